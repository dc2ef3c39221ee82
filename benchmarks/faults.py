"""Plant faults in files and documents, one at a time, and check whether `verify` finds them in the right call.

    OMP_NUM_THREADS=1 python benchmarks/faults.py [MODEL,...] [--folder DIR] [--kinds KIND,...] [--each N]

For each model of the table the kinds below are planted wherever possible, at up to N places each. A fault is found if
the report says `differ` and names the call that owns the changed node, or the name that was changed; of the faults
found, `first` counts those that the report names before any other. If a fault is not found, both files are run again in
ONNX Runtime with the same inputs: if the values are unchanged, within rounding, the fault computes the same and is
listed separately, with the largest difference measured. Everything else is an error, and ends with status 1.

Needs what `make test` installs; about a minute for each model of the list.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import modelexport
import models
from modelexport.errors import UsageError
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.verify.model import verify
from modelexport.verify.verdicts import VerifyReport

MODELS = (
    "blocks", "equal-values", "unet", "bert", "albert", "gpt2", "llama", "t5", "mixtral", "vit", "resnet", "clip",
    "whisper", "minilm",
)  # fmt: skip
CALL, SOURCE, TAGS, CALLS = (f"modelexport.{key}" for key in ("call", "source_module", "hierarchy_tags", "calls"))
PARAMETER, TRANSFORM, TREE = (f"modelexport.{key}" for key in ("parameter", "transform", "call_tree"))
SAME = 4e-6
"""The difference, in norms, up to which values count as unchanged: 64 units of roundoff of float32."""
SUFFIXES = (".hierarchy.json", ".dag.json", ".operations.json")


@dataclass(frozen=True)
class Place:
    """A fault, ready to be planted in a model that was just read."""

    kind: str
    what: str
    expected: frozenset[str]
    """Addresses or names, one of which has to be reported; for values, the first diverging call."""
    plant: Callable[[ir.Model, Path], bool]
    """Change the model, or the documents beside the path; returns whether that was possible."""
    node: str = ""
    """The node whose value is changed, to check whether it really changed."""
    documents: bool = False
    """Whether the documents are kept: after a change of tags they would reveal it."""


def nodes_with(model: ir.Model, *types: str) -> Iterator[tuple[int, ir.Node]]:
    for position, node in enumerate(model.graph):
        if node.op_type in types and CALL in node.metadata_props:
            yield position, node


def owners(node: ir.Node) -> frozenset[str]:
    listed = node.metadata_props.get(CALLS)
    return frozenset(json.loads(listed)) if listed else frozenset([node.metadata_props[CALL]])


def is_number(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is ir.DataType.FLOAT


def weight_of(node: ir.Node) -> tuple[int, ir.Value] | None:
    for index, value in enumerate(node.inputs):
        if is_number(value) and value.is_initializer() and value.const_value is not None and value.const_value.size > 3:
            return index, value
    return None


def private(node: ir.Node, index: int, array: Any, metadata: bool = True) -> None:
    """Give a node an initializer of its own."""
    old = node.inputs[index]
    new = ir.Value(name=f"{old.name}.faulty{index}", const_value=ir.tensor(np.ascontiguousarray(array)))
    new.type, new.shape = ir.TensorType(new.const_value.dtype), ir.Shape(array.shape)
    if metadata:
        new.metadata_props.update(old.metadata_props)
    node.graph.initializers.add(new)
    node.replace_input_with(index, new)


# --- faults in weights ---------------------------------------------------------------------------------------------


def weights(model: ir.Model) -> Iterator[Place]:
    changes: dict[str, Callable[[Any], Any]] = {
        "weight times 1.0009": lambda a: a * np.float32(1.0009),
        "weight zero": lambda a: a * 0,
        "one element of a weight": lambda a: np.concatenate([(a.reshape(-1)[:1] + 1), a.reshape(-1)[1:]]).reshape(
            a.shape
        ),
        "weight reversed": lambda a: np.flip(a, 0),
        "weight in half precision": lambda a: a.astype(np.float16).astype(np.float32),
    }
    for kind, change in changes.items():
        for position, node in enumerate(model.graph):
            found = weight_of(node)
            if found is None or CALL not in node.metadata_props or PARAMETER not in found[1].metadata_props:
                continue
            if np.array_equal(change(found[1].const_value.numpy()), found[1].const_value.numpy()):
                continue
            if len(found[1].uses()) > 1:
                continue

            def plant(model: ir.Model, path: Path, p: int = position, i: int = found[0], c: Any = change) -> bool:
                node = model.graph[p]
                value = node.inputs[i]
                value.const_value = ir.tensor(np.ascontiguousarray(c(value.const_value.numpy())), name=value.name)
                return True

            yield Place(kind, f"{found[1].name}", owners(node), plant, node.name or "")


def swapped_weights(model: ir.Model) -> Iterator[Place]:
    """Two weights of one shape exchanged at the nodes that use them, with or without their names."""
    by_shape: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for position, node in enumerate(model.graph):
        found = weight_of(node)
        if found and CALL in node.metadata_props and PARAMETER in found[1].metadata_props and len(found[1].uses()) == 1:
            by_shape[node.op_type, found[0], tuple(found[1].shape.numpy())].append((position, found[0]))
    for places in by_shape.values():
        for (p, i), (q, j) in itertools.pairwise(places):
            first, second = model.graph[p], model.graph[q]

            def edges(model: ir.Model, path: Path, p: int = p, q: int = q, i: int = i, j: int = j) -> bool:
                one, two = model.graph[p], model.graph[q]
                a, b = one.inputs[i], two.inputs[j]
                one.replace_input_with(i, b)
                two.replace_input_with(j, a)
                return True

            def keys(model: ir.Model, path: Path, p: int = p, q: int = q, i: int = i, j: int = j) -> bool:
                a, b = model.graph[p].inputs[i], model.graph[q].inputs[j]
                for key in (PARAMETER, TRANSFORM):
                    if (key in a.metadata_props) != (key in b.metadata_props) and key == TRANSFORM:
                        return False
                a.metadata_props[PARAMETER], b.metadata_props[PARAMETER] = (
                    b.metadata_props[PARAMETER], a.metadata_props[PARAMETER],
                )  # fmt: skip
                if TRANSFORM in a.metadata_props:
                    a.metadata_props[TRANSFORM], b.metadata_props[TRANSFORM] = (
                        b.metadata_props[TRANSFORM], a.metadata_props[TRANSFORM],
                    )  # fmt: skip
                return True

            where = owners(first) | owners(second)
            yield Place("weights exchanged", f"{first.name} and {second.name}", where, edges, first.name or "")
            yield Place("names of weights exchanged", f"{first.name} and {second.name}", where, keys, first.name or "")


# --- faults in attributes ------------------------------------------------------------------------------------------


def attributes(model: ir.Model) -> Iterator[Place]:
    def changed(name: str, change: Callable[[Any], Any]) -> Callable[[ir.Node], bool]:
        def plant(node: ir.Node) -> bool:
            attribute = node.attributes.get(name)
            if attribute is None:
                return False
            value = change(attribute.value)
            if value is None or value == attribute.value:
                return False
            node.attributes[name] = ir.Attr(name, attribute.type, value)
            return True

        return plant

    def gelu(node: ir.Node) -> bool:
        if node.op_type != "Gelu" or (
            "approximate" in node.attributes and node.attributes["approximate"].value == "tanh"
        ):
            return False
        node.attributes["approximate"] = ir.AttrString("approximate", "tanh")
        return True

    kinds: dict[str, Callable[[ir.Node], bool]] = {
        "epsilon a tenth": changed("epsilon", lambda e: e / 10 if e > 1e-9 else None),
        "epsilon ten times": changed("epsilon", lambda e: e * 10 if e > 1e-9 else None),
        "axis of a softmax": lambda n: n.op_type == "Softmax" and changed("axis", lambda a: -2 if a == -1 else -1)(n),
        "permutation": changed("perm", lambda p: [*p[:-2], p[-1], p[-2]] if len(p) > 1 else None),
        "gelu by tanh": gelu,
        "alpha of a gemm": lambda n: (
            n.op_type == "Gemm" and (n.attributes.__setitem__("alpha", ir.AttrFloat32("alpha", 1.001)) or True)
        ),
        "padding": changed("pads", lambda p: [*p[len(p) // 2 :], *[0] * (len(p) // 2)] if any(p) else None),
        "axis of a concatenation": lambda n: (
            n.op_type == "Concat"
            and is_number(n.outputs[0])
            and changed("axis", lambda a: a - 1 if a > 0 or a < -1 else None)(n)
        ),
        "groups of a normalization": changed("num_groups", lambda g: g // 2 if g > 1 else None),
    }
    for kind, plant_in in kinds.items():
        for position, node in enumerate(model.graph):
            if CALL not in node.metadata_props or not any(is_number(v) for v in node.inputs):
                continue
            if not plant_in(_Copy(node)):
                continue

            def plant(model: ir.Model, path: Path, p: int = position, f: Any = plant_in) -> bool:
                return bool(f(model.graph[p]))

            yield Place(kind, node.name or "", owners(node), plant, node.name or "")


class _Copy:
    """The conditions on a node for a change of its attributes."""

    def __init__(self, node: ir.Node) -> None:
        self.op_type, self.attributes, self.outputs = node.op_type, dict(node.attributes), node.outputs


# --- faults in edges -----------------------------------------------------------------------------------------------


def insert_after(node: ir.Node, op_type: str, *inputs: Any) -> None:
    """Insert an operation after a node, owned by the node's call."""
    value = node.outputs[0]
    constants = []
    for index, array in enumerate(inputs):
        constant = ir.Value(name=f"{value.name}.by{index}", const_value=ir.tensor(array))
        constant.type, constant.shape = ir.TensorType(constant.const_value.dtype), ir.Shape(array.shape)
        node.graph.initializers.add(constant)
        constants.append(constant)
    users = list(value.uses())
    new = ir.Node(
        "", op_type, [value, *constants], name=f"{node.name}.faulty", metadata_props=dict(node.metadata_props)
    )
    name = value.name
    node.graph.insert_after(node, new)
    for user, index in users:
        user.replace_input_with(index, new.outputs[0])
    new.outputs[0].type, new.outputs[0].shape = value.type, value.shape
    for index, output in enumerate(node.graph.outputs):
        if output is value:
            value.name, new.outputs[0].name = f"{name}.before", name
            node.graph.outputs[index] = new.outputs[0]
    if new.outputs[0].name is None:
        new.outputs[0].name = f"{name}.faulty"


