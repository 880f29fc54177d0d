"use strict";

// The first samples of a prompt, plain and speculative side by side, every token marked by where it comes from.
(() => {
  const { shown, token, visible, element } = page;
  const browser = document.getElementById("browser");
  if (!shown || !browser) return;

  const ORIGINS = { a: "accepted", r: "recovered", b: "bonus", p: "plain", u: "unknown" };
  const ARMS = { off: "plain decoding", on: "speculative decoding" };
  const config = browser.querySelector("[name=config]");
  const prompt = browser.querySelector("[name=prompt]");
  const place = browser.querySelector("output");
  let at = 0;

  const options = (select, names) => select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  options(config, Object.keys(shown.samples));
  options(prompt, Object.keys(shown.samples[config.value]));
  config.addEventListener("change", () => {
    const before = prompt.value;
    options(prompt, Object.keys(shown.samples[config.value]));
    if (before in shown.samples[config.value]) prompt.value = before;
    show();
  });
  prompt.addEventListener("change", show);
  for (const button of browser.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => {
      at += Number(button.dataset.step);
      show();
    });
  }

  function show() {
    const arms = shown.samples[config.value][prompt.value];
    const count = Math.max(...Object.values(arms).map((samples) => samples.length));
    at = Math.min(Math.max(at, 0), count - 1);
    place.textContent = `sample ${at + 1} of the first ${count}`;
    for (const button of browser.querySelectorAll("[data-step]")) {
      const to = at + Number(button.dataset.step);
      button.disabled = to < 0 || to >= count;
    }
    browser.querySelector(".texts").replaceChildren(
      ...Object.entries(arms).filter(([, samples]) => samples[at]).map(([arm, samples]) => text(arm, samples[at])));
    browser.querySelector(".prompt").replaceChildren(
      ...(shown.prompts[prompt.value] ?? []).map(([role, content]) =>
        element("p", {}, element("b", {}, `${role}: `), element("span", { class: "run" }, visible(content, true)))));
  }

  function text(arm, [seed, tokens, origins]) {
    const run = element("p", { class: "run" });
    tokens.forEach((index, position) => {
      const origin = origins[position];
      const title = `position ${position}, token ${shown.ids[index]}, ${ORIGINS[origin]}`;
      run.append(element("mark", { class: `o-${origin}`, title }, token(index, true)));
    });
    const counts = Object.entries(ORIGINS)
      .map(([letter, name]) => [origins.split(letter).length - 1, name])
      .filter(([count]) => count)
      .map(([count, name]) => `${count} ${name}`);
    return element("div", {},
      element("h3", {}, `${arm}: ${ARMS[arm]}`), run,
      element("p", { class: "soft" }, `Seed ${seed}: ${counts.join(", ")}.`));
  }

  browser.hidden = false;
  show();
})();
