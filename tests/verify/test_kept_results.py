"""Models that keep results of earlier runs, in attributes or in caches of the process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelexport import export, verify

TABLES: dict[int, torch.Tensor] = {}


def angles(length: int) -> torch.Tensor:
    frequencies = 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8)
    return torch.outer(torch.arange(length).float(), frequencies).cos()


cached_angles = functools.lru_cache(maxsize=None)(angles)


class InAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or len(self.table) != x.shape[1]:
            self.table = angles(x.shape[1])
        return self.table


class InDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = angles(x.shape[1])
        return self.tables[x.shape[1]]


class InProcess(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = angles(x.shape[1])
        return TABLES[x.shape[1]]


class InFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cached_angles(x.shape[1])


class Net(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.out = table, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x * self.table(x))


SOME_QUICK = [
    InAttribute,
    pytest.param(InDictionary, marks=pytest.mark.slow),
    pytest.param(InProcess, marks=pytest.mark.slow),
    pytest.param(InFunction, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def no_tables() -> None:
    TABLES.clear()
    cached_angles.cache_clear()


@pytest.mark.parametrize("kind", SOME_QUICK)
@pytest.mark.parametrize("length", [12, pytest.param(600, marks=pytest.mark.slow)])
def test_a_model_that_was_run_before_is_not_accused(kind: Callable[[], nn.Module], length: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(kind()).eval(), torch.randn(2, length, 4)
    export(model, (x,), tmp_path / "x.onnx", check=False)
    with torch.no_grad():
        model(x)
    report = verify(model, (x,), tmp_path / "x.onnx")
    assert report.agrees, report


@pytest.mark.parametrize("kind", SOME_QUICK)
def test_a_verification_leaves_nothing_in_caches(kind: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, x = Net(kind()).eval(), torch.randn(2, 6, 4)
    export(model, (x,), tmp_path / "x.onnx", verify=True, check=False)
    kept: list[Any] = [*TABLES.values(), *vars(model.table).get("tables", {}).values(), vars(model.table).get("table")]
    assert [table for table in kept if table is not None] == []
    assert model(x).dtype is torch.float32


def test_a_fault_is_found_and_located_in_a_model_that_was_run_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(InAttribute()).eval(), torch.randn(2, 12, 4)
    with torch.no_grad():
        model(x)
    other = Net(InAttribute()).eval()
    other.load_state_dict({key: tensor * 1.01 for key, tensor in model.state_dict().items()})
    export(other, (x,), tmp_path / "x.onnx", check=False)
    report = verify(model, (x,), tmp_path / "x.onnx", perturb=False)
    assert report.verdict == "differ"
    assert report.parameters is not None
    assert report.parameters.differing
    assert {call.address for call in report.calls if call.status == "differ"} <= {"out", ""}


def test_constants_in_attributes_are_compared_in_float64(tmp_path: Path) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = torch.linspace(0.1, 0.7, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.numbers

    model, x = Net(Constant()).eval(), torch.randn(2, 6, 4)
    export(model, (x,), tmp_path / "x.onnx", check=False)
    report = verify(model, (x,), tmp_path / "x.onnx")
    assert report.agrees
    assert not any("own types" in note for note in report.notes)
