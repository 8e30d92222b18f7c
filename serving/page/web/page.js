// Shows what is served, and ranks and explains a request. Data from the server is inserted as text only.
import { element, put, row } from "./parts.js";

const EVERY_MS = 5000;
const byId = (id) => document.getElementById(id);
let key = "";
let example = "";
let busy = false;

export async function ask(path, body) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = body === undefined ? { headers } : { method: "POST", body, headers: { ...headers, "content-type": "application/json" } };
  const answer = await fetch(path, { cache: "no-store", ...options });
  const told = await answer.json();
  byId("who").hidden = ![401, 403].includes(answer.status) && !key;
  return { status: answer.status, told };
}

function age(seconds) {
  if (seconds === null) return "not known";
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

function figure(name, value, sub) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value), element("dd", { class: "sub" }, sub));
}

function show(page) {
  const served = page.served;
  tell(page.ready ? "good" : "warning", page.ready ? "Ready" : "Not ready",
    page.ready ? `${page.schema}, version ${served.name}${served.trained_up_to_ms ? `, trained up to ${new Date(served.trained_up_to_ms).toLocaleTimeString("en-GB")}` : ""}` : `waiting for ${page.waiting_for.join(", ")}; rank answers are marked degraded`);
  const fresh = page.freshness;
  const held = page.versions.filter((v) => v !== served.name);
  put(byId("now"),
    figure("Model version", served.name, served.age_s === null ? "initial weights" : `committed ${age(served.age_s)} ago`),
    figure("Other loaded versions", held.length ? held.join(", ") : "none", `of schema ${page.schema}`),
    figure("Rows", page.rows === null ? "not known" : page.rows.toLocaleString("en"), page.rows_age_s === null ? "not yet current" : `current ${age(page.rows_age_s)} ago`),
    figure("Freshness", fresh.p50_s === null ? "not known" : age(fresh.p50_s), fresh.p99_s === null ? "engagement to servable" : `p99 ${age(fresh.p99_s)}, engagement to servable`),
    figure("Features", `${page.features.ro} + ${page.features.nro}`, "per request, per candidate"),
    figure("Tasks", page.tasks.join(", "), `release ${page.release}`));
  const names = { docs: "API", openapi: "OpenAPI", metrics: "Metrics", trainer: "Trainer" };
  put(byId("links"), ...Object.entries(page.links).map(([name, url]) => element("li", {}, element("a", { href: url }, names[name] || name))));
  if (!example) {
    example = JSON.stringify(page.example, null, 2);
    if (!byId("body").value) byId("body").value = example;
  }
  byId("read").textContent = `updated ${new Date().toLocaleTimeString("en-GB")}`;
}

function tell(tone, text, more) {
  if (document.body.dataset.tone !== tone) document.body.dataset.tone = tone;
  for (const [id, words] of [["state-text", text], ["state-more", more]]) {
    if (byId(id).textContent !== words) byId(id).textContent = words;
  }
}

async function look() {
  try {
    const { status, told } = await ask("page.json");
    if (status === 200) show(told);
    else tell("unknown", "Unknown", told.error.message);
  } catch (error) {
    tell("bad", "Unknown", `the server does not answer; the data shown is old (${byId("read").textContent || "never updated"})`);
  }
}

function change(value) {
  const text = Math.abs(value) < 0.00005 ? "0" : `${value > 0 ? "+" : "−"}${Math.abs(value).toFixed(4)}`;
  return element("td", { class: text === "0" ? "" : value > 0 ? "up" : "down" }, text);
}

function rowsOf(feature, at) {
  const rows = feature.rows && feature.rows[feature.side === "ro" ? 0 : at];
  return rows ? `${rows.learned} of ${rows.needed}` : "–";
}

function valueOf(feature, at) {
  const value = feature.values[feature.side === "ro" ? 0 : at];
  return value === null ? "missing" : typeof value === "number" ? String(Number(value.toPrecision(6))) : value;
}

function explanation(told, at) {
  const task = told.tasks[0];
  const size = (feature) => (feature.changes ? Math.abs(feature.changes[at][task]) : -1);
  const sorted = [...told.features].sort((one, other) => size(other) - size(one));
  const head = ["Feature", "Value", "Learned rows", ...told.tasks.map((name) => `${name} without it`)];
  const body = sorted.map((feature) => row(
    element("th", { scope: "row" }, feature.name, feature.side === "ro" ? " (request)" : ""),
    element("td", { class: "words" }, valueOf(feature, at)),
    element("td", {}, rowsOf(feature, at)),
    ...told.tasks.map((name) => (feature.changes ? change(feature.changes[at][name]) : element("td", {}, "–")))));
  const caption = `Features of ${told.candidates[at].item_id}, largest effect on ${task} first`;
  const heads = head.map((name, i) => element("th", { scope: "col", class: i === 1 ? "words" : "" }, name));
  const table = element("table", {}, element("caption", {}, caption), element("thead", {}, row(...heads)), element("tbody", {}, ...body));
  return element("div", { class: "table", tabindex: "0", role: "group", "aria-label": caption }, table);
}

function candidate(told, at, place) {
  const one = told.candidates[at];
  const scores = told.tasks.map((name) => element("span", { class: "score" }, `${name} ${one.scores[name].toFixed(4)}`));
  const open = place === 0 ? { open: "" } : {};
  const summary = element("summary", {}, element("span", { class: "place" }, `${place + 1}.`), element("span", { class: "item" }, String(one.item_id)), ...scores);
  return element("li", { class: "candidate" }, element("details", open, summary, explanation(told, at)));
}

function answer(told) {
  const more = [];
  if (told.degraded) more.push("degraded: Redis or embedding rows were unavailable");
  if (told.left_out) more.push(`${told.left_out} features were not tested, to save time`);
  const line = `Version ${told.model_version}, ${told.candidates.length} candidates in ranked order${more.length ? `; ${more.join("; ")}` : ""}.`;
  put(byId("answer"), element("p", { class: "soft" }, line), element("ol", { class: "candidates" }, ...told.order.map((at, place) => candidate(told, at, place))));
}

async function rank(event) {
  event.preventDefault();
  if (busy) return;
  busy = true;
  byId("rank").setAttribute("aria-disabled", "true");
  byId("refused").textContent = "";
  byId("said").textContent = "scoring…";
  let words = "";
  try {
    const { status, told } = await ask("v1/explain", byId("body").value);
    if (status === 200) {
      answer(told);
      words = `ranked ${told.candidates.length} candidates`;
    } else {
      byId("refused").textContent = `${told.error.message}${told.error.path ? ` (at ${told.error.path})` : ""}`;
    }
  } catch (error) {
    byId("refused").textContent = "the server does not answer; try again";
  }
  byId("said").textContent = words;
  byId("rank").removeAttribute("aria-disabled");
  busy = false;
}

byId("request").addEventListener("submit", rank);
byId("again").addEventListener("click", () => { byId("body").value = example; byId("body").focus(); });
byId("who").addEventListener("submit", (event) => { event.preventDefault(); key = byId("key").value.trim(); look(); });
look();
setInterval(() => { if (!document.hidden) look(); }, EVERY_MS);
