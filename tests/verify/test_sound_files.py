"""Sound files agree at every call, whatever their models compute, in any types, and whichever front end wrote them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import onnx
import pytest
import torch
from torch import nn

import models
from exports import Exporter
from modelexport import export, load, verify
from modelexport.capture import FrontEnd
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.tools.optimizers.optimize_tools import optimize_file
from modelexport.verify import model_and_file
from modelexport.verify.compared_runs import compare_runs
from modelexport.verify.verify_report import VerifyReport

NAMES = (
    "blocks", "nested-structures", "recurrent", "equal-values", "condition", "loop", "unet", "bert", "gpt2", "t5",
    "mixtral", "vit",
)  # fmt: skip
TRACED = ("blocks", "recurrent", "bert")


def proven(model: nn.Module, inputs: Any, folder: Path, **options: Any) -> VerifyReport:
    export(model, inputs, folder / "x.onnx", check=False, **options)
    return verify(model, inputs, folder / "x.onnx")


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).argmax(1)


def test_a_model_that_returns_nothing_is_not_compared(tmp_path: Path) -> None:
    assert proven(Chosen().eval(), {"x": torch.randn(0, 3)}, tmp_path).verdict == "not compared"


@pytest.mark.parametrize(
    ("name", "frontend"),
    [
        *((name, "dynamo") for name in NAMES),
        *(pytest.param(name, "torchscript", marks=pytest.mark.slow if name == "bert" else ()) for name in TRACED),
    ],
)
def test_a_model_of_the_table(name: str, frontend: FrontEnd, exported: Exporter) -> None:
    report = exported(name, frontend=frontend).verified
    assert report.agrees, report
    assert report.owners.contradicted == 0
    assert report.owners.confirmed > 0
    assert {call.status for call in report.calls} <= {"agree", "tie", "no nodes", "not compared"}
    assert all(call.reason for call in report.calls if call.status == "not compared")


@pytest.mark.parametrize("name", ["blocks", "bert", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_file_with_dynamic_axes_agrees_on_other_sizes(name: str, exported: Exporter) -> None:
    report = exported(name, dynamic=True).verified
    assert report.agrees
    assert any("size" in other.what and other.status == "agree" for other in report.others)


class Unregistered(nn.Module):
    """Puts no rows before those of a batch, as DINOv3 without register tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.registers, self.linear = nn.Parameter(torch.empty(1, 0, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([self.registers.expand(x.shape[0], -1, -1), x], 1))


@pytest.mark.slow
def test_a_parameter_without_elements(tmp_path: Path) -> None:
    assert proven(Unregistered(), {"x": torch.randn(2, 3, 8)}, tmp_path).agrees


@pytest.mark.slow
def test_a_mask_that_hides_all_of_a_row_by_the_smallest_number(tmp_path: Path) -> None:
    """Doge: PyTorch averages there; transformers' exporter writes zeros."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}
    model = models.pretrained(
        "DogeForCausalLM", **sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False
    )()
    inputs = {"input_ids": torch.randint(0, 50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    report = proven(model, inputs, tmp_path)
    assert report.agrees, report
    assert any("mask" in other.what for other in report.others)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def test_a_model_in_float64(tmp_path: Path) -> None:
    """ONNX Runtime's LayerNormalization is exact to 2e-13 only."""
    assert proven(Normalized().double().eval(), {"x": torch.randn(3, 16).double()}, tmp_path).agrees


class Doubled(nn.Module):
    """Returns a wider type than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = models.Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).double()


@pytest.mark.slow
def test_a_model_that_returns_float64(tmp_path: Path) -> None:
    assert proven(Doubled().eval(), {"x": torch.randn(3, 8)}, tmp_path).claims == []


class Narrowed(nn.Module):
    """Returns a narrower type than that of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


@pytest.mark.slow
def test_a_model_that_rounds_float64(tmp_path: Path) -> None:
    assert proven(Narrowed(), {"x": torch.randn(3, 8, dtype=torch.float64)}, tmp_path).agrees


@pytest.mark.slow
def test_a_fresh_weight_normalization(tmp_path: Path) -> None:
    """Its weight is what the normalization computes of it, but for rounding: one is not the rounded other."""
    model = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 4, 3)).eval()
    assert proven(model, (torch.randn(2, 6, 8),), tmp_path).agrees


