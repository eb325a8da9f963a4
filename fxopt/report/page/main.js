// Opening the page: unpack, build the sections of the chosen graph, and listen.

let DATA = null;
let graphs = [];

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  const now = isDark();
  $("theme").textContent = now ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Switch to ${now ? "light" : "dark"} colours`);
}

const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function switchTheme() {
  applyTheme(isDark() ? "light" : "dark");
  drawAll(true);
}

function sectionsOf(graph, choose) {
  const ran = graph.profile && graph.kernels.rows;
  return [
    summarySection(graph), graphsSection(graphs, choose), comparedSection(graph), ran ? rooflineSection(graph) : null, ran ? nodesSection(graph) : null, ran ? modulesSection(graph) : null,
    ran ? linesSection(graph) : null, ran ? timelineSection(graph) : null, ran ? kernelsSection(graph) : null, labelsSection(graph), changesSection(graph), graphTextsSection(graph), numericsSection(graph),
    graph.profile ? unattributedSection(graph) : null, machineSection(graph), glossarySection(),
  ].filter(Boolean);
}

function choose(index) {
  for (const plot of [...plots]) plot.discard();
  tables.length = 0;
  if (DATA.kind !== "diff" && !graphs[index].ready) graphs[index] = Object.assign(new Graph(DATA.graphs[index], DATA), { ready: true });
  const sections = DATA.kind === "diff" ? differenceSections(DATA.graphs[0]) : sectionsOf(graphs[index], choose);
  $("main").replaceChildren(...sections);
  $("graph").value = String(index);
  $("contents").replaceChildren(...sections.slice(1).map((one) => el("a", { href: `#${one.id}` }, one.dataset.short)));
  follow(sections);
  watchPlots();
  scrollTo({ top: 0, behavior: "instant" });
}

// The section in sight is marked in the contents.
let follower = null;
function follow(sections) {
  if (follower) follower.disconnect();
  follower = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting)
      for (const link of $("contents").children) {
        const here = link.hash === `#${entry.target.id}`;
        if (here) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const one of sections) follower.observe(one);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest && event.target.closest("input, select, textarea");
  if (event.key === "/" && !typing) {
    const inSight = tables.find((table) => { const box = table.element.getBoundingClientRect(); return box.top < innerHeight * 0.8 && box.bottom > 80 && table.text; });
    const table = inSight || tables.find((one) => one.name === "FX nodes") || tables[0];
    if (!table) return;
    table.search.focus();
    if (!inSight) table.element.scrollIntoView({ block: "start" });
    event.preventDefault();
  } else if (event.key === "d" && !typing) switchTheme();
  else if (event.key === "?" && !typing) toggleHelp();
  else if (event.key === "Escape") { hideTip(); if (!$("help").hidden) toggleHelp(); }
}

function toggleHelp() {
  $("help").hidden = !$("help").hidden;
  $("keys").setAttribute("aria-expanded", String(!$("help").hidden));
}

function listen() {
  $("graph").addEventListener("change", (event) => choose(Number(event.target.value)));
  $("theme").addEventListener("click", switchTheme);
  $("print").addEventListener("click", () => print());
  $("keys").addEventListener("click", toggleHelp);
  $("close").addEventListener("click", () => $("inspector").close());
  $("inspector").addEventListener("click", (event) => { if (event.target === $("inspector")) $("inspector").close(); });
  addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(); drawAll(true); });
  const folded = [];
  addEventListener("beforeprint", () => {
    for (const table of tables) table.print();
    for (const box of document.querySelectorAll("main details:not([open])")) { if (box.unfold) box.unfold(); box.open = true; folded.push(box); }
  });
  addEventListener("afterprint", () => {
    for (const table of tables) table.printed();
    for (const box of folded.splice(0)) box.open = false;
  });
}

async function open() {
  applyTheme();
  if (typeof DecompressionStream === "undefined") {
    $("opening").textContent = "This browser is too old to unpack the report: it needs one from 2023 or later.";
    return;
  }
  const data = await unpack("data"), library = unpack("plotly"); // which goes on while the first screen is built
  DATA = JSON.parse(data);
  DATA.lists = DATA.lists.map((ids) => ids.map((id) => DATA.texts[id]));
  document.title = DATA.title;
  $("title").replaceChildren(named(DATA.title, 160));
  graphs = DATA.graphs.map((graph) => ({ name: graph.name, report: graph.report }));
  $("graph").replaceChildren(...DATA.graphs.map((graph, i) => el("option", { value: i }, graph.name)));
  $("choice").hidden = DATA.graphs.length < 2;
  listen();
  if (DATA.graphs.length) choose(0);
  else $("main").replaceChildren(emptyReport());
  $("footer").replaceChildren(el("p", null, `Written by fxopt on ${DATA.written}. This file is complete: it asks no server for anything, and plots are drawn by plotly.js (MIT licence).`));
  performance.mark("report-rendered");
  document.documentElement.dataset.rendered = "true";
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  loadPlotly(await library);
  watchPlots();
  performance.mark("report-interactive");
  document.documentElement.dataset.ready = "true";
  const idle = window.requestIdleCallback || ((task) => setTimeout(task, 300));
  idle(async () => { await drawAll(); performance.mark("report-drawn"); document.documentElement.dataset.drawn = "true"; });
}

const emptyReport = () => el("section", null, el("p", { class: "headline" }, "No graph reached fxopt: the model ran as it is, and nothing was measured or changed."),
  el("p", null, "TorchDynamo leaves some modules (nn.LSTM, nn.GRU, nn.RNN) to eager mode, and graph breaks or disabled regions can hide the rest; TORCH_LOGS=graph_breaks shows where."),
  DATA.messages.map((text) => el("p", { class: "alert" }, text)));

open().catch((error) => {
  $("main").replaceChildren(el("p", { class: "alert", role: "alert" }, `The report could not be opened: ${error.message}`));
  throw error;
});
