// The sections of a comparison of two reports or profiles.

const signed = (ns) => (known(ns) ? `${ns > 0 ? "+" : ns < 0 ? "−" : ""}${duration(Math.abs(ns))}` : "–");

function changeTable(table, name, title, heads) {
  const rows = [...Array(table.rows).keys()], most = Math.max(...rows.map((i) => Math.abs(table.change_ns[i])), 1);
  const change = (i) => el("span", { class: table.clear[i] ? (table.change_ns[i] < 0 ? "good" : "bad") : "soft", title: table.clear[i] ? "no call of one side took as long as any of the other" : "within what calls differ by, or one call only" }, signed(table.change_ns[i]));
  return new Table({
    name, rows, sort: heads.length + 2, size: 20, text: (i) => heads.map(([, get]) => get(i)).join(" "),
    columns: [
      ...heads.map(([head, get, most = 60], at) => ({ title: head, css: !at ? "wide" : at === 1 && heads.length > 2 ? "optional least" : "optional", value: get, show: (i) => named(get(i) || "(none)", most) })),
      { title: "before", number: true, css: "optional", value: (i) => table.before_ns[i], show: (i) => duration(table.before_ns[i]) },
      { title: "after", number: true, css: "optional", value: (i) => table.after_ns[i], show: (i) => duration(table.after_ns[i]) },
      { title: "change", number: true, value: (i) => Math.abs(table.change_ns[i]), show: change },
      { title: "", css: "optional least strip", show: (i) => meter(Math.abs(table.change_ns[i]) / most) },
    ],
  }).element;
}

function differenceSections(raw) {
  const t = Object.fromEntries(Object.entries(raw.tables).map(([name, data]) => [name, { ...unpackColumns(data, DATA), clear: data.clear }]));
  const labels = unpackColumns(raw.labels, DATA), graphsTable = unpackColumns(raw.graphs, DATA);
  const legend = "A change is green or red where no call of one side took as long as any of the other, and grey where calls differ by as much.";
  const out = [
    summarySection({ summary: raw.summary, report: null }),
    raw.notes.length ? section("cautions", "What makes them hard to compare", "", el("ul", null, raw.notes.map((note) => el("li", null, note)))) : null,
    section("nodes", "By FX node", legend, changeTable(t.nodes, "FX nodes", "", [["node", (i) => t.nodes.node[i]], ["operator", (i) => t.nodes.target[i], 36], ["module", (i) => t.nodes.module_path[i], 34]])),
    section("groups", "By launch", "Nodes that one kernel, or one call of a library, computes together.", changeTable(t.groups, "launches", "", [["nodes", (i) => t.groups.nodes[i].join(", "), 90], ["module", (i) => t.groups.module_path[i], 34]])),
    section("kernels", "By kernel", "", changeTable(t.kernels, "kernels", "", [["kernel", (i) => t.kernels.name[i], 90]])),
    section("lines", "By source line", "", changeTable(t.lines, "source lines", "", [["source line", (i) => t.lines.source[i].trim(), 90], ["at", (i) => place(t.lines.file[i], t.lines.line[i]), 30]])),
    section("modules", "By module", "", changeTable(t.modules, "modules", "", [["module", (i) => t.modules.module_path[i]]])),
    labels.rows ? section("limits", "Limits gone and new", "", new Table({
      name: "limits", rows: [...Array(labels.rows).keys()], sort: 3, size: 20, text: (i) => `${labels.change[i]} ${labels.axis[i]} ${labels.where[i].join(" ")}`,
      columns: [
        { title: "limit", css: "wide", value: (i) => labels.axis[i], show: (i) => axisName(labels.axis[i]) },
        { title: "change", value: (i) => labels.change[i], show: (i) => el("span", { class: { gone: "good", new: "bad" }[labels.change[i]] || "soft" }, labels.change[i]) },
        { title: "where", css: "optional wide", value: (i) => labels.where[i].join(), show: (i) => named(labels.where[i].join(", ") || "the whole graph", 60) },
        { title: "could save, before", number: true, css: "optional", value: (i) => labels.before_ns[i], show: (i) => duration(labels.before_ns[i]) },
        { title: "after", number: true, value: (i) => labels.after_ns[i], show: (i) => duration(labels.after_ns[i]) },
      ],
    }).element) : null,
    graphsTable.rows ? section("graphs", "Graphs", "", simpleTable("", ["graph", "before", "now", "wall before", "wall now", "error before", "error now"], [...Array(graphsTable.rows).keys()].map((i) => [
      graphsTable.graph[i], named(graphsTable.before_passes[i].join(", ") || graphsTable.before_decision[i] || "–", 120), named(graphsTable.after_passes[i].join(", ") || graphsTable.after_decision[i] || "–", 120),
      duration(graphsTable.before_kept_ns[i]), duration(graphsTable.after_kept_ns[i]), scientific(graphsTable.before_error[i]), scientific(graphsTable.after_error[i])]), [3, 4, 5, 6])) : null,
    section("machine", "Environment", raw.environment.length ? "" : "Nothing that was recorded of the two environments differs.",
      raw.environment.length ? simpleTable("", ["what", "before", "after"], raw.environment.map(([name, old, now]) => [named(name, 60), named(old, 200), named(now, 200)])) : null),
  ];
  return out.filter(Boolean);
}
