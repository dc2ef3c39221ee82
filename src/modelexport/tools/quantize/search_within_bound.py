"""The cheapest methods for the modules of a file within a bound on its error, or the least error within a size.

Cheap is what has few bytes, or what takes little time on the device at hand (:mod:`.measured_seconds`).
Every method of every module is measured alone (:mod:`.sensitivity`). From all modules at their cheapest, single modules
get a better method, or are kept, in the order of the error that a byte more saves. How far along this order
the bound is met is found by runs, and the result is judged on inputs that were not used to choose.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.text import plural
from modelexport.core.timed_stages import Stages
from modelexport.errors import CheckError, InputsError, UsageError
from modelexport.files.path_or_model import Source
from modelexport.files.recipe_files import Recipe, Rule
from modelexport.runtime.devices import CPU
from modelexport.tables.turns import Turns
from modelexport.tagged.file import TaggedFile, as_tagged
from modelexport.tools.quantize.executors import Executor, Workers, open_switched, workers_for
from modelexport.tools.quantize.measured_seconds import measured_seconds, whole_time
from modelexport.tools.quantize.methods import KEEP, Method, parse_method
from modelexport.tools.quantize.metrics_and_bounds import ErrorBound, Metric, find_metric, mean_figure, parse_bound
from modelexport.tools.quantize.padded_batches import ROWS, padded_batches
from modelexport.tools.quantize.prepared_for_quantizers import prepared
from modelexport.tools.quantize.quantize import Quantized, calibrate, quantized, weights_size
from modelexport.tools.quantize.ranked_steps import Candidate, rank_steps
from modelexport.tools.quantize.sensitivity import measure_alone
from modelexport.tools.quantize.switched_model import Choice, SwitchableSession, Unit, find_units
from modelexport.traces.calibration_data import RunInputs, given_runs

Least = Literal["bytes", "time"]
JUDGEMENTS = 3
"""How often the held-out inputs may be used."""
_STRICTER = 0.9
"""The factor by which a bound is made stricter, besides what the judgement asks for."""


class MoreThanCheapest(msgspec.Struct, frozen=True):
    """A module, or a group of modules, that does not have its cheapest method."""

    calls: tuple[str, ...]
    method: str
    """``keep``, or a method."""
    loss: float
    """How much worse the output is if it alone has its cheapest method."""
    cost: float
    """Bytes of weights beyond its cheapest method, or seconds of a run."""


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of :func:`search`."""

    recipe: Recipe
    metric: str
    least: Least = "bytes"
    """The cost that is minimized: the bytes of the weights, or the time of a run."""
    bound: str
    """The bound on the error, or the number of bytes."""
    met: bool
    judged: float
    """The figure of the quantized model on the inputs that were not used to choose, one at a time."""
    in_batches: float | None
    """Its figure on the same inputs in padded batches; ``None`` if the file does not take batches of them."""
    seen: float
    """Its figure on the inputs that were used to choose."""
    cheapest: float
    """The figure on these with every module at its cheapest method."""
    changed: list[MoreThanCheapest]
    """The modules that are not at their cheapest method: first those where a byte saves most error."""
    modules: int
    """The number of modules, or groups of modules, among which it was chosen."""
    kept: int
    """The number of these for which it is cheapest to keep them."""
    times: Turns | None = None
    """The time of the result in turns with the file, if it was to take little."""
    bytes_before: int
    """Bytes of the weights of the file and of the result."""
    bytes_after: int
    judgements: int
    """How often the held-out inputs were used. Each time after the first, the choice was made stricter."""
    runs: tuple[int, int]
    """The numbers of inputs that were used to choose, and to judge."""

    @property
    def of_use(self) -> bool:
        """Whether the bound is met, a module has a method, and the result is faster than the file if it is to be."""
        fast = self.least == "bytes" or (self.times is not None and self.times.faster)
        return self.met and any(rule.method != KEEP for rule in self.recipe.rules) and fast


class Search(NamedTuple):
    """The result of :func:`search`, and what was measured."""

    found: SearchResult
    made: Quantized
    """The quantized model."""
    tagged: TaggedFile
    """The file that it was made of."""


