"""``profile``: the time and memory of a run by module, although ONNX Runtime runs its own optimized graph.

The optimized graph that ONNX Runtime saves is a descendant of the tagged file like any other: ``lineage`` finds the
owners of its nodes, in memory, and the names in the profile are those of its nodes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from modelexport.core.text import plural
from modelexport.core.timed_stages import with_progress
from modelexport.files.onnx_models import load_onnx
from modelexport.files.path_or_model import Source
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes
from modelexport.graph.snapshot import take_snapshot
from modelexport.graph.unique_names import branches_named_apart
from modelexport.lineage.owners_by_matching import trace_owners
from modelexport.runtime.devices import CPU, find_device
from modelexport.runtime.sessions import Level
from modelexport.tables import columns
from modelexport.tables.costs import read_one
from modelexport.tables.html_page import Page, Section, embedded_page
from modelexport.tables.model_explorer import ExplorerPlace, explorer_places
from modelexport.tables.onnxruntime_profiler import Kernel, Profile, Run, profile_runs, time_runs
from modelexport.tables.table import NodeFigures, Table
from modelexport.tables.turns import Turns, compare_turns, turns_line
from modelexport.tagged.file import TaggedFile
from modelexport.tagged.strip_and_inline import flat_file
from modelexport.traces.inputs_and_example_sizes import make_feeds

SESSION = "(session)"
"""The row for the time of a run outside of its nodes, at most that of a run with the profiler."""

_LISTED = 5
"""Inputs that a note lists."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How a file was run, and how long the whole run took. Seconds; medians of the runs."""

    file: str
    provider: str
    level: str
    runs: int
    warmup: int
    inputs: dict[str, str]
    """Name of an input to element type and shape."""
    inputs_from: str
    wall_seconds: float
    """The time of ``session.run`` without profiling."""
    profiled_seconds: float
    """The time of a run with profiling, as measured by ONNX Runtime."""
    kernel_seconds: float
    """The medians of all nodes together, without the profiler, as the table has them."""
    scale: float
    """The factor by which the medians were multiplied: below 1 if their sum exceeds the time of a run."""
    profiler_seconds: float
    """The time that the profiler adds to each node, which is subtracted: nearly that of the fastest node."""
    attributed: float
    """The share of the time of nodes that belongs to modules."""
    spread_seconds: float = 0.0
    """The interquartile range of the time of nodes in the runs, or the sum of those of the modules if it is larger."""


@dataclass(frozen=True)
class ModuleProfile:
    """The result of a profile."""

    table: Table
    facts: RunFacts
    feeds: Mapping[str, Any]
    """The inputs."""
    against: RunFacts | None = None
    """The run of the other file, if two were run."""
    turns: Turns | None = None
    """How long it takes beside the file with which it ran in turns."""

    def __repr__(self) -> str:
        took = f"{self.facts.wall_seconds * 1e3:,.3g} ms a run on {self.facts.provider}"
        return f"<ModuleProfile {self.facts.file}: {took}, {self.table!r}>"

    def _repr_html_(self) -> str:
        return embedded_page(Page(self.table, columns.SECONDS.name, self.sections))

    @property
    def sections(self) -> list[Section]:
        """What a page says before the times: whether they can be told apart."""
        notes = [note for facts in (self.facts, self.against) if facts is not None for note in noise_note(facts)]
        if self.turns is not None and self.against is not None:
            notes.insert(0, turns_line(self.turns, *(Path(each.file).name for each in (self.facts, self.against))))
        return [("Time", [note.partition(": ")[::2] for note in notes])] if notes else []

    def document(self, **options: Any) -> dict[str, Any]:
        """The table's document, with ``run`` and, if there is another file, ``against``."""
        document = self.table.document(**options) | {"run": msgspec.to_builtins(self.facts)}
        for name, facts in (("against", self.against), ("turns", self.turns)):
            document |= {name: msgspec.to_builtins(facts)} if facts is not None else {}
        return document


