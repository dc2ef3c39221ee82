"""Shapes that the parameters of ``torch.nn`` modules accept."""

from __future__ import annotations

import torch

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
        case nn.RNNBase():
            shapes = [(batch, length, module.input_size) if module.batch_first else (length, batch, module.input_size)]
        case nn.MultiheadAttention():
            shapes = [(batch, length, module.embed_dim) if module.batch_first else (length, batch, module.embed_dim)]
        case nn.Transformer():
            shapes = [(batch, length, module.d_model) if module.batch_first else (length, batch, module.d_model)]
        case nn.LayerNorm() | nn.RMSNorm():
            shapes = [(batch, length, *module.normalized_shape), (batch, *module.normalized_shape)]
        case nn.modules.batchnorm._NormBase():
            shapes = [(batch, module.num_features, *space) for space in ((), (length,), *((e, e) for e in _EDGES))]
        case _:
            return []
    return [(shape, None) for shape in shapes]
