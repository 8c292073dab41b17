// The script of a report: charts where the page has places for them, and the microscope with its pickers.

import { byId, element } from "./dom.js";
import { drawChart } from "./chart.js";
import { drawMicroscope } from "./microscope.js";
import { promptEnd } from "./turns.js";

const data = JSON.parse(byId("data").textContent);
for (const place of document.querySelectorAll("[data-chart]")) drawChart(place,
    data.charts[place.dataset.chart]);
if (byId("microscope") && data.tokens.length) openMicroscope(byId("microscope"), data.tokens);

// Samples are found again at another step by their kind and their place among that kind.
function openMicroscope(place, steps) {
  const keyed = steps.map(({ samples }) => {
    const counts = {};
    return new Map(samples.map((sample) => {
      counts[sample.kind] = (counts[sample.kind] ?? 0) + 1;
      return [`${sample.kind} ${counts[sample.kind]}`, sample];
    }));
  });
  const keys = [...new Set(keyed.flatMap((map) => [...map.keys()]))].sort(
      (a, b) => a.localeCompare(b, "en", { numeric: true }));
  const picker = (name, options, chosen) => {
    const select = element("select", {}, ...options.map(
        ([value, text]) => element("option", { value, text, selected: value === chosen })));
    select.id = `pick-${name}`;
    return select;
  };
  const label = (text, select) => element("label", {}, element("span", { text }), select);
  const named = steps.map((step, i) => [String(i), step.label]);
  const last = String(steps.length - 1);
  // another answer to the same prompt; trained samples have other prompts at other steps
  const changed = (key) => {
    const [old, now] = [keyed[0].get(key), keyed.at(-1).get(key)];
    return old && now && old.prompt === now.prompt && old.tokens.join("") !== now.tokens.join("");
  };
  const sample = picker("sample", keys.map((key) => [key, titleOf(key)]), keys.find(changed) ?? keys[0]);
  const left = picker("left", named, steps.length > 1 ? "0" : last);
  const right = picker("right", [["", "nothing"], ...named], steps.length > 1 ? last : "");
  const scope = element("div");
  place.append(element("div", { className: "pickers" }, label("Sample ", sample), label("at ", left),
      label("compared with ", right)), scope);

  function titleOf(key) {
    const found = keyed.map((map) => map.get(key)).find(Boolean);
    const kind = found.kind === "trained" ? "trained on" : found.kind;
    return `${kind} ${key.split(" ").at(-1)}: …${promptEnd(found)}`;
  }
  const chosen = () => [left, right].map((pick) => {
    const found = pick.value === "" ? null : keyed[pick.value].get(sample.value);
    return found ? { ...found, title: steps[pick.value].label } : null;
  });
  const view = drawMicroscope(scope, { samples: chosen(), column: data.column });
  for (const pick of [sample, left, right]) pick.addEventListener("change",
      () => view.update({ samples: chosen() }));
}
