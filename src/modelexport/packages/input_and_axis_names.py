"""The names that people expect of inputs, outputs and axes in the graphs of a package."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from modelexport.capture.exported_graph import Exported
from modelexport.exporting.requested_names import RequestedNames
from modelexport.graph.size_symbols import SYMBOL
from modelexport.packages.generation_loop import BATCH, SEQUENCE


def name_axes_of_part(exported: Exported, *, axes: Mapping[tuple[str, int], str]) -> Exported:
    """Name the inputs, outputs and given axes of a graph that generates, in place."""
    inputs, outputs = plain_names(exported)
    known = {place: size for place, size in axes.items() if place[0] in inputs.values()}
    return RequestedNames(inputs=inputs, outputs=outputs, axes=known)(exported)


def name_axes_by_input(exported: Exported) -> Exported:
    """Name the axes of a graph of a pipeline by what they usually are, in place.

    An axis that always has the size of an earlier one has its name. A second size of one name is named after its input:
    ``encoder_hidden_states_sequence``.
    """
    inputs, outputs = plain_names(exported)
    names: dict[str, str] = {}
    axes: dict[tuple[str, int], str] = {}
    for value in exported.model.graph.inputs:
        shape, name = value.shape or (), inputs[value.name or ""]
        for axis, size in enumerate(shape):
            if not isinstance(size, ir.SymbolicDim) or size.value is None or not SYMBOL.fullmatch(size.value):
                continue
            # Of tokens, of their states, of images and of videos.
            images = (BATCH, "channels", *("frames", "depth")[: len(shape) - 4], "height", "width")
            usual = (images if len(shape) > 3 else (BATCH, SEQUENCE, "width"))[axis]
            if size.value not in names:
                names[size.value] = usual if usual not in names.values() else f"{name}_{usual}"
            axes[name, axis] = names[size.value]
    return RequestedNames(inputs=inputs, outputs=outputs, axes=axes)(exported)


def plain_names(exported: Exported) -> tuple[dict[str, str], dict[str, str]]:
    """The names of inputs and outputs to those without what an exporter puts before the names of a mapping."""
    inputs = [value.name or "" for value in exported.model.graph.inputs]
    return (
        {name: name.removeprefix("input.") for name in inputs},
        {name: name.removeprefix("output.") for name in exported.output_names},
    )
