"""Tags after other packages' tools: how much is known about every node, whether it is true, and the cost.

    OMP_NUM_THREADS=1 python benchmarks/survival.py [MODEL ...]     the table of tools by models
    OMP_NUM_THREADS=1 python benchmarks/survival.py --cost          time by nodes, against onnx.load and onnx.save

A node is *contaminated* if the values contradict one of its owners: the tagged file and the changed one are both run,
the second cut at the values that both have, and only names whose values agree are trusted. An owner has to own a node
that the tagged file computes between the trusted values before and after the node, or, if the node does not produce a
trusted value, a node that produces the values before it. Tools that do not change numbers also have to agree in
``verify --against``.

Needs what `make test` installs; about twelve minutes, `--cost` nine, most of them the quantizer's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import modelexport
import models
from building import build
from modelexport.core.calls import ModuleCall
from modelexport.format import keys
from modelexport.format.versions import FORMAT_VERSION
from modelexport.graph.copies import copy_of
from modelexport.graph.node_owners import owner_of
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tools.optimizers.optimize_tools import TOOLS, optimize_file
from modelexport.traces.file_run import FileRun
from modelexport.traces.reference_values import open_reference
from outcomes import least_seconds

LOSSY = {"quantize-dynamic": 0.3, "quantize-qdq": 0.5, "quantize-qoperator": 0.5, "quantize-4bit": 0.5, "float16": 0.03}
"""The largest distance of equal values: the norm of the difference divided by the norm."""
LOSSLESS = 1e-3
SIZES = (1_000, 10_000, 20_000)

Build = Callable[[], tuple[Any, Any]]


def bert_tiny() -> tuple[Any, Any]:
    from modelexport.pytorch.loading import load_model

    model = load_model("bert-tiny").model
    return model, modelexport.example_inputs(model)


def t5_encoder() -> tuple[Any, Any]:
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return models.pretrained("T5EncoderModel", **sizes)(), models.TOKENS()


def whisper_encoder() -> tuple[Any, Any]:
    model, inputs = build("whisper")
    return model.encoder, {"input_features": inputs["input_features"]}


MODELS: Mapping[str, Build] = {
    "bert-tiny": bert_tiny,
    **{name: partial(build, name) for name in ("minilm", "gpt2", "llama", "vit", "resnet")},
    "t5-encoder": t5_encoder,
    "whisper-encoder": whisper_encoder,
}


def values_of(tagged: modelexport.TaggedModel, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Every value that the nodes of the main graph produce, in one run."""
    given = {value.name: inputs[value.name] for value in tagged.model.graph.inputs if value.name in inputs}
    every = copy_of(tagged.model)
    every.graph.outputs[:] = [value for node in every.graph for value in node.outputs if value.name]
    return run_session(open_session(every, folder=tagged.path.parent), given)