OTHER = {  # an operation with the same inputs
    "Relu": "Sigmoid", "Tanh": "Sigmoid", "Sigmoid": "Tanh", "Add": "Sub", "Mul": "Add", "Sub": "Add",
    "Erf": "Tanh", "Sqrt": "Abs", "Cos": "Sin", "Sin": "Cos", "Gelu": "Relu",
}  # fmt: skip


def edges(model: ir.Model) -> Iterator[Place]:
    def scaled(node: ir.Node) -> bool:
        insert_after(node, "Mul", np.array(1.0009, dtype=np.float32))
        return True

    def negated(node: ir.Node) -> bool:
        insert_after(node, "Neg")
        return True

    def nothing(node: ir.Node) -> bool:
        insert_after(node, "Mul", np.array(0, dtype=np.float32))
        return True

    def swapped(node: ir.Node) -> bool:
        if node.op_type not in ("Sub", "Div", "Pow", "MatMul") or len(node.inputs) != 2:
            return False
        first, second = node.inputs
        if first is second:
            return False
        node.replace_input_with(0, second)
        node.replace_input_with(1, first)
        return True

    def bypassed(node: ir.Node) -> bool:
        """Replace an input by the input of the operation that computes it."""
        for index, value in enumerate(node.inputs):
            producer = value.producer() if value is not None else None
            if producer is None or not is_number(value) or value.shape is None:
                continue
            for earlier in producer.inputs:
                if is_number(earlier) and earlier.shape == value.shape and not earlier.is_initializer():
                    node.replace_input_with(index, earlier)
                    return True
        return False

    def replaced(node: ir.Node) -> bool:
        other = OTHER.get(node.op_type)
        if other is None or (node.op_type == "Gelu" and node.attributes):
            return False
        node.op_type = other
        return True

    def without_bias(node: ir.Node) -> bool:
        for index, value in enumerate(node.inputs):
            if index and value is not None and value.is_initializer() and "bias" in (value.name or ""):
                array = value.const_value.numpy()
                if node.op_type in ("Gemm", "Conv", "Add", "LayerNormalization"):
                    private(node, index, np.zeros_like(array), metadata=False)
                    return True
        return False

    def constant(node: ir.Node) -> bool:
        for index, value in enumerate(node.inputs):
            if is_number(value) and value.is_initializer() and PARAMETER not in value.metadata_props:
                array = value.const_value.numpy()
                if np.isfinite(array).all() and np.abs(array).max() < 1e6:
                    private(node, index, array * np.float32(1.01))
                    return bool(np.abs(array).max() > 0)
        return False

    kinds = {
        "output times 1.0009": scaled, "output negated": negated, "output zero": nothing, "inputs exchanged": swapped,
        "operation left out": bypassed, "another operation": replaced, "bias dropped": without_bias,
        "constant one percent off": constant,
    }  # fmt: skip
    for kind, plant_in in kinds.items():
        for position, node in enumerate(model.graph):
            if CALL not in node.metadata_props or not is_number(node.outputs[0]):
                continue
            if kind.startswith("output") and node.op_type in ("Constant", "Shape"):
                continue

            def plant(model: ir.Model, path: Path, p: int = position, f: Any = plant_in) -> bool:
                return bool(f(model.graph[p]))

            yield Place(kind, node.name or "", owners(node), plant, node.outputs[0].name or "")


