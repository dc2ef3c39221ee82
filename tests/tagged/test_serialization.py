"""Files hold what onnx_ir writes, but for the types of initializers; what it would lose or misread is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
import onnx_ir as ir
import pytest
from google.protobuf import message
from onnx import TensorProto, helper

from modelexport.errors import FileFormatError
from modelexport.files import protobuf_reading
from modelexport.files.onnx_models import load_onnx, save_with_references
from modelexport.files.protobuf_writing import to_proto

BACKEND = sorted((Path(onnx.backend.test.__file__).parent / "data").glob("*/*/model.onnx"))
"""ONNX's own test models."""


def by_onnx_ir(proto: onnx.ModelProto) -> onnx.ModelProto:
    """What onnx_ir makes of a model, without the types of initializers."""
    written = ir.serde.serialize_model(ir.serde.deserialize_model(proto))
    drop_types(written.graph)
    return written


def drop_types(graph: onnx.GraphProto) -> None:
    tensors = {tensor.name for tensor in graph.initializer}
    kept = [info for info in graph.value_info if info.name not in tensors]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                drop_types(attribute.g)


def copy_of(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy, since onnx_ir's tensors refer to the model that they were read from."""
    copied = onnx.ModelProto()
    copied.CopyFrom(proto)
    return copied


def check(proto: onnx.ModelProto) -> None:
    read = ir.serde.deserialize_model(copy_of(proto))
    assert to_proto(read, {}).SerializeToString() == by_onnx_ir(copy_of(proto)).SerializeToString()


def test_every_test_model_of_onnx() -> None:
    assert len(BACKEND) > 100
    for path in BACKEND:
        check(onnx.load(path, load_external_data=False))


def full() -> onnx.ModelProto:
    """A model with everything that a flat graph may have."""
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [2, 2], np.ones(4, np.float32).tobytes(), raw=True)
    weight.doc_string = "of a layer"
    default = helper.make_tensor("default", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])
    texts = helper.make_tensor("texts", TensorProto.STRING, [2], [b"a", b"b"])
    apart = TensorProto(name="apart", data_type=TensorProto.FLOAT, dims=[8], data_location=TensorProto.EXTERNAL)
    apart.external_data.add(key="location", value="weights.data")
    nodes = [
        helper.make_node("Add", ["x", "weight"], ["a"], name="first", doc_string="adds"),
        helper.make_node("Relu", ["b"], ["y"], name=""),
        helper.make_node("Mul", ["a", "default"], ["b"], domain="ai.onnx"),
        helper.make_node("Clip", ["a", "", "one"], ["c"]),
        helper.make_node("LSTM", ["s", "w", "r"], ["", "h", ""], hidden_size=2, direction="forward"),
        helper.make_node("SequenceConstruct", ["a", "b"], ["list"]),
        helper.make_node("Mine", ["apart"], ["m"], domain="mine", kernel=helper.make_tensor("", 1, [1], [2.0])),
    ]
    nodes[0].metadata_props.add(key="z", value="last")
    nodes[0].metadata_props.add(key="a", value="first")
    one = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
    recurrent = [helper.make_tensor(name, TensorProto.FLOAT, [1, 8, 2], [0.5] * 16) for name in ("w", "r")]
    matrix = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "main",
        [matrix("x", TensorProto.FLOAT, ["batch", None]), matrix("s", 1, [3, 1, 2]), matrix("default", 1, [2, 2])],
        [matrix("y", TensorProto.FLOAT, ["batch", 2])],
        [weight, default, texts, apart, one, *recurrent],
        doc_string="the graph",
    )
    infos = [matrix("a", TensorProto.FLOAT, ["batch", 2], "a sum"), matrix("b", TensorProto.FLOAT, ["batch", 2])]
    infos += [matrix("c", TensorProto.FLOAT, None), helper.make_tensor_sequence_value_info("list", 1, ["batch", 2])]
    infos += [matrix("weight", TensorProto.FLOAT, [2, 2]), matrix("unknown", TensorProto.FLOAT, [2])]
    infos[0].metadata_props.add(key="made by", value="hand")
    infos[1].type.denotation = "TENSOR"
    infos[1].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    graph.value_info.extend(infos)
    graph.metadata_props.add(key="of", value="the graph")
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)], producer_name="someone"
    )
    model.metadata_props.add(key="of", value="the model")
    return model


def small() -> onnx.ModelProto:
    """A node, a weight, an input and an output of the same."""
    model = full()
    del model.graph.node[:]
    model.graph.node.extend([helper.make_node("Add", ["x", "weight"], ["y"], name="add", doc_string="adds")])
    kept = next(tensor for tensor in model.graph.initializer if tensor.name == "weight")
    given = next(value for value in model.graph.input if value.name == "x")
    del model.graph.initializer[:], model.graph.input[:], model.graph.output[:], model.graph.value_info[:]
    model.graph.initializer.append(kept)
    model.graph.input.append(given)
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 2]))
    for tensor in model.graph.initializer:
        tensor.metadata_props.add(key="of", value=tensor.name)
    return model


