// The charts of a run. Points that are here are not asked for again; a run that was cut back is drawn anew.

import { element } from "./base.js";
import { drawChart } from "./chart.js";

const MOST = 1500; // points a curve, after which all are asked for anew, thinned by the server

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

export function showCurves(run, panel) {
  const first = element("div", { className: "charts" });
  const rest = element("div", { className: "charts" });
  const more = element("details", { id: "more" }, element("summary"), rest);
  panel.append(first, more);
  const box = element("input", { type: "checkbox", id: "smooth", checked: sessionStorage.getItem("smooth") !== "no" });
  panel.prepend(element("label", { className: "box small" }, box, " Smooth: a running mean over the raw line"));
  box.onchange = () => {
    sessionStorage.setItem("smooth", box.checked ? "yes" : "no");
    draw();
  };
  const drawn = new Map(); // title -> { chart, names, spec }
  const curves = new Map(); // metric -> points
  let edition = "", after = -1;

  const wanted = () => run.about.charts.filter((chart) => chart.open || more.open);
  const missing = () => wanted().flatMap((chart) => chart.names).some((name) => !curves.has(name));

  function draw() {
    for (const { title, about, names, open } of wanted()) {
      const series = names.map((name) => ({ name, points: curves.get(name) ?? [], trend: box.checked ? trend(curves.get(name) ?? []) : null }));
      const marks = title === "Reward" ? run.about.messages.map(({ step, guard }) => ({ x: step, text: `${guard}` })) : [];
      const spec = { title, note: about, x: "step", y: "", series, marks };
      const chart = drawn.get(title);
      if (chart) chart.update(spec);
      else {
        const place = element("div", { className: "card chart-card" });
        (open ? first : rest).append(place);
        drawn.set(title, drawChart(place, spec));
      }
    }
    const left = run.about.charts.filter((chart) => !chart.open).length;
    more.hidden = !left;
    more.firstChild.textContent = `${left} more charts`;
    panel.dataset.step = run.head.step;
    panel.dataset.drawn = [...curves.values()].reduce((sum, points) => sum + points.length, 0);
  }

  more.ontoggle = () => {
    if (more.open) run.look();
  };

  return {
    metrics: () => wanted().flatMap((chart) => chart.names),
    after: () => (missing() ? -1 : after),
    keys: [["s", "smooth, or not", () => box.click()]],
    edition: () => (missing() || [...curves.values()].some((points) => points.length > MOST) ? "" : edition),
    add(head) {
      const changed = head.anew || head.edition !== edition || Object.values(head.curves).some((points) => points.length);
      for (const [name, points] of Object.entries(head.curves)) {
        curves.set(name, head.anew ? points : [...(curves.get(name) ?? []), ...points]);
      }
      edition = head.edition;
      after = head.step;
      for (const name of missing() ? wanted().flatMap((chart) => chart.names) : []) if (!curves.has(name)) curves.set(name, []);
      if (changed || !drawn.size) draw();
    },
  };
}
