"""Folders of sentence-transformers, loaded as one module from tokens to embeddings, which an exporter can capture."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from modelexport.core.text import error_line
from modelexport.errors import ModelLoadError, raised_as
from modelexport.files.named_models import BERT_TINY, named_folder
from modelexport.files.safetensors_files import read_header
from modelexport.packages.model_parts import ModelPart
from modelexport.pytorch.loading import LoadedModel, load_model
from modelexport.pytorch.loading.hugging_face import hub_answers
from modelexport.tools.sentences import sentence_settings as settings

SENTENCE_TRANSFORMER = "modules.json"
SENTENCE, TOKENS = "sentence_embedding", "token_embeddings"
Features = Mapping[str, torch.Tensor]


class SentencePipeline(nn.Module):
    """A sentence-transformers model: its modules one after the other, from tokens to an embedding.

    Args:
        output: The feature that it returns: the embedding of the sentence, or those of its tokens.
        width: The number of elements of the embedding that are kept; all by default.
        takes_prompt_length: Whether it takes the number of tokens of the prompt, which are left out of the embedding.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], output: str, width: int | None, takes_prompt_length: bool
    ) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.output, self.width, self.takes_prompt_length = output, width, takes_prompt_length

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, prompt_length: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        features = {"input_ids": input_ids, "attention_mask": attention_mask}
        features |= {} if prompt_length is None else {"prompt_length": prompt_length}
        for module in self.children():
            features |= module(features)
        embedding = features[self.output]
        return {self.output: embedding if self.width is None else embedding[..., : self.width]}


class Transformer(nn.Module):
    """Computes the embeddings of tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.auto_model = model

    def forward(self, features: Features) -> dict[str, torch.Tensor]:
        model: Any = self.auto_model
        output = (model.get_encoder() if _has_decoder(type(model)) else model)(
            input_ids=features["input_ids"], attention_mask=features["attention_mask"]
        )
        return {TOKENS: output.last_hidden_state}


class Pooling(nn.Module):
    """Computes the embedding of the sentence from those of its tokens; several modes are concatenated."""

    def __init__(self, modes: Sequence[str], include_prompt: bool) -> None:
        super().__init__()
        self.modes, self.include_prompt = modes, include_prompt

    def forward(self, features: Features) -> dict[str, torch.Tensor]:
        tokens, mask = features[TOKENS], features["attention_mask"].to(torch.int32)
        begin = mask.argmax(1, keepdim=True).to(torch.int32)  # of the text, after padding on the left
        places = torch.arange(mask.shape[1], device=mask.device, dtype=torch.int32)[None]
        if not self.include_prompt:
            mask = mask * (places >= begin + features["prompt_length"])
        pooled = [_pool(mode, tokens, mask, places - begin + 1) for mode in self.modes]
        return {SENTENCE: torch.cat(pooled, 1) if len(pooled) > 1 else pooled[0]}


def _pool(mode: str, tokens: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The embedding of a sentence.

    Args:
        places: The places of tokens in the text, from 1.
    """
    kept = mask[..., None].to(tokens.dtype)
    match mode:
        case "cls" | "lasttoken":
            at = (mask if mode == "cls" else mask * places).argmax(1, keepdim=True)[..., None]
            return (
                (tokens if mode == "cls" else tokens * kept)
                .gather(1, at.expand(tokens.shape[0], 1, tokens.shape[2]))
                .squeeze(1)
            )
        case "max":
            return tokens.masked_fill(kept == 0, -torch.inf).amax(1)
    wide = tokens.float() if tokens.dtype.itemsize == 2 else tokens  # sums of half precision would lose digits
    weights = (mask * places if mode == "weightedmean" else mask)[..., None].to(wide.dtype)
    total = weights.sum(1).clamp(min=1e-9)
    return ((wide * weights).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)).to(tokens.dtype)


class Dense(nn.Module):
    """A linear layer with an activation on a feature; with a residual, the feature is added to the result."""

    def __init__(self, config: settings.DenseConfig, activation: nn.Module) -> None:
        super().__init__()
        sizes = config.in_features, config.out_features
        self.linear, self.activation_function = nn.Linear(*sizes, config.bias), activation
        self.input, self.output = config.module_input_name, config.module_output_name or config.module_input_name
        self.residual: nn.Module | None = None
        if config.use_residual:
            self.residual = nn.Linear(*sizes, bias=False) if sizes[0] != sizes[1] else nn.Identity()

    def forward(self, features: Features) -> dict[str, torch.Tensor]:
        feature = features[self.input]
        output = self.activation_function(self.linear(feature))
        return {self.output: output if self.residual is None else output + self.residual(feature)}


