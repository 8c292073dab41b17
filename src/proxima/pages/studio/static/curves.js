// The charts of a run, in groups. Points that are here are not requested again; a run that was cut back is
// redrawn.

import { element } from "./base.js";
import { drawChart } from "./chart.js";

const MOST = 1500; // points per curve; beyond it all are requested again, thinned by the server

export function showCurves(run, panel) {
  const { node: label, box } = smoothBox(() => draw());
  const none = element("p", { className: "soft narrow", text: "No step is finished yet." });
  panel.append(label, none);
  const opened = new Map(); // title of a group -> { node, grid, open() }
  const drawn = new Map(); // title of a chart -> chart
  let curves = new Map(), bands = new Map(); // metric -> points
  let edition = "", after = -1;

  function groupFor({ title, text, open }) {
    if (opened.has(title)) return opened.get(title);
    const grid = element("div", { className: "charts" });
    const words = [element("h2", { text: title }), element("p", { className: "soft small", text })];
    const node = open
      ? element("section", { className: "group" }, ...words, grid)
      : element("details", { className: "group" }, element("summary", {}, ...words), grid);
    if (!open) node.ontoggle = () => { if (node.open) run.look(); };
    panel.append(node);
    const group = { node, grid, open: () => open || node.open };
    opened.set(title, group);
    return group;
  }

  const charts = () => run.about.groups.flatMap((group) =>
      (groupFor(group).open() ? group.charts.map((chart) => [group, chart]) : []));
  const metrics = () => charts().flatMap(([, chart]) => chart.names);
  const lacking = () => metrics().some((name) => !curves.has(name));

  function draw() {
    label.hidden = !(none.hidden = charts().length > 0);
    const marks = run.about.messages.slice(-20).map(({ step, guard }) => ({ x: step, text: String(guard) }));
    for (const [group, { title, unit, names, about, marked }] of charts()) {
      const series = names.map((name) => {
        const points = curves.get(name) ?? [];
        return { name, points, band: bands.get(name), trend: smooth() ? trend(points) : null };
      });
      const spec = { title, about, x: "step", y: unit, series, marks: marked ? marks : [] };
      if (drawn.has(title)) drawn.get(title).update(spec);
      else {
        const place = element("div", { className: "card chart-card" });
        groupFor(group).grid.append(place);
        drawn.set(title, drawChart(place, spec));
      }
    }
    panel.dataset.step = run.head.step;
    panel.dataset.points = [...curves.values()].reduce((sum, points) => sum + points.length, 0);
  }

  return {
    metrics,
    after: () => after,
    edition: () => (lacking() || [...curves.values()].some((points) => points.length > MOST) ? "" : edition),
    keys: [["s", "smoothing on or off", () => box.click()]],
    add(head, asked) {
      const news = head.anew || Object.values(head.curves).some((points) => points.length);
      if (head.anew) [curves, bands] = [new Map(), new Map()];
      for (const name of asked) curves.set(name, [...(curves.get(name) ?? []), ...(head.curves[name] ?? [])]);
      for (const [name, rows] of Object.entries(head.bands)) bands.set(name,
          [...(bands.get(name) ?? []), ...rows]);
      [edition, after] = [head.edition, head.step];
      if (news || !drawn.size) draw();
      if (lacking()) run.look(); // a group was opened meanwhile
    },
  };
}

export const smooth = () => sessionStorage.getItem("smooth") !== "no";

export function smoothBox(changed) {
  const box = element("input", { type: "checkbox", id: "smooth", checked: smooth() });
  box.onchange = () => {
    sessionStorage.setItem("smooth", box.checked ? "yes" : "no");
    changed();
  };
  return { box, node: element("label", { className: "box small" }, box,
      " Smooth (running mean over the raw curve)") };
}

// A running mean over a thirtieth of the steps, where there are enough of them.
export function trend(points) {
  if (points.length < 60) return null;
  const reach = (points.at(-1)[0] - points[0][0]) / 60;
  let [first, last, sum] = [0, 0, 0];
  return points.map(([x]) => {
    while (last < points.length && points[last][0] <= x + reach) sum += points[last++][1];
    while (points[first][0] < x - reach) sum -= points[first++][1];
    return [x, sum / (last - first)];
  });
}

// The same for a curve that has no axis of steps: points that are means of a thirtieth of the steps each.
export function drift(points) {
  const known = points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  if (known.length < 60) return points;
  const size = Math.ceil(known.length / 30);
  const mean = (part, place) => part.reduce((sum, point) => sum + point[place], 0) / part.length;
  const parts = Array.from({ length: Math.ceil(known.length / size) },
      (_, i) => known.slice(i * size, (i + 1) * size));
  return parts.map((part) => [mean(part, 0), mean(part, 1), part.at(-1)[2]]);
}
