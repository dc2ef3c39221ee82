"""Packed weights in PyTorch: a linear layer that holds them as the checkpoint does, and what it computes.

The layer is the reference: it computes each weight from its numbers and scales, and multiplies, with torch alone. Its
call is one operator, so that an exporter can translate it as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

from modelexport.weights.packed.bit_packing import unpack
from modelexport.weights.packed.known_formats import FORMATS, entry_name
from modelexport.weights.packed.scheme import Scheme


class QuantizedLinear(nn.Module):
    """``nn.Linear`` with a packed weight; its parameters are the tensors of the checkpoint, by their roles."""

    def __init__(self, scheme: Scheme, tensors: Mapping[str, torch.Tensor], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = scheme.columns, scheme.rows
        self._scheme = msgspec.json.encode(scheme).decode()
        self._names = [entry_name(role) for role in scheme.roles]
        for role, name in zip(scheme.roles, self._names, strict=True):
            self.register_parameter(name, nn.Parameter(tensors[role], requires_grad=False))
        self.register_parameter("bias", bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tensors = [getattr(self, name) for name in self._names]
        return OPERATOR(inputs, tensors, self.bias, self._scheme)

    def extra_repr(self) -> str:
        scheme = msgspec.json.decode(self._scheme, type=Scheme)
        return f"{self.in_features}, {self.out_features}, {scheme.format}, bits={scheme.bits}, group={scheme.group}"


def packed_schemes(model: nn.Module) -> list[Scheme]:
    """The schemes of the packed layers of a model."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return [msgspec.json.decode(layer._scheme, type=Scheme) for layer in layers]


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what ``nn.Linear`` does with its weight and bias, if need be by its own ``forward``."""
    if type(module).forward is nn.Linear.forward or not isinstance(module, nn.Linear):
        return isinstance(module, nn.Linear)
    inputs, weight = torch.linspace(-1, 2, 8).view(4, 2), torch.linspace(-3, 1, 6).view(3, 2)
    parameters = {"weight": weight} | ({} if module.bias is None else {"bias": torch.tensor([0.5, -1.0, 2.0])})
    try:
        result = torch.func.functional_call(module, parameters, (inputs,))
    except Exception:  # it needs other arguments, or other sizes
        return False
    expected = nn.functional.linear(inputs, weight, parameters.get("bias"))
    return isinstance(result, torch.Tensor) and result.shape == expected.shape and torch.allclose(result, expected)


def _computed(
    inputs: torch.Tensor, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None, scheme: str
) -> torch.Tensor:
    parts = [
        nn.functional.linear(inputs, weight, None if bias is None else bias[rows])
        for weight, rows in _blocks(msgspec.json.decode(scheme, type=Scheme), tensors, inputs.dtype)
    ]
    return torch.cat(parts, dim=-1)


def _shaped(
    inputs: torch.Tensor, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None, scheme: str
) -> torch.Tensor:
    return inputs.new_empty((*inputs.shape[:-1], msgspec.json.decode(scheme, type=Scheme).rows))


torch.library.custom_op(
    "modelexport::quantized_linear",
    _computed,
    mutates_args=(),
    schema="(Tensor inputs, Tensor[] tensors, Tensor? bias, str scheme) -> Tensor",
).register_fake(_shaped)
OPERATOR: Any = torch.ops.modelexport.quantized_linear.default
"""The operator of a call, for those who translate it."""


def dequantized(scheme: Scheme, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The dense weight ``[rows, columns]``, computed in ``dtype``."""
    return torch.cat([weight for weight, _ in _blocks(scheme, tensors, dtype)])


_AT_ONCE = 2**22
"""About how many elements of a dense weight are in memory at once."""


def _blocks(
    scheme: Scheme, tensors: Sequence[torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, slice]]:
    """The dense weight by blocks of rows, and which rows they are."""
    known = FORMATS[scheme.format]
    arrays = {role: TorchTensor(t.detach().cpu()).numpy() for role, t in zip(scheme.roles, tensors, strict=True)}
    codes = known.codes.compute(scheme, arrays)
    scales = _tensor(known.scales.compute(scheme, arrays), dtype)
    zeros = torch.full_like(scales, 2 ** (scheme.bits - 1))
    if known.zero_points is not None and set(known.zero_points.roles) <= set(arrays):
        zeros = _tensor(known.zero_points.compute(scheme, arrays), dtype)
    table = _tensor(known.table(scheme), dtype) if known.table is not None else None
    groups = torch.arange(scheme.columns) // scheme.group
    if scheme.ordered and known.groups is not None:
        groups = torch.from_numpy(known.groups.compute(scheme, arrays)).long()
    step = 2 * max(_AT_ONCE // (2 * scheme.columns), 1)  # an even number of rows ends with a byte
    for start in range(0, scheme.rows, step):
        rows = slice(start, min(start + step, scheme.rows))
        if table is not None:  # its blocks need not end with the rows
            first, last = start * scheme.columns, rows.stop * scheme.columns
            packed = torch.from_numpy(codes[first // 2 : last // 2])
            numbers = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
            weight = table[numbers] * scales[torch.arange(first, last) // scheme.group]
            yield weight.view(-1, scheme.columns), rows
            continue
        # Whole numbers below 256 are exact in every floating-point type.
        weight = torch.from_numpy(unpack(codes[rows], scheme.bits, scheme.columns)).to(dtype)
        yield weight.sub_(zeros[rows][:, groups]).mul_(scales[rows][:, groups]), rows


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    wide: Any = array if array.dtype == np.float64 else array.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(wide)).to(dtype)
