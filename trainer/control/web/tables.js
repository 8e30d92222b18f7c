// The current state, as figures and tables.

import { element, list, say, table } from "./parts.js";
import { UNKNOWN, bytes, clock, count, duration, eventTime, known, plain } from "./words.js";

const STAGES = [
  ["engagement_to_close", "engagement to close"],
  ["close_to_readable", "close to readable"],
  ["readable_to_trained", "readable to trained"],
  ["trained_to_servable", "trained to servable"],
  ["engagement_to_servable", "engagement to servable"],
];

const seconds = (value) => duration(known(value) ? value * 1000 : null);
/** [value, low, high] as text. */
const until = (eta) => (eta?.[0] === 0 ? "now" : seconds(eta?.[0]));
const ratio = (a, b) => (known(a) && known(b) && b ? a / b : null);
const fixed = (value, digits) => (known(value) ? value.toFixed(digits) : UNKNOWN);

export function now(host, status) {
  const { figures, training } = status.page;
  const { metrics } = training;
  const drained = training.drain_per_s?.[0];
  const [, least, most] = training.eta_s ?? [];
  const whole = figures.freshness.engagement_to_servable;
  const clicks = figures.click_rate;
  const items = [
    ["Lag", duration(training.lag_ms), `${count(training.lag_records)} samples`],
    ["Caught up in", until(training.eta_s), known(least) && known(most) && most > least ? `${seconds(least)} to ${seconds(most)}` : `${known(drained) ? count(drained, 1) : UNKNOWN} samples/s drained`],
    ["Engagement to servable", duration(whole.p50_ms), `p50; p99 ${duration(whole.p99_ms)}`],
    ["Last commit", status.commits || status.seq ? `${duration(status.commit_age_ms)} ago` : "none yet", status.manifest || "no commit yet"],
    ["Normalized entropy", fixed(metrics.ne, 4), `AUC ${fixed(metrics.auc, 4)}, calibration ${fixed(metrics.calibration, 3)}`],
    ["Click rate, served ÷ random", fixed(clicks.served_to_random, 2), `served ${fixed(clicks.served, 4)}, best ${fixed(clicks.best, 4)}`],
    ["Trained", count(training.trained), `requests as of the last commit; now at step ${count(training.step)}`],
    ["Trained up to", known(training.watermark_ms) && training.watermark_ms > 0 ? eventTime(training.watermark_ms).slice(11, 19) : UNKNOWN, `UTC of event time, ${eventTime(training.watermark_ms).slice(0, 10)}`],
    ["All events accounted for", plain(figures.accounted), "by the auditor"],
  ];
  list(
    host, items,
    () => element("div", {}, element("dt"), element("dd"), element("dd", { class: "sub" })),
    (item, texts) => texts.forEach((text, n) => say(item.children[n], text)),
  );
}

export function stages(host, status) {
  const lines = STAGES.map(([key, name]) => {
    const { p50_ms: half, p99_ms: most } = status.page.figures.freshness[key];
    return [name, duration(half), duration(most)];
  });
  table(host, "Latency of the newest samples between two stages", [{ name: "stage" }, { name: "p50" }, { name: "p99" }], lines, "");
}

export function commits(host, status) {
  const serving = status.page.figures.serving.version;
  const lines = [
    ["controller", `${plain(status.state)}${status.reason ? ` (${status.reason})` : ""}`],
    ["incarnation", count(status.incarnation)],
    ["last commit", status.manifest || "none yet"],
    ["duration", status.commits ? `${duration(status.commit_ms)}, training paused ${duration(status.paused_ms)}` : "none since the start"],
    ["since the start", `${count(status.commits)} commits, ${count(status.aborts)} aborted, ${count(status.rollbacks)} rollbacks`],
    ["served version", serving ?? UNKNOWN],
    ["workers", status.wanted_workers === status.workers ? count(status.workers) : `${count(status.workers)}, ${count(status.wanted_workers)} wanted`],
    ["holds", holds(status.holds)],
    ["device time", devices(status)],
  ];
  table(host, "The controller’s commits", [{ name: "what" }, { name: "value", words: true }], lines, "");
}

function holds(found) {
  if (found === undefined || found === null) return UNKNOWN;
  const all = Array.isArray(found) ? found : Object.values(found);
  return all.length ? all.map((hold) => (typeof hold === "object" ? [hold.kind, hold.reason].filter(Boolean).join(": ") : String(hold))).join("; ") : "none";
}

/** Device time by use, relative to training. */
function devices({ device_s: spent, device_ratio: ratios }) {
  if (!known(spent?.training)) return UNKNOWN;
  const others = Object.keys(spent).filter((name) => name !== "training");
  const uses = known(ratios?.training) ? others.map((name) => `${plain(name)} ${fixed(ratios[name], 2)}`) : others.map((name) => `${plain(name)} ${seconds(spent[name])}`);
  return `training ${seconds(spent.training)}${known(ratios?.training) ? "; relative to training: " : ", "}${uses.join(", ")}`;
}

