"""Pipelines: folders of several models, loaded as one module whose parts an exporter can capture."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
from torch import nn

from modelexport.core.json_decoding import decode_json
from modelexport.core.limits import SETTINGS_BYTES
from modelexport.core.text import error_line
from modelexport.errors import FileFormatError, ModelLoadError, raised_as
from modelexport.files.regular_files import read_regular
from modelexport.files.safetensors_files import read_header
from modelexport.packages.model_parts import ModelPart
from modelexport.pytorch.loading import LoadedModel, load_model

_T = TypeVar("_T")
SENTENCE_TRANSFORMER = "modules.json"


class SentencePipeline(nn.Module):
    """A sentence-transformers model: its modules one after the other, from tokens to an embedding."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        features = {"input_ids": input_ids, "attention_mask": attention_mask}
        for module in self.children():
            features |= module(features)
        return {"sentence_embedding": features["sentence_embedding"]}


class Transformer(nn.Module):
    """Computes the embeddings of tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.auto_model = model

    def forward(self, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = self.auto_model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return {"token_embeddings": made.last_hidden_state}


_MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")


class Pooling(nn.Module):
    """Computes the embedding of the sentence from those of its tokens; several modes are concatenated."""

    def __init__(self, modes: list[str]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tokens, mask = features["token_embeddings"], features["attention_mask"]
        pooled = [_pool(mode, tokens, mask.unsqueeze(-1).to(tokens.dtype)) for mode in self.modes]
        return {"sentence_embedding": torch.cat(pooled, 1) if len(pooled) > 1 else pooled[0]}


def _pool(mode: str, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=mask.dtype)[None, :, None]
    match mode:
        case "cls":  # the first token that is not padded
            return tokens.gather(1, mask.argmax(1, keepdim=True).expand(-1, 1, tokens.shape[2])).squeeze(1)
        case "lasttoken":
            return tokens.gather(1, (mask * places).argmax(1, keepdim=True).expand(-1, 1, tokens.shape[2])).squeeze(1)
        case "max":
            return tokens.masked_fill(mask == 0, -1e9).amax(1)
    weights = mask * places if mode == "weightedmean" else mask
    total = weights.sum(1).clamp(min=1e-9)
    return (tokens * weights).sum(1) / (total.sqrt() if mode == "mean_sqrt_len" else total)


class Dense(nn.Module):
    """A linear layer on the embedding of the sentence."""

    def __init__(self, linear: nn.Linear, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation_function = linear, activation

    def forward(self, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": self.activation_function(self.linear(features["sentence_embedding"]))}


class Normalize(nn.Module):
    """Scales the embedding to a length of one."""

    def forward(self, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": nn.functional.normalize(features["sentence_embedding"], p=2, dim=1)}


def is_pipeline(directory: Path) -> bool:
    """Whether a folder holds a pipeline."""
    return (directory / SENTENCE_TRANSFORMER).is_file()


def load_pipeline(
    directory: Path, *, trust_remote_code: bool = False, weights: Literal["memory", "files", "auto"] = "memory"
) -> LoadedModel:
    """Load the pipeline in a folder, in eval mode. Modules and entries have the names of sentence-transformers.

    Raises:
        ModelLoadError: A module is missing, damaged, or of an unknown type.
    """
    modules: dict[str, nn.Module] = {}
    loaded: dict[str, LoadedModel] = {}
    for entry in _read(directory / SENTENCE_TRANSFORMER, list[_Entry]):
        folder = _folder(directory, entry)
        match entry.type.rpartition(".")[2]:
            case _ if entry.name in modules:
                raise ModelLoadError(f"{directory / SENTENCE_TRANSFORMER} has two modules {entry.name}: correct it")
            case "Transformer":
                loaded[entry.name] = load_model(str(folder), trust_remote_code=trust_remote_code, weights=weights)
                modules[entry.name] = Transformer(loaded[entry.name].model)
            case "Pooling":
                modules[entry.name] = Pooling(_modes(folder / "config.json"))
            case "Dense":
                modules[entry.name] = _dense(folder)
            case "Normalize":
                modules[entry.name] = Normalize()
            case _:
                raise ModelLoadError(f"{directory} has a module {entry.name} of the unsupported type {entry.type}")
    apart = [(f"{name}.auto_model.", one.weights) for name, one in loaded.items() if one.weights is not None]
    weights_apart = None
    if len(apart) == 1:
        ((prefix, own),) = apart
        weights_apart = dataclasses.replace(
            own,
            tensors={f"{prefix}{key}": tensor for key, tensor in own.tensors.items()},
            made={f"{prefix}{key}": what for key, what in own.made.items()},
        )
    return LoadedModel(
        SentencePipeline(modules).eval(),
        None,
        directory.resolve().name,
        directory,
        tuple(warning for one in loaded.values() for warning in one.warnings),
        weights_apart,
    )


def pipeline_parts(model: nn.Module) -> list[ModelPart]:
    """The parts of a pipeline in the order in which they run, with example inputs."""
    ids = torch.arange(10).view(2, 5) + 1
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    return [ModelPart("model", model, {"input_ids": ids, "attention_mask": mask})]


class _Entry(msgspec.Struct, frozen=True):
    """An entry of ``modules.json``."""

    name: Annotated[str, msgspec.Meta(pattern=r"^\w+$")]
    type: str
    path: str = ""


class _DenseConfig(msgspec.Struct, frozen=True):
    in_features: Annotated[int, msgspec.Meta(gt=0)]
    out_features: Annotated[int, msgspec.Meta(gt=0)]
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"


def _folder(directory: Path, entry: _Entry) -> Path:
    """The folder of a module, which is the pipeline's or in it."""
    folder = directory / entry.path
    if "\0" in entry.path or not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(directory)):
        raise ModelLoadError(f"{directory / SENTENCE_TRANSFORMER} names {entry.path}, which is not a folder in it")
    return folder


def _modes(path: Path) -> list[str]:
    config = _read(path, dict[str, Any])
    given = config.get("pooling_mode")
    if given is not None:
        modes = [given] if isinstance(given, str) else given
    else:
        # The names in older versions: pooling_mode_cls_token, pooling_mode_mean_tokens, ...
        plain = {
            key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token"): value is True
            for key, value in config.items()
        }
        modes = [mode for mode in _MODES if plain.get(mode)]
    if not isinstance(modes, list) or not modes or not all(mode in _MODES for mode in modes):
        raise ModelLoadError(f"{path} has the pooling modes {modes or 'none'}; supported are {', '.join(_MODES)}")
    return modes


def _dense(folder: Path) -> Dense:
    from safetensors.torch import load_file

    config, weights = _read(folder / "config.json", _DenseConfig), folder / "model.safetensors"
    activation = getattr(nn, config.activation_function.rpartition(".")[2], None)
    if not (isinstance(activation, type) and issubclass(activation, nn.Module)):
        raise ModelLoadError(f"{folder} has an activation {config.activation_function} that torch.nn does not have")
    told = f"{folder} cannot be loaded"
    with raised_as(lambda error: ModelLoadError(f"{told}: {error_line(error)}; copy or download it again")):
        read_header(weights)
        with torch.device("meta"):  # the sizes may be any; the weights have theirs
            layer = Dense(nn.Linear(config.in_features, config.out_features, config.bias), activation())
        layer.load_state_dict(load_file(weights), assign=True)
    return layer


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return decode_json(read_regular(path, SETTINGS_BYTES), kind=kind)
    except (FileFormatError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}): copy or download it again") from error