def profile(
    file: Source | TaggedFile,
    inputs: Mapping[str, Any] | str | Path | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    runs: int = 10,
    warmup: int = 2,
    level: Level = "all",
    provider: str = CPU,
    seed: int = 0,
    inputs_from: str = "",
) -> ModuleProfile:
    """Run a tagged file in ONNX Runtime as users do, and measure the time and memory of each module call.

    Args:
        inputs: Name of an input to its array, or a file of them (``.npz``, ``.safetensors``, or a JSON description); by
            default those of the reference values beside the file, or else random ones.
        sizes: Sizes of dynamic axes for random inputs.
        runs, warmup: The number of measured runs, of which the figures are medians, and of the runs before these.
        level: ONNX Runtime's optimization level.
        provider, seed: Its execution provider; the seed of random inputs.
        inputs_from: Where ``inputs`` come from, for the reader.

    Returns:
        A table of ``seconds``, ``share``, ``spread`` and ``peak_bytes``; ``outside`` is what belongs to no module:
        nodes that ONNX Runtime adds, and what a run takes beside its nodes, so that all adds up to the time of a run.

    Raises:
        FileFormatError: The file is missing or damaged.
        InputsError: The inputs do not fit.
        UsageError: ONNX Runtime does not load or run the file, or does not have the provider; or it is a folder.
    """
    how: dict[str, Any] = {"runs": runs, "warmup": warmup, "level": level, "provider": provider}
    with _runs_of([read_one(file)], inputs, sizes or {}, seed) as (source, files):
        (found,) = _profiles(files, how, inputs_from or source)
    return found


def profile_in_turns(
    first: Source | TaggedFile,
    second: Source | TaggedFile,
    inputs: Mapping[str, Any] | str | Path | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    inputs_from: str = "",
    **how: Any,
) -> tuple[ModuleProfile, ModuleProfile]:
    """:func:`profile` of two files that run in turns on the same inputs; the second has the ``turns``.

    Inputs that the second file does not have are left out, as a tool removes those that nothing reads.

    Args:
        how: ``runs``, ``warmup``, ``level`` and ``provider`` of :func:`profile`.

    Raises:
        FileFormatError, InputsError, UsageError: As for :func:`profile`; or the second has an input that the first has
            not.
    """
    how = {"runs": 10, "warmup": 2, "level": "all", "provider": CPU, **how}
    with _runs_of([read_one(first), read_one(second)], inputs, sizes or {}, seed) as (source, files):
        found, other = _profiles(files, how, inputs_from or source)
    return found, other


def time_in_turns(
    first: Source | TaggedFile,
    second: Source | TaggedFile,
    inputs: Mapping[str, Any] | str | Path | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    runs: int = 10,
    warmup: int = 2,
    provider: str = CPU,
    seed: int = 0,
) -> Turns:
    """The time of two files in turns as users run them, on the same inputs as :func:`profile_in_turns`."""
    with _runs_of([read_one(first), read_one(second)], inputs, sizes or {}, seed) as (_, files):
        rounds = with_progress(range(warmup + runs))
        runs_of_files = [file for _, file in files]
        return compare_turns(
            *time_runs(runs_of_files, runs=runs, warmup=warmup, level="all", provider=provider, rounds=rounds)
        )


_Files = Sequence[tuple[TaggedFile, Run]]


@contextmanager
def _runs_of(
    tagged_files: Sequence[TaggedFile],
    inputs: Mapping[str, Any] | str | Path | None,
    sizes: Mapping[str, int],
    seed: int,
) -> Iterator[tuple[str, _Files]]:
    """Files of one model with the same inputs, each in a form that ONNX Runtime runs; and the source of the inputs."""
    with tempfile.TemporaryDirectory(prefix="modelexport-profile-") as temporary:
        runs: list[tuple[TaggedFile, Run]] = []
        source = ""
        for index, tagged in enumerate(tagged_files):
            folder = Path(temporary) / str(index)
            folder.mkdir()
            path = flat_file(tagged, folder, links=True)  # ONNX Runtime renames the nodes of functions
            if index == 0:
                feeds, source = make_feeds(tagged, path, inputs, sizes, provider=CPU, seed=seed)
            else:
                taken = {value.name for value in tagged.model.graph.inputs}
                known = {name: array for name, array in runs[0][1].inputs.items() if name in taken}
                feeds, _ = make_feeds(tagged, path, known, {}, provider=CPU, seed=seed)
            runs.append((tagged, Run(path, feeds, folder)))
        yield source, runs


