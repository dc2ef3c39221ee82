"""``profile``: the time and memory of a run by module, although ONNX Runtime runs its own optimized graph.

The optimized graph that ONNX Runtime saves is a descendant of the tagged file like any other: ``lineage`` finds the
owners of its nodes, in memory, and the names in the profile are those of its nodes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.graph.nodes import all_nodes
from modelexport.graph.owners import owner_of
from modelexport.graph.snapshot import SourceGraph, take_snapshot
from modelexport.lineage.descent import trace_owners
from modelexport.measure import columns
from modelexport.measure.columns import Column, Kind
from modelexport.measure.feeds import make_feeds
from modelexport.measure.page import embedded_page
from modelexport.measure.runs import Kernel, Level, Profile, profile_runs, time_runs
from modelexport.measure.table import NodeFigures, Table
from modelexport.runtime.sessions import CPU
from modelexport.tagged.file import TaggedFile, read_tagged

AGAINST = Column("against_seconds", "seconds", scale=10**9)
RATIO = Column("against_ratio", "of seconds", Kind.RATIO, of=("against_seconds", "seconds"))
RUNTIME = "(ONNX Runtime)"
"""The name of the time of a run that is not spent in its nodes."""


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
    """The time of all nodes together."""
    attributed: float
    """The share of the nodes' time that belongs to modules."""


@dataclass(frozen=True)
class ModuleProfile:
    """The result of a profile."""

    table: Table
    facts: RunFacts
    feeds: Mapping[str, Any]
    """The inputs."""
    against: RunFacts | None = None
    """The run of the other file, if two were run."""

    def _repr_html_(self) -> str:
        return embedded_page(self.table, main=columns.SECONDS.name)

    def document(self, **options: Any) -> dict[str, Any]:
        """The table's document, with ``run`` and, if there is another file, ``against``."""
        document = self.table.document(**options) | {"run": msgspec.to_builtins(self.facts)}
        return document | ({"against": msgspec.to_builtins(self.against)} if self.against is not None else {})


def profile(
    file: str | Path | TaggedFile,
    inputs: Mapping[str, Any] | Path | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    runs: int = 10,
    warmup: int = 2,
    level: Level = "all",
    provider: str = CPU,
    seed: int = 0,
) -> ModuleProfile:
    """Run a tagged file in ONNX Runtime as users do, and measure the time and memory of each module call.

    Args:
        inputs: Name of an input to its array, or a file of them (``.npz``, ``.safetensors``, or a JSON description); by
            default those of the reference values beside the file, or else random ones.
        sizes: Sizes of dynamic axes for random inputs.
        runs: The number of measured runs; the figures are medians.
        warmup: The number of runs before these.
        level: ONNX Runtime's optimization level.
        provider: Its execution provider.
        seed: For random inputs.

    Returns:
        A table of ``seconds``, ``share``, ``spread`` and ``peak_bytes``; ONNX Runtime's own overhead is ``outside``.

    Raises:
        FileFormatError: The file is missing or has no tags.
        InputsError: The inputs do not fit.
        UsageError: ONNX Runtime cannot load or run the file, or does not have the provider.
    """
    tagged = file if isinstance(file, TaggedFile) else read_tagged(file)
    with tempfile.TemporaryDirectory(prefix="modelexport-profile-") as temporary:
        folder = Path(temporary)
        with _runnable(tagged, folder) as path:
            feeds, source = make_feeds(tagged, path, inputs, sizes or {}, provider=provider, seed=seed)
            wall = time_runs(path, feeds, runs=runs, warmup=warmup, level=level, provider=provider)
            measured, optimized = profile_runs(
                path, feeds, folder, runs=runs, warmup=warmup, level=level, provider=provider
            )
            nodes = _joined(tagged, load_onnx(optimized), measured)
    facts = RunFacts(
        file=str(tagged.path),
        provider=provider,
        level=level,
        runs=runs,
        warmup=warmup,
        inputs={name: f"{array.dtype}{list(array.shape)}" for name, array in feeds.items()},
        inputs_from=source,
        wall_seconds=statistics.median(wall) / 1e9,
        profiled_seconds=_whole_runs(measured) / 1e9,
        kernel_seconds=_total(nodes) / 1e9,
        attributed=_total(node for node in nodes if node.calls) / _total(nodes) if _total(nodes) else 1.0,
    )
    return ModuleProfile(_table(tagged, nodes, measured, facts), facts, feeds)


def _total(nodes: Iterable[NodeFigures]) -> int:
    """Nanoseconds."""
    return sum(node.figures[columns.SECONDS.name] for node in nodes)


def _whole_runs(measured: Profile) -> float:
    """Nanoseconds of a whole run: all its nodes and the runtime's work between them."""
    runs = zip(measured.overhead, *measured.kernels.values(), strict=True)
    return float(statistics.median(sum(taken) for taken in runs))


def _table(tagged: TaggedFile, nodes: Sequence[NodeFigures], measured: Profile, facts: RunFacts) -> Table:
    """The table of a profile, with a row for the runtime's work between the nodes."""
    between = NodeFigures(RUNTIME, "", (), _seconds(measured.overhead), tuple(measured.overhead))
    return Table(
        calls=tagged.calls,
        tags=tagged.tags,
        columns=(
            columns.SECONDS,
            columns.SHARE,
            columns.SPREAD,
            *((columns.PEAK_BYTES,) if measured.memory else ()),
        ),
        nodes=(*nodes, between),
        name=tagged.path.name,
        graph=tagged.model.graph.name or "main_graph",
        notes=tuple(_notes(facts)),
    )


