// The log of a run, as it grows. It stays at its end unless the reader has scrolled up.

import { ask, element } from "./base.js";
import { visible } from "./dom.js";

const MOST = 2000; // lines kept on the page
const LOUD = /^\S+ \S+ (WARNING|ERROR|CRITICAL) /;

export function showLog(run, panel) {
  const box = element("input", { type: "checkbox", id: "loud" });
  const list = element("ol", { className: "log card", tabIndex: 0, ariaLabel: "Log" });
  const none = element("p", { className: "soft narrow", text: "Nothing was logged yet." });
  panel.append(element("label", { className: "box small" }, box, " Warnings only"), list, none);
  let end = -1, rest = "", asking = false, stopped = false;

  function append(text) {
    const low = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    const lines = (rest + text).split("\n");
    rest = lines.pop(); // a line that is not whole yet
    list.append(...lines.slice(-MOST).map((line) =>
        element("li", { className: LOUD.test(line) ? "loud" : "", text: visible(line, 2000) })));
    while (list.children.length > MOST) list.firstChild.remove();
    none.hidden = list.children.length > 0;
    list.hidden = !none.hidden;
    if (low) list.scrollTop = list.scrollHeight;
    panel.dataset.lines = list.children.length;
  }

  async function look() {
    if (asking) return;
    asking = true;
    try {
      const said = await ask(`/api/log?${new URLSearchParams({ name: run.name, after: end })}`);
      if (stopped) return;
      if (said.end < end) { // the run began again
        list.replaceChildren();
        rest = "";
      }
      end = said.end;
      append(said.text);
    } finally {
      asking = false;
    }
  }

  box.onchange = () => list.classList.toggle("only-loud", box.checked);
  return { add: look, stop() { stopped = true; }, keys: [["w", "warnings only", () => box.click()]] };
}
