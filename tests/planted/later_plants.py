"""More faults to plant, as `plants.py`: those that a look at how `verify` works suggests to one who wants to fool it.

Of inputs that the given ones do not vary, sizes that they do not have, owners beside the right ones, names and types
that nothing computes with, and single elements of large tensors.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from planted.plants import (
    CALL,
    CALLS,
    DIGESTS,
    PARAMETER,
    TAGS,
    TREE,
    Place,
    constant_of,
    give,
    insert_after,
    insert_chain,
    is_number,
    owners,
    static_shape,
    tell_initializers,
    weight_of,
)  # fmt: skip

ANYWHERE = frozenset(["*"])
"""What nothing but the fault itself could name."""


def ignored_inputs(model: ir.Model, feeds: dict[str, Any]) -> Iterator[Place]:
    """Inputs replaced by what they are in the example."""
    for value in model.graph.inputs:
        name = value.name or ""
        if not list(value.uses()) or name not in feeds:
            continue

        def plant(model: ir.Model, path: Path, name: str = name) -> bool:
            value = next(v for v in model.graph.inputs if v.name == name)
            users = list(value.uses())
            static = value.shape is not None and all(isinstance(size, int) for size in value.shape)
            if not static and not (feeds[name] == feeds[name].flat[0]).all():
                return False
            if static:
                constant = constant_of(users[0][0], f"{name}.example", feeds[name])
                for user, index in users:
                    user.replace_input_with(index, constant)
                return True
            props = dict(users[0][0].metadata_props)
            shape = ir.Node("", "Shape", [value], name=f"{name}.shape", metadata_props=props)
            filled = ir.Node("", "ConstantOfShape", [shape.outputs[0]], [
                ir.AttrTensor("value", ir.tensor(feeds[name].reshape(-1)[:1]))], name=f"{name}.filled",
                metadata_props=props)  # fmt: skip
            shape.outputs[0].name, filled.outputs[0].name = f"{name}.shape_0", f"{name}.filled_0"
            filled.outputs[0].type, filled.outputs[0].shape = value.type, value.shape
            shape.outputs[0].type = ir.TensorType(ir.DataType.INT64)
            for node in (shape, filled):
                model.graph.append(node)
            for user, index in users:
                user.replace_input_with(index, filled.outputs[0])
            model.graph.sort()
            return True

        yield Place("input ignored", name, ANYWHERE, plant)


def owner_faults(model: ir.Model) -> Iterator[Place]:
    """Owners beside the right one, and the right one behind another."""
    tree = json.loads(model.metadata_props[TREE])
    own = {entry["call"]: entry["tag"] for entry in tree}
    source = {n.metadata_props[CALL]: n.metadata_props["modelexport.source_module"]
              for n in model.graph if CALL in n.metadata_props}  # fmt: skip
    calls = list(source)

    def listed(node: ir.Node, those: list[str]) -> bool:
        give(node, those[0], source[those[0]], own[those[0]])
        node.metadata_props[CALLS] = json.dumps(those)
        node.metadata_props[TAGS] = json.dumps([source[one] for one in those])
        tell_initializers(node)
        return True

    for position, node in enumerate(model.graph):
        if CALL not in node.metadata_props or not is_number(node.outputs[0]) or len(calls) < 2:
            continue
        if not any(v is not None and not v.is_initializer() and is_number(v) for v in node.inputs):
            continue
        right = list(owners(node))
        wrong = next((c for c in calls[position % len(calls) :] + calls if c not in right), None)
        if wrong is None:
            continue

        def one_more(model: ir.Model, path: Path, p: int = position, w: str = wrong) -> bool:
            node = model.graph[p]
            return listed(node, [node.metadata_props[CALL], w])

        def behind(model: ir.Model, path: Path, p: int = position, w: str = wrong) -> bool:
            node = model.graph[p]
            return listed(node, [w, node.metadata_props[CALL]])

        where = frozenset([*right, wrong])
        yield Place("an owner too many", f"{node.name} and {wrong}", where, one_more, node.name or "", tags=True)
        yield Place("owner behind another", f"{node.name} behind {wrong}", where, behind, node.name or "", tags=True)

    def all_own(model: ir.Model, path: Path) -> bool:
        for node in model.graph:
            if CALL in node.metadata_props:
                listed(node, [node.metadata_props[CALL], *(c for c in calls if c != node.metadata_props[CALL])])
        return len(calls) > 2

    yield Place("every node owned by all", "", ANYWHERE, all_own, tags=True)


def interface_faults(model: ir.Model) -> Iterator[Place]:
    """Names, shapes and types of inputs and outputs, with which nothing is computed."""
    outputs = [value.name or "" for value in model.graph.outputs]
    for k, (one, other) in enumerate(itertools.pairwise(outputs)):

        def renamed(model: ir.Model, path: Path, k: int = k, one: str = one, other: str = other) -> bool:
            a, b = model.graph.outputs[k], model.graph.outputs[k + 1]
            a.name, b.name = "between", one
            a.name = other
            return True

        yield Place(
            "names of outputs exchanged",
            f"{one} and {other}",
            frozenset([one, other, "outputs", "."]),
            renamed,
            tags=True,
        )
    for k, name in enumerate(outputs):
        shape = model.graph.outputs[k].shape
        for axis, size in enumerate(shape or ()):

            def sized(model: ir.Model, path: Path, k: int = k, axis: int = axis) -> bool:
                value = model.graph.outputs[k]
                sizes = [s if isinstance(s, int) else s.value for s in value.shape]
                sizes[axis] = sizes[axis] + 3 if isinstance(sizes[axis], int) else 977
                value.shape = ir.Shape(sizes)
                return True

            if isinstance(size, int) or size.value is not None:
                yield Place("declared size of an output", f"{name}, axis {axis}", frozenset([name]), sized, tags=True)


def single_elements(model: ir.Model) -> Iterator[Place]:
    for position, node in enumerate(model.graph):
        if CALL not in node.metadata_props or not is_number(node.outputs[0]):
            continue
        shape = static_shape(node.outputs[0])
        if shape is None or np.prod(shape) < 64:
            continue

        def plant(model: ir.Model, path: Path, p: int = position, shape: tuple[int, ...] = shape) -> bool:
            factor = np.ones(shape, np.float32)
            factor.flat[np.prod(shape) // 3] = 1.01
            insert_after(model.graph[p], "Mul", factor)
            return True

        yield Place("one element one percent off", node.name or "", owners(node), plant, node.outputs[0].name or "")


def example_size(model: ir.Model, feeds: dict[str, Any], symbol: str | None) -> int | None:
    """What a symbol is in the example."""
    for value in model.graph.inputs:
        for axis, size in enumerate(value.shape or () if value.name in feeds else ()):
            if isinstance(size, ir.SymbolicDim) and size.value == symbol:
                return int(feeds[value.name or ""].shape[axis])
    return None


def size_faults(model: ir.Model, feeds: dict[str, Any]) -> Iterator[Place]:
    """What holds up to the size of the example, or not for one row."""
    for position, node in enumerate(model.graph):
        if CALL not in node.metadata_props or not is_number(node.outputs[0]):
            continue
        shape = node.outputs[0].shape
        if shape is None or not len(shape) or not isinstance(shape[0], ir.SymbolicDim):
            continue
        if len(shape) < 2 or example_size(model, feeds, shape[0].value) is None:
            continue

        def squeezed(model: ir.Model, path: Path, p: int = position) -> bool:
            node = model.graph[p]
            insert_after(node, "Squeeze")
            return True

        yield Place("squeezed for one row", node.name or "", owners(node), squeezed, node.outputs[0].name or "")
        for axis, size in enumerate(shape):
            if axis == 0 or not isinstance(size, ir.SymbolicDim) or size.value is None:
                continue
            now = example_size(model, feeds, size.value)
            if now is None:
                continue

            def zeroed(model: ir.Model, path: Path, p: int = position, axis: int = axis, now: int = now) -> bool:
                """Zeros from the size of the example on: a table that is as long as the example."""
                node = model.graph[p]
                value = node.outputs[0]
                rank = len(value.shape)
                props = dict(node.metadata_props)
                users = list(value.uses())
                name = value.name
                axes = constant_of(node, f"{name}.axes", np.array([axis], np.int64))
                begin = constant_of(node, f"{name}.begin", np.array([0], np.int64))
                end = constant_of(node, f"{name}.end", np.array([now], np.int64))
                most = constant_of(node, f"{name}.most", np.array([1 << 40], np.int64))
                zero = constant_of(node, f"{name}.zero", np.array(0, np.float32))
                first = ir.Node("", "Slice", [value, begin, end, axes], name=f"{name}.first", metadata_props=props)
                rest = ir.Node("", "Slice", [value, end, most, axes], name=f"{name}.rest", metadata_props=props)
                gone = ir.Node("", "Mul", [rest.outputs[0], zero], name=f"{name}.gone", metadata_props=props)
                both = ir.Node("", "Concat", [first.outputs[0], gone.outputs[0]], [ir.AttrInt64("axis", axis)],
                               name=f"{name}.both", metadata_props=props)  # fmt: skip
                insert_chain(node, (first, rest, gone, both), users)
                return rank > 1 and all(output is not value for output in node.graph.outputs)

            yield Place("zero beyond the example's size", node.name or "", owners(node), zeroed,
                        node.outputs[0].name or "")  # fmt: skip


def attribute_faults(model: ir.Model) -> Iterator[Place]:
    """Attributes of single operators."""
    changes: dict[str, Callable[[ir.Node], bool]] = {}

    def flag(name: str, new: Any, old: Any) -> Callable[[ir.Node], bool]:
        def change(node: ir.Node) -> bool:
            before = node.attributes.get(name)
            value = before.value if before is not None else old
            if value == new:
                return False
            make = ir.AttrString if isinstance(new, str) else ir.AttrFloat32 if isinstance(new, float) else ir.AttrInt64
            node.attributes[name] = make(name, new)
            return True

        return change

    changes = {
        "TopK": flag("largest", 0, 1), "ArgMax": flag("axis", 0, 0), "CumSum": flag("exclusive", 1, 0),
        "AveragePool": flag("count_include_pad", 1, 0), "Trilu": flag("upper", 0, 1),
        "Pad": flag("mode", "edge", "constant"),
        "Resize": flag("coordinate_transformation_mode", "align_corners", "half_pixel"),
        "ReduceMax": flag("keepdims", 0, 1), "Gemm": flag("beta", 2.0, 1.0), "Softmax": flag("axis", 0, -1),
        "ScatterND": flag("reduction", "add", "none"), "LayerNormalization": flag("epsilon", 3e-5, 1e-5),
        "HardSwish": flag("alpha", 0.2, 1 / 6), "Elu": flag("alpha", 1.1, 1.0), "LeakyRelu": flag("alpha", 0.02, 0.01),
        "Gelu": flag("approximate", "tanh", "none"), "Mod": flag("fmod", 1, 0), "Gather": flag("axis", 1, 0),
        "Concat": flag("axis", 0, -1),
    }  # fmt: skip
    for position, node in enumerate(model.graph):
        change = changes.get(node.op_type)
        if change is None or CALL not in node.metadata_props:
            continue

        def plant(model: ir.Model, path: Path, p: int = position, change: Any = change) -> bool:
            return bool(change(model.graph[p]))

        yield Place(f"attribute of {node.op_type}", node.name or "", owners(node), plant, node.outputs[0].name or "")


def inserted(model: ir.Model) -> Iterator[Place]:
    """Operations put behind nodes: random ones, other types, other masks."""

    def dropout(node: ir.Node) -> bool:
        insert_after(node, "Dropout", np.array(0.05, np.float32), np.array(True))
        return True

    def to_type(dtype: ir.DataType) -> Callable[[ir.Node], bool]:
        def change(node: ir.Node) -> bool:
            first = node.outputs[0]
            insert_after(node, "Cast", to=dtype.value)
            cast = next(user for user, _ in first.uses() if user.name == f"{node.name}.faulty")
            cast.outputs[0].type = ir.TensorType(dtype)
            cast.name = f"{node.name}.cast"
            cast.outputs[0].name = f"{node.name}.cast_0"
            insert_after(cast, "Cast", to=ir.DataType.FLOAT.value)
            back = next(user for user, _ in cast.outputs[0].uses())
            back.outputs[0].type = first.type
            return True

        return change

    def clipped_far(node: ir.Node) -> bool:
        insert_after(node, "Clip", np.array(-1e4, np.float32), np.array(1e4, np.float32))
        return True

    def mean_removed(node: ir.Node) -> bool:
        insert_after(node, "MeanVarianceNormalization")
        return True

    def softened(node: ir.Node) -> bool:
        """A mask of minus infinity becomes one of -10."""
        insert_after(node, "Max", np.array(-10, np.float32))
        return True

    kinds = {
        "dropout in training mode": dropout, "bfloat16 in between": to_type(ir.DataType.BFLOAT16),
        "integers in between": to_type(ir.DataType.INT32), "mask of -10": softened, "clipped far away": clipped_far,
        "normalized once more": mean_removed,
    }  # fmt: skip
    for kind, change in kinds.items():
        for position, node in enumerate(model.graph):
            if CALL not in node.metadata_props or not is_number(node.outputs[0]):
                continue
            if kind == "mask of -10" and node.op_type not in ("Where", "Mul", "Add", "Sub"):
                continue

            def plant(model: ir.Model, path: Path, p: int = position, change: Any = change) -> bool:
                return bool(change(model.graph[p]))

            yield Place(kind, node.name or "", owners(node), plant, node.outputs[0].name or "")


def seldom(model: ir.Model) -> Iterator[Place]:
    """What happens for some inputs only: one id, one row of a batch, numbers of one sign."""
    for position, node in enumerate(model.graph):
        if node.op_type == "Gather" and is_number(node.outputs[0]) and CALL in node.metadata_props:
            ids = node.inputs[1]
            if ids is None or ids.dtype is not ir.DataType.INT64 or not ids.is_graph_input():
                continue

            def one_id(model: ir.Model, path: Path, p: int = position) -> bool:
                node = model.graph[p]
                ids, table = node.inputs[1], node.inputs[0]
                rows = int(table.shape[0])
                if rows < 8:
                    return False
                most = constant_of(node, "most", np.array(rows // 2, np.int64))
                low = ir.Node("", "Min", [ids, most], name="low", metadata_props=dict(node.metadata_props))
                low.outputs[0].name, low.outputs[0].type, low.outputs[0].shape = "low_0", ids.type, ids.shape
                node.graph.insert_before(node, low)
                node.replace_input_with(1, low.outputs[0])
                return True

            yield Place("half of the ids", node.name or "", owners(node), one_id, node.outputs[0].name or "")


def metadata_faults(model: ir.Model) -> Iterator[Place]:
    tree = json.loads(model.metadata_props[TREE])
    for index, entry in list(enumerate(tree))[1:]:

        def dropped(model: ir.Model, path: Path, index: int = index) -> bool:
            text = json.loads(model.metadata_props[TREE])
            del text[index]
            model.metadata_props[TREE] = json.dumps(text)
            return True

        yield Place("call left out of the tree", entry["call"], ANYWHERE, dropped, tags=True)

        def added(model: ir.Model, path: Path, index: int = index) -> bool:
            text = json.loads(model.metadata_props[TREE])
            text.insert(index + 1, {**text[index], "call": f"{text[index]['call'].partition('@')[0]}@7",
                                    "tag": f"{text[index]['tag'].partition('@')[0]}@7"})  # fmt: skip
            model.metadata_props[TREE] = json.dumps(text)
            return True

        yield Place("call too many in the tree", entry["call"], ANYWHERE, added, tags=True)
    for position, node in enumerate(model.graph):
        if "layer_ann" in node.metadata_props:

            def annotated(model: ir.Model, path: Path, p: int = position) -> bool:
                model.graph[p].metadata_props["layer_ann"] += ".other"
                return True

            yield Place(
                "annotation for placing",
                node.name or "",
                frozenset([node.name or "", *owners(node)]),
                annotated,
                tags=True,
            )
    for key in model.metadata_props:
        if key.startswith("modelexport.") and key not in (TREE, DIGESTS, "modelexport.version"):

            def emptied(model: ir.Model, path: Path, key: str = key) -> bool:
                old = model.metadata_props[key]
                model.metadata_props[key] = "{}" if old.startswith("{") else "[]" if old.startswith("[") else "other"
                return model.metadata_props[key] != old

            yield Place(f"property {key}", key, ANYWHERE, emptied, tags=True)
    for node in model.graph:
        found = weight_of(node)
        if found is not None and PARAMETER in found[1].metadata_props:

            def twice(model: ir.Model, path: Path, name: str = found[1].name or "", at: str = node.name or "") -> bool:
                """The right weight stays beside the wrong one, under the same name of an entry."""
                node = next(n for n in model.graph if n.name == at)
                old = model.graph.initializers[name]
                new = constant_of(node, f"{name}.copy", old.const_value.numpy() * np.float32(1.5))
                new.metadata_props.update(old.metadata_props)
                for k, value in enumerate(node.inputs):
                    if value is old:
                        node.replace_input_with(k, new)
                return True

            yield Place("a weight twice", found[1].name or "", owners(node) | {found[1].name or ""}, twice)


def more_documents(model: ir.Model, path: Path) -> Iterator[Place]:
    sidecar = json.loads(path.with_suffix(".hierarchy.json").read_text())

    def place(kind: str, where: str, change: Callable[[Any], Any]) -> Place:
        def plant(model: ir.Model, path: Path) -> bool:
            file = path.with_suffix(".hierarchy.json")
            document = json.loads(file.read_text())
            before = json.dumps(document)
            change(document)
            file.write_text(json.dumps(document))
            digests = json.loads(model.metadata_props[DIGESTS])
            digests[".hierarchy.json"] = hashlib.sha256(file.read_bytes()).hexdigest()
            model.metadata_props[DIGESTS] = json.dumps(digests)
            return json.dumps(document) != before

        return Place(kind, where, ANYWHERE, plant, documents=True)

    yield place("parameters of the model", "", lambda d: d["model"].update(parameters=d["model"]["parameters"] + 1))
    yield place("class of the model", "", lambda d: d["model"].update(class_name="Other"))
    yield place("opset of the model", "", lambda d: d["model"].update(opset=d["model"]["opset"] - 1))
    for index, module in enumerate(sidecar["modules"]):
        yield place("class of a module", module["path"], lambda d, i=index: d["modules"][i].update(class_name="Other"))
        if module.get("parameters"):
            yield place("parameters of a module", module["path"],
                        lambda d, i=index: d["modules"][i].update(parameters=-1))  # fmt: skip
        if "aliases" in module:
            yield place("aliases of a module", module["path"],
                        lambda d, i=index: d["modules"][i]["aliases"].append("other"))  # fmt: skip
        if module.get("tag"):
            yield place("tag of a module", module["path"],
                        lambda d, i=index: d["modules"][i].update(tag=d["modules"][i]["tag"] + "/Other"))  # fmt: skip
        if module.get("reason"):
            yield place("reason of a module", module["path"],
                        lambda d, i=index: d["modules"][i].update(reason=None))  # fmt: skip
    for index, module in enumerate(sidecar["modules"][1:], 1):
        yield place("module left out", module["path"], lambda d, i=index: d["modules"].pop(i))
    for side in ("inputs", "outputs"):
        for index, value in enumerate(sidecar[side]):
            yield place(f"shape of the {side}", value["name"],
                        lambda d, s=side, i=index: d[s][i]["shape"].append(3))  # fmt: skip
            yield place(f"type of the {side}", value["name"],
                        lambda d, s=side, i=index: d[s][i].update(dtype="float16"))  # fmt: skip
    for index, call in enumerate(sidecar["calls"]):
        where = call["address"] or "."
        yield place(
            "tag of a call", where, lambda d, i=index: d["calls"][i].update(tag=d["calls"][i]["tag"] + "/Other")
        )
        if index and call.get("parent") is not None:
            yield place("parent of a call in the sidecar", where,
                        lambda d, i=index: d["calls"][i].update(parent=d["calls"][-1]["address"]))  # fmt: skip
        if index:
            yield place("call left out of the sidecar", where, lambda d, i=index: d["calls"].pop(i))
    for index, node in enumerate(sidecar["nodes"]):
        yield place("node left out of the sidecar", node["name"], lambda d, i=index: d["nodes"].pop(i))
    for key in ("state_dict", "entries"):
        if key in sidecar:
            for name in list(sidecar[key])[:5]:
                yield place(
                    f"entry of {key}",
                    str(name),
                    lambda d, k=key, n=name: d[k].pop(n) if isinstance(d[k], dict) else d[k].pop(),
                )


def later(model: ir.Model, path: Path, feeds: dict[str, Any]) -> Iterator[Place]:
    """All of this file."""
    yield from ignored_inputs(model, feeds)
    yield from owner_faults(model)
    yield from interface_faults(model)
    yield from single_elements(model)
    yield from size_faults(model, feeds)
    yield from attribute_faults(model)
    yield from inserted(model)
    yield from seldom(model)
    yield from metadata_faults(model)
    yield from more_documents(model, path)
