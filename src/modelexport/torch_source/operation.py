"""One node of a file as the table of operators sees it: texts of its operands, and its attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx
import onnx_ir as ir

from modelexport.core.text import plural
from modelexport.errors import UsageError
from modelexport.torch_source.expressions import (
    METHODS,
    Expression,
    Number,
    Numbers,
    listed,
    literal_or_none,
    type_name,
)
from modelexport.torch_source.size_numbers import constant_numbers, kind_of

_TEXTS = (ir.AttributeType.STRING, ir.AttributeType.STRINGS)
_NUMBERS = tuple(getattr(ir.AttributeType, name) for name in ("INT", "INTS", "FLOAT", "FLOATS", "TENSOR"))
_TEXT_ATTRIBUTES = frozenset(
    ("activation", "activations", "approximate", "auto_pad", "coordinate_transformation_mode", "direction", "equation",
     "keep_aspect_ratio_policy", "mode", "nearest_mode", "padding_mode", "reduction")
)  # fmt: skip
"""The attributes that are texts; what writes them quotes or compares them."""


class UnwrittenError(Exception):
    """An operator, or this use of it, has no counterpart in the table."""


class Operands(Protocol):
    """What a scope knows of the values that nodes of it take."""

    wide: str | None
    """The floating-point type that is float64 instead."""
    helpers: set[Callable[..., Any]]
    """The functions that the texts call."""
    device: str
    """The argument that places a new tensor on the device of the model's inputs; may be empty."""

    def tensor(self, value: ir.Value) -> Expression: ...
    def numbers(self, value: ir.Value) -> Numbers | None: ...
    def constant(self, value: ir.Value) -> Any: ...


class Operation:
    """A node with the texts of its operands.

    Args:
        version: The opset version of its domain.
    """

    def __init__(self, node: ir.Node, version: int, scope: Operands) -> None:
        self.node, self.version, self.scope = node, version, scope

    def value(self, index: int) -> ir.Value | None:
        """The value at an input; ``None`` if it is left out."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def has(self, index: int) -> bool:
        """Whether an input is given."""
        return self.value(index) is not None

    def x(self, index: int = 0, binding: int = 0) -> str:
        """An operand as a tensor, ``None`` if it is left out."""
        value = self.value(index)
        return "None" if value is None else self.scope.tensor(value).within(binding)

    def scalar(self, index: int, binding: int = 0) -> str:
        """An operand, as a Python number if it is one, and broadcasting with the other does not need its axes."""
        value = self.value(index)
        number = None if value is None else self.number(index)
        others = [other for other in self.node.inputs if other is not None and other is not value]
        if value is None or number is None or not all(self._reaches(other, value) for other in others):
            return self.x(index, binding)
        return number.expression.within(binding)

    def _reaches(self, other: ir.Value, value: ir.Value) -> bool:
        rank = len(value.shape) if value.shape is not None else None
        return rank == 0 or (rank is not None and other.shape is not None and len(other.shape) >= rank)

    def number(self, index: int) -> Number | None:
        """An operand that is one Python number."""
        value = self.value(index)
        if value is None:
            return None
        array = self.scope.constant(value)
        if array is not None and array.size == 1 and array.dtype.kind in "iufb":
            return Number.of(array.reshape(-1)[0].item())
        numbers = self.scope.numbers(value)
        return numbers.items[0] if numbers is not None and len(numbers.items) == 1 else None

    def array(self, index: int) -> Any:
        """An operand that is constant, as an array; ``None`` if it is not."""
        value = self.value(index)
        return None if value is None else self.scope.constant(value)

    def numbers(self, index: int) -> list[Number] | None:
        """The elements of an operand, if they are Python numbers."""
        value = self.value(index)
        if value is None:
            return None
        found = self.scope.numbers(value) or constant_numbers(self.scope.constant(value))
        return None if found is None else list(found.items)

    def integers(self, index: int) -> list[int] | None:
        """The elements of an operand that is a constant of whole numbers."""
        array = self.array(index)
        return None if array is None else [int(each) for each in array.reshape(-1)]

    def sizes(self, index: int) -> str:
        """An operand as a tuple of Python numbers; a tensor is read when the model runs."""
        numbers = self.numbers(index)
        return f"{self.x(index, 12)}.tolist()" if numbers is None else listed([number.text for number in numbers])

    def size(self, index: int) -> str:
        """An operand as one Python number."""
        number = self.number(index)
        return f"{self.x(index, 12)}.item()" if number is None else number.text

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute, or its default."""
        found = self.node.attributes.get(name)
        if found is None:
            return default
        if found.is_ref():
            raise UnwrittenError(f"its attribute {name} is that of a function")
        if found.type not in (_TEXTS if name in _TEXT_ATTRIBUTES else _NUMBERS):  # all else would become code
            raise UnwrittenError(f"its attribute {name} is of the type {found.type.name}")
        value: Any = found.value
        return list(value) if isinstance(value, tuple) else value

    def attributes(self) -> dict[str, Any]:
        """All attributes that the node has."""
        return {name: self.attribute(name) for name in self.node.attributes}

    def default(self, name: str) -> Any:
        """The default of an attribute by the operator's schema."""
        if not onnx.defs.has(self.node.op_type, self.version, self.node.domain):
            return None
        schema = onnx.defs.get_schema(self.node.op_type, self.version, self.node.domain)
        known = schema.attributes.get(name)
        return (
            None
            if known is None or not known.default_value.name
            else onnx.helper.get_attribute_value(known.default_value)
        )

    def axes(self, index: int, *, attribute: str = "axes") -> list[int] | None:
        """Axes, which are an attribute in older opsets and an input in newer ones; ``None`` if they are not given."""
        if attribute in self.node.attributes:
            return list(self.attribute(attribute))
        if not self.has(index):
            return None
        found = self.integers(index)
        if found is None:
            raise UnwrittenError("its axes are computed")
        return found

    def rank(self, index: int = 0) -> int:
        """How many axes an operand has."""
        value = self.value(index)
        if value is None or value.shape is None:
            raise UnwrittenError(
                f"the number of axes of {value.name if value is not None else 'an input'} is not known"
            )
        return len(value.shape)

    def dtype(self, index: int = 0) -> ir.DataType | None:
        """The element type of an operand."""
        value = self.value(index)
        return None if value is None else value.dtype

    def kind(self, index: int = 0) -> str:
        """NumPy's kind of an operand's type."""
        return kind_of(self.dtype(index))

    def type_of(self, dtype: Any) -> str:
        """``torch.float32`` of an element type or its number in ONNX."""
        return f"torch.{type_name(ir.DataType(dtype), self.scope.wide)}"

    def converted(self, text: str, dtype: Any) -> Expression:
        """A tensor in another element type. The text binds as an attribute's does."""
        name = type_name(ir.DataType(dtype), self.scope.wide)
        return Expression(f"{text}.{METHODS[name]}()" if name in METHODS else f"{text}.to(torch.{name})")

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Expression:
        """A call of a function of ``functions_*.py``; arguments that are not :class:`Text` are written as literals."""
        self.scope.helpers.add(function)
        texts = [argument if isinstance(argument, Text) else literal_or_none(argument) for argument in arguments]
        texts += [f"{name}={literal_or_none(argument)}" for name, argument in named.items()]
        return Expression(f"{function.__name__}({', '.join(texts)})")

    def outputs_used(self) -> int:
        """Up to which output the node's are used."""
        used = [number for number, value in enumerate(self.node.outputs) if value.uses() or value.is_graph_output()]
        return max(used, default=0) + 1


