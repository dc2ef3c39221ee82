"""``assert_exports``: a test that a model can be exported and that its file computes what the model does."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.errors import ModelExportError, UsageError
from modelexport.exporting.pipeline import export
from modelexport.files.path_or_model import Source
from modelexport.terminal.show_verification import format_verify

if TYPE_CHECKING:
    from torch import nn

    from modelexport.verify.verify_report import VerifyReport


def assert_exports(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    *,
    like: Source | None = None,
    path: str | Path | None = None,
    **options: Any,
) -> VerifyReport:
    """Fail unless a model exports, its file agrees with it in every call, and the file is like an earlier one.

    Args:
        inputs: Example inputs, as for :func:`modelexport.export`.
        like: A file that the new one must not differ from in modules, operators and ``state_dict`` entries; its weights
            may be others.
        path: Where to write the file, to look at it; by default it is removed.
        options: Those of :func:`modelexport.export`.

    Returns:
        The comparison with PyTorch.

    Raises:
        AssertionError: With what ``modelexport verify`` or ``modelexport compare`` prints, or why there is no file.
        UsageError, FileFormatError: The options do not go together, or ``like`` cannot be read.
    """
    __tracebackhide__ = True
    options["verify"] = True
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = export(model, inputs, path or Path(folder, "model.onnx"), **options)
        except ModelExportError as error:
            if type(error) is UsageError:
                raise
            raise AssertionError(f"{type(model).__name__} does not export: {error}") from None  # the line says all
        report = result.verified
        assert report is not None
        if not report.agrees:
            raise AssertionError(f"the file of {type(model).__name__} differs from it:\n{format_verify(report)}")
        if like is not None:
            from modelexport.tools.compare.comparison import compare
            from modelexport.tools.compare.comparison_text import format_comparison

            if (comparison := compare(like, result)).differs:
                raise AssertionError(f"the export of {type(model).__name__} changed:\n{format_comparison(comparison)}")
        return report
