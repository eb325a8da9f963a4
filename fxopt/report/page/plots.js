// Plots by plotly.js: unpacked after the first screen stands, drawn when they come into sight, drawn again in another theme.

const plots = [];
let plotly = null;

function color(name) {
  const probe = el("span", { vars: { color: `var(--${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}


// Told apart by people who see colours differently (Okabe and Ito's, lightened for the dark).
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#a6761d"];
const DARK_COLORS = ["#4aa3dd", "#f08040", "#35c49a", "#e39bc4", "#f0b740", "#85cdf5", "#b39ad6", "#cfa04a"];
const NO_COLOR = ["#8a929c", "#8a929c"];
const paletteOf = (names) => new Map(names.map((name, i) => [name, name === "" || i >= COLORS.length ? NO_COLOR : [COLORS[i], DARK_COLORS[i]]]));

// plotly reads a little HTML in its texts.
const plotText = (text, most = 60) => shorten(text, most).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

function loadPlotly(source) {
  const script = document.createElement("script");
  script.textContent = source; // admitted by its hash in the page's policy
  document.head.append(script);
  plotly = window.Plotly;
}

// Pixels above a drawing: plotly lays its toolbar over whatever is there.
const TOOLBAR = 36;

function layoutOf(extra) {
  const axis = { gridcolor: color("line"), linecolor: color("line"), zerolinecolor: color("line"), tickfont: { size: 12 }, automargin: true };
  const { xaxis, yaxis, ...rest } = extra;
  for (const one of [xaxis, yaxis]) if (one.title) one.title = { standoff: 8, ...one.title, font: { size: innerWidth < 640 ? 11 : 12, color: color("soft") } };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "system-ui, sans-serif", size: 13, color: color("text") },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("soft"), activecolor: color("text") },
    margin: { l: 60, r: 16, t: TOOLBAR, b: 50 }, hovermode: "closest", dragmode: "zoom", autosize: true, hoverlabel: { namelength: 0 },
    legend: legend((rest.height || 500) - TOOLBAR - 50),
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
  };
}

// Below the title of the horizontal axis; plotly takes the place as a part of the drawing's height.
const legend = (height) => ({ orientation: "h", y: -62 / height, yanchor: "top", x: 0, font: { size: 12 } });

class Plot {
  // build() gives {traces, layout}; hover(point) an element or null; click(point) opens it. changed(plot): after zooming.
  constructor({ label, height, build, hover, click, zoomed }) {
    Object.assign(this, { height, build, hover, click, zoomed });
    this.element = el("div", { class: "plot waiting", role: "img", "aria-label": label, vars: { height: `${height}px` } });
    this.drawn = false;
    plots.push(this);
  }

  async draw() {
    if (!plotly || !this.element.isConnected) return;
    const { traces, layout } = this.build();
    const height = layout.height || this.height;
    this.element.style.height = `${height}px`;
    const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };
    const first = !this.drawn;
    this.drawn = true;
    this.element.classList.remove("waiting");
    await plotly.react(this.element, traces, layoutOf({ ...layout, height }), config);
    if (first) this.listen();
    this.scalable();
  }

  listen() {
    const on = (event, handler) => this.element.on(event, handler);
    on("plotly_hover", (event) => {
      const content = this.hover && this.hover(event.points[0]);
      if (content) showTip(content, event.event);
    });
    on("plotly_unhover", hideTip);
    on("plotly_click", (event) => { hideTip(); if (this.click) this.click(event.points[0]); });
    on("plotly_afterplot", () => this.scalable());
    if (this.zoomed) on("plotly_relayout", (change) => this.zoomed(change));
  }

  // On paper the drawing shrinks as a whole, for which it needs a view box.
  scalable() {
    for (const icon of this.element.querySelectorAll(".modebar svg")) icon.setAttribute("aria-hidden", "true");
    for (const svg of this.element.querySelectorAll(".main-svg"))
      svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
  }

  discard() {
    if (this.drawn) plotly.purge(this.element);
    plots.splice(plots.indexOf(this), 1);
  }
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const plot = plots.find((one) => one.element === entry.target);
    if (entry.isIntersecting && plot && plotly) { watcher.unobserve(entry.target); if (!plot.drawn) plot.draw(); }
  }
}, { rootMargin: "400px" });

function watchPlots() {
  for (const plot of plots) if (!plot.drawn) { watcher.unobserve(plot.element); watcher.observe(plot.element); }
}

async function drawAll(again = false) {
  for (const plot of [...plots]) if (again ? plot.drawn : !plot.drawn) await plot.draw();
}

function showTip(content, at) {
  const tip = $("tip");
  tip.replaceChildren(content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const x = at.clientX + 14 + width > innerWidth ? Math.max(4, at.clientX - 14 - width) : at.clientX + 14;
  const y = at.clientY + 14 + height > innerHeight ? Math.max(4, at.clientY - 14 - height) : at.clientY + 14;
  tip.style.left = `${x}px`;
  tip.style.top = `${y}px`;
}

const hideTip = () => { $("tip").hidden = true; };
const tipOf = (title, ...lines) => el("div", null, el("b", null, named(title, 160)), lines.filter(Boolean).map((line) => el("div", { class: "soft" }, line)));

// ---- roofline ----

const MOST_POINTS = 1500;
const TYPES = { float32: "fp32", bfloat16: "bf16", float16: "fp16", float64: "fp64", tf32: "TF32" };

function rooflinePoints(graph, traffic) {
  const g = graph.groups, points = [];
  let without = 0;
  for (let i = 0; i < g.rows; i++) {
    const measured = g.dram_read_bytes && known(g.dram_read_bytes[i]) && known(g.dram_write_bytes[i])
      ? g.dram_read_bytes[i] + g.dram_write_bytes[i] : null;
    const bytes = traffic === "measured" ? measured : g.bytes[i];
    if (!(g.time_ns[i] > 0)) continue;
    if (!(g.flops[i] > 0) || !(bytes > 0)) { without += g.share[i]; continue; }
    points.push({ i, x: g.flops[i] / bytes, y: (g.flops[i] / g.time_ns[i]) * 1e9, bytes, limit: graph.limitOf(g.launch[i]) });
  }
  points.sort((a, b) => g.time_ns[b.i] - g.time_ns[a.i]);
  return { points: points.slice(0, MOST_POINTS), dropped: points.length - MOST_POINTS, without };
}

function rooflinePlot(graph, state) {
  const g = graph.groups;
  const build = () => {
    const { points } = rooflinePoints(graph, state.traffic);
    const whole = points.reduce((sum, point) => sum + g.time_ns[point.i], 0);
    const sums = new Map();
    for (const point of points) sums.set(point.limit, (sums.get(point.limit) || 0) + g.time_ns[point.i]);
    const names = [...sums.keys()].sort((a, b) => (a === "") - (b === "") || sums.get(b) - sums.get(a));
    const palette = paletteOf(names), shade = isDark() ? 1 : 0;
    const traces = names.map((name) => {
      const own = points.filter((point) => point.limit === name);
      return {
        type: "scatter", mode: "markers", name: name ? plotText(name.replaceAll("_", " ")) : "no limit found", x: own.map((p) => p.x), y: own.map((p) => p.y),
        customdata: own.map((p) => p.i), hoverinfo: "none",
        marker: { size: own.map((p) => Math.min(46, 6 + 60 * Math.sqrt(g.time_ns[p.i] / whole))), color: palette.get(name)[shade], opacity: 0.72, line: { width: 1, color: color("page") } },
      };
    });
    const xs = points.map((p) => p.x), ys = points.map((p) => p.y);
    const roof = roofs(graph.ceilings, xs, ys);
    return {
      traces: [...roof.traces, ...traces, ...roof.words],
      layout: {
        xaxis: { type: "log", title: { text: `FLOP per byte of device memory (${state.traffic})` }, range: roof.x, dtick: 1, exponentformat: "power" },
        yaxis: { type: "log", title: { text: "FLOP/s reached" }, range: roof.y, exponentformat: "SI", dtick: 1 },
      },
    };
  };
  return new Plot({
    label: "Roofline: rate of arithmetic over FLOP per byte of each launch; the table of FX nodes holds the same numbers", height: 546, build,
    hover: (point) => {
      if (point.customdata === undefined) return null;
      const i = point.customdata;
      return tipOf(g.nodes[i].join(", ") || g.launch[i], g.launch[i].length < 80 ? g.launch[i] : "", `${duration(g.time_ns[i])} a call, ${percent(g.share[i])} of kernel time`,
        `${prefixed(point.y, "FLOP/s")} at ${digits(point.x)} FLOP/byte`, graph.limitOf(g.launch[i]).replaceAll("_", " "), "click for all of it");
    },
    click: (point) => { if (point.customdata !== undefined) inspect(g.launch[point.customdata], launchDetail(graph, point.customdata)); },
  });
}

function roofs(ceilings, xs, ys) {
  const log = Math.log10, limit = (values, to) => (values.length ? to(...values) : 1);
  let [x0, x1] = [log(limit(xs, Math.min)) - 0.4, log(limit(xs, Math.max)) + 0.4];
  let [y0, y1] = [log(limit(ys, Math.min)) - 0.4, log(limit(ys, Math.max)) + 0.4];
  if (!ceilings) return { traces: [], words: [], x: [x0, x1], y: [y0, y1] };
  const copy = ceilings.copy_bytes_per_s, rates = Object.entries(ceilings.flops_per_s).sort((a, b) => b[1] - a[1]);
  const top = rates.length ? rates[0][1] : copy * 10 ** x1;
  x1 = Math.max(x1, log(top / copy) + 0.5);
  x0 = Math.min(x0, log(top / copy) - 1.2);
  y1 = Math.max(y1, log(top) + 0.25);
  const line = (x, y, dash) => ({ type: "scatter", mode: "lines", x, y, line: { color: color("soft"), width: 1.5, dash }, hoverinfo: "skip", showlegend: false });
  const word = (x, y, text, position) => ({ type: "scatter", mode: "text", x: [x], y: [y], text: [text], textposition: position, textfont: { size: 12, color: color("soft") }, hoverinfo: "skip", showlegend: false });
  const traces = [line([10 ** x0, top / copy], [copy * 10 ** x0, top], "solid")], words = [];
  const low = Math.max(x0, y0 - log(copy)) + 0.12;
  words.push(word(10 ** low, copy * 10 ** low, `copy ${prefixed(copy, "B/s")}`, "bottom right"));
  let last = Infinity;
  for (const [type, rate] of rates) {
    const close = log(last) - log(rate) < 0.07; // two names would stand on each other
    traces.push(line([rate / copy, 10 ** x1], [rate, rate], type === "float32" ? "solid" : "dash"));
    words.push(word(10 ** x1, close ? rate / 1.04 : rate * 1.04, `${plotText(TYPES[type] || type)} ${prefixed(rate, "FLOP/s")}`, close ? "bottom left" : "top left"));
    last = close ? last : rate;
  }
  return { traces, words, x: [x0, x1], y: [Math.min(y0, y1 - 3), y1] };
}

// ---- timeline ----

function lanesOf(graph, call) {
  const k = graph.kernels, lanes = new Map();
  for (let i = 0; i < k.rows; i++) {
    if (call !== "all" && k.iteration[i] !== call) continue;
    const where = known(k.stream[i]) ? `stream ${k.stream[i]}` : known(k.thread[i]) ? `thread ${k.thread[i]}` : "no stream";
    collect(lanes, `${k.device[i]} ${where}`, i);
  }
  return [...lanes].map(([name, rows]) => laneOf(graph, name, rows));
}

// What runs on one stream: kernels by start, the time during which any runs, and the gaps between.
function laneOf(graph, name, rows) {
  const k = graph.kernels;
  rows.sort((a, b) => k.start_ns[a] - k.start_ns[b]);
  const gaps = [];
  let busy = 0, end = k.start_ns[rows[0]], last = rows[0];
  for (const i of rows) {
    const start = k.start_ns[i], stop = start + k.duration_ns[i];
    if (start > end) gaps.push({ start: end, time: start - end, after: last, before: i });
    busy += Math.max(0, stop - Math.max(start, end));
    if (stop > end) { end = stop; last = i; }
  }
  return { name, rows, busy, gaps, start: k.start_ns[rows[0]], end };
}

// Kernels that would be narrower than two pixels are drawn together, so that any number of them is quick.
function bars(graph, lane, from, to, pixel) {
  const k = graph.kernels, out = [];
  let run = null;
  const flush = () => { if (run) out.push(run); run = null; };
  for (const i of lane.rows) {
    const start = k.start_ns[i], stop = start + k.duration_ns[i];
    if (stop < from || start > to) continue;
    if (k.duration_ns[i] >= 2 * pixel) { flush(); out.push({ start, stop, rows: [i] }); continue; }
    if (run && start - run.stop < pixel && run.stop - run.start < 40 * pixel) { run.stop = Math.max(run.stop, stop); run.rows.push(i); }
    else { flush(); run = { start, stop: Math.max(stop, start + pixel), rows: [i] }; }
  }
  flush();
  return out;
}

function timelinePlot(graph, state) {
  const k = graph.kernels;
  let last = null;
  const build = () => {
    const lanes = lanesOf(graph, state.call);
    const origin = Math.min(...lanes.map((lane) => lane.start)), end = Math.max(...lanes.map((lane) => lane.end));
    const whole = [-0.01 * (end - origin), 1.01 * (end - origin)];
    const [from, to] = state.range || whole;
    const pixel = (to - from) / Math.max(200, plot.element.clientWidth - 120);
    const sums = new Map(), byWork = new Map();
    for (const lane of lanes) for (const bar of bars(graph, lane, from + origin, to + origin, pixel)) {
      const work = bar.rows.length === 1 ? k.work[bar.rows[0]] : commonWork(k, bar.rows);
      collect(byWork, work, { ...bar, lane: lane.name });
      sums.set(work, (sums.get(work) || 0) + bar.stop - bar.start);
    }
    const all = new Map();
    for (let i = 0; i < k.rows; i++) all.set(k.work[i], (all.get(k.work[i]) || 0) + k.duration_ns[i]);
    const palette = paletteOf([...all.keys()].sort((a, b) => all.get(b) - all.get(a))), shade = isDark() ? 1 : 0; // the same at any zoom
    const lane = (name) => plotText(name, 28);
    const traces = [{
      type: "bar", orientation: "h", name: "nothing runs", y: lanes.map((one) => lane(one.name)), base: lanes.map((one) => one.start - origin),
      x: lanes.map((one) => one.end - one.start), width: 0.62, marker: { color: color("gap") }, hoverinfo: "skip", showlegend: true,
    }];
    last = [];
    for (const [work, found] of [...byWork].sort((a, b) => sums.get(b[0]) - sums.get(a[0]))) {
      traces.push({
        type: "bar", orientation: "h", name: plotText(DATA.kinds[work] || work), y: found.map((bar) => lane(bar.lane)), base: found.map((bar) => bar.start - origin),
        x: found.map((bar) => bar.stop - bar.start), width: 0.62, customdata: found.map((bar) => last.push(bar) - 1), hoverinfo: "none",
        marker: { color: (palette.get(work) || NO_COLOR)[shade], line: { width: 0 } },
      });
    }
    const narrow = innerWidth < 640, ticks = ticksOf(from, to, narrow ? 3 : 7);
    return {
      traces,
      layout: {
        barmode: "overlay", bargap: 0, height: 176 + 42 * lanes.length + (narrow ? 20 * byWork.size : 0),
        xaxis: { range: [from, to], tickvals: ticks, ticktext: ticks.map(duration), title: { text: narrow ? "" : "time since the first kernel shown" } },
        yaxis: { fixedrange: true, autorange: "reversed", type: "category" }, legend: legend(90 + 42 * lanes.length),
      },
    };
  };
  const plot = new Plot({
    label: "Timeline of kernels on each stream; the table below it holds busy time and gaps", height: 286, build,
    hover: (point) => {
      const bar = last && last[point.customdata];
      if (!bar) return null;
      if (bar.rows.length > 1) return tipOf(count(bar.rows.length, "short kernel"), `${duration(bar.stop - bar.start)} together`, "zoom in to see them");
      const i = bar.rows[0];
      return tipOf(k.name[i], `${duration(k.duration_ns[i])}, at ${duration(bar.start - Math.min(...lanesOf(graph, state.call).map((lane) => lane.start)))}`, k.nodes[i].length ? k.nodes[i].join(", ") : "", "click for all of it");
    },
    click: (point) => {
      const bar = last && last[point.customdata];
      if (!bar) return;
      if (bar.rows.length === 1) inspect(k.name[bar.rows[0]], kernelDetail(graph, bar.rows[0]));
      else inspect(count(bar.rows.length, "short kernel"), kernelList(graph, bar.rows));
    },
    zoomed: (change) => {
      if ("xaxis.range[0]" in change) state.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      else if (change["xaxis.autorange"]) state.range = null;
      else return;
      plot.draw();
    },
  });
  return plot;
}

function commonWork(k, rows) {
  const sums = new Map();
  for (const i of rows) sums.set(k.work[i], (sums.get(k.work[i]) || 0) + k.duration_ns[i]);
  return [...sums].reduce((a, b) => (b[1] > a[1] ? b : a))[0];
}

function ticksOf(from, to, most) {
  const rough = (to - from) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let at = Math.ceil(Math.max(from, 0) / step) * step; at <= to; at += step) ticks.push(at);
  return ticks;
}

// ---- ratios with intervals ----

// rows: {name, ratio, low, high, kept}; above 1 is faster.
function intervalPlot(label, rows, axis) {
  const names = rows.map((row, i) => `${plotText(row.name, 48)}${"\u200b".repeat(i)}`); // equal names are rows of their own
  return new Plot({
    label: `${label}; the table below holds the same numbers`, height: 136 + 30 * rows.length,
    build: () => ({
      traces: [{
        type: "scatter", mode: "markers", y: names, x: rows.map((row) => row.ratio), customdata: rows.map((_, i) => i), hoverinfo: "none", showlegend: false,
        marker: { size: 9, color: rows.map((row) => color(row.kept ? "accent" : "soft")), symbol: rows.map((row) => (row.kept ? "circle" : "circle-open")) },
        error_x: { type: "data", symmetric: false, array: rows.map((row) => row.high - row.ratio), arrayminus: rows.map((row) => row.ratio - row.low), thickness: 1.5, width: 4, color: color("soft") },
      }],
      layout: {
        xaxis: { title: { text: axis } }, yaxis: { autorange: "reversed", type: "category", fixedrange: true },
        shapes: [{ type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: { color: color("text"), width: 1, dash: "dot" } }],
      },
    }),
    hover: (point) => { const row = rows[point.customdata]; return row && tipOf(row.name, `${row.ratio.toFixed(2)}×, 95 % interval ${row.low.toFixed(2)} to ${row.high.toFixed(2)}`); },
  });
}