def outputs(model: ir.Model) -> Iterator[Place]:
    def backwards(model: ir.Model, path: Path) -> bool:
        value = model.graph.outputs[0]
        if value.producer() is None or value.shape is None or not isinstance(value.shape[-1], int):
            return False
        name, size = value.name, int(value.shape[-1])
        order = ir.Value(name="backwards", const_value=ir.tensor(np.arange(size)[::-1].copy()))
        order.type, order.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([size])
        model.graph.initializers.add(order)
        producer = value.producer()
        new = ir.Node("", "Gather", [value, order], [ir.AttrInt64("axis", len(value.shape) - 1)],
                      metadata_props=dict(producer.metadata_props), name="backwards")  # fmt: skip
        new.outputs[0].type, new.outputs[0].shape = value.type, value.shape
        model.graph.insert_after(producer, new)
        value.name, new.outputs[0].name = f"{name}.before", name
        model.graph.outputs[0] = new.outputs[0]
        return True

    yield Place("classes reversed", "first output", frozenset(["*"]), backwards)

    for value in model.graph.inputs:
        if "mask" in (value.name or ""):

            def ignored(model: ir.Model, path: Path, name: str = value.name or "") -> bool:
                value = next(v for v in model.graph.inputs if v.name == name)
                uses = list(value.uses())
                zero = ir.Value(name="nothing", const_value=ir.tensor(np.array(0, dtype=value.dtype.numpy())))
                one = ir.Value(name="everything", const_value=ir.tensor(np.array(1, dtype=value.dtype.numpy())))
                for constant in (zero, one):
                    constant.type, constant.shape = ir.TensorType(value.dtype), ir.Shape([])
                    model.graph.initializers.add(constant)
                props = dict(uses[0][0].metadata_props)
                times = ir.Node("", "Mul", [value, zero], name="mask_times", metadata_props=props)
                plus = ir.Node("", "Add", [times.outputs[0], one], name="mask_plus", metadata_props=props)
                times.outputs[0].name, plus.outputs[0].name = "mask_times_0", "mask_plus_0"
                for node in (plus, times):
                    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
                    model.graph.insert_before(model.graph[0], [node])
                model.graph.sort()
                for user, index in uses:
                    user.replace_input_with(index, plus.outputs[0])
                return True

            yield Place("mask ignored", value.name or "", frozenset(["*"]), ignored)