class Centered(nn.Module):
    """Returns a mean that is zero but for rounding, clamped by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.clamp, self.head = nn.LayerNorm(16), nn.Hardtanh(), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(x)
        return self.head(hidden), 3 * self.clamp(hidden.mean(-1))


@pytest.mark.slow
def test_a_result_that_is_rounding_alone(tmp_path: Path) -> None:
    """Another order of its sum gives another number; a wrong file gives one that rounding does not."""
    model, inputs, path = Centered().eval(), {"x": torch.randn(3, 16)}, tmp_path / "m.onnx"
    result = export(model, inputs, path, dynamic=True, verify=True, check=False)
    assert result.verified is not None
    assert result.verified.agrees
    file = load_onnx(path)
    next(node for node in file.graph if node.op_type == "ReduceMean").op_type = "ReduceMin"
    save_model(file, tmp_path / "faulty.onnx")
    assert verify(model, inputs, tmp_path / "faulty.onnx").verdict == "differ"


class Nothing(nn.Module):
    """Returns what is zero but for rounding, and has no weights whose last bits would show that."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.softmax(-1).sum(-1) - 1, nn.functional.group_norm(x[:, :, None].expand(-1, -1, 7), x.shape[-1])


def test_results_of_inputs_alone_that_are_rounding_alone(tmp_path: Path) -> None:
    result = export(Nothing(), (torch.randn(40, 3),), tmp_path / "m.onnx", frontend="torchscript", verify=True)
    assert result.verified is not None
    assert result.verified.agrees


class Floors(nn.Module):
    """Rounds its input, which for a whole number is another one if its last bit is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.floor() / 3).tanh()


def test_a_fault_behind_whole_numbers_that_are_rounded_is_found(tmp_path: Path) -> None:
    inputs = (torch.arange(1.0, 9.0),)
    export(Floors(), inputs, tmp_path / "m.onnx", frontend="torchscript", check=False)
    file = load_onnx(tmp_path / "m.onnx")
    next(node for node in file.graph if node.op_type == "Tanh").op_type = "Softsign"
    save_model(file, tmp_path / "faulty.onnx")
    assert verify(Floors(), inputs, tmp_path / "faulty.onnx").verdict == "differ"


def test_an_output_that_overflows_in_onnx_runtime_alone_differs(tmp_path: Path) -> None:
    """In float64 the faulty file is right."""
    model, inputs = nn.ReLU(), (torch.tensor([-1.5, 0.0, 2.5]),)
    export(model, inputs, tmp_path / "m.onnx", frontend="torchscript", check=False)
    file = onnx.load(tmp_path / "m.onnx")
    (relu,) = file.graph.node
    names = [relu.output[0] + str(place) for place in range(4)] + [relu.output[0]]
    relu.output[0] = names[0]
    for place, factor in enumerate((2.0**66, 2.0**66, 2.0**-66, 2.0**-66)):
        file.graph.initializer.append(onnx.helper.make_tensor(f"factor{place}", onnx.TensorProto.FLOAT, [], [factor]))
        step = onnx.helper.make_node("Mul", [names[place], f"factor{place}"], [names[place + 1]], f"step{place}")
        step.metadata_props.extend(relu.metadata_props)
        file.graph.node.append(step)
    onnx.save(file, tmp_path / "faulty.onnx")
    assert verify(model, inputs, tmp_path / "faulty.onnx").outputs[0].status == "differ"


class Bytes(nn.Module):
    """Divides integers, which gives a number of the default type."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.clamp(0, 1).mul(255).round().byte() / 255)


@pytest.mark.slow
def test_a_division_of_integers(tmp_path: Path) -> None:
    assert proven(Bytes().eval(), {"x": torch.rand(1, 3, 4, 4)}, tmp_path).agrees


