// The graph as boxes in boxes: module calls, nodes, branches of nodes. One level of it is drawn at a time.
// Of two files the boxes are those of both: a box has the sides (1, 2 or 3) on which it is.
const WEIGHT = 1, RESULT = 2;
// Equal calls that follow each other are folded into one box from this many on; more boxes than these are shown in runs.
const EQUAL = 3, MOST_BOXES = 60, MOST_ENDS = 8;
let graph = null, folding = true, stamp = 0;

const bits = sides => (sides[0] ? 1 : 0) + (sides[1] ? 2 : 0);

// Values with the nodes that give and take them.
function linked(described, nodes) {
  const values = described.values.map(([name, type, kind, figures]) =>
    ({ name, type: described.types[type], kind, figures, producer: null, users: [] }));
  for (const node of nodes) {
    node.inputs = node.inputs.map(index => values[index]);
    node.outputs = node.outputs.map(index => values[index]);
    for (const value of node.inputs) value.users.push(node);
    for (const value of node.outputs) value.producer = node;
  }
  return values;
}

// items: [node of the first file, node of the second], one of which may be missing.
function readGraph(items) {
  graph = { root: box("call", null, { row: root }), boxOfRow: new Map(), items };
  graph.boxOfRow.set(root, graph.root);
  for (const item of items) {
    item.forEach(node => { if (node) node.item = item; });
    const side = item[0] ? 0 : 1, node = item[side];
    if (node.operator === "Constant" && !node.inputs.length) continue;
    let place = graph.root;
    if (node.outer && node.outer.box) place = node.branch ? inner(node.outer.box, node.branch) : node.outer.box;
    const around = new Set(ancestors(place.row)), rest = ancestors(node.row).filter(row => !around.has(row));
    for (const row of rest) place = called(place, row);
    const leaf = box("node", place, { row: node.row, item, node, mark: item.mark || "" });
    place.children.push(leaf);
    item.forEach(one => { if (one) one.box = leaf; });
    for (let above = leaf; above; above = above.parent) above.sides |= bits(item);
  }
  return graph;
}
function box(kind, parent, more) {
  return { kind, parent, children: [], sides: 0, mark: "", ...more };
}
function ancestors(row) {
  const chain = [];
  for (let above = row; above; above = above.above || (above.parent === null ? null : rows[above.parent])) chain.unshift(above);
  return chain;
}
function called(place, row) {
  place.calls ||= new Map();
  if (!place.calls.has(row)) {
    const made = box("call", place, { row });
    place.calls.set(row, made);
    place.children.push(made);
    if (!graph.boxOfRow.has(row)) graph.boxOfRow.set(row, made);
  }
  return place.calls.get(row);
}
function inner(place, branch) {
  place.branches ||= new Map();
  if (!place.branches.has(branch)) {
    const made = box("branch", place, { row: place.row, branch });
    place.branches.set(branch, made);
    place.children.push(made);
  }
  return place.branches.get(branch);
}

// A number that is the same for boxes that hold the same: operators in the same order, and the same marks.
const shapes = new Map();
function shapeOf(one) {
  if (one.shape === undefined) {
    const what = one.kind === "node" ? `${one.node.operator} ${one.mark}` : one.kind === "call" ? one.row.class : one.branch;
    const text = `${what}(${one.children.map(shapeOf).join()})`;
    if (!shapes.has(text)) shapes.set(text, shapes.size);
    one.shape = shapes.get(text);
  }
  return one.shape;
}

