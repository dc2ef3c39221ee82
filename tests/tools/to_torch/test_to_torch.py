"""A file comes back as a model: its modules, its ``state_dict``, its numbers, its gradients, its tags."""

from __future__ import annotations

import functools
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import modelexport
from commands import run
from modelexport.errors import UsageError
from modelexport.format.documents import CallTensor
from modelexport.tagged.file import read_tagged
from modelexport.tools.to_torch.nested_graphs import MissingOperatorError
from modelexport.tools.to_torch.recognized_torch_classes import runs
from modelexport.tools.to_torch.to_torch import TorchSource, torch_source
from modelexport.traces.file_run import FileRun


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.drop(self.down(nn.functional.gelu(self.up(self.norm(hidden)))))


class Everything(nn.Module):
    """A convolution, an LSTM, equal blocks, one module called twice, a tied weight, a buffer, an unused module, and
    parameters of which others are computed: a weight with its norm, a logarithm, and a table of places.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU())
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.twice = Block(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.randn(8))
        self.unused = nn.Linear(3, 5)
        self.normed, self.log = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Parameter(torch.randn(8))
        self.places = nn.Embedding(3, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, _ = self.lstm(self.conv(x).transpose(1, 2))
        places = self.places(torch.arange(6) // 2)
        for block in self.blocks:
            hidden = block(hidden * -self.log.exp() + places)
        hidden = self.normed(hidden + places)
        hidden = self.twice(self.twice(hidden)) + self.shift
        return {"first": self.first(hidden), "second": self.second(hidden).mean(1)}


@functools.cache
def exported() -> tuple[nn.Module, torch.Tensor, Path]:
    torch.manual_seed(0)
    model, x = Everything().eval(), torch.randn(2, 4, 6)
    path = Path(tempfile.mkdtemp()) / "everything.onnx"
    modelexport.export(model, {"x": x}, path, check=False)
    return model, x, path


@functools.cache
def back() -> TorchSource:
    return torch_source(exported()[2])


def loss(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum((output.square().sum() for output in outputs.values()), torch.zeros(()))


def test_the_state_dict_is_the_original_s() -> None:
    """Also where the file has a weight transposed, or in the gates' other order; unused entries are zeros."""
    original, model = exported()[0], back().model()
    entries, same = original.state_dict(), model.state_dict()
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in entries.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in same.items()
    }
    assert [key for key in entries if not torch.equal(entries[key], same[key])] == ["unused.weight", "unused.bias"]
    assert model.second.weight is model.first.weight
    assert {name for name, _ in model.named_buffers()} == {
        "shift", "conv.1.running_mean", "conv.1.running_var", "conv.1.num_batches_tracked", "indices",
    }  # fmt: skip
    Everything().load_state_dict(same, strict=True)


def test_numbers_and_gradients_are_the_file_s() -> None:
    original, x, path = exported()
    model = torch_source(path, dtype="float64").model()
    wanted = FileRun(read_tagged(path).model, in_float64_for="float32").run({"x": x.numpy()})
    for name, output in model(x.double()).items():
        np.testing.assert_allclose(output.detach().numpy(), wanted[name], rtol=1e-8, atol=1e-9)
    single = back().model()
    for each in (original, single):
        each.zero_grad()
        loss(each(x)).backward()
    for name, parameter in original.named_parameters():
        if not name.startswith("unused"):
            torch.testing.assert_close(single.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + weight.T


class Pooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.activation = nn.Linear(8, 8), nn.Tanh()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(hidden[:, 0]))


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.project, self.activation = nn.Linear(8, 24), nn.Linear(8, 8), nn.SiLU()
        self.key_norm, self.drop = nn.Identity(), nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, self.key_norm(key), value)
        attended = self.activation(attended.transpose(1, 2).flatten(2))
        return hidden + self.drop(attended * self.project(self.activation(time)))


class IgnoresTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.nothing = nn.Linear(8, 8), nn.Sequential()

    def forward(self, hidden: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        self.nothing(time)
        return self.out(hidden)


class CallsWithoutNodes(nn.Module):
    """Modules of whose calls some have no nodes in the file: the blocks compute the activation of the time once for
    all, nothing uses the result of one of two poolers, the file does not have the key in the shape that its norm gets,
    and a call only returns a tensor that its caller does not need.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.pooler = nn.ModuleList(Conditioned() for _ in range(2)), Pooler()
        self.ignores, self.summary = IgnoresTime(), Pooler()
        self.last = nn.Linear(8, 8)
        nn.utils.parametrize.register_parametrization(self.last, "weight", Symmetric())

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, time)
        self.pooler(x)
        return self.last(self.ignores(x, time) + self.summary(x)[:, None])


@functools.cache
def without_nodes() -> tuple[nn.Module, dict[str, torch.Tensor], Path]:
    torch.manual_seed(0)
    model, inputs = CallsWithoutNodes().eval(), {"x": torch.randn(2, 5, 8), "time": torch.randn(2, 1, 8)}
    path = Path(tempfile.mkdtemp()) / "without_nodes.onnx"
    modelexport.export(model, inputs, path, check=False)
    return model, inputs, path


def test_calls_without_nodes_are_called_again() -> None:
    model, inputs, path = without_nodes()
    source = torch_source(path)
    same: Any = source.model()
    torch.testing.assert_close(same(**inputs), model(**inputs))
    assert "self.project(self.activation(time))" in source.text
    assert "self.nothing = nn.Sequential()" in source.text
    assert "self.nothing(time)" in source.text
    assert "self.key_norm(hidden.new_zeros((2, 2, 5, 4)))" in source.text
    assert "self.dense(hidden.new_zeros((2, 8)))" in source.text
    assert "self.activation = nn.Tanh()" in source.text


@pytest.mark.slow
@pytest.mark.parametrize("made", [exported, without_nodes])
def test_exported_again_it_has_the_same_calls_and_tags(made: Any, tmp_path: Path) -> None:
    _, given, path = made()
    inputs = given if isinstance(given, dict) else {"x": given}
    modelexport.export(torch_source(path).model(), inputs, tmp_path / "again.onnx", check=False)
    old, new = modelexport.load(path), modelexport.load(tmp_path / "again.onnx")
    assert {str(call): tag for call, tag in old.tags.items()} == {str(call): tag for call, tag in new.tags.items()}
    assert [value.name for value in new.model.graph.outputs] == [value.name for value in old.model.graph.outputs]


def test_the_source_is_what_a_person_would_write() -> None:
    text = back().text
    assert re.findall(r"^class (\w+)", text, re.MULTILINE) == [
        "Block", "_WeightNorm", "ParametrizationList", "ParametrizedLinear", "Everything",
    ]  # fmt: skip
    assert "self.lstm = nn.LSTM(8, 8, batch_first=True)" in text
    assert "self.lstm(self.conv(x).transpose(-2, -1))[0]" in text
    assert "self.places = nn.Embedding(3, 8)" in text
    assert "-torch.exp(self.log)" in text
    assert "self.blocks = nn.ModuleList([Block() for _ in range(2)])" in text
    assert "self.conv = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU())" in text
    assert "return hidden + self.drop(self.down(F.gelu(self.up(self.norm(hidden)))))" in text
    assert text.count("self.twice(") == 2
    assert "self.second.weight = self.first.weight" in text


def test_the_command_writes_code_that_runs_without_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, x, path = exported()
    out = tmp_path / "model.py"
    told = run("to-torch", path, "-o", out, "--dropout", "blocks.*=0.25", "--dropout", "twice.drop=0.5")
    assert "Everything" in told.stdout
    monkeypatch.setitem(sys.modules, "modelexport", None)  # nothing of it can be imported
    code = runpy.run_path(str(out))
    model = code["load"]()
    made = model(x)
    assert model.twice.drop.p == 0.5
    assert not model.train()(x)["first"].equal(made["first"])
    torch.testing.assert_close(made["second"], exported()[0](x)["second"], rtol=0, atol=1e-4)
    assert out.read_text().count("F.dropout(") == 1  # one class for both blocks


@pytest.mark.parametrize("dropout", ["blocks.*", "blocks.*=2", "blocks.*=x", "nothing=0.1"])
def test_a_dropout_that_means_nothing_is_refused(dropout: str, tmp_path: Path) -> None:
    refused = run("to-torch", exported()[2], "-o", tmp_path / "m.py", "--dropout", dropout)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def graph(node: ir.Node, *inputs: ir.Value) -> ir.Model:
    values = [*inputs]
    return ir.Model(ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 20, "other": 1}), ir_version=10)


def tensor(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 3]))


def test_names_of_a_file_never_become_code() -> None:
    """Names of values, inputs and outputs are identifiers or quoted texts."""
    x = tensor("x): __import__('os').abort()  #")
    node = ir.node("Relu", [x], outputs=[tensor('y"}; raise SystemExit #')])
    model = torch_source(graph(node, x)).model()
    assert list(model(torch.ones(2, 3))) == ['y"}; raise SystemExit #']


@pytest.mark.parametrize("value", ["0); __import__('os').abort(", ["0); __import__('os').abort("]])
@pytest.mark.parametrize(("operator", "name"), [("Softmax", "axis"), ("Concat", "axis"), ("Transpose", "perm")])
def test_attributes_of_a_wrong_type_never_become_code(operator: str, name: str, value: Any) -> None:
    x = tensor("x")
    node = ir.node(operator, [x], attributes={name: value}, outputs=[tensor("y")])
    with pytest.raises(UsageError, match=f"the attribute {name} of {operator} .*is of the type STRING"):
        torch_source(graph(node, x))


def test_a_missing_operator_names_itself_its_module_and_the_place_to_add_it() -> None:
    x = tensor("x")
    node = ir.node("Fancy", [x], domain="other", name="fancy", outputs=[tensor("y")])
    with pytest.raises(MissingOperatorError, match=r"other\.Fancy fancy of \. cannot .*modelexport replace"):
        torch_source(graph(node, x))


def test_the_place_of_the_weights_is_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "damaged.onnx").write_text("damaged")
    (tmp_path / "model.safetensors").mkdir()
    done = run("to-torch", tmp_path / "damaged.onnx", "-o", tmp_path / "model.py")
    assert "model.safetensors is a folder" in done.stderr


def test_only_python_is_written() -> None:
    with pytest.raises(UsageError, match="is not a Python file"):
        back().write("model.onnx")


LAYERS = (
    "GroupNorm(4, 8)", "GroupNorm(2, 8, eps=0.1)", "InstanceNorm2d(8, affine=True)", "PReLU(num_parameters=8)",
    "GLU(dim=1)", "PixelShuffle(2)", "ReflectionPad2d(1)", "AdaptiveAvgPool2d(2)", "Threshold(0.25, 2.0)", "SiLU()",
    "Threshold(20.0, 1.5)", "Hardshrink(lambd=10.0)", "Softshrink(lambd=10.0)", "Softplus(threshold=5.0)",
)  # fmt: skip


def test_classes_that_are_written_as_several_nodes_are_found_by_running_them(tmp_path: Path) -> None:
    layers = nn.ModuleList(eval(f"nn.{layer}") for layer in LAYERS)

    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(layer(x + place) for place, layer in enumerate(self.layers))

    text = torch_source(
        modelexport.export(Each(), (torch.randn(3, 8, 4, 4),), tmp_path / "x.onnx", check=False).path
    ).text
    for layer in LAYERS:
        assert f"nn.{layer}" in text


def test_a_class_that_differs_beyond_what_random_numbers_reach_is_written_out(tmp_path: Path) -> None:
    """A file may say ``ReLU6`` where somebody changed the limit; no number of normal size tells that."""
    path = modelexport.export(nn.Sequential(nn.ReLU6()), (torch.randn(2, 3),), tmp_path / "x.onnx", check=False).path
    model = onnx.load(path)
    for each in model.graph.initializer:
        if onnx.numpy_helper.to_array(each) == 6:
            each.CopyFrom(onnx.numpy_helper.from_array(np.float32(7), each.name))
    onnx.save(model, path)
    text = torch_source(path).text
    assert "nn.ReLU6" not in text
    assert "7.0" in text


@pytest.mark.slow
def test_axes_that_fractions_are_computed_from_stay_dynamic(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((0, 1)) * x.shape[0] / x.shape[1] + x[: x.shape[0] // 2].sum()

    first = modelexport.export(Scaled(), (torch.randn(6, 5),), tmp_path / "x.onnx", dynamic=True, check=False).path
    again = modelexport.export(
        modelexport.to_torch(first), (torch.randn(6, 5),), tmp_path / "y.onnx", dynamic=True, check=False
    ).path
    assert not any(isinstance(size, int) for size in ir.load(again).graph.inputs[0].shape or [1])


RESIZES = [("bilinear", None), ("nearest", None), ("bilinear", 1.75), ("bilinear", 1.7), ("bicubic", 1.7)]


@pytest.mark.parametrize(
    ("mode", "factor"), [("bilinear", 0.7), *(pytest.param(*each, marks=pytest.mark.slow) for each in RESIZES)]
)
def test_a_dynamic_image_is_resized_to_sizes(mode: str, factor: float | None, tmp_path: Path) -> None:
    class Back(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            how: dict[str, Any] = {"size": x.shape[-2:]} if factor is None else {"scale_factor": factor}
            return nn.functional.interpolate(x[:, :, ::2, ::2], **how, mode=mode)

    path = modelexport.export(Back(), (torch.randn(2, 3, 8, 10),), tmp_path / "x.onnx", dynamic=True, check=False).path
    x = torch.randn(1, 3, 7, 5)
    assert torch.allclose(modelexport.to_torch(path)(x), Back()(x), atol=1e-6)


@pytest.mark.slow
def test_corners_stay_corners_with_a_scale_that_is_not_a_whole_number(tmp_path: Path) -> None:
    model, x = nn.Upsample(scale_factor=1.7, mode="bilinear", align_corners=True), torch.randn(1, 2, 10, 9)
    path = modelexport.export(model, (x,), tmp_path / "x.onnx", check=False).path
    assert torch.allclose(modelexport.to_torch(path)(x), model(x), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_classes_of_narrow_types_are_found_too(dtype: torch.dtype, tmp_path: Path) -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.cut, self.rnn = nn.GroupNorm(2, 4, eps=1e-3), nn.Threshold(0.1, -3.0), nn.GRU(8, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.rnn(self.cut(self.norm(x)))[0]

    model, x = Short().to(dtype), torch.randn(2, 4, 8, dtype=dtype)
    source = torch_source(modelexport.export(model, (x,), tmp_path / "x.onnx", check=False).path)
    kind = f"dtype={dtype}"
    for line in (f"GroupNorm(2, 4, eps=0.001, {kind})", "Threshold(0.1, -3.0)", f"GRU(8, 4, {kind})"):
        assert f"nn.{line}" in source.text
    assert source.model()(x).equal(model(x))


@pytest.mark.slow
def test_a_class_that_differs_at_odd_sizes_is_written_out(tmp_path: Path) -> None:
    layer, x = nn.AvgPool2d(2, ceil_mode=True, divisor_override=2), torch.randn(2, 3, 8, 8)
    path = modelexport.export(nn.Sequential(layer), (x,), tmp_path / "x.onnx", dynamic=True, check=False).path
    assert torch.allclose(modelexport.to_torch(path)(x[..., :7]), layer(x[..., :7]))


def test_arguments_that_are_tried_are_few_and_their_weights_are_never_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a convolution that goes around is two nodes: its padding has no counterpart among numbers."""
    layer = nn.Conv2d(64, 64, 3, padding=1, padding_mode="circular")
    path = modelexport.export(nn.Sequential(layer), (torch.randn(1, 64, 4, 4),), tmp_path / "x.onnx", check=False).path
    made: list[str] = []

    def initialize(made_by: nn.Conv2d) -> None:
        made.append(made_by.weight.device.type)

    monkeypatch.setattr(nn.Conv2d, "reset_parameters", initialize)
    source = torch_source(path)
    assert "Conv2d" in source.text
    assert 0 < len(made) <= 300
    assert set(made) == {"meta"}


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        cosine, sine = table.chunk(2, -1)
        return self.up(x * cosine + sine)  # type: ignore[no-any-return]


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turn() for _ in range(2))
        self.register_buffer("table", torch.randn(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.table)
        return x


def test_a_node_that_two_blocks_share_is_in_both(tmp_path: Path) -> None:
    text = torch_source(modelexport.export(Turns(), (torch.randn(2, 6),), tmp_path / "x.onnx", check=False).path).text
    assert "nn.ModuleList([Turn() for _ in range(2)])" in text
    assert "table.chunk(2, 0)" in text
    assert "x = layer(x, self.table)" in text


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.7 * x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.second(self.gate(self.first(x))))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_module_that_was_called_twice_under_one_name_takes_no_other_modules_nodes(tmp_path: Path) -> None:
    """Other exporters do not tell the two calls of the gate apart, so it seems to run before the second layer."""
    torch.onnx.export(Gated().eval(), (torch.randn(2, 4),), tmp_path / "x.onnx", dynamo=True, verbose=False)
    text = torch_source(tmp_path / "x.onnx").text
    assert "self.second = nn.Linear(4, 4)" in text
    assert "self.second(" in text


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.left(x).relu(), lambda x: self.right(x).tanh(), (x,))