def check_nodes(model: ir.Model) -> None:
    """Refuse nodes that the standard does not allow: what they have would become code.

    Raises:
        UsageError: An attribute has another type than the operator's, or inputs are missing.
    """
    for node in model.graph.all_nodes():
        version = node.version or model.opset_imports.get(node.domain, 1)
        if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, version, ""):
            continue
        schema, name = onnx.defs.get_schema(node.op_type, version, ""), f"{node.op_type} {node.name or ''}".strip()
        for key, attribute in node.attributes.items():
            known = schema.attributes.get(key)
            if known is not None and not attribute.is_ref() and known.type.value != attribute.type.value:  # type: ignore[attr-defined]
                raise UsageError(
                    f"the attribute {key} of {name} is of the type {attribute.type.name}, and the operator's is "
                    f"{str(known.type).rpartition('.')[2]}: the file is damaged"
                )
        if len(node.inputs) < schema.min_input:
            raise UsageError(
                f"{name} has {plural(len(node.inputs), 'input')}, fewer than it needs: the file is damaged"
            )


@dataclass(frozen=True)
class Several:
    """Text of Python that computes a tuple of tensors, more of them perhaps than the node has outputs."""

    text: str
    count: int


E = Expression
Written = Expression | list[Expression] | Several
"""The text of one output, of each, or of all in one."""
Writer = Callable[[Operation], Written]


class Text(str):
    """An argument that is an expression and not a text of its own."""

    __slots__ = ()


def listed_operands(o: Operation) -> str:
    """All operands as arguments."""
    return ", ".join(o.x(index) for index in range(len(o.node.inputs)))


def integers_of(shape: ir.Shape) -> list[int] | None:
    """A shape without dynamic axes."""
    sizes = list(shape)
    return [size for size in sizes if isinstance(size, int)] if all(isinstance(size, int) for size in sizes) else None


def called(
    function: Callable[..., Any],
    *,
    numbers: Sequence[int] = (),
    scalars: Sequence[int] = (),
    count: int = 1,
    inputs: Sequence[Any] | None = None,
    ignored: Sequence[str] = (),
) -> Callable[[Operation], Expression | Several]:
    """What writes an operator as a call of the function that has its inputs and attributes.

    Args:
        numbers: The inputs that the function takes as tuples of Python numbers.
        scalars: Those that it takes as one number.
        count: How many tensors the function returns.
        inputs: Other arguments than the operator's inputs.
        ignored: Attributes that do not change the result, or that the inputs have already.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def write(o: Operation) -> Expression | Several:
        def argument(index: int) -> Text:
            text = o.sizes if index in numbers else o.size if index in scalars else o.x
            return Text(text(index) if o.has(index) else "None")

        arguments: list[Any] = list(inputs) if inputs is not None else [*map(argument, range(len(o.node.inputs)))]
        while arguments and arguments[-1] == "None":
            arguments.pop()
        named = {}
        for name, value in o.attributes().items():
            if name in ignored:
                continue
            if name in parameters or (takes_all and name != "storage_order"):
                named[name] = value
            elif name not in ("stash_type", "kernel_shape") and value != o.default(name):
                raise UnwrittenError(f"its attribute {name} is {value}")
        named = {
            name: value for name, value in named.items() if name not in parameters or parameters[name].default != value
        }
        text = o.call(function, *arguments, **named)
        return text if count == 1 else Several(text.text, count)

    return write
