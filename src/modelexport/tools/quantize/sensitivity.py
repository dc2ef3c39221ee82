"""``sensitivity``: how much the outputs change when one module alone is quantized."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modelexport.core.text import plural
from modelexport.core.timed_stages import with_progress
from modelexport.errors import UsageError
from modelexport.files.atomic_writing import scratch
from modelexport.files.path_or_model import Source
from modelexport.graph.node_owners import owner_of
from modelexport.runtime.devices import CPU, find_device
from modelexport.tables import columns
from modelexport.tables.model_explorer import explorer_places
from modelexport.tables.table import NodeFigures, Table, share_out
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools.quantize.methods import Method, parse_method
from modelexport.tools.quantize.metrics_and_bounds import Metric, find_metric
from modelexport.tools.quantize.prepared_for_quantizers import prepared
from modelexport.tools.quantize.quantize import calibrate
from modelexport.tools.quantize.switched_model import SwitchableSession, Unit, find_units
from modelexport.traces.calibration_data import RunInputs, given_runs

STEADY = 0.95
"""The rank correlation with the runs before from which another run would not change the order of the modules."""
SAVED_BYTES = columns.Column("saved_bytes", "bytes")
COLUMNS = (columns.SENSITIVITY, SAVED_BYTES)


class Sensitivity(msgspec.Struct, frozen=True):
    """How much a unit's quantization alone changes the output."""

    calls: tuple[str, ...]
    """The addresses of calls that get one method."""
    loss: float
    """The mean over the runs."""
    saved_bytes: int
    """What their weights get smaller by."""


@dataclass(frozen=True)
class SensitivityReport:
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
    file: Source,
    *,
    to: str,
    data: RunInputs | str | Path,
    metric: str = "error",
    output_name: str | None = None,
    processor: str | Path | None = None,
    steady: float = STEADY,
    device: str = CPU,
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
        steady: No further run is used once a run orders the modules as those before did, by rank correlation. With 2,
            all are used.

    Raises:
        UsageError: There is no such method, metric or output, or no module can be quantized.
        FileFormatError: The file or the data cannot be read.
        InputsError: The data do not fit.
    """
    tagged, method, measured = prepared(read_tagged(file)), parse_method(to), find_metric(metric)
    if method is None:
        raise UsageError("nothing changes if modules are kept: give a method")
    feeds = given_runs(tagged, data, processor)
    units = find_units(tagged, [method])
    notes = list[str]()
    with open_switched(tagged, units, [method], feeds, output_name, device) as switched:
        choices = [(i, method) for i in range(len(units))]
        losses, agreement = measure_alone(switched, choices, feeds, measured, steady, notes.append)
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


def open_switched(
    tagged: TaggedFile,
    units: Sequence[Unit],
    methods: Sequence[Method],
    feeds: RunInputs,
    output: str | None,
    device: str = CPU,
) -> SwitchableSession:
    """A session in which every unit can have every method; on a device, one for each choice."""
    if not units:
        names = ", ".join(map(str, methods))
        raise UsageError(f"{tagged.path} has no module that {names} can quantize: no node has a weight it is for")
    if not find_device(device).is_this_processor:
        from modelexport.tools.quantize.measured_on_device import OnDevice

        return OnDevice(tagged, units, methods, feeds, device, output)
    with scratch(tagged.path.parent) as folder:
        measured = any(method.row.needs_data for method in methods)
        ranges = calibrate(tagged.model, feeds, folder) if measured else None
        return SwitchableSession(tagged, units, methods, ranges=ranges, output=output)


def measure_alone(
    switched: SwitchableSession,
    choices: Sequence[tuple[int, Method]],
    feeds: RunInputs,
    metric: Metric,
    steady: float = STEADY,
    tell: Callable[[str], None] = lambda failure: None,
) -> tuple[Any, float | None]:
    """The loss of each choice alone in each run, and how the last run agrees with those before it.

    A choice that a device does not run has an infinite loss, and ``tell`` is called with a line about it.

    One run tells nearly as much about the order of the modules as many; so runs are used until they agree.
    """
    losses: list[list[float]] = []
    agreement, failed = None, set[tuple[int, Method]]()
    pieces = with_progress(range(len(feeds) * len(choices)))
    for inputs in feeds:
        right = switched.kept(inputs)
        losses.append([])
        for (index, method), _ in zip(choices, pieces, strict=False):
            ways = switched.ways if (index, method) not in failed else ()
            computed = [switched.run(inputs, {index: method}, exact=exact) for exact in ways]
            if any(output is None for output in computed):
                failed.add((index, method))
                tell(f"{', '.join(switched.units[index].calls)} in {method} does not run: {switched.failure}")
            runs = computed and (index, method) not in failed
            losses[-1].append(max(metric.loss(right, output) for output in computed) if runs else float("inf"))
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
    """Ranks around zero."""
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