@dataclass
class _Runs:
    """Figures of choices on the inputs to choose by, each measured once."""

    switched: SwitchableSession
    metric: Metric
    feeds: RunInputs
    rights: list[Any] = field(default_factory=list)
    known: dict[tuple[tuple[int, Method], ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rights = [self.switched.run(inputs) for inputs in self.feeds]

    def figure(self, choice: Choice) -> float:
        """The mean figure of a choice: the worse one if integers are exact on some processors only."""
        key = tuple(choice.items())
        if key not in self.known:
            figures = [
                _figure(self.metric, self.rights, [self.switched.run(each, choice, exact=exact) for each in self.feeds])
                for exact in self.switched.exactness
            ]
            self.known[key] = self.metric.worst(figures, self.rights)
        return self.known[key]

    def within(self, bound: ErrorBound) -> Callable[[Choice], bool]:
        """Whether the figure of a choice is within a bound."""
        return lambda choice: bound.holds(self.figure(choice))


def search(
    file: Source | TaggedFile,
    *,
    to: Sequence[str],
    data: RunInputs | str | Path,
    within: str | None = None,
    budget: int | None = None,
    metric: str = "error",
    keep: Iterable[str] = (),
    only: Iterable[str] = (),
    output_name: str | None = None,
    processor: str | Path | None = None,
    stages: Stages | None = None,
    device: str = CPU,
    least: Least = "bytes",
    executor: Executor | int | None = None,
) -> Search:
    """Choose a method for every module: the cheapest within a bound, or the least error within a number of bytes.

    Args:
        file: A tagged file.
        to: The methods that a module may get; it may always be kept.
        data: Inputs, or a file or folder of them. The first half is used to choose, the second half to judge.
        within: A metric and its limit (``cosine>=0.999``).
        budget: Bytes of weights.
        metric: The error that is minimized with ``budget``.
        keep, only: Selectors of modules that are kept, and of the only ones that are not.
        output_name: The output that is compared; by default the first of floating-point numbers.
        processor: The folder of the tokenizer or image processor that ``data`` needs; by default that of ``file``.
        stages: Is told what is being done.
        device: Where quantized versions run: ``NAME[,option=value...]``; the right values are those of the CPU.
        executor: Measures single modules elsewhere, as in :func:`.sensitivity.sensitivity`.
        least: What is cheap: few bytes of weights, or little time of a run of the first inputs on the device.

    Raises:
        UsageError: A method, metric, output or selector does not exist, or no module can be quantized.
        FileFormatError: The file or the data cannot be read.
        InputsError: The data do not fit, or are a single run.
        CheckError: The device computes the unquantized file outside of the bound.
    """
    stages = stages or Stages(lambda line: None)
    methods = [method for method in map(parse_method, dict.fromkeys(to)) if method is not None]
    if (within is None) == (budget is None) or not methods:
        raise UsageError("give methods (--to), and either a bound on the error or a number of bytes")
    _check_least(least, within)
    bound = parse_bound(within) if within is not None else None
    measured = bound.metric if bound is not None else find_metric(metric)
    tagged = prepared(as_tagged(file))
    if len(feeds := given_runs(tagged, data, processor)) < 2:
        raise InputsError("the data are one run: give two or more, since one half judges what the other half chose")
    choosing, judging = feeds[: len(feeds) // 2], feeds[len(feeds) // 2 :]
    units, kept = _chosen_and_kept(tagged, find_units(tagged, methods), list(keep), list(only))
    with stages("quantize every module by every method"):
        switched = open_switched(
            tagged, units, methods, ranges := calibrate(tagged.model, methods, choosing), output_name, device
        )
    with switched:
        runs = _Runs(switched, measured, choosing)
        if bound is not None:
            _check_unquantized(bound, runs, tagged.path, device)
        with stages("measure each module alone"):
            what = {"output": output_name, "device": device, "metric": measured.name, "ranges": ranges}
            with workers_for(executor, tagged, units, methods, data, processor=processor, **what) as workers:
                alone = _losses_alone(switched, methods, choosing, measured, workers)
        with stages("find what each method costs"):
            timed = measured_seconds(tagged, units, methods, ranges, choosing[0], device) if least == "time" else None
        options = [[Candidate(0, 0, None)] for _ in units]
        for (unit, method), cost in (switched.added if timed is None else timed).items():
            if isfinite(loss := alone[unit, method]):
                options[unit].append(Candidate(cost, loss**measured.power, method))
        ranked = rank_steps(options)
        cheapest, before = runs.figure(ranked.methods_after(0)), weights_size(tagged.model)
        with stages("choose"):
            if bound is None:
                smallest = before + sum(switched.added[pair] for pair in ranked.methods_after(0).items())
                steps = ranked.best_for((budget or 0) - smallest)
            else:
                steps = ranked.fewest_within(runs.within(bound))
        for judgements in range(1, JUDGEMENTS + 1):
            choice = ranked.methods_after(steps)
            recipe = recipe_for(tagged, [*units, *kept], choice)
            with stages("judge"):
                made = quantized(tagged, recipe, data=choosing, ranges=ranges)
                judged, in_batches = _judge(made.model, tagged.model, switched, measured, judging)
            figures = [judged] if in_batches is None else [judged, in_batches]
            if bound is None or all(map(bound.holds, figures)) or len(steps) == len(ranked.steps):
                break
            if judgements < JUDGEMENTS:
                limit = _stricter(bound, runs, runs.figure(choice), figures)
                steps = ranked.steps[: max(len(steps) + 1, len(ranked.fewest_within(runs.within(limit))))]
    after, last = made.outcome.bytes_after, {step.unit: step.option for step in steps}
    wanted = str(bound or f"at most {budget} bytes of weights")
    notes = (
        f"the {'fastest' if least == 'time' else 'smallest'} of {', '.join(map(str, methods))} and keep with {wanted}",
        f"{measured.name} {judged:.4g} on {plural(len(judging), 'input', 'that were')} not used to choose"
        + (f", {in_batches:.4g} in padded batches of {ROWS}" if in_batches is not None else ""),
    )
    return Search(
        made=made,
        tagged=tagged,
        found=SearchResult(
            recipe=Recipe(recipe.rules, notes, bound.limit if bound is not None and measured.name == "error" else None),
            metric=measured.name,
            least=least,
            times=whole_time(tagged, made.model, choosing[0], device) if least == "time" and choice else None,
            kept=sum(option.method is None for option in ranked.start),
            bound=wanted,
            met=all(map(bound.holds, figures)) if bound is not None else after <= (budget or 0),
            judged=judged,
            in_batches=in_batches,
            seen=runs.figure(choice),
            cheapest=cheapest,
            changed=[
                MoreThanCheapest(
                    units[unit].calls,
                    KEEP if option.method is None else str(option.method),
                    ranked.start[unit].loss ** (1 / measured.power),
                    option.cost - ranked.start[unit].cost,
                )
                for unit, option in last.items()
            ],
            modules=len(units),
            bytes_before=before,
            bytes_after=after,
            judgements=judgements,
            runs=(len(choosing), len(judging)),
        ),
    )


def recipe_for(tagged: TaggedFile, units: Sequence[Unit], choice: Choice) -> Recipe:
    """The recipe that gives units the methods of a choice, with a rule for a whole module where one will do."""
    method_of = {address: str(choice.get(index, KEEP)) for index, unit in enumerate(units) for address in unit.calls}
    needed: dict[ModuleCall | None, Counter[str]] = defaultdict(Counter)
    for traced in reversed(tagged.calls.calls):
        needed[traced.call].update([method_of[str(traced.call)]] if str(traced.call) in method_of else [])
        needed[traced.parent].update(needed[traced.call])
    rules: list[Rule] = []
    default: dict[ModuleCall | None, str] = {None: KEEP}
    for traced in tagged.calls:
        around, inside = default[traced.parent], needed[traced.call]
        most = max(inside, key=lambda method: (inside[method], method == around)) if inside else around
        default[traced.call] = chosen = method_of.get(str(traced.call), most)
        if chosen != around:
            rules.append(Rule(str(traced.call), chosen))
    together = (
        (method, tuple(selector for rule in same_rules for selector in rule.selectors))
        for method, same_rules in itertools.groupby(reversed(rules), key=lambda rule: rule.method)
    )
    return Recipe(
        tuple(Rule(same_rules[0] if len(same_rules) == 1 else same_rules, method) for method, same_rules in together)
    )


def _chosen_and_kept(
    tagged: TaggedFile, units: Sequence[Unit], keep: Sequence[str], only: Sequence[str]
) -> tuple[list[Unit], list[Unit]]:
    """The units that may be quantized, and all others: those that ``keep`` selects or ``only`` does not."""
    kept = {str(call) for call in tagged.select(*keep).inside} if keep else set()
    wanted = {str(call) for call in tagged.select(*only).inside}
    free = [unit for unit in units if kept.isdisjoint(unit.calls) and wanted.issuperset(unit.calls)]
    return free, [unit for unit in units if unit not in free]


def _losses_alone(
    switched: SwitchableSession, methods: Sequence[Method], feeds: RunInputs, metric: Metric, workers: Workers | None
) -> dict[tuple[int, Method], float]:
    """The mean loss of each unit with each method alone."""
    pairs = list(itertools.product(range(len(switched.units)), methods))
    losses, _ = measure_alone(switched, pairs, feeds, metric, workers=workers)
    return dict(zip(pairs, losses.mean(axis=0), strict=True))


def _check_least(least: Least, within: str | None) -> None:
    if least == "time" and within is None:
        raise UsageError("--budget is for the fewest bytes: give --least time with a bound on the error, --within")


def _check_unquantized(bound: ErrorBound, runs: _Runs, path: Path, device: str) -> None:
    if not bound.holds(figure := runs.figure({})):
        raise CheckError(
            f"unquantized, {path} has {bound.metric.name} {figure:.3g} on {device}, beyond {bound}: make it right "
            f"there first, with `modelexport verify {path} --device {device} --fix -o OUT.onnx`"
        )


def _judge(
    model: ir.Model, before: ir.Model, switched: SwitchableSession, metric: Metric, feeds: RunInputs
) -> tuple[float, float | None]:
    """The mean figures of a quantized model, in a session as users open it: on single inputs, and in padded batches.

    Where products of integers may saturate, each is the worse of this processor's figure and that of exact integers.

    Args:
        before: The model that was quantized.
    """
    opened, single_rights = switched.opened(model), [switched.run(inputs) for inputs in feeds]
    rights: list[Any] = []
    outputs: list[list[Any]] = [[] for _ in opened]
    for inputs, rows_of_runs in padded_batches(before, feeds, switched.output):
        with suppress(UsageError):  # the model does not take a batch of these
            right, results = switched.run(inputs), [run(inputs) for run in opened]
            rights += rows_of_runs(right)
            for collected_rows, output in zip(outputs, results, strict=True):
                collected_rows.extend([None] if output is None else rows_of_runs(output))
    singles = [_figure(metric, single_rights, [run(inputs) for inputs in feeds]) for run in opened]
    batches = [_figure(metric, rights, rows) for rows in outputs] if rights else []
    return metric.worst(singles, single_rights), metric.worst(batches, rights) if rights else None


def _figure(metric: Metric, rights: Sequence[Any], outputs: Sequence[Any]) -> float:
    """The mean of a metric over runs; not a number, which is within no bound, if the device failed in one."""
    return float("nan") if any(output is None for output in outputs) else mean_figure(metric, rights, outputs)


def _stricter(bound: ErrorBound, runs: _Runs, seen: float, judged: Sequence[float]) -> ErrorBound:
    """A bound that the choice has to meet where it was chosen, so that it is met where it is judged."""
    ideal = mean_figure(bound.metric, runs.rights, runs.rights)
    apart = max(*(abs(figure - ideal) for figure in judged), 1e-30)
    allowed = abs(seen - ideal) * abs(bound.limit - ideal) / apart * _STRICTER
    return replace(bound, limit=ideal + (allowed if bound.limit >= ideal else -allowed))
