"""``quantize``: methods applied to the modules of a tagged file, group by group; the result is tagged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.core.collected_messages import collected
from modelexport.core.text import error_line, short_repr
from modelexport.errors import CheckError, UsageError, raised_as
from modelexport.files.atomic_writing import scratch
from modelexport.files.map_types import model_of
from modelexport.files.onnx_models import save_model
from modelexport.files.path_or_model import Source, as_path
from modelexport.files.recipe_files import Recipe, encode_recipe
from modelexport.files.replaceable_files import check_writable, check_written_by_us
from modelexport.format import documents
from modelexport.format.keys import RECIPE_SUFFIX
from modelexport.graph.copies import copy_of
from modelexport.graph.node_owners import calls_text, owner_of
from modelexport.graph.nodes import initializers, nodes_of
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.lineage.retagging import RetagReport, write_retagged
from modelexport.regions.region import Region
from modelexport.runtime.saturating_products import saturating_modules
from modelexport.tables.turns import Turns
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools.quantize.changes_for_devices import CHANGES, apply_changes
from modelexport.tools.quantize.equal_method_groups import weighted_nodes
from modelexport.tools.quantize.methods import Method, Ranges, apply_method
from modelexport.tools.quantize.prepared_for_quantizers import prepared
from modelexport.tools.quantize.quantized_regions import QuantizedRegions, cut_for_quantizer
from modelexport.tools.quantize.recipes import (
    Assignment,
    can_quantize,
    chosen_recipe,
    is_quantized,
    resolve,
    within_range,
)
from modelexport.tools.quantize.weights_behind import same_nodes, weight_behind
from modelexport.tools.quantize.written_weights import check_written
from modelexport.traces.calibration_data import RunInputs, given_runs


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was quantized, what was kept, and the sizes before and after."""

    methods: dict[str, int]
    """Method or change to the number of nodes of the source that it has replaced."""
    kept: list[str]
    """The addresses of kept calls, without those inside of other kept ones; each is bit for bit what it was."""
    joined: list[str]
    """A line for each group of nodes that gets another method than the rules of some of its calls say."""
    bytes_before: int
    """Of the weights."""
    bytes_after: int
    left: dict[str, int]
    """The modules most of whose weights stay floating-point numbers of the same type, to the bytes of these; the most
    first."""
    quantized_before: int
    """The number of nodes that were quantized in the source; they are left alone."""

    saturating: dict[str, float]
    """The modules whose products saturate on processors without VNNI, to the share of their pairs of weights."""

    @property
    def changed(self) -> bool:
        """Whether something is quantized."""
        return bool(self.methods or self.quantized_before)


class QuantizeResult(Outcome, frozen=True, kw_only=True):
    """What ``quantize`` wrote."""

    __repr__ = short_repr

    path: str
    files: list[str]
    """With the recipe that gives this result again."""
    coverage: documents.Coverage
    times: dict[str, Turns] = {}
    """Uses of the graph (``prefill``, ``decode``; a file has one without a name) to its time in turns with that of the
    source, if it was measured."""


def quantize(
    file: Source,
    output: str | Path,
    *,
    to: str | None = None,
    keep: Iterable[str] = (),
    only: Iterable[str] = (),
    recipe: Recipe | str | Path | None = None,
    data: RunInputs | str | Path | None = None,
    processor: str | Path | None = None,
    check_runtime: bool = True,
) -> QuantizeResult:
    """Quantize modules of a tagged file, and write the result with its tags and its recipe.

    Args:
        file: A tagged file.
        output: The file to write.
        to: A method (:data:`.methods.METHODS`), with options after a colon.
        keep: Selectors of modules that stay bit for bit what they are.
        only: Selectors of the modules that get the method; by default all.
        recipe: A recipe or the file of one, instead of ``to``, ``keep`` and ``only``.
        data: Inputs for methods that measure ranges, or a file or folder of them
            (:func:`modelexport.traces.calibration_data.read_data`).
        processor: The folder of the tokenizer or image processor that ``data`` needs; by default that of ``file``.
        check_runtime: Load and run the result in the ONNX Runtime of this machine before it is written.

    Raises:
        UsageError: A selector matches nothing, a method does not exist, or data are needed.
        FileFormatError: The file or the recipe cannot be read.
        OutputError: The output cannot be written. An existing file of that name is unchanged.
        CheckError: A kept node was changed, or a library wrote other weights than its method explains.
    """
    path, output = as_path(file), Path(output)
    check_quantized_writable(output, path)
    rules = chosen_recipe(to, keep, only, recipe)
    tagged = prepared(read_tagged(path))
    feeds = given_runs(tagged, data, processor) if data else None
    result = quantized(tagged, rules, data=feeds, folder=output.parent)
    return write_quantized(result, tagged, output, rules, feeds, check_runtime=check_runtime)


