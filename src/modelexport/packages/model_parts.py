"""The types of the parts of a package: each is a module with inputs and names, before it is captured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from modelexport.format.package_manifest import Rows
from modelexport.pytorch.checkpoints.lazy_weights import lend_weights
from modelexport.weights.bytes_of_entries import Weights

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "A list of three fruits:",
    "Water boils at one hundred degrees, because the pressure of the air is",
)
"""Texts of different lengths, to run a package with."""


@dataclass(frozen=True)
class ModelPart:
    """One graph of a package, before it is captured."""

    name: str
    model: nn.Module
    """The whole model or pipeline; its ``forward`` runs this part."""
    inputs: Mapping[str, Any] | Sequence[Any]
    module: str = ""
    """The address of the module that runs; empty for the whole model."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one line each."""
    row: Mapping[str, Any] | None = None
    """The same inputs for one row, for a part that takes tokens and a cache."""
    file: str = ""
    """Its file relative to the package, if it is not ``NAME.onnx``."""

    constants: tuple[str, ...] = ()
    """The inputs whose values the file keeps."""
    dynamic: bool = True
    """Whether its axes stay dynamic."""
    axes: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """An input and an axis to what its size is, for all that stay open; by default by the usual names of inputs."""
    rows: Rows = "padded"
    """Which prompts a batch may have."""
    taken: frozenset[str] = frozenset()
    """The inputs that earlier parts return."""
    optional: bool = False
    """Whether the package is of use without this part, so that a failure to export it is a note."""

    @property
    def path(self) -> str:
        """The file of the part, relative to the package."""
        return self.file or f"{self.name}.onnx"


def with_forward(model: nn.Module, run: Callable[..., Any]) -> nn.Module:
    """A model of the same modules whose ``forward`` is a function of the model and of what it is called with."""
    part = copy.copy(model)
    part.forward = partial(run, part)
    return part


def with_weights(
    model: nn.Module, weights: Weights | None, never_called: Collection[str] = ()
) -> AbstractContextManager[None]:
    """Inside, a model that was built without weights has them while it runs; ``None`` for one that has its own.

    A part calls other methods than ``forward``, so that what modules of modules own is lent with the root.

    Args:
        never_called: Paths of modules without modules that are not called; others use their weights.
    """
    outside = [path for path, module in model.named_modules() if path and any(module.children())]
    return nullcontext() if weights is None else lend_weights(model, weights, {*outside, *never_called})
