"""Models trained with quantization, and their files: the class that is largest, steps, and bytes.

    OMP_NUM_THREADS=1 python benchmarks/trained_quantization.py [NAME...]

Each model is trained for some steps to tell apart noisy patterns, with the fake quantization of torch.ao, torchao or
brevitas; those whose package is not installed are left out (``pip install --no-deps --target DIR torchao brevitas
dependencies==2.0.1 unfoldNd`` and ``PYTHONPATH=DIR``). Its file runs in ONNX Runtime on 500 other inputs beside the
model. *Step* is that of the quantized output; bytes are those of all weights in the file as a share of float32.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torch.ao.quantization as ao
from torch import nn
from torch.ao.quantization import quantize_fx

import modelexport
from modelexport.files.onnx_models import load_onnx
from modelexport.verify.onnxruntime_outputs import output_steps

CLASSES, SIZE, STEPS, INPUTS = 8, 12, 80, 500
EXAMPLE = (torch.zeros(4, 3, SIZE, SIZE),)


def batch(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy patterns and their classes."""
    patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return patterns[labels] + torch.randn(count, 3, SIZE, SIZE, generator=generator), labels


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(STEPS):
        x, labels = batch(32, 1 + step)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def block(inputs: int, outputs: int, activation: type[nn.Module] = nn.ReLU, **how: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, **how), nn.BatchNorm2d(outputs), activation())


class Residual(nn.Module):
    """Convolutions with a sum."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first, self.second, self.third = block(3, 32, activation), block(32, 32, activation), block(32, 64)
        self.pool, self.head = nn.AdaptiveAvgPool2d(3), nn.Linear(64 * 9, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.third(x + self.second(x))
        return self.head(self.pool(x).flatten(1))


class Separable(nn.Module):
    """Convolutions of single channels and of single points."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            block(3, 32), block(32, 32, nn.ReLU6, groups=32), nn.Conv2d(32, 128, 1), nn.Hardswish(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(128 * 36, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).flatten(1))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * SIZE * SIZE, 128), nn.ReLU(), nn.Linear(128, 128), nn.Sigmoid())
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x.flatten(1)))


class Attending(nn.Module):
    """Attention between the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(3 * SIZE, 64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64 * SIZE, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.transpose(1, 2).flatten(2))
        q, k, v = self.qkv(x).chunk(3, -1)
        x = self.norm(x + self.out(nn.functional.scaled_dot_product_attention(q, k, v)))
        return self.head(x.flatten(1))


def finished(model: nn.Module) -> nn.Module:
    return model.apply(ao.disable_observer).eval()


def eager(model: nn.Module, config: Any) -> nn.Module:
    model = ao.QuantWrapper(model).train()
    model.qconfig = config
    ao.propagate_qconfig_(model)
    return finished(trained(ao.prepare_qat(model)))


def fx(model: nn.Module, backend: str) -> nn.Module:
    mapping = ao.get_default_qat_qconfig_mapping(backend)
    return finished(trained(quantize_fx.prepare_qat_fx(model.train(), mapping, EXAMPLE)))


PLAIN = ao.QConfig(
    activation=ao.FakeQuantize.with_args(observer=ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255),
    weight=ao.FakeQuantize.with_args(
        observer=ao.MinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
    ),
)
ASYMMETRIC = ao.QConfig(
    activation=ao.FusedMovingAvgObsFakeQuantize.with_args(
        observer=ao.MovingAverageMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8
    ),
    weight=ao.FusedMovingAvgObsFakeQuantize.with_args(
        observer=ao.MovingAveragePerChannelMinMaxObserver,
        quant_min=0, quant_max=255, dtype=torch.quint8, qscheme=torch.per_channel_affine,
    ),
)  # fmt: skip


def pt2e(converted: bool) -> nn.Module:
    from torchao.quantization import pt2e as of_graphs
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    shapes = ({0: torch.export.Dim("batch")},)
    model = prepare_qat_pt2e(
        torch.export.export(Residual().train(), EXAMPLE, dynamic_shapes=shapes).module(), quantizer
    )
    model = trained(model).apply(of_graphs.disable_observer)
    model = convert_pt2e(model) if converted else model
    return of_graphs.move_exported_model_to_eval(model)


def torchao_int4() -> nn.Module:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    weights = IntxFakeQuantizeConfig(torch.int4, group_size=16)
    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    model = Dense().train()
    quantize_(model, QATConfig(activation_config=activations, weight_config=weights, step="prepare"))
    return trained(model).eval()


def brevitas_qcdq() -> nn.Module:
    import brevitas.nn as qnn
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Uint8ActPerTensorFloat

    layers = nn.Sequential(
        qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat),
        qnn.QuantConv2d(3, 32, 3, padding=1, weight_quant=Int8WeightPerChannelFloat),
        nn.BatchNorm2d(32),
        qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat),
        nn.Flatten(),
        qnn.QuantLinear(32 * SIZE * SIZE, CLASSES, bias=True, weight_quant=Int8WeightPerChannelFloat),
        qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat),
    )
    return trained(layers.train()).eval()


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "eager, per channel": ("torch", lambda: eager(Residual(), ao.get_default_qat_qconfig("fbgemm"))),
    "eager, per tensor, FakeQuantize": ("torch", lambda: eager(Dense(), PLAIN)),
    "eager, asymmetric weights": ("torch", lambda: eager(Separable(), ASYMMETRIC)),
    "eager, attention": ("torch", lambda: eager(Attending(), ao.get_default_qat_qconfig("qnnpack"))),
    "FX, x86": ("torch", lambda: fx(Residual(), "x86")),
    "FX, qnnpack, separable": ("torch", lambda: fx(Separable(), "qnnpack")),
    "pt2e, prepared": ("torchao", lambda: pt2e(False)),
    "pt2e, converted": ("torchao", lambda: pt2e(True)),
    "torchao, int4 groups": ("torchao", torchao_int4),
    "brevitas, QCDQ": ("brevitas", brevitas_qcdq),
}


def rows(names: list[str]) -> Iterator[str]:
    for name, (package, build) in MODELS.items():
        if (names and name not in names) or importlib.util.find_spec(package) is None:
            continue
        torch.manual_seed(0)
        model = build()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            modelexport.export(model, (batch(4, 1000)[0],), path)
            report = modelexport.verify(model, (batch(4, 1000)[0],), path)
            session = onnxruntime.InferenceSession(path)
            steps = [step for step in output_steps(load_onnx(path)).values() if step]
            ours, right = [], []
            for seed in range(INPUTS // 4):
                x, _ = batch(4, 2000 + seed)
                ours.append(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
                with torch.no_grad():
                    right.append(model(x).numpy())
            weights = [onnx.numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer]
        off, same = np.abs(np.concatenate(ours) - np.concatenate(right)), np.concatenate(ours).argmax(1)
        agreement = float((same == np.concatenate(right).argmax(1)).mean())
        shown = (
            f"{off.max() / steps[0]:.2g} steps" if steps else f"{off.max() / np.abs(np.concatenate(right)).max():.1e}"
        )
        share = sum(each.nbytes for each in weights) / sum(4 * each.size for each in weights)
        yield f"| {name} | {report.verdict} | {agreement:.1%} | {shown} | {share:.2f} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("| model | calls, in float64 | largest class | largest difference | bytes |\n|---|---|---|---|---|")
    for row in rows(sys.argv[1:]):
        print(row, flush=True)