def _profiles(files: _Files, how: Mapping[str, Any], inputs_from: str) -> list[ModuleProfile]:
    """The profiles of files that run in turns."""
    rounds = with_progress(range(2 * (how["warmup"] + how["runs"]) + 1))
    runs = [run for _, run in files]
    walls = time_runs(runs, rounds=rounds, **how)
    profiles = profile_runs(runs, rounds=rounds, **how)
    found = [
        _module_profile(tagged, run, wall, measured, how, inputs_from)
        for (tagged, run), wall, measured in zip(files, walls, profiles, strict=True)
    ]
    others = zip(found[1:], walls[1:], strict=True)
    return [found[0], *(replace(other, turns=compare_turns(walls[0], wall)) for other, wall in others)]


def _module_profile(
    tagged: TaggedFile, run: Run, wall: Sequence[int], measured: Profile, how: Mapping[str, Any], inputs_from: str
) -> ModuleProfile:
    """The profile of a file by module."""
    kernels = _joined(tagged, load_onnx(run.optimized), measured)
    whole = round(statistics.median(wall))
    kernels, scale = _fitted(kernels, whole, measured.outside)
    taken = _total(kernels)
    facts = RunFacts(
        **how,
        file=str(tagged.path),
        inputs={name: f"{array.dtype}{list(array.shape)}" for name, array in run.inputs.items()},
        inputs_from=inputs_from,
        wall_seconds=whole / 1e9,
        profiled_seconds=statistics.median(measured.whole) / 1e9,
        kernel_seconds=taken / 1e9,
        scale=scale,
        profiler_seconds=measured.profiler / 1e9,
        attributed=_total(node for node in kernels if node.calls) / taken if taken else 1.0,
    )
    kernels.append(NodeFigures(SESSION, "", (), {columns.SECONDS.name: whole - taken}))
    shown = columns.PROFILE if measured.memory else columns.PROFILE[:-1]
    table = Table(calls=tagged.calls, tags=tagged.tags, columns=shown, nodes=tuple(kernels), name=tagged.path.name)
    facts = msgspec.structs.replace(facts, spread_seconds=_spread(table) / 1e9)
    return ModuleProfile(replace(table, notes=tuple(_notes(facts, kernels))), facts, run.inputs)


def _total(nodes: Iterable[NodeFigures]) -> int:
    """Nanoseconds."""
    return sum(node.figures[columns.SECONDS.name] for node in nodes)


