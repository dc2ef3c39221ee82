"""Which conditions of sizes a file has: the recorded ones on whose other side it differs from the model.

Most of what torch.export records changes nothing: whether tensors are contiguous, or broadcast. So the model and the
file run with sizes for which a condition does not hold. If they agree, it is dropped, and so it is if the model itself
refuses such sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from modelexport.capture.exported_graph import Exported
from modelexport.core.calls import ROOT
from modelexport.exporting.fixed_axes import (
    FixedAxesError,
    FixedAxis,
    Run,
    Tried,
    axes_of,
    find_fixed_axes,
    fixed_axis_message,
)
from modelexport.exporting.requested_names import RequestedNames
from modelexport.exporting.size_trials import SizeTrials
from modelexport.graph.size_conditions import (
    SizeCondition,
    broken,
    fitting,
    follows,
    next_odd,
    record_conditions,
    simplified,
    sizes_against,
    sizes_within,
    stated_with_line,
)
from modelexport.graph.size_symbols import SYMBOL

if TYPE_CHECKING:
    import onnx_ir as ir

    from modelexport.pytorch.nested_tensors import Inputs
    from modelexport.verify.model_and_file import Sides


def narrowed_to_one_size(
    settled: Settled, inputs: Inputs, model: ir.Model, sizes: Mapping[str, int], run: Run
) -> list[FixedAxis]:
    """The axes of which the conditions of a file allow no other size, or one with which it fails or is wrong."""
    narrowed: list[FixedAxis] = []
    for symbol in dict.fromkeys(name for condition in settled.kept for name in condition.symbols):
        about = [
            condition
            for condition in settled.kept
            if symbol in condition.symbols and condition.formula in settled.reasons
        ]
        others = sizes_within(settled.kept, sizes, symbol)[:_RUNS] if about else []
        results = {result.status if (result := run(other)) is not None else None for other in others}
        if about and ("differ" in results or results <= {"not compared"}):
            result, line = settled.reasons[about[0].formula], about[0].where
            reason = f"{result.reason}{f' ({line} decides by it: `{about[0].source}`)' if line else ''}"
            narrowed += axes_of(inputs, model, symbol, reason, result.call)
    return narrowed


@dataclass(frozen=True)
class SizesFound:
    """What a file does with other sizes."""

    conditions: Sequence[SizeCondition]
    """The conditions under which it is right."""
    constant: Sequence[FixedAxis] = ()
    """Axes of which the capture made a constant, though the model accepts other sizes."""
    refusal: str = ""
    """Why the file is not what was asked for; empty if it is."""


def find_sizes(
    sides: Sides, inputs: Inputs, exported: Exported, names: RequestedNames | None, *, every: bool
) -> SizesFound:
    """Find out what a file does with other sizes of its dynamic axes.

    Args:
        inputs: The example inputs; not changed.
        exported: The capture, with the conditions that it recorded.
        names: The names of axes that a person gave; ``None`` for a part of a package, whose axes are checked where it
            runs.
        every: Whether all axes have to be dynamic, and not only those with names.

    Raises:
        FixedAxesError: The file fixes sizes of axes that need not be dynamic.
    """
    from modelexport.pytorch.inputs.other_sizes import changeable_sizes, symbol_sizes

    trials, model = SizeTrials(sides, inputs), sides.tagged.model
    sizes = symbol_sizes(inputs, model)
    settled = settle_conditions(exported.conditions, sizes, changeable_sizes(inputs, model), trials.run)
    record_conditions(model, settled.kept)
    if names is None:
        return SizesFound(settled.kept)
    fixed = narrowed_to_one_size(settled, inputs, model, sizes, trials.run)
    known = {item.symbol for item in fixed}
    fixed += [item for item in find_fixed_axes(inputs, model, trials.run) if item.symbol not in known]
    constant = find_constant_axes(sides, inputs, exported, names)
    refused = [fixed_axis_message(item) for item in (*fixed, *constant) if every or item.symbol in names.asked]
    if fixed and not refused:
        raise FixedAxesError(fixed)
    differing = (item for item in settled.kept if item.formula in settled.reasons)
    refused += [refusal_for_condition(item) for item in differing if every or names.asked.intersection(item.symbols)]
    return SizesFound(settled.kept, constant, next(iter(refused), ""))


def refusal_for_condition(condition: SizeCondition) -> str:
    """One line that says what a file does not do for a named axis, and what to do."""
    return (
        f"{' and '.join(condition.symbols)} was to be dynamic, and the file is right only for "
        f"{stated_with_line(condition)}; leave the axis out (--dynamic writes a file that states the condition), or "
        f"let torch.where or torch.cond decide"
    )


def stated_unchecked(exported: Exported) -> Sequence[SizeCondition]:
    """The conditions that a file states if it is not run: what the model's own code decides."""
    known = {symbol for value in exported.model.graph.inputs for size in value.shape or () if not isinstance(size, int)
             for symbol in SYMBOL.findall(str(size.value))}  # fmt: skip
    return [
        condition for condition in exported.conditions if condition.in_model and known.issuperset(condition.symbols)
    ]


