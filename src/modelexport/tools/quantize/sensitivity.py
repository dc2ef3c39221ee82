"""``sensitivity``: how much the outputs change when one module alone is quantized."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modelexport.core.result_display import Shown
from modelexport.core.text import plural
from modelexport.core.timed_stages import with_progress
from modelexport.errors import UsageError
from modelexport.files.path_or_model import Source
from modelexport.graph.node_owners import owner_of
from modelexport.runtime.devices import CPU, find_device
from modelexport.tables import columns
from modelexport.tables.model_explorer import explorer_places
from modelexport.tables.table import NodeFigures, Table, share_out
from modelexport.tagged.file import TaggedFile, as_tagged
from modelexport.tools.quantize.executors import Executor, Workers, losses_of, open_switched, workers_for
from modelexport.tools.quantize.methods import Method, parse_method
from modelexport.tools.quantize.metrics_and_bounds import Metric, find_metric
from modelexport.tools.quantize.prepared_for_quantizers import prepared
from modelexport.tools.quantize.quantize import calibrate
from modelexport.tools.quantize.recipes import left_alone
from modelexport.tools.quantize.switched_model import SwitchableSession, Unit, find_units
from modelexport.traces.calibration_data import RunInputs, given_runs

STEADY = 0.95
"""The rank correlation of a run with those before it from which no further run is made."""
SAVED_BYTES = columns.Column("saved_bytes", "bytes")
COLUMNS = (columns.SENSITIVITY, SAVED_BYTES)


class Sensitivity(msgspec.Struct, frozen=True):
    """How much a unit's quantization alone changes the output."""

    calls: tuple[str, ...]
    """The addresses of calls that get one method."""
    loss: float
    """The mean over the runs."""
    saved_bytes: int
    """The bytes by which the weights of the calls become smaller."""


@dataclass(frozen=True, repr=False)
class SensitivityReport(Shown):
    """The result of :func:`sensitivity`."""

    table: Table
    units: list[Sensitivity]
    """Largest loss first."""
    runs: int
    """The runs that were used, of those that the data has."""
    agreement: float | None
    """The rank correlation of the last run with the mean of those before; ``None`` of one run."""

    def document(self, **options: Any) -> dict[str, Any]:
        """The table's document, with ``runs``, ``agreement`` and the ``groups`` of modules."""
        facts = {"runs": self.runs, "agreement": self.agreement, "groups": msgspec.to_builtins(self.units)}
        return self.table.document(**options) | facts


def sensitivity(
    file: Source | TaggedFile,
    *,
    to: str,
    data: RunInputs | str | Path,
    metric: str = "error",
    output_name: str | None = None,
    processor: str | Path | None = None,
    steady: float = STEADY,
    device: str = CPU,
    executor: Executor | int | None = None,
) -> SensitivityReport:
    """How much the quantization of each module alone changes the output of a tagged file.

    Args:
        file: A tagged file.
        to: The method.
        data: Inputs, or a file or folder of them.
        metric: ``error``, ``cosine``, ``kl``, ``top1``, or ``file.py:function`` of the right array and the one found.
        output_name: The output that is compared; by default the first of floating-point numbers.
        processor: The folder of the tokenizer or image processor that ``data`` needs; by default that of ``file``.
        device: Where the versions run: ``NAME[,option=value...]``; each is compared with the file itself there.
        executor: Measures modules elsewhere: anything with ``submit``, as ``concurrent.futures`` and Dask's
            ``Client.get_executor()`` have it, or a number of processes. Workers have to see the file and the data.
        steady: No further run is used once a run orders the modules as those before did, by rank correlation. With 2,
            all are used.

    Raises:
        UsageError: There is no such method, metric or output, or no module can be quantized.
        FileFormatError: The file or the data cannot be read.
        InputsError: The data do not fit.
    """
    tagged, method, measured = prepared(as_tagged(file)), parse_method(to), find_metric(metric)
    if method is None:
        raise UsageError("nothing changes if modules are kept: give a method")
    feeds = given_runs(tagged, data, processor)
    units = find_units(tagged, [method])
    notes = [*left_alone((node, method) for node in tagged.model.graph).values()]
    ranges = calibrate(tagged.model, [method], feeds)
    what = {"processor": processor, "output": output_name, "device": device, "metric": metric, "ranges": ranges}
    with (
        open_switched(tagged, units, [method], ranges, output_name, device) as switched,
        workers_for(executor, tagged, units, [method], data, **what) as workers,
    ):
        choices = [(i, method) for i in range(len(units))]
        losses, agreement = measure_alone(switched, choices, feeds, measured, steady, notes.append, workers)
        on_device = not find_device(device).is_this_processor
        itself = measured.loss(switched.run(feeds[0]), switched.kept(feeds[0])) if on_device else 0.0
    mean = losses.mean(axis=0)
    losses_of_units = [
        Sensitivity(unit.calls, float(mean[index]), -switched.added[index, method]) for index, unit in enumerate(units)
    ]
    where = f" on {device}, against the unquantized file there," if on_device else ""
    runs_text = plural(len(losses), "run") if len(losses) == len(feeds) else f"{len(losses)} of {len(feeds)} runs"
    notes.insert(0, f"{measured.name} of {switched.output}{where} with one module in {method}, the mean of {runs_text}")
    if on_device:
        notes.append(
            f"not in these figures: the unquantized file has {measured.name} {itself:.2g} there against the CPU "
            f"(`modelexport verify {tagged.path.name} --device {device} --fix` finds why)"
        )
    if agreement is not None:
        changed = "did not change" if agreement >= min(steady, STEADY) else "changed"
        notes.append(f"the last run {changed} the order of the modules: rank correlation {agreement:.2f}")
    order = sorted(losses_of_units, key=lambda unit_loss: -unit_loss.loss)
    return SensitivityReport(_table(tagged, units, losses_of_units, measured, notes), order, len(losses), agreement)


