"""What a file does with other sizes of its dynamic axes: its conditions, and the axes that it fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelexport.capture.exported_graph import Exported
from modelexport.exporting.constant_axes import find_constant_axes
from modelexport.exporting.fixed_axes import FixedAxis, Run, axes_of, fixed_axis_message
from modelexport.exporting.requested_names import RequestedNames
from modelexport.exporting.settled_conditions import EQUAL, Settled, settle_conditions, without_implied
from modelexport.exporting.size_trials import SizeTrials
from modelexport.graph.size_conditions import SizeCondition, broken, record_conditions, sizes_within, stated_with_line

if TYPE_CHECKING:
    import onnx_ir as ir

    from modelexport.pytorch.nested_tensors import Inputs
    from modelexport.verify.model_and_file import ModelAndFile


@dataclass(frozen=True)
class SizesFound:
    """What a file does with other sizes."""

    conditions: Sequence[SizeCondition]
    """The conditions under which it is right."""
    constant: Sequence[FixedAxis] = ()
    """Axes of which the capture made a constant, though the model accepts other sizes."""
    to_fix: Sequence[FixedAxis] = ()
    """Axes that the file fixes and that need not be dynamic: it has to be made again without them."""
    refusal: str = ""
    """Why the file does not do what was asked for; empty if it does."""


def find_sizes(
    pair: ModelAndFile,
    inputs: Inputs,
    exported: Exported,
    names: RequestedNames | None,
    *,
    every: bool,
    example: Inputs | None = None,
) -> SizesFound:
    """Find out what a file does with other sizes of its dynamic axes.

    Args:
        inputs: The inputs of the capture; not changed.
        exported: The capture, with the conditions that it recorded.
        names: The names of axes that a person gave; ``None`` for a part of a package, whose axes are checked where it
            runs.
        every: Whether all axes have to be dynamic, and not only those with names.
        example: The inputs that a person gave, with which the file has to be right, if they have other sizes.
    """
    from modelexport.exporting.unrecorded_decisions import UnrecordedDecisions
    from modelexport.pytorch.inputs.other_sizes import changeable_sizes, symbol_sizes

    trials, model = SizeTrials(pair, inputs), pair.tagged.model
    sizes, changeable = symbol_sizes(inputs, model), changeable_sizes(inputs, model)
    equal = [each for each in exported.conditions if EQUAL.fullmatch(each.formula) and {*each.symbols} <= sizes.keys()]
    tried = UnrecordedDecisions(sizes, trials.run, equal)
    settled = settle_conditions(exported.conditions, sizes, changeable, trials.run, tried.agreeing)
    if names is None:
        record_conditions(model, settled.kept)
        return SizesFound(settled.kept)
    tried.find(settled.kept)
    reasons = settled.reasons | tried.reasons
    kept = without_implied([*settled.kept, *tried.conditions])
    record_conditions(model, kept)
    fixed = _narrowed_to_one_size(kept, settled, inputs, model, sizes, trials.run)
    fixed += [axis for symbol, result in tried.fixed.items() for axis in axes_of(inputs, model, symbol, result)]
    fixed += _fixed_for_example(kept, inputs, model, symbol_sizes(example, model) if example is not None else sizes)
    fixed = list({(axis.input, axis.axis): axis for axis in reversed(fixed)}.values())[::-1]
    constant = find_constant_axes(pair, inputs, exported, names)
    refused = [fixed_axis_message(item) for item in (*fixed, *constant) if every or item.symbol in names.asked]
    if fixed and not refused:
        return SizesFound(kept, to_fix=fixed)
    differing = (item for item in kept if item.formula in reasons)
    refused += [refusal_for_condition(item) for item in differing if every or names.asked.intersection(item.symbols)]
    return SizesFound(kept, constant, refusal=next(iter(refused), ""))


def _narrowed_to_one_size(
    kept: Sequence[SizeCondition], settled: Settled, inputs: Inputs, model: ir.Model, sizes: Mapping[str, int], run: Run
) -> list[FixedAxis]:
    """The axes of which the conditions of a file allow no other size, or none that the model accepts."""
    narrowed: list[FixedAxis] = []
    for symbol in dict.fromkeys(name for condition in kept for name in condition.symbols):
        about = [item for item in kept if item.symbols == (symbol,) and item.formula in settled.reasons]
        others = sizes_within(kept, sizes, symbol)[:_RUNS] if about else []
        results = {result.status if (result := run(other)) is not None else None for other in others}
        if about and results <= {"not compared"}:
            result, condition = settled.reasons[about[0].formula], about[0]
            decides = f"{condition.where} decides by it: `{condition.source}`" if condition.where else ""
            narrowed += axes_of(inputs, model, symbol, result, decides)
    return narrowed


_RUNS = 4
"""How many of the sizes that conditions allow are tried."""


def _fixed_for_example(
    kept: Sequence[SizeCondition], inputs: Inputs, model: ir.Model, example: Mapping[str, int]
) -> list[FixedAxis]:
    """The axes whose size in an example a condition of the file excludes: it was captured with another one."""
    from modelexport.pytorch.inputs.other_sizes import symbol_sizes

    sizes = symbol_sizes(inputs, model)
    return [
        axis
        for condition in broken(kept, example)
        for symbol in condition.symbols
        if example[symbol] != sizes[symbol]
        for axis in axes_of(
            inputs, model, symbol, None, f"with others it is right only for {stated_with_line(condition)}"
        )
    ]


def refusal_for_condition(condition: SizeCondition) -> str:
    """One line that says what a file does not do for a named axis, and what to do."""
    return (
        f"{' and '.join(condition.symbols)} was to be dynamic, and the file is right only for "
        f"{stated_with_line(condition)}; leave the axis out (--dynamic writes a file that states the condition), or "
        f"let torch.where or torch.cond decide"
    )