def find_constant_axes(sides: Sides, inputs: Inputs, exported: Exported, names: RequestedNames) -> list[FixedAxis]:
    """The axes that a capture made constant, though the model accepts other sizes: ``math.sqrt(n)``, ``for row in x``.

    Axes of one size that one line made constant change together, as the model may want them to be equal, and alone.
    """
    from modelexport.pytorch.inputs.other_sizes import inputs_of_file, with_sizes

    constant_conditions = {item.symbols[0]: item for item in exported.conditions if _CONSTANT.fullmatch(item.formula)}
    values = {symbol: int(item.formula.split()[-1]) for symbol, item in constant_conditions.items()}
    ports = {
        name: port.position for port, name in exported.values.items() if port.call == ROOT and port.side == "inputs"
    }
    declared = {value.name: value.shape for value in sides.tagged.model.graph.inputs}
    specs, axes = exported.calls.calls[0].inputs, dict[str, list[str | None]]()
    for name in inputs_of_file(inputs, sides.tagged.model).values():
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
            if not accepted.issuperset(group) and _accepts(sides, with_sizes(inputs, sides.tagged.model, now, axes)):
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


_GROUPS = 16
"""How many groups of axes are tried with other sizes."""
_CONSTANT = re.compile(r"\w+ == \d+")


def _symbol_of(size: int | str, values: Mapping[str, int]) -> str | None:
    """The symbol of an axis that became constant. A second capture by TorchDynamo has calls without symbols."""
    if isinstance(size, int):
        return next((symbol for symbol, value in values.items() if value == size), None)
    return size if size in values else None


def _accepts(sides: Sides, inputs: Inputs) -> bool:
    from modelexport.pytorch.runs.outputs_as_users_run import returned_by

    try:
        returned_by(sides.model, inputs)
    except Exception:  # a model may raise anything for sizes that it does not accept
        return False
    return True


@dataclass
class Settled:
    """The conditions of a file."""

    kept: list[SizeCondition] = field(default_factory=list)
    reasons: dict[str, Tried] = field(default_factory=dict)
    """The formula of a condition to what happens if it does not hold; none for one that was not tried."""


def settle_conditions(
    recorded: Collection[SizeCondition], sizes: Mapping[str, int], changeable: Collection[str], run: Run
) -> Settled:
    """The conditions that a file has.

    Args:
        recorded: Those of its capture.
        sizes: The size of each dynamic axis in the example inputs.
        changeable: The axes that may have another size.
    """
    asked = [
        candidate
        for candidate in recorded
        if set(candidate.symbols) <= sizes.keys() and set(candidate.symbols) & set(changeable)
    ]
    ones = [SizeCondition(f"{symbol} > 1") for symbol in changeable]
    pending = [candidate for candidate in simplified([*asked, *ones]) if candidate.holds(sizes)]
    settling = _Settling(sizes, changeable, run, pending)
    settling.drop_most_by_one_run()
    settling.try_each([candidate for candidate in pending if candidate.in_model])
    settling.drop_most_by_one_run()
    settling.drop_implied()
    settling.drop_if_ones_agree()
    settling.try_each(settling.pending)
    return replace(settling.settled, kept=_without_implied(settling.settled.kept))


