"""One node of a file as the table of operators sees it: its operands as expressions, its attributes, and templates.

In a template, these names stand for parts of the node:

* ``a``, ``b``, ...: its operands as tensors, ``None`` where one is left out; ``operands`` are all;
* ``A``, ``B``, ...: the same as Python numbers if they are such, and broadcasting does not need their axes;
* ``n1``: an operand as one Python number; ``s1``: as a tuple of them, read from the tensor if it is computed;
* the name of an attribute: its value or the standard's default; ``**attributes``: all that a function takes;
* ``dtype``: the type of the first output; ``device``: where the inputs of the model are.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.core.limits import MOST_AXES
from modelexport.core.text import plural
from modelexport.errors import UsageError
from modelexport.tools.to_torch import functions_of_layers, functions_of_quantized, functions_of_tensors
from modelexport.tools.to_torch.expressions import LEFT_OUT, METHODS, code, names_of, parsed
from modelexport.tools.to_torch.size_numbers import constant_numbers, numpy_kind

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    name: each
    for file in (functions_of_tensors, functions_of_layers, functions_of_quantized)
    for name, each in vars(file).items()
    if inspect.isfunction(each) and each.__module__ == file.__name__
}
"""The functions that a generated file may contain."""
_TEXTS = (ir.AttributeType.STRING, ir.AttributeType.STRINGS)
_NUMBERS = tuple(getattr(ir.AttributeType, name) for name in ("INT", "INTS", "FLOAT", "FLOATS", "TENSOR"))
_TEXT_ATTRIBUTES = frozenset(
    ("activation", "activations", "approximate", "auto_pad", "coordinate_transformation_mode", "direction", "equation",
     "keep_aspect_ratio_policy", "mode", "nearest_mode", "padding_mode", "reduction")
)  # fmt: skip
"""The attributes that are texts. Writers quote or compare them."""
_WITHOUT_EFFECT = frozenset(
    ("stash_type", "kernel_shape", "storage_order", "saturate", "output_dtype", "mask_index_type", "accuracy_level",
     "extrapolation_value", "seed", "noop_with_empty_axes", "allowzero", "cubic_coeff_a")
)  # fmt: skip
"""Attributes that do not change a result, or that the writer of their operator has checked."""


class UnwrittenError(Exception):
    """An operator, or this use of it, has no counterpart in the table."""


class Operands(Protocol):
    """The values of a scope as expressions, for the nodes that take them."""

    helpers: set[str]
    """The names of the functions that the texts call."""
    device: Any
    """The device of the model's inputs as an expression."""

    def tensor(self, value: ir.Value) -> ast.expr: ...
    def numbers(self, value: ir.Value) -> Any: ...
    def size(self, value: ir.Value, axis: int) -> Any: ...
    def constant(self, value: ir.Value) -> Any: ...
    def type_name(self, dtype: ir.DataType) -> str: ...
    def is_exact(self) -> bool: ...


