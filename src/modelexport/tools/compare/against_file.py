"""``compare A B --numbers``: the loss of a file that was made from another (half precision, quantized, optimized) by
module.

Both run on the same inputs, in the types of the files and without PyTorch. The loss in each call of the second is
measured twice: *end to end*, in one run of each, and *per module*, where each boundary value is computed from the first
file's values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.text import plural
from modelexport.errors import InputsError, UsageError
from modelexport.files.path_or_model import Source
from modelexport.files.recipe_files import read_recipe
from modelexport.format.cut_record import CutRecord
from modelexport.format.keys import RECIPE_SUFFIX
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import initializers, required_inputs, values_taken
from modelexport.runtime.devices import CPU
from modelexport.runtime.saturating_products import saturation_notes, unsigned_copy
from modelexport.runtime.sessions import arrays_in, open_session, run_session
from modelexport.runtime.varied_inputs import negated
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.strip_and_inline import runnable
from modelexport.tools.compare.against_report import AgainstReport, CallLoss, Loss, measure_loss, weight_of
from modelexport.tools.compare.comparison import notes_of_equal_bytes
from modelexport.tools.compare.node_by_node import run_node_by_node
from modelexport.tools.compare.output_comparison import OutputComparison, RunOutputs
from modelexport.tools.compare.paired_values import paired_values, ports_of
from modelexport.traces.calibration_data import read_data
from modelexport.traces.inputs_and_example_sizes import make_feeds, sizes_of_other
from modelexport.traces.outputs_of_two_files import narrowest_type
from modelexport.traces.tolerances import ALLOWED, check_bound
from modelexport.verify.cut_out_calls import refuse_stage
from modelexport.verify.verify_report import CallStatus


def verify_against(
    path: Source,
    other: Source,
    *,
    modules: Sequence[str] = (),
    provider: str = CPU,
    seed: int = 0,
    bound: float | None = None,
    data: str | Path | None = None,
    processor: str | Path | None = None,
) -> AgainstReport:
    """Compare a tagged file with one that was made from it, module by module, without PyTorch.

    If one of them was cut out of the other by ``extract``, it gets the values of the whole file as inputs, and only its
    calls are compared. Values of the two files are paired if both sidecars assign them to the same place of the same
    call, or else if they have the same name.

    Args:
        path: The tagged file to compare with. The inputs of its reference values are used if it has them.
        other: A tagged file with the same calls, whose loss is measured.
        modules: Selectors of the calls to compare, with those inside them; by default all.
        provider: The execution provider of ONNX Runtime for the outputs.
        seed: For random inputs.
        bound: A loss as a share of a value's norm: outputs within it agree. By default the ``error_bound`` of the
            recipe beside the second file; else the tolerance for the narrowest type in the two files, for calls, too.
        data: Inputs for runs, as :func:`modelexport.quantize` takes them; the losses of outputs are means over all.
            Calls are measured in the run in which an output is off worst.
        processor: The folder of the tokenizer or image processor for the data; by default that of the first file.

    Raises:
        FileFormatError: A file is missing or damaged.
        InputsError: The files do not take the same inputs, or no random ones fit.
        UsageError: ONNX Runtime cannot load a file, a module or provider does not exist, or the files have no value in
            common.
    """
    first_file, second_file = read_tagged(path), read_tagged(other)
    # What was cut out is compared with the whole, whichever of the two comes first.
    if first_file.cut is not None and second_file.cut is None:
        first_file, second_file = second_file, first_file
    allowed = max(ALLOWED[narrowest_type(each.model)] for each in (first_file, second_file))
    of_recipe = _error_bound(second_file) if bound is None else None
    limit = next(limit for limit in (bound, of_recipe, allowed) if limit is not None)
    check_bound(limit)
    cut = second_file.cut if first_file.cut is None else None
    if cut is None and _ends(first_file) != _ends(second_file):
        refuse_stage(first_file.path, second_file.path)
        refuse_stage(second_file.path, first_file.path)
    modules = modules or ([cut.call] if cut is not None else [])
    chosen = first_file.select(*modules).inside if modules else frozenset()
    pairs = paired_values(first_file, second_file, cut)
    if not pairs and second_file.nodes:
        raise UsageError(
            f"{second_file.path} has no value of a module in common with {first_file.path}: it was not made from it"
        )
    # A call that was cut out does not take the inputs of the whole.
    sizes = sizes_of_other(first_file, second_file, {}) if cut is None and data is None else {}
    runs, source = _inputs(first_file, sizes, provider, seed, data, processor)
    comparison = OutputComparison(first_file, second_file, provider, allowed)
    measured = _measured(comparison, runs, cut, pairs, of_data=data is not None)
    calls = list(_calls(first_file, second_file, pairs, measured.end_to_end, measured.per_module, chosen))
    judged = [loss.difference.name for loss in measured.outputs if bound is not None]
    if of_recipe is not None:  # of the output that the methods were chosen by
        judged = [loss.difference.name for loss in measured.outputs if loss.norm is not None][:1]
    beyond = {ModuleCall.parse(call.address) for call in calls if weight_of(call.end_to_end) > limit}
    return AgainstReport(
        outputs=measured.outputs,
        calls=calls,
        inputs=source,
        provider=provider,
        bound=limit,
        judged=judged,
        notes=[*measured.notes, *notes_of_equal_bytes(first_file.path, second_file.path)],
        first_beyond=next((str(call) for call in _as_they_end(first_file.calls) if call in beyond), None),
        cause=measured.cause,
    )


class _Measured(NamedTuple):
    """The losses of the outputs in all runs, and of values in the run in which an output is off worst."""

    outputs: list[Loss]
    end_to_end: dict[ir.Value, Loss]
    per_module: dict[ir.Value, Loss]
    notes: list[str]
    cause: str


def _measured(
    comparison: OutputComparison,
    runs: Sequence[Mapping[str, Any]],
    cut: CutRecord | None,
    pairs: Mapping[ir.Value, ir.Value],
    *,
    of_data: bool,
) -> _Measured:
    """Run both files, and measure what the second one loses."""
    first, second, provider, allowed = comparison.first, comparison.second, comparison.provider, comparison.allowed
    if cut is None:
        fitting = [_fit(each, second) for each in runs]
        expected = _ran(first, runs, provider, unsigned_copy(first.model) if provider == CPU else None)
    else:
        around = [_around(first, each, cut, second) for each in runs]
        fitting, expected = [taken for taken, _ in around], [returned for _, returned in around]
    variants, notes = _outputs_of_second(second, fitting, provider)
    ran = RunOutputs(expected, variants[0])
    compared = comparison.worse_losses(expected, variants)
    worst = max(range(len(runs)), key=lambda run: max(map(weight_of, compared[run]), default=0))
    by_nodes, right = comparison.node_by_node(runs[worst], fitting[worst], pairs)
    alone = run_node_by_node(second.model, fitting[worst], right, drawn=by_nodes[0].drawn, replaced=right)
    end_to_end, per_module = (
        {v: measure_loss(v.name or "", right[v], run.arrays[v], allowed) for v in run.arrays if v not in run.unlike}
        for run in (by_nodes[1], alone)
    )
    to_compare = comparison.outputs_to_compare(ran, runs, fitting, worst, by_nodes) if cut is None else ran
    worse = comparison.worse_losses(to_compare.expected, [to_compare.actual, *variants[1:]])
    compared = [comparison.with_same_numbers(losses, by_nodes) for losses in worse]
    notes += [*to_compare.notes, *comparison.notes_on_exactness(to_compare.expected, variants)]
    ends, in_run = second.model.graph.outputs, compared[worst]
    without_sequences = len(ends) == len(in_run)
    for value, loss in zip(ends, in_run, strict=True) if without_sequences else ():
        # Rounding in a run node by node adds up otherwise than in a session.
        if loss.difference.status == "agree" and value in end_to_end:
            for losses in (end_to_end, per_module):
                losses[value] = min(losses.get(value, loss), loss, key=weight_of)
    return _Measured(_of_all_runs(compared, of_data=of_data), end_to_end, per_module, notes, to_compare.cause)


def _error_bound(tagged: TaggedFile) -> float | None:
    """The bound within which the methods of a file were chosen, by the recipe beside it."""
    recipe_file = tagged.path.with_suffix(RECIPE_SUFFIX)
    return read_recipe(recipe_file).error_bound if recipe_file.is_file() else None


def _ends(tagged: TaggedFile) -> tuple[list[str | None], list[str | None]]:
    """The names of the inputs and outputs."""
    return [v.name for v in required_inputs(tagged.model)], [v.name for v in tagged.model.graph.outputs]


def _as_they_end(calls: CallTree) -> Iterator[ModuleCall]:
    """The calls in the order in which they end: callees before their caller."""
    running: list[ModuleCall] = []
    for traced in calls:
        while running and running[-1] != traced.parent:
            yield running.pop()
        running.append(traced.call)
    yield from reversed(running)


def _inputs(
    tagged: TaggedFile,
    sizes: Mapping[str, int],
    provider: str,
    seed: int,
    data: str | Path | None,
    processor: str | Path | None,
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The inputs of each run, and their source: the data, or one run and, if it has conditions, one of the others."""
    if data is not None:
        runs = read_data(Path(data), tagged.model, Path(processor or tagged.path.parent))
        return runs, f"{plural(len(runs), 'run')} of {data}"
    with runnable(tagged.path, tagged.encoding) as file:
        feeds, source = make_feeds(tagged, file, None, sizes, provider=provider, seed=seed)
    others = {name: negated(name, array) for name, array in feeds.items()}
    if any(others[name] is not array for name, array in feeds.items()):
        with suppress(UsageError):  # the file need not run with them
            _ran(tagged, [others], provider)
            return [feeds, others], source
    return [feeds], source


