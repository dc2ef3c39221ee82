// The tree of modules, the search, and the modules with the largest figures.
// Words are looked for in names; with an asterisk, which stands for a part of an address, they are the whole address.
function matches(row) {
  if (!words.includes("*")) return `${name(row)} ${row.tag} ${row.class}`.toLowerCase().includes(words);
  const parts = words.split("*").map(part => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(`^${parts.join("[^.]*")}(@\\d+)?$`, "i").test(name(row));
}
function search(text) {
  byId("search").value = text;
  words = text.trim().toLowerCase();
}

// The modules whose own figure is largest, those whose addresses differ only in numbers together.
function drawLargest() {
  const groups = new Map(), added = column.kind === "sum", whole = number(data.whole[column.name]);
  for (const row of rows) {
    const own = number(row.own[column.name]);
    if (!own) continue;
    const pattern = name(row).replace(/@\d+$/, "").replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
    const group = groups.get(pattern) || { figure: 0, rows: [] };
    group.figure = added ? group.figure + own : Math.max(group.figure, own);
    group.rows.push(row);
    groups.set(pattern, group);
  }
  byId("largest-title").textContent = `Largest ${title(column).replace(/^largest /, "")}`;
  byId("largest").replaceChildren(...[...groups].sort((a, b) => b[1].figure - a[1].figure).slice(0, 5).map(([pattern, group]) => {
    const line = make("tr"), head = make("th"), button = make("button", { type: "button", title: "show these in the tree" });
    const most = group.rows.reduce((best, row) => number(row.own[column.name]) > number(best.own[column.name]) ? row : best);
    button.append(...breakable(group.rows.length > 1 ? pattern : name(most)));
    button.addEventListener("click", () => {
      search(group.rows.length > 1 ? pattern : "");
      zoom(root);
      choose(most);
      scrollToChosen();
    });
    head.append(button);
    const share = added && whole ? `, ${(100 * group.figure / whole).toPrecision(3)} %` : "";
    const calls = group.rows.length, uneven = added && number(most.own[column.name]) > 1.5 * group.figure / calls;
    const where = calls > 1 && !added ? ` in ${name(most)}` : "";
    const count = calls > 1 ? `, ${calls} calls${uneven ? `, most of it in ${name(most)}` : ""}` : "";
    line.append(head, make("td", {}, text(group.figure) + share + where + count));
    return line;
  }));
}

function line(row) {
  const element = make("div", { class: "row" + (row === chosen ? " chosen" : ""), role: "treeitem",
    "data-address": name(row), "aria-expanded": open.has(row), "aria-selected": row === chosen, title: row.tag, tabindex: -1 });
  element.row = row;
  const flat = words || sorted;
  element.style.paddingLeft = `${flat ? 0 : row.depth * 1.1}em`;
  const fold = make("button", { class: "fold", type: "button", "aria-label": "fold", tabindex: -1 },
    row.children.length && !flat ? (open.has(row) ? "\u25be" : "\u25b8") : "");
  fold.addEventListener("click", event => {
    event.stopPropagation();
    if (open.has(row)) open.delete(row); else open.add(row);
    drawTree();
  });
  const label = make("span", { class: "label" }, flat ? name(row) : row.segment);
  label.append(" ", make("small", {}, flat ? row.class : row.address));
  const track = make("span", { class: "track" }), bar = make("i");
  const most = Math.max(number(column.kind === "sum" ? data.whole[column.name] : 0), number(root.total[column.name]));
  bar.style.width = `${100 * Math.min(1, number(row.total[column.name]) / (number(most) || 1))}%`;
  track.append(bar);
  element.append(fold, label, track, ...cells(c => pair(row.total, c), text(row.own[column.name])));
  element.addEventListener("click", () => { choose(row); });
  return element;
}

// The cells of a line: the chosen figure, what is its own of it, and the other figures beside it.
function cells(total, own) {
  const beside = data.against ? COMPARED : BESIDE;
  const others = shown.filter(c => c !== column && beside.includes(c.name));
  const made = (value, which) => {
    const element = value instanceof Element ? value : make("span", { class: "number" }, value);
    element.classList.toggle("pair", !!which && !!other(which));
    return element;
  };
  return [made(total(column), column), made(own), ...others.map(c => made(total(c), c))];
}
// A figure, with that of the other file where there is one.
function pair(figures, which) {
  const mine = text(figures[which.name], which), second = other(which);
  const theirs = second ? text(figures[second.name], second) : "";
  return mine || theirs ? mine + (theirs && ` \u2192 ${theirs}`) : "";
}

// A heading chooses its figure; that of the chosen figure sorts by it, and again shows the tree.
function heading(which) {
  const chosenNow = which === column, mark = chosenNow && sorted ? " \u25be" : "";
  const button = make("button", { class: "number", type: "button", "data-column": which.name,
    title: chosenNow ? "largest own figure first, or the tree" : "show this figure" }, title(which) + mark);
  button.addEventListener("click", () => {
    sorted = chosenNow && !sorted;
    pick(which);
  });
  return button;
}
function pick(which) {
  column = which;
  byId("column").value = which.name;
  drawLargest();
  choose(chosen, false);
  if (hasGraph()) {
    level.plan = laidOut(level);  // boxes are as wide as their figures
    drawGraph();
    showItem();
  }
}

function drawTree() {
  const tree = byId("tree"), lines = [];
  const head = make("div", { class: "row heads" });
  head.append(make("span", { class: "fold" }), make("span", { class: "label" }, ""), make("span", { class: "track" }),
    ...cells(heading, "own"));
  if (words || sorted) {
    const found = rows.filter(matches);
    if (sorted) found.sort((a, b) => number(b.own[column.name]) - number(a.own[column.name]));
    byId("count").textContent = words ? `${found.length.toLocaleString("en")} found` : `by ${title(column)}`;
    lines.push(...found.slice(0, 300).map(line));
    const nodes = words && graph ? graph.items.filter(item => item.some(node => node && node.box && nodeMatches(node))) : [];
    lines.push(...nodes.slice(0, 100).map(nodeLine));
    if (!found.length && !nodes.length) lines.push(make("p", { class: "empty" }, "nothing found"));
  } else {
    byId("count").textContent = `${rows.length.toLocaleString("en")} calls`;
    const pending = [root];
    while (pending.length) {
      const row = pending.pop();
      if (row.more) { lines.push(moreLine(row)); continue; }
      lines.push(line(row));
      if (open.has(row)) pending.push(...firstChildren(row).reverse());
    }
    lines.push(...data.outside.filter(([, figures]) => figures[column.name]).map(([what, figures]) => {
      const element = make("div", { class: "row outside" });
      element.append(make("span", { class: "fold" }), make("span", { class: "label empty" }, what),
        make("span", { class: "track" }), ...cells(c => pair(figures, c), ""));
      return element;
    }));
  }
  const focused = tree.contains(document.activeElement) ? document.activeElement.row : null;
  tree.replaceChildren(head, ...lines);
  const elements = treeLines();
  const reached = elements.find(element => element.row === (focused || chosen)) || elements[0];
  if (reached) reached.tabIndex = 0;
  if (reached && focused) reached.focus();
}
const treeLines = () => [...byId("tree").querySelectorAll("[role=treeitem]")];

// The children of a module that are drawn: of many the first, those up to the chosen one, and a line for the rest.
const CHILDREN = 200, wanted = new Map();
function firstChildren(row) {
  let least = wanted.get(row) || CHILDREN;
  for (let one = chosen; one && one.parent !== null; one = rows[one.parent]) {
    if (rows[one.parent] === row) least = Math.max(least, row.children.indexOf(one) + 1);
  }
  if (row.children.length <= least + 1) return [...row.children];
  return [...row.children.slice(0, least), { more: row, count: row.children.length - least, depth: row.depth + 1, least }];
}
function moreLine({ more, count, depth, least }) {
  const element = make("div", { class: "row more", role: "treeitem", tabindex: -1 }, `${count.toLocaleString("en")} more`);
  element.style.paddingLeft = `${depth * 1.1 + 1.6}em`;
  element.addEventListener("click", () => {
    wanted.set(more, least + CHILDREN);
    drawTree();
  });
  return element;
}

// A node that was searched for.
function nodeLine(item) {
  const node = item.find(Boolean), element = make("div", { class: "row node", role: "treeitem", tabindex: -1, "data-node": node.name });
  const label = make("span", { class: "label" }, node.name);
  label.append(" ", make("small", {}, `${node.operator} of ${name(node.row)}`));
  element.append(make("span", { class: "fold" }), label);
  element.addEventListener("click", () => chooseItem(item));
  return element;
}

// Arrows move in the tree, open and close it; Enter chooses.
function listenToTree() {
  byId("tree").addEventListener("keydown", event => {
    const lines = treeLines(), at = lines.indexOf(event.target), row = event.target.row;
    if (at < 0) return;
    const reach = index => lines[index]?.focus(), turn = () => lines[at].querySelector("button.fold")?.click();
    const flat = words || sorted, folds = row && row.children.length && !flat;
    const keys = {
      ArrowDown: () => reach(at + 1), ArrowUp: () => reach(at - 1), Home: () => reach(0), End: () => reach(lines.length - 1),
      ArrowRight: () => folds && !open.has(row) ? turn() : reach(at + 1),
      ArrowLeft: () => folds && open.has(row) ? turn() : row && row.parent !== null && reach(lines.findIndex(line => line.row === rows[row.parent])),
      Enter: () => lines[at].click(), " ": () => lines[at].click(),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}
