"""An axis of size one in the example is captured with another size, so that what it decides by one size shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.errors import CheckError, UsageError
from modelexport.exporting.requested_names import RequestedNames
from modelexport.pytorch.inputs.axes_of_one import widened
from modelexport.pytorch.inputs.covering_sizes import RELATIONS, CoveringSizes, relation


class Computes(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.token = nn.Parameter(torch.rand(1, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def branch(model: Computes, x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0) if x.shape[0] > 1 else x * 2


def loop(model: Computes, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row * (index + 1) for index, row in enumerate(x)])


def class_token(model: Computes, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([model.token.expand(len(x), -1, -1), x], 1)


def class_token_by_shape(model: Computes, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([model.token.expand(x.shape[0], -1, -1), x], 1)


def state(model: Computes, x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(1, len(x), 4).transpose(0, 1) + x


def squeezed(model: Computes, x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(0).sum(-1)


def pairs(model: Computes, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("abc,dbc->ad", x, x)


FUNCTIONS = (loop, class_token, state, squeezed, pairs)


@pytest.mark.parametrize(
    "function", [branch, *(pytest.param(function, marks=pytest.mark.slow) for function in FUNCTIONS)]
)
@pytest.mark.parametrize("frontend", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
def test_a_file_of_one_row_is_right_for_others_or_takes_no_others(
    function: Callable[..., torch.Tensor], frontend: Any, tmp_path: Path
) -> None:
    model, example = Computes(function).eval(), torch.rand(1, 3, 4)
    result = export(model, (example,), tmp_path / "x.onnx", frontend=frontend, dynamic=True)
    session = result.session()
    rows = session.get_inputs()[0].shape[0]
    for count in (1, 2, 3) if isinstance(rows, str) else (rows,):
        x = torch.rand(count, 3, 4)
        assert np.allclose(session.run(None, {"x": x.numpy()})[0], model(x).detach().numpy(), atol=1e-5)
    assert isinstance(rows, str) or [(one.axis, one.size) for one in result.fixed] == [(0, 1)]


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_reason_of_a_fixed_axis_is_the_line_and_not_the_size_of_the_capture(named: bool, tmp_path: Path) -> None:
    x = torch.rand(1, 3, 4)
    inputs = {"x": x} if named else (x,)
    result = export(Computes(class_token), inputs, tmp_path / "x.onnx", frontend="dynamo", dynamic=True)
    (fixed,) = result.fixed
    assert re.match(r"test_axes_of_one.py:\d+ decides by it", fixed.reason)


def test_what_needs_no_condition_stays_dynamic(tmp_path: Path) -> None:
    result = export(Computes(class_token_by_shape).eval(), (torch.rand(1, 1, 4),), tmp_path / "x.onnx", dynamic=True)
    assert [isinstance(size, str) for size in result.session().get_inputs()[0].shape] == [True, True, False]
    assert not result.fixed


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_file_that_others_made_of_one_row_differs_at_two(tmp_path: Path) -> None:
    model, example = Computes(branch).eval(), (torch.rand(1, 3, 4),)
    torch.onnx.export(
        model, example, tmp_path / "x.onnx", dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "n"}}
    )
    report = verify(model, example, tmp_path / "x.onnx")
    assert [one.what for one in report.others if one.status == "differ"] != []


@pytest.mark.slow
def test_a_named_axis_of_one_has_to_be_right_for_one(tmp_path: Path) -> None:
    named = RequestedNames(axes={("x", 0): "batch"})
    with pytest.raises((CheckError, UsageError), match="batch"):
        export(Computes(branch).eval(), (torch.rand(1, 3, 4),), tmp_path / "x.onnx", dynamic=True, interface=named)


def test_axes_that_the_model_needs_to_be_one_stay_so() -> None:
    class Mono(nn.Module):
        def forward(self, sound: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv1d(sound, torch.ones(2, 1, 3)) * mask[..., 2:]

    inputs, wide = widened(Mono(), {"sound": torch.rand(1, 1, 8), "mask": torch.ones(1, 1, 8)})
    assert wide == {("sound", 0): 2, ("mask", 0): 2}
    assert [tuple(tensor.shape) for tensor in inputs.values()] == [(2, 1, 8), (2, 1, 8)]  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_mask_that_is_broadcast_keeps_taking_the_example(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x.reshape(len(x), 2, -1) * mask

    inputs = {"x": torch.rand(1, 10), "mask": torch.ones(1, 1, 5)}
    result = export(Masked().eval(), inputs, tmp_path / "x.onnx", dynamic=True, verify=True, check=False)
    assert result.verified is not None
    assert result.verified.agrees


@pytest.mark.parametrize("example", [{"n": 8}, {"n": 1}, {"a": 2, "b": 8}, {"a": 5, "b": 5, "c": 1}])
def test_a_covering_set_has_each_size_and_each_order(example: dict[str, int]) -> None:
    cover, tried = CoveringSizes(example), [example]
    for sizes in cover:
        tried.append(sizes)
        cover.accept(sizes)
    names = list(example)
    for name, size in example.items():
        assert {1, 2, 3} & {one[name] for one in tried} >= ({2, 3} if size == 1 else {1})
        assert any(one[name] > size for one in tried)
    for first in names:
        for second in names[names.index(first) + 1 :]:
            assert {relation(one[first], one[second]) for one in tried} == {*RELATIONS}
    assert len(tried) <= 4 + 2 * len(example)


def test_a_covering_set_has_what_a_model_accepts() -> None:
    """Images whose edges are multiples of 16, with three channels."""
    cover, accepted = CoveringSizes({"batch": 2, "channels": 3, "height": 32, "width": 32}), list[dict[str, int]]()
    for sizes in cover:
        if sizes["channels"] == 3 and sizes["height"] % 16 == sizes["width"] % 16 == 0:
            accepted.append(sizes)
            cover.accept(sizes)
    assert cover.unchanged == ["channels"]
    assert {np.sign(sizes["height"] - sizes["width"]) for sizes in accepted} == {-1, 0, 1}
    assert 1 in {sizes["batch"] for sizes in accepted}
