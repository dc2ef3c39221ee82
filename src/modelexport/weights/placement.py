"""Writing a model whose weights stay in the files of a checkpoint: linked, copied one at a time, or left out.

What ONNX Runtime takes as the place of external data decides: nothing outside the folder of the model, no symbolic link
that leads out of it, but any file in it or below, hard links included. `onnx.checker` refuses hard links.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from modelexport.errors import OutputError
from modelexport.files.links import clone_or_link
from modelexport.files.onnx_models import LARGEST_INSIDE, save_with_references
from modelexport.files.safetensors_files import SafetensorsFile
from modelexport.format import documents, keys
from modelexport.graph.nodes import initializers
from modelexport.weights.sources import Weights

_EMBEDDED = 256
"""Bytes of the largest weight that is written into the model where others go to a file: onnx_ir's own limit."""


@dataclass
class WeightsSummary:
    """Where the weights of a written file are."""

    linked: dict[str, str] = field(default_factory=dict)
    """The location of each file that weights stay in to how it got there: ``in place``, ``clone`` or ``hard link``."""
    linked_bytes: int = 0
    copied_bytes: int = 0
    """In ``NAME.onnx.data``."""
    absent_bytes: int = 0
    made: dict[str, str] = field(default_factory=dict)
    """The initializers that no file of the checkpoint has as they are, and the operations that made them."""

    @property
    def is_apart(self) -> bool:
        """Whether some are not in the model itself."""
        return bool(self.linked or self.copied_bytes or self.absent_bytes)

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "linked": self.linked,
            "linked_bytes": self.linked_bytes,
            "copied_bytes": self.copied_bytes,
            "absent_bytes": self.absent_bytes,
            "made": self.made,
        }


def use_weights(model: ir.Model, names: Mapping[str, tuple[str, ...]], weights: Weights) -> None:
    """Make each initializer that is an entry of ``weights`` point to it, in place.

    Args:
        names: The name of an initializer to the ``state_dict`` keys that it is.
    """
    for value in initializers(model):
        for key in names.get(value.name or "", ()):
            if key in weights.tensors:
                value.const_value = weights.tensors[key]


def stays_in_file(value: ir.Value | None) -> bool:
    """Whether the bytes of a value are in a file, so that nothing may be computed from them."""
    return value is not None and isinstance(value.const_value, (ir.ExternalTensor, ir.LazyTensor))


def save_with_weights(
    model: ir.Model, path: Path, staging: Path, *, mode: str, parameters: Collection[str], weights: Weights | None
) -> WeightsSummary:
    """Write a model to ``staging``, from where it will be moved to ``path``.

    Args:
        mode: ``link``, ``copy``, ``none``, or ``auto``: embedded up to 1 GB, above linked where there are ``weights``
            and copied where there are none.
        parameters: Names of the initializers that come from ``state_dict`` entries.
        weights: Where these are.

    Raises:
        OutputError: The files of the weights cannot be linked into the folder.
    """
    summary = WeightsSummary()
    values = {value: value.const_value for value in initializers(model) if value.const_value is not None}
    if mode == "auto":
        large = sum(tensor.nbytes for tensor in values.values()) > LARGEST_INSIDE
        mode = "link" if weights is not None else "copy" if large else "embed"
    linked, to_file, embedded = _divided(values, mode, parameters)
    made = weights.made if weights is not None else {}
    for value in (*to_file, *embedded):
        if isinstance(values[value], ir.LazyTensor):
            summary.made[value.name or ""] = made[values[value].name or ""]
    if linked:
        assert weights is not None
        _link(model, linked, weights, path, staging, summary)
    for value in embedded:
        if stays_in_file(value):
            value.const_value = ir.Tensor(values[value].numpy().copy(), dtype=values[value].dtype, name=value.name)
    data = f"{path.name}.data"
    if mode == "none":
        _leave_out(to_file, data, summary)
    elif to_file:
        external = ir.external_data.convert_tensors_to_external(list(to_file.values()), staging, data)
        for value, tensor in zip(to_file, external, strict=True):
            tensor.name = value.name or ""
            value.const_value = tensor
            summary.copied_bytes += tensor.nbytes
    save_with_references(model, staging / path.name)
    return summary


