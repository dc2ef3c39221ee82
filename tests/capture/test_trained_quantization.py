"""Models trained with quantization: the scales, zero points and integers of their files are those of the training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.ao.quantization as ao
from torch import nn

import modelexport
from modelexport import ExportResult, export
from modelexport.errors import ModelExportError, UsageError
from modelexport.files.onnx_models import load_onnx
from modelexport.runtime.saturating_products import saturating_modules

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning", "ignore:Please use quant_min:UserWarning"
)
X = torch.linspace(-2, 3, 4 * 3 * 6 * 6).sin().reshape(4, 3, 6, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.conv, self.bn, self.relu, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        return self.dequant(self.fc(x.flatten(1)))


def prepared(config: Any, *, steps: int = 2) -> nn.Module:
    """A model whose scales are those of some batches."""
    torch.manual_seed(0)
    model = Net().train()
    model.qconfig = config
    model = ao.prepare_qat(ao.fuse_modules_qat(model, [["conv", "bn", "relu"]]))
    for step in range(steps):
        model(X + step)
    return model.eval()


def asked(weight: torch.dtype, scheme: Any, observer: Any) -> Any:
    """A configuration of ``FakeQuantize``, whose Python asks for its flags."""
    whole = torch.iinfo(weight)
    bounds: dict[str, Any] = {"quant_min": whole.min, "quant_max": whole.max, "dtype": weight, "qscheme": scheme}
    return ao.QConfig(
        activation=ao.FakeQuantize.with_args(observer=ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255),
        weight=ao.FakeQuantize.with_args(observer=observer, **bounds),
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "fused, per channel": lambda: ao.get_default_qat_qconfig("fbgemm"),
    "asked, per tensor": lambda: asked(torch.qint8, torch.per_tensor_symmetric, ao.MinMaxObserver),
    "asked, per channel, asymmetric": lambda: asked(
        torch.quint8, torch.per_channel_affine, ao.PerChannelMinMaxObserver
    ),
}


class Arithmetic(nn.Module):
    """A layer that quantizes by arithmetic, as those of brevitas (division) and torchao (groups, the inverse)."""

    def __init__(self, group: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 96).cos().reshape(12, 8))
        self.scale = nn.Parameter(torch.tensor(0.011))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.group:
            integers = torch.round(x / self.scale)
            integers = torch.where(integers > 127, 127.0, integers)
            x = torch.where(integers < -127, -127.0, integers) * self.scale
        rows = self.weight.reshape(12, -1, self.group or 8)
        scale = rows.abs().amax(-1, keepdim=True) / 7.5
        weight = torch.clamp(torch.round(rows * (1 / scale)), -8, 7) * scale
        return x @ weight.reshape(12, 8).t()


QUICK = ("fused, per channel", "by arithmetic")
"""Quantizers of PyTorch in one operator, and arithmetic."""
TRAINED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in (*CONFIGS, "by arithmetic", "in groups")
]


Trained = tuple[nn.Module, Any, ExportResult]


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    @functools.cache
    def get(name: str) -> Trained:
        if name in CONFIGS:
            model, x = prepared(CONFIGS[name]()).apply(ao.disable_observer), X
        else:
            model, x = Arithmetic(4 * (name == "in groups")).eval(), X.reshape(-1, 8)
        path = tmp_path_factory.mktemp("trained") / "model.onnx"
        how: dict[str, Any] = {"frontend": "dynamo", "dynamic": True, "verify": True, "check": False}
        return model, x, export(model, (x,), path, **how)

    return get


@pytest.fixture(params=TRAINED)
def trained(request: pytest.FixtureRequest, exported_once: Callable[[str], Trained]) -> Trained:
    return exported_once(request.param)


def integers(path: Path) -> dict[str, np.ndarray]:
    """The weights of more than one axis that are stored as integers, by name."""
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}
    return {name: array for name, array in arrays.items() if array.ndim > 1 and array.dtype.itemsize == 1}


def test_the_file_computes_what_the_model_does_within_a_step(trained: Trained) -> None:
    verified = trained[2].verified
    assert verified is not None
    assert verified.agrees


def test_weights_are_stored_as_integers_under_their_names(trained: Trained) -> None:
    model, _, result = trained
    weights = {key for key, _ in model.named_parameters() if key.endswith("weight") and ".bn." not in key}
    assert {name.rpartition("weight")[0] + "weight" for name in integers(result.path)} == weights


def test_integers_are_those_of_pytorch(trained: Trained) -> None:
    model, x, result = trained
    with torch.no_grad():
        right = model(x).numpy()
    session = result.session()
    off = np.abs(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0] - right).max()
    step = float(model.fc.activation_post_process.scale) if isinstance(model, Net) else 1e-5
    assert off < 1.01 * step


def test_calls_stay_addresses(trained: Trained) -> None:
    model, _, result = trained
    known = set(modelexport.load(result.path))
    assert known == {name or "." for name, _ in model.named_modules()} & known


def test_activations_of_seven_bits_do_not_saturate(exported_once: Callable[[str], Trained]) -> None:
    path = exported_once("fused, per channel")[2].path  # fbgemm: from 0 to 127
    assert saturating_modules(load_onnx(path).graph) == {}


def test_observers_that_are_on_are_refused(tmp_path: Path) -> None:
    model = prepared(CONFIGS["fused, per channel"]())
    with pytest.raises(UsageError, match=r"quant.activation_post_process still observes.*disable_observer\) after"):
        export(model, (X,), tmp_path / "model.onnx")


@pytest.mark.slow
def test_observers_that_python_asks_for_are_named(tmp_path: Path) -> None:
    model = prepared(CONFIGS["asked, per tensor"]())
    with pytest.raises(ModelExportError, match="a module still observes"):
        export(model, (X,), tmp_path / "model.onnx", frontend="dynamo")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused, per channel", "asked, per tensor"])
def test_observers_that_saw_nothing_are_refused(name: str, tmp_path: Path) -> None:
    model = prepared(CONFIGS[name](), steps=0).apply(ao.disable_observer)
    with pytest.raises(UsageError, match="has seen no data"):
        export(model, (X,), tmp_path / "model.onnx")


@pytest.mark.slow
def test_a_range_by_channel_that_saw_nothing_is_named(tmp_path: Path) -> None:
    config = CONFIGS["asked, per channel, asymmetric"]()
    model = prepared(config, steps=0).apply(ao.disable_observer)
    model.quant.activation_post_process.disable_fake_quant()
    model.conv.activation_post_process.disable_fake_quant()
    with pytest.raises(UsageError, match=r"fc\.activation_post_process has seen no data"):
        export(model, (X,), tmp_path / "model.onnx")


@pytest.mark.slow
def test_a_module_that_does_not_quantize_is_exported_as_it_is(tmp_path: Path) -> None:
    model = prepared(CONFIGS["asked, per tensor"]()).apply(ao.disable_observer)
    model.fc.weight_fake_quant.disable_fake_quant()
    export(model, (X,), tmp_path / "model.onnx", frontend="dynamo", check=False)
    assert [name for name in integers(tmp_path / "model.onnx") if name.startswith("fc.")] == []


def shifted_by_half(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    zero = zero + 0.5
    return (torch.clamp(torch.round(x / scale + zero), 0, 255) - zero) * scale


def clamped_before_the_zero_point(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (torch.clamp(torch.round(x / scale), 0, 100) + zero - zero) * scale


def clamped_after_the_zero_point(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return torch.clamp(torch.round(x / scale) + zero - zero, 0, 100) * scale


def wrapped_before_the_bounds(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return torch.round(x / scale).to(torch.int32).to(torch.int8).clamp(-100, 100).float() * scale


def zero_beyond_a_bound(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    rounded = torch.round(x / scale)
    return torch.where(rounded > 100, torch.zeros(()), rounded).clamp(-128, 127) * scale


def bounds_without_the_zero_point(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (torch.clamp(torch.round(x / scale) + zero, 50, 100) - zero) * scale


OTHER_ROUNDING = [
    *(shifted_by_half, clamped_before_the_zero_point, clamped_after_the_zero_point),
    *(wrapped_before_the_bounds, zero_beyond_a_bound, bounds_without_the_zero_point),
]


@pytest.mark.sweep
@pytest.mark.parametrize("rounds", OTHER_ROUNDING, ids=lambda each: each.__name__)
def test_arithmetic_that_is_no_quantization_stays_arithmetic(rounds: Any, tmp_path: Path) -> None:
    class Rounding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.zero = nn.Parameter(torch.tensor(0.02)), nn.Parameter(torch.tensor(40.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            computed: torch.Tensor = rounds(x, self.scale, self.zero)
            return computed

    model, x, path = Rounding().eval(), torch.linspace(-1, 3, 101).reshape(1, 101), tmp_path / "m.onnx"
    export(model, (x,), path, frontend="dynamo", check=False)
    (output,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(output, model(x).detach().numpy(), atol=1e-6)


def test_quantizers_of_pytorch_are_exported_with_dynamic_axes(tmp_path: Path) -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor([0.1, 0.2]))
            self.register_buffer("zero", torch.zeros(2, dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.fake_quantize_per_tensor_affine(x, 0.05, 1, -8, 7)
            return torch.fake_quantize_per_channel_affine(x, self.scale, self.zero, 1, -8, 7)

    export(Quantized().eval(), (torch.rand(3, 2),), tmp_path / "m.onnx", frontend="dynamo", dynamic=True)
    (value,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").get_inputs()
    assert isinstance(value.shape[0], str)


def test_a_weight_in_half_precision_is_rounded_by_the_scale_of_its_row(tmp_path: Path) -> None:
    class RoundedRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                torch.linspace(-1, 2, 16).sin().reshape(4, 4) * torch.tensor([[1.0], [2], [4], [8]])
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.weight.abs().amax(1, keepdim=True) / 7
            return x @ (torch.clamp(torch.round(self.weight / scale), -7, 7) * scale)

    export(RoundedRows().half().eval(), (torch.eye(4).half(),), tmp_path / "m.onnx", frontend="dynamo")
