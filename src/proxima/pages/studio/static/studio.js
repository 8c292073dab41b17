// The studio: which view the address names, and the keys. A view is a function (place, element) => { stop,
// change?, keys? }.

import { byId, element, notice } from "./base.js";
import { link, readPlace } from "./places.js";
import { showCompare } from "./compare.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";

const VIEWS = { runs: showRuns, run: showRun, compare: showCompare };
const KEYS = [
  ["g", "all runs", () => (location.hash = "#/")],
  ["c", "compare the selected runs", () => (location.hash = link({ view: "compare" }))],
  ["?", "this list", () => showKeys()],
];

let shown = null; // the view
let at = null; // where it is

function follow() {
  const place = readPlace(location.hash);
  notice("");
  const same = at?.view === place.view && at.run === place.run;
  at = place;
  if (same && shown.change) return shown.change(place);
  if (shown) {
    shown.stop();
    byId("view").focus({ preventScroll: true }); // what had the focus goes
  }
  byId("view").replaceChildren();
  shown = VIEWS[place.view](place, byId("view"));
  byId("to-runs").ariaCurrent = place.view === "runs" ? "page" : null;
  byId("to-compare").ariaCurrent = place.view === "compare" ? "page" : null;
  window.scrollTo(0, 0);
}

// --- keys ---

function keys() {
  return [...(shown?.keys ?? []), ...KEYS];
}

function showKeys() {
  const rows = keys().map(([key, words]) =>
    element("div", {}, element("dt", {}, element("kbd", { text: key })), element("dd", { text: words })));
  byId("keys-list").replaceChildren(...rows);
  byId("keys").showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || byId("keys").open) return;
  if (event.target.matches?.("input:not([type=checkbox], [type=range]), select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const found = keys().find(([key]) => key.split(" ").includes(event.key));
  if (!found) return;
  event.preventDefault();
  found[2](event.key);
});

byId("help").onclick = showKeys;
window.addEventListener("hashchange", follow);
follow();
