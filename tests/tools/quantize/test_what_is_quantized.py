"""Which nodes `quantize` quantizes, in every form that exporters write, and what it says of those left in float."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

import modelexport
from commands import run
from corpus import make_adapter, tiny
from graph_texts import written
from modelexport.errors import UsageError
from modelexport.format.keys import STATE_DICT
from modelexport.runtime.half_precision import in_half_precision
from modelexport.runtime.products_for_quantizers import transpose_weights
from modelexport.runtime.saturating_products import saturating
from modelexport.tagged.file import read_tagged
from modelexport.tools.optimizers.optimize_tools import optimize_file
from modelexport.tools.quantize.equal_method_groups import weighted_nodes

pytestmark = pytest.mark.int8

RANDOM = np.random.default_rng(0)
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(1, 4, 32)


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def adopted(folder: Path, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], **options: object) -> Path:
    """A tagged file of nodes from ``x`` of (1, 4, 32) to ``y``; up to IR version 3 weights are inputs as well."""
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    ir_version = int(str(options.get("ir_version", 8)))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 32])]
    if ir_version < 4:
        inputs += [helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in tensors]
    more = options.get("inputs", [])
    assert isinstance(more, list)
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", [*inputs, *more], outputs, tensors)
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), folder / "other.onnx")
    modelexport.adopt(folder / "other.onnx", folder / "a.onnx")
    tagged = onnx.load(folder / "a.onnx")
    if not any(entry.key == STATE_DICT for entry in tagged.metadata_props):
        tagged.metadata_props.add(key=STATE_DICT, value="{}")
        onnx.save(tagged, folder / "a.onnx")
    return folder / "a.onnx"


def outputs(path: Path, feeds: dict[str, np.ndarray] | None = None) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, feeds or {"x": np.linspace(-1, 1, 128, dtype=np.float32).reshape(1, 4, 32)})[
        0
    ]
    return result


def distance(one: np.ndarray, two: np.ndarray) -> float:
    return float(np.linalg.norm(one - two) / np.linalg.norm(two))


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("ir_version", [3, 8])
@pytest.mark.parametrize("method", ["int8-weights", "int8-dynamic"])
def test_a_product_is_quantized_however_its_weight_is_written(method: str, ir_version: int, tmp_path: Path) -> None:
    constant = numpy_helper.from_array(numbers(32, 32))
    file = adopted(
        tmp_path,
        [
            helper.make_node(
                "FusedMatMul", ["x", "f"], ["a"], "/fused/FusedMatMul", domain="com.microsoft", transB=1, alpha=0.5
            ),
            helper.make_node("Split", ["experts"], ["e0", "e1"], "/experts/Split", axis=0),
            helper.make_node("Squeeze", ["e1", "zero"], ["e"], "/experts/Squeeze"),
            helper.make_node("MatMul", ["a", "e"], ["b"], "/experts/MatMul"),
            helper.make_node("Concat", ["q", "k"], ["qk"], "/packed/Concat", axis=1),
            helper.make_node("MatMul", ["b", "qk"], ["c"], "/packed/MatMul"),
            helper.make_node("Constant", [], ["w"], "/held/Constant", value=constant),
            helper.make_node("MatMul", ["c", "w"], ["d"], "/held/MatMul"),
            helper.make_node("Flatten", ["kernel"], ["flat"], "/flat/Flatten", axis=1),
            helper.make_node("MatMul", ["d", "flat"], ["y"], "/flat/MatMul"),
        ],
        {
            "f": numbers(32, 32),
            "kernel": numbers(32, 4, 8),
            "experts": numbers(2, 32, 32),
            "zero": np.array([0]),
            "q": numbers(32, 16),
            "k": numbers(32, 16),
        },
        ir_version=ir_version,
    )
    result = modelexport.quantize(file, tmp_path / "q.onnx", to=method)
    assert result.methods == {method: 5}
    assert not result.left
    assert not {"FusedMatMul", "MatMul", "Split", "Concat", "Constant", "Flatten"}.intersection(
        operators(tmp_path / "q.onnx")
    )
    assert distance(outputs(tmp_path / "q.onnx"), outputs(file)) < 0.05
    assert modelexport.load(tmp_path / "q.onnx").coverage.untagged == 0


def test_an_lstm_is_quantized_as_well_as_by_the_library(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(16, 16, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    torch.manual_seed(0)
    x = torch.randn(6, 1, 16)
    modelexport.export(Net(), {"x": x}, tmp_path / "m.onnx", check=False)
    modelexport.quantize(tmp_path / "m.onnx", tmp_path / "ours.onnx", to="int8-dynamic")
    folded = onnxruntime.SessionOptions()  # the library quantizes an LSTM only if its weights are initializers
    folded.optimized_model_filepath = str(tmp_path / "folded.onnx")
    folded.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(tmp_path / "m.onnx", folded)
    quantize_dynamic(onnx.load(tmp_path / "folded.onnx"), tmp_path / "theirs.onnx")
    right, feeds = outputs(tmp_path / "m.onnx", {"x": x.numpy()}), {"x": x.numpy()}
    ours, theirs = (distance(outputs(tmp_path / f"{name}.onnx", feeds), right) for name in ("ours", "theirs"))
    for name in ("ours", "theirs"):
        assert "DynamicQuantizeLSTM" in operators(tmp_path / f"{name}.onnx")
    assert ours < 1.5 * theirs


def test_what_stays_in_float_is_named_and_nothing_quantized_is_status_1(tmp_path: Path) -> None:
    modelexport.export(
        torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 32)),
        {"input": torch.zeros(1, 4, dtype=torch.int64)},
        tmp_path / "m.onnx",
        check=False,
    )
    done = run("quantize", tmp_path / "m.onnx", "-o", tmp_path / "q.onnx", "--to", "int8-weights")
    assert done.returncode == 0
    assert "left in float: 8,192 bytes, 86% of the bytes: 0\n" in done.stdout
    done = run("quantize", tmp_path / "m.onnx", "-o", tmp_path / "e.onnx", "--to", "int4", "--only", "0", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["left"] == {"0": 64 * 32 * 4, "1": 33 * 32 * 4}


def test_tables_are_quantized_where_that_is_asked_for(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 32, bias=False))
    inputs = {"input": torch.zeros(1, 4, dtype=torch.int64)}
    modelexport.export(model, inputs, tmp_path / "m.onnx", check=False, opset=21)
    result = modelexport.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx", to="int4:embeddings=true")
    assert sum(result.methods.values()) == 2
    assert not result.left
    assert operators(tmp_path / "q.onnx") == ["GatherBlockQuantized", "MatMulNBits"]


@pytest.mark.parametrize(
    "method", ["int4", pytest.param("int4:symmetric=true", marks=pytest.mark.slow), "int8-weights"]
)
def test_a_tied_table_has_the_codes_of_the_product(method: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(32, 64), torch.nn.Linear(64, 32, bias=False))
    model[1].weight = model[0].weight
    inputs = {"input": torch.arange(8).reshape(2, 4)}
    modelexport.export(model, inputs, tmp_path / "m.onnx", check=False)
    options = f"{method}{',' if ':' in method else ':'}embeddings=true"
    result = modelexport.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx", to=options)
    bits = 4 if method.startswith("int4") else 8
    assert not result.left
    assert result.bytes_after < 32 * 64 * (bits / 8 + 5 / 32) + 32
    feeds = {"input": inputs["input"].numpy()}
    assert distance(outputs(tmp_path / "q.onnx", feeds), outputs(tmp_path / "m.onnx", feeds)) < 2.5 / 2**bits


def test_what_is_quantized_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    modelexport.export(model, {"input": torch.randn(2, 16)}, tmp_path / "m.onnx", check=False)
    data = [{"input": numbers(2, 16)}]
    modelexport.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx", to="int8-static", data=data, only=["0"])
    np.savez(tmp_path / "x.npz", **data[0])
    for source, output, pairs in (("q", "all", True), ("all", "same", False)):
        words = ["--to", "int8-static", "--data", tmp_path / "x.npz"]
        done = run("quantize", tmp_path / f"{source}.onnx", "-o", tmp_path / f"{output}.onnx", *words)
        before, after = (operators(tmp_path / f"{name}.onnx").count("QuantizeLinear") for name in (source, output))
        assert (after > before) == pairs
        assert done.returncode == 0
    assert "quantized already" in done.stdout
    assert "next: " not in done.stdout


@pytest.mark.parametrize("operator", ["Transpose", "Flatten", "Identity"])
def test_a_quantized_weight_is_not_quantized_again_where_it_is_moved(operator: str, tmp_path: Path) -> None:
    file = adopted(
        tmp_path,
        [
            helper.make_node("DequantizeLinear", ["codes", "step"], ["w"], "/fc/DequantizeLinear"),
            helper.make_node(operator, ["w"], ["moved"], f"/fc/{operator}"),
            helper.make_node("MatMul", ["x", "moved"], ["y"], "/fc/MatMul"),
        ],
        {"codes": np.ones((32, 32), np.int8), "step": np.float32(0.1)},
    )
    data = [{"x": numbers(1, 4, 32)}]
    result = modelexport.quantize(file, tmp_path / "q.onnx", to="int8-static", data=data)
    assert result.methods == {}
    assert operators(tmp_path / "q.onnx") == operators(file)


@pytest.mark.parametrize("parts", [["w", "half"], ["half", "w"]])
def test_a_weight_that_is_joined_of_a_quantized_one_is_not_quantized_again(parts: list[str], tmp_path: Path) -> None:
    file = adopted(
        tmp_path,
        [
            helper.make_node("DequantizeLinear", ["codes", "step"], ["w"], "/fc/DequantizeLinear"),
            helper.make_node("Concat", parts, ["joined"], "/fc/Concat", axis=1),
            helper.make_node("MatMul", ["x", "joined"], ["y"], "/fc/MatMul"),
        ],
        {"codes": np.ones((32, 16), np.int8), "step": np.float32(0.1), "half": numbers(32, 16)},
    )
    result = modelexport.quantize(file, tmp_path / "q.onnx", to="int8-static", data=[{"x": numbers(1, 4, 32)}])
    assert result.methods == {}


def test_a_constant_with_tags_as_attributes_is_converted_to_half_precision() -> None:
    constant = helper.make_node("Constant", [], ["c"], source_module="/M", value_floats=[1.5, 2.0], hierarchy_tags="[]")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    model = helper.make_model(helper.make_graph([constant, helper.make_node("Mul", ["x", "c"], ["y"])], "g", [x], [y]))
    (half,) = [node for node in in_half_precision(model).graph.node if node.op_type == "Constant"]
    tensor = next(each.t for each in half.attribute if each.name == "value")
    assert tensor.data_type == TensorProto.FLOAT16
    assert numpy_helper.to_array(tensor).tolist() == [1.5, 2.0]


def test_values_beyond_half_precision_in_the_data_stay_in_float32(tmp_path: Path) -> None:
    file = adopted(
        tmp_path,
        [
            helper.make_node("Mul", ["x", "large"], ["a"], "/up/Mul"),
            helper.make_node("Div", ["a", "large"], ["b"], "/down/Div"),
            helper.make_node("Mul", ["b", "two"], ["y"], "/twice/Mul"),
        ],
        {"large": np.array(6e4, np.float32), "two": np.array(2, np.float32)},
    )
    data = {"x": np.full((1, 4, 32), 3, np.float32)}
    result = modelexport.quantize(file, tmp_path / "h.onnx", to="float16", data=[data] * 12)
    assert (result.methods, [line.partition(",")[0] for line in result.joined]) == (
        {"float16": 1},
        [
            "8 of 12 runs looked at for values beyond the range of float16",
            "up: /up/Mul has values up to 180",
            "down: /down/Div has values up to 180",
        ],
    )
    assert distance(outputs(tmp_path / "h.onnx", data), outputs(file, data)) < 0.01


def test_numbers_beyond_half_precision_stay_in_float32_and_masks_hide(tmp_path: Path) -> None:
    variance = np.array([1e7] * 4, np.float32)
    mask = np.array([[0, -1e9] * 16] * 4, np.float32)
    file = adopted(
        tmp_path,
        [
            helper.make_node("Add", ["x", "mask"], ["m"], "/hidden/Add"),
            helper.make_node("Softmax", ["m"], ["s"], "/hidden/Softmax"),
            helper.make_node(
                "BatchNormalization", ["s", "ones", "zeros", "zeros", "v"], ["b"], "/n/BatchNormalization"
            ),
            helper.make_node("Mul", ["b", "thousands"], ["y"], "/n/Mul"),
        ],
        {
            "mask": mask,
            "ones": np.ones(4, np.float32),
            "zeros": np.zeros(4, np.float32),
            "v": variance,
            "thousands": np.array(3000, np.float32),
        },
    )
    result = modelexport.quantize(file, tmp_path / "h.onnx", to="float16")
    assert [line for line in result.joined if "/n/BatchNormalization is beyond the range of float16" in line]
    assert distance(outputs(tmp_path / "h.onnx"), outputs(file)) < 0.01
    tensors = {tensor.name: tensor.data_type for tensor in onnx.load(tmp_path / "h.onnx").graph.initializer}
    assert tensors["v"] == TensorProto.FLOAT
    assert tensors["mask"] == TensorProto.FLOAT16
    optimize_file(file, "float16", tmp_path / "o.onnx")
    assert distance(outputs(tmp_path / "o.onnx"), outputs(file)) < 0.01


GRAPHS = {
    "numbers of float64": "a = Cast<to=11>(x) b = MatMul(a, wide) y = Cast<to=1>(b)",
    "numbers of float16": "a = Cast<to=10>(x) b = MatMul(a, half) y = Cast<to=1>(b)",
    "numbers of bfloat16": "a = Cast<to=16>(x) b = Cast<to=1>(a) y = MatMul(b, w)",
    "a sequence": "a = MatMul(x, w) s = SequenceConstruct(x, a) y = ConcatFromSequence<axis=0>(s)",
    "a list of numbers": "c = Constant<value_floats=[1.0, 2.0, 3.0, 4.0]>() a = MatMul(x, w) y = Add(a, c)",
    "a number taken twice": "n = Constant<value_ints=[1]>() r = Constant<value_floats=[0.1]>() "
    "i = Constant<value_ints=[0]>() b = Unsqueeze(x, i) k = NonMaxSuppression(b, b, n, r, r) "
    "a = Cast<to=1>(k) c = ReduceSum(a) y = Add(x, c)",
    "scales": "s = Constant<value_float=0.1>() q = QuantizeLinear(x, s) d = DequantizeLinear(q, s) y = MatMul(d, w)",
}
"""Graphs that a quantizer of ONNX Runtime refuses, or makes a file of that does not load."""


@pytest.mark.sweep
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_nodes_for_which_a_method_has_no_operators_stay_as_they_are(graph: str, tmp_path: Path) -> None:
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[4, 4] x) => (float[a, b] y) {{ {graph} }}'
    model, weight = onnx.parser.parse_model(text), numbers(4, 4)
    for name, kind in (("w", np.float32), ("half", np.float16), ("wide", np.float64)):
        if f"{name})" in graph:
            model.graph.initializer.append(numpy_helper.from_array(weight.astype(kind), name))
    onnx.save(model, tmp_path / "m.onnx")
    feeds = {"x": numbers(4, 4)}
    for method in ("int8-dynamic", "int4", "float16"):
        modelexport.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx", to=method)
        assert distance(outputs(tmp_path / "q.onnx", feeds), outputs(tmp_path / "m.onnx", feeds)) < 0.3
    optimize_file(tmp_path / "m.onnx", "float16", tmp_path / "o.onnx")
    assert distance(outputs(tmp_path / "o.onnx", feeds), outputs(tmp_path / "m.onnx", feeds)) < 0.01


def test_the_attention_of_onnx_has_no_weight_though_one_of_onnx_runtime_has(tmp_path: Path) -> None:
    text = """g (float[1,3,8] x) => (float[1,3,8] y) <float[1,2,8] k, float[1,2,8] v>
        { ["/a/Attention"] y = Attention<q_num_heads = 2, kv_num_heads = 2>(x, k, v) }"""
    model = onnx.load(written(tmp_path / "x.onnx", text, 23))
    model.graph.initializer.extend(numpy_helper.from_array(np.ones((1, 2, 8), np.float32), name) for name in "kv")
    onnx.save(model, tmp_path / "x.onnx")
    assert not weighted_nodes(read_tagged(tmp_path / "x.onnx").model)


@pytest.mark.parametrize("method", ["int8-weights", "float16"])
def test_values_of_unknown_rank_stay_of_unknown_rank(method: str, tmp_path: Path) -> None:
    file = adopted(
        tmp_path,
        [
            helper.make_node("Reshape", ["x", "sizes"], ["z"], "/a/Reshape"),
            helper.make_node("MatMul", ["z", "w"], ["y"], "/a/MatMul"),
        ],
        {"w": numbers(32, 32)},
        inputs=[helper.make_tensor_value_info("sizes", TensorProto.INT64, ["rank"])],
    )
    modelexport.quantize(file, tmp_path / "q.onnx", to=method)
    feeds = {"x": np.ones((1, 4, 32), np.float32), "sizes": np.array([2, 2, 32])}
    assert distance(outputs(tmp_path / "q.onnx", feeds), outputs(file, feeds)) < 0.02


def test_a_quantized_file_takes_adapters_as_inputs(tmp_path: Path) -> None:
    model, inputs = tiny()
    modelexport.export(model, inputs, tmp_path / "m.onnx", check=False)
    make_adapter(tmp_path / "adapter")
    modelexport.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx", to="int8-weights")
    words = ["--adapter", tmp_path / "adapter"]
    done = run("update-weights", tmp_path / "q.onnx", *words, "-o", tmp_path / "merged.onnx")
    assert done.returncode == 2
    assert "--as-inputs" in done.stderr
    assert run("update-weights", tmp_path / "q.onnx", *words, "--as-inputs", "-o", tmp_path / "in.onnx").returncode == 0
    assert run("update-weights", tmp_path / "m.onnx", *words, "-o", tmp_path / "true.onnx").returncode == 0
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(tmp_path / "in.adapter.onnx_adapter"))
    options.add_active_adapter(adapter)
    feeds = {"x": inputs["x"].numpy()}
    session = onnxruntime.InferenceSession(tmp_path / "in.onnx", providers=["CPUExecutionProvider"])
    assert distance(session.run(None, feeds, options)[0], outputs(tmp_path / "true.onnx", feeds)) < 0.05
    assert distance(session.run(None, feeds)[0], outputs(tmp_path / "q.onnx", feeds)) < 0.01


class Shares(torch.nn.Module):
    """A layer that is called twice, and an embedding whose table is a projection's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = torch.nn.Embedding(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.layer(self.table(ids))))  # type: ignore[no-any-return]


