// The token microscope. In: one sample with its columns, or two. Out: the text, each token coloured by one
// column, all its
// numbers at the pointer or the focus.
//
// drawMicroscope(place, { samples: [left, right?], column, columns }) -> { update(spec) }
// A sample is as on disk; `title` says above it which it is. Both sides share one scale of colours.

import { element, formatNumber, visible } from "./dom.js";
import { showPrompt, showTurn } from "./turns.js";

// Each column in a sentence; kind says how it is coloured: signed about `centre`, or from 0 on.
export const COLUMNS = {
  advantage: { name: "advantage", kind: "signed", text: "How much better this token was than expected: "
    + "blue tokens become more likely, orange ones less likely." },
  kl: { name: "KL", kind: "signed",
      text: "Log-probability minus the reference's: training made blue tokens more likely than before." },
  reward: { name: "reward", kind: "signed",
      text: "Reward at this token: the KL penalty at every token, and the score at the last one." },
  value: { name: "value", kind: "signed",
      text: "The return that the value model predicts before this token is written." },
  td_error: { name: "TD error", kind: "signed",
      text: "TD error: reward plus discounted next value, minus the value here." },
  return: { name: "return", kind: "signed",
      text: "The return from this token on: the target of the value model." },
  logprob: { name: "log-probability", kind: "size",
      text: "Log-probability under the policy: the darker, the less likely." },
  logprob_ref: { name: "reference's log-probability", kind: "size",
      text: "Log-probability under the reference, the model before training." },
  ratio: { name: "ratio", kind: "signed", centre: 1,
      text: "Probability after the update over the probability before it: above 1 is now more likely." },
  clipped: { name: "clipped", kind: "size", text: "1 where clipping stopped the update of this token." },
};

export function drawMicroscope(place, given) {
  let spec = given;
  let column = given.column;
  const picker = element("select");
  const say = element("span", { className: "scope-say" });
  const scale = element("div", { className: "scope-scale" });
  const label = element("label", {}, element("span", { text: "Colour by " }), picker);
  const hint = element("span", { className: "scope-hint", text: "Point at a token, or use the arrow keys." });
  const bar = element("div", { className: "scope-bar" }, label, scale, say, hint);
  const sides = element("div", { className: "scope-sides" });
  place.replaceChildren(element("div", { className: "scope" }, bar, sides));
  let drawn = []; // a side: { sample, spans, facts }
  const meaning = (name) => spec.columns?.[name] ?? COLUMNS[name] ?? { name, kind: "signed", text: "" };

  picker.addEventListener("change", () => {
    column = picker.value;
    paint();
    for (const cell of sides.querySelectorAll("[data-column]")) cell.classList.toggle("scope-chosen",
        cell.dataset.column === column);
  });

  function draw() {
    const samples = spec.samples.filter(Boolean);
    const known = Object.keys(spec.columns ?? COLUMNS);
    const there = new Set(samples.flatMap((sample) => Object.keys(sample.columns)));
    const names = [...known.filter((name) => there.has(name)),
        ...[...there].filter((name) => !known.includes(name))];
    if (!there.has(column)) column = names[0];
    picker.replaceChildren(...names.map((name) => element("option",
        { value: name, text: meaning(name).name, selected: name === column })));
    bar.hidden = !names.length;
    drawn = samples.map(side);
    sides.replaceChildren(...drawn.map((one) => one.panel));
    sides.classList.toggle("scope-two", samples.length > 1);
    if (!samples.length) sides.append(element("p",
        { className: "soft", text: "No sample was logged here." }));
    paint();
    show(strongest());
  }

  // The token of the first side that the chosen column marks most; null if there is none.
  function strongest() {
    const { centre = 0 } = meaning(column);
    let best = null;
    const size = (index) => Math.abs((drawn[0].sample.columns[column]?.[index] ?? centre) - centre);
    drawn[0]?.spans.forEach((_, index) => { if (best === null || size(index) > size(best)) best = index; });
    return best;
  }

  function side(sample, number) {
    const text = element("div", { className: "scope-text", tabIndex: -1 });
    const spans = sample.tokens.map((token, index) => {
      const span = element("span", { className: "scope-token", tabIndex: index ? -1 : 0,
          text: visible(token) || "◌" });
      span.dataset.index = index;
      if (isRead(sample, index)) span.classList.add("scope-read");
      return span;
    });
    text.append(...inTurns(sample, spans));
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", "Tokens; arrow keys move between them");
    text.addEventListener("pointerover", (event) => at(event, (index) => show(index, number)));
    text.addEventListener("focusin", (event) => at(event, (index) => show(index, number)));
    text.addEventListener("pointerdown", (event) => at(event, (index) => focus(spans, index)));
    text.addEventListener("keydown", (event) => step(event, spans));
    const facts = element("div", { className: "scope-facts" });
    facts.setAttribute("aria-live", "polite");
    const heading = element("p", { className: "scope-title" },
        element("b", { text: sample.title ?? sample.kind ?? "" }));
    const parts = Object.entries(sample.rewards ?? {});
    for (const [name, value] of [["reward", sample.reward], ...(parts.length > 1 ? parts : [])]) {
      heading.append(element("span", { text: ` ${visible(name, 80)} ${formatNumber(value)}` }));
    }
    if (sample.ended === false) heading.append(element("span",
        { text: sample.observed.length ? " truncated at a limit of the episode"
        : " truncated at max_new_tokens" }));
    const prompt = element("details", { className: "scope-prompt" },
      element("summary", { text: "Prompt" }), ...(sample.turns?.length ? [showPrompt(sample)] : []));
    const raw = element("div", { text: visible(sample.prompt ?? "", 4000) });
    prompt.append(sample.turns?.length ? element("details", {},
        element("summary", { text: "As the model reads it" }), raw) : raw);
    const answer = sample.turns?.length && !spans.some((_, index) => isRead(sample, index))
        ? showTurn("assistant", text) : text;
    const panel = element("section", { className: "scope-side" }, heading, prompt, answer, facts);
    return { sample, spans, facts, panel };
  }

  // Colours of the chosen column and their legend.
  function paint() {
    const { kind, centre = 0, text } = meaning(column);
    const values = drawn.flatMap(({ sample }) => sample.columns[column] ?? []).filter(
        (value) => value !== null);
    const most = Math.max(...values.map((value) => Math.abs(value - centre)), 0) || 1;
    say.textContent = text;
    for (const { sample, spans } of drawn) {
      const numbers = sample.columns[column] ?? [];
      spans.forEach((span, index) => {
        const value = numbers[index] ?? null;
        const strength = value === null ? 0 : (Math.abs(value - centre) / most) * 0.7;
        const hue = kind === "signed" && value < centre ? "--minus" : "--plus";
        span.style.backgroundColor = strength ? `rgb(var(${hue}) / ${strength.toFixed(3)})` : "";
      });
    }
    const low = kind === "signed" ? centre - most : 0;
    const end = kind === "size" && values.some((value) => value < 0) ? -most : centre + most;
    scale.replaceChildren(element("span", { text: formatNumber(low, 3) }),
        element("i", { className: `scope-${kind}` }),
      element("span", { text: formatNumber(end, 3) }));
  }

  // All numbers of a token, and of the token in the same place on the other side.
  function show(index, number = 0) {
    drawn.forEach(({ sample, spans, facts }, which) => {
      for (const span of spans) span.classList.toggle("scope-at", Number(span.dataset.index) === index);
      if (index === null || index >= spans.length) {
        facts.replaceChildren(element("p", { className: "soft",
            text: index === null ? "No tokens." : `Only ${spans.length} tokens.` }));
        return;
      }
      const name = element("p", { className: "scope-name" },
        element("code", { text: visible(JSON.stringify(sample.tokens[index]), 80) }),
        element("span", { text: ` token ${index + 1} of ${spans.length}`
            + (sample.ids ? ` · id ${sample.ids[index]}` : "")
            + (isRead(sample, index) ? " · read, not chosen" : "") }));
      const list = element("dl", {}, ...Object.entries(sample.columns).map(([key, values]) => {
        const cell = element("div", { className: key === column ? "scope-chosen" : "",
            title: meaning(key).text },
          element("dt", { text: meaning(key).name }),
              element("dd", { text: formatNumber(values[index], 6) }));
        cell.dataset.column = key;
        cell.dataset.value = values[index];
        return cell;
      }));
      facts.replaceChildren(name, list);
      facts.classList.toggle("scope-other", which !== number);
    });
  }

  draw();
  return {
    update(next) {
      spec = next;
      if (next.column) column = next.column;
      draw();
    },
  };
}

