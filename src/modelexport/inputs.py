"""Example inputs for a module, from its forward's signature, its configs and its parameters; a run confirms them.

No rule knows a model. Where an argument has one of the field's standard names (``input_ids``, ``pixel_values``, ...),
the name says its role and the configs say the sizes. For any other name the model is run on a probe, and the first
``torch.nn`` module that receives the probe says what fits. Nothing is returned that the model has not run with.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelexport.errors import InputsError

Inputs = dict[str, Any]
Shape = tuple[int, ...]

_LENGTHS = (16, 4)
"""Lengths of made-up sequences; the second is for models that have few positions."""
_EDGES = (64, 224, 32, 28, 96, 128, 256, 299, 384)
"""Edges of images, where only a convolution says what an image is."""
_SAMPLES = (1024, 16000, 128, 64, 16)
"""Lengths of signals, where only a convolution says what a signal is."""
_MAIN = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids")
"""Arguments that carry data. They are made up even where optional, so that every part of the model runs."""
_BESIDE_TEXT = ("attention_mask", "token_type_ids")
"""Optional arguments that go with ``input_ids``."""
_MAX_RUNS = 150
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog while seven wizards sleep in the old town.",
    "Every module of this model leaves its name on the operations that it was exported to.",
)


def example_inputs(
    model: torch.nn.Module,
    *,
    spec: Mapping[str, Any] | str | Path | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
    batch: int = 2,
) -> Inputs:
    """Keyword arguments that ``model`` has run with, on its device and in its floating-point type.

    Args:
        model: It runs in eval mode without gradients; its modes and the caller's random state stay as they were.
        spec: What to use in place of, or beside, what would be made up: a dict, or the path of a JSON file with name ->
            ``{"dtype": "int64", "shape": [2, 8], "range": [0, 100]}`` (100 is excluded), ``{"value": [[1, 2]]}``, or
            ``null`` to leave an argument out.
        directory: Where the model's tokenizer or ``preprocessor_config.json`` lies.
        seed: For the values.
        batch: The first dimension; 1 where the model takes no other.

    Raises:
        InputsError: ``spec`` is wrong, or an argument cannot be made up; the message then has the JSON to write.
    """
    signature = inspect.signature(model.forward).parameters
    kinds = inspect.Parameter
    named = {name: p for name, p in signature.items() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
    maker = _Maker(model, Path(directory) if directory is not None else None, seed)
    open_ended = any(p.kind is kinds.VAR_KEYWORD for p in signature.values())
    given = _read_spec(spec, None if open_ended else list(named), maker)
    left_out = {name for name, value in given.items() if value is None}
    given = {name: value for name, value in given.items() if value is not None}
    sized = [value.shape[0] for value in given.values() if isinstance(value, torch.Tensor) and value.ndim]
    batches = (sized[0],) if sized else tuple(dict.fromkeys((batch, 1)))

    main = getattr(model, "main_input_name", None)
    required = [name for name, p in named.items() if p.default is kinds.empty and name not in left_out]
    wanted = [name for name in named if (name in _MAIN or name == main) and name not in left_out]
    optional = [name for name in wanted if name not in required and name not in given]
    beside = [name for name in _BESIDE_TEXT if name in named and name not in left_out and name not in given]
    if maker.number("type_vocab_size") < 2:
        beside = beside[:1]
    runner = _Runner(model)
    for inputs in itertools.islice(_plans(runner, maker, given, required, optional, beside, batches), _MAX_RUNS):
        if runner.run(inputs):
            return {name: inputs[name] for name in (*named, *given) if name in inputs}
    raise InputsError(_advice(runner, maker, [name for name in required if name not in given], given, batches[0]))


def check_inputs(model: torch.nn.Module, inputs: Mapping[str, Any] | tuple[Any, ...]) -> None:
    """Run ``model`` once with these keyword or positional arguments, without gradients and in eval mode.

    Raises:
        InputsError: The run fails; the message has the inputs with their types and shapes, and the reason.
    """
    runner = _Runner(model)
    if runner.run(inputs):
        return
    named = inputs if isinstance(inputs, Mapping) else {f"argument {i}": value for i, value in enumerate(inputs)}
    raise InputsError(
        f"{type(model).__name__} does not run with {_describe(named)}: {_line(runner.first_error)}; give other inputs"
    ) from runner.first_error


def _describe(inputs: Mapping[str, Any]) -> str:
    """``input_ids int64[2, 16], use_cache bool``."""
    texts = []
    for name, value in inputs.items():
        is_tensor = isinstance(value, torch.Tensor)
        kind = f"{_dtype_name(value.dtype)}{list(value.shape)}" if is_tensor else type(value).__name__
        texts.append(f"{name} {kind}")
    return ", ".join(texts) or "no inputs"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(error: BaseException | None, limit: int = 240) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else f"{text[:limit]}..."


def _advice(runner: _Runner, maker: _Maker, missing: list[str], given: Inputs, batch: int) -> str:
    """Why nothing ran, and the JSON to write: what was guessed, and a first shape for what was not."""
    tried = runner.first_inputs or {}
    unknown = [name for name in missing if name not in tried]
    entries: dict[str, Any] = {name: {"dtype": "float32", "shape": [batch, 16]} for name in unknown}
    for name, value in tried.items():
        if isinstance(value, torch.Tensor) and name not in given:
            entries[name] = {"dtype": _dtype_name(value.dtype), "shape": list(value.shape)}
            if name.endswith("input_ids") and maker.vocabulary:
                entries[name]["range"] = [0, maker.vocabulary]
    kind = type(runner.model).__name__
    if unknown:
        problem = f"cannot make up {', '.join(unknown)} for {kind}"
    elif runner.first_error is not None:
        problem = f"{kind} does not run with {_describe(tried)}: {_line(runner.first_error)}"
    else:
        return f"{kind}.forward takes no arguments by name: let a factory return the module and its inputs"
    return f"{problem}; write the right types and shapes to a file and pass --inputs SPEC.json: {json.dumps(entries)}"


def _plans(
    runner: _Runner,
    maker: _Maker,
    given: Inputs,
    required: list[str],
    optional: list[str],
    beside: list[str],
    batches: Sequence[int],
) -> Iterator[Inputs]:
    """Inputs to try, best first: all data arguments before some of them, ``batch`` before one."""
    for batch in batches:
        for count in range(len(optional), -1, -1):
            for chosen in itertools.combinations(optional, count):
                names = [name for name in (*required, *chosen) if name not in given]
                choices = {name: maker.options(name, batch) for name in names}
                unknown = [name for name in names if not choices[name] and not maker.goes_beside(name)]
                late = [name for name in names if not choices[name] and name not in unknown]
                known = {name: tensors for name, tensors in choices.items() if tensors}
                for values in itertools.product(*known.values()):
                    start = maker.with_placeholders(runner, given | dict(zip(known, values, strict=True)))
                    for inputs in _discover(runner, maker, start, unknown, late, batch):
                        text = [name for name in beside if name not in late] if "input_ids" in inputs else []
                        for kept in range(len(text), -1, -1):
                            yield from maker.beside(inputs, (*late, *text[:kept]))
        # Standard names that mean something else here.
        yield from _discover(runner, maker, given, [name for name in required if name not in given], [], batch)


def _discover(
    runner: _Runner, maker: _Maker, known: Inputs, unknown: list[str], late: list[str], batch: int
) -> Iterator[Inputs]:
    """``known`` with each unknown argument made to fit the first ``torch.nn`` module that receives it."""
    if not unknown:
        yield known
        return
    for rank in (2, 3, 4, 1, 5):
        probes = {name: torch.rand((batch,) + (2,) * (rank - 1)).to(maker.device, maker.dtype) for name in unknown}
        seen = runner.watch(next(maker.beside(known | probes, late)))
        hits = [(name, module) for name, module in seen if name in unknown]
        if not hits and len(unknown) == 1:
            # The forward reshaped it first: what reaches the first module is still made of it.
            hits = [(unknown[0], module) for _, module in seen[:1]]
        if hits:
            break
    else:
        return
    name, module = hits[0]
    shapes = _fits(module, batch)
    if seen[0][0] is None:
        shapes = [*shapes, *(((batch, samples), None) for samples in _SAMPLES)]
    for shape, high in shapes:
        value = maker.integers(name, shape, 0, high) if high else maker.floats(name, shape)
        yield from _discover(runner, maker, known | {name: value}, [n for n in unknown if n != name], late, batch)


def _fits(module: torch.nn.Module, batch: int) -> list[tuple[Shape, int | None]]:
    """Shapes that the parameters of a ``torch.nn`` module accept, with the bound of integer values for an embedding."""
    nn, length = torch.nn, _LENGTHS[0]
    floats: list[Shape] = []
    match module:
        case nn.Embedding() | nn.EmbeddingBag():
            return [((batch, length), module.num_embeddings), ((batch,), module.num_embeddings),
                    ((batch, _LENGTHS[1]), module.num_embeddings)]  # fmt: skip
        case nn.Linear():
            floats = [(batch, module.in_features), (batch, length, module.in_features)]
        case nn.modules.conv._ConvNd():
            edges = {1: _SAMPLES, 2: _EDGES}.get(len(module.kernel_size), (16, 32, 64))
            spaces = [(edge,) * len(module.kernel_size) for edge in edges]
            floats = [(batch, module.in_channels, *space) for space in spaces]
            floats += [(batch, *space) for space in spaces] if module.in_channels == 1 else []
        case nn.RNNBase():
            floats = [(batch, length, module.input_size)]
            floats = floats if module.batch_first else [(length, batch, module.input_size)]
        case nn.RNNCellBase():
            floats = [(batch, module.input_size)]
        case nn.MultiheadAttention():
            floats = [(batch, length, module.embed_dim) if module.batch_first else (length, batch, module.embed_dim)]
        case nn.LayerNorm() | nn.RMSNorm():
            floats = [(batch, length, *module.normalized_shape), (batch, *module.normalized_shape)]
        case nn.BatchNorm1d():
            floats = [(batch, module.num_features), (batch, module.num_features, length)]
        case nn.modules.batchnorm._NormBase() | nn.GroupNorm():
            channels = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
            floats = [(batch, channels, edge, edge) for edge in _EDGES] + [(batch, channels, length)]
    return [(shape, None) for shape in floats]


class _Runner:
    """Runs a model without leaving a trace, and remembers the first inputs that it did not take."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.first_inputs: Inputs | None = None
        self.first_error: BaseException | None = None

    def run(self, inputs: Mapping[str, Any] | tuple[Any, ...]) -> bool:
        try:
            self.call(self.model, inputs)
        except Exception as error:
            if self.first_error is None:
                self.first_inputs = dict(inputs) if isinstance(inputs, Mapping) else None
                self.first_error = error
            return False
        return True

    def call(self, function: Callable[..., Any], inputs: Mapping[str, Any] | tuple[Any, ...]) -> Any:
        import warnings

        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=range(torch.cuda.device_count())),
                warnings.catch_warnings(action="ignore"),
            ):
                torch.manual_seed(0)
                return function(**inputs) if isinstance(inputs, Mapping) else function(*inputs)
        finally:
            for module, mode in modes:
                module.training = mode

    def watch(self, inputs: Inputs) -> list[tuple[str | None, torch.nn.Module]]:
        """The ``torch.nn`` modules that a run calls before it ends or fails, with the argument that each receives.

        ``None`` stands for a value that the forward computed.
        """
        arguments = {id(value): name for name, value in inputs.items()}
        seen: list[tuple[str | None, torch.nn.Module]] = []

        def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _fits(module, 1):
                received = [arguments[id(value)] for value in (*args, *kwargs.values()) if id(value) in arguments]
                seen.extend((name, module) for name in received or [None])

        handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in self.model.modules()]
        try:
            with contextlib.suppress(Exception):
                self.call(self.model, inputs)
        finally:
            for handle in handles:
                handle.remove()
        return seen


