// Poll while the page is in view. One request at a time; a slow or busy server is polled less often.

import { notice, Problem } from "./base.js";

// `work` returns the seconds until the next look, or null when there is nothing more to come.
export function watch(work, gone = null) {
  let timer = 0, stopped = false, running = false, due = false, again = false;

  async function look() {
    if (stopped) return;
    if (running) return void (again = true);
    if (document.hidden) return void (due = true);
    due = false;
    running = true;
    clearTimeout(timer);
    const began = performance.now();
    let wait = 5;
    try {
      wait = await work();
      if (!stopped) notice("");
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      if (stopped) return;
      if (problem.status === 404 && gone) return gone(problem);
      notice(problem.message, "Try now", look);
    } finally {
      running = false;
    }
    if (stopped || wait === null) return;
    const took = (performance.now() - began) / 1000;
    // at most a tenth of the time is spent on it
    timer = setTimeout(look, again ? 0 : 1000 * (wait < 1 ? wait : Math.max(wait, 10 * took)));
    again = false;
  }

  const seen = () => { if (!document.hidden && due) look(); };
  document.addEventListener("visibilitychange", seen);
  look();
  return {
    now: look,
    stop() {
      stopped = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    },
  };
}
