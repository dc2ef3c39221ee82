"""Words for the axes of arguments, from docstrings: ``input_ids (Tensor of shape (batch_size, sequence_length))``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn

_ARGUMENT = re.compile(r"^[ \t]*`{0,2}(\w+)`{0,2} ?[(:]", re.MULTILINE)
_SHAPE = re.compile(r"\bshapes?:?\W{0,3}[(\[]([^()\[\]]*)[)\]]")
_AXIS = re.compile(r"(?:num_|n_)?([a-z][a-z0-9_]*?)(?:_size|_length|_len)?")
_SHORTEST = 3
"""The fewest letters of a word: shorter names, such as ``E``, are constants in formulas of sizes."""


def documented_axes(model: nn.Module, arguments: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """A word for each axis, empty if it has none: ``{"input_ids": ("batch", "sequence")}``.

    An argument that the model's own docstring does not describe is looked up in those of its modules, in their order.

    Args:
        arguments: The names of arguments that are tensors, with the number of their axes.
    """
    words: dict[str, tuple[str, ...]] = {}
    for forward in dict.fromkeys(type(m).forward for m in model.modules() if hasattr(type(m), "forward")):
        if len(words) == len(arguments):
            break
        shapes = _documented_shapes(forward)
        for name, rank in arguments.items():
            if name not in words and len(axes := shapes.get(name, ())) == rank:
                words[name] = axes
    return words


@cache
def _documented_shapes(forward: Callable[..., Any]) -> Mapping[str, tuple[str, ...]]:
    text = inspect.getdoc(forward) or ""
    starts = [*_ARGUMENT.finditer(text)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    sections = {match[1]: text[match.start() : end] for match, end in zip(starts, ends, strict=False)}
    shapes = {name: _SHAPE.search(section) for name, section in sections.items()}
    return {name: _words(shape[1].split(",")) for name, shape in shapes.items() if shape is not None}


def _words(axes: Sequence[str]) -> tuple[str, ...]:
    words = [_word(axis.strip()) for axis in axes if axis.strip()]
    return tuple(word if words.count(word) == 1 else "" for word in words)


def _word(axis: str) -> str:
    match = _AXIS.fullmatch(axis)
    return match[1] if match is not None and len(match[1]) >= _SHORTEST else ""
