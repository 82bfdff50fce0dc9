// Draws formulas. MathJax is loaded only on pages that have some, from the file beside this one.
const beside = new URL(".", document.currentScript.src);

window.MathJax = {
  loader: { paths: { mathjax: beside.href.replace(/\/$/, "") } },
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]], processEscapes: true },
  svg: { fontCache: "global" },
  options: { ignoreHtmlClass: ".*", processHtmlClass: "arithmatex", enableMenu: false },
};

if (document.querySelector(".arithmatex")) {
  const script = document.createElement("script");
  script.src = new URL("tex-svg.js", beside).href;
  document.head.append(script);
}
