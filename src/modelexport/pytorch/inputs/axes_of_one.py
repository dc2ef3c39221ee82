"""Example inputs for a capture, in which axes of size one are larger where the model accepts that.

A capture treats a size of one apart: it fixes the axis, and what the model decides by it, or makes of it, holds for one
alone. With two or three it follows what the model does with most sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import count

import onnx_ir as ir
from torch import nn

from modelexport.pytorch.inputs.other_sizes import inputs_of_file, with_sizes_of_axes
from modelexport.pytorch.inputs.trial_runs import TrialRuns
from modelexport.pytorch.nested_tensors import Inputs, copied, tensors_in

Axis = tuple[str, int]
"""The name of a tensor in inputs, as :func:`tensors_in` has it, and the number of an axis."""


def widened(
    model: nn.Module, inputs: Inputs, *, kept: Collection[str] = (), ones: Collection[Axis] = (), runs: bool = True
) -> tuple[Inputs, dict[Axis, int]]:
    """Inputs with which a model runs, in which axes of size one have other sizes: of all, or of those that it accepts.

    First axes have another size than second ones, and none that occurs in the example, so that nothing is equal by
    chance.

    Args:
        inputs: Not changed.
        kept: Tensors that stay as they are.
        ones: Axes that stay as they are.
        runs: The model has its weights.

    Returns:
        The inputs, which are the same if no axis was changed, and the new size of each axis that was.
    """
    tensors = {name: tensor for name, tensor in tensors_in(inputs) if name not in kept}
    axes = [(name, axis) for name, t in tensors.items() for axis, size in enumerate(t.shape) if size == 1]
    axes = [axis for axis in axes if axis not in ones]
    if not axes:
        return inputs, {}
    taken = {size for tensor in tensors.values() for size in tensor.shape}
    free = (size for size in count(2) if size not in taken)
    sizes = {number: next(free) for number in sorted({number for _, number in axes})}
    trials = TrialRuns(model, has_weights=runs)

    def accepted(chosen: Collection[Axis]) -> bool:
        other = copied(with_sizes_of_axes(inputs, {axis: sizes[axis[1]] for axis in chosen}))
        return trials.run(other if isinstance(other, Mapping) else tuple(other))

    chosen: list[Axis] = []
    for group in _groups(axes):
        more = [axis for axis in group if axis not in chosen]
        if more and accepted([*chosen, *more]):
            chosen += more
        if len(chosen) == len(axes):
            break
    wide = {axis: sizes[axis[1]] for axis in chosen}
    return (with_sizes_of_axes(inputs, wide) if wide else inputs), wide


def _groups(axes: list[Axis]) -> Iterator[list[Axis]]:
    """Axes to be changed together: all, those with the same number, and each by itself."""
    yield axes
    for number in sorted({number for _, number in axes}):
        yield [axis for axis in axes if axis[1] == number]
    yield from ([axis] for axis in axes)


def axes_that_exclude(inputs: Inputs, model: ir.Model, wide: Collection[Axis]) -> list[Axis]:
    """Those changed axes because of which a graph does not take the inputs as they were.

    Args:
        inputs: The inputs before the change.
        model: The graph that was captured with the changed ones.
    """
    names = inputs_of_file(inputs, model)
    shapes = {value.name or "": value.shape for value in model.graph.inputs}
    sizes: dict[str, set[int]] = {}
    declared: dict[Axis, str | int | None] = {}
    for name, tensor in tensors_in(inputs):
        for axis, size in enumerate(shapes.get(names.get(name, "")) or ()):
            if axis < tensor.ndim:
                declared[name, axis] = size if isinstance(size, int) else size.value
                sizes.setdefault(str(declared[name, axis]), set()).add(tensor.shape[axis])
    return [axis for axis in wide if str(declared.get(axis, 1)) != "1" and (
        str(declared[axis]).isdigit() or len(sizes[str(declared[axis])]) > 1)]  # fmt: skip
