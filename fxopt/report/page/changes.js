// What a tuning run tried, kept and refused; numerics, clocks and the machine.

const times = (paired) => (paired ? `${paired.ratio.toFixed(2)}×` : "–");
const interval = (paired) => (paired ? `${paired.low.toFixed(2)} to ${paired.high.toFixed(2)}` : "–");

function comparedSection(graph) {
  const r = graph.report;
  const compared = DATA.comparison ? DATA.comparison.results : [];
  if (!r || (!r.ratio && !r.ablation.length && !compared.length)) return null;
  const rows = [], table = [];
  const add = (name, paired, kept) => {
    if (!paired) return;
    rows.push({ name, ...paired, kept });
    table.push([name, sourced(times(paired), "measured"), interval(paired), duration(paired.baseline_ns), duration(paired.candidate_ns), paired.pairs, `${(100 * paired.noise).toFixed(1)} %`]);
  };
  for (const pair of compared) add(`${pair.before} against ${pair.after}, the whole work`, pair, pair.after === "fxopt");
  add("all that was kept, wall time", r.ratio, true);
  add("all that was kept, kernel time", r.kernel_ratio, true);
  for (const row of r.ablation) {
    add(`${row.name} alone`, row.alone && row.alone.wall, false);
    add(`${row.name} in the set`, row.removed && row.removed.wall, true);
  }
  const plot = intervalPlot("Ratios with their 95 % intervals", rows, "times as fast");
  const why = r.ablation.filter((row) => row.reason);
  return section("compared", "Baseline and ablation", "How much faster, each time both codes side by side in the same process. Gains do not add up, so every row is a measurement of its own. “Alone” is a pass over the baseline; “in the set” is all that was kept over the same without the pass.",
    plot.element, simpleTable("", ["what", "ratio", "95 % interval", "before", "after", "pairs", "noise"], table, [1, 2, 3, 4, 5, 6]),
    compared.length ? null : el("p", { class: "soft small" }, "Inductor is torch.compile's own code. Eager mode was not timed; fxopt bench PROGRAM does that."),
    r.ablation.length ? null : el("p", { class: "soft small" }, "What each pass is worth by itself was not measured; the option ablate=True does that."),
    why.length ? el("details", { class: "box" }, el("summary", null, `Why ${count(why.length, "pass", "passes")} ${why.length === 1 ? "is" : "are"} not in it`), facts(why.map((row) => [row.name, `${row.outcome}: ${row.reason}`]))) : null);
}

function changesSection(graph) {
  const r = graph.report;
  if (!r) return null;
  const c = r.candidates;
  const outcome = (candidate) => el("span", { class: candidate.outcome === "kept" ? "good" : candidate.outcome === "failed" ? "bad" : null }, candidate.outcome);
  const table = c.length ? new Table({
    name: "candidates", rows: [...c.keys()], sort: 0, size: 30, open: (i) => candidateDetail(graph, c[i]),
    columns: [
      { title: "#", value: (i) => i, show: (i) => String(i + 1), number: true },
      { title: "tried", css: "wide", value: (i) => c[i].name, show: (i) => named(c[i].subject ? `${c[i].step === "remove" ? "without" : "with"} ${c[i].subject}` : c[i].name, 90) },
      { title: "outcome", value: (i) => c[i].outcome, show: (i) => outcome(c[i]) },
      { title: "ratio", number: true, help: "wall time of the best code so far over this one's", value: (i) => c[i].paired && c[i].paired.ratio, show: (i) => times(c[i].paired) },
      { title: "95 % interval", css: "optional", number: true, show: (i) => interval(c[i].paired) },
      { title: "error", css: "optional", number: true, value: (i) => c[i].verdict && c[i].verdict.rel_l2, show: (i) => (c[i].verdict ? scientific(c[i].verdict.rel_l2) : "–") },
      { title: "why", css: "optional", show: (i) => said(c[i].reason, 110) },
    ],
  }) : null;
  if (table) { table.sort.down = false; table.update(); }
  const kept = r.passes.map((name) => el("li", null, el("b", null, name), graph.descriptions[name] ? ` — ${graph.descriptions[name]}` : ""));
  const spent = Object.entries(r.seconds);
  return section("changes", "What was tried", "Candidates in the order in which they were compiled, checked against a 64-bit run and timed. The ratio of each is over the best code at that time.",
    kept.length ? [el("h3", null, "Kept"), el("ul", null, kept)] : null, table ? table.element : el("p", null, "No candidate was compiled."),
    r.out_of_reach.length ? el("details", { class: "box" }, el("summary", null, `Would answer a limit, and could not be used here (${r.out_of_reach.length})`), el("ul", null, r.out_of_reach.map((line) => el("li", { class: "small" }, line)))) : null,
    spent.length ? el("details", { class: "box" }, el("summary", null, `Time spent on tuning: ${seconds(spent.reduce((sum, [, value]) => sum + value, 0))}`), facts(spent.map(([name, value]) => [name.replaceAll("_", " "), seconds(value)]))) : null);
}

