"""What a file computes from sizes of tensors, as Python numbers: ``x.shape[1]``, ``x.shape[1] * 2``.

Such a value is an array of objects: each element is a plain number, or a :class:`Number` that has its expression.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.limits import FORMULA_TERMS
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.operator_kinds import MOVES_ELEMENTS, READ_SIZES_ONLY
from modelexport.tools.to_torch.expressions import Number, code, names_of
from modelexport.traces.node_computation import NodeComputation, NodeError

Numbers = np.ndarray[Any, np.dtype[np.object_]]
MOST = 64
"""The most elements of a value that is written as Python numbers."""
_INTEGERS = 2**63
"""The size at which the integers of a tensor overflow; Python's do not."""


def constant_numbers(array: Any) -> Numbers | None:
    """A constant as numbers, if it has at most one axis and few elements."""
    if array is None or array.ndim > 1 or array.size > MOST or array.dtype.kind not in "iufb":
        return None
    return np.array(array.tolist(), dtype=object)


def one_number(number: Any) -> Numbers:
    """A number as the value without axes that it is."""
    return np.array(number, dtype=object)


_ELEMENTWISE: dict[str, tuple[str, Callable[..., Any]]] = {
    "Add": ("a + b", operator.add), "Sub": ("a - b", operator.sub), "Mul": ("a * b", operator.mul),
    "Mod": ("a % b", operator.mod), "Equal": ("a == b", operator.eq), "Less": ("a < b", operator.lt),
    "LessOrEqual": ("a <= b", operator.le), "Greater": ("a > b", operator.gt),
    "GreaterOrEqual": ("a >= b", operator.ge),
    "Neg": ("-a", operator.neg), "Not": ("not a", operator.not_), "Abs": ("abs(a)", abs), "Max": ("max(a, b)", max),
    "Min": ("min(a, b)", min), "Sqrt": ("math.sqrt(a)", math.sqrt),
    "Identity": ("a", lambda a: a), "Rounded": ("a", lambda a: a),
    "Floor": ("torch.sym_float(math.floor(a))", lambda a: float(math.floor(a))),
    "Ceil": ("torch.sym_float(math.ceil(a))", lambda a: float(math.ceil(a))),
    "FloorDiv": ("a // b", operator.floordiv), "TrueDiv": ("a / b", operator.truediv), "Int": ("torch.sym_int(a)", int),
    "Truncated": ("torch.sym_int(a / b)", lambda a, b: int(a / b)),
    "Float": ("torch.sym_float(a)", float), "Bool": ("bool(a)", bool),
    "Where": ("b if a else c", lambda a, b, c: b if a else c),
}  # fmt: skip
"""Operators on numbers: as text, and computed. Cast and Div are each several. An export makes what Python's ``float``
and ``int`` take of a dynamic size a constant."""
_UNCHANGED = {"Add": 0, "Sub": 0, "Mul": 1, "FloorDiv": 1}
"""Operands with which the other is the result: second ones, and first ones of ``Add`` and ``Mul``."""
_CASTS = {"i": "Int", "u": "Int", "f": "Float", "b": "Bool"}


def _computed(name: str, *numbers: Any) -> Any:
    template, function = _ELEMENTWISE[name]
    if name == "Where" and (not isinstance(numbers[0], Number) or numbers[1] == numbers[2]):
        return function(*numbers)
    constants = [number for number in numbers if not isinstance(number, Number)]
    if len(constants) == len(numbers):
        result = function(*numbers)
        if isinstance(result, int) and not -_INTEGERS <= result < _INTEGERS:
            raise OverflowError
        return result
    if constants == [_UNCHANGED.get(name)] and (name in ("Add", "Mul") or not isinstance(numbers[1], Number)):
        return next(number for number in numbers if isinstance(number, Number))
    if name == "Equal" and any(map(_is_positive, numbers)) and min(constants, default=0) < 0:
        return False
    terms = 1 + sum(number.terms if isinstance(number, Number) else 1 for number in numbers)
    if terms > FORMULA_TERMS:
        raise OverflowError
    expression = code(template, **dict(zip("abc", numbers, strict=False)))
    deciding = numbers[1:] if name == "Mod" else numbers  # a remainder has the sign of the divisor
    return Number(expression, name not in ("Sub", "Neg") and all(map(_is_positive, deciding)), terms)


