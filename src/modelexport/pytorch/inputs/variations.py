"""Inputs that find more errors than the given ones: masks with padding, ids from the whole vocabulary, other numbers.

With a mask of ones it does not show that a file ignores the mask, and ids that never reach most rows do not show a
wrong row. An output that is a constant is right for the inputs that it was computed from, and so is one that does not
depend on an input; so every input changes, whether the file uses it or not, but for those that are constants of the
file by request. What is cut off at the range of the example, or wrong at zero, shows with larger and smaller numbers
and zeros; only numbers of both signs get these, since others may have to stay in their range. A branch that is not
taken shows nothing; with larger numbers of the other sign it may be taken. Inputs to vary are chosen by values and by
the graph, not by names. A model may refuse a variation; that is not a fault of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from modelexport.graph.nodes import nested_graphs
from modelexport.graph.operator_kinds import READ_SIZES_ONLY
from modelexport.pytorch.inputs.other_sizes import in_order, inputs_of_file, resized
from modelexport.pytorch.nested_tensors import Inputs, tensors_in
from modelexport.pytorch.private_torch import tree_map
from modelexport.runtime.varied_inputs import FACTORS, rows_of_ids
from modelexport.traces.tolerances import HIDES

Change = Callable[[str, torch.Tensor], torch.Tensor]
PADDED = "padded masks"
"""The name of the variation whose masks have zeros; the names of similar ones begin with it."""
PADDED_AT_THE_END = f"{PADDED}, at the end only"


def variations_one_by_one(inputs: Inputs, model: ir.Model, kept: Collection[str] = ()) -> Iterator[tuple[str, Inputs]]:
    """Each variation of the inputs that a file with this graph can run, with its description; other sizes apart.

    Args:
        kept: The names of tensors that stay as they are: the file has their values.
    """
    for what, change in _changes(inputs, model, kept):
        yield what, changed(inputs, [change])


def variations_in_one(inputs: Inputs, model: ir.Model, kept: Collection[str] = ()) -> tuple[str, Inputs] | None:
    """All variations in one, with their descriptions; ``None`` if there are less than two, or branches to be taken."""
    if any(nested_graphs(node) for node in model.graph):
        return None
    changes = dict(_changes(inputs, model, kept))
    other = resized(inputs, model)
    names = [*changes, *(["other sizes"] if other is not inputs else [])]
    return (", ".join(names), changed(other, list(changes.values()))) if len(names) > 1 else None


def padded_at_the_end(inputs: Inputs, kept: Collection[str] = ()) -> Inputs:
    """The inputs with masks that leave a token to each causal row, unlike those of :data:`PADDED`."""
    masks = [name for name, tensor in tensors_in(inputs) if name not in kept and is_mask_of_zeros_and_ones(tensor)]
    return changed(inputs, [lambda name, t: _padded(t, masks.index(name), left=False) if name in masks else t])


def beyond_example(inputs: Inputs, model: ir.Model, kept: Collection[str] = ()) -> Iterator[tuple[str, Inputs]]:
    """Variations that a model often refuses, or has no finite numbers for, each with its description.

    Numbers of both signs where the example has one; masks that leave no key to some queries; padding where numbers are
    a mask; larger integers, up to a thousand, where they are one or a list; the ids that the file compares with, and
    those beside them.

    Args:
        kept: As in :func:`variations_one_by_one`.
    """
    tensors = {name: tensor for name, tensor in tensors_in(inputs) if name not in kept}
    rows = _rows_by_name(inputs, model, tensors)
    positive = {name for name, tensor in tensors.items() if _has_one_sign(tensor)}
    masks = [
        name for name, tensor in tensors.items() if tensor.is_floating_point() and is_mask_of_zeros_and_ones(tensor)
    ]
    counts = {name for name, tensor in tensors.items() if _counts(tensor) and name not in rows}
    long = {name for name, tensor in tensors.items() if tensor.shape and tensor.shape[-1] > 3}
    special = {name: ids for name, count in rows.items() if name in long and (ids := _ids_compared(model, count))}
    yield from with_hidden_rows(inputs, kept)
    changes: list[tuple[str, Collection[str], Change]] = [
        ("numbers of both signs", positive, lambda name, t: _signed(t)),
        (f"{PADDED} of numbers", masks, lambda name, t: _padded(t, masks.index(name))),
        ("larger integers", counts, lambda name, t: _larger(t)),
        ("ids that are compared with", special, lambda name, t: _with_ids(t, special[name])),
    ]
    yield from ((what, changed(inputs, [_only(names, change)])) for what, names, change in changes if names)


def with_hidden_rows(inputs: Inputs, kept: Collection[str] = ()) -> Iterator[tuple[str, Inputs]]:
    """Masks with a first row that hides all: a query without keys, or a text without tokens."""
    tensors = {name: tensor for name, tensor in tensors_in(inputs) if name not in kept}
    hidden = {name: number for name, tensor in tensors.items() if (number := _number_that_hides(tensor)) is not None}

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        other = tensor.clone()
        if name in hidden:
            other[..., :1, :] = hidden[name]
        return other

    if hidden:
        yield f"{PADDED}, a whole row of each", changed(inputs, [change])


def magnified(inputs: Inputs, kept: Collection[str] = ()) -> Iterator[tuple[str, Inputs]]:
    """Numbers that overflow in formulas such as ``log(exp(x))``, also in float64; not those of masks."""
    numbers = [(name, t) for name, t in tensors_in(inputs) if name not in kept and t.is_floating_point()]
    if names := [name for name, tensor in numbers if _number_that_hides(tensor) is None]:
        larger = _only(names, lambda name, t: torch.where(t.abs() < HIDES, 1000 * t, t))
        yield "numbers a thousand times as large", changed(inputs, [larger])


def uniform(inputs: Inputs, kept: Collection[str] = ()) -> Iterator[tuple[str, Inputs]]:
    """Inputs with one number in all elements, of which a model selects nothing or everything; masks likewise."""
    fills: dict[str, Callable[..., Any]] = {"smallest": torch.amin, "largest": torch.amax, "zero": torch.zeros_like}
    tensors = {name: tensor for name, tensor in tensors_in(inputs) if name not in kept}
    masks = {name for name, tensor in tensors.items() if is_mask_of_zeros_and_ones(tensor)}
    numbers = {name for name, tensor in tensors.items() if tensor.numel() and not tensor.is_complex()} - masks
    for what, fill in fills.items():
        yield f"the {what} number everywhere", changed(inputs, [_filled(fill, numbers)])
    if masks:
        yield "masks of ones", changed(inputs, [_filled(torch.ones_like, masks)])
        yield f"{PADDED}, all", changed(inputs, [_filled(torch.zeros_like, masks)])


def _changes(inputs: Inputs, model: ir.Model, kept: Collection[str]) -> Iterator[tuple[str, Change]]:
    names = [name for name, _ in tensors_in(inputs) if name not in kept]
    tensors = dict(tensors_in(inputs))
    masks = [name for name in names if not _has_fractions(tensors[name]) and is_mask_of_zeros_and_ones(tensors[name])]
    if masks:
        yield PADDED, _only(masks, lambda name, t: _padded(t, masks.index(name)))
    rows = _rows_by_name(inputs, model, names)
    if rows:
        order = list(rows)
        yield "whole vocabulary", _only(rows, lambda name, t: _drawn(t, rows[name], order.index(name)))
    numbers = [name for name in names if name not in masks and name not in rows]
    if numbers:
        again = {name: _equal_before(name, numbers, tensors) for name in numbers}
        yield "other numbers", _only(numbers, lambda name, t: _other_numbers(t).roll(again[name]))
    if any(nested_graphs(node) for node in model.graph):
        floats = {name for name in names if tensors[name].is_floating_point()}
        yield "-3 times the inputs", _only(floats, lambda name, t: -3 * t)
        yield "3 times the inputs", _only(floats, lambda name, t: 3 * t)  # one of them changes any sum's sign
    elif signed := {name for name in numbers if _has_both_signs(tensors[name])}:
        yield "larger and smaller numbers", _only(signed, lambda name, t: _spread(t))


def _only(names: Collection[str], change: Change) -> Change:
    """A change of the tensors of these names alone."""
    return lambda name, tensor: change(name, tensor) if name in names else tensor


def _rows_by_name(inputs: Inputs, model: ir.Model, names: Iterable[str]) -> dict[str, int]:
    """The tensors in inputs that select rows of a weight of a file, to the number of rows."""
    rows, in_file = rows_of_ids(model), inputs_of_file(inputs, model)
    return {name: rows[in_file[name]] for name in names if in_file.get(name) in rows}


def changed(inputs: Inputs, changes: Sequence[Change]) -> Inputs:
    """Inputs with each tensor changed, one change after the other."""
    names = {id(tensor): name for name, tensor in tensors_in(inputs)}

    def with_changes(value: Any) -> Any:
        if (name := names.get(id(value))) is not None:
            other = value
            for change in changes:
                other = change(name, other)
            return in_order(value, other)
        return value

    return tree_map(with_changes, inputs)


def _other_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in reverse order, which keeps their range; other numbers if that changes nothing.

    Integers above one become smaller by one, so that lengths and positions differ from those of the example.
    """
    other = tensor.flip(tuple(range(tensor.ndim)))
    if tensor.dtype is not torch.bool and not _has_fractions(tensor):
        other = torch.where(other > 1, other - 1, other)
    if not torch.equal(other, tensor):
        return other
    if _has_fractions(tensor):  # halves of all of them would leave quotients as they are
        places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
        return torch.where(places % 2 == 0, tensor / 2, tensor)
    return ~tensor if tensor.dtype is torch.bool else tensor + 1


