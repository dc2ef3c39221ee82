"""Faults that a check could take for something harmless: a tie, another layout, a size, a branch that was not taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from modelexport.verify.outputs import run_module
from torch import nn

from modelexport import export, load, verify
from modelexport.pytorch.perturbation import indistinct
from modelexport.pytorch.variations import all_at_once, telling_inputs


class Best(nn.Module):
    """Returns integers only."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x).argmax(-1)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        return self.outer(self.inner(x).reshape(batch, length * 2, 4))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taken, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, self.taken, self.other, (x,))
        return result


def test_integers_from_wrong_scores_are_not_ties(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Best().eval(), {"x": torch.randn(2, 5, 8)}
    export(model, inputs, tmp_path / "best.onnx")
    file = load(tmp_path / "best.onnx").model
    product = next(node for node in file.graph if node.op_type == "MatMul")
    negated = ir.Node("", "Neg", [product.outputs[0]], metadata_props=dict(product.metadata_props), name="negated")
    uses = list(product.outputs[0].uses())
    file.graph.insert_after(product, negated)
    for user, index in uses:
        if user is not negated:
            user.replace_input_with(index, negated.outputs[0])
    negated.outputs[0].name, negated.outputs[0].type = "negated", product.outputs[0].type
    negated.outputs[0].shape = product.outputs[0].shape
    ir.save(file, tmp_path / "wrong.onnx")
    report = verify(model, inputs, tmp_path / "wrong.onnx")
    assert report.diverging is not None
    assert report.diverging.address == "scores"
    assert [one.status for one in report.outputs] == ["differ"]


def test_a_size_that_a_file_keeps_is_found_in_its_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Heads().eval(), {"x": torch.randn(3, 5, 8)}
    export(model, inputs, tmp_path / "heads.onnx", dynamic=True)
    assert verify(model, inputs, tmp_path / "heads.onnx").agrees
    file = load(tmp_path / "heads.onnx").model
    reshape = next(
        node for node in file.graph if node.op_type == "Reshape" and node.inputs[0].dtype is ir.DataType.FLOAT
    )
    fixed = ir.Value(name="fixed", const_value=ir.tensor(np.array([3, 10, 4])))
    fixed.type, fixed.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([3])
    file.graph.initializers.add(fixed)
    reshape.replace_input_with(1, fixed)
    ir.save(file, tmp_path / "wrong.onnx")
    report = verify(model, inputs, tmp_path / "wrong.onnx")
    assert {one.what: one.status for one in report.others} == {
        "other numbers": "agree",
        "larger and smaller numbers": "agree",
        "other sizes": "differ",
        "one row": "differ",
    }
    assert report.diverging is not None
    assert report.diverging.address == ""
    assert report.diverging.first_node == reshape.name


def test_a_branch_that_the_inputs_do_not_take_is_run_with_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Branches().eval(), {"x": -torch.rand(3, 6)}
    export(model, inputs, tmp_path / "branches.onnx")
    assert verify(model, inputs, tmp_path / "branches.onnx").agrees
    file = load(tmp_path / "branches.onnx").model
    branch = next(node for node in file.graph if node.op_type == "If").attributes["then_branch"].as_graph()
    for node in branch:
        if node.op_type == "Gemm":
            node.attributes["alpha"] = ir.AttrFloat32("alpha", 1.1)
        elif node.op_type == "Add":
            node.op_type = "Sub"
    ir.save(file, tmp_path / "wrong.onnx")
    report = verify(model, inputs, tmp_path / "wrong.onnx", perturb=False)
    assert {one.what: one.status for one in report.others} == {
        "other numbers": "agree",
        "-3 times the inputs": "differ",
        "3 times the inputs": "agree",
        "numbers of both signs": "agree",
    }


def test_an_output_that_is_a_constant_differs_although_it_is_right_for_the_example(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(8, 4).eval(), (torch.ones(2, 8),)
    export(model, inputs, tmp_path / "sound.onnx")
    file = load(tmp_path / "sound.onnx").model
    output = file.graph.outputs[0]
    node = output.producer()
    assert node is not None
    with torch.no_grad():
        learnt = ir.Value(name="learnt", const_value=ir.tensor(model(*inputs).numpy(), name="learnt"))
    file.graph.register_initializer(learnt)
    new = ir.Node("", "Identity", [learnt], metadata_props=dict(node.metadata_props), name="repeated")
    new.outputs[0].name, output.name = output.name, "before"
    new.outputs[0].type, new.outputs[0].shape = output.type, output.shape
    file.graph.append(new)
    file.graph.outputs[0] = new.outputs[0]
    ir.save(file, tmp_path / "learnt.onnx")
    report = verify(model, inputs, tmp_path / "learnt.onnx")
    assert not report.agrees
    assert "other numbers" in {one.what for one in report.others if one.status == "differ"}


def test_variations_run_together_where_the_model_has_no_branches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Heads().eval(), {"x": torch.randn(3, 5, 8)}
    export(model, inputs, tmp_path / "heads.onnx", dynamic=True)
    file = load(tmp_path / "heads.onnx").model
    assert [what for what, _ in telling_inputs(inputs, file)] == ["other numbers", "larger and smaller numbers"]
    together = all_at_once(inputs, file)
    assert together is not None and together[0] == "other numbers, larger and smaller numbers, other sizes"


def test_a_table_that_is_scaled_as_it_is_read_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 4)).eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for guarded in (False, True):
        run_module(model, [torch.arange(10)], guarded=guarded)
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_only_parameters_that_nothing_tells_apart_are_indistinct() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)])
    with torch.no_grad():
        model[1].weight.copy_(model[0].weight)
        model[3].weight.mul_(1e-6)
    keys = set(model.state_dict())
    assert indistinct(model, keys) == {"0.weight", "1.weight", "2.weight", "2.bias", "3.weight"}
    assert indistinct(model, {"0.weight", "0.bias"}) == set()


