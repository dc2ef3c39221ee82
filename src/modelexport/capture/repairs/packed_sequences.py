"""Packed sequences, computed on padded ones with operators that every front end translates.

``nn.utils.rnn`` packs the rows of all steps, without those behind the end of a sequence, in C++ that reads lengths.
Here a mask, a row a step, a column a sequence, says which rows these are; the sizes of a packed sequence carry it.
What a recurrent layer computes behind the end of a sequence changes nothing before it, and is not packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from modelexport.capture.patches import private, usable
from modelexport.capture.repairs.recurrent import layer_by_layer

_MASK = "modelexport_mask"
_FROM_OUTSIDE = "the lengths of a packed sequence are not known"
_CLOSED = 1e4
"""A gate with this number more is 1, with this less 0, in every precision."""


def pack(input: Any, lengths: Any, batch_first: bool) -> Any:
    steps = input.transpose(0, 1) if batch_first else input
    mask = _mask(lengths, steps.shape[0])
    counts = mask.sum(1)
    sizes = counts[counts.nonzero().squeeze(1)]
    if isinstance(sizes.shape[0], torch.SymInt):
        private("check")(sizes.shape[0] <= steps.shape[0])
    setattr(sizes, _MASK, mask)
    return _packed(steps, mask), sizes


def pad(data: Any, sizes: Any, batch_first: bool, padding_value: Any, total_length: Any) -> Any:
    if not hasattr(sizes, _MASK):
        raise ValueError(_FROM_OUTSIDE)
    lengths = getattr(sizes, _MASK).sum(0)
    steps = _padded(data, _mask(lengths, total_length), padding_value)
    return (steps.transpose(0, 1) if batch_first else steps), lengths


def _mask(lengths: Any, steps: Any) -> Any:
    return torch.arange(steps, device=lengths.device).unsqueeze(1) < lengths.unsqueeze(0)


def _packed(steps: Any, mask: Any) -> Any:
    return steps.flatten(0, 1)[mask.flatten().nonzero().squeeze(1)]


def _padded(data: Any, mask: Any, value: float = 0.0) -> Any:
    rows = (mask.flatten().long().cumsum(0) - 1).clamp(min=0).reshape(mask.shape)
    return torch.where(mask.reshape(*mask.shape, *[1] * (data.dim() - 1)), data[rows], value)


def first_of(sizes: Any, index: Any) -> Any:
    """An element of a tensor; the first of a packed sequence's sizes is the number of sequences."""
    mask = getattr(sizes, _MASK, None)
    return sizes[index] if mask is None or not isinstance(index, int) or index != 0 else mask.shape[1]


def _recurrent(layer: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent layer, also for a packed sequence."""

    def run(input: Any, sizes: Any, *others: Any, **kwargs: Any) -> Any:
        mask = getattr(sizes, _MASK, None)
        if mask is None and isinstance(sizes, torch.Tensor) and not sizes.is_floating_point():
            raise ValueError(_FROM_OUTSIDE)
        if mask is None:
            return layer(input, sizes, *others, **kwargs)
        return _run(layer, input, mask, *others, **kwargs)

    return run


def _run(layer: Callable[..., Any], data: Any, mask: Any, hx: Any, params: Sequence[Any], *options: Any) -> Any:
    biases, layers, _, _, bidirectional = options
    lengths = mask.sum(0)
    step = torch.arange(mask.shape[0], device=mask.device).unsqueeze(1)
    reverse = torch.where(mask, lengths - 1 - step, step)

    def run(steps: Any, first: list[Any], weights: Sequence[Any], backward: bool) -> tuple[Any, ...]:
        inputs = _at(steps, reverse) if backward else steps
        output = _layer(layer, inputs, first, weights, biases)[0]
        last = [_at(output, lengths.unsqueeze(0) - 1)]
        if len(first) == 2:
            last.append(_last_cell(layer, inputs, mask, first, weights, biases))
        return _at(output, reverse) if backward else output, *last

    states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    steps, *last = layer_by_layer(run, _padded(data, mask), states, params, layers, 2 if bidirectional else 1)
    return _packed(steps, mask), *last


def _at(steps: Any, places: Any) -> Any:
    return steps.gather(0, places.unsqueeze(-1).expand(-1, -1, steps.shape[-1]))


def _last_cell(layer: Callable[..., Any], steps: Any, mask: Any, first: list[Any], weights: Any, biases: bool) -> Any:
    """The cells of an LSTM at the end of each sequence: behind it, gates keep them as they are.

    Only this is computed a second time, and only in a file that has a use for it.
    """
    hidden = weights[0].shape[0] // 4
    gates = weights[0].new_zeros((4, hidden))
    gates[0], gates[1] = -_CLOSED, _CLOSED
    ended = torch.cat([steps, (~mask).to(steps.dtype).unsqueeze(-1)], -1)
    weights = [torch.cat([weights[0], gates.reshape(-1, 1)], 1), *weights[1:]]
    return _layer(layer, ended, first, weights, biases)[2]


def _layer(layer: Callable[..., Any], steps: Any, first: list[Any], weights: Any, biases: bool) -> Any:
    return layer(steps, first if len(first) == 2 else first[0], list(weights), biases, 1, 0.0, False, False, False)


def unless_packed(check: Callable[..., None]) -> Callable[..., None]:
    """A recurrent layer's check of what it is given, which reads the sizes of a packed sequence."""

    def checked(self: Any, input: Any, hidden: Any, batch_sizes: Any) -> None:
        if batch_sizes is None:
            check(self, input, hidden, batch_sizes)

    return checked


def packed_sequences() -> Mapping[Any, Callable[..., Any]]:
    """Functions of torch to their replacements, which work on padded tensors."""
    if not usable("packing", "padding"):
        return {}
    layers = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    return {
        private("packing"): pack,
        private("padding"): pad,
        torch.Tensor.__getitem__: first_of,
        **{layer: _recurrent(layer) for layer in layers},
    }
