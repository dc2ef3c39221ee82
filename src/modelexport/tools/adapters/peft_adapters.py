"""A LoRA adapter in the form that PEFT writes: low-rank pairs and whole entries, by the names of a ``state_dict``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modelexport.core.json_decoding import decode_json
from modelexport.core.limits import SETTINGS_BYTES
from modelexport.core.text import first_few, suggest
from modelexport.errors import FileFormatError, WeightsError
from modelexport.files.regular_files import read_regular
from modelexport.format.documents import StateDictEntry
from modelexport.weights.weight_updates import WeightsInFile

CONFIGURATION, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""What PEFT puts before the names of the model that it wraps."""

_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "bias",
    "lora_embedding_A": "table_a",
    "lora_embedding_B": "table_b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
"""The ends of the names that PEFT gives to the tensors of a module's pair, to what they are."""

_TRAINING = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules"),
        *("inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config"),
        *("megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision"),
        *("runtime_config", "target_modules", "task_type", "ephemeral_gpu_offload"),
    }
)
"""Options of PEFT that say how an adapter came about: what it computes follows from its tensors without them."""

_NEUTRAL_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the weights of the base model as they are."""


class _Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """The options that decide what an adapter computes."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    lora_bias: bool = False
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


@dataclass(frozen=True)
class LowRank:
    """The product of two small matrices that an adapter adds to the weight of one module."""

    module: str
    scaling: float
    rank: int
    is_table: bool
    """Whether the module is an embedding: weight ``(rows, width)``, ``a`` ``(rank, rows)``, ``b`` ``(width, rank)``."""
    fan_in_fan_out: bool
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of ``a`` and ``b``, and of ``bias`` and ``magnitude`` if the adapter has them."""
    _keys: Mapping[str, str]
    _read: Callable[[str], np.ndarray]

    def part(self, name: str) -> np.ndarray:
        """A tensor of the adapter in float32: ``a``, ``b`` or ``magnitude``."""
        return self._read(self._keys[name]).astype(np.float32)

    def is_transposed(self, shape: Collection[int]) -> bool:
        """Whether a weight of this shape has its outputs in the last axis, as an embedding's and GPT-2's have."""
        inside, outside = self.shapes["a"][1], self.shapes["b"][0]
        if len(shape) == 2 and inside == outside:
            return self.is_table or self.fan_in_fan_out
        return tuple(shape) == (inside, outside)

    def output_axis(self, shape: Collection[int]) -> int:
        """The axis of a weight of this shape that has its outputs."""
        return len(shape) - 1 if self.is_transposed(shape) else 0

    def fits(self, shape: Collection[int]) -> bool:
        """Whether the product of ``b`` and ``a`` has the shape of a weight."""
        a, b = self.shapes["a"], self.shapes["b"]
        if len(a) == 2:
            return sorted(shape) == sorted((b[0], a[1]))
        return tuple(shape) == (b[0], a[1] // self.groups, *a[2:])

    @property
    def groups(self) -> int:
        """The groups of a convolution: ``b`` is a grouped one, like the weight, while ``a`` takes all channels."""
        return self.shapes["a"][0] // self.shapes["b"][1]

    def delta(self, shape: tuple[int, ...]) -> np.ndarray:
        """The scaled product of ``b`` and ``a`` in float32, in the shape of the weight that it is added to."""
        a, b = self.part("a"), self.part("b")
        product = np.asarray(b.reshape(len(b), -1) @ a.reshape(len(a), -1) * np.float32(self.scaling))
        if len(shape) == 2 and self.is_transposed(shape):
            product = product.T
        return np.asarray(product.reshape(shape))

    def factor(self, base: np.ndarray, delta: np.ndarray) -> np.ndarray | None:
        """DoRA's factor of each output of the changed weight, ``(outputs,)``; ``None`` without DoRA."""
        if "magnitude" not in self._keys:
            return None
        axis = self.output_axis(base.shape)
        others = tuple(each for each in range(base.ndim) if each != axis)
        norm = np.sqrt(np.square(base.astype(np.float32) + delta).sum(axis=others))
        return np.asarray(self.part("magnitude").reshape(-1) / norm)

    def merged(self, base: np.ndarray, current: np.ndarray) -> np.ndarray:
        """The changed weight, in float32.

        Args:
            base: The weight of the model, by which DoRA measures.
            current: The weight with the adapters before this one.
        """
        delta = self.delta(base.shape)
        changed = current.astype(np.float32) + delta
        factor = self.factor(base, delta)
        if factor is None:
            return np.asarray(changed)
        axis = self.output_axis(base.shape)
        return np.asarray(changed * factor.reshape([-1 if each == axis else 1 for each in range(base.ndim)]))


