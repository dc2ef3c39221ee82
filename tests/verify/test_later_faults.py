"""Faults that computed values alone do not show, or only for inputs that nobody gave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from modelexport.verify.differences import compare_arrays
from torch import nn

from modelexport import export, verify
from modelexport.core.owners import Evidence
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.format import keys
from modelexport.format.node_tags import write_tags
from modelexport.verify.verdicts import VerifyReport


class Embedded(nn.Module):
    """Two outputs of one shape; the second input is in the range of the example only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4)
        self.kinds = nn.Embedding(3, 4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(ids) + self.kinds(kinds)
        y = self.first(x)
        return {"one": y, "two": self.second(y)}


INPUTS = {"ids": torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]), "kinds": torch.zeros(2, 8).long()}


def embedded() -> Embedded:
    torch.manual_seed(3)
    return Embedded().eval()


def verified(path: Path, plant: Callable[[ir.Model], None]) -> VerifyReport:
    """Export, plant a fault in the file, and verify."""
    export(embedded(), INPUTS, path, dynamic=path.stem == "dynamic")
    file = load_onnx(path)
    plant(file)
    return verify(embedded(), INPUTS, saved_alone(file, path))


def saved_alone(file: ir.Model, path: Path) -> Path:
    """Save a changed file beside the sound one, whose documents are not its own."""
    faulty = path.with_name("faulty.onnx")
    save_model(file, faulty)
    return faulty


def owner(node: ir.Node) -> str:
    return node.metadata_props["modelexport.call"]


def constant(node: ir.Node, index: int, array: np.ndarray) -> None:
    value = ir.Value(name=f"{node.name}.constant{index}", const_value=ir.tensor(array))
    value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)  # type: ignore[union-attr]
    assert node.graph is not None
    node.graph.initializers.add(value)  # type: ignore[union-attr]
    node.replace_input_with(index, value)


@pytest.mark.parametrize("name", ["ids", "kinds"])
def test_an_input_that_the_file_ignores(name: str, tmp_path: Path) -> None:
    def plant(file: ir.Model) -> None:
        value = next(value for value in file.graph.inputs if value.name == name)
        for node, index in list(value.uses()):
            constant(node, index, INPUTS[name].numpy())

    report = verified(tmp_path / "x.onnx", plant)
    assert report.verdict == "differ"
    assert any(one.status == "differ" for one in report.others)


def node_of(file: ir.Model, address: str, op_types: tuple[str, ...]) -> ir.Node:
    return next(n for n in file.graph if owner(n) == address and n.op_type in op_types)


@pytest.mark.parametrize("right_first", [True, False])
def test_an_owner_beside_the_right_one(right_first: bool, tmp_path: Path) -> None:
    def plant(file: ir.Model) -> None:
        node, other = node_of(file, "", ("Add",)), node_of(file, "second", ("MatMul", "Gemm", "Add"))
        calls = ["", "second"] if right_first else ["second", ""]
        tags = {owner(one): one.metadata_props["modelexport.source_module"] for one in (node, other)}
        node.metadata_props["modelexport.call"] = calls[0]
        node.metadata_props["modelexport.source_module"] = tags[calls[0]]
        node.metadata_props["namespace"] = "Embedded/Linear.second" if calls[0] else "Embedded"
        node.metadata_props["modelexport.calls"] = json.dumps(calls)
        node.metadata_props["modelexport.hierarchy_tags"] = json.dumps([tags[call] for call in calls])

    report = verified(tmp_path / "x.onnx", plant)
    assert report.verdict == "differ"
    assert report.diverging is not None
    assert report.diverging.address in ("", "second")
    assert "tags are wrong" in report.diverging.reason


def test_names_of_outputs_exchanged(tmp_path: Path) -> None:
    def plant(file: ir.Model) -> None:
        one, two = file.graph.outputs
        one.name, two.name = "between", "one"
        one.name = "two"

    report = verified(tmp_path / "x.onnx", plant)
    assert {claim.where for claim in report.claims} == {"one", "two"}


def test_a_size_that_an_output_does_not_have(tmp_path: Path) -> None:
    def plant(file: ir.Model) -> None:
        file.graph.outputs[0].shape = ir.Shape([2, 9, 4])

    report = verified(tmp_path / "x.onnx", plant)
    assert [(claim.where, claim.claimed, claim.found) for claim in report.claims] == [("one", "[2, 9, 4]", "[2, 8, 4]")]


def test_the_list_of_entries_leaves_one_out(tmp_path: Path) -> None:
    def plant(file: ir.Model) -> None:
        file.metadata_props["modelexport.state_dict"] = "{}"

    report = verified(tmp_path / "x.onnx", plant)
    assert report.verdict == "differ"
    assert any("second.weight" in claim.claimed for claim in report.claims)


def after(node: ir.Node, op_type: str, *inputs: ir.Value, **attributes: int) -> None:
    """Put an operation behind a node, with the same owner."""
    value = node.outputs[0]
    users, graph = list(value.uses()), node.graph
    attrs = [ir.AttrInt64(key, number) for key, number in attributes.items()]
    new = ir.Node(
        "", op_type, [value, *inputs], attrs, name=f"{node.name}.new", metadata_props=dict(node.metadata_props)
    )
    new.outputs[0].type, new.outputs[0].shape, new.outputs[0].name = value.type, value.shape, f"{value.name}.new"
    assert graph is not None
    graph.insert_after(node, new)
    for user, index in users:
        user.replace_input_with(index, new.outputs[0])


