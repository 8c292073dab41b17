// Line charts. In: series of points. Out: a figure that fits its place, read by pointer or by arrow keys.
//
// drawChart(place, { title, note, x, y, series, marks: [{ x, text }],
//                    about: [{ name, meaning, healthy, otherwise }], free }) -> { update(spec) }
// series: [{ name, points: [[x, y, note?], …], band: [[x, low, high], …], faint, trend, colour }]
// y may be null: a gap. trend = points of a calmer line over the others, which become faint.
// about = what its metrics are, behind a question mark; what the note says already is not said again.
// free = points in an order of their own (reward against KL): the nearest in the plane is read, not in x.

import { element, formatNumber, svg, visible } from "./dom.js";

const HEIGHT = 220;
const COLOURS = 8;

export function drawChart(place, given) {
  let spec = given;
  let shape = null; // how the last drawing maps numbers to pixels
  let at = null; // the place read now: { series, index }
  const hidden = new Set();

  const title = element("h3", { className: "chart-title" });
  const note = element("p", { className: "chart-note" });
  const readout = element("p", { className: "chart-readout" });
  const drawing = svg("svg", { class: "chart-drawing", tabindex: "0", role: "img", height: HEIGHT });
  const legend = element("div", { className: "chart-legend" });
  const help = element("details", { className: "chart-help" });
  let helped = "";
  const figure = element("figure", { className: "chart" }, title, note, help, drawing, readout, legend);
  place.replaceChildren(figure);

  const shown = () => spec.series.filter((one) => !hidden.has(one.name));
  const colour = (name) => {
    const place = spec.series.findIndex((one) => one.name === name);
    return `chart-c${(spec.series[place].colour ?? place) % COLOURS}`;
  };

  function draw() {
    title.textContent = spec.title ?? "";
    title.hidden = !spec.title;
    note.textContent = spec.note ?? "";
    note.hidden = !spec.note;
    drawHelp();
    const width = Math.max(figure.clientWidth, 200);
    drawing.setAttribute("width", width);
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.setAttribute("aria-label",
        `${spec.title ?? ""}: ${spec.y ?? ""} by ${spec.x ?? ""}. Arrow keys read the points.`);
    drawing.replaceChildren();
    shape = layOut(shown(), spec.marks ?? [], width);
    if (shape === null) {
      drawing.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle",
          text: "nothing to show yet" }));
      at = null;
    } else {
      drawing.append(...axes(shape, spec, width), ...marks(shape, spec.marks ?? []));
      for (const one of shown()) {
        drawing.append(...curve(shape, one.trend ? { ...one, faint: true } : one, colour(one.name),
            spec.free));
        if (one.trend) drawing.append(...curve(shape, { points: one.trend }, colour(one.name)));
      }
      if (spec.free) drawing.append(...stationNames(shape, shown()));
    }
    drawLegend();
    read();
  }

  // Rebuilt only where its text changed, so that an open one stays open in a live run.
  function drawHelp() {
    const about = spec.about ?? [];
    help.hidden = !about.length;
    const now = JSON.stringify([about, spec.note, spec.title]);
    if (now === helped) return;
    helped = now;
    const summary = element("summary", { text: "?", title: "What is this, and is it healthy?" });
    summary.setAttribute("aria-label", `About ${spec.title ?? "this chart"}`);
    const line = (word, text) => element("p", {}, element("b", { text: word }), ` ${text}`);
    help.replaceChildren(summary, ...about.flatMap(({ name, meaning, healthy, otherwise }) => {
      const said = (spec.note ?? "").startsWith(meaning);
      return [
        (!said || about.length > 1) && line(visible(name, 60), said ? "" : meaning),
        healthy && line("Healthy:", healthy), otherwise && line("Otherwise:", otherwise),
      ].filter(Boolean);
    }));
  }

  function drawLegend() {
    legend.hidden = spec.series.length < 2;
    const focused = [...legend.children].indexOf(document.activeElement);
    legend.replaceChildren(...spec.series.map((one) => {
      const button = element("button", { type: "button", className: colour(one.name) },
        element("i"), element("span", { text: visible(one.name, 60) }));
      button.setAttribute("aria-pressed", String(!hidden.has(one.name)));
      button.onclick = () => {
        if (!hidden.delete(one.name)) hidden.add(one.name);
        draw();
      };
      return button;
    }));
    legend.children[focused]?.focus();
  }

  // The numbers at the place read now, and a line and dots there.
  function read() {
    drawing.querySelector(".chart-cursor")?.remove();
    // a live run says nothing unless it is asked
    readout.setAttribute("aria-live", at === null ? "off" : "polite");
    if (shape === null || at === null) {
      readout.replaceChildren(element("span", { className: "soft", text: last() }));
      return;
    }
    const lead = shown().find((one) => one.name === at.series) ?? shown()[0];
    const point = lead.points[Math.min(at.index, lead.points.length - 1)];
    const cursor = svg("g", { class: "chart-cursor" });
    if (!spec.free) cursor.append(svg("line", { x1: shape.x(point[0]), x2: shape.x(point[0]), y1: shape.top,
        y2: shape.bottom }));
    const parts = [element("b", { text: `${spec.x ?? "x"} ${formatNumber(point[0])}` })];
    for (const one of spec.free ? [lead] : shown()) {
      const here = spec.free ? point : one.points[nearest(one.points, point[0])];
      if (!here || (!spec.free && Math.abs(shape.x(here[0]) - shape.x(point[0])) > 12)) continue;
      parts.push(element("span", { className: colour(one.name) }, element("i"),
        element("span", { text: `${visible(one.name, 60)} ${formatNumber(here[1])}`
            + (here[2] === undefined ? "" : ` · ${here[2]}`) })));
      if (here[1] !== null) cursor.append(svg("circle",
          { class: colour(one.name), cx: shape.x(here[0]), cy: shape.y(here[1]), r: 4 }));
    }
    for (const mark of spec.marks ?? []) {
      if (!spec.free && Math.abs(shape.x(mark.x) - shape.x(point[0])) < 4) parts.push(
          element("em", { text: mark.text }));
    }
    drawing.append(cursor);
    readout.replaceChildren(...parts);
  }

  function last() {
    const ends = shown().map((one) => [one.name, one.points.findLast((point) => point[1] !== null)]).filter(
        ([, end]) => end);
    return ends.slice(0, 4).map(([name, end]) => `${visible(name, 60)} ${formatNumber(end[1])}`).join("   ");
  }

  function point(event) {
    if (shape === null) return;
    const box = drawing.getBoundingClientRect();
    const [left, top] = [event.clientX - box.left, event.clientY - box.top];
    let best = Infinity;
    for (const one of shown()) {
      one.points.forEach((each, index) => {
        if (each[1] === null || each[0] === null) return;
        const far = spec.free
          ? Math.hypot(shape.x(each[0]) - left, shape.y(each[1]) - top)
          : Math.abs(shape.x(each[0]) - left) + Math.abs(shape.y(each[1]) - top) / 1e4;
        if (far < best) [best, at] = [far, { series: one.name, index }];
      });
    }
    read();
  }

  function move(event) {
    if (shape === null || event.altKey || event.ctrlKey || event.metaKey) return;
    const lead = shown().find((one) => one.name === at?.series) ?? shown()[0];
    const now = at?.index ?? lead.points.length - 1;
    const to = {
      ArrowLeft: at ? now - 1 : now, ArrowRight: at ? now + 1 : now, Home: 0, End: lead.points.length - 1,
      PageUp: now - Math.ceil(lead.points.length / 10), PageDown: now + Math.ceil(lead.points.length / 10),
    }[event.key];
    if (event.key === "Escape") at = null;
    else if (to === undefined) return;
    else at = { series: lead.name, index: Math.min(Math.max(to, 0), lead.points.length - 1) };
    event.preventDefault();
    read();
  }

  drawing.addEventListener("pointermove", point);
  drawing.addEventListener("pointerdown", point);
  drawing.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") { at = null;
  read(); } });
  drawing.addEventListener("keydown", move);
  drawing.addEventListener("blur", () => { at = null; read(); });
  let width = 0;
  new ResizeObserver(() => {
    if (figure.clientWidth !== width) { width = figure.clientWidth; draw(); }
  }).observe(figure);
  draw();
  return { update(next) { spec = next; draw(); } };
}

