// Addresses of the views: #/ · #/run/NAME/TAB?step=… · #/compare?run=…&run=…

export const TABS = ["charts", "samples", "microscope", "warnings", "about", "findings", "log"];

export function readPlace(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map(decode);
  const asked = new URLSearchParams(query);
  if (parts[0] === "run" && parts[1]) {
    return { view: "run", run: parts[1], tab: TABS.includes(parts[2]) ? parts[2] : TABS[0], asked };
  }
  if (parts[0] === "compare") return { view: "compare", asked };
  return { view: "runs", asked };
}

export function link({ view = "run", run = "", tab = "charts", asked = {} }) {
  const path = view === "run" ? `#/run/${encodeURIComponent(run)}/${tab}`
      : `#/${view === "runs" ? "" : view}`;
  const query = new URLSearchParams(asked).toString();
  return query ? `${path}?${query}` : path;
}

// Change what the address says without a new entry for the back button: a slider has many places.
export function amend(place) {
  history.replaceState(null, "", link(place));
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
