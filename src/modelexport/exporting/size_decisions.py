"""What a file does with other sizes of its dynamic axes: its conditions, and the axes that it fixes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelexport.capture.exported_graph import Exported
from modelexport.core.calls import ROOT
from modelexport.core.collected_messages import collected
from modelexport.exporting.fixed_axes import FixedAxis, Run, Tried, axes_of, fixed_axis_message, tried
from modelexport.exporting.requested_names import RequestedNames
from modelexport.exporting.settled_conditions import EQUAL, Settled, settle_conditions, without_implied
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
    tried: bool = False
    """Whether the file was compared at other sizes than those of the example."""


def find_sizes(
    pair: ModelAndFile,
    inputs: Inputs,
    exported: Exported,
    names: RequestedNames | None,
    *,
    every: bool,
    example: Inputs | None = None,
    fixed: Sequence[FixedAxis] = (),
) -> SizesFound:
    """Find out what a file does with other sizes of its dynamic axes.

    Args:
        inputs: The inputs of the capture; not changed.
        exported: The capture, with the conditions that it recorded.
        names: The names of axes that a person gave; ``None`` for a part of a package, whose axes are checked where it
            runs.
        every: Whether all axes have to be dynamic, and not only those with names.
        example: The inputs that a person gave, with which the file has to be right, if they have other sizes.
        fixed: Axes that an earlier file could only have in one size. What decides by their size and that of another
            axis may still be wrong for others of that one.
    """
    from modelexport.exporting.unrecorded_decisions import UnrecordedDecisions
    from modelexport.pytorch.inputs.other_sizes import changeable_sizes, symbol_sizes

    trials, model = SizeTrials(pair, inputs), pair.tagged.model
    sizes, changeable = symbol_sizes(inputs, model), changeable_sizes(inputs, model)
    equal = [each for each in exported.conditions if EQUAL.fullmatch(each.formula) and {*each.symbols} <= sizes.keys()]
    same = {f"{axis.input}:{axis.axis}": axis for axis in fixed}
    unrecorded = UnrecordedDecisions(
        {**sizes, **{name: axis.size for name, axis in same.items()}},
        lambda others: trials.run({symbol: others[symbol] for symbol in sizes}),
        equal,
        fixed={name: Tried("differ", axis.reason) for name, axis in same.items()},
    )
    settled = settle_conditions(exported.conditions, sizes, changeable, trials.run, unrecorded.agreeing)
    if names is None:
        record_conditions(model, settled.kept)
        return SizesFound(settled.kept)
    unrecorded.find(settled.kept)
    reasons = settled.reasons | unrecorded.reasons
    kept = without_implied([*settled.kept, *unrecorded.conditions])
    record_conditions(model, kept)
    to_fix = _narrowed_to_one_size(kept, settled, inputs, model, sizes, trials.run)
    found = {symbol: result for symbol, result in unrecorded.fixed.items() if symbol in sizes}
    to_fix += [axis for symbol, result in found.items() for axis in axes_of(inputs, model, symbol, result)]
    to_fix += _fixed_for_example(kept, inputs, model, symbol_sizes(example, model) if example is not None else sizes)
    to_fix = list({(axis.input, axis.axis): axis for axis in reversed(to_fix)}.values())[::-1]
    constant = _constant_axes(pair, inputs, exported, names)
    refused = [fixed_axis_message(item) for item in (*to_fix, *constant) if every or item.symbol in names.asked]
    if to_fix and not refused:
        return SizesFound(kept, to_fix=to_fix)
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
    were = "was" if len(condition.symbols) == 1 else "were"
    return (
        f"{' and '.join(condition.symbols)} {were} to be dynamic, and the file is right only for "
        f"{stated_with_line(condition)}; leave the axis out (--dynamic writes a file that states the condition), or "
        f"let torch.where or torch.cond decide"
    )


def _constant_axes(pair: ModelAndFile, inputs: Inputs, exported: Exported, names: RequestedNames) -> list[FixedAxis]:
    """The axes that a capture made constant, though the model accepts other sizes: ``math.sqrt(n)``, ``for row in x``.

    Axes of one size that one line made constant change together, as the model may want them to be equal, and alone.
    """
    from modelexport.pytorch.inputs.other_sizes import inputs_of_file, with_sizes

    constant_conditions = {item.symbols[0]: item for item in exported.conditions if _CONSTANT.fullmatch(item.formula)}
    values = {symbol: int(item.formula.split()[-1]) for symbol, item in constant_conditions.items()}
    ports = {
        name: port.position for port, name in exported.values.items() if port.call == ROOT and port.side == "inputs"
    }
    declared = {value.name: value.shape for value in pair.tagged.model.graph.inputs}
    specs, axes = exported.calls.calls[0].inputs, dict[str, list[str | None]]()
    for name in inputs_of_file(inputs, pair.tagged.model).values():
        shape = specs[ports[name]].shape if ports.get(name, len(specs)) < len(specs) else ()
        fixed = [isinstance(size, int) for size in declared.get(name) or ()]
        axes[name] = [
            _symbol_of(size, values) if is_fixed else None for size, is_fixed in zip(shape, fixed, strict=False)
        ]
    sizes = {symbol: values[symbol] for symbols in axes.values() for symbol in symbols if symbol is not None}
    alike: dict[tuple[str, int], list[str]] = {}
    for symbol, size in sizes.items():
        if size > 1:
            alike.setdefault((constant_conditions[symbol].where, size), []).append(symbol)
    alone = [[symbol] for group in alike.values() if len(group) > 1 for symbol in group]
    accepted: set[str] = set()
    for group in [*alike.values(), *alone][:_GROUPS]:
        for times, more in ((1, 1), (2, 0), (4, 0), (1, -1)):
            now = {symbol: times * sizes[symbol] + more for symbol in group}
            if not accepted.issuperset(group) and pair.accepts(with_sizes(inputs, pair.tagged.model, now, axes)):
                accepted.update(group)
    return [
        FixedAxis(
            input=name,
            axis=axis,
            symbol=names.leading[axis] if axis < len(names.leading) else symbol,
            size=sizes[symbol],
            call="",
            reason=f"it is a constant of the file: {condition.where or 'torch.export'}: `{condition.source}`",
        )
        for name, symbols in axes.items()
        for axis, symbol in enumerate(symbols)
        if symbol in accepted
        for condition in [constant_conditions[symbol]]
    ]


def notes_on_constants(exported: Exported) -> list[str]:
    """The sizes that the model's code made constant in a file that is not checked, a line each."""
    return [
        f"a size that was to be dynamic is {item.formula.split()[-1]} in the file, because {item.where} makes a number "
        f"of it, or decides by it: `{item.source}`"
        for item in exported.conditions
        if item.in_model and item.where and _CONSTANT.fullmatch(item.formula)
        if item not in exported.unchecked_conditions
    ]


