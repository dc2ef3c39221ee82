// Drawing a level: where its boxes are is computed by dagre, once for both files, so that equal boxes have equal places.
const ROW_HEIGHT = 38, END_HEIGHT = 20, LETTER = 6.7;

const valueText = values => values.length ? shortType(values[0].type).replace("?", "") + (values.length > 1 ? ` +${values.length - 1}` : "") : "";
// float32[2, 16] as f32 2×16
const shortType = type => type.replace(/^([a-z])[a-z]*(\d+)/, (whole, letter, width) => /^(float|int|uint)\d/.test(whole) ? letter + width : whole)
  .replace(/\[(.*)\]$/, (whole, sizes) => ` ${sizes.replaceAll(", ", "\u00d7")}`);

function laidOut(level) {
  const plan = new dagre.graphlib.Graph({ multigraph: true });
  plan.setGraph({ rankdir: "TB", ranker: "tight-tree", nodesep: 22, ranksep: 30, edgesep: 12, marginx: 12, marginy: 12 });
  plan.setDefaultEdgeLabel(() => ({}));
  const connect = (from, to, values) => {
    const label = Math.max(...values.map(some => valueText([...some]).length)) * 5.2 + 8;
    plan.setEdge(from, to, { width: label, height: 12, labelpos: "c", values });
  };
  for (const piece of level.boxes) {
    piece.lines = wordsOf(piece);
    const marks = piece.weights.some(weights => weights.size) ? 36 : 0;
    const width = Math.max(84, piece.lines[0].length * LETTER + 22 + marks, piece.lines[1].length * 6 + 16);
    plan.setNode(`box ${piece.index}`, { width, height: ROW_HEIGHT, piece });
  }
  for (const [ends, kind] of [[level.enters, "enter"], [level.leaves, "leave"]]) {
    ends.forEach((end, index) => {
      end.words = endWords(end);
      const width = Math.max(...end.words.map(words => words.length)) * 6 + 16;
      plan.setNode(`${kind} ${index}`, { width, height: END_HEIGHT, end, kind });
      for (const [at, values] of end.to) {
        connect(...(kind === "enter" ? [`enter ${index}`, `box ${at}`] : [`box ${at}`, `leave ${index}`]), values);
      }
    });
  }
  for (const line of level.lines) connect(`box ${line.from}`, `box ${line.at}`, line.values);
  dagre.layout(plan);
  return plan;
}

function endWords(end) {
  return end.values.map(values => {
    const [first] = values;
    return !first ? "" : values.size > 1 ? `${values.size} values` : fitting(first.name, 28);
  });
}

const marksText = marks => [...marks].filter(([, count]) => count).map(([mark, count]) => `${count} ${mark}`).join(", ");

// The two lines of text in a box: what it is, and its figure.
function wordsOf({ box: one, marks }) {
  const figure = text(figureOf(one));
  const many = one.kind === "fold" ? `\u00d7${one.children.length}` : "";
  const names = {
    call: () => one.row.segment,
    node: () => one.item.filter(Boolean).map(node => node.operator).filter((word, index, all) => all.indexOf(word) === index)
      .join(" \u2192 "),
    branch: () => one.branch.replaceAll("_", " "),
    fold: () => one.children[0].row.class,
    run: () => `${one.start + 1} \u2026 ${one.start + one.children.length}`,
  };
  const inside = one.kind === "node" && one.children.length ? "opens" : "";
  const changed = one.kind === "node" ? "" : marksText(marks);
  return [fitting(names[one.kind](), 34), [many, figure, changed, inside].filter(Boolean).join(" \u00b7 ")];
}

// The chosen figure of a box, added up as in the tree; undefined where it has none.
function figureOf(one) {
  if (one.kind === "call" && graph.boxOfRow.get(one.row) === one) return one.row.total[column.name];
  if (one.kind === "node" && !one.children.length) return nodeFigure(one.node);
  if (column.kind !== "sum" && column.kind !== "largest" && column.kind !== "smallest") return undefined;
  let sum;
  for (const child of one.kind === "node" ? [one.node.alone ||= { ...box("node", null, one), children: [] }, ...one.children] : one.children) {
    const figure = figureOf(child);
    if (figure !== undefined && figure !== null) sum = sum === undefined ? figure : joinedFigures(column.kind, sum, figure);
  }
  return sum;
}
function nodeFigure(node) {
  const own = node.figures[column.index];
  if (own !== null && own !== undefined) return own;
  const ran = node.ran.map(one => one.figures[column.index]).filter(figure => figure !== null);
  return ran.length ? ran.reduce((sum, figure) => joinedFigures(column.kind, sum, figure)) : undefined;
}

function heat(strength) {
  return `hsl(${Math.round(210 - 200 * strength)} 70% ${Math.round(80 - 18 * strength)}%)`;
}

