// The page of results: tables, plots and settings, from the data in it or from a server.

// Colours that people with any colour vision tell apart (Okabe and Ito), then again with other strokes and hatches.
// There are as many signs as colours, so they move on by one in each turn, and are open in every second.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"];
const STROKES = ["solid", "dash", "dot", "dashdot"];
const SIGNS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"];
const HATCHES = ["", "/", ".", "x"]; // of bars
const MANY = 4; // lines; with more, bands are hidden until they are asked for
const FEW = 60; // points; with more, a line has no dots
const DOT = 7, LARGEST_DOT = 26; // pixels, of one client and of many at the same place
// Named one by one: the library's own choice has a button that sends a chart to a server.
const BUTTONS = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
const PAPER = { width: 315, height: 240, autosize: false }; // two plots beside each other on A4 or letter, less their legends
const FEW_TICKS = 8; // on paper
const BESIDE = 70; // of a plot's width, for its numbers
const LETTER = 6.6, LINE = 16; // a letter's width and a line's height, about

let paper = false, closed = []; // whether it is being printed, and what is open for that alone
const cards = new Map(); // by plot: its element, its data, whether it is drawn

const ticks = (upwards) => (paper ? FEW_TICKS : upwards ? 14 : 24); // of clients and classes

function style(place) {
  const turn = Math.floor(place / COLOURS.length);
  return {
    colour: COLOURS[place % COLOURS.length], stroke: STROKES[turn % STROKES.length], hatch: HATCHES[turn % HATCHES.length],
    sign: SIGNS[(place + turn) % SIGNS.length] + (turn % 2 ? "-open" : ""),
  };
}

function alpha(colour, share) {
  return colour + Math.round(255 * share).toString(16).padStart(2, "0");
}

// From our plots to Plotly's.

function traces(plot, bands) {
  return plot.marks.flatMap((mark) => ({ line: lines, points: points, bars: bars, heatmap: heat })[mark.kind](mark, plot, bands));
}

function lines(mark, plot, bands) {
  const { colour, stroke, sign } = style(mark.style);
  const shared = { x: mark.x, legendgroup: mark.name, type: "scatter" };
  const drawn = bands ? mark.bands.flatMap((band, place) => {
    const side = { ...shared, mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip", connectgaps: true };
    const fill = alpha(colour, place ? 0.3 : 0.13);
    return [{ ...side, y: band.low }, { ...side, y: band.high, fill: "tonexty", fillcolor: fill }];
  }) : [];
  const text = mark.text.length ? mark.text : undefined;
  const dots = mark.dots && mark.x.length <= FEW;
  return [...drawn, {
    ...shared, y: mark.y, name: mark.name, text, mode: dots ? "lines+markers" : "lines", connectgaps: true,
    line: { color: colour, dash: stroke, width: 2 }, marker: { color: colour, symbol: sign, size: 6 },
    hovertemplate: `%{y:.4~g}${text ? " (%{text})" : ""}`,
  }];
}

function points(mark, plot) {
  const { colour, sign } = style(mark.style), open = sign.endsWith("-open");
  const most = Math.max(...plot.marks.flatMap((one) => one.many));
  const one = Math.min(DOT, LARGEST_DOT / Math.sqrt(most)); // its area tells how many
  return [{
    type: "scatter", mode: "markers", name: mark.name, x: mark.x, y: mark.y, text: mark.text,
    marker: {
      color: open ? colour : alpha(colour, most > 1 ? 0.4 : 0.75), symbol: sign, opacity: 1,
      line: { color: colour, width: most > 1 || open ? 1 : 0 }, // large ones of several entries lie on each other
      size: mark.many.map((many) => Math.max(4, one * Math.sqrt(many))),
    },
    hovertemplate: `%{text}<br>%{x:.4~g} → %{y:.4~g}<extra>${safe(mark.name)}</extra>`,
  }];
}

// On paper names of bars stand upright where they are many; where their lines have no room beside each other, in one line.
function names(mark) {
  const lines = Math.max(...mark.labels.map((label) => label.split("\n").length));
  return paper && mark.labels.length * lines * LINE > PAPER.width - BESIDE ? mark.labels.map((label) => label.replace(/\n/g, " ")) : mark.labels;
}

function bars(mark) {
  const { colour, hatch } = style(mark.style);
  const marker = { color: colour, pattern: { shape: hatch, size: 6, solidity: 0.4, fgcolor: "#ffffff", fillmode: "overlay" } };
  return [{ type: "bar", name: mark.name, x: names(mark), y: mark.y, marker, hovertemplate: `%{y:.4~g}` }];
}

function heat(mark, plot) {
  const hover = `${safe(plot.x.label)} %{x}, ${safe(plot.y.label)} %{y}: %{z:.4~g}<extra>${safe(mark.name)}</extra>`;
  return [{
    type: "heatmap", x: mark.columns, y: mark.rows, z: mark.values, zmin: mark.low ?? undefined, zmax: mark.high ?? undefined,
    colorscale: "Cividis", hovertemplate: hover, colorbar: { thickness: 12, title: { text: safe(mark.name), side: "right" } },
  }];
}

// Plotly reads some markup in its texts; names of clients and files are nobody's markup.
function safe(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "% {").replace(/\n/g, "<br>");
}

