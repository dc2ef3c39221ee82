"""One run of PyTorch and of the file on the same inputs, compared call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
from msgspec.structs import replace as changed

from modelexport.core.calls import ROOT
from modelexport.graph.kept_outputs import requested_outputs
from modelexport.graph.nodes import draws, nodes_behind, with_nested
from modelexport.tagged.file import TaggedFile
from modelexport.traces.array_differences import EMPTY, Difference
from modelexport.traces.file_run import FileRun
from modelexport.traces.file_trace import FileTrace, exact_constants, measure_noise, trace_file
from modelexport.traces.node_computation import NodeError
from modelexport.traces.outputs_of_two_files import RANDOM
from modelexport.traces.trace import SeenTensor, Trace
from modelexport.verify.cut_out_calls import results_of_cut
from modelexport.verify.matched_values import Matches
from modelexport.verify.onnxruntime_outputs import AsRun
from modelexport.verify.owner_contradictions import Contradiction, check_owners
from modelexport.verify.verify_report import OwnerCounts
from modelexport.verify.wrong_calls import (
    Located,
    Pairs,
    find_pairs,
    find_wrong_values,
    known_tensors,
    locate,
    replacements,
)


@dataclass(eq=False)
class Compared:
    """The runs of the file beside the run of PyTorch."""

    end_to_end: Matches
    per_module: Matches
    """The run in which wrong values were replaced; the same one if there are none."""
    located: Located
    owners: OwnerCounts
    contradictions: list[Contradiction] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.located.pairs or self.contradictions or self.failed)

    @property
    def failed(self) -> NodeError | None:
        """The node of the file that fails; not one that only the evaluator cannot compute."""
        failed = self.end_to_end.trace.failed
        return failed if failed is not None and not failed.of_evaluator else None

    @property
    def unknown(self) -> NodeError | None:
        """The node that the evaluator cannot compute: what follows it was not compared."""
        return self.end_to_end.trace.failed if self.failed is None else None


def compare_runs(
    tagged: TaggedFile,
    run: FileRun,
    inputs: Mapping[str, Any],
    reference: Trace,
    weights: Mapping[ir.Value, Any],
    own_trace: Callable[[], Trace] | None = None,
) -> Compared:
    """Run a file and compare it with a run of PyTorch.

    Args:
        inputs: Names of the file's inputs to arrays.
        reference: The run of PyTorch.
        weights: Initializers to other arrays for them.
        own_trace: Runs PyTorch in the types of the model. Called if the runs differ, since an exporter may have
            computed constants of the file in these types.
    """
    exact = exact_constants(run, reference, weights)
    compared = _compare(tagged, run, inputs, reference, {**weights, **exact})
    if compared.agrees or own_trace is None:
        return compared
    more = exact_constants(run, reference, weights, own_trace())
    return _compare(tagged, run, inputs, reference, {**weights, **more}) if more.keys() != exact.keys() else compared


def _compare(
    tagged: TaggedFile, run: FileRun, inputs: Mapping[str, Any], reference: Trace, constants: Mapping[ir.Value, Any]
) -> Compared:
    def traced(pairs: Pairs) -> FileTrace:
        return trace_file(run, inputs, reference, constants=constants, replace=replacements(pairs))

    def measured(at: FileTrace, pairs: Pairs) -> tuple[dict[ir.Value, float], dict[ir.Value, float]]:
        return measure_noise(run, inputs, reference, at, constants=constants, replace=replacements(pairs))

    def compared(matches: Matches) -> Compared:
        pairs, again = find_wrong_values(
            matches, known, lambda pairs: Matches(tagged, reference, traced(pairs), matches.noise, matches.rounding)
        )
        return judged(matches, again, pairs)

    def judged(matches: Matches, again: Matches, pairs: Pairs) -> Compared:
        located = locate(again, pairs)
        owners, contradictions = check_owners(again)
        # What follows from a wrong node tells nothing of owners.
        return Compared(matches, again, located, owners, [] if located.blamed else contradictions)

    trace = traced({})
    of_evaluator = trace.failed is not None and trace.failed.of_evaluator
    known = [pair for pair in outputs_of(tagged, reference) if not of_evaluator or pair[0] in trace.prints]
    matches = Matches(tagged, reference, trace)
    if trace.failed is not None or not find_pairs(matches, known):
        strict = compared(matches)
        if strict.agrees or trace.failed is not None:
            return strict
    # The constants that the file has rounded may be why.
    noise = measured(trace, {})
    loose = compared(Matches(tagged, reference, trace, *noise))
    if not loose.located.blamed:
        return loose
    # Errors and noise grow from layer to layer: each known value is computed once more from PyTorch's own tensors.
    pairs = loose.located.pairs
    every = {**known_tensors(loose.per_module), **pairs}
    alone = traced(every)
    again = Matches(tagged, reference, alone, *measured(alone, every))
    off = {
        value: tensor for value, tensor in every.items() if alone.replaced.get(value, 0.0) > again.allowed_error(value)
    }
    by_layer = judged(loose.end_to_end, again, {**off, **pairs})
    if by_layer.located.blamed:
        return by_layer
    # Behind a wrong value the noise may be another one than behind a right one.
    behind = measured(loose.per_module.trace, pairs)
    larger = (
        {value: max(first.get(value, 0.0), second.get(value, 0.0)) for value in {**first, **second}}
        for first, second in zip(noise, behind, strict=True)
    )
    return compared(Matches(tagged, reference, trace, *larger))


def outputs_of(tagged: TaggedFile, reference: Trace) -> list[tuple[ir.Value, SeenTensor]]:
    """The outputs of a file, each with what the model, or the call that the file is, returned in its place."""
    if tagged.cut is not None:
        return list(results_of_cut(tagged, tagged.cut, reference).items())
    returned = requested_outputs(tagged.model, reference.side(ROOT, "outputs"))
    returned = [
        tensor
        for tensor in returned
        if tensor.content.fingerprint.size or len(returned) == len(tagged.model.graph.outputs)
    ]
    return list(zip(tagged.model.graph.outputs, returned, strict=False))


def explained(run: AsRun, compared: Compared, *, other_weights: bool = False) -> AsRun:
    """The outputs in ONNX Runtime, with the reasons of those that differ although the file agrees in float64.

    Such an output depends on random numbers or on a choice among equal scores, or its rounding grows, unless a part of
    ONNX Runtime makes it wrong. What depends on random numbers or choices does not hide the cause of another output.

    Args:
        other_weights: Whether the file has other weights than the model, which the run in float64 replaced.
    """
    matches = compared.end_to_end
    ends = {value.name or "": value for value in matches.tagged.model.graph.outputs}
    behind = {name: [each for node in nodes_behind([end]) for each in with_nested(node)] for name, end in ends.items()}
    random = {name for name, nodes in behind.items() if any(map(draws, nodes))}
    tied = {name for name, nodes in behind.items() if not matches.trace.ties.keys().isdisjoint(nodes)}
    wrong = {output.name for output in run.outputs if output.status == "differ"} - random
    causes = dict[str, str]()
    for names in filter(None, (wrong - tied, wrong & tied)):
        causes |= dict.fromkeys(names, run.cause_of(names))

    def with_reason(output: Difference) -> Difference:
        if output.status == "agree" or output.absolute is None or output.absolute == float("inf"):
            return output
        if output.name in random:
            return changed(output, status="not compared", reason=RANDOM)
        if output.status != "differ" or causes[output.name]:
            return output
        if output.name in tied:
            return changed(output, status="tie", reason="equal scores were chosen in another order")
        if not matches.reference.is_float64:
            return output
        reason = f"in float64 it agrees; in the types of the file rounding grows: {output.reason}"
        return changed(output, status="not compared", reason=reason)

    is_right = not compared.located.pairs and matches.trace.failed is None and not other_weights
    outputs = [with_reason(output) if is_right else output for output in run.outputs]
    return replace(run, outputs=outputs, cause=next(filter(None, causes.values()), ""))


def output_differences(compared: Compared) -> list[Difference]:
    """The outputs in float64."""
    matches, differences = compared.end_to_end, []
    for value, tensor in outputs_of(matches.tagged, matches.reference):
        facts: dict[str, Any] = {"name": value.name or "", "dtype": tensor.dtype, "shape": list(tensor.shape)}
        if value in compared.located.pairs:
            error = compared.located.errors[value]
            reason = f"it is off by {error:.1e} of its size" if error < float("inf") else "it is not PyTorch's"
            differences.append(Difference(**facts, status="differ", reason=reason, relative=error))
        elif not tensor.content.fingerprint.size:
            differences.append(Difference(**facts, status="not compared", reason=EMPTY))
        elif matches.is_random(value):
            differences.append(Difference(**facts, status="not compared", reason=RANDOM))
        elif compared.unknown is not None and value not in matches.trace.prints:
            differences.append(Difference(**facts, status="not compared", reason=str(compared.unknown)))
        else:
            differences.append(Difference(**facts, status="tie" if matches.trace.ties else "agree"))
    return differences