def test_weights_of_several_nodes_are_quantized_as_each_of_them_uses_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.arange(8)
    modelexport.export(Shares().eval(), (ids,), tmp_path / "m.onnx", check=False)
    assert {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node} == {"Gather", "Gemm"}
    feeds = {"ids": ids.numpy()}
    modelexport.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx", to="int8-dynamic")
    optimize_file(tmp_path / "m.onnx", "quantize-dynamic", tmp_path / "o.onnx")
    for changed in ("q.onnx", "o.onnx"):
        assert distance(outputs(tmp_path / changed, feeds), outputs(tmp_path / "m.onnx", feeds)) < 0.03


def test_transposed_weights_of_one_name_in_two_branches_stay_apart(tmp_path: Path) -> None:
    branch = "{name} () => (float[2,2] r) <float[2,2] w = {{{values}}}> {{ t = Transpose(w) r = MatMul(x, t) }}"
    one, two = (branch.format(name=name, values=values) for name, values in (("a", "1, 2, 3, 4"), ("b", "5, 6, 7, 8")))
    text = f"g (float[2,2] x, bool c) => (float[2,2] y) {{ y = If(c) <then_branch = {one}, else_branch = {two}> }}"
    file = written(tmp_path / "file.onnx", text, 17)
    onnx.save(transpose_weights(onnx.load(file)), tmp_path / "changed.onnx")
    for chosen in (True, False):
        feeds = {"x": np.eye(2, dtype=np.float32), "c": np.array(chosen)}
        np.testing.assert_array_equal(outputs(tmp_path / "changed.onnx", feeds), outputs(file, feeds))


