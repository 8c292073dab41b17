// Numbers, times and states in words; the small drawing of a curve.

import { element, formatNumber, svg, visible } from "./dom.js";

export const number = (value, digits = 4) => formatNumber(typeof value === "number" ? value : null, digits);
export const line = (text, longest = 200) => visible(String(text ?? ""), longest).replace(/\s+/g, " ");

export function ago(seconds) {
  const passed = Date.now() / 1000 - seconds;
  if (passed < 10) return "now";
  for (const [unit, name] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]) {
    if (passed >= unit) return `${Math.floor(passed / unit)} ${name} ago`;
  }
  return "now";
}

const STATES = {
  training: "A process is training it now.",
  finished: "Training is complete.",
  stopped: "It stopped early: interrupted, killed or failed.",
  stale: "A process holds it, but no step has been logged for a long time.",
};

export function stateMark(state) {
  return element("span", { className: `state ${state in STATES ? state : ""}`, text: state,
      title: STATES[state] ?? "" });
}

// A curve without axes.
export function spark(points, width = 96, height = 24) {
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", "aria-hidden": "true" });
  if (points.length < 2) return drawing;
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const place = ([x, y]) => {
    const across = 1 + ((x - left) / (right - left || 1)) * (width - 2);
    const down = height - 2 - ((y - low) / (high - low || 1)) * (height - 4);
    return `${across.toFixed(1)},${down.toFixed(1)}`;
  };
  drawing.append(svg("polyline", { points: points.map(place).join(" ") }));
  return drawing;
}

// A number from a sorted list, chosen with buttons or by typing. `picked` gets the number.
export function stepPicker(label, steps, value, picked) {
  const nearest = (wanted) => steps.reduce((best, step) =>
      (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps[0]);
  const input = element("input", { type: "number", inputMode: "numeric", min: steps[0], max: steps.at(-1),
      value, ariaLabel: label });
  const move = (by) => {
    const place = steps.indexOf(nearest(Number(input.value)));
    set(steps[Math.min(Math.max(place + by, 0), steps.length - 1)]);
  };
  const set = (step) => {
    input.value = step;
    picked(step);
  };
  input.onchange = () => set(nearest(Number(input.value) || 0));
  const button = (text, by, words) => element("button",
      { type: "button", text, ariaLabel: `${label}: ${words}`, onclick: () => move(by) });
  const node = element("span", { className: "picker" }, element("span", { className: "soft", text: label }),
      button("‹", -1, "previous"), input, button("›", 1, "next"));
  return { node, move, set };
}
