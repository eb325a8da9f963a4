// The sections of the page about what ran: each gives an element, or null where there is nothing to say.

const SHORT = {
  graphs: "Graphs", compared: "Ablation", roofline: "Roofline", nodes: "Nodes", modules: "Modules", lines: "Source", timeline: "Timeline", kernels: "Kernels", limits: "Limits",
  changes: "Tried", graphtext: "Graph", numerics: "Numerics", unattributed: "Unattributed", machine: "Machine", words: "Words", changed: "Changes",
};

function section(id, title, intro, ...content) {
  return el("section", { id, "data-short": SHORT[id] || title, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), intro ? el("p", { class: "soft" }, intro) : null, content);
}

function summarySection(graph) {
  const { headline, detail, answers } = graph.summary;
  const item = (row) => el("li", null, el("span", null, said(row.text, 140)), el("span", { class: "value" }, row.source ? sourced(row.value, row.source) : row.value),
    row.share !== null ? meter(row.share) : null, row.note ? el("span", { class: "note" }, said(row.note, 260)) : null);
  return el("section", { id: "summary", "aria-label": "Summary" },
    el("p", { class: "headline" }, headline), el("p", { class: "soft" }, detail),
    alerts(graph),
    el("div", { class: `answers of${answers.length}` }, answers.map((answer) => el("div", { class: "answer" },
      el("h2", null, answer.question), el("p", null, answer.answer), answer.rows.length ? el("ul", null, answer.rows.map(item)) : null))),
    el("p", { class: "key" }, sourced("measured", "measured"), sourced("modelled from shapes and types", "modelled"),
      sourced("ceiling of this device, measured beforehand", "ceiling"), missing("not measured, or not known")));
}

function alerts(graph) {
  const found = [...(graph.summary.alerts || []), ...DATA.messages, ...(graph.report ? graph.report.messages : [])];
  if (graph.report && graph.report.ratio) found.push(...graph.report.ratio.marked);
  for (const module of DATA.eager)
    found.push(`Left to eager by Dynamo, and so neither measured nor changed here: ${module.name} (${module.type}), ${duration(module.time_ns)}, ${percent(module.share)} of a call.`);
  return found.map((text) => el("p", { class: "alert" }, said(text, 1500)));
}

function graphsSection(graphs, choose) {
  if (graphs.length < 2) return null;
  const rows = graphs.map((graph, i) => {
    const r = graph.report || {};
    return [el("button", { type: "button", class: "link", on: { click: () => choose(i) } }, graph.name), r.decision === "candidate" ? "changed" : "as it was",
      duration(r.baseline_wall_ns), duration(r.kept_wall_ns), r.decision === "candidate" && r.ratio ? `${r.ratio.ratio.toFixed(2)}×` : "1.00×",
      (r.passes || []).join(", ") || "–"];
  });
  const sum = (key) => graphs.reduce((total, graph) => total + ((graph.report && graph.report[key]) || 0), 0);
  const before = sum("baseline_wall_ns"), after = sum("kept_wall_ns");
  if (before && after) rows.push([el("b", null, "all graphs, one call of each"), "", duration(before), duration(after), `${(before / after).toFixed(2)}×`, ""]);
  return section("graphs", `${graphs.length} graphs`, "Parts of a model that TorchDynamo cut (TORCH_LOGS=graph_breaks says why), the same code for other shapes or modes (TORCH_LOGS=recompiles), or several models. Everything below is about the chosen one.",
    simpleTable("", ["graph", "code", "before", "now", "faster", "rewrites"], rows, [2, 3, 4]));
}

const ofBaseline = (graph) => (graph.report ? " It is the profile of torch.compile's own code, before any change." : "");

