"""What Python asks of values while a model is captured: answered where the answer is known, presumed where work is
skipped for nothing, and otherwise an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.cli.app import main
from modelexport.errors import CaptureError, CheckError
from modelexport.pytorch.runs.other_answers import with_other_answers
from modelexport.runtime.sessions import run_session

Forward = Callable[[torch.Tensor], torch.Tensor]


class Experts(nn.Module):
    """A mixture of experts, which skips those that no token goes to, in one of the ways that are usual."""

    def __init__(self, skips: str) -> None:
        super().__init__()
        self.skips = skips
        self.gate = nn.Linear(8, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 1, dim=-1)
        mask = nn.functional.one_hot(chosen, 2).permute(2, 1, 0)
        out = torch.zeros_like(x)
        hit = mask.sum((-1, -2)) > 0
        for one in hit.nonzero() if self.skips == "rows" else range(2):
            number = one if isinstance(one, int) else int(one.item())
            if self.skips == "any" and not (chosen == number).any():
                continue
            if self.skips == "count" and (chosen == number).sum() == 0:
                continue
            place, token = torch.where(mask[number])
            if self.skips == "numel" and token.numel() == 0:
                continue
            if self.skips == "shape" and token.shape[0] == 0:
                continue
            out.index_add_(0, token, self.experts[number](x[token]) * weights[token, place, None])
        return out


WAYS_TO_SKIP = ("rows", "any", "count", "numel")


@pytest.mark.parametrize("ways", [("rows",), pytest.param(WAYS_TO_SKIP, marks=pytest.mark.slow)])
def test_experts_that_are_skipped_in_the_example_are_in_the_file(ways: tuple[str, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*map(Experts, ways)).eval()
    result = export(model, torch.randn(1, 8), tmp_path / "x.onnx", verify=True, check=False)
    assert result.verified is not None
    assert result.verified.agrees
    experts = {f"{layer}.experts.{number}" for layer in range(len(model)) for number in range(2)}
    assert {row.address for row in result.tree if row.nodes} >= experts
    assert len(result.hierarchy.settings.presumed) == len(ways)
    for seed in range(4):
        torch.manual_seed(seed)
        other = torch.randn(1, 8)
        (found,) = run_session(result.session(), {"input": other.numpy()}).values()
        torch.testing.assert_close(torch.from_numpy(found), model(other))


def test_a_trace_does_not_follow_sizes_of_what_is_selected_in_the_example(tmp_path: Path) -> None:
    for skips in ("numel", "shape"):
        with pytest.raises(CaptureError, match="data-dependent"):
            export(Experts(skips).eval(), torch.randn(2, 8), tmp_path / "x.onnx", frontend="torchscript")


class Asks(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self.linear(x))


ASSERTED = """
def asserted(x):
    assert (x.abs() < 1e3).all()
    assert x.max() < 1e3, f"{x} is too large"
    return x * 2
