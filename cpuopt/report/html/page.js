"use strict";
(() => {
  // what a mark says moves from its title to one box that follows the pointer; always as text
  const tip = document.getElementById("tip");
  for (const title of document.querySelectorAll("svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  for (const cell of document.querySelectorAll("td[title]")) {
    cell.dataset.tip = cell.title;
    cell.removeAttribute("title");
  }
  document.addEventListener("pointermove", (e) => {
    const mark = e.target instanceof Element ? e.target.closest("[data-tip]") : null;
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    const below = e.clientY + 16;
    tip.style.top = (below + tip.offsetHeight > innerHeight ? e.clientY - tip.offsetHeight - 10 : below) + "px";
  });
  document.addEventListener("scroll", () => (tip.hidden = true), true);

  const key = (row, at) => {
    const cell = row.cells[at];
    if (cell.dataset.value === "") return null;
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  for (const table of document.querySelectorAll("table.listing")) {
    table.querySelectorAll("th").forEach((th, at) => {
      th.querySelector("button").addEventListener("click", () => {
        const number = th.classList.contains("number");
        const was = th.getAttribute("aria-sort") || (number ? "ascending" : "descending");
        const sign = was === "ascending" ? -1 : 1;
        table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
        th.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => [key(row, at), row]);
        rows.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null);
          return sign * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
        });
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }
  for (const field of document.querySelectorAll("input[data-filter]")) {
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      for (const row of document.getElementById(field.dataset.filter).tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }

  // a line of a generated backward, and those that belong to it
  for (const line of document.querySelectorAll("[data-line]")) {
    const same = line.closest("section").querySelectorAll(`[data-line="${line.dataset.line}"]`);
    const mark = (on) => same.forEach((x) => x.classList.toggle("on", on));
    line.addEventListener("mouseenter", () => mark(true));
    line.addEventListener("mouseleave", () => mark(false));
  }

  // a picture or table that is wider than its place says so; on a phone most are
  const boxes = [...document.querySelectorAll(".picture, .scroll")];
  const mark = () => boxes.forEach((box) => box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1));
  addEventListener("resize", mark);
  document.addEventListener("toggle", mark, true);
  mark();

  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