class Turned(nn.Module):
    """Turns by large angles that depend on nothing: in float32 they are off by more than their rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = 1e4 ** torch.linspace(0, 1, 8) * torch.pi * torch.arange(x.shape[1])[:, None]
        return self.linear(x) * angles.cos()


@pytest.mark.slow
def test_constants_that_float32_computes_with_more_than_its_rounding(tmp_path: Path) -> None:
    assert proven(Turned().eval(), {"x": torch.randn(2, 6, 8)}, tmp_path).agrees


class Peaks(nn.Module):
    """Marks the largest of neighbours, among which many are equal in float32 and none in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Conv1d(1, 1, 1)
        nn.init.constant_(self.scores.weight, 1e-9)
        nn.init.constant_(self.scores.bias, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores(x)
        return torch.where(scores == nn.functional.max_pool1d(scores, 3, 1, 1), scores, 0.0)


def test_a_model_that_compares_rounded_numbers_runs_in_its_own_types_on_both_sides(tmp_path: Path) -> None:
    """The key points of a fresh SuperPoint."""
    export(Peaks().eval(), {"x": torch.randn(2, 1, 64)}, tmp_path / "x.onnx", check=False)
    report = verify(Peaks().eval(), {"x": torch.randn(2, 1, 64)}, tmp_path / "x.onnx", perturb=False)
    assert report.agrees
    assert any("float64" in note for note in report.notes)


def test_layers_in_half_precision(tmp_path: Path) -> None:
    assert proven(Normalized().half().eval(), {"x": torch.randn(3, 16).half()}, tmp_path).agrees


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    case = models.case("bert")
    assert proven(case.build().to(dtype), case.inputs(), tmp_path).agrees


class Scaled(nn.Sequential):
    """Multiplies with a number of Python between two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self
        return second(first(x) * 0.238)


def test_a_number_that_bfloat16_rounds(tmp_path: Path) -> None:
    model = Scaled(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    assert proven(model, (torch.randn(3, 4).bfloat16(),), tmp_path).agrees


class Angles(nn.Module):
    """Cosines of angles that are computed in float32, of a length alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1])[:, None].float() * torch.tensor([1.0, 0.1, 0.01, 0.001])
        return angles.cos().to(x.dtype)


