"""The weights of a PyTorch model: read for the comparison (:mod:`.parameter_comparison`), and changed on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir
import torch
from torch import nn

from modelexport.files.path_or_model import Source
from modelexport.graph.parameter_plans import state_dict_of
from modelexport.pytorch.nested_tensors import as_array, as_stored
from modelexport.pytorch.perturbed_weights import entries_of, indistinct, perturbed
from modelexport.tagged.file import read_tagged
from modelexport.verify.parameter_comparison import (
    compare_parameters,
    differing_buffers,
    merged_entries,
    perturbable,
    untraced_entries,
)
from modelexport.verify.verify_report import ParameterReport
from modelexport.weights.bytes_of_entries import Weights


def verify_parameters(model: nn.Module, path: Source) -> ParameterReport:
    """Compare each parameter in a tagged file with the model's ``state_dict``, bit for bit."""
    return compare_with_model(model, read_tagged(path).model)


def compare_with_model(
    model: nn.Module, file: ir.Model, weights: Weights | None = None, only: set[str] | None = None
) -> ParameterReport:
    """Compare each parameter in a file with the model's ``state_dict``, bit for bit.

    Args:
        weights: The places of the weights of a model that was built without them.
        only: The names of the initializers to compare; by default all.
    """
    tensors, apart = entries_of(model), weights.tensors if weights is not None else {}

    def read(key: str) -> Any:
        return apart[key].numpy() if key in apart else as_array(as_stored(tensors[key]))

    def is_same_place(key: str, tensor: ir.TensorProtocol) -> bool:
        return key in apart and _same_place(apart[key], tensor)

    report = compare_parameters(file, tensors.keys(), read, is_same_place=is_same_place, only=only)
    if weights is not None or only is not None:
        return report
    unsaved = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in tensors}
    wrong = differing_buffers(file, lambda name: as_array(unsaved[name]), unsaved)
    return msgspec.structs.replace(report, differing=[*report.differing, *wrong])


def _same_place(first: ir.TensorProtocol, second: ir.TensorProtocol) -> bool:
    """Whether two tensors are the same bytes of one file, and so are known to be equal without reading them."""
    if not isinstance(first, ir.ExternalTensor) or not isinstance(second, ir.ExternalTensor):
        return False
    facts = [(t.offset, t.length, t.dtype, tuple(t.shape.numpy())) for t in (first, second)]
    return facts[0] == facts[1] and Path(first.path).samefile(second.path)


def changed_weights(
    model: nn.Module, file: ir.Model, perturb: bool | None
) -> tuple[Mapping[str, torch.Tensor], list[str]]:
    """Other weights for both sides, of which no two are equal; empty if that is not needed or not possible, and why.

    Args:
        perturb: Whether to change all; by default those that are equal to others, constant or nearly zero.
    """
    if perturb is False:
        return {}, []
    keys = perturbable(file)
    if perturb is None:
        keys = indistinct(model, keys)
        if keys and (folded := _folded(model, file)):
            more = f" and {len(folded) - 1} others" if len(folded) > 1 else ""
            return {}, [f"weights were not perturbed: another tool folded or merged {folded[0]}{more}"]
    return (perturbed(model, keys) if keys else {}), []


def _folded(model: nn.Module, file: ir.Model) -> list[str]:
    """The entries that cannot be given other values in a file, because it no longer has them as they are."""
    tensors = entries_of(model)

    def is_tied(first: str, second: str) -> bool:
        return first in tensors and second in tensors and tensors[first].data_ptr() == tensors[second].data_ptr()

    used = {key for key, entry in state_dict_of(file).items() if entry.used}
    return sorted((untraced_entries(file) | merged_entries(file, is_tied)) & used)
