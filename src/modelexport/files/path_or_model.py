"""Turns what Python functions take for a file, a path or an open model, into the path of a file."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from modelexport.errors import FileFormatError

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

Source: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model"
"""A path, anything that has one (a result of this package), or an open model of ``onnx`` or ``onnx_ir``."""


class _Temporary(type(Path())):  # type: ignore[misc]  # PosixPath or WindowsPath
    """The path of a file that is removed when nobody has this path any more."""


def as_path(source: Source) -> Path:
    """The path of a file. An open model is written to a temporary one, which lives as long as the path."""
    if isinstance(source, _Temporary):
        return source
    if isinstance(source, str | os.PathLike):
        return Path(source)
    import onnx
    import onnx_ir as ir

    from modelexport.files.map_types import model_of
    from modelexport.files.onnx_models import save_model
    from modelexport.format import keys
    from modelexport.graph.copies import copy_of
    from modelexport.graph.nodes import initializers
    from modelexport.graph.properties import record, take_properties

    if not isinstance(source, onnx.ModelProto | ir.Model):
        raise FileFormatError(f"{type(source).__name__} is neither a path nor an ONNX model: give one of them")
    folder = tempfile.mkdtemp(prefix="modelexport-")
    path = _Temporary(folder, "model.onnx")
    weakref.finalize(path, shutil.rmtree, folder, ignore_errors=True)
    model = model_of(source) if isinstance(source, onnx.ModelProto) else copy_of(source)
    for value in initializers(model):
        take_properties(value, shared=True)
    for key in (keys.DATA, keys.WEIGHTS, keys.DOCUMENTS):  # of the files that it was read from
        record(model, key, None)
    try:
        save_model(model, path)
    except OSError as error:
        name = error.filename or error
        raise FileFormatError(f"the weights of the model cannot be read ({name}): give the path of its file") from error
    return path
