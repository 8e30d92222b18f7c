// Reads /status.json every two seconds and shows it. If it cannot be read, the page says since when its content is stale.

import { Chart } from "./chart.js";
import { element, list, say } from "./parts.js";
import { baselines, changesTable, commits, drift, members, now, partitions, readers, rows, slices, stages, windows } from "./tables.js";
import { clock, count, duration, known } from "./words.js";

const EVERY_MS = 2000;
const LIMIT_MS = 5000;
const SPANS = [
  { name: "15 min", seconds: 900, grain: 0 },
  { name: "1 h", seconds: 3600, grain: 0 },
  { name: "6 h", seconds: 21_600, grain: 1 },
  { name: "3 d", seconds: 259_200, grain: 2 },
];
const CHARTS = [
  { title: "Lag in event time", lines: [{ name: "lag", series: "lag_ms" }], show: duration, zero: true },
  { title: "Normalized entropy", lines: [{ name: "NE", series: "ne" }], show: (v) => v.toFixed(4) },
  { title: "AUC, overall and within requests", lines: [{ name: "AUC", series: "auc" }, { name: "request AUC", series: "request_auc" }], show: (v) => v.toFixed(4) },
  { title: "Calibration", lines: [{ name: "predicted / observed", series: "calibration" }], show: (v) => v.toFixed(3), band: [0.9, 1.1] },
  {
    title: "Freshness by stage, p50",
    lines: [
      { name: "engagement to servable", series: "fresh.engagement_to_servable" },
      { name: "to close", series: "fresh.engagement_to_close" },
      { name: "to readable", series: "fresh.close_to_readable" },
      { name: "to trained", series: "fresh.readable_to_trained" },
      { name: "to servable", series: "fresh.trained_to_servable" },
    ],
    show: duration, zero: true,
  },
  { title: "Trained requests per second", lines: [{ name: "trained", series: "trained_per_s" }], show: (v) => count(v, 1), zero: true },
  { title: "Click rate", lines: [{ name: "served", series: "click.served" }, { name: "random", series: "click.random" }, { name: "best", series: "click.best" }], show: (v) => v.toFixed(4), zero: true },
  { title: "Commit duration and pause", lines: [{ name: "commit", series: "commit_ms" }, { name: "pause", series: "paused_ms" }], show: duration, zero: true },
  { title: "Rows", lines: [{ name: "rows", series: "rows" }], show: (v) => count(v), zero: true },
];
const TONES = { caught_up: "good", idle: "good", transient_hold: "good", catching_up: "warning", initial: "warning", falling_behind: "warning", unknown: "unknown" };

const $ = (id) => document.getElementById(id);
const charts = CHARTS.map((settings) => new Chart(settings));
let past = null;
let span = SPANS[0];
let chosen = false;
let answeredMs = null;
let silentSinceMs = null;