function rooflineSection(graph) {
  if (!graph.groups.rows) return null;
  const counted = graph.groups.dram_read_bytes && graph.groups.dram_read_bytes.some(known);
  const state = { traffic: "modelled" };
  const { points, dropped, without } = rooflinePoints(graph, state.traffic);
  if (!points.length) return section("roofline", "Roofline", "No launch has both FLOPs and bytes modelled, so there is nothing to draw.");
  const plot = rooflinePlot(graph, state);
  const choice = el("select", { on: { change: (event) => { state.traffic = event.target.value; plot.draw(); } } },
    el("option", { value: "modelled" }, "modelled from shapes"), el("option", { value: "measured" }, "measured by counters"));
  const c = graph.ceilings, notes = [];
  if (without > 0.001) notes.push(`${percent(without)} of the kernel time has no modelled FLOPs or bytes and is not in the plot.`);
  if (dropped > 0) notes.push(`The ${MOST_POINTS} longest launches are drawn, ${count(dropped, "shorter one")} left out.`);
  notes.push(c ? `Ceilings were measured on ${c.device || "this device"} on ${c.measured.slice(0, 10)}: the largest copy and matrix products reached. A point above the slope keeps its data in a cache.`
    : "No ceilings of the device are in this file, so no roof is drawn.");
  return section("roofline", "Roofline",
    "How close each launch comes to what the device can do. Left of the bend memory sets the limit, right of it arithmetic. The larger a point, the more time it takes; its colour is the limit whose removal would save most.",
    counted ? el("div", { class: "bar" }, el("label", null, "Bytes ", choice)) : null, plot.element, el("p", { class: "soft small" }, notes.join(" ")));
}

function nodesSection(graph) {
  const n = graph.nodes;
  const rows = [...Array(n.rows).keys()].filter((i) => n.time_ns[i] > 0 || n.kind[i] === "operator" || n.launches[i].length);
  const silent = n.rows - rows.length;
  const top = rows.reduce((most, i) => Math.max(most, n.share[i] || 0), 0) || 1;
  const table = new Table({
    name: "FX nodes", rows, sort: 3, paper: [30, 3],
    text: (i) => [n.node[i], n.target[i], n.module_path[i], n.module_class[i], n.source[i], place(n.file[i], n.line[i]), n.dtype[i], ...graph.labelsOfNode(i).map((label) => axisName(label.axis))].join(" "),
    open: (i) => nodeDetail(graph, i),
    columns: [
      { title: "node", css: "wide", value: (i) => n.node[i], show: (i) => named(n.node[i], 60) },
      { title: "operator", css: "optional least", value: (i) => n.target[i], show: (i) => named(n.target[i].replace(/^aten\./, ""), 40) },
      { title: "module", css: "optional", value: (i) => n.module_path[i], show: (i) => named(n.module_path[i], 34) },
      { title: "time a call", number: true, css: "time", value: (i) => n.time_ns[i], show: (i) => el("span", { class: n.estimate[i] ? "modelled-time" : null }, timed(n.time_ns[i], (n.share[i] || 0) / top)) },
      { title: "share", number: true, css: "optional", value: (i) => n.share[i], show: (i) => sourced(percent(n.share[i]), n.estimate[i] ? "modelled" : "measured") },
      { title: "limit", css: "optional", value: (i) => limitOfNode(graph, i), show: (i) => limitOfNode(graph, i).replaceAll("_", " ") || "–" },
      { title: "source", css: "optional least", value: (i) => place(n.file[i], n.line[i]), show: (i) => named(place(n.file[i], n.line[i]), 26) },
    ],
  });
  return section("nodes", "Time by FX node",
    `One row an operator of the graph that Inductor compiled${rows.some((i) => n.kind[i] === "operator") ? ", or that ran outside of it" : ""}. Nodes fused into one kernel share its time by the bytes they move: those shares are estimates (○).${ofBaseline(graph)}`,
    table.element, silent ? el("p", { class: "soft small" }, `${count(silent, "node")} without a kernel (views, constants) left out.`) : null);
}

function limitOfNode(graph, i) {
  const labels = graph.labelsOfNode(i);
  return labels.length ? labels.reduce((a, b) => (b.headroom_ns > a.headroom_ns ? b : a)).axis : "";
}

