"""Inputs to run a file with: given ones, those of its reference values, or random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.errors import InputsError, ModelExportError, UsageError
from modelexport.graph.copies import value_like
from modelexport.graph.nodes import required_inputs, sizes_of
from modelexport.graph.size_conditions import (
    SizeCondition,
    check_sizes,
    conditions_of,
    fitting,
    record_conditions,
    renamed,
)
from modelexport.graph.size_formulas import evaluated_size, symbols_in, symbols_of
from modelexport.graph.size_symbols import SYMBOL, rename_sizes
from modelexport.runtime.devices import CPU
from modelexport.runtime.fitted_inputs import fitted
from modelexport.runtime.input_files import read_feeds
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import array_of_input, open_file, session_options
from modelexport.runtime.shapes import symbols_of_inputs
from modelexport.tagged.file import TaggedFile
from modelexport.tagged.strip_and_inline import runnable
from modelexport.traces.reference_values import open_reference, reference_path


def make_feeds(
    tagged: TaggedFile,
    path: Path,
    inputs: Mapping[str, Any] | str | Path | None,
    sizes: Mapping[str, int],
    *,
    provider: str,
    seed: int,
) -> tuple[dict[str, Any], str]:
    """Arrays for the inputs of a file, and their source.

    Args:
        path: The file that is run.
        inputs: Name to array, or a file of arrays; by default those of the reference values if they have ``sizes``, or
            random ones.
        sizes: Symbol to size.

    Raises:
        FileFormatError: The file of inputs cannot be read.
        InputsError: The inputs do not fit the file, or have their own sizes; or no random inputs fit.
    """
    if inputs is not None:
        if sizes:
            raise InputsError(
                "sizes (--size) are those of random inputs, and this run has inputs that are given (--inputs) or those "
                "of a PyTorch model (--against-torch): leave out the sizes"
            )
        if isinstance(inputs, str | Path):
            return fitted(read_feeds(Path(inputs), seed), tagged.model, optional=True), str(inputs)
        return fitted(dict(inputs), tagged.model, optional=True), "given"
    if reference_path(tagged.path).exists():
        with open_reference(tagged) as reference:
            names = [value.name or "" for value in required_inputs(tagged.model)]
            arrays = {name: np.array(reference.inputs[name]) for name in names}
        if sizes.items() <= sizes_of_arrays(tagged.model, arrays).items():
            return arrays, "reference values"
    return random_feeds(tagged, path, sizes, known={}, provider=provider, seed=seed), "random"


def example_sizes(tagged: TaggedFile, sizes: Mapping[str, int]) -> tuple[dict[str, int], str]:
    """Sizes for the dynamic axes of a file: those given, and for the others those of inputs that it runs with.

    Returns:
        The sizes, and what they are; only those given, and nothing, if all are given or no inputs are known to fit.
    """
    if sizes.keys() >= set(symbols_of_inputs(tagged.model)):
        return dict(sizes), ""
    feeds, source = example_feeds(tagged, sizes)
    example = {name: size for name, size in sizes_of_arrays(tagged.model, feeds).items() if name not in sizes}
    if not example:
        return dict(sizes), ""
    which = "small ones with which the file runs" if source == "random" else f"those of the {source}"
    listed = ", ".join(f"{symbol}={size}" for symbol, size in example.items())
    return {**example, **sizes}, f"sizes of dynamic axes are {which}: {listed} (give others with --size NAME=N)"


def sizes_of_arrays(model: ir.Model, arrays: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the dynamic axes of a model, as far as the shapes of some of its inputs tell them."""
    inputs = {value.name or "": sizes_of(value) for value in required_inputs(model)}
    shapes = [(inputs[name], np.shape(array)) for name, array in arrays.items() if name in inputs]
    pairs = [pair for sizes, shape in shapes for pair in zip(sizes, shape, strict=False)]
    return _solved({size: actual for size, actual in pairs if isinstance(size, str)})


