"use strict";

// Heat maps as grids: arrow keys move, Enter or a click opens what both arms drew in a cell.
(() => {
  const { shown, token, element } = page;
  const readout = document.querySelector(".readout");
  const maps = [...document.querySelectorAll("table.heat")];
  const cellsOf = (row) => [...row.querySelectorAll("td[data-title]")];

  for (const map of maps) {
    for (const cell of map.querySelectorAll("td[title]")) {
      // Said at once on hover and focus by the line above the maps, where a title would wait and hide cells.
      cell.dataset.title = cell.title;
      cell.setAttribute("aria-label", cell.title);
      cell.removeAttribute("title");
      cell.tabIndex = -1;
    }
    map.setAttribute("role", "grid");
    const first = map.querySelector("td[data-title]");
    if (first) first.tabIndex = 0;
    map.addEventListener("keydown", (event) => move(event, map));
    for (const kind of ["mouseover", "focusin"]) map.addEventListener(kind, (event) => say(event.target));
    if (shown) map.addEventListener("click", (event) => open(event.target.closest("td[data-title]")));
  }
  if (readout && maps.length) {
    readout.hidden = false;
    readout.textContent = "Hover a cell or move to it for its numbers.";
  }

  function say(target) {
    const cell = target.closest("td[data-title]");
    if (cell) readout.textContent = cell.dataset.title;
  }

  function move(event, map) {
    const cell = event.target.closest("td[data-title]");
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      open(cell);
      return;
    }
    const rows = [...map.tBodies[0].rows];
    const [row, column] = [rows.indexOf(cell.parentElement), cellsOf(cell.parentElement).indexOf(cell)];
    const to = {
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      Home: [row, 0],
      End: [row, Infinity],
    }[event.key];
    if (!to || !rows[to[0]]) return;
    event.preventDefault();
    const choice = cellsOf(rows[to[0]]);
    const next = choice[Math.min(to[1], choice.length - 1)];
    if (next) focusCell(map, next);
  }

  function focusCell(map, cell) {
    for (const other of map.querySelectorAll('td[tabindex="0"]')) other.tabIndex = -1;
    cell.tabIndex = 0;
    cell.focus();
  }

  if (!shown) return;
  const dialog = document.getElementById("cell");
  let opened = null;

  dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
  for (const button of dialog.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => {
      const next = neighbour(Number(button.dataset.step));
      if (next) open(next);
    });
  }
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => opened && focusCell(opened.closest("table"), opened));
  window.addEventListener("resize", () => dialog.open && draw());

  for (const place of document.querySelectorAll("td[data-opens]")) {
    const [config, prompt] = [...place.parentElement.cells].map((cell) => cell.textContent);
    const target = find(place.dataset.opens, config, prompt, place.textContent);
    if (!target) continue;
    const button = element("button", { type: "button", class: "opens" }, place.textContent);
    button.setAttribute("aria-label", `Open ${prompt}, position ${place.textContent}`);
    button.addEventListener("click", () => open(target));
    place.replaceChildren(button);
  }

  function find(comparison, config, prompt, position) {
    const map = maps.find((one) => one.dataset.comparison === comparison && one.dataset.config === config);
    const row = map && [...map.tBodies[0].rows].find((one) => one.cells[0].textContent === prompt);
    return row && row.cells[1 + map.dataset.positions.split(" ").indexOf(position)];
  }

  function neighbour(step) {
    const cells = cellsOf(opened.parentElement);
    return cells[cells.indexOf(opened) + step];
  }

  /** The tokens of a cell: for each of two arms its count, share and interval. */
  function read(cell) {
    const map = cell.closest("table");
    const { config, comparison } = map.dataset;
    const prompt = cell.parentElement.cells[0].textContent;
    const position = map.dataset.positions.split(" ")[cell.cellIndex - 1];
    const found = shown.cells[config]?.[prompt]?.[position];
    if (!found) return null;
    const [tokens, counts, numOthers] = found;
    const arms = map.dataset.arms.split(" ").filter((arm) => counts[shown.arms.indexOf(arm)]);
    const labels = tokens.map((index) => token(index));
    const ids = tokens.map((index) => String(shown.ids[index]));
    if (numOthers) {
      labels.push(numOthers === 1 ? "one other token" : `${numOthers} other tokens`);
      ids.push("");
    }
    const bars = arms.flatMap((arm) => {
      const own = counts[shown.arms.indexOf(arm)];
      const total = own.reduce((sum, count) => sum + count, 0);
      return labels.map((_, row) => {
        const [low, high] = shown.intervals[total][own[row]];
        return { arm, row, count: own[row], share: own[row] / total, low, high };
      });
    });
    const seen = labels.map((_, row) => bars.some((bar) => bar.row === row && bar.count));
    const kept = labels.map((_, row) => row).filter((row) => seen[row]);
    return { config, comparison, prompt, position, arms, labels, ids, kept, bars: bars.filter((bar) => seen[bar.row]) };
  }

  function open(cell) {
    const data = cell && read(cell);
    if (!data) return;
    opened = cell;
    document.getElementById("cell-title").textContent =
      `${data.arms.join(" vs ")}: ${data.config}, ${data.prompt}, position ${data.position}`;
    dialog.querySelector(".numbers").textContent = cell.dataset.title;
    for (const button of dialog.querySelectorAll("[data-step]")) {
      button.disabled = !neighbour(Number(button.dataset.step));
    }
    dialog.querySelector("table").replaceChildren(...table(data));
    if (!dialog.open) dialog.showModal();
    draw();
  }

  function draw() {
    const data = read(opened);
    const figure = dialog.querySelector(".plot");
    const width = Math.min(720, figure.clientWidth || 320);
    const longest = Math.max(...data.kept.map((row) => Array.from(data.labels[row]).length));
    const [first, second] = data.arms;
    const place = { x: "share", y: "arm", fy: "row" };
    const of = (arm) => data.bars.filter((bar) => bar.arm === arm);
    const chart = Plot.plot({
      width,
      height: 75 + 34 * data.kept.length,
      marginBottom: 42,
      marginLeft: Math.min(0.42 * width, 16 + 7.5 * longest),
      marginRight: 12,
      style: { background: "transparent", color: "inherit", fontSize: "12px", "--plot-background": "var(--bg)" },
      x: { label: "share of the samples →", grid: true, nice: true, domain: [0, Math.max(...data.bars.map((bar) => bar.high))] },
      y: { domain: data.arms, axis: null, padding: 0.1 },
      fy: { domain: data.kept, tickFormat: (row) => data.labels[row], label: null, padding: 0.18 },
      ariaLabel: `Shares of the tokens of arms ${data.arms.join(" and ")}; the same numbers are in the table below`,
      marks: [
        Plot.barX(of(first), { ...place, fill: "var(--series-2)", stroke: "currentColor", strokeWidth: 0.6 }),
        second ? Plot.barX(of(second), { ...place, fill: "var(--series-1)", stroke: "currentColor", strokeWidth: 0.6 }) : null,
        Plot.ruleY(data.bars, { x1: "low", x2: "high", y: "arm", fy: "row", stroke: "currentColor", strokeWidth: 1.4, marker: "tick" }),
        Plot.tip(data.bars, Plot.pointer({ ...place, title: said, fill: "var(--bg)", stroke: "var(--line)" })),
      ],
    });
    chart.setAttribute("role", "img");
    const key = element("p", { class: "key" });
    data.arms.forEach((arm, index) => {
      const swatch = element("span", { class: index ? "swatch-on" : "swatch-off" });
      key.append(element("b", {}, swatch, `${arm} (${index ? "lower" : "upper"} bar)`));
    });
    key.append("lines: 95 % intervals");
    figure.replaceChildren(key, chart);
  }

  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const said = (bar) =>
    `${bar.arm}: ${bar.count} samples, ${percent(bar.share)}\n95 % interval ${percent(bar.low)} to ${percent(bar.high)}`;

  function table(data) {
    const head = ["Token", "Id", ...data.arms.flatMap((arm) => [arm, "95 % interval"])];
    if (data.arms.length > 1) head.push("Difference");
    const heads = head.map((text, index) => element("th", { scope: "col", class: index ? "n" : "" }, text));
    const rows = data.kept.map((row) => {
      const own = data.bars.filter((bar) => bar.row === row);
      const texts = own.flatMap((bar) => [`${bar.count} (${percent(bar.share)})`, `${percent(bar.low)} to ${percent(bar.high)}`]);
      if (own.length > 1) {
        const difference = 100 * (own[1].share - own[0].share);
        texts.push(`${difference < 0 ? "−" : "+"}${Math.abs(difference).toFixed(1)} pp`);
      }
      return element("tr", {},
        element("th", { scope: "row" }, element("code", {}, data.labels[row])),
        ...[data.ids[row], ...texts].map((text) => element("td", { class: "n" }, text)));
    });
    return [
      element("caption", {}, "How often each arm drew each token"),
      element("thead", {}, element("tr", {}, ...heads)),
      element("tbody", {}, ...rows),
    ];
  }
})();