"""


def asserted(x: torch.Tensor) -> torch.Tensor:
    """Written as text, since pytest makes other code of the assertions of tests."""
    names: dict[str, Any] = {"__name__": "nets"}
    exec(ASSERTED, names)
    found: torch.Tensor = names["asserted"](x)
    return found


def refused(x: torch.Tensor) -> torch.Tensor:
    if torch.isnan(x).any().item():
        raise ValueError("NaN")
    if x.max() > 1e3 or x.min() < -1e3:
        raise ValueError("too large")
    if torch.equal(x, torch.zeros(4)):
        raise ValueError("zeros")
    return x * 2


@pytest.mark.sweep
@pytest.mark.parametrize("forward", [asserted, refused])
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_a_model_may_refuse_inputs_by_their_values(forward: Forward, frontend: str, tmp_path: Path) -> None:
    result = export(Asks(forward), torch.randn(2, 4), tmp_path / "x.onnx", frontend=frontend)
    assert result.check is not None
    assert result.check.status == "passed"
    assert not result.hierarchy.settings.presumed


def decides(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.mean() > 0 else x


def decides_twice(x: torch.Tensor) -> torch.Tensor:
    for part in x:
        if part.mean() > 0:
            x = x * 2
    return x


@pytest.mark.parametrize("forward", [decides, pytest.param(decides_twice, marks=pytest.mark.slow)])
def test_a_model_that_decides_by_values_is_refused(forward: Forward, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="data-dependent"):
        export(Asks(forward), torch.randn(2, 4), tmp_path / "x.onnx", frontend="dynamo")


def other_work(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if (x > 0).any() else x - 1


@pytest.mark.parametrize(
    "example", [-torch.ones(2, 4), pytest.param(torch.tensor([[1.0, -1e-3, -1e-3, -1e-3]]), marks=pytest.mark.slow)]
)
def test_what_is_presumed_is_checked_on_other_inputs(example: torch.Tensor, tmp_path: Path) -> None:
    """Nothing is positive in the example, so that the file is wrong there; or with larger numbers of the other sign."""
    model = Asks(other_work)
    nn.init.eye_(model.linear.weight)
    nn.init.zeros_(model.linear.bias)
    with pytest.raises((CheckError, CaptureError)):
        export(model, example, tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


class Steps(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        written = torch.zeros(2, 4, dtype=torch.bool)
        written[:, 1:] = mask[:, 1:] > 0
        return x + 1 if written.flatten().any().item() else x - 1


@pytest.mark.slow
def test_what_is_written_into_a_constant_is_no_constant(tmp_path: Path) -> None:
    with pytest.raises((CaptureError, CheckError)):
        export(Steps(), {"x": torch.randn(2, 4), "mask": torch.zeros(2, 4)}, tmp_path / "x.onnx")


@pytest.mark.parametrize("mask", [torch.zeros(2, 4), pytest.param(torch.ones(2, 4), marks=pytest.mark.slow)])
def test_what_constants_decide_is_as_in_the_example(mask: torch.Tensor, tmp_path: Path) -> None:
    x, constants = torch.randn(2, 4), ["mask"]
    result = export(Steps(), (x, mask), tmp_path / "x.onnx", frontend="dynamo", constants=constants, check=False)
    assert not result.hierarchy.settings.presumed
    (found,) = run_session(result.session(), {"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(found), Steps()(x, mask))


NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        mask = x > 0
        if mask.any():
            x = torch.where(mask, self.linear(x), x)
        return x

def net():
    return Net(), torch.randn(2, 4)
"""


def test_what_is_presumed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Net.py").write_text(NETS)
    monkeypatch.setattr("sys.argv", ["modelexport", "export", "Net.py:net", "-o", "x.onnx"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    told = "model asks whether anything is selected (Net.py:12)"
    assert told in capsys.readouterr().err
    assert told in Path("x.report.md").read_text()


def early(x: torch.Tensor) -> torch.Tensor:
    return x if (x[:, :1] > 0).all() else x * 2


def while_any(x: torch.Tensor) -> torch.Tensor:
    while (x.abs() > 0.1).any():
        x = x / 2
    return x


def while_counted(x: torch.Tensor) -> torch.Tensor:
    while (x.abs() > 0.1).sum() > 0:
        x = x / 2
    return x


def until_none(x: torch.Tensor) -> torch.Tensor:
    while True:
        x = x / 2
        if not (x.abs() > 0.1).any():
            return x


def test_what_follows_if_all_are_selected_is_tried(tmp_path: Path) -> None:
    with pytest.raises((CaptureError, CheckError), match=r"decides otherwise|data-dependent"):
        export(Asks(early), torch.randn(4, 4), tmp_path / "x.onnx", frontend="dynamo")


def unless_any(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if (x > 100).any() else x


def test_the_error_names_the_question_that_the_example_answers_otherwise(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"asks whether anything is selected \(test_questions_of_values.py:\d+\)"):
        export(Asks(unless_any), torch.randn(2, 4), tmp_path / "x.onnx", frontend="dynamo")


@pytest.mark.parametrize(
    "forward", [while_any, *(pytest.param(one, marks=pytest.mark.slow) for one in (while_counted, until_none))]
)
def test_a_loop_that_ends_by_values_is_refused_with_its_line(forward: Forward, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"test_questions_of_values.py:\d+"):
        export(Asks(forward), torch.randn(2, 4), tmp_path / "x.onnx")


def test_both_answers_are_looked_for() -> None:
    x = torch.tensor([[0.5, -1.0], [-0.5, 1.0]])
    found = [other for _, other in with_other_answers(Asks(early), (x @ torch.ones(2, 4),))]
    assert len(found) == 1
