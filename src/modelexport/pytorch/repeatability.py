"""Parts of a model's behavior that change from run to run, which an exported file cannot reproduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from modelexport.core.messages import collected
from modelexport.pytorch.traced import untouched
from modelexport.pytorch.values import output_tensors, run_arguments

Kind = Literal["random", "buffer", "no output", "empty output"]


class Unrepeatable(msgspec.Struct, frozen=True, kw_only=True):
    """Behavior of the model that a file cannot reproduce."""

    kind: Kind
    where: str
    """The name of an output or a buffer."""


def find_unrepeatable(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any]) -> list[Unrepeatable]:
    """Run a model twice on the same inputs, with different random numbers; its state is restored afterwards.

    Returns:
        Outputs that differ or are empty, and buffers that a run changes. Empty if the model does not run.
    """
    args, kwargs = run_arguments(inputs)
    found: list[Unrepeatable] = []
    with untouched(model), collected():
        before = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
        try:
            torch.manual_seed(1)
            first = {name: tensor.clone() for name, tensor in output_tensors(model(*args, **kwargs))}
            found += [
                Unrepeatable(kind="buffer", where=name)
                for name, buffer in model.named_buffers()
                if name in before and not _same(before[name], buffer)
            ]
            for name, buffer in model.named_buffers():
                if name in before and before[name].shape == buffer.shape:
                    buffer.copy_(before[name])
            torch.manual_seed(2)
            second = dict(output_tensors(model(*args, **kwargs)))
        except Exception:  # capture reports why a model does not run
            return []
    if not first:
        found.append(Unrepeatable(kind="no output", where="."))
    found += [Unrepeatable(kind="empty output", where=name) for name, tensor in first.items() if not tensor.numel()]
    if not any(one.kind == "buffer" for one in found):
        found += [
            Unrepeatable(kind="random", where=name)
            for name, tensor in first.items()
            if name not in second or not _same(tensor, second[name])
        ]
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.shape == other.shape and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))
