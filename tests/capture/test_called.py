"""Modules whose class computes in ``__call__``, where hooks do not see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commands import run
from modelexport import export, verify
from modelexport.capture.front_ends import FrontEnd
from modelexport.errors import InputsError
from modelexport.pytorch.inputs.generated_inputs import generate_inputs

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


class Around(NoForward):
    """Has a forward as well, which it runs without the hooks of the module."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.child(x)) + 1


frontends = pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])


@frontends
@pytest.mark.parametrize("inputs", [{"x": X}, (X,)], ids=["named", "positional"])
def test_a_model_without_a_forward_is_refused(frontend: FrontEnd, inputs: Any, tmp_path: Path) -> None:
    with pytest.raises(InputsError, match="NoForward has a __call__ in the place of a forward: rename it") as raised:
        export(NoForward(), inputs, tmp_path / "m.onnx", frontend=frontend)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@frontends
def test_a_model_that_runs_its_forward_without_its_hooks_is_refused(frontend: FrontEnd, tmp_path: Path) -> None:
    with pytest.raises(InputsError, match=r"Around has a __call__ that does not run .*: let it call super\(\)"):
        export(Around(), (X,), tmp_path / "m.onnx", frontend=frontend)
    assert list(tmp_path.iterdir()) == []


def test_a_container_is_refused() -> None:
    with pytest.raises(InputsError, match="ModuleList has no forward, so it cannot run"):
        generate_inputs(nn.ModuleList([nn.Linear(4, 4)]))


def test_a_name_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputsError, match=r"the model is a str, not a torch.nn.Module: give the module, or"):
        export("bert-tiny", (X,), tmp_path / "m.onnx")  # type: ignore[arg-type]


@pytest.mark.parametrize("child", [NoForward, pytest.param(Around, marks=pytest.mark.slow)])
def test_what_a_child_computes_in_its_own_call_belongs_to_its_caller(child: type[nn.Module], tmp_path: Path) -> None:
    model, path = Parent(child()), tmp_path / "m.onnx"
    result = export(model, (X,), path, check=False)
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)
    owners = {node.op_type: node.call for node in result.hierarchy.nodes}
    assert (owners["Mul"], owners["Tanh"]) == ("", "")
    assert {call.address for call in result.hierarchy.calls} == {"", "child.linear"}
    assert next(module for module in result.hierarchy.modules if module.path == "child").calls == 0
    assert verify(model, (X,), path).agrees


def test_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __call__(self, x):\n"
        "        return x * 2\n"
        "def make():\n"
        "    return Net(), {'x': torch.ones(2)}\n"
        "def alone():\n"
        "    return Net()\n"
    )
    for factory in ("make", "alone"):
        refused = run("export", f"{source}:{factory}", "-o", tmp_path / "m.onnx")
        assert refused.returncode == 2
        assert len(refused.stderr.strip().splitlines()) == 1
        assert "rename it to forward" in refused.stderr
