"""Expressions of Python as syntax trees, filled into templates; literals, and names that are safe to write."""

from __future__ import annotations

import ast
import functools
import keyword
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.format.dtypes import dtype_name

LEFT_OUT: Any = object()
"""The operand of a keyword argument that is not written."""


@dataclass(frozen=True)
class Number:
    """A Python number that is computed from sizes of tensors."""

    code: ast.expr
    is_positive: bool = False
    """Whether it is known to be at least 0."""
    terms: int = 1
    """How many numbers, names and operators it has, at most."""

    def __str__(self) -> str:
        return ast.unparse(self.code)


@functools.cache
def parsed(template: str) -> ast.expr:
    """A text as an expression."""
    return ast.parse(template, mode="eval").body


def names_of(expression: ast.expr) -> list[str]:
    """Every name in an expression, as often as it occurs."""
    return [node.id for node in ast.walk(expression) if isinstance(node, ast.Name)]


def code(template: str, /, **operands: Any) -> ast.expr:
    """A template with operands in the place of names: expressions, or values that are written as literals.

    ``*name`` inserts the elements of a list, and ``**name`` those of a dictionary.
    """
    return _filled(parsed(template), operands)


def _filled(node: Any, operands: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [filled for each in node for filled in _elements(each, operands)]
    if isinstance(node, ast.Name) and node.id in operands:
        return literal(operands[node.id])
    if not isinstance(node, ast.AST):
        return node
    new: Any = type(node)(**{name: _filled(value, operands) for name, value in ast.iter_fields(node)})
    if isinstance(new, ast.Subscript) and isinstance(new.slice, ast.Tuple) and len(new.slice.elts) == 1:
        new.slice = new.slice.elts[0]
    return new


def replaced_names(expression: ast.expr, names: Mapping[str, str]) -> ast.expr:
    """An expression with other names."""
    return _filled(expression, {old: parsed(new) for old, new in names.items()})


def _elements(node: Any, operands: Mapping[str, Any]) -> list[Any]:
    """An argument or element of a list with its operand; several if it is starred, none if it is left out."""
    value = getattr(node, "value", None)
    if not isinstance(value, ast.Name) or value.id not in operands:
        return [_filled(node, operands)]
    operand = operands[value.id]
    if isinstance(node, ast.Starred):
        return [literal(each) for each in operand]
    if isinstance(node, ast.keyword) and node.arg is None:
        return [ast.keyword(name, literal(each)) for name, each in operand.items() if each is not LEFT_OUT]
    return [] if operand is LEFT_OUT else [_filled(node, operands)]


def matches(pattern: Any, expression: Any, holes: dict[str, Any]) -> bool:
    """Whether an expression is a pattern with its names replaced; writes down by what."""
    if isinstance(pattern, ast.Name) and pattern.id not in ("self", "F", "torch"):
        known = holes.setdefault(pattern.id, expression)
        return ast.dump(known) == ast.dump(expression)
    if type(pattern) is not type(expression):
        return False
    if isinstance(pattern, ast.Call) and pattern.keywords and pattern.keywords[-1].arg is None:
        holes["more"] = {keyword.arg: keyword.value for keyword in expression.keywords}
        return matches(pattern.func, expression.func, holes) and matches(pattern.args, expression.args, holes)
    if isinstance(pattern, list):
        return len(pattern) == len(expression) and all(map(matches, pattern, expression, [holes] * len(pattern)))
    if isinstance(pattern, ast.AST):
        return all(matches(value, getattr(expression, name), holes) for name, value in ast.iter_fields(pattern))
    return bool(pattern == expression)


_IDIOMS = {
    "1 / torch.sqrt(x)": "torch.rsqrt(x)",
    "x * torch.sigmoid(x)": "F.silu(x)",
    "torch.sigmoid(x) * x": "F.silu(x)",
}
"""Expressions that exporters write with several operators, to the function of torch that computes the same."""


def idiomatic(expression: ast.expr) -> ast.expr:
    """An expression, or the function of torch that computes the same."""
    for pattern, function in _IDIOMS.items():
        holes: dict[str, Any] = {}
        if matches(parsed(pattern), expression, holes):
            return code(function, **holes)
    return expression


def literal(value: Any) -> ast.expr:
    """A number, truth value, text or sequence of these; expressions are themselves.

    A float32 of at most six digits is written as these: an epsilon of 1e-12 is what the model's author wrote.
    """
    if isinstance(value, ast.expr):
        return value
    if isinstance(value, Number):
        return value.code
    if isinstance(value, tuple | list) or (isinstance(value, np.ndarray) and value.ndim):
        return (ast.Tuple if isinstance(value, tuple) else ast.List)([literal(each) for each in value], ast.Load())
    if isinstance(value, np.float32) and math.isfinite(value):
        short = float(str(value))
        return parsed(repr(short if float(f"{short:.6g}") == short else float(value)))
    plain = value.item() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        return parsed("math.nan" if math.isnan(plain) else "math.inf" if plain > 0 else "-math.inf")
    return ast.Constant(plain) if isinstance(plain, str | types.EllipsisType) else parsed(repr(plain))


def identifier(text: str, default: str = "value") -> str:
    """A name of Python that resembles a text; never a keyword, and never with two underscores at its start."""
    name = re.sub(r"[^0-9A-Za-z_]+", "_", text)
    if name.startswith("__"):
        name = name.strip("_")
    if name.strip("_") == "":
        name = default
    if name[0].isdigit():
        name = f"{default}_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in RESERVED else name


RESERVED = frozenset(
    ("self", "torch", "nn", "F", "math", "Tensor", "super", "range", "list", "int", "float", "bool", "min", "max",
     "abs", "zip", "call", "setattr", "getattr", "len")
)  # fmt: skip
"""Names that a generated file uses otherwise."""


def is_plain(name: str) -> bool:
    """Whether a name can be written as an attribute: ``self.name``."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")


def attribute(owner: ast.expr, name: str) -> ast.expr:
    """``owner.name``, or ``getattr`` with a name that is not one of Python's."""
    return ast.Attribute(owner, name, ast.Load()) if is_plain(name) else code("getattr(x, name)", x=owner, name=name)


TORCH_TYPES = {
    "int4": "int8", "uint4": "uint8", "int2": "int8", "uint2": "uint8", "float4_e2m1fn": "float32",
}  # fmt: skip
"""Types of ONNX that PyTorch computes in another type, which has all of their numbers."""

METHODS = {"float32": "float", "float64": "double", "int64": "long", "int32": "int", "bool": "bool", "float16": "half",
           "bfloat16": "bfloat16"}  # fmt: skip
"""Types to the methods of a tensor that convert to them."""


def type_name(dtype: ir.DataType) -> str:
    """PyTorch's name of an element type."""
    name = dtype_name(dtype)
    return TORCH_TYPES.get(name, name)
