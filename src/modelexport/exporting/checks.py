"""The checks of an export before its files are moved into place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import onnx

from modelexport.core.stages import Stages
from modelexport.errors import CheckError, UsageError
from modelexport.exporting.fixed_axes import FixedAxesError, find_fixed_axes, told_of_fixed
from modelexport.exporting.options import Options
from modelexport.format import documents
from modelexport.graph.requested import requested_outputs
from modelexport.tagged.flattening import runnable
from modelexport.verify.differences import SHARES, UNITS, Difference, compare_arrays, known_beside_noise
from modelexport.verify.verdicts import VerifyReport
from modelexport.weights.placement import WeightsSummary, reachable
from modelexport.weights.sources import Weights

if TYPE_CHECKING:
    from torch import nn

CheckStep = Literal["onnx.checker", "loading", "running", "outputs", "other sizes"]


class FileCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of checking a file."""

    status: Literal["passed", "failed", "skipped"]
    step: CheckStep | None = None
    """The step that failed or could not be done."""
    reason: str = ""
    largest: float | None = None
    """The largest error of any output: the norm of the difference over the norm of the output."""


def _check_written(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    path: Path,
    hierarchy: documents.Hierarchy,
    weights: WeightsSummary,
    options: Options,
) -> FileCheck:
    """Check whether a file is valid, ONNX Runtime loads it, and it computes the model's outputs.

    Args:
        inputs: The example inputs; not changed.
        path: The file, in a place where it can be run.
        weights: The places of its weights.
    """
    lent = options.weights.to_check
    if weights.absent_bytes or (options.weights.lent is not None and lent is None):
        return FileCheck(status="skipped", reason="the weights of the model are not in memory")
    with runnable(path, options.tags.tags_as) as file, _with_weights(model, lent, hierarchy):
        # onnx.checker does not know ONNX Runtime's operators in the standard domain.
        if not weights.linked and not options.graph.fuse and (fault := _invalid(file)):
            return FileCheck(status="failed", step="onnx.checker", reason=fault)
        return _check_outputs(model, inputs, file)


def _with_weights(
    model: nn.Module, lent: Weights | None, hierarchy: documents.Hierarchy
) -> AbstractContextManager[None]:
    """Inside, a model that was built without weights has them while it runs."""
    if lent is None:
        return nullcontext()
    from modelexport.pytorch.lazy_weights import lend_weights

    return lend_weights(model, lent, {module.path for module in hierarchy.modules if not module.calls})


def _check_sizes(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    path: Path,
    hierarchy: documents.Hierarchy,
    options: Options,
    asked: Collection[str],
    passed: FileCheck,
) -> FileCheck:
    """Check whether a file accepts other sizes of its dynamic axes.

    Raises:
        FixedAxesError: It fixes sizes of axes that need not be dynamic.
    """
    from modelexport.verify.model import verify

    with runnable(path, options.tags.tags_as) as file:
        fixed = find_fixed_axes(
            model, inputs, file, hierarchy, lambda: verify(model, inputs, file, sidecar=hierarchy, perturb=False)
        )
    wrong = [axis for axis in fixed if options.checks.sizes or axis.symbol in asked]
    if wrong:
        return FileCheck(status="failed", step="other sizes", reason=told_of_fixed(wrong[0]))
    if fixed:
        raise FixedAxesError(fixed)
    return passed


def _invalid(path: Path) -> str:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return " ".join(str(error).split())[:_REASON]
    return ""


_REASON = 300
"""The largest number of characters of a reason in a message."""

_NO_KERNEL = "NOT_IMPLEMENTED"
"""ONNX Runtime's message for an operator that it does not implement on this device for the file's types."""

_FEW_KERNELS = ("float16", "bfloat16", "float64")
"""Types of parameters for which ONNX Runtime implements many operators on other devices only."""


