"""The tensors in nested values, named by their paths, and the arguments of a run."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from modelexport.core.calls import TensorSpec
from modelexport.errors import InputsError, UsageError
from modelexport.pytorch.private_torch import is_functorch_wrapped_tensor


def tensors_in(value: object, name: str = "", *, _around: tuple[int, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value and their names, in order: ``past.0.key`` is in ``{"past": [Layer(key=...)]}``.

    Follows mappings, dataclasses, tuples, lists and other objects with attributes (caches); cycles are ignored.
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    elif id(value) not in _around:
        for part_name, part in _parts(value):
            inner = f"{name}.{part_name}" if name else part_name
            yield from tensors_in(part, inner, _around=(*_around, id(value)))


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (type, enum.Enum, nn.Module, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()


def tensors_held(
    value: object, by: Callable[[object], bool], *, _around: tuple[int, ...] = ()
) -> Iterator[torch.Tensor]:
    """The tensors in those objects inside a value that ``by`` says yes to."""
    if isinstance(value, torch.Tensor) or id(value) in _around:
        return
    if by(value):
        yield from (tensor for _, tensor in tensors_in(value))
        return
    for _, part in _parts(value):
        yield from tensors_held(part, by, _around=(*_around, id(value)))


NamedTensors = list[tuple[str, torch.Tensor]]


def input_tensors(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NamedTensors:
    """The tensors that a module is called with, named as ``forward``'s arguments."""
    try:
        signature = inspect.signature(module.forward)
        arguments = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or arguments that forward is about to refuse
        if isinstance(module, torch.jit.ScriptModule):
            names = [argument.name for argument in schema_of_forward(module).arguments[1:]]
            return [*tensors_in(dict(zip(names, args, strict=False))), *tensors_in(kwargs)]
        return [*tensors_in(args, "args"), *tensors_in(kwargs)]
    variadic = inspect.Parameter.VAR_KEYWORD
    return [
        named
        for name, value in arguments.items()
        for named in tensors_in(value, "" if signature.parameters[name].kind is variadic else name)
    ]


def output_tensors(output: object) -> NamedTensors:
    """The tensors that a module returns: named by field, or ``output``, ``output.0``, ..."""
    plain = isinstance(output, (list, tuple, torch.Tensor)) and not hasattr(output, "_fields")
    return list(tensors_in(output, "output" if plain else ""))


def has_elements(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a dense array: not nested or sparse, and not one that ``torch.func`` computes on."""
    return not tensor.is_nested and tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


def memory_of(tensor: torch.Tensor) -> int | None:
    """Where the elements of a tensor and of all its views are; ``None`` if it has none."""
    return tensor.untyped_storage().data_ptr() or None if tensor.layout is torch.strided else None


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a file has it: complex numbers are pairs of numbers, in a last axis."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def tensor_specs(tensors: NamedTensors) -> tuple[TensorSpec, ...]:
    """Names, element types and shapes of tensors as a file has them; a dynamic size is the name of its symbol."""
    return tuple(
        TensorSpec(
            name,
            str(tensor.dtype.to_real()).removeprefix("torch."),
            (
                *(size if isinstance(size, int) else str(size) for size in tensor.shape),
                *((2,) if tensor.is_complex() else ()),
            ),
        )
        for name, tensor in tensors
    )


Inputs = Mapping[str, Any] | Sequence[Any]
"""Example inputs of a model: keyword arguments of its ``forward``, or positional ones."""


def arguments_of(inputs: Any) -> Any:
    """Example inputs; a tensor is the only argument, as for ``torch.onnx.export``."""
    if isinstance(inputs, str) or not isinstance(inputs, torch.Tensor | Mapping | Sequence):
        raise InputsError(
            f"the example inputs are a {type(inputs).__name__}: give keyword arguments of forward as a dict, or "
            "positional ones as a tuple"
        )
    return (inputs,) if isinstance(inputs, torch.Tensor) else inputs


def run_arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments: copies, since a run may write into them."""
    copies = copied(arguments_of(inputs))
    return ((), dict(copies)) if isinstance(copies, Mapping) else (tuple(copies), {})


def with_each_tensor_once(inputs: Any) -> Any:
    """Example inputs in which no tensor is given twice, by copies: exporters take one tensor for one input."""
    found = [id(tensor) for _, tensor in tensors_in(inputs)]
    return inputs if len(found) == len({*found}) else _copied_if_seen(inputs, set())


def _copied_if_seen(value: Any, seen: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) in seen:
            return value.detach().clone().requires_grad_(value.requires_grad)
        seen.add(id(value))
    elif type(value) in (tuple, list):
        return type(value)(_copied_if_seen(part, seen) for part in value)
    elif type(value) is dict:
        return {key: _copied_if_seen(part, seen) for key, part in value.items()}
    return value


def copied(inputs: Any, tensors: dict[int, Any] | None = None) -> Any:
    """Example inputs with tensors and containers of their own; modules, and objects that refuse it, are not copied.

    Args:
        tensors: By ``id``, what takes the place of each tensor, instead of a copy.
    """
    memo = tensors or {id(t): t.detach().clone().requires_grad_(t.requires_grad) for _, t in tensors_in(inputs)}
    return _deep_copy(inputs, memo)


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(_deep_copy(part, memo) for part in value)
    if type(value) is dict:
        return {key: _deep_copy(part, memo) for key, part in value.items()}
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # it refuses, or has something inside that does
        return value


def as_array(tensor: torch.Tensor) -> Any:
    """A tensor as a NumPy array, as a file has it: complex numbers are pairs of numbers, in a last axis.

    ``bfloat16`` and ``float8``, which NumPy does not have, use ``ml_dtypes``.
    """
    if not has_elements(tensor):
        raise UsageError("a tensor of the model is nested or sparse, which no ONNX file can have: use dense ones")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = as_stored(tensor)
    if tensor.is_floating_point() and tensor.itemsize < 4 and tensor.dtype is not torch.float16:
        import ml_dtypes

        bits = tensor.view(torch.uint16 if tensor.itemsize == 2 else torch.uint8).numpy()
        return bits.view(getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch.")))
    return tensor.numpy()


def schema_of_forward(module: nn.Module) -> Any:
    """The schema of a scripted module's ``forward``, which TorchScript adds to the method."""
    return module.forward.schema  # type: ignore[attr-defined]  # of a script
