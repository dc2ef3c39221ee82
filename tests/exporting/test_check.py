"""A file is written only if it is valid, loads and computes the model's outputs, unless it is kept anyway."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commands import run
from modelexport import ExportResult, export, verify
from modelexport.capture.repairs import attention
from modelexport.errors import CheckError
from modelexport.exporting.front_end_choice import first_that_passes
from modelexport.exporting.output_checks import check_outputs
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.pytorch.nested_tensors import Inputs
from modelexport.tagged.file import read_tagged
from modelexport.verify.model_and_file import ModelAndFile, ModelRuns


class Otherwise(nn.Module):
    """Computes something else when one of the front ends captures it."""

    def __init__(self, dynamo: bool = True, torchscript: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dynamo, self.torchscript = dynamo, torchscript

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        traced = torch.jit.is_tracing()
        wrong = (self.torchscript and traced) or (self.dynamo and torch.compiler.is_exporting() and not traced)
        return self.linear(x) + (1.0 if wrong else 0.0)


X = torch.ones(2, 4)


def test_a_right_file_passes(tmp_path: Path) -> None:
    result = export(nn.Linear(4, 4), (X,), tmp_path / "m.onnx")
    assert result.check is not None
    assert result.check.status == "passed"
    assert result.check.largest is not None
    assert result.check.largest < 1e-5
    assert not result.attempts
    assert not result.messages  # such as one of a translation that PyTorch does not understand


def test_a_node_that_was_given_to_another_call_is_told_and_fails_no_check(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    export(model, (X,), tmp_path / "m.onnx", frontend="dynamo")
    tagged = read_tagged(tmp_path / "m.onnx")
    first, last = (node for node in tagged.nodes if node.op_type == "Gemm")
    set_owner(first, owner_of(last))
    check = check_outputs(ModelAndFile.of(ModelRuns(model), (X,), tagged), (X,), tmp_path / "m.onnx")
    told = f"1 node may be of another call; the first is {first.name}, given to 2: "
    assert (check.status, check.reason[: len(told)]) == ("passed", told)


def test_a_wrong_file_makes_auto_take_the_next_front_end(tmp_path: Path) -> None:
    result = export(Otherwise(), (X,), tmp_path / "m.onnx")
    assert result.hierarchy.settings.frontend == "torchscript"
    assert [attempt.frontend for attempt in result.attempts] == ["dynamo"]
    assert "differs from PyTorch's output" in result.attempts[0].reason
    report = (tmp_path / "m.report.md").read_text()
    assert "differs from PyTorch's output" in report
    assert "Passed" in report


def test_where_no_file_is_right_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        CheckError, match=r"(?s)differs from PyTorch's output.*the front end torchscript failed for the same reason"
    ):
        export(Otherwise(torchscript=True), (X,), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("runs", "status"), [(True, 1), (False, 4)])
def test_the_status_tells_whether_the_files_of_all_front_ends_run(runs: bool, status: int) -> None:
    def export_by(frontend: str, *_: object) -> None:
        raise CheckError(f"the file of {frontend} is wrong", reason="wrong", runs=runs)

    with pytest.raises(CheckError, match="failed too") as raised:
        first_that_passes("auto", export_by)
    assert raised.value.exit_status == status


@pytest.mark.slow
def test_a_wrong_file_can_be_kept_anyway(tmp_path: Path) -> None:
    result = export(Otherwise(torchscript=True), (X,), tmp_path / "m.onnx", keep_anyway=True)
    assert result.check is not None
    assert result.check.status == "failed"
    assert (tmp_path / "m.onnx").exists()
    assert "**Failed**" in (tmp_path / "m.report.md").read_text()


class OtherwiseInDouble(Otherwise):
    """Returns something else in float64, too: as a model that there takes others of equal scores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = (x * 0 + 0.1).double() == 0.1
        return super().forward(x) + torch.where(exact, 50.0, 0.0).to(x.dtype)


def test_what_a_model_returns_in_float64_excuses_no_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="differs from PyTorch's output"):
        export(OtherwiseInDouble(torchscript=True), (X,), tmp_path / "m.onnx")


