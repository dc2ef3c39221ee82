"""A pipeline of diffusers as one module, whose children are its models."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelexport.core.collected_messages import collected
from modelexport.core.text import error_line
from modelexport.errors import ModelLoadError, raised_as
from modelexport.files.regular_files import read_json
from modelexport.pytorch.loading import LoadedModel
from modelexport.pytorch.loading.hugging_face import quiet_transformers
from modelexport.pytorch.loading.trust import no_questions

MODEL_INDEX = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
"""The libraries whose classes a pipeline may name without ``--trust-remote-code``."""


class PipelineModules(nn.Module):
    """The models of a pipeline under the names that they have there: ``unet``, ``vae``, ``text_encoder``, ...

    Its class has the name of the pipeline's. Its ``forward`` is set by each part.
    """

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        self.pipeline = pipeline
        for name, component in pipeline.components.items():
            if isinstance(component, nn.Module):
                self.add_module(name, component)


def as_module(pipeline: Any) -> PipelineModules:
    """The models of a pipeline of diffusers as one module, in eval mode."""
    cls = type(type(pipeline).__name__, (PipelineModules,), {"__module__": type(pipeline).__module__})
    module: PipelineModules = cls(pipeline)
    module.eval()
    return module


def is_diffusion_pipeline(value: object) -> bool:
    """Whether something is a pipeline of diffusers."""
    return isinstance(getattr(value, "components", None), Mapping) and hasattr(value, "scheduler")


def load_diffusion(directory: Path, *, trust_remote_code: bool = False, dtype: str | None = None) -> LoadedModel:
    """Load the pipeline in a folder, with its weights."""
    if not trust_remote_code:
        _check_index(directory)
    try:
        import diffusers
    except ImportError as error:
        raise ModelLoadError(
            f"{directory} is a pipeline of diffusers, which cannot be imported ({error_line(error)}): "
            f"install diffusers and pillow"
        ) from error
    fails = raised_as(lambda error: ModelLoadError(f"{directory} cannot be loaded: {error_line(error)}"))
    with ExitStack() as stack, collected(), no_questions(), quiet_transformers(), fails:
        if diffusers.utils.logging.is_progress_bar_enabled():  # they are also written into pipes
            diffusers.utils.logging.disable_progress_bar()
            stack.callback(diffusers.utils.logging.enable_progress_bar)
        load: Any = diffusers.DiffusionPipeline.from_pretrained
        pipeline = load(
            str(directory),
            local_files_only=True,
            use_safetensors=None if trust_remote_code else True,
            torch_dtype=getattr(torch, dtype) if dtype is not None else None,
            trust_remote_code=trust_remote_code,
        )
    pipeline.set_progress_bar_config(disable=True)
    return LoadedModel(as_module(pipeline), None, directory.resolve().name, directory)


def _check_index(directory: Path) -> None:
    """Refuse an index that names classes of other libraries: importing them would run code."""
    path = directory / MODEL_INDEX
    index = read_json(path, ModelLoadError, "copy or download it again")
    entries = [entry for entry in index.values() if isinstance(entry, list)]
    known = all(len(entry) == 2 and _is_known(entry[0]) for entry in entries)
    if not known or not isinstance(index.get("_class_name"), str):
        raise ModelLoadError(
            f"{path} names classes that are not of diffusers or transformers: read their code, then pass "
            f"--trust-remote-code to run it"
        )


def _is_known(library: object) -> bool:
    """Whether a component's library is a trusted one, or a pipeline of diffusers by the name of its module."""
    from importlib.util import find_spec

    if library is None or library in _LIBRARIES:
        return True
    named = isinstance(library, str) and library.isidentifier() and find_spec("diffusers") is not None
    return named and find_spec(f"diffusers.pipelines.{library}") is not None
