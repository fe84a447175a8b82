"use strict";
// The theme's colours from lowest to highest, in plotly's format.
const heatScale = ({ heat }) => heat.map((colour, place) => [place / (heat.length - 1), colour]);

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

  // Axes and a title for each graph, in fractions of the whole figure as plotly needs them.
  function arranged(graphs, steps, width, theme) {
    const columns = Math.max(1, Math.min(graphs.length, Math.floor(width / ROOM.least)));
    const room = Math.min(ROOM.most, width / columns);
    const side = room - AROUND.left - AROUND.right;
    const block = side + AROUND.top + AROUND.bottom;
    const height = block * Math.ceil(graphs.length / columns) + SCALE;
    const layout = { height, annotations: [] };
    const traces = graphs.map((z, place) => {
      const left = (place % columns) * room + AROUND.left;
      const top = Math.floor(place / columns) * block + AROUND.top;
      const name = place === 0 ? "" : String(place + 1);
      const across = [left / width, (left + side) / width];
      const down = [1 - (top + side) / height, 1 - top / height];
      layout[`xaxis${name}`] = axis(across, `y${name}`, z.length, theme);
      layout[`yaxis${name}`] = axis(down, `x${name}`, z.length, theme);
      layout[`yaxis${name}`].range.reverse(); // the first row on top, as in a matrix
      layout.annotations.push({
        text: `step ${steps[place]}`, showarrow: false, font: { size: 12 },
        xref: "paper", x: across[0], xanchor: "left", yref: "paper", y: down[1], yanchor: "bottom",
      });
      return {
        type: "heatmap", z, xaxis: `x${name}`, yaxis: `y${name}`, coloraxis: "coloraxis", xgap: 0.5, ygap: 0.5,
        hovertemplate: "row %{y}, column %{x}: %{z:.3f}<extra></extra>",
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
