"use strict";
// The Explorer: the tokens of a text, or the patches of a picture, with a row for each layer. It draws stored routes only, and
// inserts strings as text, never as markup.
function explore(root, { explorer: { sets, routers, what_if: whatIf }, looks }) {
  const [bar, status, legend, panes, panel] = ["bar", "status", "legend", "panes", "panel"].map((name) => root.querySelector(`.x-${name}`));
  const ALL = "all";
  const LONG = 24; // letters of a word that may be broken between its tokens
  const THIN = 8; // layers above which the rows are thin and have no numbers
  const MOST_LISTED = 12;

  function make(parent, name, className = "", text) {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    parent?.append(element);
    return element;
  }

  // ---- the stored routes ------------------------------------------------------------------------------------------

  const ofSet = (set) => routers.filter((router) => router.set === set);

  function range(router, example) {
    let start = 0;
    for (const one of sets[router.set].slice(0, example)) start += one.tokens;
    return [start, start + sets[router.set][example].tokens];
  }

  // The experts and weights of a token in a layer; after a perturbation, null if it could not be compared.
  function route(router, layer, token, name = "") {
    const own = router.layers[layer];
    if (!name) return [own.routes[token], own.weights[token]];
    const perturbed = router.perturbed[name];
    if (!perturbed || !perturbed.compared.some(([start, end]) => start <= token && token < end)) return null;
    const changed = perturbed.layers[layer];
    changed.places ??= new Map(changed.tokens.map((each, place) => [each, place]));
    const place = changed.places.get(token);
    return place === undefined ? [own.routes[token], null] : [changed.experts[place], changed.weights[place]];
  }

  const core = (experts, count) => (count === null ? experts : experts.slice(0, count));
  const sameSet = (one, other) => one.length === other.length && one.every((expert) => other.includes(expert));

  function flips(router, layer, token, name) {
    const after = route(router, layer, token, name);
    const { routes, core: count } = router.layers[layer];
    return after !== null && !sameSet(core(routes[token], count), core(after[0], count));
  }

  // Each router numbers its experts in its own way: pair those of two routers that share the most weight, the best pair first.
  const pairings = new Map();
  function pairing(one, other, layer) {
    const key = [routers.indexOf(one), routers.indexOf(other), layer].join();
    if (!pairings.has(key)) {
      const shared = new Map(); // of each pair, the product of the weights, summed over tokens
      const { routes, weights } = one.layers[layer], others = other.layers[layer];
      routes.forEach((experts, token) => {
        others.routes[token].forEach((theirs, at) => experts.forEach((mine, place) => {
          const pair = `${theirs},${mine}`;
          shared.set(pair, (shared.get(pair) ?? 0) + others.weights[token][at] * weights[token][place]);
        }));
      });
      const found = new Map(), taken = new Set();
      const pairs = [...shared].map(([pair, weight]) => [weight, ...pair.split(",").map(Number)]);
      pairs.sort((a, b) => b[0] - a[0] || a[1] - b[1] || a[2] - b[2]);
      for (const [, theirs, mine] of pairs) {
        if (found.has(theirs) || taken.has(mine)) continue;
        found.set(theirs, mine);
        taken.add(mine);
      }
      pairings.set(key, found);
    }
    return pairings.get(key);
  }

  function differs(one, other, layer, token) {
    const paired = pairing(one, other, layer);
    const mine = core(one.layers[layer].routes[token], one.layers[layer].core);
    const theirs = core(other.layers[layer].routes[token], other.layers[layer].core);
    return !sameSet(mine, theirs.map((expert) => paired.get(expert) ?? `other ${expert}`));
  }

  // ---- the state ---------------------------------------------------------------------------------------------------

  const usual = { router: 0, beside: null, text: 0, layer: ALL, after: "", colour: "expert", search: "", flipped: false, token: null };
  const state = { ...usual };
  let expert = null; // {router, layer, expert} of the panel
  let hovered = null;

  const shownRouter = () => routers[state.router];
  const besideRouter = () => (state.beside === null ? null : routers[state.beside]);
  const shownRouters = () => [shownRouter(), besideRouter()].filter(Boolean);
  const layersOf = (router) => (state.layer === ALL ? router.layers.map((_, layer) => layer) : [Number(state.layer)]);

  function read() {
    const told = Object.fromEntries(Object.keys(state).map((name) => [name, pageState.get(`explorer.${name}`)]));
    const number = (name, most) => (/^\d+$/.test(told[name] ?? "") && Number(told[name]) < most ? Number(told[name]) : null);
    state.router = number("router", routers.length) ?? 0;
    state.beside = whatIf ? null : number("beside", routers.length);
    state.text = number("text", Infinity) ?? 0;
    state.layer = number("layer", Infinity) ?? ALL;
    state.token = number("token", Infinity);
    state.after = told.after ?? "";
    state.colour = told.colour === "radius" ? "radius" : "expert";
    state.search = told.search ?? "";
    state.flipped = told.flipped === "true";
    settle();
  }

  // A setting that does not fit the others falls back to the first choice.
  function settle() {
    const router = shownRouter();
    if (state.beside === state.router || besideRouter()?.set !== router.set) state.beside = null;
    if (state.text >= sets[router.set].length) state.text = 0;
    if (state.layer !== ALL && state.layer >= router.layers.length) state.layer = ALL;
    if (!(state.after in router.perturbed)) state.after = "";
    const [start, end] = range(router, state.text);
    if (state.token !== null && (state.token < start || state.token >= end)) state.token = null;
  }

  function change(settings) {
    Object.assign(state, settings);
    settle();
    for (const [name, value] of Object.entries(state)) {
      const key = `explorer.${name}`, told = value === usual[name] ? null : String(value);
      if (pageState.get(key) !== told) pageState.set(key, told); // a browser allows only so many changes of the address
    }
    draw();
  }

  // ---- controls ----------------------------------------------------------------------------------------------------

  function picker(name, options, value, choose) {
    const label = make(bar, "label", "x-pick");
    make(label, "span", "", name);
    const select = make(label, "select");
    select.name = name;
    select.autocomplete = "off";
    for (const [key, text] of options) {
      const option = make(select, "option", "", text);
      option.value = key;
    }
    select.value = value;
    select.addEventListener("change", () => choose(select.value));
  }

  const brief = (text, most = 40) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

  function exampleName(example, place, count) {
    const kind = example.picture ? "picture" : "text";
    const about = example.picture ? example.picture.label : example.pieces.slice(0, 30).join("").trim().replace(/\s+/g, " ");
    return `${kind} ${place + 1} of ${count}: ${brief(about, 32)}`;
  }

  function drawBar() {
    const focused = bar.contains(document.activeElement) ? document.activeElement.name : null;
    const caret = document.activeElement?.selectionStart ?? null;
    bar.replaceChildren();
    const router = shownRouter(), examples = sets[router.set];
    if (whatIf) {
      const toggle = make(bar, "button", "x-toggle", `what if: ${routers[1].name}`);
      toggle.type = "button";
      toggle.name = "what-if";
      toggle.ariaPressed = String(state.router === 1);
      toggle.addEventListener("click", () => change({ router: 1 - state.router }));
    } else if (routers.length > 1) {
      picker("router", routers.map(({ name }, place) => [place, name]), state.router, (value) => change({ router: Number(value) }));
      const others = ofSet(router.set).filter((other) => other !== router);
      if (others.length) {
        const choices = [["", "nothing"], ...others.map((other) => [routers.indexOf(other), other.name])];
        picker("beside", choices, state.beside ?? "", (value) => change({ beside: value === "" ? null : Number(value) }));
      }
    }
    if (examples.length > 1) {
      const names = examples.map((example, place) => [place, exampleName(example, place, examples.length)]);
      picker(examples[0].picture ? "picture" : "text", names, state.text, (value) => change({ text: Number(value), token: null }));
    }
    if (router.layers.length > 1) {
      const layers = router.layers.map((_, layer) => [layer, `layer ${layer}`]);
      picker("layer", [[ALL, "all layers"], ...layers], state.layer, (value) => change({ layer: value === ALL ? ALL : Number(value) }));
    }
    const perturbations = Object.keys(router.perturbed);
    if (perturbations.length) {
      picker("perturbation", [["", "unperturbed"], ...perturbations.map((name) => [name, name])], state.after, (after) => change({ after }));
    }
    if (router.layers.some(({ radii }) => radii)) {
      picker("colour", [["expert", "first expert"], ["radius", "radius"]], state.colour, (colour) => change({ colour }));
    }
    if (!examples[0].picture) {
      const label = make(bar, "label", "x-pick");
      make(label, "span", "", "search");
      const search = make(label, "input");
      search.type = "search";
      search.name = "search";
      search.value = state.search;
      search.autocomplete = "off";
      search.addEventListener("input", () => change({ search: search.value }));
    }
    if (perturbations.length) {
      const label = make(bar, "label", "x-check");
      const box = make(label, "input");
      box.type = "checkbox";
      box.name = "flipped";
      box.checked = state.flipped;
      label.append(" flipped only");
      box.addEventListener("change", () => change({ flipped: box.checked }));
    }
    if (focused) {
      const again = bar.querySelector(`[name="${focused}"]`);
      again?.focus();
      if (again?.type === "search") again.setSelectionRange(caret, caret);
    }
  }

  // ---- tokens ------------------------------------------------------------------------------------------------------

  // An expert of the second router has the colour of the expert of the first with which it is paired.
  function look(router, layer, expert) {
    const number = router === besideRouter() ? pairing(shownRouter(), router, layer).get(expert) ?? expert : expert;
    return `expert-${number % looks.colours} border-${Math.floor(number / looks.colours) % looks.borders}`;
  }
  const riskOf = (radius) => looks.risks.filter((bound) => radius === null || radius >= bound).length;

  function paint(cell, router, layer, token) {
    const own = router.layers[layer];
    const found = route(router, layer, token, state.after);
    const shown = found ?? [[], []];
    const number = shown[0][0];
    let style = "x-none";
    if (state.colour === "radius" && own.radii) style = `risk-${riskOf(own.radii[token])}`;
    else if (number !== undefined) style = look(router, layer, number);
    const flipped = state.after && flips(router, layer, token, state.after) ? " x-flip" : "";
    const differ = besideRouter() && differs(shownRouter(), besideRouter(), layer, token) ? " x-differs" : "";
    cell.className = `x-cell ${style}${flipped}${differ}`;
    cell.textContent = number ?? (found ? "–" : "?");
  }

  function name(element, router, token, layers) {
    const numbers = layers.map((layer) => route(router, layer, token, state.after)?.[0][0] ?? "none");
    const experts = `expert ${numbers.join(", ")}`;
    if (sets[router.set][state.text].picture) element.ariaLabel = `${tokenName(router, token)}, ${experts}`;
    else element.ariaDescription = experts; // the piece is its name
  }

  const visible = (piece) => piece.split(/\r\n|\r|\n/).join("↵").trim() || (piece ? "␣" : "∅");

  // With one layer, all its experts can be clicked; by radius, the colours are explained.
  function drawLegend() {
    legend.replaceChildren();
    const router = shownRouter(), layers = layersOf(router);
    if (state.colour === "radius") {
      legend.append("radius ");
      looks.names.forEach((name, level) => { make(legend, "span", `x-key risk-${level}`, name); });
    } else if (layers.length === 1) {
      legend.append("expert ");
      for (let own = 0; own < router.layers[layers[0]].experts; own += 1) chip(legend, router, layers[0], own);
    }
    legend.hidden = !legend.hasChildNodes();
  }

  function asWords(pieces) {
    const words = [];
    let open = false;
    pieces.forEach((piece, place) => {
      if (!open || /^\s/.test(piece)) words.push([]);
      words.at(-1).push(place);
      open = !/\s$/.test(piece);
    });
    return words;
  }

  function textPane(parent, router, example, start) {
    const text = make(parent, "div", "x-text");
    text.dir = "auto";
    const layers = layersOf(router);
    text.classList.toggle("x-thin", layers.length > THIN);
    if (layers.length > 1) {
      const heads = make(text, "span", "x-heads");
      heads.ariaHidden = "true";
      make(heads, "span", "x-piece", "layer");
      for (const layer of layers) make(heads, "i", "x-cell", layer);
    }
    for (const word of asWords(example.pieces)) {
      const letters = word.reduce((sum, place) => sum + example.pieces[place].length, 0);
      const group = make(text, "span", letters > LONG ? "x-word x-long" : "x-word");
      for (const place of word) {
        const token = make(group, "span", "x-token");
        make(token, "bdi", "x-piece", visible(example.pieces[place]));
        for (const layer of layers) paint(make(token, "i"), router, layer, start + place);
        for (const cell of token.querySelectorAll(".x-cell")) cell.ariaHidden = "true"; // the description has them
        token.dataset.token = start + place;
        name(token, router, start + place, layers);
        if (/[\r\n]$/.test(example.pieces[place])) make(text, "span", "x-break");
      }
    }
    return text;
  }

  function picturePane(parent, router, example, start) {
    const { picture } = example, [rows, columns] = picture.grid;
    const text = make(parent, "div", "x-pictures");
    for (const layer of layersOf(router)) {
      const figure = make(text, "figure", "x-picture");
      figure.setAttribute("role", "group"); // a list box has options and groups of them
      figure.ariaLabel = `layer ${layer}`;
      const patches = make(figure, "div", "x-patches");
      const canvas = make(patches, "canvas");
      Object.assign(canvas, { width: picture.width, height: picture.height, ariaHidden: "true" });
      const context = canvas.getContext("2d"), image = context.createImageData(picture.width, picture.height);
      [...atob(picture.pixels)].forEach((byte, place) => image.data.set([...Array(3).fill(byte.charCodeAt(0)), 255], 4 * place));
      context.putImageData(image, 0, 0);
      const overlay = make(patches, "div", "x-overlay");
      overlay.style.gridTemplate = `repeat(${rows}, 1fr) / repeat(${columns}, 1fr)`;
      for (let place = 0; place < rows * columns; place += 1) {
        const token = make(overlay, "span", "x-token");
        paint(make(token, "i"), router, layer, start + place);
        token.dataset.token = start + place;
        name(token, router, start + place, [layer]);
      }
      make(figure, "figcaption", "", `layer ${layer}`).ariaHidden = "true"; // the name of the group
    }
    const said = router.said[state.text];
    const right = said === picture.label ? picture.label : `${picture.label}, predicted ${said}`;
    make(parent, "p", said === picture.label ? "x-label" : "x-label x-wrong", right);
    return text;
  }

  function tokenName(router, token) {
    const example = sets[router.set][state.text], [start] = range(router, state.text);
    if (!example.picture) return `“${visible(example.pieces[token - start])}”`;
    const columns = example.picture.grid[1];
    return `patch ${Math.floor((token - start) / columns) + 1}, ${((token - start) % columns) + 1}`;
  }

  const tokens = (number) => root.querySelectorAll(number === undefined ? ".x-token" : `.x-token[data-token="${number}"]`);

  function drawPanes() {
    panes.replaceChildren();
    panes.classList.toggle("x-two", shownRouters().length > 1);
    for (const router of shownRouters()) {
      const pane = make(panes, "div", "x-pane");
      pane.dataset.router = routers.indexOf(router);
      if (routers.length > 1) make(pane, "h3", "", router.name);
      const [start] = range(router, state.text), example = sets[router.set][state.text];
      const list = (example.picture ? picturePane : textPane)(pane, router, example, start);
      list.setAttribute("role", "listbox");
      list.ariaLabel = `${example.picture ? "Patches" : "Tokens"} by ${router.name}`;
      for (const token of list.querySelectorAll(".x-token")) {
        token.setAttribute("role", "option");
        token.tabIndex = -1;
      }
    }
    const reached = state.token === null ? root.querySelector(".x-token") : tokens(state.token)[0];
    if (reached) reached.tabIndex = 0;
  }

  const flipsAnywhere = (router, token) => {
    const names = state.after ? [state.after] : Object.keys(router.perturbed);
    return layersOf(router).some((layer) => names.some((name) => flips(router, layer, token, name)));
  };

  // Tokens that the search, "flipped only" or an expert leaves out are dimmed: what is left is still read as a text.
  function filter() {
    const router = shownRouter(), example = sets[router.set][state.text], [start, end] = range(router, state.text);
    const wanted = state.search.trim().toLowerCase();
    const hits = new Set();
    if (wanted && !example.picture) {
      const starts = [];
      let text = "";
      for (const piece of example.pieces) { starts.push(text.length); text += piece; }
      const low = text.toLowerCase().length === text.length ? text.toLowerCase() : text;
      for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, at + 1)) {
        example.pieces.forEach((piece, place) => {
          if (starts[place] < at + wanted.length && starts[place] + piece.length > at) hits.add(start + place);
        });
      }
    }
    const all = Array.from({ length: end - start }, (_, place) => start + place);
    const flipped = new Set(state.after || state.flipped ? all.filter((token) => shownRouters().some((one) => flipsAnywhere(one, token))) : []);
    const using = (token) => routers[expert.router].layers[expert.layer].routes[token].includes(expert.expert);
    const left = new Set(all.filter((token) =>
      (!wanted || hits.has(token)) && (!state.flipped || flipped.has(token)) && (!expert || using(token))));
    for (const token of tokens()) {
      token.classList.toggle("x-dim", !left.has(Number(token.dataset.token)));
      token.classList.toggle("x-hit", hits.has(Number(token.dataset.token)));
    }
    const parts = [`${all.length} ${example.picture ? "patches" : "tokens"}`];
    if (wanted) parts.push(`${hits.size} match “${state.search.trim()}”`);
    if (state.after || state.flipped) parts.push(`${flipped.size} flip ${state.after ? `under ${state.after}` : "under a perturbation"}`);
    const beside = besideRouter();
    if (beside) {
      const places = layersOf(router).flatMap((layer) => all.map((token) => differs(router, beside, layer, token)));
      parts.push(`${Math.round(100 * places.filter(Boolean).length / places.length)}% of their routes differ between the two routers`);
    }
    status.textContent = parts.join(", ");
  }

  // ---- the panel ---------------------------------------------------------------------------------------------------

  const weight = (thousandths) => (thousandths / 1000).toFixed(3);
  const number = (value) => (value === null ? "∞" : String(value));

  function chip(parent, router, layer, own, text = "") {
    const found = make(parent, "button", `x-chip ${look(router, layer, own)}`, own);
    found.type = "button";
    found.ariaLabel = `expert ${own} of layer ${layer}${text ? `, weight ${text}` : ""}`;
    found.addEventListener("click", () => { expert = { router: routers.indexOf(router), layer, expert: own }; drawPanel(); filter(); });
    return found;
  }

  function chips(parent, router, layer, [experts, weights]) {
    experts.forEach((own, place) => {
      const pair = make(parent, "span", "x-pair");
      chip(pair, router, layer, own, weights && weight(weights[place]));
      if (weights) make(pair, "small", "", weight(weights[place]));
    });
    if (!experts.length) parent.append("none");
  }

  function table(parent, columns, className) {
    const sheet = make(parent, "div", "x-sheet");
    const found = make(sheet, "table", className);
    const row = make(make(found, "thead"), "tr");
    for (const column of columns) make(row, "th", "", column).scope = "col";
    return make(found, "tbody");
  }

  function tokenTable(router, token) {
    const columns = ["layer", "experts and weights", "margin", "radius", ...(state.after ? [`after ${state.after}`] : [])];
    const body = table(panel, columns, "x-token-table");
    router.layers.forEach((own, layer) => {
      const row = make(body, "tr");
      make(row, "th", "", layer).scope = "row";
      chips(make(row, "td"), router, layer, route(router, layer, token));
      make(row, "td", "", number(own.margins[token]));
      make(row, "td", "", own.radii ? number(own.radii[token]) : "–");
      if (state.after) {
        const after = route(router, layer, token, state.after), cell = make(row, "td");
        if (after === null) cell.textContent = "not compared";
        else if (after[1] === null) cell.textContent = "same";
        else chips(cell, router, layer, after);
        if (flips(router, layer, token, state.after)) cell.className = "x-flip";
      }
    });
  }

  // The path: the experts in each layer before, and after each perturbation that changes one of them.
  function pathTable(router, token) {
    const names = Object.keys(router.perturbed);
    if (!names.length) return;
    const known = names.filter((name) => router.layers.some((_, layer) => route(router, layer, token, name) !== null));
    const changing = known.filter((name) => router.layers.some((_, layer) => flips(router, layer, token, name)));
    make(panel, "h4", "", "Path through the layers");
    if (changing.length) {
      const body = table(panel, ["layer", "unperturbed", ...changing], "x-path");
      router.layers.forEach((own, layer) => {
        const row = make(body, "tr");
        make(row, "th", "", layer).scope = "row";
        for (const name of ["", ...changing]) {
          const cell = make(row, "td"), found = route(router, layer, token, name);
          if (found === null) cell.textContent = "?";
          else if (name && !flips(router, layer, token, name)) cell.textContent = "·";
          else chips(cell, router, layer, [core(found[0], own.core), null]);
          if (name && found !== null && flips(router, layer, token, name)) cell.className = "x-flip";
        }
      });
    }
    const list = (some) => some.join(", ");
    const unchanged = known.filter((name) => !changing.includes(name)), missing = names.filter((name) => !known.includes(name));
    if (unchanged.length) make(panel, "p", "x-note", `Flips in no layer under ${list(unchanged)}.`);
    if (missing.length) make(panel, "p", "x-note", `Not compared under ${list(missing)}.`);
  }

  function heading(text, close) {
    const head = make(panel, "div", "x-head");
    make(head, "h3", "", text);
    if (!close) return;
    const button = make(head, "button", "x-close", "×");
    button.type = "button";
    button.ariaLabel = "close";
    button.addEventListener("click", close);
  }

  function expertPanel({ router: place, layer, expert: own }) {
    const router = routers[place], { routes, weights, load, experts } = router.layers[layer];
    heading(`Expert ${own} of layer ${layer}${routers.length > 1 ? `, ${router.name}` : ""}`, () => { expert = null; drawPanel(); filter(); });
    const pieces = sets[router.set].flatMap((example, at) => example.pieces ?? Array.from({ length: example.tokens }, (_, patch) => `picture ${at + 1}, patch ${patch + 1}`));
    const found = new Map(), together = new Map();
    let count = 0;
    routes.forEach((selected, token) => {
      const slot = selected.indexOf(own);
      if (slot < 0) return;
      count += 1;
      const piece = visible(pieces[token]), [times, sum] = found.get(piece) ?? [0, 0];
      found.set(piece, [times + 1, sum + weights[token][slot]]);
      for (const other of selected) if (other !== own) together.set(other, (together.get(other) ?? 0) + 1);
    });
    const share = (part, whole) => `${(100 * part / whole).toFixed(1)}%`;
    const facts = make(panel, "dl", "x-facts");
    const fact = (name, text) => {
      const row = make(facts, "div");
      make(row, "dt", "", name);
      return make(row, "dd", "", text);
    };
    if (load) fact("load, all data", `${load[own].toFixed(1)}% of the tokens`);
    fact("load, here", `${share(count, routes.length)} of the tokens (${count} of ${routes.length})`);
    const with_ = fact("selected together with");
    const others = [...together].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, MOST_LISTED);
    for (const [other, times] of others) {
      const pair = make(with_, "span", "x-pair");
      chip(pair, router, layer, other);
      make(pair, "small", "", share(times, count));
    }
    if (!others.length) with_.textContent = "no other expert";
    const body = table(panel, [sets[router.set][0].picture ? "top patches" : "top tokens", "times", "mean weight"], "x-top");
    const top = [...found].sort((a, b) => b[1][1] - a[1][1] || (a[0] < b[0] ? -1 : 1)).slice(0, MOST_LISTED);
    for (const [piece, [times, sum]] of top) {
      const row = make(body, "tr");
      make(make(row, "th"), "bdi", "", brief(piece)).parentElement.scope = "row";
      make(row, "td", "", times);
      make(row, "td", "", weight(sum / times));
    }
  }

  function drawPanel() {
    const token = hovered ?? state.token;
    panel.replaceChildren();
    panel.classList.toggle("x-empty", !expert && token === null);
    if (expert && hovered === null) return expertPanel(expert);
    if (token === null) {
      make(panel, "p", "x-note", "Point at a token for its experts, weights, margin and radius in every layer. Click it for its path; click an expert for its tokens.");
      return undefined;
    }
    const [start] = range(shownRouter(), state.text);
    const close = state.token === null ? null : () => change({ token: null });
    heading(`${tokenName(shownRouter(), token)}, ${token - start + 1} of ${sets[shownRouter().set][state.text].tokens}`, close);
    for (const router of shownRouters()) {
      if (shownRouters().length > 1) make(panel, "h4", "", router.name);
      tokenTable(router, token);
      if (token === state.token) pathTable(router, token);
    }
    return undefined;
  }

  function mark() {
    for (const token of root.querySelectorAll(".x-on")) token.classList.remove("x-on");
    if (hovered !== null) for (const token of tokens(hovered)) token.classList.add("x-on");
    for (const token of tokens()) if (token.ariaSelected !== "false" || Number(token.dataset.token) === state.token) {
      token.ariaSelected = String(Number(token.dataset.token) === state.token);
    }
  }

  function point(token) {
    if (token === hovered) return;
    hovered = token;
    mark();
    drawPanel();
  }

  function choose(token) {
    expert = null;
    hovered = null;
    change({ token: state.token === token ? null : token });
  }

  // ---- pointers and keys ---------------------------------------------------------------------------------------------

  const numberOf = (target) => {
    const token = target.closest?.(".x-token");
    return token ? Number(token.dataset.token) : null;
  };

  panes.addEventListener("pointerover", (event) => { if (event.pointerType !== "touch") point(numberOf(event.target)); });
  panes.addEventListener("pointerleave", () => point(null));
  panes.addEventListener("focusin", (event) => {
    for (const token of panes.querySelectorAll(".x-token[tabindex='0']")) token.tabIndex = -1;
    event.target.tabIndex = 0;
    if (event.target.matches(":focus-visible")) point(numberOf(event.target));
  });
  // A keyboard goes from a token to the experts of its panel: the panel stays until the focus leaves both.
  for (const part of [panes, panel]) part.addEventListener("focusout", ({ relatedTarget: next }) => {
    if (!panes.contains(next) && !panel.contains(next)) point(null);
  });
  panes.addEventListener("click", (event) => {
    const token = numberOf(event.target);
    if (token !== null) choose(token);
  });

  // The nearest token of the next line, up or down.
  function inNextLine(all, from, step) {
    const box = from.getBoundingClientRect();
    const beyond = all.map((token) => [token, token.getBoundingClientRect()])
      .filter(([, { top }]) => (top - box.top) * step > box.height / 2);
    const line = Math.min(...beyond.map(([, { top }]) => Math.abs(top - box.top)));
    const near = beyond.filter(([, { top }]) => Math.abs(Math.abs(top - box.top) - line) < 2);
    return near.sort(([, a], [, b]) => Math.abs(a.left - box.left) - Math.abs(b.left - box.left))[0]?.[0];
  }

  panes.addEventListener("keydown", (event) => {
    const from = event.target.closest(".x-token");
    if (!from) return;
    const all = [...from.closest("[role=listbox]").querySelectorAll(".x-token")], place = all.indexOf(from);
    const back = getComputedStyle(from).direction === "rtl" ? 1 : -1;
    const keys = {
      ArrowLeft: () => all[place + back]?.focus(),
      ArrowRight: () => all[place - back]?.focus(),
      ArrowUp: () => inNextLine(all, from, -1)?.focus(),
      ArrowDown: () => inNextLine(all, from, 1)?.focus(),
      Home: () => all[0].focus(),
      End: () => all.at(-1).focus(),
      Enter: () => choose(Number(from.dataset.token)),
      " ": () => choose(Number(from.dataset.token)),
      Escape: () => change({ token: null }),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });

  let drawn = "";
  function draw() {
    drawBar();
    drawLegend();
    const { router, beside, text, layer, after, colour } = state;
    const now = JSON.stringify({ router, beside, text, layer, after, colour });
    if (now !== drawn) drawPanes();
    drawn = now;
    filter();
    mark();
    drawPanel();
  }

  pageState.changed(() => { read(); draw(); });
  read();
  draw();
}

// Nothing is read or drawn until the Explorer is near the screen, or printed: a page opens without waiting for it.
(() => {
  const root = document.getElementById("explorer");
  if (!root) return;
  const near = new IntersectionObserver((seen) => { if (seen.some(({ isIntersecting }) => isIntersecting)) begin(); }, { rootMargin: "400px" });
  function begin() {
    near.disconnect();
    removeEventListener("beforeprint", begin);
    root.classList.add("x-ready");
    explore(root, JSON.parse(document.getElementById("figures").textContent));
  }
  near.observe(root);
  addEventListener("beforeprint", begin);
})();
