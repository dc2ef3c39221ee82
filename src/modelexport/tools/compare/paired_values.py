"""Which value of a file is which of another one: by the ports of their calls, or by name."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.format.cut_record import CutRecord
from modelexport.graph.boundaries import find_boundaries
from modelexport.graph.nodes import may_be
from modelexport.tagged.file import TaggedFile


def ports_of(tagged: TaggedFile) -> dict[tuple[str, str, int], str]:
    """Call, side and position to the name of a value; without a sidecar, those at the boundary of the call's nodes."""
    if tagged.hierarchy is None:
        return {
            (call.address, side, index): value.name or ""
            for call, boundary in find_boundaries(tagged.model, tagged.calls).items()
            for side, values in (("inputs", boundary.inputs), ("outputs", boundary.outputs))
            for index, value in enumerate(values)
        }
    return {
        (call.address, side, index): tensor.value
        for call in tagged.hierarchy.calls
        for side, tensors in (("inputs", call.inputs), ("outputs", call.outputs))
        for index, tensor in enumerate(tensors)
        if tensor.value is not None
    }


def paired_values(first: TaggedFile, second: TaggedFile, cut: CutRecord | None) -> dict[ir.Value, ir.Value]:
    """Boundary values of the second file to their values in the first.

    Args:
        cut: The record of the second file if it was cut out of the first, perhaps out of a branch.
    """
    known, produced = (
        {value.name or "": value for node in (t.nodes if cut else t.model.graph) for value in node.outputs}
        for t in (first, second)
    )
    ports = ports_of(first)
    places = ports_of(second) if first.hierarchy is not None and second.hierarchy is not None else {}
    # A tool that fuses nodes may keep the old name for a new value; the sidecar then has the right one.
    renamed = {name for port, name in places.items() if ports.get(port, name) != name}
    pairs: dict[ir.Value, ir.Value] = {}
    for port, name in ports.items():
        same = places.get(port)
        match = same if same in produced else name if name in produced and name not in renamed else None
        if name in known and match is not None and may_be(known[name].shape, produced[match].shape):
            pairs.setdefault(produced[match], known[name])
    results = zip(second.model.graph.outputs, cut.outputs, strict=False) if cut is not None else ()
    return pairs | {value: known[each.value] for value, each in results if each.value in known}
