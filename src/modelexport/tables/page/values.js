// What values were when the file was run: ranges, and a histogram of their sizes by powers of two.
// Of a value: [smallest, largest, elements, zeros, NaN, infinite, first power of two, elements by power].
const FLOAT16_POWERS = [-24, 16];

function rangeText([least, most, elements, zeros, nan, infinite]) {
  const short = value => Number(value.toPrecision(4)).toString();
  const parts = [least === null ? "nothing finite" : `${short(least)} \u2026 ${short(most)}`];
  if (zeros) parts.push(`${(100 * zeros / elements).toPrecision(2)} % zeros`);
  if (nan) parts.push(`${nan.toLocaleString("en")} NaN`);
  if (infinite) parts.push(`${infinite.toLocaleString("en")} infinite`);
  return parts.join(", ");
}

// The sizes of all that nodes compute; nothing if they were not run.
function histogram(nodes) {
  const counts = new Map();
  for (const node of nodes) {
    for (const value of node.outputs || []) {
      if (value.figures) value.figures[7].forEach((count, index) => {
        const power = value.figures[6] + index;
        counts.set(power, (counts.get(power) || 0) + count);
      });
    }
  }
  if (!counts.size) return [];
  const least = Math.min(-26, ...counts.keys()), most = Math.max(18, ...counts.keys());
  const wide = 100 / (most - least + 1), tallest = Math.max(...counts.values());
  const svg = make("svg", { id: "histogram", role: "img", "aria-label": "sizes of values by powers of two" });
  for (const [power, count] of counts) {
    // Few elements matter as well as many: heights are logarithms.
    const height = 80 * Math.log1p(count) / Math.log1p(tallest), outside = power > FLOAT16_POWERS[1] || power < FLOAT16_POWERS[0];
    const bar = make("rect", { x: `${(power - least) * wide}%`, y: 80 - height, width: `${0.86 * wide}%`, height, class: outside ? "outside" : "" });
    bar.append(make("title", {}, `2^${power - 1} to 2^${power}: ${count.toLocaleString("en")}`));
    svg.append(bar);
  }
  for (const [power, words, anchor] of [[FLOAT16_POWERS[0], "float16 from", "start"], [0, "1", "middle"], [FLOAT16_POWERS[1] + 1, "float16 to", "end"]]) {
    const x = `${(power - least) * wide}%`;
    svg.append(make("line", { x1: x, x2: x, y1: 0, y2: 84 }), make("text", { x, y: 96, "text-anchor": anchor }, words));
  }
  return [make("h2", {}, "Sizes of values"), svg];
}