function modulesSection(graph) {
  const root = graph.moduleTree();
  if (!root.children.size) return null;
  const body = el("tbody");
  const total = root.time || 1;
  const add = (module, depth, parentOpen, open) => {
    const children = [...module.children.values()].sort((a, b) => b.time - a.time);
    const twist = children.length ? el("button", { type: "button", class: "twist", "aria-expanded": String(open), "aria-label": `Modules of ${shorten(module.path || "the whole model", 80)}` }, open ? "▾" : "▸") : el("span", { class: "twist", "aria-hidden": "true" }, " ");
    const row = el("tr", { hidden: !parentOpen }, el("td", { vars: { "--depth": depth } }, twist, " ", named(module.name, 60)),
      el("td", { class: "optional soft" }, named(module.type, 40)), el("td", { class: "number" }, percent(module.time / total)), el("td", { class: "number time" }, timed(module.time, module.time / total)));
    body.append(row);
    const rows = children.map((child) => add(child, depth + 1, parentOpen && open, depth < 1 && children.length < 30));
    const show = (visible) => { row.hidden = !visible; for (const child of rows) child.show(visible && twist.getAttribute("aria-expanded") === "true"); };
    if (children.length) twist.addEventListener("click", () => {
      const now = twist.getAttribute("aria-expanded") !== "true";
      twist.setAttribute("aria-expanded", String(now));
      twist.textContent = now ? "▾" : "▸";
      for (const child of rows) child.show(now);
    });
    return { show };
  };
  add(root, 0, true, true);
  return section("modules", "Time by module", "The modules of the model, each with everything below it.",
    el("div", { class: "scroll" }, el("table", { class: "tree" }, el("thead", null, el("tr", null, el("th", { scope: "col" }, "module"), el("th", { scope: "col", class: "optional" }, "class"),
      el("th", { scope: "col", class: "number" }, "share"), el("th", { scope: "col", class: "number" }, "time a call"))), body)));
}

function linesSection(graph) {
  const lines = graph.byLine();
  if (!lines.some((line) => line.file)) return null;
  const most = Math.max(...lines.map((line) => line.time));
  const table = new Table({
    name: "source lines", rows: lines, sort: 1, size: 12, text: (line) => `${line.source} ${line.file}:${line.line}`,
    open: (line) => el("div", { class: "detail" }, line.file ? el("p", { class: "soft small" }, named(`${line.file}:${line.line}`, 200)) : null,
      simpleTable("", ["time a call", "node", "operator", "module"], line.nodes.sort((a, b) => graph.nodes.time_ns[b] - graph.nodes.time_ns[a]).slice(0, 60).map((i) => [
        duration(graph.nodes.time_ns[i]), el("button", { type: "button", class: "link", on: { click: () => inspect(graph.nodes.node[i], nodeDetail(graph, i)) } }, named(graph.nodes.node[i], 60)),
        named(graph.nodes.target[i], 60), named(graph.nodes.module_path[i], 60)]), [0])),
    columns: [
      { title: "source line", css: "wide", value: (line) => line.source, show: (line) => el("code", null, named(line.source.trim() || "(no source line known)", 110)) },
      { title: "time a call", number: true, css: "time", value: (line) => line.time, show: (line) => timed(line.time, line.time / most) },
      { title: "share", number: true, css: "optional", value: (line) => line.share, show: (line) => percent(line.share) },
      { title: "nodes", number: true, css: "optional", value: (line) => line.nodes.length, show: (line) => line.nodes.length },
      { title: "at", css: "optional", value: (line) => place(line.file, line.line), show: (line) => named(place(line.file, line.line), 30) },
    ],
  });
  return section("lines", "Time by source line", "The lines of the model that the operators come from. A line that runs once in each layer is one row: the sum over the layers.", table.element, sourceListings(graph, lines));
}

function sourceListings(graph, lines) {
  const files = Object.keys(graph.sources);
  if (!files.length) return null;
  const sum = (file) => lines.reduce((total, line) => total + (line.file === file ? line.time : 0), 0);
  return files.sort((a, b) => sum(b) - sum(a)).map((file, index) => {
    const own = lines.filter((line) => line.file === file), most = Math.max(...own.map((line) => line.time), 1);
    const times = new Map(own.map((line) => [line.line, { time: line.time, relative: line.time / most }]));
    return el("details", { class: "box", open: index === 0 }, el("summary", null, named(fileName(file), 60), el("span", { class: "soft" }, ` · ${duration(sum(file))} a call`)), listing(graph.sources[file], times, 0, Infinity));
  });
}

