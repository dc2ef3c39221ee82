"""``verify A --against B``: the loss of each call, and which calls are listed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import commands
from exports import Shared
from graph_texts import with_formula, written
from modelexport import export, extract, verify_against
from modelexport.errors import UsageError
from modelexport.tools.compare.loss_text import format_losses
from modelexport.tools.figures.report_page import write_report_page
from modelexport.tools.optimizers.optimize_tools import optimize_file
from modelexport.verify.verify_report import VerifyReport

SCALED = """g (float[2,2] x) => (float[2,2] y) <float[2] w = {1, 1}, float[2] s = {1, %s}>
    { ["/a/Mul"] h = Mul(x, w) ["/b/Mul"] i = Mul(h, s) ["/b/Mul_1"] y = Mul(i, s) }"""


def test_an_output_with_one_infinite_element_is_within_no_bound(tmp_path: Path) -> None:
    right, wrong = (written(tmp_path / f"{factor}.onnx", SCALED % factor) for factor in ("1", "1e38"))
    report = verify_against(right, wrong, bound=0.05)
    assert (report.verdict, report.outputs[0].norm, report.first_beyond) == ("differ", None, "b")


@pytest.mark.parametrize("last", ['["/a/Relu"] y = Relu(h)', '["/a/b/Relu"] y = Relu(h)'])
def test_files_whose_outputs_have_no_elements_are_not_compared(tmp_path: Path, last: str) -> None:
    """Of the second call, what it returns is computed in a call inside it."""
    text = f'g (float[0,2] x) => (float[0,2] y) <float s = {{%s}}> {{ ["/a/Mul"] h = Mul(x, s) {last} }}'
    files = (written(tmp_path / f"{factor}.onnx", text % factor) for factor in ("1", "2"))
    assert verify_against(*files).verdict == "not compared"


@pytest.mark.parametrize("option", ["--seed=0", "--device=cpu", "--provider=CPUExecutionProvider"])
def test_an_option_of_runs_runs_both_files_even_if_it_is_given_its_default(tmp_path: Path, option: str) -> None:
    files = (written(tmp_path / f"{factor}.onnx", SCALED % factor) for factor in ("1", "2"))
    assert "differ: y is off by" in commands.run("compare", *files, option).stdout


@pytest.mark.parametrize("how", [(), ("--numbers",)])
def test_files_that_are_the_same_bytes_are_said_to_be(tmp_path: Path, how: tuple[str, ...]) -> None:
    files = (written(tmp_path / f"{name}.onnx", SCALED % 1) for name in "ab")
    assert "\nthe files are the same bytes\n" in f"\n{commands.run('compare', *files, *how).stdout}"


def test_modules_in_the_order_of_their_losses_are_not_indented_as_a_tree(tmp_path: Path) -> None:
    files = (written(tmp_path / f"{n}.onnx", (SCALED % n).replace("/b/Mul_1", "/b/c/Mul_1")) for n in (1, 2))
    rows = commands.run("compare", *files, "--numbers").stdout.partition("\nOWN")[0].splitlines()
    assert [row[:4] for row in rows if not row.startswith("MODULE")] == ["b   ", "c   "]


@pytest.mark.parametrize(("factor", "status"), [("1", "agree"), ("2", "differ")])
def test_a_call_has_the_loss_of_its_own_output_behind_one_that_is_a_sequence(
    tmp_path: Path, factor: str, status: str
) -> None:
    text = """g (float[2,2] x) => (seq(float[2,2]) z, float[2,2] y) <float s = {%s}>
        { ["/a/SequenceConstruct"] z = SequenceConstruct(x, x, x) ["/b/Mul"] y = Mul(x, s) }"""
    first, second = (written(tmp_path / f"{name}.onnx", text % name) for name in ("1", factor))
    assert verify_against(first, second)["b"].status == status


def test_every_run_of_data_is_compared_and_a_sequence_may_have_another_length_in_each(tmp_path: Path) -> None:
    text = """g (float[N] x) => (seq(float[N]) z, float[N] y) <float s = {%s}>
        { ["/a/SplitToSequence"] z = SplitToSequence(x) ["/b/Mul"] y = Mul(x, s) }"""
    files = [written(tmp_path / f"{factor}.onnx", text % factor) for factor in ("1", "2")]
    (tmp_path / "data.jsonl").write_text('{"x": [0]}\n{"x": [1, 2, 3]}\n')
    cut = tmp_path / "cut.onnx"
    for file, agrees in zip(files, (True, False), strict=True):
        extract(file, "b", cut)
        for second in (file, cut):  # the first run tells nothing
            report = verify_against(files[0], second, data=tmp_path / "data.jsonl")
            assert report.agrees == agrees
            assert report.inputs.startswith("2 runs")


BRANCHES = """g (float[2,2] x, bool c) => (float[2,2] y) <float[2] w = {1, 1}, float[2] v = {%s, %s}>
    { ["/a/If"] y = If (c) <then_branch = t () => (float[2,2] p) { ["/a/Mul"] p = Mul(x, w) },
                            else_branch = e () => (float[2,2] q) { ["/a/Mul_1"] q = Mul(x, v) }> }"""


def test_a_fault_in_one_branch_is_not_halved_by_the_other(tmp_path: Path) -> None:
    right, wrong = (written(tmp_path / f"{v}.onnx", BRANCHES % (v, v)) for v in ("1", "1.08"))
    report = verify_against(right, wrong, bound=0.05)
    assert report.verdict == "differ"
    assert report.outputs[0].norm == pytest.approx(0.08, rel=1e-3)
    assert report.first_beyond == "a"
    assert verify_against(right, wrong)["a"].status == "differ"


def test_inputs_have_the_sizes_that_either_file_fixes(tmp_path: Path) -> None:
    text = 'g (float[%s, 2] x) => (float[%s, 2] y) { ["/a/Abs"] y = Abs(x) }'
    sizes = {"any": "N", "even": "E", "six": "6", "five": "5"}
    files = {name: written(tmp_path / f"{name}.onnx", text % (size, size)) for name, size in sizes.items()}
    with_formula(files["even"], "E", "2*N")
    for first, second in (("any", "six"), ("six", "any"), ("even", "six"), ("any", "even")):
        assert verify_against(files[first], files[second]).agrees
    with pytest.raises(UsageError, match=r"axis 0 of x is 2\*N in .*even\.onnx and 5 in .*five\.onnx: export one"):
        verify_against(files["even"], files["five"])


def test_a_file_without_the_calls_says_that_none_was_compared(tmp_path: Path) -> None:
    right, other = (written(tmp_path / f"{name}.onnx", SCALED % "1") for name in ("right", "other"))
    report = verify_against(right, other)
    assert "calls compute the same" in format_losses(report)
    lost = replace(report, calls=[replace(call, status="no nodes") for call in report.calls])
    assert "agree: " in (text := format_losses(lost))
    assert "no call was compared: no node of the second file" in text


@pytest.mark.parametrize("bound", [float("nan"), -1, float("inf")])
def test_what_is_not_a_bound_is_refused(tmp_path: Path, bound: float) -> None:
    file = written(tmp_path / "file.onnx", SCALED % "1")
    with pytest.raises(UsageError, match="is not a bound: give a share"):
        verify_against(file, file, bound=bound)


class Flat(nn.Module):
    """The first call computes the number of rows for all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0] * x.shape[1]
        return (x.reshape(rows, 8) @ self.weight).reshape(x.shape)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(Flat()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def files(shared: Shared) -> Path:
    """`whole.onnx` and its copy `half.onnx` in float16."""

    def make(folder: Path) -> None:
        export(Model(), {"x": torch.randn(2, 3, 8)}, folder / "whole.onnx", dynamic=True, check=False)
        optimize_file(folder / "whole.onnx", "float16", folder / "half.onnx")

    return shared("losses", make)


@pytest.mark.parametrize("name", ["whole", "half"])
def test_only_the_call_with_a_wrong_weight_is_blamed(files: Path, tmp_path: Path, name: str) -> None:
    model = onnx.load(files / f"{name}.onnx")
    (weight,) = (each for each in model.graph.initializer if each.name == "blocks.1.0.weight")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * np.float16(1.25), weight.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    (tmp_path / "wrong.hierarchy.json").write_bytes((files / f"{name}.hierarchy.json").read_bytes())
    report = verify_against(files / "whole.onnx", tmp_path / "wrong.onnx")
    assert [call.address for call in report.listed] == [report.first_beyond] == ["blocks.1.0"]
    loss = report["blocks.1.0"].per_module
    assert loss is not None
    assert loss.norm == pytest.approx(0.25, rel=0.01)
    assert "6 of 7 calls compute the same" in format_losses(report)


def test_half_precision_agrees_and_a_bound_lists_each_call_beyond_it(files: Path) -> None:
    whole, half = files / "whole.onnx", files / "half.onnx"
    report = verify_against(whole, half)
    assert report.agrees, report
    assert not report.listed, report
    error = report.outputs[0].norm
    assert error is not None
    assert 1e-5 < error < 1e-2
    strict = verify_against(whole, half, bound=1e-5)
    assert (strict.verdict, strict.first_beyond) == ("differ", "blocks.0.0")
    assert {call.address for call in strict.listed} == {f"blocks.{index}.0" for index in range(3)}
    assert max(loss.norm or 0 for call in strict.listed if (loss := call.per_module)) < error, (
        "of one product, not three"
    )
    loose = verify_against(whole, half, bound=1e-2)
    assert loose.agrees, loose
    assert not loose.listed, loose


@pytest.mark.parametrize(("bound", "verdict"), [(1e-5, "differ"), (1e-2, "agree")])
def test_the_page_of_two_files_has_the_verdict_of_the_recipes_bound(
    files: Path, tmp_path: Path, bound: float, verdict: str
) -> None:
    half = Path(shutil.copy(files / "half.onnx", tmp_path))
    half.with_suffix(".recipe.yaml").write_text(f"rules: []\nerror_bound: {bound:f}")
    assert verify_against(files / "whole.onnx", half).verdict == verdict
    write_report_page(files / "whole.onnx", tmp_path / "page.html", against=half)
    page = (tmp_path / "page.html").read_text()
    assert f"Against another file: {verdict}s" in page
    assert re.search(rf'\["[^"]*output[^"]*", ?"{verdict}, off by 0\.\d+ % of its norm', page)
    nothing = VerifyReport(outputs=[], calls=[], provider="CPUExecutionProvider", parameters=None)
    write_report_page(half, tmp_path / "half.html", verified={"": nothing})
    assert "Verification: not compared" in (tmp_path / "half.html").read_text()
