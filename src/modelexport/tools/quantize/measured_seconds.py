"""How many seconds methods save, for each module and for a whole file, measured in turns with the file as it is."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.timed_stages import with_progress
from modelexport.errors import UsageError
from modelexport.files.atomic_writing import scratch
from modelexport.files.onnx_models import save_model
from modelexport.graph.copies import copy_of
from modelexport.graph.unique_names import name_nodes_apart
from modelexport.runtime.devices import find_device
from modelexport.tables.profiles import ModuleProfile, profile_in_turns, time_in_turns
from modelexport.tables.turns import Turns, median_interval
from modelexport.tagged.encodings.encoded import encoded
from modelexport.tagged.file import TaggedFile
from modelexport.tools.quantize.equal_method_groups import weighted_nodes
from modelexport.tools.quantize.methods import Method, Ranges
from modelexport.tools.quantize.quantize import quantize_model
from modelexport.tools.quantize.recipes import can_quantize
from modelexport.tools.quantize.switched_model import Unit

TURNS = 20
"""More than a profile has by default: modules that take little of the time are told apart, too."""


def measured_seconds(
    tagged: TaggedFile,
    units: Sequence[Unit],
    methods: Sequence[Method],
    ranges: Ranges | None,
    inputs: Mapping[str, Any],
    device: str,
) -> dict[tuple[int, Method], float]:
    """Units and methods to the seconds of a run that the method adds, negative: those that take less than the unit as
    it is, in spite of the noise.

    All units have one method at a time, so that neighbours of one precision are measured as they run together.

    Args:
        ranges: What :func:`.quantize.calibrate` measured, for methods that need it.
        inputs: Those of the timed runs.
    """
    if find_device(device).compiles:
        raise UsageError(
            f"{device} compiles its graphs, or is behind a command, so the time of a module is not known there: give "
            "--least bytes"
        )
    saved: dict[tuple[int, Method], float] = {}
    weighted, nodes = weighted_nodes(tagged.model), {node.name or "": node for node in tagged.model.graph}
    for method in with_progress(methods):
        assignment = {name: method for unit in units for name in unit.nodes}
        with _written(tagged, quantize_model(tagged.model, assignment, ranges=ranges)) as file:
            before, after = profile_in_turns(tagged.path, file, inputs, runs=TURNS, provider=device)
        for index, unit in enumerate(units):
            if not any(can_quantize(method, nodes[name], weighted) for name in unit.nodes):
                continue  # its neighbours have the method, and what it takes itself may still change
            added = _nanoseconds(after, unit) - _nanoseconds(before, unit)
            interval = median_interval([float(difference) for difference in added])
            if interval is not None and interval[1] < 0:
                saved[index, method] = statistics.median(added) / 1e9
    return saved


def _nanoseconds(profile: ModuleProfile, unit: Unit) -> Any:
    """What the calls of a unit take in each run; a node with several owners takes the same for each of them."""
    taken = np.zeros(profile.facts.runs)
    for node in profile.table.nodes:
        if node.calls and node.runs:
            share = sum(str(call) in unit.calls for call in node.calls) / len(node.calls)
            taken += share * np.array(node.runs)
    return taken


def whole_time(tagged: TaggedFile, model: ir.Model, inputs: Mapping[str, Any], device: str) -> Turns:
    """The time of a quantized model in turns with the file that it was made from.

    If the noise allows no answer, four times as many turns, whose interval is half as wide, are the measurement.
    """
    with _written(tagged, model) as file:
        turns = time_in_turns(tagged.path, file, inputs, runs=TURNS, provider=device)
        if not turns.faster and not turns.slower:
            turns = time_in_turns(tagged.path, file, inputs, runs=4 * TURNS, provider=device)
    return turns


@contextmanager
def _written(tagged: TaggedFile, model: ir.Model) -> Iterator[Path]:
    """A file of a model that was made from a tagged file, with tags."""
    with scratch() as folder:
        model = encoded(copy_of(model), tagged.call_tags)
        name_nodes_apart(model)
        save_model(model, file := folder / "quantized.onnx")
        yield file
