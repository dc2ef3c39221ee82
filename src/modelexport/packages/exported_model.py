"""The manifest of transformers' ``ExportedModel``, so that ``ExportedModel.from_pretrained(FOLDER)`` runs each part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from modelexport.format.packages import Manifest
from modelexport.pytorch.private_torch import tree_structure, treespec_dumps


def exported_model_manifest(model: nn.Module, manifest: Manifest) -> tuple[str, dict[str, Any]]:
    """The name of the file and its content.

    A part takes and returns nested dictionaries made from the names of its inputs and outputs: what it returns as
    ``present`` is passed as ``past_key_values`` in the next step.
    """
    from transformers.exporters.base import EXPORT_MANIFEST_FILE, EXPORT_SCHEMA_VERSION
    from transformers.exporters.metadata import ExportMetadata

    dtype = str(next((p.dtype for p in model.parameters() if p.is_floating_point()), "float32"))
    components = {
        part.name: {
            "file": part.file,
            "metadata": dataclasses.asdict(
                ExportMetadata(
                    architecture=type(model).__name__,
                    export_dtype=dtype.removeprefix("torch."),
                    export_device="cpu",
                    kwargs={name: {} for name in _nested(part.inputs)},
                    out_spec=treespec_dumps(tree_structure(_nested(part.outputs))),
                )
            ),
        }
        for part in manifest.parts
    }
    content = {"schema_version": EXPORT_SCHEMA_VERSION, "export_format": "onnx", "components": components}
    return EXPORT_MANIFEST_FILE, content


def _nested(names: Sequence[str]) -> Mapping[str, Any]:
    """``{"present": {"3": {"key": 0}}}`` for ``present.3.key``: dotted names as nested dictionaries, in order."""
    nested: dict[str, Any] = {}
    for name in names:
        *way, last = name.split(".")
        inner = nested
        for step in way:
            inner = inner.setdefault(step, {})
        inner[last] = 0
    return nested