async function read(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** Append the newest point. False: more points are missing, so the whole history must be read again. */
function append(newest, startedMs) {
  if (!past || past.startedMs !== startedMs) return false;
  if (!newest) return true;
  const grain = past.grains[0];
  const last = grain.slot.at(-1);
  if (last === undefined || newest.slot > last + 1) return false;
  const at = newest.slot === last ? grain.slot.length - 1 : grain.slot.length;
  grain.slot[at] = newest.slot;
  grain.at_s[at] = newest.at_s;
  for (const [name, value] of Object.entries(newest.values)) (grain.values[name] ??= [])[at] = value;
  return past.readMs > Date.now() - 60_000; // refreshes coarser grains and drops old points
}

async function turn() {
  try {
    const status = await read("status.json");
    if (!append(status.page.newest, status.page.started_ms)) {
      past = { ...(await read("history.json")), startedMs: status.page.started_ms, readMs: Date.now() };
    }
    show(status);
    answeredMs = Date.now();
    silentSinceMs = null;
  } catch (error) {
    silentSinceMs ??= Date.now();
    console.debug(error.message);
  }
  age();
  setTimeout(turn, EVERY_MS);
}

/** Marks the page as stale if the controller cannot be reached. */
function age() {
  const silent = silentSinceMs !== null;
  document.body.classList.toggle("stale", silent);
  $("old").hidden = !silent;
  say($("read"), answeredMs ? `read ${clock(answeredMs)}` : "not read yet");
  if (!silent) return;
  const since = answeredMs ? `The controller has not answered since ${clock(answeredMs)}. The page shows the state of that time.` : "The controller has not answered since this page was opened.";
  say($("old"), since);
  tone("unknown", "Unknown");
}

function tone(name, text) {
  document.body.dataset.tone = name;
  if ($("state-text").textContent !== text) $("state-text").textContent = text;
  document.title = `${text} · Roostream`;
}

function show(status) {
  const { headline, findings, at_s: atS } = status.page;
  const worst = findings[0]?.level;
  const own = TONES[headline.state] ?? "bad";
  tone(worst === "bad" ? "bad" : own === "good" && worst === "warning" ? "warning" : own, headline.text);
  say($("state-more"), more(status));
  problems(findings, atS);
  now($("now"), status);
  windows($("windows-body"), status);
  baselines($("baselines-body"), $("verdict"), status);
  slices($("slices-body"), status);
  drift($("drift-body"), status);
  stages($("stages-body"), status);
  commits($("commits-body"), status);
  members($("members-body"), status);
  rows($("rows-body"), status);
  partitions($("partitions-body"), status);
  readers($("readers-body"), status);
  changesTable($("changes-body"), status);
  draw(atS);
  say($("kept"), `Charts and changes are in the controller’s memory, since ${clock(status.page.started_ms)}; a restart loses them.`);
}

/** One line under the state: since when, the lag, and the time until caught up. */
function more(status) {
  const { headline, training, at_s: atS } = status.page;
  const parts = [];
  if (known(headline.since_s) && atS - headline.since_s >= 1) parts.push(`for ${duration((atS - headline.since_s) * 1000)}`);
  if (training.state === "held") return [...parts, training.reason].join(" · ");
  if (training.initial) parts.push(history(training.initial, training.watermark_ms));
  parts.push(known(training.lag_ms) ? `behind by ${duration(training.lag_ms)}, ${count(training.lag_records)} samples` : "lag unknown");
  const [eta, least, most] = training.eta_s ?? [];
  const bounds = known(least) && known(most) && most - least > 0.05 * eta ? ` (${duration(least * 1000)} to ${duration(most * 1000)})` : "";
  if (known(eta) && eta > 0) parts.push(`caught up in about ${duration(eta * 1000)}${bounds}`);
  else if (!known(eta) && !training.initial && !["caught_up", "idle"].includes(headline.state)) parts.push("time until caught up unknown");
  return parts.join(" · ");
}

/** Committed progress of the initial phase, event time reached by all workers, and the time left. */
function history({ epoch, epochs, records, left, last_close_ms: lastMs, eta_s: eta }, watermarkMs) {
  const share = records ? Math.floor((100 * (records - left)) / records) : 0;
  const parts = [`${count(records - left)} of ${count(records)} historical samples committed (${share} %), epoch ${epoch} of ${epochs}`];
  if (known(watermarkMs)) parts.push(`event time ${clock(watermarkMs)}${known(lastMs) ? ` of ${clock(lastMs)}` : ""}`);
  parts.push(known(eta?.[0]) ? `time left about ${duration(eta[0] * 1000)}` : "time left unknown");
  return parts.join(", ");
}

function problems(findings, atS) {
  const host = $("wrong");
  if (!findings.length) return void (host.querySelector("p") ?? host.replaceChildren(element("p", {}, "No known problems.")));
  if (!host.querySelector("ul")) host.replaceChildren(element("ul", { "aria-label": "Problems" }));
  list(
    host.firstElementChild, findings,
    () => element("li", {}, element("span", { class: "level" }), element("span", { class: "text" }), element("span", { class: "since" })),
    (item, { level, text, since_s: sinceS }) => {
      item.children[0].className = `level level-${["bad", "warning"].includes(level) ? level : "unknown"}`;
      say(item.children[0], { bad: "Error", warning: "Warning", unknown: "Unknown" }[level] ?? level);
      say(item.children[1], text);
      say(item.children[2], known(sinceS) ? `for ${duration((atS - sinceS) * 1000)}` : "just now");
    },
  );
}

function draw(atS) {
  if (!past) return;
  if (!chosen && span === SPANS[0] && past.grains[0].at_s[0] < atS - SPANS[0].seconds) {
    span = SPANS[1];
    $("span").querySelector(`[value="${span.seconds}"]`).checked = true;
  }
  for (const chart of charts) chart.update(past.grains[span.grain], past.grains[0], atS, span.seconds);
  past.drawnS = atS;
}

function choose() {
  for (const one of SPANS) {
    const input = element("input", { type: "radio", name: "span", value: one.seconds });
    input.checked = one === span;
    input.addEventListener("change", () => {
      [span, chosen] = [one, true];
      if (past?.drawnS !== undefined) draw(past.drawnS);
    });
    $("span").append(element("label", {}, input, one.name));
  }
}

choose();
$("charts").append(...charts.map((chart) => chart.figure));
const NOTHING = { step_s: 10, slot: [], at_s: [], values: {} };
for (const chart of charts) chart.update(NOTHING, NOTHING, 0, span.seconds);
turn();