class Operation:
    """A node with its operands.

    Args:
        version: The opset version of its domain.
    """

    def __init__(self, node: ir.Node, version: int, scope: Operands) -> None:
        self.node, self.version, self.scope = node, version, scope
        known = not node.domain and onnx.defs.has(node.op_type, version, "")
        self._standard = onnx.defs.get_schema(node.op_type, version, "").attributes if known else {}
        self._asked: set[str] = set()

    # Templates

    def write(self, template: str, /, **operands: Any) -> ast.expr:
        """A template with the node's parts, and with operands under other names."""
        given = set(operands)
        for name in names_of(parsed(template)):  # as often as it is there: an operand that is used twice gets a name
            if name in FUNCTIONS:
                self.scope.helpers.add(name)
            elif name not in given and (part := self._part(name)) is not None:
                operands[name] = part()
        if "**attributes" in template:
            operands["attributes"] = self._taken_attributes(FUNCTIONS[template.partition("(")[0]])
        written = code(template, **operands)
        while isinstance(written, ast.Call) and isinstance(written.func, ast.Name) and _ends_with_none(written.args):
            written.args.pop()
        return written

    def _part(self, name: str) -> Callable[[], Any] | None:
        """A function that makes the part of the node that a name in a row refers to; ``None`` for any other name."""
        letter = "abcdefghij".find(name.lower()) if len(name) == 1 and name not in "DEFGHIJ" else -1
        if letter >= 0 and name not in self._standard:
            return lambda: self.tensor(letter) if name.islower() else self.scalar(letter)
        if re.fullmatch(r"[ns]\d", name):
            return lambda: (self.size if name[0] == "n" else self.sizes)(int(name[1]))
        parts: dict[str, Callable[[], Any]] = {
            "operands": lambda: [self.tensor(index) for index in range(len(self.node.inputs))],
            "dtype": lambda: self.type_of(self.node.outputs[0].dtype),
            "device": lambda: self.scope.device,
        }
        if name in self._standard or name in self.node.attributes:
            return lambda: LEFT_OUT if self.attribute(name) is None else self.attribute(name)
        return parts.get(name)

    def _taken_attributes(self, function: Callable[..., Any]) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters
        named = {name: self.attribute(name) for name in self.node.attributes if name in parameters}
        return {name: value for name, value in named.items() if parameters[name].default != value}

    def check_attributes(self) -> None:
        """Refuse an attribute that nothing asked for, unless it has its default."""
        for name in self.node.attributes.keys() - self._asked - _WITHOUT_EFFECT:
            value = self.attribute(name)
            if value != self._default(name) and value not in (0, "", None):
                raise UnwrittenError(f"its attribute {name} is {value}")

    # Operands

    def value(self, index: int) -> ir.Value | None:
        """The value at an input; ``None`` if it is left out."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def has(self, index: int) -> bool:
        """Whether an input is given."""
        return self.value(index) is not None

    def tensor(self, index: int) -> ast.expr | None:
        """An operand as a tensor."""
        value = self.value(index)
        return None if value is None else self.scope.tensor(value)

    def scalar(self, index: int) -> Any:
        """An operand, as a Python number if it is one, and broadcasting with the others does not need its axes."""
        number, rank = self.number(index), self.known_rank(index)
        others = [each for each in range(len(self.node.inputs)) if each != index and self.has(each)]
        fits = all(rank == 0 or 0 <= rank <= self.known_rank(each) for each in others)
        if number is None or not fits or (index == 0 and all(self.number(each) is not None for each in others)):
            return self.tensor(index)
        return number

    def known_rank(self, index: int = 0) -> int:
        """How many axes an operand has; -1 if that is not known."""
        shape = self.known_shape(index)
        return -1 if shape is None else len(shape)

    def number(self, index: int) -> Any:
        """An operand that is one Python number; ``None`` if it is not."""
        numbers = self.numbers(index, most=1)
        return numbers[0] if numbers is not None and len(numbers) == 1 else None

    def array(self, index: int) -> Any:
        """An operand that is constant, as an array; ``None`` if it is not."""
        value = self.value(index)
        return None if value is None else self.scope.constant(value)

    def numbers(self, index: int, *, most: int | None = None) -> list[Any] | None:
        """The elements of an operand, if they are Python numbers."""
        value = self.value(index)
        if value is None:
            return None
        numbers = self.scope.numbers(value)
        array = self.scope.constant(value) if numbers is None else None
        if array is not None and (array.size == most or constant_numbers(array) is not None):
            return list(array.reshape(-1)) if array.dtype.kind in "iufb" else None
        return None if numbers is None else list(numbers.reshape(-1))

    def integers(self, index: int) -> list[int] | None:
        """The elements of an operand that is a constant of whole numbers."""
        array = self.array(index)
        return None if array is None else [int(each) for each in array.reshape(-1)]

    def sizes(self, index: int) -> Any:
        """An operand as a tuple of Python numbers; a tensor is read when the model runs."""
        numbers = self.numbers(index)
        if numbers is None:
            return code("x.tolist()", x=self.tensor(index)) if self.has(index) else None
        return tuple(numbers)

    def size(self, index: int) -> Any:
        """An operand as one Python number."""
        number = self.number(index)
        if number is None:
            return code("x.item()", x=self.tensor(index)) if self.has(index) else None
        return number

    def axes(self, index: int) -> list[int] | None:
        """Axes, which are an attribute in older opsets and an input in newer ones; ``None`` if they are not given."""
        if "axes" in self.node.attributes:
            return list(self.attribute("axes"))
        axes = self.integers(index)
        if self.has(index) and axes is None:
            raise UnwrittenError("its axes are computed")
        check_axes(axes or ())
        return axes

    def rank(self, index: int = 0) -> int:
        """How many axes an operand has."""
        rank, value = self.known_rank(index), self.value(index)
        if rank < 0:
            raise UnwrittenError(f"the number of axes of {value.name if value is not None else 'it'} is not known")
        return rank

    def shape(self, index: int = 0) -> list[Any]:
        """The sizes of an operand; what is not a whole number is dynamic."""
        return list(self.known_shape(index) or [None] * self.rank(index))

    def known_shape(self, index: int = 0) -> ir.Shape | None:
        """The shape of an operand; ``None`` if it is not known."""
        value = self.value(index)
        return value.shape if value is not None else None

    def kind(self, index: int = 0) -> str:
        """NumPy's kind of an operand's type; ``O`` if the type is not known."""
        return numpy_kind(self.dtype(index))

    def dtype(self, index: int = 0) -> ir.DataType | None:
        """The element type of an operand."""
        value = self.value(index)
        return None if value is None else value.dtype

    # Attributes and types

    def attribute(self, name: str) -> Any:
        """An attribute, or the standard's default."""
        self._asked.add(name)
        found = self.node.attributes.get(name)
        if found is None:
            return self._default(name)
        if found.is_ref():
            raise UnwrittenError(f"its attribute {name} is that of a function")
        if found.type not in (_TEXTS if name in _TEXT_ATTRIBUTES else _NUMBERS):  # all else would become code
            raise UnwrittenError(f"its attribute {name} is of the type {found.type.name}")
        value: Any = tuple(found.value) if isinstance(found.value, list | tuple) else found.value
        if name in _AXES:
            check_axes(value if isinstance(value, tuple) else [value])
        return np.float32(value) if isinstance(value, float) and not self.scope.is_exact() else value

    def _default(self, name: str) -> Any:
        known = self._standard.get(name)
        if known is None or not known.default_value.name:
            return None
        value = onnx.helper.get_attribute_value(known.default_value)
        value = value.decode() if isinstance(value, bytes) else value
        return np.float32(value) if isinstance(value, float) and not self.scope.is_exact() else value

    def type_of(self, dtype: Any) -> ast.expr:
        """``torch.float32`` of an element type or its number in ONNX."""
        if dtype is None or dtype not in {*ir.DataType} or ir.DataType(dtype) in _WITHOUT_TYPE:
            raise UnwrittenError("PyTorch has no such type, or the type is not known")
        return parsed(f"torch.{self.scope.type_name(ir.DataType(dtype))}")

    def converted(self, tensor: ast.expr | None, dtype: Any) -> ast.expr:
        """A tensor in another element type."""
        kind = self.type_of(dtype)
        name = ast.unparse(kind).partition(".")[2]
        return code(f"x.{METHODS[name]}()" if name in METHODS else "x.to(kind)", x=tensor, kind=kind)

    def outputs_used(self) -> int:
        """The number of outputs of the node up to the last one that is used; at least 1."""
        used = [number for number, value in enumerate(self.node.outputs) if value.uses() or value.is_graph_output()]
        return max(used, default=0) + 1


