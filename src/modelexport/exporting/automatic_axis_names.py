"""Names for dynamic axes that were given none: words of docstrings and of the ONNX standard, or input and axis."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from modelexport.capture.exported_graph import Exported
from modelexport.core.calls import Port
from modelexport.exporting.requested_names import with_symbols
from modelexport.graph.nodes import all_nodes
from modelexport.graph.operator_kinds import RECURRENT
from modelexport.graph.size_conditions import SizeCondition
from modelexport.graph.size_symbols import SYMBOL


@dataclass(frozen=True)
class _Axis:
    symbol: str
    argument: str
    """The name that the model's ``forward`` has for the tensor; for an output, that of the graph."""
    value: str
    """The name of the graph's input or output."""
    number: int


def captured_symbols(exported: Exported) -> frozenset[str]:
    """The names that a capture gives to the sizes of inputs and outputs."""
    return frozenset(axis.symbol for axis in (*_input_axes(exported), *_output_axes(exported)))


def name_unnamed_axes(
    exported: Exported,
    unnamed: Collection[str],
    words: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
) -> Exported:
    """Name the sizes that still have the names of the capture; its graph is changed in place.

    Sizes for which docstrings have the same word get one name if they are equal in the example and no output has both.

    Args:
        unnamed: The symbols to rename.
        words: Arguments to a word for each of their axes, empty if there is none.
        shapes: Arguments to their shapes in the example.
    """
    inputs = [axis for axis in _input_axes(exported) if len(shapes.get(axis.argument, ())) > axis.number]
    outputs = [axis for axis in _output_axes(exported) if axis.symbol in unnamed]
    together = [{axis.symbol for axis in outputs if axis.value == value} for value in {axis.value for axis in outputs}]
    names = {axis.symbol: axis.symbol for axis in inputs if axis.symbol not in unnamed}
    of_operators = _words_of_operators(exported.model)
    documented: dict[tuple[str, int], str] = {}
    symbols: dict[tuple[str, int], str] = {}
    for axis in sorted(inputs, key=lambda axis: axis.symbol in unnamed):
        word, size = words.get(axis.argument, {axis.number: ""})[axis.number], shapes[axis.argument][axis.number]
        first = documented.setdefault((word, size), axis.symbol) if word else axis.symbol
        equal = symbols.setdefault((axis.value, axis.number), axis.symbol)
        if axis.symbol in names:
            continue
        if equal in names:
            names[axis.symbol] = names[equal]
        elif first in names and not any(both >= {first, axis.symbol} for both in together):
            names[axis.symbol] = names[first]
        else:
            names[axis.symbol] = _unique_name(axis, word or of_operators.get(axis.symbol, ""), names.values())
    for axis in outputs:
        if axis.symbol not in names:
            names[axis.symbol] = _unique_name(axis, "", names.values())
    return with_symbols(exported, names)


def _input_axes(exported: Exported) -> Iterator[_Axis]:
    """The dynamic axes of inputs, first those of the graph, then those that only the calls have.

    A capture learns later than it calls the model which sizes are equal, and which are constants.
    """
    root = exported.calls.calls[0]
    values = {value.name or "": value for value in exported.model.graph.inputs}
    names = [
        exported.values.get(Port(root.call, "inputs", place), tensor.name) for place, tensor in enumerate(root.inputs)
    ]
    for spec, name in zip(root.inputs, names, strict=True):
        if name in values:
            yield from (_Axis(symbol, spec.name, name, number) for number, symbol in _symbols_of(values[name]))
    for spec, name in zip(root.inputs, names, strict=True):
        for number, size in enumerate(spec.shape):
            if isinstance(size, str) and SYMBOL.fullmatch(size):
                yield _Axis(size, spec.name, name, number)


def _output_axes(exported: Exported) -> Iterator[_Axis]:
    names = [*exported.output_names, *(value.name or "" for value in exported.model.graph.outputs)]
    for name, value in zip(names, exported.model.graph.outputs, strict=False):
        for number, symbol in _symbols_of(value):
            yield _Axis(symbol, name, name, number)


def _symbols_of(value: ir.Value) -> Iterator[tuple[int, str]]:
    for number, size in enumerate(value.shape or ()):
        if isinstance(size, ir.SymbolicDim) and size.value is not None and SYMBOL.fullmatch(size.value):
            yield number, size.value


_SPATIAL = {3: ("length",), 4: ("height", "width"), 5: ("depth", "height", "width")}


def _words_of_operators(model: ir.Model) -> dict[str, str]:
    """Symbols to the ONNX standard's words for the first input of convolutions, pooling and recurrent layers."""
    words: dict[str, str] = {}
    for node in all_nodes(model):
        if not node.inputs or node.inputs[0] is None or node.domain not in ("", "ai.onnx"):
            continue
        value = node.inputs[0]
        axes: Sequence[str] = ()
        if node.op_type.endswith(("Conv", "ConvTranspose", "Pool")):
            axes = ("batch", "channels", *_SPATIAL.get(len(value.shape or ()), ()))
        elif node.op_type in RECURRENT:
            axes = ("sequence", "batch")
            if value.shape is None and (before := value.producer()) is not None and before.op_type == "Transpose":
                value, axes = before.inputs[0] or value, ("batch", "sequence")
        for number, symbol in _symbols_of(value):
            if number < len(axes):
                words.setdefault(symbol, axes[number])
    return words


def _unique_name(axis: _Axis, word: str, taken: Collection[str]) -> str:
    value = re.sub(r"\W|^(?=\d)", "_", axis.value)
    by_axis = f"{value}_axis_{axis.number}"
    names = [word, f"{value}_{word}", by_axis, *(f"{by_axis}_{count}" for count in range(2, len(taken) + 3))]
    return next(
        name for name in names[0 if word else 2 :] if name not in taken and SizeCondition(name).symbols == (name,)
    )
