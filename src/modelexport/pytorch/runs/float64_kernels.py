"""Operators of ONNX that PyTorch computes in float64 many times as fast as onnx's reference evaluator, or that this one
computes in float32 (places of a grid).
"""

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


class GridSample(OpRun):
    def _run(
        self, x: Any, grid: Any, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
    ) -> tuple[Any, ...]:
        mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
        sample = torch.nn.functional.grid_sample
        return (sample(torch.from_numpy(x), torch.from_numpy(grid), mode, padding_mode, bool(align_corners)).numpy(),)


class AffineGrid(OpRun):
    def _run(self, theta: Any, size: Any, align_corners: int = 0) -> tuple[Any, ...]:
        grid = torch.nn.functional.affine_grid(torch.from_numpy(theta), size.tolist(), bool(align_corners))
        return (grid.numpy(),)


DOUBLE_KERNELS = {"Erf": Erf, "Gelu": Gelu, "GridSample": GridSample, "AffineGrid": AffineGrid}
"""By the names of the operators, in the standard domain."""