def measure_alone(
    switched: SwitchableSession,
    choices: Sequence[tuple[int, Method]],
    feeds: RunInputs,
    metric: Metric,
    steady: float = STEADY,
    tell: Callable[[str], None] = lambda failure: None,
    workers: Workers | None = None,
) -> tuple[Any, float | None]:
    """The loss of each choice alone in each run, and how the last run agrees with those before it.

    A choice that a device does not run has an infinite loss, and ``tell`` is called with a line about it. ``workers``
    measure in other processes.

    One run tells nearly as much about the order of the modules as many; so runs are used until they agree.
    """
    losses: list[list[float]] = []
    agreement, failed = None, dict[tuple[int, Method], str]()
    pieces = with_progress(range(len(feeds) * len(choices)))
    for run, inputs in enumerate(feeds):
        pending = [choice for choice in choices if choice not in failed]
        if workers is None:
            found = losses_of(switched, inputs, (choice for choice, _ in zip(pending, pieces, strict=False)), metric)
        else:
            found = workers.measure(run, pending, partial(losses_of, switched, inputs, metric=metric))
        for choice, (_, failure) in zip(pending, found, strict=True):
            if failure:
                failed[choice] = failure
                tell(f"{', '.join(switched.units[choice[0]].calls)} in {choice[1]} does not run: {failure}")
        loss_of = dict(zip(pending, (loss for loss, _ in found), strict=True))
        losses.append([loss_of.get(choice, float("inf")) for choice in choices])
        if len(losses) > 1:
            agreement = rank_correlation(np.mean(losses[:-1], axis=0), losses[-1])
            if agreement >= steady:
                break
    return np.array(losses), agreement


def rank_correlation(first_figures: Iterable[float], other_figures: Iterable[float]) -> float:
    """Spearman's coefficient: equal figures share their mean rank. If all of one side are equal it is 0, of both 1."""
    first, second = (_ranks(np.array(list(figures), dtype=np.float64)) for figures in (first_figures, other_figures))
    size = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / size if size else float(not first.any() and not second.any())


def _ranks(figures: Any) -> Any:
    """The ranks of figures, with a mean of zero."""
    _, place, count = np.unique(figures, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count + 1) / 2)[place]
    return ranks - ranks.mean()


def _table(
    tagged: TaggedFile, units: Sequence[Unit], losses: Sequence[Sensitivity], metric: Metric, notes: Sequence[str]
) -> Table:
    """The table of the figures: a call has those of the unit that its nodes are in."""
    of_node = {name: index for index, unit in enumerate(units) for name in unit.nodes}
    shown = replace(columns.SENSITIVITY, unit=metric.unit or f"change of {metric.name}")
    places = explorer_places(tagged)
    nodes = []
    saved = [iter(share_out(loss.saved_bytes, len(unit.nodes))) for unit, loss in zip(units, losses, strict=True)]
    for node in tagged.nodes:
        owner = owner_of(node)
        figures: Mapping[str, Any] = {}
        index = of_node.get(node.name or "")
        if index is not None:
            loss = {shown.name: losses[index].loss} if math.isfinite(losses[index].loss) else {}
            figures = {**loss, SAVED_BYTES.name: next(saved[index])}
        calls = owner.calls if owner is not None else ()
        nodes.append(NodeFigures(node.name or "", node.op_type, calls, figures, place=places.get(node, ("", ""))))
    return Table(
        tagged.calls, tagged.tags, (shown, SAVED_BYTES), tuple(nodes), name=tagged.path.name, notes=tuple(notes)
    )