// Ranges, margins and ticks; null where there is no finite point at all.
function layOut(series, marksGiven, width) {
  const xs = [];
  const ys = [];
  for (const one of series) {
    for (const [x, y] of one.points) if (Number.isFinite(x) && Number.isFinite(y)) { xs.push(x); ys.push(y); }
    for (const [x, low, high] of one.band ?? []) {
      if (Number.isFinite(x) && Number.isFinite(low) && Number.isFinite(high)) { xs.push(x);
      ys.push(low, high); }
    }
  }
  if (!xs.length) return null;
  const [left, right] = range(xs, 0, 1);
  const [low, high] = range(ys, 0.06);
  const up = ticks(low, high, 5);
  const labels = up.map((tick) => formatTick(tick, up));
  const margin = 12 + 6.6 * Math.max(...labels.map((label) => label.length));
  const [top, bottom] = [marksGiven.length ? 16 : 8, HEIGHT - 36];
  const across = ticks(left, right, Math.max(Math.floor((width - margin) / 90), 2));
  return {
    left: margin, right: width - 14, top, bottom,
    x: (value) => margin + ((value - left) / (right - left)) * (width - 14 - margin),
    y: (value) => bottom - ((value - low) / (high - low)) * (bottom - top),
    up: up.map((tick, i) => [tick, labels[i]]),
    across: across.map((tick) => [tick, formatTick(tick, across)]),
  };
}

