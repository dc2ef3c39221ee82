"""Runs of a model without side effects, to find inputs that it accepts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.private_torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    tree_map,
)

Shape = tuple[int, ...]

LENGTHS = (16, 4)
"""Lengths of generated sequences; the second is for models that have few positions."""
SAMPLES = (1024, 16000, 128, 64, 16)
"""Lengths of signals if only a convolution shows that an argument is a signal."""
_EDGES = (64, 224, 32, 28, 96, 128, 256, 299, 384)
"""Edge lengths of images if only a convolution shows that an argument is an image."""


def fitting_shapes(module: torch.nn.Module, batch: int) -> list[tuple[Shape, int | None]]:
    """Shapes that a ``torch.nn`` module accepts by its parameters, with the bound of an embedding's integers."""
    nn, length = torch.nn, LENGTHS[0]
    match module:
        case nn.Embedding() | nn.EmbeddingBag():
            return [(shape, module.num_embeddings) for shape in ((batch, length), (batch,), (batch, LENGTHS[1]))]
        case nn.Linear():
            shapes: list[Shape] = [(batch, module.in_features), (batch, length, module.in_features)]
        case nn.modules.conv._ConvNd():
            rank = len(module.kernel_size)
            spaces = [(edge,) * rank for edge in (SAMPLES, _EDGES, (16, 32, 64))[rank - 1]]
            shapes = [(batch, module.in_channels, *space) for space in spaces]
            shapes += [(batch, *space) for space in spaces] if module.in_channels == 1 else []
        case nn.RNNBase() | nn.MultiheadAttention() | nn.Transformer():
            widths: list[Any] = [getattr(module, name, None) for name in ("input_size", "embed_dim", "d_model")]
            shapes = [(*((batch, length) if module.batch_first else (length, batch)), next(filter(None, widths)))]
        case nn.LayerNorm() | nn.RMSNorm():
            shapes = [(batch, length, *module.normalized_shape), (batch, *module.normalized_shape)]
        case nn.modules.batchnorm._NormBase():
            shapes = [(batch, module.num_features, *space) for space in ((), (length,), *((e, e) for e in _EDGES))]
        case _:
            return []
    return [(shape, None) for shape in shapes]


Inputs = dict[str, Any]


class TrialRuns:
    """Runs a model without side effects, and remembers the first inputs that it rejected."""

    def __init__(self, model: torch.nn.Module, has_weights: bool = True) -> None:
        self.model = model
        self._fake = None if has_weights else FakeTensorMode(allow_non_fake_inputs=True)
        self.first_inputs: Inputs | None = None
        self.first_error: BaseException | None = None

    def run(self, inputs: Mapping[str, Any] | tuple[Any, ...]) -> bool:
        try:
            self.call(self.model, self._shapes_of(inputs))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return True  # the rest depends on values, which a model without weights does not have
        except Exception as error:  # a model may raise anything for inputs that it does not accept
            if self.first_error is None:
                self.first_inputs = dict(inputs) if isinstance(inputs, Mapping) else None
                self.first_error = error
            return False
        return True

    def _shapes_of(self, inputs: Mapping[str, Any] | tuple[Any, ...]) -> Mapping[str, Any] | tuple[Any, ...]:
        """The inputs, or, for a model without weights, tensors of the same types and shapes without data."""

        def without_data(value: Any) -> Any:
            return self._fake.from_tensor(value) if self._fake and isinstance(value, torch.Tensor) else value

        return tree_map(without_data, inputs) if self._fake else inputs

    def call(self, function: Callable[..., Any], inputs: Mapping[str, Any] | tuple[Any, ...]) -> Any:
        with (
            untouched(self.model, runs=self._fake is None),
            self._fake or contextlib.nullcontext(),
            warnings.catch_warnings(action="ignore"),
        ):
            torch.manual_seed(0)
            return function(**inputs) if isinstance(inputs, Mapping) else function(*inputs)

    def watch(self, inputs: Inputs) -> list[tuple[str | None, torch.nn.Module]]:
        """The ``torch.nn`` modules that a run calls before it ends or fails, with the argument that each receives.

        ``None`` means a value that the forward computed.
        """
        keywords = self._shapes_of(inputs)
        assert isinstance(keywords, Mapping)
        arguments = {id(value): name for name, value in keywords.items()}
        seen: list[tuple[str | None, torch.nn.Module]] = []

        def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if fitting_shapes(module, 1):
                received = [arguments[id(value)] for value in (*args, *kwargs.values()) if id(value) in arguments]
                seen.extend([(name, module) for name in received] or [(None, module)])

        handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in self.model.modules()]
        try:
            with contextlib.suppress(Exception):  # what was seen before it failed is enough
                self.call(self.model, keywords)
        finally:
            for handle in handles:
                handle.remove()
        return seen