function at(event, act) {
  const index = event.target.dataset?.index;
  if (index !== undefined) act(Number(index));
}

// Whether a token was read and not chosen: an environment wrote it.
const isRead = (sample, index) => sample.observed.includes(index);

// Tokens as they are, or, where some were read, as the turns of an episode.
function inTurns(sample, spans) {
  if (!spans.some((_, index) => isRead(sample, index))) return spans;
  const turns = [];
  spans.forEach((span, index) => {
    const read = isRead(sample, index);
    if (!index || read !== isRead(sample, index - 1)) turns.push(
        { role: read ? "environment" : "assistant", spans: [] });
    turns.at(-1).spans.push(span);
  });
  return turns.map((turn) => showTurn(turn.role, element("div", {}, ...turn.spans)));
}

function focus(spans, index) {
  for (const span of spans) span.tabIndex = -1;
  spans[index].tabIndex = 0;
  spans[index].focus();
}

function step(event, spans) {
  const now = spans.indexOf(document.activeElement);
  if (now < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
  const to = {
    ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: spans.length - 1,
    ArrowDown: line(spans, now, 1), ArrowUp: line(spans, now, -1),
  }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  focus(spans, Math.min(Math.max(to, 0), spans.length - 1));
}

// The token nearest above or below.
function line(spans, now, way) {
  const here = spans[now];
  let best = now;
  for (let i = now + way; i >= 0 && i < spans.length; i += way) {
    const [top, left] = [spans[i].offsetTop, spans[i].offsetLeft];
    if (top === here.offsetTop) continue;
    if (best !== now && top !== spans[best].offsetTop) break;
    if (best === now || Math.abs(left - here.offsetLeft) < Math.abs(
        spans[best].offsetLeft - here.offsetLeft)) best = i;
  }
  return best;
}