def test_scales_of_channels_are_refused_where_no_operator_takes_them(tmp_path: Path) -> None:
    text = 'g (float[1,2] x) => (float[1,2] y) <float[2,2] "a.w" = {1, 2, 3, 4}> { ["/a/MatMul"] y = MatMul(x, "a.w") }'
    file, data = written(tmp_path / "file.onnx", text, 12), [{"x": np.ones((1, 2), np.float32)}]
    with pytest.raises(UsageError, match=r"^a: a scale .* the file has 12: give int8-static:per_channel=false"):
        modelexport.quantize(file, tmp_path / "out.onnx", to="int8-static", data=data)
    assert modelexport.quantize(file, tmp_path / "out.onnx", to="int8-static:per_channel=false", data=data).changed


def test_a_table_that_needs_newer_operators_stays_as_it_is(tmp_path: Path) -> None:
    text = 'g (int64[2] x) => (float[2,32] y) { ["/table/Gather"] y = Gather(table, x) }'
    file, model = tmp_path / "file.onnx", onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.initializer.append(numpy_helper.from_array(numbers(8, 32), "table"))
    onnx.save(model, file)
    (line,) = modelexport.quantize(file, tmp_path / "q.onnx", to="int4:embeddings=true").joined
    assert line.endswith("can write, from opset 21 (the file has 17): it stays as it is")


