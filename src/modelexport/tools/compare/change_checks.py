"""Comparing two files as a check: structure, weights, outputs and cost, each of which may fail a build."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from modelexport.core.calls import ROOT, CallTree, TracedCall
from modelexport.core.owners import Evidence, Owner
from modelexport.core.result_display import Report
from modelexport.core.tags import CallFacts, RecordedTags
from modelexport.errors import InputsError, UsageError
from modelexport.files.path_or_model import Source
from modelexport.graph.node_owners import set_owner
from modelexport.graph.nodes import required_inputs
from modelexport.graph.parameter_plans import record_own_names
from modelexport.lineage.retagging import with_calls_restored
from modelexport.runtime.devices import CPU
from modelexport.runtime.sessions import open_session
from modelexport.runtime.varied_inputs import varied_inputs
from modelexport.tables.costs import cost
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.strip_and_inline import runnable
from modelexport.tools.compare.comparison import compare
from modelexport.tools.compare.comparison_report import FileComparison
from modelexport.traces.array_differences import Difference
from modelexport.traces.inputs_and_example_sizes import example_sizes, make_feeds, sizes_of_other
from modelexport.traces.outputs_of_two_files import compare_sessions

Aspect = Literal["structure", "weights", "outputs", "cost"]
ASPECTS: tuple[Aspect, ...] = ("structure", "weights", "outputs", "cost")
MARGIN = 0.01
"""The relative increase up to which a figure of the second file counts as unchanged."""


class CostChange(msgspec.Struct, frozen=True):
    """A figure of the whole file, in both files."""

    column: str
    first: int | float
    second: int | float
    worse: bool
    """Whether the second is more than 1 % above the first."""


class ChangeReport(Report, msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two files, and the aspects that differ."""

    comparison: FileComparison
    outputs: list[Difference] | None
    """Each with its largest difference; ``None`` if they were not compared."""
    tried: list[str]
    """The inputs for which outputs were compared: where they are from, and variations of them."""
    costs: list[CostChange] | None
    failed: list[Aspect]
    """The requested aspects that differ."""
    asked: list[Aspect]

    @property
    def agrees(self) -> bool:
        """Whether all requested aspects are the same; if none was requested, whether all modules are."""
        return not (self.failed if self.asked else self.comparison.differs)

    @property
    def document(self) -> dict[str, Any]:
        """The document that ``modelexport compare --json`` prints: the comparison and the requested aspects."""
        names = ("asked", "failed", "outputs", "tried", "costs") if self.asked else ()
        return msgspec.to_builtins(self.comparison) | {name: getattr(self, name) for name in names}


def check_changes(
    first: Source,
    second: Source,
    fail_on: Collection[Aspect] = (),
    *,
    values: bool = False,
    modules: Sequence[str] = (),
    inputs: Path | None = None,
    provider: str = CPU,
    seed: int = 0,
) -> ChangeReport:
    """Compare two files in the aspects that must not differ.

    A file without tags that was made from the other one has that one's calls. Otherwise, if their calls were found in
    different ways, each file is compared as one module.

    Args:
        fail_on: ``structure``: calls, operators, attributes, entries; ``weights``: the elements of parameters, which
            are all read; ``outputs``: the outputs for the same inputs; ``cost``: no figure of the cost may grow.
        values: Compare the elements of parameters even if ``weights`` is not requested.
        modules: Selectors of the calls to compare; by default all.
        inputs: A file of inputs for ``outputs``; by default those of the first file's reference values, or random ones,
            and variations of them.

    Raises:
        FileFormatError: A file is missing or not ONNX.
        UsageError: ONNX Runtime cannot run one of them, or a selector matches nothing.
    """
    if inputs is not None and "outputs" not in fail_on:
        raise UsageError("inputs are for the outputs: give --fail-on outputs, or --data to compare numbers by module")
    first_file, second_file = read_tagged(first), read_tagged(second)
    costs = _costs(first_file, second_file) if "cost" in fail_on else None
    files, notes = _with_equal_calls(first_file, second_file)
    first_file, second_file = files
    unlike = _kinds(first_file) != _kinds(second_file)
    counts = [{"calls": len(file.calls), "coverage": file.coverage} for file in files]
    if unlike:
        first_file, second_file = map(as_one_module, files)
    comparison = compare(first_file, second_file, values=values or "weights" in fail_on, modules=modules)
    if unlike:
        facts = [replace(f, **count) for f, count in zip((comparison.first, comparison.second), counts, strict=True)]
        notes.append("the calls of the files were found in different ways: each file is compared as one module")
        comparison = replace(comparison, first=facts[0], second=facts[1])
    comparison = replace(comparison, notes=notes + comparison.notes)
    outputs, tried = _outputs(first_file, second_file, inputs, provider, seed) if "outputs" in fail_on else (None, [])
    differs: dict[Aspect, bool] = {
        "structure": bool(
            comparison.only_in_first or comparison.only_in_second or comparison.changed or comparison.entries
        ),
        "weights": bool(comparison.values and (comparison.values.different or comparison.values.unpaired)),
        "outputs": any(output.status != "agree" for output in outputs or ()),
        "cost": any(change.worse for change in costs or ()),
    }
    asked = [aspect for aspect in ASPECTS if aspect in fail_on]
    return ChangeReport(
        comparison=comparison,
        outputs=outputs,
        tried=tried,
        costs=costs,
        failed=[aspect for aspect in asked if differs[aspect]],
        asked=asked,
    )