def _check_outputs(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any], path: Path) -> FileCheck:
    from modelexport.pytorch.repeatability import is_random
    from modelexport.runtime.sessions import open_session, run_session
    from modelexport.verify.feeding import feeds
    from modelexport.verify.given_choices import rounded_outputs, run_in_double, run_with_choices
    from modelexport.verify.outputs import run_module

    expected = run_module(model, inputs)
    step: CheckStep = "loading"
    try:
        runs = open_session(path, optimized=True)
        step = "running"
        actual = run_session(runs, feeds(inputs, runs))
    except UsageError as error:
        types = {str(one.dtype).removeprefix("torch.") for one in (*model.parameters(), *model.buffers())}
        unsupported = not types.isdisjoint(_FEW_KERNELS) and _NO_KERNEL in str(error)
        status: Literal["failed", "skipped"] = "skipped" if unsupported else "failed"
        return FileCheck(status=status, step=step, reason=str(error)[:_REASON])
    asked = runs.get_modelmeta().custom_metadata_map
    expected = requested_outputs(asked, expected)
    if len(expected) != len(actual):
        reason = f"PyTorch returns {len(expected)} tensors, the file {len(actual)}"
        return FileCheck(status="failed", step="outputs", reason=reason)
    differences = [_compare(name, one, actual[name]) for name, one in zip(actual, expected, strict=True)]
    wrong = [difference for difference in differences if difference.status != "agree"]
    largest = max((difference.relative or 0.0 for difference in differences), default=0.0)
    if not wrong:
        return FileCheck(status="passed", largest=largest)

    def agrees(found: Mapping[str, Any]) -> bool:
        return all(_compare(k, one, found[k]).status == "agree" for k, one in zip(actual, expected, strict=True))

    fed, tied = run_with_choices(model, inputs, path)
    if fed and agrees(fed):
        return FileCheck(status="passed", step="outputs", reason=f"the file {tied}")
    precise, told = run_in_double(inputs, path, agrees)
    if precise:
        return FileCheck(status="passed", step="outputs", reason=told)
    if is_random(model, inputs):
        return FileCheck(status="skipped", step="outputs", reason="the model uses random numbers")
    judged = fed or actual  # what a choice among equal scores changes was not the reason, or not the only one
    rounded = rounded_outputs(model, inputs, same_choices=bool(fed))
    others = requested_outputs(asked, rounded) if rounded is not None else [None] * len(expected)
    measured = [_compare(k, one, judged[k], other) for k, one, other in zip(actual, expected, others, strict=True)]
    measured = [known_beside_noise(one) for one in measured]
    if all(one.status == "agree" for one in measured):
        return FileCheck(status="passed", step="outputs", reason=_ROUNDING, largest=largest)
    if all(one.status != "differ" for one in measured):
        drowned = next(one for one in measured if one.status != "agree")
        return FileCheck(status="skipped", step="outputs", reason=f"{drowned.name}: {drowned.reason}", largest=largest)
    reason = f"{wrong[0].name} differs from PyTorch's output: {wrong[0].reason}"
    return FileCheck(status="failed", step="outputs", reason=reason, largest=largest)


_ROUNDING = "the model's own result is off by as much: rounding grows in it"


def _compare(name: str, expected: Any, actual: Any, rounded: Any | None = None) -> Difference:
    """Compare an output with the expected one, coarsely: `verify` measures rounding errors.

    Args:
        rounded: The expected one with other roundings, if that is known.
    """
    dtype = str(expected.dtype)
    units = SHARES.get(dtype, 0.0) / UNITS.get(dtype, 1.0)
    return compare_arrays(name, expected, actual, units=units, exact=rounded)


def run_checks(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    staged: Path,
    path: Path,
    hierarchy: documents.Hierarchy,
    weights: WeightsSummary,
    options: Options,
    stages: Stages,
    *,
    asked: Collection[str] | None,
    must_pass: bool,
) -> tuple[FileCheck | None, VerifyReport | None]:
    """Check a file that was just written, verify it and store its reference values, as the options request.

    Args:
        staged: The file, which will be moved to ``path``.
        asked: The symbols of the axes that have to be dynamic; ``None`` if other sizes are not checked.

    Returns:
        The check and the verification; ``None`` for those that were not requested.

    Raises:
        CheckError: The file fails the check, and ``must_pass`` is set.
        FixedAxesError: The file fixes sizes of axes that need not be dynamic.
    """
    check = verified = None
    if not options.checks.any:
        return check, verified
    from modelexport.pytorch.prepared import prepare_inputs
    from modelexport.verify.model import record_reference, verify  # nothing else in an export needs ONNX Runtime

    if options.checks.checked is not None:
        inputs = prepare_inputs(model, options.checks.checked).inputs
    with reachable(staged.parent, path, weights):
        if options.checks.check:
            with stages("check"):
                check = _check_written(model, inputs, staged, hierarchy, weights, options)
                if asked is not None and check.status == "passed" and options.weights.lent is None:
                    check = _check_sizes(model, inputs, staged, hierarchy, options, asked, check)
            if check.status == "failed" and must_pass:
                raise CheckError(
                    f"the file is wrong and was not written ({check.step}): {check.reason}; "
                    f"--keep-anyway (keep_anyway=True) writes it nevertheless",
                    reason=check.reason,
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
    return check, verified
