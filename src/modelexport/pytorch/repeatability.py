"""Parts of a model's behavior that change from run to run, which an exported file cannot reproduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from modelexport.core.messages import collected
from modelexport.pytorch.traced import masks_kept, nothing_fused, untouched
from modelexport.pytorch.values import output_tensors, run_arguments

Kind = Literal["random", "buffer", "mask", "fused", "no output", "empty output"]


class Unrepeatable(msgspec.Struct, frozen=True, kw_only=True):
    """Behavior of the model that a file cannot reproduce."""

    kind: Kind
    where: str
    """The name of an output or a buffer."""


def find_unrepeatable(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any]) -> list[Unrepeatable]:
    """Run a model twice on the same inputs, with different random numbers; its state is restored afterwards.

    The second run leaves out attention masks that hide nothing, where transformers does. Some models compute otherwise
    then: without a mask, attention follows a flag of the module that disagrees with it. A file has the mask. Nor does a
    file have PyTorch's fused operator for a ``TransformerEncoder``, which gives zeros for what is padded.

    Returns:
        Outputs that differ or are empty, and buffers that a run changes. Empty if the model does not run.
    """

    def run() -> dict[str, torch.Tensor]:
        args, kwargs = run_arguments(inputs)  # anew, since a run may write into them
        return dict(output_tensors(model(*args, **kwargs)))

    found: list[Unrepeatable] = []
    with untouched(model, masks=False), collected():
        before = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
        try:
            with masks_kept(), nothing_fused():
                torch.manual_seed(1)
                first = {name: tensor.clone() for name, tensor in run().items()}
            found += [
                Unrepeatable(kind="buffer", where=name)
                for name, buffer in model.named_buffers()
                if name in before and not _same(before[name], buffer)
            ]
            _put_back(model, before)
            torch.manual_seed(2)
            plain = {name: tensor.clone() for name, tensor in run().items()}
            second = fused = plain
            if not _all_same(first, plain):
                _put_back(model, before)
                with masks_kept(), nothing_fused():
                    torch.manual_seed(2)
                    second = run()
                _put_back(model, before)
                with masks_kept():
                    torch.manual_seed(2)
                    fused = run()
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
        found += [
            Unrepeatable(kind="mask" if name in fused and _close(tensor, fused[name]) else "fused", where=name)
            for name, tensor in second.items()
            if name in plain and not _close(tensor, plain[name])
        ]
    return found


def _put_back(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in before and before[name].shape == buffer.shape:
            buffer.copy_(before[name])


def _all_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return all(name in second and _same(tensor, second[name]) for name, tensor in first.items())


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether no more than rounding is between two tensors."""
    if one.shape != other.shape or not one.is_floating_point():
        return _same(one, other)
    a, b = (torch.nan_to_num(tensor.double(), posinf=0.0, neginf=0.0) for tensor in (one, other))
    return bool((a - b).norm() <= 1e-3 * max(float(a.norm()), 1e-6))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.shape == other.shape and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))
