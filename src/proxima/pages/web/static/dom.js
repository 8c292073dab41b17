// Making elements. Text reaches the page through textContent alone.

export const byId = (id) => document.getElementById(id);

export function element(tag, { text = "", ...properties } = {}, ...children) {
  const made = document.createElement(tag);
  made.textContent = text;
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

export function svg(tag, { text = "", ...attributes } = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  if (text) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A number for people: `digits` significant digits, thousands separated, very large and small ones with an
// exponent.
export function formatNumber(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(Math.max(digits - 2, 1)).replace(
      "e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

const DIRECTIONS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufeff]/g;

// Text as it can be seen: ends of lines marked, control and direction characters named, very long ones cut.
export function visible(text, longest = 400) {
  const cut = text.length > longest
      ? `${text.slice(0, longest)}… (${text.length.toLocaleString("en")} characters)` : text;
  return cut
    .replace(/\n/g, "↵\n")
    .replace(/[\x00-\x08\x0b-\x1f\x7f]/g, (one) =>
        (one === "\x7f" ? "\u2421" : String.fromCharCode(0x2400 + one.charCodeAt(0))))
    .replace(DIRECTIONS, (one) => `⟨U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}
