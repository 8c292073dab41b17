// The comparison page. In: the page's data. Out: a table, win rates, charts and answers; text through
// textContent alone.

import { drawChart } from "./chart.js";
import { byId, element, formatNumber, visible } from "./dom.js";
import { promptEnd, showPrompt, showTurn } from "./turns.js";

const data = JSON.parse(byId("data").textContent);

function cell(value) {
  if (value === null || value === undefined) return element("td", { text: "–" });
  if (!Array.isArray(value)) return element("td", { text: typeof value === "number" ? formatNumber(value)
      : visible(value, 80) });
  const [mean, low, high] = value;
  const made = element("td", { text: formatNumber(mean) });
  if (low !== null) made.append(
      element("small", { text: ` ${formatNumber(low, 3)} to ${formatNumber(high, 3)}` }));
  return made;
}

function table(head, rows) {
  const made = element("table", {}, element("thead", {},
      element("tr", {}, ...head.map((text) => element("th", { text, scope: "col" })))));
  made.append(element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row))));
  return element("div", { className: "wide" }, made);
}

const columns = Object.entries(data.columns).filter(
    ([key]) => data.rows.some((row) => row[key] !== null && row[key] !== ""));
byId("table").append(
  table(columns.map(([, title]) => title), data.rows.map((row) => columns.map(([key]) => cell(row[key])))),
  element("p", { className: "soft",
      text: "The last numbers of each run. Runs that differ only in their seed are also shown as one row: "
    + "the mean and its 95 % interval (Student's t)." }),
  ...data.notes.map((text) => element("p", { text })),
);

for (const [judge, rows] of Object.entries(data.win_rates)) {
  const rate = (ours, theirs) => {
    const row = rows.find((one) => one.ours === ours && one.theirs === theirs);
    if (row) return [row.rate, row.low, row.high];
    const back = rows.find((one) => one.ours === theirs && one.theirs === ours);
    return back && back.rate !== null ? [1 - back.rate, 1 - back.high, 1 - back.low] : null;
  };
  const body = data.names.map((ours) => [
    element("th", { text: visible(ours, 60), scope: "row" }),
    ...data.names.map((theirs) => cell(ours === theirs ? null : rate(ours, theirs))),
  ]);
  const prompts = Math.min(...rows.map((row) => row.prompts));
  byId("wins").append(
    element("h2", { text: `Win rate of the row over the column, by ${visible(judge, 60)}` }),
    table(["", ...data.names.map((name) => visible(name, 60))], body),
    element("p", { className: "soft",
        text: `Ties count half. 95 % intervals by bootstrap over ${prompts} prompts.` }),
  );
}

for (const chart of data.charts) {
  const place = element("div", { className: "card" });
  byId("charts").append(place);
  drawChart(place, chart);
}

if (data.texts.length) byId("texts").append(element("h2", { text: "Responses to the same prompts" }));
for (const row of data.texts) {
  const answers = data.names.map((name) => element("div", {}, element("b", { text: visible(name, 60) }),
    row.turns?.length ? showTurn("assistant", answerOf(row, name)) : answerOf(row, name)));
  byId("texts").append(element("details", { open: byId("texts").childElementCount < 4 },
    element("summary", { text: row.turns?.length ? promptEnd(row, 300) : visible(row.prompt, 300) }),
    ...(row.turns?.length ? [showPrompt(row)] : []), element("div", { className: "answers" }, ...answers)));
}

function answerOf(row, name) {
  return element("p", { text: visible(row.answers[name], 1000) });
}

if (data.problems.length) {
  byId("problems").append(element("h2", { text: "Left out" }),
      ...data.problems.map((text) => element("p", { text: visible(text) })));
}
