"""Computes booleans and narrow integers in wider integers, where ONNX Runtime's CPU provider has no kernels for them.

ONNX itself allows some operators (``Add``, ``Pow``, ``Neg``) for fewer types than PyTorch does, and the runtime has
kernels for fewer still (``Where``, ``Trilu``, ``Pad``). Such a node computes in a wider type, and its results are
converted back: integers wrap, and what is not zero is true, as in PyTorch.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from modelexport.graph.missing_types import fill_types, schema_of
from modelexport.graph.narrow_to_float32 import cast, graph_of, put_in_place_of
from modelexport.graph.nodes import all_nodes, nested_graphs

_NARROW = (
    ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.UINT8, ir.DataType.UINT16,
    ir.DataType.UINT32,
)  # fmt: skip
_WIDER = (ir.DataType.INT32, ir.DataType.INT64)
"""What a narrow type becomes: the first for which there is a kernel."""


def compute_in_wider_integers(model: ir.Model) -> None:
    """Let the nodes without kernels for their booleans or integers compute in wider ones, in place.

    What they give keeps its name and its type. Nodes for which wider types have no kernels either are left alone.
    """
    fill_types(model)
    for node in list(all_nodes(model)):
        values = (*node.inputs, *node.outputs)
        if node.domain or not any(value is not None and value.dtype in _NARROW for value in values):
            continue
        schema = schema_of(node, model.opset_imports[""])
        if schema is None or any(True for _ in nested_graphs(node)):
            continue
        types = _types(node, schema)
        for name, wider in _changes(node.op_type, schema.since_version, types).items():
            _widen(node, schema, name, wider)


def _types(node: ir.Node, schema: onnx.defs.OpSchema) -> dict[str, ir.DataType]:
    """Type parameter of an operator to its type in a node, as far as it is known."""
    typed = [*zip(node.inputs, _parameters(schema.inputs, len(node.inputs)), strict=False)]
    typed += zip(node.outputs, _parameters(schema.outputs, len(node.outputs)), strict=False)
    return {name: value.dtype for value, name in typed if value is not None and value.dtype is not None}


def _parameters(formal: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """The type parameters of the first inputs or outputs; the last formal one may stand for several."""
    return [formal[min(index, len(formal) - 1)].type_str for index in range(count)]


def _changes(op_type: str, since: int, types: Mapping[str, ir.DataType]) -> Mapping[str, ir.DataType]:
    """The type parameters that have to be wider for a kernel, and what they become; empty without such a kernel."""
    if _has_kernel(op_type, since, types):
        return {}
    for wider in _WIDER:
        narrow = {name: wider for name, dtype in types.items() if dtype in _NARROW and dtype.bitwidth < wider.bitwidth}
        for change in (*({name: wider} for name in narrow), narrow):
            if change and _has_kernel(op_type, since, {**types, **change}):
                return change
    return {}


def _has_kernel(op_type: str, since: int, types: Mapping[str, ir.DataType]) -> bool:
    """Whether there is one; also if there are none for any types, since then the operator is a function of others."""
    kernels = _kernels().get(op_type)
    return not kernels or any(
        first <= since <= last
        and all(name not in types or f"tensor({types[name].name.lower()})" in allowed for name, allowed in by_name)
        for (first, last), by_name in kernels
    )


@functools.cache
def _kernels() -> Mapping[str, list[tuple[tuple[int, int], list[tuple[str, list[str]]]]]]:
    """Standard operator to the versions and types of its kernels on the CPU, as the installed runtime lists them."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state  # an export without a check may need none

    from modelexport.runtime.devices import CPU

    kernels = defaultdict(list)
    for kernel in state.get_all_opkernel_def():
        if kernel.provider == CPU and not kernel.domain:
            kernels[kernel.op_name].append((kernel.version_range, list(kernel.type_constraints.items())))
    return kernels


def _widen(node: ir.Node, schema: onnx.defs.OpSchema, name: str, wider: ir.DataType) -> None:
    """Convert the inputs of one type parameter before a node, and its outputs of this parameter behind it."""
    for index, (value, parameter) in enumerate(
        zip(node.inputs, _parameters(schema.inputs, len(node.inputs)), strict=True)
    ):
        if value is not None and parameter == name:
            up = cast(value, wider, f"{node.name or node.outputs[0].name}.{index}", node)
            graph_of(node).insert_before(node, up)
            node.replace_input_with(index, up.outputs[0])
    for value, parameter in zip(node.outputs, _parameters(schema.outputs, len(node.outputs)), strict=True):
        if parameter == name:
            _narrow_again(node, value, wider)
        elif value.dtype is None:  # a sequence, whose elements have the type of the inputs
            _narrow_elements(value, wider)


def _narrow_elements(sequence: ir.Value, wider: ir.DataType) -> None:
    """Convert what nodes take out of a sequence of wider integers."""
    for user in list(sequence.consumers()):
        for value in user.outputs:
            if value.dtype in _NARROW:
                _narrow_again(user, value, wider)
            elif value.dtype is None:
                _narrow_elements(value, wider)


def _narrow_again(node: ir.Node, value: ir.Value, wider: ir.DataType) -> None:
    """Convert a result of a node that became wider; the converted one has its name, type and users."""
    if value.dtype is not None:
        down = cast(value, value.dtype, value.name or "", node)
        graph_of(node).insert_after(node, down)
        put_in_place_of(value, down.outputs[0], down)
        value.name, value.type = f"{value.name}.wide", ir.TensorType(wider)