def test_a_weight_that_is_zero_in_half_precision_stays_in_float32(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "/layer/MatMul")
    file = adopted(tmp_path, [node], {"w": numbers(32, 32) * np.float32(1e-12)})
    written = modelexport.quantize(file, tmp_path / "h.onnx", to="float16").joined
    assert written == ["layer: a weight of /layer/MatMul is below the range of float16: it stays as it is"]


@pytest.mark.parametrize("method", ["float16", "int8-dynamic"])
def test_a_transposed_weight_that_is_an_output_stays_one(method: str, tmp_path: Path) -> None:
    text = "g (float[1,4,32] x) => (float[1,4,32] y, float[32,32] t) { t = Transpose(w) y = MatMul(x, t) }"
    file, model = tmp_path / "file.onnx", onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.initializer.append(numpy_helper.from_array(weight := numbers(32, 32), "w"))
    onnx.save(model, file)
    modelexport.quantize(file, tmp_path / "q.onnx", to=method)
    session = onnxruntime.InferenceSession(tmp_path / "q.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(["t"], {"x": X})[0], weight.T)


def test_outputs_that_nothing_uses_have_the_type_that_their_operator_gives_them(tmp_path: Path) -> None:
    """The mean of a normalization is float32 in float16, too; `export --fuse` leaves it there."""
    body = "s, mean, deviation, sum = com.microsoft.SkipSimplifiedLayerNormalization(x, x, scale) y = Add(s, sum)"
    text = f"g (float[2, 4] x) => (float[2, 4] y) <float[4] scale = {{1, 2, 3, 4}}> {{ {body} }}"
    path = written(tmp_path / "skip.onnx", text, **{"com.microsoft": 1})
    assert modelexport.quantize(path, tmp_path / "half.onnx", to="float16").methods == {"float16": 2}


def test_the_weights_of_a_branch_that_stay_are_listed(tmp_path: Path) -> None:
    multiply = helper.make_node("MatMul", ["x", "v"], ["r"], "/r/MatMul")
    result = [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)]
    branch = helper.make_graph([multiply], "branch", [], result, [numpy_helper.from_array(numbers(32, 32), "v")])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "/m/MatMul"),
        helper.make_node("If", ["yes"], ["c"], "/c/If", then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["m", "c"], ["y"], "/Add"),
    ]
    file = adopted(tmp_path, nodes, {"w": numbers(32, 32), "yes": np.array(True)})
    left = modelexport.quantize(file, tmp_path / "q.onnx", to="int8-dynamic").left
    assert sum(left.values()) == 2 * 32 * 32 * 4


