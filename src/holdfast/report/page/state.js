"use strict";
// What the reader has chosen, kept in the address so that a link shows the same: #tab=training&hide=smooth&layer=1
const pageState = (() => {
  const read = () => new URLSearchParams(location.hash.slice(1));
  return {
    all: (key) => read().getAll(key),
    get: (key) => read().get(key),
    // Replaces all values of a key; no values, or null, remove it.
    set: (key, values) => {
      const state = read();
      state.delete(key);
      for (const value of [values ?? []].flat()) state.append(key, value);
      const hash = String(state);
      history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    },
    // Calls a function when the reader follows a link with another state.
    changed: (apply) => addEventListener("hashchange", apply),
  };
})();