def test_branches_are_those_of_python(tmp_path: Path) -> None:
    model, x = Branches().eval(), torch.ones(2, 4)
    modelexport.export(model, {"x": x}, tmp_path / "m.onnx", check=False)
    source = torch_source(tmp_path / "m.onnx")
    assert re.search(r"if .+:\n.*\n        else:", source.text)
    same: Any = source.model()
    for each in (x, -x):
        torch.testing.assert_close(same(each), model(each))


class Shortened(nn.Module):
    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return x[:, : length[0]].mean(1)


@pytest.mark.slow
def test_a_size_that_is_a_value_stays_dynamic(tmp_path: Path) -> None:
    """Python reads it as a number, in a way that exporters understand."""
    model, x, length = Shortened().eval(), torch.randn(2, 5, 8), torch.tensor([3])
    modelexport.export(model, {"x": x, "length": length}, tmp_path / "m.onnx", check=False)
    same: Any = torch_source(tmp_path / "m.onnx").model()
    modelexport.export(same, {"x": x, "length": length}, tmp_path / "again.onnx", check=False)
    again: Any = modelexport.to_torch(tmp_path / "again.onnx")
    for each in (length, length - 1):
        torch.testing.assert_close(again(x, each), model(x, each))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = [layer(hidden).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        result = nn.functional.scaled_dot_product_attention(*heads, mask)
        return result.transpose(1, 2).flatten(2)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attends()

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, keys = (torch.arange(size) for size in mask.shape)
        seen = mask.bool()[batch[:, None, None, None], keys[None, None, None]]
        return self.attention(hidden, (keys[None, None, :, None] >= 0) & seen)


@pytest.mark.slow
def test_of_dynamic_sizes_attention_is_one_call_and_sizes_have_names(tmp_path: Path) -> None:
    model, path = Masked().eval(), tmp_path / "m.onnx"
    hidden, mask = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.long)
    modelexport.export(model, {"hidden": hidden, "mask": mask}, path, dynamic=True, check=False)
    source = torch_source(path)
    assert re.search(r"\w+ = self\.query\(hidden\)\.unflatten\(-1, \(2, 4\)\)\.transpose\(1, 2\)\n", source.text)
    assert "F.scaled_dot_product_attention(query, key, value, mask)" in source.text
    assert "self.attention(hidden, mask.bool()[:, None, None])" in source.text
    hidden, mask = torch.randn(3, 7, 8), torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    torch.testing.assert_close(source.model()(hidden, mask), model(hidden, mask))


