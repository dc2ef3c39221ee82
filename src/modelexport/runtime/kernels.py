"""Models computed with the runtime's float64 kernels, to tell errors of its float32 kernels from faults of a file.

A float32 kernel may be far less exact than the rounding of its type: that of ``Sigmoid`` is exact to 6e-8, and 2e-9 for
it is nothing. The same node, from the same float32 numbers, is computed in float64, and its result rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.graph.doubles import Doubled, in_doubles
from modelexport.runtime.sessions import input_names, open_session, run_session


def with_double_kernels(
    model: ir.Model, provider: str, only: Collection[str] | None = None
) -> tuple[ir.Model, list[str]]:
    """A copy of a model whose nodes compute in float64 where the runtime can, and the operators of these.

    All values keep their names and types. A model with functions stays as it is.

    Args:
        only: The operators to compute so.
    """
    if model.functions:
        return model, []
    has_kernel = _has_kernel(model, provider)
    return in_doubles(model, lambda one: (only is None or one.node.op_type in only) and has_kernel(one))


def run_in_double(
    model: ir.Model, folder: Path, feeds: Mapping[str, Any], provider: str
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The outputs of a model computed with all float64 kernels that the runtime has, and the operators of these.

    With those of one operator after the other where they do not run together: some say only then that they are none.
    """
    every, operators = with_double_kernels(model, provider)
    for only in [operators, *([one] for one in operators)] if operators else ():
        precise = every if only is operators else with_double_kernels(model, provider, only)[0]
        try:
            session = open_session(precise, folder=folder, provider=provider)
            found = run_session(session, {name: feeds[name] for name in input_names(session)})
        except UsageError:
            continue
        yield found, only
        if only is operators:
            return


def _has_kernel(model: ir.Model, provider: str) -> Callable[[Doubled], bool]:
    known: dict[object, bool] = {}

    def has_kernel(doubled: Doubled) -> bool:
        node = doubled.node
        types = tuple(None if value is None else value.dtype for value in node.inputs)
        key = (node.domain, node.op_type, types, tuple(doubled.inputs), tuple(doubled.outputs))
        if key not in known:
            known[key] = _loads(doubled, model, provider)
        return known[key]

    return has_kernel


def _loads(doubled: Doubled, model: ir.Model, provider: str) -> bool:
    """Whether the runtime loads a model of this node alone."""
    node = doubled.node
    given = [
        None
        if value is None
        else ir.Value(
            name=f"x{place}", type=ir.TensorType(ir.DataType.DOUBLE) if place in doubled.inputs else value.type
        )
        for place, value in enumerate(node.inputs)
    ]
    alone = ir.Node(
        node.domain, node.op_type, given, list(node.attributes.values()), num_outputs=len(node.outputs), name="alone"
    )
    for place, value in enumerate(alone.outputs):
        value.name = f"y{place}" if node.outputs[place].name else ""
    graph = ir.Graph(
        [value for value in given if value is not None],
        [value for value in alone.outputs if value.name],
        nodes=[alone],
        opset_imports=dict(model.opset_imports),
        name="alone",
    )
    for place, value in enumerate(alone.outputs):
        value.type = ir.TensorType(ir.DataType.DOUBLE) if place in doubled.outputs else node.outputs[place].type
    try:
        open_session(ir.Model(graph, ir_version=model.ir_version), provider=provider)
    except UsageError:
        return False
    return True
