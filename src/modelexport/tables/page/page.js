// The page as a whole: which part is shown, links, the controls.
// A link to a module: its address after "#", of several parts after the name of its part.
function chooseLinked() {
  const link = decodeURI(location.hash.slice(1)), part = parts.find(one => link.startsWith(`${one.part}/`));
  if (part && part !== data) { byId("part").value = part.part; show(part); return; }
  const [address, node] = (parts.length > 1 ? link.slice(link.indexOf("/") + 1) : link).split("~");
  zoom(rows.find(row => row.address === address) || root);
  const item = node && graph && graph.items.find(one => one.some(each => each && each.box && each.name === node));
  if (item) item.find(Boolean).box.children.length ? enter(item.find(Boolean).box) : chooseItem(item);
}

// What was chosen above is seen, where it is below the window.
function scrollToChosen() {
  const shows = byId(hasGraph() ? "inside" : "tables");
  if (shows.getBoundingClientRect().top > 0.8 * innerHeight) shows.scrollIntoView();
}
function choices(select, names, current) {
  select.replaceChildren(...names.map(([value, label]) => {
    const option = make("option", { value }, label);
    option.selected = value === current;
    return option;
  }));
}
function show(part) {
  read(part);
  byId("title").textContent = data.name + (data.against && ` \u2192 ${data.against}`);
  byId("tables").classList.toggle("compared", !!data.against);
  byId("path").hidden = hasGraph();  // the path of the graph is the same
  document.title = `${data.name} by module`;
  choices(byId("column"), shown.map(which => [which.name, title(which)]), column.name);
  byId("sections").replaceChildren();
  const linkTo = new Map(rows.map(row => [`#${row.address}`, () => {
    const button = make("button", { type: "button", title: "show this module" });
    button.append(...breakable(name(row)));
    button.addEventListener("click", () => {
      search("");
      zoom(root);
      choose(row);
      scrollToChosen();
    });
    return button;
  }]));
  for (const [heading, lines] of data.sections) {
    const table = make("table"), section = make("details", { open: "" });
    for (const cells of lines) {
      const line = make("tr");
      cells.forEach((cell, index) => {
        const made = make(index ? "td" : "th"), plain = cell.replace(/^#/, "");
        made.append(...linkTo.has(cell) ? [linkTo.get(cell)()] : index ? [plain] : breakable(plain));
        line.append(made);
      });
      table.append(line);
    }
    section.append(make("summary", {}, heading), table);
    byId("sections").append(section);
  }
  const largest = make("details", { open: "" });
  largest.append(make("summary", { id: "largest-title" }), make("table", { id: "largest" }));
  byId("sections").insertBefore(largest, data.sections.length > 1 ? byId("sections").lastElementChild : null);
  drawLargest();
  byId("notes").replaceChildren(...data.notes.map(note => make("p", {}, note)));
  chooseLinked();
}
choices(byId("part"), parts.map(part => [part.part, part.part]), parts[0].part);
byId("choose-part").hidden = parts.length === 1;
byId("part").addEventListener("change", event => {
  history.replaceState(null, "", `#${encodeURI(event.target.value)}/`);
  show(parts.find(part => part.part === event.target.value));
});
byId("column").addEventListener("change", event => {
  pick(shown.find(which => which.name === event.target.value));
});
byId("search").addEventListener("input", event => {
  search(event.target.value);
  drawIcicle();
  drawTree();
  drawGraph();
});
const theme = dark => {
  document.documentElement.classList.toggle("dark", dark);
  byId("theme").textContent = dark ? "light" : "dark";
};
byId("theme").addEventListener("click", () => theme(!document.documentElement.classList.contains("dark")));
theme(matchMedia("(prefers-color-scheme: dark)").matches);
listenToGraph();
listenToTree();
show(parts[0]);
addEventListener("resize", () => { drawIcicle(); if (hasGraph()) fit(); });
addEventListener("hashchange", chooseLinked);
