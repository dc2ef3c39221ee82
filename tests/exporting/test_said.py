"""What the check of an export sees, and what does not make the file wrong, is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.cli.show_export import print_warnings
from modelexport.exporting.options import Options


class OtherCode(nn.Module):
    """Calls no module where it is exported, as models do that know an exporter's gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.linear = nn.AdaptiveAvgPool2d(1), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = x.mean((2, 3), keepdim=True) if torch.onnx.is_in_onnx_export() else self.pool(x)
        return self.linear(pooled.flatten(1))


def test_calls_that_the_export_did_not_make_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = export(OtherCode().eval(), {"x": torch.rand(1, 2, 4, 4)}, tmp_path / "x.onnx", frontend="dynamo")
    assert result.check is not None and result.check.status == "passed"
    print_warnings(result, Options())
    told = capsys.readouterr().err
    assert "the file lacks 1 call that PyTorch makes (pool): the model runs other code while it is exported" in told
