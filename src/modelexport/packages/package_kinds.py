"""Which kind of package a model becomes: the parts of generation, those of a pipeline, or the model whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from modelexport.errors import InputsError
from modelexport.exporting.options import PackageOptions
from modelexport.files.named_models import named_folder
from modelexport.files.safetensors_files import INDEX, SINGLE
from modelexport.format.package_manifest import Kind
from modelexport.packages import sentence_pipelines as sentences
from modelexport.packages.diffusion.components_module import MODEL_INDEX, PipelineModules, load_diffusion
from modelexport.packages.diffusion.diffusion_parts import diffusion_parts, model_parts
from modelexport.packages.diffusion.observed_calls import observe_example
from modelexport.packages.generation_parts import can_generate, generation_forms
from modelexport.packages.model_parts import ModelPart
from modelexport.pytorch.loading import LoadedModel, load_model
from modelexport.weights.bytes_of_entries import Weights

Takes = Literal["arguments", "nothing", "sizes", "inputs"]
"""What a model is given for an example run: the arguments of a pipeline; nothing; only the sizes of images, where the
other inputs are made; or inputs."""


def load_for_parts(
    spec: str, parts: str, *, model_class: str | None, trust_remote_code: bool, seed: int, dtype: str | None
) -> tuple[LoadedModel, Takes]:
    """Load a model for a package, and tell what it takes. Weights stay in their files if they can.

    Args:
        spec: A folder of a pipeline, or what :func:`modelexport.pytorch.loading.load_model` takes, like the others.
        parts: The kind that is asked for, or ``auto``.
    """
    folder = named_folder(spec) or Path(spec)
    linked = any((folder / name).is_file() for name in (SINGLE, INDEX))
    weights: Literal["files", "auto"] = "files" if linked else "auto"
    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": dtype}
    if parts in ("auto", "pipeline") and (folder / MODEL_INDEX).is_file():
        return load_diffusion(folder, **how), "arguments"
    if parts in ("auto", "pipeline") and (pipeline := sentences.pipeline_folder(spec)) is not None:
        return sentences.load_pipeline(pipeline, weights=weights, **how), "nothing"
    loaded = load_model(spec, model_class=model_class, seed=seed, weights=weights, **how)
    return loaded, "sizes" if parts != "whole" and can_generate(loaded.model) else "inputs"


def kind_and_forms(
    model: nn.Module,
    asked: PackageOptions,
    inputs: Mapping[str, Any] | Sequence[Any] | None,
    weights: Weights | None,
    directory: Path | None = None,
) -> tuple[Kind, Iterable[list[ModelPart]]]:
    """The kind of the package, and the forms that its parts may have, the best first; those of generation are made when
    they are asked for.
    """
    parts = asked.parts or "auto"
    if parts == "generate" or (parts == "auto" and can_generate(model)):
        user_inputs = inputs if isinstance(inputs, Mapping) else None
        return "generate", generation_forms(model, asked, user_inputs, weights, directory)
    if asked.static_cache is not None or asked.separate_prefill:
        raise InputsError("--static-cache and --separate-prefill are for a model that generates: leave them out")
    if isinstance(model, PipelineModules):
        if parts == "whole":
            raise InputsError(f"{type(model).__name__} is not one model: leave out --parts whole")
        observed, _ = observe_example(model, inputs if isinstance(inputs, Mapping) else None, steps=2)
        return "pipeline", [model_parts(model, diffusion_parts(model, observed), observed.inside)]
    if parts == "pipeline" or (parts == "auto" and isinstance(model, sentences.SentencePipeline)):
        if not isinstance(model, sentences.SentencePipeline):
            names = f"{sentences.SENTENCE_TRANSFORMER} or {MODEL_INDEX}"
            raise InputsError(f"{type(model).__name__} is not a pipeline: give a folder with {names}")
        return "pipeline", [sentences.pipeline_parts(model)]
    if inputs is None:
        from modelexport.pytorch.inputs.generated_inputs import generate_inputs

        inputs = generate_inputs(model, directory=directory)
    return "whole", [[ModelPart("model", model, inputs)]]
