// The live list: a visitor clicks items and sees how their order changes, and why. Data from the server is inserted as text only.
import { ask } from "./page.js";
import { element, put, row } from "./parts.js";

const EVERY_MS = 1000;
const MOVE_MS = 700;
const IDLE_MS = 600000; // a list that nobody uses is paused
const SMALL = 0.0005; // smaller changes of a score are not shown
const SHOWN_FEATURES = 10;
const byId = (id) => document.getElementById(id);
const random = () => Array.from(crypto.getRandomValues(new Uint8Array(6)), (b) => b.toString(16).padStart(2, "0")).join("");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const session = `session-${random()}`;

let list = null; // the items, and what a request of them looks like
let cards = []; // in the request's order
let user = "";
let latest = null; // the newest explanation
let click = null; // the newest click: its request, the explanation before it, and its stages
let chosen = 0; // the card whose score is explained
let paused = false;
let turn = Promise.resolve();
let usedMs = 0;
let ticks = 0;

// Ids are JSON texts: numbers of digits stay numbers of 64 bits.
const id = (text) => (/^[1-9][0-9]{0,18}$/.test(text) ? text : JSON.stringify(text));

function requestBody(requestId) {
  const own = list.user_features.map((name) => `${JSON.stringify(name)}:[${id(user)}]`);
  const candidates = list.items.map((item) => item.candidate);
  return `{"request_id":${JSON.stringify(requestId)},"user_id":${id(user)},"session_id":${JSON.stringify(session)},"ro":{${own}},"candidates":[${candidates}]}`;
}

function say(text, alarming = false) {
  byId("live-said").textContent = alarming ? "" : text;
  byId("live-refused").textContent = alarming ? text : "";
}

async function load() {
  const { status, told } = await ask("page/items.json").catch(() => ({ status: 0 }));
  if (status !== 200) return;
  list = told;
  latest = click = null;
  chosen = 0;
  const some = list.items.length > 0;
  byId("live-none").hidden = some;
  for (const part of ["visitor", "shop"]) byId(part).hidden = !some;
  const kinds = [...new Set(list.items.map((item) => item.kind))];
  cards = list.items.map((item, at) => card(item, at, kinds.indexOf(item.kind) / kinds.length));
  put(byId("cards"), ...cards.map((one) => one.li));
  await look();
}

function card(item, at, turn) {
  const part = (name) => element("span", { class: name });
  const one = { place: part("place"), moved: part("moved"), score: part("score"), fill: part("fill"), cause: part("cause") };
  const pick = element("button", { type: "button", class: "pick" }, one.place, element("span", { class: "name" }, item.name), one.moved, one.score);
  const why = element("button", { type: "button", class: "why", "aria-label": `Why is ${item.name} here?` }, "why");
  const of = list;
  pick.addEventListener("click", () => inTurn(() => (list === of ? engage(at) : null)));
  why.addEventListener("click", () => { chosen = at; draw(); });
  one.why = why;
  one.li = element("li", { class: "story" }, pick, why, element("span", { class: "gauge", "aria-hidden": "true" }, one.fill), one.cause);
  one.li.style.setProperty("--hue", String(Math.round(turn * 360)));
  return one;
}

// One exchange with the server at a time, so that a click is sent with the list that the visitor saw.
function inTurn(work) {
  usedMs = Date.now();
  turn = turn.then(work);
  return turn;
}

// Sends the list as one request, and the click on it, as any client does.
async function engage(at) {
  const [item, before] = [list.items[at], latest];
  if (!before) return;
  try {
    const requestId = `${list.request_prefix}${random()}`;
    const ranked = await ask("v1/rank", requestBody(requestId));
    const body = `{"request_id":"${requestId}","user_id":${id(user)},"session_id":"${session}","item_id":${item.id},"action":${JSON.stringify(list.action)},"value":${list.value}}`;
    const sent = ranked.status === 200 ? await ask("v1/engagements", body) : ranked;
    if (sent.status !== 200) {
      say(sent.told.error.message, true);
      return;
    }
    click = { requestId, at, before, atMs: Date.now(), features: null, trained: null, rescored: null };
    chosen = at;
    say(`Clicked ${item.name}.`);
    await look();
  } catch (error) {
    say("The server does not answer; the click may be lost.", true);
  }
}

