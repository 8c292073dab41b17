// The microscope of a run: a step, a sample, a column, and another step to compare with.

import { ask, element, notice } from "./base.js";
import { drawMicroscope } from "./microscope.js";
import { amend } from "./places.js";
import { promptEnd } from "./turns.js";
import { stepPicker } from "./words.js";

export function showInspect(run, panel, asked) {
  const at = { step: null, beside: null, sample: 0, column: "advantage" };
  const kept = new Map(); // step -> samples
  const bar = element("div", { className: "row tools" });
  const place = element("div", { id: "scope" });
  const none = element("p", { className: "soft narrow", hidden: true,
      text: "No tokens were logged yet. They are logged with the evaluations (eval_every), "
        + "for token_samples samples." });
  panel.append(bar, place, none);
  let scope = null, picker = null, edition = run.about.edition, drawing = 0, wanted = null;

  function read(next) {
    const whole = (name, otherwise) => (/^\d+$/.test(next.get(name) ?? "") ? Number(next.get(name))
        : otherwise);
    Object.assign(at, { step: whole("step", at.step), beside: whole("beside", null),
        sample: whole("sample", 0), column: next.get("column") ?? at.column });
    wanted = next.has("text") ? { kind: next.get("kind"), text: next.get("text") } : null;
  }

  const nearest = (wanted) => run.about.tokens.reduce(
      (best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), run.about.tokens[0]);

  async function tokens(step) {
    if (!kept.has(step)) {
      const { samples } = await ask(`/api/tokens?${new URLSearchParams({ name: run.name, step })}`);
      if (kept.size > 20) kept.delete(kept.keys().next().value);
      kept.set(step, samples);
    }
    return kept.get(step);
  }

  // The same prompt of the same kind at the other step, in the same place where the prompt comes twice; else
  // what is in that place.
  const alike = (samples, sample) => [samples[at.sample], ...samples].find(
      (one) => one?.kind === sample.kind && one.prompt === sample.prompt) ?? samples[at.sample];

  async function draw() {
    const steps = run.about.tokens;
    none.hidden = steps.length > 0;
    bar.hidden = place.hidden = !steps.length;
    if (!steps.length) return;
    at.step = nearest(at.step ?? steps.at(-1));
    if (at.beside !== null) at.beside = nearest(at.beside);
    const turn = ++drawing;
    try {
      const [left, right] = await Promise.all([tokens(at.step), at.beside === null ? [] : tokens(at.beside)]);
      if (turn !== drawing || !panel.isConnected) return;
      const found = wanted ? left.findIndex((one) =>
          one.kind === wanted.kind && one.text.startsWith(wanted.text)) : -1;
      if (found >= 0) at.sample = found;
      wanted = null;
      at.sample = Math.min(at.sample, Math.max(left.length - 1, 0));
      drawBar(left);
      const sample = left[at.sample];
      const other = sample && at.beside !== null ? alike(right, sample) : null;
      const samples = [sample && { ...sample, title: `Step ${at.step} · ${sample.kind}` },
          other && { ...other, title: `Step ${at.beside} · ${other.kind}` }].filter(Boolean);
      const spec = { samples, column: at.column };
      if (scope) scope.update(spec);
      else scope = drawMicroscope(place, spec);
      panel.dataset.shown = `${at.step} ${at.beside ?? ""} ${at.sample}`;
    } catch (problem) {
      notice(problem.message);
    }
  }

  function say() {
    const { beside, ...rest } = at;
    amend({ run: run.name, tab: "microscope", asked: beside === null ? rest : { ...rest, beside } });
  }

  function go(change) {
    Object.assign(at, change);
    say();
    draw();
  }

  function drawBar(samples) {
    const focused = bar.contains(document.activeElement) ? document.activeElement.ariaLabel : null;
    picker = stepPicker("Step", run.about.tokens, at.step, (step) => go({ step }));
    const choice = element("select", { ariaLabel: "Sample",
        onchange: () => go({ sample: Number(choice.value) }) },
      ...samples.map((sample, i) => element("option",
          { value: i, selected: i === at.sample,
          text: `${i + 1} · ${sample.kind} · ${promptEnd(sample)}` })));
    const box = element("input", { type: "checkbox", checked: at.beside !== null,
        ariaLabel: "Compare with another step", onchange: () =>
        go({ beside: box.checked ? run.about.tokens[0] : null }) });
    const other = at.beside === null ? [] : [stepPicker("Other step", run.about.tokens, at.beside,
        (beside) => go({ beside })).node];
    bar.replaceChildren(picker.node, element("label", { className: "pick" }, choice),
        element("label", { className: "box" }, box, " Compare with another step"), ...other);
    if (focused) [...bar.querySelectorAll("button, select, input")].find(
        (one) => one.ariaLabel === focused)?.focus();
  }

  place.addEventListener("change", (event) => { // the microscope's own choice of a column
    if (event.target instanceof HTMLSelectElement) {
      at.column = event.target.value;
      say();
    }
  });
  const sampleBy = (by) => go({ sample: Math.max(at.sample + by, 0) });
  read(asked);
  draw();
  return {
    add(head) {
      if (head.edition !== edition) { // what was logged may be gone
        edition = head.edition;
        kept.clear();
        draw();
      } else if (bar.hidden && run.about.tokens.length) draw();
    },
    change(next) {
      read(next);
      draw();
    },
    keys: [
      ["[", "previous step", () => picker?.move(-1)],
      ["]", "next step", () => picker?.move(1)],
      [",", "previous sample", () => sampleBy(-1)],
      [".", "next sample", () => sampleBy(1)],
      ["b", "compare with the first step, or not",
          () => go({ beside: at.beside === null ? run.about.tokens[0] : null })],
    ],
  };
}