def write_quantized(
    result: Quantized, tagged: TaggedFile, output: Path, rules: Recipe, feeds: RunInputs | None, *, check_runtime: bool
) -> QuantizeResult:
    """Write a quantized file with its tags and its recipe, after a run with the first inputs."""
    report = write_retagged(
        result.model,
        tagged,
        output,
        beside={RECIPE_SUFFIX: encode_recipe(rules)},
        check=check_runtime,
        inputs=feeds[0] if feeds else None,
    )
    return result_of(report, result)


def check_quantized_writable(output: Path, file: Path) -> None:
    """Fail before the work when a file that is quantized, or the recipe beside it, cannot be written."""
    check_writable(output, [file])
    check_written_by_us(output.with_suffix(RECIPE_SUFFIX))


def result_of(report: RetagReport, result: Quantized) -> QuantizeResult:
    """The result for a file that was written."""
    outcome = msgspec.structs.asdict(result.outcome)
    return QuantizeResult(path=report.path, files=report.files, coverage=report.coverage, **outcome)


@dataclass(frozen=True)
class Quantized:
    """A quantized model in memory."""

    model: ir.Model
    outcome: Outcome


def quantized(
    tagged: TaggedFile,
    recipe: Recipe,
    *,
    data: RunInputs | None = None,
    ranges: Ranges | None = None,
    folder: Path | None = None,
) -> Quantized:
    """Quantize a tagged file in memory; what is kept is compared with what it was.

    Args:
        tagged: What :func:`.prepared_for_quantizers.prepared` returned.
        ranges: What :func:`calibrate` measured on the data, if it did.
        folder: Where files may be written that are removed again; by default as
            :func:`modelexport.files.atomic_writing.scratch`.

    Raises:
        UsageError: A selector matches nothing, a method does not exist, or data are needed.
        FileFormatError: A weights file is missing or has changed.
    """
    resolved = resolve(recipe, tagged)
    if data:
        resolved = within_range(resolved, tagged, data)
    ranges = ranges or calibrate(tagged.model, resolved.assignment.values(), data, folder)
    model = quantize_model(tagged.model, resolved.assignment, ranges=ranges)
    counts: dict[str, int] = defaultdict(int)
    for name in _check_kept_nodes(tagged.model, model, resolved.assignment):
        counts[str(resolved.assignment[name])] += 1
    changes = apply_changes(model, tagged, [rule for rule in recipe.rules if rule.method in CHANGES])
    outcome = Outcome(
        methods={**counts, **changes},
        kept=resolved.kept,
        joined=resolved.joined,
        bytes_before=weights_size(tagged.model),
        bytes_after=weights_size(model),
        left=_unquantized(tagged.model, model),
        quantized_before=sum(is_quantized(node) for node in tagged.model.graph),
        saturating=saturating_modules(nodes_of(model.graph)),
    )
    return Quantized(model, outcome)


def _unquantized(before: ir.Model, after: ir.Model) -> dict[str, int]:
    """Modules to the bytes of their weights that stay floating-point numbers, if these are most of them.

    A module whose matrix is quantized and whose bias is not is quantized.
    """
    left: dict[str, int] = defaultdict(int)
    changed: dict[str, int] = defaultdict(int)
    types = {value.name: value.dtype for value in initializers(after)}
    for value in initializers(before):
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point():
            continue
        plan, users = parameter_plan(value), value.consumers()
        owner = next((owner for user in users if (owner := owner_of(user)) is not None), None)
        module = plan.keys[0].rpartition(".")[0] if plan is not None else owner.call.path if owner is not None else ""
        sizes = left if types.get(value.name) == tensor.dtype else changed
        sizes[module or "the model"] += tensor.nbytes
    mostly = {module: size for module, size in left.items() if size > changed[module]}
    return dict(sorted(mostly.items(), key=lambda entry: -entry[1]))


