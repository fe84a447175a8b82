"use strict";
// Draws the plots, and redraws them when the reader hides a router, chooses a layer, changes the theme or prints.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const { plots, themes, graphs, curves } = figures;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const PAPER = 660; // pixels between the margins of a printed page
  const chips = [...document.querySelectorAll(".chip")];
  const layerPicker = document.getElementById("layer");
  const hidden = new Set();
  const firstLayer = figures.layer ?? "all";
  let layer = firstLayer;
  let graphRouter = graphs[0]?.router;
  let measure = 0; // of the curves over training
  let printing = false;

  const shown = ({ router, layer: own }) => !hidden.has(router) && (own === undefined || own === layer);

  const alpha = (share) => Math.round(176 * share).toString(16).padStart(2, "0");

  // The cells of a slice have one colour for each set of experts; the strip of smooth darkens them (lightens, in the dark).
  function filled(trace, theme) {
    const { fill, colours, names } = trace.meta;
    if (fill === "strip") return { ...trace, colorscale: [0, 1].map((share) => [share, theme.strip + alpha(share)]) };
    if (fill !== "cells") return { ...trace, colorscale: heatScale(theme) };
    const count = colours.length;
    const steps = colours.flatMap((colour, place) => [place, place + 1].map((edge) => [edge / count, theme.cells[colour]]));
    const text = trace.z.map((row) => row.map((cell) => names[cell]));
    return { ...trace, colorscale: steps, zmin: -0.5, zmax: count - 0.5, text, hovertemplate: "experts %{text}<extra></extra>" };
  }

  const inkOf = ({ ink, share }, theme) => ({ ring: theme.ground, strip: `${theme.strip}${alpha(share)}` })[ink] ?? theme.ink;

  function coloured(trace, theme) {
    if (trace.type === "heatmap") return { ...filled(trace, theme), visible: shown(trace.meta) };
    if (trace.meta.ink) {
      const marker = { ...trace.marker, color: inkOf(trace.meta, theme), line: { ...trace.marker?.line, color: theme.ink } };
      const line = { ...trace.line, color: theme.ink };
      const textfont = { ...trace.textfont, color: theme.ink };
      return { ...trace, visible: shown(trace.meta), marker, line, textfont, showlegend: "name" in trace };
    }
    const color = theme.routers[trace.meta.router % theme.routers.length];
    const marker = { ...trace.marker, color, line: { ...trace.marker?.line, color } };
    const copy = { ...trace, visible: shown(trace.meta), marker, line: { ...trace.line, color }, showlegend: "name" in trace };
    if (trace.fill) copy.fillcolor = `${color}2e`;
    for (const bar of ["error_x", "error_y"]) if (trace[bar]) copy[bar] = { ...trace[bar], color };
    return copy;
  }

  function dressed(layout, theme) {
    const axis = (own) => ({ gridcolor: theme.line, linecolor: theme.line, zerolinecolor: theme.line, automargin: true, ...own });
    return {
      height: 320,
      hovermode: "closest",
      dragmode: touch ? false : "zoom", // a finger on a plot scrolls the page
      ...layout,
      ...(printing ? { width: PAPER, autosize: false } : { autosize: true }),
      margin: { l: 10, r: 10, t: 28, b: 10 },
      paper_bgcolor: theme.ground,
      plot_bgcolor: theme.ground,
      font: { family: "system-ui, sans-serif", size: 13, color: theme.ink },
      xaxis: axis(layout.xaxis),
      ...Object.fromEntries(Object.keys({ yaxis: {}, ...layout }).filter((key) => key.startsWith("yaxis")).map((key) => [key, axis(layout[key])])),
      shapes: (layout.shapes ?? []).map((shape) => ({ ...shape, line: { ...shape.line, color: theme.muted, width: 1.5 } })),
    };
  }

  // The range of an axis of names: the first on top, with half a row of space on both sides.
  function rows(data) {
    const names = new Set(data.filter((trace) => trace.visible).flatMap((trace) => trace.y));
    return [names.size - 0.5, -0.5];
  }

  const themeNow = () => (dark.matches && !printing ? themes.dark : themes.light);

  function optionsNow() {
    return {
      responsive: true,
      displaylogo: false,
      displayModeBar: touch ? false : "hover",
      showSendToCloud: false, // by default plotly offers to upload a plot
      plotlyServerURL: "",
      modeBarButtons: [["toImage", "resetScale2d"]],
    };
  }

  // One router and one layer at a time: the chosen ones, or the first ones if these are hidden or have no graph.
  function drawGraph() {
    const section = document.getElementById("graph");
    if (!section || !pageTabs.isShown(section)) return;
    const open = graphs.filter(({ router }) => !hidden.has(router));
    section.hidden = open.length === 0;
    if (section.hidden) return;
    const evolution = open.find(({ router }) => router === graphRouter) ?? open[0];
    const own = layer in evolution.layers ? layer : Object.keys(evolution.layers)[0];
    const picker = document.getElementById("graph-router");
    for (const option of picker.options) option.hidden = option.disabled = hidden.has(Number(option.value));
    picker.value = evolution.router;
    section.querySelector(".caption").textContent = evolution.caption;
    section.querySelector(".shown-layer")?.replaceChildren(`layer ${own}`);
    const plot = document.getElementById("plot-graph");
    const width = printing ? PAPER : plot.clientWidth;
    drawGraphs(plot, evolution, evolution.layers[own], { theme: themeNow(), width, config: optionsNow() });
  }

  function drawMeasure() {
    const section = document.getElementById("curves");
    if (!section || !pageTabs.isShown(section)) return;
    section.querySelector(".caption").textContent = curves[measure].caption;
    const plot = document.getElementById("plot-curves");
    const width = printing ? PAPER : plot.clientWidth;
    drawCurves(plot, curves[measure], { styles: figures.styles, theme: themeNow(), width, config: optionsNow(), coloured });
  }

  function draw() {
    const theme = themeNow();
    for (const [name, plot] of Object.entries(plots)) {
      if (!pageTabs.isShown(document.getElementById(`plot-${name}`))) continue; // it is drawn when its tab is chosen
      const data = plot.data.map((trace) => coloured(trace, theme));
      const layout = structuredClone(dressed(plot.layout, theme)); // plotly modifies its arguments
      if (layout.yaxis.type === "category") layout.yaxis.range = rows(data);
      Plotly.react(`plot-${name}`, data, layout, optionsNow());
    }
    for (const chip of chips) chip.ariaPressed = String(!hidden.has(Number(chip.dataset.router)));
    for (const row of document.querySelectorAll("tr[data-router]")) row.hidden = hidden.has(Number(row.dataset.router));
    for (const note of document.querySelectorAll(".layer")) note.textContent = layer === "all" ? note.dataset.every : `layer ${layer}`;
    for (const part of document.querySelectorAll("[data-layer]")) part.hidden = part.dataset.layer !== layer;
    drawMeasure();
    drawGraph();
    describePlots();
  }

  function toggle(router) {
    if (!hidden.delete(router)) hidden.add(router);
    if (hidden.size === chips.length) hidden.clear(); // everything is hidden: show all again
    keepHidden();
  }

  function keepHidden() {
    pageState.set("hide", chips.filter((chip) => hidden.has(Number(chip.dataset.router))).map((chip) => chip.dataset.name));
    draw();
  }

  // The routers, the layer and the tab of the address.
  function restore() {
    const names = new Set(pageState.all("hide"));
    hidden.clear();
    for (const chip of chips) if (names.has(chip.dataset.name)) hidden.add(Number(chip.dataset.router));
    if (hidden.size === chips.length) hidden.clear();
    const wanted = pageState.get("layer");
    layer = [...(layerPicker?.options ?? [])].some(({ value }) => value === wanted) ? wanted : firstLayer;
    if (layerPicker) layerPicker.value = layer;
    pageTabs.show();
  }

  for (const chip of chips) chip.addEventListener("click", () => toggle(Number(chip.dataset.router)));
  document.getElementById("everything")?.addEventListener("click", () => { hidden.clear(); keepHidden(); });
  layerPicker?.addEventListener("change", (event) => {
    layer = event.target.value;
    pageState.set("layer", layer === firstLayer ? null : layer);
    draw();
  });
  document.getElementById("graph-router")?.addEventListener("change", (event) => {
    graphRouter = Number(event.target.value);
    drawGraph();
    describePlots();
  });
  document.getElementById("curve-measure")?.addEventListener("change", (event) => {
    measure = Number(event.target.value);
    drawMeasure();
    describePlots();
  });
  addEventListener("resize", () => { drawMeasure(); drawGraph(); });
  dark.addEventListener("change", draw);
  for (const [event, on] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => { printing = on; pageTabs.show({ all: on }); });
  }
  pageTabs.listen(draw);
  pageState.changed(restore);
  restore();
})();
