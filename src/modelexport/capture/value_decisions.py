"""Refuses Python control flow that depends on tensor values while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from modelexport.capture.patches import private
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import Inputs, input_tensors, run_arguments
from modelexport.pytorch.private_torch import tensor_leaves, tracing_state, version_of
from modelexport.pytorch.runs.questions_of_values import TRUTHS, Site, asks, site_of


class DecisionError(RuntimeError):
    """The model reads a number that depends on the values of its inputs or parameters."""


class NoDecisions(TorchFunctionMode):
    """Raises an error when Python code reads a number that depends on inputs or parameters.

    The trace would apply the decision made for the example inputs to all others. Numbers that depend only on sizes may
    be read, unless the sizes themselves depend on values (the number of nonzero elements). A tensor that is written
    into meanwhile counts as dependent, since the trace does not show what was written through its views.

    Args:
        model: The traced model. Writes into its buffers before the trace, as when they were initialized, are ignored.
        fixed: Places of the model's code that may read truth values: they are always the same.
    """

    def __init__(self, model: nn.Module, fixed: Collection[Site] = ()) -> None:
        super().__init__()
        self._earlier = WeakIdKeyDictionary({buffer: version_of(buffer) for buffer in model.buffers()})
        self._fixed = fixed
        self._found: dict[tuple[int, str], bool] = {}
        self._of_written = WeakIdKeyDictionary()  # it keeps no tensor alive
        self._raised: Exception | None = None
        """The last error of an operation of torch at which the trace ended."""

    def check_nothing_caught(self) -> None:
        """Refuse a model that went on after an error ended the trace: torch ends the process when it reads such a one.

        Raises:
            DecisionError: It did.
        """
        if self._raised is not None:
            raise DecisionError(
                f"the model catches the {type(self._raised).__name__} of an operation, after which torch.jit.trace "
                "ends the process; let an if decide instead"
            ) from self._raised

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if tracing_state() is not None and (func in READS_VALUES or func in READS_SIZES):
            for tensor in tensor_leaves(args):
                value = private("value")(tensor)
                if self._fixed and asks(func, args) and site_of() in self._fixed:
                    break
                if self._depends(value, "size") or (func in READS_VALUES and self._is_by_values(tensor, value)):
                    name = func.__name__.strip("_")
                    raise DecisionError(
                        f"data-dependent: Python reads a tensor ({name}), and the trace would fix its present value; "
                        f"torch.where decides in the graph"
                    )
        is_traced = tracing_state() is not None
        try:
            output = func(*args, **(kwargs or {}))
        except Exception as error:
            if is_traced and tracing_state() is None:  # a size that is not there, x.shape[9], does not end the trace
                self._raised = error
            raise
        if func not in _TELL_SIZES and any(map(self._is_written, tensor_leaves((args, kwargs)))):
            self._of_written.update(dict.fromkeys(tensor_leaves(output)))
        return output

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was written into since the trace began, or computed from such a one."""
        return version_of(tensor) != self._earlier.get(tensor, 0) or tensor in self._of_written

    def _is_by_values(self, tensor: torch.Tensor, value: Any) -> bool:
        """Whether a value of the trace depends on elements of inputs or parameters, not only on their sizes."""
        return self._is_written(tensor) or self._depends(value, "elements")

    def _depends(self, value: Any, what: Literal["elements", "size"]) -> bool:
        """Whether the elements or the size of a value of the trace depend on elements of inputs or parameters."""
        pending = [(value, what)]
        while pending:
            current, of = pending[-1]
            if (key := (current.unique(), of)) not in self._found:
                by_itself, before = _reasons(current.node(), of)
                unseen = [earlier for earlier in before if (earlier[0].unique(), earlier[1]) not in self._found]
                if not by_itself and unseen:
                    pending.extend(unseen)
                    continue
                self._found[key] = by_itself or any(self._found[earlier.unique(), its] for earlier, its in before)
            pending.pop()
        return self._found[value.unique(), what]


