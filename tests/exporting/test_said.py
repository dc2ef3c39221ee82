"""What the check of an export sees, and what does not make the file wrong, is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commands import run
from modelexport import export, load
from modelexport.cli.show_export import format_export, print_warnings
from modelexport.core.collected_messages import collected
from modelexport.errors import LimitedFileWarning
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
    assert result.check is not None
    assert result.check.status == "passed"
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


def test_a_verified_file_that_onnx_runtime_has_no_kernels_for_is_said_not_to_run(tmp_path: Path) -> None:
    model = nn.Linear(4, 4).bfloat16()
    result = export(model, torch.randn(3, 4).bfloat16(), tmp_path / "x.onnx", frontend="torchscript", verify=True)
    assert "\n  this ONNX Runtime does not run the file; computed in float32" in format_export(result)


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


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if x.shape[0] > 3 else x + 1


def test_conditions_are_warnings_in_python_in_the_line_of_the_caller(tmp_path: Path) -> None:
    with pytest.warns(LimitedFileWarning, match=r"right only for x_axis_0 <= 3") as warned:
        result = export(Doubles(), (torch.rand(2, 4),), tmp_path / "x.onnx", dynamic=True)
    assert [str(one.message) for one in warned] == result.limits
    assert [one.filename for one in warned] == [__file__]


class Divided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / int(x.shape[0])


@pytest.mark.parametrize(
    ("frontend", "told"),
    [
        ("dynamo", r"a size that was to be dynamic is 2 in the file, because test_said.py:\d+"),
        ("torchscript", r"right only for x_axis_0 == 2 .*no other sizes were tried"),
    ],
)
def test_a_file_that_is_not_checked_says_what_is_not_known_of_its_sizes(
    frontend: Any, told: str, tmp_path: Path
) -> None:
    with pytest.warns(LimitedFileWarning, match=told):
        export(Divided(), (torch.rand(2, 4),), tmp_path / "x.onnx", dynamic=True, check=False, frontend=frontend)


def test_the_command_says_them_itself(tmp_path: Path) -> None:
    code = "import torch\nclass Doubles(torch.nn.Module):\n    def forward(self, x: torch.Tensor):\n"
    code += "        return 2 * x if x.shape[0] > 3 else x + 1\n"
    (tmp_path / "nets.py").write_text(code + "def make():\n    return Doubles(), (torch.rand(2, 4),)\n")
    said = run("export", f"{tmp_path}/nets.py:make", "-o", tmp_path / "x.onnx", "--dynamic")
    assert said.stderr.count("right only for") == 1


def test_inputs_that_transformers_computes_are_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.exporters.utils")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=16, max_position_embeddings=8, **sizes)).eval()

    def precompute(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
        inputs.setdefault("position_ids", torch.arange(4)[None])

    monkeypatch.setattr(utils, "precompute_export_inputs", precompute)
    ids = {"input_ids": torch.ones(2, 4, dtype=torch.int64)}
    with pytest.warns(LimitedFileWarning, match=r"position_ids computed .*precompute_export_inputs"):
        result = export(model, ids, tmp_path / "x.onnx", frontend="torchscript", check=False)
    assert list(result.added) == ["position_ids"]
    assert {one.name for one in result.session().get_inputs()} == {"input_ids", "position_ids"}


def test_a_package_that_no_model_needs_is_not_said_to_be_missing() -> None:
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    with collected() as messages:
        log.warning("torchvision is not installed. Skipping %s", "torchvision::nms")
        log.warning("something else")
    assert messages == ["something else"]
