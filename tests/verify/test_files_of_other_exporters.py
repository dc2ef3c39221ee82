"""A file that another exporter wrote is verified by module: calls, parameters and owners are found by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import modelexport
from modelexport.core.owners import Evidence
from modelexport.graph.node_owners import owner_of
from modelexport.tools.cut.extraction import extract
from modelexport.verify.model_and_file import ModelAndFile, ModelRuns, open_for
from torch_onnx import quietly


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3, padding=1)
        self.fc = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.fc(self.norm(self.conv(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(0)
    model = Net().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.uniform_(-1, 1)
            module.weight.data.uniform_(0.5, 2)
    return model


INPUTS = {"x": torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))}


def exported(path: Path, *, dynamo: bool, model: nn.Module | None = None) -> Path:
    with quietly():
        arguments: dict[str, Any] = {"verbose": False} if dynamo else {"opset_version": 17, "input_names": ["x"]}
        torch.onnx.export(model or net(), (INPUTS["x"],), str(path), dynamo=dynamo, **arguments)
    return path


def differing(report: modelexport.VerifyReport) -> list[str]:
    return [call.address for call in report.calls if call.status == "differ"]


@pytest.fixture(
    scope="module", params=[pytest.param(True, marks=pytest.mark.slow), False], ids=["dynamo", "torchscript"]
)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("others") / "net.onnx", dynamo=request.param)


def without_names(file: Path, path: Path) -> Path:
    """The file with names that say nothing, neither of nodes nor of values and parameters."""
    model = onnx.load(file)
    graph = model.graph
    kept = {value.name for value in (*graph.input, *graph.output)}
    names = [tensor.name for tensor in graph.initializer] + [name for node in graph.node for name in node.output]
    fresh = {name: f"v{number}" for number, name in enumerate(names) if name not in kept}
    for node in graph.node:
        node.name = ""
        del node.metadata_props[:]
        for side in (node.input, node.output):
            side[:] = [fresh.get(name, name) for name in side]
    for tensor in graph.initializer:
        tensor.name = fresh.get(tensor.name, tensor.name)
        del tensor.metadata_props[:]
    del graph.value_info[:]
    onnx.save(model, path)
    return path


def test_a_sound_file_agrees_in_every_call_though_norms_are_folded_and_names_are_lost(
    file: Path, tmp_path: Path
) -> None:
    for path in (file, without_names(file, tmp_path / "nameless.onnx")):
        report = modelexport.verify(net(), INPUTS, path, others=False)
        assert report.agrees, report
        assert {call.address for call in report.calls if call.status == "agree"} >= {
            "", "blocks.0", "blocks.0.norm", "blocks.0.fc", "blocks.1", "blocks.1.norm", "blocks.1.fc", "head",
        }  # fmt: skip
        assert "found by value" in report.notes[0]


@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_sound_file_with_all_names_of_the_model_agrees_although_classes_are_guessed(
    dynamo: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv1d(4, 2, 3)).eval()
    file = exported(tmp_path / "file.onnx", dynamo=dynamo, model=model)
    for path in (file, modelexport.adopt(file, tmp_path / "adopted.onnx").path):
        report = modelexport.verify(model, (INPUTS["x"],), path)
        assert report.agrees, report
        assert report.parameters.used == 4, report


def test_a_part_that_was_cut_out_is_found_by_value_too(file: Path, tmp_path: Path) -> None:
    extract(file, "blocks.1", tmp_path / "cut.onnx")
    report = modelexport.verify(net(), INPUTS, tmp_path / "cut.onnx")
    assert report.agrees, report
    assert {key.split(".")[1] for key in report.parameters.untraced} == {"1"}
    proto = onnx.load(tmp_path / "cut.onnx")
    tensor = next(each for each in proto.graph.initializer if len(each.dims) == 2)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.01, tensor.name))
    onnx.save(proto, tmp_path / "cut.onnx")
    assert differing(modelexport.verify(net(), INPUTS, tmp_path / "cut.onnx")) == ["blocks.1.fc"]


@pytest.mark.parametrize("wrong", ["weight", "operator"])
def test_a_planted_fault_is_found_in_its_call(wrong: str, file: Path, tmp_path: Path) -> None:
    model = onnx.load(file)
    tanh = [node for node in model.graph.node if node.op_type == "Tanh"][1]
    if wrong == "operator":
        tanh.op_type = "Sin"
    else:
        product = next(node for node in model.graph.node if tanh.input[0] in node.output)
        tensor = next(one for one in model.graph.initializer if one.name in product.input and len(one.dims) == 2)
        changed = numpy_helper.to_array(tensor) * 1.01
        tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    report = modelexport.verify(net(), INPUTS, tmp_path / "wrong.onnx", others=False)
    assert not report.agrees
    assert differing(report) == ["blocks.1" if wrong == "operator" else "blocks.1.fc"]


def test_a_wrong_weight_without_a_name_is_the_parameter_of_its_size_that_is_not_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Embedding(6, 5), nn.Tanh(), nn.Linear(5, 3)).eval(), torch.tensor([[0, 3, 5]])
    path = tmp_path / "m.onnx"
    with quietly():
        torch.onnx.export(model, (x,), str(path), dynamo=False, input_names=["input"])
    proto = onnx.load(path)
    tensor = next(one for one in proto.graph.initializer if numpy_helper.to_array(one).size == 30)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.01, tensor.name))
    onnx.save(proto, path)
    without_names(path, path)
    assert differing(modelexport.verify(model, {"input": x}, path, others=False)) == ["0"]


def test_owners_come_from_values_and_are_never_exact(file: Path, tmp_path: Path) -> None:
    path = without_names(file, tmp_path / "nameless.onnx")
    sides = ModelAndFile.of(ModelRuns(net()), INPUTS, open_for(net(), path))
    tagged = sides.with_calls_by_value(INPUTS, {}).tagged
    found = [(node.op_type, str(owner_of(node).call)) for node in tagged.nodes if node.op_type in ("Tanh", "MatMul")]
    assert found[:2] == [("MatMul", "blocks.0.fc"), ("Tanh", "blocks.0")]
    assert {owner_of(node).evidence for node in tagged.nodes} == {Evidence.INFERRED}
    assert tagged.tags[tagged.find("blocks.1.fc")] == "/Net/Block.1/Linear"
