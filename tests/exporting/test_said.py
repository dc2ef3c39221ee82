"""What the check of an export sees, and what does not make the file wrong, is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from modelexport import export, load
from modelexport.cli.show_export import print_warnings
from modelexport.exporting.options import Options


class OtherCode(nn.Module):
    """Calls no module where it is exported, as models do that know an exporter's gaps."""

    def __init__(self, asks: Callable[[], bool]) -> None:
        super().__init__()
        self.pool, self.linear, self.asks = nn.AdaptiveAvgPool2d(1), nn.Linear(2, 2), asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = x.mean((2, 3), keepdim=True) if self.asks() else self.pool(x)
        return self.linear(pooled.flatten(1))


def said(model: nn.Module, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    result = export(model.eval(), {"x": torch.rand(1, 2, 4, 4)}, folder / "x.onnx", frontend="dynamo")
    assert result.check is not None and result.check.status == "passed"
    print_warnings(result, Options())
    return capsys.readouterr().err


def test_calls_that_the_export_did_not_make_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = said(OtherCode(torch.compiler.is_exporting), tmp_path, capsys)
    assert "the file lacks 1 call that PyTorch makes (pool): the model runs other code while it is exported" in told


def test_a_model_that_leaves_out_calls_for_onnx_is_captured_as_users_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The PSPNet of segmentation_models_pytorch."""
    asks = lambda: torch.onnx.is_in_onnx_export()  # noqa: E731, PLW0108 - looked up when it is called
    assert said(OtherCode(asks), tmp_path, capsys) == ""
    assert "pool" in load(tmp_path / "x.onnx")


class Fresh(nn.Module):
    """Computes the same in two calls as long as the weights of one are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Logarithm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1 + x) * self.inner(x)


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log1p((x + self.linear(x)).abs())


def test_an_owner_is_not_doubted_for_equal_values_of_fresh_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(Fresh(), tmp_path, capsys) == ""
