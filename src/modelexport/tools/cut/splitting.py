"""``split``: write a tagged file as a package of stages that run in sequence, cut at module boundaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import onnx_ir as ir

from modelexport.core.result_display import Rows, Written
from modelexport.core.selectors import Selection
from modelexport.core.text import plural, short_repr
from modelexport.errors import UsageError
from modelexport.files.manifest_file import write_manifest
from modelexport.files.output_folders import check_package_folder
from modelexport.format.package_manifest import PACKAGE_VERSION, Manifest, PartEntry
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import required_inputs, with_nested
from modelexport.regions import Sharing
from modelexport.regions.graph_cutter import Cut
from modelexport.regions.region import Region
from modelexport.regions.shared_files import SharedFiles, size_of_weights
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.tagged.file import TaggedFile
from modelexport.tools.cut.node_timeline import Timeline
from modelexport.tools.cut.stage_balance import SLACK, Units, balanced_cuts, best_limit, fewest_stages

Measure = Callable[[ir.Node], int]
"""The measure of a node, if stages are balanced by something other than the bytes of their weights."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a model that was split."""

    __repr__ = short_repr

    name: str
    file: str
    modules: list[str]
    """The calls that run completely in it, without those inside them."""
    parts_of: list[str]
    """The calls that run partly in this stage and partly in others, without the calls that contain the whole stage."""
    nodes: int
    borrowed: int
    """The number of these that recompute constants or sizes that another stage has as well."""
    bytes: int
    """Bytes of its weights."""
    share: float
    """Its share of the figure by which the stages are balanced."""
    inputs: list[str]
    outputs: list[str]


class Split(Written, msgspec.Struct, frozen=True, kw_only=True):
    """A model that was split into stages."""

    path: str
    by: str
    largest: int
    """The figure of the largest stage."""
    best: int
    """The smallest possible figure of the largest stage with this number of stages."""
    crossing: list[int]
    """For each cut, the number of values that are computed before it and used after it."""
    stages: list[Stage]
    weights: list[str]

    def _table(self) -> Rows:
        yield "stage", "share", "nodes", "bytes of weights", "modules"
        for stage in self.stages:
            yield stage.file, f"{stage.share:.1%}", stage.nodes, stage.bytes, ", ".join(stage.modules)


def split(
    tagged: TaggedFile,
    folder: str | Path,
    *,
    stages: int | None = None,
    max_bytes: int | None = None,
    at: Sequence[str] = (),
    by: Literal["bytes", "flops", "time"] = "bytes",
    measure: Measure | None = None,
    weights: Sharing = "auto",
) -> Split:
    """Write a model as a folder of stages that run in sequence, with a manifest.

    - Stages are cut where a module call begins or ends; a model that is one module is cut anywhere.
    - Among the cuts whose largest stage is within 10 % of the smallest possible, those that the fewest bytes cross are
      chosen.
    - A stage recomputes what follows from weights and constants alone, and sizes that it can read from its inputs.
    - A weight that several stages use is in each of them.
    - A value has its name in ``tagged`` in every stage, and the inputs of the model go to the stages that use them.

    Args:
        folder: A folder that does not exist, is empty, or has an earlier split, whose files are replaced.
        stages: How many.
        max_bytes: As many as it takes for none to have more bytes of weights; only where these are balanced.
        at: Selectors: a stage begins with each call that they name. With ``stages``, only these are considered.
        by: The figure by which stages are balanced; with ``flops`` or ``time``, ``measure`` has to return it.
        measure: The figure of a node.
        weights: How external weights are handled.

    Raises:
        UsageError: There are too few boundaries, a module does not fit, a selector matches nothing, or ``max_bytes``
            is given and other figures than bytes are balanced.
        FileFormatError: Weights in other files are missing.
        OutputError: The folder cannot be written.
    """
    folder = Path(folder)
    if max_bytes is not None and by != "bytes":
        raise UsageError(f"--max-mb bounds the bytes of weights, and --by {by} balances other figures: give --stages")
    check_package_folder(folder, [tagged.path], ["stages"])
    timeline = Timeline(tagged)
    allowed = _allowed(timeline, tagged.select(*at)) if at else timeline.points
    points = sorted(allowed)
    units = _units(timeline, points, measure)
    if at and stages is None and max_bytes is None:
        ends = list(range(1, len(points) + 1))  # a cut at each of them
    else:
        ends = _balanced(timeline, units, points, stages, max_bytes, tagged.path)
    cuts = [points[end - 1] for end in ends]
    sizes = units.sizes(ends)
    divided = _Stages(tagged, timeline, cuts)
    with checked_and_written(folder, [tagged.path], make=True, package=True) as staging:
        shared, files = SharedFiles(folder, staging, weights), dict[str, None]()
        written: list[Stage] = []
        for index, (cut, places) in enumerate(zip(divided.cut(), divided.places, strict=True)):
            whole, parts_of = timeline.cover(places)
            stage = Stage(
                name=f"stage_{index}",
                file=f"stage_{index}.onnx",
                modules=[str(call) for call in whole],
                parts_of=[str(call) for call in parts_of],
                nodes=sum(1 for _ in cut.model.graph.all_nodes()),
                borrowed=cut.borrowed,
                bytes=size_of_weights(cut.model, tagged.path),
                share=sizes[index] / max(sum(sizes), 1),
                inputs=[value.name or "" for value in required_inputs(cut.model)],
                outputs=[value.name or "" for value in cut.model.graph.outputs],
            )
            files.update(dict.fromkeys(shared.save(cut.model, stage.file)))
            written.append(stage)
        parts = [
            PartEntry(
                name=stage.name,
                file=stage.file,
                module=timeline.around(places).address,
                inputs=stage.inputs,
                outputs=stage.outputs,
            )
            for stage, places in zip(written, divided.places, strict=True)
        ]
        manifest = Manifest(format_version=PACKAGE_VERSION, kind="stages", parts=parts, weights=[*files], files=[])
        write_manifest(manifest, staging)
    return Split(
        path=str(folder),
        by=by,
        largest=max(sizes),
        best=best_limit(_units(timeline, sorted(timeline.points), measure), len(sizes)) if len(sizes) > 1 else sizes[0],
        crossing=[len(timeline.crossing_values(cut)) for cut in cuts],
        stages=written,
        weights=[*files],
    )


