"""What a model decides by two sizes is tried where the first is smaller, as large and larger."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional

from modelexport import export
from modelexport.capture.traced_size_conditions import size_conditions_of_trace
from modelexport.errors import LimitedFileWarning
from modelexport.graph.size_conditions import SizeCondition


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "shapes", "other"),
    [
        (pad_shorter, [(12, 4), (6, 4)], [(2, 4), (5, 4)]),
        (equal_in_one_line, [(5, 4), (3, 4)], [(3, 4), (3, 4)]),
        (equal_in_one_line, [(5, 4), (5, 4)], [(5, 4), (3, 4)]),
        (shorter_axis, [(6, 12), (4,)], [(9, 4), (4,)]),
    ],
)
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
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


@pytest.mark.parametrize(
    ("holds", "formula"),
    [
        (lambda n, m: n - m > 12, "n - m <= 12"),
        (lambda n, m: n > 5 * m, "n <= 5 * m"),
        (lambda n, m: n == 2 * m + 1, "n != 2 * m + 1"),
        (lambda n, m: n * m > 90, "n * m <= 90"),
        (lambda n, m: n % 7 == m + 1, "n % 7 != m + 1"),
        (lambda n, m: divmod(n, m)[0] == 2, "n // m != 2"),
    ],
)
def test_a_comparison_of_lengths_in_a_traced_model_is_recorded_as_it_is_written(
    holds: Callable[[int, int], bool], formula: str
) -> None:
    assert conditions_of_trace(decided(holds)) == [formula]


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda x: f"{len(x):4d}", id="format"),
        pytest.param(lambda x: f"{x.shape[0]:4d}", id="format of a size"),
        pytest.param(lambda x: f"{len(x) / 3:.1f}", id="format of a ratio"),
        pytest.param(lambda x: {13: 1}.get(len(x)), id="key"),
        pytest.param(lambda x: {True: 1}[isinstance(len(x), int)], id="type"),
    ],
)
def test_a_comparison_is_recorded_after_what_needs_a_number(use: Callable[[torch.Tensor], object]) -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        use(x)
        return decided(lambda n, m: 12 + m < n)(x, y)

    assert conditions_of_trace(forward) == ["m + 12 >= n"]


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(int, id="int"),
        pytest.param(math.sqrt, id="root"),
        pytest.param(str, id="text"),
        pytest.param(range, id="range"),
        pytest.param(lambda n: [0] * n, id="list"),
        pytest.param({13: 1}.get, id="key"),
        pytest.param(lambda n: {True: 1}[type(n) is int], id="type"),
    ],
)
def test_a_length_that_is_made_a_plain_number_is_noted(use: Callable[[Any], object]) -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        use(len(x))
        return x.sum(0) + y.sum(0)

    assert "n" in {symbol for one in recorded_of_trace(forward) if one.makes_number for symbol in one.symbols}


def test_a_length_in_the_text_of_an_error_that_was_not_raised_is_not_noted() -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) > 6:
            raise ValueError(f"{len(x)} rows and {len(y)}")
        return x.sum(0) + y.sum(0)

    assert not any(one.makes_number for one in recorded_of_trace(forward))


def test_a_file_is_not_said_to_be_right_where_a_length_was_made_a_plain_number(tmp_path: Path) -> None:
    """No size that is tried is above 40."""
    model = Compares(decided(lambda n, m: int(n) > 40)).eval()
    with pytest.warns(LimitedFileWarning, match=r"x_axis_0; .*what it decides by them from there on is not recorded"):
        inputs = torch.rand(5, 4), torch.rand(3, 4)
        export(model, inputs, tmp_path / "x.onnx", frontend="torchscript", dynamic=True, documents=False)


def conditions_of_trace(function: Callable[..., torch.Tensor]) -> list[str]:
    return [one.formula for one in recorded_of_trace(function) if one.in_model and not one.makes_number]


def recorded_of_trace(function: Callable[..., torch.Tensor]) -> Sequence[SizeCondition]:
    graph = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 18]> g (float[n, 4] x, float[m, 4] y) => (float[n, 4] z) {z = Relu(x)}'
    )
    inputs = {"x": torch.rand(5, 4), "y": torch.rand(5, 4)}
    return size_conditions_of_trace(Compares(function), inputs, graph)


def decided(holds: Callable[[int, int], bool]) -> Callable[..., torch.Tensor]:
    return lambda x, y: x.sum(0) + y.sum(0) * (2 if holds(len(x), len(y)) else 1)


def padded(holds: Callable[[int, int], bool]) -> Callable[..., torch.Tensor]:
    """Both branches compute the same where the sizes are equal."""

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n, m = x.shape[0], y.shape[0]
        if holds(n, m):
            return x + functional.pad(y, (0, 0, 0, max(n - m, 0)))[:n]
        return functional.pad(x, (0, 0, 0, max(m - n, 0)))[:m] + y

    return forward


QUESTIONS: dict[str, Callable[[int, int], bool]] = {
    "quotient": lambda n, m: n / m > 0.7,
    "difference": lambda n, m: n - m > 3,
    "product": lambda n, m: n * n > m,
    "halves": lambda n, m: n // 2 == m // 2,
    "next": lambda n, m: n == m + 1,
}


def wrong_sizes(model: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor], path: Path) -> list[tuple[int, int]]:
    """The lengths of two inputs that a traced file declares to take, and with which it differs from its model."""
    result = export(model, inputs, path, frontend="torchscript", dynamic=True, documents=False)
    session, wrong = result.session(), []
    shapes = [value.shape for value in session.get_inputs()]
    for n, m in itertools.product((1, 2, 3, 4, 5, 6, 9, 12), repeat=2):
        declared = [*zip(shapes[0], (n, 4), strict=True), *zip(shapes[1], (m, 4), strict=True)]
        named = {size: number for size, number in declared if isinstance(size, str)}
        fits = all(named.get(size, size) == number for size, number in declared)
        if fits and all(eval(one.formula, {}, named) for one in result.valid_if):
            given = (torch.rand(n, 4), torch.rand(m, 4))
            found = session.run(
                None, dict(zip([v.name for v in session.get_inputs()], map(np.asarray, given), strict=True))
            )
            right = model(*given).numpy()
            wrong += [] if right.shape == found[0].shape and np.allclose(right, found[0], atol=1e-4) else [(n, m)]
    return wrong


@pytest.mark.parametrize(
    "question", [pytest.param(name, marks=() if name == "quotient" else pytest.mark.slow) for name in QUESTIONS]
)
@pytest.mark.parametrize("body", [pytest.param(decided, marks=pytest.mark.slow), padded])
def test_what_two_sizes_decide_is_right_at_all_sizes_that_a_trace_declares(
    body: Callable[[Callable[[int, int], bool]], Callable[..., torch.Tensor]], question: str, tmp_path: Path
) -> None:
    model = Compares(body(QUESTIONS[question])).eval()
    assert not wrong_sizes(model, (torch.rand(5, 4), torch.rand(3, 4)), tmp_path / "x.onnx")


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y: x * math.gcd(x.shape[0], y.shape[0]) + y.sum(0), id="one of two becomes fixed"),
        pytest.param(
            lambda x, y: x * (2 if x.nbytes > 4 * 4 * 3 else 1) + y.sum(0), id="bytes, twice as many in float64"
        ),
    ],
)
def test_what_else_sizes_decide_is_right_at_all_sizes_that_a_trace_declares(
    function: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    assert not wrong_sizes(Compares(function).eval(), (torch.rand(2, 4), torch.rand(5, 4)), tmp_path / "x.onnx")


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


@pytest.mark.slow
def test_a_product_of_sizes_that_allows_wrong_ones_has_a_second_condition(tmp_path: Path) -> None:
    inputs = (torch.rand(1, 2, 8, 8),)
    result = export(Levels().eval(), inputs, tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    assert any("==" in one.formula and "16" in one.formula for one in result.valid_if)
    assert not all(eval(one.formula, {}, {"height": 4, "width": 16}) for one in result.valid_if)


@pytest.mark.slow
def test_inputs_of_a_huge_common_multiple_are_not_made(tmp_path: Path) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(x).mean((2, 3))

    result = export(Pooled(), (torch.rand(3, 1, 61, 67),), tmp_path / "m.onnx", dynamic=True, verify=True, check=False)
    assert result.verified is not None
    assert result.verified.agrees


def test_a_decision_that_another_one_implies_is_stated(tmp_path: Path) -> None:
    """In the example more than six columns are more than four; of other sizes, only three columns show the second."""

    class LastOnes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = min(x.shape[1], 6)
            return x[:, :first].sum(1) + x[:, max(0, x.shape[1] - 4) :].sum(1)

    result = export(LastOnes(), (torch.rand(2, 9),), tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    assert [one.formula for one in result.valid_if] == ["x_axis_1 >= 5"]