def _with_equal_calls(first: TaggedFile, second: TaggedFile) -> tuple[list[TaggedFile], list[str]]:
    """Two files, and what is said of them: one has the calls of the other if it was made from it and has no tags."""
    files = [first, second]
    if _kinds(first) != _kinds(second):
        place = 0 if first.found_calls is not None and second.found_calls is None else 1
        file, source = files[place], files[1 - place]
        if file.found_calls is not None and (made := with_calls_restored(source, file.path)) is not None:
            files[place] = made
            return files, [f"{file.path} has no tags: its calls are those of {source.path}, as `retag` finds them"]
    return files, []


def _kinds(file: TaggedFile) -> Collection[str] | None:
    """How the calls of a file were found; ``None`` if it has tags."""
    return None if file.found_calls is None else file.found_calls.kinds


def _outputs(
    first: TaggedFile, second: TaggedFile, inputs: Path | None, provider: str, seed: int
) -> tuple[list[Difference], list[str]]:
    """The largest difference of each output, and the inputs for which the outputs were compared.

    If no inputs are given, the ones that are known are varied.
    """
    sizes: dict[str, int] = {}
    if inputs is None:
        ours, theirs = ([value.name or "" for value in required_inputs(file.model)] for file in (first, second))
        if set(ours) != set(theirs):
            raise InputsError(
                f"{first.path} takes {', '.join(ours)}, and {second.path} takes {', '.join(theirs)}: "
                "outputs can be compared of files that take the same inputs"
            )
        sizes = sizes_of_other(first, second, {})
    with runnable(first.path, first.encoding) as path, runnable(second.path, second.encoding) as against:
        feeds, source = make_feeds(first, path, inputs, sizes, provider=provider, seed=seed)
        variations = varied_inputs(first.model, feeds, sizes, seed) if inputs is None else ()
        runs = [(source, feeds), *variations]

        def compared(first_optimized: bool, second_optimized: bool) -> tuple[list[Difference], list[str]]:
            ours = open_session(path, provider=provider, optimized=first_optimized)
            return compare_sessions(ours, open_session(against, provider=provider, optimized=second_optimized), runs)

        # ONNX Runtime's optimizer may be wrong: the nodes of the first file decide what is right.
        outputs, tried = compared(False, True)
        if _differ_in(outputs) and not _differ_in(by_nodes := compared(False, False)[0]):
            if not _differ_in(compared(True, True)[0]):
                return by_nodes, tried
            outputs = [replace(o, reason=f"{o.reason}{_OPTIMIZER}") if o.status == "differ" else o for o in outputs]
        return outputs, tried


_OPTIMIZER = "; without ONNX Runtime's optimizer it is right"


def _differ_in(outputs: Sequence[Difference]) -> bool:
    """Whether an output differs."""
    return any(output.status == "differ" for output in outputs)


def _costs(first: TaggedFile, second: TaggedFile) -> list[CostChange]:
    """Figures of both files, at the sizes that one of them fixes, and else at those of the first one's example."""
    sizes, _ = example_sizes(first, sizes_of_other(first, second, {}))
    others, _ = example_sizes(second, sizes_of_other(second, first, sizes))
    tables = cost(first, {**sizes_of_other(first, second, others), **sizes}), cost(second, others)
    before, after = (table.numbers(table.whole) for table in tables)
    return [
        CostChange(name, before[name], after[name], after[name] > before[name] * (1 + MARGIN))
        for name in before
        if name in after
    ]


def as_one_module(tagged: TaggedFile) -> TaggedFile:
    """The file as one module whose parameters are the initializers, for a comparison with a file of unknown calls."""
    for node in tagged.nodes:
        set_owner(node, Owner((ROOT,), Evidence.INFERRED))
    record_own_names(tagged.model)
    calls = CallTree((TracedCall(ROOT, None, 0, None, None),))
    one = dataclasses.replace(tagged, call_tags=RecordedTags(calls, {ROOT: CallFacts("Module", True, "Module")}))
    vars(one)["hierarchy"] = None  # the sidecar describes the calls that were left out
    return one
