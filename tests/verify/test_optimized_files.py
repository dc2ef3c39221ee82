"""One fault in a file that ONNX Runtime's optimizer made is one call that differs, and what it fused is no excuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from modelexport import export, retag, verify
from modelexport.verify.verify_report import VerifyReport


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down, self.norm = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.act(self.up(x))))


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, dict[str, Any], Path]:
    """Three blocks, each of which is MatMul, BiasGelu, MatMul, SkipLayerNormalization in the file."""
    folder = tmp_path_factory.mktemp("optimized")
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Block(), Block(), Block()).eval(), {"input": torch.randn(2, 5, 8)}
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 5
    export(model, inputs, folder / "tagged.onnx", check=False, dynamic=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "changed.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(folder / "tagged.onnx", options)
    retag(folder / "changed.onnx", source=folder / "tagged.onnx", output=folder / "optimized.onnx")
    return model, inputs, folder / "optimized.onnx"


Plant = Callable[[list[onnx.NodeProto]], None]


def other_bias(nodes: list[onnx.NodeProto]) -> None:
    first, second, _ = [node for node in nodes if node.op_type == "BiasGelu"]
    first.input[1] = second.input[1]


def other_epsilon(nodes: list[onnx.NodeProto]) -> None:
    node = [node for node in nodes if node.op_type == "SkipLayerNormalization"][1]
    next(one for one in node.attribute if one.name == "epsilon").f = 0.1


def other_weight(nodes: list[onnx.NodeProto]) -> None:
    products = [node for node in nodes if node.op_type == "MatMul"]
    products[1].input[1] = products[3].input[1]


def two_faults(nodes: list[onnx.NodeProto]) -> None:
    other_bias(nodes)
    other_epsilon(nodes)


@pytest.mark.parametrize(
    ("plant", "calls"),
    [
        (other_bias, ["0.act"]),
        (other_epsilon, ["1.norm"]),
        (other_weight, ["0.down"]),
        (two_faults, ["0.act", "1.norm"]),
    ],
)
def test_the_calls_with_faults_differ_and_no_other(
    plant: Plant, calls: list[str], optimized: tuple[nn.Module, dict[str, Any], Path], tmp_path: Path
) -> None:
    model, inputs, path = optimized
    file = onnx.load(path)
    plant(list(file.graph.node))
    onnx.save(file, tmp_path / "wrong.onnx")
    report = verify(model, inputs, tmp_path / "wrong.onnx")
    assert report.diverging is not None and report.diverging.address == calls[0]
    assert [one.address for one in report.calls if one.status == "differ"] == calls


def test_the_file_without_a_fault_agrees(optimized: tuple[nn.Module, dict[str, Any], Path]) -> None:
    report: VerifyReport = verify(*optimized)
    assert report.agrees and {one.status for one in report.calls} <= {"agree", "no nodes"}