def field(number: int, content: bytes, length: bytes | None = None) -> bytes:
    """A field of a message; its length takes as many bytes as protobuf reads, if no other one is given."""
    return bytes([number << 3 | 2]) + (long_length(len(content), 5) if length is None else length) + content


def long_length(number: int, size: int) -> bytes:
    """A length in more bytes than it needs."""
    return bytes([number >> 7 * place & 0x7F | 0x80 for place in range(size - 1)]) + b"\0"


@pytest.mark.parametrize("number", [5, 7])
def test_lengths_that_protobuf_does_not_read_are_refused(number: int, tmp_path: Path) -> None:
    tensor = helper.make_tensor("large", TensorProto.FLOAT, [400], [0.5] * 400).SerializeToString()
    graph = field(5, tensor, long_length(len(tensor), 6) if number == 5 else None)
    content = small().SerializeToString() + field(7, graph, long_length(len(graph), 6) if number == 7 else None)
    with pytest.raises(message.DecodeError):
        onnx.ModelProto.FromString(content)
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(FileFormatError, match="damaged"):
        load_onnx(tmp_path / "model.onnx")


def test_messages_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    model = small()
    told = field(1, bytes([8, 1]))
    for _ in range(49):
        told = field(4, field(1, told))
    info, graph = field(13, field(1, b"y2") + field(2, told)), model.graph
    graph.node.append(helper.make_node("Neg", ["y"], ["y2"]))
    content = graph.SerializeToString() + info
    model.ClearField("graph")
    content = model.SerializeToString() + field(7, content)
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(FileFormatError, match="damaged"):
        load_onnx(tmp_path / "model.onnx")


def unreadable(what: str) -> onnx.ModelProto:
    model = small()
    graph = model.graph
    match what:
        case "training":
            model.training_info.add().algorithm.name = "adam"
        case "sparse" | "sparse inside":
            inner = graph if what == "sparse" else onnx.GraphProto(name="branch")
            inner.sparse_initializer.add().values.name = "rows"
            if what == "sparse inside":
                graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=inner, else_branch=inner))
        case "sparse constant":
            numbers = helper.make_tensor("numbers", TensorProto.FLOAT, [1], [2.0])
            places = helper.make_tensor("places", TensorProto.INT64, [1], [0])
            sparse = helper.make_sparse_tensor(numbers, places, [4])
            graph.node.append(helper.make_node("Constant", [], ["rows"], sparse_value=sparse))
        case "two values":
            graph.node.append(helper.make_node("Constant", [], ["rows"], value_int=1, value_float=1.0))
        case "negative":
            graph.initializer.add(name="large", data_type=TensorProto.FLOAT, dims=[-300, -1], raw_data=b"1234" * 300)
        case "segment":
            large = graph.initializer.add(name="large", data_type=TensorProto.FLOAT, dims=[300], raw_data=b"1234" * 300)
            large.segment.end = 300
        case "size":
            graph.initializer.add(name="large", data_type=TensorProto.FLOAT, dims=[300], raw_data=b"1234" * 301)
    return model


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("training", "the model has training_info"),
        ("sparse", "the initializer 'rows' is sparse"),
        ("sparse inside", "the initializer 'rows' is sparse"),
        ("sparse constant", "the sparse_value of 'rows' is sparse"),
        ("two values", "the Constant '' has 2 values, not one"),
        ("negative", "the tensor 'large' has a negative size"),
        ("segment", "the tensor 'large' is a segment"),
        ("size", "the tensor 'large' has 1,204 bytes for 300 elements"),
    ],
)
def test_what_would_be_lost_or_wrong_is_refused_in_one_line(what: str, expected: str, tmp_path: Path) -> None:
    onnx.save(unreadable(what), tmp_path / "model.onnx")
    with pytest.raises(FileFormatError, match=expected) as found:
        load_onnx(tmp_path / "model.onnx")
    assert "\n" not in str(found.value)


def model_of_marks() -> onnx.ModelProto:
    """A model in which each text is a mark of its own."""
    model = small()
    graph, node = model.graph, model.graph.node[0]
    node.input[0] = graph.input[0].name = "MARK0"
    node.input[1] = graph.initializer[0].name = "MARK1"
    node.output[0] = graph.output[0].name = "MARK2"
    node.name, node.doc_string, node.domain, node.overload, node.op_type = "MARK3", "MARK4", "MARK5", "MARK6", "MARK7"
    node.attribute.append(helper.make_attribute("MARK8", 1, doc_string="MARK9"))
    node.metadata_props.add(key="MARKa", value="MARKb")
    graph.initializer[0].doc_string = "MARKc"
    graph.initializer[0].metadata_props.add(key="MARKd", value="MARKe")
    graph.value_info.append(helper.make_tensor_value_info("MARKf", 1, ["MARKg"]))
    graph.value_info.append(helper.make_tensor_value_info("MARK0", 1, ["MARKh"]))
    graph.value_info.append(helper.make_tensor_value_info("MARK1", 1, ["MARKi", 2]))
    graph.name, graph.doc_string, model.producer_name = "MARKj", "MARKk", "MARKl"
    return model


