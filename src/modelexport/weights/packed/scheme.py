"""What a format says of one packed weight: the same fields for all formats, and the functions that unpack it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from modelexport.errors import WeightsError
from modelexport.files.safetensors_files import TensorLocation
from modelexport.format.dtypes import dtype_name

Tensors = Mapping[str, np.ndarray]
"""The tensors of a weight by their roles."""
FLOATS = ("float16", "bfloat16", "float32")
"""Types of scales."""


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """One weight of ``rows`` outputs and ``columns`` inputs, each number in ``bits`` bits."""

    format: str
    rows: int
    columns: int
    bits: int
    group: int
    """Consecutive numbers of a row that share a scale."""
    roles: tuple[str, ...]
    """The names of its tensors in the checkpoint, without the name of the layer."""
    variant: str = ""
    """A variant of the format: its version, or the name of a table; empty if there is only one."""
    ordered: bool = False
    """Whether the columns of a group are not consecutive (activation order): a tensor tells the group of each."""


@dataclass(frozen=True)
class Component:
    """One part of a weight, computed from some of its tensors."""

    roles: tuple[str, ...]
    compute: Callable[[Scheme, Tensors], np.ndarray]
    is_bytes: bool = False
    """Whether the result has the bytes of the first tensor, if the columns need not be sorted."""


@dataclass(frozen=True)
class Reader:
    """The tensors of a checkpoint by name: their places, and their contents on demand."""

    places: Mapping[str, TensorLocation]
    notes: Mapping[str, Any]
    """The metadata in the headers of the files."""

    def read(self, name: str) -> np.ndarray:
        return self.places[name].tensor(name).numpy().copy()

    def layers(self, role: str) -> list[str]:
        """The names of the layers that have a tensor of this role."""
        return [name.removesuffix(f".{role}") for name in self.places if name.endswith(f".{role}")]

    def check(self, name: str, shape: Sequence[int], *dtypes: str) -> None:
        """Refuse a checkpoint without this tensor, or in which it has another shape or type."""
        place = self.places.get(name)
        if place is None:
            raise WeightsError(f"the checkpoint lacks {name}: copy or download it again", missing=[name])
        dtype = dtype_name(place.dtype)
        if place.shape != tuple(shape) or (dtypes and dtype not in dtypes):
            wanted = f"{' or '.join(dtypes) or dtype}{list(shape)}"
            raise WeightsError(
                f"{name} is {dtype}{list(place.shape)} and should be {wanted}: the files of the checkpoint do not fit "
                "its quantization_config; download both again",
                misshapen=[name],
            )


@dataclass(frozen=True)
class Format:
    """How the weights of one format are found and unpacked."""

    find: Callable[[Mapping[str, Any], Reader], dict[str, Scheme]]
    """From ``quantization_config`` and the tensors: the name of each layer to its scheme."""
    codes: Component
    """``uint8[rows, columns * bits / 8]``: the unsigned numbers, packed as in ``packed/bit_packing.py``."""
    scales: Component
    """``[rows, columns / group]``, or as many in one row where the groups do not end with the rows."""
    zero_points: Component | None = None
    """``uint8[rows, columns / group]``; absent for a table. The number that means zero."""
    groups: Component | None = None
    """``int32[columns]``: the group of each column, if the scheme is ordered."""
    table: Callable[[Scheme], np.ndarray] | None = None
    """The values that the numbers mean, if these are not equally spaced."""
    unread: tuple[str, ...] = ()
    """Roles of tensors from which nothing is computed: sizes, fixed tables."""


def whole_groups(layer: str, columns: int, group: int) -> int:
    """The size of a group, ``-1`` meaning all columns."""
    size = columns if group == -1 else group
    if size < 1 or columns % size:
        raise WeightsError(
            f"{layer} has {columns} inputs, which groups of {group} do not divide: the files of the checkpoint do not "
            "fit its quantization_config; download both again"
        )
    return size


def setting(settings: Mapping[str, Any], name: str, kind: type) -> Any:
    """A value of ``quantization_config``."""
    value = settings.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        problem = f"is {value!r}" if name in settings else "is missing"
        raise WeightsError(f"{name} {problem} in the quantization_config of config.json: download the checkpoint again")
    return value


def with_groups(scheme: Scheme, layer: str, checkpoint: Reader, role: str) -> Scheme:
    """The scheme with the tensor that tells the group of each column, if the checkpoint has one."""
    if (name := f"{layer}.{role}") not in checkpoint.places:
        return scheme
    checkpoint.check(name, (scheme.columns,), "int32", "int64")
    groups = checkpoint.read(name)
    ordered = not consecutive(scheme, groups)
    if ordered:
        order_of(layer, scheme, groups)
    return msgspec.structs.replace(scheme, roles=(*scheme.roles, role), ordered=ordered)


def consecutive(scheme: Scheme, groups: np.ndarray) -> bool:
    """Whether the groups are consecutive columns, which a tensor of -1 means as well."""
    return bool((groups == np.arange(scheme.columns) // scheme.group).all() or (groups == -1).all())


def order_of(layer: str, scheme: Scheme, groups: np.ndarray) -> np.ndarray:
    """The columns sorted by their groups: ``int64[columns]``."""
    counts = np.bincount(groups[groups >= 0], minlength=scheme.columns // scheme.group)
    if len(counts) * scheme.group != scheme.columns or (counts != scheme.group).any():
        raise WeightsError(f"{layer} does not have {scheme.group} columns in each group: download the checkpoint again")
    return np.argsort(groups, kind="stable").astype(np.int64)
