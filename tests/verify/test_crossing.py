"""Owners and values that only the boundaries of calls tell to be wrong, and single rows that are."""

from __future__ import annotations

from pathlib import Path

import msgspec
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
from modelexport.tagged.file import read_tagged
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


def last(file: ir.Model, op_type: str, before: int = 0) -> ir.Node:
    return [node for node in file.graph if node.op_type == op_type][-1 - before]


def with_owners(
    build: type[nn.Module], x: torch.Tensor, path: Path, op_type: str, owners: list[str], before: int = 0
) -> VerifyReport:
    """The report on a file in which a node of a type, by default the last, has other owners; the sound one agrees."""
    torch.manual_seed(0)
    model, inputs = build().eval(), {"x": x}
    export(model, inputs, path)
    assert verify(model, inputs, path).agrees
    file = load_onnx(path)
    tags = {node.metadata_props[keys.CALL]: node.metadata_props[keys.SOURCE_MODULE] for node in file.graph}
    node = last(file, op_type, before)
    write_tags(
        node.metadata_props,
        owners,
        [tags.get(one, f"/{build.__name__}") for one in owners],
        Evidence.EXACT,
    )
    node.metadata_props.pop(keys.LAYER_ANNOTATION)
    node.metadata_props.pop(keys.NAMESPACE)
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


class Biased(nn.Module):
    """Attention with biases by distance, which are looked up and added to a mask: a constant of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.biases = nn.Linear(8, 8), nn.Embedding(9, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(5)
        bias = self.biases(places[None] - places[:, None] + 4)[..., 0] + mask
        return nn.functional.scaled_dot_product_attention(self.query(x), x, x, attn_mask=bias), bias


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Biased()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, bias = self.inner(x.tanh(), torch.arange(5.0) * 0.1)
        return y.tanh(), bias


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Around()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x * 2)[0] * 3
        return y


@pytest.mark.sweep
@pytest.mark.parametrize("owner", ["", "layer", "layer.inner.biases"])
@pytest.mark.parametrize("op_type", ["MatMul", "Add", "Softmax"])
def test_what_is_between_two_values_of_a_call_is_in_it(op_type: str, owner: str, tmp_path: Path) -> None:
    """PyTorch has no value of what is inside attention, and the biases that the layer returns are a constant."""
    report = with_owners(
        Layers, torch.randn(2, 2, 5, 8), tmp_path / "x.onnx", op_type, [owner], 1 if op_type == "MatMul" else 0
    )
    assert owner in misplaced(report)


class Compared(nn.Module):
    """Encodes two inputs, to unit length: of two rows, the two norms tell no call."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 6), Unit())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) * self.encoder(x.flip(0) * 2)


class Unit(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x.tanh(), dim=-1)


@pytest.mark.parametrize("owner", ["", "encoder.0@1", "encoder.1"])
def test_a_few_numbers_between_two_values_of_a_call_are_in_it(owner: str, tmp_path: Path) -> None:
    report = with_owners(Compared, torch.randn(2, 8), tmp_path / "x.onnx", "Clip", [owner])
    assert owner in misplaced(report)


class Sampled(nn.Module):
    """Much of what the root computes in one step is several nodes, and no value of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.change = nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = torch.tanh(self.offsets(x)).permute(0, 2, 3, 1) + torch.linspace(-0.2, 0.3, 6)[:, None]
        return self.change(nn.functional.grid_sample(x, grid, align_corners=False) * 1.5) + 1


@pytest.mark.parametrize("owners", [["change", ""], ["", "change"], ["change", "offsets"]])
def test_another_owner_with_which_a_call_shares_only_known_values(owners: list[str], tmp_path: Path) -> None:
    report = with_owners(Sampled, torch.randn(2, 4, 6, 6), tmp_path / "x.onnx", "Conv", owners)
    assert {one for one in owners if one != "change"} <= misplaced(report)


class Masked(nn.Module):
    """What the layers get besides their input is a constant, which the file adds to another before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Added(), Added()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(5.0)[:, None] * 0.1
        return self.second(self.first(x.tanh(), mask), mask).sigmoid()


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * (mask + 1).log1p()


def test_another_owner_that_passed_only_what_was_there_before(tmp_path: Path) -> None:
    report = with_owners(Masked, torch.randn(2, 5, 8), tmp_path / "x.onnx", "Add", ["second", ""])
    assert "" in misplaced(report)


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(12, 8), nn.Embedding(5, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.argsort(-1)
        return self.norm(self.words(ids) + self.places(torch.arange(5)))


@pytest.mark.parametrize("owners", [[""], ["norm"], ["places"], ["words", ""]])
def test_rows_of_a_weight_belong_to_the_call_that_looks_them_up(owners: list[str], tmp_path: Path) -> None:
    """The rows are elements of a weight, and the root passes them on: neither makes them the root's."""
    report = with_owners(Looked, torch.randn(2, 5), tmp_path / "x.onnx", "Gather", owners)
    assert {one for one in owners if one != "words"} <= misplaced(report)


class Shifted(nn.Module):
    """What the second module gets is made in several steps from what the first one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y[:, 1:] * y[:, :-1])


@pytest.mark.parametrize("op_type", ["Slice", "Mul"])
def test_what_takes_nothing_that_a_call_gets_is_not_in_it(op_type: str, tmp_path: Path) -> None:
    report = with_owners(Shifted, torch.randn(2, 6, 8), tmp_path / "x.onnx", op_type, ["second"])
    assert "second" in misplaced(report)


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
    assert "the model's own weights" in report.diverging.reason


class Nearest(nn.Module):
    """What a call looks up is computed again, so that gradients pass."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.codes(torch.cdist(x, self.codes.weight).argmin(-1))
        return x + (found - x).detach()


def test_a_value_that_is_computed_again_is_first_of_the_call_that_had_it_first(tmp_path: Path) -> None:
    report = with_owners(Nearest, torch.rand(12, 8), tmp_path / "x.onnx", "Gather", [""])
    assert "" in misplaced(report)


class Chosen(nn.Module):
    """Rows of what a call returns, chosen by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.message(x)[x[:, 0].argsort()[:4]])


def test_rows_that_the_inputs_choose_are_not_of_the_call_that_made_them_all(tmp_path: Path) -> None:
    report = with_owners(Chosen, torch.randn(6, 8), tmp_path / "x.onnx", "GatherND", ["message"])
    assert "message" in misplaced(report)
