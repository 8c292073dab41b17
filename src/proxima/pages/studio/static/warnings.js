// Alarms of the guards, the newest first.

import { element } from "./base.js";
import { visible } from "./dom.js";

export function showWarnings(run, panel) {
  let drawn = -1;
  function draw() {
    const messages = run.about.messages;
    drawn = run.about.warnings;
    if (!drawn) return panel.replaceChildren(element("p",
        { className: "soft narrow",
        text: "No warnings. The guards watch KL, entropy, length, rewards and updates." }));
    const rows = [...messages].reverse().map(({ step, guard, message, action }) => element("tr", {},
      element("td", { className: "figure", text: String(step) }),
          element("td", { text: visible(String(guard ?? "")) }),
      element("td", { className: "text", text: visible(String(message ?? ""), 2000) }),
          element("td", { text: visible(String(action ?? "")) })));
    const heads = ["Step", "Guard", "Message", "Action"].map(
        (text, i) => element("th", { text, scope: "col", className: i ? "" : "figure" }));
    panel.replaceChildren(element("div", { className: "card scroll" },
        element("table", { className: "plain" }, element("thead", {}, element("tr", {}, ...heads)),
        element("tbody", {}, ...rows))));
  }
  draw();
  return { add: () => { if (run.about.warnings !== drawn) draw(); } };
}
