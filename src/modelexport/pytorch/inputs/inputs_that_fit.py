"""Example inputs for a model and a file of it that was exported with others, in the sizes that the file declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import onnx_ir as ir
import torch

from modelexport.errors import FileFormatError, InputsError
from modelexport.graph.nodes import may_be, required_inputs
from modelexport.graph.size_symbols import put_size
from modelexport.pytorch.inputs.named_inputs import under_names
from modelexport.pytorch.inputs.other_sizes import inputs_of_file, with_sizes, within_conditions
from modelexport.pytorch.nested_tensors import Inputs, tensors_in
from modelexport.pytorch.private_torch import tree_map
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.traces.reference_values import open_reference, reference_path


def inputs_that_fit(example: Inputs, tagged: TaggedFile) -> Inputs:
    """The example if a file takes it; else the inputs of the reference values beside the file, or the example in the
    sizes that the file declares; the example if none of them fits.

    Args:
        example: Inputs that the model takes.
        tagged: The file. For one that was cut out, the file beside it that it was cut from counts.
    """
    if tagged.cut is not None:
        whole = tagged.path.parent / tagged.cut.file
        source = read_tagged(whole) if whole.is_file() else tagged
        return example if source.cut is not None else inputs_that_fit(example, source)
    names = [value.name or "" for value in required_inputs(tagged.model)]
    for inputs in _candidates(example, tagged):
        if not _misfit(under_names(inputs, names), tagged):
            return inputs
    return example


def check_inputs_fit(feeds: Mapping[str, Any], tagged: TaggedFile) -> None:
    """Check that arrays have the sizes that a file declares for its inputs."""
    if misfit := _misfit(feeds, tagged):
        raise InputsError(f"{misfit}: give the inputs that it was exported with (--inputs SPEC.json)")


def _misfit(feeds: Mapping[str, Any], tagged: TaggedFile) -> str:
    """Which array has other sizes than a file declares; empty if none has."""
    for value in required_inputs(tagged.model):
        shape = getattr(feeds.get(value.name or ""), "shape", None)
        if shape is not None and not may_be(value.shape, ir.Shape(shape)):
            declared = ", ".join(map(str, _sizes(value)))
            return f"input {value.name} of {tagged.path} is [{declared}], and not {list(shape)}"
    return ""


def _sizes(value: ir.Value) -> list[int | str]:
    return [size if isinstance(size, int) else size.value or "?" for size in value.shape or ()]


def _candidates(example: Inputs, tagged: TaggedFile) -> Iterator[Inputs]:
    yield within_conditions(example, tagged.model)
    if reference_path(tagged.path).is_file():
        with suppress(FileFormatError, TypeError), open_reference(tagged) as reference:
            arrays = {name: torch.as_tensor(array) for name, array in reference.inputs.items()}
            yield _replaced(example, tagged, arrays)
    names, drawn = inputs_of_file(example, tagged.model), {}
    declared = {value.name or "": _sizes(value) for value in required_inputs(tagged.model) if value.shape is not None}
    for name, tensor in tensors_in(example):
        sizes = declared.get(names.get(name, ""), [*tensor.shape])
        if tensor.ndim != len(sizes):
            drawn[names[name]] = _drawn(tensor, [put_size(str(size), {}) for size in sizes])
    fixed: dict[str, list[str | None]] = {name: [str(size) for size in sizes] for name, sizes in declared.items()}
    yield within_conditions(with_sizes(_replaced(example, tagged, drawn), tagged.model, {}, fixed), tagged.model)


def _drawn(tensor: torch.Tensor, sizes: list[int | str]) -> torch.Tensor:
    """Numbers like those of a tensor in other sizes: dynamic ones are 2 for the first axis, 8 for others."""
    shape = [size if isinstance(size, int) else 8 if axis else 2 for axis, size in enumerate(sizes)]
    if tensor.is_floating_point():
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))
    index = torch.arange(torch.Size(shape).numel(), device=tensor.device) % max(tensor.numel(), 1)
    return tensor.flatten()[index].reshape(shape)


def _replaced(example: Inputs, tagged: TaggedFile, tensors: Mapping[str, torch.Tensor]) -> Inputs:
    """An example with other tensors for inputs of a file, in its types."""
    names = inputs_of_file(example, tagged.model)
    others = {id(tensor): tensors.get(names.get(name, "")) for name, tensor in tensors_in(example)}

    def replaced(value: Any) -> Any:
        other = others.get(id(value))
        return value if other is None else other.to(value)

    return tree_map(replaced, example)
