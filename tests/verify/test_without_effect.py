"""Operands without effect: interpolation by zero, products with zero, gates that a fresh model has closed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.format.keys import CALL

X = torch.linspace(-1, 1, 48).reshape(4, 12)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Gated(nn.Module):
    """Puts two layers and what it gets together, with a gate of zeros."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.one, self.other = kind, nn.Linear(12, 12), nn.Linear(12, 12)
        self.gate = nn.Parameter(torch.zeros(12))
        self.register_buffer("strength", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KINDS[self.kind](self, x)


class Surrounded(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before, self.middle, self.after = Inner(), Gated(kind), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.middle(self.before(x)))


KINDS: dict[str, Callable[[Gated, torch.Tensor], torch.Tensor]] = {
    "lerp by a zero": lambda m, x: torch.lerp(m.one(x), m.other(x), 0.0),
    "lerp by a buffer": lambda m, x: torch.lerp(m.one(x), m.other(x), m.strength),
    "lerp by a parameter": lambda m, x: torch.lerp(x, m.other(x), m.gate),
    "lerp from the input": lambda m, x: torch.lerp(x, m.other(x), 0.0),
    "lerp to the input": lambda m, x: torch.lerp(m.other(x), x, 1.0),
    "lerp by one": lambda m, x: torch.lerp(m.one(x), m.other(x), m.strength + 1),
    "lerp twice": lambda m, x: torch.lerp(torch.lerp(x, m.one(x), 0.0), m.other(x), 0.0),
    "written out": lambda m, x: m.other(x) + (m.one(x) - m.other(x)) * m.strength,
    "addcmul": lambda m, x: torch.addcmul(x, m.one(x), m.other(x), value=0.0),
    "addmm": lambda m, x: torch.addmm(m.one(x), x, m.other.weight, alpha=0),
    "baddbmm": lambda m, x: torch.baddbmm(m.one(x)[None], x[None], m.other.weight[None], beta=0)[0],
    "alpha": lambda m, x: torch.add(x, m.one(x), alpha=0),
    "times zero": lambda m, x: m.one(x) * 0 + m.other(x),
    "scaled layer": lambda m, x: x + m.gate * m.one(x),
    "gate": lambda m, x: x + torch.tanh(m.gate) * torch.relu(m.one(x)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("perturb", [None, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_effect_is_no_fault(kind: str, perturb: bool | None, tmp_path: Path) -> None:
    model = Surrounded(kind).eval()
    export(model, (X,), tmp_path / "m.onnx", check=False)
    report = verify(model, (X,), tmp_path / "m.onnx", perturb=perturb)
    assert not [(call.address, call.reason) for call in report.calls if call.status == "differ"]
    assert report.agrees


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["lerp by a zero", "lerp from the input", "lerp to the input"])
@pytest.mark.parametrize(("owner", "other"), [("before", "middle"), ("middle", "after")])
def test_a_node_given_to_a_call_beside_an_interpolation(kind: str, owner: str, other: str, tmp_path: Path) -> None:
    model = Surrounded(kind).eval()
    export(model, (X,), tmp_path / "m.onnx", check=False)
    graph = ir.load(tmp_path / "m.onnx")
    # One that only chooses may be in any call that its tensor passes.
    nodes = [one for one in graph.graph if one.metadata_props.get(CALL) == owner and one.op_type != "Where"]
    given_to = next(one for one in graph.graph if one.metadata_props.get(CALL) == other)
    nodes[-1].metadata_props.update(given_to.metadata_props)
    ir.save(graph, tmp_path / "m.onnx")
    for document in tmp_path.glob("m.*.json"):
        document.unlink()
    report = verify(model, (X,), tmp_path / "m.onnx")
    assert {call.address for call in report.calls if call.status == "differ"} & {owner, other}
