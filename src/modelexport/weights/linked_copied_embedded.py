"""During writing: which weights are linked, copied, embedded or left out.

The rules follow from what ONNX Runtime accepts as external data: any file in or below the model's folder, hard links
included, but nothing outside the folder and no symbolic link out of it. `onnx.checker` refuses hard links.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from modelexport.errors import OutputError
from modelexport.files import onnx_models
from modelexport.files.external_data import sample_digest
from modelexport.files.linked_weights import clone_or_link, free_place, seal
from modelexport.files.safetensors_files import SafetensorsFile
from modelexport.format import documents, keys
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.graph.properties import record
from modelexport.weights.bytes_of_entries import Weights

_Tensors = dict[ir.Value, ir.TensorProtocol]


@dataclass
class WeightsSummary:
    """The places of the weights of a written file."""

    linked: dict[str, str] = field(default_factory=dict)
    """The location of each linked weights file to how it got there: ``in place``, ``clone`` or ``hard link``."""
    linked_bytes: int = 0
    copied_bytes: int = 0
    """Bytes in ``NAME.onnx.data``."""
    absent_bytes: int = 0
    made: dict[str, str] = field(default_factory=dict)
    """The initializers that are not in the checkpoint unchanged, to the operations that compute them."""

    @property
    def is_apart(self) -> bool:
        """Whether some weights are not in the model file."""
        return bool(self.linked or self.copied_bytes or self.absent_bytes)


def place_weights(
    model: ir.Model, path: Path, staging: Path, *, mode: str, weights: Weights | None
) -> tuple[_Tensors, WeightsSummary]:
    """Write or link the weights files of a model in ``staging``; they will be moved beside ``path`` later.

    Args:
        mode: ``link``, ``copy``, ``none``, or ``auto``: embedded up to 1 GB; above that, linked if ``weights`` are
            given, otherwise copied.
        weights: The places of these entries.

    Returns:
        What is written into the model file for each initializer, its numbers or where these are, and a summary.

    Raises:
        OutputError: The files of the weights cannot be linked into the folder.
    """
    summary = WeightsSummary()
    values = {value: value.const_value for value in initializers(model) if value.const_value is not None}
    if mode == "auto":
        small = onnx_models.fits_inside(sum(tensor.nbytes for tensor in values.values()))
        mode = "link" if weights is not None else "embed" if small else "copy"
    linked, to_file, embedded = _divided(values, mode)
    computed = weights.made if weights is not None else {}
    for value in (*to_file, *embedded):
        if isinstance(values[value], ir.LazyTensor):
            summary.made[value.name or ""] = computed.get(values[value].name or "", "repacked")
    placed: _Tensors = {value: onnx_models.inside_file(tensor) for value, tensor in embedded.items()}
    if linked:
        assert weights is not None
        placed |= _link(model, linked, weights, path, staging, summary)
    data = path.name + keys.DATA_SUFFIX
    total = sum(tensor.nbytes for tensor in to_file.values())
    if mode == "none":
        placed |= _leave_out(to_file, data)
        summary.absent_bytes = total
    elif to_file:
        placed |= onnx_models.write_data_file(to_file, staging, data)
        record(model, keys.DATA, {data: seal(staging / data)})
        summary.copied_bytes = total
    return placed, summary


def _divided(values: Mapping[ir.Value, ir.TensorProtocol], mode: str) -> tuple[_Tensors, _Tensors, _Tensors]:
    """The initializers that stay in their files, those for the data file, and those for the model file."""
    linked: _Tensors = {}
    to_file: _Tensors = {}
    embedded: _Tensors = {}
    constants = sum(tensor.nbytes for value, tensor in values.items() if parameter_plan(value) is None)
    for value, tensor in values.items():
        if mode == "link" and isinstance(tensor, ir.ExternalTensor):
            linked[value] = tensor
        elif mode == "embed" or tensor.nbytes < onnx_models.SMALLEST_OUTSIDE:
            embedded[value] = tensor
        # With linked or absent weights, constants stay in the model file unless they are large themselves.
        elif (
            mode == "copy"
            or parameter_plan(value) is not None
            or (mode == "link" and not onnx_models.fits_inside(constants))
        ):
            to_file[value] = tensor
        else:
            embedded[value] = tensor
    return linked, to_file, embedded


def _link(
    model: ir.Model, linked: _Tensors, weights: Weights, path: Path, staging: Path, summary: WeightsSummary
) -> _Tensors:
    """References to the files of initializers; a file outside the folder of ``path`` is linked into it."""
    used = {tensor.path for tensor in linked.values() if isinstance(tensor, ir.ExternalTensor)}
    locations: dict[str, str] = {}
    recorded: dict[str, documents.WeightsFile] = {}
    for file in weights.files:
        real = os.path.realpath(file.path)
        if real in used and real not in locations:
            location, how = _place(file, path, staging)
            locations[real] = location
            summary.linked[location] = how
            recorded[location] = documents.WeightsFile(file.size, file.header, sample_digest(file.path))
    record(model, keys.WEIGHTS, recorded)
    placed: _Tensors = {}
    for value, tensor in linked.items():
        assert isinstance(tensor, ir.ExternalTensor)
        placed[value] = in_file(locations[tensor.path], tensor, value.name or "", path.parent)
        summary.linked_bytes += tensor.nbytes
    return placed


def in_file(location: str, tensor: ir.ExternalTensor, name: str, folder: Path) -> ir.ExternalTensor:
    """A tensor of a file that has another location, relative to a folder."""
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(
        location, tensor.offset, tensor.length, tensor.dtype, shape=shape, name=name, base_dir=folder
    )


def _place(file: SafetensorsFile, path: Path, staging: Path) -> tuple[str, str]:
    """The location of a file, relative to the folder of ``path``, and how it got there."""
    real, folder = Path(os.path.realpath(file.path)), Path(os.path.realpath(path.parent))
    if real.is_relative_to(folder):
        return real.relative_to(folder).as_posix(), "in place"
    target = free_place(path, staging, real, file.path.name)
    return target.name, link_file(file, target)


def link_file(file: SafetensorsFile, target: Path) -> str:
    """Link a file to a second place without copying; returns how: ``clone`` or ``hard link``."""
    try:
        return clone_or_link(Path(os.path.realpath(file.path)), target)
    except OSError as error:
        raise OutputError(
            f"{file.path} cannot be linked into {target.parent} ({error.strerror}): write the model to the folder of "
            f"the weights or above, or copy {file.size / 1e9:,.1f} GB with --weights copy"
        ) from error


def _leave_out(absent: _Tensors, data: str) -> _Tensors:
    """References to initializers at consecutive offsets in a data file that is not written."""
    offset = 0
    placed: _Tensors = {}
    for value, tensor in absent.items():
        shape = ir.Shape(tensor.shape.numpy())
        placed[value] = ir.ExternalTensor(data, offset, tensor.nbytes, tensor.dtype, shape=shape, name=value.name or "")
        offset += tensor.nbytes
    return placed
