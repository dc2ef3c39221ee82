"""``values``: what each call of a file computes, and the first NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.selectors import Selection
from modelexport.core.text import plural
from modelexport.errors import RunError, UsageError
from modelexport.files.path_or_model import Source
from modelexport.format.dtypes import LARGEST_FLOAT16
from modelexport.graph.copies import copy_of
from modelexport.graph.missing_types import fill_types
from modelexport.graph.node_owners import owner_of, place_of
from modelexport.runtime.devices import CPU, find_device
from modelexport.runtime.runner_process import RunnerProcess, write_for_runner
from modelexport.tables import columns
from modelexport.tables.columns import Column, Figure, Kind
from modelexport.tables.html_page import Page, Section
from modelexport.tables.model_explorer import explorer_places
from modelexport.tables.page_graph import type_text
from modelexport.tables.table import By, NodeFigures, Table
from modelexport.tagged.file import TaggedFile, as_tagged
from modelexport.tagged.strip_and_inline import runnable
from modelexport.traces.calibration_data import RunInputs, given_runs
from modelexport.traces.inputs_and_example_sizes import make_feeds
from modelexport.traces.value_ranges import BFLOAT16, Origin, ValueRange, ValueRanges, measure_values

TORCH = (
    Column("torch_largest", "value", Kind.LARGEST),
    Column("torch_smallest", "value", Kind.SMALLEST),
)
"""The ranges of what PyTorch's modules return."""


@dataclass(frozen=True, repr=False)
class FileValues:
    """The result of :func:`values`."""

    table: Table
    found: ValueRanges
    tagged: TaggedFile
    source: str
    """Where the inputs come from."""

    def __repr__(self) -> str:
        return f"<FileValues of {self.table.name}: {plural(self.found.runs, 'run')}; {(self.lines or ['finite'])[0]}>"

    @property
    def first(self) -> Origin | None:
        """What makes the first NaN or infinity that reaches an output; ``None`` if the outputs are finite."""
        return self.found.first

    def document(
        self, by: By = "call", *, depth: int | None = None, only: Selection | None = None, sort: str | None = None
    ) -> dict[str, Any]:
        """The table as JSON values, with ``first``, ``inside``, ``runs`` and ``values``: a row for each value."""
        return {
            **self.table.document(by, depth=depth, only=only, sort=sort),
            "runs": self.found.runs,
            "inputs_from": self.source,
            "first": None if self.first is None else _origin_document(self.first),
            "inside": [_origin_document(origin) for origin in self.found.inside],
            "values": [
                {
                    "name": value.name or "",
                    "node": producer.name if (producer := value.producer()) is not None else None,
                    "call": call.address if (call := _call_of(value)) is not None else None,
                    "type": type_text(value),
                    **_range_document(numbers),
                }
                for value, numbers in self.found.ranges.items()
                if only is None or _call_of(value) in only
            ],
        }

    @property
    def section(self) -> Section:
        """What the page says about NaN, infinities, and what float16 cannot hold."""
        lines = self.lines or ["none reaches an output"]
        more = [("inside", describe_origin(origin, self.found.runs)[0]) for origin in self.found.inside]
        more += [(f"#{call.address}", f"up to {reach:.4g}, beyond float16") for call, reach in self.beyond_float16[:5]]
        if not self.beyond_float16 and self.first is None:
            more.append(("float16", "can hold the largest values"))
        return "NaN, infinities, float16", [
            ("" if index else "NaN or infinity", line.strip()) for index, line in enumerate(lines)
        ] + more

    def page(self) -> Page:
        """The page of the table, with the graph and its values."""
        return Page(self.table, columns.LARGEST.name, [self.section], file=self.tagged, ranges=self.found.ranges)

    def beside(self, table: Table) -> Table:
        """Another table of the same file with the columns of the values."""
        own = self.table.nodes
        nodes = [
            replace(node, figures={**node.figures, **mine.figures})
            for node, mine in zip(table.nodes, own, strict=False)
        ]
        return replace(table, columns=(*table.columns, *self.table.columns), nodes=(*nodes, *table.nodes[len(own) :]))

    @property
    def beyond_float16(self) -> list[tuple[ModuleCall, float]]:
        """The calls whose own values float16 cannot hold, to the largest size of these; the largest first."""
        found: dict[ModuleCall, float] = {}
        for value, numbers in self.found.ranges.items():
            if numbers.reach > LARGEST_FLOAT16 and (call := _call_of(value)) is not None:
                found[call] = max(found.get(call, 0.0), numbers.reach)
        return sorted(found.items(), key=lambda item: -item[1])

    @cached_property
    def lines(self) -> list[str]:
        """What the first NaN or infinity is, for a person; empty if no output has one."""
        return [] if self.first is None else describe_origin(self.first, self.found.runs)