_GROUPS = 16
"""How many groups of axes are tried with other sizes."""
_CONSTANT = re.compile(r"\w+ == \d+")


def _symbol_of(size: int | str, values: Mapping[str, int]) -> str | None:
    """The symbol of an axis that became constant. A second capture by TorchDynamo has calls without symbols."""
    if isinstance(size, int):
        return next((symbol for symbol, value in values.items() if value == size), None)
    return size if size in values else None


class SizeTrials:
    """Runs of a model and its file with other sizes of the example inputs, each made once."""

    def __init__(self, pair: ModelAndFile, inputs: Inputs) -> None:
        self._pair, self._inputs = pair, inputs
        self._done: dict[tuple[tuple[str, int], ...], Tried | None] = {}

    def run(self, sizes: Mapping[str, int]) -> Tried | None:
        """What happens with sizes of the dynamic axes; ``None`` if the inputs would be too large, or crash PyTorch."""
        key = tuple(sorted(sizes.items()))
        if key not in self._done:
            self._done[key] = self._run(sizes)
        return self._done[key]

    def _run(self, sizes: Mapping[str, int]) -> Tried | None:
        from modelexport.pytorch.inputs.other_sizes import (
            LARGEST_TRIED,
            symbol_sizes,
            too_large,
            with_sizes,
            with_telling_numbers,
            without_parts,
        )

        model = self._pair.tagged.model
        before = symbol_sizes(self._inputs, model)
        if any(size > max(LARGEST_TRIED, 2 * before[symbol] + 1) for symbol, size in sizes.items()):
            return None
        if too_large(self._inputs, model, sizes):
            return None
        other = with_sizes(self._inputs, model, sizes)
        if without_parts(self._inputs, other):
            return None
        result = self._compared(other)
        if result.status == "agree" and (telling := with_telling_numbers(other)) is not None:
            result_of_others = self._compared(telling)
            return result_of_others if result_of_others.status == "differ" else result
        return result

    def _compared(self, inputs: Inputs) -> Tried:
        with collected():
            try:
                self._pair.runs.own(inputs)  # most sizes that are refused are refused here, in no time
                pair = self._pair.settled(inputs)  # what decides by bytes or types decides otherwise in float64
                right = pair.returned(inputs)
                if not pair.agrees(inputs, right):
                    return tried(pair.compared(inputs, {})[1])
                fault = pair.fault_beside_nan(inputs, right)
                return Tried("differ" if fault else "agree", fault)
            except Exception:  # a model may raise anything for sizes that it does not accept, some only in float64
                return Tried("not compared")
