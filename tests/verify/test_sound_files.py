"""Files that are right, of kinds that a comparison has accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from modelexport.verify.differences import compare_arrays
from torch import nn

from modelexport import export, verify
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.lineage.tools import optimize_file
from modelexport.verify.verdicts import VerifyReport


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(4096.0), torch.tensor([1.0, 0.3, 0.1, 0.03]))
        self.table = torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[4 : 4 + x.shape[1]]


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.project(x).unflatten(-1, (2, 4, 2)))
        return torch.view_as_real(pairs * positions.unsqueeze(1)).flatten(2)


class ComplexPositions(nn.Module):
    """Complex numbers that several calls get: a file has them as pairs, which each call takes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.turns = nn.ModuleList([Turn(), Turn()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.positions(x)
        for turn in self.turns:
            x = x + turn(x, positions)
        return x


class Angles(nn.Module):
    def forward(self, time: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-9.21 * torch.arange(0, 128, dtype=torch.float32) / 128)
        angles = 1000 * (time[:, None].float() * rates[None])
        return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class LargeAngles(nn.Module):
    """Sines of large angles, computed in float32 whatever the type of the model: the last bit of an angle shows."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = Angles()
        self.project = nn.Linear(256, 8)

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        return self.project(self.angles(time).to(time.dtype))


class Resized(nn.Module):
    """A long computation of the root itself, whose result no call returns: a call gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(nn.functional.interpolate(x, size=(224, 224), mode="bicubic"))


class WideOutput(nn.Module):
    """A float64 result of float32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.float_power(torch.tanh(self.project(x)), 2.0)


class CallsMore(nn.Module):
    """Computes something around ``forward``, which hooks do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x) + 1


class TwiceAlike(nn.Module):
    """A layer called on the same numbers twice, once taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.vmap(torch.vmap(self.layer))(x), self.layer(x)


class LearnedQueries(nn.Module):
    """A parameter repeated for each row of the batch, which PyTorch copies only where a layer flattens it."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 4, 8))
        self.project, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries.expand(x.shape[0], -1, -1)
        return queries + self.project(queries) @ self.other(x).mT @ x


def numbers(*shape: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(1)),)


