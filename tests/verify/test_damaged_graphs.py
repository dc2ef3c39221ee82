"""Files whose nodes share a name, make one value twice or form a cycle are refused; nodes need no names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch

from modelexport import export, verify
from modelexport.errors import UsageError
from models import case

Nodes = list[onnx.NodeProto]


def one_name(nodes: Nodes) -> None:
    nodes[0].name = nodes[1].name


def one_name_for_all(nodes: Nodes) -> None:
    for node in nodes:
        node.name = "node"


def one_value(nodes: Nodes) -> None:
    nodes[1].output[0] = nodes[0].output[0]


def own_output(nodes: Nodes) -> None:
    nodes[1].input[0] = nodes[1].output[0]


def cycle(nodes: Nodes) -> None:
    nodes[1].input[0] = nodes[-1].output[0]


def no_output(nodes: Nodes) -> None:
    nodes[1].output[0] = ""


def no_names(nodes: Nodes) -> None:
    for node in nodes:
        node.name = ""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(torch.float32, marks=pytest.mark.slow),
        pytest.param(torch.float16, marks=pytest.mark.slow),
        torch.bfloat16,
    ],
    ids=str,
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.dtype, Path]:
    """A type and a file in it. ONNX Runtime has all, some or no kernels for the type."""
    path = tmp_path_factory.mktemp("damaged") / "model.onnx"
    model, inputs = built(request.param)
    export(model, inputs, path, check=False)
    return request.param, path


def built(dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    blocks = case("blocks")
    return blocks.build().to(dtype), {name: value.to(dtype) for name, value in blocks.inputs().items()}


def changed(path: Path, change: Callable[[Nodes], None], to: Path) -> Path:
    model = onnx.load(path)
    nodes = list(model.graph.node)
    change(nodes)
    onnx.save(model, to)
    return to


@pytest.mark.sweep
@pytest.mark.parametrize("change", [one_name, one_name_for_all, one_value, own_output, cycle, no_output])
def test_a_damaged_graph_is_refused_in_one_line(
    exported: tuple[torch.dtype, Path], change: Callable[[Nodes], None], tmp_path: Path
) -> None:
    model, inputs = built(exported[0])
    path = changed(exported[1], change, tmp_path / "model.onnx")
    with pytest.raises(UsageError) as refused:
        verify(model, inputs, path)
    assert "\n" not in str(refused.value)
    if change in (one_name, one_name_for_all):
        assert "two nodes with same node name" in str(refused.value)


def test_nodes_need_no_names(exported: tuple[torch.dtype, Path], tmp_path: Path) -> None:
    model, inputs = built(exported[0])
    assert verify(model, inputs, changed(exported[1], no_names, tmp_path / "model.onnx")).agrees
