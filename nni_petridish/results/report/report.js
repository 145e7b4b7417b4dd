"use strict";
// Chooses the model that is shown, marks it and its lineage in all pictures, sorts the table, and, where the
// page is served, replaces its content when the search has moved on. Without this script all models are shown.
(() => {
  const root = document.documentElement;
  const main = () => document.querySelector("main");
  const all = (selector) => [...main().querySelectorAll(selector)];
  const models = () => all(".model").map((model) => model.id);
  let chosen = null;

  function lineage(id) {
    const found = new Set();
    const parents = new Map(all(".chart [data-model]").map((dot) => [dot.dataset.model, dot.dataset.parent]));
    for (let at = id; at && !found.has(at); at = parents.get(at)) found.add(at);
    return found;
  }

  function choose(id, remember = true) {
    if (!models().includes(id)) return false;
    chosen = id;
    const kin = lineage(id);
    for (const model of all(".model")) model.classList.toggle("chosen", model.id === id);
    for (const mark of all("[data-model]")) mark.classList.toggle("chosen", mark.dataset.model === id);
    for (const line of all("[data-child]")) line.classList.toggle("lit", kin.has(line.dataset.child));
    const select = main().querySelector(".steps select");
    if (select) select.value = id;
    if (remember) {
      try { history.replaceState(null, "", "#" + id); } catch { /* a page inside of another has no address */ }
    }
    return true;
  }

  function step(by) {
    const ids = models();
    choose(ids[(ids.indexOf(chosen) + by + ids.length) % ids.length]);
  }

  function button(text, label, action) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.ariaLabel = label;
    made.onclick = action;
    return made;
  }

  function addSteps() {
    const nav = main().querySelector(".steps");
    if (!nav || models().length < 2) return;
    const select = document.createElement("select");
    select.ariaLabel = "Model";
    for (const id of models()) select.add(new Option(id, id));
    select.onchange = () => choose(select.value);
    nav.append(button("←", "Previous model", () => step(-1)), select, button("→", "Next model", () => step(1)));
  }

  function sortBy(table, column, header) {
    const down = header.ariaSort === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.ariaSort = down ? "descending" : "ascending";
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const number = (row) => { const n = parseFloat(value(row)); return Number.isNaN(n) ? Infinity : n; };
    const order = table.tBodies[0].rows[0]?.cells[column].dataset.value === undefined
      ? (a, b) => value(a).localeCompare(value(b)) : (a, b) => (number(a) > number(b)) - (number(a) < number(b));
    const rows = [...table.tBodies[0].rows].sort(order);
    table.tBodies[0].append(...(down ? rows.reverse() : rows));
  }

  function makeSortable(table) {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const made = button(header.textContent, "Sort by " + header.textContent, () => sortBy(table, column, header));
      header.replaceChildren(made);
    });
  }

  // One tip for all points. The browser's own would come late, and twice.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function showTip(dot) {
    for (const other of all(".near")) other.classList.remove("near");
    tip.hidden = !dot;
    if (!dot) return;
    dot.classList.add("near");
    tip.textContent = dot.ariaLabel;
    const at = dot.getBoundingClientRect(), width = tip.offsetWidth, height = tip.offsetHeight;
    const left = Math.min(Math.max(8, at.x + at.width / 2 - width / 2), root.clientWidth - width - 8);
    tip.style.left = left + "px";
    tip.style.top = (at.y > height + 16 ? at.y - height - 8 : at.bottom + 8) + "px";
  }

  // The nearest point counts: fingers are wider than points.
  function nearest(svg, event, reach = 26) {
    let found = null;
    for (const dot of svg.querySelectorAll("[data-model]")) {
      const at = dot.getBoundingClientRect();
      const away = Math.hypot(event.clientX - at.x - at.width / 2, event.clientY - at.y - at.height / 2);
      if (away < reach) [found, reach] = [dot, away];
    }
    return found;
  }

  function makeAlive(svg) {
    for (const dot of svg.querySelectorAll("[data-model]")) {
      const title = dot.querySelector("title");
      dot.ariaLabel = title.textContent;
      title.remove();
      dot.tabIndex = 0;
      dot.role = "button";
      dot.onfocus = () => showTip(dot);
      dot.onblur = () => showTip(null);
      dot.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(dot.dataset.model); } };
    }
    svg.onpointermove = (event) => { if (event.pointerType === "mouse") showTip(nearest(svg, event)); };
    svg.onpointerleave = () => showTip(null);
    svg.onclick = (event) => { const dot = nearest(svg, event); if (dot) choose(dot.dataset.model); };
  }

  function start() {
    addSteps();
    for (const svg of all("svg")) if (svg.querySelector("[data-model]")) makeAlive(svg);
    for (const row of all("tr[data-model]")) {
      row.onclick = (event) => {
        if (choose(row.dataset.model) && !event.target.closest("a")) main().querySelector("#models").scrollIntoView({ behavior: "smooth" });
      };
    }
    for (const table of all("table.models")) makeSortable(table);
    choose(chosen, false) || choose(location.hash.slice(1), false) || choose(main().dataset.best, false) || choose(models()[0], false);
  }

  async function refresh() {
    let seen = true;
    try {
      const { version } = await (await fetch("state.json", { cache: "no-store" })).json();
      if (version !== main().dataset.version) {
        const page = await (await fetch("./", { cache: "no-store" })).text();
        const next = new DOMParser().parseFromString(page, "text/html").querySelector("main");
        const open = all("details").map((details) => details.open);
        showTip(null);
        main().replaceWith(next);
        all("details").forEach((details, i) => { details.open = open[i] ?? false; });
        start();
      }
    } catch { seen = false; }
    const sign = main().querySelector(".live");
    sign.classList.toggle("lost", !seen);
    sign.textContent = seen ? "live" : "connection lost";
    setTimeout(refresh, 2000);
  }

  root.classList.add("js");
  window.addEventListener("hashchange", () => choose(location.hash.slice(1), false));
  start();
  if (main().dataset.version) refresh();
})();