class TimesAngles(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles, linear = self
        return linear(x * angles(x))


def test_numbers_of_sizes_that_are_rounded_to_half_precision(tmp_path: Path) -> None:
    model = TimesAngles(Angles(), nn.Linear(4, 4)).bfloat16()
    assert proven(model, (torch.randn(2, 5, 4).bfloat16(),), tmp_path, dynamic=True, frontend="dynamo").agrees


class Buckets(nn.Module):
    """Embeds the logarithms of positions: whole numbers in float32, and a little less or more in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = (torch.arange(x.shape[1]) + 1).float()
        return x * self.rows(((positions / 8).log() / math.log(16) * 8).long() + 8)


@pytest.mark.slow
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integers_of_numbers_that_are_computed_from_sizes(
    dtype: torch.dtype, frontend: Literal["dynamo", "torchscript"], tmp_path: Path
) -> None:
    model, x = Buckets().to(dtype), torch.randn(2, 17, 4).to(dtype)
    export(model, (x,), tmp_path / "x.onnx", frontend=frontend, dynamic=True, check=False)
    assert verify(model, (x,), tmp_path / "x.onnx", others=False).agrees


class Rounded(nn.Module):
    """Adds a number that Python rounds: 100 times 0.575 is a little below 57.5."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + round(x.shape[1] * 0.575)


@pytest.mark.slow
def test_a_number_of_sizes_that_python_rounds(tmp_path: Path) -> None:
    x = torch.randn(2, 100)
    export(Rounded(), (x,), tmp_path / "x.onnx", dynamic=True, check=False)
    assert verify(Rounded(), (x,), tmp_path / "x.onnx", others=False).agrees


class Roots(nn.Module):
    """Divides by a root in one call, of which a file computes the root first, and later computes the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.divided, self.linear = Divided(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.abs() + 1
        return self.linear(self.divided(x)) * x.sqrt()


class Divided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0.5).rsqrt()


def test_a_step_that_pytorch_does_not_take_is_of_its_call_whatever_equals_it_later(tmp_path: Path) -> None:
    report = proven(Roots().eval(), {"x": torch.randn(3, 8)}, tmp_path)
    assert report.agrees, report


class Autocast(nn.Module):
    """Rounds to half precision in each of its layers, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized, self.head = Normalized(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(self.normalized(x))


@pytest.mark.parametrize("around", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_under_autocast_is_exact_in_the_types_of_its_weights(around: bool, tmp_path: Path) -> None:
    model, x = Autocast().eval(), torch.randn(3, 16)
    with torch.autocast("cpu", enabled=around):
        result = export(model, (x,), tmp_path / "x.onnx", verify=True, check=False)
        assert torch.is_autocast_enabled("cpu") is around
    assert [one.kind for one in result.unrepeatable] == ["autocast"]
    assert result.verified is not None
    assert result.verified.agrees
    assert {output.dtype for output in result.verified.outputs} == {"float32"}
    assert model(x).dtype is torch.bfloat16


class Biased(nn.Module):
    """Computes a bias, and an attention with it, in a type for which ONNX Runtime's CPU has no kernels."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.layer, self.head = dtype, nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.layer_norm(self.layer(x).to(self.dtype), (8,))
        bias = torch.tensor([0.3]).to(self.dtype) * torch.arange(300, 308)
        scores = nn.functional.gelu(x * 3) @ (x + bias).transpose(-1, -2)
        return self.head((torch.softmax(scores * 0.01, -1) @ x).to(torch.float32))


class BetweenTypes(nn.Module):
    """Computes a function in half precision inside a model in float32."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], half: torch.dtype) -> None:
        super().__init__()
        self.linear, self.function, self.half = nn.Linear(8, 8), function, half

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x).to(self.half)).float() * 1.3


ROUNDED_ONCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "its nodes": nn.functional.silu,
    "a number": lambda x: torch.remainder(x, 0.7),
    "conversions of the exporter": lambda x: x.std(-1),
    "a result in float32": lambda x: torch.addcmul(x, x, x, value=0.3),
    "a decomposition": lambda x: torch.log1p(x.abs()),
    "a function of ours": lambda x: torch.atan2(x, x.flip(-1)),
    "halfway between two numbers": lambda x: torch.lerp(x, x * 2, 0.3),
}