def sizes_of_other(file: TaggedFile, other: TaggedFile, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the dynamic axes of a file for which its inputs are as large as those of another file.

    Args:
        sizes: Those of dynamic axes of the other; axes of other names have any size.
    """
    others = {value.name: value for value in required_inputs(other.model)}
    wanted = [
        (value.name, axis, size, number)
        for value in required_inputs(file.model)
        if value.name in others
        for axis, (size, theirs) in enumerate(zip(sizes_of(value), sizes_of(others[value.name]), strict=False))
        if size is not None and (number := _number(theirs, sizes)) is not None
    ]
    solved = _solved({size: number for _, _, size, number in wanted if isinstance(size, str)})
    for name, axis, size, number in wanted:
        if (known := _number(size, solved)) != number:
            raise InputsError(
                f"axis {axis} of {name} is {size if known is None else known} in {file.path} and {number} in "
                f"{other.path}: export one of them with the size of the other, or with --dynamic"
            )
    return solved


def _number(size: int | str | None, sizes: Mapping[str, int]) -> int | None:
    return evaluated_size(size, sizes) if isinstance(size, str) else size


def _solved(wanted: Mapping[str, int]) -> dict[str, int]:
    """The sizes of symbols for which formulas have the given values, where each formula adds one unknown symbol."""
    declared = symbols_of(wanted)
    sizes = {text: number for text, number in wanted.items() if text in declared}
    for text, number in wanted.items():
        if len(unknown := set(symbols_in(text, declared)) - sizes.keys()) == 1:
            start = {**sizes, **dict.fromkeys(unknown, 1)}
            found = fitting([SizeCondition(f"{text} == {number}")], start, unknown)
            if found is not None and evaluated_size(text, found) == number:
                sizes = found
    return sizes


def example_feeds(tagged: TaggedFile, sizes: Mapping[str, int]) -> tuple[dict[str, Any], str]:
    """Inputs of these sizes that a file runs with, and their source; nothing if none are known."""
    try:
        with runnable(tagged.path, tagged.encoding) as file:
            return make_feeds(tagged, file, None, sizes, provider=CPU, seed=0)
    except ModelExportError:
        return {}, ""


def shapes_in_run(tagged: TaggedFile, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of inputs of these sizes and of the values that a file computes from them; empty if it cannot be run.

    Values in branches that are not taken have none.
    """
    from modelexport.traces.file_run import FileRun  # slow to import
    from modelexport.traces.node_computation import NodeError

    feeds, _ = example_feeds(tagged, sizes)
    shapes = {name: np.shape(array) for name, array in feeds.items()}

    def watch(node: ir.Node, arrays: Sequence[Any], value: ir.Value, array: Any) -> Any:
        if isinstance(array, np.ndarray) and value.name:
            shapes[value.name] = array.shape
        return array

    with suppress(NodeError, UsageError):
        if feeds:
            FileRun(tagged.model, in_float64_for=None).run(feeds, watch)
    return shapes


def random_feeds(
    tagged: TaggedFile, path: Path, sizes: Mapping[str, int], *, known: Mapping[str, Any], provider: str, seed: int
) -> dict[str, Any]:
    """Random arrays for the inputs of a file that are not among ``known``, with the sizes that those have.

    Raises:
        InputsError: No random ones fit, or no dynamic axis has a name in ``sizes``.
    """
    names = [value.name or "" for value in required_inputs(tagged.model)]
    fixed = {name: array_of_input(name, known[name]) for name in names if name in known}
    bound = {**sizes, **sizes_of_arrays(tagged.model, fixed)}
    session = open_file(path, session_options("none", provider))
    return make_random_inputs(tagged.model, session, seed=seed, known=fixed, sized=_sized(tagged.model, bound))


def _sized(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """A model with nothing but the inputs of another, with sizes for their dynamic axes."""
    texts = [str(size.value) for v in required_inputs(model) for size in v.shape or () if not isinstance(size, int)]
    symbols = {symbol for text in texts for symbol in SYMBOL.findall(text)} | set(texts)
    if unknown := sorted(set(sizes) - symbols):
        raise InputsError(
            f"no dynamic axis is named {', '.join(unknown)}: there are {', '.join(sorted(symbols)) or 'none'}"
        )
    sized = ir.Model(ir.Graph(list(map(value_like, required_inputs(model))), [], nodes=[]), ir_version=10)
    check_sizes(conditions_of(model), sizes)
    numbers = {name: str(number) for name, number in sizes.items()}
    rename_sizes(sized, numbers)
    record_conditions(sized, renamed(conditions_of(model), numbers))
    return sized
