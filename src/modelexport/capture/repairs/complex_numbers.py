"""Operators of complex numbers that ``torch.onnx`` translates for real numbers only, written in real numbers.

PyTorch knows how: a composite operator has its own definition, and the tensor class for complex numbers has the real
and imaginary parts of the others' results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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
    translations = [one for known in private("registry")().functions.values() for one in known]
    translated = {one.fx_target for one in translations if one.is_complex}
    operators = {*_overloads(by_parts_of), *(one.fx_target for one in translations)}
    defaults = dict(torch.export.default_decompositions().items())
    made: Decompositions = {}
    for operator in operators:
        if not isinstance(operator, OpOverload) or schema_of(operator).is_mutable:
            continue
        if not _takes_tensors(operator):
            if _makes_tensors(operator):
                made[operator] = _where(_is_complex, _made_in_parts(operator), present.get(operator))
            continue
        if operator.overloadpacket in _BETWEEN:
            continue
        by_parts = by_parts_of.get(operator, by_parts_of.get(operator.overloadpacket))
        if operator in translated:  # but not with a complex number of Python
            if by_parts is not None:
                made[operator] = _where(_is_complex_number, _in_parts(by_parts), present.get(operator))
            if torch.Tag.pointwise in operator.tags:
                made[operator] = _promoting(operator, made.get(operator, present.get(operator)))
            continue
        whole = defaults.get(operator, private("definitions").get(operator))
        if by_parts is not None and (whole is None or operator.overloadpacket not in _BY_DEFINITION):
            made[operator] = _where(_is_complex, _in_parts(by_parts), present.get(operator))
        elif operator not in present and whole is not None:
            made[operator] = _where(_is_complex, whole, None)
    convert = torch.ops.prims.convert_element_type.default
    made[convert] = _where(_is_complex, _converted, present.get(convert))
    return made


def _promoting(operator: Any, otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    """The operator with its arguments converted to one type, where some are complex and have different ones.

    ``torch.onnx`` inserts such conversions itself, and does not translate them.
    """

    def decompose(*args: Any, **kwargs: Any) -> Any:
        numbers = tensor_leaves(args)
        if any(one.is_complex() for one in numbers) and len({one.dtype for one in numbers}) > 1:
            dtype = functools.reduce(torch.promote_types, (one.dtype for one in numbers))
            args = tree_map(lambda one: _converted(one, dtype) if isinstance(one, torch.Tensor) else one, args)
            return operator(*args, **kwargs)
        return NotImplemented if otherwise is None else otherwise(*args, **kwargs)

    return decompose


def _converted(x: Any, dtype: torch.dtype) -> Any:
    """The conversion to another type, of which one or both are complex."""
    if x.dtype == dtype:
        return x
    pairs = torch.view_as_real(x.resolve_conj()) if x.is_complex() else torch.stack([x, torch.zeros_like(x)], -1)
    if not dtype.is_complex:
        return pairs.select(-1, 0).to(dtype)
    pairs = pairs.to(dtype.to_real())
    return torch.complex(pairs.select(-1, 0), pairs.select(-1, 1))


def _overloads(operators: Mapping[Any, Any]) -> set[Any]:
    found: set[Any] = set()
    for operator in operators:
        if isinstance(operator, OpOverload):
            found.add(operator)
        else:
            found.update(getattr(operator, name) for name in operator.overloads())
    return found


def _takes_tensors(operator: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in schema_of(operator).arguments)


_BY_DEFINITION = {torch.ops.aten.pow}
"""Operators whose own definition knows more: a square is a product, and not the exponential of a logarithm."""


def _makes_tensors(operator: Any) -> bool:
    """Whether it makes a tensor of numbers: ``zeros``, ``full``."""
    schema = schema_of(operator)
    return any(argument.name == "dtype" for argument in schema.arguments) and str(schema.returns[0].type) == "Tensor"


def _where(
    applies: Callable[[Any], bool], function: Callable[..., Any], otherwise: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The function where it applies to an argument; elsewhere the other one, or the operator as it is."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        if any(map(applies, tree_leaves((args, kwargs)))):
            return function(*args, **kwargs)
        return NotImplemented if otherwise is None else otherwise(*args, **kwargs)

    return decompose


def _is_complex_number(value: Any) -> bool:
    return isinstance(value, complex)


def _is_complex(value: Any) -> bool:
    if isinstance(value, torch.dtype):
        return bool(value.is_complex)
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex())


def _made_in_parts(operator: Any) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = kwargs["dtype"].to_real()
        imaginary = [one.imag for one in tree_leaves(args) if isinstance(one, complex)]
        args = tree_map(lambda one: one.real if isinstance(one, complex) else one, args)
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