def _is_positive(number: Any) -> bool:
    return number.is_positive if isinstance(number, Number) else number >= 0


def _elementwise(name: str, arrays: Sequence[Numbers], computed: Callable[..., Any]) -> Numbers:
    count = 2 if name in ("Max", "Min") else len(arrays)
    compute = np.frompyfunc(lambda *numbers: computed(name, *numbers), count, 1)
    result = reduce(compute, arrays) if name in ("Max", "Min") else compute(*arrays)
    return np.asarray(result, dtype=object)


_SINGLE = "torch.tensor({}, dtype=torch.float32)"
_ROUNDED = {
    **{name: f"{_SINGLE.format(_ELEMENTWISE[name][0])}.item()" for name in ("Add", "Sub", "Mul", "Rounded")},
    "TrueDiv": f"({_SINGLE.format('a')} / b).item()", "Sqrt": f"{_SINGLE.format('a')}.sqrt().item()",
}  # fmt: skip
"""Operators whose result float32 rounds. Python raises where a number is divided by zero, or negative under a root."""


def _in_float32(name: str, *numbers: Any) -> Any:
    """What an operator of the file computes in float32: Python's numbers have more digits, which Ceil and Floor see."""
    result = _computed(name, *numbers)
    if not isinstance(result, Number):
        return float(np.float32(result))
    factors = {"Mul": numbers, "TrueDiv": numbers[1:]}.get(name, ())
    exact = any(not isinstance(each, Number) and math.frexp(each)[0] == 0.5 for each in factors)  # a power of two
    if name not in _ROUNDED or exact or any(result is each for each in numbers):
        return result
    expression = code(_ROUNDED[name], **dict(zip("ab", numbers, strict=False)))
    return Number(expression, result.is_positive, result.terms)


_MOVES = MOVES_ELEMENTS | {"Concat", "ConstantOfShape", "Gather", "Slice"}
"""Operators that move elements, or repeat one, and give numbers of numbers. No other does: not ``Expand`` and ``Tile``,
which may repeat all elements often, nor ``Split``, ``GatherElements`` and others that select elements."""


def size_of(value: ir.Value, axis: int) -> Any:
    """A size as a number: of a dynamic axis with a name it is the name in angle brackets, which no code has."""
    size = value.shape[axis] if value.shape is not None else None
    if isinstance(size, int):
        return size
    name = size.value if size is not None else None
    return Number(ast.Name(f"<{name or '?'}>", ast.Load()), True)


def sizes_of(value: ir.Value) -> list[str]:
    """The sizes of a value as text; a dynamic one by its name."""
    return [str(size_of(value, axis)) for axis in range(len(value.shape or ()))]


def _sizes(node: ir.Node, value: ir.Value, size: Callable[[ir.Value, int], Any]) -> Numbers | None:
    """The sizes of a tensor, or how many elements it has."""
    if value.shape is None or isinstance(value.type, ir.SequenceType):
        return None
    if node.op_type == "Size":
        return one_number(reduce(partial(_computed, "Mul"), (size(value, n) for n in range(len(value.shape))), 1))
    start, end = (node.attributes[name].value if name in node.attributes else None for name in ("start", "end"))
    return np.array([size(value, axis) for axis in range(len(value.shape))[slice(start, end)]], dtype=object)


def numpy_kind(dtype: ir.DataType | None) -> str:
    """NumPy's kind of an element type: ``i``, ``u``, ``f`` or ``b``; ``O`` if it is not known."""
    if dtype is None or dtype.name in ("UNDEFINED", "STRING"):
        return "O"
    return "f" if dtype.is_floating_point() else str(np.dtype(dtype.numpy()).kind)


_WIDTH = 4
"""Bytes of a number that neither wraps around nor is rounded where it is a size."""


