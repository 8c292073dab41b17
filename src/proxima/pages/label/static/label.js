// The labelling page: one item at a time. Every answer names its item; it is kept in the tab until the server
// has it.

import { ask, askUntilAnswered, byId, element, notice, Problem, showView } from "./base.js";
import { showPrompt, showTurn } from "./turns.js";

const WORDS = ["very bad", "bad", "fair", "good", "very good"];
const CHOICES = {
  pairs: [["1", "First"], ["tie", "Tie", "t"], ["2", "Second"]],
  ratings: WORDS.map((word, i) => [String(i + 1), word]),
};
const EXTRA = [["skip", "Skip", "s"], ["undo", "Undo", "u"]];
// milliseconds for which a new item takes no answer: the second press of a double press is none
const PAUSE = 250;

let state = null; // what the server said last
let busy = false; // something is on its way
let shownAt = 0; // when the item came up
let seen = 0; // milliseconds it was in view before the tab was last hidden

const me = () => sessionStorage.getItem("annotator");
const keep = (name, value) => (value === null ? sessionStorage.removeItem(name)
    : sessionStorage.setItem(name, value));

// a note outlives a reload, and comes back with its item after undo
const draft = () => `note ${state.annotator} ${state.item.id}`;

// --- requests ---

async function send(path, body) {
  if (busy) return;
  busy = true;
  markBusy();
  keep("pending", JSON.stringify({ path, body }));
  try {
    const said = await askUntilAnswered(path, body,
        "Your answer is kept in this tab and sent again automatically.");
    await show(said);
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    if (problem.state) await show(problem.state);
    notice(problem.message, "Close", () => notice(""));
  } finally {
    keep("pending", null);
    busy = false;
    markBusy();
  }
}

async function load() {
  const pending = JSON.parse(sessionStorage.getItem("pending") ?? "null");
  if (pending) await send(pending.path, pending.body);
  if (pending && state) return;
  try {
    await show(await askUntilAnswered(`/api/state?annotator=${encodeURIComponent(me())}`));
  } catch (problem) {
    askName();
    notice(problem.message);
  }
}

function answer(choice) {
  const early = performance.now() - shownAt < PAUSE;
  if (busy || early || !state?.item || byId("view-item").hidden) return;
  const seconds = Math.round(seen + performance.now() - shownAt) / 1000;
  document.querySelector(`[data-choice="${choice}"]`)?.classList.add("pressed");
  send("/api/answer", { annotator: me(), item: state.item.id, choice, seconds, note: byId("note").value });
}

function undo() {
  if (state?.last && !busy) send("/api/undo", { annotator: me(), answer: state.last });
}

// --- views ---

async function askName() {
  state = null;
  keep("annotator", null);
  byId("tools").hidden = byId("progress").hidden = true;
  showView("view-name");
  byId("name").focus();
  const said = await askUntilAnswered("/api/annotators");
  tellInstructions(said.instructions);
  byId("names").replaceChildren(...said.annotators.map((value) => element("option", { value })));
  byId("intro").textContent = said.mode === "pairs"
    ? "You will see a prompt and two completions. Say which one is better. "
      + "Keys: 1, 2, t for a tie, s to skip, u to undo."
    : "You will see a prompt and a completion. Rate it from 1 (very bad) to 5 (very good). "
      + "Keys: 1 to 5, s to skip, u to undo.";
}

// The project's own words: shown as text before the first item, and again with a key.
function tellInstructions(text) {
  for (const id of ["instructions", "intro-instructions"]) byId(id).textContent = text;
  byId("instruct").hidden = byId("intro-instructions").hidden = !text;
}

async function show(next) {
  const summary = next.item ? null : await askUntilAnswered("/api/summary");
  const before = state;
  state = next;
  byId("tools").hidden = byId("progress").hidden = false;
  byId("switch").textContent = `${next.annotator} · switch`;
  byId("bar").max = Math.max(next.total, 1);
  byId("bar").value = next.done;
  byId("count").textContent = `${next.done} of ${next.total}`;
  if (summary) return showSummary(summary);
  const fresh = byId("view-item").hidden;
  showItem(next);
  if (fresh) byId("question").focus();
  const verb = !before ? "" : next.done < before.done ? "Undone. " : next.done > before.done ? "Saved. " : "";
  byId("live").textContent = `${verb}Item ${next.done + 1} of ${next.total}.`;
}