@pytest.mark.parametrize("half", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
@pytest.mark.parametrize(
    "name", [name if name == "a number" else pytest.param(name, marks=pytest.mark.slow) for name in ROUNDED_ONCE]
)
def test_half_precision_is_rounded_once_in_an_operation(
    name: str, half: torch.dtype, frontend: FrontEnd, tmp_path: Path
) -> None:
    model = BetweenTypes(ROUNDED_ONCE[name], half).eval()
    assert proven(model, {"x": torch.randn(8, 8)}, tmp_path, frontend=frontend).agrees


@pytest.mark.parametrize("half", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16])
def test_half_precision_inside_a_model_is_computed_in_float32_and_rounded(half: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Biased(half).eval(), {"x": torch.randn(2, 8, 8)}
    result = export(model, x, tmp_path / "x.onnx", verify=True)
    assert result.check is not None
    assert result.check.status == "passed"
    assert result.verified is not None, result.verified
    assert result.verified.agrees, result.verified
    (made,) = result.session().run(None, {"x": x["x"].numpy()})
    torch.testing.assert_close(torch.from_numpy(made), model(**x), rtol=0, atol=1e-5)
    without = Biased(torch.float32)
    without.load_state_dict(model.state_dict())
    assert not verify(without.eval(), x, tmp_path / "x.onnx").agrees
    traced = export(model, x, tmp_path / "traced.onnx", frontend="torchscript")
    assert traced.check is not None
    assert traced.check.status == "passed"


class Steps(nn.Module):
    """Adds in half precision what leaves few digits: with the roundings left out, 23 % of what comes out differs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + 1000) * 3 - 3000).float()


@pytest.mark.parametrize("narrow_inputs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_onnx_runtime_rounds_each_step_in_float16_as_pytorch_does(narrow_inputs: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8) if not narrow_inputs else torch.randn(4, 8).half()
    model = nn.Sequential(nn.Identity() if narrow_inputs else Narrow(), Steps()).eval()
    result = export(model, (x,), tmp_path / "x.onnx", verify=True, check=False)
    (made,) = result.session().run(None, {"input": x.numpy()})
    assert result.verified is not None
    assert result.verified.agrees
    torch.testing.assert_close(torch.from_numpy(made), model(x), rtol=0, atol=0)


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.half()


@pytest.mark.slow
def test_a_fresh_router_chooses_among_equal_scores(tmp_path: Path) -> None:
    case = models.case("mixtral")
    model = case.build()
    for path, parameter in model.named_parameters():
        if path.endswith("gate.weight"):
            nn.init.zeros_(parameter)
    export(model, case.inputs(), tmp_path / "x.onnx", check=False)
    report = verify(model, case.inputs(), tmp_path / "x.onnx", perturb=False)
    assert report.agrees


@pytest.mark.slow
def test_a_model_that_loops_over_the_experts_that_were_chosen(tmp_path: Path) -> None:
    """OpenAI's privacy filter does so unless it is told otherwise."""
    sizes = models.DECODER | {"num_hidden_layers": 1}
    model: Any = models.pretrained("MixtralForCausalLM", **sizes, num_local_experts=2, num_experts_per_tok=1)()
    model.set_experts_implementation("eager")
    assert proven(model, models.TOKENS(), tmp_path).agrees
    assert model.get_experts_implementation()[""] == "eager"


class Noisy(nn.Module):
    """Draws numbers in one call, and computes from them in another."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.noise, self.after = nn.Linear(8, 8), Noise(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.noise(self.before(x)))


class Noise(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor] = torch.randn_like) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.draw(x)


def dropped(x: torch.Tensor) -> torch.Tensor:
    """Twice, as in a prenet that drops in evaluation, too: other elements each time."""
    return nn.functional.dropout(x, 0.1, training=True) - nn.functional.dropout(x, 0.1, training=True)


ALIKE = {"normal": torch.randn_like, "dropout": dropped, "choice": lambda x: torch.bernoulli(torch.full_like(x, 0.5))}
"""What files draw as PyTorch does."""


@pytest.mark.sweep
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
@pytest.mark.parametrize("draw", ALIKE)
def test_a_model_that_draws_random_numbers_is_compared_with_those(
    draw: str, frontend: FrontEnd, tmp_path: Path
) -> None:
    model = Noisy().eval()
    model.noise = Noise(ALIKE[draw])
    report = proven(model, {"x": torch.randn(3, 8)}, tmp_path, frontend=frontend)
    assert {call.address: call.status for call in report.calls} == dict.fromkeys(
        ("", "before", "noise", "after"), "agree"
    )


def test_a_fault_beside_random_numbers_is_found(tmp_path: Path) -> None:
    model = Noisy().eval()
    model.noise = Noise(dropped)
    export(model, {"x": torch.randn(3, 8)}, tmp_path / "x.onnx", check=False)
    graph = onnx.load(tmp_path / "x.onnx")
    next(node for node in graph.graph.node if node.op_type == "Sub").op_type = "Add"
    onnx.save(graph, tmp_path / "wrong.onnx")
    report = verify(model, {"x": torch.randn(3, 8)}, tmp_path / "wrong.onnx")
    assert [call.address for call in report.calls if call.status == "differ"] == ["noise"]


@pytest.mark.slow
def test_numbers_that_files_compute_from_others_are_not_compared(tmp_path: Path) -> None:
    """Exponential ones are logarithms of uniform ones: PyTorch's would be the wrong ones at their place."""
    model = Noisy().eval()
    model.noise = Noise(lambda x: x.new_empty(x.shape).exponential_())
    report = proven(model, {"x": torch.randn(3, 8)}, tmp_path)
    assert [one.status for one in report.outputs] == ["not compared"]
    assert {call.status for call in report.calls} == {"agree", "not compared"}


class Warped(nn.Module):
    """``AffineGrid`` is a function with an ``If``, for which onnx calls it random."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        grid = nn.functional.affine_grid(places, [2, 1, 4, 4], align_corners=False)
        return nn.functional.grid_sample(x, grid, align_corners=False)


def test_a_grid_is_not_random(tmp_path: Path) -> None:
    inputs = (torch.rand(2, 1, 4, 4), torch.rand(2, 2, 3))
    assert proven(Warped(), inputs, tmp_path, frontend="torchscript", opset=20).agrees


class OnlyFloat32(nn.Module):
    """Refuses other types, so that its run in float64 is impossible."""

    def __init__(self) -> None:
        super().__init__()
        self.block = models.Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 is needed")
        return self.block(x) * 0.7


def test_a_model_that_refuses_float64_is_compared_in_its_own_types(tmp_path: Path) -> None:
    report = proven(OnlyFloat32().eval(), {"x": torch.randn(3, 8)}, tmp_path)
    assert report.agrees
    assert next(call for call in report.calls if call.address == "block.linear").status == "agree"


class AsksForType(nn.Module):
    """Computes something else in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if x.dtype is torch.float64 else 3)


