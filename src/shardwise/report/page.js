"use strict";
(() => {
  const root = document.documentElement;
  const remember = (key, value) => { try { localStorage.setItem(key, value); } catch { /* A page from a file may not be allowed to. */ } };
  const recall = (key) => { try { return localStorage.getItem(key); } catch { return null; } };

  function setTheme(theme) {
    root.dataset.theme = theme;
    remember("shardwise-theme", theme);
    document.querySelector("button.theme").setAttribute("aria-pressed", String(theme === "dark"));
  }

  // Each series of a figure is shown while its box is ticked.
  function onToggle(box) {
    for (const mark of box.closest("figure").querySelectorAll("[data-series]"))
      if (mark.dataset.series === box.value) mark.classList.toggle("hidden", !box.checked);
  }

  // Of the panels with one name, the chosen one is shown.
  function onTab(box) {
    for (const tab of box.closest(".tabbed").querySelectorAll(":scope > .tab"))
      tab.classList.toggle("hidden", tab.dataset.tab !== box.value);
  }

  function onSort(button) {
    const head = button.closest("th"), table = head.closest("table"), at = [...head.parentNode.children].indexOf(head);
    const isUp = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
    const key = (row) => { const cell = row.children[at]; return cell.dataset.value ?? cell.textContent; };
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)], [p, q] = [Number(x), Number(y)];
      return x !== "" && y !== "" && !Number.isNaN(p) && !Number.isNaN(q) ? p - q : x.localeCompare(y);
    };
    const rows = [...table.tBodies[0].rows].sort((a, b) => (isUp ? compare(a, b) : compare(b, a)));
    table.tBodies[0].append(...rows);
  }

  document.addEventListener("change", (event) => {
    const box = event.target;
    if (box.matches(".legend input")) onToggle(box);
    if (box.matches(".tabs input")) onTab(box);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button === null) return;
    if (button.matches("th button")) onSort(button);
    if (button.matches(".theme")) {
      const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      setTheme(isDark ? "light" : "dark");
    }
  });
  if (recall("shardwise-theme")) setTheme(recall("shardwise-theme"));

  // A live page asks for its body again; what was chosen stays chosen.
  const main = document.querySelector("main");
  const seconds = Number(main.dataset.live || 0);
  let version = main.dataset.version;
  async function refresh() {
    const note = document.querySelector(".live");
    try {
      const answer = await fetch(`${location.pathname}body`, { cache: "no-store", headers: { "If-None-Match": version } });
      if (answer.status === 200) {
        version = answer.headers.get("ETag");
        const off = [...main.querySelectorAll(".legend input:not(:checked)")].map((box) => box.id);
        const tabs = [...main.querySelectorAll(".tabs input:checked")].map((box) => box.id);
        const open = [...main.querySelectorAll("details")].map((each) => each.open);
        main.innerHTML = await answer.text();
        for (const id of tabs) { const box = document.getElementById(id); if (box) { box.checked = true; onTab(box); } }
        for (const id of off) { const box = document.getElementById(id); if (box) { box.checked = false; onToggle(box); } }
        [...main.querySelectorAll("details")].forEach((each, at) => { if (at < open.length) each.open = open[at]; });
      }
      note.textContent = `live, last looked at ${new Date().toLocaleTimeString()}`;
    } catch {
      note.textContent = "The run's server does not answer any more; this is the last that it has told.";
    }
  }
  if (seconds > 0) setInterval(refresh, seconds * 1000);
})();
