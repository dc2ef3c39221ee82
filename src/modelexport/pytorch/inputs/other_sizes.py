"""Inputs with other sizes of the dynamic axes of a file.

A symbol has one size wherever it occurs, also in sums (``past + sequence``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import onnx_ir as ir
import torch

from modelexport.graph.nodes import required_inputs
from modelexport.graph.size_conditions import broken, conditions_of, fitting, larger, limits_of, next_odd
from modelexport.graph.size_formulas import evaluated_size
from modelexport.graph.size_symbols import SYMBOL
from modelexport.pytorch.nested_tensors import Inputs, tensors_in
from modelexport.pytorch.private_torch import tree_map


def names_in_file(inputs: Inputs, wanted: Sequence[str]) -> dict[str, str]:
    """The name of each tensor in inputs to that of a file's input: the same, or, if names differ, that in order."""
    names = [name for name, _ in tensors_in(inputs)]
    by_plain = {_plain(name.removeprefix("input.")): name for name in wanted}
    same = {name: by_plain[_plain(name)] for name in names if _plain(name) in by_plain}
    return dict(zip(names, wanted, strict=True)) if len(same) < len(names) == len(wanted) else same


def _plain(name: str) -> str:
    """The name that the exporter writes: ``past.0`` becomes ``past_0``."""
    return re.sub(r"\W", "_", name)


def inputs_of_file(inputs: Inputs, model: ir.Model) -> dict[str, str]:
    """The name of each tensor in inputs to that of a file's input (:func:`names_in_file`)."""
    return names_in_file(inputs, [value.name or "" for value in required_inputs(model)])


def changeable_sizes(inputs: Inputs, model: ir.Model) -> dict[str, int]:
    """The symbols of the dynamic axes of a file to their sizes in some inputs, without those of size none."""
    return {symbol: size for symbol, size in symbol_sizes(inputs, model).items() if size > 0}


def resized(inputs: Inputs, model: ir.Model, symbols: Collection[str] | None = None) -> Inputs:
    """Inputs with larger sizes of dynamic axes for which the conditions of a file hold, or the same ones.

    A table that is as long as the example is right for everything shorter. First axes, which may be batches, grow by
    one.

    Args:
        symbols: Those to change; by default all.
    """
    before, now = symbol_sizes(inputs, model), {}
    for symbol, (size, axis) in _symbols(inputs, model).items():
        changes = size > 0 and (symbols is None or symbol in symbols)
        now[symbol] = size if not changes else size + 1 if axis == 0 else larger(size)
    fits = fitting(conditions_of(model), now, [symbol for symbol, size in now.items() if size != before[symbol]])
    return inputs if fits is None or fits == before else with_sizes(inputs, model, fits)


def with_sizes(
    inputs: Inputs, model: ir.Model, now: Mapping[str, int], axes: Mapping[str, list[str | None]] | None = None
) -> Inputs:
    """Inputs with other sizes, by symbols: cut, or repeated with other numbers.

    Args:
        axes: The inputs of the file, each to the symbol of each axis; by default the dynamic axes of the file.
    """
    return with_sizes_of_axes(inputs, _sizes_of_axes(inputs, model, now, axes))


def _sizes_of_axes(inputs: Inputs, model: ir.Model, now: Mapping[str, int], axes: Any) -> dict[tuple[str, int], int]:
    axes = symbols_by_input(model) if axes is None else axes
    file_names = inputs_of_file(inputs, model)
    sizes: dict[tuple[str, int], int] = {}
    for name, tensor in tensors_in(inputs):
        for axis, symbol in enumerate(axes.get(file_names.get(name, ""), [])[: tensor.ndim]):
            size = evaluated_size(symbol, now) if symbol is not None else None
            if size is not None:
                sizes[name, axis] = size
    return sizes


def with_sizes_of_axes(inputs: Inputs, sizes: Mapping[tuple[str, int], int]) -> Inputs:
    """Inputs with other sizes: cut, or repeated with other numbers.

    Args:
        sizes: Names of tensors, as :func:`tensors_in` has them, and numbers of axes to their sizes.
    """
    names = {id(tensor): name for name, tensor in tensors_in(inputs)}
    known = {name for name, _ in sizes}
    shorter: list[tuple[int, int]] = []

    def with_size(value: Any) -> Any:
        name = names.get(id(value))
        if name not in known:
            return value
        other = value
        for axis in range(value.ndim):
            other = _resized(other, axis, sizes.get((name, axis), value.shape[axis]))
        shorter.extend((size, less) for size, less in zip(value.shape, other.shape, strict=True) if less < size)
        return in_order(value, other) if not _are_offsets(value) else other.cummax(0).values

    changed: Inputs = tree_map(with_size, inputs)
    return tree_map(lambda value: _ending_within(value, shorter), changed) if shorter else changed


