"""``export``: export a PyTorch model to a tagged ONNX file with its documents. Read this file first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from modelexport.capture import FrontEnd, check_opset
from modelexport.capture.choice import Attempt, capture, first_that_passes
from modelexport.capture.exported import Exported
from modelexport.capture.patches import turned_off
from modelexport.core.garbage import only_new_garbage
from modelexport.core.locking import exclusive
from modelexport.core.stages import Stages
from modelexport.exporting import steps
from modelexport.exporting.checks import run_checks
from modelexport.exporting.fixed_axes import FixedAxesError, FixedAxis
from modelexport.exporting.interface import AS_CAPTURED, Interface, with_fixed_axes
from modelexport.exporting.options import Keywords, Options
from modelexport.exporting.report import report_path, write_report
from modelexport.exporting.result import ExportResult
from modelexport.files.atomic import Replacement, check_writable
from modelexport.graph.owners import owned_operators
from modelexport.pytorch.prepared import Prepared, prepare_inputs
from modelexport.pytorch.repeatability import Unrepeatable, find_unrepeatable
from modelexport.pytorch.static import module_tree
from modelexport.tagged.documents.dag import check_dag_directory, write_dag_files
from modelexport.tagged.tree import tree_rows

if TYPE_CHECKING:
    from torch import nn


@exclusive
@only_new_garbage()
def export(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    path: str | Path,
    *,
    name: str | None = None,
    frontend: FrontEnd = "auto",
    dynamic: bool = False,
    opset: int | None = None,
    optimized: bool = True,
    interface: Callable[[Exported], Exported] = AS_CAPTURED,
    options: Options | None = None,
    dag_dir: str | Path | None = None,
    stages: Stages | None = None,
    **keywords: Unpack[Keywords],
) -> ExportResult:
    """Export a model to ``path``, with every node tagged with the module call that it came from.

    The model is exported in evaluation mode and restored afterwards.

    Args:
        inputs: Example inputs: keyword arguments of ``forward``, or positional ones.
        path: ``DIR/NAME.onnx``; the documents are written beside it.
        name: The model's name in the documents; by default its class.
        frontend: ``dynamo``, ``torchscript``, or ``auto``: the first whose file passes its check.
        dynamic: Make every axis of every input dynamic, except those that the model fixes, in whatever way; the result
            lists those that the capture left dynamic, and the file turned out to fix.
        opset: The opset of the standard domain; by default the exporter's.
        optimized: Fold constants, rewrite and merge equal nodes.
        interface: Names the inputs, outputs and dynamic axes of the captured graph.
        options: How the file is tagged, where its weights go, how it is checked; each option is a keyword as well.
        dag_dir: A folder for the entries of ``NAME.dag.json`` as separate files; created if necessary.
        stages: Times the stages of the export and reports the running one.

    Raises:
        CaptureError, InputsError, UsageError: The model, the inputs or the options do not fit.
        UntaggedNodeError: A node has no owner. Nothing is written.
        CheckError: The file is invalid, does not load, or computes something else. Nothing is written.
        OutputError: The files cannot be written. Existing files are unchanged.
    """
    path, stages, options = Path(path), stages or Stages(), (options or Options()).replaced_by(keywords)
    check_opset(opset)
    options.check_together(optimized=optimized)
    check_writable(path)
    if (folder := Path(dag_dir) if dag_dir is not None else None) is not None:
        check_dag_directory(folder)
    with stages("repeat"):
        prepared = prepare_inputs(model, inputs, options.capture.constants)
        unrepeatable = [] if options.weights.lent is not None else find_unrepeatable(model, prepared.inputs)
    job = _Job(model, prepared, path, name, dynamic, opset, optimized, interface, options, folder, stages, unrepeatable)
    return first_that_passes(frontend, job.export_by, keep_anyway=options.checks.keep_anyway)


@dataclass(frozen=True)
class _Job:
    """One export: everything except the choice of the front end."""

    model: nn.Module
    prepared: Prepared
    path: Path
    name: str | None
    dynamic: bool
    opset: int | None
    optimized: bool
    interface: Callable[[Exported], Exported]
    options: Options
    dag_dir: Path | None
    stages: Stages
    unrepeatable: Sequence[Unrepeatable]

    def export_by(
        self, frontend: FrontEnd, attempts: Sequence[Attempt], keep_anyway: bool, fixed: Sequence[FixedAxis] = ()
    ) -> ExportResult:
        """Export with a front end. The files are moved into place if everything succeeds."""
        try:
            with turned_off(*([] if self.options.capture.reuse else ["once"])):
                return self._export_by(frontend, attempts, keep_anyway, fixed)
        except FixedAxesError as error:
            more = error.axes
        return self.export_by(frontend, attempts, keep_anyway, [*fixed, *more])

    def _export_by(
        self, frontend: FrontEnd, attempts: Sequence[Attempt], keep_anyway: bool, fixed: Sequence[FixedAxis]
    ) -> ExportResult:
        model, inputs, options, stages = self.model, self.prepared.inputs, self.options, self.stages
        with stages("capture"):
            tree = module_tree(model)
            exported = self.interface(capture(model, inputs, frontend, **options.for_capture(self.dynamic, self.opset)))
            exported = with_fixed_axes(exported, {(one.input, one.axis): one.size for one in fixed})
        with stages("optimize"):
            before = steps.remember(model, exported, options.weights.source)
            messages = [*exported.messages, *(steps.optimize_exported(exported, before) if self.optimized else ())]
            fused = steps.fuse(exported, before, tree, options.fusing)
        with stages("tag"):
            tagged = steps.tag(exported, before, tree, options.tags, fused)
        with stages("documents"):
            settings = options.settings(exported, attempts, dynamic=self.dynamic, optimized=self.optimized)
            described = steps.describe(model, exported, before, tagged, name=self.name, settings=settings)
            hierarchy = described.hierarchy
        with stages("encoding"):
            functions = steps.encode(exported.model, tagged.tags, options.tags.tags_as)
        with Replacement() as replacement:
            staged = replacement.folder(self.path.parent) / self.path.name
            graph = functions.model if functions else exported.model
            with stages("write"):
                weights = steps.write_files(graph, tagged, described.files, self.path, staged, options.weights)
            check, verified = run_checks(
                model,
                inputs,
                staged,
                self.path,
                hierarchy,
                weights,
                options,
                stages,
                asked=self._asked,
                must_pass=not keep_anyway,
            )
            result = ExportResult(
                path=self.path,
                hierarchy=hierarchy,
                tree=tree_rows(owned_operators(exported.model), exported.calls, tagged.tags.tag),
                seconds=stages.seconds,
                verified=verified,
                files=steps.list_files(staged, self.path, self.dag_dir),
                check=check,
                attempts=attempts,
                functions=functions,
                weights=weights,
                notes=self.prepared.notes,
                messages=messages,
                fusion=fused.found if fused is not None else None,
                unrepeatable=self.unrepeatable,
                fixed=fixed,
            )
            write_report(report_path(staged), result)
            if self.dag_dir is not None:
                write_dag_files(replacement, self.dag_dir, described.dags)
        return result

    @property
    def _asked(self) -> frozenset[str] | None:
        """The axes that have to be dynamic; ``None`` if the axes are those of a part of a package, which knows them."""
        return self.interface.asked if self.dynamic and isinstance(self.interface, Interface) else None
