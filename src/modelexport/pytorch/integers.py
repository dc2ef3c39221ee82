"""Integers that a model may take and examples seldom have: above a thousand, and negative ones that stand for nothing.

Positions and times have no table that bounds them, and a label of -100 or an id of -1 often means that there is none.
A model may refuse them, and what it then does is not asked of the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir
import torch

from modelexport.graph.nodes import READ_SIZES_ONLY, all_graphs
from modelexport.pytorch.other_sizes import inputs_of_file
from modelexport.pytorch.values import tensors_in
from modelexport.pytorch.variations import changed, integers_compared, is_mask, rows_of_ids

Inputs = Mapping[str, Any] | Sequence[Any]
Alternatives = list[tuple[str, Inputs]]
"""Variations with their descriptions, of which the first that a model accepts is enough."""


def integers_above(inputs: Inputs, model: ir.Model, kept: Collection[str] = ()) -> Iterator[Alternatives]:
    """Inputs with integers above a thousand, where the file has no table for them: all at once, or one by one.

    Args:
        kept: The names of tensors that stay as they are: the file has their values.
    """
    if any(_narrows(node) for graph in all_graphs(model) for node in graph):
        return
    rows = rows_of_ids(model)
    found = _integers(inputs, model, kept)
    names = [name for name, (value, tensor) in found.items() if value.name not in rows and _has_room(tensor)]
    groups = [names, *([name] for name in names if len(names) > 1)] if names else []
    if groups:
        yield [("integers above a thousand", changed(inputs, [partial(_above, those)])) for those in groups]


def negative_integers(inputs: Inputs, model: ir.Model, kept: Collection[str] = ()) -> Iterator[Alternatives]:
    """Each input of integers with negative ones in some places of its rows: several of them, or a single one.

    A length or a time of less than zero may leave a row without anything, of which a softmax is whatever one likes.

    Args:
        kept: As in :func:`integers_above`.
    """
    for name, (value, tensor) in _integers(inputs, model, kept).items():
        if tensor.ndim < 2 or tensor.shape[-1] < _LONG:
            continue
        compared = (one for own in integers_compared(model, [value]) for one in (own, own - 1))
        least = torch.iinfo(tensor.dtype).min
        numbers = list(dict.fromkeys(one for one in (*compared, *_NOTHING) if least <= one < 0))
        groups = [numbers, *([one] for one in numbers)]
        yield [(f"negative integers in {name}", changed(inputs, [partial(_put, name, those)])) for those in groups]


_NOTHING = (-100, -1)
"""What stands for no label in PyTorch's losses, and for nothing elsewhere."""
_LONG = 4
"""So many integers of a row are not all negative then."""
_ABOVE = (2003, 1013, 3001, 1511)
"""What is added, in turn."""


def _integers(inputs: Inputs, model: ir.Model, kept: Collection[str]) -> Mapping[str, tuple[ir.Value, torch.Tensor]]:
    """Integers that may have other values: the file uses them, not as masks, and computes no sizes of them."""
    values = {value.name or "": value for value in model.graph.inputs}
    found, own = {}, inputs_of_file(inputs, model)
    for name, tensor in tensors_in(inputs):
        value = values.get(own.get(name, ""))
        if name in kept or tensor.dtype not in _TYPES or not tensor.numel() or is_mask(tensor) or value is None:
            continue
        if value.uses() and not _gives_sizes(value):
            found[name] = value, tensor
    return found


_TYPES = (torch.int64, torch.int32, torch.int16)


def _gives_sizes(given: ir.Value) -> bool:
    """Whether what is computed from a value is a size, or how often something is done: large ones take all memory."""
    pending, seen = [given], {given}
    while pending:
        for node, index in pending.pop().uses():
            if index >= _SIZED.get(node.op_type, len(node.inputs)) or node.graph is not given.graph:
                return True  # what a branch or a loop makes of it may be one, too
            for value in node.outputs if node.op_type not in READ_SIZES_ONLY else ():
                if value not in seen:
                    seen.add(value)
                    pending.append(value)
    return False


_SIZED = {
    "ConstantOfShape": 0,
    "Range": 0,
    "Loop": 0,
    "Resize": 1,
    "Upsample": 1,
    "CenterCropPad": 1,
    "Pad": 1,
    "Expand": 1,
    "Reshape": 1,
    "Tile": 1,
    "OneHot": 1,
    "Slice": 1,
    "Split": 1,
    "TopK": 1,
    "AffineGrid": 1,
    "If": 0,
    "HannWindow": 0,
    "HammingWindow": 0,
    "BlackmanWindow": 0,
    "Col2Im": 1,
    "Scan": 0,
    "STFT": 1,
    "DFT": 1,
}
"""Operators to the first of their inputs that are sizes, or numbers of steps."""


def _narrows(node: ir.Node) -> bool:
    """Whether a node makes of integers numbers of a type that has not all of them from a thousand on."""
    taken = node.inputs[0] if node.inputs else None
    return (
        node.op_type == "Cast"
        and node.outputs[0].dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        and taken is not None
        and (taken.dtype is None or taken.dtype.is_integer())
        and taken.dtype is not ir.DataType.BOOL
    )


def _has_room(tensor: torch.Tensor) -> bool:
    return int(tensor.abs().max()) + max(_ABOVE) <= int(torch.iinfo(tensor.dtype).max)


def _above(names: Collection[str], name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name not in names:
        return tensor
    added = torch.tensor(_ABOVE, dtype=tensor.dtype, device=tensor.device)
    places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
    return tensor.abs() + added[places % len(_ABOVE)]


def _put(where: str, those: Sequence[int], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Puts numbers in a third of the places of one tensor, in turn."""
    if name != where:
        return tensor
    flat = tensor.reshape(-1).clone()
    for turn, place in enumerate(range(min(1, flat.numel() - 1), flat.numel(), 3)):
        flat[place] = those[turn % len(those)]
    return flat.reshape(tensor.shape)