class AmongEqualScores(Otherwise):
    """Takes four of sixty-four equal scores: ONNX Runtime takes others than PyTorch, and so does rounding."""

    def __init__(self) -> None:
        super().__init__(torchscript=True)
        self.rows, self.scores = nn.Parameter(torch.randn(64, 4)), nn.Parameter(torch.full((64,), 30.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        likely = 0.7 * torch.sigmoid(self.scores + 0 * x.sum())
        chosen = likely.topk(4).indices
        return super().forward(x + self.rows[chosen][:2])


class OtherType(nn.Module):
    """Returns the right numbers in another type while it is captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = x.to(torch.int8)
        return narrow.int() if torch.jit.is_tracing() or torch.compiler.is_exporting() else narrow


def test_right_numbers_of_another_type_are_not_rounding(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"expected int8\[2, 4\], got int32\[2, 4\]"):
        export(OtherType(), (X,), tmp_path / "m.onnx")


@pytest.mark.slow
def test_a_choice_among_equal_scores_excuses_no_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="differs from PyTorch's output"):
        export(AmongEqualScores(), (X,), tmp_path / "m.onnx")


def test_without_a_check_the_first_file_is_taken(tmp_path: Path) -> None:
    result = export(Otherwise(), (X,), tmp_path / "m.onnx", check=False)
    assert result.hierarchy.settings.frontend == "dynamo"
    assert result.check is None


@pytest.mark.slow
def test_without_a_check_the_runtime_is_not_loaded(tmp_path: Path) -> None:
    code = f"""
import sys, torch, modelexport
modelexport.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),), {str(tmp_path / "m.onnx")!r}, check=False)
assert "onnxruntime" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_verify_computes_a_file_that_this_runtime_has_no_kernels_for(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU()).double()  # ONNX Runtime has no Erf in float64
    result = export(model, (X.double(),), tmp_path / "m.onnx", verify=True)
    assert result.check is not None
    assert result.check.status == "skipped"
    assert result.verified is not None
    assert result.verified.agrees
    assert "computed as the standard says" in " ".join(result.verified.notes)


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def test_a_model_that_computes_with_random_numbers_is_not_called_wrong(tmp_path: Path) -> None:
    result = export(Noise(), (X,), tmp_path / "m.onnx")
    assert result.check is not None
    assert (result.check.status, result.check.step) == ("skipped", "outputs")


class SameNoise(nn.Module):
    """Seeds its own generator, so that every run adds the same numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(4, generator=torch.Generator().manual_seed(3))


def test_a_file_that_draws_numbers_that_are_the_same_in_every_run_of_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="PyTorch has the same in every run: make them a buffer"):
        export(SameNoise(), (X,), tmp_path / "m.onnx", frontend="dynamo")


class UnusedNoise(nn.Module):
    """Draws numbers that no output depends on, and chooses among equal scores."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.topk(2).indices, x + (torch.rand(4) * 0).sum()


def test_random_numbers_that_change_no_output_refuse_no_tie(tmp_path: Path) -> None:
    result = export(UnusedNoise(), (torch.ones(2, 4),), tmp_path / "m.onnx", frontend="dynamo")
    assert result.check is not None
    assert (result.check.status, result.check.reason) == ("passed", "equal scores were chosen in another order")


