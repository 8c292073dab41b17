// Shared by every page that talks to a server.

import { byId, element } from "./dom.js";

export { byId, element };

// What went wrong with a request: status 0 = no answer at all.
export class Problem extends Error {
  constructor(status, message, state = null) {
    super(message);
    Object.assign(this, { status, state });
  }
  get mayPass() { // worth trying again: gone, restarted, or failing for a moment
    return this.status === 0 || this.status === 403 || this.status >= 500;
  }
}

// GET, or POST when there is a body; JSON both ways.
export async function ask(path, body = null) {
  const options = { signal: AbortSignal.timeout(15000), headers: { accept: "application/json" } };
  if (body !== null) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    options.headers["content-type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Problem(0, "The server does not respond.");
  }
  if (response.status === 403) {
    throw new Problem(403, "The server was restarted. Open the address it prints now, in this browser.");
  }
  const said = await response.json().catch(() => null);
  if (!response.ok || said === null) {
    throw new Problem(response.status, said?.error ?? "The server failed.", said?.state);
  }
  return said;
}

// Show one view of <main> and hide the others.
export function showView(id) {
  for (const view of document.querySelectorAll("main > section")) view.hidden = view.id !== id;
}

// A strip of text under the header; with a button where there is something to do.
export function notice(text, label = "", action = null) {
  const strip = byId("notice");
  strip.replaceChildren();
  strip.hidden = !text;
  if (!text) return;
  strip.append(element("span", { text }));
  if (label) strip.append(element("button", { text: label, type: "button", onclick: action }));
}

// Ask until there is an answer, and say meanwhile why there is none.
export async function askUntilAnswered(path, body = null, kept = "") {
  for (let wait = 1000; ; wait = Math.min(wait * 1.5, 8000)) {
    try {
      const said = await ask(path, body);
      notice("");
      return said;
    } catch (problem) {
      if (!(problem instanceof Problem) || !problem.mayPass) throw problem;
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, wait);
        notice(`${problem.message} ${kept}`, "Try now", () => { clearTimeout(timer); resolve(); });
      });
    }
  }
}
