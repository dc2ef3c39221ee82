"""Operators of complex numbers that ``torch.onnx`` translates for real numbers only, written in real numbers.

PyTorch knows how: a composite operator has its own definition, and the tensor class for complex numbers has the real
and imaginary parts of the others' results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from modelexport.capture.patches import private, replaced
from modelexport.pytorch.private_torch import OpOverload, schema_of, tensor_leaves, tree_leaves, tree_map

Decompositions = dict[Any, Callable[..., Any]]


def complex_decompositions(present: Mapping[Any, Callable[..., Any]]) -> Decompositions:
    """Operator to a decomposition that applies to complex tensors alone.

    Args:
        present: The decompositions that are made of every tensor, which come before these.
    """
    by_parts_of = private("complex operators")
    translations = [known for overloads in private("registry")().functions.values() for known in overloads]
    translated = {known.fx_target for known in translations if known.is_complex}
    defaults = dict(torch.export.default_decompositions().items())
    decompositions: Decompositions = {}

    def add(operator: Any, applies: Callable[[list[Any]], bool], function: Callable[..., Any]) -> None:
        otherwise = decompositions.get(operator, present.get(operator))
        decompositions[operator] = _where(applies, function, otherwise)

    for operator in {*_overloads(by_parts_of), *(known.fx_target for known in translations)}:
        if not isinstance(operator, OpOverload) or schema_of(operator).is_mutable:
            continue
        if not any("Tensor" in str(argument.type) for argument in schema_of(operator).arguments):
            if _makes_tensors(operator):
                add(operator, _has_complex, _made_in_parts(operator))
            continue
        if operator.overloadpacket in _BETWEEN:
            continue
        by_parts = by_parts_of.get(operator, by_parts_of.get(operator.overloadpacket))
        if operator in translated:  # but not with a complex number of Python
            if by_parts is not None:
                add(operator, _has_complex_numbers, _in_parts(by_parts))
            if torch.Tag.pointwise in operator.tags:
                add(operator, _has_several_types, functools.partial(_of_one_type, operator))
            continue
        whole = defaults.get(operator, private("definitions").get(operator))
        if by_parts is not None and (whole is None or operator.overloadpacket not in _BY_DEFINITION):
            add(operator, _has_complex, _in_parts(by_parts))
        elif operator not in present and whole is not None:
            add(operator, _has_complex, whole)
    add(torch.ops.prims.convert_element_type.default, _has_complex, _converted)
    return decompositions


def _where(
    applies: Callable[[list[Any]], bool], function: Callable[..., Any], otherwise: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The function where its condition applies to the arguments; elsewhere the other one, or the operator as it is."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        if applies(tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        return NotImplemented if otherwise is None else otherwise(*args, **kwargs)

    return decompose


def _has_complex_numbers(arguments: list[Any]) -> bool:
    return any(isinstance(argument, complex) for argument in arguments)


def _has_complex(arguments: list[Any]) -> bool:
    tensors_and_types = [part for part in arguments if isinstance(part, torch.Tensor | torch.dtype)]
    dtypes = [part if isinstance(part, torch.dtype) else part.dtype for part in tensors_and_types]
    return _has_complex_numbers(arguments) or any(dtype.is_complex for dtype in dtypes)


def _has_several_types(arguments: list[Any]) -> bool:
    dtypes = {tensor.dtype for tensor in tensor_leaves(arguments)}
    return len(dtypes) > 1 and any(dtype.is_complex for dtype in dtypes)


def _of_one_type(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator with its arguments converted to one type.

    ``torch.onnx`` inserts such conversions itself, and does not translate them.
    """
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensor_leaves(args)))
    args = tree_map(lambda part: _converted(part, dtype) if isinstance(part, torch.Tensor) else part, args)
    return operator(*args, **kwargs)


def _converted(x: Any, dtype: torch.dtype) -> Any:
    """The conversion to another type, of which one or both are complex."""
    if x.dtype == dtype:
        return x
    pairs = torch.view_as_real(x.resolve_conj()) if x.is_complex() else torch.stack([x, torch.zeros_like(x)], -1)
    if not dtype.is_complex:
        return pairs.select(-1, 0).to(dtype)
    pairs = pairs.to(dtype.to_real())
    return torch.complex(pairs.select(-1, 0), pairs.select(-1, 1))


def _overloads(operators: Iterable[Any]) -> set[Any]:
    """Operators, with all overloads of those that are given without one."""
    by_operator = [
        [operator] if isinstance(operator, OpOverload) else [getattr(operator, n) for n in operator.overloads()]
        for operator in operators
    ]
    return {overload for overloads in by_operator for overload in overloads}


_BY_DEFINITION = {torch.ops.aten.pow}
"""Operators whose own definition knows more: a square is a product, and not the exponential of a logarithm."""


def _makes_tensors(operator: Any) -> bool:
    """Whether it makes a tensor of numbers: ``zeros``, ``full``."""
    schema = schema_of(operator)
    return any(argument.name == "dtype" for argument in schema.arguments) and str(schema.returns[0].type) == "Tensor"


def _made_in_parts(operator: Any) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = kwargs["dtype"].to_real()
        imaginary = [part.imag for part in tree_leaves(args) if isinstance(part, complex)]
        args = tree_map(lambda part: part.real if isinstance(part, complex) else part, args)
        real = operator(*args, **kwargs)
        return torch.complex(real, torch.full_like(real, imaginary[0] if imaginary else 0.0))

    return apply


def _in_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_parts, (args, kwargs))
        # A decomposed program has no room for the constants that ``torch.asarray`` makes of numbers.
        with replaced({"asarray": lambda _: lambda number, dtype: torch.full((), number, dtype=dtype)}):
            return tree_map(_whole, function(*args, **kwargs))

    return apply


_BETWEEN = {torch.ops.aten.view_as_real, torch.ops.aten.resolve_conj, torch.ops.aten.complex}
"""What the parts are taken and put together with."""


def _parts(value: Any) -> Any:
    pair = private("complex tensors")
    if isinstance(value, torch.Tensor) and value.is_complex():
        pairs = torch.view_as_real(value.resolve_conj())
        return pair(pairs.select(-1, 0), pairs.select(-1, 1))
    if isinstance(value, complex):
        return pair(torch.full((), value.real), torch.full((), value.imag))
    return value


def _whole(value: Any) -> Any:
    return torch.complex(value.re, value.im) if isinstance(value, private("complex tensors")) else value
