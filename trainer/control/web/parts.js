// HTML elements. Text from outside is set through textContent only; nothing here parses markup.

import { UNKNOWN } from "./words.js";

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

/** Change the text only if it differs, so that nothing is announced or laid out twice. */
export function say(node, text) {
  if (node.textContent !== String(text)) node.textContent = String(text);
  node.classList.toggle("unknown", text === UNKNOWN);
}

/** One child of `host` for each of `items`: existing children are updated, others added or removed at the end. */
export function list(host, items, make, update) {
  while (host.children.length > items.length) host.lastElementChild.remove();
  items.forEach((item, n) => {
    if (n >= host.children.length) host.append(make(item));
    update(host.children[n], item);
  });
}

/** A table in its own region, which scrolls if it is wider than the screen.
 *  `columns`: {name, words} (words: text, aligned left); `rows`: arrays of text, or {text, share} for a load bar. */
export function table(host, caption, columns, rows, none) {
  if (!rows.length) {
    if (!host.querySelector(".none")) host.replaceChildren(element("p", { class: "none" }, ""));
    say(host.firstElementChild, none);
    host.firstElementChild.className = "none";
    return;
  }
  let body = host.querySelector("tbody");
  const heads = columns.map((column) => column.name).join("\n");
  if (!body || host.dataset.heads !== heads) {
    host.dataset.heads = heads;
    body = element("tbody");
    const head = element("tr", {}, ...columns.map((c) => element("th", { scope: "col", ...(c.words ? { class: "words" } : {}) }, c.name)));
    const whole = element("table", {}, element("caption", {}, caption), element("thead", {}, head), body);
    host.replaceChildren(element("div", { class: "table", role: "region", tabindex: "0", "aria-label": caption }, whole));
  }
  list(body, rows, () => row(columns), (line, cells) => cells.forEach((cell, n) => fill(line.children[n], cell)));
}

function row(columns) {
  const cells = columns.map((column, n) =>
    n === 0 ? element("th", { scope: "row" }) : element("td", column.words ? { class: "words" } : {}),
  );
  return element("tr", {}, ...cells);
}

function fill(cell, value) {
  if (value === null || typeof value !== "object") return say(cell, value ?? UNKNOWN);
  if (!cell.querySelector(".load")) {
    cell.replaceChildren(element("span"), element("span", { class: "load", "aria-hidden": "true" }, element("i")));
  }
  say(cell.firstElementChild, value.text);
  cell.querySelector("i").style.width = `${Math.round(Math.min(Math.max(value.share, 0), 1) * 100)}%`;
}
