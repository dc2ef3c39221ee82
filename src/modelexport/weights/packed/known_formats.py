"""The formats by the names that ``quant_method`` has, and what a checkpoint packs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from safetensors import safe_open

from modelexport.errors import WeightsError
from modelexport.files.safetensors_files import SafetensorsFile
from modelexport.weights.packed import awq, bitsandbytes, compressed_tensors, gptq, torchao
from modelexport.weights.packed.scheme import Format, Reader, Scheme

FORMATS: Mapping[str, Format] = {
    "gptq": gptq.FORMAT,
    "awq": awq.FORMAT,
    "compressed-tensors": compressed_tensors.FORMAT,
    "torchao": torchao.FORMAT,
    "bitsandbytes": bitsandbytes.FORMAT,
}
_DOTTED = re.compile(r"(?:^|\.)(weight\.(?:absmax|nested_absmax|nested_quant_map|quant_state\..+))$")
"""The names of bitsandbytes."""


def find_packed(settings: Mapping[str, Any], files: Sequence[SafetensorsFile]) -> dict[str, Scheme]:
    """The packed weights of a checkpoint: the name of each layer to its scheme.

    Args:
        settings: The ``quantization_config`` of ``config.json``.
    """
    method = settings["quant_method"]
    notes: dict[str, str] = {}
    for file in files:
        with safe_open(file.path, framework="numpy") as opened:
            notes.update(opened.metadata() or {})
    places = {name: place for file in files for name, place in file.tensors.items()}
    schemes = FORMATS[method].find(settings, Reader(places, notes))
    if not schemes:
        raise WeightsError(
            f"config.json says that the checkpoint is quantized by {method}, and it has no such weights: download both "
            "again"
        )
    return schemes


def packed_names(layer: str, scheme: Scheme, names: Collection[str]) -> list[str]:
    """The names of all tensors of a packed weight, also of those from which nothing is computed."""
    known = FORMATS[scheme.format]
    parts = (known.codes, known.scales, known.zero_points, known.groups)
    roles = {*scheme.roles, *known.unread, *(role for part in parts if part is not None for role in part.roles)}
    return [name for role in sorted(roles) if (name := f"{layer}.{role}") in names]


def entry_name(name: str) -> str:
    """The name that a tensor of a checkpoint has in a ``state_dict``, where parameters have no dots in their names."""
    dotted = _DOTTED.search(name)
    return name if dotted is None else name[: dotted.start(1)] + dotted[1].replace(".", "_")
