"""Ties: of equal scores a file may choose others than PyTorch, whose choice the rest is then compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from modelexport.runtime.choices import choose_alike, chosen_axis, is_tie
from torch import nn

import models
from modelexport import export, load, verify, verify_reference
from modelexport.verify.verdicts import VerifyReport

SCORES = np.array([[3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 5.0, -1.0]], dtype=np.float32)


class Router(nn.Module):
    """Picks two of six for each token; all scores are equal while its weights are zero."""

    def __init__(self, *, equal: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 6, bias=False)
        if equal:
            nn.init.zeros_(self.gate.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.gate(x).softmax(-1).topk(2, -1)
        return chosen.values, chosen.indices


class Mixture(nn.Module):
    def __init__(self, *, equal: bool) -> None:
        super().__init__()
        self.router, self.norm, self.best = Router(equal=equal), nn.LayerNorm(8), nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(6, 8, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = self.router(x)
        made = torch.einsum("btd,btkde->btke", x, self.experts[chosen])
        x = self.norm((made * weights[..., None]).sum(-2) + x)
        return x, self.best(x).argmax(-1)


def mixture(folder: Path, *, equal: bool, dynamic: bool = False) -> tuple[nn.Module, dict[str, torch.Tensor], Path]:
    torch.manual_seed(0)
    model, inputs = Mixture(equal=equal).eval(), {"x": torch.randn(2, 5, 8)}
    export(model, inputs, folder / "mixture.onnx", dynamic=dynamic, reference=True)
    return model, inputs, folder / "mixture.onnx"


def statuses(report: VerifyReport) -> dict[str, str]:
    return {call.address: call.status for call in report.calls}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_other_choices_of_equal_scores_are_ties_and_what_follows_is_compared(dynamic: bool, tmp_path: Path) -> None:
    model, inputs, path = mixture(tmp_path, equal=True, dynamic=dynamic)
    for report in (verify(model, inputs, path, perturb=False), verify_reference(path)):
        assert statuses(report) == {
            "": "agree", "router": "tie", "router.gate": "agree", "norm": "agree", "best": "agree",
        }  # fmt: skip
        assert report.outputs[0].status == "tie"
        assert "PyTorch's choice was fed on" in report.outputs[0].reason
        assert report.agrees


def test_with_other_weights_the_scores_are_not_equal_and_the_calls_agree(tmp_path: Path) -> None:
    model, inputs, path = mixture(tmp_path, equal=True)
    report = verify(model, inputs, path)
    assert report.perturbed
    assert set(statuses(report).values()) == {"agree"}
    assert report.outputs[0].status == "tie"


@pytest.mark.parametrize("equal", [False, True], ids=["scores apart", "scores equal"])
def test_the_smallest_for_the_largest_is_no_tie(equal: bool, tmp_path: Path) -> None:
    model, inputs, path = mixture(tmp_path, equal=equal)
    tagged = load(path)
    node = next(node for node in tagged.model.graph if node.op_type == "TopK")
    node.attributes["largest"] = ir.AttrInt64("largest", 0)
    ir.save(tagged.model, tmp_path / "wrong.onnx")
    report = verify(model, inputs, tmp_path / "wrong.onnx")
    assert report.verdict == "differ"
    assert report.diverging is not None
    assert report.diverging.address == "router"


def test_a_transformers_router_of_zeros_is_a_tie(tmp_path: Path) -> None:
    case = models.case("mixtral")
    model = case.build()
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            nn.init.zeros_(parameter)
    export(model, case.inputs(), tmp_path / "moe.onnx")
    report = verify(model, case.inputs(), tmp_path / "moe.onnx", perturb=False)
    tied = [address for address, status in statuses(report).items() if status == "tie"]
    assert tied == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert set(statuses(report).values()) == {"agree", "tie", "no nodes"}
    assert report.agrees


class Nearest(nn.Module):
    """Gives the nearest of some vectors for each."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.vectors = nn.Embedding(16, 4)
        self.vectors.weight.data.add_(size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = self.vectors.weight
        apart = (x**2).sum(-1, keepdim=True) - 2 * x @ known.t() + (known**2).sum(-1)
        nearest = apart.argmin(-1)
        return self.vectors(nearest), nearest


class Quantized(nn.Module):
    def __init__(self, size: float = 0.0) -> None:
        super().__init__()
        self.encoder, self.nearest, self.decoder = nn.Linear(6, 4), Nearest(size), nn.Linear(4, 6)
        self.encoder.bias.data.add_(size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, nearest = self.nearest(self.encoder(x))
        return self.decoder(quantized), nearest


def quantized(folder: Path, size: float = 0.0, *, dynamic: bool = False) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, inputs = Quantized(size).eval(), {"x": torch.randn(2, 7, 6)}
    export(model, inputs, folder / "sound.onnx", dynamic=dynamic, reference=True)
    return model, inputs


def insert(value: ir.Value, op_type: str, number: float) -> None:
    """Make the users of a value take what an operator makes of it and a number, in the same call."""
    node = value.producer()
    assert node is not None and isinstance(node.graph, ir.Graph)
    constant = ir.Value(name="planted", const_value=ir.tensor(np.float32(number), name="planted"))
    constant.type, constant.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
    node.graph.initializers.add(constant)
    users = list(value.uses())
    made = ir.node(op_type, [value, constant], metadata_props=dict(node.metadata_props), name=f"{node.name}_changed")
    made.outputs[0].name, made.outputs[0].type = f"{value.name}_changed", value.type
    made.outputs[0].shape = value.shape
    node.append(made)
    for user, index in users:
        user.replace_input_with(index, made.outputs[0])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_wrong_scores_of_a_right_choice_are_found_in_their_call(dynamic: bool, tmp_path: Path) -> None:
    model, inputs = quantized(tmp_path, dynamic=dynamic)
    sound = verify(model, inputs, tmp_path / "sound.onnx")
    assert sound.verdict == "agree"
    tagged = load(tmp_path / "sound.onnx")
    product = next(node for node in tagged.model.graph if node.op_type == "Mul")
    insert(product.outputs[0], "Mul", 1.01)
    ir.save(tagged.model, tmp_path / "wrong.onnx")
    report = verify(model, inputs, tmp_path / "wrong.onnx")
    assert {one.status for one in report.outputs} == {"agree"}, "the same vectors are the nearest in the example"
    assert report.verdict == "differ"
    assert {address for address, status in statuses(report).items() if status == "differ"} == {"nearest"}
    assert report.diverging is not None
    assert report.diverging.first_node == f"{product.name}_changed"


@pytest.mark.parametrize("op_type", ["Mul", "Add"])
def test_scores_that_choose_alike_are_not_wrong(op_type: str, tmp_path: Path) -> None:
    model, inputs = quantized(tmp_path)
    tagged = load(tmp_path / "sound.onnx")
    chooses = next(node for node in tagged.model.graph if node.op_type == "ArgMin")
    scores = chooses.inputs[0]
    assert scores is not None
    insert(scores, op_type, 1.1)
    ir.save(tagged.model, tmp_path / "scaled.onnx")
    assert set(statuses(verify(model, inputs, tmp_path / "scaled.onnx")).values()) == {"agree"}


def test_scores_of_which_rounding_leaves_little_are_not_accused(tmp_path: Path) -> None:
    model, inputs = quantized(tmp_path, size=60.0)
    tagged = load(tmp_path / "sound.onnx")
    known = next(node for node in tagged.model.graph if node.op_type == "Sub")
    # Another order of the same sum: it differs from PyTorch's by a part in a thousand.
    squares, products = known.inputs
    total = next(user for user, _ in known.outputs[0].uses())
    others = next(value for value in total.inputs if value is not known.outputs[0])
    for value in (squares, products, others):
        assert value is not None
    first = ir.node("Sub", [others, products], metadata_props=dict(total.metadata_props), name="first")
    last = ir.node("Add", [first.outputs[0], squares], metadata_props=dict(total.metadata_props), name="last")
    first.outputs[0].name, last.outputs[0].name = "first", "last"
    for value in (first.outputs[0], last.outputs[0]):
        value.type, value.shape = total.outputs[0].type, total.outputs[0].shape
    total.append([first, last])
    total.outputs[0].replace_all_uses_with(last.outputs[0])
    tagged.model.graph.remove([total, known], safe=True)
    ir.save(tagged.model, tmp_path / "ordered.onnx")
    report = verify(model, inputs, tmp_path / "ordered.onnx", perturb=False)
    assert statuses(report)["nearest"] != "differ"


def test_scores_that_differ_by_scale_and_by_row_choose_alike() -> None:
    chosen = np.array([[0, 2], [2, 1]])
    rows = np.array([[5.0], [-2.0]], dtype=np.float32)
    assert choose_alike(SCORES, 3 * SCORES + rows, chosen, 1e-5)
    assert not choose_alike(SCORES, -SCORES, chosen, 1e-5)
    assert not choose_alike(SCORES, SCORES + np.array([0, 0, 0, 1e-3], dtype=np.float32), chosen, 1e-5)
    masked = np.where(SCORES < 0, -np.inf, SCORES)
    assert choose_alike(masked, 2 * masked, chosen, 1e-5)
    assert not choose_alike(masked, SCORES, chosen, 1e-5)


def test_a_choice_is_known_by_its_numbers() -> None:
    assert chosen_axis(SCORES, np.array([[0, 2], [2, 1]])) == 1
    assert chosen_axis(SCORES, np.array([[1, 3], [3, 0]])) == 1, "the smallest"
    assert chosen_axis(SCORES, np.array([0, 2])) == 1, "one for each row"
    assert chosen_axis(SCORES, np.array(6)) == 0, "one of all"
    assert chosen_axis(SCORES, np.array([[0, 0], [2, 2]])) is None, "one of them twice"
    assert chosen_axis(SCORES, np.array([[0, 1], [2, 1]])) is None, "not the largest"
    assert chosen_axis(SCORES, SCORES.astype(np.int64)) is None, "another type, no places"


def test_only_equal_scores_are_a_tie() -> None:
    right = np.array([[0, 2, 1], [2, 0, 1]])
    assert is_tie(SCORES, SCORES, right, np.array([[0, 2, 3], [2, 1, 0]]))
    assert not is_tie(SCORES, SCORES, right, np.array([[0, 1, 3], [2, 1, 0]]))
    assert not is_tie(SCORES, SCORES, right, np.array([[0, 2, 2], [2, 1, 0]])), "one of them twice"
    assert not is_tie(SCORES, SCORES, right, np.array([[2, 0, 1], [2, 0, 1]])), "in the wrong order"
    off = SCORES + np.array([0, 0, 0, 1e-3], dtype=np.float32)
    assert is_tie(SCORES, off, right, np.array([[0, 2, 3], [2, 1, 0]])), "no more than the scores are off"
