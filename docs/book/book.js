// Equations are set by MathJax, on pages that have some. What the theme adds gets a name, and what scrolls can be reached by key.
MathJax = {options: {ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex"}};
if (document.querySelector(".arithmatex")) {
  const script = document.createElement("script");
  script.src = new URL("mathjax/tex-chtml.js", document.currentScript.src);
  document.head.append(script);
}
document.querySelector(".md-search").setAttribute("aria-label", "Search");
new MutationObserver(() => {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none");
  for (const nav of document.querySelectorAll("nav.md-nav[aria-labelledby]")) {
    if (!document.getElementById(nav.getAttribute("aria-labelledby"))?.textContent.trim()) {
      nav.removeAttribute("aria-labelledby");
      nav.setAttribute("aria-label", nav.parentElement.querySelector("a").textContent.trim());
    }
  }
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .arithmatex")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}).observe(document, {childList: true, subtree: true});

// The dojo: which exercises are solved is kept in this browser.
const boxes = [...document.querySelectorAll("input[data-exercise]")];
const count = () => {
  const solved = boxes.filter(box => box.checked).length;
  document.getElementById("dojo").value = solved / boxes.length;
  document.getElementById("dojo-count").textContent = `${solved} of ${boxes.length}`;
};
for (const box of boxes) {
  const key = `dojo/${box.dataset.exercise}`;
  box.checked = localStorage.getItem(key) === "solved";
  box.addEventListener("change", () => {
    box.checked ? localStorage.setItem(key, "solved") : localStorage.removeItem(key);
    count();
  });
}
if (boxes.length) count();
