// Conversations as turns. In: a prompt with its turns ({ role, text }), if it has any. Out: elements; text
// through
// textContent alone.

import { element, visible } from "./dom.js";

const asLines = (text, longest = 4000) => visible(text, longest).replaceAll("↵\n", "\n");

// A prompt as its turns, or as plain text where it has none. `say` makes texts fit to be seen.
export function showPrompt({ turns, prompt }, say = asLines) {
  if (!turns?.length) return element("div", { className: "told", dir: "auto", text: say(prompt ?? "") });
  return element("div", { className: "turns" }, ...turns.map(
      ({ role, text }) => showTurn(role, element("div",
      { className: "told", dir: "auto", text: say(text) }))));
}

// One turn; a system prompt is folded, and what an environment said is marked.
export function showTurn(role, content) {
  const name = visible(role, 40);
  if (role === "system") return element("details", { className: "turn" }, element("summary", { text: name }),
      content);
  return element("div", { className: role === "environment" ? "turn read" : "turn" },
      element("b", { text: name }), content);
}

// The end of a prompt in one line: of its last turn, where it has turns.
export function promptEnd({ turns, prompt }, longest = 60) {
  return visible((turns?.at(-1)?.text ?? prompt ?? "").slice(-longest).replace(/\s+/g, " "));
}