function range(values, room = 0, alone = 0) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === high) { const pad = alone || Math.abs(low) * 0.1 || 1; return [low - pad, high + pad]; }
  return [low - (high - low) * room, high + (high - low) * room];
}

function ticks(low, high, about) {
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.8) ?? 10 * power;
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) found.push(i * size || 0);
  return found;
}

function formatTick(value, all) {
  const size = all.length > 1 ? Math.abs(all[1] - all[0]) : Math.abs(value) || 1;
  const most = Math.max(...all.map(Math.abs));
  if (most >= 1e6 || size < 1e-4) return Math.abs(value) < size / 2 ? "0"
      : value.toExponential(1).replace("e+", "e");
  return value.toLocaleString("en", { minimumFractionDigits: decimals(size),
      maximumFractionDigits: decimals(size) });
}

const decimals = (size) => Math.min(Math.max(Math.ceil(-Math.log10(size) - 1e-9), 0), 6);

function axes(shape, spec, width) {
  const made = [];
  for (const [value, text] of shape.up) {
    made.push(svg("line", { class: "chart-grid", x1: shape.left, x2: shape.right, y1: shape.y(value),
        y2: shape.y(value) }));
    made.push(svg("text", { x: shape.left - 6, y: shape.y(value) + 4, "text-anchor": "end", text }));
  }
  for (const [value, text] of shape.across) {
    made.push(svg("text", { x: shape.x(value), y: shape.bottom + 16, "text-anchor": "middle", text }));
  }
  made.push(svg("line", { class: "chart-axis", x1: shape.left, x2: shape.right, y1: shape.bottom,
      y2: shape.bottom }));
  if (spec.x) made.push(svg("text", { class: "chart-name", x: width - 14, y: HEIGHT - 4, "text-anchor": "end",
      text: spec.x }));
  if (spec.y) made.push(svg("text", { class: "chart-name", x: 2, y: HEIGHT - 4, text: `↑ ${spec.y}` }));
  return made;
}

function marks(shape, given) {
  return given.filter((mark) => Number.isFinite(mark.x)).map((mark) => {
    const x = shape.x(mark.x);
    const flag = svg("path", { d: `M${x - 4} ${shape.top - 12}h8l-4 8z` }, svg("title", { text: mark.text }));
    return svg("g", { class: "chart-mark" }, svg("line",
        { x1: x, x2: x, y1: shape.top - 4, y2: shape.bottom }), flag);
  });
}

