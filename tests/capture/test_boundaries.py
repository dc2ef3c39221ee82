"""The values at a call's boundary are PyTorch's at the end of the call, or missing; they are never earlier ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelexport import export, update_weights
from truth import wrong


class TwoSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = self.cell(x)
        h, c = self.cell(x, (h, c))
        return self.head(h) + c.sum()


class Filled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(2, 4)
        made[:, :2] = x[:, :2]
        return made


class Above(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filled = Filled()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.filled(x) * 2)


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forth = nn.RNN(4, 6, bidirectional=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.forth(x)[0])


class CutByValues(nn.Module):
    """Captured by torch.onnx's strict mode, which runs no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norms = nn.Sequential(nn.LayerNorm(4), nn.Dropout(), nn.LayerNorm(4))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max().item())
        # Dropout and `to` are nodes only until decomposition.
        return self.second(self.norms(self.first(x)[:, :longest]).to(torch.float32)).transpose(0, 1)


MODELS = {
    "cell": (TwoSteps, (torch.ones(2, 4),)),
    "filled": (Above, (torch.ones(2, 4),)),
    "both ways": (BothWays, (torch.ones(5, 2, 4),)),
    "cut by values": (CutByValues, (torch.ones(2, 5, 4), torch.tensor([3, 4]))),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "both ways" else ()) for name in MODELS]
)
def test_every_call_that_is_compared_agrees(name: str, tmp_path: Path) -> None:
    kind, inputs = MODELS[name]
    torch.manual_seed(0)
    model = kind().eval()
    result = export(model, inputs, tmp_path / "m.onnx", frontend="dynamo", verify=True, check=False)
    assert wrong(tmp_path / "m.onnx", model, inputs) == ""
    assert result.verified is not None
    status = {call.address: call.status for call in result.verified.calls}
    assert "differ" not in status.values()
    assert status[""] == "agree"
    if name == "cut by values":
        assert {address for address, its in status.items() if its != "agree"} == {"norms.1"}


class NamedLikeParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor(2.65))
        self.t = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"s": self.s.exp(), "y": x * self.t, "other": self.t}


def test_an_output_is_not_taken_for_a_parameter(tmp_path: Path) -> None:
    model = NamedLikeParameters().eval()
    result = export(model, (torch.ones(3),), tmp_path / "m.onnx", verify=True, check=False)
    assert result.verified is not None
    assert result.verified.agrees
    save_file(dict(model.state_dict()), tmp_path / "same.safetensors")
    update_weights(tmp_path / "m.onnx", tmp_path / "same.safetensors", tmp_path / "same.onnx")
    assert wrong(tmp_path / "same.onnx", model, (torch.ones(3),)) == ""


class Regions(nn.Module):
    """Code under other settings of PyTorch, which torch.export captures in graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.linear(x).sin()
        with torch.enable_grad():
            x = torch.cos(x)
        return x + 1


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_code_under_autocast_belongs_to_its_calls(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(Regions(), Regions()).eval().to(dtype)
    result = export(
        model, (torch.linspace(-1, 1, 8, dtype=dtype).reshape(2, 4),), tmp_path / "m.onnx", verify=True, check=False
    )
    found = [(node.call, node.op_type) for node in result.hierarchy.nodes]
    once = [(".linear", "Gemm"), ("", "Sin"), ("", "Cos"), ("", "Add")]
    assert found == [(f"{path}{name}", kind) for path in "01" for name, kind in once]
    assert result.verified is not None
    assert result.verified.agrees


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    model.register_forward_hook(lambda module, given, output: output * 2)
    return model


def _hooked_with_keywords() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.register_forward_pre_hook(lambda module, given, named: ((given[0] * 3,), named), with_kwargs=True)
    return model


class WritesForOthers(nn.Module):
    """Its parts write into a tensor that they are given, and return nothing."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, made: torch.Tensor, x: torch.Tensor, place: int) -> None:
            made[:, place] = self.linear(x)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([self.Part(), self.Part()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(2, 2, 4)
        for place, part in enumerate(self.parts):
            part(made, x, place)
        return made


class TakesComplex(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z.abs() + z.real


BOUNDARIES = {
    "hooks of the root": _hooked,
    "hooks with keywords": _hooked_with_keywords,
    "writes into arguments": WritesForOthers,
    "complex inputs": TakesComplex,
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_boundaries_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    given = torch.complex(x, x.flip(0)) if name == "complex inputs" else x
    result = export(
        BOUNDARIES[name]().eval(), (given,), tmp_path / "m.onnx", frontend="dynamo", verify=True, check=False
    )
    assert result.verified is not None
    assert result.verified.agrees


class WritesThenViews(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y += x
        return y.flatten(1).unflatten(1, (2, 3)).transpose(1, 2)


class UsesViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = WritesThenViews()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x).unsqueeze(0).permute(0, 2, 1, 3).contiguous().cos()


class Summed(nn.Module):
    """Python's sum begins with 0: an addition of the same operator as a linear layer's, which is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x) for part in self.parts) * 2


def test_what_adds_nothing_to_a_result_leaves_its_owner_alone(tmp_path: Path) -> None:
    result = export(
        Summed().eval(), (torch.rand(2, 3, 4),), tmp_path / "m.onnx", frontend="dynamo", verify=True, check=False
    )
    calls = {call.address: call for call in result.hierarchy.calls}
    values = [calls[f"parts.0{inside}"].outputs[0].value for inside in ("", ".0", ".1")]
    assert len({*values}) == 1
    assert [node.calls for node in result.hierarchy.nodes if node.call.startswith("parts")] == [[]] * 4
    assert result.verified is not None
    assert result.verified.agrees


class WritesIntoItsInput(nn.Module):
    """Writes into a view that another call returned."""

    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().transpose(1, 2).flatten(1)

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(12, 2), nn.Dropout()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += 1.0
            return self.linear(self.dropout(x))

    def __init__(self) -> None:
        super().__init__()
        self.views, self.writes = self.Views(), self.Writes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.writes(self.views(x))


def test_a_view_that_another_call_writes_into_is_made_again_in_that_call(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    result = export(WritesIntoItsInput().eval(), (x,), tmp_path / "m.onnx", frontend="dynamo", verify=True, check=False)
    found = [(node.op_type, node.call) for node in result.hierarchy.nodes]
    assert found[:4] == [("Sin", "views"), ("Transpose", "views"), ("Reshape", "views"), ("Add", "writes")]
    assert all(call.startswith("writes") for _, call in found[4:])
    assert result.verified is not None
    assert result.verified.agrees


def test_views_of_a_written_tensor_belong_to_the_call_that_makes_them(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    result = export(
        UsesViews().eval(), (x,), tmp_path / "m.onnx", frontend="dynamo", optimized=False, verify=True, check=False
    )
    found = {node.name: node.call for node in result.hierarchy.nodes}
    assert found["node_transpose"] == "part"
    assert found["node_permute"] == ""
    assert result.verified is not None
    assert result.verified.agrees


class ReturnsView(nn.Module):
    """Returns a view of a tensor that it then writes into."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        first = doubled[:, 0]
        doubled.add_(1)
        return first


def test_a_returned_view_of_a_written_tensor_belongs_to_its_call(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 3), ReturnsView()).eval()
    result = export(model, (torch.ones(4, 6),), tmp_path / "m.onnx", frontend="dynamo", check=False)
    assert {node.call for node in result.hierarchy.nodes} == {"0", "1"}
    assert (result.coverage.derived, result.coverage.inferred) == (0, 0)
