"""``export``: export a PyTorch model to a tagged ONNX file with its documents. Read this file first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.capture import FrontEnd
from modelexport.capture.exported_graph import Exported
from modelexport.capture.front_ends import capture
from modelexport.capture.patches import turned_off
from modelexport.core.declared_options import with_keywords_of
from modelexport.core.garbage_collection import only_new_garbage
from modelexport.core.one_at_a_time import exclusive
from modelexport.core.text import error_line
from modelexport.core.timed_stages import Stages
from modelexport.core.warned_callers import warn_caller
from modelexport.errors import CaptureError, CheckError, LimitedFileWarning, UsageError
from modelexport.exporting import steps
from modelexport.exporting.automatic_axis_names import captured_symbols, name_unnamed_axes
from modelexport.exporting.capture_inputs import CaptureInputs
from modelexport.exporting.export_checks import ExportChecks
from modelexport.exporting.export_result import ExportResult, note_on_rank, notes_on_numbers
from modelexport.exporting.exposed_outputs import expose
from modelexport.exporting.fixed_axes import FixedAxis
from modelexport.exporting.front_end_choice import Attempt, first_that_passes
from modelexport.exporting.markdown_report import report_path, write_report
from modelexport.exporting.options import Options
from modelexport.exporting.requested_names import AS_CAPTURED, RequestedNames, with_fixed_axes
from modelexport.exporting.size_decisions import notes_on_constants
from modelexport.files.output_folders import check_output_folder
from modelexport.files.replaceable_files import check_writable
from modelexport.graph.copies import copy_of
from modelexport.graph.node_owners import owned_operators
from modelexport.pytorch.calls.module_tree_of_model import module_tree
from modelexport.pytorch.inputs.axes_of_one import Axis, widened
from modelexport.pytorch.inputs.documented_axes import documented_axes
from modelexport.pytorch.inputs.prepared_inputs import Prepared, arguments_by_name, kept_tensors, prepare_inputs
from modelexport.pytorch.nested_tensors import Inputs, arguments_of, input_tensors, run_arguments
from modelexport.pytorch.runs.repeatability import Unrepeatable, find_unrepeatable
from modelexport.runtime.checked_writing import checked_and_replaced
from modelexport.tagged.documents.dag import write_dag_files
from modelexport.tagged.tree_display import tree_rows

if TYPE_CHECKING:
    from torch import Tensor, nn


@with_keywords_of(*Options().of_a_file, only_python=True)
def export(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any] | Tensor,
    path: str | Path | None = None,
    *,
    name: str | None = None,
    options: Options | None = None,
    stages: Stages | None = None,
    progress: Callable[[str], None] = lambda stage: None,
    remarks: Sequence[str] = (),
    **keywords: Any,
) -> ExportResult:
    """Export a model to ``path``, with every node tagged with the module call that it came from.

    The model is exported in evaluation mode and restored afterwards.

    Args:
        inputs: Example inputs: keyword arguments of ``forward``, or positional ones; a tensor is the only argument.
        path: ``DIR/NAME.onnx``, which has to be given; the documents are written beside it.
        name: The model's name in the documents; by default its class.
        options: All of the options below in one value; those that are given as keywords as well replace its own.
        stages: Times the stages of the export.
        progress: Called with the name of each stage as it begins, if ``stages`` are not given.
        remarks: Lines about the model and its inputs for the report.

    Raises:
        CaptureError, InputsError, UsageError: The model, the inputs or the options do not fit.
        UntaggedNodeError: A node has no owner. Nothing is written.
        CheckError: The file is invalid, does not load, or computes something else. Nothing is written.
        OutputError: The files cannot be written. Existing files are unchanged.

    Warns:
        LimitedFileWarning: The file is right only for some sizes or values, or does not take the inputs as given.
    """
    if path is None:
        raise UsageError("there is no path: give export(model, inputs, path), for example with example_inputs(model)")
    if str(path).endswith("/") or "." not in Path(path).name:  # it could be meant as a folder
        raise UsageError(f"{path} does not end in .onnx: give {Path(path)}.onnx, or a folder to export_package")
    options, stages = (options or Options()).replaced_by(keywords), stages or Stages(progress)
    return export_with(model, inputs, Path(path), options, stages, name=name, remarks=remarks)


@exclusive
@only_new_garbage()
def export_with(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any] | Tensor,
    path: Path,
    options: Options,
    stages: Stages,
    *,
    name: str | None = None,
    remarks: Sequence[str] = (),
    part: steps.AsPart | None = None,
) -> ExportResult:
    """Export a model with all options in one value, as :func:`export` does, or as a part of a package."""
    options.check_together()
    check_writable(path)
    if options.tags.dag_dir is not None:
        check_output_folder(Path(options.tags.dag_dir))
    with stages("prepare"):
        given: Inputs = arguments_of(inputs)
        prepared = prepare_inputs(model, given, options.capture.constants)
        if options.capture.interface is not None:
            options.capture.interface.check_named_axes(arguments_by_name(model, prepared.inputs))
        unrepeatable = [] if options.weights.lent is not None else find_unrepeatable(model, prepared.inputs)
    job = _Job(model, given, prepared, path, name, options, stages, unrepeatable, remarks, part)
    result = first_that_passes(options.capture.frontend, job.export_by, keep_anyway=options.checks.keep_anyway)
    for line in (*result.limits, *result.notes):
        warn_caller(line, LimitedFileWarning)
    return result


@dataclass(frozen=True)
class _Job:
    """One export: everything except the choice of the front end."""

    model: nn.Module
    inputs: Inputs
    """The example as it was given."""
    prepared: Prepared
    path: Path
    name: str | None
    options: Options
    stages: Stages
    unrepeatable: Sequence[Unrepeatable]
    remarks: Sequence[str]
    part: steps.AsPart | None

    @property
    def names(self) -> RequestedNames | None:
        """The names that a person asked for; ``None`` for a part of a package, whose kind names its values."""
        return (self.options.capture.interface or AS_CAPTURED) if self.part is None else None

    def export_by(self, frontend: FrontEnd, attempts: Sequence[Attempt], keep_anyway: bool) -> ExportResult:
        """Export with a front end, again while axes turn out to be fixed. The files are moved into place at the end."""
        fixed: list[FixedAxis] = []
        ones: list[Axis] = []
        exported: Exported | None = None
        while True:
            if exported is None:
                with self.stages("prepare"):
                    captured = self._for_capture(ones)
            try:
                with turned_off(*([] if self.options.capture.reuse else ["once"])):
                    start = exported or self._captured(frontend, captured)
                    if isinstance(start, Exported):
                        exported = replace(start, model=copy_of(start.model))  # the export changes its graph
                        made = self._export(start, attempts, keep_anyway, fixed, captured)
                    else:
                        made = start
            except (CaptureError, CheckError) as error:
                if not captured.wide or self._names_one_of(captured.axes_of_file):
                    raise
                reason = f"with another size in the example the export fails: {error_line(error)}"
                fixed, ones = [*fixed, *captured.all_as_in_example(reason)], [*ones, *captured.wide]
                exported = None
                continue
            if isinstance(made, ExportResult):
                return made
            fixed, wide = [*fixed, *captured.as_in_example(made)], captured.wide_axes(made)
            if wide:  # with their size in the example, the inputs of the capture are others
                ones, exported = [*ones, *wide], None

    def _for_capture(self, ones: Collection[Axis]) -> CaptureInputs:
        """The inputs of the capture, whose axes have another size than one where that can be dynamic."""
        capture = self.options.capture
        if not capture.dynamic or self.part is not None:
            row = self.part.one_row if self.part is not None else None
            checked = self.prepared if row is None else prepare_inputs(self.model, row)
            return CaptureInputs(checked.inputs, self.prepared.inputs)
        kept = kept_tensors(self.model, self.inputs, tuple(self.prepared.constants))
        has_weights = self.options.weights.lent is None
        wide, sizes = widened(self.model, self.inputs, kept=kept, ones=ones, runs=has_weights)
        inputs = prepare_inputs(self.model, wide, capture.constants).inputs if sizes else self.prepared.inputs
        return CaptureInputs(self.prepared.inputs, inputs, sizes, fixes_ones=True)

    def _names_one_of(self, axes: Collection[tuple[str, int]]) -> bool:
        """Whether a person named an axis, which has to be dynamic then."""
        names = self.names or AS_CAPTURED
        return any(axis < len(names.leading) for _, axis in axes) or bool({*axes} & {*names.axes})

    def _captured(self, frontend: FrontEnd, captured: CaptureInputs) -> Exported | Sequence[FixedAxis]:
        """The capture, or the axes of which it does not take the size of the example."""
        with self.stages("capture"):
            tree = module_tree(self.model)  # before the capture: it refuses names that calls have
            how = self.options.for_front_end(ones=not captured.fixes_ones)
            exported = self._named(capture(self.model, captured.inputs, frontend, how), captured.inputs)
            if other_sizes := captured.axes_of_other_sizes(exported, unchecked=not self.options.checks.check):
                return other_sizes
            tags = self.options.tags
            return expose(exported, tuple(tags.expose), steps.tags_of(tree, exported, tags))

    def _export(
        self,
        exported: Exported,
        attempts: Sequence[Attempt],
        keep_anyway: bool,
        fixed: Sequence[FixedAxis],
        captured: CaptureInputs,
    ) -> ExportResult | Sequence[FixedAxis]:
        """The export, or the axes that have to be fixed in another one.

        Args:
            exported: The capture, whose graph is changed in place.
            fixed: Axes that have to have the size of the example.
        """
        model, options, stages, tree = self.model, self.options, self.stages, module_tree(self.model)
        folder = Path(options.tags.dag_dir) if options.tags.dag_dir is not None else None
        exported = with_fixed_axes(exported, {(axis.input, axis.axis): axis.size for axis in fixed})
        with stages("optimize"):
            before = steps.remember(model, exported, options.weights.source)
            messages = [
                *exported.messages,
                *(steps.optimize_exported(exported, before) if options.graph.optimized else ()),
            ]
            fused = steps.fuse(exported, before, tree, options.graph, self.part)
        with stages("tag"):
            tagged = steps.tag(exported, before, tree, options.tags, fused)
        with checked_and_replaced(check=False) as replacement:
            staged = replacement.folder(self.path.parent) / self.path.name
            written = steps.StagedExport(
                model, exported, before, tagged, attempts, options, stages, self.path, staged, self.name
            )
            written.write(exported.unchecked_conditions)
            checks = ExportChecks(written, captured, self.names, fixed)
            check, verified, sizes = checks.run(must_pass=not keep_anyway)
            if sizes.to_fix:
                replacement.drop()
                return sizes.to_fix
            described, functions, weights = written.described, written.functions, written.weights
            hierarchy = described.hierarchy
            if not options.tags.documents:
                for suffix in described.files:
                    staged.with_suffix(suffix).unlink()
            result = ExportResult(
                path=self.path,
                hierarchy=hierarchy,
                tree=tree_rows(owned_operators(exported.model), exported.calls, tagged.tags.tag),
                seconds=stages.seconds,
                verified=verified,
                files=steps.list_files(staged, self.path, folder, report=options.tags.documents),
                check=check,
                attempts=attempts,
                functions=functions,
                weights=weights,
                notes=[
                    *self.prepared.notes,
                    *map(note_on_rank, tagged.outputs_of_any_rank),
                    *(notes_on_constants(exported) if check is None and options.capture.dynamic else ()),
                    *notes_on_numbers(exported.unchecked_conditions, hierarchy.settings.valid_if),
                ],
                added=self.prepared.added,
                remarks=self.remarks,
                messages=messages,
                fusion=fused.found if fused is not None else None,
                unrepeatable=self.unrepeatable,
                fixed=[*fixed, *sizes.constant],
                tried_other_sizes=sizes.tried,
            )
            if options.tags.documents:
                write_report(report_path(staged), result)
            if folder is not None:
                write_dag_files(replacement, folder, described.dags)
        return result

    def _named(self, exported: Exported, inputs: Inputs) -> Exported:
        """The capture with the names that were asked for, and names for all other dynamic axes."""
        symbols = captured_symbols(exported)
        exported = (self.names or AS_CAPTURED)(exported) if self.part is None else self.part.name_values(exported)
        if not symbols:
            return exported
        shapes = {name: tuple(t.shape) for name, t in input_tensors(self.model, *run_arguments(inputs))}
        words = documented_axes(self.model, {name: len(shape) for name, shape in shapes.items()})
        return name_unnamed_axes(exported, symbols, words, shapes)
