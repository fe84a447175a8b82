"use strict";
// Words and patches in the colours of their experts. Strings are inserted only as text: they may contain anything.
const buildViews = (() => {
  function make(parent, name, className) {
    const element = document.createElement(name);
    if (className) element.className = className;
    parent.append(element);
    return element;
  }

  // Elements with the expert of each in every layer, to be coloured.
  const painted = (experts, count, build, kind) => Array.from({ length: count }, (_, place) => {
    const element = build(place);
    return (layer, look) => {
      const expert = experts[layer]?.[place];
      const known = expert !== undefined;
      element.className = known ? `${kind} ${look(expert)}` : kind;
      element.title = known ? `expert ${expert}` : "";
      element.dataset.expert = known ? expert : "";
    };
  });

  // <bdi> isolates a piece from its neighbours, whatever its writing direction.
  function textOf(parent, { pieces, experts }) {
    const text = make(parent, "p", "text");
    return painted(experts, pieces.length, (place) => {
      const element = make(text, "bdi");
      const lines = pieces[place].split(/\r\n|\r|\n/);
      element.textContent = lines.join("↵");
      text.append(lines.length > 1 ? document.createElement("br") : " ");
      return element;
    }, "piece");
  }

  function pixelsOn(canvas, [width, height, grey]) {
    Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, height);
    [...atob(grey)].forEach((byte, place) => image.data.set([...Array(3).fill(byte.charCodeAt(0)), 255], 4 * place));
    context.putImageData(image, 0, 0);
  }

  function imageOf(parent, { label, said, grid: [rows, columns], experts, pixels }, known) {
    const image = make(parent, "figure", "image");
    const patches = make(image, "div", "patches");
    pixelsOn(make(patches, "canvas"), known[pixels]);
    const caption = make(image, "figcaption", said === label ? "" : "wrong");
    caption.textContent = said === label ? label : `${label}, predicted ${said}`;
    const overlay = make(patches, "div", "overlay");
    overlay.style.gridTemplate = `repeat(${rows}, 1fr) / repeat(${columns}, 1fr)`;
    return painted(experts, rows * columns, () => make(overlay, "i"), "patch");
  }

  // Returns a function that colours all elements by the experts of a layer.
  return ({ views, pixels, looks }) => {
    const look = (expert) =>
      `expert-${expert % looks.colours} border-${Math.floor(expert / looks.colours) % looks.borders}`;
    const parts = views.flatMap((view) => {
      const parent = document.querySelector(`.view[data-router="${view.router}"]`);
      if (view.pieces) return textOf(parent, view);
      const images = make(parent, "div", "images");
      return view.images.flatMap((image) => imageOf(images, image, pixels));
    });
    return (layer) => { for (const paint of parts) paint(layer, look); };
  };
})();
