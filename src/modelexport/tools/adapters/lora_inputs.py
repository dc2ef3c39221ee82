"""Low-rank pairs as optional inputs of a graph, added to what an operator computes with a weight.

``y = MatMul(x, w)`` becomes ``y = MatMul(x, w) + MatMul(MatMul(x, a), b)``, where ``a`` and ``b`` are inputs with a
default: a pair of rank 1 that is zero. None of rank 0: ONNX Runtime's Conv leaves its output as it finds it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from modelexport.format import keys
from modelexport.format.parameter_plan import AdapterInput, AdapterPart, ParameterPlan
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.parameter_plans import record_adapter_input
from modelexport.graph.properties import put_texts
from modelexport.graph.weighted_operators import result_axes
from modelexport.tools.adapters.peft_adapters import LowRank
from modelexport.weights.entries_from_file import transposition

Kind = Literal["linear", "table", "convolution"]


@dataclass(frozen=True)
class WeightUse:
    """A node that computes with a weight."""

    node: ir.Node
    kind: Kind


def low_rank_uses(value: ir.Value, plan: ParameterPlan, pairs: Sequence[LowRank]) -> list[WeightUse] | None:
    """The nodes that compute with a weight, if a pair can be added to what each of them computes.

    With DoRA it cannot: what it multiplies depends on the weight.
    """
    dora = any("magnitude" in pair.shapes for pair in pairs)
    if dora or len(plan.keys) != 1 or value.is_graph_output() or value.shape is None:
        return None
    if not plan.recorded:
        sizes = [pairs[0].shapes["b"][0], pairs[0].shapes["a"][1]]
        quantized = [
            (node, index)
            for node, index in value.uses()
            if node.op_type == "MatMulNBits"
            and not pairs[0].is_table
            and [node.attributes.get_int(name, 0) for name in ("N", "K")] == sizes
        ]
        whole = len(quantized) == len(value.uses())
        return [WeightUse(node, "linear") for node, index in quantized if index == 1] if whole else None
    axes = transposition(plan.steps)
    if plan.steps and axes != [1, 0]:
        return None
    sizes = [int(size) for size in value.shape.numpy()]
    entry = tuple(sizes[::-1] if axes else sizes)
    places = list(_places(value, pairs[0], flipped=axes is not None, entry=entry))
    return None if None in places or not places else [place for place in places if place is not None]


def gives_last(value: ir.Value, *, flipped: bool) -> bool | None:
    """Whether a weight of two axes has those of its results in the last one; ``None`` if its uses do not tell.

    Args:
        flipped: The value is the weight transposed.
    """
    seen: set[bool | None] = set()
    for node, index in value.uses():
        if node.op_type == "Transpose" and not node.domain:
            seen.add(gives_last(node.outputs[0], flipped=not flipped))
        elif node.op_type in ("MatMul", "Gemm") and not node.domain and index == 1:
            seen.add(flipped != (result_axes(node) == (-1,)))
        else:
            seen.add(None)
    return seen.pop() if len(seen) == 1 else None


def _places(value: ir.Value, pair: LowRank, *, flipped: bool, entry: tuple[int, ...]) -> Iterator[WeightUse | None]:
    for node, index in value.uses():
        if node.domain:
            yield None
        elif node.op_type == "Transpose" and len(entry) == 2:
            yield from _places(node.outputs[0], pair, flipped=not flipped, entry=entry)
        elif node.op_type == "Conv" and index == 1 and len(entry) > 2:
            yield WeightUse(node, "convolution")
        elif node.op_type in ("MatMul", "Gemm") and index == 1 and len(entry) == 2 and not pair.is_table:
            attributes = node.attributes
            scaled = any(attributes.get_float(factor, 1.0) != 1.0 for factor in ("alpha", "beta"))
            fits = pair.is_transposed(entry) != (flipped == (result_axes(node) == (-1,)))
            yield WeightUse(node, "linear") if fits and not scaled and not attributes.get_int("transA", 0) else None
        elif node.op_type == "Gather" and index == 0 and len(entry) == 2 and pair.is_table:
            fits = pair.is_transposed(entry) != flipped and not node.attributes.get_int("axis", 0)
            yield WeightUse(node, "table") if fits else None
        else:
            yield None
    if value.is_graph_output():
        yield None


@dataclass
class PairInputs:
    """Adds pairs to one model."""

    model: ir.Model
    free: Callable[[str], str]
    """Makes a name unique: the given name, or a variant that no value or node has yet."""
    moved: dict[ir.Value, ir.Value] = field(default_factory=dict)
    """What nodes computed to what takes its place."""
    added: int = 0
    """Nodes that were added."""
    _inputs: dict[str, tuple[ir.Value, ...]] = field(default_factory=dict)

    def add(self, key: str, weight: ir.Value, pair: LowRank, places: Sequence[WeightUse]) -> None:
        """Let nodes add a pair to what they compute.

        Args:
            key: The entry that the weight is.
        """
        if key not in self._inputs:
            first = places[0].node
            typed = (first.inputs[2] if first.domain else None) or weight  # scales have the type of the product
            self._inputs[key] = tuple(self._make(key, typed, pair, places[0].kind))
        for place in places:
            self._branch(place, *self._inputs[key])

    def _make(self, key: str, weight: ir.Value, pair: LowRank, kind: Kind) -> Iterator[ir.Value]:
        module = pair.module
        rank = f"{module}.rank"
        a, b = pair.shapes["a"], pair.shapes["b"]
        shapes: dict[AdapterPart, list[int | str]]
        if kind == "convolution":
            group = pair.groups
            shapes = {"a": [rank, *a[1:]], "b": [b[0], rank if group == 1 else f"{rank}/{group}", *b[2:]]}
        else:
            shapes = {"a": [a[1], rank], "b": [rank, b[0]]}
        names: dict[AdapterPart, str] = {"a": "lora_A.weight", "b": "lora_B.weight"}
        assert weight.dtype is not None
        for part, shape in shapes.items():
            smallest = {rank: pair.groups, f"{rank}/{pair.groups}": 1}
            sizes = [size if isinstance(size, int) else smallest[size] for size in shape]
            name = self.free(f"{module}.{names[part]}".removeprefix("."))
            value = ir.Value(
                name=name,
                type=ir.TensorType(weight.dtype),
                shape=ir.Shape(shape),
                const_value=ir.tensor(np.zeros(sizes, weight.dtype.numpy()), dtype=weight.dtype, name=name),
            )
            record_adapter_input(value, AdapterInput(key, part, kind))
            self.model.graph.inputs.append(value)
            self.model.graph.initializers.add(value)
            yield value

    def _branch(self, place: WeightUse, a: ir.Value, b: ir.Value) -> None:
        node, old = place.node, place.node.outputs[0]
        assert a.shape is not None
        assert node.graph is not None
        nodes: list[ir.Node] = []

        def step(op_type: str, name: str, inputs: Sequence[ir.Value | None], shape: ir.Shape | None) -> ir.Value:
            output = ir.Value(name=self.free(f"{old.name}_{name}"), type=old.type, shape=shape)
            nodes.append(ir.Node("", op_type, inputs, outputs=[output], name=self.free(f"{node.name}/{name}")))
            return output

        rank = a.shape[0] if place.kind == "convolution" else a.shape[1]
        if place.kind == "convolution":
            inner = step("Conv", "lora_A", [node.inputs[0], a], _with_rank(old.shape, 1, rank))
            nodes[-1].attributes.update({n: attr for n, attr in node.attributes.items() if n != "group"})
            delta = step("Conv", "lora_B", [inner, b], old.shape)
            if (group := node.attributes.get_int("group", 1)) > 1:
                nodes[-1].attributes["group"] = ir.AttrInt64("group", group)
        else:
            first = "Gather" if place.kind == "table" else "MatMul"
            inputs = [a, node.inputs[1]] if place.kind == "table" else [node.inputs[0], a]
            inner = step(first, "lora_A", inputs, _with_rank(old.shape, -1, rank))
            delta = step("MatMul", "lora_B", [inner, b], old.shape)
        new = step("Add", "lora", [old, delta], old.shape)
        for added in nodes:
            put_texts(added, {keys.ADAPTER: "lora"})
            set_owner(added, owner_of(node))
        self._take_over(old, new, nodes)
        node.graph.insert_after(node, nodes)
        self.added += len(nodes)

    def _take_over(self, old: ir.Value, new: ir.Value, nodes: Sequence[ir.Node]) -> None:
        """Let a new value have the name and the users of an old one."""
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        for node in nodes:
            for index, value in enumerate(node.inputs):
                if value is new:
                    node.replace_input_with(index, old)
        name = old.name or ""
        old.name = self.free(f"{name}_base")
        new.name = name
        self.moved[old] = new


def _with_rank(shape: ir.Shape | None, axis: int, rank: int | ir.SymbolicDim) -> ir.Shape | None:
    if shape is None or not len(shape):
        return None
    sizes = list(shape)
    sizes[axis] = rank
    return ir.Shape(sizes)