function cleaned(trace) {
  const made = { ...trace };
  if (made.name !== undefined) made.name = safe(made.name);
  for (const key of ["text", "labels"]) if (Array.isArray(made[key])) made[key] = made[key].map(safe);
  if (made.type !== "scatter") for (const key of ["x", "y"]) made[key] = made[key].map((one) => (typeof one === "string" ? safe(one) : one));
  return made;
}

function layout(plot) {
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(`--${name}`).trim();
  const kinds = new Set(plot.marks.map((mark) => mark.kind));
  const category = kinds.has("heatmap") || kinds.has("bars");
  const axis = (one, named) => ({
    title: { text: safe(one.label), standoff: 8 }, gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false,
    automargin: true, ...(named ? { type: "category", tickangle: "auto", nticks: kinds.has("heatmap") ? ticks(one === plot.y) : 24 } : {}),
    ...(one.low !== null && one.high !== null ? { range: [one.low, one.high] } : one.low !== null ? { rangemode: "tozero" } : {}),
    ...(one.log ? { type: "log" } : {}), ...(one.ticks.length ? { tickvals: one.ticks, ticktext: one.ticks.map(String) } : {}),
    ...(one.whole ? { tickformat: ",d", ...(span(plot) <= 8 ? { dtick: 1 } : {}) } : {}),
  });
  const along = kinds.has("line") && plot.x.whole;
  const flat = kinds.has("line") && plot.y.low === null ? around(plot) : {};
  const keys = plot.marks.filter((mark) => mark.kind !== "heatmap").length;
  return {
    margin: { l: 8, r: 16, t: 30, b: 8 }, modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("faint"), activecolor: colour("ink") }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("ink") }, showlegend: keys > 1 || (keys > 0 && plot.legend),
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, traceorder: "normal", maxheight: 1 }, barmode: plot.stacked ? "stack" : "group",
    hovermode: along && plot.marks.length <= 12 ? "x unified" : "closest",
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
    xaxis: axis(plot.x, category), yaxis: { ...axis(plot.y, kinds.has("heatmap")), ...flat, ...(kinds.has("heatmap") ? { autorange: "reversed" } : {}) },
    shapes: plot.diagonal ? [diagonal(plot, colour("faint"))] : [],
  };
}

// A legend of many long names needs room below the plot, which keeps its own, and so do names that stand upright on paper.
function more(plot) {
  const width = paper ? PAPER.width - BESIDE : 500;
  const keys = plot.marks.filter((mark) => mark.kind !== "heatmap").map((mark) => mark.name.length);
  const across = Math.max(1, Math.floor(width / (Math.max(0, ...keys) * LETTER + 46)));
  const named = plot.marks.find((mark) => mark.labels || mark.columns);
  const below = named?.labels ? names(named) : (named?.columns ?? []);
  const longest = Math.max(0, ...below.flatMap((label) => label.split("\n").map((line) => line.length)));
  const many = named?.labels ? below.length : Math.min(below.length, FEW_TICKS);
  const upright = paper && longest * many * LETTER > width ? Math.max(0, longest - 8) * LETTER : 0;
  return 19 * Math.max(0, Math.ceil(keys.length / across) - 2) + upright;
}