@pytest.mark.parametrize(
    ("constructor", "dtype", "expected"),
    [
        ("nn.Softmax()", "float32", True),  # with a warning of torch, which an error would be here
        ("nn.Sequential(OrderedDict(a=nn.ReLU()))", "float32", True),
        ("nn.Sequential(Block())", "float32", False),  # a class of the file
        ("nn.ReLU()", "a type that torch lacks", False),
        ("nn.PixelShuffle(2)", "float32", False),
        ("nn.FractionalMaxPool2d(2, output_size=1)", "float32", False),
    ],
)
def test_whether_a_module_takes_a_tensor_is_told_whatever_it_raises(
    constructor: str, dtype: str, *, expected: bool
) -> None:
    assert runs(constructor, [CallTensor(name="x", dtype=dtype, shape=["batch", 3])]) is expected


@pytest.mark.parametrize("recorded", [False, True], ids=["names", "metadata of torch.onnx"])
def test_folded_weights_of_other_exporters_are_parameters_of_their_modules(recorded: bool, tmp_path: Path) -> None:
    name = "val_3" if recorded else "onnx::MatMul_9"
    w, b, table = (np.random.default_rng(0).random(s, np.float32) for s in ((3, 4), 4, (2, 4)))
    nodes = [
        helper.make_node("MatMul", ["x", name], ["m"], name="/fc/MatMul"),
        helper.make_node("Add", ["fc.bias", "m"], ["a"], name="/fc/Add"),
        helper.make_node("Mul", ["a", "table"], ["y"], name="/Mul"),
    ]
    sides = [[helper.make_tensor_value_info(n, 1, [2, s])] for n, s in (("x", 3), ("y", 4))]
    tensors = [numpy_helper.from_array(a, n) for a, n in ((w, name), (b, "fc.bias"), (table, "table"))]
    described = [helper.make_tensor_value_info(t.name, 1, t.dims) for t in tensors]
    for value, kind, persistent in ((described[1], "PARAMETER", "None"), (described[2], "BUFFER", "False")):
        for key, text in (("kind", kind), ("persistent", persistent)):
            value.metadata_props.add(key=f"pkg.torch.export.graph_signature.InputSpec.{key}", value=text)
    graph = helper.make_graph(nodes, "g", *sides, tensors, value_info=described if recorded else [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "m.onnx")
    source = torch_source(tmp_path / "m.onnx")
    model = source.model()
    assert source.unnamed == ("fc.weight",)
    assert "nn.Linear(3, 4)" in source.text
    assert torch.equal(model.state_dict()["fc.weight"], torch.tensor(w.T))
    assert {n for n, _ in model.named_parameters()} == {"fc.weight", "fc.bias"} | (set() if recorded else {"table"})
    x = torch.rand(2, 3)
    torch.testing.assert_close(model(x)["y"], (x @ torch.tensor(w) + torch.tensor(b)) * torch.tensor(table))
