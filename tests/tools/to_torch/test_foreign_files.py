"""Files of other exporters, and hostile ones, as code of PyTorch: it computes what the file does, or is refused."""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import modelexport
from commands import run
from modelexport.core.limits import COMPARED_ELEMENTS
from modelexport.errors import CheckError, ModelExportError
from modelexport.tools.to_torch import call_layout
from modelexport.tools.to_torch.layer_operators import OPERATORS
from modelexport.tools.to_torch.to_torch import torch_source
from modelexport.tools.to_torch.value_scope import with_names_used_again

FLOAT, INT64, BOOL, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING
node, info = helper.make_node, helper.make_tensor_value_info
X = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)


def saved(
    path: Path, nodes: Sequence[Any], weights: dict[str, Any] | None = None, *, sizes: Any = (2, 3), opset: int = 17,
    outputs: Sequence[str] = ("out",), kind: int = FLOAT,
) -> Path:  # fmt: skip
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    given = [info("in", FLOAT, sizes)]
    graph = helper.make_graph(nodes, "g", given, [info(name, kind, None) for name in outputs], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def largest_error(path: Path, x: Any = X) -> float:
    right = onnxruntime.InferenceSession(path).run(None, {"in": x})
    found = modelexport.to_torch(path)(torch.tensor(x))
    found = [*found.values()] if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
    return max(float(np.abs(one - other.detach().numpy()).max()) for one, other in zip(right, found, strict=True))


class Head(nn.Module):
    """Entries of one number: a bias, a weight, a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.last = nn.Linear(3, 1), nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.head(x)) * self.scale + 0.25


@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_entry_of_one_number_is_an_entry(dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Head().eval()
    with warnings.catch_warnings(action="ignore"):  # the exporter that is not the default is deprecated
        torch.onnx.export(model, (torch.tensor(X),), tmp_path / "m.onnx", dynamo=dynamo, verbose=False)
    back = modelexport.to_torch(tmp_path / "m.onnx")
    assert {name: entry.numel() for name, entry in back.state_dict().items()} == {
        name: entry.numel() for name, entry in model.state_dict().items()
    }
    assert all(torch.equal(entry, back.state_dict()[name]) for name, entry in model.state_dict().items())


def test_outputs_that_would_fill_the_memory_are_not_compared(tmp_path: Path) -> None:
    size = COMPARED_ELEMENTS + 1
    source = torch_source(saved(tmp_path / "m.onnx", [node("Expand", ["in", "s"], ["out"])], {"s": [size]}, sizes=[1]))
    assert source.compared(source.model()).startswith("its outputs have 67,108,865 elements")


def test_names_are_used_again_in_time_that_grows_with_the_statements() -> None:
    lines = ["add = f(x)", *(f"add_{place} = f(add_{place - 1})" for place in range(1, 3001))]
    lines[1] = "add_1 = f(add)"
    start = time.process_time()
    assert set(with_names_used_again(["x"], lines)) == {"add = f(x)", "add = f(add)"}
    assert time.process_time() - start < 5


def test_a_number_without_the_name_of_an_entry_stays_a_number(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [node("Mul", ["in", "half"], ["out"])], {"half": np.float32(0.5)})
    assert "* 0.5" in torch_source(path).text


def test_a_constant_with_the_name_of_a_bias_is_not_the_bias(tmp_path: Path) -> None:
    """``nn.Linear`` would have a random one."""
    nodes = [node("MatMul", ["in", "fc.weight"], ["m"], name="/fc/MatMul"),
             node("Constant", [], ["bias"], value=numpy_helper.from_array(np.arange(4, dtype=np.float32)[::-1].copy())),
             node("Add", ["m", "bias"], ["out"], name="/fc/Add")]  # fmt: skip
    assert largest_error(saved(tmp_path / "m.onnx", nodes, {"fc.weight": np.ones((3, 4), np.float32)})) < 1e-5


NAMES = ("_1", "class_1", "None_1", "__1", "__0x1", "torch_1", "self_2", "F", "lambda", "é", "x\ny", "'''", "range_3",
         "__module__ = 'torch.nn'")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_value_is_a_name_or_a_text_in_the_code(name: str, tmp_path: Path) -> None:
    nodes = [node("Relu", ["in"], [name]), node("Add", [name, name], ["a"]), node("Add", ["a", name], ["out"])]
    assert largest_error(saved(tmp_path / "m.onnx", nodes, outputs=["out", name])) < 1e-6


def loop(*nodes: Any) -> list[Any]:
    body = helper.make_graph([*nodes, node("Identity", ["c"], ["d"])], "body",
                             [info("i", INT64, []), info("c", BOOL, []), info("v", FLOAT, [2, 3])],
                             [info("d", BOOL, []), info("w", FLOAT, [2, 3])])  # fmt: skip
    return [node("Loop", ["n", "", "in"], ["out"], body=body)]


@pytest.mark.parametrize("place", ["/block", ""])
def test_a_module_in_a_loop_gets_the_number_of_the_step_as_a_tensor(place: str, tmp_path: Path) -> None:
    nodes = loop(node("Cast", ["i"], ["f"], to=FLOAT, name=f"{place}/Cast"),
                 node("Add", ["v", "f"], ["w"], name="/other/Add"))  # fmt: skip
    assert largest_error(saved(tmp_path / "m.onnx", nodes, {"n": np.int64(3)})) < 1e-6


class Inner(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"bias": False},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"batch_first": True}, {"num_layers": 2})),
    ],
)
def test_modules_of_one_class_may_have_unlike_arguments(arguments: dict[str, Any], tmp_path: Path) -> None:
    model = nn.Sequential(Inner(nn.GRU(3, 3)), Inner(nn.GRU(3, 3, **arguments))).eval()
    path = modelexport.export(model, (torch.randn(2, 2, 3),), tmp_path / "m.onnx", check=False).path
    text = torch_source(path).text
    assert text.count("class Inner") == 1 or "num_layers=2" in text
    x = torch.randn(2, 2, 3)
    torch.testing.assert_close(modelexport.to_torch(path)(x), model(x))


LONG, DEEP = "a." * 20_000 + "w", "/" + "a/" * 10_000
SQUARES = [node("Shape", ["in"], ["s0"]), *(node("Mul", [f"s{n}"] * 2, [f"s{n + 1}"]) for n in range(40)),
           node("Cast", ["s40"], ["out"], to=FLOAT)]  # fmt: skip
TWICE = [node("Shape", ["in"], ["s0"]), *(node("Concat", [f"s{n}"] * 2, [f"s{n + 1}"], axis=0) for n in range(14)),
         node("Cast", ["s14"], ["out"], to=FLOAT)]  # fmt: skip
SMALL_AND_ENDLESS: dict[str, tuple[list[Any], dict[str, Any], Any]] = {
    "a size that is squared 40 times": (SQUARES, {}, (2, 3)),
    "a size that is squared 40 times, of a dynamic axis": (SQUARES, {}, ("a", 3)),
    "sizes that are repeated 14 times": (TWICE, {}, ("a", "b")),
    "a parameter with a name of 20,000 parts": ([node("Add", ["in", LONG], ["out"])], {LONG: X[0]}, (2, 3)),
    "a node with a name of 10,000 parts": ([node("Relu", ["in"], ["out"], name=f"{DEEP}Relu")], {}, (2, 3)),
    "a value with a name of 10,000 parts": (
        [node("Relu", ["in"], [f"{DEEP}Relu_output_0"]), node("Relu", [f"{DEEP}Relu_output_0"], ["out"])], {}, (2, 3)),
    "a long signal": (
        [node("Add", ["in", "in"], ["a"]), *(node("Mul", ["a", "a"], ["a" * n]) for n in range(2, 9)),
         node("Relu", ["aa"], ["out"])], {}, (5_000_000,)),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", SMALL_AND_ENDLESS)
def test_a_small_file_is_converted_in_seconds(name: str, tmp_path: Path) -> None:
    nodes, weights, sizes = SMALL_AND_ENDLESS[name]
    start = time.process_time()
    text = torch_source(saved(tmp_path / "m.onnx", nodes, weights, sizes=sizes)).text
    assert time.process_time() - start < 15
    assert len(text) < 500_000


STATE = {"w": np.ones((1, 16, 3), np.float32), "r": np.ones((1, 16, 4), np.float32)}
REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "Gather": ([node("Gather", ["in", "i"], ["out"], axis=400_000_000)], {"i": [0]}, "its axis 400000000 is out of"),
    "Unsqueeze": ([node("Unsqueeze", ["in", "i"], ["out"])], {"i": [0, 400_000_000]}, "its axis 400000000 is out of"),
    "Slice": ([node("Slice", ["in", *"ijk"], ["out"])], {"i": [0], "j": [1], "k": [4 * 10**8]}, "is out of range"),
    "a step of 0": (
        [node("Conv", ["in", "w"], ["out"], strides=[0], auto_pad="SAME_UPPER")],
        {"w": np.ones((2, 3, 1), np.float32)},
        "its inputs or attributes do not fit",
    ),
    "a loop without a body": ([node("Loop", ["", "", "in"], ["out"])], {}, "lacks its attribute body"),
    "a loop of another body": (
        [node("Loop", ["", "", "in"], ["out"], body=helper.make_graph([], "b", [], []))],
        {},
        "are not those of its graphs",
    ),
    "texts": ([node("Gather", ["t", "i"], ["out"])], {"t": np.array(["a", "b"]), "i": [0]}, "is a tensor of texts"),
    "constant texts": ([node("Constant", [], ["out"], value_strings=["a", "b"])], {}, "is a tensor of texts"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    nodes, weights, reason = REFUSED[name]
    path = saved(tmp_path / "m.onnx", nodes, weights, sizes=(1, 3, 4), kind=STRING if "text" in name else FLOAT)
    with pytest.raises(ModelExportError, match=reason) as raised:
        torch_source(path)
    assert "\n" not in str(raised.value)


def test_an_attention_whose_products_are_used_is_refused(tmp_path: Path) -> None:
    nodes = [node("Attention", ["in", "in", "in"], ["y", "", "", "out"], q_num_heads=1, kv_num_heads=1)]
    with pytest.raises(ModelExportError, match="its fourth output is used"):
        torch_source(saved(tmp_path / "m.onnx", nodes, sizes=(1, 2, 3), opset=23))


def test_a_state_of_another_batch_is_an_error(tmp_path: Path) -> None:
    """PyTorch's functions, without those of its modules, would write beyond the memory of the state."""
    weights = {**STATE, "h": np.zeros((1, 1, 4), np.float32), "c": np.zeros((1, 1, 4), np.float32)}
    nodes = [node("LSTM", ["in", "w", "r", "", "", "h", "c"], ["out"], hidden_size=4)]
    model = modelexport.to_torch(saved(tmp_path / "m.onnx", nodes, weights, sizes=("t", "n", 3)))
    assert model(torch.ones(5, 1, 3))["out"].shape == (5, 1, 1, 4)
    with pytest.raises(ValueError, match="an initial state of shape"):
        model(torch.ones(5, 3, 3))


def test_code_refuses_the_weights_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        path = saved(tmp_path / f"{number}.onnx", [node("MatMul", ["in", "fc.weight"], ["out"])],
                     {"fc.weight": np.full((3, 3), number, np.float32)})  # fmt: skip
        assert run("to-torch", path, "-o", tmp_path / f"net_{number}.py").returncode == 0
    (tmp_path / "net_2.safetensors").replace(tmp_path / "net_1.safetensors")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("net_1")
    with pytest.raises(ValueError, match="was not written with") as raised:
        module.load()
    assert "\n" not in str(raised.value)
    loaded = module.load(tmp_path / "net_1.safetensors")  # which says that these are wanted
    assert loaded.state_dict()["fc.weight"].eq(2).all()
    del sys.modules["net_1"]


WRONG = {"all": "torch.tanh(a)", "other sizes": "torch.relu(a) * (a.shape[0] == 2)", "an error": "a.nothing()"}


@pytest.mark.parametrize("what", WRONG)
def test_code_that_computes_something_else_than_the_file_is_not_written(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPERATORS, ("", "Relu"), lambda o: o.write(WRONG[what]))
    path = saved(tmp_path / "m.onnx", [node("Relu", ["in"], ["out"])], sizes=("batch", 3))
    refused = run("to-torch", path, "-o", tmp_path / "net.py")
    assert refused.returncode == 1
    assert "does not compute what" in refused.stderr
    assert not [*tmp_path.glob("net.*")]
    with pytest.raises(CheckError, match="does not compute what"):
        modelexport.to_torch(path)


def test_products_that_the_processor_saturates_are_no_difference(tmp_path: Path) -> None:
    nodes = [node("Constant", [], ["k"], value_float=255.0), node("Add", ["in", "k"], ["a"]),
             node("Clip", ["a", "", "k"], ["b"]), node("Cast", ["b"], ["u"], to=TensorProto.UINT8),
             node("MatMulInteger", ["u", "w"], ["m"]), node("Cast", ["m"], ["out"], to=FLOAT)]  # fmt: skip
    path = saved(tmp_path / "m.onnx", nodes, {"w": np.full((3, 4), 127, np.int8)})
    assert modelexport.to_torch(path)(torch.full((2, 3), 1.0))["out"].eq(3 * 255 * 127).all()


def test_a_file_that_draws_random_numbers_is_written_and_not_compared(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [node("RandomNormalLike", ["in"], ["r"]), node("Add", ["in", "r"], ["out"])])
    told = run("to-torch", path, "-o", tmp_path / "net.py")
    assert told.returncode == 0
    assert "not compared with m.onnx: it draws random numbers" in told.stdout


def test_modules_of_more_elements_than_the_limit_are_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes are found by running them, which takes minutes for a small file with a long signal."""
    path = modelexport.export(
        nn.Sequential(nn.GroupNorm(2, 4)), (torch.randn(2, 4, 50),), tmp_path / "m.onnx", check=False
    ).path
    assert "nn.GroupNorm(2, 4)" in torch_source(path).text
    monkeypatch.setattr(call_layout, "TESTED_ELEMENTS", 1000)
    assert "nn.GroupNorm(2, 4)" not in torch_source(path).text
    modelexport.to_torch(path)


def test_an_entry_of_another_shape_than_the_file_records_is_refused(tmp_path: Path) -> None:
    path = modelexport.export(nn.Linear(3, 4), (torch.ones(2, 3),), tmp_path / "m.onnx", check=False).path
    model = onnx.load(path)
    next(each for each in model.graph.initializer if each.name == "bias").dims[:] = [1, 4]
    onnx.save(model, path)
    refused = run("to-torch", path, "-o", tmp_path / "net.py")
    assert refused.returncode == 2
    assert "bias has the shape [1, 4] and is recorded with [4]" in refused.stderr
