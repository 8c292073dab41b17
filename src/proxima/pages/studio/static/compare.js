// Several runs in one chart. The address names them; the seeds of one config are one curve with a band.

import { ask, element } from "./base.js";
import { drawChart } from "./chart.js";
import { choose, chosen } from "./chosen.js";
import { drift, smooth, smoothBox, trend } from "./curves.js";
import { amend } from "./places.js";
import { line, number, stateMark } from "./words.js";
import { watch } from "./watch.js";

export function showCompare(place, view) {
  document.title = "Compare · Proxima";
  let names = place.asked.getAll("run");
  if (!names.length) names = chosen();
  let more = place.asked.getAll("metric");
  const list = element("fieldset", { className: "choice" }, element("legend", { text: "Runs" }));
  const metric = element("select", { ariaLabel: "Another metric", hidden: true });
  const note = element("p", { className: "soft small" });
  const last = element("div", { className: "card scroll", id: "last", hidden: true });
  const charts = element("div", { className: "charts" });
  view.append(element("div", { className: "row tools" }, element("h1", { text: "Compare" }),
      element("label", { className: "pick" }, metric), smoothBox(() => { mark = ""; looking.now(); }).node),
      list, note, last, charts);
  const drawn = new Map();
  let mark = "", marked = "", offered = "";

  function put(key, spec) {
    if (drawn.has(key)) return drawn.get(key).chart.update(spec);
    const node = element("div", { className: "card chart-card" });
    charts.append(node);
    drawn.set(key, { node, chart: drawChart(node, spec) });
  }

  function say() {
    choose(names);
    amend({ view: "compare", asked: [...names.map((name) => ["run", name]),
        ...more.map((name) => ["metric", name])] });
  }

  function drawList(runs) {
    const now = JSON.stringify([runs.map((run) => run.name), names]);
    if (now === marked) return;
    marked = now;
    const focused = document.activeElement?.value;
    list.replaceChildren(list.firstChild, ...runs.map((run) => {
      const box = element("input", { type: "checkbox", value: run.name, checked: names.includes(run.name) });
      box.onchange = () => {
        names = box.checked ? [...names, run.name] : names.filter((name) => name !== run.name);
        mark = "";
        say();
        looking.now();
      };
      return element("label", { className: "box" }, box, element("bdi", { text: line(run.name, 80) }));
    }));
    [...list.querySelectorAll("input")].find((box) => box.value === focused)?.focus();
  }

  function drawMetrics(left) { // metric -> title
    const now = JSON.stringify(left);
    if (offered === now) return;
    offered = now;
    metric.hidden = !Object.keys(left).length;
    metric.replaceChildren(element("option", { value: "", text: "Add a chart …" }),
        ...Object.entries(left).map(([name, title]) =>
        element("option", { value: name, text: line(title, 60) })));
  }

  // The last numbers; those of a group of seeds are a mean and its interval.
  function drawLast(columns, rows) {
    last.hidden = !rows.length;
    if (!rows.length) return;
    const heads = Object.keys(columns);
    const cell = (head, value) => {
      if (head === "run") return element("th", { scope: "row" }, element("bdi", { text: line(value, 80) }));
      if (head === "state") return element("td", {}, ...(value ? [stateMark(value)] : []));
      const text = Array.isArray(value)
          ? `${number(value[0], 3)} (${number(value[1], 3)} to ${number(value[2], 3)})` : number(value);
      return element("td", { className: "figure", text });
    };
    const body = rows.map((row) => element("tr", {}, ...heads.map((head) => cell(head, row[head]))));
    const top = heads.map((head) => element("th", { scope: "col", text: columns[head],
        className: ["run", "state"].includes(head) ? "" : "figure" }));
    last.replaceChildren(element("table", { className: "plain" },
        element("thead", {}, element("tr", {}, ...top)), element("tbody", {}, ...body)));
  }

  const looking = watch(async () => {
    const { runs } = await ask("/api/runs");
    const there = new Set(runs.map((run) => run.name));
    const lost = names.filter((name) => !there.has(name));
    drawList(runs);
    const wanted = names.filter((name) => there.has(name));
    const lines = runs.filter((run) => wanted.includes(run.name));
    const pace = lines.some((run) => run.state === "training") ? 5 : 10;
    const now = JSON.stringify([wanted, more, lost, lines.map((run) => [run.step, run.changed])]);
    if (now === mark) return pace; // nothing is new
    if (!wanted.length) {
      note.textContent = runs.length ? "Select two or more runs." : "There are no runs yet.";
      charts.replaceChildren();
      drawn.clear();
      last.hidden = true;
      mark = now;
      return pace;
    }
    const named = wanted.map((name) => ["name", name]);
    const said = await ask(
        `/api/compare?${new URLSearchParams([...named, ...more.map((name) => ["metric", name])])}`);
    drawMetrics(said.more);
    drawLast(said.columns, said.rows);
    note.textContent = [
      ...said.notes,
      Object.keys(said.groups).length && "Runs whose configs differ only in the seed are also drawn as one "
        + "curve: their mean and its 95 % interval.",
      lost.length && `No longer found: ${lost.map((name) => line(name, 80)).join(", ")}.`,
    ].filter(Boolean).join(" ");
    const titles = new Set(said.charts.map((chart) => chart.title));
    for (const [title, { node }] of drawn) if (!titles.has(title)) { node.remove(); drawn.delete(title); }
    for (const chart of said.charts) {
      const calm = (one) => {
        if (!smooth()) return one;
        return chart.free ? { ...one, points: drift(one.points) }
            : { ...one, trend: one.faint ? null : trend(one.points) };
      };
      put(chart.title, { ...chart, series: chart.series.map(calm) });
    }
    mark = now;
    view.dataset.compared = wanted.length;
    return pace;
  });

  metric.onchange = () => {
    if (!metric.value) return;
    more = [...more, metric.value];
    say();
    looking.now();
  };
  return { stop: looking.stop };
}
