"""Outputs computed with the runtime's float64 kernels: its float32 ones may be less exact than their type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.runtime.kernels import run_in_double, with_double_kernels
from modelexport.runtime.sessions import CPU, input_names, open_session, run_session


def outputs_in_double(
    model: ir.Model,
    folder: Path,
    feeds: Mapping[str, Any],
    agrees: Callable[[Mapping[str, Any]], bool],
    *,
    provider: str = CPU,
) -> tuple[Mapping[str, Any], str]:
    """The outputs of a file computed with float64 kernels, and the operator whose float32 kernel is to blame.

    Args:
        agrees: Whether outputs are those of the PyTorch model.

    Returns:
        Nothing where they do not agree either, or where those of the float32 kernels agree without the runtime's
        optimizer: then that is to blame.
    """

    def is_right(changed: ir.Model) -> bool | None:
        try:
            session = open_session(changed, folder=folder, provider=provider)
            return agrees(run_session(session, {name: feeds[name] for name in input_names(session)}))
        except UsageError:  # it does not run so
            return None

    for found, operators in run_in_double(model, folder, feeds, provider):
        if not agrees(found):
            continue
        if is_right(model) is not False:
            break
        alone = (one for one in operators if is_right(with_double_kernels(model, provider, [one])[0]))
        told = next(alone, ", ".join(operators))
        return found, f"with float64 kernels: ONNX Runtime's float32 kernel of {told} is less exact than its type"
    return {}, ""