def _of_all_runs(compared: Sequence[Sequence[Loss]], *, of_data: bool) -> list[Loss]:
    """The loss of each output: the worst of all runs, of data with the mean of their norms."""
    by_output: dict[str, list[Loss]] = defaultdict(list)
    for loss in chain(*compared):  # a sequence may be longer in one run than in another
        by_output[loss.difference.name].append(loss)
    return [_worst_with_mean_norm(x) if of_data else max(x, key=weight_of) for x in by_output.values()]


def _worst_with_mean_norm(losses: Sequence[Loss]) -> Loss:
    """The worst of the losses of an output in several runs, with the mean of their norms."""
    worst, norms = max(losses, key=weight_of), [loss.norm for loss in losses if loss.norm is not None]
    return msgspec.structs.replace(worst, norm=sum(norms) / len(norms)) if len(norms) == len(losses) else worst


def _fit(feeds: Mapping[str, Any], tagged: TaggedFile) -> dict[str, Any]:
    """Inputs with the names and element types of another file: by name, or by order if names differ."""
    wanted = required_inputs(tagged.model)
    if len(wanted) != len(feeds):
        raise InputsError(
            f"{tagged.path} takes {plural(len(wanted), 'input')}, not {len(feeds)}: it was not made from the file"
        )
    names = [value.name or "" for value in wanted]
    arrays = [feeds[name] for name in names] if set(names) == set(feeds) else list(feeds.values())
    return {
        name: array.astype(value.dtype.numpy()) if value.dtype is not None else array
        for name, value, array in zip(names, wanted, arrays, strict=True)
    }