def values(
    file: Source | TaggedFile,
    data: RunInputs | str | Path | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    processor: str | Path | None = None,
    torch_ranges: Mapping[ModuleCall, ValueRange] | None = None,
    device: str | None = None,
) -> FileValues:
    """Run a file in its own types, and measure what each call computes.

    Args:
        data: The inputs of one run or several, or a file of them; by default those of the reference values, or random
            ones.
        sizes: Names of dynamic axes to sizes, for random inputs.
        processor: The folder of the tokenizer or image processor that ``data`` needs; by default that of ``file``.
        torch_ranges: What PyTorch's modules return, to be shown beside.
        device: Where it runs: ``NAME[,option=value...]``; by default each node is computed as the standard defines it,
            which ``cpu`` does not do with all integers.

    Raises:
        FileFormatError: The file, or the data, is missing or cannot be read, or the file is a folder.
        InputsError: The inputs do not fit the file.
        UsageError: A node cannot be computed.
    """
    tagged = as_tagged(file)
    if data is None:
        with runnable(tagged.path, tagged.encoding) as path:
            feeds, source = make_feeds(tagged, path, None, sizes or {}, provider=CPU, seed=0)
        runs: RunInputs = [feeds]
    else:
        if sizes:
            raise UsageError("--size is for random inputs, and --data gives inputs: leave out one of them")
        runs, source = given_runs(tagged, data, processor), str(data) if isinstance(data, str | Path) else "given"
    if device is None:
        found = measure_values(tagged, runs)
    else:
        where = find_device(device)
        with RunnerProcess(where) as process:
            found = measure_values(tagged, runs, partial(values_there, tagged.model, process))
        source += f", on {where}"
    table = value_table(tagged, found)
    if torch_ranges:
        known = {call: each for call, each in torch_ranges.items() if call in table.calls}
        for column, numbers in zip(TORCH, ("largest", "smallest"), strict=True):
            table = table.with_column(column, {call: getattr(each, numbers) for call, each in known.items()})
    notes = (f"inputs: {source}, {plural(found.runs, 'run')}",)
    return FileValues(replace(table, notes=notes), found, tagged, source)


def value_table(tagged: TaggedFile, found: ValueRanges) -> Table:
    """The ranges of what nodes compute, by module call."""
    places = explorer_places(tagged)
    nodes = []
    for node in tagged.nodes:
        owner = owner_of(node)
        ranges = [found.ranges[value] for value in node.outputs if value in found.ranges]
        figures = _figures(ranges) if ranges and node.op_type != "Constant" else {}
        calls, place = owner.calls if owner else (), places.get(node, ("", ""))
        nodes.append(NodeFigures(node.name or "", node.op_type, calls, figures, place=place))
    return Table(tagged.calls, tagged.tags, columns.VALUES, tuple(nodes), name=tagged.path.name)


def _figures(ranges: list[ValueRange]) -> dict[str, Figure]:
    counted = sum(each.elements - each.nan - each.infinite for each in ranges)
    figures: dict[str, Figure] = {
        columns.COUNTED.name: counted,
        columns.NAN.name: sum(each.nan for each in ranges),
        columns.INFINITE.name: sum(each.infinite for each in ranges),
        columns.ZERO.name: sum(each.zeros for each in ranges),
        columns.LOST.name: sum(each.lost for each in ranges),
        columns.SIZES.name: float(sum(each.sizes for each in ranges)),
    }
    if counted:
        size = max(each.reach for each in ranges)
        figures |= {
            columns.LARGEST.name: max(each.largest for each in ranges),
            columns.SMALLEST.name: min(each.smallest for each in ranges),
            columns.IN_FLOAT16.name: size / LARGEST_FLOAT16,
            columns.IN_BFLOAT16.name: size / BFLOAT16,
        }
    return figures