class Near(nn.Module):
    """Attends to the last positions only."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = torch.arange(x.shape[1])
        apart = here[:, None] - here
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return scores.masked_fill((apart < 0) | (apart >= self.window), -1e9).softmax(-1) @ x


class InFront(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.norm = part, nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.part(x))
        return normed


def test_a_bound_on_positions_beyond_the_example_is_found_in_its_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = InFront(Near(48)).eval(), {"x": torch.randn(2, 12, 8)}
    export(model, inputs, tmp_path / "near.onnx", dynamic=True)
    right = verify(model, inputs, tmp_path / "near.onnx")
    assert right.agrees and right.others[-1].what == "one row of size 240"

    file = load(tmp_path / "near.onnx").model
    bound = next(
        v
        for v in file.graph.initializers.values()
        if v.const_value is not None and v.const_value.numpy().tolist() == 48
    )
    bound.const_value = ir.tensor(np.array(96), name=bound.name)
    ir.save(file, tmp_path / "near.onnx")
    report = verify(model, inputs, tmp_path / "near.onnx")
    assert report.diverging is not None and report.diverging.address == "part"
    assert "one row of size 480" in report.diverging.reason


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(64, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.get_buffer("rows")
        return x + rows[: x.shape[1]]


def test_a_wrong_row_that_no_run_reads_of_a_buffer_that_is_not_saved_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs, path = InFront(Table()).eval(), {"x": torch.randn(2, 12, 8)}, tmp_path / "table.onnx"
    export(model, inputs, path, dynamic=True)
    assert verify(model, inputs, path).agrees
    file = load(path).model
    table = file.graph.initializers["part.rows"]
    assert table.const_value is not None
    rows = table.const_value.numpy().copy()
    rows[60, 3] += 0.5
    table.const_value = ir.tensor(rows, name=table.name)
    ir.save(file, path)
    report = verify(model, inputs, path)
    assert report.parameters.differing == ["part.rows"]
    assert report.diverging is not None and report.diverging.address == "part"


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids)) + x.mean()


def test_ids_of_all_rows_are_tried_also_where_inputs_have_no_names(tmp_path: Path) -> None:
    model, inputs = Looked().eval(), (torch.tensor([[1, 3, 5, 7], [3, 2, 2, 3]]), torch.randn(2, 3))
    export(model, inputs, tmp_path / "looked.onnx")
    assert verify(model, inputs, tmp_path / "looked.onnx").agrees
    file = load(tmp_path / "looked.onnx").model
    lookup = next(node for node in file.graph if node.op_type == "Gather")
    one = ir.Value(name="one", const_value=ir.tensor(np.array(1), name="one"))
    file.graph.initializers.add(one)
    least = ir.Node("", "Max", [lookup.inputs[1], one], metadata_props=dict(lookup.metadata_props), name="least")
    least.outputs[0].name = "least"
    file.graph.insert_before(lookup, least)
    lookup.replace_input_with(1, least.outputs[0])
    ir.save(file, tmp_path / "faulty.onnx")
    report = verify(model, inputs, tmp_path / "faulty.onnx")
    assert report.diverging is not None
    assert report.diverging.address == "words"


class Observed(nn.Module):
    """Of a mask of equal numbers the mean depends on nothing, nor of half of them."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.head, self.decides = nn.Linear(5, 3), decides

    def forward(self, x: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
        if self.decides:
            x = torch.where(observed > 0, x, -1)
        weights = observed if not self.decides else torch.ones_like(observed)
        return self.head(x * weights / weights.mean(-1, keepdim=True))


@pytest.mark.parametrize("decides", [True, False], ids=["as a condition", "as weights"])
def test_a_mask_of_numbers_that_a_file_ignores(decides: bool, tmp_path: Path) -> None:
    model, inputs = Observed(decides).eval(), {"x": torch.randn(2, 5), "observed": torch.ones(2, 5)}
    export(model, inputs, tmp_path / "observed.onnx")
    assert verify(model, inputs, tmp_path / "observed.onnx").agrees
    file = load(tmp_path / "observed.onnx").model
    mask = file.graph.inputs[1]
    ones = ir.Value(name="ones", const_value=ir.tensor(np.ones((2, 5), np.float32), name="ones"))
    file.graph.initializers.add(ones)
    mask.replace_all_uses_with(ones)
    ir.save(file, tmp_path / "faulty.onnx")
    assert verify(model, inputs, tmp_path / "faulty.onnx").verdict == "differ"
