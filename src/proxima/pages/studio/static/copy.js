// A button that copies a text. Where the browser gives no clipboard (a page without encryption), the text is
// selected and copied as people do.

import { element } from "./base.js";

export function copyButton(text, label) {
  const button = element("button", { type: "button", text: label, title: text.slice(0, 2000) });
  button.onclick = async () => {
    const done = await copy(text);
    button.textContent = done ? "Copied" : "Cannot copy: see Config";
    setTimeout(() => (button.textContent = label), 1500);
  };
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