@pytest.mark.parametrize("mark", "0123456789abcdefghijkl")
def test_bytes_that_are_not_text_are_refused_in_each_place(mark: str, tmp_path: Path) -> None:
    content = model_of_marks().SerializeToString()
    name = f"MARK{mark}".encode()
    assert name in content
    content = content.replace(name, b"MARK\xff")
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(FileFormatError, match="not text"):
        load_onnx(tmp_path / "model.onnx")


def annotated() -> onnx.ModelProto:
    model = full()
    for name in ("a", "weight", "y", "x"):
        note = model.graph.quantization_annotation.add(tensor_name=name)
        note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="one")
    return model


def nested() -> onnx.ModelProto:
    model = full()
    half = helper.make_tensor("half", TensorProto.FLOAT, [], [0.5])
    inner = [helper.make_node("Mul", ["a", "half"], ["inside"])]
    branch = helper.make_graph(inner, "branch", [], [helper.make_tensor_value_info("inside", 1, None)], [half])
    model.graph.node.append(helper.make_node("If", ["flag"], ["chosen"], then_branch=branch, else_branch=branch))
    model.graph.initializer.append(helper.make_tensor("flag", TensorProto.BOOL, [], [True]))
    return model


def with_function() -> onnx.ModelProto:
    model = full()
    body = [helper.make_node("Tanh", ["i"], ["o"])]
    model.functions.append(helper.make_function("mine", "Mine", ["i"], ["o"], body, [helper.make_opsetid("", 20)]))
    return model


def on_devices() -> onnx.ModelProto:
    model = full()
    model.ir_version = 11
    model.configuration.add(name="two", num_devices=2)
    model.graph.node[0].device_configurations.add(configuration_id="two", pipeline_stage=1)
    return model


def with_loose_ends() -> onnx.ModelProto:
    """Nothing computes an input of a node and an output of the graph."""
    model = full()
    model.graph.node[1].input[0] = "nowhere"
    model.graph.output.append(helper.make_tensor_value_info("nothing", 1, [2]))
    return model


@pytest.mark.parametrize("build", [full, annotated, nested, with_function, on_devices, with_loose_ends])
def test_a_model_with(build: Callable[[], onnx.ModelProto]) -> None:
    check(build())


def test_properties_of_initializers_are_written_to_their_tensors() -> None:
    model = ir.serde.deserialize_model(full())
    model.graph.initializers["weight"].metadata_props["b"] = "2"
    model.graph.initializers["weight"].metadata_props["a"] = "1"
    tensor = ir.tensor(np.zeros((2, 2), np.float32))
    written = to_proto(model, {model.graph.initializers["weight"]: tensor}).graph.initializer[0]
    assert [(entry.key, entry.value) for entry in written.metadata_props] == [("a", "1"), ("b", "2")]
    assert written.name == "weight"
    assert onnx.numpy_helper.to_array(written).tolist() == [[0, 0], [0, 0]]


def test_tensors_that_are_written_one_by_one_are_where_protobuf_writes_them(tmp_path: Path) -> None:
    model = full()
    content = np.random.default_rng(0).bytes(4000)
    for name in ("large", "larger"):
        tensor = helper.make_tensor(name, TensorProto.FLOAT, [1000], content, raw=True)
        tensor.doc_string = "written behind the data"
        model.graph.initializer.append(tensor)
    read = ir.serde.deserialize_model(copy_of(model))
    save_with_references(read, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == by_onnx_ir(model).SerializeToString()


def test_more_fields_than_are_read_are_counted_in_all_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = small().SerializeToString() + 3 * field(7, 20 * field(1, b""))
    (tmp_path / "model.onnx").write_bytes(content)
    monkeypatch.setattr(protobuf_reading, "MOST_FIELDS", 100)
    with pytest.raises(FileFormatError, match="no outputs"):
        load_onnx(tmp_path / "model.onnx")
    monkeypatch.setattr(protobuf_reading, "MOST_FIELDS", 70)
    with pytest.raises(FileFormatError, match="not an ONNX file, or damaged"):
        load_onnx(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\3\4 and weights", ": it is a ZIP archive, as torch.save writes"),
        (b'{"a": 1}\n', r""": it is text that begins with '{"a": 1}'"""),
        (b"\x0f\x0f\x0f", ", or damaged: its bytes are not a protobuf message"),
        (small().SerializeToString()[:-1], ", or damaged: it was not written or copied completely"),
    ],
)
def test_what_is_not_an_onnx_file_is_called_what_it_is(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(FileFormatError, match=rf"not an ONNX file{reason}$"):
        load_onnx(tmp_path / "model.onnx")


def test_a_file_that_protobuf_does_not_read_for_its_size_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "model.onnx").open("wb") as file:
        file.truncate(2**31 + 1)
    with pytest.raises(FileFormatError, match="keep its weights in a file beside it"):
        load_onnx(tmp_path / "model.onnx")