class Normalize(nn.Module):
    """Scales a feature to a length of one."""

    def __init__(self, config: settings.NormalizeConfig) -> None:
        super().__init__()
        self.input, self.output = config.module_input_name, config.module_output_name or config.module_input_name

    def forward(self, features: Features) -> dict[str, torch.Tensor]:
        feature = features.get(self.input)  # without it, sentence-transformers does nothing
        return {} if feature is None else {self.output: nn.functional.normalize(feature, p=2, dim=-1)}


class LayerNorm(nn.Module):
    """A layer normalization of the embedding of the sentence."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dimension)

    def forward(self, features: Features) -> dict[str, torch.Tensor]:
        return {SENTENCE: self.norm(features[SENTENCE])}


def pipeline_folder(spec: str) -> Path | None:
    """The folder of the pipeline that ``spec`` names, here or on the hub; ``None`` if it is another model."""
    folder = named_folder(spec)
    if folder is None and spec != BERT_TINY and ":" not in spec:
        from huggingface_hub import hf_hub_download, snapshot_download

        local_only = not hub_answers()
        with suppress(Exception):  # of the hub or its client for HTTP: whoever loads the model says what is wrong
            hf_hub_download(spec, SENTENCE_TRANSFORMER, local_files_only=local_only)
            files = ["*.json", "*.txt", "*.model", "*.safetensors", "*pytorch_model.bin"]
            folder = Path(snapshot_download(spec, allow_patterns=files, local_files_only=local_only))
    return folder if folder is not None and is_pipeline(folder) else None


def is_pipeline(directory: Path) -> bool:
    """Whether a folder holds a pipeline. A cross encoder, which has the same files, is one model with its head."""
    if not (directory / SENTENCE_TRANSFORMER).is_file():
        return False
    task = (settings.transformer_settings(directory, dict[str, Any]) or {}).get("transformer_task")
    return task != "sequence-classification"


def load_pipeline(
    directory: Path,
    *,
    trust_remote_code: bool = False,
    dtype: str | None = None,
    weights: Literal["memory", "files", "auto"] = "memory",
) -> LoadedModel:
    """Load the pipeline in a folder, in eval mode. Modules and entries have the names of sentence-transformers.

    Raises:
        ModelLoadError: A module is missing, damaged, or of an unknown type, or has a setting that is not supported.
    """
    modules: dict[str, nn.Module] = {}
    loaded: dict[str, LoadedModel] = {}
    for entry in settings.read_settings(directory / SENTENCE_TRANSFORMER, list[settings.Entry]):
        folder = _folder(directory, entry)
        if entry.name in modules:
            raise ModelLoadError(f"{directory / SENTENCE_TRANSFORMER} has two modules {entry.name}: correct it")
        module = _module(entry.type, folder, trust_remote_code, dtype, weights)
        if isinstance(module, LoadedModel):
            loaded[entry.name], module = module, Transformer(module.model)
        modules |= {} if module is None else {entry.name: module}
    apart = [
        dataclasses.replace(
            part.weights,
            tensors={f"{name}.auto_model.{key}": tensor for key, tensor in part.weights.tensors.items()},
            made={f"{name}.auto_model.{key}": what for key, what in part.weights.made.items()},
        )
        for name, part in loaded.items()
        if part.weights is not None
    ]
    pooled = [part for part in modules.values() if isinstance(part, Pooling)]
    width = settings.read_model_settings(directory).truncate_dim
    prompt = any(not part.include_prompt for part in pooled)
    model = SentencePipeline(modules, SENTENCE if pooled else TOKENS, width if pooled else None, prompt)
    modes = {name: f" ({', '.join(part.modes)})" for name, part in modules.items() if isinstance(part, Pooling)}
    classes = ", ".join(f"{type(part).__name__}{modes.get(name, '')}" for name, part in modules.items())
    return LoadedModel(
        model.eval(),
        None,
        directory.resolve().name,
        directory,
        tuple(warning for part in loaded.values() for warning in part.warnings),
        apart[0] if len(apart) == 1 else None,
        f"as in sentence-transformers: {classes}; --bare: the Transformer alone",
    )


def pipeline_parts(model: SentencePipeline) -> list[ModelPart]:
    """The parts of a pipeline in the order in which they run, with example inputs."""
    ids = torch.arange(10).view(2, 5) + 1
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    prompt = {"prompt_length": torch.tensor(2)} if model.takes_prompt_length else {}
    return [ModelPart("model", model, {"input_ids": ids, "attention_mask": mask, **prompt})]


def _folder(directory: Path, entry: settings.Entry) -> Path:
    """The folder of a module, which is the pipeline's or in it."""
    folder = directory / entry.path
    if "\0" in entry.path or not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(directory)):
        raise ModelLoadError(f"{directory / SENTENCE_TRANSFORMER} names {entry.path}, which is not a folder in it")
    return folder


