"""Refuses Python control flow that depends on tensor values while a model is traced."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from modelexport.capture.failure_hints import line_of
from modelexport.capture.patches import private
from modelexport.core.collected_messages import collected
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import input_tensors, run_arguments
from modelexport.pytorch.private_torch import tracing_state, tree_leaves, version_of


class DecisionError(RuntimeError):
    """The model reads a number that depends on the values of its inputs or parameters."""


class NoDecisions(TorchFunctionMode):
    """Raises an error when Python code reads a number that depends on inputs or parameters.

    The trace would apply the decision made for the example inputs to all others. Numbers that depend only on sizes may
    be read, unless the sizes themselves depend on values (the number of nonzero elements). A tensor that was written
    into counts as dependent, since the trace does not show what was written through its views.

    Args:
        fixed: Lines of the model, ``net.py:12``, that may read truth values: they are always the same.
    """

    def __init__(self, fixed: Collection[str] = ()) -> None:
        super().__init__()
        self._fixed = fixed
        self._by_values: dict[int, bool] = {}
        self._sized_by_values: dict[int, bool] = {}
        self._of_written: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if tracing_state() is not None and (func in READS_VALUES or func in READS_SIZES):
            for tensor in _tensors(args):
                value = private("value")(tensor)
                if asks(func, args) and self._fixed and line_of(traceback.extract_stack()) in self._fixed:
                    break
                if self._is_sized_by_values(value) or (func in READS_VALUES and self._is_by_values(tensor, value)):
                    name = func.__name__.strip("_")
                    raise DecisionError(
                        f"data-dependent: Python reads a tensor ({name}), and the trace would fix its present value; "
                        f"torch.where decides in the graph"
                    )
        output = func(*args, **(kwargs or {}))
        if func not in _TELL_SIZES and any(map(self._is_written, _tensors((args, kwargs)))):
            self._of_written.update((id(tensor), tensor) for tensor in _tensors(output))
        return output

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was written into, or computed from such a one."""
        return bool(version_of(tensor)) or id(tensor) in self._of_written

    def _is_by_values(self, tensor: torch.Tensor, value: Any) -> bool:
        """Whether a value of the trace depends on elements of inputs or parameters, not only on their sizes."""

        def known(node: Any) -> bool | None:
            if node.kind() == "prim::Param":
                return True
            return any(map(self._is_sized_by_values, node.inputs())) if node.kind() in _SIZES else None

        return self._is_written(tensor) or _follow(value, self._by_values, known)

    def _is_sized_by_values(self, value: Any) -> bool:
        """Whether the size of a value of the trace depends on elements of inputs or parameters."""

        def known(node: Any) -> bool | None:
            if node.kind() in _SIZED_BY_VALUES:
                return True
            if node.kind() == "aten::where" and len(list(node.inputs())) == 1:
                return True
            if node.kind() == "aten::index":
                indices = list(node.inputs())[1].node().inputs()
                return True if any(map(_is_mask, indices)) else None
            return None

        return _follow(value, self._sized_by_values, known)


def _follow(value: Any, found: dict[int, bool], known: Callable[[Any], bool | None]) -> bool:
    """Whether a fact holds for the node that produces a value, or for any node that it is computed from."""
    pending = [value]
    while pending:
        current = pending[-1]
        number = current.unique()
        if number not in found:
            told = known(current.node())
            inputs = list(current.node().inputs()) if told is None else []
            unseen = [one for one in inputs if one.unique() not in found]
            if unseen:
                pending.extend(unseen)
                continue
            found[number] = any(found[one.unique()] for one in inputs) if told is None else told
        pending.pop()
    return found[value.unique()]


def _is_mask(value: Any) -> bool:
    kind = value.type()
    return isinstance(kind, torch.TensorType) and kind.scalarType() in ("Bool", "Byte")


def _tensors(value: object) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def asks(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function gives Python a truth value."""
    return func in _TRUTHS or (func is torch.Tensor.item and args[0].dtype is torch.bool)


_TRUTHS = {
    torch.Tensor.__bool__,
    torch.Tensor.equal,
    torch.equal,
    torch.Tensor.allclose,
    torch.allclose,
    torch.is_nonzero,
}

READS_VALUES = {
    *_TRUTHS,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__complex__,
    torch.Tensor.__index__,
    torch.Tensor.__contains__,
    torch.Tensor.__array__,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.data.__get__,
    torch.Tensor.new_tensor,
    torch.tensor,
}
"""Functions that return elements of tensors as Python numbers, or tensors that the trace takes for constants."""

_TELL_SIZES = {
    torch.Tensor.shape.__get__,
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.dim,
    torch.Tensor.__len__,
}

READS_SIZES = {torch.Tensor.__len__, torch.Tensor.unbind, torch.unbind}

_SIZES = {"aten::size", "aten::numel", "aten::dim", "aten::len"}

_SIZED_BY_VALUES = {
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::argwhere",
    "aten::masked_select",
    "aten::unique",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
}


class InputsRead(TorchFunctionMode):
    """Notes which inputs of a run Python reads the values of: its structure is that of these values.

    A value goes on from an input through whole numbers and truth values, and through numbers made of such alone. Where
    it meets other numbers (an embedding, a score) it is data, and what is decided by data is not the input's structure.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.read: dict[str, None] = {}
        """Names of inputs, in the order in which they were read."""
        self._from: dict[int, frozenset[str]] = {id(tensor): frozenset({name}) for name, tensor in inputs.items()}
        self._alive: list[torch.Tensor] = list(inputs.values())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = _tensors((args, kwargs))
        sources = frozenset[str]().union(*(self._from.get(id(tensor), frozenset()) for tensor in given))
        if sources and func in READS_VALUES:
            self.read.update(dict.fromkeys(sorted(sources)))
        output = func(*args, **(kwargs or {}))
        data = any(_is_data(tensor) and id(tensor) not in self._from for tensor in given)
        if sources and not data:
            for tensor in _tensors(output):
                self._from[id(tensor)] = self._from.get(id(tensor), frozenset()) | sources
                self._alive.append(tensor)
        return output


def _is_data(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex()) and tensor.dim() > 0


def inputs_read(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any]) -> list[str]:
    """The arguments, other than floating-point ones, whose values a model reads in Python. It is as before afterwards.

    Nothing where the model does not run.
    """
    args, kwargs = run_arguments(inputs)
    tensors = {name: tensor for name, tensor in input_tensors(model, args, kwargs) if not _is_data(tensor)}
    mode = InputsRead(tensors)
    with untouched(model), collected(), contextlib.suppress(Exception), mode:
        model(*args, **kwargs)
    return list(mode.read)
