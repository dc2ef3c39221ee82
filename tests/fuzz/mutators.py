"""Format-aware damage: one part of a file is changed so that the rest is still consistent."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx

from corpus import properties, set_property
from modelexport.format import keys

Random = np.random.Generator

JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, -(2**63), 0.5, "", " ", "\x1b[2J\x1b[31mred", "\u202e", "/", "..",
    "../../../etc/passwd", "a" * 5000, "path@", "@1", "x@-1", "x@99999999999999999999", "\x00", [], {}, [[]], [None],
    {"": ""}, [1, "a", None], {"call": "", "tag": "/X"}, "/A\n/B", "NaN",
]  # fmt: skip


def choose(random: Random, options: list[Any]) -> Any:
    return options[int(random.integers(len(options)))]


def mutate_json(random: Random, document: Any) -> Any:
    """The document with one value replaced, removed, moved or duplicated, at a random depth."""
    if isinstance(document, (dict, list)) and document and random.random() < 0.85:
        key = choose(random, list(document) if isinstance(document, dict) else list(range(len(document))))
        changed = dict(document) if isinstance(document, dict) else list(document)
        kind = random.random()
        if kind < 0.12:
            del changed[key]
        elif kind < 0.2 and isinstance(changed, list):
            changed.append(changed[key])
        elif kind < 0.28 and isinstance(changed, dict):
            changed[str(choose(random, JUNK))] = changed.pop(key)
        elif kind < 0.35:
            other = choose(random, list(document) if isinstance(document, dict) else list(range(len(document))))
            changed[key], changed[other] = changed[other], changed[key]
        else:
            changed[key] = mutate_json(random, document[key])
        return changed
    return choose(random, JUNK)


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """The bytes truncated, flipped, duplicated, or overwritten in places."""
    if not data:
        return b"\x00"
    position = int(random.integers(len(data)))
    match int(random.integers(5)):
        case 0:
            return data[:position]
        case 1:
            return data[:position] + bytes([data[position] ^ (1 << int(random.integers(8)))]) + data[position + 1 :]
        case 2:
            return data[:position] + random.bytes(int(random.integers(1, 40))) + data[position:]
        case 3:
            return data[:position] + b"\xff" * 12 + data[position + 12 :]
        case _:
            return data[:position] + data[position // 2 :]


def encoded(random: Random, document: Any) -> str:
    text = json.dumps(document)
    if random.random() < 0.1:
        return mutate_bytes(random, text.encode()).decode("utf-8", "replace")
    if random.random() < 0.03:
        return "[" * 100_000
    return text


# --- onnx -------------------------------------------------------------------------------------------------------------


def all_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [*model.graph.node, *(node for function in model.functions for node in function.node)]


def model_property(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    key = choose(random, list(properties(model)))
    value = properties(model)[key]
    try:
        changed = encoded(random, mutate_json(random, json.loads(value)))
    except ValueError:
        changed = str(choose(random, JUNK))
    set_property(model, key, changed)


def no_model_property(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    del model.metadata_props[int(random.integers(len(model.metadata_props)))]


def node_property(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    node = choose(random, all_nodes(model))
    if not node.metadata_props:
        set_property(node, keys.CALL, str(choose(random, JUNK)))
        return
    entry = choose(random, list(node.metadata_props))
    match int(random.integers(4)):
        case 0:
            node.metadata_props.remove(entry)
        case 1:
            entry.value = str(choose(random, JUNK))
        case 2:
            entry.value = str(choose(random, [e.value for n in all_nodes(model) for e in n.metadata_props]))
        case _:
            set_property(node, keys.CALLS, json.dumps(choose(random, [["", ""], ["nowhere"], [1], [], "x"])))


def initializer_property(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    tensor = choose(random, list(model.graph.initializer))
    key = choose(random, [keys.PARAMETER, keys.TRANSFORM, keys.HIERARCHY_TAGS])
    steps = [{"op_type": "Expand", "inputs": ["a", "b"], "attributes": {}, "version": 13},
             {"op_type": "Constant", "attributes": {"value": {"dtype": "int64", "value": [2**40]}}},
             {"op_type": "Transpose", "inputs": [tensor.name], "attributes": {"perm": [9]}, "version": 13}]  # fmt: skip
    set_property(tensor, key, encoded(random, mutate_json(random, choose(random, [steps, ["a"], [tensor.name]]))))


def call_tree(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    cases: list[Callable[[], list[dict[str, Any]]]] = [
        lambda: [{"call": "", "tag": "/A"}, {"call": "a", "tag": "/A/B", "parent": "a"}],
        lambda: [{"call": "", "tag": "/A"}, {"call": "", "tag": "/A", "parent": ""}],
        lambda: [{"call": "a", "tag": "/A", "parent": "b"}, {"call": "b", "tag": "/B", "parent": "a"}],
        lambda: [{"call": "", "tag": "/A"}, *deep(5000)],
        list,
        lambda: [{"call": "", "tag": "/\x1b[31mA"}],
    ]
    entries = [{"class_name": "A", "level": True, **entry} for entry in choose(random, cases)()]
    if random.random() < 0.4:
        entries = json.loads(properties(model).get(keys.CALL_TREE, "[]")) + entries
    set_property(model, keys.CALL_TREE, json.dumps(entries))


def deep(levels: int) -> list[dict[str, Any]]:
    names = [".".join("x" * (n + 1)) for n in range(levels // 20)]
    parents = ["", *names]
    return [{"call": n, "tag": "/A/" + n.replace(".", "/"), "parent": p} for n, p in zip(names, parents, strict=False)]


def functions(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    match int(random.integers(4)):
        case 0 if model.functions:
            del model.functions[int(random.integers(len(model.functions)))]
        case 1 if model.functions:
            function = choose(random, list(model.functions))
            function.node.add(op_type=function.name, domain=function.domain, overload=function.overload)
        case 2 if model.functions:
            function = choose(random, list(model.functions))
            del function.node[int(random.integers(len(function.node))) :]
        case _:
            count = int(choose(random, [2, 40, 64]))
            for n in range(count):
                function = model.functions.add(name=f"f{n}", domain="modelexport")
                function.opset_import.add(domain="", version=18)
                for _ in range(2 if n else 0):
                    function.node.add(op_type=f"f{n - 1}", domain="modelexport")
            model.graph.node.add(op_type=f"f{count - 1}", domain="modelexport", name="again")
            model.opset_import.add(domain="modelexport", version=1)


def external(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    tensor = choose(random, list(model.graph.initializer))
    if not (folder / "fifo").exists():
        os.mkfifo(folder / "fifo")
        (folder / "leads-out").symlink_to("/etc/passwd")
        (folder / "inside").mkdir()
        os.link(folder / "new.safetensors", folder / "hard-link")
    location = choose(
        random,
        ["fifo", "leads-out", "inside", "hard-link", "../x", "/etc/passwd", "/dev/zero", "", ".", "a\0b",
         "new.safetensors", "missing", "inside/../../x", "linked.safetensors", "copied.onnx.data"],
    )  # fmt: skip
    offset = choose(random, ["0", "8", "-1", str(2**62), "x", "", "99999999999999999999999"])
    length = choose(random, [None, "0", "1", str(2**62), "-5", "x"])
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=value)
    if random.random() < 0.3:
        record = {location: {"size": 100, "header": "0" * 64}}
        set_property(model, keys.WEIGHTS, json.dumps(record))
    if random.random() < 0.3:
        node = choose(random, list(model.graph.node))
        attribute = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
        attribute.t.CopyFrom(tensor)


def tensor(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    tensor = choose(random, list(model.graph.initializer))
    match int(random.integers(7)):
        case 0:
            tensor.dims.append(int(choose(random, [0, 2**40, 2**62, -1])))
        case 1:
            tensor.dims[:] = [2**31, 2**31, 2**31]
        case 2:
            tensor.data_type = int(choose(random, [0, 8, 16, 22, 99, -1]))
        case 3:
            tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 2]
        case 4:
            tensor.name = choose(random, [t.name for t in model.graph.initializer] + ["", "\x1b[2J", "\x00"])
        case 5:
            model.graph.initializer.append(tensor)
        case _:
            tensor.string_data.append(b"\xff\xfe")


def graph(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    node = choose(random, all_nodes(model))
    match int(random.integers(10)):
        case 0 if node.input:
            node.input[int(random.integers(len(node.input)))] = choose(random, ["", "nowhere", *node.output])
        case 1 if node.output:
            node.output[0] = choose(random, [n.output[0] for n in all_nodes(model) if n.output] + ["", "\x1b[31m"])
        case 2:
            node.op_type = choose(random, ["", "If", "Loop", "Unknown", "Constant", "\x1b[31m", "A" * 3000])
        case 3:
            node.name = choose(random, [n.name for n in all_nodes(model)] + ["", "\x1b]0;title\x07", "\u202eevil"])
        case 4:
            node.domain = choose(random, ["modelexport", "nowhere", "ai.onnx.ml"])
        case 5:
            node.attribute.add(name="x", type=int(choose(random, [0, 1, 4, 5, 6, 10, 14])))
        case 6:
            nested = node.attribute.add(name="body", type=onnx.AttributeProto.GRAPH).g
            for _ in range(int(choose(random, [1, 30]))):
                inner = nested.node.add(op_type="If", name="n")
                nested = inner.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
        case 7 if len(model.graph.node) > 1:
            del model.graph.node[int(random.integers(len(model.graph.node)))]
        case 8:
            del model.graph.output[:]
        case _:
            model.opset_import[0].version = int(choose(random, [0, -1, 999, 1]))


FORMULAS = [
    "9**9**9**9",
    "a**9**9**9",
    "(" * 900 + "a" + ")" * 900,
    "1/0",
    "a//0",
    "Max(" + ", ".join("abcdefghijklmnop") + ")",
    "a" * 4000,
    "__import__('os').system('touch ran')",
    "a.b",
    "1e400",
    "0.1**0.1",
    "-a",
    "a" + "+1" * 400,
    "Mod(5, 0)",
    "floor(a/3)*b**2",
    "(a+b+c+d+e+f)**40",
    "*".join(f"(a{i}+b{i})" for i in range(30)),
    "floor((a+b)**9/7)*Mod((a-b)**9, c)",
    "(a+b)*(c+d)*(e+f)",
]


def shapes(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    value = choose(random, [*model.graph.input, *model.graph.output, *model.graph.value_info])
    match int(random.integers(5)):
        case 4:
            value.type.tensor_type.shape.dim.add(dim_param=str(choose(random, [*FORMULAS, *JUNK])))
        case 0:
            value.type.tensor_type.elem_type = int(choose(random, [0, 8, 77]))
        case 1:
            value.type.Clear()
        case 2:
            value.type.sequence_type.elem_type.tensor_type.elem_type = 1
        case _:
            value.type.tensor_type.shape.dim.add(dim_value=int(choose(random, [-5, 2**62])))


def operator_sets(random: Random, model: onnx.ModelProto, folder: Path) -> None:
    imports = choose(random, [model, *model.functions]).opset_import
    one = choose(random, list(imports))
    match int(random.integers(5)):
        case 0:
            imports.remove(one)
        case 1:
            one.domain = str(choose(random, ["ai.onnx", "com.microsoft", "modelexport", "x", "ai.onnx.ml"]))
        case 2:
            one.version = int(choose(random, [0, -1, 1, 5, 99, 2**31 - 1]))
        case 3:
            imports.add(domain=one.domain, version=int(choose(random, [1, 18])))
        case _:
            choose(random, all_nodes(model)).domain = str(
                choose(random, ["ai.onnx", "com.microsoft", "x", "modelexport"])
            )


MODEL_MUTATORS = [
    model_property, model_property, no_model_property, node_property, node_property, initializer_property, call_tree,
    functions, external, external, tensor, graph, graph, shapes, operator_sets,
]  # fmt: skip


def mutate_model(random: Random, path: Path) -> str:
    """Change one ONNX file, in place; returns a description of the change."""
    if random.random() < 0.12:
        path.write_bytes(mutate_bytes(random, path.read_bytes()))
        return "bytes"
    model = onnx.load(path, load_external_data=False)
    done = []
    for _ in range(int(random.integers(1, 3))):
        mutator = choose(random, MODEL_MUTATORS)
        try:
            mutator(random, model, path.parent)
            done.append(mutator.__name__)
        except (ValueError, IndexError, TypeError, OverflowError):  # an earlier change removed what this one needs
            continue
    path.write_bytes(model.SerializeToString())
    return "+".join(done)


def mutate_document(random: Random, model: Path, suffix: str) -> str:
    """Change a document; in most cases the model's digest is updated, so that the content is read."""
    path = model.with_suffix(suffix)
    if random.random() < 0.05:
        path.unlink()
        os.mkfifo(path)
        return "fifo"
    changed = encoded(random, mutate_json(random, json.loads(path.read_text()))).encode()
    path.write_bytes(changed)
    if random.random() < 0.7:
        proto = onnx.load(model)
        names = json.loads(next(entry.value for entry in proto.metadata_props if entry.key == keys.DOCUMENTS))
        digests = {name: hashlib.sha256(model.with_suffix(name).read_bytes()).hexdigest() for name in names}
        set_property(proto, keys.DOCUMENTS, json.dumps(digests))
        model.write_bytes(proto.SerializeToString())
        return f"{suffix}, recorded"
    return suffix