// The axis of lines that are all at one value: the library would leave 1 on both sides, whatever the value.
function around(plot) {
  const all = plot.marks.flatMap((mark) => [...mark.y, ...mark.bands.flatMap((band) => [...band.low, ...band.high])]).filter((one) => one !== null);
  const [value] = all, room = Math.abs(value) / 20 || 1;
  return all.every((one) => one === value) ? { range: [value - room, value + room] } : {};
}

function span(plot) {
  const all = plot.marks.flatMap((mark) => mark.x || []);
  return all.length ? Math.max(...all) - Math.min(...all) : 0;
}

function diagonal(plot, colour) {
  const all = plot.marks.flatMap((mark) => [...mark.x, ...mark.y]);
  const low = Math.min(...all), high = Math.max(...all);
  return { type: "line", layer: "below", x0: low, y0: low, x1: high, y1: high, line: { color: colour, width: 1, dash: "dot" } };
}

function draw(card) {
  const { plot, canvas, bands } = card;
  const image = { format: "svg", filename: plot.name };
  const size = paper ? { ...PAPER, height: PAPER.height + more(plot) } : { autosize: true };
  card.drawn = true;
  canvas.style.setProperty("--more", `${more(plot)}px`);
  return Plotly.react(canvas, traces(plot, bands).map(cleaned), { ...layout(plot), ...size }, {
    responsive: !paper, displaylogo: false, toImageButtonOptions: image, displayModeBar: "hover", modeBarButtons: BUTTONS,
  });
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const card = cards.get(entry.target.id);
    if (entry.isIntersecting && card && !card.drawn) draw(card);
  }
}, { rootMargin: "400px" });

function cardOf(plot) {
  const id = anchor("plot", plot.name);
  const known = cards.get(id);
  if (known) {
    known.about.textContent = plot.about;
    known.plot = plot;
    known.canvas.style.setProperty("--more", `${more(plot)}px`);
    if (known.drawn) draw(known);
    return known.element;
  }
  const count = plot.marks.filter((mark) => mark.bands && mark.bands.length).length;
  const card = { plot, bands: count <= MANY, drawn: false, canvas: el("div", { class: "canvas" }), about: el("p", { class: "about" }, plot.about) };
  const said = () => `${card.bands ? "hide" : "show"} bands`;
  const toggle = el("button", { type: "button", onclick: () => { card.bands = !card.bands; toggle.textContent = said(); draw(card); } }, said());
  card.element = el("section", { class: "plot", id },
    el("div", { class: "row" }, el("h3", {}, plot.title), ...(count ? [toggle] : [])), card.about, card.canvas);
  card.canvas.style.setProperty("--more", `${more(plot)}px`);
  cards.set(id, card);
  seen.observe(card.element);
  return card.element;
}

// The parts of the page.

function titled(table, level = "h3") {
  const about = table.about ? [el("p", { class: "about" }, table.about)] : [];
  return [el(level, {}, table.title), ...about, tableOf(table)];
}

function listed(title, lines) {
  return lines.length ? [el("h3", {}, title), el("ul", {}, ...lines.map((one) => el("li", {}, one)))] : [];
}

function study(data) {
  if (!data.study) return [];
  const { lines, table, claims, failed, notes, open } = data.study;
  const two = (one) => {
    const [first, ...rest] = one.text.split("\n");
    return el("span", {}, first, ...rest.map((line) => el("small", {}, line)));
  };
  const word = (claim) => (claim.holds === null ? "" : claim.holds ? "holds" : "fails");
  return [
    el("h2", {}, table.title), ...lines.map((line) => el("p", {}, line)), tableOf(table, two),
    ...(claims.length ? [el("h3", {}, "Claims"), el("ul", { class: "claims" }, ...claims.map((claim) =>
      el("li", {}, el("b", { class: word(claim) }, claim.word), claim.text)))] : []),
    ...listed("Not measured", failed), ...listed("Notes", notes), ...listed("What the paper leaves open", open),
  ];
}

const opened = new Map(); // panels that somebody opened or closed

function panel(one, place, several, missing) {
  const by = (key) => one.tables.filter((table) => table.key === key);
  const content = [
    ...by("summary").flatMap((table) => titled(table)), ...listed("Not measured", missing),
    ...by("differences").flatMap((table) => titled(table)),
    el("div", { class: "plots" }, ...one.plots.map(cardOf)),
    ...by("paired").flatMap((table) => titled(table)), ...by("clients").flatMap((table) => titled(table)),
  ];
  if (!several) return content;
  const open = opened.get(one.name) ?? place === 0;
  const made = el("details", { class: "panel", id: anchor("panel", one.name), open }, el("summary", {}, one.name), ...content);
  made.addEventListener("toggle", () => opened.set(one.name, made.open));
  return [made];
}

