// The chart: modules as an icicle, in which a click zooms.
function drawIcicle() {
  const svg = byId("icicle"), width = svg.clientWidth || 900, height = 22;
  svg.replaceChildren();
  let deepest = 0;
  const above = [];
  for (let row = focus; row; row = row.parent === null ? null : rows[row.parent]) above.unshift(row);
  const draw = (row, x, wide, level) => {
    if (wide < 1) return;
    deepest = Math.max(deepest, level);
    const strength = heatOf.get(row);
    const rect = make("rect", { x, y: level * height, width: wide, height, "data-address": name(row), class: row === chosen ? "chosen" : "",
      fill: `hsl(${Math.round(210 - 200 * strength)} 70% ${Math.round(80 - 18 * strength)}%)`,
      opacity: words && !matches(row) ? 0.25 : 1 });
    rect.append(make("title", {}, `${name(row)}\n${row.class}: ${text(row.total[column.name])} `
      + `(own ${text(row.own[column.name]) || 0})`));
    rect.addEventListener("click", () => { zoom(row === focus && row.parent !== null ? rows[row.parent] : row); });
    svg.append(rect);
    if (wide > 40) {
      svg.append(make("text", { x: x + 4, y: level * height + 15 }, fitting(row.segment, (wide - 8) / 6.8)));
    }
    if (level < above.length - 1) { draw(above[level + 1], x, wide, level + 1); return; }
    const all = weight(row) || 1;
    let at = x;
    for (const child of row.children) {
      const part = wide * weight(child) / all;
      draw(child, at, part, level + 1);
      at += part;
    }
  };
  const most = Math.max(1e-30, ...rows.map(r => number(r.own[column.name])));
  const heatOf = new Map(rows.map(row => [row, column.kind === "sum"
    ? number(row.own[column.name]) / most : number(row.total[column.name]) / (number(root.total[column.name]) || 1)]));
  draw(above[0], 0, width, 0);
  svg.setAttribute("height", (deepest + 1) * height);
  svg.setAttribute("viewBox", `0 0 ${width} ${(deepest + 1) * height}`);
  byId("legend").replaceChildren(`Width: ${column.kind === "sum" ? title(column) : "nodes"} of a module with its parts. Colour: `,
    `${title(column)} of ${column.kind === "sum" ? "the module itself, without its parts" : "the module"}, little `, make("i"), " much.");
  const path = byId("path");
  path.replaceChildren(...above.flatMap(row => {
    const button = make("button", { type: "button" }, row.segment);
    button.addEventListener("click", () => zoom(row));
    return [button, document.createTextNode(row === focus ? "" : "/")];
  }));
}
function zoom(row) {
  focus = row;
  choose(row);
}