SOUND: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "complex positions": (ComplexPositions, numbers(2, 6, 16)),
    "large angles": (LargeAngles, (torch.tensor([0.3, 0.777, 0.91]),)),
    "resized": (Resized, numbers(1, 3, 240, 240)),
    "wide output": (WideOutput, numbers(3, 6)),
    "twice alike": (TwiceAlike, numbers(2, 3, 6)),
    "more around forward": (CallsMore, numbers(3, 6)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_file_is_not_accused(name: str, tmp_path: Path) -> None:
    build, inputs = SOUND[name]
    torch.manual_seed(0)
    verified = export(build().eval(), inputs, tmp_path / "model.onnx", verify=True).verified
    assert verified is not None
    assert accused(verified) == []
    assert verified.agrees


def test_a_weight_that_is_repeated_by_a_size_is_of_the_call_that_repeats_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LearnedQueries().eval()
    export(model, numbers(2, 6, 8), tmp_path / "model.onnx", dynamic=True)
    assert "Expand" in {node.op_type for node in load_onnx(tmp_path / "model.onnx").graph}
    report = verify(model, numbers(2, 6, 8), tmp_path / "model.onnx")
    assert accused(report) == []
    assert report.agrees


def test_a_gate_that_is_mostly_closed_is_rounded_as_a_number_near_one() -> None:
    x = np.linspace(-60, 30, 64)
    open_by = 1 / (1 + np.exp(-x))
    right = (x * open_by).astype(np.float32)
    assert compare_arrays("gate", right, (x * (open_by + 2.0**-26)).astype(np.float32)).status == "agree"
    assert compare_arrays("gate", right, (x * (open_by + 2.0**-16)).astype(np.float32)).status == "differ"


class Gated(nn.Module):
    """A gate that is closed for every element, so that what it lets through is next to nothing, or nothing at all."""

    def __init__(self, gate: Callable[[torch.Tensor], torch.Tensor], by: float, bias: bool) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=bias)
        nn.init.constant_(self.gate.bias, by)
        self.function = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.function(self.gate(x)))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("gate", "by", "bias"),
    [
        (torch.sigmoid, -20, True),  # 2e-9, of which float32 kernels compute nothing
        (torch.sigmoid, -60, False),  # the runtime's float64 kernel gives zero
        pytest.param(torch.sigmoid, -100, False, marks=pytest.mark.slow),  # too small for a normal number
        pytest.param(nn.functional.silu, -30, False, marks=pytest.mark.slow),
        pytest.param(nn.functional.softplus, -100, False, marks=pytest.mark.slow),
        pytest.param(nn.functional.mish, -100, False, marks=pytest.mark.slow),
        pytest.param(nn.functional.relu, -100, True, marks=pytest.mark.slow),
        (nn.functional.logsigmoid, -60, False),  # it was the logarithm of zero
    ],
)
@pytest.mark.parametrize("fault", [False, True])
def test_a_gate_that_is_closed_everywhere(
    gate: Callable[[torch.Tensor], torch.Tensor], by: float, bias: bool, fault: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs, path = Gated(gate, by, bias).eval(), numbers(3, 8), tmp_path / "model.onnx"
    export(model, inputs, path)
    if fault:  # what the gate hides
        file = load_onnx(path)
        node = next(node for node in file.graph if node.metadata_props["modelexport.call"] == "up")
        users = list(node.outputs[0].uses())
        negated = ir.Node("", "Neg", [node.outputs[0]], metadata_props=dict(node.metadata_props), name="negated")
        file.graph.insert_after(node, negated)
        for user, index in users:
            user.replace_input_with(index, negated.outputs[0])
        negated.outputs[0].name, negated.outputs[0].type = "negated", node.outputs[0].type
        negated.outputs[0].shape = node.outputs[0].shape
        save_model(file, path, same_graph=True)
        path.with_suffix(".hierarchy.json").unlink()
    report = verify(model, inputs, path)
    if fault:
        assert not report.agrees
        assert report.diverging is not None
        assert report.diverging.address == "up"
    else:
        assert accused(report) == []
        assert report.agrees


class ZeroInside(nn.Module):
    """Branches that fresh parameters scale by zero: an end of zeros, a scale, a gate that a layer of zeros computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.end, self.modulation = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.zeros(8))
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        for layer in (self.end, self.modulation):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.first(self.norm(x))
        x = x + self.modulation(x) * self.second(self.norm(x))
        return self.end(x)


@pytest.mark.sweep
@pytest.mark.parametrize("perturb", [None, False, True])
@pytest.mark.parametrize("fault", [False, True])
def test_branches_that_fresh_parameters_close(perturb: bool | None, fault: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs, path = ZeroInside().eval(), numbers(3, 8), tmp_path / "model.onnx"
    export(model, inputs, path)
    if fault:  # exchange two biases that a product with zero hides
        file = load_onnx(path)
        one, other = (file.graph.initializers[f"{name}.bias"] for name in ("first", "second"))
        one.replace_all_uses_with(other)
        save_model(file, path, same_graph=True)
    report = verify(model, inputs, path, perturb=perturb)
    assert report.agrees != fault
    assert accused(report) == [] or fault


def accused(report: VerifyReport) -> list[str]:
    return [
        *(f"{call.address}: {call.reason}" for call in report.calls if call.status == "differ"),
        *(f"{claim.where}: {claim.claimed} and not {claim.found}" for claim in report.claims),
    ]


class Unlikely(nn.Module):
    """Probabilities of 1e-9, for which the runtime's float32 kernel is not exact enough."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.scores(x) - 20)


@pytest.mark.parametrize("fault", [False, True])
def test_a_kernel_that_is_less_exact_than_its_type_is_no_fault_and_hides_none(fault: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Unlikely().eval(), tmp_path / "model.onnx"
    inputs = {"x": torch.randn(3, 8)}
    export(model, inputs, path, dynamic=True)
    if fault:
        file = load_onnx(path)
        (shift,) = (value for value in file.graph.initializers.values() if value.const_value.numpy().size == 1)
        shift.const_value = ir.tensor(shift.const_value.numpy() * np.float32(1.001), name=shift.name)
        save_model(file, path, same_graph=True)
    report = verify(model, inputs, path)
    assert report.agrees != fault
    assert (report.diverging is not None) == fault
    if not fault:
        assert any("float32 kernel of Sigmoid" in note for note in report.notes)


class EqualScores(nn.Module):
    """Scores that are a bias, as fresh ones are, choose what follows; the products before them lead only there."""

    def __init__(self) -> None:
        super().__init__()
        self.states = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        with torch.no_grad():
            self.head.weight.mul_(1e-9)
            self.head.bias.fill_(-1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = torch.tanh(self.states(x))
        chosen = self.head(states).max(-1).values.topk(2, dim=1).indices
        return states.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 8))


def test_a_node_before_a_value_that_tells_no_call_may_be_of_those_that_return_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = EqualScores().eval(), {"x": torch.randn(2, 6, 8)}
    export(model, inputs, tmp_path / "model.onnx")
    report = verify(model, inputs, tmp_path / "model.onnx", perturb=False)
    assert not accused(report)


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x).masked_fill(~mask.bool(), -0.5)