function candidateDetail(graph, candidate) {
  const refusals = (report) => {
    const reasons = new Map();
    for (const [target, why] of report.refused) collect(reasons, why, target);
    return [...reasons].sort((a, b) => b[1].length - a[1].length).map(([why, targets]) => el("li", { class: "small" }, why, el("span", { class: "soft" }, " · ", named(targets.join(", "), 120))));
  };
  const options = Object.entries(candidate.options).filter(([, value]) => Object.keys(value).length).map(([name, value]) => `${name}: ${JSON.stringify(value)}`).join("; ");
  return el("div", { class: "detail columns" },
    el("div", null, el("h4", null, "Candidate"), facts([
      ["consists of", named(candidate.passes.join(", "), 400)], ["options", options && named(options, 400)], ["outcome", `${candidate.outcome}${candidate.reason ? `: ${candidate.reason}` : ""}`],
      ["ratio", candidate.paired ? sourced(`${times(candidate.paired)}, 95 % interval ${interval(candidate.paired)}, ${candidate.paired.pairs} pairs`, "measured") : missing()],
      ["kernel time a call", known(candidate.kernel_ns) ? sourced(duration(candidate.kernel_ns), "measured") : missing()],
      ["more memory held", known(candidate.memory_bytes) ? prefixed(candidate.memory_bytes, "B") : missing()], ["more during a call", known(candidate.peak_bytes) ? prefixed(candidate.peak_bytes, "B") : ""],
      ["its labels said", candidate.headroom_ns ? `it could save up to ${duration(candidate.headroom_ns)}` : ""], ["compiled in", candidate.compile_seconds ? seconds(candidate.compile_seconds) : ""],
    ])),
    candidate.verdict ? el("div", null, el("h4", null, "Numerics"), verdictFacts(candidate.verdict)) : null,
    el("div", null, el("h4", null, "Passes"), candidate.reports.map((report) => el("div", { class: "label" },
      el("p", null, el("b", null, report.name), ` · ${report.stage} · matched ${report.matched}, rewrote ${report.rewritten}${report.refused.length ? `, refused ${report.refused.length}` : ""}`),
      report.error ? el("p", { class: "bad" }, report.error) : null, report.refused.length ? el("ul", null, refusals(report)) : null,
      graph.report.changes && graph.report.changes[report.change] ? changeBox(graph.report.changes[report.change], "the graph", false) : null))));
}

function verdictFacts(v) {
  return facts([
    ["verdict", el("span", { class: v.ok ? "good" : "bad" }, v.ok ? "right" : `refused: ${v.reason}`)],
    ["relative L2 error of the outputs", sourced(scientific(v.rel_l2), "measured")], ["of torch.compile's own code", sourced(scientific(v.baseline_rel_l2), "measured")],
    ["allowed", scientific(v.limit)], ["largest error of an element", sourced(scientific(v.max_abs), "measured")], ["NaN and infinity", v.nan_agree ? "in the same places" : "DIFFER"],
    ["top-1 agreement", known(v.top1) ? percent(v.top1) : missing("the output does not look like logits")], ["sets of inputs", v.checked],
  ]);
}

function numericsSection(graph) {
  const v = graph.report && graph.report.verdict;
  if (!v) return null;
  return section("numerics", "Numerics", "Both codes were compared with a run of the same graph in 64-bit arithmetic, on the caller's inputs and on fresh ones. Shapes, strides, types, aliasing and writes to inputs have to agree exactly.", verdictFacts(v));
}

const plainValue = (value) => (value === null ? missing("not known") : Array.isArray(value) ? (value.length ? value.map(String).join(", ") : "none")
  : typeof value === "object" ? Object.entries(value).map(([key, item]) => `${key} ${item}`).join(", ") : typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value));