function showItem({ mode, item }) {
  showView("view-item");
  const pairs = mode === "pairs";
  byId("question").textContent = pairs ? "Which completion is better?" : "How good is this completion?";
  const plain = (text) => text;
  byId("prompt").replaceChildren(...(item.turns.length ? [showPrompt(item, plain)] : [item.prompt]));
  // what is said last is answered
  byId("prompt").scrollTop = item.turns.length ? byId("prompt").scrollHeight : 0;
  byId("sides").className = pairs ? "sides" : "sides one";
  byId("sides").replaceChildren(...item.sides.map(
      (side, i) => pane(side, pairs ? ["First", "Second"][i] : "Completion", item.turns.length > 0)));
  if (byId("choices").dataset.mode !== mode) makeButtons(mode);
  markBusy();
  for (const pressed of document.querySelectorAll(".pressed")) pressed.classList.remove("pressed");
  byId("view-item").dataset.item = item.id;
  if (byId("note").dataset.draft !== draft()) byId("note").value = sessionStorage.getItem(draft()) ?? "";
  byId("note").dataset.draft = draft();
  if (document.activeElement === byId("note")) byId("note").blur(); // the next key answers
  seen = 0;
  shownAt = performance.now();
}

function pane(side, title, answers) {
  // the space after the prompt
  const text = element("div", { className: "text", dir: "auto", text: side.text.replace(/^ /, "") });
  if (!side.text) text.append(element("em", { className: "soft", text: "(empty)" }));
  const mark = side.ended
    ? element("p", { className: "mark", text: "finished" })
    : element("p", { className: "mark cut", text: "cut off here" });
  const scroll = element("div", { className: "pane", tabIndex: 0 },
      answers ? showTurn("assistant", text) : text, mark);
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", title);
  return element("article", { className: "card side" }, element("h2", { text: title }), scroll);
}

function makeButtons(mode) {
  const make = ([choice, label, key], className) => {
    const made = element("button", { type: "button", className }, element("kbd", { text: key ?? choice }),
        element("span", { text: label }));
    made.dataset.choice = choice;
    made.onclick = () => (choice === "undo" ? undo() : answer(choice));
    return made;
  };
  byId("choices").className = `choices ${mode}`;
  byId("choices").dataset.mode = mode;
  byId("choices").replaceChildren(...CHOICES[mode].map((one) => make(one, "big")),
      ...EXTRA.map((one) => make(one, "quiet")));
}

function markBusy() {
  for (const button of byId("choices").children) button.setAttribute("aria-disabled", String(busy));
  for (const button of document.querySelectorAll('[data-choice="undo"], #undo-done')) {
    button.setAttribute("aria-disabled", String(busy || !state?.last));
  }
}

// --- agreement ---

const number = (value) => (value === null ? "not defined" : value.toFixed(2));

let following = 0; // while agreement is shown, it follows the answers of others

async function followAgreement() {
  clearTimeout(following);
  following = setTimeout(async () => {
    if (byId("view-summary").hidden) return;
    try {
      if (!document.hidden) drawFigures(await ask("/api/summary"));
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem; // the next look may do
    }
    followAgreement();
  }, 3000);
}

function showSummary(said) {
  const left = state.total - state.done;
  showView("view-summary");
  byId("summary-title").textContent = left ? "Agreement so far" : `All done. Thank you, ${state.annotator}.`;
  byId("summary-text").textContent = left
    ? `You have answered ${state.done} items; ${left} are left for you.`
    : `You have answered all ${state.done} items that were for you.`;
  drawFigures(said);
  const target = said.mode === "pairs" ? "preferences.jsonl" : "ratings.jsonl";
  const words = ["proxima label", `--db ${said.db}`, `--export ${target}`];
  byId("command").replaceChildren(...words.flatMap(
      (text) => [element("span", { className: "nowrap", text }), " "]));
  byId("go-on").textContent = left ? "Go on labelling" : "Look for new items";
  markBusy();
  byId("summary-title").focus();
  byId("live").textContent = byId("summary-title").textContent;
  followAgreement();
}

function drawFigures(said) {
  const people = Object.keys(said.annotators).length;
  const rows = [
    ["Answers", `${said.answers} to ${said.items} items`],
    ["Annotators", String(people)],
    ["Items answered by two or more", String(said.shared)],
  ];
  if (said.shared) {
    rows.push(["Raw agreement", number(said.raw)]);
    if (said.kappa !== null) rows.push(["Cohen’s kappa", number(said.kappa)]);
    rows.push([`Krippendorff’s alpha (${said.metric})`, number(said.alpha)]);
  }
  byId("figures").replaceChildren(...rows.map(([term, value]) =>
      element("div", {}, element("dt", { text: term }), element("dd", { text: value }))));
  byId("agreement").textContent = agreement(said);
  drawPeople(said);
}

