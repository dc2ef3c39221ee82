"""Products without the bias that PyTorch adds in one operation: in files another node may add it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from modelexport.pytorch.nested_tensors import has_elements

_BIAS = {
    torch.ops.aten.addmm: 0,
    torch.ops.aten.baddbmm: 0,
    torch.ops.aten.linear: 2,
    torch.ops.aten.convolution: 2,
}
"""Operations that add a tensor to a product or a convolution, each to its place among the arguments."""


def product_without_bias(func: Any, args: Sequence[Any], output: Any) -> Any:
    """The result of an operation less its bias; ``None`` if the operation adds none."""
    place = _BIAS.get(getattr(func, "overloadpacket", None))
    bias = args[place] if place is not None and len(args) > place else None
    if bias is None or not has_elements(bias):
        return None
    is_convolution = func is torch.ops.aten.convolution.default
    return output - (bias.reshape(-1, *(1,) * (output.dim() - 2)) if is_convolution else bias)
