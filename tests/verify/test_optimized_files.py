"""One fault in a file that ONNX Runtime's optimizer made is one call that differs, and what it fused is no excuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from modelexport import export, quantize, retag, verify
from modelexport.verify.verify_report import VerifyReport


class Block(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(size, 16), nn.GELU(), nn.Linear(16, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.act(self.up(x))))


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, dict[str, Any], Path]:
    """Three blocks, each of which is MatMul, BiasGelu, MatMul, SkipLayerNormalization in the file."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Block(), Block(), Block()).eval(), {"input": torch.randn(2, 5, 8)}
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 5
    return model, inputs, optimized_file(model, inputs, tmp_path_factory.mktemp("optimized"), dynamic=True)


def optimized_file(model: nn.Module, inputs: dict[str, Any], folder: Path, *, dynamic: bool = False) -> Path:
    export(model, inputs, folder / "tagged.onnx", check=False, dynamic=dynamic)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "changed.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(folder / "tagged.onnx", options)
    retag(folder / "changed.onnx", source=folder / "tagged.onnx", output=folder / "optimized.onnx")
    return folder / "optimized.onnx"


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
        pytest.param(other_bias, ["0.act"], marks=pytest.mark.slow),
        pytest.param(other_epsilon, ["1.norm"], marks=pytest.mark.slow),
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
    report = verify(model, inputs, tmp_path / "wrong.onnx", others=False)
    assert report.diverging is not None
    assert report.diverging.address == calls[0]
    assert [one.address for one in report.calls if one.status == "differ"] == calls


def test_the_file_without_a_fault_agrees(optimized: tuple[nn.Module, dict[str, Any], Path]) -> None:
    report: VerifyReport = verify(*optimized, others=False)
    assert report.agrees
    assert {one.status for one in report.calls} <= {"agree", "no nodes"}


@pytest.mark.slow
def test_a_small_error_behind_noisy_layers_is_not_that_of_the_call_which_adds_it_up(tmp_path: Path) -> None:
    """ONNX Runtime computes the fused nodes of each block in float32. The noise of eight blocks hides an error of 1e-5
    in the last one, and not in the sum of its elements, where equal errors add up and random ones do not.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(8)), nn.Linear(64, 1)).eval()
    model[8].weight.data = 1 + torch.rand(1, 64) / 8
    inputs = {"input": torch.randn(2, 5, 64)}
    file = onnx.load(optimized_file(model, inputs, tmp_path))
    norm = [node for node in file.graph.node if node.op_type == "SkipLayerNormalization"][-1]
    bias = next(each for each in file.graph.initializer if each.name == norm.input[3])
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(1e-5), bias.name))
    onnx.save(file, tmp_path / "wrong.onnx")
    report = verify(model, inputs, tmp_path / "wrong.onnx")
    assert [one.address for one in report.calls if one.status == "differ"] == ["7.norm"]
    assert "is off by" in next(one.reason for one in report.calls if one.address == "7.norm")


class Shares(nn.Module):
    """The shares of attention are the same if each element of the normalized input has the opposite sign."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.value, self.other = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.query, self.key = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.other.weight.data.neg_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return self.other(torch.softmax(self.query(h) @ self.key(h).T, -1) @ self.value(h))