# --- faults in tags ------------------------------------------------------------------------------------------------

COPIES = ("Reshape", "Transpose", "Identity", "Unsqueeze", "Squeeze", "Cast", "Expand", "Slice", "Split", "Concat",
          "Constant", "Flatten", "Gather", "Dropout", "Tile", "ConstantOfShape", "Range", "Pad", "Where")  # fmt: skip


def give(node: ir.Node, address: str, tag: str, own: str) -> None:
    for key in (CALLS, TAGS):
        node.metadata_props.pop(key, None)
    node.metadata_props.update({CALL: address, SOURCE: tag, "namespace": own[1:]})


def tags(model: ir.Model) -> Iterator[Place]:
    tree = json.loads(model.metadata_props[TREE])
    own = {entry["call"]: entry["tag"] for entry in tree}
    parent = {entry["call"]: entry.get("parent") for entry in tree}
    source = {n.metadata_props[CALL]: n.metadata_props[SOURCE] for n in model.graph if CALL in n.metadata_props}
    computing = [
        (p, n) for p, n in enumerate(model.graph)
        if CALL in n.metadata_props and CALLS not in n.metadata_props
        and n.op_type not in COPIES and is_number(n.outputs[0])
        and any(v is not None and not v.is_initializer() and is_number(v) for v in n.inputs)
    ]  # fmt: skip
    root = tree[0]["call"]

    def moved(positions: list[int], target: str) -> Callable[[ir.Model, Path], bool]:
        def plant(model: ir.Model, path: Path) -> bool:
            for position in positions:
                give(model.graph[position], target, source.get(target, own[root]), own[target])
            return True

        return plant

    targets = [call for call in source if call != root]
    for i, (position, node) in enumerate(computing):
        address = node.metadata_props[CALL]
        if address != root:
            yield Place(
                "node given to the root",
                node.name or "",
                frozenset([address, root]),
                moved([position], root),
                node.name or "",
            )
        other = next((c for c in targets[i % len(targets) :] + targets if c != address), None) if targets else None
        if other is not None:
            yield Place("node given to another call", f"{node.name} to {other}", frozenset([address, other]),
                        moved([position], other), node.name or "")  # fmt: skip
    everything = [p for p, n in enumerate(model.graph) if CALL in n.metadata_props]
    if targets:
        yield Place("everything given to the root", "", frozenset(["*"]), moved(everything, root))

    kinds: dict[tuple[str | None, str], list[str]] = defaultdict(list)
    for address, tag in own.items():
        last = tag.rpartition("/")[2].partition(".")[0].partition("@")[0]
        above = (parent[address] or "").rstrip("0123456789")
        kinds[above, last].append(address)
    for siblings in kinds.values():
        for one, other in itertools.pairwise(siblings):

            def inside(call: str, top: str) -> bool:
                at: str | None = call
                while at is not None:
                    if at == top:
                        return True
                    at = parent.get(at)
                return False

            def exchanged(model: ir.Model, path: Path, one: str = one, other: str = other) -> bool:
                changed = 0
                for node in model.graph:
                    at = node.metadata_props.get(CALL)
                    for a, b in ((one, other), (other, one)):
                        if at is not None and inside(at, a):
                            target = b + at[len(a) :]
                            if target in own:
                                give(node, target, source.get(target, own[target]), own[target])
                                changed += 1
                            break
                return changed > 1

            if not inside(one, other) and not inside(other, one):
                yield Place("calls exchanged", f"{one} and {other}", frozenset([one, other]), exchanged)

    for position, node in computing:
        address = node.metadata_props[CALL]

        def text(model: ir.Model, path: Path, p: int = position) -> bool:
            model.graph[p].metadata_props[SOURCE] += "/Other"
            return True

        yield Place("text of a tag", node.name or "", frozenset([node.name or ""]), text)

    def renamed(model: ir.Model, path: Path) -> bool:
        text = json.loads(model.metadata_props[TREE])
        text[-1]["tag"] = text[-1]["tag"].rpartition("/")[0] + "/Other"
        model.metadata_props[TREE] = json.dumps(text)
        return True

    yield Place("class in a tag", tree[-1]["call"], frozenset([tree[-1]["call"]]), renamed)

    for name, value in model.graph.initializers.items():
        if TAGS in value.metadata_props:

            def other_tags(model: ir.Model, path: Path, name: str = name) -> bool:
                props = model.graph.initializers[name].metadata_props
                wrong = [tag for tag in own.values() if tag not in json.loads(props[TAGS])]
                props[TAGS] = json.dumps(wrong[:1])
                return bool(wrong)

            yield Place("tags of an initializer", name, frozenset([name]), other_tags)


