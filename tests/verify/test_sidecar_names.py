"""Names in the sidecar that are those of other values, weights, inputs and tensors of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from modelexport.verify.model import verify as run_verify
from torch import nn

from modelexport import export, verify
from modelexport.format import documents
from modelexport.tagged.documents.reading import load_hierarchy

Change = Callable[[documents.CallEntry], documents.CallEntry]


class Square(nn.Module):
    """All tensors and weights have one size; a weight is passed on as it is, and one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.times = Times()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.second(self.first(x).tanh() + y)
        return self.times(z, self.third.weight) + self.times(z, self.third.weight.t() * 2)


class Times(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ (weight + x)


def with_value(side: str, position: int, value: str) -> Change:
    def change(call: documents.CallEntry) -> documents.CallEntry:
        tensors = list(getattr(call, side))
        assert tensors[position].value != value
        tensors[position] = msgspec.structs.replace(tensors[position], value=value)
        return msgspec.structs.replace(call, **{side: tensors})

    return change


def with_name(side: str, position: int, name: str) -> Change:
    def change(call: documents.CallEntry) -> documents.CallEntry:
        tensors = list(getattr(call, side))
        tensors[position] = msgspec.structs.replace(tensors[position], name=name)
        return msgspec.structs.replace(call, **{side: tensors})

    return change


CHANGES: dict[str, tuple[str, Change]] = {
    "a weight for what a call returns": ("first", with_value("outputs", 0, "first.weight")),
    "a weight for what it gets": ("second", with_value("inputs", 0, "third.weight")),
    "a weight for another": ("times", with_value("inputs", 1, "first.weight")),
    "a weight for an input of the file": ("", with_value("inputs", 1, "second.weight")),
    "a value for an input of the file": ("", with_value("inputs", 1, "tanh")),
    "an input of the file for another": ("first", with_value("inputs", 0, "y")),
    "an input of the file for a value": ("second", with_value("outputs", 0, "x")),
    "the name of another argument": ("times", with_name("inputs", 1, "factor")),
    "the name of another result": ("times@1", with_name("outputs", 0, "output.0")),
    "the end of the root": ("", lambda call: msgspec.structs.replace(call, exit=(call.exit or 0) + 1)),
}


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, dict[str, torch.Tensor], Path]:
    torch.manual_seed(0)
    model, path = Square().eval(), tmp_path_factory.mktemp("square") / "m.onnx"
    inputs = {"x": torch.randn(6, 6), "y": torch.randn(6, 6)}
    export(model, inputs, path)
    assert verify(model, inputs, path).agrees
    return model, inputs, path


@pytest.mark.parametrize("what", CHANGES)
def test_a_name_of_something_of_the_same_kind(
    what: str, square: tuple[nn.Module, dict[str, torch.Tensor], Path]
) -> None:
    model, inputs, path = square
    address, change = CHANGES[what]
    sidecar = load_hierarchy(path.with_suffix(".hierarchy.json"))
    calls = [change(call) if call.address == address else call for call in sidecar.calls]
    report = run_verify(model, inputs, path, sidecar=msgspec.structs.replace(sidecar, calls=calls), others=False)
    (claim,) = report.claims
    assert claim.where.partition(",")[0] == (address or ".")