_Tensors = dict[ir.Value, ir.TensorProtocol]


def _divided(
    values: Mapping[ir.Value, ir.TensorProtocol], mode: str, parameters: Collection[str]
) -> tuple[_Tensors, _Tensors, _Tensors]:
    """The initializers that stay where they are, those that go to the data file, and those that go into the model."""
    linked: _Tensors = {}
    to_file: _Tensors = {}
    embedded: _Tensors = {}
    constants = sum(tensor.nbytes for value, tensor in values.items() if value.name not in parameters)
    for value, tensor in values.items():
        if mode == "link" and isinstance(tensor, ir.ExternalTensor):
            linked[value] = tensor
        elif mode == "embed" or tensor.nbytes <= _EMBEDDED:
            embedded[value] = tensor
        # Constants stay in the model beside weights that are linked or absent, unless they are large themselves.
        elif mode == "copy" or value.name in parameters or (mode == "link" and constants > LARGEST_INSIDE):
            to_file[value] = tensor
        else:
            embedded[value] = tensor
    return linked, to_file, embedded


def _link(
    model: ir.Model, linked: _Tensors, weights: Weights, path: Path, staging: Path, summary: WeightsSummary
) -> None:
    """Point the initializers to their files, which get a place in the folder of ``path`` where they have none."""
    used = {tensor.path for tensor in linked.values() if isinstance(tensor, ir.ExternalTensor)}
    locations: dict[str, str] = {}
    recorded: dict[str, documents.WeightsFile] = {}
    for file in weights.files:
        real = os.path.realpath(file.path)
        if real in used and real not in locations:
            location, how = _place(file, path, staging)
            locations[real] = location
            summary.linked[location] = how
            recorded[location] = documents.WeightsFile(file.size, file.header)
    for value, tensor in linked.items():
        assert isinstance(tensor, ir.ExternalTensor)
        value.const_value = ir.ExternalTensor(
            locations[tensor.path],
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=path.parent,
        )
        summary.linked_bytes += tensor.nbytes
    model.metadata_props[keys.WEIGHTS] = msgspec.json.encode(recorded).decode()


def _place(file: SafetensorsFile, path: Path, staging: Path) -> tuple[str, str]:
    """Where a file is, seen from the folder of ``path``, and how it got there."""
    real, folder = Path(os.path.realpath(file.path)), Path(os.path.realpath(path.parent))
    if real.is_relative_to(folder):
        return real.relative_to(folder).as_posix(), "in place"
    target = staging / f"{path.stem}.{file.path.name}"
    try:
        how = clone_or_link(real, target)
    except OSError as error:
        raise OutputError(
            f"{file.path} cannot be linked into {path.parent} ({error.strerror}): write the model to the folder of the "
            f"weights or above, or copy {file.size / 1e9:,.1f} GB with --weights copy"
        ) from error
    return target.name, how


def _leave_out(absent: _Tensors, data: str, summary: WeightsSummary) -> None:
    """Describe initializers as though they were in a data file, one after the other, which is not written."""
    offset = 0
    for value, tensor in absent.items():
        shape = ir.Shape(tensor.shape.numpy())
        value.const_value = ir.ExternalTensor(
            data, offset, tensor.nbytes, tensor.dtype, shape=shape, name=value.name or ""
        )
        offset += tensor.nbytes
    summary.absent_bytes = offset


@contextlib.contextmanager
def reachable(staging: Path, path: Path, summary: WeightsSummary) -> Iterator[None]:
    """Inside, the model in ``staging`` can be run: files that it is linked to beside ``path`` can be found from there.

    Raises:
        OutputError: They cannot.
    """
    added: list[Path] = []
    try:
        for location, how in summary.linked.items():
            if how == "in place":
                target = staging / location
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path.parent / location, target)
                added.append(target)
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be run before it is in place ({error}): verify it afterwards") from error
    finally:
        for target in added:
            target.unlink()
