"""Images of any size: what a model computes from the sizes of images, in operations of the graph and not in Python.

The vision towers of transformers take an image as patches, and the sizes of the images in patches as ``grid_thw``,
``[images, 3]``: time, height and width. Their code reads the sizes, which a capture would keep, so that transformers'
exporter computes ahead what follows from them. Here the same functions are operations. The number of patches, which is
known from the patches themselves, gives the size of their results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from modelexport.core.replaced_attributes import attribute_set

_SIZES = "grid_thw"
"""The argument by which transformers' exporter knows a tower that takes sizes."""


@contextmanager
def sizes_in_graph(model: nn.Module) -> Iterator[None]:
    """Inside, a capture of the towers of a model keeps no sizes of images."""
    with ExitStack() as stack:
        for module in model.modules():
            if _SIZES in inspect.signature(module.forward).parameters:
                stack.enter_context(attribute_set(module, "forward", _computing(module, module.forward)))
        yield


def _computing(tower: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` of a tower with what transformers' exporter adds to its arguments."""
    from transformers.exporters import utils

    signature = inspect.signature(forward)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        inputs = {name: value for name, value in bound.items() if name != "kwargs"} | bound.get("kwargs", {})
        patches = next(value.shape[0] for value in inputs.values() if isinstance(value, torch.Tensor))
        with ExitStack() as stack:
            for name, function in FUNCTIONS.items():
                stack.enter_context(attribute_set(utils, name, partial(function, patches)))
            utils.precompute_export_inputs(tower, inputs)
        return forward(**inputs)

    return run


class _Places(NamedTuple):
    """Where patches are: one number for each of them."""

    frame: torch.Tensor
    """The number of the first patch of its frame."""
    time: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    sizes: torch.Tensor
    """The sizes of its image, ``[patches, 3]``."""


def _places(patches: int, sizes: torch.Tensor, merged: int = 1) -> _Places:
    """The places of patches in the order of a tower, in which those that are merged follow each other."""
    counts, number = sizes.prod(-1), torch.arange(patches)
    ends = number[counts.cumsum(0) - 1] + 1  # sizes of more patches than there are fail here, in a runtime as well
    image = (number[:, None] >= ends).sum(1)
    sizes = sizes[image]
    _, height, width = sizes.unbind(-1)
    first = (ends - counts)[image]
    inside = (number - first) % (height * width)
    block, unit = inside // merged**2, inside % merged**2
    row = block // (width // merged) * merged + unit // merged
    column = block % (width // merged) * merged + unit % merged
    return _Places(number - inside, (number - first) // (height * width), row, column, sizes)


def _segments(patches: int, sizes: torch.Tensor, config: Any, merge_temporal: bool = False, kwargs: Any = None) -> Any:
    """The end of the segment of each patch, after a zero: a segment is a frame, or an image with all of its frames."""
    places = _places(patches, sizes)
    _, height, width = places.sizes.unbind(-1)
    ends = places.frame + height * width
    if merge_temporal:
        ends = places.frame + (places.sizes[:, 0] - places.time) * height * width
    return pad(ends, (1, 0)).int(), None


def _positions(
    patches: int, sizes: torch.Tensor, merged: int, include_temporal: bool = False, kwargs: Any = None
) -> torch.Tensor:
    """The row and the column of each patch."""
    places = _places(patches, sizes, merged)
    return torch.stack([*[places.time] * include_temporal, places.row, places.column], -1)


def _windows(
    patches: int, sizes: torch.Tensor, merged: int, window: int, patch: int, kwargs: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of merged patches window by window, and the end of the window of each of them, in patches."""
    edge, count = window // merged // patch, patches // merged**2
    places = _places(count, sizes // torch.tensor([1, merged, merged]))
    _, height, width = places.sizes.unbind(-1)
    top, left = places.row // edge * edge, places.column // edge * edge
    rows, columns = (height - top).clamp(max=edge), (width - left).clamp(max=edge)
    first = places.frame + top * width + rows * left
    number = first + (places.row - top) * columns + places.column - left
    order = torch.zeros_like(number).scatter(0, number, torch.arange(count))
    return order, pad((first + rows * columns)[order] * merged**2, (1, 0)).int()


def _interpolation(
    patches: int,
    sizes: torch.Tensor,
    side: int,
    mode: str = "bilinear",
    align_corners: bool = False,
    spatial_merge_size: int = 1,
    padding: str = "border",
    kwargs: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of a square table of positions between which each patch is, and their weights."""
    from transformers.vision_utils import _interpolation_axis_taps_weights as of_axis

    places = _places(patches, sizes, spatial_merge_size)
    rows, weights = of_axis(places.row, places.sizes[:, 1], side, mode, align_corners, padding)
    columns, factors = of_axis(places.column, places.sizes[:, 2], side, mode, align_corners, padding)
    entries = rows[:, :, None] * side + columns[:, None]
    return entries.flatten(1), (weights[:, :, None] * factors[:, None]).flatten(1)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "get_vision_attention_seqlens": _segments,
    "get_vision_position_ids": _positions,
    "get_vision_window_index": _windows,
    "get_vision_interpolation_indices_and_weights": _interpolation,
}
"""The functions of transformers that read sizes, and the same in operations, which get the number of patches first."""


@dataclass(frozen=True)
class PositionsOfSizes:
    """The positions of the tokens of a prompt with images of any sizes: time, row and column; text after the largest.

    Args:
        token: The placeholder token.
        merged: How many patches in a row become one token.
        sizes: The name of the input with the sizes of images in patches, ``[images, 3]``.
    """

    token: int
    merged: int
    sizes: str
    axes = 3
    as_in_genai = True

    def of_prompt(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """The positions of each token, ``[axes, batch, sequence]``; of padding, those of the next token."""
        image = input_ids == self.token
        text = (~image & attention_mask.bool()).long()
        sizes = pad(sizes, (0, 0, 0, 1), value=self.merged)  # an image that no token is of: there may be no other
        time, height, width = (sizes // torch.tensor([1, self.merged, self.merged])).unbind(-1)
        counts, extents = time * height * width, torch.maximum(height, width)
        placeholders = image.long().flatten().cumsum(0).view(image.shape) - image.long()
        # The image that a placeholder is of, and that comes next for text.
        at = (placeholders[..., None] >= counts.cumsum(0)).sum(-1).clamp(max=sizes.shape[0] - 1)
        before = extents.cumsum(0) - extents
        start = text.cumsum(-1) - text + before[at] - before[at[:, :1]]
        inside, height, width = placeholders - (counts.cumsum(0) - counts)[at], height[at], width[at]
        places = torch.stack([inside // (height * width), inside // width % height, inside % width])
        return start + torch.where(image, places, 0)

    def __call__(self, model: nn.Module, /, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """A ``forward`` from the tokens of a prompt and the sizes of its images to the positions of tokens."""
        return {"position_ids": self.of_prompt(inputs["input_ids"], inputs["attention_mask"], inputs[self.sizes])}
