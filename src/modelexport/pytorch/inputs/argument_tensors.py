"""Generates a tensor for an argument of a model, by its name and by the configs of the model."""

from __future__ import annotations

import contextlib
import inspect
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from modelexport.core.limits import SETTINGS_BYTES
from modelexport.errors import FileFormatError
from modelexport.files.regular_files import read_regular
from modelexport.pytorch.inputs.trial_runs import LENGTHS, Inputs, Shape, TrialRuns
from modelexport.pytorch.loading.trust import no_questions

_TYPES = "mm_token_type_ids"
"""The argument that says of each token whether it is text or a placeholder."""
_TILES = 5
"""How many parts an image is cut into: a capture treats an axis of size one as fixed, and axes of one size as equal."""
COUNTED = ("_ids", "mask")
"""Suffixes of the names of integer arguments."""
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog while seven wizards sleep in the old town.",
    "Every module of this model leaves its name on the operations that it was exported to.",
)


class InputMaker:
    """Makes tensors for arguments with standard names, with sizes from the model's configs."""

    def __init__(self, model: torch.nn.Module, directory: Path | None, seed: int, *, grids: bool = False) -> None:
        floating = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        self.model, self.directory, self.seed = model, directory, seed
        self.device, self.dtype, self._grids = floating.device, floating.dtype, grids
        self.configs = _configs(model, directory)
        sizes = [config.get(f"{side}vocab_size") for config in self.configs for side in ("", "src_", "tgt_")]
        self.vocabulary = min((size for size in sizes if isinstance(size, int) and size > 0), default=0)

    def find(self, *names: str) -> Any:
        """The first of these settings that a config has, the outermost config first; ``None`` if there is none."""
        return next((config[name] for name in names for config in self.configs if config.get(name) is not None), None)

    def number(self, *names: str) -> int:
        """Like ``find``, as an integer: the first of a list; 0 if there is none."""
        value = self.find(*names)
        value = value[0] if isinstance(value, list | tuple) and value else value
        return value if isinstance(value, int) else 0

    def generator(self, name: str) -> torch.Generator:
        # One for each name, so that changing one input does not change the values of the others.
        return torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))

    def floats(self, name: str, shape: Shape) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator(name)).to(self.device, self.dtype)

    def integers(self, name: str, shape: Shape, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator(name)).to(self.device)

    def is_of_tokens(self, name: str) -> bool:
        """Whether an argument of this name takes tokens of the model's vocabulary."""
        return name.endswith("input_ids") and self.vocabulary > 0

    def tokens(self, name: str, shape: Shape) -> torch.Tensor:
        """Ordinary tokens, the end token last: special ones (image, mask, ...) would require other inputs."""
        settings = [item for config in self.configs for item in config.items()]
        special = [value for key, value in settings if key.endswith(("_token_id", "_token_ids", "_token_index"))]
        banned = {token for value in special for token in (value if isinstance(value, list | tuple) else [value])}
        ordinary = torch.tensor(sorted(set(range(self.vocabulary)) - banned) or [0])
        ids = ordinary[torch.randint(len(ordinary), shape, generator=self.generator(name))]
        end = self.number("eos_token_id")
        if 0 < end < self.vocabulary:
            ids[..., -1:] = end
        return ids.to(self.device)

    def options(self, name: str, batch: int) -> list[torch.Tensor]:
        """Candidates for an argument of this name, most likely first; empty if its role or its sizes are unknown."""
        if self.is_of_tokens(name):
            # Shorter for a decoder, so that exporters do not assume that its length equals the encoder's.
            long, short = [n // 2 for n in LENGTHS] if name.startswith("decoder") else LENGTHS
            drawn = [self.tokens(name, shape) for shape in ((batch, long), (batch, short), (batch, 2, long))]
            read = self._tokenized(batch) if name == "input_ids" else []
            return [*read, *drawn]
        shapes: list[Shape] = []
        if name.startswith("pixel_values"):
            image, frames = self.image(), self.number("num_frames", "frames_per_clip")
            shapes = [(batch, *image), (batch, frames or _TILES, *image), (batch, image[0], frames or 1, *image[1:])]
        elif name == "input_features":
            bins = self.number("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
            shapes = [(batch, bins, 2 * self.number("max_source_positions")), (batch, 128, bins), (batch, 1, 128, bins)]
        elif name == "input_values":
            wave, spectrum = 16000, (self.number("max_length"), self.number("num_mel_bins"))
            shapes = [(batch, wave), (batch, self.number("audio_channels") or 1, wave), (batch, *spectrum)]
        elif name in ("inputs_embeds", "hidden_states", "encoder_hidden_states"):
            shapes = [(batch, LENGTHS[0], self.number("hidden_size"))]
        elif name in ("past_values", "past_time_features"):
            lags = self.find("lags_sequence") or []  # how far back a model looks from each step
            steps, channels = self.number("context_length") + max(lags, default=0), self.number("input_size")
            if name == "past_time_features":  # there may be none
                return [self.floats(name, (batch, steps, self.number("num_time_features")))] if lags else []
            several = (batch, steps, self.number("num_input_channels") or channels or 1)
            shapes = [(batch, steps)] if lags and channels < 2 else [several]
        return [self.floats(name, shape) for shape in shapes if all(shape)] if self.configs else []

    def unseen(self, name: str, batch: int) -> Iterator[torch.Tensor]:
        """Candidates for an argument that no ``torch.nn`` module receives: an image if a config has one, then rows."""
        if self.find("image_size", "img_size") is not None:
            yield self.floats(name, (batch, *self.image()))
        shape = (batch, LENGTHS[0])
        yield self.integers(name, shape, 0, 2) if name.endswith(COUNTED) else self.floats(name, shape)

    @property
    def states_image(self) -> bool:
        """Whether a config gives channels, height and width in one setting, as timm's do."""
        size = self.find("input_size")
        return isinstance(size, list | tuple) and len(size) == 3

    def image(self) -> Shape:
        """Channels, height and width."""
        if self.states_image:
            return tuple(self.find("input_size"))
        size = self.find("image_size", "img_size", "crop_size", "size") or 224
        if isinstance(size, Mapping):
            size = [size.get(side) or size.get("shortest_edge") or 224 for side in ("height", "width")]
        height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        return (self.number("num_channels", "in_channels", "in_chans") or 3, height, width)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own tokenizer; ``None`` if the folder has none, or it cannot be built."""
        if self.directory is not None and any(self.directory.glob("*token*")):
            from transformers import AutoTokenizer

            # One that cannot be built (for instance because a package is missing) does not make the inputs fail.
            with contextlib.suppress(Exception), no_questions():
                return AutoTokenizer.from_pretrained(self.directory, local_files_only=True, trust_remote_code=False)
        return None

    def _tokenized(self, batch: int) -> list[torch.Tensor]:
        """Sentences tokenized with the model's own tokenizer, cut to the same length so that none is padded."""
        texts = [_SENTENCES[i % len(_SENTENCES)] for i in range(batch)]
        with contextlib.suppress(Exception):  # what it does with texts may fail as well
            length = min(len(ids) for ids in self.tokenizer(texts)["input_ids"])
            ids = torch.tensor(self.tokenizer(texts, truncation=True, max_length=length)["input_ids"])
            if ids.numel() and int(ids.max()) < self.vocabulary:
                return [ids.to(self.device)]
        return []

    def beside(self, inputs: Inputs, names: Iterable[str]) -> Iterator[Inputs]:
        """``inputs`` with the arguments that take their shape from them; masks, all ones, in both types."""
        for mask_type in (torch.int64, torch.bool) if any(name.endswith("mask") for name in names) else (torch.int64,):
            yield inputs | {name: self._beside(name, inputs, mask_type) for name in names}

    def _beside(self, name: str, inputs: Inputs, mask_type: torch.dtype) -> torch.Tensor:
        tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim}
        side = name.partition("_")[0] if name.startswith(("decoder", "encoder")) else "input"
        # The argument of the same side (decoder_input_ids), otherwise the first tokens, otherwise any argument.
        anchor = min(tensors, key=lambda key: (not key.startswith(side), tensors[key].is_floating_point()))
        shape = tensors[anchor].shape[:2] if tensors[anchor].is_floating_point() else tensors[anchor].shape
        if name == "pixel_mask" and "pixel_values" in tensors:
            shape = torch.Size((shape[0], *tensors["pixel_values"].shape[-2:]))
        if name == "bool_masked_pos":
            edge, frames = self.number("patch_size") or 16, self.number("num_frames") or 1
            _, height, width = self.image()
            patches = frames // (self.number("tubelet_size") or 1) * (height // edge) * (width // edge)
            return (torch.arange(patches) % 2 == 0).expand(shape[0], -1).to(self.device)
        positions = torch.arange(shape[-1]).expand(shape).to(self.device)
        if name.endswith("token_type_ids"):
            return positions * min(max(self.number("type_vocab_size"), 1), 2) // shape[-1]
        return positions if name.endswith("position_ids") else torch.ones(shape, dtype=mask_type, device=self.device)

    def with_placeholders(self, runner: TrialRuns, inputs: Inputs) -> Inputs:
        """Text and images (or sound) together: one placeholder token in the text for each feature of the other."""
        for kind, name in (("image", "pixel_values"), ("audio", "input_features")):
            token, ids = self.find(f"{kind}_token_id", f"{kind}_token_index"), inputs.get("input_ids")
            if token is None or ids is None or ids.ndim != 2 or name not in inputs:
                continue
            # If this fails, the run decides; it may then use text alone.
            with contextlib.suppress(Exception):
                function = getattr(self.model, f"get_{kind}_features")
                taken = self._as_taken(function, name, f"{kind}_grid_thw", inputs)
                features = runner.call(function, taken)
                features = getattr(features, "pooler_output", features)
                features = torch.cat(list(features)) if isinstance(features, list | tuple) else features
                slots = ids.new_full((len(ids), features.numel() // features.shape[-1] // len(ids)), token)
                inputs = inputs | taken | {"input_ids": torch.cat([ids[:, :1], slots, ids[:, 1:]], 1)}
                if _TYPES in inspect.signature(self.model.forward).parameters:
                    inputs[_TYPES] = (inputs["input_ids"] == token).to(torch.int32)
        return inputs

    def _as_taken(self, function: Callable[..., Any], name: str, grid: str, inputs: Inputs) -> Inputs:
        """An image for each row: as it is, or, for a function that takes grids, cut into patches, a row for each."""
        taken = inspect.signature(function).parameters
        if not self._grids or grid not in taken or name not in inputs:
            return {argument: inputs[argument] for argument in (name, *taken) if argument in inputs}
        channels = self.number("in_channels", "in_chans", "num_channels") or 3
        depth, edge = self.number("temporal_patch_size") or 1, self.number("patch_size") or 16
        sizes = inputs.get(grid)
        if sizes is None:  # patches that are merged, and windows of attention, are whole
            merged = self.number("spatial_merge_size", "merge_size") or 1
            unit = max(2 * merged, self.number("window_size") // edge)
            sizes = torch.tensor([[1, unit, 2 * unit]] * len(inputs["input_ids"]), device=self.device)
        patches = self.floats(name, (int(sizes.prod(-1).sum()), channels * depth * edge * edge))
        return {name: patches, grid: sizes}


def _configs(model: torch.nn.Module, directory: Path | None) -> list[Mapping[str, Any]]:
    """The sources of sizes, best first: the model's config, those inside it, the image or audio processor's file."""
    queue = [vars(module).get("config") for module in model.modules()]
    queue = [config for config in queue if config is not None][:1]
    queue += [vars(model)[name] for name in ("pretrained_cfg", "default_cfg") if vars(model).get(name)]
    configs: list[Mapping[str, Any]] = []
    for config in queue:
        values = dict(config) if isinstance(config, Mapping) else dict(getattr(config, "__dict__", {}))
        # transformers gives some settings a standard name besides their own: n_embd is also hidden_size.
        aliases = getattr(config, "attribute_map", {})
        configs.append(values | {alias: values.get(name) for alias, name in aliases.items() if alias not in values})
        queue.extend(v for v in values.values() if hasattr(v, "to_dict") or (isinstance(v, dict) and "input_size" in v))
    with contextlib.suppress(FileFormatError, ValueError, TypeError, RecursionError):
        if directory is not None:
            configs.append(dict(json.loads(read_regular(directory / "preprocessor_config.json", SETTINGS_BYTES))))
    return configs
