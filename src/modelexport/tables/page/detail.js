// One module: its figures, its operators, its nodes.
// The nodes that have the figure: those that ran have times, those of the file have the others.
function listed(nodes) {
  const figure = node => node.figures[column.index], timed = columns.filter(c => c.unit === "seconds");
  const fit = nodes.filter(timed.includes(column) ? node => figure(node) !== null :
    node => timed.every(c => node.figures[c.index] === null));
  return (fit.length ? fit : nodes).sort((a, b) => number(figure(b)) - number(figure(a)));
}

function choose(row, opened = true) {
  chosen = row;
  if (opened) chosenItem = null;
  for (let above = row.parent; above !== null; above = rows[above].parent) open.add(rows[above]);
  drawTree();
  byId("chosen").textContent = row.address || `${row.class}, the whole model`;
  const figures = make("table"), head = make("tr", { class: "heads" });
  head.append(...["", "with its parts", "its own"].map(one => make("th", {}, one)));
  figures.append(head);
  for (const which of shown) {
    if (shown.some(c => other(c) === which)) continue;  // it is beside the first file's
    const line = make("tr");
    line.append(make("th", { title: which.unit }, title(which)), cell(row.total, which), cell(row.own, which));
    figures.append(line);
  }
  const within = [row];
  for (const one of within) within.push(...one.children);
  const nodes = listed([...new Set(within.flatMap(one => one.nodes))]);
  const own = new Set(row.nodes), figure = node => number(node.figures[column.index]);
  const detail = byId("detail");
  detail.replaceChildren(make("p", { class: "empty" }, row.tag), ...(row.source ? [source(row.source)] : []), figures);
  if (!nodes.length) detail.append(make("h2", {}, "no nodes"));
  else detail.append(kinds(nodes, figure));
  detail.append(...histogram(nodes.filter(node => node.outputs)));
  for (const [one, listedNodes] of [["of the module itself", nodes.filter(node => own.has(node))],
    ["of its parts", nodes.filter(node => !own.has(node))]]) {
    if (!listedNodes.length) continue;
    const table = make("table"), folded = make("details", { class: "nodes" });
    for (const node of listedNodes.slice(0, 500)) {
      const line = make("tr"), label = make("td"), kind = make("td");
      kind.append(make("span", { class: "kind", style: `background: ${colourOf(node.operator)}` }), node.operator);
      label.append(make("code", {}, node.name));
      line.append(kind, label, make("td", { class: "number" }, text(node.figures[column.index])));
      table.append(line);
    }
    const count = listedNodes.length, first = count > 500 ? "; the 500 largest" : "";
    folded.append(make("summary", {}, `${count.toLocaleString("en")} node${count === 1 ? "" : "s"} ${one}${first}`), table);
    folded.open = count <= 30 && (one === "of the module itself" || !own.size && !row.children.length);
    detail.append(folded);
  }
  byId("node").replaceChildren();
  if (opened) graphOfChosen();
  drawIcicle();
  remember();
}

// What is chosen is in the address bar: of several parts the part, the address of the module, and after "~" the node.
function remember() {
  // Of no use, and refused, where the page is in a frame of a notebook.
  if (location.protocol === "about:") return;
  const node = chosenItem ? `~${chosenItem.find(Boolean).name}` : "";
  history.replaceState(null, "", `#${encodeURI((parts.length > 1 ? `${data.part}/` : "") + chosen.address + node)}`);
}

// The Python module and the line of a class, as an editor finds it.
function source(where) {
  const line = make("p", { id: "source" }), code = make("code"), button = make("button", { type: "button" }, "copy");
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(code);
    button.textContent = document.execCommand("copy") ? "copied" : "selected";
  });
  code.append(...breakable(where));
  line.append(code, button);
  return line;
}

// Operators by their share of the figure, or of the nodes where no node has it.
function kinds(nodes, figure) {
  const amount = nodes.some(figure) ? figure : () => 1, sums = new Map(), counts = new Map();
  for (const node of nodes) {
    sums.set(node.operator, (sums.get(node.operator) || 0) + amount(node));
    counts.set(node.operator, (counts.get(node.operator) || 0) + 1);
  }
  const largest = [...sums].sort((a, b) => b[1] - a[1]), whole = largest.reduce((sum, [, one]) => sum + one, 0);
  const bar = make("div", { id: "kinds" }), list = make("p");
  for (const [operator, sum] of largest) {
    bar.append(make("span", { style: `background: ${colourOf(operator)}; width: ${100 * sum / whole}%`, title: operator }));
    const label = make("span", { style: "white-space: nowrap" });
    label.append(make("span", { class: "kind", style: `background: ${colourOf(operator)}` }), `${counts.get(operator)} ${operator}`);
    list.append(label, "  ");
  }
  const made = make("section");
  made.append(make("h2", {}, "Operators"), bar, list);
  return made;
}
