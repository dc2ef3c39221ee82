"""Quantized checkpoints, written from the specifications of their formats; nothing here is shared with the exporter.

Each writer takes a dense weight ``[rows, columns]`` and returns the tensors of a layer, and :class:`Plain`: the numbers,
scales and zero points that they mean, from which a test computes the weight itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn


@dataclass
class Plain:
    """A quantized weight, unpacked: ``weight[r, c] = scales[r, g[c]] * (numbers[r, c] - zeros[r, g[c]])``."""

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray
    bits: int

    def weight(self) -> np.ndarray:
        steps = self.numbers.astype(np.float32) - self.zeros.astype(np.float32)[:, self.groups]
        return steps * self.scales.astype(np.float32)[:, self.groups]


def quantize(weight: np.ndarray, bits: int, group: int, *, symmetric: bool, order: np.ndarray | None = None) -> Plain:
    """Round to the nearest, by groups of the columns in some order."""
    rows, columns = weight.shape
    order = np.arange(columns) if order is None else order
    parts = weight[:, order].reshape(rows, columns // group, group)
    if symmetric:
        scales = np.abs(parts).max(axis=2) / (2 ** (bits - 1) - 0.5)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = parts.min(axis=2).clip(max=0), parts.max(axis=2).clip(min=0)
        scales = (high - low) / (2**bits - 1)
        zeros = np.rint(-low / scales)
    scales = scales.astype(np.float16)
    numbers = np.rint(parts / scales[..., None].astype(np.float32) + zeros[..., None]).clip(0, 2**bits - 1)
    groups = np.empty(columns, np.int64)
    groups[order] = np.arange(columns) // group
    natural = np.empty((rows, columns), np.int64)
    natural[:, order] = numbers.reshape(rows, columns)
    return Plain(natural, scales, zeros.astype(np.int64), groups, bits)


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Each run of ``32 / bits`` numbers along the last axis as an int32, the first in the lowest bits."""
    each = 32 // bits
    padded = np.pad(numbers, [(0, 0), (0, -numbers.shape[1] % each)]).astype(object)
    packed = [
        [sum(int(row[start + i]) << (bits * i) for i in range(each)) for start in range(0, len(row), each)]
        for row in padded
    ]
    return np.array(packed, dtype=np.uint64).astype(np.uint32).view(np.int32)


def gptq(plain: Plain, version: int = 1) -> dict[str, np.ndarray]:
    each = 32 // plain.bits
    zeros = words(plain.zeros.T, plain.bits).view(np.uint32).astype(np.uint64)
    if version == 1:
        zeros = (zeros - sum(1 << (plain.bits * i) for i in range(each))) % 2**32
    return {
        "qweight": words(plain.numbers, plain.bits).T.copy(),
        "qzeros": zeros.astype(np.uint32).view(np.int32),
        "scales": plain.scales.T.copy(),
        "g_idx": plain.groups.astype(np.int32),
    }


def awq(plain: Plain) -> dict[str, np.ndarray]:
    def packed(numbers: np.ndarray) -> np.ndarray:
        columns, rows = numbers.shape
        mixed = numbers.reshape(columns, rows // 8, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(mixed.reshape(columns, rows), 4)

    return {"qweight": packed(plain.numbers.T), "qzeros": packed(plain.zeros.T), "scales": plain.scales.T.copy()}


def compressed(plain: Plain) -> dict[str, np.ndarray]:
    tensors = {
        "weight_packed": words(plain.numbers, plain.bits),
        "weight_scale": plain.scales,
        "weight_shape": np.array(plain.numbers.shape, np.int64),
    }
    if (plain.zeros != 2 ** (plain.bits - 1)).any():
        tensors["weight_zero_point"] = words(plain.zeros.T, plain.bits).T.copy()
    if (plain.groups != np.arange(len(plain.groups)) // (len(plain.groups) // plain.scales.shape[1])).any():
        tensors["weight_g_idx"] = plain.groups.astype(np.int32)
    return tensors


@dataclass
class Written:
    """A checkpoint in a folder, and the dense model that it means."""

    folder: Path
    dense: nn.Module
    plain: dict[str, Plain]


def write(
    folder: Path,
    model: nn.Module,
    settings: dict[str, Any],
    pack: Callable[[str, np.ndarray], tuple[Plain, dict[str, np.ndarray]]],
    *,
    skip: tuple[str, ...] = ("lm_head",),
    notes: dict[str, str] | None = None,
) -> Written:
    """Write a checkpoint of a model of transformers with every linear layer packed, and make the model dense of it."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for tied in getattr(model, "all_tied_weights_keys", {}):
        tensors.pop(tied, None)
    plains: dict[str, Plain] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or any(path.endswith(end) for end in skip):
            continue
        plains[path], packed = pack(path, module.weight.detach().numpy())
        del tensors[f"{path}.weight"]
        tensors |= {f"{path}.{role}": torch.from_numpy(np.ascontiguousarray(a)) for role, a in packed.items()}
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(plains[path].weight()))
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **(notes or {})})
    return Written(folder, model.eval(), plains)
