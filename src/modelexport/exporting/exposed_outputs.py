"""Adds what inner calls return to the outputs of the file, named by address."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from modelexport.capture.exported_graph import Exported
from modelexport.core.calls import ROOT, ModuleCall
from modelexport.core.selectors import select_calls
from modelexport.core.tags import Tags
from modelexport.errors import UsageError
from modelexport.exporting.graph_passes import copied_value
from modelexport.graph.nodes import all_nodes


def expose(exported: Exported, selectors: Sequence[str], tags: Tags) -> Exported:
    """Give a captured graph what calls return as outputs, behind those of the model; it is changed in place.

    An output has the address of its call, and if that returns several tensors, a colon and the tensor's name:
    ``encoder.layer.0``, ``encoder.layer.0:output.1``.

    Raises:
        UsageError: A selector matches nothing, or a call has no tensor in the graph itself.
    """
    if not selectors:
        return exported
    names = {traced.call: tags.tag(traced.call) for traced in exported.calls}
    graph = exported.model.graph
    exposed = []
    for call in select_calls(selectors, exported.calls, names).calls:
        for name, value in _returned(exported, call):
            # A value is an output once, and an input or a weight never.
            is_free = value.producer() is not None and not value.is_graph_output()
            graph.outputs.append(value if is_free else copied_value(graph, value, call, f"expose_{call.address}"))
            exposed.append(name)
    return dataclasses.replace(exported, output_names=(*exported.output_names, *exposed), exposed=len(exposed))


def _returned(exported: Exported, call: ModuleCall) -> Iterator[tuple[str, ir.Value]]:
    """The tensors that a call returns: the name as an output, and the value."""
    graph = exported.model.graph
    results = (value for node in all_nodes(exported.model) for value in node.outputs)
    values = {value.name: value for value in (*graph.inputs, *graph.initializers.values(), *results)}
    ports = sorted(port for port in exported.values if port.call == call and port.side == "outputs")
    returned = [(port, values[exported.values[port]]) for port in ports if exported.values[port] in values]
    if call == ROOT or not returned or any(value.graph is not graph for _, value in returned):
        why = "returns what the file returns" if call == ROOT else "returns no tensor outside of branches and loops"
        raise UsageError(f"{call} cannot be exposed, since it {why}: leave it out with '!{call}'")
    specs = exported.calls[call].outputs
    for port, value in returned:
        name = specs[port.position].name if port.position < len(specs) else str(port.position)
        yield (call.address if len(returned) == 1 else f"{call.address}:{name}"), value