def per_module(
    tagged: modelexport.TaggedModel, right: Mapping[str, Any], inputs: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The values of a file, each computed from those of the tagged one, so that small losses do not add up."""
    found: dict[str, np.ndarray] = {}

    def watch(node: ir.Node, given: Any, value: ir.Value, array: Any) -> Any:
        found[value.name or ""] = array
        return right[value.name].astype(array.dtype) if value.name in right else array

    FileRun(tagged.model, in_float64_for=None).run(inputs, watch)
    return found


def agree(one: np.ndarray, other: np.ndarray, limit: float) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind != "f" or other.dtype.kind != "f":
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    a, b = one.astype(np.float64), other.astype(np.float64)
    finite = (np.abs(a) < 1e30) & (np.abs(b) < 1e30)
    return bool(np.linalg.norm((a - b)[finite]) <= limit * max(float(np.linalg.norm(a[finite])), 1e-6))


class Truth:
    """The owners that the values allow for the nodes of a changed file."""

    def __init__(self, before: modelexport.TaggedModel, after: modelexport.TaggedModel, limit: float) -> None:
        with open_reference(before) as reference:
            inputs = dict(reference.inputs)
        a, b = values_of(before, inputs), values_of(after, inputs)
        b = per_module(after, {name: a[name] for name in b if name in a and a[name].shape == b[name].shape}, inputs)
        self.believed = {name for name in b if agree(a[name], b[name], limit)}
        self.believed.update(str(value.name) for value in before.model.graph.inputs)
        self.producer = {value.name: node for node in before.model.graph for value in node.outputs}
        equal: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for name, array in a.items():
            equal[array.shape, str(array.dtype), array.tobytes()].append(name)
        self.duplicates = {name: names for names in equal.values() for name in names}
        self.after = after

    def allowed(self, node: ir.Node) -> set[ModuleCall]:
        behind = set(self._believed_behind(node))
        makes = any(value.name in self.believed for value in node.outputs)
        before = set() if makes else set(self._believed_before(node))
        found = self._owners(behind, through=True)
        return found | self._owners(before, through=False)

    def _believed_behind(self, node: ir.Node) -> Iterable[str]:
        pending, seen = [node], {node}
        while pending:
            current = pending.pop()
            for value in current.outputs:
                if value.name in self.believed:
                    yield str(value.name)
                    continue
                for user, _ in value.uses():
                    if user not in seen:
                        seen.add(user)
                        pending.append(user)

    def _believed_before(self, node: ir.Node) -> Iterable[str]:
        pending, seen = [node], {node}
        while pending:
            for value in pending.pop().inputs:
                if value is None or value.is_initializer():
                    continue
                if value.name in self.believed:
                    yield str(value.name)
                elif (producer := value.producer()) is not None and producer not in seen:
                    seen.add(producer)
                    pending.append(producer)

    def _owners(self, names: set[str], *, through: bool) -> set[ModuleCall]:
        pending = [duplicate for name in names for duplicate in self.duplicates.get(name, [name])]
        seen, found = set(pending), set()
        while pending:
            node = self.producer.get(pending.pop())
            if node is None:
                continue
            owner = owner_of(node)
            found.update(owner.calls if owner is not None else ())
            for value in node.inputs if through else ():
                name = str(value.name) if value is not None else ""
                if name and name not in self.believed and name not in seen:
                    seen.add(name)
                    pending.append(name)
        return found


def contaminated(truth: Truth) -> list[str]:
    """Nodes with an owner that the values contradict."""
    return [
        f"{node.op_type} {node.name}: {', '.join(map(str, wrong))}"
        for node in truth.after.model.graph
        if (wrong := set(owner.calls if (owner := owner_of(node)) else ()) - truth.allowed(node))
    ]


def survival(names: list[str], folder: Path) -> None:
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for name in names:
        source = folder / f"{name}.onnx"
        model, inputs = MODELS[name]()
        modelexport.export(model, inputs, source, reference=True)
        before = modelexport.load(source)
        for tool in TOOLS:
            output = folder / f"{name}.{tool}.onnx"
            report = optimize_file(source, tool, output)
            after = modelexport.load(output)
            wrong = contaminated(Truth(before, after, LOSSY.get(tool, LOSSLESS)))
            compared = modelexport.verify_against(source, output)
            coverage = report.coverage
            totals[tool].update(
                {
                    "nodes": len(after.nodes),
                    "exact": coverage.exact,
                    "derived": coverage.derived,
                    "inferred, untagged": coverage.inferred + coverage.untagged,
                    "contaminated": len(wrong),
                    "differ": 0 if tool in LOSSY else sum(call.status == "differ" for call in compared.calls),
                }
            )
            fused = [node for node in (*report.fused, *report.unclear) if len(node.calls) > 4]
            print(f"{name}, {tool}: {len(after.nodes)} nodes", *wrong, sep="\n    ", file=sys.stderr)
            for node in fused:
                print(f"    {node.op_type} {node.name}: {len(node.calls)} owners, {node.reason}", file=sys.stderr)
    titles = ("nodes", "exact", "derived", "inferred, untagged", "contaminated", "differ")
    print(f"| tool | {' | '.join(titles)} |\n|{'---|' * (len(titles) + 1)}")
    for tool, counts in totals.items():
        cells = [f"{counts[title]:,}" for title in titles[:-1]]
        cells.append("numbers change" if tool in LOSSY else f"{counts['differ']:,}")
        print(f"| `{tool}` | {' | '.join(cells)} |")
    every = sum(totals.values(), Counter())
    print(f"| all | {' | '.join(f'{every[title]:,}' for title in titles)} |")


def tagged_chain(nodes: int, path: Path) -> None:
    """A tagged file with this number of nodes: blocks of a linear layer, an activation and a skip connection."""
    random = np.random.default_rng(0)
    blocks = nodes // 4
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 8]))
    value, made, initializers = x, [], []
    calls = [{"call": "", "tag": "/Model"}]
    for block in range(blocks):
        calls.append({"call": f"blocks.{block}", "tag": f"/Model/Block.{block}", "parent": ""})
        weights = []
        for name, shape in (("weight", (8, 8)), ("bias", (8,))):
            array = random.standard_normal(shape).astype(np.float32) / 8
            weights.append(ir.Value(name=f"blocks.{block}.{name}", const_value=ir.tensor(array)))
        before = value
        for operator, inputs in (("MatMul", weights[:1]), ("Add", weights[1:]), ("Tanh", []), ("Add", [before])):
            node = ir.node(operator, [value, *inputs], name=f"node_{len(made)}")
            value = node.outputs[0]
            value.name, value.type, value.shape = f"val_{len(made)}", x.type, x.shape
            node.metadata_props.update(
                {
                    keys.SOURCE_MODULE: f"/Model/Block.{block}",
                    keys.CALL: f"blocks.{block}",
                    keys.EVIDENCE: "exact",
                    keys.NAMESPACE: f"Model/Block.{block}",
                }
            )
            made.append(node)
        for weight in weights:
            weight.type, weight.shape = ir.TensorType(ir.DataType.FLOAT), weight.const_value.shape
            weight.metadata_props[keys.PARAMETER] = f'["{weight.name}"]'
        initializers += weights
    graph = ir.Graph([x], [value], nodes=made, initializers=initializers, opset_imports={"": 20}, name="main_graph")
    model = ir.Model(graph, ir_version=10)
    entries = {weight.name: ["float32", list(weight.const_value.shape.numpy()), True] for weight in initializers}
    model.metadata_props.update(
        {
            keys.FORMAT_VERSION_KEY: FORMAT_VERSION,
            keys.CALL_TREE: json.dumps(calls),
            keys.STATE_DICT: json.dumps(entries),
        }
    )
    ir.save(model, path)


def cost(folder: Path) -> None:
    print("| nodes of the tagged file | tool | nodes of the changed file | retag, s of processor time ", end="")
    print("| ratio to `onnx.load` and `onnx.save` |")
    print("|---|---|---|---|---|")
    for nodes in SIZES:
        source = folder / f"{nodes}.onnx"
        tagged_chain(nodes, source)
        for tool in ("ort-extended", "quantize-dynamic"):
            changed = folder / f"{nodes}.{tool}.onnx"
            TOOLS[tool].run(source, changed, dict)

            def plain(source: Path = source, changed: Path = changed) -> None:
                onnx.load(source)  # is read, too
                onnx.save(onnx.load(changed), folder / "copy.onnx")

            def retagged(source: Path = source, changed: Path = changed) -> None:
                modelexport.retag(changed, source=source, output=folder / "out.onnx")

            both, work = least_seconds(plain, retagged, runs=7)
            count = len(onnx.load(changed).graph.node)
            print(f"| {nodes:,} | `{tool}` | {count:,} | {work:.2f} | {work / both:.1f} |", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if "--cost" in sys.argv:
            cost(Path(folder))
        else:
            survival(sys.argv[1:] or list(MODELS), Path(folder))


if __name__ == "__main__":
    main()
