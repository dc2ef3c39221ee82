"""The types of values that optimizers leave out, as ONNX Runtime finds them."""

from __future__ import annotations

import re

import onnx_ir as ir

from modelexport.graph.copies import copy_of
from modelexport.graph.missing_types import fill_types
from modelexport.runtime.sessions import open_session
from modelexport.tagged.file import TaggedFile


def infer_types(tagged: TaggedFile) -> None:
    """Give every value of the main graph its type, in place, as ONNX Runtime finds it: optimizers leave out many."""
    graph = tagged.model.graph
    untyped = {value.name: value for node in graph for value in node.outputs if value.name and value.dtype is None}
    if untyped:
        copy = copy_of(tagged.model)  # its tensors are the model's
        fill_types(copy)
        values = [value for node in copy.graph for value in node.outputs if value.name in untyped]
        copy.graph.outputs[:] = [value for value in values if value.dtype is not ir.DataType.BFLOAT16]
        for typed in open_session(copy, folder=tagged.path.parent).get_outputs():
            value, kind = untyped.get(typed.name), _KIND.fullmatch(typed.type)
            if value is not None and kind is not None and kind[1]:
                value.type = ir.SequenceType(ir.TensorType(ir.DataType[kind[2].upper()]))
            elif value is not None and kind is not None:
                value.dtype = ir.DataType[kind[2].upper()]
                if value.shape is None and typed.shape:  # it has [] for a scalar and for an unknown rank
                    value.shape = ir.Shape(typed.shape)


_KIND = re.compile(r"(seq\()?tensor\((\w+)\)+")
"""A type as ONNX Runtime writes it."""
