"use strict";
// Tabs: one panel at a time, all of them on paper. Arrow keys, Home and End move between tabs.
const pageTabs = (() => {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const panelOf = (tab) => document.getElementById(tab.getAttribute("aria-controls"));
  const nameOf = (tab) => tab.id.replace("tab-", "");
  const listeners = [];

  const chosen = () => tabs.find((tab) => nameOf(tab) === pageState.get("tab")) ?? tabs[0];

  function show({ all = false } = {}) {
    const current = chosen();
    for (const tab of tabs) {
      tab.ariaSelected = String(tab === current);
      tab.tabIndex = tab === current ? 0 : -1;
      panelOf(tab).hidden = !all && tab !== current;
    }
    for (const listener of listeners) listener();
  }

  function choose(tab) {
    pageState.set("tab", tab === tabs[0] ? null : nameOf(tab));
    show();
    const above = tab.closest(".bar").previousElementSibling.getBoundingClientRect().bottom;
    if (above < 0) scrollBy({ top: above }); // from below: the new panel begins under the bar
    tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  for (const [place, tab] of tabs.entries()) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: place + 1, ArrowLeft: place - 1 + tabs.length, Home: 0, End: tabs.length - 1 };
      if (!(event.key in steps)) return;
      event.preventDefault();
      const next = tabs[steps[event.key] % tabs.length];
      choose(next);
      next.focus();
    });
  }

  // `listener` is called whenever other panels are shown.
  return { listen: (listener) => listeners.push(listener), show, isShown: (element) => !element.closest("[role=tabpanel][hidden]") };
})();
