// All that is known of a node, a launch, a kernel or a label, as elements.

function inspect(title, content) {
  $("inspected").replaceChildren(named(title, 300));
  $("inspection").replaceChildren(content);
  if (!$("inspector").open) $("inspector").showModal();
  $("inspector").scrollTop = 0;
}

const axisName = (axis) => axis.replaceAll("_", " ");

function labelBlock(label, withPlace = false) {
  const axis = DATA.axes[label.axis];
  return el("div", { class: "label" },
    el("p", null, el("b", null, axisName(label.axis)), `: could save up to ${duration(label.headroom_ns)} a call · confidence ${label.confidence}`,
      withPlace && label.launch ? [" · ", named(label.scope === "kernel" && label.nodes.length ? label.nodes.join(", ") : label.launch, 70)] : null),
    el("p", null, label.why),
    axis && axis.answer ? el("p", { class: "soft small" }, `What answers it: ${axis.answer}.`) : null,
    label.next ? el("p", { class: "soft small" }, `Next: ${label.next}`) : null,
    el("ul", { class: "evidence" }, label.evidence.map((item) => el("li", null, el("span", { class: "soft" }, `${item.metric.replace(/_ns$/, "")} `),
      sourced(quantity(item.value, item.unit), item.source), item.threshold === null ? null : el("span", { class: "soft" }, ` held against ${quantity(item.threshold, item.unit)}`)))),
    label.reference ? el("p", { class: "soft small" }, `Rule: ${label.reference}`) : null);
}

function labelsBlock(labels, none = "No rule fired here.") {
  const ranked = [...labels].sort((a, b) => b.headroom_ns - a.headroom_ns);
  return el("div", null, el("h4", null, "What limits it"), ranked.length ? ranked.map((label) => labelBlock(label)) : el("p", { class: "soft" }, none));
}

function countersBlock(graph, rows) {
  if (!graph.profile.counters.length)
    return el("div", null, el("h4", null, "Hardware counters"), el("p", { class: "missing" }, "Not measured: this profile holds times alone."));
  const carried = rows.some((i) => graph.kernels.counters && graph.kernels.counters[i] === "carried");
  const source = (counter) => (["registers", "shared_memory", "waves_per_sm"].includes(counter.key) ? "measured" : carried ? "carried" : "measured");
  return el("div", null, el("h4", null, "Hardware counters"),
    simpleTable("", ["counter", "value", "meaning"], graph.counters(rows).map((counter) => [
      counter.key, known(counter.value) ? sourced(quantity(counter.value, counter.unit), source(counter)) : missing(), el("span", { class: "soft" }, counter.meaning)]), [1]));
}

function kernelList(graph, rows) {
  const k = graph.kernels, names = new Map();
  for (const i of rows) collect(names, k.name[i], i);
  const ranked = [...names].map(([name, own]) => ({ name, own, time: own.reduce((sum, i) => sum + k.duration_ns[i], 0) })).sort((a, b) => b.time - a.time);
  return el("div", null, el("h4", null, "Kernels"),
    simpleTable("", ["a call", "kernels", "kernel", "grid", "block", "registers", "shared"], ranked.slice(0, 40).map(({ name, own, time }) => {
      const longest = own.reduce((a, b) => (k.duration_ns[b] > k.duration_ns[a] ? b : a));
      return [duration(time / graph.calls), digits(own.length / graph.calls).replace(/\.0+$/, ""),
        el("button", { type: "button", class: "link", on: { click: () => inspect(name, nameDetail(graph, name)) } }, named(name, 70)),
        k.grid[longest] || "–", k.block[longest] || "–", known(k.registers[longest]) ? k.registers[longest] : "–",
        known(k.shared_memory[longest]) ? quantity(k.shared_memory[longest], "byte") : "–"];
    }), [0, 1, 5, 6]),
    ranked.length > 40 ? el("p", { class: "soft" }, `${ranked.length - 40} more names.`) : null);
}

