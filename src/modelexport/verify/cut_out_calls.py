"""The inputs and outputs of a file that ``extract`` wrote, as tensors of a call in PyTorch's run of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import Side
from modelexport.errors import UsageError
from modelexport.files.manifest_file import folder_of_stages
from modelexport.format.cut_record import CutRecord, CutValue
from modelexport.format.dtypes import dtype_name
from modelexport.graph.nodes import may_be, required_inputs
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
    """The tensors that the record names; of a value of which it does not tell, the only one
    that is left of its type and shape.
    """
    seen = {tensor.place.name: tensor for tensor in reference.side(tagged.top, side)}
    by_value = {v: seen[each.tensor] for v, each in zip(values, known, strict=False) if each.tensor in seen}
    left = [tensor for tensor in seen.values() if tensor not in by_value.values()]
    fitting: Mapping[ir.Value, list[SeenTensor]] = {
        value: [
            tensor
            for tensor in left
            if value.dtype is not None
            and tensor.dtype == dtype_name(value.dtype)
            and may_be(value.shape, ir.Shape(tensor.shape))
        ]
        for value, each in zip(values, known, strict=False)
        if each.tensor is None
    }
    chosen = [tensors[0] for tensors in fitting.values() if len(tensors) == 1]
    by_value |= {
        v: t[0] for v, t in fitting.items() if len(t) == 1 and sum(t[0] is candidate for candidate in chosen) == 1
    }
    return {value: by_value[value] for value in values if value in by_value}
