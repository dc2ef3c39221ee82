"""Find the module of a node from the names of the parameters that it uses: ``encoder.layer.0.query.weight``."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.calls import common_stack
from modelexport.core.limits import CALL_DEPTH
from modelexport.core.owners import Evidence
from modelexport.graph.nodes import all_nodes, initializers, nested_graphs, stored_tensors
from modelexport.tagged.found_calls.recorded_stacks import CallSource, Found, StackEntry

_Path = tuple[str, ...]


def read_parameter_names(model: ir.Model) -> dict[ir.Node, Found]:
    """The stacks of the nodes that use parameters with such names, directly or through nodes that only they go into.

    A node that uses parameters of several modules belongs to the nearest module that they are all in. Some exporters
    write parameters as Constant nodes; of those, arrays of floating-point numbers are parameters.
    """
    paths: dict[ir.Value, _Path] = {value: _module(value.name or "") for value in initializers(model)}
    for value, tensor in stored_tensors(model):
        if value not in paths and tensor.dtype.is_floating_point() and tensor.size > 1:
            paths[value] = _module(value.name or "")
    if len({path for path in paths.values() if path}) < 2:
        return {}
    stacks: dict[ir.Node, Found] = {}
    for node in all_nodes(model):
        taken = [value for value in node.inputs if value is not None]
        if node.op_type == "Constant":
            taken = [value for value in node.outputs if value in paths]
        used = [path for value in taken if (path := paths.get(value))]
        is_constant = all(value in paths for value in taken) and not nested_graphs(node)
        path = common_stack(used)
        if is_constant:  # such as the transpose of a weight
            paths.update(dict.fromkeys(node.outputs, path))
        if path:
            stack = tuple(StackEntry(".".join(path[:end])) for end in range(len(path) + 1))
            stacks[node] = Found(stack, Evidence.INFERRED, CallSource.PARAMETER_NAMES)
    return stacks


def _module(name: str) -> _Path:
    """The module in the name of a parameter; none if the last part is a number: exporters number constants."""
    *module, last = name.replace("@", "%40").split(".")
    return () if last.isdecimal() else tuple(module[:CALL_DEPTH])