// One file's side of a level as a drawing; what the other file alone has leaves its place free.
function drawSide(svg, level, plan, side) {
  const bit = 1 << side, group = make("g", { class: "moved" });
  const most = Math.max(1e-30, ...level.boxes.map(piece => Math.abs(number(figureOf(piece.box)))));
  for (const key of plan.edges()) {
    const edge = plan.edge(key), values = [...edge.values[side]];
    if (values.length) group.append(lineElement(edge, values));
  }
  for (const name of plan.nodes()) {
    const node = plan.node(name);
    if (node.end) {
      const values = [...node.end.values[side]];
      if (values.length) group.append(endElement(node, values, node.end.words[side]));
    } else if (node.piece.box.sides & bit) group.append(boxElement(node, side, most));
  }
  svg.replaceChildren(arrowHead(), group);
}
function arrowHead() {
  const defs = make("defs"), marker = make("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7,
    markerHeight: 7, orient: "auto" });
  marker.append(make("path", { d: "M0 0 8 4 0 8z" }));
  defs.append(marker);
  return defs;
}
function lineElement(edge, values) {
  const points = edge.points, group = make("g", { class: "line", tabindex: -1 });
  let path = `M${points[0].x} ${points[0].y}`;
  for (let index = 1; index < points.length - 1; index++) {
    const { x, y } = points[index], next = points[index + 1];
    path += index < points.length - 2 ? `Q${x} ${y} ${(x + next.x) / 2} ${(y + next.y) / 2}` : `Q${x} ${y} ${next.x} ${next.y}`;
  }
  if (points.length === 2) path += `L${points[1].x} ${points[1].y}`;
  group.append(make("path", { d: path, "marker-end": "url(#arrow)" }), make("path", { d: path, class: "near" }),
    make("text", { x: edge.x, y: edge.y + 3 }, valueText(values)));
  group.tip = values.map(valueTip).join("\n");
  return group;
}
function valueTip(value) {
  const range = value.figures ? `\n  ${rangeText(value.figures)}` : "";
  return `${value.name}\n  ${value.type}${range}`;
}
function endElement(node, values, words) {
  const group = make("g", { class: "end", transform: `translate(${node.x - node.width / 2} ${node.y - node.height / 2})` });
  group.append(make("rect", { width: node.width, height: node.height, rx: 10 }),
    make("text", { x: node.width / 2, y: 14 }, words));
  group.tip = values.slice(0, 20).map(valueTip).join("\n");
  return group;
}
function boxElement(node, side, most) {
  const { piece } = node, one = piece.box, figure = figureOf(one);
  const opens = one.children.length > 0;
  const found = words && !boxMatches(one);
  const marked = one.kind === "node" ? one.mark : one.sides === 3 || !data.other ? (piece.marks.size ? "inside" : "")
    : one.sides === 1 ? "removed" : "added";
  const group = make("g", { class: `box ${one.kind} ${marked}`, tabindex: -1, role: "button", "data-box": piece.index,
    "data-name": one.kind === "node" ? (one.item[side] || one.node).name : name(one.row), opacity: found ? 0.25 : 1,
    "aria-label": piece.lines.filter(Boolean).join(", "),
    transform: `translate(${node.x - node.width / 2} ${node.y - node.height / 2})` });
  const fill = figure === undefined || figure === null ? "" : heat(Math.abs(figure) / most);
  if (one.kind === "fold" || one.kind === "run") group.append(make("rect", { class: "behind", x: 4, y: 4, width: node.width, height: node.height }));
  const rect = make("rect", { width: node.width, height: node.height, rx: opens ? 0 : 6 });
  if (fill) rect.style.fill = fill;
  group.classList.toggle("heated", !!fill);
  const beside = piece.weights.some(some => some.size) ? 16 : 0;
  group.append(rect, make("text", { x: (node.width - beside) / 2, y: piece.lines[1] ? 16 : 23 }, piece.lines[0]),
    make("text", { class: "figure", x: (node.width - beside) / 2, y: 30 }, piece.lines[1]));
  const weights = [...piece.weights[side]];
  if (weights.length) {
    const mark = make("g", { class: "weights", transform: `translate(${node.width - 9} 9)` });
    mark.append(make("rect", { x: -4, y: -4, width: 8, height: 8 }), make("text", { x: -6, y: 3 }, weights.length > 1 ? weights.length : ""));
    mark.tip = weights.slice(0, 12).map(valueTip).join("\n") + (weights.length > 12 ? `\nand ${weights.length - 12} more` : "");
    group.append(mark);
  }
  group.piece = piece;
  group.tip = boxTip(piece, side);
  return group;
}
function boxTip({ box: one, lines, marks }, side) {
  const parts = [];
  if (one.kind === "call") parts.push(name(one.row), one.row.class);
  else if (one.kind === "node") {
    const node = one.item[side] || one.node;
    parts.push(`${node.operator}  ${node.name}`, node.attributes, node.line, one.item.why);
  } else if (one.kind === "fold") parts.push(`${one.children.length} equal calls`, name(one.children[0].row), `\u2026 ${name(one.children.at(-1).row)}`);
  else parts.push(lines[0]);
  const figure = text(figureOf(one));
  if (figure) parts.push(`${title(column)}: ${figure}`);
  if (one.kind !== "node" && marks.size) parts.push(marksText(marks));
  return parts.filter(Boolean).join("\n");
}
function boxMatches(one) {
  if (one.kind === "call") return matches(one.row) || one.children.some(boxMatches);
  if (one.kind === "node" && (matches(one.row) || one.item.some(node => node && nodeMatches(node)))) return true;
  return one.children.some(boxMatches);
}
function nodeMatches(node) {
  return [node.name, node.operator, ...node.outputs.map(value => value.name)].some(one => one.toLowerCase().includes(words));
}
