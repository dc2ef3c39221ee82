"""Models with hooks of their own, and models that refuse what verify runs them with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from modelexport.pytorch.replaced_tensors import spread
from modelexport.runtime.fingerprints import is_floating
from torch import nn

import models
from modelexport import export, verify
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.pytorch.values import as_array

IDS = {"ids": torch.arange(3, 9)[None]}


class OfIds(nn.Module):
    """No input makes the numbers behind its normalization larger."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.act, self.head = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.norm(self.words(ids)) * 0.2))


HOOKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of 16 bits": lambda x: torch.clamp(torch.round(x * 4096), -32768.0, 32767.0) / 4096,
    "cut off": lambda x: torch.clamp(x + 1e-4, max=10.0),
}


@pytest.mark.parametrize("which", HOOKS)
def test_what_a_hook_of_the_model_cuts_off_is_cut_off_by_pytorch_too(which: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = OfIds().eval()
    for parameter in model.parameters():  # none equal, so that none are changed
        nn.init.uniform_(parameter, 0.5, 1.5)
    model.norm.register_forward_hook(lambda module, args, output: HOOKS[which](output))
    export(model, IDS, tmp_path / "file.onnx")
    report = verify(model, IDS, tmp_path / "file.onnx")
    assert [call.reason for call in report.calls if call.status == "differ"] == []


def test_half_precision_is_spread_without_an_infinite_factor() -> None:
    found = spread(torch.full((8,), 5e-4, dtype=torch.float16), 16.0)
    assert found.dtype == torch.float16
    assert found.tolist() == [64, 16, 8, 32, 0, 16, 48, 64]


def test_a_model_of_zeros_in_bfloat16_is_floating() -> None:
    """NumPy calls the type a structure; outputs of it that are zero, or no numbers, are told of as others are."""
    bfloat16 = as_array(torch.zeros(2, dtype=torch.bfloat16))
    assert bfloat16.dtype.kind == "V"
    assert is_floating(bfloat16)
    assert not is_floating(np.zeros(2, dtype=np.int64))


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return torch.sin(x) * 2 + x


class BetweenWaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.waves, self.head = Waves(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.waves(x))


def times(number: float, node: ir.Node) -> None:
    """Multiply what a node gives."""
    value, graph = node.outputs[0], node.graph
    assert isinstance(graph, ir.Graph)
    factor = ir.val("factor", const_value=ir.tensor(np.float32(number), name="factor"))
    graph.register_initializer(factor)
    product = ir.node("Mul", [value, factor], metadata_props=dict(node.metadata_props))
    product.name, product.outputs[0].name, product.outputs[0].dtype = "planted", "planted", value.dtype
    graph.insert_after(node, product)
    for user, index in [(user, index) for user, index in value.uses() if user is not product]:
        user.replace_input_with(index, product.outputs[0])


@pytest.mark.parametrize("hooked", [False, True])
def test_a_hook_of_the_model_does_not_hide_a_fault_behind_it(hooked: bool, tmp_path: Path) -> None:
    """The noise of a call is that of its own rounding, with what the hook does."""
    torch.manual_seed(0)
    model, inputs = BetweenWaves().eval(), (torch.randn(3, 16),)
    if hooked:
        model.waves.linear.register_forward_hook(lambda module, args, output: output * 1.5)
    export(model, inputs, tmp_path / "file.onnx")
    assert verify(model, inputs, tmp_path / "file.onnx").agrees
    file = load_onnx(tmp_path / "file.onnx")
    times(1.001, next(node for node in file.graph if node.op_type == "Sin"))
    save_model(file, tmp_path / "faulty.onnx")
    report = verify(model, inputs, tmp_path / "faulty.onnx")
    assert report.diverging is not None
    assert report.diverging.address == "waves"


class OnlyOdd(nn.Module):
    """Refuses even lengths, and gives nothing but the place of the largest number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and x.shape[1] % 2 == 0:
            raise ValueError("odd lengths only")
        return self.linear(x).argmax(-1)


class OnlyOnes(nn.Module):
    """Checks one of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and not bool((self.scale == 1).all()):
            raise ValueError("a scale of ones only")
        return self.linear(x) * self.scale


REFUSING: dict[str, tuple[type[nn.Module], Any, bool, str]] = {
    "sizes": (OnlyOdd, (torch.randn(3, 17, 16),), True, ""),
    "weights": (OnlyOnes, (torch.randn(3, 16),), False, "weights were not perturbed"),
}


@pytest.mark.parametrize("what", REFUSING)
def test_what_a_model_refuses_is_no_fault_of_its_file(what: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind, inputs, dynamic, note = REFUSING[what]
    model = kind().eval()
    export(model, inputs, tmp_path / "file.onnx", dynamic=dynamic)
    report = verify(model, inputs, tmp_path / "file.onnx")
    assert report.agrees
    assert any(one.startswith(note) for one in report.notes) if note else not report.notes


class Refused(OfIds):
    """Refuses numbers that its activation cannot give."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.words(ids)))
        if not torch.compiler.is_exporting() and float(x.detach().abs().max()) > 1:
            raise ValueError("too large")
        return self.head(torch.clamp(x, max=0.999999))


def test_a_model_that_refuses_larger_numbers_inside_is_told_of(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Refused().eval()
    export(model, IDS, tmp_path / "file.onnx")
    report = verify(model, IDS, tmp_path / "file.onnx", perturb=False)
    assert report.agrees
    assert any("ValueError: too large" in note for note in report.notes)


class Keeping(nn.Module):
    """Keeps what it computes for another module to read, and returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), torch.zeros(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.linear(x)
        return self.kept * 2


class Reading(nn.Module):
    def __init__(self, kept: Keeping) -> None:
        super().__init__()
        self._kept = [kept]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._kept[0].kept.tanh()


class KeepingAndReading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keeping = Keeping()
        self.reading = Reading(self.keeping)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reading(self.keeping(x).exp())


def test_a_module_may_read_what_another_one_kept(tmp_path: Path) -> None:
    model, inputs = KeepingAndReading().eval(), {"x": torch.randn(3, 8)}
    export(model, inputs, tmp_path / "kept.onnx")
    assert verify(model, inputs, tmp_path / "kept.onnx").agrees


@pytest.mark.parametrize(
    ("name", "dtype"), [("t5", "float16"), ("vit", "bfloat16"), ("mixtral", "bfloat16"), ("whisper", "bfloat16")]
)
def test_models_in_half_precision_agree(name: str, dtype: str, tmp_path: Path) -> None:
    """Rounding adds up on the way, to more than tells values apart; convolutions of bfloat16 compute in float32."""
    case = models.case(name)
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}: `make test` installs them")
    own = getattr(torch, dtype)
    inputs = {name: one.to(own) if one.is_floating_point() else one for name, one in case.inputs().items()}
    model = case.build().to(own)
    export(model, inputs, tmp_path / "half.onnx")
    assert verify(model, inputs, tmp_path / "half.onnx").agrees


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_traced_part_has_the_names_of_its_arguments(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    part = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), x)
    model, path = nn.Sequential(nn.Linear(8, 8), part).eval(), tmp_path / "traced.onnx"
    export(model, {"input": x}, path)
    report = verify(model, {"input": x}, path)
    assert report.agrees, report.claims
