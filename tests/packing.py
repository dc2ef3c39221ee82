"""Quantized checkpoints, written from the specifications of their formats; nothing here is shared with the exporter.

:func:`quantize` makes a :class:`Plain` of a dense weight ``[rows, columns]``: numbers, scales and zero points, from
which a test computes the weight itself. The writers make the tensors of a layer from it.
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
    padded = np.pad(numbers, [(0, 0), (0, -numbers.shape[1] % each)]).astype(np.uint64)
    shifted = padded.reshape(len(padded), -1, each) << np.arange(0, 32, bits, dtype=np.uint64)
    return shifted.sum(axis=2).astype(np.uint32).view(np.int32)


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


def torchao(plain: Plain, kind: str, layer: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors, and the metadata of the file."""
    middle = 2 ** (plain.bits - 1)
    groups = plain.scales.shape[1]
    data: dict[str, Any] = {"block_size": [1, plain.numbers.shape[1] // groups]}
    if kind == "IntxUnpackedToInt8Tensor":
        data |= {"target_dtype": {"_type": "torch.dtype", "_data": f"int{plain.bits}"}, "activation_quantization": None}
    else:
        data |= {"act_quant_kwargs": None, "reduce_range": False}
    tensors = {
        "_weight_qdata": (plain.numbers - middle).astype(np.int8),
        "_weight_scale": plain.scales,
        "_weight_zero_point": (plain.zeros - middle).astype(np.int8),
    }
    return tensors, {f"{layer}.weight": json.dumps({"_type": kind, "_data": data})}


NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / 12


@dataclass
class Tabled:
    """A weight of 4-bit numbers with a table of values, in blocks of the flattened weight."""

    numbers: np.ndarray
    absmax: np.ndarray
    table: np.ndarray
    block: int

    def weight(self) -> np.ndarray:
        flat = self.table[self.numbers.reshape(-1)] * np.repeat(self.absmax, self.block)[: self.numbers.size]
        return flat.reshape(self.numbers.shape).astype(np.float32)


def bitsandbytes(weight: np.ndarray, kind: str, block: int, *, nested: bool) -> tuple[Tabled, dict[str, np.ndarray]]:
    table = {"nf4": NF4, "fp4": FP4}[kind]
    flat = weight.reshape(-1, block)
    absmax = np.abs(flat).max(axis=1).astype(np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    tensors: dict[str, np.ndarray] = {"weight.quant_map": table, "weight.absmax": absmax}
    if nested:
        offset = float(absmax.mean())
        steps = np.linspace(-1, 1, 256).astype(np.float32)
        outer = np.array([np.abs(part - offset).max() for part in np.split(absmax, range(256, len(absmax), 256))])
        outer = outer.astype(np.float32)
        each = np.repeat(outer, 256)[: len(absmax)]
        coded = np.abs(((absmax - offset) / each)[:, None] - steps).argmin(axis=1).astype(np.uint8)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.absmax": coded, "weight.nested_absmax": outer, "weight.nested_quant_map": steps}
        absmax = steps[coded] * each + np.float32(offset)
    numbers = np.abs((flat / absmax[:, None])[..., None] - table).argmin(axis=2).reshape(weight.shape)
    pairs = numbers.reshape(-1, 2)
    tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).astype(np.uint8).reshape(-1, 1)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text
    return Tabled(numbers, absmax, table, block), tensors


Packer = Callable[[str, np.ndarray], tuple[Plain | Tabled, dict[str, np.ndarray], dict[str, str]]]
"""From the name and the weight of a layer: what is packed, its tensors, and metadata of the file."""


@dataclass
class Written:
    """A checkpoint in a folder, and the dense model that it means."""

    folder: Path
    dense: nn.Module
    plain: dict[str, Plain | Tabled]


def write(
    folder: Path,
    model: nn.Module,
    settings: dict[str, Any],
    pack: Packer,
    *,
    skip: tuple[str, ...] = ("lm_head", "embed_out"),
) -> Written:
    """Write a checkpoint of a model of transformers with every linear layer packed; the model gets what it means."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for tied in getattr(model, "all_tied_weights_keys", {}):
        tensors.pop(tied, None)
    plains: dict[str, Plain | Tabled] = {}
    notes = {"format": "pt"}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or any(path.endswith(end) for end in skip):
            continue
        plains[path], packed, noted = pack(path, module.weight.detach().numpy())
        notes |= noted
        del tensors[f"{path}.weight"]
        tensors |= {f"{path}.{role}": torch.from_numpy(np.array(array, order="C")) for role, array in packed.items()}
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(plains[path].weight()))
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file(tensors, folder / "model.safetensors", metadata=notes)
    return Written(folder, model.eval(), plains)
