"""The files of a package for other loaders: the model's configuration and tokenizer, and transformers' manifest."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelexport.core.collected_messages import collected
from modelexport.format.package_manifest import Manifest
from modelexport.pytorch.loading.loaded import TOKENIZER_FILES
from modelexport.pytorch.pretrained import PretrainedModel
from modelexport.pytorch.private_torch import tree_structure, treespec_dumps


def write_configs_and_tokenizers(
    model: PretrainedModel, directory: Path | None, folder: Path, manifest: Manifest
) -> None:
    """Copy the tokenizer of a model's folder, and write what ``transformers`` needs to load the package."""
    for file in [file for pattern in TOKENIZER_FILES for file in (directory.glob(pattern) if directory else ())]:
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        with collected():
            config.save_pretrained(folder)
        name, content = exported_model_manifest(model, manifest)
        write_json(folder / name, content)
        for part in manifest.parts:
            # transformers' loader requires this file but does not use its content.
            (folder / f"{part.file}.data").touch()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON document as people read it."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def exported_model_manifest(model: PretrainedModel, manifest: Manifest) -> tuple[str, dict[str, Any]]:
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
