"""What an operation of PyTorch computes before it adds its bias: in files another node may add it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modelexport.pytorch.nested_tensors import has_elements
from modelexport.pytorch.private_torch import schema_of


def product_without_bias(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Any:
    """The result of an operation less the tensor that it adds; ``None`` if it adds none.

    PyTorch's schemas tell: an operator adds its argument ``bias``, or ``beta`` times its first one, as ``addmm`` does.
    """
    names = [argument.name for argument in schema_of(func).arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    bias = arguments.get("bias", args[0] if "beta" in names else None)
    if not isinstance(bias, torch.Tensor) or not isinstance(output, torch.Tensor) or not has_elements(bias):
        return None
    if "stride" in names:  # a convolution, whose channels are the second axis
        bias = bias.reshape(-1, *(1,) * (output.dim() - 2))
    return output - arguments.get("beta", 1) * bias
