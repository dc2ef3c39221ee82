"""The shape of every value of a graph: numbers, or formulas of the symbols of dynamic axes.

Shapes in the file take precedence. Missing ones are inferred by ONNX Runtime's symbolic shape inference, which also
follows the sizes that a graph computes. Sizes that depend on the data (``NonZero``) stay unknown.
"""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import operator
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import onnx
import onnx_ir as ir

from modelexport.core.limits import EXPANDED_TERMS, FORMULA_CHARACTERS, FORMULA_TERMS, SIZE_DIGITS
from modelexport.core.text import nearest
from modelexport.errors import UsageError
from modelexport.files.protobuf_reading import serialized_graphs
from modelexport.format.dtypes import bit_width
from modelexport.graph.copies import copy_of
from modelexport.graph.hidden_weights import bind_tensors, detach_tensors
from modelexport.graph.nodes import all_nodes
from modelexport.graph.size_symbols import rename_sizes

Size = Any
"""A number or a sympy expression."""
_LARGEST = 10**SIZE_DIGITS
_MOST_ARGUMENTS = 8
"""Of a function in a formula: sympy compares each argument of a maximum with every other."""
_LARGE = 1024
"""The number of elements from which an initializer is not taken for a size."""


@dataclass(frozen=True)
class Shapes:
    """The shapes and element types of a graph's values by name."""

    sizes: Mapping[str, tuple[Size, ...]]
    types: Mapping[str, ir.DataType]
    symbols: tuple[str, ...]
    """Names of dynamic axes of the inputs for which no size was given."""
    computed: tuple[str, ...] = ()
    """Names of sizes that depend on the data."""

    def of(self, value: ir.Value | None) -> tuple[Size, ...] | None:
        """The shape of a value; ``None`` if it is not known."""
        return None if value is None else self.sizes.get(value.name or "")

    def completed(self, seen: Mapping[str, tuple[int, ...]]) -> Shapes:
        """The shapes with those of a run, and without the formulas of sizes that depend on the data."""
        if not seen:
            return self
        numbers = {n: shape for n, shape in self.sizes.items() if all(isinstance(size, int) for size in shape)}
        return replace(self, sizes={**numbers, **seen}, computed=())

    def bytes(self, value: ir.Value | None) -> Size:
        """The size of a value in bytes; ``None`` if its shape or its element type is not known."""
        shape = self.of(value)
        dtype = self.types.get(value.name or "") if value is not None else None
        if shape is None or not (width := bit_width(dtype)):
            return None
        bits = elements(shape) * width
        return -(-bits // 8) if isinstance(bits, int) else bits / 8


def elements(shape: Iterable[Size]) -> Size:
    """The number of elements of a shape."""
    count: Size = 1
    for size in shape:
        count = count * size
    return count


def expanded(formula: Size) -> Size:
    """A formula multiplied out, unless that would have too many terms."""
    if not hasattr(formula, "free_symbols"):
        return formula
    return formula.expand() if _expanded_terms(formula) <= EXPANDED_TERMS else formula


def _expanded_terms(formula: Any) -> int:
    """How many terms a formula would have if it were multiplied out, at most; counted no further than needed."""
    inner = [_expanded_terms(part) for part in formula.args]
    if formula.is_Add:
        count = sum(inner)
    elif formula.is_Mul:
        count = prod(inner)
    elif formula.is_Pow and formula.exp.is_number and inner[0] > 1:
        count = inner[0] ** min(int(abs(formula.exp)), SIZE_DIGITS)
    else:
        count = max(inner, default=1)
    return min(count, EXPANDED_TERMS + 1)


def find_shapes(model: ir.Model, sizes: Mapping[str, int] | None = None) -> Shapes:
    """The shapes of all values, with ``sizes`` for the symbols of dynamic axes.

    Args:
        sizes: Symbol to size. Symbols without a size stay symbols.

    Raises:
        UsageError: The model has no dynamic axis of that name; the message lists those that it has.
    """
    known_sizes = dict(sizes or {})
    symbols = {
        name: None
        for value in model.graph.inputs
        for size in value.shape or ()
        if isinstance(size, ir.SymbolicDim) and size.value is not None
        for name in symbols_in(size.value)
    }
    values = [*model.graph.inputs, *(value for node in all_nodes(model) for value in node.outputs)]
    initial = [value for graph in model.graphs() for value in graph.initializers.values()]
    known: dict[str, tuple[Size, ...]] = {}
    types = {value.name or "": value.dtype for value in [*values, *initial] if value.dtype is not None and value.name}
    texts: dict[str, Size] = {}
    for value in [*values, *initial]:
        shape = value.const_value.shape if value.const_value is not None else value.shape
        if shape is not None and all(isinstance(size, int) or size.value is not None for size in shape):
            dims = tuple(
                size if isinstance(size, int) else _evaluated(str(size.value), known_sizes, texts) for size in shape
            )
            if _is_possible(dims):
                known[value.name or ""] = dims
    if any(value.name and value.name not in known for value in values):
        for name, dtype, dims in _inferred(model, known_sizes):
            sizes_found = tuple(_evaluated(d, known_sizes, texts) if isinstance(d, str) else d for d in dims)
            if _is_possible(sizes_found):
                known.setdefault(name, sizes_found)
            types.setdefault(name, dtype)
    left = {str(symbol) for size in texts.values() for symbol in getattr(size, "free_symbols", ())}
    used = [name for text in texts for name in symbols_in(text)]
    for name in known_sizes:
        if name not in symbols and name not in used:
            has = f"; it has {', '.join(symbols)}" if symbols else ": all of its sizes are fixed"
            raise UsageError(f"the model has no dynamic axis '{name}'{nearest(name, symbols)}{has}")
    return Shapes(
        known, types, tuple(name for name in symbols if name not in known_sizes), tuple(sorted(left - {*symbols}))
    )


def _is_possible(shape: Sequence[Size]) -> bool:
    """Whether a value may have a shape: figures of one with more elements would be too large for numbers."""
    count = elements(shape)
    return not isinstance(count, int) or 0 <= count < _LARGEST


def _evaluated(text: str, known_sizes: Mapping[str, int], known: dict[str, Size]) -> Size:
    """The value of a size that is a formula of symbols, with the given sizes inserted."""
    if text not in known:
        import sympy

        try:
            formula = _formula(_parsed(text), known_sizes)
            if formula.is_number and not 0 <= formula < _LARGEST:
                raise ValueError("a size that no value has")
        except (ArithmeticError, SyntaxError, TypeError, ValueError, RecursionError):  # a name that is not a formula
            formula = known_sizes.get(text, sympy.Symbol(text, positive=True))
        known[text] = int(formula) if not isinstance(formula, int) and formula.is_number else formula
    return known[text]


def symbols_in(text: str) -> list[str]:
    """The symbols in a formula."""
    try:
        return [node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)]
    except (SyntaxError, ValueError):
        return [text]


