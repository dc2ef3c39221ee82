"""The kind of packages that models of sentence-transformers become."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from modelexport.capture.exported_graph import Exported
from modelexport.files.first_module_folder import SENTENCE_TRANSFORMER
from modelexport.format.package_manifest import Manifest
from modelexport.packages.input_and_axis_names import name_axes_by_input
from modelexport.packages.model_parts import ModelPart
from modelexport.packages.package_kinds import Loads, PackageKind, Request, verify_parts
from modelexport.packages.part_reports import PartReports
from modelexport.pytorch.loading import LoadedModel
from modelexport.tagged.package import Package
from modelexport.tools.sentences.encoding_check import encoding_fault
from modelexport.tools.sentences.sentence_pipelines import (
    SentencePipeline,
    load_pipeline,
    pipeline_folder,
    pipeline_parts,
)


class SentenceKind(PackageKind):
    """Models of sentence-transformers: all of their modules as one graph."""

    name = "pipeline"
    takes = "nothing"
    needs = f"a model of sentence-transformers (a folder with {SENTENCE_TRANSFORMER})"
    does, example = "compute", "a text"
    loads_for_files = True

    def find(self, spec: str) -> Path | None:
        return pipeline_folder(spec)

    def load(self, folder: Path, *, weights: Loads, trust_remote_code: bool, dtype: str | None) -> LoadedModel:
        return load_pipeline(folder, weights=weights, trust_remote_code=trust_remote_code, dtype=dtype)

    def made_by(self, class_name: str) -> bool:
        return class_name == SentencePipeline.__name__

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, SentencePipeline)

    def forms(self, request: Request) -> Iterable[list[ModelPart]]:
        assert isinstance(request.model, SentencePipeline)
        return [pipeline_parts(request.model)]

    def example_inputs(self, model: nn.Module) -> Any:
        assert isinstance(model, SentencePipeline)
        return pipeline_parts(model)[0].inputs

    def name_values(self, exported: Exported) -> Exported:
        return name_axes_by_input(exported)

    def find_fault(self, request: Request, manifest: Manifest, folder: Path, notes: list[str]) -> str:
        assert isinstance(request.model, SentencePipeline)
        return encoding_fault(request.model, folder / manifest.parts[0].file, notes)

    def verify(self, model: nn.Module, inputs: Any, package: Package, **how: Any) -> PartReports:
        assert isinstance(model, SentencePipeline)
        return verify_parts(pipeline_parts(model), package, **how)


KIND = SentenceKind()
