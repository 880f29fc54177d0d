"use strict";

// What every part of the page needs. Text of the model reaches the page as text nodes only, never as markup.
const page = (() => {
  const source = document.getElementById("shown");
  const shown = source ? JSON.parse(source.textContent) : null;

  const WRITTEN = { " ": "␣", "\n": "↵", "\t": "⇥" };

  /** Characters as they can be seen. `running`: as part of a text, in which spaces and line ends keep their place. */
  function visible(text, running = false) {
    return Array.from(text, (char) => {
      if (running && char === " ") return char;
      if (running && char === "\n") return "↵\n";
      if (WRITTEN[char]) return WRITTEN[char];
      if (!/[\p{C}\p{Z}]/u.test(char)) return char;
      return `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
    }).join("");
  }

  /** A token by its index in the list of shown tokens; without a text it goes by its id. */
  function token(index, running = false) {
    const text = shown.texts[index];
    if (text === null) return `#${shown.ids[index]} `;
    return text === "" ? "⟨empty⟩" : visible(text, running);
  }

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  for (const waiting of document.querySelectorAll(".scripted")) waiting.hidden = !shown;

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const isDark = () => (root.style.colorScheme ? root.style.colorScheme === "dark" : dark.matches);
  const label = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => {
    root.style.colorScheme = isDark() ? "light" : "dark";
    label();
  });
  dark.addEventListener("change", label);
  button.hidden = false;
  label();

  // On paper nothing can be unfolded; what is long and is in evidence.parquet as well stays folded.
  const folded = [];
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not([open], .stays)")) {
      details.open = true;
      folded.push(details);
    }
  });
  window.addEventListener("afterprint", () => {
    for (const details of folded.splice(0)) details.open = false;
  });

  return { shown, visible, token, element };
})();