// Asks for the order now. Nothing of this is logged.
async function look() {
  if (!list || !list.items.length) return;
  try {
    const { status, told } = await ask("v1/explain", requestBody("page-look"));
    if (status === 200) {
      if (click) await rescore(click, told);
      latest = told;
      byId("live-read").textContent = `asked ${clock(Date.now())}, every second`;
      draw();
    } else if (status !== 429) {
      say(told.error.message, true);
    }
  } catch (error) {
    byId("live-read").textContent = "the server does not answer; this order is old";
  }
}

async function rescore(since, told) {
  const { status, told: scores } = await ask(`page/rescored.json?request_id=${since.requestId}&model_version=${told.model_version}`);
  since.unknown = status === 404;
  if (status !== 200) return;
  since.rescored = scores;
  const after = (Date.now() - since.atMs) / 1000;
  const changed = list.click_features.filter((name) => valueIn(told, name, since.at) !== valueIn(since.before, name, since.at));
  if (!since.features && changed.length) {
    since.features = { after, names: changed };
    say(`The online features have your click: ${changed.join(", ")}.`);
  }
  const closeMs = scores.request_ms + list.join_window_ms;
  since.closesInS = (closeMs - scores.now_ms) / 1000;
  if (!since.trained && list.join_window_ms && scores.trained_up_to_ms >= closeMs) {
    since.trained = { after, version: scores.model_version };
    say(`Your click was trained: version ${scores.model_version} has it.`);
  }
}

const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
const scoreOf = (told, at) => told.candidates[at].scores[list.task];
const featureOf = (told, name) => told.features.find((feature) => feature.name === name);

function valueIn(told, name, at) {
  if (name === list.kind_feature && list.items[at].kind) return list.items[at].kind;
  const feature = featureOf(told, name);
  const value = feature.values[feature.side === "ro" ? 0 : at];
  if (typeof value === "number") return String(Number(value.toPrecision(4)));
  if (value === null) return "missing";
  const nameOf = (digits) => list.item_features.includes(name) && list.items.find((item) => item.id === digits)?.name;
  return value.replace(/\d+/g, (digits) => nameOf(digits) || (digits.length > 7 ? `…${digits.slice(-5)}` : digits));
}

// How much of a score's change since the click is due to features, and how much to training.
function causes(at) {
  if (!click || !click.rescored) return null;
  const { then, now } = click.rescored;
  return { features: scoreOf(latest, at) - now[at], training: now[at] - then[at] };
}

function draw() {
  if (!latest) return;
  const order = latest.order;
  const highest = Math.max(...order.map((at) => scoreOf(latest, at)), 1e-9);
  order.forEach((at, place) => {
    const { li, place: number, moved, score, fill, cause, why } = cards[at];
    const up = click ? click.before.order.indexOf(at) - place : 0;
    number.textContent = String(place + 1);
    moved.textContent = up > 0 ? `up ${up}` : up < 0 ? `down ${-up}` : "";
    moved.className = `moved ${up > 0 ? "up" : "down"}`;
    score.textContent = scoreOf(latest, at).toFixed(3);
    fill.style.width = `${(100 * scoreOf(latest, at)) / highest}%`;
    const shown = Object.entries(causes(at) || {}).filter(([, value]) => Math.abs(value) >= SMALL);
    put(cause, ...shown.map(([name, value]) => element("span", { class: name }, `${name} ${signed(value)} `)));
    li.classList.toggle("clicked", Boolean(click) && click.at === at);
    li.classList.toggle("chosen", chosen === at);
    why.setAttribute("aria-pressed", String(chosen === at));
  });
  move(order.map((at) => cards[at].li));
  put(byId("stages"), ...stages());
  put(byId("verdict"), ...verdict());
  explainChosen();
}

// Moves the cards from where they were to where they are now.
function move(sorted) {
  const place = byId("cards");
  if (sorted.every((li, i) => place.children[i] === li)) return;
  const before = new Map(sorted.map((li) => [li, li.getBoundingClientRect()]));
  const focused = document.activeElement;
  place.append(...sorted);
  if (place.contains(focused)) focused.focus({ preventScroll: true });
  if (calm.matches) return;
  for (const li of sorted) {
    const [from, to] = [before.get(li), li.getBoundingClientRect()];
    const [x, y] = [from.left - to.left, from.top - to.top];
    if (!x && !y) continue;
    li.style.zIndex = y > 0 ? "1" : "";
    li.animate([{ transform: `translate(${x}px, ${y}px)` }, { transform: "none" }], { duration: MOVE_MS, easing: "ease-in-out" });
  }
}

