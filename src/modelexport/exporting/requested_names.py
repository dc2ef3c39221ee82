"""The names of a graph's inputs, outputs and dynamic axes, and the outputs that it keeps."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.capture.exported_graph import Exported
from modelexport.core.calls import CallTree, TensorSpec
from modelexport.core.text import suggest
from modelexport.errors import UsageError
from modelexport.graph.kept_outputs import keep_outputs
from modelexport.graph.size_conditions import renamed as renamed_conditions
from modelexport.graph.size_symbols import SYMBOL, put_size, rename_sizes


@dataclass(frozen=True)
class RequestedNames:
    """Names for a captured graph. Calling it renames the graph; anything that it does not name keeps its name."""

    inputs: Mapping[str, str] | Sequence[str] = field(default_factory=dict)
    """Names of inputs to new names, or the new names of all inputs in order."""
    outputs: Mapping[str, str] | Sequence[str] = field(default_factory=dict)
    """The same for the outputs."""
    kept: Sequence[str] = ()
    """Patterns (``present.*``) over the new names of the outputs to keep; all if there are none."""
    axes: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """An input's new name and an axis to the symbol of its size, or a sum of symbols (``past + sequence``)."""
    suggested: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """The same for names that only describe an axis: one that does not fit is left out, and the axis gets another."""
    leading: Sequence[str] = ()
    """Symbols for the first axes of every input: the first axis has to be dynamic, another one in some input."""

    def __call__(self, exported: Exported) -> Exported:
        """Rename a capture; its graph is changed in place.

        Raises:
            UsageError: An input, output or axis does not exist, a name is given twice, or an axis is fixed.
        """
        graph = exported.model.graph
        renamed = _renamed([value.name or "" for value in graph.inputs], self.inputs, "input")
        for value, name in zip(graph.inputs, renamed.values(), strict=True):
            value.name = name
        names = list(_renamed(exported.output_names, self.outputs, "output").values())
        kept = _kept_outputs(names, self.kept)
        keep_outputs(exported.model, kept)
        symbols = _symbols(exported, {**self._leading(exported), **self.axes})
        symbols |= _fitting(exported, self.suggested, symbols)
        return dataclasses.replace(
            with_symbols(exported, symbols),
            values={port: renamed.get(name, name) for port, name in exported.values.items()},
            output_names=tuple(names[index] for index in kept),
        )

    def check_named_axes(self, arguments: Iterable[str]) -> None:
        """Check, before anything is captured, that inputs whose axes are named can exist.

        Args:
            arguments: The names of the model's arguments, with which the names of inputs begin.
        """
        known = [*arguments, *(self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs)]
        for name, _ in self.axes:
            if known and not name.startswith(tuple(known)):
                raise UsageError(f"the model has no input {name}{suggest(name, known)}; it has {', '.join(known)}")

    @property
    def asked(self) -> frozenset[str]:
        """The symbols of the named axes, which have to be dynamic where the model accepts other sizes."""
        named = [symbol for size in self.axes.values() for symbol in SYMBOL.findall(size)]
        return frozenset([*named, *self.leading])

    def _leading(self, exported: Exported) -> dict[tuple[str, int], str]:
        shapes = {value.name or "": tuple(value.shape or ()) for value in exported.model.graph.inputs}
        named: dict[tuple[str, int], str] = {}
        for axis, symbol in enumerate(self.leading):
            with_axis = [name for name, shape in shapes.items() if axis < len(shape)]
            if not with_axis:
                raise UsageError(f"no input has an axis {axis}, which would be {symbol}: leave out this name")
            dynamic = [name for name in with_axis if isinstance(_size_of(shapes[name][axis]), str)]
            for name in with_axis if axis == 0 else dynamic or with_axis[:1]:  # of the fixed ones, to be refused
                named[name, axis] = symbol
        return named


AS_CAPTURED = RequestedNames()
"""The interface that keeps the names of the capture."""


def with_fixed_axes(exported: Exported, axes: Mapping[tuple[str, int], int]) -> Exported:
    """A capture in which some dynamic axes of the inputs have a size; its graph is changed in place."""
    inputs = {value.name or "": value for value in exported.model.graph.inputs}
    symbols = {}
    for (name, axis), number in axes.items():
        size = shape[axis] if name in inputs and (shape := inputs[name].shape) is not None else None
        if isinstance(size, ir.SymbolicDim) and size.value is not None and SYMBOL.fullmatch(size.value):
            symbols[size.value] = str(number)
    return with_symbols(exported, symbols)


def with_symbols(exported: Exported, symbols: Mapping[str, str]) -> Exported:
    """A capture in which symbols of sizes have other names, or numbers; its graph is changed in place."""
    rename_sizes(exported.model, symbols)
    conditions = renamed_conditions(exported.conditions, symbols)
    return dataclasses.replace(exported, calls=_with_sizes(exported.calls, symbols), conditions=conditions)