function commandLine(text) {
  const copy = el("button", { type: "button" }, "copy");
  copy.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text); copy.textContent = "copied"; } catch { copy.textContent = "select and copy"; }
    setTimeout(() => { copy.textContent = "copy"; }, 2000);
  });
  return el("div", { class: "command" }, el("pre", {}, text), copy);
}

function settings(data) {
  const commands = [...new Set(data.repeats.map((one) => one.command))];
  const rows = Object.entries(data.settings).map(([key, value]) => [{ text: key, value: key }, { text: value, value }]);
  const heads = [{ name: "key", about: "", words: true }, { name: "value", about: "", words: true }];
  return [
    el("h2", { id: "settings" }, "Settings"),
    el("p", { class: "about" }, "To repeat it. A run's folder has its complete configuration in config.yaml; 'tailor run --config' takes it as it is."),
    ...commands.map(commandLine),
    ...(rows.length ? [el("p", { class: "about" }, "What all runs have in common and is not a default:"), tableOf({ key: "common", heads, rows })] : []),
    el("h3", {}, "Complete configurations"),
    ...data.repeats.map((one) => el("details", {}, el("summary", {}, one.label), el("pre", {}, one.config))),
  ];
}

function headline(data) {
  document.title = data.title;
  document.querySelector("h1").textContent = data.title;
  const state = document.getElementById("state");
  const going = data.progress.length ? `${data.progress.length} not finished` : "";
  state.textContent = data.runs === 1 ? going && "not finished" : [`${data.runs} runs`, going].filter(Boolean).join(", ");
  document.querySelector("footer").textContent = `tailorfl ${data.version}`;
  const several = data.panels.length > 1;
  const links = [["study", "Table", data.study], ...data.panels.map((one) => [anchor("panel", one.name), one.name, several]), ["settings", "Settings", true]];
  const back = data.home ? [el("a", { href: data.home }, "all runs")] : [];
  document.querySelector("nav").replaceChildren(...back, ...links.filter((one) => one[2]).map(([id, name]) => el("a", { href: `#${id}` }, name)));
}

function show(data) {
  const there = new Set(data.panels.flatMap((one) => one.plots.map((plot) => anchor("plot", plot.name))));
  for (const [id, card] of cards) if (!there.has(id)) { Plotly.purge(card.canvas); seen.unobserve(card.element); cards.delete(id); }
  headline(data);
  const main = document.querySelector("main");
  keeping(() => main.replaceChildren(
    ...(data.progress.length ? [el("ul", { id: "progress" }, ...data.progress.map((line) => el("li", {}, line)))] : []),
    ...(data.choice ? [el("p", { id: "choice" }, `${data.choice[0].toUpperCase()}${data.choice.slice(1)}.`)] : []),
    ...(data.notes.length ? [el("ul", { id: "notes" }, ...data.notes.map((line) => el("li", {}, line)))] : []),
    el("section", { id: "study" }, ...study(data)),
    ...data.panels.flatMap((one, place) => panel(one, place, data.panels.length > 1, data.missing)),
    ...settings(data),
  ));
  for (const card of cards.values()) if (card.drawn && card.element.isConnected) Plotly.Plots.resize(card.canvas);
  document.body.dataset.ready = "yes";
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function redraw() {
  if (paper) document.documentElement.dataset.theme = "light";
  for (const card of cards.values()) if (card.drawn) draw(card);
}

// On paper all is there, dark on white.
addEventListener("beforeprint", () => {
  paper = true;
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const one of closed) one.open = true;
  for (const card of cards.values()) card.drawn = true;
  redraw();
});
addEventListener("afterprint", () => {
  paper = false;
  for (const one of closed) one.open = false;
  paint(redraw);
});

async function start() {
  watchTheme(redraw);
  const source = document.body.dataset.source;
  if (source) return follow(source, show);
  const library = document.createElement("script");
  library.textContent = await unpack("plotly");
  document.head.append(library);
  show(JSON.parse(await unpack("data")));
}

start().catch((error) => { document.querySelector("main").textContent = `This page cannot be shown: ${error.message || error}`; });