def _module(
    kind: str, folder: Path, trust_remote_code: bool, dtype: str | None, weights: Literal["memory", "files", "auto"]
) -> nn.Module | LoadedModel | None:
    """A module of a type, or the model of a ``Transformer``.

    Returns:
        ``None`` for a module that does nothing: dropout in eval mode, a mask that keeps every token of a text.
    """
    of_library, path = kind.startswith("sentence_transformers."), folder / "config.json"
    match kind.rpartition(".")[2] if of_library else kind:
        case "Transformer":
            settings.transformer_settings(folder, settings.TransformerConfig)
            # The class that config.json names may have a head, which sentence-transformers leaves out.
            whole = _class_without_head(settings.read_settings(path, dict[str, Any]).get("model_type"))
            return load_model(
                str(folder),
                model_class=None if whole is not None and _has_decoder(whole) else "AutoModel",
                trust_remote_code=trust_remote_code,
                dtype=dtype,
                weights=weights,
            )
        case "Pooling":
            config = settings.read_settings(path, settings.PoolingConfig)
            return Pooling(config.modes, config.include_prompt)
        case "Dense":
            dense = settings.read_settings(path, settings.DenseConfig)
            activation = getattr(nn, dense.activation_function.rpartition(".")[2], None)
            if not (isinstance(activation, type) and issubclass(activation, nn.Module)):
                raise ModelLoadError(f"{folder} has an activation {dense.activation_function} that torch.nn lacks")
            return _with_weights(folder, dtype, lambda: Dense(dense, activation()))
        case "LayerNorm":
            dimension = settings.read_settings(path, settings.LayerNormConfig).dimension
            return _with_weights(folder, dtype, lambda: LayerNorm(dimension))
        case "Normalize":
            return Normalize(settings.read_if_there(path, settings.NormalizeConfig()))
        case "Dropout" | "MultiVectorMask" as name:
            settings.read_if_there(path, settings.DropoutConfig() if name == "Dropout" else settings.MaskConfig())
            return None
    raise ModelLoadError(f"{folder} is a module of the unsupported type {kind}: export its transformer with --bare")


def _class_without_head(kind: Any) -> Any:
    """What ``AutoModel`` loads for a type of models; ``None`` for one of the folder's own code."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    with suppress(KeyError):
        classes = MODEL_MAPPING[CONFIG_MAPPING[kind]]
        return classes[0] if isinstance(classes, tuple) else classes
    return None


def _has_decoder(kind: type[nn.Module]) -> bool:
    """Whether a model has a decoder behind its encoder, which sentence-transformers leaves out."""
    return "decoder_input_ids" in inspect.signature(kind.forward).parameters


def _with_weights(folder: Path, dtype: str | None, make: Callable[[], nn.Module]) -> nn.Module:
    from safetensors.torch import load_file

    weights, older = folder / "model.safetensors", folder / "pytorch_model.bin"
    problem = f"{folder} cannot be loaded"
    with raised_as(lambda error: ModelLoadError(f"{problem}: {error_line(error)}; copy or download it again")):
        with torch.device("meta"):  # the sizes may be any; the weights have theirs
            layer = make()
        if older.is_file() and not weights.exists():
            layer.load_state_dict(torch.load(older, map_location="cpu", weights_only=True), assign=True)
        else:
            read_header(weights)
            layer.load_state_dict(load_file(weights), assign=True)
    return layer if dtype is None else layer.to(getattr(torch, dtype))