def test_a_model_that_asks_for_its_type_is_compared_once_in_float64_and_once_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_and_file, "compare_runs", compared := Mock(side_effect=compare_runs))
    assert proven(AsksForType(), {"x": torch.randn(3, 8)}, tmp_path).agrees
    assert compared.call_count == 2


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.slow
def test_an_encoder_that_takes_another_path_without_hooks(tmp_path: Path) -> None:
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    assert proven(Padded().eval(), {"x": torch.randn(2, 5, 16), "padding": padding}, tmp_path).agrees


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity()
        self.between, self.after = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = x + self.first(x)
        return self.after(self.last(added + self.second(self.between(added))))


@pytest.mark.slow
def test_documents_of_a_fused_file_name_no_output_that_has_no_name(tmp_path: Path) -> None:
    model, inputs = Residual(), {"x": torch.randn(2, 5, 8)}
    optimize_file(export(model, inputs, tmp_path / "m.onnx", check=False).path, "ort-bert", tmp_path / "fused.onnx")
    fused = load(tmp_path / "fused.onnx")
    assert any(not value.name for node in fused.nodes for value in node.outputs)
    assert verify(model, inputs, tmp_path / "fused.onnx").claims == []


class Queries(nn.Module):
    """Learned rows for each of a batch, which a module takes and computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm, self.project = nn.Parameter(torch.randn(5, 16)), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows.expand(x.shape[0], -1, -1)
        return self.project(rows) + self.norm(rows).mean() + x.mean()


@pytest.mark.parametrize("frontend", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
def test_rows_that_are_expanded_for_a_call_are_of_its_caller(
    frontend: Literal["dynamo", "torchscript"], tmp_path: Path
) -> None:
    model, x = Queries().eval(), torch.randn(2, 3)
    export(model, (x,), tmp_path / "x.onnx", frontend=frontend, dynamic=True, check=False)
    report = verify(model, (x,), tmp_path / "x.onnx", others=False)
    assert report.agrees, report


class Mixed(nn.Module):
    """A body in half precision before a norm in float32."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.half = half
        self.body, self.norm = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).to(half), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x.to(self.half)).float())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_parts_in_half_precision_are_compared_without_their_rounding(half: torch.dtype, tmp_path: Path) -> None:
    assert proven(Mixed(half).eval(), (torch.randn(2, 4),), tmp_path, frontend="torchscript").agrees


class NormalizesItsWeight(nn.Module):
    """Writes into the weight of a module before it calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.div_(self.linear.weight.norm(dim=1, keepdim=True))
        return self.linear(x)


def test_a_weight_that_a_caller_writes_to_is_computed_by_it(tmp_path: Path) -> None:
    model = NormalizesItsWeight().eval().requires_grad_(False)
    assert proven(model, (torch.randn(2, 4),), tmp_path, frontend="torchscript").agrees


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["ortho", "forward"])
def test_spectra_along_several_axes_are_not_accused(norm: str, tmp_path: Path) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(torch.fft.rfftn(x, dim=(-2, -1), norm=norm))

    x = torch.randn(2, 3, 8, 6)
    export(Spectrum(), (x,), tmp_path / "x.onnx", check=False)
    report = verify(Spectrum(), (x,), tmp_path / "x.onnx")
    assert report.agrees, report
