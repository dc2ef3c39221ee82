"""Operators give what they give in PyTorch at the ends of the range of their type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import range_ends
from modelexport import export
from truth import wrong

CURED = {
    "numbers": ("expm1", "log1p", "erfc", "log_ndtr", "erfcx", "x % 3", "x // -3"),
    "pairs": ("floor_divide", "atan2", "hypot", "logaddexp", "logaddexp2"),
    "rows": ("logcumsumexp", "logcumsumexp, columns"),
}
"""Those that torch.onnx translates so that they overflow, or lose a sign or small numbers."""


@pytest.mark.parametrize(
    "table", ["rows", *(pytest.param(table, marks=pytest.mark.slow) for table in ("numbers", "pairs"))]
)
def test_operators_that_overflow_or_lose_signs(table: str, tmp_path: Path) -> None:
    functions = {name: range_ends.TABLES[table][name] for name in CURED[table]}
    allowed = {"logaddexp2"}  # PyTorch's own result for -1 and -1 is not zero
    assert range_ends.different(table, torch.float32, tmp_path, functions).keys() <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", range_ends.DTYPES, ids=str)
@pytest.mark.parametrize("table", range_ends.TABLES)
def test_every_operator_is_as_the_page_says(table: str, dtype: torch.dtype, tmp_path: Path) -> None:
    column = range_ends.DTYPES.index(dtype)
    told = {name: row[column] for name, row in range_ends.DIFFERENT.items() if name in range_ends.TABLES[table]}
    found = range_ends.different(table, dtype, tmp_path)
    certain = {name for name, cell in told.items() if cell == range_ends.ALWAYS}
    assert certain <= found.keys() <= {name for name, cell in told.items() if cell != range_ends.NEVER}, found


def test_the_page_is_that_of_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "evidence" / "range-ends.md"
    assert page.read_text(encoding="utf-8") == range_ends.page()


class Quotients(nn.Module):
    def forward(self, x: torch.Tensor, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "floored": x // 0.1,
            "floored, by name": torch.floor_divide(x, 0.1),
            "floored, div": torch.div(x, 0.1, rounding_mode="floor"),
            "rest": x % 0.1,
            "rest of tensors": x % (x * 0 + 0.1),
            "angle": torch.atan2(x * 0, x),
            "angle, by its other name": torch.arctan2(x * 0, x),
            "whole, floored": whole // 3,
            "whole, div": torch.div(whole, 3, rounding_mode="floor"),
            "whole, truncated": torch.div(whole, 3, rounding_mode="trunc"),
            "any": x.any(0),
            "each": (x / 100).any(1),
        }


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_quotients_are_not_rounded_before_they_are_floored(frontend: Any, tmp_path: Path) -> None:
    inputs = torch.tensor([[1.0, -0.7], [0.3, -2.0]]), torch.tensor([50331651, -50331652, -7, 2**62 + 1, -(2**62) - 1])
    plain = torch.rand(2, 2), torch.arange(5)
    export(Quotients(), plain, tmp_path / "m.onnx", frontend=frontend, check=False)
    assert wrong(tmp_path / "m.onnx", Quotients(), inputs) == ""
