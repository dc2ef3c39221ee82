// Read the modules of a tagged ONNX file without a library: node read_tags.js FILE.onnx, or readTags(bytes) in a browser.
"use strict";
const text = bytes => new TextDecoder().decode(bytes);

// The fields of a Protocol Buffers message with a length (numbers of fields: onnx.proto): {number: [bytes, ...]}.
function fields(bytes) {
  const found = {};
  let at = 0;
  const varint = () => { let n = 0, s = 1, b; do { b = bytes[at++]; n += (b & 127) * s; s *= 128; } while (b & 128); return n; };
  while (at < bytes.length) {
    const key = varint(), kind = key % 8;
    if (kind === 0) varint();
    else if (kind === 2) { const size = varint(); (found[(key - kind) / 8] ??= []).push(bytes.subarray(at, at += size)); }
    else at += kind === 1 ? 8 : 4;
  }
  return found;
}
const properties = entries => Object.fromEntries((entries ?? []).map(fields).map(e => [text(e[1][0]), text(e[2][0])]));

// The nodes of a graph, and of the graphs of its branches and loops.
function allNodes(graph) {
  return (fields(graph)[1] ?? []).map(fields).flatMap(node => [node, ...(node[5] ?? []).map(fields)
    .flatMap(attribute => [...(attribute[6] ?? []), ...(attribute[11] ?? [])]).flatMap(allNodes)]);
}

// Address of each call to its tag, its operators, and the state_dict entries that its nodes use.
function readTags(bytes) {
  const model = fields(bytes), graph = model[7][0];
  const calls = new Map(JSON.parse(properties(model[14])["modelexport.call_tree"])
    .map(entry => [entry.call, { tag: entry.tag, operators: [], parameters: [] }]));
  const entries = new Map((fields(graph)[5] ?? []).map(fields)
    .map(tensor => [text(tensor[8][0]), JSON.parse(properties(tensor[16])["modelexport.parameter"] ?? "[]")]));
  for (const node of allNodes(graph)) {
    const call = calls.get(properties(node[9])["modelexport.call"]);
    call.operators.push(text(node[4][0]));
    for (const key of (node[1] ?? []).flatMap(name => entries.get(text(name)) ?? [])) {
      if (!call.parameters.includes(key)) call.parameters.push(key);
    }
  }
  return calls;
}

if (typeof process !== "undefined" && require.main === module) {
  for (const [address, call] of readTags(require("fs").readFileSync(process.argv[2]))) {
    console.log([address || ".", call.tag, call.operators.join(" "), call.parameters.join(" ")].join("\t"));
  }
}
