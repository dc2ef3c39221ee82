"""What a model returns, as users run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from modelexport.core.messages import collected
from modelexport.pytorch.traced import untouched
from modelexport.pytorch.values import as_array, as_stored, has_elements, output_tensors, run_arguments


def returned_by(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any], *, as_exported: bool = True) -> list[Any]:
    """The tensors in what a model returns, in order. It runs in evaluation mode, and is restored afterwards.

    Args:
        as_exported: With masks that hide nothing and without fused operators, as front ends see it.
    """
    args, kwargs = run_arguments(inputs)
    with untouched(model, masks=as_exported, guarded=True), collected():
        result = model(*args, **kwargs)
    return [as_array(as_stored(tensor)) for _, tensor in output_tensors(result) if has_elements(tensor)]
