"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const colour = (word) => word && word.startsWith("@")
    ? getComputedStyle(document.documentElement).getPropertyValue("--" + word.slice(1)).trim() : word;

  const traces = (plot) => plot.data.map((trace) => ({
    ...trace,
    line: { ...trace.line, color: colour(trace.line.color) },
    marker: { ...trace.marker, color: colour(trace.marker.color) },
  }));

  const axis = (given, type) => ({
    ...given, type, automargin: true, gridcolor: colour("@line"), zerolinecolor: colour("@line"),
    linecolor: colour("@line"), exponentformat: "power", title: { ...given.title, standoff: 10 },
  });

  const layout = (plot, scales) => ({
    xaxis: axis(plot.layout.xaxis, scales.x),
    yaxis: axis(plot.layout.yaxis, scales.y),
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", size: 12, color: colour("@ink") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: colour("@raised"), bordercolor: colour("@line"), font: { color: colour("@ink") } },
    margin: { l: 48, r: 16, t: 34, b: 40 },
    legend: { orientation: "h", y: -0.2, yanchor: "top", x: 0, font: { size: 11 }, bgcolor: "rgba(0,0,0,0)" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("@line"), activecolor: colour("@muted") },
    hovermode: "closest", dragmode: narrow.matches ? false : "zoom", showlegend: true,
  });

  const options = {
    responsive: true, displaylogo: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };

  const scalesOf = (place) => {
    const plot = plots[Number(place.dataset.plot)];
    return {
      x: place.dataset.x || plot.layout.xaxis.type,
      y: place.dataset.y || plot.layout.yaxis.type,
    };
  };

  const draw = (place) => {
    const plot = plots[Number(place.dataset.plot)];
    place.dataset.drawn = "yes";
    return Plotly.react(place, traces(plot), layout(plot, scalesOf(place)), options);
  };

  // A long report draws only what comes near the screen.
  const places = [...document.querySelectorAll(".plot")];
  const watcher = new IntersectionObserver((seen) => {
    for (const entry of seen) {
      if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
    }
  }, { rootMargin: "600px" });
  places.forEach((place) => watcher.observe(place));
  dark.addEventListener("change", () => places.filter((place) => place.dataset.drawn).forEach(draw));

  for (const button of document.querySelectorAll("button[data-axis]")) {
    button.addEventListener("click", () => {
      const article = button.closest("article");
      const which = button.dataset.axis;
      const isLog = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isLog));
      for (const place of article.querySelectorAll(".plot")) {
        place.dataset[which] = isLog ? "log" : "linear";
        draw(place);
      }
    });
  }

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
