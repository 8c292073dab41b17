// One run: its head, and one tab each for charts, samples, microscope, findings, log, warnings and config;
// commands to copy.

import { ask, byId, element } from "./base.js";
import { showAbout } from "./about.js";
import { showCurves } from "./curves.js";
import { copyButton } from "./copy.js";
import { showFindings } from "./findings.js";
import { showInspect } from "./inspect.js";
import { showLog } from "./log.js";
import { link, TABS } from "./places.js";
import { showSamples } from "./samples.js";
import { showWarnings } from "./warnings.js";
import { ago, number, stateMark } from "./words.js";
import { watch } from "./watch.js";

const VIEWS = { charts: showCurves, samples: showSamples, microscope: showInspect, findings: showFindings,
    log: showLog, warnings: showWarnings, about: showAbout };
const TITLES = { charts: "Charts", samples: "Samples", microscope: "Microscope", findings: "Findings",
    log: "Log", warnings: "Warnings", about: "Config" };
const OF_PPO = ["samples", "microscope", "findings", "warnings"]; // fine-tuning has none of these
// seconds between looks; an ended run may be resumed
const PACE = { training: 2, stale: 5, stopped: 5, finished: 5 };

export function showRun(place, view) {
  const name = place.run;
  const state = element("span"), figures = element("dl", { className: "figures" }),
      why = element("p", { className: "soft small", id: "why" });
  const tabs = TABS.map((tab) => element("a", { href: link({ run: name, tab }), text: TITLES[tab] }));
  let panel = element("section", { id: "panel" });
  const copies = element("span", { className: "copies row" });
  view.append(
    element("div", { className: "row head" }, element("h1", {}, element("bdi", { text: name })), state,
        figures),
    why, copies, element("nav", { className: "tabs", ariaLabel: "Parts of the run" }, ...tabs), panel,
  );
  document.title = `${name} · Proxima`;
  const run = { name, about: null, head: null };
  let tab = place.tab, open = null, asked = place.asked;

  function drawHead(head) {
    const before = run.head;
    run.head = head;
    if (before?.state !== head.state) {
      state.replaceChildren(stateMark(head.state));
      if (before) byId("live").textContent = `The run is ${head.state}.`;
    }
    const rows = [["Step", number(head.step, 9)], ...head.last.map(
        ({ title, unit, value }) => [`${title} (${unit})`, number(value)]), ["Changed", ago(head.changed)]];
    rows.forEach(([term, value], i) => {
      const row = figures.children[i] ?? figures.appendChild(
          element("div", {}, element("dt", { text: term }), element("dd")));
      if (row.lastChild.textContent !== value) row.lastChild.textContent = value;
    });
    why.textContent = [head.stop_reason && `Ended: ${head.stop_reason}`, ...head.problems.slice(0, 3),
        head.problems.length > 3 && `and ${head.problems.length - 3} more problems`].filter(Boolean).join(
        " · ");
    why.classList.toggle("wrong", head.problems.length > 0);
    tabs[TABS.indexOf("warnings")].textContent = head.warnings ? `Warnings (${head.warnings})` : "Warnings";
  }

  async function loadAbout() {
    run.about = await ask(`/api/run?name=${encodeURIComponent(name)}`);
    drawHead(run.about);
    tabs.forEach((each, i) => (each.hidden = run.about.kind !== "ppo" && OF_PPO.includes(TABS[i])));
    const { line, resume } = run.about.command;
    const texts = JSON.stringify([line, resume]);
    if (copies.dataset.texts === texts) return; // a button that was just pressed stays
    copies.dataset.texts = texts;
    copies.replaceChildren(...[[line, "Copy command"], [resume, "Copy resume command"]].filter(
        ([text]) => text).map(([text, label]) => copyButton(text, label)));
  }

  function openTab() {
    tabs.forEach((each, i) => (each.ariaCurrent = TABS[i] === tab ? "page" : null));
    tabs[TABS.indexOf(tab)].scrollIntoView({ block: "nearest", inline: "nearest" });
    open?.stop?.();
    const fresh = element("section", { id: "panel" }); // an answer that comes late finds its own panel gone
    panel.replaceWith(fresh);
    panel = fresh;
    open = VIEWS[tab](run, panel, asked);
  }

  function gone(problem) {
    open?.stop?.();
    panel.replaceChildren(element("div", { className: "narrow", id: "gone" },
        element("h2", { text: "The run is gone" }), element("p", { text: problem.message }),
        element("a", { href: "#/", text: "All runs" })));
    state.replaceChildren();
  }

  const looking = watch(async () => {
    if (!run.about) {
      await loadAbout();
      openTab();
    }
    const metric = open.metrics?.() ?? [];
    const query = new URLSearchParams([["name", name], ...metric.map((each) => ["metric", each]),
        ["after", open.after?.() ?? -1], ["edition", open.edition?.() ?? ""]]);
    const before = run.head;
    const head = await ask(`/api/curves?${query}`);
    const grown = head.metrics !== before.metrics || head.edition !== before.edition
        || head.warnings !== before.warnings || String(head.token_steps) !== String(before.token_steps)
        || head.state !== before.state;
    if (grown) await loadAbout();
    drawHead(head);
    await open.add?.(head, metric);
    return PACE[head.state] ?? 5;
  }, gone);
  run.look = looking.now;
  return {
    stop() { looking.stop(); open?.stop?.(); },
    change(next) {
      asked = next.asked;
      if (next.tab === tab) return open?.change?.(asked);
      tab = next.tab;
      if (run.about) openTab();
      looking.now();
    },
    get keys() {
      return [
        ...TABS.filter((each, i) => !tabs[i].hidden).map(
            (each, i) => [String(i + 1), TITLES[each].toLowerCase(),
            () => (location.hash = link({ run: name, tab: each }))]),
        ...(open?.keys ?? []),
      ];
    },
  };
}