def quantize_model(model: ir.Model, assignment: Assignment, *, ranges: Ranges | None = None) -> ir.Model:
    """A copy of a model in memory, quantized; its nodes have owners.

    Args:
        model: A model without local functions, whose nodes have unique names.
        ranges: What :func:`calibrate` measured, for methods that need it.

    Raises:
        CheckError: A library wrote other weights than its method explains.
    """
    copy = copy_of(model)
    quantized = QuantizedRegions(copy)
    for method, nodes in _nodes_by_method(copy, assignment):
        region = Region.of(nodes)
        cut = cut_for_quantizer(copy, region)
        changed = apply_method(cut, method, ranges, calls_text(nodes))
        if method.row.largest is None:
            if not any(map(is_quantized, changed.graph)):
                continue  # only the form of its products has changed
            before = model_of(cut_for_quantizer(copy, region))  # what was given to the quantizer may have changed
            check_written(nodes, method, before, changed, ranges if method.row.needs_data else None)
        quantized.put(region, changed)
    return copy


def _nodes_by_method(model: ir.Model, assignment: Assignment) -> list[tuple[Method, list[ir.Node]]]:
    """Groups of nodes that a library quantizes at once, with their method.

    Nodes that share a weight are in one group, so that it is quantized once. A method that takes every node gets all of
    its nodes at once, so that nothing is converted back between two of them.
    """
    weighted = weighted_nodes(model)
    given: dict[Method, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if (method := assignment.get(node.name or "")) is not None:
            given[method].append(node)
    for method, nodes in given.items():
        among: set[ir.Node] = set()
        while len(among) != len(nodes):  # a sequence that one node leaves alone is left alone by all
            among = {*nodes}
            nodes[:] = [node for node in nodes if can_quantize(method, node, weighted, among)]
    parts: dict[tuple[Method, str | None], list[ir.Node]] = defaultdict(list)
    for method, nodes in given.items():
        for node in nodes:
            parts[method, None if method.row.operators is None else weighted[node].name].append(node)
    return [(method, nodes) for (method, _), nodes in parts.items()]


def calibrate(
    model: ir.Model, methods: Iterable[Method], data: RunInputs | None, folder: Path | None = None
) -> Ranges | None:
    """The ranges of all values that a method may quantize; ``None`` if none of the methods needs them.

    Args:
        folder: Where files may be written that are removed again, as for :func:`quantized`.

    Raises:
        UsageError: There are no data, or the model does not run with them.
    """
    asking = sorted({str(method) for method in methods if method.row.needs_data})
    if not asking:
        return None
    if not data:
        raise UsageError(f"{asking[0]} measures ranges on inputs like those that the model will get: give --data")
    from onnxruntime.quantization import CalibrationMethod, create_calibrator

    def fails(error: Exception) -> UsageError:
        return UsageError(f"the ranges cannot be measured with these data: {error_line(error)}")

    with scratch(folder) as place:
        save_model(copy_of(model), source := place / "calibrated.onnx")
        with collected(), raised_as(fails):
            calibrator = create_calibrator(
                source,
                None,  # every floating-point value
                augmented_model_path=str(place / "augmented.onnx"),
                calibrate_method=CalibrationMethod.MinMax,
                use_external_data_format=(place / "calibrated.onnx.data").exists(),
            )
            calibrator.collect_data(SimpleNamespace(get_next=partial(next, iter(data), None)))
            measured = calibrator.compute_data()
    for values in measured.values():  # the library fails if one is not a number, though nothing quantizes it
        values.lowest = np.where(np.isnan(values.lowest), np.float32(-np.inf), values.lowest)
        values.highest = np.where(np.isnan(values.highest), np.float32(np.inf), values.highest)
    return measured


def _check_kept_nodes(before: ir.Model, after: ir.Model, assignment: Assignment) -> list[str]:
    """Check that nodes without a method are unchanged, with their weights; returns the names of all changed nodes."""
    there = {node.name: node for node in after.graph}
    changed: list[str] = []
    for node in before.graph:
        now = there.get(node.name)
        if now is not None and same_nodes(node, now):
            continue
        if weight_behind(node.outputs[0]) is not None:
            continue  # a transposed weight goes when nothing uses it any more
        if node.name not in assignment:
            raise CheckError(f"{node.name} should have been kept and was changed", reason="a kept node was changed")
        changed.append(node.name or "")
    return changed


def weights_size(model: ir.Model) -> int:
    """Bytes of all initializers."""
    return sum(value.const_value.nbytes for value in initializers(model) if value.const_value is not None)