@pytest.mark.parametrize("operator", ["MatMul", "Gemm", "Conv", "LSTM"])
@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static", "int8-static:per_channel=false"])
def test_what_is_quantized_by_default_saturates_on_no_processor(method: str, operator: str, tmp_path: Path) -> None:
    random = {"MatMul": (32, 32), "Gemm": (32, 32), "Conv": (4, 4, 3), "LSTM": (1, 64, 32)}
    bounds = {"w": RANDOM.uniform(-1, 1, random[operator]).astype(np.float32)}
    bounds |= {"r": RANDOM.uniform(-1, 1, (1, 64, 16)).astype(np.float32)} if operator == "LSTM" else {}
    more = {"hidden_size": 16} if operator == "LSTM" else {}
    source = "rows" if operator == "Gemm" else "x"
    nodes = [helper.make_node(operator, [source, *bounds], ["y"], f"/layer/{operator}", **more)]
    if operator == "Gemm":
        nodes.insert(0, helper.make_node("Flatten", ["x"], ["rows"], "/Flatten", axis=2))
    file = adopted(tmp_path, nodes, bounds)
    result = modelexport.quantize(file, tmp_path / "q.onnx", to=method, data=[{"x": X}])
    if operator != "LSTM" or method == "int8-dynamic":
        assert sum(result.methods.values())
    assert not saturating(modelexport.load(tmp_path / "q.onnx").nodes)
    assert distance(outputs(tmp_path / "q.onnx"), outputs(file)) < 0.04


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static", "int8-weights"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.5), (1.0, 0.0), (0.5, 1.0), (-2.0, 3.0)])
def test_the_factors_of_a_gemm_are_in_its_weight_and_bias(
    method: str, alpha: float, beta: float, tmp_path: Path
) -> None:
    factors = {"alpha": alpha, "beta": beta, "transB": 1}
    nodes = [
        helper.make_node("Flatten", ["x"], ["rows"], "/Flatten", axis=2),
        helper.make_node("Gemm", ["rows", "w", "b"], ["y"], "/layer/Gemm", **factors),
    ]
    file = adopted(tmp_path, nodes, {"w": numbers(16, 32), "b": numbers(16)})
    result = modelexport.quantize(file, tmp_path / "q.onnx", to=method, data=[{"x": X}])
    assert result.methods[method]
    assert distance(outputs(tmp_path / "q.onnx"), outputs(file)) < 0.03


