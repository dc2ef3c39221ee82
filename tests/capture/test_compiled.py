"""Models with parts that ``torch.compile`` made: exported with the calls and verified against their Python code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.errors import CaptureError
from modelexport.pytorch.calls.traced_tree import trace_calls


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)))


class WithCondition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.yes, self.no = torch.compile(Block(), backend="eager"), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.yes, self.no, (self.block(x),))


def decorated() -> nn.Module:
    class Decorated(Block):
        @torch.compile(backend="eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.relu(self.one(x)))

    return nn.Sequential(Decorated())


def in_place() -> nn.Module:
    blocks = nn.Sequential(Block(), Block())
    for block in blocks:
        block.compile(backend="eager")
    return blocks


MODELS = {
    "whole": (lambda: torch.compile(Block(), backend="eager"), {"_orig_mod.one", "_orig_mod.two"}),
    "part": (
        lambda: nn.Sequential(torch.compile(Block(), backend="eager"), nn.ReLU()),
        {"0._orig_mod.one", "0._orig_mod.two", "1"},
    ),
    "in-place": (in_place, {"0.one", "0.two", "1.one", "1.two"}),
    "decorated": (decorated, {"0.one", "0.two"}),
    "condition": (WithCondition, {"block._orig_mod.one", "block._orig_mod.two"}),
}
"""Name to a builder and the leaves that run outside of branches."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
def test_what_is_compiled_has_its_calls_and_agrees(name: str, tmp_path: Path) -> None:
    build, leaves = MODELS[name]
    result = export(build().eval(), (torch.randn(2, 6),), tmp_path / "m.onnx", verify=True, check=False)
    assert result.verified is not None
    assert result.verified.agrees
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)
    assert leaves <= {call.address for call in result.verified.calls if call.status == "agree"}


def test_a_trace_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="compile the model after the export"):
        export(MODELS["part"][0](), (torch.randn(2, 6),), tmp_path / "m.onnx", frontend="torchscript")


def test_nothing_is_compiled_and_the_model_compiles_afterwards() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: object) -> object:
        compiled.append(graph)
        return graph.forward

    model = torch.compile(Block(), backend=backend)
    calls = trace_calls(model, (torch.ones(2, 6),))
    assert [call.call.path for call in calls] == ["", "_orig_mod", "_orig_mod.one", "_orig_mod.two"]
    assert compiled == []
    model(torch.ones(2, 6))
    assert compiled


def test_calls_in_branches_are_no_calls_of_the_run() -> None:
    calls = trace_calls(WithCondition().eval(), (torch.ones(2, 6),))
    assert [call.call.path for call in calls if not call.call.path.startswith("block.")] == ["", "block"]
