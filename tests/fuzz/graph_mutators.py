"""Graphs that are well-formed and hostile in what they compute: for the commands that run them in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from corpus import properties
from modelexport.format import keys
from mutators import Random, choose

INTEGERS = [0, -1, 1, 2, -2, 7, 12, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1]
OPERATORS = [
    "MatMul", "Gemm", "Softmax", "Transpose", "Concat", "Pow", "Div", "Mod", "Gather", "Where", "Conv", "LSTM", "TopK",
    "Slice", "Reshape", "Pad", "CumSum", "ScatterND", "LayerNormalization", "NonZero", "Unique", "If", "Loop", "Scan",
    "Cast", "BitShift", "QuantizeLinear", "DequantizeLinear", "RoiAlign", "DFT", "Multinomial", "Det", "MaxPool",
    "StringNormalizer", "SequenceAt", "Optional",
]  # fmt: skip


def values(random: Random, model: onnx.ModelProto) -> None:
    tensor = choose(random, list(model.graph.initializer))
    array = numpy_helper.to_array(tensor).copy()
    if array.dtype.kind == "f":
        extremes = [np.nan, np.inf, -np.inf, 3e38, 1e-45]
    else:
        extremes = [0, 1] if array.dtype == bool else [np.iinfo(array.dtype).min, np.iinfo(array.dtype).max]
    array.flat[int(random.integers(array.size))] = choose(random, extremes)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def sizes(random: Random, model: onnx.ModelProto) -> None:
    tensor = choose(random, list(model.graph.initializer))
    count = int(np.prod(tensor.dims))
    tensor.dims[:] = choose(random, [[count], [1, count], [count, 1], list(reversed(tensor.dims)), [1] * 30 + [count]])


def connections(random: Random, model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)
    position = int(random.integers(len(nodes)))
    known = [name for node in nodes[:position] for name in node.output]
    known += [value.name for value in (*model.graph.input, *model.graph.initializer)]
    node = nodes[position]
    node.input[int(random.integers(len(node.input)))] = choose(random, known)


def operator(random: Random, model: onnx.ModelProto) -> None:
    node = choose(random, list(model.graph.node))
    del node.attribute[:]
    node.op_type = choose(random, OPERATORS)


def attribute(random: Random, model: onnx.ModelProto) -> None:
    node = choose(random, [node for node in model.graph.node if node.attribute])
    name = choose(random, list(node.attribute)).name
    kept = [one for one in node.attribute if one.name != name]
    del node.attribute[:]
    value = choose(random, [choose(random, INTEGERS), float("nan"), 1e38, "x", [choose(random, INTEGERS)] * 3])
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def inserted(random: Random, model: onnx.ModelProto) -> None:
    """A node with extreme parameters in front of another one. None asks for much memory, or for ever."""

    def constant(*numbers: Any, dtype: Any = np.int64) -> str:
        name = f"constant_{len(model.graph.initializer)}"
        model.graph.initializer.append(numpy_helper.from_array(np.array(numbers, dtype), name))
        return name

    def some() -> str:
        return constant(choose(random, INTEGERS))

    position = int(random.integers(len(model.graph.node)))
    node = model.graph.node[position]
    taken, made = node.input[0], f"inserted_{len(model.graph.node)}"
    kinds: list[Callable[[], tuple[str, list[str], dict[str, Any]]]] = [
        lambda: ("Expand", [taken, constant(-1, 2**40, 12)], {}),
        lambda: ("Tile", [taken, constant(choose(random, [0, -1, 2**40]), 1)], {}),
        lambda: ("Reshape", [taken, constant(*(choose(random, INTEGERS) for _ in range(3)))], {"allowzero": 1}),
        lambda: ("Slice", [taken, some(), some(), constant(choose(random, [0, -5, 7])), some()], {}),
        lambda: ("Gather", [taken, some()], {"axis": choose(random, [0, 1, -1, 5])}),
        lambda: ("Pad", [taken, constant(*(choose(random, [0, -1, 2**40, -(2**63)]) for _ in range(4)))], {}),
        lambda: ("TopK", [taken, some()], {"axis": choose(random, [0, -1, 9])}),
        lambda: ("ReduceSum", [taken, some()], {}),
        lambda: ("Concat", [taken] * 500, {"axis": choose(random, [0, 1, -7])}),
        lambda: ("Transpose", [taken], {"perm": [choose(random, [0, 1, 5, -1]) for _ in range(2)]}),
        lambda: ("Cast", [taken], {"to": choose(random, [0, 8, 9, 14, 16, 17, 22, 99, -1])}),
        lambda: ("Einsum", [taken, taken], {"equation": choose(random, ["ij,jk", "ij", "i" * 80, "...i,...j->...ij"])}),
        lambda: ("Div", [constant(-(2**63)), constant(choose(random, [0, -1]))], {}),
        lambda: ("Resize", [taken, "", constant(choose(random, [0, -1, np.nan]), 1, dtype=np.float32)], {}),
        lambda: ("DequantizeLinear", [constant(1, 2, dtype=np.int8), constant(1, 2, 3, dtype=np.float32)], {"axis": 9}),
    ]
    kind, inputs, attributes = choose(random, kinds)()
    outputs = [made, f"{made}_indices"][: 2 if kind == "TopK" else 1]
    model.graph.node.insert(position, helper.make_node(kind, inputs, outputs, name=made, **attributes))
    model.graph.node[position + 1].input[0] = made


MUTATORS: list[Callable[[Random, onnx.ModelProto], None]] = [
    values, sizes, connections, operator, attribute, inserted, inserted, inserted,
]  # fmt: skip


def mutate_graph(random: Random, model: onnx.ModelProto) -> str:
    """Change what a model computes, in place, and forget its documents, which would be refused first."""
    if keys.DOCUMENTS in properties(model):
        del model.metadata_props[list(properties(model)).index(keys.DOCUMENTS)]
    done = []
    for _ in range(int(random.integers(1, 3))):
        mutator = choose(random, MUTATORS)
        try:
            mutator(random, model)
            done.append(mutator.__name__)
        except IndexError:  # an earlier change removed what this one needs
            continue
    del model.graph.value_info[:]
    return "+".join(done)