def _equal_before(name: str, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> int:
    """How many tensors before one are equal to it: exchanged, they would show nowhere."""
    before = (tensors[earlier] for earlier in names[: names.index(name)])
    return sum(tensor.shape == tensors[name].shape and torch.equal(tensor, tensors[name]) for tensor in before)


def _has_one_sign(tensor: torch.Tensor) -> bool:
    """Whether all numbers are above or below zero, and not those of a mask."""
    if not tensor.is_floating_point() or tensor.numel() < 2 or _has_both_signs(tensor):
        return False
    return bool(((tensor != 0) & (tensor != 1) & torch.isfinite(tensor)).any())


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of both signs, larger and smaller ones."""
    places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
    return torch.where(places % 3 == 1, -_spread(tensor), _spread(tensor))


def _counts(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an integer, or a list of some."""
    return not _has_fractions(tensor) and tensor.dtype is not torch.bool and tensor.ndim < 2


def _larger(tensor: torch.Tensor) -> torch.Tensor:
    most, wide = min(_COUNTED, torch.iinfo(tensor.dtype).max), tensor.long()
    return torch.where(wide < most, (4 * wide.abs()).clamp(max=most), wide).to(tensor.dtype)


_COUNTED = 1000
"""Angles are computed of larger ones, in which float32 numbers are not exact."""


def _ids_compared(model: ir.Model, rows: int) -> list[int]:
    """The integers that a graph compares integers of its inputs with, and those beside them, as far as they are ids."""
    integers = (value for value in model.graph.inputs if value.dtype in _INTEGERS)
    near = [number + step for number in integers_compared(model, integers) for step in (0, 1, -1)]
    return list(dict.fromkeys(number for number in near if 0 <= number < rows))


def integers_compared(model: ir.Model, values: Iterable[ir.Value]) -> list[int]:
    """The integers that a graph compares values with, or other integers computed from them."""
    integers, compared = set(values), list[int]()
    for node in model.graph:
        if node.op_type in READ_SIZES_ONLY or not any(value in integers for value in node.inputs):
            continue
        integers.update(value for value in node.outputs if value.dtype in _INTEGERS)
        for value in node.inputs if node.domain == "" and node.op_type in _COMPARISONS else ():
            tensor = value.const_value if value is not None and value.is_initializer() else None
            if tensor is not None and tensor.size == 1 and not tensor.dtype.is_floating_point():
                compared.append(int(tensor.numpy().reshape(-1)[0]))
    return compared


_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})