# --- faults in documents -------------------------------------------------------------------------------------------


def documents(model: ir.Model, path: Path) -> Iterator[Place]:
    sidecar = json.loads(path.with_suffix(".hierarchy.json").read_text())

    def place(kind: str, where: str, suffix: str, change: Callable[[Any], bool]) -> Place:
        def plant(model: ir.Model, path: Path) -> bool:
            file = path.with_suffix(suffix)
            document = json.loads(file.read_text())
            done = change(document)
            file.write_text(json.dumps(document))
            return done

        return Place(kind, where, frozenset([where]), plant, documents=True)

    def in_call(index: int, change: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda document: change(document["calls"][index])

    for index, call in enumerate(sidecar["calls"]):
        where = call["address"] or "."
        if call["boundary"]["outputs"]:
            yield place(
                "boundary", where, ".hierarchy.json", in_call(index, lambda c: bool(c["boundary"]["outputs"].pop()))
            )
        yield place(
            "count of nodes", where, ".hierarchy.json", in_call(index, lambda c: not c.update(nodes=c["nodes"] + 1))
        )
        for k, tensor in enumerate(call["outputs"]):
            if call["enter"] is not None and tensor["shape"] and isinstance(tensor["shape"][-1], int):
                yield place("shape of a tensor", where, ".hierarchy.json", in_call(
                    index, lambda c, k=k: c["outputs"][k]["shape"].__setitem__(-1, 12345) is None))  # fmt: skip
                yield place("type of a tensor", where, ".hierarchy.json", in_call(
                    index, lambda c, k=k: c["outputs"][k].update(dtype="float64") is None))  # fmt: skip
                others = [
                    t["value"]
                    for c in sidecar["calls"]
                    for t in c["outputs"]
                    if t.get("value") and t["value"] != tensor.get("value") and t["dtype"] == tensor["dtype"]
                ]
                if tensor.get("value") and others and tensor["dtype"] == "float32":
                    yield place("value of a tensor", where, ".hierarchy.json", in_call(
                        index, lambda c, k=k, o=others[-1]: c["outputs"][k].update(value=o) is None))  # fmt: skip
    for index, entry in enumerate(sidecar["initializers"]):
        if entry.get("transform"):
            yield place(
                "transform",
                entry["name"],
                ".hierarchy.json",
                lambda d, i=index: bool(d["initializers"][i].pop("transform")),
            )
        if entry.get("parameter"):
            yield place("parameter in the sidecar", entry["name"], ".hierarchy.json",
                        lambda d, i=index: d["initializers"][i].update(parameter=["other"]) is None)  # fmt: skip
    yield place(
        "coverage",
        "coverage",
        ".hierarchy.json",
        lambda d: d["coverage"].update(exact=d["coverage"]["exact"] + 1) is None,
    )
    for index, entry in enumerate(sidecar["nodes"]):
        yield place("evidence", entry["name"], ".hierarchy.json",
                    lambda d, i=index: d["nodes"][i].update(evidence="inferred") is None)  # fmt: skip
    dags = json.loads(path.with_suffix(".dag.json").read_text())
    for tag, dag in dags.items():
        if dag["edges"]:
            yield place("edge of a DAG", tag, ".dag.json", lambda d, t=tag: bool(d[t]["edges"].pop()))
    for name in json.loads(path.with_suffix(".operations.json").read_text()):
        yield place(
            "tags in the operations", name, ".operations.json", lambda d, n=name: d[n].update(tags=["/Other"]) is None
        )


# --- asking for them -----------------------------------------------------------------------------------------------


def reported(report: VerifyReport) -> set[str]:
    found = {call.address or "." for call in report.calls if call.status == "differ"}
    for claim in report.claims:
        found |= {claim.where, claim.where.partition(", ")[0]}
    return found


def is_found(place: Place, report: VerifyReport) -> bool:
    if report.agrees:
        return False
    expected = {address or "." for address in place.expected}
    # A fault inside a call may be reported for that call.
    found = {name for one in reported(report) for name in (one, *(e for e in expected if one.startswith(f"{e}.")))}
    return "*" in expected or not expected.isdisjoint(found)


def is_first(place: Place, report: VerifyReport) -> bool:
    """Whether the report names the right call before any other."""
    if "*" in place.expected or place.documents or report.diverging is None:
        return True
    return report.diverging.address in place.expected


def node_difference(original: Path, changed: Path, place: Place, feeds: dict[str, Any]) -> float:
    """The distance of the values of all nodes of the main graph from the original ones, in norms.

    0 if the outputs are equal bit for bit, for instance if a later node only compares the value with zero.
    """
    runs = []
    for path in (original, changed):
        model = load_onnx(path)
        values = [v for n in model.graph for v in n.outputs if v.name and not v.name.endswith((".faulty", ".before"))]
        model.graph.outputs.clear()
        model.graph.outputs.extend(values)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
        names = [o.name for o in session.get_outputs()]
        runs.append(dict(zip(names, session.run(names, feeds), strict=True)))
    ends = [value.name for value in load_onnx(original).graph.outputs]
    if all(end in runs[0] and np.array_equal(runs[0][end], runs[1][end]) for end in ends):
        return 0.0
    largest = 0.0
    for name in runs[0].keys() & runs[1].keys():
        a, b = runs[0][name], runs[1][name]
        if a.shape != b.shape:
            return float("inf")
        if a.dtype.kind == "f":
            a, b = (
                np.nan_to_num(a.astype(np.float64), posinf=0, neginf=0),
                np.nan_to_num(b.astype(np.float64), posinf=0, neginf=0),
            )
            a, b = np.clip(a, -1e30, 1e30), np.clip(b, -1e30, 1e30)
            norm = float(np.linalg.norm(a))
            largest = max(largest, float(np.linalg.norm(a - b)) / norm if norm else float(np.linalg.norm(b)))
        elif not np.array_equal(a, b):
            return float("inf")
    return largest


def places_of(model: ir.Model, path: Path, each: int, kinds: set[str]) -> list[Place]:
    by_kind: dict[str, list[Place]] = defaultdict(list)
    sources = (weights, swapped_weights, attributes, edges, outputs, tags)
    for place in (*(p for source in sources for p in source(model)), *documents(model, path)):
        if not kinds or place.kind in kinds:
            by_kind[place.kind].append(place)
    chosen = []
    for kind, places in by_kind.items():
        # More than needed, since some turn out not to be possible.
        random.Random(f"{path.name}{kind}").shuffle(places)
        chosen += places[: 6 * each]
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="?", default=",".join(MODELS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--each", type=int, default=1)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    found: Counter[str] = Counter()
    first: Counter[str] = Counter()
    planted: Counter[str] = Counter()
    same: list[str] = []
    missed: list[str] = []
    for name in arguments.models.split(","):
        start = time.perf_counter()
        case = models.case(name)
        source = folder / f"{name}.onnx"
        if not source.exists():
            modelexport.export(case.build(), case.inputs(), source)
        model, inputs = case.build(), case.inputs()
        if not verify(model, inputs, source).agrees:
            missed.append(f"{name}: a false alarm without any fault")
        done: Counter[str] = Counter()
        for place in places_of(
            load_onnx(source), source, arguments.each, set(filter(None, arguments.kinds.split(",")))
        ):
            if done[place.kind] >= arguments.each:
                continue
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                path = Path(temporary, source.name)
                for suffix in SUFFIXES if place.documents else ():
                    shutil.copyfile(source.with_suffix(suffix), path.with_suffix(suffix))
                faulty = load_onnx(source)
                if not place.plant(faulty, path):
                    continue
                save_model(faulty, path)
                try:
                    report = verify(model, inputs, path)
                except UsageError as error:
                    if "cannot load" in str(error) or "cannot run" in str(error):
                        continue  # the runtime refuses the file, so nobody can use it
                    report = None
                    refused = str(error)
                done[place.kind] += 1
                planted[place.kind] += 1
                what = f"{name}: {place.kind}, {place.what}, in {sorted(place.expected)}"
                if report is None:
                    found[place.kind] += 1
                    first[place.kind] += 1
                    print(f"  refused: {what}: {refused[:100]}", flush=True)
                elif is_found(place, report):
                    found[place.kind] += 1
                    first[place.kind] += is_first(place, report)
                    if not is_first(place, report):
                        print(
                            f"  elsewhere first: {what}: {report.diverging.address!r} {report.diverging.reason[:100]}",
                            flush=True,
                        )
                else:
                    feeds = {
                        v.name: t.numpy()
                        for v, t in zip(load_onnx(source).graph.inputs, _tensors(inputs), strict=False)
                    }
                    difference = node_difference(source, path, place, feeds) if not place.documents else float("inf")
                    is_tag = place.kind.startswith(("node given", "calls exch", "everything"))
                    line = (
                        f"{what}: largest difference {difference:.1e}; {report.verdict} {sorted(reported(report))[:4]}"
                    )
                    (same if difference < SAME and not is_tag else missed).append(line)
                    print(f"  {'same values' if line in same else 'MISSED'}: {line}", flush=True)
        print(
            f"{name}: {sum(done.values())} placements of {len(done)} kinds, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    print(f"\n{'kind':34}{'planted':>9}{'found':>7}{'first':>7}")
    for kind in planted:
        print(f"{kind:34}{planted[kind]:9}{found[kind]:7}{first[kind]:7}")
    print(f"{'all, ' + str(len(planted)) + ' kinds':34}{planted.total():9}{found.total():7}{first.total():7}")
    print(f"{len(same)} compute the same values:", *same, sep="\n  ")
    print(f"{len(missed)} missed:", *missed, sep="\n  ")
    return bool(missed)


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "numpy"):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


if __name__ == "__main__":
    sys.exit(main())
