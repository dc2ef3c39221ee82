"""Example inputs for a module, from its forward's signature, its configs and its parameters; a run confirms them.

No rule knows a model. Where an argument has one of the field's standard names (``input_ids``, ``pixel_values``, ...),
the name says its role and the configs say the sizes. For any other name the model is run on a probe, and the first
``torch.nn`` module that receives the probe says what fits. Nothing is returned that the model has not run with.

Over 400 lines because all of it makes tensors, and torch may be imported in few files.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from modelexport.core.limits import ELEMENTS, SETTINGS_BYTES
from modelexport.core.messages import collected
from modelexport.errors import FileFormatError, InputsError
from modelexport.files.regular import read_regular
from modelexport.pytorch.private_torch import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from modelexport.pytorch.traced import untouched
from modelexport.pytorch.trust import no_questions

Inputs = dict[str, Any]
Shape = tuple[int, ...]

_LENGTHS = (16, 4)
"""Lengths of generated sequences; the second is for models that have few positions."""
_EDGES = (64, 224, 32, 28, 96, 128, 256, 299, 384)
"""Edges of images, where only a convolution says what an image is."""
_SAMPLES = (1024, 16000, 128, 64, 16)
"""Lengths of signals, where only a convolution says what a signal is."""
_MAIN = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids")
"""Arguments that carry data. They are generated even where optional, so that every part of the model runs."""
_BESIDE_TEXT = ("attention_mask", "token_type_ids")
"""Optional arguments that go with ``input_ids``."""
_SHAPED_BY_ANOTHER = ("mask", "token_type_ids", "position_ids", "bool_masked_pos")
_COUNTED = ("_ids", "mask")
"""Ends of names whose values are whole numbers."""
_MAX_RUNS = 150
_MAX_RUNS_OF_SHAPES = 8
_EXAMPLE = '{"NAME": {"dtype": "int64", "shape": [2, 8], "range": [0, 100]}} or {"NAME": {"value": [[1, 2]]}}'
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
    has_weights: bool = True,
) -> Inputs:
    """Keyword arguments that ``model`` has run with, on its device and in its floating-point type.

    Args:
        model: It runs in eval mode without gradients; its modes and the caller's random state stay as they were.
        spec: Replaces or adds to what would be generated: a dict, or the path of a JSON file with name ->
            ``{"dtype": "int64", "shape": [2, 8], "range": [0, 100]}`` (100 is excluded), ``{"value": [[1, 2]]}``, or
            ``null`` to leave an argument out.
        directory: Where the model's tokenizer or ``preprocessor_config.json`` lies.
        seed: For the values.
        batch: The first dimension; 1 where the model takes no other.
        has_weights: Whether it can run. Without weights its run is one of shapes and types alone, and where those
            fit no inputs, the first that were generated are returned.

    Raises:
        InputsError: ``spec`` is wrong, or an argument cannot be generated; the message then has the JSON to write.
    """
    signature = inspect.signature(model.forward).parameters
    kind = inspect.Parameter
    named = {name: p for name, p in signature.items() if p.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)}
    maker = _Maker(model, Path(directory) if directory is not None else None, seed)
    takes_any = any(p.kind is kind.VAR_KEYWORD for p in signature.values())
    entries = _read_spec(spec, None if takes_any else list(named), maker)
    given = {name: value for name, value in entries.items() if value is not None}
    sized = [value.shape[0] for value in given.values() if isinstance(value, torch.Tensor) and value.ndim]

    main = getattr(model, "main_input_name", None)
    free = [name for name in named if name not in entries]
    required = [name for name in free if named[name].default is kind.empty]
    optional = [name for name in free if (name in _MAIN or name == main) and name not in required]
    beside = [name for name in _BESIDE_TEXT if name in free and name not in required]
    if maker.number("type_vocab_size") < 2:
        beside = [name for name in beside if name != "token_type_ids"]
    runner = _Runner(model, has_weights)
    for size in (sized[0],) if sized else dict.fromkeys((batch, 1)):
        plans = _plans(runner, maker, size, given=given, required=required, optional=optional, beside=beside)
        for inputs in itertools.islice(plans, _MAX_RUNS if has_weights else _MAX_RUNS_OF_SHAPES):
            if runner.run(inputs):
                return {name: inputs[name] for name in dict.fromkeys((*named, *given)) if name in inputs}
    if not has_weights and runner.first_inputs is not None:
        # Some operations compute shapes for fewer types than values; the exporter, which replaces those, will tell.
        return runner.first_inputs
    raise InputsError(_advice(runner, maker, given)) from runner.first_error


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
        texts.append(f"{name} {_dtype(value)}{list(value.shape)}" if is_tensor else f"{name} {type(value).__name__}")
    return ", ".join(texts) or "no inputs"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _line(error: BaseException | None, limit: int = 240) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else f"{text[:limit]}..."


def _advice(runner: _Runner, maker: _Maker, given: Inputs) -> str:
    """Why nothing ran, and the JSON to correct: what was generated first."""
    kind, tried = type(runner.model).__name__, runner.first_inputs or {}
    entries: dict[str, Any] = {}
    for name, value in tried.items():
        if name not in given:
            entries[name] = {"dtype": _dtype(value), "shape": list(value.shape)}
            if name.endswith("input_ids") and maker.vocabulary:
                entries[name]["range"] = [0, maker.vocabulary]
    problem = f"{kind} does not run with {_describe(tried)}: {_line(runner.first_error)}"
    if not entries:
        return f"{problem}; give others, or let a factory return the module and its inputs"
    return f"{problem}; correct the generated part and pass it with --inputs SPEC.json: {json.dumps(entries)}"


def _plans(
    runner: _Runner,
    maker: _Maker,
    batch: int,
    *,
    given: Inputs,
    required: list[str],
    optional: list[str],
    beside: list[str],
) -> Iterator[Inputs]:
    """Inputs to try, best first: those with every argument that carries data before those with fewer."""
    subsets = (itertools.combinations(optional, count) for count in range(len(optional), -1, -1))
    for chosen in itertools.chain.from_iterable(subsets):
        choices = {name: maker.options(name, batch) for name in (*required, *chosen)}
        known = {name: tensors for name, tensors in choices.items() if tensors}
        late = [name for name in choices if name not in known and name.endswith(_SHAPED_BY_ANOTHER)]
        has_tensors = any(isinstance(value, torch.Tensor) and value.ndim for value in given.values())
        late = late if len(late) < len(choices) or has_tensors else []
        unknown = [name for name in choices if name not in known and name not in late]
        for values in itertools.product(*known.values()):
            start = maker.with_placeholders(runner, given | dict(zip(known, values, strict=True)))
            text = beside if "input_ids" in start else []
            for inputs in _discover(runner, maker, batch, known=start, unknown=unknown, late=late):
                for kept in range(len(text), -1, -1):
                    yield from maker.beside(inputs, (*late, *text[:kept]))
    # A name that is a standard one elsewhere may mean something else here.
    yield from _discover(runner, maker, batch, known=given, unknown=required, late=[])


def _discover(
    runner: _Runner, maker: _Maker, batch: int, *, known: Inputs, unknown: list[str], late: list[str]
) -> Iterator[Inputs]:
    """``known`` with each unknown argument made to fit the first ``torch.nn`` module that receives it."""
    if not unknown:
        yield known
        return
    name, values = unknown[0], maker.unseen(unknown[0], batch)
    # Edges of one, tried last, also add to positions and the like, whose size is not known yet.
    for edge, rank in itertools.product((2, 1), (2, 3, 4, 1, 5)):
        probes = {name: maker.floats(name, (batch,) + (edge,) * (rank - 1)) for name in unknown}
        seen = runner.watch(next(maker.beside(known | probes, late)))
        hits = [(argument, module) for argument, module in seen if argument in unknown]
        if not hits and len(unknown) == 1:
            # The forward reshaped it first: what reaches the first module is still made of it.
            hits = [(name, module) for argument, module in seen if argument is None]
        if hits:
            name, module = hits[0][0] or name, hits[0][1]
            shapes = _fits(module, batch)
            if seen[0][0] is None:
                shapes += [((batch, samples), None) for samples in _SAMPLES]
            # Made only when it is its turn: images are large.
            values = (maker.integers(name, at, 0, high) if high else maker.floats(name, at) for at, high in shapes)
            break
    rest = [other for other in unknown if other != name]
    if maker.states_image and not known:
        values = itertools.chain([maker.floats(name, (batch, *maker.image()))], values)
    for value in values:
        yield from _discover(runner, maker, batch, known=known | {name: value}, unknown=rest, late=late)


def _fits(module: torch.nn.Module, batch: int) -> list[tuple[Shape, int | None]]:
    """Shapes that the parameters of a ``torch.nn`` module accept, with the bound of integer values for an embedding."""
    nn, length = torch.nn, _LENGTHS[0]
    match module:
        case nn.Embedding() | nn.EmbeddingBag():
            return [(shape, module.num_embeddings) for shape in ((batch, length), (batch,), (batch, _LENGTHS[1]))]
        case nn.Linear():
            shapes: list[Shape] = [(batch, module.in_features), (batch, length, module.in_features)]
        case nn.modules.conv._ConvNd():
            rank = len(module.kernel_size)
            spaces = [(edge,) * rank for edge in (_SAMPLES, _EDGES, (16, 32, 64))[rank - 1]]
            shapes = [(batch, module.in_channels, *space) for space in spaces]
            shapes += [(batch, *space) for space in spaces] if module.in_channels == 1 else []
        case nn.RNNBase():
            shapes = [(batch, length, module.input_size) if module.batch_first else (length, batch, module.input_size)]
        case nn.MultiheadAttention():
            shapes = [(batch, length, module.embed_dim) if module.batch_first else (length, batch, module.embed_dim)]
        case nn.Transformer():
            shapes = [(batch, length, module.d_model) if module.batch_first else (length, batch, module.d_model)]
        case nn.LayerNorm() | nn.RMSNorm():
            shapes = [(batch, length, *module.normalized_shape), (batch, *module.normalized_shape)]
        case nn.modules.batchnorm._NormBase():
            shapes = [(batch, module.num_features, *space) for space in ((), (length,), *((e, e) for e in _EDGES))]
        case _:
            return []
    return [(shape, None) for shape in shapes]


class _Runner:
    """Runs a model without leaving a trace, and remembers the first inputs that it did not take."""

    def __init__(self, model: torch.nn.Module, has_weights: bool = True) -> None:
        self.model = model
        self._fake = None if has_weights else FakeTensorMode(allow_non_fake_inputs=True)
        self.first_inputs: Inputs | None = None
        self.first_error: BaseException | None = None

    def run(self, inputs: Mapping[str, Any] | tuple[Any, ...]) -> bool:
        try:
            self.call(self.model, self._shapes_of(inputs))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return True  # from here on the values decide, which a model without weights does not have
        except Exception as error:
            if self.first_error is None:
                self.first_inputs = dict(inputs) if isinstance(inputs, Mapping) else None
                self.first_error = error
            return False
        return True

    def _shapes_of(self, inputs: Mapping[str, Any] | tuple[Any, ...]) -> Mapping[str, Any] | tuple[Any, ...]:
        """The inputs as they are, or, for a model without weights, tensors of the same types and shapes."""
        if self._fake is None:
            return inputs
        if isinstance(inputs, Mapping):
            return {name: self._shape_of(value) for name, value in inputs.items()}
        return tuple(map(self._shape_of, inputs))

    def _shape_of(self, value: Any) -> Any:
        return self._fake.from_tensor(value) if self._fake and isinstance(value, torch.Tensor) else value

    def call(self, function: Callable[..., Any], inputs: Mapping[str, Any] | tuple[Any, ...]) -> Any:
        with (
            untouched(self.model, runs=self._fake is None),
            # Shapes that do not fit are logged with a traceback before they are raised.
            contextlib.nullcontext() if self._fake is None else collected(),
            self._fake or contextlib.nullcontext(),
            warnings.catch_warnings(action="ignore"),
        ):
            torch.manual_seed(0)
            return function(**inputs) if isinstance(inputs, Mapping) else function(*inputs)

    def watch(self, inputs: Inputs) -> list[tuple[str | None, torch.nn.Module]]:
        """The ``torch.nn`` modules that a run calls before it ends or fails, with the argument that each receives.

        ``None`` is a value that the forward computed.
        """
        given = self._shapes_of(inputs)
        assert isinstance(given, Mapping)
        arguments = {id(value): name for name, value in given.items()}
        seen: list[tuple[str | None, torch.nn.Module]] = []

        def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _fits(module, 1):
                received = [arguments[id(value)] for value in (*args, *kwargs.values()) if id(value) in arguments]
                seen.extend([(name, module) for name in received] or [(None, module)])

        handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in self.model.modules()]
        try:
            with contextlib.suppress(Exception):
                self.call(self.model, given)
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
        sizes = [config.get(f"{side}vocab_size") for config in self.configs for side in ("", "src_", "tgt_")]
        self.vocabulary = min((size for size in sizes if isinstance(size, int) and size > 0), default=0)

    def find(self, *names: str) -> Any:
        """The first of these names that a config has, the outermost config first; ``None`` if none has any."""
        return next((config[name] for name in names for config in self.configs if config.get(name) is not None), None)

    def number(self, *names: str) -> int:
        """Like ``find``: a whole number, the first of a list, or 0."""
        value = self.find(*names)
        value = value[0] if isinstance(value, list | tuple) and value else value
        return value if isinstance(value, int) else 0

    def generator(self, name: str) -> torch.Generator:
        # One for each name, so that a change of one input leaves the values of the others.
        return torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))

    def floats(self, name: str, shape: Shape) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator(name)).to(self.device, self.dtype)

    def integers(self, name: str, shape: Shape, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator(name)).to(self.device)

    def tokens(self, name: str, shape: Shape) -> torch.Tensor:
        """Ordinary tokens, the end token last: special ones (image, mask, ...) ask for something at their place."""
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
        """What an argument of this name may be, likeliest first; nothing where its role or its sizes are unknown."""
        if name.endswith("input_ids"):
            # Shorter for a decoder, so that exporters do not take its length for the encoder's.
            long, short = [n // 2 for n in _LENGTHS] if name.startswith("decoder") else _LENGTHS
            made = [self.tokens(name, shape) for shape in ((batch, long), (batch, short), (batch, 2, long))]
            read = self._tokenized(batch) if name == "input_ids" else []
            return [*read, *made] if self.vocabulary else []
        shapes: list[Shape] = []
        if name.startswith("pixel_values"):
            image, frames = self.image(), self.number("num_frames", "frames_per_clip") or 1
            shapes = [(batch, *image), (batch, frames, *image), (batch, image[0], frames, *image[1:])]
        elif name == "input_features":
            bins = self.number("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
            shapes = [(batch, bins, 2 * self.number("max_source_positions")), (batch, 128, bins), (batch, 1, 128, bins)]
        elif name == "input_values":
            wave, spectrum = 16000, (self.number("max_length"), self.number("num_mel_bins"))
            shapes = [(batch, wave), (batch, self.number("audio_channels") or 1, wave), (batch, *spectrum)]
        elif name in ("inputs_embeds", "hidden_states", "encoder_hidden_states"):
            shapes = [(batch, _LENGTHS[0], self.number("hidden_size"))]
        elif name == "past_values":
            shapes = [(batch, self.number("context_length"), self.number("num_input_channels") or 1)]
        return [self.floats(name, shape) for shape in shapes if all(shape)] if self.configs else []

    def unseen(self, name: str, batch: int) -> Iterator[torch.Tensor]:
        """For an argument that no ``torch.nn`` module receives: an image where a config speaks of one, then rows."""
        if self.find("image_size", "img_size") is not None:
            yield self.floats(name, (batch, *self.image()))
        shape = (batch, _LENGTHS[0])
        yield self.integers(name, shape, 0, 2) if name.endswith(_COUNTED) else self.floats(name, shape)

    @property
    def states_image(self) -> bool:
        """Whether a config gives channels, height and width in one, the way timm's do."""
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

    def _tokenized(self, batch: int) -> list[torch.Tensor]:
        """Sentences in the tokens of the model's own tokenizer, all cut to one length so that none is padded."""
        if self.directory is None or not any(self.directory.glob("*token*")):
            return []
        from transformers import AutoTokenizer

        texts = [_SENTENCES[i % len(_SENTENCES)] for i in range(batch)]
        # A tokenizer that cannot be built here (a package is missing, say) does not make the inputs fail.
        with contextlib.suppress(Exception):
            with no_questions():
                tokenizer = AutoTokenizer.from_pretrained(
                    self.directory, local_files_only=True, trust_remote_code=False
                )
            length = min(len(ids) for ids in tokenizer(texts)["input_ids"])
            ids = torch.tensor(tokenizer(texts, truncation=True, max_length=length)["input_ids"])
            if ids.numel() and int(ids.max()) < self.vocabulary:
                return [ids.to(self.device)]
        return []

    def beside(self, inputs: Inputs, names: Iterable[str]) -> Iterator[Inputs]:
        """``inputs`` with the arguments that take their shape from them; masks, which hide nothing, in both types."""
        for mask_type in (torch.int64, torch.bool) if any(name.endswith("mask") for name in names) else (torch.int64,):
            yield inputs | {name: self._beside(name, inputs, mask_type) for name in names}

    def _beside(self, name: str, inputs: Inputs, mask_type: torch.dtype) -> torch.Tensor:
        tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim}
        side = name.partition("_")[0] if name.startswith(("decoder", "encoder")) else "input"
        # The argument of the same side (decoder_input_ids), else the first tokens, else whatever there is.
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

    def with_placeholders(self, runner: _Runner, inputs: Inputs) -> Inputs:
        """Text and images (or sound) together: one placeholder token in the text for each feature of the other."""
        for kind, name in (("image", "pixel_values"), ("audio", "input_features")):
            token, ids = self.find(f"{kind}_token_id", f"{kind}_token_index"), inputs.get("input_ids")
            if token is None or ids is None or ids.ndim != 2 or name not in inputs:
                continue
            # What cannot be computed this way is left to the run, which may then ask for text alone.
            with contextlib.suppress(Exception):
                made = runner.call(getattr(self.model, f"get_{kind}_features"), {name: inputs[name]})
                made = getattr(made, "pooler_output", made)
                made = torch.cat(list(made)) if isinstance(made, list | tuple) else made
                slots = ids.new_full((len(ids), made.numel() // made.shape[-1] // len(ids)), token)
                inputs = inputs | {"input_ids": torch.cat([ids[:, :1], slots, ids[:, 1:]], 1)}
        return inputs


def _configs(model: torch.nn.Module, directory: Path | None) -> list[Mapping[str, Any]]:
    """What says sizes, best first: the model's config, those inside it, and the image or sound processor's file."""
    queue = [vars(module).get("config") for module in model.modules()]
    queue = [config for config in queue if config is not None][:1]
    queue += [vars(model)[name] for name in ("pretrained_cfg", "default_cfg") if vars(model).get(name)]
    found: list[Mapping[str, Any]] = []
    for config in queue:
        values = dict(config) if isinstance(config, Mapping) else dict(getattr(config, "__dict__", {}))
        # Transformers gives some settings a standard name beside their own: n_embd is also hidden_size.
        aliases = getattr(config, "attribute_map", {})
        found.append(values | {alias: values.get(own) for alias, own in aliases.items() if alias not in values})
        queue.extend(v for v in values.values() if hasattr(v, "to_dict") or (isinstance(v, dict) and "input_size" in v))
    with contextlib.suppress(FileFormatError, ValueError, TypeError, RecursionError):
        if directory is not None:
            found.append(dict(json.loads(read_regular(directory / "preprocessor_config.json", SETTINGS_BYTES))))
    return found


def _read_spec(spec: Mapping[str, Any] | str | Path | None, accepted: list[str] | None, maker: _Maker) -> Inputs:
    """The arguments that ``spec`` gives; ``accepted`` is ``None`` where the forward takes any name.

    Raises:
        InputsError: It cannot be read, names an argument that there is not, or describes one wrongly.
    """
    if isinstance(spec, str | Path):
        try:
            spec = json.loads(read_regular(Path(spec), SETTINGS_BYTES))
        except FileFormatError as error:
            raise InputsError(f"{error}; give a JSON file") from error
        except (ValueError, RecursionError) as error:
            raise InputsError(f"{spec} is no JSON: {error}; write {_EXAMPLE}") from error
    if not isinstance(spec, Mapping | None):
        raise InputsError(f"the inputs are a {type(spec).__name__} and no JSON object: write {_EXAMPLE}")
    given: Inputs = {}
    for name, entry in (spec or {}).items():
        if accepted is not None and name not in accepted:
            raise InputsError(f"{type(maker.model).__name__} takes no input {name}: it takes {', '.join(accepted)}")
        try:
            given[name] = None if entry is None else _read_entry(name, entry, maker)
        except (ValueError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
            raise InputsError(f"input {name}: {' '.join(str(error).split())}") from error
    return given


def _read_entry(name: str, entry: Any, maker: _Maker) -> Any:
    """One argument of the spec. Raises ValueError, or what torch raises, when the entry is wrong."""
    if not isinstance(entry, Mapping) or not (entry.keys() <= {"dtype", "shape", "range"} or "value" in entry):
        raise ValueError(f"this is neither a shape nor a value; write {_EXAMPLE}")
    dtype = getattr(torch, str(entry["dtype"]), None) if "dtype" in entry else None
    if "dtype" in entry and not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {entry['dtype']!r}; give float32, int64, bool or another type of torch")
    if "value" in entry:
        value = entry["value"]
        return torch.tensor(value, dtype=dtype, device=maker.device) if isinstance(value, list) or dtype else value
    shape, bounds = entry.get("shape"), entry.get("range")
    if not isinstance(shape, list | tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f'"shape" is a list of sizes such as [2, 8], not {shape!r}')
    if prod(shape) > ELEMENTS:
        raise ValueError(f'"shape" asks for {prod(shape):,} elements, and at most {ELEMENTS:,} are made: {shape!r}')
    numbers = isinstance(bounds, list | tuple) and all(type(bound) in (int, float) for bound in bounds)
    if bounds is not None and not (numbers and len(bounds) == 2 and bounds[0] < bounds[1]):
        raise ValueError(f'"range" is [low, high] with low below high, not {bounds!r}')
    shape = tuple(shape)
    counts = name.endswith(_COUNTED) if bounds is None else all(type(bound) is int for bound in bounds)
    dtype = dtype or (torch.int64 if counts else maker.dtype)
    if bounds is not None and dtype.is_floating_point:
        values = torch.rand(shape, generator=maker.generator(name)) * (bounds[1] - bounds[0]) + bounds[0]
    elif dtype.is_floating_point:
        values = maker.floats(name, shape)
    elif bounds is None and name.endswith("mask"):
        values = torch.ones(shape)
    elif bounds is None and name.endswith("input_ids") and maker.vocabulary:
        values = maker.tokens(name, shape)
    else:
        values = maker.integers(name, shape, *(bounds or (0, 2)))
    return values.to(maker.device, dtype)