// One row per annotator: how many items they answered.
function drawPeople({ annotators }) {
  byId("people").hidden = !Object.keys(annotators).length;
  const row = ([name, count]) => element("tr", {},
      element("th", { scope: "row" }, element("bdi", { text: name })),
      element("td", { text: String(count) }));
  const heads = ["Annotator", "Answers"].map((text) => element("th", { scope: "col", text }));
  byId("people").replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...heads)),
      element("tbody", {}, ...Object.entries(annotators).map(row))));
}

function agreement({ shared, alpha }) {
  if (!shared) {
    return "Agreement is measured once two people have answered the same items; "
      + "the last few answers may not count yet.";
  }
  if (alpha === null) return "Everyone gave one and the same answer, so "
    + "agreement beyond chance cannot be measured.";
  if (alpha >= 0.8) return "Alpha of 0.8 and above: the answers are reliable.";
  if (alpha >= 0.667) return "Alpha between 0.67 and 0.8: usable, with care.";
  return "Alpha below 0.67: people judge differently. "
    + "Write down clearer rules, or collect several answers per item.";
}

// --- keys ---

// digits and letters by what they mean, or by place on keyboards that have others there
function keyOf(event) {
  if (/^[a-z1-5]$/i.test(event.key)) return event.key.toLowerCase();
  return event.code.replace(/^(Key|Digit|Numpad)/, "").toLowerCase();
}

function showKeys() {
  const mode = state?.mode ?? "pairs";
  const rows = [...CHOICES[mode], ...EXTRA].map(([choice, label, key]) =>
      [key ?? choice, label.toLowerCase()]);
  rows.push(["n", "write a note; Enter or Escape leaves it"]);
  if (!byId("instruct").hidden) rows.push(["i", "instructions"]);
  rows.push(["Tab, arrows", "move to a text and scroll it"], ["?", "this list"]);
  byId("keys-list").replaceChildren(...rows.map(([key, words]) =>
      element("div", {}, element("dt", {}, element("kbd", { text: key })), element("dd", { text: words }))));
  byId("keys").showModal();
}

document.addEventListener("keydown", (event) => {
  if (byId("keys").open || byId("told").open) return;
  if (event.target === byId("note") && ["Enter", "Escape"].includes(event.key)) return event.target.blur();
  // a held Enter is one press
  if (event.repeat && event.target instanceof HTMLButtonElement) event.preventDefault();
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey
      || event.target instanceof HTMLInputElement) return;
  if (event.key === "?") return showKeys();
  const key = keyOf(event);
  if (key === "n" && !byId("view-item").hidden) {
    event.preventDefault(); // it opens the note, and is not part of it
    return byId("note").focus();
  }
  if (key === "i" && !byId("instruct").hidden) return byId("told").showModal();
  if (key === "u" && (!byId("view-item").hidden || !byId("view-summary").hidden)) return undo();
  const button = [...byId("choices").children].find((one) => one.querySelector("kbd").textContent === key);
  if (button && !byId("view-item").hidden) answer(button.dataset.choice);
});

document.addEventListener("visibilitychange", () => { // time in another tab is not time spent on the item
  if (document.hidden) seen += performance.now() - shownAt;
  else shownAt = performance.now();
});

byId("name-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const said = await ask(`/api/state?annotator=${encodeURIComponent(byId("name").value)}`);
    notice("");
    keep("annotator", said.annotator);
    byId("name").value = "";
    await show(said);
  } catch (problem) {
    notice(problem.message);
  }
});
byId("note").oninput = () => keep(draft(), byId("note").value || null);
byId("switch").onclick = () => { if (!busy) askName(); };
byId("help").onclick = showKeys;
byId("instruct").onclick = () => byId("told").showModal();
byId("see-agreement").onclick = async () => { if (!busy) showSummary(await askUntilAnswered("/api/summary"));
};
byId("undo-done").onclick = undo;
byId("go-on").onclick = () => load();

byId("places").hidden = location.pathname !== "/label"; // inside the studio

if (me()) {
  load();
  askUntilAnswered("/api/annotators").then((said) => tellInstructions(said.instructions));
} else askName();
