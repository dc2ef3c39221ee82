// The panel "inside": which level is open, moving and zooming in it, the keyboard, and the chosen node.
let level = null, chosenItem = null, view = { x: 0, y: 0, scale: 1 }, focused = 0;

const hasGraph = () => !!data.graph.values;
const sidesShown = () => data.other ? [0, 1] : [0];

// Opens a box, and shows what is in it.
function openBox(one) {
  level = levelOf(one);
  level.plan = laidOut(level);
  focused = 0;
  drawGraph();
  fit();
}
function drawGraph() {
  if (!hasGraph()) return;
  const svgs = sidesShown().map(side => {
    const svg = byId(`graph-${side}`);
    drawSide(svg, level, level.plan, side);
    svg.removeAttribute("hidden");
    return svg;
  });
  byId("graphs").classList.toggle("two", svgs.length > 1);
  byId("graph-empty").hidden = level.boxes.length > 0;
  byId("graphs").hidden = !level.boxes.length;
  const path = byId("level");
  path.replaceChildren(...levelsAround(level.parent).flatMap((one, index, all) => {
    const button = make("button", { type: "button" }, levelName(one));
    button.addEventListener("click", () => enter(one));
    if (index === all.length - 1) button.setAttribute("aria-current", "true");
    return [button, document.createTextNode(index === all.length - 1 ? "" : "/")];
  }));
  byId("fold").textContent = folding ? "unfold equal" : "fold equal";
  for (const element of document.querySelectorAll("#graphs .box")) {
    element.classList.toggle("chosen", !!chosenItem && element.piece.box.item === chosenItem);
  }
  setFocused(focused);
  place();
  byId("differences").replaceChildren(...differences());
}
// What differs inside the level, each group of nodes that replace one another in one line.
const DIFFERENCES = 100;
function differences() {
  if (!data.other) return [];
  const groups = new Map();
  const collect = one => {
    if (one.item && one.mark) {
      const [first, second] = one.item, key = `${one.mark} ${one.item.why} ${name(one.row)}`;
      if (!groups.has(key)) groups.set(key, { item: one.item, row: one.row, mark: one.mark, why: one.item.why, names: new Set() });
      groups.get(key).names.add((first || second).name);
    }
    one.children.forEach(collect);
  };
  collect(level.parent);
  const listed = [...groups.values()], table = make("table");
  for (const { item, row, mark, why, names } of listed.slice(0, DIFFERENCES)) {
    const line = make("tr"), where = make("td"), button = make("button", { type: "button" });
    button.append(...breakable(name(row)));
    button.addEventListener("click", () => chooseItem(item));
    where.append(button);
    const first = [...names].slice(0, 3).join(", ") + (names.size > 3 ? ` and ${names.size - 3} more` : "");
    const head = make("th");
    head.append(make("span", { class: `mark ${mark}` }), mark);
    line.append(head, where, make("td", {}, why || item.find(Boolean).operator), make("td", {}, first));
    table.append(line);
  }
  const more = listed.length > DIFFERENCES ? `; the first ${DIFFERENCES}` : "";
  const count = listed.length ? `${listed.length} difference${listed.length === 1 ? "" : "s"} inside${more}` : "no differences inside";
  return [make("h2", {}, count), table];
}
function levelsAround(one) {
  const chain = [];
  for (let above = one; above; above = above.parent) chain.unshift(above);
  return chain;
}
function levelName(one) {
  if (one.kind === "call") return one.row.segment;
  if (one.kind === "node") return one.node.operator;
  if (one.kind === "branch") return one.branch.replaceAll("_", " ");
  return one.kind === "fold" ? `\u00d7${one.children.length}` : `${one.start + 1} \u2026 ${one.start + one.children.length}`;
}
// Opening a box of a call is choosing the call; another box is in the call that is chosen.
function enter(one) {
  chosenItem = one.item || null;
  if (one.kind === "call" && graph.boxOfRow.get(one.row) === one && !one.row.foreign) choose(one.row);
  else {
    const row = ancestors(one.row).findLast(above => !above.foreign);
    if (chosen !== row) choose(row, false);
    openBox(one);
    showItem();
  }
}
function leave() {
  if (level.parent.parent) enter(level.parent.parent);
}
function activate(piece) {
  if (piece.box.children.length) enter(piece.box);
  else chooseItem(piece.box.item);
}
// Chooses a node: marked in the graph, described below it, named in the address bar.
function chooseItem(item) {
  chosenItem = item;
  const leaf = item.find(Boolean).box;
  if (!level.boxes.some(piece => piece.box === leaf)) {
    choose(ancestors(leaf.row).findLast(above => !above.foreign), false);
    openBox(holding(leaf));
  } else drawGraph();
  showItem();
}
// The level in which a box is drawn: its own, or a run of it.
function holding(leaf) {
  let one = leaf.parent, before;
  do {
    before = one;
    one = piecesOf(one).find(piece => (piece.kind === "run" || piece.kind === "fold") && piece.children.some(child => within(child, leaf))) || one;
  } while (one !== before);
  return one;
}
function within(one, leaf) {
  return one === leaf || ((one.kind === "run" || one.kind === "fold") && one.children.some(child => within(child, leaf)));
}
function showItem() {
  byId("node").replaceChildren(...(chosenItem ? sidesShown().flatMap(side => chosenItem[side] ? [described(chosenItem[side], side)] : []) : []));
  remember();
}
function described(node, side) {
  const table = make("table"), line = (head, ...cells) => {
    const made = make("tr");
    made.append(make("th", {}, head), ...cells.map(one => make("td", {}, one)));
    table.append(made);
  };
  line(node.operator, node.name, data.other ? (side ? data.against : data.name) : "");
  if (node.item.why) line("", node.item.why);
  if (node.line) line("made in", node.line);
  if (node.attributes) line("attributes", node.attributes);
  for (const [head, values] of [["takes", node.inputs], ["gives", node.outputs]]) {
    for (const value of values) line(head, value.name, value.type, value.figures ? rangeText(value.figures) : value.kind & WEIGHT ? "weight" : "");
  }
  return table;
}