export function members(host, status) {
  const lines = status.page.members.map((name) => {
    const member = status.members[name];
    const report = status.reports[name] ?? {};
    const state = report.broken || (report.leaving ? "stopping" : report.watch?.state ? plain(report.watch.state) : report.ready === false ? "not ready" : "connected");
    return member ? [name, state, count(member.incarnation), duration(member.silent_ms)] : [name, "not connected", UNKNOWN, UNKNOWN];
  });
  for (const [name, answers] of Object.entries(status.page.figures.programs)) {
    const state = answers === true ? "answers" : answers === false ? "does not answer" : UNKNOWN;
    lines.push([`${name} /metrics`, state, "–", "–"]);
  }
  const columns = [{ name: "member" }, { name: "state", words: true }, { name: "incarnation" }, { name: "last beat" }];
  table(host, "Members of this incarnation, and programs that the page reads", columns, lines, "No member is known.");
}

export function rows(host, status) {
  const shards = Object.entries(status.page.figures.shards).sort();
  const stacks = [...new Set(shards.flatMap(([, shard]) => Object.keys(shard.rows)))].sort();
  const sum = (shard) => Object.values(shard.rows).reduce((a, b) => a + b, 0);
  const all = shards.reduce((total, [, shard]) => total + sum(shard), 0);
  const most = Math.max(...shards.map(([, shard]) => sum(shard)), 1);
  const lines = shards.map(([name, shard]) => [
    name, ...stacks.map((stack) => count(shard.rows[stack] ?? 0)), count(sum(shard)),
    { text: all ? `${((100 * sum(shard)) / all).toFixed(1)} %` : "–", share: sum(shard) / most },
    bytes(shard.bytes), count(shard.pulls),
  ]);
  const everyAnswers = Object.entries(status.page.figures.programs).every(([name, answers]) => answers || !name.startsWith("shard-"));
  if (shards.length > 1 && everyAnswers) {
    const total = (of) => shards.reduce((a, [, shard]) => a + (of(shard) ?? 0), 0);
    const balance = ratio(most, all / shards.length);
    lines.push(["all", ...stacks.map((stack) => count(total((s) => s.rows[stack]))), count(all), `largest ${fixed(balance, 2)} × mean`, bytes(total((s) => s.bytes)), count(total((s) => s.pulls))]);
  }
  const columns = [{ name: "shard" }, ...stacks.map((name) => ({ name })), { name: "rows" }, { name: "share" }, { name: "memory" }, { name: "pulls" }];
  table(host, "Rows in memory, by table stack", columns, lines, "Unknown: no shard reports its rows.");
}

const WINDOWS = { "1h": "the last hour", "1d": "the last day", all: "all" };
const FEATURES_SHOWN = 12;
const MOVED = 0.25;

const figures = (it) => [count(it.candidates), fixed(it.base_rate, 4), fixed(it.ne, 4), fixed(it.ne_online, 4), fixed(it.auc, 4), fixed(it.calibration, 3)];
const FIGURES = ["candidates", "base rate", "NE", "NE, running base rate", "AUC", "calibration"].map((name) => ({ name }));

/** By window of event time; the shadow model beside the trained model on the same candidates. */
export function windows(host, status) {
  const { windows: found, shadow } = status.page.training.quality;
  const lines = Object.entries(WINDOWS).flatMap(([window, text]) =>
    Object.entries(found[window] ?? {}).map(([task, it]) => [`${task}, ${text}`, ...figures(it)]),
  );
  for (const [of, text] of [["live", "in training"], ["shadow", `frozen at ${shadow?.version}`]]) {
    for (const [task, it] of Object.entries(shadow?.[of]?.["1h"] ?? {})) lines.push([`${task}, the last hour, ${text}`, ...figures(it)]);
  }
  table(host, "Scores from before training on the labels, by window of event time", [{ name: "task and window" }, ...FIGURES], lines, "Unknown: no worker has reported yet.");
}

const METRICS = [["request_auc", "request AUC"], ["ne", "NE"]];
const signed = (value) => (known(value) ? `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(4)}` : UNKNOWN);

/** The model minus each baseline on the same newest requests, and the verdict in words. */
export function baselines(host, words, status) {
  const found = status.page.figures.model_quality;
  say(words, found ? `The model is ${found.sentence}.` : "");
  const lines = METRICS.flatMap(([metric, name]) =>
    Object.entries(found?.[metric]?.baselines ?? {}).map(([rule, it]) => [
      `${name}, by ${rule} alone`, count(found[metric].requests), fixed(found[metric].model, 4), fixed(it.value, 4), signed(it.difference), `${signed(it.low)} to ${signed(it.high)}`,
    ]),
  );
  const columns = [{ name: "metric and baseline" }, { name: "requests" }, { name: "model" }, { name: "baseline" }, { name: "difference" }, { name: "interval, 95 % for all baselines" }];
  table(host, "The model minus baselines, on the same newest requests", columns, lines, found ? "Too few requests so far." : "Unknown: the auditor does not compare the model.");
}

