"""Compares some calls of a file that is too large to run whole, each computed alone from PyTorch's tensors."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.core.one_at_a_time import exclusive
from modelexport.core.timed_stages import with_progress
from modelexport.errors import FileFormatError
from modelexport.files.path_or_model import Source
from modelexport.format.keys import SIDECAR_SUFFIX
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import required_inputs
from modelexport.pytorch.inputs.named_inputs import under_names
from modelexport.pytorch.nested_tensors import Inputs
from modelexport.pytorch.runs.float64_kernels import DOUBLE_KERNELS
from modelexport.pytorch.runs.model_trace import own_type, trace_model
from modelexport.runtime.devices import CPU
from modelexport.tagged.file import TaggedFile
from modelexport.traces.array_differences import Difference, relative_error, worst
from modelexport.traces.file_run import FileRun
from modelexport.traces.tolerances import CALL_ALONE
from modelexport.traces.trace import SeenTensor, Trace
from modelexport.verify.model_and_file import open_for
from modelexport.verify.parameters_in_pytorch import compare_with_model
from modelexport.verify.verify_report import CallVerdict, VerifyReport
from modelexport.weights.bytes_of_entries import Weights


@exclusive
def verify_sample(
    model: nn.Module,
    inputs: Inputs,
    path: Source | TaggedFile,
    *,
    count: int = 0,
    modules: Sequence[str] = (),
    provider: str = CPU,
    seed: int = 0,
    weights: Weights | None = None,
) -> VerifyReport:
    """Compare only some calls, each computed alone: for a file that is too large to run whole.

    PyTorch first runs all modules from the inputs, for the tensors that enter and leave the calls. With ``weights`` it
    holds those of one module at a time, so that memory does not grow with the model. The sidecar maps values to
    tensors; a wrong entry shows as a difference.

    Args:
        count: The number of calls to draw from those that own nodes.
        modules: Selectors of further calls to compare, with those inside them.
        seed: The seed of the draw.
        weights: As in :func:`modelexport.verify`.

    Returns:
        A report without outputs, with the compared calls and the parameters that they use.
    """
    tagged = open_for(model, path)
    calls = set(tagged.select(*modules).inside) if modules else set()
    calls.update(_drawn(tagged, count, seed))
    verdicts: list[CallVerdict] = []
    used: set[str] = set()
    if calls:
        never = {name for name, _ in model.named_modules()} - {traced.call.path for traced in tagged.calls}
        reference = trace_model(model, inputs, weights=weights, never_called=never, operations=False)
        names = [value.name or "" for value in required_inputs(tagged.model)]
        run = FileRun(
            tagged.model, in_float64_for=str(own_type(model, inputs)).removeprefix("torch."), kernels=DOUBLE_KERNELS
        )
        verdicts, used = _verdicts(tagged, run, under_names(inputs, names), reference, calls)
    return VerifyReport(
        outputs=[],
        calls=verdicts,
        provider=provider,
        parameters=compare_with_model(model, tagged.model, weights, used),
        notes=[] if calls else ["no call was chosen: give a number above 0 with --weights-sample, or --module"],
    )


def _drawn(tagged: TaggedFile, count: int, seed: int) -> list[ModuleCall]:
    """Some of the calls that own nodes, in the order in which they began; all if there are no more than ``count``."""
    owning = {call for node in tagged.nodes if (owner := owner_of(node)) is not None for call in owner.calls}
    calls = [traced.call for traced in tagged.calls if traced.call in owning]
    chosen = set(random.Random(seed).sample(range(len(calls)), min(count, len(calls))))
    return [call for index, call in enumerate(calls) if index in chosen]


def _verdicts(
    tagged: TaggedFile, run: FileRun, inputs: Mapping[str, Any], reference: Trace, calls: Collection[ModuleCall]
) -> tuple[list[CallVerdict], set[str]]:
    """The verdicts, and the names of the initializers that the calls use."""
    claimed = _claimed(tagged, reference)
    known = {value: tensor.content.array.reshape(tensor.shape) for value, tensor in claimed.items()}
    known |= {value: inputs[value.name or ""] for value in required_inputs(tagged.model)}
    verdicts, used = [], set[str]()
    for call in with_progress([traced.call for traced in tagged.calls if traced.call in calls]):
        nodes = list(tagged.nodes_of(call))
        used.update(v.name or "" for node in nodes for v in node.inputs if v is not None and v.is_initializer())
        wanted = [value for value in tagged.boundaries[call].outputs if value in claimed]
        differences: list[Difference] = []
        for value, array in zip(wanted, run.values(wanted, known), strict=True):
            tensor = claimed[value]
            error = relative_error(known[value], array)
            status: Any = "agree" if error <= CALL_ALONE else "differ"
            reason = "" if status == "agree" else f"{value.name} is off by {error:.1e} of its size"
            facts: dict[str, Any] = {"name": tensor.place.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            differences.append(Difference(**facts, status=status, reason=reason, relative=error, allowed=CALL_ALONE))
        largest = worst(differences)
        unknown = "no tensor that it returns is a known value of the file"
        verdicts.append(
            CallVerdict(
                address=call.address,
                tag=tagged.tags[call],
                status=largest.status if largest else "not compared" if nodes else "no nodes",
                reason=largest.reason if largest else unknown if nodes else "",
                nodes=sum((owner := owner_of(node)) is not None and owner.call == call for node in nodes),
                per_module=largest,
            )
        )
    return verdicts, used


def _claimed(tagged: TaggedFile, reference: Trace) -> dict[ir.Value, SeenTensor]:
    """The values of the main graph that the sidecar maps to tensors of a run."""
    if tagged.hierarchy is None:
        sidecar = tagged.path.with_suffix(SIDECAR_SUFFIX)
        raise FileFormatError(f"{sidecar} is missing: it has the values of {tagged.path} that modules get and return")
    by_name = {value.name: value for node in tagged.model.graph for value in node.outputs}
    seen = {(t.place.call.address, str(t.place.side), t.place.name): t for t in reference.tensors}
    claimed = {}
    for call in tagged.hierarchy.calls:
        for side, tensors in (("inputs", call.inputs), ("outputs", call.outputs)):
            for tensor in tensors:
                its = seen.get((call.address, side, tensor.name))
                if its and tensor.value in by_name and (its.dtype, len(its.shape)) == (tensor.dtype, len(tensor.shape)):
                    claimed[by_name[tensor.value]] = its
    return claimed
