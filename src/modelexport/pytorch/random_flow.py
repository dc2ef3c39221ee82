"""What depends on random numbers in a run: followed from where they are drawn, through every operation.

Whether an operation drew is seen at the generator: attention may draw, and does not without dropout. What takes a
random tensor gives random ones, and memory that one is written to is random from then on, whichever view of it is read.
Where a random number leaves PyTorch (as a number of Python, or an array), all that follows may depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from modelexport.pytorch.private_torch import schema_of

_RANDOM = "_modelexport_random"

_LEAVING = frozenset((torch.ops.aten._local_scalar_dense, torch.ops.aten.detach))
"""Operations by which numbers leave PyTorch: ``detach`` is all that is seen of ``numpy()``."""


class RandomFlow:
    """The random tensors of one run."""

    def __init__(self) -> None:
        self._mark = object()
        """Of this run: a buffer keeps its memory until the next one."""
        self._drawn = self._left = False
        self._may_draw: dict[Any, bool] = {}

    def before(self, func: Any, given: Iterable[Any]) -> list[tuple[torch.Generator, torch.Tensor]]:
        """The states of the generators before an operation, if it may draw.

        Args:
            given: What it takes.
        """
        if func not in self._may_draw:
            self._may_draw[func] = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if not self._may_draw[func]:
            return []
        own = [one for one in leaves(given) if isinstance(one, torch.Generator)]
        return [(one, one.get_state()) for one in (torch.default_generator, *own)]

    def after(
        self, func: Any, args: Any, kwargs: Any, output: Any, states: list[tuple[torch.Generator, torch.Tensor]]
    ) -> bool:
        """Whether an operation gave something that depends on random numbers.

        Args:
            states: What :meth:`before` gave.
        """
        drew = any(not torch.equal(state, one.get_state()) for one, state in states)
        self._drawn = self._drawn or drew
        if not self._drawn or not (drew or self._left or any(map(self.is_random, leaves((args, kwargs))))):
            return False
        if getattr(func, "overloadpacket", None) in _LEAVING:
            self._left = True
        for value in (*leaves(output), *_written(func, args, kwargs)):
            if isinstance(value, torch.Tensor):
                setattr(_holder(value), _RANDOM, self._mark)
        return True

    def is_random(self, value: Any) -> bool:
        """Whether a value is a tensor that depends on random numbers."""
        if not self._drawn or not isinstance(value, torch.Tensor):
            return False
        return getattr(_holder(value), _RANDOM, None) is self._mark


def leaves(value: Any) -> Iterator[Any]:
    """What an operation takes or gives, without its lists: several times faster than PyTorch's own."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


def _holder(tensor: torch.Tensor) -> Any:
    """The memory of a tensor, which its views share and which ends with the last of them; itself if it has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse or nested
        return tensor


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    schema = schema_of(func)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from leaves(args[place] if place < len(args) else kwargs.get(argument.name))