def too_large(inputs: Inputs, model: ir.Model, now: Mapping[str, int]) -> bool:
    """Whether inputs with other sizes, by symbols, would be too large to be tried, given those of the example."""
    sizes = _sizes_of_axes(inputs, model, now, None)
    shapes = [
        [sizes.get((name, axis), size) for axis, size in enumerate(tensor.shape)] for name, tensor in tensors_in(inputs)
    ]
    before = sum(tensor.numel() for _, tensor in tensors_in(inputs))
    return sum(map(prod, shapes)) > max(_MOST_ELEMENTS, 8 * before)


_MOST_ELEMENTS = 2**18
"""The most elements of inputs that are tried, if those of the example are fewer."""


def _sorted_from_zero(value: Any) -> bool:
    """Whether a tensor may hold where parts of another begin. Kernels of PyTorch read memory wherever these point."""
    if not isinstance(value, torch.Tensor) or value.ndim != 1 or value.dtype not in (torch.int32, torch.int64):
        return False
    return value.numel() > 0 and int(value[0]) == 0 and bool((value.diff() >= 0).all())


def _are_offsets(value: Any) -> bool:
    """Whether a tensor holds where parts of another begin, and not merely positions."""
    return _sorted_from_zero(value) and int(value[-1]) >= value.numel()