def _around(
    whole: TaggedFile, inputs: Mapping[str, Any], cut: CutRecord, tagged: TaggedFile
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a call that was cut out takes and returns in a run of the whole file."""
    wanted = {each.value for each in (*cut.inputs, *cut.outputs)}
    values = {value for node in whole.nodes for value in node.outputs if value.name in wanted}
    computed = run_node_by_node(whole.model, inputs, values).arrays
    weights = {v.name or "": v.const_value for v in initializers(whole.model) if v.name in wanted}
    there = {**inputs, **{name: tensor.numpy() for name, tensor in weights.items() if tensor is not None}}
    there |= {value.name or "": array for value, array in computed.items()}
    if missing := sorted(wanted - there.keys()):
        raise UsageError(
            f"{tagged.path} was cut from {cut.file}: {whole.path} does not compute '{missing[0]}' to compare it with"
        )
    return _fit({each.value: there[each.value] for each in cut.inputs}, tagged), {
        each.value: there[each.value] for each in cut.outputs
    }


def _ran(
    tagged: TaggedFile, runs: Sequence[Mapping[str, Any]], provider: str, model: ir.Model | None = None
) -> list[dict[str, Any]]:
    """The outputs of a file in each run, as ONNX Runtime computes them; of another model of it if that is given."""
    with runnable(tagged.path, tagged.encoding) as file:
        session = open_session(model or file, folder=tagged.path.parent, provider=provider, optimized=True)
        return [arrays_in(run_session(session, inputs)) for inputs in runs]


def _outputs_of_second(
    second: TaggedFile, runs: Sequence[Mapping[str, Any]], provider: str
) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """The outputs of the second file in each run, and notes on them.

    Where its products may saturate, they are computed with exact integers as well, and the worse loss counts.
    """
    variants, notes = [_ran(second, runs, provider)], saturation_notes(second.nodes, second.path)
    if (unsigned := unsigned_copy(second.model)) is not None and provider == CPU:
        variants.append(_ran(second, runs, provider, unsigned))
    return variants, notes


def _calls(
    first_file: TaggedFile,
    two: TaggedFile,
    pairs: Mapping[ir.Value, ir.Value],
    end_to_end: Mapping[ir.Value, Loss],
    per_module: Mapping[ir.Value, Loss],
    modules: Collection[ModuleCall],
) -> Iterator[CallLoss]:
    ports = {port: name for port, name in ports_of(first_file).items() if port[1] == "outputs"}
    matched = {first.name for first in pairs.values()}
    absent = {address for (address, _, _), name in ports.items() if name not in matched}
    losses_of: dict[str, list[Loss]] = defaultdict(list)
    for value, loss in per_module.items():
        # Calls before the one that computes a value add to its loss only by results that the second file does not have.
        # A node that a quantizer added may have no owner: its value is that of the call that computes it in the first.
        owners = _owners(value.producer()) or _owners(pairs[value].producer())
        for address in owners | (_owners_before(value, pairs) & absent):
            losses_of[address].append(loss)
    names = {first.name: end_to_end[value] for value, first in pairs.items() if value in end_to_end}
    returned: dict[str, list[Loss]] = defaultdict(list)
    for (address, _, _), name in ports.items():
        if name in names:
            returned[address].append(names[name])
    counts: dict[str, int] = defaultdict(int)
    inside: set[str] = set()
    for node in two.nodes:
        owner = owner_of(node)
        if owner is not None:
            counts[owner.call.address] += 1
            inside.update(above.address for call in owner.calls if call in two.calls for above in two.calls.stack(call))
    stacks = {traced.call.address: first_file.calls.stack(traced.call) for traced in first_file.calls}
    without_tags = (pairs[value] for value in per_module if not _owners(value.producer()))
    owned = (address for value in without_tags for address in _owners(value.producer()))
    inside.update(above.address for address in owned for above in stacks.get(address, ()))
    measured = {above.address for address in losses_of for above in stacks.get(address, ())}
    for traced in first_file.calls:
        if modules and traced.call not in modules:
            continue
        address = traced.call.address
        largest = max(losses_of[address], key=weight_of, default=None)
        through = max(returned[address], key=weight_of, default=None)
        status: CallStatus
        if address not in inside:
            status, reason = "no nodes", ""
        elif largest is not None:
            status, reason = largest.difference.status, largest.difference.reason
        elif through is not None and address in measured:
            # What it returns is computed by the calls inside it, which have the loss.
            compared, reason = through.difference.status != "not compared", through.difference.reason
            status, reason = ("agree", "") if compared else ("not compared", reason)
        else:
            status, reason = "not compared", "none of the values that its nodes compute is in both files"
        yield CallLoss(
            address=address,
            tag=first_file.tags[traced.call],
            status=status,
            reason=reason,
            nodes=counts[address],
            end_to_end=through,
            per_module=largest,
        )


def _owners(node: ir.Node | None) -> set[str]:
    """The addresses of the calls that a node belongs to."""
    owner = owner_of(node) if node is not None else None
    return {call.address for call in owner.calls} if owner is not None else set()


def _owners_before(value: ir.Value, boundaries: Collection[ir.Value]) -> set[str]:
    """The calls of the nodes between a value and the boundary values before it."""
    pending = [node] if (node := value.producer()) is not None else []
    seen, addresses = set(pending), set[str]()
    while pending:
        node = pending.pop()
        addresses |= _owners(node)
        for before in values_taken(node):
            producer = before.producer()
            if producer is not None and producer not in seen and before not in boundaries:
                seen.add(producer)
                pending.append(producer)
    return addresses
