"use strict";
window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

// Curves: show the values of the step nearest to the pointer.
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
const facts = JSON.parse(document.getElementById("curves-data").textContent);
for (const svg of document.querySelectorAll("svg[data-panel]")) {
  const panel = facts[Number(svg.dataset.panel)];
  const mark = svg.querySelector(".mark");
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * panel.width;
    const wanted = panel.steps[0] + ((at - panel.left) / (panel.right - panel.left)) * panel.span;
    const step = panel.steps.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    const lines = Object.entries(panel.series)
      .map(([name, points]) => [name, points.find((point) => point[0] === step)])
      .filter(([, point]) => point !== undefined)
      .map(([name, point]) => `${name} ${Number(point[1].toPrecision(5))}`);
    const x = panel.left + (panel.span ? (step - panel.steps[0]) / panel.span : 0) * (panel.right - panel.left);
    mark.setAttribute("x1", x);
    mark.setAttribute("x2", x);
    mark.style.display = "";
    tip.textContent = [`step ${step}`, ...lines].join("\n");
    tip.style.display = "block";
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  svg.addEventListener("mouseleave", () => { tip.style.display = "none"; mark.style.display = "none"; });
}

// Tables: sort by a column at a click on its head, the largest first.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("th")];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const rows = [...table.tBodies[0].rows].sort((a, b) => key(b).localeCompare(key(a), "en", { numeric: true }));
    table.tBodies[0].append(...(down ? rows : rows.reverse()));
  }));
}
document.documentElement.dataset.ready = "true";
