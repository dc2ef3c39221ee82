"""Fourier transforms, window functions, and ``roll``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch

from modelexport.capture.numbers_of_python import node_like
from modelexport.graph.nodes import all_nodes


def rolled(self: Any, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Any:
    """``roll``, as in ``fftshift``: torch.onnx lacks shifts by dynamic sizes, and confuses axes of complex numbers."""
    if not self.is_complex() and all(isinstance(shift, int) for shift in shifts):
        return NotImplemented
    if not dims:
        return rolled(self.reshape(-1), shifts, (0,)).reshape(self.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = self.shape[dim]
        moved = shift % size
        self = self.index_select(dim, torch.cat([torch.arange(size - moved, size), torch.arange(size - moved)]))
    return self


def frequencies(n: Any, d: float = 1.0, **options: Any) -> Any:
    """``fftfreq``, which nothing translates."""
    places = torch.arange(n, dtype=options.get("dtype") or torch.get_default_dtype())
    return torch.where(places < (n + 1) // 2, places, places - n) / (n * d)


def half_the_frequencies(n: Any, d: float = 1.0, **options: Any) -> Any:
    """``rfftfreq``, which nothing translates."""
    return torch.arange(n // 2 + 1, dtype=options.get("dtype") or torch.get_default_dtype()) / (n * d)


def windows_added(grad: Any, input_size: Any, dim: int, size: int, step: int) -> Any:
    """``unfold_backward``, as in ``istft``: PyTorch's own decomposition writes once for each place in a window."""
    places = torch.arange(grad.shape[dim]).unsqueeze(1) * step + torch.arange(size)
    windows = grad.movedim((dim, -1), (0, 1)).flatten(0, 1)
    zeros = grad.new_zeros(input_size).movedim(dim, 0)
    return torch.index_put(zeros, (places.reshape(-1),), windows, accumulate=True).movedim(0, dim)


def hide_sizes_of_transforms(model: ir.Model) -> Iterator[ir.Node]:
    """Hide the size of the axis of each one-sided transform from inference, in place; yields the node after that.

    ONNX's inference, also the one in ONNX Runtime, takes the size of the result to be that of the input where that is
    not a number: the runtime then puts the result into memory of another size, and fails.

    Args:
        model: A translated graph, before inference.
    """
    if all(isinstance(size, int) for value in model.graph.inputs for size in value.shape or ()):
        return
    for node in list(all_nodes(model)):
        if node.op_type != "DFT" or node.attributes.get_int("onesided", 0) == 0:
            continue
        place_given = node.inputs[2] if len(node.inputs) > 2 else None  # below opset 20, it is an attribute
        axis = ir.convenience.get_const_tensor(place_given) if place_given is not None else None
        place = int(axis.numpy().item()) if axis is not None else node.attributes.get_int("axis", 1)
        assert node.graph is not None
        first, last = (node_like("Constant", [], {"value_ints": [number]}, node) for number in (0, place))
        end = node_like("Shape", node.inputs[:1], {"start": place, "end": place + 1}, node)
        whole = node_like("Slice", [node.inputs[0], first.outputs[0], end.outputs[0], last.outputs[0]], {}, node)
        node.graph.insert_before(node, [first, last, end, whole])
        node.replace_input_with(0, whole.outputs[0])
        yield node
