"""The kind of packages that pipelines of diffusers become."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from modelexport.capture.exported_graph import Exported
from modelexport.core.collected_messages import collected
from modelexport.files.named_models import named_folder
from modelexport.format.package_manifest import Manifest
from modelexport.packages.configs_and_tokenizers import write_json
from modelexport.packages.input_and_axis_names import name_axes_by_input
from modelexport.packages.model_parts import ModelPart
from modelexport.packages.package_kinds import Loads, PackageKind, Request
from modelexport.pytorch.loading import LoadedModel
from modelexport.tagged.package import Package
from modelexport.tools.pipelines.component_weights import share_components
from modelexport.tools.pipelines.components_module import (
    MODEL_INDEX,
    PipelineModules,
    as_module,
    is_diffusion_pipeline,
    load_diffusion,
)
from modelexport.tools.pipelines.diffusion_parts import diffusion_parts, model_parts
from modelexport.tools.pipelines.observed_calls import observe_example
from modelexport.tools.pipelines.pipeline_text import format_pipeline
from modelexport.tools.pipelines.verify_by_pipeline import PipelineReport, verify_pipeline
from modelexport.weights.bytes_of_entries import Weights


class DiffusionKind(PackageKind):
    """Pipelines of diffusers: the methods of their models that a run calls."""

    name = "pipeline"
    takes = "arguments"
    never_whole = True
    needs = f"a pipeline of diffusers (a folder with {MODEL_INDEX})"
    verified_with = ("steps", "seed")

    def find(self, spec: str) -> Path | None:
        folder = named_folder(spec) or Path(spec)
        return folder if (folder / MODEL_INDEX).is_file() else None

    def load(self, folder: Path, *, weights: Loads, trust_remote_code: bool, dtype: str | None) -> LoadedModel:
        return load_diffusion(folder, trust_remote_code=trust_remote_code, dtype=dtype)

    def as_module(self, model: Any) -> nn.Module | None:
        return as_module(model) if is_diffusion_pipeline(model) else None

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, PipelineModules)

    def forms(self, request: Request) -> Iterable[list[ModelPart]]:
        model = request.model
        assert isinstance(model, PipelineModules)
        observed, _ = observe_example(model, request.named_inputs, steps=2)
        return [model_parts(model, diffusion_parts(model, observed), observed.inside)]

    def share_weights(self, request: Request, parts: Sequence[ModelPart], folder: Path) -> Mapping[str, Weights]:
        return share_components(parts, request.directory, folder, request.options.weights.weights)

    def name_values(self, exported: Exported) -> Exported:
        return name_axes_by_input(exported)

    def write_layouts(
        self, request: Request, folder: Path, manifest: Manifest, parts: Sequence[ModelPart]
    ) -> list[str]:
        assert isinstance(request.model, PipelineModules)
        write_diffusers_layout(request.model.pipeline, folder, parts)
        return []

    def verify(self, model: nn.Module, inputs: Any, package: Package, **how: Any) -> PipelineReport:
        return verify_pipeline(model, package.folder, arguments=inputs, **how)

    def text_of_report(self, report: Any) -> str:
        return format_pipeline(report)


def write_diffusers_layout(pipeline: Any, folder: Path, parts: Sequence[ModelPart]) -> None:
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
    write_json(folder / MODEL_INDEX, index | {name: [None, None] for name in missing})


KIND = DiffusionKind()