/** The last hour of each slice, if it has one. */
export function slices(host, status) {
  const lines = Object.entries(status.page.training.quality.slices).flatMap(([slice, values]) =>
    Object.entries(values)
      .map(([value, told]) => [value, Object.entries(told["1h"] ?? told.all ?? {})[0]])
      .filter(([, first]) => first)
      .sort(([, [, a]], [, [, b]]) => b.candidates - a.candidates)
      .map(([value, [task, it]]) => [`${plain(slice)}: ${value}`, task, ...figures(it)]),
  );
  table(host, "The same by slice, last hour", [{ name: "slice" }, { name: "task", words: true }, ...FIGURES], lines, "No slices are configured (worker.slices).");
}

/** Features with the largest drift, the base rate of each task, and new ids of each table. */
export function drift(host, status) {
  const found = status.page.training.quality.drift;
  const moved = Object.entries(found.psi ?? {}).sort(([, a], [, b]) => b - a).slice(0, FEATURES_SHOWN);
  const share = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : UNKNOWN);
  const lines = [
    ...Object.keys(found.base_rate ?? {}).map((task) => [`base rate of ${task}`, "–", share(found.base_rate[task]), share(found.base_rate_before[task]), "–"]),
    ...moved.map(([name, psi]) => [name, psi > MOVED ? `${fixed(psi, 3)}, moved` : fixed(psi, 3), share(found.coverage[name]), share(found.coverage_before[name]), name in found.lengths ? fixed(found.lengths[name], 3) : "–"]),
    ...Object.entries(found.new_ids ?? {}).map(([name, value]) => [`new ids of ${name}`, "–", share(value), "–", "–"]),
  ];
  const columns = [{ name: "input" }, { name: "PSI" }, { name: "present, or rate" }, { name: "before" }, { name: "PSI of lengths" }];
  table(host, "Inputs of the newest window compared with earlier ones", columns, lines, "Unknown until two windows are full.");
}

/** By partition; without reports of workers, only the exported lag. */
export function partitions(host, status) {
  const { training, figures } = status.page;
  const exported = () => Object.entries(figures.partition_lag_records).map(([name, lag]) => ({ name, lag_records: lag }));
  const found = training.partitions.length ? training.partitions.map((row) => ({ ...row, name: `${row.topic}-${row.partition}` })) : exported();
  const lines = found.sort((a, b) => byNumber(a.name, b.name)).map((it) => [
    it.name, it.reason ? `${plain(it.state)}: ${it.reason}` : plain(it.state), it.worker ?? UNKNOWN, count(it.lag_records), count(it.hidden_records),
    duration(it.lag_ms), it.consumption_per_s ? count(it.consumption_per_s[0], 1) : UNKNOWN, until(it.eta_s),
  ]);
  const columns = [{ name: "partition" }, { name: "state", words: true }, { name: "worker" }, { name: "samples behind" }, { name: "hidden" }, { name: "lag" }, { name: "samples/s" }, { name: "caught up in" }];
  table(host, "Partitions of the training input", columns, lines, "Unknown: no worker reports its partitions.");
}

/** Readers of a warehouse session, their splits, and the workers' buffers. */
export function readers(host, status) {
  const of = status.readers;
  const lines = [];
  if (of && (of.wanted || of.there || of.splits_wanted)) {
    const expired = of.leases_expired ? `; ${count(of.leases_expired)} leases expired` : "";
    lines.push(["all", `${count(of.there)} connected, ${count(of.wanted)} wanted (${count(of.least)} to ${count(of.most)})${expired}`, `${count(of.splits_wanted)} requested`, "–", "–", "–"]);
    for (const [number, its] of Object.entries(of.buffers).sort(([a], [b]) => byNumber(a, b))) {
      const share = known(its.stall_share) ? `, ${(100 * its.stall_share).toFixed(1)} % of its time` : "";
      lines.push([`buffer of worker ${number}`, `${(100 * its.fullness).toFixed(0)} % full; waited ${seconds(its.stalled_s)}${share}`, `${count(its.in_flight)} in flight`, count(its.pieces), "–", "–"]);
    }
    for (const [name, its] of Object.entries(of.readers).sort(([a], [b]) => byNumber(a, b))) {
      const splits = of.leases.filter((lease) => lease.reader === name).map((lease) => `${lease.split} for worker ${lease.worker}`);
      lines.push([name, splits.length ? `reads split ${splits.join(", ")}` : "has no lease", count(its.held_splits), count(its.held_pieces), bytes(its.sent_bytes), seconds(its.silent_s)]);
    }
  }
  const columns = [{ name: "reader" }, { name: "state", words: true }, { name: "splits" }, { name: "pieces" }, { name: "sent" }, { name: "last call" }];
  table(host, "Reader programs, and the buffers of the workers", columns, lines, "No reader programs: workers read by themselves, or train on the stream.");
}

const byNumber = (a, b) => a.localeCompare(b, "en", { numeric: true });

export function changesTable(host, status) {
  const lines = [...status.page.changes].reverse().map(({ time_ms: ms, what, was, now: is }) => [clock(ms), plain(what), was ? `${plain(is)}, was ${plain(was)}` : is]);
  const columns = [{ name: "when" }, { name: "what", words: true }, { name: "change", words: true }];
  table(host, "Newest first, since the controller started", columns, lines, "Nothing has changed since the controller started.");
}
