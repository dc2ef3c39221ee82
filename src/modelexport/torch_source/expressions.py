"""Python expressions as text, with how tightly they bind; literals of numbers, and names that are safe to write."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.format.dtypes import dtype_name

ATOM, POWER, UNARY, PRODUCT, SUM, SHIFT, AND, XOR, OR, COMPARISON, NOT, LOWEST = range(12, 0, -1)
"""How tightly operators of Python bind, the tightest first."""


@dataclass(frozen=True)
class Expression:
    """Text of Python that computes a tensor, or a sequence of tensors."""

    text: str
    binding: int = ATOM

    def within(self, binding: int) -> str:
        """The text as operand of something that binds so tightly."""
        return self.text if self.binding >= binding else f"({self.text})"


@dataclass(frozen=True)
class Number:
    """A Python number that is computed from sizes of tensors."""

    expression: Expression
    is_positive: bool = False
    """Whether it is known to be at least 0."""
    literal: Any = None
    """The number itself if it is known."""

    @classmethod
    def of(cls, value: Any) -> Number:
        """A known number."""
        text = literal(value)
        return cls(Expression(text, UNARY if text.startswith("-") else ATOM), bool(value >= 0), value)

    @property
    def text(self) -> str:
        """As an argument of a function."""
        return self.expression.text


@dataclass(frozen=True)
class Numbers:
    """A tensor of at most one axis whose elements are Python numbers."""

    items: tuple[Number, ...]
    is_scalar: bool

    @property
    def text(self) -> str:
        """A tuple of the numbers, or the number alone."""
        return self.items[0].text if self.is_scalar else listed([item.text for item in self.items])


def listed(texts: Sequence[str]) -> str:
    """A tuple of expressions."""
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def literal(value: Any) -> str:
    """A number, truth value, text or list of these in Python.

    A float32 of at most six digits is written as these: an epsilon of 1e-12 is what the model's author wrote.
    """
    if isinstance(value, bool | np.bool_ | int | np.integer | str):
        return ascii(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, Sequence | np.ndarray):
        return f"[{', '.join(map(literal, value))}]"
    number = float(value)
    if not math.isfinite(number):
        return "math.nan" if math.isnan(number) else "math.inf" if number > 0 else "-math.inf"
    with np.errstate(over="ignore"):
        narrow = np.float32(number)
    if float(narrow) == number:
        short = float(str(narrow))
        return repr(short if float(f"{short:.6g}") == short else number)
    return repr(number)


def literal_or_none(value: Any) -> str:
    """A literal; lists of numbers as tuples."""
    if value is None:
        return "None"
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        return listed([literal(each) for each in value])
    return literal(value)


def identifier(text: str, default: str = "value") -> str:
    """A name of Python that resembles a text; never a keyword, and never with two underscores at both ends."""
    name = re.sub(r"[^0-9A-Za-z_]+", "_", text)
    if not name.isascii() or not name or name.strip("_") == "":
        name = default
    if name[0].isdigit():
        name = f"{default}_{name}"
    if name.startswith("__"):
        name = name.strip("_") or default
    return f"{name}_" if keyword.iskeyword(name) or name in RESERVED else name


RESERVED = frozenset(
    ("self", "torch", "nn", "F", "math", "Tensor", "super", "range", "list", "int", "float", "bool", "min", "max",
     "abs", "zip", "call", "setattr", "getattr", "len")
)  # fmt: skip
"""Names that a generated file uses otherwise."""


def is_plain(name: str) -> bool:
    """Whether a name can be written as an attribute: ``self.name``."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")


TORCH_TYPES = {
    "int4": "int8", "uint4": "uint8", "int2": "int8", "uint2": "uint8", "float4_e2m1fn": "float32",
}  # fmt: skip
"""Types of ONNX that PyTorch computes in another type, which has all of their numbers."""

METHODS = {"float32": "float", "float64": "double", "int64": "long", "int32": "int", "bool": "bool", "float16": "half",
           "bfloat16": "bfloat16"}  # fmt: skip
"""Types to the methods of a tensor that convert to them."""


def type_name(dtype: ir.DataType, wide: str | None = None) -> str:
    """PyTorch's name of an element type.

    Args:
        wide: The floating-point type that is float64 instead.
    """
    name = dtype_name(dtype)
    name = TORCH_TYPES.get(name, name)
    return "float64" if name == wide else name