class Gate(nn.Module):
    """FusedGemm in the file, which only ONNX Runtime computes, and zeros if the bias before it has the other sign."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.other = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.linear, self.act = nn.Linear(8, 8), nn.ReLU()
        self.first.weight.data.abs_(), self.linear.weight.data.abs_()
        self.norm.bias.data[:], self.other.bias.data[:] = 4 + torch.rand(8), -4 + torch.rand(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.act(self.linear(self.first(self.norm(x)))))


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, dict[str, Any], Path]:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Shares(), Gate()).eval(), {"input": torch.randn(5, 8)}
    return model, inputs, optimized_file(model, inputs, tmp_path_factory.mktemp("gated"))


def opposite_signs(nodes: list[onnx.NodeProto]) -> None:
    first, second, *_ = [node for node in nodes if node.op_type == "LayerNormalization"]
    first.input[1] = second.input[1]


def zeros_behind(nodes: list[onnx.NodeProto]) -> None:
    *_, first, second = [node for node in nodes if node.op_type == "LayerNormalization"]
    first.input[2] = second.input[2]


def no_bias(nodes: list[onnx.NodeProto]) -> None:
    next(node for node in nodes if node.op_type == "Gemm" and len(node.input) > 2).input.pop()


@pytest.mark.parametrize(
    ("plant", "call"),
    [(opposite_signs, "0.norm"), pytest.param(zeros_behind, "1.norm", marks=pytest.mark.slow), (no_bias, "0.value")],
)
def test_what_follows_proves_nothing_if_something_else_that_follows_is_wrong(
    plant: Plant, call: str, gated: tuple[nn.Module, dict[str, Any], Path], tmp_path: Path
) -> None:
    model, inputs, path = gated
    file = onnx.load(path)
    assert "FusedGemm" in {node.op_type for node in file.graph.node}
    plant(list(file.graph.node))
    onnx.save(file, tmp_path / "wrong.onnx")
    report = verify(model, inputs, tmp_path / "wrong.onnx")
    assert [one.address for one in report.calls if one.status == "differ"] == [call]


def test_a_call_that_quantizes_is_off_by_its_own_error_and_not_that_of_the_call_before(tmp_path: Path) -> None:
    """What rounds a value has the owner of the value; the error shows in the product, and so does a fault there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    inputs = {"input": torch.randn(3, 8)}
    export(model, inputs, tmp_path / "x.onnx", check=False)
    quantize(tmp_path / "x.onnx", output=tmp_path / "q.onnx", to="int8-dynamic")
    sound = verify(model, inputs, tmp_path / "q.onnx")
    file = onnx.load(tmp_path / "q.onnx")
    (scale,) = (one for one in file.graph.initializer if re.fullmatch(r"2\.weight.*_scale", one.name))
    scale.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(scale), scale.name))
    onnx.save(file, tmp_path / "wrong.onnx")
    wrong = verify(model, inputs, tmp_path / "wrong.onnx")
    before, after = (
        {one.address: one.reason for one in report.calls if one.status == "differ"} for report in (sound, wrong)
    )
    assert before.keys() == after.keys() == {"0", "2", "4"}
    assert [address for address in before if before[address] != after[address]] == ["2"]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x).view(5, 2, 4) * 0.5)


def test_a_tool_may_put_a_step_of_the_module_around_into_the_weight(tmp_path: Path) -> None:
    """As onnxslim does with the scale of attention: the node of the Linear then computes what its parent does."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Scaled(), nn.Linear(4, 8)).eval(), {"input": torch.randn(5, 8)}
    export(model, inputs, tmp_path / "tagged.onnx", check=False)
    file = onnx.load(tmp_path / "tagged.onnx")
    linear, view, scale, *_ = file.graph.node
    assert [linear.op_type, view.op_type, scale.op_type] == ["Gemm", "Reshape", "Mul"]
    for place, name in enumerate(linear.input[1:], 1):
        entry = next(each for each in file.graph.initializer if each.name == name)
        file.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(entry) / 2, f"fused_{place}"))
        file.graph.initializer.remove(entry)
        linear.input[place] = f"fused_{place}"
    linear.name, linear.output[0], view.input[0], view.output[0] = "val_10", "product", "product", scale.output[0]
    linear.ClearField("metadata_props")
    file.graph.node.remove(scale)
    onnx.save(file, tmp_path / "changed.onnx")
    retag(tmp_path / "changed.onnx", source=tmp_path / "tagged.onnx", output=tmp_path / "retagged.onnx")
    assert verify(model, inputs, tmp_path / "retagged.onnx").agrees


def test_a_file_that_lost_its_tags_is_compared_like_one_that_had_none(
    optimized: tuple[nn.Module, dict[str, Any], Path], caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs, path = optimized
    with caplog.at_level("INFO", "modelexport.reading"):
        report = verify(model, inputs, path.with_name("changed.onnx"), others=False)
    assert report.agrees
    assert report.calls
    assert not report.claims
    assert "no tags left (`modelexport retag` restores those of the export)" in caplog.text