def _with_ids(ids: torch.Tensor, others: Sequence[int]) -> torch.Tensor:
    """Other ids at the same places in all rows, in at most half of the places: of some ids each row has one."""
    changed = ids.clone()
    for place, number in zip(range(1, ids.shape[-1], 2), others, strict=False):
        changed[..., place] = number
    return changed


def _has_both_signs(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool((tensor < 0).any() and (tensor > 0).any())


def _has_fractions(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _filled(fill: Callable[..., Any], names: Collection[str]) -> Change:
    return _only(names, lambda name, tensor: fill(tensor).to(tensor.dtype).expand(tensor.shape).clone())


def is_mask_of_zeros_and_ones(tensor: torch.Tensor) -> bool:
    """Whether a tensor has nothing but zeros and ones, in rows that are long enough not to be so by chance.

    If it is of conditions, two are enough, and it may have no ones: what is true then is padding.
    """
    ones, conditions = tensor == 1, tensor.dtype is torch.bool
    rows = tensor.ndim >= 2 and tensor.shape[-1] > (1 if conditions else 3)
    return rows and (conditions or bool(ones.any())) and bool((ones | (tensor == 0)).all())


def _padded(mask: torch.Tensor, index: int, *, left: bool = True) -> torch.Tensor:
    """Padded at the end in the last row, and by one at the beginning in the first, as a batch of prompts is.

    Args:
        index: Which of the masks it is; others are padded otherwise.
        left: At the beginning, too.
    """
    kept = _number_that_keeps(mask)
    other = torch.full_like(mask, kept)
    if mask.shape[0] > 1 and left:
        other[0, ..., 0] = 1 - kept
    other[-1, ..., -max(mask.shape[-1] // 3 - index, 1) :] = 1 - kept
    return other


def _number_that_keeps(mask: torch.Tensor) -> int:
    """The number with which a mask keeps what it does not hide: what is rarer in conditions hides."""
    return 0 if mask.dtype is torch.bool and 2 * int(mask.sum()) < mask.numel() else 1


def _number_that_hides(tensor: torch.Tensor) -> float | None:
    """The number with which a mask hides keys, also one that is added to the scores of attention."""
    if is_mask_of_zeros_and_ones(tensor):
        return 1 - _number_that_keeps(tensor)
    if not tensor.is_floating_point() or tensor.ndim < 2 or tensor.shape[-1] <= 3:
        return None
    others = tensor[tensor != 0]
    if not others.numel():
        return float("-inf")
    return float(others[0]) if bool(((others == others[0]) & (others <= -HIDES)).all()) else None


def _drawn(ids: torch.Tensor, rows: int, index: int) -> torch.Tensor:
    """Ids of all rows, the first and the last of them among them: padding often is one of these.

    Args:
        index: Which of the inputs of ids it is; others get other ids.
    """
    generator = torch.Generator().manual_seed(12 + index)
    drawn = torch.randint(0, rows, ids.shape, generator=generator).to(ids.device, ids.dtype)
    if drawn.numel() > 2:
        drawn.view(-1)[1], drawn.view(-1)[-1] = 0, rows - 1
    return drawn


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Each number times one of a few factors, some of which are above one and one is zero; none that is infinite."""
    factors = torch.tensor(FACTORS, dtype=torch.float64, device=tensor.device)
    places = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
    return torch.where(tensor.abs() < HIDES, (tensor * factors[places % len(FACTORS)]).to(tensor.dtype), tensor)