function curve(shape, one, name, free) {
  const made = [];
  const band = (one.band ?? []).filter((row) => row.every(Number.isFinite));
  if (band.length > 1) {
    const upper = band.map(([x, , high]) => `${shape.x(x)},${shape.y(high)}`);
    const lower = band.map(([x, low]) => `${shape.x(x)},${shape.y(low)}`).reverse();
    made.push(svg("polygon", { class: `chart-band ${name}`, points: [...upper, ...lower].join(" ") }));
  }
  let path = "";
  let pen = 0; // points since the last gap
  let start = "";
  const lonely = [];
  const end = () => { if (pen === 1) lonely.push(start); pen = 0; };
  for (const [x, y] of one.points) {
    if (!Number.isFinite(x) || !Number.isFinite(y)) { end(); continue; }
    start = `${shape.x(x).toFixed(1)} ${shape.y(y).toFixed(1)}`;
    path += `${pen ? "L" : "M"}${start}`;
    pen += 1;
  }
  end();
  made.push(svg("path", { class: `chart-line ${name}${one.faint ? " chart-faint" : ""}`,
      d: path || "M0 0" }));
  for (const spot of lonely) {
    const [cx, cy] = spot.split(" ");
    made.push(svg("circle", { class: `chart-dot ${name}`, cx, cy, r: 3 }));
  }
  if (free) made.push(...stations(shape, one.points.filter(
      (point) => point.slice(0, 2).every(Number.isFinite)), name));
  return made;
}

// Dots on a curve with an order of its own.
function stations(shape, points, name) {
  return points.map(([x, y]) => svg("circle", { class: `chart-dot ${name}`, cx: shape.x(x), cy: shape.y(y),
      r: 2.5 }));
}

// The last and the first point of each such curve by name. A name is moved to where it covers no other one;
// where
// there is no such place it is left out, and pointing at the point reads it.
function stationNames(shape, series) {
  const taken = [];
  const lines = series.map((one) => one.points.filter((point) => point.slice(0, 2).every(Number.isFinite)));
  const ends = [...lines.map((points) => points.at(-1)),
      ...lines.map((points) => points.length > 1 && points[0])];
  return ends.filter((point) => point?.[2]).flatMap((point) => {
    const text = visible(String(point[2]), 40);
    const free = placesBeside(shape, point, 6.6 * text.length).find(
        (one) => !taken.some((other) => overlap(one, other)));
    if (!free) return [];
    taken.push(free);
    return [svg("text", { x: free.x, y: free.y, "text-anchor": free.anchor, text })];
  });
}

// Where a name of this width can be written beside a point, the best place first.
function placesBeside(shape, point, wide) {
  const [x, y] = [shape.x(point[0]), shape.y(point[1])];
  const late = x > (shape.left + shape.right) / 2;
  const places = [-6, 14].flatMap((down) => [late, !late].map((end) => {
    const left = end ? x - 6 - wide : x + 6;
    return { x: end ? x - 6 : x + 6, y: y + down, anchor: end ? "end" : "start", left, right: left + wide,
        top: y + down - 10, bottom: y + down + 3 };
  }));
  return places.filter((one) => one.left >= shape.left && one.right <= shape.right + 14
      && one.top >= shape.top - 4 && one.bottom <= shape.bottom);
}

const overlap = (one, other) => one.left < other.right && other.left < one.right && one.top < other.bottom
    && other.top < one.bottom;

// The index of the point with y whose x is nearest; points are in order of x.
function nearest(points, x) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  let best = -1;
  for (let i = Math.max(low - 2, 0); i <= Math.min(low + 2, points.length - 1); i++) {
    if (points[i][1] !== null && (best < 0 || Math.abs(points[i][0] - x) < Math.abs(
        points[best][0] - x))) best = i;
  }
  return best;
}
