"""The checks of an export before its files are moved into place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from modelexport.capture.exported_graph import Exported
from modelexport.core.text import first_few
from modelexport.core.timed_stages import Stages
from modelexport.errors import CheckError
from modelexport.exporting.input_output_axis_names import AS_CAPTURED, Interface
from modelexport.exporting.options import Options
from modelexport.exporting.output_checks import LONGEST_REASON, FileCheck, check_outputs
from modelexport.exporting.size_decisions import SizesFound, find_sizes, stated_unchecked
from modelexport.format import documents
from modelexport.graph.size_conditions import SizeCondition
from modelexport.runtime.checked_writing import beside
from modelexport.tagged.strip_and_inline import runnable
from modelexport.verify.verify_report import VerifyReport
from modelexport.weights.bytes_of_entries import Weights
from modelexport.weights.linked_copied_embedded import WeightsSummary

if TYPE_CHECKING:
    from torch import nn

    from modelexport.pytorch.nested_tensors import Inputs


def _check_written(
    model: nn.Module,
    inputs: Inputs,
    path: Path,
    hierarchy: documents.Hierarchy,
    weights: WeightsSummary,
    options: Options,
    *,
    asks_for_values: bool,
) -> FileCheck:
    """Check whether a file is valid, ONNX Runtime loads it, and it computes the model's outputs.

    Args:
        inputs: The example inputs; not changed.
        path: The file, in a place where it can be run.
        weights: The places of its weights.
        asks_for_values: The model asks for values.
    """
    lent = options.weights.to_check
    if weights.absent_bytes or (options.weights.lent is not None and lent is None):
        return FileCheck(status="skipped", reason="the weights of the model are not in memory")
    with runnable(path, options.tags.tags_as) as file, _with_weights(model, lent, hierarchy):
        # onnx.checker does not know ONNX Runtime's operators in the standard domain.
        if not weights.linked and not options.graph.fuse and (fault := _invalid(file)):
            return FileCheck(status="failed", step="onnx.checker", reason=fault)
        check = check_outputs(model, inputs, file)
        if check.status == "passed" and asks_for_values:
            return _check_on_others(model, inputs, file, hierarchy, check)
        return check


def _with_weights(
    model: nn.Module, lent: Weights | None, hierarchy: documents.Hierarchy
) -> AbstractContextManager[None]:
    """Inside, a model that was built without weights has them while it runs."""
    if lent is None:
        return nullcontext()
    from modelexport.pytorch.weights.lazy_weights import lend_weights

    return lend_weights(model, lent, {module.path for module in hierarchy.modules if not module.calls})


def _check_sizes(
    model: nn.Module,
    inputs: Inputs,
    path: Path,
    options: Options,
    exported: Exported,
    passed: FileCheck,
) -> tuple[FileCheck, SizesFound]:
    """Check what a file does with other sizes of its dynamic axes.

    Raises:
        FixedAxesError: It fixes sizes of axes that need not be dynamic.
    """
    from modelexport.verify.model_and_file import Sides, open_for

    interface = options.capture.interface or AS_CAPTURED
    names = interface if isinstance(interface, Interface) else None
    with runnable(path, options.tags.tags_as) as file:
        sizes = find_sizes(
            Sides.of(model, inputs, open_for(model, file)), inputs, exported, names, every=options.checks.sizes
        )
    return FileCheck(status="failed", step="other sizes", reason=sizes.refusal) if sizes.refusal else passed, sizes


def _invalid(path: Path) -> str:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return " ".join(str(error).split())[:LONGEST_REASON]
    return ""


def _check_on_others(
    model: nn.Module,
    inputs: Inputs,
    path: Path,
    hierarchy: documents.Hierarchy,
    passed: FileCheck,
) -> FileCheck:
    """Compare the file of a model that asks for values on other inputs."""
    from modelexport.pytorch.inputs.prepared_inputs import kept_tensors
    from modelexport.verify.model_and_file import Sides, open_for
    from modelexport.verify.other_inputs import compare_others

    settings = hierarchy.settings
    sides = Sides.of(model, inputs, open_for(model, path))
    kept = kept_tensors(model, inputs, tuple(settings.constants))
    for comparison in compare_others(sides, inputs, kept, selects=True).compared:
        if comparison.status == "differ":
            cause = told_of_presumed(settings.presumed) if settings.presumed else "the model decides by values"
            reason = f"with {comparison.what}: {comparison.reason}; {cause}"
            return FileCheck(status="failed", step="other inputs", reason=reason)
    return passed


def told_of_presumed(lines: Sequence[str]) -> str:
    """What a file does where the model asks whether anything is selected."""
    return (
        f"the model asks whether anything is selected ({first_few(lines, 3)}); the file always does what follows if "
        "something is: verify it on inputs for which nothing is"
    )


def run_checks(
    model: nn.Module,
    inputs: Inputs,
    staged: Path,
    path: Path,
    hierarchy: documents.Hierarchy,
    weights: WeightsSummary,
    options: Options,
    stages: Stages,
    *,
    exported: Exported,
    restate: Callable[[Sequence[SizeCondition]], documents.Hierarchy],
    must_pass: bool,
    asks_for_values: bool,
) -> tuple[FileCheck | None, VerifyReport | None, SizesFound]:
    """Check a file that was just written, verify it and store its reference values, as the options request.

    Args:
        staged: The file, which will be moved to ``path``.
        asks_for_values: The model asks for values; the file is then compared on other inputs, too.
        exported: The capture, with the conditions of sizes that it recorded.
        restate: Writes the file once more, with the conditions of sizes that were found to be its own.

    Returns:
        The check and the verification, ``None`` for those that were not requested, and what was found about sizes.

    Raises:
        CheckError: The file fails the check, and ``must_pass`` is set.
        FixedAxesError: The file fixes sizes of axes that need not be dynamic.
    """
    check = verified = None
    sizes = SizesFound(list(stated_unchecked(exported)))
    if not options.checks.any:
        return check, verified, sizes
    from modelexport.pytorch.inputs.prepared_inputs import prepare_inputs
    from modelexport.verify.verify import (
        record_reference,  # nothing else in an export needs ONNX Runtime
        verify,
    )

    if options.checks.checked is not None:
        inputs = prepare_inputs(model, options.checks.checked).inputs
    with beside(staged, path.parent):
        if options.checks.check:
            with stages("check"):
                check = _check_written(
                    model, inputs, staged, hierarchy, weights, options, asks_for_values=asks_for_values
                )
                lent, interface = options.weights.to_check, options.capture.interface or AS_CAPTURED
                # A part of a package whose weights stay in files is compared where it generates.
                runs = options.weights.lent is None or (lent is not None and isinstance(interface, Interface))
                if options.capture.dynamic and runs and check.status == "passed":
                    with _with_weights(model, lent, hierarchy):
                        check, sizes = _check_sizes(model, inputs, staged, options, exported, check)
                    if [condition.formula for condition in sizes.conditions] != [
                        condition.formula for condition in hierarchy.settings.valid_if
                    ]:
                        hierarchy = restate(sizes.conditions)
            if check.status == "failed" and must_pass:
                raise CheckError(
                    f"the file is wrong and was not written ({check.step}): {check.reason}; "
                    f"--keep-anyway (keep_anyway=True) writes it nevertheless",
                    reason=check.reason,
                    runs=check.step not in ("onnx.checker", "loading", "running"),
                )
        kept, source = options.checks.reference, options.weights.lent
        if options.checks.verify:
            with stages("verify"), runnable(staged, options.tags.tags_as) as file:
                verified = verify(model, inputs, file, sidecar=hierarchy, weights=source)
        if kept:
            with stages("reference values"):
                record_reference(
                    model,
                    inputs,
                    staged,
                    modules=() if isinstance(kept, bool) else kept,
                    sidecar=hierarchy,
                    announce=lambda size: stages.tell(f"reference values, {size / 1e6:,.1f} MB"),
                    weights=source,
                )
    return check, verified, sizes
