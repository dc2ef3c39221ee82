"""Models from outside the table of the tests: many of each family, small, with random weights.

``benchmarks/sweep.py`` exports each of them beside the bare exporter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, Mapping[str, Any] | Sequence[Any]]


@dataclass(frozen=True)
class Case:
    """A model of a family and the inputs that it is exported with."""

    family: str
    name: str
    build: Callable[[], Built]
    """The model and its inputs, with the same weights each time."""
    constants: tuple[str, ...] = ()
    """Arguments of ``forward`` that are bound as they are."""

    def __call__(self) -> Built:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, inputs = self.build()
            return model.eval(), inputs


def cases() -> list[Case]:
    """Of all families. A family whose package is not installed has none."""
    from zoo import audio, diffusion, embedded, styles, vision

    return [*styles.CASES, *embedded.CASES, *vision.CASES, *audio.CASES, *diffusion.CASES]


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))
