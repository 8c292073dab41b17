// The runs chosen for a comparison; kept in the tab.

const NAME = "chosen runs";

export function chosen() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(NAME) ?? "[]");
    return Array.isArray(kept) ? kept.filter((one) => typeof one === "string") : [];
  } catch {
    return [];
  }
}

export function choose(names) {
  sessionStorage.setItem(NAME, JSON.stringify(names));
}

export function toggle(name) {
  const now = chosen();
  choose(now.includes(name) ? now.filter((one) => one !== name) : [...now, name]);
}
