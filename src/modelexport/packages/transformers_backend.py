"""A backend of ``transformers.exporters``: its classes export with this package, and write tagged files.

Only public names are used: ``register_backend``, the classes that it takes, and functions of ``exporters.metadata``.
"""

from __future__ import annotations

import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import torch
from transformers.exporters import ExportFormat, ExportMetadata, OnnxConfig, OnnxExporter, register_backend
from transformers.exporters.auto import get_runner_class
from transformers.exporters.metadata import build_export_metadata, record_output_structure

from modelexport.errors import UsageError
from modelexport.exporting.pipeline import export
from modelexport.format import keys
from modelexport.graph.nodes import initializers
from modelexport.graph.properties import record, take_properties
from modelexport.pytorch.nested_tensors import copied
from modelexport.pytorch.private_torch import tree_structure

FORMAT = "modelexport"
"""The format to ask for: ``AutoHfExporter.from_config({"export_format": "modelexport"})``."""


@dataclass
class TaggedOnnxConfig(OnnxConfig):
    """That of transformers' exporter to ONNX."""

    export_format: str = FORMAT


class TaggedOnnxExporter(OnnxExporter):
    """Exports a model of transformers to a tagged ``onnx_ir.Model``. What it saves, transformers alone loads."""

    export_format: str = FORMAT
    config_class = TaggedOnnxConfig

    def __init__(self) -> None:
        super().__init__()
        self.export_format = ExportFormat.ONNX  # of what it makes: saved and run as any other export to ONNX

    def export_program(
        self, model: Any, sample_inputs: MutableMapping[str, Any], config: OnnxConfig
    ) -> tuple[ir.Model, ExportMetadata]:
        """Trace and translate one graph.

        Raises:
            UsageError: The configuration asks for what is not done here: a quantizer, or fusions for other providers.
            CaptureError, CheckError: As :func:`modelexport.export`.
        """
        fuse = {None: None, "cpu": "ort-cpu", "cuda": "ort-cuda"}.get(config.ort_fusions, "")
        if config.quantizer is not None or fuse == "" or config.dynamic_shapes is not None:
            raise UsageError(
                "the format modelexport has no quantizer, no dynamic_shapes and fusions for cpu and cuda only: export "
                "without them, and quantize the file"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            export(
                model,
                dict(sample_inputs),
                path,
                dynamic=config.dynamic,
                opset=config.opset_version,
                optimized=config.optimize,
                fuse=fuse,
            )
            program = ir.load(path)
            ir.external_data.load_to_model(program)
        for value in initializers(program):  # saved with the value, since transformers replaces the tensor
            take_properties(value)
        for key in (keys.DATA, keys.WEIGHTS, keys.DOCUMENTS):
            record(program, key, None)
        return program, _metadata(model, sample_inputs, self.required_packages)


def register_transformers_backend() -> None:
    """Make the format ``modelexport`` known to ``AutoHfExporter`` and ``AutoExportConfig``."""
    register_backend(TaggedOnnxExporter, get_runner_class(ExportFormat.ONNX))


def _metadata(model: Any, inputs: MutableMapping[str, Any], packages: list[str]) -> ExportMetadata:
    """What transformers records of an export."""
    arguments = copied(dict(inputs))
    with torch.no_grad():
        returned = model(**arguments)
    specs = SimpleNamespace(in_spec=tree_structure(((), dict(inputs))), out_spec=tree_structure(returned))
    metadata = build_export_metadata(model, inputs, SimpleNamespace(call_spec=specs), packages)
    record_output_structure(metadata, returned)
    return metadata
