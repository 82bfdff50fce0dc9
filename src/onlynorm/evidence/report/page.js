"use strict";
(() => {
  const box = document.getElementById("filter-text");
  if (!box) return;
  const buttons = [...document.querySelectorAll("button[data-verdict]")];
  const statements = [...document.querySelectorAll(".statement")];
  const shown = document.getElementById("filter-count");
  let verdict = "";
  const apply = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const statement of statements) {
      const text = statement.textContent.toLowerCase();
      const fits = (!verdict || statement.dataset.verdict === verdict) && words.every((word) => text.includes(word));
      statement.hidden = !fits;
      count += fits ? 1 : 0;
    }
    for (const group of document.querySelectorAll(".statements")) {
      group.hidden = !group.querySelector(".statement:not([hidden])");
    }
    shown.textContent = `${count} of ${statements.length} shown`;
  };
  box.addEventListener("input", apply);
  for (const button of buttons) {
    button.addEventListener("click", () => {
      verdict = button.dataset.verdict;
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      apply();
    });
  }
})();
