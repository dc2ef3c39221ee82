"""What a model decides by two sizes is tried where the first is smaller, as large and larger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from modelexport import export


def pad_shorter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > y.shape[0]:
        return x + functional.pad(y, (0, 0, 0, x.shape[0] - y.shape[0]))
    return functional.pad(x, (0, 0, 0, y.shape[0] - x.shape[0])) + y


def equal_in_one_line(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sum(0) + (y.sum(0) if len(x) == len(y) else 0)


def shorter_axis(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sum() + torch.ones(x.shape[0] if x.shape[0] < x.shape[1] else x.shape[1]) + y.sum()


class Compares(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(x, y)


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
@pytest.mark.parametrize(
    ("function", "shapes", "other"),
    [
        (pad_shorter, [(12, 4), (6, 4)], [(2, 4), (5, 4)]),
        (equal_in_one_line, [(5, 4), (3, 4)], [(3, 4), (3, 4)]),
        (equal_in_one_line, [(5, 4), (5, 4)], [(5, 4), (3, 4)]),
        (shorter_axis, [(6, 12), (4,)], [(9, 4), (4,)]),
    ],
)
def test_an_order_that_matters_is_stated(
    function: Callable[..., torch.Tensor], shapes: Any, other: Any, frontend: Any, tmp_path: Path
) -> None:
    inputs = tuple(torch.rand(shape) for shape in shapes)
    result = export(Compares(function).eval(), inputs, tmp_path / "x.onnx", frontend=frontend, dynamic=True)
    declared = [size for value in result.session().get_inputs() for size in value.shape]
    sizes = [size for shape in other for size in shape]
    takes = all(isinstance(size, str) or size == number for size, number in zip(declared, sizes, strict=True))
    named = {size: number for size, number in zip(declared, sizes, strict=True) if isinstance(size, str)}
    assert not takes or not all(eval(one.formula, {}, named) for one in result.valid_if)


class Levels(nn.Module):
    """Makes constants of two sizes in a trace, of which only the product is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        height, width = y.shape[-2:]
        rows = y.flatten(2).split([int(height * width)], 2)[0]
        return rows.reshape(x.shape[0], 2, int(height), int(width)).mean(2)


def test_a_product_of_sizes_that_allows_wrong_ones_has_a_second_condition(tmp_path: Path) -> None:
    inputs = (torch.rand(1, 2, 16, 16),)
    result = export(Levels().eval(), inputs, tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    assert any("==" in one.formula and "64" in one.formula for one in result.valid_if)
    assert "height == width" in [one.formula for one in result.valid_if]