def _reasons(node: Any, of: Literal["elements", "size"]) -> tuple[bool, list[tuple[Any, Literal["elements", "size"]]]]:
    """Whether the elements or sizes of what a node gives depend on values by themselves, and on what before it."""
    kind, inputs = node.kind(), list(node.inputs())
    if of == "elements":
        return kind == "prim::Param", [(value, "size" if kind in _SIZES else "elements") for value in inputs]
    if kind in _SIZED_BY_VALUES or (kind == "aten::where" and len(inputs) == 1):
        return True, []
    if kind == "aten::index" and any(map(_is_boolean_tensor, inputs[1].node().inputs())):
        return True, []
    is_made = kind in _MADE_OF_NUMBERS
    return False, [(value, "elements" if is_made or _is_number(value) else "size") for value in inputs]


def _is_number(value: Any) -> bool:
    """Whether a value of a trace is a number or a list of numbers: those that tell sizes, bounds and counts."""
    kind = value.type()
    while isinstance(kind, (torch.ListType, torch.OptionalType)):
        kind = kind.getElementType()
    return not isinstance(kind, torch.TensorType)


def _is_boolean_tensor(value: Any) -> bool:
    kind = value.type()
    return isinstance(kind, torch.TensorType) and kind.scalarType() in ("Bool", "Byte")


WRITES_TEXT = {torch.Tensor.__format__, torch.Tensor.__repr__}
"""Functions that write elements of tensors."""

READS_VALUES = {
    *TRUTHS,
    *WRITES_TEXT,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__complex__,
    torch.Tensor.__index__,
    torch.Tensor.__contains__,
    torch.Tensor.__array__,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]  # a descriptor
    torch.Tensor.new_tensor,
    torch.tensor,
}
"""Functions that return elements of tensors as Python numbers, or tensors that the trace takes for constants."""

_TELL_SIZES = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]  # a descriptor
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.dim,
    torch.Tensor.__len__,
}

READS_SIZES = {
    torch.Tensor.__len__,
    torch.Tensor.unbind,
    torch.unbind,
    torch.numel,
    torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]  # a descriptor
    torch.Tensor.untyped_storage,
}

_SIZES = {"aten::size", "aten::numel", "aten::dim", "aten::len"}

_SELECT = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave")
"""Functions of torch whose results have sizes that depend on values."""
_SELECTING = {getattr(owner, name) for owner in (torch, torch.Tensor) for name in _SELECT}
_TRACED_AS = ("nonzero_numpy", "_unique", "_unique2", "unique_dim", "unique_dim_consecutive", "to_sparse")
"""Further operators of a trace with such sizes, most of them what these functions call."""
_SIZED_BY_VALUES = {f"aten::{name}" for name in (*_SELECT, *_TRACED_AS)}

_MADE_OF_NUMBERS = {f"aten::{name}" for name in ("arange", "range", "linspace", "logspace", "tensor_split")}
"""Their sizes are numbers that a trace has as tensors."""


def selects(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the size of what a function gives depends on values."""
    if func is torch.Tensor.__getitem__:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensor_leaves(args[1]))
    return func in _SELECTING or (func in (torch.where, torch.Tensor.where) and len(args) == 1)


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
        tensors = tensor_leaves((args, kwargs))
        sources = frozenset[str]().union(*(self._from.get(id(tensor), frozenset()) for tensor in tensors))
        if sources and func in READS_VALUES:
            self.read.update(dict.fromkeys(sorted(sources)))
        output = func(*args, **(kwargs or {}))
        data = any(_is_data(tensor) and id(tensor) not in self._from for tensor in tensors)
        if sources and not data:
            for tensor in tensor_leaves(output):
                self._from[id(tensor)] = self._from.get(id(tensor), frozenset()) | sources
                self._alive.append(tensor)
        return output


def _is_data(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex()) and tensor.dim() > 0


def inputs_read(model: nn.Module, inputs: Inputs) -> list[str]:
    """The arguments, other than floating-point ones, whose values a model reads in Python. It is as before afterwards.

    Nothing where the model does not run.
    """
    args, kwargs = run_arguments(inputs)
    tensors = {name: tensor for name, tensor in input_tensors(model, args, kwargs) if not _is_data(tensor)}
    mode = InputsRead(tensors)
    with untouched(model), contextlib.suppress(Exception), mode:
        model(*args, **kwargs)
    return list(mode.read)