def _parsed(text: str) -> ast.expr:
    """The expression that a text is.

    Raises:
        SyntaxError, ValueError: It is none, or one that is too long, or too deep for Python's parser.
    """
    if len(text) > FORMULA_CHARACTERS:
        raise ValueError("too long for a formula")
    try:
        parsed = ast.parse(text, mode="eval").body
        if _terms(parsed) > FORMULA_TERMS:
            raise ValueError("too many terms for a formula")
        if any(isinstance(node, ast.BinOp) and _divides_by_a_name(node) for node in ast.walk(parsed)):
            raise ValueError("a name with slashes, as TorchScript's are")
    except (MemoryError, RecursionError) as error:  # what the parser says of too many brackets
        raise ValueError("too deep for a formula") from error
    return parsed


def _divides_by_a_name(node: ast.BinOp) -> bool:
    return isinstance(node.op, ast.Div) and isinstance(node.right, ast.Name)


def _terms(tree: ast.expr) -> int:
    """How many terms an expression would have if it were multiplied out, at most; counted no further than needed."""
    match tree:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            count = _terms(left) + _terms(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() | float() as exponent)):
            count = _terms(left)
            count = count if count == 1 else count ** min(int(abs(exponent)), SIZE_DIGITS)
        case ast.BinOp(left=left, right=right):
            count = _terms(left) * _terms(right)
        case ast.UnaryOp(operand=operand):
            count = _terms(operand)
        case ast.Call(args=args):
            count = max(map(_terms, args), default=1)
        case _:
            count = 1
    return min(count, FORMULA_TERMS + 1)


def _power(base: Any, exponent: Any) -> Any:
    """A power, unless it would be a number that fills the memory."""
    if exponent.is_number and not -SIZE_DIGITS <= exponent <= SIZE_DIGITS:
        raise ValueError("a power that is no size")
    if base.is_number and abs(base) >= _LARGEST:
        raise ValueError("a number that is no size")
    return base**exponent