function machineSection(graph) {
  const p = graph.profile, r = graph.report;
  const environment = p ? p.environment : {};
  const clocks = r && r.ratio && Object.keys(r.ratio.clocks).length ? r.ratio.clocks : null;
  const rates = graph.ceilings ? [["copy", sourced(prefixed(graph.ceilings.copy_bytes_per_s, "B/s"), "measured")], ...Object.entries(graph.ceilings.flops_per_s).map(([type, rate]) => [`products in ${TYPES[type] || type}`, sourced(prefixed(rate, "FLOP/s"), "measured")]), ["measured on", graph.ceilings.measured.slice(0, 10)]] : null;
  const pairs = (object) => Object.entries(object).filter(([key]) => key !== "clocks").map(([key, value]) => [key.replaceAll("_", " "), typeof value === "string" ? named(value, 300) : plainValue(value)]);
  const notes = p ? p.notes : [];
  return section("machine", "Clocks, machine, notes", "", el("div", { class: "columns" },
    el("div", null, el("h3", null, "Clocks"), clocks ? facts(pairs(clocks)) : environment.clocks ? facts(pairs(environment.clocks)) : el("p", null, missing("Not measured: NVML gives a GPU's clocks, and there is none here."))),
    el("div", null, el("h3", null, "Ceilings of the device"), rates ? facts(rates) : el("p", null, missing())),
    el("div", null, el("h3", null, "Environment"), Object.keys(environment).length ? facts(pairs(environment)) : el("p", null, missing("not recorded"))),
    r ? el("div", null, el("h3", null, "This decision"), facts([
      ["decided by", r.source], ["weights", r.frozen ? "folded into the code" : "as they were"], ["more memory held", known(r.memory_bytes) ? prefixed(r.memory_bytes, "B") : missing()],
      ["peak during a call, baseline", known(r.baseline_peak_bytes) ? prefixed(r.baseline_peak_bytes, "B") : ""], ["outputs copied out of a CUDA graph", known(r.output_copies) ? r.output_copies : ""],
      ["roofline floor", known(r.floor_ns) ? sourced(`${duration(r.floor_ns)} (${prefixed(r.floor_flops || 0, "FLOP")}, ${prefixed(r.floor_bytes || 0, "B")})`, "modelled") : missing("not modelled")],
      ["kernels over the floor", r.gap_to_floor ? `${digits(r.gap_to_floor[0])}× before, ${digits(r.gap_to_floor[1])}× now` : ""], ["pays for itself after", known(r.calls_to_pay) ? count(Math.round(r.calls_to_pay), "call") : ""],
      ["ranks", r.agreement ? plainValue(r.agreement) : ""], ["plan", r.plan_path && named(r.plan_path, 300)], ["key", el("code", null, r.key)], ["compile", r.compile_id],
    ])) : null),
    notes.length ? [el("h3", null, "Notes of the profiler"), el("ul", null, notes.map((note) => el("li", { class: "small" }, el("bdi", null, shorten(note, 2000)))))] : null);
}

// ---- the graph before and after each pass ----

const STRETCH = 4; // unchanged lines around a change that are shown, of a longer stretch

// A difference as fxopt.graph_text writes it: lines that begin with " ", "-", "+" or "@@".
function differenceView(change, show) {
  const lines = change.split("\n"), out = [];
  const near = lines.map((line) => line.startsWith("@@"));
  lines.forEach((line, at) => {
    if (/^[-+]/.test(line)) for (let i = Math.max(0, at - STRETCH); i <= Math.min(lines.length - 1, at + STRETCH); i++) near[i] = true;
  });
  let skipped = 0;
  const flush = () => { if (skipped) out.push(el("div", { class: "fold" }, `⋯ ${count(skipped, "unchanged line")}`)); skipped = 0; };
  lines.forEach((line, at) => {
    if ((show === "before" && line[0] === "+") || (show === "after" && line[0] === "-")) return;
    if (show === "difference" && !near[at]) { skipped++; return; }
    flush();
    out.push(el("div", { class: line.startsWith("@@") ? "fold" : { "+": "added", "-": "removed" }[line[0]] }, show === "difference" || line.startsWith("@@") ? line : line.slice(1)));
  });
  flush();
  return el("div", { class: "diff", tabindex: "0" }, out);
}

function changeBox(change, title, open) {
  const holder = el("div");
  const draw = (show) => holder.replaceChildren(differenceView(change, show));
  const choice = el("select", { on: { change: (event) => draw(event.target.value) } },
    el("option", { value: "difference" }, "what changed"), el("option", { value: "before" }, "before"), el("option", { value: "after" }, "after"));
  const lines = change.split("\n"), signs = (sign) => lines.filter((line) => line[0] === sign).length;
  let drawn = false;
  const once = () => { if (!drawn) { drawn = true; draw("difference"); } };
  const box = el("details", { class: "box", open, on: { toggle: once } }, el("summary", null, el("b", null, named(title, 80)), el("span", { class: "soft" }, ` · ${count(signs("-"), "line")} gone, ${signs("+")} new`)),
    el("div", { class: "bar" }, el("label", null, "Show ", choice)), holder);
  box.unfold = once; // on paper at once: its own event would come too late
  if (open) once();
  return box;
}

function graphTextsSection(graph) {
  const r = graph.report;
  if (!r || !r.changes) return null;
  const kept = r.candidates.filter((candidate) => candidate.outcome === "kept").pop();
  const boxes = (kept ? kept.reports : []).filter((report) => r.changes[report.change]).map((report, index) => changeBox(r.changes[report.change], `${report.name} (${report.stage})`, index === 0));
  if (!boxes.length) return null;
  return section("graphtext", "The graph before and after each pass", "One line a node of the FX graph, for each pass of the kept code that changed it, in the order in which they ran. Passes that only set options change no graph.", boxes);
}