def _fitted(nodes: list[NodeFigures], whole: int, outside: int) -> tuple[list[NodeFigures], float]:
    """Nodes that together take a run without profiling but for at most ``outside``, and the factor of their figures.

    A profiled node is slower, by more than what is the same for every node, and on a busy machine the runs without
    profiling may have had more of the processor. Nor do medians add up: on such a machine they lack what interrupted
    the nodes, which is not time outside of them.
    """
    taken = _total(nodes)
    fitted = min(max(taken, whole - outside), whole)
    if fitted == taken or not taken:
        return nodes, 1.0
    timed = (columns.SECONDS.name, columns.NODE_SECONDS.name)
    return [
        replace(
            node,
            figures={
                name: figure * fitted // taken if name in timed else figure for name, figure in node.figures.items()
            },
            runs=tuple(run * fitted // taken for run in node.runs),
        )
        for node in nodes
    ], fitted / taken


def _joined(tagged: TaggedFile, optimized: ir.Model, measured: Profile) -> list[NodeFigures]:
    """The time and memory of each node of the optimized graph, with the calls that own it."""
    with branches_named_apart(tagged.model, optimized):
        trace_owners(take_snapshot(tagged.model), optimized)
    by_name: dict[tuple[str, str], list[ir.Node]] = defaultdict(list)
    for node in all_nodes(optimized):
        by_name[node.name or "", node.op_type].append(node)
    kernels: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in sorted(measured.kernels, key=lambda kernel: int(kernel.index or 0)):
        kernels[kernel.name, kernel.op_type].append(kernel)
    joined = []
    places = _places(tagged)
    for key, same in kernels.items():
        nodes = by_name.get(key, [])
        for position, kernel in enumerate(same):
            made_by = nodes[min(position, len(nodes) - 1)] if nodes else None
            taken = measured.kernels[kernel]
            median = round(statistics.median(taken))
            figures = {columns.SECONDS.name: median, columns.NODE_SECONDS.name: median}
            if (used := measured.memory.get(Kernel(kernel.name, kernel.op_type, ""))) is not None:
                figures[columns.PEAK_BYTES.name] = used
            owner = owner_of(made_by) if made_by is not None else None
            calls = owner.calls if owner is not None else ()
            place = _place(places, made_by) if made_by is not None else ("", "")
            joined.append(NodeFigures(kernel.name, kernel.op_type, calls, figures, tuple(taken), place))
    return joined


def _places(tagged: TaggedFile) -> Mapping[str, ExplorerPlace]:
    """The names of values to the nodes that give them, as Model Explorer has these."""
    shown = explorer_places(tagged)
    named = [(value.name, node) for node in tagged.nodes for value in node.outputs if value.name]
    often = Counter(name for name, _ in named)
    return {name: shown[node] for name, node in named if often[name] == 1 and node in shown}


def _place(places: Mapping[str, ExplorerPlace], node: ir.Node) -> ExplorerPlace:
    """The node of the tagged file that gives what a node gives, or else what that leads to."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop(0)
        for value in current.outputs:
            if value.name and value.name in places:
                return places[value.name]
            following = [user for user, _ in value.uses() if user not in seen]
            seen.update(following)
            pending.extend(following)
    return "", ""


def _spread(table: Table) -> int:
    """Nanoseconds. Noise that hits other modules in each run shows in the whole, noise of each module in their sum."""
    rows, name = table.rows(), columns.SPREAD.name
    return int(max(rows[0].total.get(name, 0), sum(row.own.get(name, 0) for row in rows)))


def noise_note(facts: RunFacts) -> list[str]:
    """A line if the runs differ by more than they take, so that the modules cannot be ranked by their time."""
    if facts.spread_seconds <= facts.kernel_seconds:
        return []
    return [
        f"too noisy to rank: the runs of {facts.file} differ by {facts.spread_seconds * 1e3:,.3g} ms, more than the "
        f"{facts.kernel_seconds * 1e3:,.3g} ms that the nodes take: stop other programs, and measure again"
    ]


def _notes(facts: RunFacts, kernels: Sequence[NodeFigures]) -> list[str]:
    shared = sum(len(node.calls) > 1 for node in kernels)
    divided = [f"{plural(shared, 'kernel')} with several owners: the time is divided equally among them"]
    described = [f"{name} {kind}" for name, kind in facts.inputs.items()]
    more = [f"and {len(described) - _LISTED} more"] if len(described) > _LISTED else []
    sizes = ", ".join(described[:_LISTED] + more)
    simulated = [f"{facts.provider} is a simulator here: its times tell nothing about the device"]
    simulated = simulated if find_device(facts.provider).simulated else []
    scaled = f", and the rest multiplied by {facts.scale:.2f} to fit a run" if facts.scale != 1 else ""
    return [
        *noise_note(facts),
        *(divided if shared else []),
        f"a run takes {facts.wall_seconds * 1e3:,.3g} ms, its nodes {facts.kernel_seconds * 1e3:,.3g} ms; with "
        f"profiling {facts.profiled_seconds * 1e3:,.3g} ms, of which {facts.profiler_seconds * 1e6:,.3g} us a node are "
        f"taken off{scaled}; "
        f"{facts.attributed:.1%} of the time of nodes belongs to modules",
        *simulated,
        f"{facts.runs} runs after {facts.warmup} warm-up runs, {facts.provider}, optimization level {facts.level}; "
        f"inputs: {facts.inputs_from} ({sizes})",
    ]
