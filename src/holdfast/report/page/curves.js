"use strict";
// The curves of one measure over training: a panel for each layer, as many per row as fit, on common axes.
const drawCurves = (() => {
  const AROUND = { left: 46, right: 8, top: 26, bottom: 40 };
  const TALL = 130; // pixels of a panel
  const rooms = (width) => ({ least: width < 600 ? 160 : 240, most: 560 }); // pixels across, for a panel with its labels
  const font = { size: 11 };

  const traceOf = ({ router, x, y }, panel, { form, marks }, { label, symbol, dash }) => ({
    type: "scatter", mode: "lines+markers", meta: { router }, x, y, hoverlabel: { namelength: 0 },
    marker: { size: 6, symbol, maxdisplayed: marks }, line: { width: 2, dash },
    hovertemplate: `${panel}, ${label}, step %{x}: %{y:${form}}<extra></extra>`,
  });

  return (element, measure, { styles, theme, width: given, config, coloured }) => {
    const { axis: title, from_zero: fromZero, panels } = measure;
    const width = Math.max(given, 160); // a window may briefly have no width
    const { places, columns, height } = arrangePanels(panels.length, width, { ...rooms(width), tall: TALL, around: AROUND });
    const layout = { height, annotations: panels.map((panel, at) => panelTitle(panel.title, places[at])) };
    const lines = { gridcolor: theme.line, linecolor: theme.line, zeroline: false, tickfont: font, fixedrange: true };
    const traces = panels.flatMap(({ title: panel, data }, at) => {
      const name = at === 0 ? "" : String(at + 1);
      const isLast = at + columns >= panels.length; // in its column
      layout[`xaxis${name}`] = {
        ...lines, domain: places[at].across, anchor: `y${name}`, nticks: 4, tickangle: 0, ...(at ? { matches: "x" } : {}),
        ...(isLast ? { title: { text: "step", font, standoff: 4 } } : {}),
      };
      layout[`yaxis${name}`] = {
        ...lines, domain: places[at].down, anchor: `x${name}`, nticks: 5, rangemode: fromZero ? "tozero" : "normal", ...(at ? { matches: "y" } : {}),
        ...(at % columns === 0 ? { title: { text: title, font, standoff: 4 } } : {}),
      };
      const traces = data.map((curve) => coloured(traceOf(curve, panel, measure, styles[curve.router]), theme));
      return traces.map((trace) => ({ ...trace, xaxis: `x${name}`, yaxis: `y${name}` }));
    });
    Plotly.react(element, traces, structuredClone({
      ...layout,
      width,
      autosize: false,
      dragmode: false,
      hovermode: "closest",
      margin: { l: 0, r: 0, t: 0, b: 0 },
      paper_bgcolor: theme.ground,
      plot_bgcolor: theme.ground,
      font: { family: "system-ui, sans-serif", size: 13, color: theme.ink },
    }), { ...config, responsive: false });
  };
})();
