"""Operators of integers and of dynamic sizes that torch.onnx refuses, writes wrongly, or writes for one size alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional

from modelexport import export
from modelexport.runtime.sessions import open_session, run_session
from modelexport.runtime.wider_integers import compute_in_wider_integers
from truth import wrong

I16, U8 = torch.int16, torch.uint8


class Computes(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def assert_right(function: Callable[[torch.Tensor], Any], tmp_path: Path) -> onnx.ModelProto:
    """Export with dynamic sizes by `dynamo`, and compare at two sizes; the file."""
    model = Computes(function).eval()
    first, other = (
        torch.arange(-rows * 3, rows * 3).reshape(rows, 6)[:, :columns] for rows, columns in ((2, 5), (3, 6))
    )
    export(model, (first,), tmp_path / "m.onnx", frontend="dynamo", dynamic=True, check=False)
    assert [wrong(tmp_path / "m.onnx", model, (x,)) for x in (first, other)] == ["", ""]
    return onnx.load(tmp_path / "m.onnx")


def narrow(x: torch.Tensor) -> Any:
    short, some = x.to(I16), x > 1
    return (
        *(torch.where(some, short, short.flip(1)), short.masked_fill(some, 3), torch.maximum(short, short * 2)),
        *(short.amax(1), short**2, short.triu(), nn.functional.pad(short, (1, 2), value=7), short.clamp(-2, 2)),
        *(short @ short.T, short.nonzero(), short.sort(1)[0], short.round()),
        short.split([1, x.shape[1] - 1], 1)[1],
    )


def others(x: torch.Tensor) -> Any:
    byte, some = x.to(U8), x > 1
    columns = torch.zeros(x.shape[0], 2, dtype=torch.long)
    return (
        *(-byte, byte**3, byte.relu(), byte.tril(), byte @ byte.T),  # these wrap
        *(*byte.split([2, x.shape[1] - 2], 1), byte.ceil()),
        *(some + some.flip(1), torch.where(some, some.flip(1), some), some.masked_fill(x > 3, True)),
        *(some.sort(dim=1, stable=True), x.cumprod(1), (x * 0.5).cumprod(0)),
        *(x.floor(), x.trunc(), x.relu()),
        *(x.scatter(1, columns, x * 2), x.scatter_add(1, columns, x * 3)),  # the source has more elements
    )


@pytest.mark.parametrize("function", [narrow, pytest.param(others, marks=pytest.mark.slow)])
def test_operators_without_kernels_compute_in_wider_integers(
    function: Callable[[torch.Tensor], Any], tmp_path: Path
) -> None:
    file = assert_right(function, tmp_path)
    assert {node.op_type for node in file.graph.node} >= {"Where", "Trilu", "Pow", "MatMul"}


@pytest.mark.slow
def test_integers_are_shifted_as_in_pytorch(tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> Any:
        kinds = [x.to(dtype) for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)]
        by = x.abs() % 9
        return [
            *(part for one in kinds for part in (one >> 1, one << 3, one << by.to(one.dtype), one >> by.to(one.dtype))),
            *(x << 63, x >> 63, (x.to(U8) << 4) | (x.to(U8) & 15)),
            *(torch.bitwise_left_shift(x.to(U8), 3), torch.bitwise_right_shift(x.to(U8), 3)),
            x[torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([1, 2])],
        ]

    assert_right(function, tmp_path)


def divided(x: torch.Tensor) -> Any:
    (rows, columns), small = x.shape, x.abs() % 3
    return x % columns, columns % (x.abs() + 1), columns // (x.abs() + 1), small**rows, rows**small


def repeated_and_combined(x: torch.Tensor) -> Any:
    rows, columns = x.shape
    return (
        *(x.repeat_interleave(rows, 1), x.float().repeat_interleave(columns // 2), torch.fmax(x, x.flip(1))),
        torch.fmin(x, x.flip(1)),
        *(x & columns, x | columns, x ^ columns, x.fmod(columns), x.float() % columns, x.float() ** rows),
    )


@pytest.mark.parametrize("function", [divided, pytest.param(repeated_and_combined, marks=pytest.mark.slow)])
def test_integers_meet_sizes(function: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    assert_right(function, tmp_path)


@pytest.mark.slow
def test_integers_meet_numbers_of_python(tmp_path: Path) -> None:
    """Both exporters of torch fail here; inside a branch no trace can help."""

    def function(x: torch.Tensor) -> Any:
        bias = torch.cond(x.sum() > 0, lambda y: 1.0 - y, lambda y: (1.0 - y) * -10000.0, (x,))
        return bias, torch.rsub(x, 1.5, alpha=2), x // 2.0, 7 // (x.abs() + 1), 7.5 // (x.abs() + 1)

    assert_right(function, tmp_path)


@pytest.mark.slow
def test_rolls_and_spectra_of_dynamic_sizes(tmp_path: Path) -> None:
    fft = torch.fft

    def function(x: torch.Tensor) -> Any:
        y = (x * 0.7).sin()
        return (
            *(y.roll(y.shape[1] // 2, 1), fft.ifftshift(y), fft.fftshift(fft.fft(y)).abs(), y.roll(2)),
            *(fft.fftfreq(6), fft.rfftfreq(6)),
            *(fft.fftn(y).roll(1, 1).imag, fft.fftn(y).roll(2).real),
            *(fft.irfft(fft.rfft(y) * 2, n=y.shape[1]), fft.irfft2(fft.rfft2(y), s=y.shape, norm="ortho")),
        )

    assert_right(function, tmp_path)


@pytest.mark.slow
def test_interpolation_by_a_scale_copies_along_axes_that_keep_their_size(tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> Any:
        image = x[None, None].float()
        return (
            functional.interpolate(image, scale_factor=(1.3, 2), mode="nearest"),  # 2 and 3 rows stay
            functional.interpolate(image, scale_factor=(2, 1.18), mode="bilinear"),  # 5 columns stay, 6 become 7
            functional.interpolate(image[0, :, :1], scale_factor=1.18, mode="linear"),
            functional.pixel_shuffle(x[:, None, None].expand(-1, 4, 3, -1), 2),
        )

    assert_right(function, tmp_path)


NEAREST: dict[str, tuple[dict[str, Any], Sequence[int], Sequence[int]]] = {
    "a given size": ({"size": (12, 24)}, (20, 14), (49, 7)),
    "a given length": ({"size": 12}, (20,), (7,)),
    "a size that some axes have": ({"size": (4, 5, 12)}, (4, 5, 20), (4, 2, 17)),
    "a share": ({"scale_factor": (0.6, 1.2)}, (20, 15), (13, 7)),
    "a share that some axes keep": ({"scale_factor": (1.1, 0.3)}, (7, 15), (13, 9)),
    "a third": ({"scale_factor": 1 / 3}, (20, 15), (33, 4)),
    "a share of the sizes": ({"scale_factor": 0.6, "recompute_scale_factor": True}, (20, 15), (33, 7)),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("frontend", "dynamic"),
    [
        ("dynamo", True),
        ("torchscript", False),
        pytest.param("dynamo", False, marks=pytest.mark.slow),
        pytest.param("torchscript", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", NEAREST)
def test_the_nearest_pixels_are_those_of_pytorch_in_onnx_runtime(
    case: str, dynamic: bool, frontend: Literal["dynamo", "torchscript"], tmp_path: Path
) -> None:
    how, example, other = NEAREST[case]
    model = Computes(lambda x: functional.interpolate(x, mode="nearest", **how))
    pictures = [torch.arange(2.0 * math.prod(sizes)).reshape(1, 2, *sizes) for sizes in (example, other)]
    result = export(
        model, (pictures[0],), tmp_path / "m.onnx", frontend=frontend, dynamic=dynamic, documents=False, check=False
    )
    session = result.session()
    for picture in pictures if dynamic else pictures[:1]:
        (made,) = session.run(None, {session.get_inputs()[0].name: picture.numpy()})
        assert np.array_equal(made, model(picture).numpy())


@pytest.mark.parametrize("how", [{"scale_factor": 2}, {"size": (8, 12)}])
def test_pictures_that_onnx_runtime_resizes_as_pytorch_stay_a_resize(how: dict[str, Any], tmp_path: Path) -> None:
    export(
        Computes(lambda x: functional.interpolate(x, **how)),
        (torch.ones(1, 2, 4, 6),),
        tmp_path / "m.onnx",
        check=False,
    )
    assert [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node] == ["Resize"]


class Layers(nn.Module):
    """Recurrent layers, one with a given state, pooling, parts of a dynamic axis, and normalized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.RNN(4, 3, 1, nonlinearity="relu", bidirectional=True, batch_first=True)
        self.rnn, self.gru, self.lstm = nn.RNN(6, 3, bias=False), nn.GRU(6, 3), nn.LSTM(6, 3)
        self.scale = nn.Parameter(torch.linspace(-1, 1, 4))
        nn.utils.parametrizations.weight_norm(self, "scale")
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        first, second = x.chunk(2, 1)
        parts = x.split(x.shape[0] // 2)
        steps, last = self.plain(x * self.scale)
        pool = nn.functional.avg_pool2d
        return (
            *(first * 2, second, parts[0] + parts[1], self.linear(x), last),
            *(self.rnn(steps, state)[0], self.gru(steps, state)[0], self.lstm(steps, (state, state))[0]),
            *(pool(x, 2, divisor_override=3), pool(x, 3, 2, 1, ceil_mode=True, divisor_override=5)),
            pool(x, (1, 2), (3, 2), ceil_mode=True, divisor_override=1),
            nn.functional.avg_pool3d(x[None], (1, 2, 2), divisor_override=3),
        )


@pytest.mark.slow
def test_recurrent_layers_pooling_and_parts_of_dynamic_axes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Layers().eval()
    first, other = ((torch.randn(batch, length, 4), torch.randn(1, length, 3)) for batch, length in ((2, 6), (4, 10)))
    export(model, first, tmp_path / "m.onnx", frontend="dynamo", dynamic=True, check=False)
    assert [wrong(tmp_path / "m.onnx", model, inputs) for inputs in (first, other)] == ["", ""]


class Eight(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 2, 16).reshape(4, 4).to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, pytest.param(torch.float8_e5m2, marks=pytest.mark.slow)])
def test_weights_may_be_in_float8(dtype: torch.dtype, tmp_path: Path) -> None:
    model, inputs = Eight(dtype).eval(), (torch.eye(4),)
    result = export(model, inputs, tmp_path / "m.onnx", verify=True, check=False)
    assert result.verified is not None
    assert result.verified.agrees
    assert wrong(tmp_path / "m.onnx", model, inputs) == ""


