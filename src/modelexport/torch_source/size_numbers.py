"""What a file computes from sizes of tensors, as Python numbers: ``x.shape[1]``, ``x.shape[1] * 2``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.graph.nodes import nested_graphs
from modelexport.torch_source.call_layout import SMALL, CallLayout
from modelexport.torch_source.expressions import (
    ATOM,
    COMPARISON,
    LOWEST,
    NOT,
    PRODUCT,
    SUM,
    UNARY,
    Expression,
    Number,
    Numbers,
)

MOST = 64
"""Of how many numbers a constant may consist that is written as these."""


def constant_numbers(array: Any) -> Numbers | None:
    """A constant as numbers, if it has at most one axis and few elements."""
    if array is None or array.ndim > 1 or array.size > MOST or array.dtype.kind not in "iufb":
        return None
    return Numbers(tuple(Number.of(value) for value in array.reshape(-1).tolist()), array.ndim == 0)


def _binary(sign: str, binding: int, known: Callable[[Any, Any], Any]) -> Callable[[Number, Number], Number]:
    right = binding if sign in "+*" else binding + 1
    left = binding + 1 if binding == COMPARISON else binding

    def compute(a: Number, b: Number) -> Number:
        if a.literal is not None and b.literal is not None:
            return Number.of(known(a.literal, b.literal))
        if (sign, b.literal) in (("+", 0), ("-", 0), ("*", 1), ("//", 1)):
            return a
        if (sign, a.literal) in (("+", 0), ("*", 1)):
            return b
        text = f"{a.expression.within(left)} {sign} {b.expression.within(right)}"
        return Number(Expression(text, binding), sign not in ("-", "%") and a.is_positive and b.is_positive)

    return compute


_TRUTH: dict[str, Any] = {"Equal": ("==", lambda a, b: a == b), "Less": ("<", lambda a, b: a < b),
                          "Greater": (">", lambda a, b: a > b), "LessOrEqual": ("<=", lambda a, b: a <= b),
                          "GreaterOrEqual": (">=", lambda a, b: a >= b)}  # fmt: skip
_PAIRS: dict[str, Callable[[Number, Number], Number]] = {
    "Add": _binary("+", SUM, lambda a, b: a + b),
    "Sub": _binary("-", SUM, lambda a, b: a - b),
    "Mul": _binary("*", PRODUCT, lambda a, b: a * b),
    "Mod": _binary("%", PRODUCT, lambda a, b: a % b),
    **{name: _binary(sign, COMPARISON, known) for name, (sign, known) in _TRUTH.items()},
}
_QUOTIENTS = {
    True: _binary("//", PRODUCT, lambda a, b: a // b),
    False: _binary("/", PRODUCT, lambda a, b: a / b),
}


def _function(name: str) -> Callable[..., Number]:
    def compute(*numbers: Number) -> Number:
        return Number(
            Expression(f"{name}({', '.join(number.text for number in numbers)})"),
            all(number.is_positive for number in numbers),
        )

    return compute


def _negative(number: Number) -> Number:
    if number.literal is not None:
        return Number.of(-number.literal)
    return Number(Expression(f"-{number.expression.within(UNARY)}", UNARY))


_SINGLE: dict[str, Callable[[Number], Number]] = {
    "Neg": _negative,
    "Not": lambda n: Number(Expression(f"not {n.expression.within(NOT)}", NOT)),
    "Abs": _function("abs"),
    "Sqrt": _function("math.sqrt"),
    "Floor": lambda n: Number(Expression(f"float(math.floor({n.text}))"), n.is_positive),
    "Ceil": lambda n: Number(Expression(f"float(math.ceil({n.text}))"), n.is_positive),
    "Identity": lambda n: n,
}


def computed_numbers(
    operator: str, inputs: Sequence[Numbers | None], attributes: dict[str, Any], kinds: Sequence[str]
) -> Numbers | None:
    """The result of an operator on numbers; ``None`` if it has to be computed with tensors.

    Args:
        kinds: NumPy's kind (``i``, ``f``, ``b``) of each input's type, and of the output's as last.
    """
    first = inputs[0] if inputs else None
    if first is None:
        return None
    given = [each for each in inputs if each is not None]
    if operator in _SINGLE:
        return Numbers(tuple(map(_SINGLE[operator], first.items)), first.is_scalar)
    if operator == "Cast":
        return _cast(first, kinds[0], kinds[-1])
    if len(given) < len(inputs):
        return None
    if operator in _PAIRS or operator in ("Div", "Max", "Min", "Where"):
        return _elementwise(operator, given, kinds)
    items = _chosen(operator, given, attributes)
    is_scalar = operator == "Gather" and given[1].is_scalar
    return _reshaped(operator, given, attributes) if items is None else Numbers(items, is_scalar)


def _chosen(operator: str, given: Sequence[Numbers], attributes: dict[str, Any]) -> tuple[Number, ...] | None:
    """The numbers that an operator picks out of lists of them."""
    first, known = given[0], [_literals(each) for each in given[1:]]
    if operator == "Concat" and not any(each.is_scalar for each in given):
        return tuple(item for each in given for item in each.items)
    if first.is_scalar or not known or any(each is None for each in known):
        return None
    literals = [each for each in known if each is not None]
    if operator == "Gather":
        return tuple(first.items[int(place)] for place in literals[0])
    if operator == "Slice":
        step = int(literals[3][0]) if len(literals) > 3 else 1
        return first.items[slice(int(literals[0][0]), int(literals[1][0]), step)]
    return None


def _literals(numbers: Numbers | None) -> list[Any] | None:
    values = [item.literal for item in numbers.items] if numbers is not None else [None]
    return None if any(value is None for value in values) else values


def _reshaped(operator: str, given: Sequence[Numbers], attributes: dict[str, Any]) -> Numbers | None:
    """Numbers with another number of axes, or the product of all."""
    first, axes = given[0], len(given[1].items) if len(given) > 1 else 1
    if operator == "ReduceProd":
        total = Number.of(1)
        for item in first.items:
            total = _PAIRS["Mul"](total, item)
        return Numbers((total,), not attributes.get("keepdims", 1))
    if operator == "Unsqueeze" and first.is_scalar:
        return Numbers(first.items, False)
    if operator == "Squeeze" and len(first.items) == 1:
        return Numbers(first.items, True)
    return Numbers(first.items, axes == 0) if operator == "Reshape" and axes < 2 else None


def _cast(first: Numbers, before: str, after: str) -> Numbers | None:
    name = {"f": "float", "i": "int", "u": "int", "b": "bool"}.get(after)
    if name is None:
        return None
    if before == after:
        return first
    kind: Any = {"float": float, "int": int, "bool": bool}[name]
    items = [
        Number.of(kind(item.literal)) if item.literal is not None and math.isfinite(item.literal)
        else Number(Expression(f"{name}({item.text})", ATOM), item.is_positive)
        for item in first.items
    ]  # fmt: skip
    return Numbers(tuple(items), first.is_scalar)


def _elementwise(operator: str, given: Sequence[Numbers], kinds: Sequence[str]) -> Numbers | None:
    count = max(len(each.items) for each in given)
    if any(len(each.items) not in (1, count) for each in given):
        return None
    rows = [[each.items[place % len(each.items)] for each in given] for place in range(count)]
    items = [_one(operator, row, kinds) for row in rows]
    if any(item is None for item in items):
        return None
    return Numbers(tuple(item for item in items if item is not None), all(each.is_scalar for each in given))


def _one(operator: str, row: Sequence[Number], kinds: Sequence[str]) -> Number | None:
    if operator == "Where":
        return _choice(*row)
    if operator in ("Max", "Min"):
        return _function(operator.lower())(*row) if len(row) > 1 else row[0]
    if operator == "Div":
        whole = kinds[0] in "iu"
        return _QUOTIENTS[whole](*row) if not whole or all(number.is_positive for number in row) else None
    return _PAIRS[operator](*row)


def _choice(condition: Number, yes: Number, no: Number) -> Number:
    if condition.literal is not None:
        return yes if condition.literal else no
    text = f"{yes.expression.within(NOT)} if {condition.expression.within(NOT)} else {no.expression.within(NOT)}"
    return Number(Expression(text, LOWEST), yes.is_positive and no.is_positive)


def kind_of(dtype: Any) -> str:
    """NumPy's kind of an element type: ``i``, ``u``, ``f`` or ``b``."""
    if dtype is None or dtype.name in ("UNDEFINED", "STRING"):
        return "O"
    found = np.dtype(dtype.numpy()).kind
    return "f" if dtype.is_floating_point() else str(found)


