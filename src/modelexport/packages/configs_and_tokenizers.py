"""The files of a package for other loaders: configurations, tokenizers, transformers, diffusers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelexport.core.collected_messages import collected
from modelexport.format.package_manifest import Manifest
from modelexport.packages.diffusion.components_module import MODEL_INDEX, PipelineModules
from modelexport.packages.genai_config import GENAI_CONFIG, GenaiError, make_genai_config, settings_of_generate
from modelexport.packages.model_parts import ModelPart
from modelexport.packages.multimodal import POSITIONS
from modelexport.pytorch.loading.loaded import TOKENIZER_FILES
from modelexport.pytorch.pretrained import PretrainedModel
from modelexport.pytorch.private_torch import tree_structure, treespec_dumps


def write_layouts(
    model: PretrainedModel, directory: Path | None, folder: Path, manifest: Manifest, parts: Sequence[ModelPart]
) -> list[str]:
    """Write the files that other loaders need beside the graphs.

    Returns:
        The files that could not be written and why, one line each.
    """
    if isinstance(model, PipelineModules):
        _write_pipeline(model.pipeline, folder, parts)
        return []
    for file in [file for pattern in TOKENIZER_FILES for file in (directory.glob(pattern) if directory else ())]:
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    notes: list[str] = []
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        with collected():
            config.save_pretrained(folder)
            if getattr(model, "generation_config", None) is not None and manifest.kind == "generate":
                model.generation_config.save_pretrained(folder)
        name, content = exported_model_manifest(model, manifest)
        _write(folder / name, content)
        for part in manifest.parts:
            # transformers' loader requires this file but does not use its content.
            (folder / f"{part.file}.data").touch()
    if manifest.kind == "generate":
        try:
            positions: Any = next((part.model.forward for part in parts if part.name == POSITIONS), None)
            content, notes = make_genai_config(model, folder, manifest, getattr(positions, "func", None))
            _write(folder / GENAI_CONFIG, content)
        except GenaiError as reason:
            notes.append(f"{GENAI_CONFIG} was not written: {reason}")
            settings = settings_of_generate(model.generation_config.to_dict())
            if others := [f"{name} = {value}" for name, value in settings.items() if not name.startswith("max_")]:
                notes.append(
                    f"generate also applies {', '.join(others)}: a loop over the graphs has to apply it itself"
                )
    return notes


def _write_pipeline(pipeline: Any, folder: Path, parts: Sequence[ModelPart]) -> None:
    """The layout of diffusers: its index, the configuration of each part's model, tokenizers, schedulers, ..."""
    with collected():
        pipeline.save_config(folder)
        for part in parts:
            component = pipeline.components[part.module]
            config = component if hasattr(component, "save_config") else component.config
            save = getattr(config, "save_config", None) or config.save_pretrained
            save((folder / part.path).parent)
        modules = {part.module for part in parts}
        missing: list[str] = []
        for name, component in pipeline.components.items():
            if hasattr(component, "state_dict") and hasattr(component, "forward"):
                missing += [name] if name not in modules else []
            elif hasattr(component, "save_pretrained"):
                component.save_pretrained(folder / name)
    index = json.loads((folder / MODEL_INDEX).read_text(encoding="utf-8"))
    _write(folder / MODEL_INDEX, index | {name: [None, None] for name in missing})


def _write(path: Path, content: dict[str, Any]) -> None:
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
