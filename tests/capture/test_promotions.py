"""Outputs have the types of the model's also where torch.onnx computes in others: sums of half-precision numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.capture.dynamo import capture_by_dynamo

Several = tuple[torch.Tensor, ...]


class Reduces(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Returns(nn.Module):
    """Returns what a call reduces, as it is and used, what it reduces itself, and one of these twice."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = Reduces(function)

    def forward(self, x: torch.Tensor) -> Several:
        y = self.linear(x)
        z = self.inner(y)
        return z, z * 2 + 1, y.sum(0), z


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "prod": lambda x: x.prod(-1),
    "mean": lambda x: x.mean(-1),
    "sum in float32": lambda x: x.sum(-1, dtype=torch.float32),
}


@pytest.mark.sweep
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_reductions_leave_in_the_type_of_the_model(name: str, half: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Returns(FUNCTIONS[name]).to(half).eval(), torch.randn(3, 4, dtype=half)
    expected = model(x)
    export(model, (x,), tmp_path / "model.onnx", frontend="dynamo", dynamic=name == "sum", check=False)
    kinds = {torch.float32: onnx.TensorProto.FLOAT, half: getattr(onnx.TensorProto, str(half)[6:].upper())}
    outputs = onnx.load(tmp_path / "model.onnx").graph.output
    assert [v.type.tensor_type.elem_type for v in outputs] == [kinds[value.dtype] for value in expected]
    assert verify(model, (x,), tmp_path / "model.onnx").agrees
    if half == torch.float16:
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        for value, made in zip(expected, session.run(None, {"x": x.numpy()}), strict=True):
            assert value.detach().numpy().dtype == made.dtype
            torch.testing.assert_close(value.detach(), torch.tensor(made), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_result_that_the_exporter_of_traces_has_in_float32_leaves_in_the_type_of_the_model(
    half: torch.dtype, tmp_path: Path
) -> None:
    model = Returns(lambda x: torch.addcmul(x, x, x, value=0.3)).to(half).eval()
    export(model, (torch.randn(3, 4, dtype=half),), tmp_path / "x.onnx", frontend="torchscript", check=False)
    types = {output.type.tensor_type.elem_type for output in onnx.load(tmp_path / "x.onnx").graph.output}
    assert types == {getattr(onnx.TensorProto, str(half)[6:].upper())}


def test_the_boundaries_of_a_call_are_after_the_conversion() -> None:
    model = Returns(FUNCTIONS["sum"]).half().eval()
    captured = capture_by_dynamo(model, (torch.randn(3, 4).half(),))
    named = {value.name: value for node in captured.model.graph for value in node.outputs}
    boundaries = [named[name] for port, name in captured.values.items() if port.side == "outputs"]
    assert len(boundaries) == 6  # of the root, of linear and of inner
    assert {str(value.dtype) for value in boundaries} == {"FLOAT16"}


class Normalized(nn.Module):
    """Operators that ONNX has without bfloat16 in the front ends' opsets, and a product, which it has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.norm(self.conv(x)).amax((2, 3)))
        return nn.functional.softplus(y).round().topk(2).values


@pytest.fixture(scope="module", params=["dynamo", "torchscript"])
def normalized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Module, Several, Path]:
    torch.manual_seed(0)
    model, inputs = Normalized().bfloat16().eval(), (torch.randn(2, 3, 8, 8, dtype=torch.bfloat16),)
    path = tmp_path_factory.mktemp("normalized") / "model.onnx"
    export(model, inputs, path, frontend=request.param)
    return model, inputs, path


def test_operators_that_onnx_has_without_bfloat16_compute_in_float32(
    normalized: tuple[nn.Module, Several, Path],
) -> None:
    model, inputs, path = normalized
    assert verify(model, inputs, path).verdict == "agree"


def test_operators_that_onnx_has_with_bfloat16_keep_it(normalized: tuple[nn.Module, Several, Path]) -> None:
    graph = onnx.shape_inference.infer_shapes(onnx.load(normalized[2])).graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    assert [types[node.output[0]] for node in graph.node if node.op_type == "Gemm"] == [onnx.TensorProto.BFLOAT16]