class TwiceFilled(nn.Module):
    """Two modules invert one mask, which a file does once, and a tool as a part of what follows in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Filled(), Filled()])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def test_a_tool_that_fuses_a_mask_of_several_calls(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = TwiceFilled().eval(), {"x": torch.randn(2, 6, 8), "mask": torch.ones(2, 6, 8, dtype=torch.long)}
    export(model, inputs, tmp_path / "model.onnx")
    optimize_file(tmp_path / "model.onnx", "ort-basic", tmp_path / "fused.onnx")
    assert "Not" not in {node.op_type for node in load_onnx(tmp_path / "fused.onnx").graph}
    assert not accused(verify(model, inputs, tmp_path / "fused.onnx"))


class OneOfThree(nn.Module):
    """As attention to a single token: PyTorch computes queries and keys, on which nothing depends."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computed = [layer(x) for layer in (self.query, self.key, self.value)]
        return computed[-1].relu()


def test_a_product_that_a_tool_merged_is_of_each_call_whose_numbers_it_has(tmp_path: Path) -> None:
    """Whichever of the parts is the first output of the node that takes them apart."""
    torch.manual_seed(0)
    model, inputs = OneOfThree().eval(), {"x": torch.randn(3, 1, 8)}
    export(model, inputs, tmp_path / "model.onnx")
    file = load_onnx(tmp_path / "model.onnx")
    product = next(node for node in file.graph if node.op_type == "MatMul")
    weights = torch.cat([layer.weight for layer in (model.query, model.key, model.value)]).detach().T.contiguous()
    merged = ir.node("MatMul", [product.inputs[0], ir.val("weights", const_value=ir.tensor(weights, name="weights"))])
    parts = ir.node("Split", merged.outputs, {"axis": -1, "num_outputs": 3}, num_outputs=3)
    for node in (merged, parts):
        node.name = f"new_{node.op_type}"
        node.metadata_props.update({**product.metadata_props, "modelexport.evidence": "derived"})
        for index, value in enumerate(node.outputs):
            value.name, value.dtype = f"{node.name}_{index}", ir.DataType.FLOAT
    file.graph.register_initializer(merged.inputs[1])
    file.graph.insert_before(product, [merged, parts])
    product.outputs[0].replace_all_uses_with(parts.outputs[2])
    file.graph.remove(product)
    save_model(file, tmp_path / "merged.onnx")
    assert not [call for call in accused(verify(model, inputs, tmp_path / "merged.onnx")) if "tags" in call]


class Floored(nn.Module):
    """What a caller computes in several nodes has few different numbers; what a call makes of it has many."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 8)

    def forward(self, minutes: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.div(minutes, 1440, rounding_mode="floor").float()[:, None])


def test_steps_of_a_result_with_few_numbers_are_of_the_call_that_computed_it(tmp_path: Path) -> None:
    model, inputs = Floored().eval(), {"minutes": torch.tensor([30, 700, 1300, 2000])}
    export(model, inputs, tmp_path / "floored.onnx")
    report = verify(model, inputs, tmp_path / "floored.onnx")
    assert [call.reason for call in report.calls if call.status == "differ"] == []


class Encoder(nn.Module):
    """A causal mask, and padding that leaves nothing to the first word if it is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        causal = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), 1)
        x: torch.Tensor = self.layers(self.words(ids), mask=causal, src_key_padding_mask=mask == 0)
        return x


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_rows_that_padding_empties_may_have_no_numbers_in_both(dynamic: bool, tmp_path: Path) -> None:
    inputs = {"ids": torch.randint(0, 20, (2, 5)), "mask": torch.ones(2, 5, dtype=torch.long)}
    model = Encoder().eval()
    export(model, inputs, tmp_path / "encoder.onnx", dynamic=dynamic)
    report = verify(model, inputs, tmp_path / "encoder.onnx")
    assert report.agrees
    assert any("padded masks" in one.what for one in report.others if one.status == "agree")