def _units(timeline: Timeline, points: Sequence[int], measure: Measure | None) -> Units:
    """What lies between points of a timeline."""
    items = [timeline.items(range(*ends), measure) for ends in pairwise([0, *points, len(timeline.nodes)])]
    return Units(items, [0, *(timeline.crossing[point] for point in points)])


def _allowed(timeline: Timeline, selection: Selection) -> dict[int, None]:
    """The points where the selected calls begin."""
    points: dict[int, None] = {}
    for call in selection.calls:
        if call not in timeline.spans:
            raise UsageError(f"no stage can begin with '{call}': it has no nodes of its own to begin with")
        start, _ = timeline.spans[call]
        if start == 0:
            continue
        if start not in timeline.points:
            raise UsageError(
                f"no stage can begin with '{call}': other modules run at the same time; name the module that it is in"
            )
        points[start] = None
    if not points:
        names = ", ".join(map(str, selection.calls))
        raise UsageError(f"the model begins with {names}: name the modules with which the later stages begin")
    return points


def _balanced(
    timeline: Timeline, units: Units, points: Sequence[int], stages: int | None, max_bytes: int | None, path: Path
) -> list[int]:
    """The units before which the stages begin."""
    largest = max(range(len(units.items)), key=lambda i: units.size(i, i + 1))
    if max_bytes is not None:
        if (least := units.size(largest, largest + 1)) > max_bytes:
            begin = points[largest - 1] if largest else 0
            raise UsageError(
                f"no stage of {path} is within {max_bytes / 1e6:,g} MB: {timeline.name(begin)} alone has "
                f"{least / 1e6:,g} MB of weights"
            )
        stages = max(stages or 1, fewest_stages(units, max_bytes))
    if stages is None or stages < 1:
        raise UsageError(
            "give the number of stages (--stages), the largest size of one (--max-mb), or the modules with which they "
            "begin (--at)"
        )
    if stages > len(units.items):
        raise UsageError(f"{path} cannot be cut into {stages} stages: it has {plural(len(points), 'place')} for a cut")
    best = best_limit(units, stages)
    limit = int(best * (1 + SLACK))
    return balanced_cuts(units, stages, limit if max_bytes is None else min(limit, max_bytes))


class _Stages:
    """Cuts a model at points of its timeline."""

    def __init__(self, tagged: TaggedFile, timeline: Timeline, cuts: Sequence[int]) -> None:
        self._tagged, self._timeline = tagged, timeline
        ends = [0, *cuts, len(timeline.nodes)]
        self.places = [range(start, end) for start, end in pairwise(ends)]
        """The nodes of each stage, as positions in the timeline."""
        self._stage = {
            node: index
            for index, places in enumerate(self.places)
            for place in places
            for node in with_nested(timeline.nodes[place])
        }

    def cut(self) -> list[Cut]:
        """The stages, in order."""
        whole, last = self._tagged.model.graph, len(self.places) - 1
        outputs = dict.fromkeys(whole.outputs)
        constants = {value: None for value in outputs if self._made_in(value) is None}
        cuts: list[Cut] = []
        for index in reversed(range(len(self.places))):
            at_end = constants if index == last else {}
            returned = [v for v in outputs | at_end if self._made_in(v) == index or v in at_end]
            cuts.append(self._stage_of(index, returned))
            outputs.update(dict.fromkeys(cuts[-1].inputs))
        return cuts[::-1]

    def _made_in(self, value: ir.Value) -> int | None:
        """The stage that computes a value; ``None`` of an input, a weight, and what is computed only from weights."""
        producer = value.producer()
        return None if producer is None else self._stage.get(producer)

    def _stage_of(self, index: int, outputs: list[ir.Value]) -> Cut:
        """A stage that computes these values, with only the nodes that they need."""
        if not outputs:
            begin = self._timeline.name(self.places[index].start)
            raise UsageError(f"no later stage uses the results of the stage that begins with {begin}: cut elsewhere")
        found = Region.between(outputs, lambda value: self._made_in(value) == index)
        returned = (value for value in outputs if value.is_graph_input() and not value.is_initializer())
        order = {value: place for place, value in enumerate(self._tagged.model.graph.inputs)}
        taken = sorted(dict.fromkeys([*found.inputs, *returned]), key=lambda value: order.get(value, len(order)))
        calls, owners = self._tagged.calls, map(owner_of, found.nodes)
        alone = {owner.call for owner in owners if owner is not None and len(owner.calls) == 1}
        inside = {above for call in alone for above in calls.stack(call)}
        region, root = Region(found.nodes, taken, outputs), calls.calls[0].call
        return self._timeline.cutter.cut(region, f"stage {index}", inside=inside, above={root})


def figures_of(nodes: Mapping[str, float]) -> Measure:
    """A measure from figures of nodes by name, in whole millionths of the largest; nodes without a figure count as 0.

    Nodes of nested graphs are counted with their enclosing node.
    """
    unit = max(nodes.values(), default=0.0) / 1e6 or 1.0
    return lambda node: round(nodes.get(node.name or "", 0.0) / unit)