class FileNumbers:
    """Which values of a graph are computed from sizes alone, and so are Python numbers in its code.

    Args:
        array: A small constant as an array.
    """

    def __init__(self, graph: ir.Graph, array: Callable[[ir.Value], Any]) -> None:
        self.array = array
        self._nodes = NodeComputation(graph.opset_imports, None, {})
        self.known: dict[ir.Value, Numbers] = {}
        for node in graph.all_nodes():
            found = self.of_node(node, self.known.get, size_of)
            if found is not None:
                self.known[node.outputs[0]] = found

    def number(self, value: ir.Value | None) -> Any:
        """A value that is one number, or ``None``."""
        array = None if value is None else self.known.get(value, self.array(value))
        return array.item() if array is not None and array.size == 1 else None

    def names(self, value: ir.Value) -> set[str]:
        """The names of sizes that a value is computed from."""
        codes = [number.code for number in self.known[value].reshape(-1) if isinstance(number, Number)]
        return {name for each in codes for name in names_of(each) if name.startswith("<")}

    def of_node(
        self, node: ir.Node, numbers: Callable[[ir.Value], Numbers | None], size: Callable[[ir.Value, int], Any]
    ) -> Numbers | None:
        """What a node gives as numbers; ``None`` if it has to be computed with tensors.

        Args:
            numbers: What is known of a value.
            size: A size of a tensor.
        """
        if node.domain or not node.inputs or node.inputs[0] is None or len(node.outputs) != 1 or nested_graphs(node):
            return None
        known, dtype = [None if value is None else numbers(value) for value in node.inputs], node.outputs[0].dtype
        is_narrow = dtype is not None and numpy_kind(dtype) in "iuf" and dtype.itemsize < _WIDTH
        reads_sizes = node.op_type in READ_SIZES_ONLY
        if all(each is None for each in known) and node.op_type != "ConstantOfShape" and not reads_sizes:
            return None
        if is_narrow or node.attributes.get_int("fmod", 0) == 1:
            return None  # Python's numbers do not wrap around or lose digits; its remainder has the sign of the divisor
        given = [
            each if each is not None or value is None else constant_numbers(self.array(value))
            for each, value in zip(known, node.inputs, strict=True)
        ]
        arrays = [each for each in given if each is not None]
        try:
            if reads_sizes:
                return _sizes(node, node.inputs[0], size)
            result = self._of_arrays(node, arrays) if len(arrays) == len(given) else None
        except (ArithmeticError, LookupError, TypeError, ValueError, NodeError):  # also of numbers that are damaged
            result = None
        return result if result is not None and result.ndim < 3 and result.size <= MOST else None

    def _of_arrays(self, node: ir.Node, arrays: Sequence[Numbers]) -> Numbers | None:
        name, types = node.op_type, [value.dtype for value in (*node.inputs, *node.outputs) if value is not None]
        kinds = [*map(numpy_kind, types)]
        if name == "Cast":
            if kinds[-1] not in _CASTS:
                return None
            is_rounded = types == [ir.DataType.DOUBLE, ir.DataType.FLOAT]
            name = "Rounded" if is_rounded else "Identity" if kinds[0] == kinds[-1] else _CASTS[kinds[-1]]
        elif name == "Div":
            is_floor = all(_is_positive(number) for each in arrays for number in each.reshape(-1))
            name = "TrueDiv" if kinds[0] not in "iu" else "FloorDiv" if is_floor else "Truncated"
        elif name == "ReduceProd" and arrays[0].ndim == 1 and not node.attributes.get_int("noop_with_empty_axes", 0):
            total = reduce(partial(_computed, "Mul"), arrays[0].tolist(), 1)
            return np.array([total] if node.attributes.get_int("keepdims", 1) else total, dtype=object)
        if name not in _ELEMENTWISE:
            return self._moved(node, arrays) if name in _MOVES else None
        return _elementwise(name, arrays, _in_float32 if types[-1] == ir.DataType.FLOAT else _computed)

    def _moved(self, node: ir.Node, arrays: Sequence[Numbers]) -> Numbers | None:
        """Move numbers as a node moves elements: the node is computed with their positions instead of them."""
        count = {"Concat": len(arrays), "ConstantOfShape": 0}.get(node.op_type, 1)
        elements, known = ([n for each in part for n in each.reshape(-1)] for part in (arrays[:count], arrays[count:]))
        if any(isinstance(number, Number) for number in known) or (not count and math.prod(known) > MOST):
            return None
        places = np.split(np.arange(len(elements)), np.cumsum([each.size for each in arrays[:count]]))
        given = [at.reshape(each.shape) for at, each in zip(places, arrays[:count], strict=False)]
        (moved,) = self._nodes.compute(node, [*given, *(each.astype(np.int64) for each in arrays[count:])])
        result: Any = np.array(moved, dtype=object)
        result.flat = [elements[place] for place in moved.flat] if count else moved.tolist()
        return np.asarray(result)