function workFacts(flops, bytes, time) {
  return [
    ["FLOPs", known(flops) ? sourced(prefixed(flops, "FLOP"), "modelled") : missing("not modelled")],
    ["bytes", known(bytes) ? sourced(prefixed(bytes, "B"), "modelled") : missing("not modelled")],
    ["rate", known(flops) && time > 0 ? sourced(`${prefixed((flops / time) * 1e9, "FLOP/s")}${known(bytes) ? `, ${prefixed((bytes / time) * 1e9, "B/s")}` : ""}`, "modelled") : ""],
  ];
}

function sourceBlock(graph, file, line, source) {
  if (!file && !source) return null;
  const lines = graph.sources[file];
  return el("div", null, el("h4", null, "Source ", el("span", { class: "soft" }, named(place(file, line), 60))),
    lines && lines[line] !== undefined ? listing(lines, new Map([[line, null]]), Math.max(1, line - 2), line + 2)
      : el("div", { class: "source" }, el("div", { class: "line" }, el("span"), el("span", null, String(line || "")), el("bdi", null, source))));
}

// times: line -> {time, share} or null for a line that is only marked.
function listing(lines, times, from, to) {
  const rows = [];
  let last = null;
  for (const number of Object.keys(lines).map(Number).sort((a, b) => a - b)) {
    if (number < from || number > to) continue;
    if (last !== null && number > last + 1) rows.push(el("div", { class: "skip-line" }, "⋮"));
    last = number;
    const hot = times.has(number), at = times.get(number);
    rows.push(el("div", { class: hot ? "line hot" : "line", vars: { "--share": hot ? (at ? at.relative : 1) : 0 } },
      el("span", null, at ? duration(at.time) : ""), el("span", null, String(number)), el("bdi", null, lines[number])));
  }
  return el("div", { class: "source", tabindex: "0" }, rows);
}

function nodeDetail(graph, i) {
  const n = graph.nodes, rows = graph.nodeRows.get(pair(n.graph[i], n.node[i])) || [];
  const shared = n.estimate[i] ? `${duration(n.time_ns[i])}, its share by bytes of ${duration(n.group_time_ns[i])} of fused kernels: an estimate` : `${duration(n.time_ns[i])} (its kernels are its own)`;
  return el("div", { class: "detail" },
    el("div", { class: "columns" },
      el("div", null, el("h4", null, n.kind[i] === "operator" ? "Operator outside of compiled graphs" : "FX node"),
        facts([
          ["name", fullName(n.node[i])], ["operator", n.target[i] && fullName(n.target[i])], ["output", [n.shape[i], n.dtype[i]].filter(Boolean).join(" ")],
          ["time a call", rows.length ? sourced(shared, n.estimate[i] ? "modelled" : "measured") : missing("no kernel of its own was found")],
          ["kernels a call", n.kernels[i]], ...workFacts(n.flops[i], n.bytes[i], n.kind[i] === "node" ? n.group_time_ns[i] && !n.estimate[i] ? n.time_ns[i] : 0 : 0),
          ["module", n.module_path[i] ? [named(n.module_path[i]), n.module_class[i] ? ` (${n.module_class[i]})` : ""] : ""],
          ["before AOTAutograd", n.pre_grad[i].join(", ")], ["fused with", n.fused_with[i].length ? named(n.fused_with[i].join(", "), 300) : ""],
          ["compiled graph", graph.severalCompiles ? n.graph[i] : ""],
        ])),
      sourceBlock(graph, n.file[i], n.line[i], n.source[i]),
      labelsBlock(graph.labelsOfNode(i)), rows.length ? countersBlock(graph, rows) : null),
    rows.length ? kernelList(graph, rows) : null);
}

function launchDetail(graph, i) {
  const g = graph.groups, rows = graph.launchRows.get(pair(g.graph[i], g.launch[i])) || [];
  return el("div", { class: "detail" }, el("h4", null, "Launch of compiled code"),
    facts([
      ["launch", fullName(g.launch[i])], ["nodes", fullName(g.nodes[i].join(", "))], ["type", g.dtype[i]],
      ["time a call", `${duration(g.time_ns[i])}, ${percent(g.share[i])} of kernel time`], ["kernels a call", g.kernels[i]],
      ...workFacts(g.flops[i], g.bytes[i], g.time_ns[i]), ["module", g.module_path[i]],
    ]),
    sourceOfLaunch(graph, i), labelsBlock(graph.labelsOfLaunch(g.launch[i])), countersBlock(graph, rows), kernelList(graph, rows));
}

