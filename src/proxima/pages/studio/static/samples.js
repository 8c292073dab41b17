// Samples: the same prompts at several steps, one column per step.

import { ask, element, notice } from "./base.js";
import { visible } from "./dom.js";
import { amend, link } from "./places.js";
import { showPrompt, showTurn } from "./turns.js";
import { number, stepPicker } from "./words.js";

const seen = (text) => visible(text.replace(/^ /, ""), 4000).replaceAll("↵\n", "\n");

export function showSamples(run, panel, asked) {
  let steps = asked.getAll("step").map(Number).filter(Number.isInteger);
  let logged = ""; // what the run's samples were like at the last look
  let drawing = 0;

  async function draw() {
    const query = new URLSearchParams([["name", run.name], ...steps.map((step) => ["step", step])]);
    const turn = ++drawing;
    const said = await ask(`/api/samples?${query}`).catch((problem) => notice(problem.message));
    if (!said || turn !== drawing || !panel.isConnected) return;
    if (!said.rows.length) return panel.replaceChildren(
        element("p", { className: "soft narrow",
        text: "No samples yet. They are logged with the first evaluation (eval_every)." }));
    const places = said.chosen;
    const head = element("tr", {}, element("th", { text: "Prompt", scope: "col" }),
        ...places.map((step, i) => {
      const go = (next) => {
        steps = places.map((each, place) => (place === i ? next : each));
        amend({ run: run.name, tab: "samples", asked: steps.map((each) => ["step", each]) });
        draw();
      };
      const picker = stepPicker("Step", said.steps, step, go);
      return element("th", { scope: "col" }, picker.node);
    }));
    const body = said.rows.map((row) => element("tr", {},
      element("th", { scope: "row" }, element("span", { className: "soft small", text: row.kind }),
          element("div", { className: "text clamp soft", tabIndex: 0 },
          showPrompt({ turns: row.turns, prompt: row.prompt.replace(/^ /, "") }))),
      ...row.cells.map((cell, i) => showCell(cell, row, places[i]))));
    const left = said.left ? ` ${said.left} more prompts are not shown.` : "";
    const note = `Steps with samples: ${said.steps.length}. Followed prompts come first.${left}`;
    panel.replaceChildren(
      element("p", { className: "soft small", text: note }),
      element("div", { className: "card scroll" },
          element("table", { className: "samples" }, element("thead", {}, head),
          element("tbody", {}, ...body))),
    );
  }

  function showCell(cell, row, step) {
    if (!cell) return element("td", { className: "soft", text: "–" });
    const asked = { step, kind: row.kind, text: cell.text.slice(0, 100) };
    const look = run.about.tokens.includes(step) ? [
        element("a", { href: link({ run: run.name, tab: "microscope", asked }), text: "microscope" })] : [];
    const foot = element("p", { className: "soft small" }, element("b", { text: number(cell.reward) }),
        ` · step ${step} `, ...look);
    if (cell.replies.length) return element("td", {},
        element("div", { className: "text" }, showPrompt({ turns: cell.replies }, seen)), foot);
    const text = element("div", { className: "text", dir: "auto", text: seen(cell.text) });
    return element("td", {}, row.turns.length ? showTurn("assistant", text) : text, foot);
  }

  draw();
  return {
    add(head) { // the first samples appear automatically; a table that is being read is not changed
      const now = `${head.edition} ${String(head.token_steps)}`;
      if (now !== logged && (panel.querySelector("p.narrow") || logged.split(" ")[0] !== head.edition)) draw(
          );
      logged = now;
    },
    change(next) {
      steps = next.getAll("step").map(Number).filter(Number.isInteger);
      draw();
    },
  };
}
