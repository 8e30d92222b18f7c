// Formats numbers and times for people. null and undefined are unknown, never 0.

export const UNKNOWN = "unknown";

export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function count(value, digits = 0) {
  return known(value) ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : UNKNOWN;
}

/** Milliseconds as a duration with at most two units. */
export function duration(ms) {
  if (!known(ms)) return UNKNOWN;
  if (ms < 0) return `−${duration(-ms)}`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 119_500) return `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;
  const minutes = Math.round(ms / 60_000);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(value < 1 ? 0 : Math.floor(Math.log10(value) / 3), 4);
  return `${(value / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

/** Local time of day; with the date if it is not today. */
export function clock(ms) {
  if (!known(ms) || ms <= 0) return UNKNOWN;
  const at = new Date(ms);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

/** Event time, UTC. */
export function eventTime(ms) {
  return known(ms) && ms > 0 ? `${new Date(ms).toISOString().slice(0, 19).replace("T", " ")} UTC` : UNKNOWN;
}

/** The text of a code: caught_up → caught up. */
export function plain(word) {
  return word === null || word === undefined || word === "" ? UNKNOWN : String(word).replaceAll("_", " ");
}
