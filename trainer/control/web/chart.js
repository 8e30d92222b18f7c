// Line charts. Each has its newest value as text, a sentence for screen readers, and its numbers as a table.

import { element, list, say } from "./parts.js";
import { UNKNOWN, clock, duration, known } from "./words.js";

const WIDTH = 320;
const HEIGHT = 120;
const SVG = "http://www.w3.org/2000/svg";
const MAX_NUMBERS = 12;

function drawn(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

/** `lines`: [{name, series}] (names of the history's values); `show`: number → text; `band`: [min, max] of healthy values. */
export class Chart {
  constructor({ title, lines, show, band = null, zero = false }) {
    Object.assign(this, { title, lines, show, band, zero });
    this.newest = element("span");
    this.svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" });
    this.axis = element("div", { class: "axis", "aria-hidden": "true" }, element("span"), element("span"), element("span"));
    this.numbers = element("details", {}, element("summary", {}, "Numbers"), element("div", { class: "numbers" }));
    const key = lines.length > 1 ? [this.legend()] : [];
    this.figure = element("figure", {}, element("figcaption", {}, element("strong", {}, title), this.newest), this.svg, this.axis, ...key, this.numbers);
    this.numbers.addEventListener("toggle", () => this.tabulate());
  }

  legend() {
    const items = this.lines.map(({ name }, n) => {
      const sample = drawn("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" });
      sample.append(drawn("path", { class: `curve c${n}`, d: "M0 4H26" }));
      return element("li", {}, sample, name);
    });
    return element("ul", { class: "legend" }, ...items);
  }

  /** `grain`: a resolution of /history.json; `finest`: the finest one, whose last point is now; `nowS`: its clock; `spanS`: seconds shown. */
  update(grain, finest, nowS, spanS) {
    this.seen = { grain, nowS, spanS };
    const from = grain.at_s.findIndex((at) => at >= nowS - spanS);
    const first = from < 0 ? grain.at_s.length : from;
    const curves = this.lines.map(({ series }) => (grain.values[series] ?? []).slice(first));
    const values = curves.flat().filter(known);
    const last = this.lines.map(({ series }) => finest.values[series]?.at(-1));
    say(this.newest, last.every((v) => !known(v)) ? UNKNOWN : last.map((v) => (known(v) ? this.show(v) : "?")).join(" · "));
    const [least, most] = this.range(values);
    const x = (n) => WIDTH * (1 - (nowS - grain.at_s[first + n]) / spanS);
    const y = (value) => HEIGHT * (1 - (value - least) / (most - least));
    const shapes = [0, 0.5, 1].map((part) => drawn("path", { class: "grid", d: `M0 ${HEIGHT * part}H${WIDTH}` }));
    if (this.band) shapes.unshift(this.shade(y));
    curves.forEach((curve, n) => shapes.push(drawn("path", { class: `curve c${n}`, d: this.path(curve, grain, first, x, y) })));
    this.svg.replaceChildren(...shapes);
    const shown = values.length ? `${this.show(least)} to ${this.show(most)}` : "";
    [`${duration(spanS * 1000)} ago`, shown, "now"].forEach((text, n) => (this.axis.children[n].textContent = text));
    this.svg.setAttribute("aria-label", this.sentence(curves, last, spanS));
    if (this.numbers.open) this.tabulate();
  }

  range(values) {
    let least = values.length ? Math.min(...values) : 0;
    let most = values.length ? Math.max(...values) : 1;
    if (this.zero) least = Math.min(least, 0);
    const room = (most - least || Math.abs(most) * 0.1 || 1) * 0.06;
    return [this.zero && least >= 0 ? 0 : least - room, most + room];
  }

  shade(y) {
    const [top, bottom] = [y(this.band[1]), y(this.band[0])].map((at) => Math.min(Math.max(at, 0), HEIGHT));
    return drawn("rect", { class: "band", x: 0, y: top, width: WIDTH, height: Math.max(bottom - top, 0) });
  }

  /** A line is interrupted at unknown values, and at gaps of more than 2.5 steps. */
  path(curve, grain, first, x, y) {
    let out = "";
    let joined = false;
    curve.forEach((value, n) => {
      if (!known(value)) return void (joined = false);
      const near = n > 0 && grain.at_s[first + n] - grain.at_s[first + n - 1] <= 2.5 * grain.step_s;
      const lone = !(joined && near) && !known(curve[n + 1]);
      out += `${joined && near ? "L" : "M"}${x(n).toFixed(1)} ${y(value).toFixed(1)}${lone ? "h1" : ""}`;
      joined = true;
    });
    return out;
  }

  sentence(curves, last, spanS) {
    const told = this.lines.map(({ name }, n) => {
      const values = curves[n].filter(known);
      if (!values.length) return `${name}: unknown`;
      const [least, most] = [Math.min(...values), Math.max(...values)].map(this.show);
      const now = known(last[n]) ? this.show(last[n]) : UNKNOWN;
      return `${name}: ${least} to ${most}, now ${now}`;
    });
    return `${this.title}, last ${duration(spanS * 1000)}. ${told.join(". ")}.`;
  }

  tabulate() {
    if (!this.numbers.open || !this.seen) return;
    const { grain, nowS, spanS } = this.seen;
    const all = grain.at_s.map((at, n) => n).filter((n) => grain.at_s[n] >= nowS - spanS);
    const step = Math.max(Math.ceil(all.length / MAX_NUMBERS), 1);
    const shown = all.filter((_, n) => (all.length - 1 - n) % step === 0).reverse();
    const host = this.numbers.lastElementChild;
    const heads = ["time", ...this.lines.map(({ name }) => name)];
    if (!host.firstElementChild) {
      const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col" }, name)));
      const whole = element("table", {}, element("thead", {}, head), element("tbody"));
      host.append(element("div", { class: "table", role: "region", tabindex: "0", "aria-label": `Numbers of ${this.title}` }, whole));
    }
    list(
      host.querySelector("tbody"), shown,
      () => element("tr", {}, element("th", { scope: "row" }), ...this.lines.map(() => element("td"))),
      (line, n) => {
        const cells = [clock(Date.now() - (nowS - grain.at_s[n]) * 1000), ...this.lines.map(({ series }) => grain.values[series]?.[n])];
        cells.forEach((cell, k) => say(line.children[k], k === 0 ? cell : known(cell) ? this.show(cell) : UNKNOWN));
      },
    );
  }
}