def test_a_weight_that_is_an_input_as_well_is_quantized(tmp_path: Path) -> None:
    file = adopted(tmp_path, [helper.make_node("MatMul", ["x", "w"], ["y"], "/layer/MatMul")], {"w": numbers(32, 32)})
    model = onnx.load(file)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [32, 32]))
    onnx.save(model, file)
    assert modelexport.quantize(file, tmp_path / "q.onnx", to="int8-dynamic").methods == {"int8-dynamic": 1}
    assert [value.name for value in onnx.load(tmp_path / "q.onnx").graph.input] == ["x"]


@pytest.mark.parametrize(("keep", "converted"), [([], "x"), (["b"], "p"), (["c"], "x")])
def test_a_sequence_is_in_half_precision_where_all_that_use_it_are(
    keep: list[str], converted: str, tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"], "/a/split", axis=1),
        helper.make_node("SequenceAt", ["s", "i"], ["p"], "/b/at"),
        helper.make_node("Neg", ["p"], ["y"], "/c/neg"),
    ]
    path = adopted(tmp_path, nodes, {"i": np.array(1)})
    modelexport.quantize(path, tmp_path / "h.onnx", to="float16", keep=keep)
    casts = [node for node in onnx.load(tmp_path / "h.onnx").graph.node if node.op_type == "Cast"]
    assert [node.input[0] for node in casts if node.attribute[0].i == TensorProto.FLOAT16] == [converted]
    np.testing.assert_allclose(outputs(tmp_path / "h.onnx"), outputs(path), atol=1e-3)