def in_order(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Other numbers, sorted if those before were: PyTorch defines ``searchsorted`` and its like for sorted rows only.

    Masks and successive integers, which positions are, may have any order.
    """
    if before.ndim == 0 or before.shape[-1] <= _BY_CHANCE or before.dtype is torch.bool or before.is_complex():
        return now
    steps = before.diff(dim=-1)
    are_positions = not before.is_floating_point() and bool((steps == 1).all())
    is_sorted = bool((steps >= 0).all()) and bool((steps > 0).any())
    return now.sort(-1).values if is_sorted and not _has_numbers_of_masks(before) and not are_positions else now


_BY_CHANCE = 2
"""So many numbers are often sorted without a reason."""


def without_parts(inputs: Inputs, other: Inputs) -> bool:
    """Whether only the first of the offsets in some inputs is left in others. PyTorch's kernels crash without parts."""
    pairs = zip(tensors_in(inputs), tensors_in(other), strict=True)
    return any(now.numel() == 1 < before.numel() and _are_offsets(before) for (_, before), (_, now) in pairs)


def _ending_within(value: Any, shorter: Sequence[tuple[int, int]]) -> Any:
    """Clamp offsets into an axis that became shorter, so that the last one is its new size."""
    ends = [less for size, less in shorter if less < value[-1] <= size] if _sorted_from_zero(value) else []
    return value.clamp(max=min(ends)) if ends else value


def within_conditions(inputs: Inputs, model: ir.Model) -> Inputs:
    """Inputs in the nearest sizes for which the conditions of a file hold; the same ones if they do, or if none fit."""
    conditions, sizes = conditions_of(model), symbol_sizes(inputs, model)
    now = fitting(conditions, sizes, [*changeable_sizes(inputs, model)]) if broken(conditions, sizes) else None
    return inputs if now is None else with_sizes(inputs, model, now)


def sizes_at_limits(inputs: Inputs, model: ir.Model) -> Iterator[tuple[str, Inputs]]:
    """Inputs with the last sizes for which the conditions of a file hold, and with odd ones, with a description."""
    before, conditions = symbol_sizes(inputs, model), conditions_of(model)
    odd = {symbol: next_odd(size) for symbol, size in changeable_sizes(inputs, model).items()}
    wanted = [("odd sizes", {**before, **odd})] if odd else []
    for sizes in limits_of(conditions, before):
        symbol = next(name for name in sizes if sizes[name] != before[name])
        wanted.append((f"{symbol} = {sizes[symbol]}", sizes))
    for what, sizes in dict(wanted).items():
        largest = max(sizes.values(), default=0)
        if not broken(conditions, sizes) and sizes != before and largest <= max(LARGEST_TRIED, *before.values()):
            yield what, with_sizes(inputs, model, sizes)


LARGEST_TRIED = 1100
"""The largest size of an axis that is tried, unless that of the example is larger."""


def symbol_sizes(inputs: Inputs, model: ir.Model) -> dict[str, int]:
    """The symbols of the dynamic axes of a file to their sizes in some inputs."""
    return {symbol: size for symbol, (size, _) in _symbols(inputs, model).items()}


def symbols_by_input(model: ir.Model) -> dict[str, list[str | None]]:
    """The inputs with dynamic axes, each to the size of each axis, ``None`` for a number."""
    axes = {}
    for value in required_inputs(model):
        sizes = [s.value if isinstance(s, ir.SymbolicDim) else None for s in value.shape or ()]
        if any(sizes):
            axes[value.name or ""] = sizes
    return axes


def _symbols(inputs: Inputs, model: ir.Model) -> dict[str, tuple[int, int]]:
    """Each symbol that is the size of an axis to its size in some inputs, and the first axis that has it."""
    axes, file_names = symbols_by_input(model), inputs_of_file(inputs, model)
    symbols: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors_in(inputs):
        for axis, symbol in enumerate(axes.get(file_names.get(name, ""), ())):
            if symbol is not None and SYMBOL.fullmatch(symbol) and axis < tensor.ndim:
                size, first = symbols.get(symbol, (tensor.shape[axis], axis))
                symbols[symbol] = size, min(axis, first)
    return symbols


def fix_broadcast_axes(model: ir.Model, inputs: Inputs) -> None:
    """Declare the size of an axis as one if it is that in the inputs, where its symbol has another size elsewhere.

    PyTorch captures a mask that is broadcast as if it had the size of what it is added to, and so for all sizes. A file
    that says so would be wrong about the inputs that it was made for.
    """
    axes, file_names = symbols_by_input(model), inputs_of_file(inputs, model)
    seen = [
        (file_names[name], axis, symbol, tensor.shape[axis])
        for name, tensor in tensors_in(inputs)
        for axis, symbol in enumerate(axes.get(file_names.get(name, ""), ()))
        if symbol is not None and axis < tensor.ndim
    ]
    larger = {symbol for _, _, symbol, size in seen if size > 1}
    values = {value.name or "": value for value in model.graph.inputs}
    for name, axis, symbol, size in seen:
        shape = values[name].shape
        if size == 1 and symbol in larger and shape is not None:
            values[name].shape = ir.Shape([*shape[:axis], 1, *shape[axis + 1 :]])


def _resized(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    if size == tensor.shape[axis] or not tensor.shape[axis]:
        return tensor
    index = torch.arange(size, device=tensor.device) % tensor.shape[axis]
    return _with_others(tensor.index_select(axis, index), axis, tensor.shape[axis])


def _with_others(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Numbers from a size on between those that were repeated there: a maximum or a mean shows no copies.

    Masks, of zeros, ones and infinities, stay as they are.
    """
    added = torch.arange(tensor.shape[axis], device=tensor.device) >= size
    if not tensor.is_floating_point() or not added.any():
        return tensor
    if _has_numbers_of_masks(tensor):
        return tensor
    along = [-1 if place == axis else 1 for place in range(tensor.ndim)]
    if size > 1:
        others = tensor + 0.25 * (tensor.flip(axis) - tensor).to(tensor.dtype)
    else:  # each copy of the only row is another mixture of it with itself in reverse
        share = torch.arange(len(added), device=tensor.device).reshape(along) / (2 * len(added))
        mirrored = tensor.flip(tuple(range(tensor.ndim)))
        others = tensor + (share * ((mirrored if not torch.equal(mirrored, tensor) else 0 * tensor) - tensor)).to(
            tensor.dtype
        )
    added = added.reshape(along)
    return torch.where(added & torch.isfinite(others), others, tensor)


def _has_numbers_of_masks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no other numbers than zeros, ones and infinities."""
    return bool(((tensor == 0) | (tensor == 1) | ~torch.isfinite(tensor)).all())


def with_telling_numbers(inputs: Inputs) -> Inputs | None:
    """Inputs with other numbers where a tensor has a single one, or those of a mask: ``2 * x`` and ``x + 1`` are equal
    for ones. ``None`` if each tensor of numbers has several.
    """
    generator = torch.Generator().manual_seed(0)
    changed: list[torch.Tensor] = []

    def telling(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.numel() or value.is_complex():
            return value
        if not (_has_numbers_of_masks(value) if value.is_floating_point() else bool((value == 1).all())):
            return value
        drawn = torch.rand(value.shape, generator=generator).to(value.device)
        changed.append(value + drawn.to(value.dtype) if value.is_floating_point() else (drawn < 0.5).to(value.dtype))
        return changed[-1]

    other: Inputs = tree_map(telling, inputs)
    return other if changed else None
