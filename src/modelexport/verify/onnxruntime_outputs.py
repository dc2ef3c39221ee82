"""The outputs of a file as users run it: ONNX Runtime, with its optimizer, in the types of the file.

They are compared with PyTorch's run in float64: the file may be off by a small multiple of what PyTorch is off by
itself in the types of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import onnxruntime

from modelexport.errors import RunError, UsageError
from modelexport.files.onnx_models import load_onnx
from modelexport.graph.narrow_to_float32 import narrow_values
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.graph.operator_kinds import SELECTS_ELEMENTS
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.runtime.sessions import NO_KERNEL, open_session, run_session
from modelexport.tagged.file import TaggedFile
from modelexport.tagged.strip_and_inline import runnable
from modelexport.traces.array_differences import Difference, compare_arrays, is_floating, relative_error
from modelexport.traces.file_run import FileRun
from modelexport.traces.outputs_of_two_files import narrowest_type
from modelexport.traces.runtime_causes import cause_in_runtime
from modelexport.traces.tolerances import ALLOWED, ONE_STEP, ROUNDED_TO_STEPS, TIMES_OWN


@dataclass
class AsRun:
    """The comparison of the outputs of ONNX Runtime with PyTorch's."""

    outputs: list[Difference]
    notes: list[str] = field(default_factory=list)
    cause: str = ""
    """The part of the runtime that makes outputs wrong although the file is right, if it was looked for."""
    cause_of: Callable[[Collection[str]], str] = lambda names: ""
    """Finds the part of the runtime that makes the outputs of these names wrong; empty if there is none."""


def compare_as_run(
    tagged: TaggedFile,
    inputs: Mapping[str, Any],
    own_results: Sequence[Any],
    exact: Sequence[Any],
    *,
    provider: str,
    exposed: Collection[str] = (),
    ran: Mapping[str, Any] | None = None,
) -> AsRun:
    """Run a file and compare its outputs.

    Args:
        own_results: What PyTorch returns in the types of the model.
        exact: The same in float64.
        exposed: The outputs that the model does not return.
        ran: The outputs of the file, if it was run before.
    """
    note, steps, narrowest = "", output_steps(tagged.model), narrowest_type(tagged.model)
    if ran is None:
        with runnable(tagged.path, tagged.encoding) as path:
            try:
                session, note = _open(path, provider)
            except RunError as error:
                if NO_KERNEL not in str(error):
                    raise
                ran = FileRun(load_onnx(path), in_float64_for=None).run(inputs)
                note = f"this ONNX Runtime does not run the file; computed as the standard says: {error}"
            else:
                ran = run_session(session, inputs)

    def compare(actual: Mapping[str, Any]) -> list[Difference]:
        differences = []
        actual = {name: array for name, array in actual.items() if name not in exposed}
        for place, (name, array) in enumerate(actual.items()):
            if place >= len(own_results):
                differences.append(Difference(name=name, status="differ", reason="PyTorch has no such output"))
                continue
            least = max(ALLOWED[narrowest], ROUNDED_TO_STEPS if steps else 0.0)
            found = _compare(name, own_results[place], exact[place], array, least)
            differences.append(_within_step(found, own_results[place], array, steps.get(name)))
        missing = [i for i in range(len(actual), len(own_results)) if own_results[i].size]
        differences += [
            Difference(name=f"output {i}", status="differ", reason="the file has no such output") for i in missing
        ]
        return differences

    def cause_of(names: Collection[str]) -> str:
        def agrees(again: Mapping[str, Any]) -> bool:
            return bool(again) and all(each.status != "differ" for each in compare(again) if each.name in names)

        with runnable(tagged.path, tagged.encoding) as path:
            return cause_in_runtime(path, inputs, agrees, provider)

    outputs = compare(ran)
    notes = [*filter(None, (note, nan_note(outputs, own_results))), *_rounding_notes(outputs, steps)]
    return AsRun(outputs, notes, cause_of=cause_of)


def nan_note(outputs: Sequence[Difference], own_results: Sequence[Any]) -> str:
    """The first output that does not differ, but has NaN in PyTorch and in the file; empty if there is none."""
    for output, array in zip(outputs, own_results, strict=False):
        count = int(np.count_nonzero(np.isnan(array.astype(np.float64)))) if is_floating(array) else 0
        if count and output.status != "differ":
            return (
                f"{count:,} of {array.size:,} elements of {output.name} are NaN in PyTorch and in the file; "
                "`modelexport values` names the node that makes the first"
            )
    return ""


