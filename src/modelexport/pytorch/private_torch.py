"""The private names of torch that running a model needs; ``tests/pytorch/test_private_torch.py`` tests them.

There is no public interface for what they do, and without them no model runs here. What only an export needs, and can
do without, is in ``capture/patches.py``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._higher_order_ops.utils as operator_utilities
from torch._C import DisableTorchFunction
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, treespec_dumps

__all__ = [
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "in_trace",
    "is_functorch_wrapped_tensor",
    "operator_utilities",
    "outside_of_modes",
    "peek_interpreter_stack",
    "schema_of",
    "tensor_leaves",
    "tracing_state",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "treespec_dumps",
    "version_of",
    "written_by",
]


outside_of_modes = _disable_current_modes
"""A context in which no mode sees operations: what is not the model's own."""
tracing_state = torch._C._get_tracing_state


def tensor_leaves(value: object) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def schema_of(operation: Any) -> Any:
    """What an operation says of its arguments and results; ``None`` for higher-order operations and functions."""
    return getattr(operation, "_schema", None)


def written_by(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    """The arguments of an operation, as a dispatch mode or an FX node has it, that it may write to."""
    schema = schema_of(operation)
    if schema is None or not schema.is_mutable:
        return []
    by_place: dict[Any, Any] = {**dict(enumerate(args)), **(kwargs or {})}
    return [
        by_place.get(argument.name, by_place.get(position))
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def version_of(tensor: torch.Tensor) -> int | None:
    """A number that grows with each write to a tensor's memory; ``None`` if torch does not count them."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def in_trace(state: Any) -> Iterator[Any]:
    """Record the code in the block in this trace of ``torch.jit`` or, with ``None``, in none. Yields the one before."""
    before = tracing_state()
    torch._C._set_tracing_state(state)  # type: ignore[attr-defined]  # not in its stub
    try:
        yield before
    finally:
        torch._C._set_tracing_state(before)  # type: ignore[attr-defined]  # it is private
