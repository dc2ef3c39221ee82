"""Numbers that Python computes from sizes are right at every size, and neither fix an axis nor accuse a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import (
    adaptive_avg_pool2d,
    adaptive_max_pool2d,
    affine_grid,
    interpolate,
    one_hot,
    scaled_dot_product_attention,
)

from modelexport import export, verify
from modelexport.errors import CaptureError

Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "inverse": lambda x: x * (1 / x.shape[1]),
    "power": lambda x: torch.softmax(x @ x.transpose(1, 2) * x.shape[1] ** -0.5, -1),
    "ratio": lambda x: x * (x.shape[1] / x.shape[2]),
    "unbiased": lambda x: x * (x.shape[1] / (x.shape[1] - 1)),
    "tenth": lambda x: x * (0.1 * x.shape[2]),
    "several": lambda x: x * (x.shape[1] * 0.3 + x.shape[0] ** 0.5 - 1 / x.shape[2]),
    "full": lambda x: x + torch.full((x.shape[1], 1), 1 / x.shape[1]),
    "bound": lambda x: x.clamp(max=x.shape[1] / 7),
    "bounds": lambda x: x.clamp(-0.5, x.shape[1] / 7) + torch.clamp(x, -x.shape[1] / 9, 1),
    "where": lambda x: torch.where(x > 1 / x.shape[1], x, 1 / x.shape[2]),
    "alpha": lambda x: torch.add(x, x * x, alpha=1 / x.shape[1]),
    "epsilon": lambda x: x / (x.norm(dim=1, keepdim=True) + 1 / x.shape[1]),
    "mean": lambda x: x.sum(1) / x.shape[1],
    "bytes": lambda x: x / x.nbytes,
    "area": lambda x: x - x.sum((1, 2), keepdim=True) / (x.shape[1] * x.shape[2]),
    "positions": lambda x: x + (2 * torch.arange(x.shape[2]) / (x.shape[2] - 1) - 1),
    "tensor": lambda x: x / torch.sqrt(torch.tensor(x.shape[1])),
    "attention": lambda x: scaled_dot_product_attention(x[None], x[None], x[None]),
    "attention of three axes": lambda x: scaled_dot_product_attention(x, x, x),
    "rounded down": lambda x: x[:, : math.floor(x.shape[1] * 0.57)],
    "rounded up": lambda x: x + torch.ones(math.ceil(x.shape[1] / 3)).sum(),
    "quotient of a negative number": lambda x: x[:, : -(-x.shape[1] // 4)] + (5 - x.shape[1]) // 2,
    "evenly spaced": lambda x: x + torch.linspace(0.5, x.shape[2] - 0.5, x.shape[2]),
    "windows": lambda x: x * (torch.hann_window(x.shape[2]) + torch.bartlett_window(x.shape[2], periodic=False)),
    "other windows": lambda x: x * (torch.hamming_window(x.shape[2]) + torch.blackman_window(x.shape[2])),
    "classes": lambda x: one_hot(torch.arange(x.shape[2]) // 2, x.shape[2]).float() @ x.transpose(1, 2),
    "kron": lambda x: torch.kron(x[0], x[:2, 0]),
    "vander": lambda x: torch.vander(x[0, 0]).clamp(-1, 1) + torch.vander(x[0, 0], 1, increasing=True),
    "grid": lambda x: affine_grid(x[:, :2, :3], (x.shape[0], 1, *x.shape[1:]), align_corners=False),
    "divmod": lambda x: x * sum(divmod(x.shape[1], 4)),
    "rounded to even": lambda x: x[:, : round(x.shape[1] / 4)] * (x.shape[0] - round(x.shape[1] * 0.5)),
    "whole product": lambda x: interpolate(x, scale_factor=0.7, recompute_scale_factor=True),
    "root": lambda x: x / math.sqrt(x.shape[1] + 1) + math.exp(-x.shape[2]),
    "powers of two": lambda x: x * torch.logspace(0, 1, x.shape[2], 2),
    "triangles": lambda x: (
        x[0][tuple(torch.triu_indices(x.shape[1], x.shape[1], 1) % x.shape[2])]
        + x[0, 0, torch.tril_indices(x.shape[1], x.shape[1], -1)[1] % x.shape[2]]
    ),
    "combinations": lambda x: torch.combinations(x[0, 0], 3),
    "quotient of sizes": lambda x: interpolate(x, scale_factor=31 / x.shape[2], mode="linear"),
    "quotient of sizes, cubic": lambda x: interpolate(
        x[None, :, :9], scale_factor=(31 / x.shape[1], 0.5), mode="bicubic"
    ),
    "quotient of sizes, nearest": lambda x: interpolate(x, scale_factor=x.shape[1] / x.shape[2]),
    "quotient that keeps a size": lambda x: interpolate(x, scale_factor=(x.shape[2] + 0.1) / x.shape[2], mode="linear"),
    "windows of uneven sizes": lambda x: adaptive_avg_pool2d(x, (3, 4)),
    "windows of half the size": lambda x: interpolate(
        x[None], scale_factor=0.5, mode="area", recompute_scale_factor=True
    ),
    "windows as many as rows": lambda x: adaptive_avg_pool2d(x, (x.shape[0], 3)),
    "numbers between bounds": lambda x: (
        x + torch.arange(0.5, x.shape[2])[-1] * torch.arange(x.shape[1] / 3, x.shape[1]).sum()
    ),
    "maxima of uneven sizes": lambda x: adaptive_max_pool2d(x, (2, 3)),
    "scale": lambda x: interpolate(x, scale_factor=2.3, mode="linear"),
    "new, in double precision": lambda x: x.double().new_full((x.shape[1],), x.shape[1] * 0.57).floor(),
    "alike, in double precision": lambda x: torch.full_like(x.double(), x.shape[1] * 0.57).floor(),
    "numbers between": lambda x: x.sum() + torch.arange(1, 9.0),
}
BY_TRACE = (
    "inverse",
    "power",
    "ratio",
    "full",
    "bound",
    "bytes",
    "alpha",
    "epsilon",
    "attention of three axes",
    "quotient of a negative number",
    "evenly spaced",
    "windows",
    "other windows",
    "classes",
    "kron",
    "divmod",
    "whole product",
)


class Computed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FUNCTIONS[self.name](x)


class All(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Computed, names))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part(x) for part in self.parts)


@pytest.mark.parametrize(
    ("frontend", "names"),
    [
        ("dynamo", tuple(FUNCTIONS)[::40]),
        ("torchscript", BY_TRACE[::16]),
        pytest.param("torchscript", BY_TRACE, marks=pytest.mark.slow),
        pytest.param("dynamo", tuple(FUNCTIONS), marks=pytest.mark.slow),
    ],
)
def test_numbers_from_sizes(frontend: str, names: tuple[str, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = All(names).eval(), torch.randn(3, 10, 20)
    result = export(model, {"x": x}, tmp_path / "x.onnx", dynamic=True, frontend=frontend)  # type: ignore[arg-type]
    assert not result.fixed
    session = result.session()
    assert all(isinstance(size, str) for size in session.get_inputs()[0].shape)
    report = verify(model, {"x": x}, tmp_path / "x.onnx")
    assert report.agrees, report
    assert {one.status for one in report.others} == {"agree"}
    for sizes in ((2, 100, 7), (5, 23, 9)):  # 100 * 0.57 is 56.99999999999999 in Python, and 57 in float32
        other = torch.randn(sizes)
        found = session.run(None, {"x": other.numpy()})
        for name, right, array in zip(names, model(other), found, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(array), right, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m
            )


RANGES: Mapping[str, Callable[[Any], torch.Tensor]] = {
    "of numbers": lambda n: torch.arange(0, 2.4, 0.1),  # 25 elements in float32
    "to a size": lambda n: torch.arange(0.7, n, 0.7),
    "down": lambda n: torch.arange(n, 0, -0.3),
    "by name": lambda n: torch.arange(start=0, end=n, step=0.1),
    "in float64": lambda n: torch.arange(0, n, 0.3, dtype=torch.float64),
    "to a part of a size": lambda n: torch.arange(0, n * 0.1, 0.1),
    "by a part of a size": lambda n: torch.arange(0, 1, 1 / n),
}
BY_FRACTION_OF_SIZE = ("to a part of a size", "by a part of a size")


class Range(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() + torch.sin(RANGES[self.name](x.shape[0]))


@pytest.mark.parametrize(
    ("frontend", "name"),
    [
        *(("dynamo", name) for name in RANGES),
        *(("torchscript", name) for name in RANGES if name not in BY_FRACTION_OF_SIZE),
    ],
)
def test_a_range_by_fractions_has_the_elements_of_pytorch_at_every_size(
    frontend: str, name: str, tmp_path: Path
) -> None:
    model, x = Range(name), torch.randn(7, 2)
    result = export(model, {"x": x}, tmp_path / "x.onnx", dynamic=True, frontend=frontend)  # type: ignore[arg-type]
    assert not result.fixed
    assert verify(model, {"x": x}, tmp_path / "x.onnx").agrees
    session = result.session()
    for size in range(2, 80):
        other = torch.randn(size, 2)
        (found,) = session.run(None, {"x": other.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BY_FRACTION_OF_SIZE)
def test_a_trace_refuses_a_range_whose_count_it_would_round(name: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="use the front end dynamo"):
        export(Range(name), {"x": torch.randn(7, 2)}, tmp_path / "x.onnx", dynamic=True, frontend="torchscript")
