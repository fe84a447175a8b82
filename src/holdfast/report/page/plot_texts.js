"use strict";
// Gives plots to readers without a mouse or without sight: what hovering shows of each point, as a list below the plot.
const describePlots = (() => {
  const MOST = 2000; // points in a list

  // Texts for plotly contain tags and entities. Nothing in a template runs or is loaded.
  function plain(text) {
    const template = document.createElement("template");
    template.innerHTML = String(text).replaceAll("<br>", " ");
    return template.content.textContent;
  }

  // The formats of our templates, as in Python: ".2f", "+.2f", ".3g".
  function formatted(value, format) {
    const [, sign, digits, kind] = /^(\+?)\.(\d+)([fg])$/.exec(format ?? "") ?? [];
    if (typeof value !== "number" || !kind) return plain(value);
    const text = kind === "f" ? value.toFixed(digits) : String(Number(value.toPrecision(digits)));
    return sign && value >= 0 ? `+${text}` : text.replace(/^-(0(\.0*)?)$/, "$1"); // no minus before 0
  }

  function sentence({ hovertemplate }, point) {
    const filled = hovertemplate.replace(/<extra>.*<\/extra>$/, "").split(/(%\{\w+(?::[^}]*)?\})/);
    return filled.map((part) => {
      const [, name, format] = /^%\{(\w+)(?::([^}]*))?\}$/.exec(part) ?? [];
      return name ? formatted(point[name], format) : plain(part);
    }).join("");
  }

  function bar(trace, letter, place) {
    const { array, arrayminus = array } = trace[`error_${letter}`] ?? {};
    if (!array) return "";
    const [low, high] = [-arrayminus[place], array[place]].map((size) => formatted(trace[letter][place] + size, ".3g"));
    return ` (bar from ${low} to ${high})`;
  }

  function* sentences(trace) {
    if (trace.visible === false || !trace.hovertemplate || trace.meta?.fill) return; // a map of cells is no list of points
    if (trace.type !== "heatmap") {
      for (const [place, x] of trace.x.entries()) {
        const point = { x, y: trace.y[place], text: [trace.text].flat()[place] };
        if (point.y !== null) yield sentence(trace, point) + bar(trace, "x", place) + bar(trace, "y", place);
      }
      return;
    }
    for (const [row, values] of trace.z.entries()) {
      for (const [column, z] of values.entries()) {
        const point = { x: trace.x?.[column] ?? column, y: trace.y?.[row] ?? row, z, text: trace.text?.[row]?.[column] };
        if (z !== null) yield sentence(trace, point);
      }
    }
  }

  function fill(list, plot) {
    const all = [...new Set((plot.data ?? []).flatMap((trace) => [...sentences(trace)]))];
    const texts = all.length > MOST ? [...all.slice(0, MOST), `These are the first ${MOST} of ${all.length} points.`] : all;
    list.replaceChildren(...texts.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
  }

  function addList(plot) {
    const details = document.createElement("details");
    details.className = "as-text";
    const summary = Object.assign(document.createElement("summary"), { textContent: "Points as text" });
    const title = document.getElementById(plot.getAttribute("aria-labelledby"))?.textContent.trim() ?? "";
    summary.ariaLabel = `Points as text: ${title}`;
    const list = Object.assign(document.createElement("ul"), { tabIndex: 0, ariaLabel: title }); // it may scroll
    details.append(summary, list);
    details.addEventListener("toggle", () => { if (details.open) fill(list, plot); });
    plot.parentElement.append(details);
    return () => { if (details.open) fill(list, plot); };
  }

  const lists = new Map();

  // To be called after plots are drawn: their buttons stay reachable, their drawing is hidden from screen readers.
  return () => {
    for (const plot of document.querySelectorAll(".plot")) {
      if (!plot.querySelector(".main-svg")) continue; // not drawn yet
      plot.setAttribute("role", "group");
      for (const drawing of plot.querySelectorAll(".main-svg")) drawing.ariaHidden = "true";
      if (!lists.has(plot)) lists.set(plot, addList(plot));
      lists.get(plot)();
    }
  };
})();