class LogarithmOfAll(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


def test_nan_in_an_output_is_told_where_the_file_agrees(tmp_path: Path) -> None:
    result = export(LogarithmOfAll(), (torch.tensor([1.0, -1.0, 2.0]),), tmp_path / "m.onnx", frontend="dynamo")
    assert result.check is not None
    told = "1 of 3 elements of output are NaN in PyTorch and in the file"
    assert result.check.reason.startswith(told)
    report = verify(LogarithmOfAll(), (torch.tensor([1.0, -1.0, 2.0]),), tmp_path / "m.onnx")
    assert [note.partition(";")[0] for note in report.notes] == [told]


def test_an_output_of_nan_alone_is_not_compared_and_is_told(tmp_path: Path) -> None:
    (tmp_path / "nan.py").write_text(
        "import torch\n"
        "class Logarithm(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.log()\n"
        "def make():\n"
        "    return Logarithm(), {'x': -torch.ones(2)}\n"
    )
    done = run("export", "nan.py:make", "-o", "nan.onnx", cwd=tmp_path)
    assert "check: the file loads and runs; no output was compared" in done.stdout
    assert "2 of 2 elements of output are NaN in PyTorch and in the file; `modelexport values` names" in done.stderr


def test_the_command_ends_with_1_and_one_line(tmp_path: Path) -> None:
    factory = tmp_path / "wrong.py"
    factory.write_text(
        "import torch\n"
        "class Wrong(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * 2 if torch.compiler.is_exporting() else x\n"
        "def make():\n"
        "    return Wrong(), {'x': torch.ones(2)}\n"
    )
    output = tmp_path / "m.onnx"
    command = ["export", f"{factory}:make", "-o", output, "--frontend", "dynamo"]
    refused = run(*command)
    assert refused.returncode == 1
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "differs from PyTorch's output" in refused.stderr
    assert not output.exists()
    kept = run(*command, "--keep-anyway")
    assert kept.returncode == 1
    assert output.exists()


def test_a_result_that_is_rounding_alone_is_not_called_wrong(tmp_path: Path) -> None:
    """The sum of normalized numbers, with a fresh normalization."""
    normalized = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    normalized.register_forward_hook(lambda module, given, output: output.sum(-1))
    result = export(normalized, (torch.randn(2, 8),), tmp_path / "m.onnx")
    assert result.check is not None
    assert result.check.status == "passed"


class Attends(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_query_without_keys_is_checked_although_the_example_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = torch.linspace(-2, 3, 32).sin().reshape(1, 2, 4, 4), torch.ones(4, 4).tril().bool()
    export(Attends(), inputs, tmp_path / "m.onnx", frontend="dynamo")
    monkeypatch.setattr(attention, "with_empty_rows", lambda *args, **kwargs: NotImplemented)
    with pytest.raises(CheckError, match="a whole row of each: the file is off by"):
        export(Attends(), inputs, tmp_path / "m.onnx", frontend="dynamo")


class AddsMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = (1 - mask[:, None, :]) * torch.finfo(x.dtype).min
        scores = self.linear(x) @ x.transpose(1, 2) + hidden
        return scores.softmax(-1) @ x


@pytest.fixture(scope="module")
def masked_in_half(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Inputs, Path, ExportResult]:
    """A model that hides keys with the smallest number of its type, which is another one in float64."""
    torch.manual_seed(0)
    model = AddsMask().half().eval()
    inputs = {"x": torch.randn(2, 4, 8).half(), "mask": torch.ones(2, 4).half()}
    path = tmp_path_factory.mktemp("half") / "m.onnx"
    return model, inputs, path, export(model, inputs, path)


def test_the_mask_of_a_model_in_half_precision_is_that_of_its_file_in_float64(masked_in_half: Any) -> None:
    assert masked_in_half[3].check.status == "passed"


def test_verify_compares_with_the_mask_of_the_file(masked_in_half: Any) -> None:
    model, inputs, path, _ = masked_in_half
    assert verify(model, inputs, path).verdict == "agree"


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, None, :])


def test_a_mask_that_the_file_keeps_is_not_tried_with_other_values(tmp_path: Path) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]).bool()
    inputs = {"x": torch.randn(2, 1, 5, 4), "mask": mask}
    result = export(Masked().eval(), inputs, tmp_path / "x.onnx", constants=["mask"])
    assert result.check is not None
    assert result.check.status == "passed"


def test_what_the_runtime_computes_wrongly_when_it_optimizes_is_not_rounding(tmp_path: Path) -> None:
    class Reverses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[torch.arange(x.shape[0] - 1, -1, -1)]  # Gather of a Range, which ONNX Runtime makes a Slice

    with pytest.raises(CheckError, match=r"the file was not written.* ONNX Runtime's optimizer \w+ makes"):
        export(Reverses(), (torch.rand(8),), tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    assert export(Reverses(), (torch.rand(8),), tmp_path / "x.onnx", dynamic=True).check.status == "passed"  # type: ignore[union-attr]


def test_reference_values_are_those_of_the_run_of_the_check(tmp_path: Path) -> None:
    types: list[torch.dtype] = []

    class Tells(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            types.append(x.dtype)
            return super().forward(x)

    def runs_in_float64(**options: bool) -> int:
        types.clear()
        export(Tells(4, 4), (X,), tmp_path / "m.onnx", **options)  # type: ignore[arg-type]
        return types.count(torch.float64)

    assert runs_in_float64(reference=True) == runs_in_float64()
