// What the page is about: the data of one file or part, its rows, and how names and figures become text.
const parts = JSON.parse(document.getElementById("data").textContent);
let data, columns, shown, rows, root, column, focus, chosen, open;
let words = "", sorted = false;
// What is shown beside the chosen figure, where the file has it; beside another file, what differs.
const BESIDE = ["seconds", "flops", "parameters", "precision", "error"];
const COMPARED = ["seconds", "bytes", "precision", "error"];
const SHARES = ["share", "zeros", "float16", "float16_lost", "bfloat16"];
const LABELS = { bytes: "weights", flops: "operations", macs: "multiply-adds", activation_bytes: "activations",
  peak_bytes: "peak memory", precision: "bits per weight", intensity: "operations per byte", seconds: "time",
  seconds_alone: "time alone", share: "share of time", spread: "spread of time", error: "relative error",
  against_ratio: "times as long", largest: "largest value", smallest: "smallest value", nan: "NaN", infinite: "infinities", float16: "share of float16\u2019s range",
  float16_lost: "zero in float16", bfloat16: "share of bfloat16\u2019s range", zeros: "share of zeros" };
const other = which => shown.find(c => c.name === "against_" + which.name);
const make = (name, attributes = {}, text) => {
  const svg = ["rect", "text", "title", "g", "path", "defs", "marker", "svg", "line"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const byId = id => document.getElementById(id);
const title = which => LABELS[which.name] || which.name.replaceAll("_", " ");
// The same colour for an operator everywhere on the page. Steps of the golden angle keep neighbors apart.
const colourOf = operator => {
  const index = data.operators.indexOf(operator);
  return `hsl(${(210 + 137.5 * index) % 360} 60% ${[50, 65, 38][Math.floor(index / 8) % 3]}%)`;
};

// Rows: [parent, tail of the address, segment, class, {column: own}, {column: total} where it is not a sum, source].
function read(part) {
  data = part;
  columns = data.columns;
  shown = columns.filter(c => !c.hidden);
  columns.forEach((which, index) => { which.index = index; });
  rows = data.rows.map(([parent, tail, segment, name, own, given, source], index) =>
    ({ index, parent, segment, class: name, source: data.sources[source], own, total: { ...given }, children: [], nodes: [], count: 0,
       depth: 0, address: "", tag: "", tail }));
  for (const row of rows) {
    const above = row.parent === null ? null : rows[row.parent];
    if (above) { above.children.push(row); row.depth = above.depth + 1; }
    // A tail that begins with "." goes on from the address above; any other is whole.
    row.address = row.tail.startsWith(".") && above ? above.path + row.tail : row.tail;
    row.path = row.address.replace(/@\d+$/, "");
    row.tag = (above ? above.tag : "") + "/" + row.segment;
  }
  const nodes = [];
  for (const [name, operator, owners, figures, inputs, outputs, attributes, line, outer, branch] of data.nodes) {
    const node = { name, operator: data.operators[operator], figures, row: rows[owners[0] ?? 0], side: 0, ran: [] };
    if (outputs) Object.assign(node, { inputs, outputs, attributes: data.graph.attributes[attributes], line: data.graph.lines[line],
      outer: nodes[outer], branch });
    else if (inputs !== undefined) nodes[inputs].ran.push(node);
    nodes.push(node);
    for (const owner of owners) { rows[owner].nodes.push(node); rows[owner].count++; }
  }
  root = rows[0];
  if (data.graph.values) {
    const drawn = nodes.filter(node => node.outputs);
    linked(data.graph, drawn);
    readGraph(data.other ? readOther(nodes) : drawn.map(node => [node]));
  }
  for (const row of [...rows].reverse()) {
    for (const column of columns) {
      const name = column.name, own = row.own[name];
      if (column.kind === "sum" && own !== undefined) row.total[name] = (row.total[name] || 0) + own;
      if (column.kind in ENDS && own !== undefined) row.total[name] = ENDS[column.kind](row.total[name] ?? own, own);
    }
    if (row.parent === null) continue;
    const above = rows[row.parent];
    above.count += row.count;
    for (const { name, kind } of columns) {
      const total = row.total[name];
      if (total === undefined) continue;
      if (kind === "sum") above.total[name] = (above.total[name] || 0) + total;
      if (kind in ENDS) above.total[name] = ENDS[kind](above.total[name] ?? total, total);
    }
  }
  shown = shown.filter(({ name, kind }) => kind === "ratio" || name in root.total || data.whole[name] !== null);
  for (const { name, kind, of, share } of columns) {
    if (kind !== "ratio") continue;
    const whole = data.whole[of[1]];
    for (const row of rows) {
      for (const side of [row.own, row.total]) {
        const below = share ? whole : side[of[1]];
        if (below && side[of[0]] !== undefined) {
          side[name] = side[of[0]] / scale(of[0]) / (below / scale(of[1]));
        }
      }
    }
  }
  column = shown.find(c => c.name === column?.name) || shown.find(c => c.name === data.main) || shown[0];
  focus = chosen = root;
  open = new Set([root]);
  for (const row of root.children) if (rows.length < 400) open.add(row);
}
// The nodes of the other file with those of the first, in the order of both. Calls that only it has are rows of the
// graph, not of the tree.
function readOther(first) {
  const other = data.other, calls = [...rows], nodes = [];
  for (const [parent, tail, segment, name] of other.calls) {
    const above = calls[parent], address = tail.startsWith(".") ? above.path + tail : tail;
    calls.push({ parent, above, index: calls.length, segment, class: name, address, path: address.replace(/@\d+$/, ""), own: {}, total: {}, children: [],
      nodes: [], count: 0, depth: above.depth + 1, tag: `${above.tag}/${segment}`, foreign: true });
  }
  for (const [name, operator, owners, figures, inputs, outputs, attributes, line, outer, branch] of other.nodes) {
    nodes.push({ name, operator: data.operators[operator], figures, row: calls[owners[0] ?? 0], side: 1, ran: [], inputs, outputs,
      attributes: other.attributes[attributes], line: other.lines[line], outer: nodes[outer], branch });
  }
  linked(other, nodes);
  first.forEach((node, index) => { node.order = index; });
  const items = other.pairs.map(([one, two, mark, why]) => Object.assign([first[one], nodes[two]], { mark, why }));
  for (const [one, two] of items) if (one && two) two.order = one.order;
  let order = -1;
  nodes.forEach((node, index) => { order = node.order ??= order + (index + 1) / (nodes.length + 1) / nodes.length; });
  return items.sort((a, b) => (a[0] || a[1]).order - (b[0] || b[1]).order);
}
function scale(name) { return columns.find(c => c.name === name)?.scale || 1; }

// Two figures of a column as one.
const ENDS = { largest: Math.max, smallest: Math.min };
const joinedFigures = (kind, one, two) => kind === "sum" ? one + two : ENDS[kind](one, two);

function text(value, which = column) {
  if (value === undefined || value === null) return "";
  const number = value / (which.scale || 1);
  if (SHARES.includes(which.name)) {
    return (number && Math.abs(number) < 1e-3 ? (100 * number).toExponential(1) : (100 * number).toFixed(1)) + " %";
  }
  if (which.unit === "seconds") {
    if (Math.abs(number) >= 1) return number.toPrecision(3) + " s";
    return Math.abs(number) >= 1e-3 ? (number * 1e3).toPrecision(3) + " ms" : (number * 1e6).toPrecision(3) + " us";
  }
  if (!Number.isInteger(number)) return number && Math.abs(number) < 1e-3 ? number.toExponential(1) : number.toPrecision(3);
  const rounded = Number(number.toPrecision(3)), unit = which.unit === "bytes" ? "B" : "";
  for (const [least, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(rounded) < least) continue;
    return `${(rounded / (letter === "k" ? 1e3 : least)).toPrecision(3)} ${letter}${unit}`;
  }
  return number.toLocaleString("en") + (unit && " " + unit);
}
// A name in pieces, between which a line may end.
const breakable = words => words.split(/(?=[.:])(?!(?<=\d)\.\d)/).flatMap((part, index) => index ? [make("wbr"), part] : [part]);
const cell = (figures, which) => make("td", { class: "number" }, pair(figures, which));
const fitting = (words, room) => words.length <= room ? words : `${words.slice(0, room - 1)}\u2026`;
const number = value => value ?? 0;
const name = row => row.address || ".";
// Widths need figures that add up; for others they show how many nodes there are.
const weight = row => column.kind === "sum" && number(root.total[column.name]) > 0
  ? number(row.total[column.name]) : row.count || (row.children.length ? 1 : 0);
