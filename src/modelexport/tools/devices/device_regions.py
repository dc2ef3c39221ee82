"""Nodes of a file as small models of their own, with right values at their inputs and outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.format.dtypes import LARGEST_FLOAT16
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import required_inputs
from modelexport.regions.graph_cutter import Cut, Cutter
from modelexport.regions.inferred_types import infer_types
from modelexport.regions.region import Region
from modelexport.runtime.runner import output_error
from modelexport.runtime.runner_process import largest
from modelexport.runtime.saturating_products import unsigned_copy
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import TaggedFile
from modelexport.traces.array_differences import is_comparable
from modelexport.traces.file_run import FileRun, type_of
from modelexport.traces.node_computation import NodeError

_KEPT = 2**28
"""Bytes of values that are kept although nothing asked for them, so that a file is seldom run again."""


@dataclass(frozen=True, eq=False)
class ReferenceRegion:
    """A region as a model of its own, with right values at its boundary; the whole file is a region too."""

    name: str
    nodes: tuple[ir.Node, ...]
    """The nodes of the file, in its order."""
    model: ir.Model
    folder: Path
    """Where the external data of the model is."""
    inputs: Mapping[str, Any]
    """Names of its inputs to the right arrays."""
    outputs: Mapping[str, Any]
    """Those that can be compared."""
    type: str
    """The type of the file, whose numbers are computed in float64."""

    def with_model(self, model: ir.Model) -> ReferenceRegion | None:
        """The region with a changed model, and what that computes; ``None`` if it cannot be computed exactly."""
        try:
            results = FileRun(model, in_float64_for=self.type).run(self.inputs)
        except NodeError:
            return None
        outputs = {name: results[name].astype(right.dtype) for name, right in self.outputs.items()}
        return replace(self, model=model, outputs=outputs)

    def errors_on_cpu(self) -> float:
        """The largest error of ONNX Runtime on the CPU, of one that adds integers without saturation."""
        model = unsigned_copy(self.model) or self.model
        results = run_session(open_session(model, folder=self.folder, optimized=True), self.inputs)
        return error_between(self.outputs, results)

    def cost_of_half(self) -> float:
        """The largest error if every number is rounded to float16, each operator being computed exactly."""
        run = FileRun(self.model, in_float64_for=self.type)
        inputs = {name: _as_half(array) for name, array in self.inputs.items()}
        try:
            results = run.run(
                inputs,
                lambda node, arguments, value, array: _as_half(array),
                change=lambda value, array: _as_half(array),
            )
        except NodeError:
            return 0.0
        return error_between(self.outputs, {k: results[k].astype(right.dtype) for k, right in self.outputs.items()})


def error_between(right: Mapping[str, Any], results: Mapping[str, Any]) -> float:
    """The largest error of some arrays, by name."""
    return largest(output_error(array, results[name]) for name, array in right.items())


def _comparable(outputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in outputs.items() if not array.size or is_comparable(array)}


def _as_half(array: Any) -> Any:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        return array
    with np.errstate(over="ignore"):
        return np.clip(array, -LARGEST_FLOAT16, LARGEST_FLOAT16).astype(np.float16).astype(array.dtype)


class RegionCutter:
    """Cuts regions out of one file that was run once, exactly, on some inputs.

    Args:
        tagged: The file.
        inputs: Names of its inputs to arrays.
    """

    def __init__(self, tagged: TaggedFile, inputs: Mapping[str, Any]) -> None:
        self.tagged, self.inputs = tagged, inputs
        with suppress(UsageError):  # the CPU has no kernel
            infer_types(tagged)
        self._bytes = 0
        self._cutter = Cutter(tagged)
        graph = tagged.model.graph  # the weights may have a type that only a part of the file computes in
        self._type = type_of((*graph.inputs, *graph.outputs))
        self._run = FileRun(tagged.model, in_float64_for=self._type)
        self._right: dict[ir.Value, Any] = {
            value: np.asarray(inputs[value.name or ""]) for value in tagged.model.graph.inputs if value.name in inputs
        }
        boundaries = (
            value for boundary in tagged.boundaries.values() for value in (*boundary.inputs, *boundary.outputs)
        )
        self._compute([*tagged.model.graph.outputs, *boundaries])

    def whole(self) -> ReferenceRegion:
        """The file itself."""
        model = self.tagged.model
        values = [value for value in model.graph.outputs if value in self._right]
        right = {value.name or "": self._array(value) for value in values}
        folder, taken = self.tagged.path.parent, dict(self.inputs)
        return ReferenceRegion(".", self.tagged.nodes, model, folder, taken, _comparable(right), self._type)

    def of_call(self, call: ModuleCall) -> ReferenceRegion | None:
        """A call with those inside it; ``None`` if it depends on no input, or its boundary is not known."""
        if call.address in ("", ".") or not self._cutter.has_nodes(call):
            return None
        return self._region(str(call), self.tagged.nodes_of(call), self._cutter.cut_call(call))

    def of_nodes(self, name: str, nodes: Sequence[ir.Node], calls: Collection[ModuleCall]) -> ReferenceRegion | None:
        """Some nodes of the main graph; ``None`` if they depend on no input, or cannot be cut out."""
        inside = {call for node in nodes if (owner := owner_of(node)) is not None for call in owner.calls}
        try:
            cut = self._cutter.cut(Region.of(nodes), name, inside=inside, above=calls)
        except UsageError:  # of a value without a type
            return None
        return self._region(name, nodes, cut)

    def _region(self, name: str, nodes: Iterable[ir.Node], cut: Cut) -> ReferenceRegion | None:
        self._compute([*cut.inputs, *cut.outputs])
        if not cut.inputs or not all(value in self._right for value in (*cut.inputs, *cut.outputs)):
            return None  # constants are computed when the file is loaded
        inputs = {
            value.name or "": source for value, source in zip(required_inputs(cut.model), cut.inputs, strict=True)
        }
        outputs = {value.name or "": source for value, source in zip(cut.model.graph.outputs, cut.outputs, strict=True)}
        taken, right = ({key: self._array(source) for key, source in side.items()} for side in (inputs, outputs))
        folder = self.tagged.path.parent
        return ReferenceRegion(name, tuple(nodes), cut.model, folder, taken, _comparable(right), self._type)

    def _array(self, value: ir.Value) -> Any:
        """The right array of a value, in its type."""
        array = self._right[value]
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array if value.dtype is None else array.astype(value.dtype.numpy()))

    def _compute(self, values: Iterable[ir.Value]) -> None:
        """Run the file for the values that are not known yet."""
        wanted = {value for value in values if value not in self._right}
        if not wanted:
            return

        def watch(node: ir.Node, arguments: Sequence[Any], value: ir.Value, array: Any) -> Any:
            if isinstance(array, np.ndarray) and (value in wanted or self._bytes < _KEPT):
                self._right[value] = array
                self._bytes += array.nbytes
            return array

        with suppress(NodeError):  # what follows has no right values
            self._run.run(self.inputs, watch)
