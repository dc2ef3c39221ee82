"""The kind of packages that generate text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from modelexport.capture.exported_graph import Exported
from modelexport.core.collected_messages import collected
from modelexport.exporting.export_result import ExportResult
from modelexport.exporting.options import PackageOptions
from modelexport.format.package_manifest import Manifest, Rows
from modelexport.packages.configs_and_tokenizers import write_json
from modelexport.packages.generation_loop import STEPWISE, generation_of
from modelexport.packages.model_parts import ModelPart
from modelexport.packages.package_kinds import PackageKind, Request
from modelexport.pytorch.loading import LoadedModel
from modelexport.tagged.package import Package
from modelexport.tools.generate.cache_names import name_generation
from modelexport.tools.generate.genai_config import GENAI_CONFIG, GenaiError, make_genai_config, settings_of_generate
from modelexport.tools.generate.generation_parts import can_generate, generation_forms
from modelexport.tools.generate.generation_text import format_generation
from modelexport.tools.generate.multimodal import POSITIONS
from modelexport.tools.generate.observed_state import restart_length
from modelexport.tools.generate.prompts import example_prompts
from modelexport.tools.generate.verify_by_generation import GenerationReport, generation_fault, verify_generation


class GenerationKind(PackageKind):
    """Models of transformers with a working ``generate``: the parts that it runs."""

    name = "generate"
    takes = "sizes"
    needs = "a model that can generate"
    does, example = "generate", "a prompt"
    keeps_as_inputs = STEPWISE
    verified_in_memory = True
    verified_with = ("new_tokens",)

    def accepts(self, model: nn.Module) -> bool:
        return can_generate(model)

    def check_options(self, asked: PackageOptions) -> None:
        """All options of packages are for this kind."""

    def forms(self, request: Request) -> Iterable[list[ModelPart]]:
        options = request.options
        return generation_forms(
            request.model, options.package, request.named_inputs, options.weights.to_check, request.directory
        )

    def name_values(self, exported: Exported) -> Exported:
        return name_generation(exported)

    def completed(
        self, manifest: Manifest, model: nn.Module, parts: Sequence[ModelPart], results: Mapping[str, ExportResult]
    ) -> Manifest:
        rows: Rows = next((part.rows for part in parts if part.rows != "padded"), "padded")
        documents = {part.name: results[part.name].hierarchy for part in parts}
        return msgspec.structs.replace(manifest, generation=generation_of(documents, rows, restart_length(model)))

    def find_fault(self, request: Request, manifest: Manifest, folder: Path, notes: list[str]) -> str:
        if manifest.generation is None:
            return ""
        return generation_fault(request.model, manifest, folder, request.named_inputs)

    def write_layouts(
        self, request: Request, folder: Path, manifest: Manifest, parts: Sequence[ModelPart]
    ) -> list[str]:
        notes = super().write_layouts(request, folder, manifest, parts)
        generated: Any = request.model
        with collected():
            generated.generation_config.save_pretrained(folder)
        try:
            positions: Any = next((part.model.forward for part in parts if part.name == POSITIONS), None)
            content, of_genai = make_genai_config(request.model, folder, manifest, getattr(positions, "func", None))
            write_json(folder / GENAI_CONFIG, content)
            notes += of_genai
        except GenaiError as reason:
            notes.append(f"{GENAI_CONFIG} was not written: {reason}")
            settings = settings_of_generate(generated.generation_config.to_dict())
            if others := [f"{name} = {value}" for name, value in settings.items() if not name.startswith("max_")]:
                notes.append(
                    f"generate also applies {', '.join(others)}: a loop over the graphs has to apply it itself"
                )
        return notes

    def inputs_for_verification(
        self, loaded: LoadedModel, manifest: Manifest, user_inputs: Mapping[str, Any] | None, seed: int
    ) -> Any:
        return example_prompts(loaded.model, loaded.directory, seed=seed, user_inputs=user_inputs, manifest=manifest)

    def verify(self, model: nn.Module, inputs: Any, package: Package, **how: Any) -> GenerationReport:
        prompts = inputs or example_prompts(model, None, manifest=package.manifest)
        return verify_generation(model, package.folder, prompts, **how)

    def text_of_report(self, report: Any) -> str:
        return format_generation(report)


KIND = GenerationKind()