def _renamed(names: Sequence[str], new: Mapping[str, str] | Sequence[str], what: str) -> dict[str, str]:
    if not isinstance(new, Mapping):
        if len(new) != len(names):
            raise UsageError(f"{len(new)} names for {len(names)} {what}s: the model has {', '.join(names)}")
        new = dict(zip(names, new, strict=True))
    for name in new:
        if name not in names:
            raise UsageError(f"the model has no {what} {name}{suggest(name, names)}; it has {', '.join(names)}")
    renamed = {name: new.get(name, name) for name in names}
    _check_text(renamed.values())
    if twice := [name for name in renamed.values() if list(renamed.values()).count(name) > 1]:
        raise UsageError(f"two {what}s would have the name {twice[0]}: give each a different name")
    return renamed


def _check_text(names: Iterable[str]) -> None:
    """Refuse names that no file can hold: bytes of a command line that are not UTF-8."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the name {name!r} is not UTF-8: give another one") from error


def _kept_outputs(names: Sequence[str], patterns: Sequence[str]) -> list[int]:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"the model has no output {pattern}{suggest(pattern, names)}; it has {', '.join(names)}")
    chosen = [i for i, name in enumerate(names) if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    return chosen if patterns else list(range(len(names)))


def _symbols(exported: Exported, axes: Mapping[tuple[str, int], str]) -> dict[str, str]:
    """The symbols of the capture to the requested names."""
    inputs = {value.name or "": value for value in exported.model.graph.inputs}
    symbols: dict[str, str] = {}
    first: dict[str, str] = {}
    _check_text(axes.values())
    for (name, axis), symbol in axes.items():
        if name not in inputs:
            raise UsageError(f"the model has no input {name}{suggest(name, list(inputs))}; it has {', '.join(inputs)}")
        shape = inputs[name].shape
        if shape is None or not -len(shape) <= axis < len(shape):
            raise UsageError(f"input {name} has {0 if shape is None else len(shape)} axes, so there is no axis {axis}")
        size = _size_of(shape[axis])
        if not isinstance(size, str):
            raise UsageError(
                f"axis {axis} of {name} cannot be dynamic as {symbol}: {_what_fixes(exported, name, axis, size)}; "
                + ("give an example in which it is larger, or do not name this axis" if size in (0, 1) else _ADVICE)
            )
        if symbols.setdefault(size, symbol) != symbol:
            same = f"{first[size]}, {symbols[size]}"
            raise UsageError(f"axis {axis} of {name} cannot be {symbol}: it always has the same size as {same}")
        first.setdefault(size, f"axis {axis} of {name}")
    return {size: symbol for size, symbol in symbols.items() if SYMBOL.fullmatch(size)}


def _fitting(exported: Exported, suggested: Mapping[tuple[str, int], str], known: Mapping[str, str]) -> dict[str, str]:
    """The symbols of the capture to the suggested names, for those that have no name yet."""
    shapes = {value.name or "": tuple(value.shape or ()) for value in exported.model.graph.inputs}
    fitting: dict[str, str] = {}
    for (name, axis), symbol in suggested.items():
        size = _size_of(shapes[name][axis]) if axis < len(shapes.get(name, ())) else None
        if isinstance(size, str) and SYMBOL.fullmatch(size) and size not in known:
            fitting.setdefault(size, symbol)
    return fitting


def _what_fixes(exported: Exported, name: str, axis: int, size: int | None) -> str:
    """The line that makes the size a number, or the innermost call after which it is one, if the capture shows it."""
    root = exported.calls.calls[0]
    declared = next((spec for spec in root.inputs if spec.name == name), None)
    symbol = declared.shape[axis] if declared is not None and axis < len(declared.shape) else None
    if not isinstance(symbol, str) or symbol.isdigit():
        return f"the capture fixes it at {size}"
    if line := next((c for c in exported.conditions if c.formula == f"{symbol} == {size}"), None):
        return f"the model fixes it at {size} ({line.where}: `{line.source}`)"
    last = root
    for traced in exported.calls:
        if any(symbol in map(str, spec.shape) for spec in traced.inputs):
            last = traced
    return f"{last.call if last is not root else 'the model itself'} fixes it at {size}"


_ADVICE = "do not name this axis, or make the module compute with its size"
"""What to do about a size that no other example would free."""


def _size_of(dimension: int | ir.SymbolicDim) -> int | str | None:
    """A size, as an integer also if the exporter wrote a number as a symbol."""
    if isinstance(dimension, int):
        return dimension
    return int(dimension.value) if dimension.value and dimension.value.isdigit() else dimension.value


def _with_sizes(calls: CallTree, symbols: Mapping[str, str]) -> CallTree:
    def put(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(
            dataclasses.replace(
                spec, shape=tuple(put_size(s, symbols) if isinstance(s, str) else s for s in spec.shape)
            )
            for spec in specs
        )

    return CallTree(
        tuple(dataclasses.replace(traced, inputs=put(traced.inputs), outputs=put(traced.outputs)) for traced in calls)
    )