function timelineSection(graph) {
  const k = graph.kernels;
  if (!k.rows) return null;
  const calls = [...new Set(k.iteration)].sort((a, b) => a - b);
  const perCall = k.rows / calls.length;
  const state = { call: calls[Math.min(1, calls.length - 1)], range: null };
  const plot = timelinePlot(graph, state), tableHolder = el("div");
  const gaps = () => {
    const lanes = lanesOf(graph, state.call), rows = [];
    for (const lane of lanes) {
      const longest = lane.gaps.reduce((a, b) => (b.time > a.time ? b : a), { time: 0 });
      const whole = lane.end - lane.start;
      rows.push([named(lane.name, 40), lane.rows.length.toLocaleString("en"), `${duration(lane.busy)} (${percent(whole ? lane.busy / whole : 1)})`, duration(whole - lane.busy), lane.gaps.length.toLocaleString("en"),
        longest.time ? el("span", null, duration(longest.time), el("span", { class: "soft" }, " before ", named(k.name[longest.before], 44))) : "–"]);
    }
    tableHolder.replaceChildren(simpleTable("Measured; idle time is between the first and the last kernel of a stream", ["stream", "kernels", "busy", "idle", "gaps", "longest gap"], rows, [1, 2, 3, 4]));
  };
  gaps();
  const choose = el("select", { on: { change: (event) => { state.call = event.target.value === "all" ? "all" : Number(event.target.value); state.range = null; gaps(); plot.draw(); } } },
    calls.map((call) => el("option", { value: call, selected: call === state.call }, `call ${call + 1}`)), calls.length > 1 ? el("option", { value: "all" }, "all calls") : null);
  const back = el("button", { type: "button", on: { click: () => { state.range = null; plot.draw(); } } }, "Show all of it");
  return section("timeline", "Timeline", `What ran when, on each stream: about ${Math.round(perCall).toLocaleString("en")} kernels a call. Where the lane is empty, nothing ran.${ofBaseline(graph)}`,
    el("div", { class: "bar" }, el("label", null, "Show ", choose), back), plot.element, tableHolder);
}