def test_a_file_that_is_wrong_for_one_row_only(tmp_path: Path) -> None:
    report = verified(tmp_path / "dynamic.onnx", lambda file: after(node_of(file, "", ("Add",)), "Squeeze"))
    assert [one.what for one in report.others if one.status == "differ"] == ["one row"]


def test_a_sound_file_is_run_with_one_row_of_small_sizes_only(tmp_path: Path) -> None:
    inputs = {name: ids.repeat(1, 8) for name, ids in INPUTS.items()}
    path = tmp_path / "dynamic.onnx"
    export(embedded(), inputs, path, dynamic=True)
    report = verify(embedded(), inputs, path)
    assert report.agrees
    assert [(one.what, one.outputs[0].shape) for one in report.others][1:] == [("one row of small sizes", [1, 9, 4])]


def test_a_table_as_long_as_the_example(tmp_path: Path) -> None:
    def plant(file: ir.Model) -> None:
        node = node_of(file, "", ("Add",))
        after(node, "Slice")
        cut = next(user for user, _ in node.outputs[0].uses())
        cut.resize_inputs(4)
        for index, numbers in ((1, [0]), (2, [8]), (3, [1])):
            constant(cut, index, np.array(numbers))

    report = verified(tmp_path / "dynamic.onnx", plant)
    assert report.verdict == "differ"


def test_one_element_of_many() -> None:
    right = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
    wrong = right.copy()
    wrong[17] += 1e-3
    found = compare_arrays("x", right, wrong)
    assert found.relative is not None
    assert found.relative < 2e-6  # its norm would hide it
    assert found.status == "differ"
    assert "a single one by" in found.reason
    noisy = right * (1 + 1e-7 * np.random.default_rng(1).standard_normal(right.size).astype(np.float32))
    assert compare_arrays("x", right, noisy).status == "agree"


def test_a_file_in_bfloat16_is_computed_in_float32(tmp_path: Path) -> None:
    model = embedded().to(torch.bfloat16)
    path = tmp_path / "x.onnx"
    export(model, INPUTS, path)
    report = verify(model, INPUTS, path)
    assert report.agrees
    assert {output.dtype for output in report.outputs} == {"bfloat16"}
    assert any("computed in float32" in note for note in report.notes)
    file = load_onnx(path)
    node = node_of(file, "first", ("MatMul", "Gemm"))
    node.inputs[1].const_value = ir.tensor(-node.inputs[1].const_value.numpy())  # type: ignore[union-attr]
    assert not verify(model, INPUTS, saved_alone(file, path)).agrees


def test_an_error_after_a_recurrence_is_of_the_recurrence(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True)
            self.gru = nn.GRU(3, 3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden, _ = self.lstm(x)
            result: torch.Tensor = self.gru(hidden)[0]
            return result

    torch.manual_seed(0)
    model, inputs, path = Two().eval(), {"x": torch.randn(2, 5, 4)}, tmp_path / "x.onnx"
    export(model, inputs, path)
    file = load_onnx(path)
    gru = next(n for n in file.graph if n.op_type == "GRU")
    given = gru.inputs[0]
    assert given is not None
    producer = given.producer()
    assert producer is not None
    assert owner(producer) == "lstm"
    after(producer, "Mul")
    times = next(user for user, _ in given.uses())
    times.resize_inputs(2)
    constant(times, 1, np.array(1.0005, np.float32))
    report = verify(model, inputs, saved_alone(file, path))
    assert report.diverging is not None
    assert report.diverging.address == "lstm"


def test_what_leads_to_a_recurrence_is_not_of_the_one_that_gets_its_result(tmp_path: Path) -> None:
    """The second of two layers gets what the first transposed, and transposes it back."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True, bidirectional=True)
            self.gru = nn.GRU(6, 3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.gru(self.lstm(x)[0])[0]
            return result

    torch.manual_seed(0)
    model, inputs, path = Two().eval(), {"x": torch.randn(2, 5, 4)}, tmp_path / "x.onnx"
    export(model, inputs, path)
    assert verify(model, inputs, path).agrees
    for index in range(2):
        file = load_onnx(path)
        node = [n for n in file.graph if n.op_type == "LSTM"][index]
        properties = node.metadata_props
        write_tags(properties, ["lstm", "gru"], [properties[keys.SOURCE_MODULE], "/Two/GRU"], Evidence.EXACT)
        report = verify(model, inputs, saved_alone(file, path))
        assert report.diverging is not None
        assert report.diverging.first_node == node.name


def test_a_count_of_a_mask_of_ones_is_of_the_call_that_uses_it(tmp_path: Path) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.first(x)) * mask.float().sum(-1, keepdim=True)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counted, self.after = Counted(), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.after(self.counted(x, mask))
            return result

    torch.manual_seed(0)
    model, path = Whole().eval(), tmp_path / "x.onnx"
    inputs = {"x": torch.randn(2, 6, 8), "mask": torch.ones(2, 6, 8, dtype=torch.long)}
    export(model, inputs, path)
    assert verify(model, inputs, path).agrees
    for owners in (["after"], ["counted", "after"]):
        file = load_onnx(path)
        node = next(node for node in file.graph if node.op_type == "ReduceSum")
        tags = {"counted": "/Whole/Counted", "after": "/Whole"}
        write_tags(node.metadata_props, owners, [tags[one] for one in owners], Evidence.EXACT)
        report = verify(model, inputs, saved_alone(file, path))
        assert report.diverging is not None
        assert report.diverging.first_node == node.name