def test_large_unsigned_integers_stay_large_in_wider_ones() -> None:
    text = "g (uint32[2] x) => (uint32 y) { y = ReduceMax <keepdims = 0>(x) }"
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}'))
    compute_in_wider_integers(model)
    numbers = np.array([3, 2**32 - 1], np.uint32)
    assert run_session(open_session(model), {"x": numbers})["y"] == 2**32 - 1


def test_large_integers_are_shifted_without_rounding(tmp_path: Path) -> None:
    class Shifts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x >> 4

    x = torch.tensor([2**31 - 1, -(2**31), 2**28 + 33, -5], dtype=torch.int32)
    export(Shifts(), (x,), tmp_path / "m.onnx", frontend="dynamo")


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
@pytest.mark.parametrize("rounding", ["floor", "trunc"])
def test_large_integers_are_divided_without_rounding(rounding: str, frontend: Any, tmp_path: Path) -> None:
    class Divides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.div(x, 16, rounding_mode=rounding)

    x = torch.tensor([2**31 - 1, -(2**31), 2**40 + 33, -5])
    export(Divides(), (x,), tmp_path / "m.onnx", frontend=frontend)
    quotients = {"floor": [2**27 - 1, -(2**27), 2**36 + 2, -1], "trunc": [2**27 - 1, -(2**27), 2**36 + 2, 0]}
    assert run_session(open_session(tmp_path / "m.onnx"), {"x": x.numpy()})["output"].tolist() == quotients[rounding]