def profile_against(one: ModuleProfile, other: ModuleProfile) -> ModuleProfile:
    """Two profiles side by side: ``against_seconds`` of the other, and their ratio to the first's.

    A call that only the other file has is counted for the innermost enclosing call that both files have.
    """
    calls = one.table.calls

    def known(call: ModuleCall) -> ModuleCall | None:
        return next((above for above in reversed(other.table.calls.stack(call)) if above in calls), None)

    added = [
        replace(
            node,
            calls=tuple(dict.fromkeys(found for call in node.calls if (found := known(call)) is not None)),
            figures={AGAINST.name: node.figures["seconds"]},
            runs=(),
            value="",
        )
        for node in other.table.nodes
    ]
    return _beside(one, added, {}, other.facts)


def profile_beside(one: ModuleProfile, seconds: Mapping[ModuleCall, int], name: str) -> ModuleProfile:
    """A profile side by side with the nanoseconds of each call itself measured elsewhere, such as in PyTorch."""
    own = {call: taken for call, taken in seconds.items() if call in one.table.calls}
    rest = sum(seconds.values()) - sum(own.values())
    added = [NodeFigures(f"({name})", "", (), {AGAINST.name: rest})] if rest else []
    facts = msgspec.structs.replace(
        one.facts, file=name, wall_seconds=sum(seconds.values()) / 1e9, profiled_seconds=sum(seconds.values()) / 1e9
    )
    return _beside(one, added, {AGAINST.name: own}, facts)


def _beside(
    one: ModuleProfile,
    added: Sequence[NodeFigures],
    direct: Mapping[str, Mapping[ModuleCall, int]],
    facts: RunFacts,
) -> ModuleProfile:
    first, *more = one.table.columns
    note = f"against: {facts.file}, {facts.wall_seconds * 1e3:,.3g} ms a run"
    table = replace(
        one.table,
        columns=(first, AGAINST, RATIO, *more),
        nodes=(*one.table.nodes, *added),
        direct={**one.table.direct, **direct},
        notes=(*one.table.notes, note),
    )
    return ModuleProfile(table, one.facts, one.feeds, facts)


@contextmanager
def _runnable(tagged: TaggedFile, folder: Path) -> Iterator[Path]:
    """The file itself if its tags are metadata, or a flat copy: ONNX Runtime renames the nodes that it inlines."""
    if tagged.encoding == "metadata":
        yield tagged.path
        return
    path = folder / "flat.onnx"
    save_model(tagged.model, path)
    yield path


def _joined(tagged: TaggedFile, optimized: ir.Model, measured: Profile) -> list[NodeFigures]:
    """The time and memory of each node of the optimized graph, with the calls that own it."""
    source = take_snapshot(tagged.model)
    trace_owners(source, optimized)
    by_name: dict[tuple[str, str], list[ir.Node]] = defaultdict(list)
    for node in all_nodes(optimized):
        by_name[node.name or "", node.op_type].append(node)
    kernels: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in sorted(measured.kernels, key=lambda kernel: int(kernel.index or 0)):
        kernels[kernel.name, kernel.op_type].append(kernel)
    found = []
    for key, same in kernels.items():
        nodes = by_name.get(key, [])
        for position, kernel in enumerate(same):
            made_by = nodes[min(position, len(nodes) - 1)] if nodes else None
            taken = measured.kernels[kernel]
            figures = _seconds(taken)
            if (used := measured.memory.get(Kernel(kernel.name, kernel.op_type, ""))) is not None:
                figures[columns.PEAK_BYTES.name] = used
            owner = owner_of(made_by) if made_by is not None else None
            calls = owner.calls if owner is not None else ()
            made = _known_value(source, made_by) if made_by is not None else ""
            found.append(NodeFigures(kernel.name, kernel.op_type, calls, figures, tuple(taken), made))
    return found


def _known_value(source: SourceGraph, node: ir.Node) -> str:
    """The first value of the tagged file that a node produces, or that its outputs lead to."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop(0)
        for value in current.outputs:
            if value.name and value.name in source.producer:
                return value.name
            following = [user for user, _ in value.uses() if user not in seen]
            seen.update(following)
            pending.extend(following)
    return ""


def _seconds(taken: Sequence[int]) -> dict[str, int]:
    return {columns.SECONDS.name: round(statistics.median(taken))}


def _notes(facts: RunFacts) -> list[str]:
    wall, profiled = facts.wall_seconds, facts.profiled_seconds
    sizes = ", ".join(f"{name} {kind}" for name, kind in facts.inputs.items())
    return [
        f"a run takes {wall * 1e3:,.3g} ms, with profiling {profiled * 1e3:,.3g} ms ({profiled / wall - 1:+.1%}); "
        f"{facts.attributed:.1%} of the time of nodes belongs to modules",
        f"{facts.runs} runs after {facts.warmup} warm-up runs, {facts.provider}, optimization level {facts.level}; "
        f"inputs: {facts.inputs_from} ({sizes})",
    ]
