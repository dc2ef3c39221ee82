"""``values`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save
from onnx.helper import make_node
from torch import nn

import modelexport
from commands import run
from exports import Exporter


@pytest.fixture
def overflowing(tmp_path: Path) -> Path:
    """A file in float16 whose second block multiplies with 1000."""
    nodes = [
        make_node("Mul", ["x", "two"], ["small"], "/net/first/Mul"),
        make_node("Mul", ["small", "thousand"], ["large"], "/net/second/Mul"),
    ]
    constants = [numpy_helper.from_array(np.array(n, np.float16), name) for n, name in ((2, "two"), (1000, "thousand"))]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2]) for name in ("x", "large")]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "half.onnx")
    np.savez(tmp_path / "runs.npz", x=np.array([[1, 2], [3, 40]], np.float16))
    return tmp_path / "half.onnx"


def test_the_first_infinity_is_told_with_what_the_node_takes(overflowing: Path) -> None:
    ended = run("values", overflowing, "--data", overflowing.with_name("runs.npz"))
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-3:] == [
        "first infinity: Mul /net/second/Mul of net.second, run 2 of 2, its large at [1]",
        "  takes small float16[2]: 6 … 80; there 80",
        "  takes thousand float16[]: 1000 … 1000; there 1000",
    ]


def test_a_finite_file_ends_with_zero(overflowing: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "small.npz", x=np.array([1, 2], np.float16))
    assert run("values", overflowing, "--data", tmp_path / "small.npz").returncode == 0


def test_the_document_has_each_value_with_the_run_of_its_ends(overflowing: Path) -> None:
    ended = run("values", overflowing, "--data", overflowing.with_name("runs.npz"), "--json")
    document = json.loads(ended.stdout)
    small = next(value for value in document["values"] if value["name"] == "small")
    assert (small["smallest"], small["smallest_run"], small["largest"], small["largest_run"]) == (2, 0, 80, 1)
    assert document["first"]["call"] == "net.second"
    assert document["rows"][0]["total"]["infinite"] == 1


def test_values_of_pytorch_are_beside_those_of_the_file(exported: Exporter) -> None:
    from modelexport.tools.figures.call_ranges import ranges_of_calls

    case = exported("bert")
    inputs = case.case.inputs()
    ranges = ranges_of_calls(case.case.build(), inputs)
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    table = modelexport.values(case.path, [arrays], torch_ranges=ranges).table
    row = next(row for row in table.rows() if row.address == "encoder.layer.0.output.LayerNorm")
    assert row.own["torch_largest"] == pytest.approx(row.own["largest"], rel=1e-4)
    assert row.own["torch_smallest"] == pytest.approx(row.own["smallest"], rel=1e-4)


def test_the_page_names_the_modules_that_float16_cannot_hold(tmp_path: Path) -> None:
    nodes = [make_node("Mul", ["x", "large"], ["y"], "/up/Mul")]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(np.array(6e4, np.float32), "large")])
    save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    found = modelexport.values(tmp_path / "m.onnx", [{"x": np.array([3, 1], np.float32)}])
    assert ("#up", "up to 1.8e+05, beyond float16") in found.section[1]


def test_calls_in_a_branch_that_was_not_taken_have_no_figures(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond((x * x).sum() >= 0, self.first, self.second, (x,))

    modelexport.export(Branches(), (torch.rand(1, 2),), tmp_path / "m.onnx", check=False)
    ended = run("values", tmp_path / "m.onnx", "second")
    assert ended.returncode == 1
    assert "second: these calls have no figures: they compute nothing, or are in a branch not taken" in ended.stderr