class _Settling:
    """Conditions that are still to be tried, and those that were kept: each method has fewer to be tried."""

    def __init__(
        self, sizes: Mapping[str, int], changeable: Collection[str], run: Run, pending: Sequence[SizeCondition]
    ) -> None:
        self.sizes = sizes
        self.changeable = changeable
        self.run = run
        self.pending = list(pending)
        self.equal = [candidate for candidate in pending if _EQUAL.fullmatch(candidate.formula)]
        self.settled = Settled()

    def drop_most_by_one_run(self) -> None:
        """Drop those that do not hold at sizes at which most do not, if the file agrees there."""
        other = fitting(self.settled.kept, _against_most(self.pending, self.sizes, self.changeable), self.changeable)
        if other is None or not self._agrees(other):
            return
        self.pending = [candidate for candidate in self.pending if candidate.in_model or candidate.holds(other)]

    def drop_implied(self) -> None:
        """Drop those that always hold with the kept ones."""
        self.pending = [candidate for candidate in self.pending if not _always_with(self.settled.kept, candidate)]

    def drop_if_ones_agree(self) -> None:
        """Drop those that do not hold if all sizes are one, if the file agrees there."""
        ones = {symbol: 1 if symbol in self.changeable else size for symbol, size in self.sizes.items()}
        if self._agrees(ones):
            self.pending = [candidate for candidate in self.pending if candidate.holds(ones)]

    def try_each(self, conditions: Sequence[SizeCondition]) -> None:
        """Keep those without which the file differs, or the model raises."""
        for condition in list(conditions):
            self._try(condition)
            self.pending.remove(condition)

    def _agrees(self, other: Mapping[str, int]) -> bool:
        return (result := self.run(other)) is not None and result.status in ("agree", "tie")

    def _try(self, condition: SizeCondition) -> None:
        sizes, settled = self.sizes, self.settled
        against = list(islice(sizes_against(condition, sizes), _LOOKED_AT))
        if condition not in self.equal:
            against = [_with_equal(other, sizes, self.equal) for other in against]
        against = [
            other for other in against if all(other[name] == sizes[name] or name in self.changeable for name in sizes)
        ]
        against = [other for other in against if not broken(settled.kept, other)]
        others = [candidate for candidate in self.pending if candidate is not condition]
        against.sort(key=lambda other: bool(broken(others, other)))
        result = _worst_result(against, self.run)
        if result is None and against and condition.in_model:
            settled.kept.append(condition)
        elif (
            result is not None and result.status == "differ" and (as_is := self.run(sizes)) and as_is.status != "differ"
        ):
            settled.kept.append(condition)
            settled.reasons[condition.formula] = result


_EQUAL = re.compile(r"\w+ == [A-Za-z_]\w*")


def _with_equal(other: Mapping[str, int], sizes: Mapping[str, int], equal: Sequence[SizeCondition]) -> dict[str, int]:
    """Sizes in which the axes that are always equal to a changed one are changed, too."""
    unchanged = [symbol for symbol in other if other[symbol] == sizes[symbol]]
    return fitting(equal, other, unchanged) or dict(other)


def _worst_result(candidates: Sequence[Mapping[str, int]], run: Run) -> Tried | None:
    """The worst that happens at some of several sizes; ``None`` if they are too large."""
    results: list[Tried] = []
    for other in candidates:
        if (result := run(other)) is None:
            continue
        results.append(result)
        agreeing = sum(earlier.status in ("agree", "tie") for earlier in results)
        most = _RUNS if agreeing or result.status != "not compared" else _REFUSED
        if result.status == "differ" or agreeing == _AGREEING or len(results) >= most:
            break
    return max(results, key=lambda tried: ("not compared", "tie", "agree", "differ").index(tried.status), default=None)


_LOOKED_AT, _RUNS, _REFUSED, _AGREEING = 24, 4, 12, 2
"""How many sizes on the other side of a condition are looked at, run, run if the model refuses all of them, and have to
agree before it is dropped."""


def _against_most(
    conditions: Sequence[SizeCondition], sizes: Mapping[str, int], changeable: Collection[str]
) -> dict[str, int]:
    """Other sizes of all axes, for each that for which most conditions of it alone do not hold; odd if there are none.

    The size of an axis that has no condition becomes odd, since what is decided by halves shows with no others.
    """
    chosen = dict(sizes)
    for symbol in changeable:
        own_conditions = [condition for condition in conditions if condition.symbols == (symbol,)]
        values = Counter(
            other[symbol]
            for condition in own_conditions
            for other in islice(sizes_against(condition, sizes), _LOOKED_AT)
        )
        likely = [value for value, _ in values.most_common() if value > 1]
        chosen[symbol] = likely[0] if likely else next_odd(sizes[symbol])
    return chosen


def _always_with(kept: Sequence[SizeCondition], condition: SizeCondition) -> bool:
    """Whether a condition of one axis always holds where those of the same axis do that are kept."""
    about = [known for known in kept if known.symbols == condition.symbols]
    return len(condition.symbols) == 1 and bool(about) and follows(condition, about)


def _without_implied(conditions: Sequence[SizeCondition]) -> list[SizeCondition]:
    """Conditions without those that hold wherever the others of the same axis do."""
    kept = list(conditions)
    for condition in conditions:
        if _always_with([other for other in kept if other is not condition], condition):
            kept.remove(condition)
    for symbols in {condition.symbols for condition in kept if len(condition.symbols) == 1}:
        same = [condition for condition in kept if condition.symbols == symbols]
        both = simplified(
            [msgspec.structs.replace(same[0], formula=" and ".join(f"({condition.formula})" for condition in same))]
        )
        if (
            len(same) > 1
            and len(both) == 1
            and len(both[0].formula) <= max(len(condition.formula) for condition in same)
        ):
            kept[kept.index(same[0])] = both[0]
            kept = [condition for condition in kept if condition not in same[1:]]
    return kept
