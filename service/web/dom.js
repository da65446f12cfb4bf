// Elements. Text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with properties (or, with a dash, attributes) and children: elements or strings. */
export function element(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function filled(made, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

/** Sets what changes only: an unchanged text would be laid out, and read aloud, again. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** The clipboard needs a secure page (https or this machine); elsewhere the text is selected, to be copied by hand. */
export async function copy(text, source) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(source);
    return false;
  }
}

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