def describe_origin(origin: Origin, runs: int) -> list[str]:
    """What makes NaN or infinities, for a person."""
    where = f", run {origin.run + 1} of {runs}" if runs > 1 else ""
    what = {"NaN": "NaN", "infinity": "infinities"}[origin.what]
    if origin.kind != "node":
        (taken,) = origin.takes
        user = f"; {origin.node.op_type} {origin.node.name} takes it first" if origin.node is not None else ""
        of_call = f" of {origin.call}" if origin.call is not None else ""
        return [f"the {origin.kind} {origin.name} has {what} ({taken.range.not_finite}){user}{of_call}{where}"]
    assert origin.node is not None
    place = f" at {list(origin.place)}" if origin.place else ""
    of_call = f" of {place_of(origin.node)}" if origin.call is not None else ""
    lines = [f"first {origin.what}: {origin.node.op_type} {origin.name}{of_call}{where}, its {origin.value}{place}"]
    for taken in origin.takes:
        numbers = taken.range
        shown = (
            f"{numbers.smallest:.4g} … {numbers.largest:.4g}"
            if numbers.smallest <= numbers.largest
            else "nothing finite"
        )
        more = [numbers.not_finite] if numbers.not_finite else []
        more += [f"there {taken.element:.6g}"] if taken.element is not None else []
        shape = ", ".join(map(str, taken.shape))
        lines.append(f"  takes {taken.name} {taken.dtype}[{shape}]: {'; '.join([shown, *more])}")
    return lines


def _origin_document(origin: Origin) -> dict[str, Any]:
    return {
        "kind": origin.kind,
        "what": origin.what,
        "name": origin.name,
        "call": None if origin.call is None else origin.call.address,
        "line": origin.line or None,
        "run": origin.run,
        "value": origin.value,
        "place": list(origin.place),
        "takes": [
            {
                "name": t.name,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "element": _finite(t.element),
                **_range_document(t.range),
            }
            for t in origin.takes
        ],
    }


def _finite(element: Any) -> Any:
    """A number as JSON has it: what is infinite or not a number is a text."""
    return element if not isinstance(element, float) or math.isfinite(element) else str(element)


def _range_document(numbers: ValueRange) -> dict[str, Any]:
    known = numbers.smallest <= numbers.largest
    finite = numbers.elements - numbers.nan - numbers.infinite
    return {
        "elements": numbers.elements,
        "smallest": numbers.smallest if known else None,
        "smallest_run": numbers.smallest_run if known else None,
        "largest": numbers.largest if known else None,
        "largest_run": numbers.largest_run if known else None,
        "mean_size": numbers.sizes / finite if finite else None,
        "zeros": numbers.zeros,
        "nan": numbers.nan,
        "infinite": numbers.infinite,
        "float16_lost": numbers.lost,
        "powers": {str(power): numbers.powers[power] for power in sorted(numbers.powers)},
    }


def _call_of(value: ir.Value) -> ModuleCall | None:
    producer = value.producer()
    owner = owner_of(producer) if producer is not None else None
    return owner.call if owner is not None else None


def values_there(model: ir.Model, process: RunnerProcess, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Names of the tensors that the nodes of the main graph compute, to their arrays."""
    copy = copy_of(model)
    fill_types(copy)
    computed = [value for node in copy.graph if node.op_type != "Constant" for value in node.outputs if value.name]
    copy.graph.outputs[:] = [v for v in computed if isinstance(v.type, ir.TensorType) and v.dtype is not None]
    names = dict.fromkeys(value.name or "" for value in copy.graph.outputs)
    folder = process.folder
    written = write_for_runner(copy, feeds, names, folder, name="values", stem=f"values_{process.measured}")
    result = process.run_model(folder, written)
    if result.status != "ran":
        raise RunError(f"the file does not run on {process.device}: {result.message}")
    return {output["name"]: np.load(folder / output["save"]) for output in written["outputs"]}
