"""Quantization that a model computes itself: ``(clamp(round(x / scale) + zero_point) - zero_point) * scale``.

Scale, zero point and bounds are computed from the ``state_dict`` alone; other scales, as those of single tokens, stay
arithmetic. The bounds are those of eight bits or fewer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from modelexport.capture.program_state import ProgramState

aten = torch.ops.aten
PER_TENSOR, PER_CHANNEL = aten.fake_quantize_per_tensor_affine, aten.fake_quantize_per_channel_affine
QUANTIZERS = (PER_TENSOR, PER_CHANNEL)
_AS_IT_IS = {
    *(aten.detach.default, aten.alias.default, aten.clone.default, aten.to.dtype, aten._to_copy.default),
    *(aten.view.default, aten.reshape.default),
}
"""Operators that keep the integers of a tensor, in their order."""
_ASSERTS = aten._assert_tensor_metadata.default
_LOWER = {aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor, aten.lt.Tensor, aten.lt.Scalar}
_UPPER = {aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor, aten.gt.Tensor, aten.gt.Scalar}
"""Operators of an integer and a bound, or of a condition that chooses the bound where it is true."""


def quantizer_by_arithmetic(rounded: torch.fx.Node, state: ProgramState) -> None:
    """Replace a rounding and the arithmetic around it by a fake quantization, in place, if they compute one."""
    divided, zero = _plus(rounded.args[0], state)
    x, scale = _divided(divided, state)
    if scale is None or x.meta.get("val") is None:
        return
    chain = _Chain(rounded, state, zero)
    end = chain.end(scale)
    if end is None or tuple(end.meta["val"].shape) != (shape := tuple(x.meta["val"].shape)):
        return
    sizes = tuple(state.numbers(scale).shape)
    axes = [axis + len(shape) - len(sizes) for axis, size in enumerate(sizes) if size != 1]
    is_prefix = axes == list(range(len(axes))) and all(isinstance(size, int) for size in shape)
    if len(axes) > 1 and not is_prefix:
        return
    add = _Inserter(end)
    flat = add(aten.reshape.default, scale, [-1])
    points = _zero_points(add, flat, chain.zero, state)
    if not axes:
        made = add(PER_TENSOR.tensor_qparams, x, flat, points, chain.low, chain.high)
    elif len(axes) == 1:
        made = add(PER_CHANNEL.default, x, flat, points, axes[0], chain.low, chain.high)
    else:  # groups of a row, each with its scale
        rows = add(aten.reshape.default, x, [-1, *shape[len(axes) :]])
        rows = add(PER_CHANNEL.default, rows, flat, points, 0, chain.low, chain.high)
        made = add(aten.reshape.default, rows, list(shape))
    end.replace_all_uses_with(made)
    chain.erase_asserts()


def _plus(node: Any, state: ProgramState) -> tuple[Any, Any]:
    """The operands of a sum with a ``state_dict`` entry; any other node is returned with ``None``."""
    if (
        isinstance(node, torch.fx.Node)
        and node.target is aten.add.Tensor
        and not node.kwargs
        and state.has(node.args[1])
    ):
        return node.args[0], node.args[1]
    return node, None


def _divided(node: Any, state: ProgramState) -> tuple[Any, Any]:
    """The dividend and the scale of a division; ``None`` for both if the node is not a division."""
    if not isinstance(node, torch.fx.Node) or len(node.args) < 2 or not isinstance(node.args[0], torch.fx.Node):
        return None, None
    x, scale = node.args[:2]
    if node.target is aten.mul.Tensor and isinstance(scale, torch.fx.Node):
        if scale.target is aten.mul.Tensor and scale.args[1] == 1.0:
            (scale, _) = scale.args
        scale = scale.args[0] if isinstance(scale, torch.fx.Node) and scale.target is aten.reciprocal.default else None
    elif node.target is not aten.div.Tensor:
        scale = None
    return x, scale if isinstance(scale, torch.fx.Node) and state.has(scale) else None


def _zero_points(add: _Inserter, flat: torch.fx.Node, zero: Any, state: ProgramState) -> torch.fx.Node:
    """A zero point for each scale."""
    numbers = torch.zeros(1) if zero is None else state.numbers(zero).reshape(-1)
    if isinstance(zero, torch.fx.Node) and not (numbers == numbers[0]).all():
        return add(aten.reshape.default, add(aten.to.dtype, zero, torch.int32), [-1])
    # Computed from the scale, and not a constant of its size, which would be too large to be recorded.
    same = add(aten.add.Tensor, add(aten.mul.Tensor, flat, 0), int(numbers[0]))
    return add(aten.to.dtype, same, torch.int32)


class _Inserter:
    """Adds nodes before another one, of the same call."""

    def __init__(self, before: torch.fx.Node) -> None:
        self._before = before

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.call_function(target, args, kwargs)
        values, named = map_arg((args, kwargs), lambda each: each.meta["val"])
        node.meta = {**self._before.meta, "val": target(*values, **named)}
        return node


class _Chain:
    """The nodes of a fake quantization written as arithmetic, from the rounding to the multiplication by the scale.

    Args:
        zero: The zero point that was added before the rounding.
    """

    def __init__(self, rounded: torch.fx.Node, state: ProgramState, zero: Any) -> None:
        self._state, self.zero = state, zero
        self._nodes = [rounded]
        self.low, self.high = _UNBOUNDED
        """The bounds of the integers."""
        self._subtracted: Any = None

    def end(self, scale: Any) -> torch.fx.Node | None:
        """Follow the nodes to the multiplication by ``scale`` that ends the fake quantization, and return its node.

        ``None`` if they compute something else, or integers that do not fit into eight bits.
        """
        while True:
            users = self._users()
            if not users or not self._takes(users[0], users[1:]):
                return None
            node = users[-1]
            self._nodes += users
            if node.target is aten.mul.Tensor:
                subtracted = 0 if self._subtracted is None else self._subtracted
                zero = self._state.numbers(0 if self.zero is None else self.zero)
                fits = self._state.equal(subtracted, zero) and torch.equal(
                    zero, zero.round().clamp(self.low, self.high)
                )
                in_range = (self.low >= 0 and self.high <= 255) or (self.low >= -128 and self.high <= 127)
                return node if fits and in_range and self._state.equal(_other(node, self._nodes[-2]), scale) else None

    def _users(self) -> list[torch.fx.Node]:
        """The nodes that compute with the last one, and not only ask for its type."""
        users = self._nodes[-1].users
        return [user for user in users if user.target not in (_ASSERTS, aten.type_as.default)]

    def _takes(self, user: torch.fx.Node, more: list[torch.fx.Node]) -> bool:
        """Whether the next nodes are a step of a quantization; its bounds and zero point are noted."""
        last, target, bound = self._nodes[-1], user.target, _other(user, self._nodes[-1])
        if more and (target not in _CONDITIONS or len(more) > 1 or more[0].target is not aten.where.self):
            return False
        if target in _LOWER | _UPPER:
            if not self._state.has(bound) or (target in _CONDITIONS and not self._chooses(user, bound, more)):
                return False
            return self._bounded(*((bound, None) if target in _LOWER else (None, bound)))
        if target in (aten.clamp.default, aten.clamp.Tensor):
            return all(map(self._state.has, user.args[1:])) and self._bounded(*user.args[1:])
        if target in _AS_IT_IS:
            return self._fits(user.meta["val"].dtype)
        known = self._state.has(bound) and not user.kwargs  # as a factor of what is added
        if target is aten.add.Tensor and self.zero is None and (self.low, self.high) == _UNBOUNDED:
            self.zero = bound  # bounds that came before it would be those of other integers
        elif target is aten.sub.Tensor and user.args[0] is last:
            self._subtracted = bound
        else:
            known &= target is aten.mul.Tensor
        return known

    def _chooses(self, condition: torch.fx.Node, bound: Any, choice: list[torch.fx.Node]) -> bool:
        """Whether a condition of the integers goes with a choice of the bound where it is true."""
        last = self._nodes[-1]
        if condition.args[0] is not last or not choice or [*choice[0].args[::2]] != [condition, last]:
            return False
        return self._state.has(choice[0].args[1]) and self._state.equal(choice[0].args[1], bound)

    def _fits(self, dtype: torch.dtype) -> bool:
        """Whether integers within the bounds keep their numbers in a type; others would be cut or wrap around."""
        if dtype.is_floating_point:
            return True
        limits, wide = torch.iinfo(dtype), self._subtracted is None and dtype in (torch.int32, torch.int64)
        return wide or (limits.min <= self.low and self.high <= limits.max)

    def _bounded(self, low: Any = None, high: Any = None) -> bool:
        if self._subtracted is not None:
            return False  # they would be bounds of other integers
        bounds = [None if each is None else self._state.numbers(each) for each in (low, high)]
        if any(each is not None and (each.numel() != 1 or each.item() != int(each.item())) for each in bounds):
            return False
        self.low = self.low if bounds[0] is None else max(self.low, int(bounds[0].item()))
        self.high = self.high if bounds[1] is None else min(self.high, int(bounds[1].item()))
        return True

    def erase_asserts(self) -> None:
        """Remove what PyTorch would keep although nothing uses it; the nodes themselves are dead code."""
        for user in {user for node in self._nodes for user in node.users if user.target is _ASSERTS}:
            user.graph.erase_node(user)


_UNBOUNDED = (-(2**31), 2**31)
_CONDITIONS = {aten.lt.Tensor, aten.lt.Scalar, aten.gt.Tensor, aten.gt.Scalar}


def _other(node: torch.fx.Node, taken: torch.fx.Node) -> Any:
    """The other argument of a node of two."""
    arguments = [argument for argument in node.args[:2] if argument is not taken]
    return arguments[0] if arguments else taken
