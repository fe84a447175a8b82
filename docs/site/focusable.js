"use strict";
// A keyboard scrolls only what has the focus. The theme puts wide tables into boxes that scroll but cannot have it, and
// takes it from blocks of code on devices without a mouse.
addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0;
  const focusable = (code) => { if (code.scrollWidth > code.clientWidth && code.tabIndex < 0) code.tabIndex = 0; };
  const changes = new MutationObserver((found) => found.forEach(({ target }) => focusable(target)));
  for (const code of document.querySelectorAll("pre > code")) {
    focusable(code);
    changes.observe(code, { attributeFilter: ["tabindex"] });
  }
});
