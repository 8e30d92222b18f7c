// DOM helpers. Data is inserted as text and never parsed as markup.
export function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== "" || key === "open") made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const row = (...cells) => element("tr", {}, ...cells);

export function put(place, ...children) {
  place.replaceChildren(...children);
}
