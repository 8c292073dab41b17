// The settings of a run, its environment, checkpoints, and how it ended.

import { element } from "./base.js";
import { copyButton } from "./copy.js";
import { visible } from "./dom.js";
import { ago, number } from "./words.js";

export function showAbout(run, panel) {
  const { config, environment, checkpoints, results, evaluation, path, command, bundles } = run.about;
  const filter = element("input", { type: "search", placeholder: "Filter settings",
      ariaLabel: "Filter settings", autocomplete: "off" });
  const settings = table(config);
  filter.oninput = () => {
    for (const row of settings.querySelectorAll("div")) row.hidden = !row.textContent.toLowerCase().includes(
        filter.value.toLowerCase());
  };
  const saved = Object.fromEntries(checkpoints.map((one) => {
    const evaluated = one.eval_reward === null ? "not evaluated" : `evaluation ${number(one.eval_reward)}`;
    return [one.name, evaluated + (one.best ? " · best" : "")];
  }));
  const lines = { line: "Command", resume: "Resume it with" };
  const commands = Object.entries(lines).filter(([name]) => command[name]).map(([name, title]) => card(title,
    element("code", { className: "command", text: command[name] }), copyButton(command[name], "Copy"),
    element("p", { className: "soft small", text: [command.folder && `Given in ${command.folder}.`,
        command[name].includes("***") && "Keys are not written down: put them in the place of ***."].filter(
        Boolean).join(" ") })));
  const recorded = bundles.slice(-50).map(({ name, step, reason, bytes, changed, command: line,
      show: look }) =>
    element("li", {}, element("bdi", { text: visible(step === null ? name : `Step ${step}`, 200),
        title: visible(name, 200) }),
      element("span", { className: "soft small", text: `${number(bytes / 1e6, 3)} MB, ${ago(changed)}` }),
          ...(reason ? [element("bdi", { className: "small", text: visible(reason, 500) })] : []),
      element("span", { className: "row" }, copyButton(line, "Copy replay command"),
          copyButton(look, "Copy command for the microscope"))));
  const cards = [
    ...commands,
    recorded.length ? card("Recorded steps", element("ul", { className: "bundles" }, ...recorded)) : null,
    results ? card("Results", table(results)) : null,
    evaluation ? card("Evaluation", table(evaluation)) : null,
    Object.keys(saved).length ? card("Checkpoints", table(saved)) : null,
    card("Environment", table({ folder: path, ...environment })),
  ];
  panel.append(element("div", { className: "cards" },
      element("div", { className: "stack" }, ...cards.filter(Boolean)), card("Settings", filter, settings)));
  return { keys: [["/", "filter the settings", () => filter.focus()]] };
}

const card = (title, ...children) => element("section", { className: "card part" },
    element("h2", { text: title }), ...children);

function table(values) {
  const rows = flat(values).map(([name, value]) =>
      element("div", {}, element("dt", { text: visible(name, 200) }), element("dd", { text: show(value) })));
  return element("dl", { className: "pairs" }, ...rows);
}

const flat = (values, before = "") => Object.entries(values ?? {}).flatMap(([name, value]) =>
  value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
      ? flat(value, `${before}${name} · `) : [[before + name, value]]);

function show(value) {
  if (value === null || value === "") return "–";
  if (typeof value === "number") return number(value, 6);
  return visible(typeof value === "string" ? value : JSON.stringify(value), 500);
}