class Iterated(nn.Module):
    """Each step triples what rounding is off by: after fourteen, five million times as much."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scale(x)
        for _ in range(14):
            x = torch.sin(3 * x)
        return x


def test_rounding_that_grows_on_other_inputs_is_measured_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Iterated().eval(), (torch.randn(6, 8),)
    export(model, inputs, tmp_path / "iterated.onnx")
    others = verify(model, inputs, tmp_path / "iterated.onnx").others
    assert [(one.what, one.reason) for one in others if one.reason] == []


class Before(nn.Module):
    """A model that makes integers or conditions of what it gets, for a module in it."""

    def __init__(self, chosen: Callable[[torch.Tensor], torch.Tensor], inner: nn.Module) -> None:
        super().__init__()
        self.chosen, self.inner = chosen, inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(self.chosen(x))
        return found


class Signed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, condition: torch.Tensor) -> torch.Tensor:
        return torch.where(condition, self.weight, -self.weight)


@pytest.mark.parametrize(
    ("chosen", "inner", "x"),
    [
        (lambda x: torch.div(x, 3, rounding_mode="floor"), nn.Embedding(997, 8), torch.arange(12).reshape(2, 6) ** 2),
        (lambda x: torch.bucketize(x, torch.linspace(0, 1, 11)) + 1, nn.Embedding(997, 8), torch.rand(2, 6)),
        (lambda x: torch.isclose(x, x.round(), atol=0.3), Signed(), torch.rand(3, 6)),
        (lambda x: x > x.median(-1, keepdim=True).values, Before(lambda mask: ~mask, Signed()), torch.rand(3, 6)),
    ],
    ids=["quotients", "buckets", "near integers", "above the median"],
)
def test_steps_to_ids_and_conditions_are_of_the_call_that_made_these(
    chosen: Callable[[torch.Tensor], torch.Tensor], inner: nn.Module, x: torch.Tensor, tmp_path: Path
) -> None:
    model = Before(chosen, inner).eval()
    export(model, (x,), tmp_path / "before.onnx", frontend="dynamo")
    assert accused(verify(model, (x,), tmp_path / "before.onnx")) == []


def test_steps_to_ids_are_not_of_an_unrelated_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = Before(lambda x: torch.div(x, 3, rounding_mode="floor"), nn.Embedding(997, 8))
    model, inputs = nn.Sequential(before, nn.Linear(8, 8)).eval(), (torch.arange(12).reshape(2, 6) ** 2,)
    export(model, inputs, tmp_path / "before.onnx", frontend="dynamo")
    file = load_onnx(tmp_path / "before.onnx")
    step = next(node for node in file.graph if node.op_type == "Floor")
    step.metadata_props.update(list(file.graph)[-1].metadata_props)
    save_model(file, tmp_path / "wrong.onnx")
    assert any("tags" in one for one in accused(verify(model, inputs, tmp_path / "wrong.onnx")))


class Broadcast(nn.Module):
    """Adds numbers of both shapes, for the shape of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = torch.broadcast_tensors(x, self.weight)
        return one * two


def test_what_only_gives_a_size_is_of_no_call_whose_numbers_have_that_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(6, 6), Broadcast()).eval(), (torch.randn(3, 6),)
    export(model, inputs, tmp_path / "sizes.onnx", frontend="torchscript", dynamic=True)
    assert accused(verify(model, inputs, tmp_path / "sizes.onnx")) == []


class TwoOfOne(nn.Module):
    """Both modules negate what they get: the first one inside an operation, the second one in one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first, self.second = nn.Linear(6, 6), nn.LogSigmoid(), nn.Softmin(-1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.linear(x)
        return self.first(x), self.second(x)


def test_a_step_that_the_file_does_once_for_two_calls_was_done_in_the_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = TwoOfOne().eval(), (torch.randn(3, 6) * 3,)
    export(model, inputs, tmp_path / "two.onnx", frontend="dynamo")
    assert accused(verify(model, inputs, tmp_path / "two.onnx")) == []
