"""The inputs and outputs of a file that ``extract`` wrote, as tensors of a call in PyTorch's run of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import Side
from modelexport.errors import UsageError
from modelexport.files.manifest_file import folder_of_stages
from modelexport.format.cut_record import CutRecord, CutValue
from modelexport.format.documents import CallTensor
from modelexport.graph.boundaries import match_values
from modelexport.graph.nodes import required_inputs
from modelexport.tagged.file import TaggedFile
from modelexport.traces.trace import SeenTensor, Trace


def arguments_of_cut(tagged: TaggedFile, cut: CutRecord, reference: Trace) -> dict[str, Any]:
    """What the call got in a run, under the names of the file's inputs, in float64 or in the types of the file."""
    if tagged.top not in reference.parents:
        raise UsageError(f"{tagged.path} is the call '{cut.call}', which the model does not make with these inputs")
    values = required_inputs(tagged.model)
    tensors = _tensors(tagged, values, cut.inputs, reference, "inputs")
    feeds: dict[str, Any] = {}
    for value in values:
        if value not in tensors:
            raise UsageError(
                f"{tagged.path}: '{value.name}' is not an argument of '{cut.call}', so that a run of the model does "
                f"not give it: compare with the file that it was cut from (compare {tagged.path} {cut.file} --numbers)"
            )
        array, dtype = array_of(tensors[value]), value.dtype
        narrows = not reference.is_float64 and dtype is not None and array.dtype.kind == "f"
        feeds[value.name or ""] = array.astype(dtype.numpy()) if narrows and dtype is not None else array
    return feeds


def refuse_stage(path: Path, whole: str | Path) -> None:
    """Refuse one of the stages of a split file, which takes what the stages before it compute.

    Args:
        whole: The file that was split, as one types it.
    """
    if (folder := folder_of_stages(path)) is not None:
        raise UsageError(
            f"{path} is a stage of a split file: compare all stages together, modelexport compare {folder}/ "
            f"{whole} --numbers"
        )


def array_of(tensor: SeenTensor) -> Any:
    """The elements of a tensor in its shape; equal ones are kept once, in the shape that they had first."""
    return tensor.content.array.reshape(tensor.shape)


def results_of_cut(tagged: TaggedFile, cut: CutRecord, reference: Trace) -> dict[ir.Value, SeenTensor]:
    """The outputs of the file that are results of the call, with what it returned in a run."""
    return _tensors(tagged, tagged.model.graph.outputs, cut.outputs, reference, "outputs")


def _tensors(
    tagged: TaggedFile, values: Sequence[ir.Value], known: Sequence[CutValue], reference: Trace, side: Side
) -> dict[ir.Value, SeenTensor]:
    """The tensors that the record names; those of other values that fit, as :func:`match_values` has them."""
    seen = {tensor.place.name: tensor for tensor in reference.side(tagged.top, side)}
    pairs = [(value, each.tensor) for value, each in zip(values, known, strict=False)]
    named = {name: value.name for value, name in pairs if name in seen}
    tensors = [CallTensor(name, tensor.dtype, list(tensor.shape), named.get(name)) for name, tensor in seen.items()]
    matched = match_values([value for value, name in pairs if name is None or name in seen], tensors)
    return {value: seen[matched[value].name] for value in values if value in matched}
