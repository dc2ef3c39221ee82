"""Kernels in NumPy of operators that sample a grid, where onnx's own round places of the grid otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.reference.ops.op_grid_sample import GridSample as GridSampleAtFloat32
from onnx.reference.ops.op_resize import Resize as ResizeByExactScales


class GridSample(GridSampleAtFloat32):
    """``GridSample`` with positions in the type of the grid; onnx rounds them to float32, an error in a float64 run."""

    def _gs_denormalize_coordinates(self, n: Any, dims: Sequence[int], align_corners: bool) -> Any:
        places = zip(n, dims, strict=True)
        return np.array([self._gs_denormalize(place, size, align_corners) for place, size in places], n.dtype)


class Resize(ResizeByExactScales):
    """``Resize`` with sizes computed in float32, as runtimes do: 10 x 0.7 is 7, though its float32 is below 0.7."""

    def _run(
        self, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, *, axes: Any = None, **how: Any
    ) -> tuple[Any, ...]:
        if scales is not None and scales.size and (roi is None or not roi.size):
            whole = np.ones(x.ndim)
            whole[list(axes) if axes is not None else slice(None)] = scales
            scales, axes = whole.view(_Scales), None
            old_sizes, (places, mode) = np.array(x.shape), map(how.get, ("coordinate_transformation_mode", "mode"))
            if places == "align_corners":  # places depend on the sizes alone
                scales, sizes = None, (scales * old_sizes).astype(np.int64)
            elif (places, mode, how.get("nearest_mode")) == ("asymmetric", "nearest", "floor"):  # places in float32
                for axis, (size, scale) in enumerate(
                    zip((scales * old_sizes).astype(int), whole.astype(np.float32), strict=True)
                ):
                    chosen = np.floor(np.arange(size, dtype=np.float32) / scale).astype(int)
                    x = x.take(np.minimum(chosen, old_sizes[axis] - 1), axis)
                return (x,)
        return super()._run(x, roi, scales, sizes, axes=axes, **how)


class _Scales(np.ndarray[Any, Any]):
    def __mul__(self, sizes: Any) -> Any:
        return self.view(np.ndarray).astype(np.float32) * sizes.astype(np.float32)