@dataclass(frozen=True)
class Adapter:
    """The adapter in a folder that PEFT wrote."""

    path: Path
    pairs: Mapping[str, LowRank]
    """Path of a module to what is added to its weight."""
    whole: Mapping[str, str]
    """``state_dict`` key to the name of the tensor in the file that takes the place of that entry."""
    source: WeightsInFile = field(repr=False)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def read(self, key: str) -> np.ndarray:
        """The tensor that takes the place of an entry."""
        return self.source.read(self.whole[key])

    def shape(self, key: str) -> list[int]:
        return self.source.types[self.whole[key]][1]


def read_adapter(folder: str | Path) -> Adapter:
    """A LoRA adapter: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    folder = Path(folder)
    configuration = _read_configuration(folder)
    if not (folder / TENSORS).is_file():
        others = " (PEFT writes it with save_pretrained(..., safe_serialization=True))" if folder.is_dir() else ""
        raise FileFormatError(f"{folder} has no {TENSORS}{others}: give the folder of an adapter")
    weights = WeightsInFile(folder / TENSORS)
    parts: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for key in weights.types:
        name = key.removeprefix(_PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        part = next((end for end in _PARTS if f".{name}".endswith(f".{end}")), None)
        if part is not None:
            parts.setdefault(name.removesuffix(part).removesuffix("."), {})[_PARTS[part]] = key
        elif "lora_" in name or "token_adapter" in name or "trainable_tokens" in name:
            raise WeightsError(
                f"{folder} has {key}, which modelexport cannot apply: merge it with PEFT and export that"
            )
        else:
            whole[name] = key
    pairs = {module: _pair(folder, configuration, module, keys, weights) for module, keys in parts.items()}
    if not pairs and not whole:
        raise FileFormatError(f"{folder / TENSORS} is empty: save the adapter again")
    # PEFT saves an embedding's own weight along with its pair, for tokens that were added.
    return Adapter(folder, pairs, whole, weights)


def _read_configuration(folder: Path) -> _Configuration:
    path = folder / CONFIGURATION
    if not path.is_file():
        raise FileFormatError(f"{folder} has no {CONFIGURATION}: give the folder of an adapter that PEFT wrote")
    content = read_regular(path, SETTINGS_BYTES)
    if_damaged = {"damaged": f"{path} is damaged or another document", "then": "save the adapter again"}
    options = decode_json(content, kind=dict[str, Any], **if_damaged)
    if str(options.get("peft_type")).upper() != "LORA":
        kind = options.get("peft_type")
        raise WeightsError(f"{folder} is an adapter of the kind {kind}, and modelexport applies LORA alone")
    configuration: _Configuration = decode_json(content, kind=_Configuration, **if_damaged)
    known = {field.name for field in msgspec.structs.fields(_Configuration)} | _TRAINING
    if other := [name for name, value in options.items() if value and name not in known]:
        raise WeightsError(
            f"{folder} uses {', '.join(other)}, which modelexport cannot apply: merge it with PEFT and export that"
        )
    if configuration.init_lora_weights not in (None, *_NEUTRAL_STARTS):
        raise WeightsError(
            f"{folder} began with init_lora_weights={configuration.init_lora_weights}, which changes the base model "
            "too: save it with path_initial_model_for_weight_conversion, and give that folder"
        )
    return configuration


def _pair(
    folder: Path, configuration: _Configuration, module: str, keys: Mapping[str, str], weights: WeightsInFile
) -> LowRank:
    """The pair of one module, checked against the configuration."""
    named = {name.removeprefix("table_"): key for name, key in keys.items()}
    if not {"a", "b"} <= named.keys():
        raise WeightsError(f"{folder} has one matrix of the pair for '{module}' and not the other: save it again")
    rank = _by_pattern(folder, configuration.rank_pattern or {}, module, configuration.r)
    alpha = _by_pattern(folder, configuration.alpha_pattern or {}, module, configuration.lora_alpha)
    a, b = (weights.types[named[name]][1] for name in "ab")
    fits = len(a) >= 2 and len(a) == len(b) and a[0] == rank > 0 and b[1] > 0
    if not fits or (a[0] != b[1] if len(a) == 2 else a[0] % b[1]):
        raise WeightsError(
            f"{folder} has a pair of rank {a[0] if a else 0} for '{module}' ({a} and {b}), and {CONFIGURATION} says "
            f"{rank}: they are not of one adapter"
        )
    return LowRank(
        module,
        alpha / (sqrt(rank) if configuration.use_rslora else rank),
        rank,
        "table_a" in keys,
        configuration.fan_in_fan_out,
        {name: tuple(weights.types[key][1]) for name, key in named.items()},
        named,
        weights.read,
    )


def _by_pattern(folder: Path, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that the end of a module's path matches: PEFT's rule."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise FileFormatError(
                f"{folder / CONFIGURATION} has a pattern '{pattern}' that is not a regular expression: {error}"
            ) from error
    return default


@dataclass(frozen=True)
class Changes:
    """What adapters do to the entries of one model."""

    adapters: tuple[Adapter, ...]
    entries: Mapping[str, StateDictEntry]
    pairs: Mapping[str, tuple[LowRank, ...]]
    """Key of a weight to what is added to it, in the order of the adapters."""
    whole: Mapping[str, Adapter]
    """Key of an entry to the last adapter that puts a tensor in its place."""

    @property
    def keys(self) -> list[str]:
        """Every entry that changes, biases to which pairs add included."""
        biases = [_bias_of(key) for key, pairs in self.pairs.items() if any("bias" in pair.shapes for pair in pairs)]
        return list(dict.fromkeys([*self.pairs, *self.whole, *biases]))

    def module_of(self, key: str) -> str:
        """The path of the module whose adapter changes an entry: other modules may use the same tensor."""
        return self.pairs[key][0].module if key in self.pairs else key.rpartition(".")[0]

    def apply(self, key: str, base: np.ndarray) -> np.ndarray:
        """An entry with the adapters, in its own type."""
        start = self.whole[key].read(key) if key in self.whole else base
        current = start
        for pair in self.pairs.get(key, ()):
            current = pair.merged(start, current)
        for pair in (pair for weight, pairs in self.pairs.items() for pair in pairs if _bias_of(weight) == key):
            if "bias" in pair.shapes:
                current = current.astype(np.float32) + pair.part("bias") * np.float32(pair.scaling)
        return current.astype(base.dtype)


def changes(path: Path, entries: Mapping[str, StateDictEntry], adapters: Iterable[Adapter]) -> Changes:
    """What adapters do to the entries of a file."""
    adapters = tuple(adapters)
    pairs: dict[str, list[LowRank]] = {}
    whole: dict[str, Adapter] = {}
    for adapter in adapters:
        missing: list[str] = []
        misfits: list[str] = []
        for module, pair in adapter.pairs.items():
            key = f"{module}.weight" if module else "weight"
            if f"{module}.in_proj_weight".removeprefix(".") in entries:
                raise WeightsError(
                    f"{adapter.path} adapts '{module}', an nn.MultiheadAttention, whose output PEFT adapts once "
                    "or twice, as its version goes: merge it with PEFT and export that"
                )
            if key not in entries:
                missing.append(module)
                continue
            if not pair.fits(entries[key].shape):
                misfits.append(f"{key} is {entries[key].shape}, the pair {pair.shapes['a']} and {pair.shapes['b']}")
            if "bias" in pair.shapes and _bias_of(key) not in entries:
                missing.append(_bias_of(key))
            pairs.setdefault(key, []).append(pair)
        for key in adapter.whole:
            if key not in entries:
                missing.append(key)
            elif adapter.shape(key) != entries[key].shape:
                misfits.append(f"{key} is {entries[key].shape} and it has {adapter.shape(key)}")
            whole[key] = adapter
        if missing or misfits:
            known = {key.rpartition(".")[0] for key in entries} | entries.keys()
            problems = [f"{path} does not have {first_few(missing, 3)}{suggest(missing[0], known)}"] if missing else []
            problems += [f"shapes differ: {first_few(misfits, 3)}"] if misfits else []
            raise WeightsError(f"{adapter.path} is for another model: {'; '.join(problems)}", missing=missing)
    return Changes(adapters, entries, {key: tuple(pairs_of_key) for key, pairs_of_key in pairs.items()}, whole)


def _bias_of(key: str) -> str:
    return f"{key.removesuffix('weight')}bias"
