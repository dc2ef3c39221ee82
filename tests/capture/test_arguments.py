"""What a model takes and gives back: objects, flags and names are constants, and so is what is named one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from modelexport import export, verify
from modelexport.capture.value_decisions import inputs_read
from modelexport.errors import CaptureError, UsageError
from modelexport.pytorch.inputs.prepared_inputs import prepare_inputs
from truth import wrong

X = torch.linspace(-1, 1, 48).reshape(2, 6, 4).sin()
LENGTH = torch.tensor([2, 4])


@dataclasses.dataclass
class Given:
    x: torch.Tensor
    scale: float
    more: tuple[torch.Tensor, ...] = ()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class Objects(Layer):
    def forward(self, given: Given, activation: Any, mode: str = "plain") -> dict[str, Any]:
        y = activation(self.inner(given.x) * given.scale) + sum(given.more)
        return {
            "y": y if mode == "plain" else -y,
            "size": 3,
            "ready": True,
            "nothing": None,
            "given": Given(y + 1, 2.0),
        }


class Steps(Layer):
    """As many steps as the values of an input say."""

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(x.shape[0], 4)
        for step in range(int(length.max().item())):
            y = torch.tanh(self.inner(x[:, step]) + y)
        return y


class Branches(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.mean() > 0 else x * 3


def _run(path: Path, **feeds: torch.Tensor) -> Any:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert {value.name for value in session.get_inputs()} == set(feeds)
    return session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_objects_are_taken_apart_and_what_is_no_tensor_is_kept(frontend: Any, tmp_path: Path) -> None:
    model, given = Objects().eval(), Given(X, 0.5, (X * 2,))
    inputs = {"given": given, "activation": torch.tanh, "mode": "minus"}
    result = export(model, inputs, tmp_path / "m.onnx", frontend=frontend, verify=True, check=False)
    assert result.verified is not None
    assert result.verified.agrees
    assert [value.name for value in result.hierarchy.outputs] == ["y", "given.x"]
    assert result.hierarchy.settings.constants == {"activation": "tanh", "mode": "'minus'"}
    y, more = _run(tmp_path / "m.onnx", given_x=X + 1, given_more_0=X)
    expected = model(Given(X + 1, 0.5, (X,)), torch.tanh, "minus")
    assert torch.allclose(torch.from_numpy(y), expected["y"], atol=1e-6)
    assert torch.allclose(torch.from_numpy(more), expected["given"].x, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("constants", [pytest.param(["length"], marks=pytest.mark.slow), ["auto"]])
def test_an_input_that_says_how_many_steps_is_a_constant(constants: list[str], tmp_path: Path) -> None:
    model = Steps().eval()
    result = export(
        model, {"x": X, "length": LENGTH}, tmp_path / "m.onnx", constants=constants, verify=True, check=False
    )
    assert result.hierarchy.settings.constants == {"length": "int64[2] [2, 4]"}
    assert result.verified is not None
    assert result.verified.agrees
    assert not [note for note in result.verified.notes if "length" in note]
    (y,) = _run(tmp_path / "m.onnx", x=X + 1)
    assert torch.allclose(torch.from_numpy(y), model(X + 1, LENGTH), atol=1e-6)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + shift


@pytest.mark.parametrize("inputs", [{"x": X, "shift": X * 2}, (X, X * 2)], ids=["named", "positional"])
def test_a_constant_does_not_change_when_other_inputs_are_tried(inputs: Any, tmp_path: Path) -> None:
    result = export(Shifted().eval(), inputs, tmp_path / "m.onnx", constants=["shift"], verify=True, check=False)
    assert result.verified is not None
    others = {one.what: one.status for one in result.verified.others}
    assert others == {
        "other numbers, larger and smaller numbers": "agree",
        "numbers a thousand times as large": "agree",
    }
    assert result.verified.agrees


def test_the_error_alone_offers_the_input_that_the_structure_depends_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError, match="--constant length") as caught:
        export(Steps().eval(), {"x": X, "length": LENGTH}, tmp_path / "m.onnx", frontend="dynamo")
    assert capfd.readouterr() == ("", "")
    assert caught.value.constants == ("length",)
    assert "test_arguments.py" in caught.value.problem
    assert not list(tmp_path.iterdir())


def test_data_that_decides_is_not_offered_as_a_constant(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="data-dependent") as caught:
        export(Branches().eval(), (X,), tmp_path / "m.onnx", frontend="dynamo")
    assert caught.value.constants == ()


class BranchesAndSteps(Steps):
    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.mean() > 0 else x * 3, length)


@pytest.mark.slow
def test_a_constant_that_does_not_help_is_not_offered(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="data-dependent") as caught:
        export(BranchesAndSteps().eval(), {"x": X, "length": LENGTH}, tmp_path / "m.onnx", frontend="dynamo")
    assert caught.value.constants == ()
    assert "--constant" not in str(caught.value)


def test_a_constant_that_is_no_argument_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no argument lenght; did you mean length"):
        export(Steps().eval(), {"x": X, "length": LENGTH}, tmp_path / "m.onnx", constants=["lenght"])


def test_values_are_followed_from_inputs_to_where_python_reads_them() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor, sizes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            rows = (sizes * 2).tolist()
            best = int(nn.functional.embedding(ids, x[0]).sum(-1).argmax())
            return x[:, : rows[0]] * float(scale.sum()) + best

    inputs = {"x": X, "ids": torch.tensor([0, 1]), "sizes": torch.tensor([1, 2]), "scale": torch.tensor(2.0)}
    assert inputs_read(Reads(), inputs) == ["sizes", "scale"]


def test_on_the_command_line(tmp_path: Path) -> None:
    from modelexport.cli.command_parsers import app

    code = tmp_path / "nets.py"
    code.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = torch.nn.Linear(4, 4)\n"
        "    def forward(self, x, n):\n"
        "        return [self.inner(x) for _ in range(int(n))]\n"
        "def make():\n"
        "    return Net().eval(), {'x': torch.ones(2, 4), 'n': torch.tensor(2)}\n"
    )
    out = tmp_path / "m.onnx"
    told = CliRunner().invoke(app, ["export", f"{code}:make", "-o", str(out), "--constant", "n"])
    assert told.exit_code == 0, told.output
    assert "n = int64[] [2]" in told.output
    assert [value.name for value in onnxruntime.InferenceSession(out).get_inputs()] == ["x"]


def _tiny_bert() -> Any:
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return transformers.BertForTokenClassification(transformers.BertConfig(vocab_size=20, **sizes)).eval()


@pytest.mark.slow
def test_labels_are_left_out_and_the_report_says_so(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3]])
    inputs = {"input_ids": ids, "labels": ids % 2}
    result = export(_tiny_bert(), inputs, tmp_path / "m.onnx", verify=True, check=False)
    assert [value.name for value in result.hierarchy.inputs] == ["input_ids"]
    assert any("labels left out" in note for note in result.notes)
    assert "labels left out" in (tmp_path / "m.report.md").read_text()
    assert result.verified is not None
    assert result.verified.agrees


def test_a_tensor_is_the_only_argument(tmp_path: Path) -> None:
    model, image = nn.Conv2d(3, 4, 3).eval(), torch.randn(1, 3, 8, 8)
    export(model, image, tmp_path / "m.onnx", check=False)
    assert verify(model, image, tmp_path / "m.onnx").agrees


def test_example_inputs_are_not_changed() -> None:
    inputs = {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[0, 1]])}
    prepared = prepare_inputs(_tiny_bert(), inputs)
    assert list(inputs) == ["input_ids", "labels"]
    assert list(prepared.inputs) == ["input_ids"]


class Passes(nn.Module):
    """Its arguments have no names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.inner(*args[:1]) + sum(args[1:]) if args else self.inner(kwargs["input"]) - kwargs["more"]


def _given(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 4), torch.randn(batch, 3)


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        pytest.param(Passes, _given, id="positional"),
        pytest.param(Passes, lambda batch: dict(zip(("input", "more"), _given(batch), strict=True)), id="named"),
        pytest.param(
            lambda: torch.compile(nn.Sequential(nn.Linear(4, 3)), backend="eager"),
            lambda batch: _given(batch)[:1],
            id="compiled",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_arguments_without_names_have_dynamic_axes(build: Any, inputs: Any, tmp_path: Path) -> None:
    model = build().eval()
    export(model, inputs(2), tmp_path / "m.onnx", frontend="dynamo", dynamic=True, check=False)
    assert wrong(tmp_path / "m.onnx", model, inputs(5)) == ""


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_one_tensor_for_two_arguments_is_two_inputs(frontend: Any, tmp_path: Path) -> None:
    class Weighted(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * 2 + y

    zeros = torch.zeros(3)
    export(Weighted(), {"x": zeros, "y": zeros}, tmp_path / "m.onnx", frontend=frontend)
    assert not wrong(tmp_path / "m.onnx", Weighted(), (torch.rand(3), torch.rand(3)))
