"""Every public class of ``torch.nn`` that can be called: how it is made, what it takes, and why it cannot be exported.

``docs/evidence/torch-nn.md`` is generated from this table and what its exports gave: ``python tests/torch_nn.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

NOT_CALLED = {
    "Container": "an obsolete base class",
    "Module": "a base class",
    "ModuleDict": "a container without forward",
    "ModuleList": "a container without forward",
    "ParameterDict": "a container without forward",
    "ParameterList": "a container without forward",
    "RNNBase": "a base class",
    "RNNCellBase": "a base class",
}
"""The classes that are not called."""


@dataclass(frozen=True)
class NnCase:
    """A class of ``torch.nn``, constructed in one way, and the inputs of one call."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Sequence[Any]]
    variant: str = ""
    failure: str = ""
    """Part of the reason if it cannot be exported; then no file is written."""
    frontend: str = "dynamo"
    """The front end whose file is used."""

    @property
    def label(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name


def _x(*shape: int) -> Callable[[], Sequence[Any]]:
    return lambda: (_floats(*shape),)


def _floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def _positive(*shape: int, seed: int = 0) -> torch.Tensor:
    return _floats(*shape, seed=seed).sigmoid()


def _labels(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(7))


def _signs(*shape: int) -> torch.Tensor:
    return torch.sign(_floats(*shape, seed=3)) + (_floats(*shape, seed=3) == 0)


def _case(
    name: str,
    inputs: Callable[[], Sequence[Any]],
    *args: Any,
    variant: str = "",
    failure: str = "",
    frontend: str = "dynamo",
    runs: bool = False,
    **kwargs: Any,
) -> NnCase:
    """A case of a class by its name; ``runs`` for classes that are initialized by their first run."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecated classes, and of layers without elements
            module = getattr(nn, name)(*args, **kwargs)
        if runs:
            module(*inputs())
        return module.eval()

    return NnCase(name, build, inputs, variant, failure, frontend)


# fmt: off
ELEMENTWISE = [
    "AlphaDropout", "CELU", "Dropout", "Dropout1d", "ELU", "FeatureAlphaDropout", "GELU", "Hardshrink",
    "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish", "PReLU", "RReLU", "ReLU",
    "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
]
# fmt: on
SPATIAL = {1: (2, 4, 10), 2: (2, 4, 8, 10), 3: (2, 4, 6, 8, 6)}
PAIRS: dict[str, Callable[[], Sequence[Any]]] = {
    "BCELoss": lambda: (_positive(3, 4), _positive(3, 4, seed=1)),
    "BCEWithLogitsLoss": lambda: (_floats(3, 4), _positive(3, 4)),
    "CTCLoss": lambda: (
        _floats(10, 2, 5).log_softmax(-1),
        _labels(4, 2, 3) + 1,
        torch.tensor([10, 10]),
        torch.tensor([3, 2]),
    ),
    "CosineEmbeddingLoss": lambda: (_floats(3, 4), _floats(3, 4, seed=1), torch.tensor([1, -1, 1])),
    "CosineSimilarity": lambda: (_floats(3, 4), _floats(3, 4, seed=1)),
    "CrossEntropyLoss": lambda: (_floats(3, 5), _labels(5, 3)),
    "GaussianNLLLoss": lambda: (_floats(3, 4), _floats(3, 4, seed=1), _positive(3, 4)),
    "HingeEmbeddingLoss": lambda: (_floats(3, 4), _signs(3, 4)),
    "HuberLoss": lambda: (_floats(3, 4), _floats(3, 4, seed=1)),
    "KLDivLoss": lambda: (_floats(3, 4).log_softmax(-1), _floats(3, 4, seed=1).softmax(-1)),
    "L1Loss": lambda: (_floats(3, 4), _floats(3, 4, seed=1)),
    "MSELoss": lambda: (_floats(3, 4), _floats(3, 4, seed=1)),
    "MarginRankingLoss": lambda: (_floats(4), _floats(4, seed=1), _signs(4)),
    "MultiLabelMarginLoss": lambda: (_floats(2, 4), torch.tensor([[3, 0, -1, 1], [1, -1, 0, 0]])),
    "MultiLabelSoftMarginLoss": lambda: (_floats(3, 4), (_floats(3, 4, seed=1) > 0).float()),
    "MultiMarginLoss": lambda: (_floats(3, 5), _labels(5, 3)),
    "NLLLoss": lambda: (_floats(3, 5).log_softmax(-1), _labels(5, 3)),
    "NLLLoss2d": lambda: (_floats(3, 5, 4, 4).log_softmax(1), _labels(5, 3, 4, 4)),
    "PairwiseDistance": lambda: (_floats(3, 4), _floats(3, 4, seed=1)),
    "PoissonNLLLoss": lambda: (_floats(3, 4), _positive(3, 4)),
    "SmoothL1Loss": lambda: (_floats(3, 4), _floats(3, 4, seed=1)),
    "SoftMarginLoss": lambda: (_floats(3, 4), _signs(3, 4)),
    "TripletMarginLoss": lambda: (_floats(3, 4), _floats(3, 4, seed=1), _floats(3, 4, seed=2)),
    "TripletMarginWithDistanceLoss": lambda: (_floats(3, 4), _floats(3, 4, seed=1), _floats(3, 4, seed=2)),
}


REFUSED: dict[str, dict[str, str]] = {
    "CTCLoss": {"failure": "aten._ctc_loss"},
}
"""Facts about single classes: the reason why one cannot be exported, or that the second front end exports it."""


def _by_dimension() -> list[NnCase]:
    cases = []
    for n, shape in SPATIAL.items():
        x, channels = _x(*shape), shape[1]
        both = (1,) * (2 * n)
        cases += [
            _case(f"AdaptiveAvgPool{n}d", x, 2),
            _case(f"AdaptiveMaxPool{n}d", x, 2),
            _case(f"AvgPool{n}d", x, 2),
            _case(f"AvgPool{n}d", x, 3, stride=2, padding=1, ceil_mode=True, variant="ceil"),
            _case(f"BatchNorm{n}d", x, channels),
            _case(f"CircularPad{n}d", x, 1),
            _case(f"ConstantPad{n}d", x, 1, 0.5),
            _case(f"Conv{n}d", x, channels, 6, 3, padding=1),
            _case(f"ConvTranspose{n}d", x, channels, 6, 3, stride=2),
            _case(f"InstanceNorm{n}d", x, channels, affine=True),
            _case(f"LPPool{n}d", lambda shape=shape: (_positive(*shape),), 2.0, 2),
            _case(f"LazyBatchNorm{n}d", x, runs=True),
            _case(f"LazyConv{n}d", x, 6, 3, runs=True),
            _case(f"LazyConvTranspose{n}d", x, 6, 3, runs=True),
            _case(f"LazyInstanceNorm{n}d", x, affine=True, runs=True),
            _case(f"MaxPool{n}d", x, 2),
            _case(f"MaxPool{n}d", x, 3, stride=2, padding=1, variant="padded"),
            _case(f"MaxUnpool{n}d", _pooled(n, shape), 2),
            _case(f"ReflectionPad{n}d", x, 1),
            _case(f"ReplicationPad{n}d", x, 1),
            _case(f"ZeroPad{n}d", x, both),
        ]
    return cases


def _pooled(n: int, shape: tuple[int, ...]) -> Callable[[], Sequence[Any]]:
    return lambda: tuple(getattr(nn.functional, f"max_pool{n}d")(_floats(*shape), 2, return_indices=True))


def _recurrent() -> list[NnCase]:
    cases = []
    for name in ("GRU", "LSTM", "RNN"):
        cases += [
            _case(name, _x(5, 2, 4), 4, 6),
            _case(name, _x(2, 5, 4), 4, 6, num_layers=2, bidirectional=True, batch_first=True, variant="bidirectional"),
        ]
    return [
        *cases,
        _case("LSTM", _x(5, 2, 4), 4, 6, proj_size=3, variant="projected"),
        _case("GRUCell", _x(2, 4), 4, 6),
        _case("LSTMCell", _x(2, 4), 4, 6),
        _case("RNNCell", _x(2, 4), 4, 6),
    ]


def _attention() -> list[NnCase]:
    layer: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}
    source, target = _floats(2, 5, 8), _floats(2, 4, 8, seed=1)

    def encoder() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2).eval()

    def decoder() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), 2).eval()

    return [
        _case("MultiheadAttention", lambda: (source, source, source), 8, 2, batch_first=True),
        _case("Transformer", lambda: (source, target), num_encoder_layers=1, num_decoder_layers=1, **layer),
        NnCase("TransformerDecoder", decoder, lambda: (target, source)),
        _case("TransformerDecoderLayer", lambda: (target, source), **layer),
        NnCase("TransformerEncoder", encoder, lambda: (source,)),
        _case("TransformerEncoderLayer", lambda: (source,), **layer),
    ]


IMAGE = (2, 4, 8, 10)
CASES: list[NnCase] = [
    *(_case(name, _x(3, 4, 5)) for name in ELEMENTWISE),
    *(_case(name, inputs, **REFUSED.get(name, {})) for name, inputs in PAIRS.items()),
    *_by_dimension(),
    *_recurrent(),
    *_attention(),
    _case(
        "AdaptiveLogSoftmaxWithLoss",
        lambda: (_floats(6, 8), _labels(20, 6)),
        8,
        20,
        cutoffs=[5, 10],
        failure="data-dependent",
    ),
    _case("AdaptiveMaxPool2d", _x(*IMAGE), (3, 3), return_indices=True, variant="uneven"),
    _case("Bilinear", lambda: (_floats(3, 4), _floats(3, 5)), 4, 5, 6),
    _case("ChannelShuffle", _x(*IMAGE), 2),
    _case("CrossEntropyLoss", PAIRS["CrossEntropyLoss"], label_smoothing=0.1, variant="smoothed"),
    _case("CrossMapLRN2d", _x(*IMAGE), 3, failure="storage of a tensor"),
    _case("Dropout2d", _x(*IMAGE)),
    _case("Dropout3d", _x(*SPATIAL[3])),
    _case("Embedding", lambda: (_labels(10, 2, 3),), 10, 4, padding_idx=0),
    _case("EmbeddingBag", lambda: (_labels(10, 2, 3),), 10, 4),
    _case(
        "EmbeddingBag",
        lambda: (_labels(10, 6), torch.tensor([0, 4]), _floats(6)),
        10,
        4,
        mode="sum",
        variant="weighted",
    ),
    _case("Flatten", _x(*IMAGE)),
    _case("Fold", _x(2, 16, 20), (8, 10), 2, stride=2),
    _case("FractionalMaxPool2d", _x(*IMAGE), 2, output_size=(4, 5), _random_samples=torch.full((2, 4, 2), 0.4)),
    _case("FractionalMaxPool3d", _x(*SPATIAL[3]), 2, output_size=3, _random_samples=torch.full((2, 4, 3), 0.4)),
    _case("GLU", _x(3, 4)),
    _case("GroupNorm", _x(*IMAGE), 2, 4),
    _case("LayerNorm", _x(3, 4, 5), 5),
    _case("LazyLinear", _x(3, 5), 6, runs=True),
    _case("Linear", _x(3, 5), 5, 6),
    _case("LinearCrossEntropyLoss", lambda: (_floats(3, 5), _labels(6, 3)), 5, 6),
    _case("LocalResponseNorm", _x(*IMAGE), 3),
    _case("LogSoftmax", _x(3, 4), -1),
    _case("PixelShuffle", _x(*IMAGE), 2),
    _case("PixelUnshuffle", _x(*IMAGE), 2),
    _case("RMSNorm", _x(3, 4, 5), 5),
    NnCase("Sequential", lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).eval(), _x(3, 5)),
    NnCase("DataParallel", lambda: nn.DataParallel(nn.Linear(5, 6)).eval(), _x(3, 5)),
    _case("Softmax", _x(3, 4), -1),
    _case("Softmax2d", _x(*IMAGE)),
    _case("Softmin", _x(3, 4), -1),
    _case("SyncBatchNorm", _x(*IMAGE), 4),
    _case("Threshold", _x(3, 4), 0.1, 20.0),
    _case("Unflatten", _x(3, 12), 1, (3, 4)),
    _case("Unfold", _x(*IMAGE), 2),
    _case("Upsample", _x(*IMAGE), scale_factor=2, mode="bicubic"),
    _case("UpsamplingBilinear2d", _x(*IMAGE), scale_factor=2),
    _case("UpsamplingNearest2d", _x(*IMAGE), scale_factor=2),
]


def public_classes() -> list[str]:
    """The names of the public modules of ``torch.nn``."""
    return [
        name for name in dir(nn) if isinstance(getattr(nn, name), type) and issubclass(getattr(nn, name), nn.Module)
    ]


HEADER = """# torch.nn

Every public class of `torch.nn` with a `forward`, exported with `modelexport.export` in evaluation mode. The test
suite checks each line: the file passes `onnx.checker`, ONNX Runtime loads it, its outputs are those of PyTorch, and
every node has an owner, none of them inferred. If the front end is `torchscript`, `dynamo` cannot export the class.
[frontends.md](../frontends.md) describes the front ends.

This page is generated from the table in the tests: `python tests/torch_nn.py`.
"""


def page() -> str:
    """``docs/evidence/torch-nn.md``: a line for each case, then the classes that are not called."""
    lines = [HEADER, "| class | variant | exported | why not |", "|---|---|---|---|"]
    for case in sorted(CASES, key=lambda case: (case.name, case.variant)):
        how = "no" if case.failure else f"`{case.frontend}`"
        lines.append(f"| `{case.name}` | {case.variant} | {how} | {REASONS.get(case.label, '')} |")
    lines += ["", "Not in the table:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in NOT_CALLED.items()]
    return "\n".join(lines) + "\n"


REASONS = {
    "CTCLoss": "neither exporter has a translation of `aten._ctc_loss`",
    "AdaptiveLogSoftmaxWithLoss": "its Python code depends on the number of labels in each cluster",
    "CrossMapLRN2d": "it is an autograd function with its own buffers; use `LocalResponseNorm`",
}
"""The reason of each case with a failure."""


if __name__ == "__main__":
    Path(__file__).parent.parent.joinpath("docs", "evidence", "torch-nn.md").write_text(page(), encoding="utf-8")