// The boxes that are shown of one: equal calls folded, and runs where there are too many.
function piecesOf(parent) {
  let pieces = parent.children;
  if (folding && parent.kind !== "fold") {
    pieces = [];
    for (let index = 0; index < parent.children.length;) {
      const first = parent.children[index];
      let end = index + 1;
      while (first.kind === "call" && end < parent.children.length && parent.children[end].kind === "call"
        && shapeOf(parent.children[end]) === shapeOf(first)) end++;
      const equal = parent.children.slice(index, end);
      if (equal.length < EQUAL) pieces.push(...equal);
      else pieces.push(grouped("fold", parent, equal));
      index = end;
    }
  }
  if (pieces.length <= MOST_BOXES) return pieces;
  const size = Math.ceil(pieces.length / Math.min(MOST_BOXES, Math.ceil(pieces.length / MOST_BOXES)));
  const runs = [];
  for (let index = 0; index < pieces.length; index += size) {
    runs.push(grouped("run", parent, pieces.slice(index, index + size), index));
  }
  return runs;
}
function grouped(kind, parent, children, start = 0) {
  const sides = children.reduce((sum, child) => sum | child.sides, 0);
  return { ...box(kind, parent, { row: parent.row, start }), children, sides };
}

function eachNode(one, visit) {
  if (one.item) for (const node of one.item) if (node) visit(node, one);
  for (const child of one.children) eachNode(child, visit);
}

// What is drawn of a level: boxes, lines between them, and the values that enter and leave it.
function levelOf(parent) {
  const boxes = piecesOf(parent).map((one, index) => ({ box: one, index, weights: [new Set(), new Set()], marks: new Map() }));
  const lines = new Map(), enters = new Map(), leaves = new Map();
  const current = ++stamp, found = [];
  for (const piece of boxes) {
    eachNode(piece.box, (node, leaf) => {
      node.stamp = current;
      node.at = piece.index;
      found.push(node);
      if (!leaf.mark) return;
      const counts = leaf.item[0] ? !node.side : leaf.mark === "added";  // of what was replaced, nodes of the first file
      piece.marks.set(leaf.mark, (piece.marks.get(leaf.mark) || 0) + (counts ? 1 : 0));
    });
  }
  const add = (map, key, made, side, value, at) => {
    if (!map.has(key)) map.set(key, { ...made, values: [new Set(), new Set()], to: new Map() });
    const one = map.get(key);
    one.values[side].add(value);
    if (at === undefined) return;
    if (!one.to.has(at)) one.to.set(at, [new Set(), new Set()]);
    one.to.get(at)[side].add(value);
  };
  for (const node of found) {
    for (const value of node.inputs) {
      const from = value.producer;
      if (value.kind & WEIGHT) boxes[node.at].weights[node.side].add(value);
      else if (!from || from.stamp !== current) add(enters, keyOf(value), {}, node.side, value, node.at);
      else if (from.at !== node.at) add(lines, `${from.at} ${node.at}`, { from: from.at, at: node.at }, node.side, value);
    }
    for (const value of node.outputs) {
      if (value.kind & RESULT || value.users.some(user => user.stamp !== current)) {
        add(leaves, keyOf(value), {}, node.side, value, node.at);
      }
    }
  }
  return { parent, boxes, lines: [...lines.values()], enters: joined(enters), leaves: joined(leaves) };
}
// Values of two files are one where the same pair of nodes gives them, or they have the same name.
function keyOf(value) {
  const item = value.producer?.item;
  if (!item || !item[0] || !item[1]) return value.name;
  item.key ||= `item ${++stamp}`;
  return `${item.key} ${value.producer.outputs.indexOf(value)}`;
}
// Many values that go to the same boxes are drawn as one.
function joined(ends) {
  if (ends.size <= MOST_ENDS) return [...ends.values()];
  const groups = new Map();
  for (const end of ends.values()) {
    const key = [...end.to.keys()].sort((a, b) => a - b).join();
    if (!groups.has(key)) { groups.set(key, end); continue; }
    const into = groups.get(key), merge = (from, to) => from.forEach((values, side) => values.forEach(value => to[side].add(value)));
    merge(end.values, into.values);
    for (const [at, values] of end.to) merge(values, into.to.get(at));
  }
  return [...groups.values()];
}
