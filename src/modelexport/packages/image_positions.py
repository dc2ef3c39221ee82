"""Positions on several axes: those of time, height and width that the tokens of an image have in some models."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

POSITIONS = "positions"
"""The part that computes them from tokens."""
_METHOD = "get_rope_index"
"""The method of transformers' models that computes them, which its exporters ask for as well."""


@dataclass(frozen=True)
class Positions:
    """The positions of the tokens of a prompt, if all of its images have one size.

    Args:
        token: The placeholder token.
        offsets: The positions of the tokens of an image from its first one, ``[axes, tokens]``.
        extent: How much further the text after an image begins than the image.
    """

    token: int
    offsets: torch.Tensor
    extent: int

    def of_prompt(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The positions of each token, ``[axes, batch, sequence]``; of padding, those of the next token."""
        image = input_ids == self.token
        text = (~image & attention_mask.bool()).long()
        # Every image has as many tokens, so that counting tells which one of which image a token is.
        count = image.long().cumsum(-1)
        at, size = (count - 1).clamp(min=0), self.offsets.shape[1]
        before = text.cumsum(-1) - text + torch.where(image, at // size, count // size) * self.extent
        return torch.where(image, before + self.offsets[:, at % size], before)

    @property
    def as_in_genai(self) -> bool:
        """Whether they are what onnxruntime-genai computes itself: time, row and column, and text after the largest."""
        rows, columns = (int(axis.max()) + 1 for axis in self.offsets[-2:])
        grid = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns)).T
        return torch.equal(self.offsets, grid) and self.extent == max(rows, columns)


def positions_of(model: nn.Module, token: int, example: Mapping[str, Any], one: Mapping[str, Any]) -> Positions | None:
    """The positions that a model gives to tokens; ``None`` if a token has one position in it.

    Args:
        token: The placeholder token.
        example: The inputs of a run of the whole model.
        one: What its encoder takes for one image.
    """
    owner = next((module for module in model.modules() if callable(getattr(module, _METHOD, None))), None)
    if owner is None:
        return None
    method = getattr(owner, _METHOD)
    ids = example["input_ids"][:1]
    image = ids[ids == token]
    ids = torch.cat([image, ids[ids != token][-1:]])[None]
    known = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **one}
    known |= {name: types_of(token, ids, example) for name in types_in(example)}
    wanted = inspect.signature(method).parameters
    found = method(**{name: value for name, value in known.items() if name in wanted})[0][:, 0]
    return Positions(token, found[:, :-1].clone(), int(found[0, -1]))


def types_in(example: Mapping[str, Any]) -> list[str]:
    """The names of the inputs that say what each token is: integers of the shape of the tokens, besides their mask."""
    ids = example["input_ids"]
    return [
        name
        for name, value in example.items()
        if name not in ("input_ids", "attention_mask") and getattr(value, "shape", None) == ids.shape
    ]


def types_of(token: int, ids: torch.Tensor, example: Mapping[str, Any]) -> torch.Tensor:
    """Which tokens are placeholders, in the type in which a model takes it: 1 for those, 0 for text."""
    return (ids == token).to(example[types_in(example)[0]].dtype)
