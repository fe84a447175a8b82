"use strict";
// The theme's colours from lowest to highest, in plotly's format.
const heatScale = ({ heat }) => heat.map((colour, place) => [place / (heat.length - 1), colour]);

// Where panels of one figure stand: as many per row as fit, in fractions of the figure as plotly needs them.
function arrangePanels(count, width, { least, most, tall, around, below = 0 }) {
  const columns = Math.max(1, Math.min(count, Math.floor(width / least)));
  const room = Math.min(most, width / columns);
  const wide = room - around.left - around.right;
  const high = tall ?? wide; // square, if not given
  const block = high + around.top + around.bottom;
  const height = block * Math.ceil(count / columns) + below;
  const places = Array.from({ length: count }, (_, place) => {
    const left = (place % columns) * room + around.left;
    const top = Math.floor(place / columns) * block + around.top;
    return { across: [left / width, (left + wide) / width], down: [1 - (top + high) / height, 1 - top / height] };
  });
  return { places, columns, height };
}

// A title above a panel.
const panelTitle = (text, { across, down }) => ({
  text, showarrow: false, font: { size: 12 },
  xref: "paper", x: across[0], xanchor: "left", yref: "paper", y: down[1], yanchor: "bottom",
});

// The expert graphs of one router and layer: a heat map for each snapshot, as many per row as fit.
const drawGraphs = (() => {
  const ROOM = { least: 150, most: 260 }; // pixels across, for a heat map with its labels
  const AROUND = { left: 26, right: 10, top: 26, bottom: 22 };
  const SCALE = 50; // pixels below, for the colour scale
  const font = { size: 11 };

  const axis = (domain, anchor, experts, theme) => ({
    domain, anchor, tick0: 0, dtick: Math.max(1, Math.ceil(experts / 6)), tickangle: 0, tickfont: font, ticks: "",
    showgrid: false, zeroline: false, fixedrange: true, linecolor: theme.line, range: [-0.5, experts - 0.5],
  });

  // Axes and a title for each graph.
  function arranged(graphs, steps, width, theme) {
    const { places, height } = arrangePanels(graphs.length, width, { ...ROOM, around: AROUND, below: SCALE });
    const layout = { height, annotations: places.map((place, at) => panelTitle(`step ${steps[at]}`, place)) };
    const traces = graphs.map((z, at) => {
      const name = at === 0 ? "" : String(at + 1);
      layout[`xaxis${name}`] = axis(places[at].across, `y${name}`, z.length, theme);
      layout[`yaxis${name}`] = axis(places[at].down, `x${name}`, z.length, theme);
      layout[`yaxis${name}`].range.reverse(); // the first row on top, as in a matrix
      return {
        type: "heatmap", z, xaxis: `x${name}`, yaxis: `y${name}`, coloraxis: "coloraxis", xgap: 0.5, ygap: 0.5,
        hovertemplate: `step ${steps[at]}, row %{y}, column %{x}: %{z:.3f}<extra></extra>`,
      };
    });
    return { traces, layout };
  }

  return (element, { steps, low, high }, graphs, { theme, width: given, config }) => {
    const width = Math.max(given, ROOM.least); // a window may briefly have no width
    const { traces, layout } = arranged(graphs, steps, width, theme);
    Plotly.react(element, traces, {
      ...layout,
      width,
      autosize: false,
      dragmode: false,
      margin: { l: 0, r: 0, t: 0, b: 0 },
      paper_bgcolor: theme.ground,
      plot_bgcolor: theme.ground,
      font: { family: "system-ui, sans-serif", size: 13, color: theme.ink },
      coloraxis: {
        cmin: low, cmax: high, colorscale: heatScale(theme),
        colorbar: {
          orientation: "h", x: 0, xanchor: "left", xpad: AROUND.left, y: 0, yanchor: "bottom", ypad: 4,
          lenmode: "pixels", len: Math.min(width, ROOM.most), thickness: 10, outlinewidth: 0, tickfont: font, nticks: 5,
        },
      },
    }, { ...config, responsive: false }); // the number per row depends on the width, so a new width needs a new drawing
  };
})();