function kernelsSection(graph) {
  const rows = graph.byName();
  if (!rows.length) return null;
  const most = Math.max(...rows.map((row) => row.time));
  const columns = [
    { title: "kernel", css: "wide", value: (row) => row.name, show: (row) => named(row.name, 80) },
    { title: "time a call", number: true, css: "time", value: (row) => row.time, show: (row) => timed(row.time, row.time / most) },
    { title: "share", number: true, css: "optional", value: (row) => row.share, show: (row) => percent(row.share) },
    { title: "a call", number: true, css: "optional", help: "launches in one call", value: (row) => row.rows.length, show: (row) => digits(row.rows.length / graph.calls).replace(/\.0+$/, "") },
    { title: "kind of work", css: "optional", value: (row) => row.work, show: (row) => (DATA.kinds[row.work] || row.work).replace(/ \(.*/, "") },
  ];
  const kept = ["dram_throughput", "sm_throughput", "tensor_active", "achieved_occupancy"];
  const values = new Map();
  const counterOf = (row, key) => {
    if (!values.has(row)) values.set(row, new Map(graph.counters(row.rows).map((counter) => [counter.key, counter.value])));
    return values.get(row).get(key);
  };
  for (const counter of graph.profile.counters.filter((one) => kept.includes(one.key)))
    columns.push({ title: counter.key.replaceAll("_", " "), number: true, css: "optional least", help: counter.meaning, value: (row) => counterOf(row, counter.key),
      show: (row) => (known(counterOf(row, counter.key)) ? quantity(counterOf(row, counter.key), counter.unit) : "–") });
  const table = new Table({ name: "kernels", rows, sort: 1, paper: [20, 2], text: (row) => `${row.name} ${DATA.kinds[row.work] || ""} ${graph.kernels.operator[row.longest]}`, open: (row) => nameDetail(graph, row.name), columns });
  const counted = graph.profile.counters.length;
  return section("kernels", "Kernels and counters",
    `What the device ran, by name. ${counted ? `A row opens to its ${counted} hardware counters.` : "No hardware counters are in this profile: it holds times and what each kernel was launched with."}${ofBaseline(graph)}`, table.element);
}

function labelsSection(graph) {
  if (!graph.labels.length && !graph.missing.length) return null;
  const axes = new Map();
  for (const label of graph.labels) collect(axes, label.axis, label);
  const sum = (labels) => labels.reduce((total, label) => total + label.headroom_ns, 0);
  const blocks = [...axes].sort((a, b) => sum(b[1]) - sum(a[1])).map(([axis, labels], index) => {
    const ranked = labels.sort((a, b) => b.headroom_ns - a.headroom_ns), what = DATA.axes[axis];
    return el("details", { class: "box", open: index < 2 },
      el("summary", null, el("b", null, axisName(axis)), ` · ${labels[0].scope === "graph" ? "the graph as a whole" : count(labels.length, "place")} · up to ${duration(sum(labels))} a call`),
      what ? el("p", { class: "soft" }, `The limit: ${what.what}.`) : null, labelBlock(ranked[0], true), ranked.length > 1 ? moreLabels(ranked.slice(1)) : null);
  });
  const lacking = graph.missing.length ? el("details", { class: "box" }, el("summary", null, `What could not be asked (${graph.missing.length})`), el("ul", null, graph.missing.map((line) => el("li", { class: "small" }, line)))) : null;
  return section("limits", "Limits, with evidence", "Each rule that fired, what it rests on, and what removing the limit could save at most. What one launch could save under several limits does not add up.", blocks, lacking);
}

function moreLabels(labels) {
  const table = new Table({
    name: `more places limited by ${axisName(labels[0].axis)}`, rows: labels, sort: 1, size: 10, paper: [6, 0], text: (label) => `${label.launch} ${label.nodes.join(" ")}`, open: (label) => labelBlock(label),
    columns: [
      { title: "nodes", css: "wide", value: (label) => label.nodes.join(), show: (label) => named(label.nodes.join(", ") || label.launch, 70) },
      { title: "could save", number: true, value: (label) => label.headroom_ns, show: (label) => duration(label.headroom_ns) },
      { title: "confidence", css: "optional", value: (label) => label.confidence, show: (label) => label.confidence },
      { title: "why", css: "optional", show: (label) => shorten(label.why, 160) },
    ],
  });
  return table.element;
}

function unattributedSection(graph) {
  const p = graph.profile, u = graph.unattributed;
  const whole = p.total_ns || 1;
  const shares = facts([
    ["kernel time of the measured calls", sourced(duration(p.total_ns), "measured")], ["traced to operators", `${duration(p.attributed_ns)} (${percent(p.attributed_ns / whole)})`],
    ["not traced", `${duration(p.unattributed_ns)} (${percent(p.unattributed_ns / whole)})`], ["outside of the measured calls", p.outside_ns ? duration(p.outside_ns) : ""],
  ]);
  if (!u.rows) return section("unattributed", "Unattributed", "Every kernel of the measured calls was traced to an operator.", shares);
  const table = new Table({
    name: "unattributed kernels", rows: [...Array(u.rows).keys()], sort: 1, size: 12, text: (i) => `${u.name[i]} ${u.reason[i]}`, open: (i) => nameDetail(graph, u.name[i]),
    columns: [
      { title: "kernel", css: "wide", value: (i) => u.name[i], show: (i) => named(u.name[i], 80) },
      { title: "time a call", number: true, value: (i) => u.time_ns[i], show: (i) => duration(u.time_ns[i] / graph.calls) },
      { title: "launches", number: true, css: "optional", value: (i) => u.kernels[i], show: (i) => u.kernels[i].toLocaleString("en") },
      { title: "why", css: "optional", value: (i) => u.reason[i], show: (i) => said(u.reason[i], 200) },
    ],
  });
  return section("unattributed", "Unattributed", "Kernels whose operators are not known, each with the reason.", shares, table.element);
}

const WORDS = [
  ["kernel", "A program that the device runs once it is launched; on a CPU, a compiled loop or an operator of a library."],
  ["FX node", "One operator of the model in the graph that torch.compile takes it apart into."],
  ["fused", "Several nodes computed by one kernel, which reads and writes memory once for all of them."],
  ["stream", "A queue of kernels on a GPU, run in order."],
  ["headroom", "What a call could save at most if one limit were gone."],
  ["roofline", "The most that a device can reach for a given ratio of arithmetic to memory traffic."],
  ["attributed", "A kernel whose FX node or operator is known."],
  ["95 % interval", "The range that holds the true ratio in 95 of 100 such comparisons; it assumes no distribution."],
  ["baseline", "What torch.compile gives by itself, with its default backend, Inductor."],
];

const glossarySection = () => section("words", "Words", "", facts(WORDS));
