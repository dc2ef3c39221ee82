"""Pooling with ``ceil_mode`` declares the sizes that its results have."""

from __future__ import annotations

import itertools
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import modelexport
from modelexport.runtime.sessions import open_session, run_session


class Pools(nn.Module):
    """Pools of every kind over one input, each followed by an operator whose size depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = nn.ModuleList()
        for kernel, stride in itertools.product((2, 3), (2, 3)):
            self.pools.append(nn.LPPool2d(2, kernel, stride, ceil_mode=True))
            for padding in (0, 1):
                self.pools.append(nn.MaxPool2d(kernel, stride, padding, ceil_mode=True))
                for counts in (False, True):
                    self.pools.append(nn.AvgPool2d(kernel, stride, padding, True, counts))
        # Only one of the two axes leaves a window out.
        self.pools.append(nn.MaxPool2d((3, 2), (3, 2), (1, 1), ceil_mode=True))
        self.pools.append(nn.AvgPool2d((2, 3), (3, 2), ceil_mode=True))
        self.then = nn.AvgPool2d(2, 1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.then(pool(x)) for pool in self.pools]


@pytest.mark.parametrize("frontend", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [pytest.param(6, marks=pytest.mark.slow), 7])
def test_the_declared_sizes_are_those_of_the_results(size: int, frontend: str, tmp_path: Path) -> None:
    x = torch.rand(1, 1, size, size)
    path = tmp_path / "x.onnx"
    modelexport.export(Pools(), {"x": x}, path, frontend=frontend, check=False)
    onnx.checker.check_model(path, full_check=True)
    outputs = onnx.load(path).graph.output
    declared = [[dim.dim_value for dim in output.type.tensor_type.shape.dim] for output in outputs]
    session = open_session(path)
    assert declared == [list(found.shape) for found in run_session(session, {"x": x.numpy()}).values()]
    assert declared == [list(expected.shape) for expected in Pools()(x)]
