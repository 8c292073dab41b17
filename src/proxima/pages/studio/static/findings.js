// What the run shows, in sentences with their numbers, and what the doctor said.

import { ask, element } from "./base.js";
import { visible } from "./dom.js";
import { number } from "./words.js";

export function showFindings(run, panel) {
  let step = null, stopped = false;

  async function draw(now) {
    const { findings, checks, examinations } = await ask(
        `/api/findings?name=${encodeURIComponent(run.name)}`);
    if (stopped) return;
    const said = examinations.map((each) => doctor(`What ${each.how} said`, each.checks));
    panel.replaceChildren(...findings.map(finding), ...said,
        doctor("What the doctor said before it began", checks));
    panel.dataset.found = findings.length;
    step = now;
  }

  return {
    add: ({ step: now }) => (now === step ? null : draw(now)),
    stop() { stopped = true; },
  };
}

function finding({ question, answer, status, sentence, evidence, step }) {
  const between = evidence.some(({ middle }) => middle !== null);
  const heads = ["", "Start", ...(between ? [`Step ${step}`] : []), "End"].map(
      (text, i) => element("th", { text, scope: "col", className: i ? "figure" : "" }));
  const rows = evidence.map(({ title, start, middle, end, sign }) => element("tr", {},
    element("td", {}, visible(title), ...(sign ? [
        element("p", { className: "soft small", text: visible(sign) })] : [])),
    ...[start, ...(between ? [middle] : []), end].map(
        (value) => element("td", { className: "figure", text: number(value, 3) }))));
  return element("article", { className: "card part finding" },
    element("div", {}, element("h2", {}, question, " ",
        element("span", { className: `answer ${status}`, text: visible(answer) })),
        element("p", { text: visible(sentence, 2000) })),
    ...(rows.length ? [element("div", { className: "scroll" },
        element("table", { className: "plain" }, element("thead", {}, element("tr", {}, ...heads)),
        element("tbody", {}, ...rows)))] : []));
}

function doctor(words, checks) {
  const title = element("h2", { text: visible(words, 200) });
  if (!checks) return element("section", { className: "card part" }, title,
      element("p", { className: "soft",
      text: "Nothing: the run was started from Python, with --skip-checks, or by an older version." }));
  const rows = checks.map(({ level, name, text, advice }) => element("tr", {},
    element("td", { className: level === "ok" ? "soft" : "wrong", text: visible(level) }),
        element("td", { text: visible(name) }),
    element("td", { className: "text", text: visible(text, 2000) }),
        element("td", { className: "text", text: visible(advice, 2000) })));
  const heads = ["", "Check", "Finding", "What to do"].map((text) => element("th", { text, scope: "col" }));
  return element("section", { className: "card part doctor" }, title,
      element("div", { className: "scroll" }, element("table", { className: "plain" },
      element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows))));
}