_AXES = ("axis", "axes", "perm", "batch_dims")
"""The attributes that are axes, or how many of them."""


def check_axes(axes: Iterable[Any]) -> None:
    """Refuse an axis that no tensor has: code that names those before it would fill the memory.

    Raises:
        UnwrittenError: It is out of range.
    """
    for axis in axes:
        if not -MOST_AXES <= axis < MOST_AXES:
            raise UnwrittenError(f"its axis {axis} is out of range")


_WITHOUT_TYPE = (ir.DataType.STRING, ir.DataType.UNDEFINED)


def _ends_with_none(arguments: list[ast.expr]) -> bool:
    return bool(arguments) and isinstance(arguments[-1], ast.Constant) and arguments[-1].value is None


def refuse_damaged_nodes(model: ir.Model) -> None:
    """Refuse nodes that the standard does not allow, since their attributes would become code."""
    for node in model.graph.all_nodes():
        version = node.version or model.opset_imports.get(node.domain, 1)
        if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, version, ""):
            continue
        schema, name = onnx.defs.get_schema(node.op_type, version, ""), f"{node.op_type} {node.name or ''}".strip()
        for key, attribute in node.attributes.items():
            known: Any = schema.attributes.get(key)
            if known is not None and not attribute.is_ref() and known.type.value != attribute.type.value:
                raise UsageError(
                    f"the attribute {key} of {name} is of the type {attribute.type.name}, and the operator's is "
                    f"{str(known.type).rpartition('.')[2]}: the file is damaged"
                )
        if lacking := [
            key for key, known in schema.attributes.items() if known.required and key not in node.attributes
        ]:
            raise UsageError(f"{name} lacks its attribute {lacking[0]}: the file is damaged")
        if len(node.inputs) < schema.min_input:
            raise UsageError(
                f"{name} has {plural(len(node.inputs), 'input')}, fewer than it needs: the file is damaged"
            )