class _Maker:
    """Tensors for arguments with standard names, sized by what the configs of the model say."""

    def __init__(self, model: torch.nn.Module, directory: Path | None, seed: int) -> None:
        floating = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        self.model, self.directory, self.seed = model, directory, seed
        self.device, self.dtype = floating.device, floating.dtype
        self.configs = _configs(model, directory)
        sizes = [
            c[key] for c in self.configs for key in ("vocab_size", "src_vocab_size", "tgt_vocab_size") if c.get(key)
        ]
        self.vocabulary = min((size for size in sizes if isinstance(size, int)), default=0)

    def find(self, *names: str) -> Any:
        """The first of these names that a config has, the outermost config first; ``None`` if none has any."""
        return next((c[name] for name in names for c in self.configs if c.get(name) is not None), None)

    def number(self, *names: str) -> int:
        value = self.find(*names)
        value = value[0] if isinstance(value, list | tuple) and value else value
        return value if isinstance(value, int) else 0

    def _generator(self, name: str) -> torch.Generator:
        # A generator for each name, so that a change of one input leaves the values of the others.
        return torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))

    def floats(self, name: str, shape: Shape) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator(name)).to(self.device, self.dtype)

    def integers(self, name: str, shape: Shape, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator(name)).to(self.device)

    def tokens(self, name: str, shape: Shape) -> torch.Tensor:
        """Ordinary tokens, with the end token last: special ones (image, mask, ...) ask for something at their place."""
        special: set[int] = set()
        for config in self.configs:
            for key, value in config.items():
                if key.endswith(("_token_id", "_token_ids", "_token_index")):
                    special.update(v for v in (value if isinstance(value, list | tuple) else [value]) if v is not None)
        ordinary = torch.tensor(sorted(set(range(self.vocabulary)) - special) or [0])
        ids = ordinary[torch.randint(len(ordinary), shape, generator=self._generator(name))]
        end = self.number("eos_token_id")
        if 0 < end < self.vocabulary:
            ids[..., -1] = end
        return ids.to(self.device)

    def options(self, name: str, batch: int) -> list[torch.Tensor]:
        """What an argument of this name may be, likeliest first; nothing where its role or its sizes are unknown."""
        shapes: list[Shape] = []
        if name.endswith("input_ids"):
            if not self.vocabulary:
                return []
            # Lengths differ, so that exporters do not take the encoder's and the decoder's for one.
            lengths = [n // 2 for n in _LENGTHS] if name.startswith("decoder") else _LENGTHS
            shapes = [(batch, lengths[0]), (batch, lengths[1]), (batch, 2, lengths[0])]
            read = [self._tokenized(batch)] if name == "input_ids" else []
            return [*(ids for ids in read if ids is not None), *(self.tokens(name, shape) for shape in shapes)]
        if not self.configs:
            return []
        if name.startswith("pixel_values"):
            image = self._image()
            frames = self.number("num_frames", "frames_per_clip") or 1
            shapes = [(batch, *image), (batch, frames, *image), (batch, image[0], frames, *image[1:])]
        elif name == "input_features":
            bins = self.number("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
            frames = 2 * self.number("max_source_positions")
            shapes = [(batch, bins, frames), (batch, 128, bins), (batch, 1, 1024, bins)] if bins else []
        elif name == "input_values":
            channels = self.number("audio_channels") or 1
            bins, frames = self.number("num_mel_bins"), self.number("max_length")
            shapes = [(batch, 16000), (batch, channels, 16000), (batch, frames, bins)]
        elif name in ("inputs_embeds", "hidden_states", "encoder_hidden_states"):
            shapes = [(batch, _LENGTHS[0], self.number("hidden_size"))]
        elif name == "past_values":
            channels = self.number("num_input_channels") or 1
            shapes = [(batch, self.number("context_length"), channels)]
        return [self.floats(name, shape) for shape in shapes if all(shape)]

    def _image(self) -> Shape:
        """Channels, height and width."""
        size = self.find("input_size")
        if isinstance(size, list | tuple) and len(size) == 3:
            return tuple(size)
        channels = self.number("num_channels", "in_channels", "in_chans") or 3
        size = self.find("image_size", "img_size", "crop_size", "size") or 224
        if isinstance(size, Mapping):
            edge = size.get("shortest_edge")
            size = (size.get("height") or edge or 224, size.get("width") or edge or 224)
        height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        return (channels, height, width)

    def _tokenized(self, batch: int) -> torch.Tensor | None:
        """Sentences in the tokens of the model's own tokenizer, all cut to one length so that none is padded."""
        if self.directory is None or not any(self.directory.glob("*token*")):
            return None
        from transformers import AutoTokenizer

        texts = [_SENTENCES[i % len(_SENTENCES)] for i in range(batch)]
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.directory, local_files_only=True)
            length = min(len(ids) for ids in tokenizer(texts)["input_ids"])
            ids = torch.tensor(tokenizer(texts, truncation=True, max_length=length)["input_ids"])
        except Exception:
            # A tokenizer that cannot be built here (a missing package, say) is no reason to fail: random ids do.
            return None
        return ids.to(self.device) if ids.numel() and int(ids.max()) < self.vocabulary else None

    def goes_beside(self, name: str) -> bool:
        """Whether an argument takes its shape from another one."""
        return name.endswith(("mask", "token_type_ids", "position_ids")) or name in ("bbox", "bool_masked_pos")

    def beside(self, inputs: Inputs, names: Sequence[str]) -> Iterator[Inputs]:
        """``inputs`` with the arguments that take their shape from them; masks, which hide nothing, in both types."""
        for mask_type in (torch.int64, torch.bool) if any(name.endswith("mask") for name in names) else (torch.int64,):
            yield inputs | {name: self._beside(name, inputs, mask_type) for name in names}

    def _beside(self, name: str, inputs: Inputs, mask_type: torch.dtype) -> torch.Tensor:
        prefix = name.partition("_")[0] if name.startswith(("decoder", "encoder")) else ""
        tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim}
        text = {key: value for key, value in tensors.items() if not value.is_floating_point()} or tensors
        anchor = next((v for key, v in tensors.items() if prefix and key.startswith(prefix)), next(iter(text.values())))
        shape = anchor.shape[:2] if anchor.is_floating_point() else anchor.shape
        if name == "pixel_mask" and "pixel_values" in tensors:
            shape = (tensors["pixel_values"].shape[0], *tensors["pixel_values"].shape[-2:])
        if name == "bool_masked_pos":
            patch = self.number("patch_size") or 16
            frames = (self.number("num_frames") or 1) // (self.number("tubelet_size") or 1)
            patches = frames * (self._image()[1] // patch) * (self._image()[2] // patch)
            return (torch.arange(patches) % 2 == 0).expand(shape[0], -1).to(self.device)
        if name == "bbox":
            return torch.tensor([0, 0, 100, 100]).expand(*shape, 4).to(self.device)
        positions = torch.arange(shape[-1]).expand(shape).to(self.device)
        if name.endswith("token_type_ids"):
            segments = max(self.number("type_vocab_size"), 1)
            return (positions * min(segments, 2)) // shape[-1]
        return positions if name.endswith("position_ids") else torch.ones(shape, dtype=mask_type, device=self.device)

    def with_placeholders(self, runner: _Runner, inputs: Inputs) -> Inputs:
        """Text and images (or sound) together: one placeholder token in the text for each feature of the other."""
        for kind, name in (("image", "pixel_values"), ("audio", "input_features")):
            token = self.find(f"{kind}_token_id", f"{kind}_token_index")
            features = getattr(self.model, f"get_{kind}_features", None)
            if (
                token is None
                or features is None
                or name not in inputs
                or "input_ids" not in inputs
                or inputs["input_ids"].ndim != 2
            ):
                continue
            try:
                made = runner.call(features, {name: inputs[name]})
            except Exception:
                continue
            made = getattr(made, "pooler_output", made)
            made = torch.cat(list(made)) if isinstance(made, list | tuple) else made
            ids = inputs["input_ids"]
            rows = made.numel() // made.shape[-1] // ids.shape[0]
            inputs = inputs | {
                "input_ids": torch.cat([ids[:, :1], ids.new_full((len(ids), rows), token), ids[:, 1:]], 1)
            }
        return inputs


def _configs(model: torch.nn.Module, directory: Path | None) -> list[Mapping[str, Any]]:
    """What says sizes, best first: the model's config, those inside it, and the image or sound processor's file."""
    queue = [
        config for config in (getattr(module, "config", None) for module in model.modules()) if config is not None
    ][:1]
    queue += [c for c in (getattr(model, "pretrained_cfg", None), getattr(model, "default_cfg", None)) if c]
    found: list[Mapping[str, Any]] = []
    for config in queue:
        values = dict(config) if isinstance(config, Mapping) else dict(getattr(config, "__dict__", {}))
        # Transformers gives some settings a standard name beside their own: n_embd is also hidden_size.
        aliases = getattr(config, "attribute_map", {})
        values |= {alias: values.get(own) for alias, own in aliases.items() if alias not in values}
        found.append(values)
        queue.extend(v for v in values.values() if hasattr(v, "to_dict") or (isinstance(v, dict) and "input_size" in v))
    with contextlib.suppress(OSError, ValueError):
        if directory is not None:
            found.append(dict(json.loads((directory / "preprocessor_config.json").read_text(encoding="utf-8"))))
    return found


def _read_spec(spec: Mapping[str, Any] | str | Path | None, accepted: list[str] | None, maker: _Maker) -> Inputs:
    """The arguments that ``spec`` gives; ``accepted`` is ``None`` where the forward takes any name.

    Raises:
        InputsError: It cannot be read, names an argument that there is not, or describes one wrongly.
    """
    if isinstance(spec, str | Path):
        try:
            spec = json.loads(Path(spec).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputsError(f"cannot read {spec}: {error.strerror}; give a JSON file") from error
        except ValueError as error:
            raise InputsError(f"{spec} is no JSON: {error}") from error
    if not isinstance(spec, Mapping | None):
        raise InputsError(f'the inputs are a JSON {type(spec).__name__}: write {{"NAME": {{"shape": [2, 8]}}}}')
    given: Inputs = {}
    for name, entry in (spec or {}).items():
        if accepted is not None and name not in accepted:
            raise InputsError(f"{type(maker.model).__name__} takes no input {name}: it takes {', '.join(accepted)}")
        try:
            given[name] = None if entry is None else _read_entry(name, entry, maker)
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputsError(f"input {name}: {' '.join(str(error).split())}") from error
    return given


def _read_entry(name: str, entry: Any, maker: _Maker) -> Any:
    """One argument of the spec. Raises ValueError, or what torch raises, when the entry is wrong."""
    if not isinstance(entry, Mapping) or not (entry.keys() <= {"dtype", "shape", "range"} or "value" in entry):
        raise ValueError('give {"dtype": ..., "shape": [...], "range": [low, high]} or {"value": ...}')
    dtype = getattr(torch, str(entry["dtype"]), None) if "dtype" in entry else None
    if "dtype" in entry and not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {entry['dtype']!r}; give float32, int64, bool or another type of torch")
    if "value" in entry:
        if not entry.keys() <= {"value", "dtype"}:
            raise ValueError('"value" goes with "dtype" only')
        value = entry["value"]
        if isinstance(value, list) or dtype is not None:
            return torch.tensor(value, dtype=dtype, device=maker.device)
        return value
    shape, bounds = entry.get("shape"), entry.get("range")
    if not isinstance(shape, list | tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f'"shape" is a list of sizes such as [2, 8], not {shape!r}')
    if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        raise ValueError(f'"range" is [low, high] with low below high, not {bounds!r}')
    is_integer = name.endswith(("_ids", "mask")) if bounds is None else all(type(bound) is int for bound in bounds)
    dtype = dtype or (torch.int64 if is_integer else maker.dtype)
    if bounds is None and name.endswith("mask"):
        return torch.ones(shape, dtype=dtype, device=maker.device)
    if dtype.is_floating_point:
        values = maker.floats(name, tuple(shape))
        if bounds is not None:
            uniform = torch.rand(shape, generator=maker._generator(name)).to(maker.device)
            values = uniform * (bounds[1] - bounds[0]) + bounds[0]
        return values.to(dtype)
    if bounds is None and name.endswith("input_ids") and maker.vocabulary:
        return maker.tokens(name, tuple(shape)).to(dtype)
    low, high = bounds or (0, 2)
    return maker.integers(name, tuple(shape), low, high).to(dtype)
