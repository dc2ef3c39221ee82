"""Faults to plant in an exported file, one at a time: in weights, attributes, edges, outputs, tags and documents.

Nothing here knows how a fault could be found: only NumPy, onnx_ir and what `docs/format.md` says of the metadata.

Over 400 lines because it is a list: each kind is a few lines, read beside the others.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

CALL, SOURCE, TAGS, CALLS = (f"modelexport.{key}" for key in ("call", "source_module", "hierarchy_tags", "calls"))
EVIDENCE = "modelexport.evidence"
PARAMETER, TRANSFORM, TREE = (f"modelexport.{key}" for key in ("parameter", "transform", "call_tree"))
DIGESTS = "modelexport.documents"


@dataclass(frozen=True)
class Place:
    """A fault, ready to be planted in a model that was just read."""

    kind: str
    what: str
    expected: frozenset[str]
    """Addresses or names of which one has to be reported; for values, the first diverging call."""
    plant: Callable[[ir.Model, Path], bool]
    """Change the model, or the documents beside the path; says whether it could."""
    node: str = ""
    """The node whose value is changed, for the proof that it is not."""
    tags: bool = False
    """Whether nothing that is computed changes, so that equal outputs prove nothing."""
    sizes: bool = False
    """Whether it declares other sizes, which may be true."""
    documents: bool = False
    """Whether the documents stay: those of a file whose tags are changed would give it away."""


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
    """What a change of attributes needs of a node, apart from it."""

    def __init__(self, node: ir.Node) -> None:
        self.op_type, self.attributes, self.outputs = node.op_type, dict(node.attributes), node.outputs


# --- faults in edges -----------------------------------------------------------------------------------------------


def insert_chain(node: ir.Node, chain: Sequence[ir.Node], users: Sequence[ir.Usage]) -> None:
    """Put nodes behind a node, the last of which gives these users what the node gave them."""
    value, after = node.outputs[0], node
    for new in chain:
        new.outputs[0].name, new.outputs[0].type = f"{new.name}_0", value.type
        node.graph.insert_after(after, new)
        after = new
    after.outputs[0].shape = value.shape
    for user, index in users:
        user.replace_input_with(index, after.outputs[0])


def insert_after(node: ir.Node, op_type: str, *inputs: Any, **attributes: int) -> None:
    """Put an operation behind a node, which the node's call owns."""
    value = node.outputs[0]
    constants = []
    for index, array in enumerate(inputs):
        constant = ir.Value(name=f"{value.name}.by{index}.faulty", const_value=ir.tensor(array))
        constant.type, constant.shape = ir.TensorType(constant.const_value.dtype), ir.Shape(array.shape)
        node.graph.initializers.add(constant)
        constants.append(constant)
    users = list(value.uses())
    new = ir.Node(
        "",
        op_type,
        [value, *constants],
        [ir.AttrInt64(key, number) for key, number in attributes.items()],
        name=f"{node.name}.faulty",
        metadata_props=dict(node.metadata_props),
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


OTHER = {  # an operation that takes the same inputs
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
        """An input from before the operation that makes it."""
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

            # One that is off by less than rounding is still told by its own name.
            names = {v.name or "" for v in node.inputs if v is not None and v.is_initializer()} - {""}
            where = owners(node) | (names if kind.startswith("constant") else set())
            yield Place(kind, node.name or "", where, plant, node.outputs[0].name or "")


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
    if "layer_ann" in node.metadata_props:
        path, _, number = address.partition("@")
        node.metadata_props["layer_ann"] = f"{path}.{f'@{number}.' if number else ''}"
    tell_initializers(node)


def tell_initializers(node: ir.Node) -> None:
    """Write the tags of their users to the initializers of a node, whose own tags have changed."""
    for value in node.inputs:
        if value is not None and TAGS in value.metadata_props:
            those = [user.metadata_props for user, _ in value.uses()]
            listed = [json.loads(props[TAGS]) if TAGS in props else [props[SOURCE]] for props in those]
            value.metadata_props[TAGS] = json.dumps(list(dict.fromkeys(itertools.chain(*listed))))


def calls_of(model: ir.Model) -> tuple[dict[str, str], dict[str, str | None], dict[str, str]]:
    """The calls of a file to their tags and to their callers, and those with nodes to the source tags of these."""
    tree = json.loads(model.metadata_props[TREE])
    return (
        {entry["call"]: entry["tag"] for entry in tree},
        {entry["call"]: entry.get("parent") for entry in tree},
        {n.metadata_props[CALL]: n.metadata_props[SOURCE] for n in model.graph if CALL in n.metadata_props},
    )


def tags(model: ir.Model) -> Iterator[Place]:
    own, parent, source = calls_of(model)
    computing = [
        (p, n) for p, n in enumerate(model.graph)
        if CALL in n.metadata_props and CALLS not in n.metadata_props
        and n.op_type not in COPIES and is_number(n.outputs[0])
        and any(v is not None and not v.is_initializer() and is_number(v) for v in n.inputs)
    ]  # fmt: skip
    root = next(iter(own))

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

    last = list(own)[-1]
    yield Place("class in a tag", last, frozenset([last]), renamed)

    for name, value in model.graph.initializers.items():
        if TAGS in value.metadata_props:

            def other_tags(model: ir.Model, path: Path, name: str = name) -> bool:
                props = model.graph.initializers[name].metadata_props
                wrong = [tag for tag in own.values() if tag not in json.loads(props[TAGS])]
                props[TAGS] = json.dumps(wrong[:1])
                return bool(wrong)

            yield Place("tags of an initializer", name, frozenset([name]), other_tags)


# --- more of each --------------------------------------------------------------------------------------------------


def constant_of(node: ir.Node, name: str, array: Any) -> ir.Value:
    """An initializer of its own in the graph of a node."""
    value = ir.Value(name=name, const_value=ir.tensor(np.ascontiguousarray(array), name=name))
    value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)
    node.graph.initializers.add(value)
    return value


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    if value.shape is None or any(not isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape.numpy())


def last_size(value: ir.Value) -> int:
    return value.shape[-1] if value.shape is not None and len(value.shape) and isinstance(value.shape[-1], int) else 0


def more_weights(model: ir.Model) -> Iterator[Place]:
    def rows(a: Any) -> Any:
        return a[[1, 0, *range(2, len(a))]] if len(a) > 1 else a

    changes: dict[str, Callable[[Any], Any]] = {
        "two rows of a weight exchanged": rows,
        "weight transposed": lambda a: a.T if a.ndim == 2 and a.shape[0] == a.shape[1] else a,
        "sign of a weight": lambda a: -a,
        "weight rolled by one": lambda a: np.roll(a, 1, -1),
        "a thousandth added to a weight": lambda a: a + np.float32(1e-3),
        "weight clipped": lambda a: np.clip(a, None, np.sort(a, axis=None)[-max(a.size // 50, 1) - 1]),
        "weight rounded to int8": lambda a: np.round(a / (np.abs(a).max() / 127)) * (np.abs(a).max() / 127),
    }
    for kind, change in changes.items():
        for position, node in enumerate(model.graph):
            found = weight_of(node)
            if found is None or CALL not in node.metadata_props or PARAMETER not in found[1].metadata_props:
                continue
            array = found[1].const_value.numpy()
            if not np.abs(array).max() or len(found[1].uses()) > 1:
                continue
            other = change(array)
            if other.shape != array.shape or np.array_equal(other, array):
                continue

            def plant(model: ir.Model, path: Path, p: int = position, i: int = found[0], c: Any = change) -> bool:
                value = model.graph[p].inputs[i]
                old = value.const_value.numpy()
                value.const_value = ir.tensor(np.ascontiguousarray(c(old).astype(old.dtype)), name=value.name)
                return True

            yield Place(kind, f"{found[1].name}", owners(node), plant, node.outputs[0].name or "")


def more_edges(model: ir.Model) -> Iterator[Place]:
    def rolled(node: ir.Node) -> bool:
        size = last_size(node.outputs[0])
        if size < 2:
            return False
        insert_after(node, "Gather", np.roll(np.arange(size), 1), axis=-1)
        return True

    def batch_reversed(node: ir.Node) -> bool:
        shape = static_shape(node.outputs[0])
        if not shape or shape[0] < 2:
            return False
        insert_after(node, "Gather", np.arange(shape[0])[::-1].copy(), axis=0)
        return True

    def noise(node: ir.Node) -> bool:
        size = last_size(node.outputs[0])
        if size < 2:
            return False
        factors = 1 + 1e-4 * np.random.default_rng(0).standard_normal(size)
        insert_after(node, "Mul", factors.astype(np.float32))
        return True

    def in_half(node: ir.Node) -> bool:
        insert_after(node, "Cast", to=int(ir.DataType.FLOAT))
        behind = next(user for user, _ in node.outputs[0].uses())
        half = ir.Node("", "Cast", [node.outputs[0]], [ir.AttrInt64("to", int(ir.DataType.FLOAT16))],
                       name=f"{node.name}.half", metadata_props=dict(node.metadata_props))  # fmt: skip
        half.outputs[0].name = f"{node.outputs[0].name}.half.faulty"
        half.outputs[0].type, half.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT16), node.outputs[0].shape
        node.graph.insert_before(behind, half)
        behind.replace_input_with(0, half.outputs[0])
        return True

    def doubled(node: ir.Node) -> bool:
        """``a + a`` for ``a + b``."""
        if node.op_type != "Add" or any(not is_number(v) or v.is_initializer() for v in node.inputs):
            return False
        first, second = node.inputs
        if first is second or first.shape != second.shape:
            return False
        node.replace_input_with(1, first)
        return True

    def condition(node: ir.Node) -> bool:
        if node.op_type != "Where":
            return False
        insert_before_input(node, 0, "Not")
        return True

    def row_off_by_one(node: ir.Node) -> bool:
        """A table looked up one row further on, which is a row all the same."""
        if node.op_type != "Gather" or not node.inputs[0].is_initializer() or node.inputs[0].shape is None:
            return False
        table = node.inputs[0].shape.numpy()
        if len(table) != 2 or table[0] < 3 or node.inputs[1].is_initializer():
            return False
        ids = insert_before_input(node, 1, "Add", np.array(1))
        insert_before_input(node, 1, "Mod", np.array(table[0]))
        return ids is not None

    def smallest(node: ir.Node) -> bool:
        if node.op_type != "TopK":
            return False
        node.attributes["largest"] = ir.AttrInt64("largest", 0)
        return True

    def clipped(node: ir.Node) -> bool:
        insert_after(node, "Clip", np.array(-0.5, dtype=np.float32), np.array(0.5, dtype=np.float32))
        return True

    def shifted(node: ir.Node) -> bool:
        insert_after(node, "Add", np.array(1e-2, dtype=np.float32))
        return True

    def absolute(node: ir.Node) -> bool:
        insert_after(node, "Abs")
        return True

    def without_transpose(node: ir.Node) -> bool:
        perm = node.attributes.get("perm")
        shape = static_shape(node.outputs[0])
        if node.op_type != "Transpose" or perm is None or not shape or shape != static_shape(node.inputs[0]):
            return False
        node.attributes["perm"] = ir.AttrInt64s("perm", list(range(len(shape))))
        return True

    def square(node: ir.Node) -> bool:
        found = weight_of(node)
        if node.op_type not in ("Gemm", "MatMul") or found is None or found[0] != 1 or found[1].const_value is None:
            return False
        array = found[1].const_value.numpy()
        if array.ndim != 2 or array.shape[0] != array.shape[1]:
            return False
        private(node, 1, array.T)
        return True

    def flattened(node: ir.Node) -> bool:
        """The right numbers in the right shape, laid out in another order."""
        shape = static_shape(node.outputs[0])
        if not shape or len(shape) < 3 or shape[-1] == shape[-2] or min(shape[-2:]) < 2:
            return False
        order = np.arange(int(np.prod(shape[-2:]))).reshape(shape[-2:]).T.reshape(-1)
        insert_after(node, "Reshape", np.array([*shape[:-2], -1]))
        first = next(user for user, _ in node.outputs[0].uses())
        value = first.outputs[0]
        insert_after(first, "Gather", order, axis=-1)
        second = next(user for user, _ in value.uses())
        insert_after(second, "Reshape", np.array(shape))
        for one in (first, second):
            one.outputs[0].shape = ir.Shape([*shape[:-2], order.size])
        return True

    kinds: dict[str, Callable[[ir.Node], bool]] = {
        "elements rolled by one": rolled, "batch reversed": batch_reversed, "noise of 1e-4": noise,
        "half precision in between": in_half, "residual doubled": doubled, "condition inverted": condition,
        "row off by one": row_off_by_one, "smallest for largest": smallest, "output clipped": clipped,
        "a hundredth added": shifted, "absolute values": absolute, "transpose left out": without_transpose,
        "weight transposed in the graph": square, "another order of the elements": flattened,
    }  # fmt: skip
    for kind, plant_in in kinds.items():
        for position, node in enumerate(model.graph):
            if CALL not in node.metadata_props or not is_number(node.outputs[0]) or node.op_type == "Constant":
                continue

            def plant(model: ir.Model, path: Path, p: int = position, f: Any = plant_in) -> bool:
                return bool(f(model.graph[p]))

            yield Place(kind, node.name or "", owners(node), plant, node.outputs[0].name or "")


def insert_before_input(node: ir.Node, index: int, op_type: str, *inputs: Any) -> ir.Node:
    """Put an operation before an input of a node, which the node's call owns."""
    value = node.inputs[index]
    arrays = [
        constant_of(node, f"{node.name}.{op_type}.{k}.faulty", np.asarray(a, dtype=value.dtype.numpy()))
        for k, a in enumerate(inputs)
    ]
    new = ir.Node("", op_type, [value, *arrays], name=f"{node.name}.{op_type}.faulty",
                  metadata_props=dict(node.metadata_props))  # fmt: skip
    new.outputs[0].name = f"{value.name}.{op_type}.faulty"
    new.outputs[0].type, new.outputs[0].shape = value.type, value.shape
    node.graph.insert_before(node, new)
    node.replace_input_with(index, new.outputs[0])
    return new


def crossed(model: ir.Model) -> Iterator[Place]:
    """Wires between calls: an input from another call, and the inputs of two calls exchanged."""
    by_kind: dict[Any, list[int]] = defaultdict(list)
    for position, node in enumerate(model.graph):
        if CALL not in node.metadata_props or not node.inputs or not is_number(node.inputs[0]):
            continue
        if node.inputs[0].is_initializer() or CALLS in node.metadata_props:
            continue
        by_kind[node.op_type, str(node.inputs[0].shape), str(node.outputs[0].shape)].append(position)
    for positions in by_kind.values():
        for p, q in itertools.pairwise(positions):
            one, other = model.graph[p], model.graph[q]
            if one.inputs[0] is other.inputs[0] or owners(one) == owners(other):
                continue

            def earlier(model: ir.Model, path: Path, p: int = p, q: int = q) -> bool:
                model.graph[q].replace_input_with(0, model.graph[p].inputs[0])
                return True

            def output_of(model: ir.Model, path: Path, p: int = p, q: int = q) -> bool:
                node, value = model.graph[q], model.graph[p].outputs[0]
                uses = [(user, index) for user, index in node.outputs[0].uses()]
                for user, index in uses:
                    user.replace_input_with(index, value)
                return bool(uses)

            what = f"{other.name} takes that of {one.name}"
            yield Place("input of another call", what, owners(other), earlier, other.outputs[0].name or "")
            users = frozenset(call for user, _ in other.outputs[0].uses() if CALL in user.metadata_props
                              for call in owners(user))  # fmt: skip
            if users:
                yield Place("output of another call", what, owners(other) | users, output_of)


def more_outputs(model: ir.Model, run: Callable[[list[str]], dict[str, Any]]) -> Iterator[Place]:
    """Args: ``run`` gives values of the sound file, for the example inputs."""
    ends = [value.name or "" for value in model.graph.outputs]
    shapes = [static_shape(value) for value in model.graph.outputs]
    root = json.loads(model.metadata_props[TREE])[0]

    def memorised(model: ir.Model, path: Path) -> bool:
        value = model.graph.outputs[0]
        producer = value.producer()
        if producer is None or not is_number(value):
            return False
        learnt = constant_of(producer, "learnt.faulty", run([ends[0]])[ends[0]])
        tags = {CALL: root["call"], SOURCE: root["tag"], "modelexport.evidence": "exact", "namespace": root["tag"][1:]}
        new = ir.Node("", "Identity", [learnt], name="learnt", metadata_props=tags)
        value.name, new.outputs[0].name = f"{ends[0]}.before", ends[0]
        new.outputs[0].type, new.outputs[0].shape = value.type, value.shape
        model.graph.append(new)
        model.graph.outputs[0] = new.outputs[0]
        return True

    yield Place("output learnt by heart", ends[0], frozenset(["*"]), memorised)
    for i, j in itertools.combinations(range(len(ends)), 2):
        if shapes[i] is not None and shapes[i] == shapes[j]:

            def exchanged(model: ir.Model, path: Path, i: int = i, j: int = j) -> bool:
                one, other = model.graph.outputs[i], model.graph.outputs[j]
                if one is other or not is_number(one) or not is_number(other):
                    return False
                model.graph.outputs[i], model.graph.outputs[j] = other, one
                one.name, other.name = "between", one.name
                one.name = ends[j]
                return True

            yield Place("outputs exchanged", f"{ends[i]} and {ends[j]}", frozenset(["*"]), exchanged)


def sizes(model: ir.Model, run: Callable[[list[str]], dict[str, Any]]) -> Iterator[Place]:
    """Sizes that are those of the example, in a file with dynamic axes."""
    if not any(not isinstance(size, int) for value in model.graph.inputs for size in value.shape or ()):
        return
    for position, node in enumerate(model.graph):
        if node.op_type not in ("Reshape", "Expand", "Slice") or CALL not in node.metadata_props:
            continue
        for index, value in enumerate(node.inputs):
            if index == 0 or value is None or value.is_initializer() or value.producer() is None:
                continue
            if not is_number(node.outputs[0]) or value.producer().op_type not in ("Concat", "Shape", "Add", "Reshape"):
                continue

            def plant(model: ir.Model, path: Path, p: int = position, i: int = index) -> bool:
                node = model.graph[p]
                name = node.inputs[i].name or ""
                node.replace_input_with(i, constant_of(node, f"{name}.faulty", run([name])[name]))
                return True

            yield Place("size baked in", f"{node.name}, {value.name}", owners(node), plant)


def more_tags(model: ir.Model) -> Iterator[Place]:
    tree = json.loads(model.metadata_props[TREE])
    for position, node in enumerate(model.graph):
        if CALL not in node.metadata_props or not is_number(node.outputs[0]):
            continue

        def namespace(model: ir.Model, path: Path, p: int = position) -> bool:
            model.graph[p].metadata_props["namespace"] += "/Other"
            return True

        if "namespace" in node.metadata_props:
            yield Place("namespace", node.name or "", frozenset([node.name or ""]), namespace)
        if CALLS in node.metadata_props:

            def tags_of_several(model: ir.Model, path: Path, p: int = position) -> bool:
                properties = model.graph[p].metadata_props
                properties[TAGS] = json.dumps(json.loads(properties[TAGS])[::-1])
                return json.loads(properties[TAGS])[0] != json.loads(properties[TAGS])[-1]

            yield Place("tags of several owners", node.name or "", frozenset([node.name or ""]), tags_of_several)
    for index, entry in enumerate(tree[1:], 1):
        above = next((e["call"] for e in tree if e["call"] not in (entry["call"], entry.get("parent"))), None)
        if above is None or above.startswith(f"{entry['call']}."):
            continue

        def parent(model: ir.Model, path: Path, i: int = index, a: str = above) -> bool:
            text = json.loads(model.metadata_props[TREE])
            if tree.index(next(e for e in tree if e["call"] == a)) >= i:
                return False
            text[i]["parent"] = a
            model.metadata_props[TREE] = json.dumps(text)
            return True

        yield Place("parent of a call", entry["call"], frozenset([entry["call"]]), parent)
    for name, value in model.graph.initializers.items():
        if PARAMETER not in value.metadata_props or not value.uses():
            continue

        def unnamed(model: ir.Model, path: Path, name: str = name) -> bool:
            for key in (PARAMETER, TRANSFORM):
                model.graph.initializers[name].metadata_props.pop(key, None)
            return True

        keys = json.loads(value.metadata_props[PARAMETER])
        yield Place("parameter without its name", name, frozenset([name, *keys]), unnamed)


def moves(model: ir.Model) -> Iterator[Place]:
    """Nodes that only move elements, given to a call that their tensor does not pass."""
    tree = json.loads(model.metadata_props[TREE])
    own = {entry["call"]: entry["tag"] for entry in tree}
    source = {n.metadata_props[CALL]: n.metadata_props[SOURCE] for n in model.graph if CALL in n.metadata_props}

    def is_move(node: ir.Node) -> bool:
        return node.op_type in MOVES and is_number(node.inputs[0]) and not node.inputs[0].is_initializer()

    def passed(node: ir.Node) -> set[str]:
        """The calls that compute, move or use the tensor of a node, with those around them."""
        found: set[str] = set()
        pending, seen = [node], {node}
        while pending:
            current = pending.pop()
            found |= owners(current) if CALL in current.metadata_props else set()
            around = [v.producer() for v in current.inputs if v is not None] if is_move(current) else []
            users = [user for value in current.outputs for user, _ in value.uses()]
            # Down from anything that holds the tensor, and up from moves.
            for other in [*around, *(users if is_move(current) else [])]:
                if other is not None and other not in seen:
                    seen.add(other)
                    pending.append(other)
        return found

    for position, node in enumerate(model.graph):
        if CALL not in node.metadata_props or CALLS in node.metadata_props or not is_move(node):
            continue
        near = passed(node)
        far = [c for c in source if not any(c == n or within(c, n) or within(n, c) for n in near)]
        if not far:
            continue
        target = far[position % len(far)]

        def plant(model: ir.Model, path: Path, p: int = position, t: str = target) -> bool:
            give(model.graph[p], t, source[t], own[t])
            return True

        where = frozenset([*near, target])
        yield Place("moved elements given to another call", f"{node.name} to {target}", where, plant, node.name or "")


MOVES = ("Reshape", "Identity", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Split", "Gather", "Concat",
         "Expand", "Tile")  # fmt: skip


def within(call: str, other: str) -> bool:
    """Whether a call is of a module inside another's."""
    return other == "" or call.partition("@")[0].startswith(f"{other.partition('@')[0]}.")


def conditions(model: ir.Model) -> Iterator[Place]:
    """Comparisons, branches and integers, on which numbers depend."""

    def compared(node: ir.Node) -> bool:
        other = COMPARISONS.get(node.op_type)
        if other is None:
            return False
        node.op_type = other
        return True

    def branches(node: ir.Node) -> bool:
        if node.op_type != "Where" or node.inputs[1].shape != node.inputs[2].shape:
            return False
        one, other = node.inputs[1:]
        node.replace_input_with(1, other)
        node.replace_input_with(2, one)
        return True

    def index(node: ir.Node) -> bool:
        """Another of the rows that a constant index picks."""
        if node.op_type not in ("Gather", "GatherElements", "Slice") or node.inputs[1].const_value is None:
            return False
        size = node.inputs[0].shape[0] if node.inputs[0].shape else None
        array = node.inputs[1].const_value.numpy()
        if not isinstance(size, int) or size < 2 or not array.size or node.inputs[0].dtype is ir.DataType.INT64:
            return False
        private(node, 1, (array + 1) % size if node.op_type != "Slice" else array + 1, metadata=False)
        return True

    def truncated(node: ir.Node) -> bool:
        """Fewer digits than the type has: everything is rounded to a multiple of a thousandth."""
        if not is_number(node.outputs[0]):
            return False
        insert_after(node, "Mul", np.array(1000, dtype=np.float32))
        first = next(user for user, _ in node.outputs[0].uses())
        value = first.outputs[0]
        insert_after(first, "Round")
        second = next(user for user, _ in value.uses())
        insert_after(second, "Div", np.array(1000, dtype=np.float32))
        return True

    kinds: dict[str, Callable[[ir.Node], bool]] = {
        "another comparison": compared, "branches exchanged": branches, "another index": index,
        "rounded to a thousandth": truncated,
    }  # fmt: skip
    for kind, plant_in in kinds.items():
        for position, node in enumerate(model.graph):
            if CALL not in node.metadata_props or node.op_type == "Constant":
                continue

            def plant(model: ir.Model, path: Path, p: int = position, f: Any = plant_in) -> bool:
                return bool(f(model.graph[p]))

            yield Place(kind, node.name or "", owners(node), plant, node.outputs[0].name or "")


COMPARISONS = {
    "Less": "LessOrEqual", "LessOrEqual": "Less", "Greater": "GreaterOrEqual", "GreaterOrEqual": "Greater",
    "And": "Or", "Or": "And", "Max": "Min", "Min": "Max", "ReduceMax": "ReduceMin", "ReduceMean": "ReduceSum",
    "ReduceSum": "ReduceMean", "ArgMax": "ArgMin", "Ceil": "Floor", "Floor": "Ceil",
}  # fmt: skip
"""Operations of the same inputs that differ only on some of them."""


def bodies(model: ir.Model) -> Iterator[Place]:
    """Faults inside the branches of conditions."""
    for position, node in enumerate(model.graph):
        for name, attribute in node.attributes.items():
            if attribute.type is not ir.AttributeType.GRAPH:
                continue
            for inner, one in enumerate(attribute.as_graph()):
                if not is_number(one.outputs[0]) or one.op_type == "Constant":
                    continue

                def plant(model: ir.Model, path: Path, p: int = position, n: str = name, i: int = inner) -> bool:
                    insert_after(model.graph[p].attributes[n].as_graph()[i], "Mul", np.array(1.01, dtype=np.float32))
                    return True

                where = (owners(one) if CALL in one.metadata_props else frozenset()) | owners(node)
                yield Place("fault in a branch", f"{node.name}, {name}, {one.name}", where, plant)


# --- faults in documents -------------------------------------------------------------------------------------------


def documents(model: ir.Model, path: Path) -> Iterator[Place]:
    sidecar = json.loads(path.with_suffix(".hierarchy.json").read_text())

    def place(kind: str, where: str, suffix: str, change: Callable[[Any], bool]) -> Place:
        def plant(model: ir.Model, path: Path) -> bool:
            file = path.with_suffix(suffix)
            document = json.loads(file.read_text())
            done = change(document)
            file.write_text(json.dumps(document))
            # Otherwise the digest alone would give it away.
            digests = json.loads(model.metadata_props[DIGESTS])
            digests[suffix] = hashlib.sha256(file.read_bytes()).hexdigest()
            model.metadata_props[DIGESTS] = json.dumps(digests)
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
