// All runs: one line each, the newest first. Lines are changed in place, so that focus and selection stay.

import { ask, byId, element } from "./base.js";
import { chosen, toggle } from "./chosen.js";
import { link } from "./places.js";
import { ago, number, spark, stateMark } from "./words.js";
import { watch } from "./watch.js";

const METRICS = ["avg_reward", "kl"]; // their titles come with the runs
const KINDS = { ppo: "PPO", sft: "SFT", reward: "Reward model" };
const HEADS = ["", "Run", "State", "Step", ...METRICS, "Curve", "Changed"];
const FIGURES = ["Step", ...METRICS];

export function showRuns(place, view) {
  const filter = element("input", { id: "filter", type: "search",
      placeholder: "Filter by name, kind, state or model", autocomplete: "off",
      value: place.asked.get("q") ?? "" });
  filter.ariaLabel = "Filter runs";
  const count = element("p", { className: "soft", id: "count" });
  const compare = element("button", { type: "button", id: "compare-chosen", className: "main",
      hidden: true });
  const body = element("tbody", { id: "runs" });
  const heads = HEADS.map((text) => element("th", { text, scope: "col",
      className: FIGURES.includes(text) ? "figure" : "" }));
  let titles = {};
  const table = element("table", { className: "runs" }, element("thead", {}, element("tr", {}, ...heads)),
      body);
  const empty = element("div", { className: "narrow", hidden: true });
  view.append(element("div", { className: "row tools" }, element("h1", { text: "Runs" }), filter, count,
      compare), element("div", { className: "card scroll" }, table), empty);
  const rows = new Map(); // name -> { node, mark, said }
  let said = [];

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (run) => words.every(
        (word) => `${run.name} ${run.state} ${KINDS[run.kind] ?? ""} ${run.model ?? ""}`.toLowerCase(
        ).includes(word));
    const wanted = said.filter(fits);
    const names = new Set(said.map((run) => run.name));
    for (const [name, row] of rows) if (!names.has(name)) { row.node.remove(); rows.delete(name); }
    wanted.forEach((run, place) => {
      const row = rows.get(run.name) ?? newRow(run.name);
      fill(row, run);
      if (body.children[place] !== row.node) body.insertBefore(row.node, body.children[place] ?? null);
    });
    for (const { node } of [...rows.values()].filter(
        ({ name }) => !wanted.some((run) => run.name === name))) node.remove();
    count.textContent = wanted.length === said.length ? `${said.length}`
        : `${wanted.length} of ${said.length}`;
    table.hidden = !said.length;
    const now = chosen();
    compare.hidden = now.length < 2;
    compare.textContent = `Compare ${now.length} runs`;
  }

  function newRow(name) {
    const box = element("input", { type: "checkbox", ariaLabel: `Select ${name} for comparison`,
        onchange: () => { toggle(name); draw(); } });
    const anchor = element("a", { href: link({ run: name }) }, element("bdi", { text: name }));
    const cells = HEADS.map((head, place) => element("td", { className: `cell-${place}` }));
    cells[0].append(element("label", { className: "box" }, box));
    cells[1].append(anchor, element("p", { className: "soft small" }));
    const node = element("tr", { onclick: (event) => { if (
        !event.target.closest("a, input, label")) anchor.click(); } }, ...cells);
    const row = { name, node, cells, box, note: cells[1].lastChild, mark: "" };
    rows.set(name, row);
    return row;
  }

  function fill(row, run) {
    row.box.checked = chosen().includes(run.name);
    row.cells[7].textContent = ago(run.changed);
    if (run.unread) return;
    const mark = JSON.stringify([run.state, run.step, run.shown, run.spark.length, run.problems,
        run.stop_reason]);
    if (mark === row.mark) return;
    row.mark = mark;
    row.note.textContent = run.problems[0] ?? [KINDS[run.kind], run.model].filter(Boolean).join(" · ");
    row.note.classList.toggle("wrong", run.problems.length > 0);
    row.cells[2].replaceChildren(stateMark(run.state));
    row.cells[2].title = run.stop_reason ?? "";
    [["step", "Step", run.step], ...run.shown].forEach(([name, title, value], i) => {
      // fine-tuning measures something else in this column
      const other = name !== "step" && !METRICS.includes(name);
      row.cells[3 + i].replaceChildren(number(value),
          ...(other ? [element("p", { className: "soft small", text: title })] : []));
      row.cells[3 + i].dataset.name = title;
    });
    row.cells[6].replaceChildren(spark(run.spark));
  }

  const looking = watch(async () => {
    const { runs, folder, label, ...more } = await ask("/api/runs");
    said = runs;
    titles = more.titles;
    heads.forEach((head, i) => (head.textContent = titles[HEADS[i]] ?? HEADS[i]));
    document.title = `Runs · Proxima`;
    byId("to-label").hidden = !label;
    empty.hidden = runs.length > 0;
    empty.replaceChildren(
      element("h2", { text: "No runs yet" }),
      element("p", { className: "soft",
          text: `There is no run in ${folder}. Start one and it appears here:` }),
      element("code", { className: "card command", text: "proxima train --model-name embedded "
          + `--data prompts.txt --rewards length_band,low=5,high=20 --run-dir ${folder}` }),
    );
    draw();
    return runs.some((run) => run.unread) ? 0.2 : runs.some((run) => run.state === "training") ? 3 : 6;
  });

  const anchors = () => [...body.querySelectorAll("a")];
  const move = (by) => {
    const all = anchors();
    const here = all.indexOf(document.activeElement?.closest("tr")?.querySelector("a"));
    all[here < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(here + by, 0), all.length - 1)]?.focus();
  };
  filter.oninput = () => {
    history.replaceState(null, "", link({ view: "runs", asked: filter.value ? { q: filter.value } : {} }));
    draw();
  };
  compare.onclick = () => (location.hash = link({ view: "compare",
      asked: chosen().map((name) => ["run", name]) }));

  return {
    stop: looking.stop,
    keys: [
      ["/", "filter the runs", () => filter.focus()],
      ["j ArrowDown", "next run", () => move(1)],
      ["k ArrowUp", "previous run", () => move(-1)],
      ["Enter", "open the run", () => document.activeElement?.closest("tr")?.querySelector("a")?.click()],
      ["x", "select it for comparison", () => document.activeElement?.closest("tr")?.querySelector(
          "input")?.click()],
    ],
  };
}