function place() {
  for (const moved of document.querySelectorAll("#graphs .moved")) {
    moved.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.scale})`);
  }
}
// The whole level, or as much of its beginning as can be read.
function fit() {
  if (!level.boxes.length) return;
  const svg = byId("graph-0"), { width, height } = level.plan.graph();
  const wide = svg.clientWidth || 800, tall = tallest();
  const scale = Math.min(1.1, Math.max(0.55, Math.min(wide / (width || 1), tall / (height || 1))));
  const used = Math.max(180, Math.min(tall, (height || 0) * scale + 4));
  byId("graphs").style.setProperty("--tall", `${Math.round(used)}px`);
  const places = level.boxes.map(({ index }) => level.plan.node(`box ${index}`));
  const first = places.length ? places.reduce((top, one) => one.y < top.y ? one : top) : null;
  const middle = width * scale <= wide || !first ? width / 2 : first.x;
  view = { scale, x: wide / 2 - middle * scale, y: 0 };
  place();
}
const tallest = () => Math.max(260, Math.round(innerHeight * 0.62));
function zoomAt(x, y, factor) {
  const scale = Math.min(4, Math.max(0.05, view.scale * factor)), change = scale / view.scale;
  view = { scale, x: x - (x - view.x) * change, y: y - (y - view.y) * change };
  place();
}
function zoomMiddle(factor) {
  const svg = byId("graph-0");
  zoomAt(svg.clientWidth / 2, svg.clientHeight / 2, factor);
}

function setFocused(index) {
  focused = Math.max(0, Math.min(index, level.boxes.length - 1));
  for (const element of document.querySelectorAll("#graphs .box")) element.classList.toggle("focused", element.piece.index === focused);
}
// The nearest box in a direction: of those that a line leads to, or else of all; what is straight ahead is nearer.
function moveFocus(dx, dy) {
  if (!level.boxes.length) return;
  const from = level.plan.node(`box ${focused}`);
  const nearest = indices => {
    let best = null, least = Infinity;
    for (const index of indices) {
      const to = level.plan.node(`box ${index}`), x = to.x - from.x, y = to.y - from.y, along = x * dx + y * dy;
      const distance = along + 3 * Math.abs(dx ? y : x);
      if (along > 1 && distance < least) [best, least] = [index, distance];
    }
    return best;
  };
  const beside = level.lines.filter(line => line.from === focused || line.at === focused);
  const best = nearest(beside.map(line => line.from === focused ? line.at : line.from)) ?? nearest(level.boxes.keys());
  if (best === null) return;
  setFocused(best);
  const svg = byId("graph-0"), to = level.plan.node(`box ${best}`), x = view.x + to.x * view.scale, y = view.y + to.y * view.scale;
  if (x < 40 || x > svg.clientWidth - 40) view.x += svg.clientWidth / 2 - x;
  if (y < 30 || y > svg.clientHeight - 30) view.y += svg.clientHeight / 2 - y;
  place();
  byId("spoken").textContent = level.boxes[best].lines.filter(Boolean).join(", ");
}
const KEYS = {
  ArrowUp: () => moveFocus(0, -1), ArrowDown: () => moveFocus(0, 1), ArrowLeft: () => moveFocus(-1, 0), ArrowRight: () => moveFocus(1, 0),
  Enter: () => level.boxes.length && activate(level.boxes[focused]), " ": () => KEYS.Enter(), Backspace: leave, Escape: leave,
  "+": () => zoomMiddle(1.25), "=": () => zoomMiddle(1.25), "-": () => zoomMiddle(0.8), 0: fit,
};

// Wheel, one finger or the mouse moves; two fingers zoom.
function listen(svg) {
  const fingers = new Map();
  let moved = 0;
  svg.addEventListener("keydown", event => {
    if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  svg.addEventListener("wheel", event => {
    event.preventDefault();
    const { left, top } = svg.getBoundingClientRect();
    zoomAt(event.clientX - left, event.clientY - top, Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)));
  }, { passive: false });
  svg.addEventListener("pointerdown", event => {
    fingers.set(event.pointerId, [event.clientX, event.clientY]);
    if (fingers.size === 1) moved = 0;
  });
  svg.addEventListener("pointermove", event => {
    if (!fingers.has(event.pointerId)) return;
    const before = [...fingers.values()], [x, y] = fingers.get(event.pointerId);
    fingers.set(event.pointerId, [event.clientX, event.clientY]);
    const after = [...fingers.values()];
    moved += Math.abs(event.clientX - x) + Math.abs(event.clientY - y);
    if (after.length === 1) {
      view.x += event.clientX - x;
      view.y += event.clientY - y;
      if (moved > 4 && !svg.hasPointerCapture(event.pointerId)) svg.setPointerCapture(event.pointerId);
      place();
    } else {
      const apart = two => Math.hypot(two[0][0] - two[1][0], two[0][1] - two[1][1]), { left, top } = svg.getBoundingClientRect();
      zoomAt((after[0][0] + after[1][0]) / 2 - left, (after[0][1] + after[1][1]) / 2 - top, apart(after) / (apart(before) || 1));
    }
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"]) svg.addEventListener(end, event => fingers.delete(event.pointerId));
  svg.addEventListener("click", event => {
    const element = event.target.closest(".box");
    if (!element || moved > 4) { moved = 0; return; }
    setFocused(element.piece.index);
    activate(element.piece);
  });
  svg.addEventListener("pointerover", event => showTip(event.target.closest(".weights, .box, .line, .end"), event));
  svg.addEventListener("pointerleave", () => showTip(null));
}
function showTip(element, event) {
  const tip = byId("tip");
  tip.hidden = !element || !element.tip;
  if (tip.hidden) return;
  tip.textContent = element.tip;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 12) : event.clientY + 18}px`;
}

// The level of the chosen module, when another was chosen.
function graphOfChosen() {
  byId("inside").hidden = !hasGraph();
  if (!hasGraph()) return;
  const one = graph.boxOfRow.get(chosen);
  openBox(one || { ...box("call", graph.boxOfRow.get(root), { row: chosen }), children: [] });
}
function listenToGraph() {
  for (const side of [0, 1]) listen(byId(`graph-${side}`));
  byId("fold").addEventListener("click", () => { folding = !folding; openBox(actual(level.parent)); });
  byId("closer").addEventListener("click", () => zoomMiddle(1.25));
  byId("farther").addEventListener("click", () => zoomMiddle(0.8));
  byId("fit").addEventListener("click", fit);
  byId("up").addEventListener("click", leave);
}
// A run or folded calls are of the way in which a level is shown; with another way the level itself is opened.
function actual(one) {
  let place = one;
  while (place.kind === "run" || place.kind === "fold") place = place.parent;
  return place;
}