def output_steps(model: ir.Model) -> dict[str, float | None]:
    """The outputs of a file that rounds activations or weights to integers, each to its step if it is itself such an
    integer times a step; empty for other files.
    """
    plans = map(parameter_plan, initializers(model))
    rounds = any(node.op_type in ("QuantizeLinear", "Round") and not node.domain for node in all_nodes(model))
    if not rounds and not any(plan is not None and plan.quantizes for plan in plans):
        return {}
    follows = SELECTS_ELEMENTS - {"Concat"}  # whose inputs may have unlike steps, or none
    steps: dict[str, float | None] = {}
    for value in model.graph.outputs:
        node = value.producer()
        while node is not None and node.op_type in follows and node.inputs and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        scale = node.inputs[1] if node is not None and node.op_type == "DequantizeLinear" else None
        tensor = ir.convenience.get_const_tensor(scale) if scale is not None else None
        steps[value.name or ""] = float(tensor.numpy().max()) if tensor is not None else None
    return steps


def _within_step(found: Difference, right: Any, actual: Any, step: float | None) -> Difference:
    """Marks a difference as agreement if no element is off by more than one step, between which rounding decides."""
    if found.status != "differ" or step is None or right.shape != actual.shape:
        return found
    steps = np.abs(right.astype(np.float64) - actual) / step
    return msgspec.structs.replace(found, status="agree", reason="") if (steps < ONE_STEP).all() else found


def _rounding_notes(outputs: Sequence[Difference], steps: Mapping[str, float | None]) -> list[str]:
    """Notes on outputs that agree except for the rounding of activations to integers."""
    notes = []
    for output in outputs:
        step = steps.get(output.name)
        if output.status == "agree" and output.absolute and step is not None:
            notes.append(
                f"{output.name} is within one step of {step:.3g} in ONNX Runtime, off by {output.absolute / step:.2g} "
                "steps"
            )
        elif output.status == "agree" and output.name in steps and (output.relative or 0) > ALLOWED["float32"]:
            notes.append(
                f"{output.name} is off by {output.relative:.1e} of its size in ONNX Runtime: the last bit of a number "
                "decides between two steps of an activation"
            )
    return notes


def _open(path: Path, provider: str) -> tuple[onnxruntime.InferenceSession, str]:
    """A session with the runtime's optimizer, or without it if it fails on the file, and a note on that.

    Raises:
        UsageError: ONNX Runtime does not load the file.
    """
    try:
        return open_session(path, provider=provider, optimized=True), ""
    except UsageError as error:
        reason = str(error)
    try:
        session = open_session(path, provider=provider)
        return session, f"ONNX Runtime loads the file only with its optimizer off, and runs it so here: {reason}"
    except UsageError:
        model = load_onnx(path)
        if not (narrow := narrow_values(model)):
            raise
    types = ", ".join(sorted({dtype.name.lower() for dtype in narrow.values()}))
    session = open_session(model, folder=path.parent, provider=provider)
    return (
        session,
        f"this ONNX Runtime does not run the file; computed in float32, each value rounded to {types}: {reason}",
    )


def _compare(name: str, own_array: Any, exact: Any, actual: Any, least: float) -> Difference:
    """Compare one output.

    Args:
        least: The error that is allowed in any case.
    """
    if not is_floating(own_array) or own_array.shape != exact.shape:
        return compare_arrays(name, own_array, actual)
    allowed, own_error = max(ALLOWED.get(str(own_array.dtype), 0.0), least), relative_error(exact, own_array)
    if np.isinf(own_error):  # a NaN that is of its types alone is right, as is the exact number
        own_error, exact = 0.0, exact if relative_error(exact, actual) <= allowed else own_array
    found = compare_arrays(name, own_array, actual, allowed=max(allowed, TIMES_OWN * own_error), exact=exact)
    if found.status != "agree" or TIMES_OWN * own_error < 1 or (found.relative or 0.0) <= allowed:
        return found
    reason = f"in its own types PyTorch is off by {own_error:.1e} of its size itself"  # which zeros may be as well
    return msgspec.structs.replace(found, status="not compared", reason=reason)
