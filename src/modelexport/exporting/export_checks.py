"""The checks of an export before its files are moved into place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import onnx

from modelexport.core.text import bytes_text, reason_of
from modelexport.errors import CheckError
from modelexport.exporting.capture_inputs import CaptureInputs
from modelexport.exporting.export_result import presumption
from modelexport.exporting.fixed_axes import FixedAxis
from modelexport.exporting.output_checks import LONGEST_REASON, FileCheck, check_outputs
from modelexport.exporting.requested_names import RequestedNames
from modelexport.exporting.size_decisions import SizesFound, find_sizes
from modelexport.exporting.steps import StagedExport
from modelexport.runtime.checked_writing import beside
from modelexport.tagged.strip_and_inline import runnable
from modelexport.verify.verify_report import VerifyReport
from modelexport.weights.bytes_of_entries import Weights

if TYPE_CHECKING:
    from modelexport.pytorch.nested_tensors import Inputs
    from modelexport.verify.model_and_file import ModelAndFile, ModelRuns


@dataclass(frozen=True)
class ExportChecks:
    """The checks of a file that was just written, and of what it was made from."""

    written: StagedExport
    captured: CaptureInputs
    names: RequestedNames | None
    """The names that a person asked for; ``None`` for a part of a package, which is checked where it runs."""
    fixed: Sequence[FixedAxis]
    """Axes that earlier files of this export could only have in one size."""

    def run(self, *, must_pass: bool) -> tuple[FileCheck | None, VerifyReport | None, SizesFound]:
        """Check the file, verify it and store its reference values, as the options request.

        Returns:
            The check and the verification, ``None`` for those that were not requested, and what was found about sizes.
        """
        check = verified = None
        written, model, example = self.written, self.written.model, self.captured.example
        options, stages, staged = written.options, written.stages, written.staged
        sizes = SizesFound(written.exported.unchecked_conditions)
        if not options.checks.any:
            return check, verified, sizes
        from modelexport.verify.verify import (
            record_reference,  # nothing else in an export needs ONNX Runtime
            verify,
        )

        with beside(staged, written.path.parent):
            if options.checks.check:
                with stages("check"):
                    check, sizes = self._check(sizes)
                if sizes.to_fix:
                    return check, verified, sizes
                if check.status == "failed" and must_pass:
                    is_wrong = "" if check.cause else "is wrong and "
                    raise CheckError(
                        f"the file {is_wrong}was not written ({check.step}): {check.reason}; "
                        f"--keep-anyway (keep_anyway=True) writes it nevertheless",
                        reason=check.reason,
                        runs=check.step not in ("onnx.checker", "loading", "running"),
                    )
            kept, source = options.checks.reference, options.weights.lent
            runs = self._runs if source is None else None
            if options.checks.verify:
                # Read again: the check may have written the file once more.
                with stages("verify"), runnable(staged, options.tags.tags_as) as file:
                    verified = verify(
                        model, example, file, sidecar=written.described.hierarchy, weights=source, runs=runs
                    )
            if kept:
                with stages("reference values"):
                    record_reference(
                        model,
                        example,
                        staged,
                        modules=() if isinstance(kept, bool) else kept,
                        sidecar=written.described.hierarchy,
                        announce=lambda size: stages.tell(f"reference values, {bytes_text(size)}"),
                        weights=source,
                        runs=runs,
                    )
        return check, verified, sizes

    @cached_property
    def _runs(self) -> ModelRuns:
        """The runs of the model that all checks share."""
        from modelexport.verify.model_and_file import ModelRuns

        return ModelRuns(self.written.model)

    def _check(self, sizes: SizesFound) -> tuple[FileCheck, SizesFound]:
        """Check the file with the example inputs and, if it passes and has dynamic axes, with other sizes."""
        written, options = self.written, self.written.options
        lent = options.weights.to_check
        if written.weights.absent_bytes or (options.weights.lent is not None and lent is None):
            return FileCheck(status="skipped", reason="the weights of the model are not in memory"), sizes
        from modelexport.verify.model_and_file import ModelAndFile, open_for

        with runnable(written.staged, options.tags.tags_as) as file, self._with_weights(lent):
            # onnx.checker does not know ONNX Runtime's operators in the standard domain.
            if not written.weights.linked and not options.graph.fuse and (fault := _invalid(file)):
                return FileCheck(status="failed", step="onnx.checker", reason=fault), sizes
            wide, example = self.captured.inputs, self.captured.example
            if not self.captured.wide:
                wide = example
            pair = ModelAndFile.of(self._runs, wide, open_for(written.model, file))
            check = self._check_outputs(pair, wide, file)
            # A part of a package whose weights stay in files is compared where it generates.
            runs = options.weights.lent is None or self.names is not None
            if options.capture.dynamic and runs and _is_right(check, pair, wide):
                every = options.checks.sizes
                about = written.exported, self.names
                sizes = find_sizes(pair, wide, *about, every=every, example=example, fixed=self.fixed)
                sizes = replace(sizes, tried=True)
                if sizes.to_fix:
                    return check, sizes
                if sizes.refusal:
                    check = FileCheck(status="failed", step="other sizes", reason=sizes.refusal)
            if self.captured.wide and check.status == "passed":
                check = self._check_outputs(ModelAndFile.of(self._runs, example, pair.tagged), example, file)
        stated = [condition.formula for condition in written.described.hierarchy.settings.valid_if]
        if [condition.formula for condition in sizes.conditions] != stated:
            written.write(sizes.conditions)
        return check, sizes

    def _with_weights(self, lent: Weights | None) -> AbstractContextManager[None]:
        """Inside, a model that was built without weights has them while it runs."""
        if lent is None:
            return nullcontext()
        from modelexport.pytorch.checkpoints.lazy_weights import lend_weights

        modules = self.written.described.hierarchy.modules
        return lend_weights(self.written.model, lent, {module.path for module in modules if not module.calls})

    def _check_outputs(self, pair: ModelAndFile, inputs: Inputs, file: Path) -> FileCheck:
        """Whether ONNX Runtime loads the file, and it computes the model's outputs.

        Where the model asks for values, the file is compared on other inputs, too.
        """
        check = check_outputs(pair, inputs, file)
        settings = self.written.described.hierarchy.settings
        cause = presumption(settings.presumed) if settings.presumed else "the model decides by values"
        cause += "; torch.where and torch.cond decide in the graph"
        if settings.presumed and check.status == "failed" and check.step == "outputs" and not check.cause:
            return msgspec.structs.replace(check, reason=f"{check.reason}; {cause}")
        if check.status != "passed" or not self.written.asks_for_values:
            return check
        from modelexport.pytorch.inputs.prepared_inputs import kept_tensors
        from modelexport.verify.other_inputs import compare_others

        kept = kept_tensors(self.written.model, inputs, tuple(settings.constants))
        for comparison in compare_others(pair.settled(inputs), inputs, kept, selects=True).compared:
            if comparison.status == "differ":
                reason = f"with {comparison.what}: {comparison.reason}; {cause}"
                return FileCheck(status="failed", step="other inputs", reason=reason)
        return check


def _is_right(check: FileCheck, pair: ModelAndFile, inputs: Inputs) -> bool:
    """Whether a file computes what the model does; one that only other processors run is compared in float64."""
    not_run = check.status == "skipped" and check.step == "loading"
    return check.status == "passed" or (not_run and pair.agrees_alone(inputs))


def _invalid(path: Path) -> str:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return reason_of(error, LONGEST_REASON)
    return ""