function sourceOfLaunch(graph, i) {
  const g = graph.groups, lead = g.nodes[i].map((name) => graph.nodeOf.get(pair(g.graph[i], name))).find((at) => at !== undefined && graph.nodes.file[at] === g.file[i] && graph.nodes.line[at] === g.line[i]);
  return lead === undefined ? null : sourceBlock(graph, g.file[i], g.line[i], graph.nodes.source[lead]);
}

function kernelFacts(graph, i) {
  const k = graph.kernels;
  return [
    ["kernel", fullName(k.name[i])], ["kind of work", [DATA.kinds[k.work[i]] || k.work[i], k.precision[i], k.opaque[i] ? "a black box to the graph" : ""].filter(Boolean).join(", ")],
    ["grid", k.grid[i]], ["block", k.block[i]], ["registers a thread", known(k.registers[i]) ? k.registers[i] : ""],
    ["shared memory", known(k.shared_memory[i]) ? quantity(k.shared_memory[i], "byte") : ""],
    ["occupancy at most", known(k.theoretical_occupancy[i]) ? sourced(`${digits(k.theoretical_occupancy[i])} %${k.occupancy_limiter[i] ? `, limited by ${k.occupancy_limiter[i]}` : ""}`, "modelled") : ""],
    ["waves per SM", known(k.waves_per_sm[i]) ? sourced(digits(k.waves_per_sm[i]), "modelled") : ""],
    ["operator", k.operator[i] && named(k.operator[i])], ["device", k.device[i]],
  ];
}

function kernelDetail(graph, i) {
  const k = graph.kernels, launch = k.launch[i], group = launch ? graph.groupOf.get(pair(k.graph[i], launch)) : undefined;
  return el("div", { class: "detail" },
    facts([
      ...kernelFacts(graph, i), ["took", sourced(duration(k.duration_ns[i]), "measured")], ["call", k.iteration[i] + 1],
      ["stream", known(k.stream[i]) ? k.stream[i] : ""], ["launched", known(k.launch_ns[i]) ? `${duration(k.start_ns[i] - k.launch_ns[i])} before it began` : ""],
      ["nodes", k.nodes[i].length ? fullName(k.nodes[i].join(", ")) : missing(k.reason[i] || "not known")],
      ["how they were found", k.method[i] === "none" ? "" : `${k.method[i].replaceAll("_", " ")}, confidence ${k.confidence[i]}`],
      ["other claims", k.evidence[i].join(" ")],
    ]),
    group !== undefined ? sourceOfLaunch(graph, group) : null, labelsBlock(graph.labelsOfKernel(i)), countersBlock(graph, [i]));
}

function nameDetail(graph, name) {
  const k = graph.kernels, rows = graph.nameRows.get(name), longest = rows.reduce((a, b) => (k.duration_ns[b] > k.duration_ns[a] ? b : a));
  const times = rows.map((i) => k.duration_ns[i]).sort((a, b) => a - b), nodes = [...new Set(rows.flatMap((i) => k.nodes[i]))];
  const labels = new Set(rows.flatMap((i) => graph.labelsOfKernel(i)));
  return el("div", { class: "detail" }, el("div", { class: "columns" },
    el("div", null, el("h4", null, "Kernel"), facts([
      ...kernelFacts(graph, longest), ["launches", `${rows.length} in ${count(graph.calls, "call")}`],
      ["shortest, median, longest", sourced([times[0], times[times.length >> 1], times[times.length - 1]].map(duration).join(", "), "measured")],
      ["nodes", nodes.length ? fullName(shorten(nodes.join(", "), 2000)) : missing(k.reason[longest] || "not known")],
    ])),
    countersBlock(graph, rows), labelsBlock([...labels].slice(0, 6))));
}
