"""Random inputs for a file of which only the graph inputs are known; a run in ONNX Runtime shows whether they fit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from modelexport.core.limits import RANDOM_ELEMENTS
from modelexport.errors import InputsError, UsageError
from modelexport.graph.nodes import all_nodes, required_inputs
from modelexport.graph.size_conditions import conditions_of, conditions_of_formulas, fitting
from modelexport.graph.size_formulas import evaluated_size
from modelexport.runtime.sessions import run_session
from modelexport.runtime.shapes import symbols_of_inputs

_BOUNDS = (1000, 100, 10)
"""Upper bounds of integers, tried in turn (they may be indices into something of unknown size); then all are 1."""
_LARGEST_SIZE = 8
"""The upper bound of integers that are sizes of tensors: three sizes of 1000 are gigabytes."""
_TAKE_SIZES = {
    "AffineGrid": (1,), "CenterCropPad": (1,), "Col2Im": (1, 2), "ConstantOfShape": (0,), "Expand": (1,),
    "MaxUnpool": (2,), "OneHot": (1,), "Pad": (1,), "Range": (0, 1, 2), "Reshape": (1,), "Resize": (3,), "Tile": (1,),
    "TopK": (1,),
}  # fmt: skip
"""Operators to their inputs that are sizes of what they give."""
_SIZES = (
    (2, 8, 8), (2, 32, 32), (1, 64, 64), (1, 224, 224), (1, 1, 1), (1, 1, 512), (1, 16_000, 16_000),
)  # fmt: skip
"""The sizes of a dynamic first axis, of those between, and of the last: up to an image, and a second of sound."""
_SIZES_OF_SCANS = ((1, 512, 512), (1, 16_000, 16_000))
"""Sizes that are tried first for a file with a ``Scan``: ONNX Runtime ends the process when one has nothing to scan."""
_NOT_A_NUMBER = "is not a number for any of them"


def make_random_inputs(
    model: ir.Model,
    session: onnxruntime.InferenceSession,
    *,
    seed: int = 0,
    known: Mapping[str, Any] | None = None,
    sized: ir.Model | None = None,
) -> dict[str, Any]:
    """Arrays that a file has run with: normal numbers, integers from 1 to a bound that fits, as token ids, and true.

    Those that gave a NaN are taken if no others fit. An integer that the graph compares with constants is one of them.

    Args:
        model: The file, for its inputs' types and shapes.
        session: A session for the same file.
        seed: For the values.
        known: Arrays of inputs that are not to be drawn.
        sized: A model with the same inputs, some of whose dynamic axes have a size.

    Raises:
        InputsError: The file does not run with any of the inputs that were tried, or does not declare how many axes an
            input has: inputs of another rank end the process in some kernels of ONNX Runtime (``ConvInteger``).
    """
    reason, sizes = "", _inputs_that_are_sizes(model)
    known = {**_compared_numbers(model), **(known or {})}
    without_rank = [v.name or "" for v in required_inputs(sized or model) if v.shape is None and v.name not in known]
    if without_rank:
        raise InputsError(
            f"no random inputs are made for {', '.join(without_rank)}, whose number of axes the file does not declare; "
            "give inputs with --inputs, where the command takes them"
        )
    without_numbers: dict[str, Any] | None = None
    scans = any(node.op_type == "Scan" for node in all_nodes(model))
    for of_axes in (*(_SIZES_OF_SCANS if scans else ()), *_SIZES):
        shapes = _shapes(sized or model, *of_axes)
        if sum(prod(shape) for shape in shapes.values()) > RANDOM_ELEMENTS or any(
            min(s, default=0) < 0 for s in shapes.values()
        ):
            continue
        for lowest in (1, 0):
            draw = partial(_drawn, model, shapes, seed, lowest, known)
            drawn, bounds = draw({}), dict[str, int]()
            misfit = _misfit(session, drawn)
            reason = reason or misfit
            if misfit.endswith(_NOT_A_NUMBER) and without_numbers is None:
                without_numbers = drawn
            if not misfit:
                for name in (name for name, array in drawn.items() if name not in known and array.dtype.kind in "iu"):
                    for bound in (_LARGEST_SIZE,) if name in sizes else _BOUNDS:
                        if not _misfit(session, draw({**bounds, name: bound})):
                            bounds[name] = bound
                            break
                return draw(bounds)
    if without_numbers is not None:
        return without_numbers
    names = ", ".join(value.name or "" for value in required_inputs(model))
    reason = reason or "their fixed sizes are too large, or negative"
    raise InputsError(
        f"none of the random inputs fit ({names}): {reason}; give inputs with --inputs, or sizes with --size, "
        "where the command takes them; export with --reference stores inputs that fit"
    )


def _inputs_that_are_sizes(model: ir.Model) -> set[str]:
    """The names of the inputs of integers from which sizes of tensors are computed."""
    names = set()
    for source in required_inputs(model):
        pending, seen = [source], {source}
        while pending:
            value = pending.pop()
            if value.dtype is not None and not value.dtype.is_integer():
                continue
            for user, index in value.uses():
                if index in _TAKE_SIZES.get(user.op_type, ()):
                    names.add(source.name or "")
                pending += [output for output in user.outputs if output not in seen]
                seen.update(user.outputs)
    return names


def _compared_numbers(model: ir.Model) -> dict[str, Any]:
    """The integer inputs that a graph compares with constants, such as the rate of a sound, to the last of these."""
    compared = {}
    for value in required_inputs(model):
        sizes = [size if isinstance(size, int) else 1 for size in value.shape or ()]
        if value.dtype is None or not value.dtype.is_integer() or prod(sizes) != 1:
            continue
        for user, _ in value.uses():
            constants = [ir.convenience.get_const_tensor(taken) for taken in user.inputs if taken is not None]
            if user.op_type == "Equal" and (numbers := [tensor.numpy() for tensor in constants if tensor is not None]):
                compared[value.name or ""] = np.full(sizes, numbers[0].flat[0], value.dtype.numpy())
    return compared


def _drawn(
    model: ir.Model,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    lowest: int,
    known: Mapping[str, Any],
    bounds: Mapping[str, int],
) -> dict[str, Any]:
    """Inputs whose whole numbers are below ``bounds``, or all the lowest."""
    arrays: dict[str, Any] = {}
    for index, value in enumerate(required_inputs(model)):
        random, name, dtype = np.random.default_rng((seed, index)), value.name or "", value.dtype or ir.DataType.FLOAT
        if name in known:
            arrays[name] = known[name]
        elif dtype is ir.DataType.BOOL:
            arrays[name] = np.ones(shapes[name], dtype=bool)
        elif dtype.is_integer():
            arrays[name] = random.integers(lowest, bounds.get(name, lowest + 1), shapes[name]).astype(dtype.numpy())
        else:
            arrays[name] = random.standard_normal(shapes[name]).astype(dtype.numpy())
    return arrays


def _shapes(model: ir.Model, first: int, middle: int, last: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the inputs: a symbol has one size wherever it is, and a sum of symbols is theirs."""

    def default(axis: int, rank: int) -> int:
        return first if not axis else last if axis == rank - 1 else middle

    names, symbols, formulas = symbols_of_inputs(model), dict[str, int](), list[str]()
    for value in required_inputs(model):
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and size.value in names:
                symbols.setdefault(size.value, default(axis, len(value.shape or ())))
            elif isinstance(size, ir.SymbolicDim) and size.value is not None:
                formulas.append(f"({size.value}) >= 1")  # an empty tensor shows nothing
    conditions = conditions_of(model)
    some = fitting([*conditions, *conditions_of_formulas(formulas)], symbols, symbols)
    fits = some or fitting(conditions, symbols, symbols) or symbols

    def sized(size: int | ir.SymbolicDim, axis: int, rank: int) -> int:
        number = size if isinstance(size, int) else evaluated_size(size.value or "", fits)
        return default(axis, rank) if number is None else number

    axes = {value.name or "": tuple(value.shape or ()) for value in required_inputs(model)}
    return {name: tuple(sized(size, i, len(sizes)) for i, size in enumerate(sizes)) for name, sizes in axes.items()}


def _misfit(session: onnxruntime.InferenceSession, inputs: Mapping[str, Any]) -> str:
    """Why a file should not be run with these inputs; empty if it runs, and gives no NaN."""
    try:
        outputs = run_session(session, inputs)
    except UsageError as error:
        return str(error)
    for name, array in outputs.items():
        if isinstance(array, np.ndarray) and array.dtype.kind == "f" and np.isnan(array).any():
            return f"{name} {_NOT_A_NUMBER}"
    return ""
