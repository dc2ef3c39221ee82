"""Owners and values that only the boundaries of calls tell to be wrong, and single rows that are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.core.owners import Evidence
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.format import keys
from modelexport.format.node_tags import write_tags
from modelexport.tagged.file import read_tagged
from modelexport.verify.differences import compare_arrays
from modelexport.verify.verdicts import VerifyReport


class Sliced(nn.Module):
    """A part taken between two modules, and a single number at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.second(self.first(x)[:, 1:])).sum()


class Recurrent(nn.Module):
    """Of two recurrences neither returns a value of the file: the transposes between them undo each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(4, 3, batch_first=True), nn.GRU(3, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x)[0])[0]
        return result


def last(file: ir.Model, *op_types: str) -> ir.Node:
    return [node for node in file.graph if node.op_type in op_types][-1]


def with_owners(build: type[nn.Module], x: torch.Tensor, path: Path, op_type: str, owners: list[str]) -> VerifyReport:
    """The report on a file in which the last node of a type has other owners; the sound one agrees."""
    torch.manual_seed(0)
    model, inputs = build().eval(), {"x": x}
    export(model, inputs, path)
    assert verify(model, inputs, path).agrees
    file = load_onnx(path)
    tags = {node.metadata_props[keys.CALL]: node.metadata_props[keys.SOURCE_MODULE] for node in file.graph}
    write_tags(
        last(file, op_type).metadata_props,
        owners,
        [tags.get(one, f"/{build.__name__}") for one in owners],
        Evidence.EXACT,
    )
    last(file, op_type).metadata_props.pop(keys.LAYER_ANNOTATION)
    last(file, op_type).metadata_props.pop(keys.NAMESPACE)
    faulty = path.with_name("faulty.onnx")
    save_model(file, faulty)
    return verify(model, inputs, faulty)


def misplaced(report: VerifyReport) -> set[str]:
    """The calls of which the report says that their tags are wrong."""
    return {call.address for call in report.calls if call.status == "differ" and "the tags are wrong" in call.reason}


@pytest.mark.parametrize("owners", [["second"], ["second", ""]], ids=["alone", "before another"])
def test_what_makes_a_calls_input_is_not_in_it(owners: list[str], tmp_path: Path) -> None:
    report = with_owners(Sliced, torch.randn(2, 6, 8), tmp_path / "x.onnx", "Slice", owners)
    assert "second" in misplaced(report)


@pytest.mark.parametrize("owners", [["first"], ["", "first"]], ids=["alone", "behind another"])
def test_a_single_number_is_not_of_a_call_that_returns_nothing_computed_from_it(
    owners: list[str], tmp_path: Path
) -> None:
    report = with_owners(Sliced, torch.randn(2, 6, 8), tmp_path / "x.onnx", "ReduceSum", owners)
    assert "first" in misplaced(report)


def test_what_takes_a_later_calls_values_is_not_of_the_earlier_one(tmp_path: Path) -> None:
    report = with_owners(Recurrent, torch.randn(2, 5, 4), tmp_path / "x.onnx", "Transpose", ["second", "first"])
    assert "first" in misplaced(report)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean(-1, keepdim=True).flatten(1)


def test_a_value_that_the_sidecar_names_has_the_shape_of_the_tensor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs, path = Pooled().eval(), {"x": torch.randn(2, 6, 8)}, tmp_path / "x.onnx"
    export(model, inputs, path)
    assert verify(model, inputs, path).agrees
    sidecar = read_tagged(path).hierarchy
    assert sidecar is not None
    root = sidecar.calls[0]
    (output,) = root.outputs
    (other,) = [node.outputs[0].name for node in load_onnx(path).graph if node.op_type == "ReduceMean"]
    assert other != output.value
    wrong = msgspec.structs.replace(root, outputs=[msgspec.structs.replace(output, value=other)])
    changed = msgspec.structs.replace(sidecar, calls=[wrong, *sidecar.calls[1:]])
    (claim,) = verify(model, inputs, path, sidecar=changed).claims
    assert (claim.where, claim.claimed, claim.found) == (f"., {output.name}", other, output.value)


def test_one_row_of_many() -> None:
    right = np.random.default_rng(0).standard_normal((100, 64)).astype(np.float32)
    wrong = right.copy()
    wrong[7] *= np.float32(1 + 1e-5)
    assert compare_arrays("x", right, wrong).status == "agree"  # neither its norm nor an element shows it
    found = compare_arrays("x", right, wrong, by_row=True)
    assert found.status == "differ"
    assert "a row by 1.0e-05" in found.reason
    assert compare_arrays("x", right, wrong, exact=wrong.astype(np.float64), by_row=True).status == "agree"  # rounding
    assert compare_arrays("x", right, right * np.float32(1 + 1e-6), by_row=True).status == "agree"  # all rows alike


def test_a_row_that_is_wrong_is_found_in_its_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    inputs, path = {"input": torch.randn(40, 16)}, tmp_path / "x.onnx"
    export(model, inputs, path)
    file = load_onnx(path)
    node, factor = next(node for node in file.graph if node.op_type == "Gemm"), np.ones((40, 1), np.float32)
    factor[7] += 1e-5
    value = node.outputs[0]
    users = list(value.uses())
    constant = ir.Value(name="factor", const_value=ir.tensor(factor), type=value.type, shape=ir.Shape(factor.shape))
    file.graph.initializers.add(constant)
    times = ir.Node("", "Mul", [value, constant], name="times", metadata_props=dict(node.metadata_props))
    times.outputs[0].name, times.outputs[0].type, times.outputs[0].shape = "times", value.type, value.shape
    file.graph.insert_after(node, times)
    for user, index in users:
        user.replace_input_with(index, times.outputs[0])
    faulty = tmp_path / "faulty.onnx"
    save_model(file, faulty)
    report = verify(model, inputs, faulty)
    assert report.diverging is not None
    assert report.diverging.address == "0"
    assert "a row by" in report.diverging.reason


def test_a_fault_that_changed_weights_hide_is_found_in_its_call(tmp_path: Path) -> None:
    """Fresh norms are all ones, so that weights are changed in memory; with larger ones an epsilon has no effect."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 16), nn.LayerNorm(16), nn.Linear(16, 16)).eval()
    embedding = model[0]
    assert isinstance(embedding, nn.Embedding)
    embedding.weight.data *= 0.02
    inputs, path = {"input": torch.randint(12, (2, 8))}, tmp_path / "x.onnx"
    export(model, inputs, path)
    file = load_onnx(path)
    last(file, "LayerNormalization").attributes["epsilon"] = ir.AttrFloat32("epsilon", 9.9e-6)
    faulty = tmp_path / "faulty.onnx"
    save_model(file, faulty)
    report = verify(model, inputs, faulty)
    assert report.perturbed
    assert report.diverging is not None
    assert report.diverging.address == "1"
