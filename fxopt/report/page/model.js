// The data as columns, and what belongs to what.

function unpackColumns(data, pools) {
  const table = { rows: data.rows };
  for (const [name, ids] of Object.entries(data.texts)) table[name] = ids.map((id) => pools.texts[id]);
  for (const [name, ids] of Object.entries(data.lists)) table[name] = ids.map((id) => pools.lists[id]);
  Object.assign(table, data.numbers);
  for (const extra of ["opaque", "estimate"]) if (data[extra]) table[extra] = data[extra];
  return table;
}

const pair = (graph, name) => `${graph}\u0000${name}`;

function collect(map, key, value) {
  const found = map.get(key);
  if (found) found.push(value);
  else map.set(key, [value]);
}

class Graph {
  constructor(raw, pools) {
    Object.assign(this, raw);
    this.launchRows = new Map();
    this.nodeRows = new Map();
    this.nameRows = new Map();
    this.groupOf = new Map();
    this.nodeOf = new Map();
    this.launchLabels = new Map();
    this.nodeLabels = new Map();
    if (raw.profile) {
      const { kernels, nodes, groups, unattributed } = raw.profile;
      this.kernels = unpackColumns(kernels, pools);
      this.nodes = unpackColumns(nodes, pools);
      this.groups = unpackColumns(groups, pools);
      this.unattributed = unpackColumns(unattributed, pools);
      this.index();
    }
    for (const label of this.labels) {
      if (label.launch) collect(this.launchLabels, label.launch, label);
      for (const node of label.nodes) collect(this.nodeLabels, node, label);
    }
  }

  index() {
    const k = this.kernels;
    for (let i = 0; i < k.rows; i++) {
      if (k.launch[i]) collect(this.launchRows, pair(k.graph[i], k.launch[i]), i);
      for (const node of k.nodes[i]) collect(this.nodeRows, pair(k.graph[i], node), i);
      collect(this.nameRows, k.name[i], i);
    }
    const several = new Set(this.nodes.graph.filter((name) => name)).size > 1;
    this.severalCompiles = several;
    for (let i = 0; i < this.groups.rows; i++) this.groupOf.set(pair(this.groups.graph[i], this.groups.launch[i]), i);
    for (let i = 0; i < this.nodes.rows; i++) this.nodeOf.set(pair(this.nodes.graph[i], this.nodes.node[i]), i);
  }

  get calls() { return Math.max(1, this.profile.iterations); }

  // Longest first; a launch's labels, or those of a kernel outside of every graph by its name.
  labelsOfLaunch(launch) { return this.launchLabels.get(launch) || []; }

  // Outside of the graphs the labels of one node are not those of another that runs a kernel of the same name.
  labelsOfKernel(i) {
    const k = this.kernels, found = this.labelsOfLaunch(k.launch[i] || k.name[i]);
    return k.launch[i] ? found : found.filter((label) => !label.nodes.some((node) => this.nodeOf.has(pair("", node))) || label.nodes.some((node) => k.nodes[i].includes(node)));
  }

  labelsOfNode(i) {
    const launches = new Set(this.nodes.launches[i]);
    const own = this.nodeLabels.get(this.nodes.node[i]) || [];
    return own.filter((label) => !launches.size || !label.launch || launches.has(label.launch));
  }

  // The limit that would give back most of a launch's time, "" where no rule fired.
  limitOf(launch) {
    const labels = this.labelsOfLaunch(launch);
    return labels.length ? labels.reduce((a, b) => (b.headroom_ns > a.headroom_ns ? b : a)).axis : "";
  }

  // Counters over several kernels: sums per call, rates weighted by duration, constants by the largest.
  counters(rows) {
    const found = [];
    for (const counter of this.profile.counters) {
      const column = this.kernels[counter.key];
      let weight = 0, sum = 0, most = -Infinity, lacking = 0;
      for (const i of rows) {
        if (!known(column[i])) { lacking += 1; continue; }
        weight += this.kernels.duration_ns[i];
        sum += counter.aggregation === "sum" ? column[i] : column[i] * this.kernels.duration_ns[i];
        most = Math.max(most, column[i]);
      }
      let value = null;
      if (lacking < rows.length && weight > 0)
        value = counter.aggregation === "max" ? most : counter.aggregation === "sum" ? (lacking ? null : sum / this.calls) : sum / weight;
      found.push({ ...counter, value });
    }
    return found;
  }

  byName() {
    const k = this.kernels;
    return [...this.nameRows].map(([name, rows]) => {
      const time = rows.reduce((sum, i) => sum + k.duration_ns[i], 0);
      const longest = rows.reduce((a, b) => (k.duration_ns[b] > k.duration_ns[a] ? b : a));
      return { name, rows, longest, time: time / this.calls, share: time / (this.profile.total_ns || 1), work: k.work[longest] };
    });
  }

  byLine() {
    const found = new Map(), n = this.nodes;
    for (let i = 0; i < n.rows; i++) {
      if (!(n.time_ns[i] > 0)) continue;
      const key = n.file[i] ? pair(n.file[i], n.line[i]) : "";
      const at = found.get(key) || { file: n.file[i], line: n.line[i], source: n.source[i], time: 0, share: 0, estimate: 0, nodes: [] };
      at.time += n.time_ns[i];
      at.share += n.share[i] || 0;
      at.estimate |= n.estimate[i];
      at.nodes.push(i);
      found.set(key, at);
    }
    return [...found.values()];
  }

  // A tree of modules: name, path, time with all below, and the nodes of its own.
  moduleTree() {
    const root = { name: "(the whole model)", path: "", time: 0, share: 0, type: "", children: new Map(), nodes: [] };
    const n = this.nodes;
    for (let i = 0; i < n.rows; i++) {
      if (!(n.time_ns[i] > 0)) continue;
      let at = root;
      const path = n.kind[i] === "operator" ? ["(outside of compiled graphs)"] : n.module_path[i] ? n.module_path[i].split(".") : [];
      at.time += n.time_ns[i];
      at.share += n.share[i] || 0;
      for (const [depth, name] of path.entries()) {
        if (!at.children.has(name))
          at.children.set(name, { name, path: path.slice(0, depth + 1).join("."), time: 0, share: 0, type: "", children: new Map(), nodes: [] });
        at = at.children.get(name);
        at.time += n.time_ns[i];
        at.share += n.share[i] || 0;
      }
      if (path.length && n.module_class[i]) at.type = n.module_class[i];
      at.nodes.push(i);
    }
    return root;
  }
}
