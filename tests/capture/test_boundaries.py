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

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max().item())
        return self.second(self.first(x)[:, :longest])


MODELS = {
    "cell": (TwoSteps, (torch.ones(2, 4),)),
    "filled": (Above, (torch.ones(2, 4),)),
    "both ways": (BothWays, (torch.ones(5, 2, 4),)),
    "cut by values": (CutByValues, (torch.ones(2, 5, 4), torch.tensor([3, 4]))),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_call_that_is_compared_agrees(name: str, tmp_path: Path) -> None:
    kind, inputs = MODELS[name]
    torch.manual_seed(0)
    model = kind().eval()
    result = export(model, inputs, tmp_path / "m.onnx", frontend="dynamo", verify=True)
    assert wrong(tmp_path / "m.onnx", model, inputs) == ""
    assert result.verified is not None
    status = {call.address: call.status for call in result.verified.calls}
    assert "differ" not in status.values()
    assert status[""] == "agree"
    if name == "cut by values":
        assert set(status.values()) == {"agree"}


class NamedLikeParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor(2.65))
        self.t = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"s": self.s.exp(), "y": x * self.t, "other": self.t}


def test_an_output_is_not_taken_for_a_parameter(tmp_path: Path) -> None:
    model = NamedLikeParameters().eval()
    result = export(model, (torch.ones(3),), tmp_path / "m.onnx", verify=True)
    assert result.verified is not None and result.verified.agrees
    save_file(dict(model.state_dict()), tmp_path / "same.safetensors")
    update_weights(tmp_path / "m.onnx", tmp_path / "same.safetensors", tmp_path / "same.onnx")
    assert wrong(tmp_path / "same.onnx", model, (torch.ones(3),)) == ""