_WIDTH = 4
"""Bytes of an integer that does not wrap around at numbers that sizes are."""


class FileNumbers:
    """Which values of a file are computed from sizes alone, and so are Python numbers in its code."""

    def __init__(self, layout: CallLayout) -> None:
        self.layout = layout
        self._arrays: dict[ir.Value, Any] = {}
        self.known: dict[ir.Value, Numbers] = {}
        for node in layout.graph.all_nodes():
            found = self.of_node(node, self.known.get, lambda value: "x")
            if found is not None:
                self.known[node.outputs[0]] = found

    def array(self, value: ir.Value) -> Any:
        """A small constant as an array; ``None`` for others."""
        tensor = self.layout.constants.get(value)
        if tensor is None or tensor.nbytes > 16 * SMALL or tensor.dtype == ir.DataType.STRING:
            return None
        if value not in self._arrays:
            self._arrays[value] = tensor.numpy()
        return self._arrays[value]

    def of_node(
        self, node: ir.Node, numbers: Callable[[ir.Value], Numbers | None], text: Callable[[ir.Value], str]
    ) -> Numbers | None:
        """What a node gives as numbers.

        Args:
            numbers: What is known of a value.
            text: A tensor as text.
        """
        if node.domain or not node.inputs or node.inputs[0] is None or len(node.outputs) != 1 or nested_graphs(node):
            return None
        first = node.inputs[0]
        if node.op_type == "Shape" and first.shape is not None and not isinstance(first.type, ir.SequenceType):
            start, end = (
                int(node.attributes[k].value) if k in node.attributes else d for k, d in (("start", 0), ("end", None))
            )
            axes = range(len(first.shape))[start:end]
            return Numbers(tuple(Number(Expression(f"{text(first)}.shape[{axis}]"), True) for axis in axes), False)
        if node.op_type == "Size" and first.shape is not None:
            return Numbers((Number(Expression(f"{text(first)}.numel()"), True),), True)
        given = [None if value is None else numbers(value) for value in node.inputs]
        if not any(found is not None for found in given):
            return None
        full = [
            found if found is not None or value is None else constant_numbers(self.array(value))
            for found, value in zip(given, node.inputs, strict=True)
        ]
        kinds = [kind_of(value.dtype) if value is not None else "O" for value in (*node.inputs, node.outputs[0])]
        made = node.outputs[0].dtype
        if (made is not None and kinds[-1] in "iu" and made.itemsize < _WIDTH) or (
            node.op_type == "Mod" and "fmod" in node.attributes
        ):
            return None  # Python's numbers do not wrap around, and its remainder has the sign of the divisor
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        return computed_numbers(node.op_type, full, attributes, kinds)