def mutate_safetensors(random: Random, path: Path) -> str:
    """Change the header of a safetensors file: overlaps, gaps, duplicate names, impossible lengths."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    entry = header[choose(random, names)]
    kind = choose(random, ["json", "overlap", "hole", "twice", "length", "shape", "dtype", "bytes", "longer"])
    text = None
    match kind:
        case "json":
            header = mutate_json(random, header)
        case "overlap":
            entry["data_offsets"] = header[choose(random, names)]["data_offsets"]
        case "hole":
            entry["data_offsets"] = [entry["data_offsets"][0] + 4, entry["data_offsets"][1] + 4]
        case "twice":
            text = json.dumps(header)[:-1] + ", " + json.dumps({names[0]: header[names[-1]]})[1:]
        case "shape":
            entry["shape"] = choose(random, [[-1], [2**40, 2**40], ["a"], None, [0], [1.5]])
        case "dtype":
            entry["dtype"] = choose(random, ["F8_E8M0", "X", 5, None, "", "I64"])
        case "longer":
            header.setdefault("__metadata__", {})["more"] = "x" * 80
    text = json.dumps(header) if text is None else text
    size = len(text.encode())
    if kind == "length":
        size = int(choose(random, [0, 1, 2**63, 2**64 - 1, size - 1, size + 1]))
    changed = size.to_bytes(8, "little") + text.encode() + rest
    path.write_bytes(mutate_bytes(random, data) if kind == "bytes" else changed)
    return kind


def mutate_json_file(random: Random, path: Path) -> str:
    path.write_text(encoded(random, mutate_json(random, msgspec.json.decode(path.read_bytes()))), encoding="utf-8")
    return path.name