def _formula(tree: ast.expr, sizes: Mapping[str, int]) -> Any:
    """Evaluate a parsed expression if it is arithmetic; text of a file is never executed."""
    import sympy

    match tree:
        case ast.Name(id=name):
            return sympy.Integer(sizes[name]) if name in sizes else sympy.Symbol(name, positive=True)
        case ast.Constant(value=int() | float() as number) if abs(number) < _LARGEST:
            return sympy.Integer(number) if isinstance(number, int) else sympy.Rational(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_formula(operand, sizes)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_formula(left, sizes), _formula(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS and len(args) <= _MOST_ARGUMENTS:
            return getattr(sympy, _FUNCTIONS[name])(*(_formula(arg, sizes) for arg in args))
    raise ValueError(f"{ast.unparse(tree)} is not arithmetic")


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS = {
    "floor": "floor",
    "ceiling": "ceiling",
    "Max": "Max",
    "Min": "Min",
    "max": "Max",
    "min": "Min",
    "Mod": "Mod",
}


def _inferred(model: ir.Model, sizes: Mapping[str, int]) -> list[tuple[str, ir.DataType, tuple[int | str, ...]]]:
    """What shape inference finds: name, element type and shape of values, with the given sizes.

    ONNX Runtime's inference follows formulas of symbols; onnx's goes on from there into branches and bodies.
    """
    small = _small(model, sizes)
    whole = onnx.ModelProto()
    whole.CopyFrom(small)
    if (inferred := _largest_inferred(small)) is not None:
        whole.graph.value_info.extend([*inferred.graph.value_info, *inferred.graph.output])
    with contextlib.suppress(onnx.shape_inference.InferenceError):  # of a file that contradicts itself
        whole = onnx.shape_inference.infer_shapes(whole, data_prop=True)
    shapes: list[tuple[str, ir.DataType, tuple[int | str, ...]]] = []
    for info in (info for graph in serialized_graphs(whole) for info in (*graph.value_info, *graph.output)):
        tensor = info.type.tensor_type
        if tensor.HasField("shape"):
            dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]
            if all(dim != "" for dim in dims):
                shapes.append((info.name, ir.DataType(tensor.elem_type), tuple(dims)))
    return shapes


def _largest_inferred(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """What the tool makes of a graph; if there is a node that it gives up on, of as many nodes as it can take."""
    if (inferred := _infer(proto)) is not None:
        return inferred
    nodes = list(proto.graph.node)
    most, too_many = 0, len(nodes)
    while too_many - most > 1:
        count = (most + too_many) // 2
        del proto.graph.node[:], proto.graph.output[:]
        proto.graph.node.extend(nodes[:count])
        for name in (name for node in nodes[:count] for name in node.output if name):
            proto.graph.output.add().name = name  # it leaves out what no output needs
        if (part := _infer(proto)) is None:
            too_many = count
        else:
            most, inferred = count, part
    return inferred


def _infer(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """One run of the tool, which prints, and gives up on a graph by raising whatever happened: then nothing.

    It may leave a file in the working folder before it does.
    """
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    logger = logging.getLogger("onnxruntime.tools.symbolic_shape_infer")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
        ):
            inferred: onnx.ModelProto = SymbolicShapeInference.infer_shapes(proto, auto_merge=True)
    except Exception:  # the tool gives up by whatever happened
        return None
    finally:
        logger.setLevel(level)
    return inferred


def _small(model: ir.Model, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """The model with its large weights, which no shape depends on, as inputs, and all others in memory.

    The tool reads the elements of every initializer that it comes across, and only from regular files.
    """
    copy = copy_of(model)
    rename_sizes(copy, {name: str(size) for name, size in sizes.items()})
    held: dict[ir.Value, ir.TensorProtocol] = {}
    for graph in copy.graphs():
        for value in list(graph.initializers.values()):
            tensor = value.const_value
            if tensor is None:
                continue
            if tensor.size <= _LARGE:
                held[value] = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
            elif graph is copy.graph:
                del graph.initializers[value.name or ""]
                detach_tensors([value])
                value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
                if value not in graph.inputs:
                    graph.inputs.append(value)
    bind_tensors(held)
    proto: onnx.ModelProto = ir.to_proto(copy)
    del proto.graph.value_info[:]
    return proto
