"""Inputs with which the code of a model that asks of tensor values (``if mask.any()``) gets both answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import islice

import torch
from torch import nn

from modelexport.pytorch.inputs.variations import changed, uniform
from modelexport.pytorch.nested_tensors import Inputs, tensors_in
from modelexport.pytorch.runs.questions_of_values import answers_of_run


def with_other_answers(model: nn.Module, inputs: Inputs, kept: Collection[str] = ()) -> Iterator[tuple[str, Inputs]]:
    """Inputs for which some place of the model's code gets an answer that it got for none before, with a description.

    The same number everywhere; one row everywhere, for which all rows are as that one; larger, smaller and other
    numbers. They end once every place that asks has got both answers.

    Args:
        kept: The names of tensors that stay as they are: the file has their values.
    """
    seen = set(answers_of_run(model, inputs) or ())
    for what, other in islice(_candidates(inputs, kept), _MOST_RUNS):
        if all((site, not answer) in seen for site, answer in seen):
            return
        if new := (answers_of_run(model, other) or frozenset()) - seen:
            seen |= new
            yield f"{what}, with which the model decides otherwise", other


_MOST_RUNS = 96
"""How many inputs a model runs with, at most, to get its other answers."""
_ROWS, _DRAWN = 8, 64


def _candidates(inputs: Inputs, kept: Collection[str]) -> Iterator[tuple[str, Inputs]]:
    tensors = {name: tensor for name, tensor in tensors_in(inputs) if name not in kept and tensor.numel()}
    rows = max((tensor.shape[0] for tensor in tensors.values() if tensor.dim()), default=0)
    generator = torch.Generator().manual_seed(0)
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        **{f"row {row} everywhere": partial(_row, row=row) for row in range(min(rows, _ROWS))},
        **{f"{times} times the numbers": partial(_times, times=times) for times in (-1, 3, -3, 0.1, 30, -30)},
        **{f"drawn numbers {n}": partial(_drawn, number=n, generator=generator) for n in range(_DRAWN)},
    }

    def change(name: str, tensor: torch.Tensor, by: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return by(tensor) if name in tensors else tensor

    yield from uniform(inputs, kept)
    yield from ((what, changed(inputs, [partial(change, by=each)])) for what, each in changes.items())


def _row(tensor: torch.Tensor, row: int) -> torch.Tensor:
    return tensor[row % tensor.shape[0]].expand(tensor.shape).clone() if tensor.dim() else tensor


def _times(tensor: torch.Tensor, times: float) -> torch.Tensor:
    return tensor * times if tensor.is_floating_point() else tensor


def _drawn(tensor: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers of the tensor in another order; floating-point ones also larger or smaller, and moved to one side."""
    order = torch.randint(tensor.numel(), tensor.shape, generator=generator).to(tensor.device)
    other = tensor.flatten()[order]
    if not tensor.is_floating_point():
        return other
    return (other * (0.5, 2, 4)[number % 3] + (number % 5 - 2) * 2 * tensor.abs().mean()).to(tensor.dtype)
