"""Operators of ONNX that PyTorch computes in float64 many times as fast as NumPy."""

from __future__ import annotations

from typing import Any

import torch
from onnx.reference.op_run import OpRun


class Erf(OpRun):
    def _run(self, x: Any) -> tuple[Any, ...]:
        return (torch.erf(torch.from_numpy(x)).numpy(),)


class Gelu(OpRun):
    def _run(self, x: Any, approximate: str = "none") -> tuple[Any, ...]:
        return (torch.nn.functional.gelu(torch.from_numpy(x), approximate=approximate).numpy(),)


DOUBLE_KERNELS = {"Erf": Erf, "Gelu": Gelu}
"""By the names of the operators, in the standard domain."""
