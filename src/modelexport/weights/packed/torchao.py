"""torchao, weight-only: ``_weight_qdata``, ``_weight_scale`` and ``_weight_zero_point`` of integer tensors.

Specification: ``prototype/safetensors/safetensors_support.py`` of pytorch/ao, which flattens tensors and describes each
in the metadata of the file; ``Int8Tensor`` and ``IntxUnpackedToInt8Tensor`` in ``quantization/quantize_/workflows``.

- ``qdata`` int8 ``[rows, columns]``, also for numbers of 4 bits; ``scale`` ``[rows, columns / group]``.
- ``zero_point``: absent, int8, or whole numbers as floats; ``[rows, columns / group]``.
- A weight is ``scale * (number - zero point)``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from modelexport.errors import WeightsError
from modelexport.weights.packed.bit_packing import pack
from modelexport.weights.packed.scheme import FLOATS, Component, Format, Reader, Scheme, Tensors, whole_groups

_INTEGERS = {"int4": 4, "int8": 8}


def _find(settings: Mapping[str, Any], checkpoint: Reader) -> dict[str, Scheme]:
    schemes = {}
    for layer in checkpoint.layers("_weight_qdata"):
        try:
            described = json.loads(checkpoint.notes[f"{layer}.weight"])
            kind, data = described["_type"], described["_data"]
            block = data["block_size"]
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"the metadata of the file do not describe {layer}.weight: save the checkpoint again"
            ) from error
        schemes[layer] = _scheme(layer, checkpoint, kind, data, block)
    return schemes


def _scheme(layer: str, checkpoint: Reader, kind: str, data: Mapping[str, Any], block: Any) -> Scheme:
    bits = {"Int8Tensor": 8, "IntxUnpackedToInt8Tensor": _INTEGERS.get(_name(data.get("target_dtype")))}.get(kind)
    active = data.get("act_quant_kwargs") or data.get("activation_quantization")
    active = active or any(name.startswith(f"{layer}._weight_act_") for name in checkpoint.places)
    shape = checkpoint.places[f"{layer}._weight_qdata"].shape
    is_block = isinstance(block, list) and len(block) == 2 and block[0] == 1 and type(block[1]) is int
    if bits is None or active or len(shape) != 2 or not is_block:
        raise WeightsError(
            f"{layer}.weight is a {kind} of torchao{' with quantized activations' if active else ''}: modelexport "
            "reads weight-only Int8Tensor and IntxUnpackedToInt8Tensor of int4 and int8, by group and by channel"
        )
    rows, columns = shape
    size = whole_groups(layer, columns, block[1])
    checkpoint.check(f"{layer}._weight_qdata", shape, "int8")
    checkpoint.check(f"{layer}._weight_scale", (rows, columns // size), *FLOATS)
    roles = ["_weight_qdata", "_weight_scale"]
    if (zeros := f"{layer}._weight_zero_point") in checkpoint.places:
        checkpoint.check(zeros, (rows, columns // size), "int8", *FLOATS)
        roles.append("_weight_zero_point")
    return Scheme(format="torchao", rows=rows, columns=columns, bits=bits, group=size, roles=tuple(roles))


def _name(value: Any) -> str:
    """A type as the metadata spell it: ``int4`` or ``torch.int4``, alone or as the ``_data`` of an object."""
    return str(value.get("_data") if isinstance(value, dict) else value).removeprefix("torch.")


def _unsigned(name: str, tensors: Tensors, bits: int) -> np.ndarray:
    """The numbers plus half their range."""
    numbers = tensors[name].astype(np.float32) + 2 ** (bits - 1)
    if ((numbers < 0) | (numbers >= 2**bits) | (numbers != np.rint(numbers))).any():
        raise WeightsError(f"{name} has numbers that are not integers of {bits} bits: save the checkpoint again")
    return numbers.astype(np.uint8)


FORMAT = Format(
    find=_find,
    codes=Component(
        ("_weight_qdata",), lambda scheme, tensors: pack(_unsigned("_weight_qdata", tensors, scheme.bits), scheme.bits)
    ),
    scales=Component(("_weight_scale",), lambda scheme, tensors: tensors["_weight_scale"], is_bytes=True),
    zero_points=Component(
        ("_weight_zero_point",), lambda scheme, tensors: _unsigned("_weight_zero_point", tensors, scheme.bits)
    ),
)