function stages() {
  if (!click) return [element("li", {}, "Nothing is logged until you click.")];
  const stage = (done, name, text) => element("li", { class: done ? "done" : "" }, element("strong", {}, `${name}${done ? "" : "?"} `), text);
  const { features, trained, rescored, closesInS } = click;
  const closed = closesInS <= 0;
  const after = (seconds) => `after ${seconds.toFixed(1)} s`;
  const known = list.join_window_ms > 0;
  const newest = rescored && rescored.trained_up_to_ms ? `served version ${rescored.model_version} is trained up to ${clock(rescored.trained_up_to_ms)}` : "no trained version is served yet";
  return [
    stage(true, "Logged", `${clock(click.atMs)}, request ${click.requestId}`),
    list.click_features.length
      ? stage(features, "In the online features", features ? `${after(features.after)}: ${features.names.join(", ")}` : "waiting for the feature updater")
      : element("li", {}, "No online feature of this schema counts a user's clicks."),
    stage(known && closed, "Joined", !known ? "when the join window has closed" : closed ? "the join window has closed" : closesInS === undefined ? "" : `the join window closes in ${Math.ceil(closesInS)} s`),
    stage(trained, "Trained and served", trained ? `${after(trained.after)}, in version ${trained.version}` : newest),
  ];
}

function verdict() {
  if (click && click.unknown) return ["The causes are not known: the process that answered now did not rank the clicked list."];
  if (!click || !click.rescored) return [];
  const largest = (name) => Math.max(...cards.map((_, at) => Math.abs(causes(at)[name])));
  const [features, training] = [largest("features"), largest("training")];
  const whose = click.trained ? "requests of yours and of others" : click.closesInS > 0 ? "requests of others, yours is not joined yet" : "requests of others, and perhaps yours already";
  const part = (name, value, text) => element("span", { class: name }, value < SMALL ? `${text} changed nothing` : `${text} changed scores by up to ${value.toFixed(3)}`);
  return ["Since your click, ", part("features", features, "online features (counters and history, by you and others)"), "; ", part("training", training, `training (on ${whose})`), "."];
}

function explainChosen() {
  const at = chosen;
  const effect = (feature) => (feature.changes ? -feature.changes[at][list.task] : 0);
  const sorted = [...latest.features].sort((one, other) => Math.abs(effect(other)) - Math.abs(effect(one))).slice(0, SHOWN_FEATURES);
  const body = sorted.map((feature) => {
    const [now, then] = [latest, click ? click.before : latest].map((one) => valueIn(one, feature.name, at));
    const online = list.online_features.includes(feature.name) ? " online" : "";
    return row(element("th", { scope: "row" }, feature.name, element("small", {}, online)),
      element("td", {}, click ? then : ""),
      element("td", { class: now !== then ? "changed" : "" }, now),
      element("td", { class: effect(feature) < 0 ? "down" : "up" }, signed(effect(feature))));
  });
  byId("why-title").textContent = `Why ${list.items[at].name} scores ${scoreOf(latest, at).toFixed(3)}`;
  const heads = ["Feature", click ? "At the click" : "", "Now", "Adds"].map((name) => element(name ? "th" : "td", name ? { scope: "col" } : {}, name));
  put(byId("why-table"), element("thead", {}, row(...heads)), element("tbody", {}, ...body));
}

async function become(name) {
  user = name.trim() || `guest-${random().slice(0, 4)}`;
  byId("user").value = user;
  latest = click = null;
  say(`You are ${user}.`);
  await look();
}

function pause(now) {
  paused = now;
  byId("pause").setAttribute("aria-pressed", String(now));
}

let waiting = false;
async function tick() {
  if (Date.now() - usedMs > IDLE_MS) pause(true);
  const some = list && list.items.length;
  if (document.hidden || paused || waiting || (!some && ticks++ % 5)) return;
  waiting = true;
  await (turn = turn.then(some ? look : load));
  waiting = false;
}

byId("visitor").addEventListener("submit", (event) => { event.preventDefault(); inTurn(() => become(byId("user").value)); });
byId("guest").addEventListener("click", () => inTurn(() => become("")));
byId("others").addEventListener("click", () => inTurn(load));
byId("pause").addEventListener("click", () => inTurn(() => pause(!paused)));
inTurn(() => become("")).then(tick);
setInterval(tick, EVERY_MS);
