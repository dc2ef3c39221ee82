"""Faults that the example hides are found on other inputs, and inputs that a model refuses accuse nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.verify.verify_report import VerifyReport


class Text(nn.Module):
    """Embeds ids, one of them as padding, and averages the rows that a mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(12, 8, padding_idx=0), nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        kept = attention_mask[..., None].float()
        hidden = self.linear(self.words(input_ids).reshape(input_ids.shape[0], -1, 8))
        return (hidden * kept).sum(1) / kept.sum(1)


INPUTS = {"input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), "attention_mask": torch.ones(2, 4, dtype=torch.long)}


def constant(node: ir.Node, index: int, array: Any) -> None:
    assert isinstance(node.graph, ir.Graph)
    tensor = ir.tensor(array, name="planted")
    value = ir.Value(name="planted", const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    node.graph.initializers.add(value)
    node.replace_input_with(index, value)


def text() -> nn.Module:
    torch.manual_seed(1)
    return Text().eval()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.onnx"
    result = export(text(), INPUTS, path, check=False, verify=True)
    assert result.verified is not None
    assert result.verified.agrees
    return path


def verified(path: Path, folder: Path, plant: Callable[[ir.Model], None]) -> VerifyReport:
    model, file = text(), load_onnx(path)
    plant(file)
    save_model(file, folder / "faulty.onnx")
    report = verify(model, INPUTS, folder / "faulty.onnx")
    assert all(one.status == "agree" for one in report.outputs)
    return report


def test_a_mask_that_is_ignored(sound: Path, tmp_path: Path) -> None:
    def plant(file: ir.Model) -> None:
        mask = next(value for value in file.graph.inputs if value.name == "attention_mask")
        for node, index in list(mask.uses()):
            constant(node, index, INPUTS["attention_mask"].numpy())

    report = verified(sound, tmp_path, plant)
    assert [one.status for one in report.others if "mask" in one.what] == ["differ"]
    assert report.verdict == "differ"


def test_a_table_with_other_rows_for_ids_that_the_example_does_not_have(sound: Path, tmp_path: Path) -> None:
    def plant(file: ir.Model) -> None:
        node = next(node for node in file.graph if node.op_type == "Gather")
        table = node.inputs[0]
        assert table is not None
        assert table.const_value is not None
        rows = np.array(table.const_value.numpy())
        rows[0] = 1
        constant(node, 0, rows)

    report = verified(sound, tmp_path, plant)
    assert report.verdict == "differ"
    assert any(one.status == "differ" for one in report.others)


def test_a_size_of_the_example_in_a_reshape(tmp_path: Path) -> None:
    def plant(file: ir.Model) -> None:
        node = next(node for node in file.graph if node.op_type == "Reshape")
        constant(node, 1, np.array([2, 4, 8]))

    export(text(), INPUTS, tmp_path / "sound.onnx", check=False, dynamic=True)
    assert verify(text(), INPUTS, tmp_path / "sound.onnx").agrees
    report = verified(tmp_path / "sound.onnx", tmp_path, plant)
    assert report.verdict == "differ"
    assert any(one.status == "differ" and "size" in one.what for one in report.others)
    assert report.diverging is not None


class FewIds(nn.Module):
    """Has an embedding of all ids, and one of half of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.halves = nn.Embedding(12, 4), nn.Embedding(6, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.words(input_ids) + self.halves(input_ids)


def test_inputs_that_the_model_refuses_accuse_nobody(tmp_path: Path) -> None:
    model, inputs = FewIds().eval(), {"input_ids": torch.tensor([[1, 2, 3]])}
    export(model, inputs, tmp_path / "x.onnx", check=False)
    report = verify(model, inputs, tmp_path / "x.onnx")
    assert report.agrees
    assert "differ" not in {one.status for one in report.others}


def test_they_can_be_left_out(sound: Path) -> None:
    assert verify(text(), INPUTS, sound, others=False).others == []


class Attends(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(4, 4).tril().bool(),
        pytest.param(torch.zeros(4, 4), marks=pytest.mark.slow),
        torch.zeros(4, 4).masked_fill(torch.eye(4) > 0, -1e9),
    ],
)
def test_queries_without_keys(mask: torch.Tensor, tmp_path: Path) -> None:
    """A query to which the mask leaves no key has zeros, or an average, in PyTorch."""
    model, inputs = Attends().eval(), (torch.linspace(-2, 3, 32).sin().reshape(1, 2, 4, 4), mask)
    export(model, inputs, tmp_path / "sound.onnx", frontend="dynamo", check=False)
    assert [one.status for one in verify(model, inputs, tmp_path / "sound.onnx").others if "row" in one.what] == [
        "agree"
    ]
    file = load_onnx(tmp_path / "sound.onnx")
    last = file.graph.outputs[0].producer()
    assert last is not None
    assert last.op_type == "Where"  # selects zero in these rows
    constant(last, 0, np.array(False))
    save_model(file, tmp_path / "faulty.onnx")
    report = verify(model, inputs, tmp_path / "faulty.onnx")
    wanted = "agree" if mask.min() == -1e9 else "differ"
    assert [one.status for one in report.others if "row" in one.what] == [wanted]


class LogOfSum(nn.Module):
    """Adds numbers by their logarithms; a file has the exponentials."""

    def __init__(self, naive: bool) -> None:
        super().__init__()
        self.naive = naive

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x).sum(-1).log() if self.naive else x.logsumexp(-1)


class Searches(nn.Module):
    def forward(self, limits: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.searchsorted(limits, x), torch.bucketize(x, limits[0])


def test_rows_that_are_sorted_stay_so(tmp_path: Path) -> None:
    """PyTorch does not define what it finds in other rows."""
    model, inputs = Searches().eval(), {"limits": torch.rand(2, 5).sort()[0], "x": torch.rand(2, 6)}
    result = export(model, inputs, tmp_path / "x.onnx", dynamic=True, verify=True)
    assert not result.fixed
    assert result.verified is not None
    assert {other.status for other in result.verified.others} == {"agree"}


def test_no_rows_are_inputs_too(tmp_path: Path) -> None:
    result = export(
        nn.Linear(4, 3).eval(), (torch.rand(0, 4),), tmp_path / "x.onnx", dynamic=True, verify=True, check=False
    )
    assert result.session().run(None, {"input": np.ones((2, 4), np.float32)})[0].shape == (2, 3)


def test_formulas_that_overflow(tmp_path: Path) -> None:
    x = (torch.linspace(-2, 3, 12).sin().reshape(3, 4),)
    export(LogOfSum(naive=True), x, tmp_path / "x.onnx", frontend="dynamo", check=False)
    assert verify(LogOfSum(naive=True), x, tmp_path / "x.onnx").agrees  # in PyTorch as well
    report = verify(LogOfSum(naive=False), x, tmp_path / "x.onnx")
    assert [one.what for one in report.others if one.status == "differ"] == ["numbers a thousand times as large"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_integers_of_few_bits_become_larger_as_far_as_their_type_goes(dtype: torch.dtype, tmp_path: Path) -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float() / 2

    inputs = (torch.tensor([1, 40, 90], dtype=dtype),)
    result = export(Halves(), inputs, tmp_path / "x.onnx", frontend="dynamo", verify=True)
    assert result.verified is not None
    assert [other.status for other in result.verified.others if other.what == "larger integers"] == ["agree"]
