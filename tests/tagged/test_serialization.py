"""Models are read and written as onnx_ir does it, which is slower; of initializers, only the tensors are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import onnx_ir as ir
import pytest
from google.protobuf import message
from onnx import TensorProto, helper

from modelexport.errors import FileFormatError
from modelexport.files import wire
from modelexport.files.deserializing import to_model
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.files.plain_reading import to_plain
from modelexport.files.plain_writing import plain_bytes
from modelexport.files.serializing import to_proto
from modelexport.graph.nodes import all_nodes
from modelexport.graph.plain import PlainModel, add_properties, is_used_once

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
    expected = by_onnx_ir(copy_of(proto)).SerializeToString()
    assert to_proto(to_model(copy_of(proto)), {}).SerializeToString() == expected
    assert by_onnx_ir(ir.serde.serialize_model(to_model(copy_of(proto)))).SerializeToString() == expected
    if (read := read_plain(proto)) is not None:
        check_same(read, to_model(copy_of(proto)))
        assert plain_bytes(read, {}) == expected


def read_plain(proto: onnx.ModelProto) -> PlainModel | None:
    found = to_plain(proto.SerializeToString())
    return None if found is None else found[0]


def check_same(read: PlainModel, model: ir.Model) -> None:
    """A plain model says of itself what onnx_ir's says."""
    assert describe(read) == describe(model)


def describe(model: ir.Model) -> list[Any]:
    def described(value: ir.Value | None) -> Any:
        if value is None:
            return None
        producer, tensor = value.producer(), value.const_value
        about = (value.name, value.dtype, value.shape, value.metadata_props == {}, producer and producer.name)
        uses = [(node.name, node.inputs.count(value)) for node in value.consumers()]
        roles = value.is_graph_input(), value.is_graph_output(), value.is_initializer()
        found = None if tensor is None else (tensor.dtype, tensor.shape, tensor.size, tensor.nbytes, tensor.tobytes())
        return *about, uses, roles, found

    graph = model.graph
    nodes = [
        (
            node.op_identifier(),
            node.name,
            dict(node.metadata_props),
            {name: str(attribute) for name, attribute in node.attributes.items()},
            list(map(described, node.inputs)),
            list(map(described, node.outputs)),
        )
        for node in all_nodes(model)
    ]
    ends = [list(map(described, values)) for values in (graph.inputs, graph.outputs, graph.initializers.values())]
    return [nodes, *ends, dict(model.opset_imports), dict(model.metadata_props), graph.name, model.ir_version]


def test_every_test_model_of_onnx() -> None:
    assert len(BACKEND) > 100
    for path in BACKEND:
        check(onnx.load(path, load_external_data=False))
    plain_ones = [path for path in BACKEND if read_plain(onnx.load(path, load_external_data=False)) is not None]
    assert len(plain_ones) > len(BACKEND) // 2


def plain() -> onnx.ModelProto:
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


def only_plain() -> onnx.ModelProto:
    """The same without what a plain graph may not have."""
    model = plain()
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


def test_a_plain_model_becomes_the_same_file(tmp_path: Path) -> None:
    model = only_plain()
    large = helper.make_tensor("large", TensorProto.FLOAT, [40, 10], [0.5] * 400)  # as numbers, not as bytes
    model.graph.initializer.append(large)
    onnx.save(model, tmp_path / "model.onnx")
    read = load_onnx(tmp_path / "model.onnx", plain=True)
    assert isinstance(read, PlainModel)
    assert read.graph.initializers["weight"].metadata_props == {"of": "weight"}
    save_model(read, tmp_path / "plain.onnx")
    save_model(load_onnx(tmp_path / "model.onnx"), tmp_path / "other.onnx")
    assert (tmp_path / "plain.onnx").read_bytes() == (tmp_path / "other.onnx").read_bytes()


def fault(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    graph = model.graph
    match what:
        case "two values of one name":
            graph.node.append(helper.make_node("Neg", ["x"], ["weight"]))
        case "two initializers of one name":
            graph.initializer.append(graph.initializer[0])
        case "no outputs":
            graph.node.append(helper.make_node("Neg", ["x"], []))
        case "not sorted":
            graph.node.insert(0, helper.make_node("Neg", ["y"], ["z"]))
        case "too few bytes":
            graph.initializer[0].raw_data = b"123"
        case "two attributes of one name":
            graph.node[0].attribute.extend([helper.make_attribute("a", 1), helper.make_attribute("a", 2)])
        case "weights in another file":
            graph.initializer[0].data_location = TensorProto.EXTERNAL
        case "an output that nothing makes":
            graph.output.append(helper.make_tensor_value_info("nothing", 1, [2]))
    return model


FAULTS = (
    "two values of one name",
    "two initializers of one name",
    "no outputs",
    "not sorted",
    "too few bytes",
    "two attributes of one name",
    "weights in another file",
    "an output that nothing makes",
)


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_not_plain_or_has_a_fault_is_left_to_the_other_reader(what: str) -> None:
    assert read_plain(only_plain()) is not None
    assert read_plain(fault(only_plain(), what)) is None


UNKNOWN_FIELD = bytes([0xFA, 0x3E, 1, 0x61])
"""A text in field 1007, which no message of ONNX has."""


def unusual(what: str) -> onnx.ModelProto:
    model = only_plain()
    node, tensor = model.graph.node[0], model.graph.initializer[0]
    match what:
        case "long names":
            node.name, tensor.name = "n" * 300, "w" * 20_000
            node.input[1] = tensor.name
        case "empty texts":
            node.name = node.domain = node.overload = node.doc_string = tensor.doc_string = ""
        case "an empty property":
            node.metadata_props.add(key="empty", value="")
        case "half a property":
            node.metadata_props.add(key="only")
        case "numbers in place of bytes":
            tensor.ClearField("raw_data")
            tensor.float_data.extend([1.0, 2.0, 3.0, 4.0])
            other = model.graph.initializer.add(name="other", data_type=TensorProto.INT32, dims=[2])
            other.int32_data.extend([1, -1])
        case "tensors that differ in data only":
            for name, number in (("one", 1.0), ("two", 2.0)):
                model.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, [], [number]))
        case "fields that ONNX has not in a node":
            node.MergeFromString(UNKNOWN_FIELD)
        case "fields that ONNX has not in a tensor":
            tensor.MergeFromString(UNKNOWN_FIELD)
        case "nodes that share properties":
            for index in range(2):
                more = helper.make_node("Neg", ["y"], [f"z{index}"])
                more.metadata_props.add(key="of", value="both")
                model.graph.node.append(more)
    return model


@pytest.mark.parametrize(
    "what",
    [
        "long names",
        "empty texts",
        "an empty property",
        "half a property",
        "numbers in place of bytes",
        "tensors that differ in data only",
        "nodes that share properties",
    ],
)
def test_a_model_with_unusual_bytes_becomes_the_same_file(what: str, tmp_path: Path) -> None:
    onnx.save(unusual(what), tmp_path / "model.onnx")
    read = load_onnx(tmp_path / "model.onnx", plain=True)
    assert isinstance(read, PlainModel) == (what != "half a property")
    save_model(read, tmp_path / "plain.onnx")
    save_model(load_onnx(tmp_path / "model.onnx"), tmp_path / "other.onnx")
    assert (tmp_path / "plain.onnx").read_bytes() == (tmp_path / "other.onnx").read_bytes()


@pytest.mark.parametrize("what", ["a node", "a tensor"])
def test_fields_that_onnx_has_not_are_left_to_the_other_reader(what: str) -> None:
    assert read_plain(unusual(f"fields that ONNX has not in {what}")) is None


def field(number: int, content: bytes, length: bytes | None = None) -> bytes:
    """A field of a message, with another length in place of its own if that is given."""
    return bytes([number << 3 | 2]) + (wire.varint(len(content)) if length is None else length) + content


def written_otherwise(what: str) -> bytes:
    """A model in bytes that protobuf would not write, but reads."""
    model = only_plain()
    names = [field(1, b"x"), field(1, b"weight"), field(2, b"y")]
    node = b"".join([*names, field(3, b"add"), field(4, b"Add")])
    tensor, last = model.graph.initializer[0].SerializeToString(), b""
    match what:
        case "fields in another order":
            node = b"".join([*names, field(4, b"Add"), field(3, b"add")])
        case "a long length":
            node = b"".join([*names, field(3, b"add", b"\x83\x00"), field(4, b"Add")])
        case "a long length in an operator":
            node = b"".join([*names, field(3, b"add"), field(4, b"Add", b"\x83\x00")])
        case "a long length in a tensor":
            raw = bytes([9 << 3 | 2, 16])
            assert tensor.count(raw) == 1
            more = tensor.replace(raw, bytes([9 << 3 | 2, 0x90, 0])).replace(b"weight", b"height")
            last = field(5, more)  # the first one of this type and these sizes is checked by protobuf
        case "a long length in a type":
            last = field(13, field(1, b"y") + field(2, field(1, bytes([8, 1]), b"\x82\x00")))
        case "a long length of a node":
            last = field(1, field(1, b"y") + field(2, b"z") + field(4, b"Neg"), b"\x8b\x00")
        case "a long key of a node":
            last = b"\x8a\x00" + field(1, field(1, b"y") + field(2, b"z") + field(4, b"Neg"))[1:]
        case "a long key of a tensor":
            last = b"\xaa\x00" + field(5, tensor.replace(b"weight", b"height"))[1:]
        case "a long key of a type":
            last = b"\xea\x00" + field(13, field(1, b"none") + field(2, field(1, bytes([8, 1]))))[1:]
        case "a node without an operator":
            last = field(1, field(1, b"y") + field(2, b"z"))
        case "two types of one value":
            last = 2 * field(13, field(1, b"none") + field(2, field(1, bytes([8, 1]))))
    del model.graph.node[:], model.graph.initializer[:]
    graph = field(1, node) + field(5, tensor) + model.graph.SerializeToString() + last
    model.ClearField("graph")
    match what:
        case "a graph in two parts":
            return model.SerializeToString() + field(7, graph) + field(7, b"")
        case "a long key of the graph":
            return model.SerializeToString() + b"\xba\x00" + field(7, graph)[1:]
        case "a long length of the graph":
            return model.SerializeToString() + field(7, graph, long_length(len(graph), 5))
    return model.SerializeToString() + field(7, graph)


def long_length(number: int, size: int) -> bytes:
    """A length in more bytes than it needs."""
    return bytes([number >> 7 * place & 0x7F | 0x80 for place in range(size - 1)]) + b"\0"


@pytest.mark.parametrize(
    "what",
    [
        "nothing",
        "fields in another order",
        "a long length",
        "a long length in an operator",
        "a long length in a tensor",
        "a long length in a type",
        "a long length of a node",
        "a long length of the graph",
        "a long key of a node",
        "a long key of a tensor",
        "a long key of a type",
        "a long key of the graph",
        "a node without an operator",
        "two types of one value",
        "a graph in two parts",
    ],
)
def test_a_model_that_protobuf_would_write_in_other_bytes_is_left_to_the_other_reader(
    what: str, tmp_path: Path
) -> None:
    (tmp_path / "model.onnx").write_bytes(written_otherwise(what))
    read = load_onnx(tmp_path / "model.onnx", plain=True)
    assert isinstance(read, PlainModel) == (what == "nothing")
    save_model(read, tmp_path / "plain.onnx")
    save_model(load_onnx(tmp_path / "model.onnx"), tmp_path / "other.onnx")
    assert (tmp_path / "plain.onnx").read_bytes() == (tmp_path / "other.onnx").read_bytes()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("number", [5, 7])
def test_lengths_that_protobuf_does_not_read_are_refused(number: int, plain: bool, tmp_path: Path) -> None:
    tensor = helper.make_tensor("large", TensorProto.FLOAT, [400], [0.5] * 400).SerializeToString()
    graph = field(5, tensor, long_length(len(tensor), 6) if number == 5 else None)
    content = only_plain().SerializeToString() + field(7, graph, long_length(len(graph), 6) if number == 7 else None)
    with pytest.raises(message.DecodeError):
        onnx.ModelProto.FromString(content)
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(FileFormatError, match="damaged"):
        load_onnx(tmp_path / "model.onnx", plain=plain)


def test_a_graph_is_a_message() -> None:
    model = only_plain()
    model.ClearField("graph")
    assert to_plain(model.SerializeToString() + bytes([7 << 3 | 1]) + field(2, b"graph1")) is None


def test_types_inside_types_are_left_to_the_other_reader(tmp_path: Path) -> None:
    """Protobuf reads 100 messages in each other, and counts from the model."""
    model = only_plain()
    told = field(1, bytes([8, 1]))
    for _ in range(49):
        told = field(4, field(1, told))
    info, graph = field(13, field(1, b"y2") + field(2, told)), model.graph
    graph.node.append(helper.make_node("Neg", ["y"], ["y2"]))
    content = graph.SerializeToString() + info
    model.ClearField("graph")
    content = model.SerializeToString() + field(7, content)
    assert to_plain(content) is None
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(FileFormatError, match="damaged"):
        load_onnx(tmp_path / "model.onnx", plain=True)


def unreadable(what: str) -> onnx.ModelProto:
    model = only_plain()
    graph = model.graph
    match what:
        case "training":
            model.training_info.add().algorithm.name = "adam"
        case "sparse" | "sparse inside":
            inner = graph if what == "sparse" else onnx.GraphProto(name="branch")
            inner.sparse_initializer.add().values.name = "rows"
            if what == "sparse inside":
                graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=inner, else_branch=inner))
        case "negative":
            graph.initializer.add(name="large", data_type=TensorProto.FLOAT, dims=[-300, -1], raw_data=b"1234" * 300)
        case "segment":
            large = graph.initializer.add(name="large", data_type=TensorProto.FLOAT, dims=[300], raw_data=b"1234" * 300)
            large.segment.end = 300
        case "size":
            graph.initializer.add(name="large", data_type=TensorProto.FLOAT, dims=[300], raw_data=b"1234" * 301)
    return model


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("training", "the model has training_info"),
        ("sparse", "the initializer 'rows' is sparse"),
        ("sparse inside", "the initializer 'rows' is sparse"),
        ("negative", "the tensor 'large' has a negative size"),
        ("segment", "the tensor 'large' is a segment"),
        ("size", "the tensor 'large' has 1,204 bytes instead of 1,200"),
    ],
)
def test_what_would_be_lost_or_wrong_is_refused_in_one_line(
    what: str, expected: str, plain: bool, tmp_path: Path
) -> None:
    onnx.save(unreadable(what), tmp_path / "model.onnx")
    with pytest.raises(FileFormatError, match=expected) as found:
        load_onnx(tmp_path / "model.onnx", plain=plain)
    assert "\n" not in str(found.value)


def model_of_marks() -> onnx.ModelProto:
    """A plain model in which each text is a mark of its own."""
    model = only_plain()
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
    assert to_plain(content) is not None
    name = f"MARK{mark}".encode()
    assert name in content
    content = content.replace(name, b"MARK\xff")
    assert to_plain(content) is None
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(FileFormatError, match="not text"):
        load_onnx(tmp_path / "model.onnx", plain=True)


def test_data_is_checked_for_each_tensor() -> None:
    model = unusual("tensors that differ in data only")
    assert read_plain(model) is not None
    model.graph.initializer[-1].ClearField("float_data")
    assert read_plain(model) is None
    model.graph.initializer[-1].float_data.extend([1.0, 2.0])
    assert read_plain(model) is None


@pytest.mark.parametrize("size", [2, 300])
def test_data_is_checked_for_each_way_to_store_it(size: int) -> None:
    """A tensor has numbers or few bytes where one that begins alike has numbers, or bytes that were taken out."""
    model = only_plain()
    first = helper.make_tensor("first", TensorProto.INT64, [size], range(size), raw=False)
    if size > 2:
        first = helper.make_tensor("first", TensorProto.INT64, [size], bytes(8 * size), raw=True)
    model.graph.initializer.append(first)
    assert read_plain(model) is not None
    second = model.graph.initializer.add()
    second.CopyFrom(first)
    second.name, second.raw_data = "second", b"1" if size > 2 else b""
    assert read_plain(model) is None


def test_the_users_of_a_value_are_known_without_the_inputs_of_its_users() -> None:
    """Else one node with 10,000 inputs would be searched 10,000 times."""
    model = only_plain()
    model.graph.node.append(helper.make_node("Mul", ["y", "y"], ["z"]))
    read = read_plain(model)
    assert read is not None
    first, second = read.plain_nodes
    weight, y = first.inputs[1], first.outputs[0]
    assert weight is not None
    first.inputs = second.inputs = ()
    assert (list(weight.consumers()), list(y.consumers()), list(second.outputs[0].consumers())) == (
        [first],
        [second],
        [],
    )
    assert is_used_once(weight)
    assert not is_used_once(y)
    assert not is_used_once(second.outputs[0])


def test_properties_that_nodes_share_are_not_changed() -> None:
    read = read_plain(unusual("nodes that share properties"))
    assert read is not None
    _, first, second = read.plain_nodes
    add_properties(first, {"more": "1"})
    assert (first.metadata_props, second.metadata_props) == ({"of": "both", "more": "1"}, {"of": "both"})


def annotated() -> onnx.ModelProto:
    model = plain()
    for name in ("a", "weight", "y", "x"):
        note = model.graph.quantization_annotation.add(tensor_name=name)
        note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="one")
    return model


def nested() -> onnx.ModelProto:
    model = plain()
    half = helper.make_tensor("half", TensorProto.FLOAT, [], [0.5])
    inner = [helper.make_node("Mul", ["a", "half"], ["inside"])]
    branch = helper.make_graph(inner, "branch", [], [helper.make_tensor_value_info("inside", 1, None)], [half])
    model.graph.node.append(helper.make_node("If", ["flag"], ["chosen"], then_branch=branch, else_branch=branch))
    model.graph.initializer.append(helper.make_tensor("flag", TensorProto.BOOL, [], [True]))
    return model


def with_function() -> onnx.ModelProto:
    model = plain()
    body = [helper.make_node("Tanh", ["i"], ["o"])]
    model.functions.append(helper.make_function("mine", "Mine", ["i"], ["o"], body, [helper.make_opsetid("", 20)]))
    return model


def on_devices() -> onnx.ModelProto:
    model = plain()
    model.ir_version = 11
    model.configuration.add(name="two", num_devices=2)
    model.graph.node[0].device_configurations.add(configuration_id="two", pipeline_stage=1)
    return model


def with_loose_ends() -> onnx.ModelProto:
    """Nothing computes an input of a node and an output of the graph."""
    model = plain()
    model.graph.node[1].input[0] = "nowhere"
    model.graph.output.append(helper.make_tensor_value_info("nothing", 1, [2]))
    return model


@pytest.mark.parametrize("build", [plain, annotated, nested, with_function, on_devices, with_loose_ends])
def test_a_model_with(build: Callable[[], onnx.ModelProto]) -> None:
    check(build())


def test_a_value_that_two_nodes_make_is_refused_as_onnx_ir_does() -> None:
    model = plain()
    model.graph.node.append(helper.make_node("Neg", ["a"], ["b"]))
    with pytest.raises(ir.serde.SerdeError, match="main") as expected:
        ir.serde.deserialize_model(copy_of(model))
    with pytest.raises(ir.serde.SerdeError, match="main") as found:
        to_model(model)
    assert str(found.value) == str(expected.value)


def test_values_share_no_types() -> None:
    model = to_model(plain())
    first, second = model.graph[0].outputs[0], model.graph[2].outputs[0]
    first.dtype = ir.DataType.FLOAT16
    assert second.dtype == ir.DataType.FLOAT


def test_properties_of_initializers_are_written_to_their_tensors() -> None:
    model = to_model(plain())
    model.graph.initializers["weight"].metadata_props["b"] = "2"
    model.graph.initializers["weight"].metadata_props["a"] = "1"
    tensor = ir.tensor(np.zeros((2, 2), np.float32))
    written = to_proto(model, {model.graph.initializers["weight"]: tensor}).graph.initializer[0]
    assert [(entry.key, entry.value) for entry in written.metadata_props] == [("a", "1"), ("b", "2")]
    assert written.name == "weight"
    assert onnx.numpy_helper.to_array(written).tolist() == [[0, 0], [0, 0]]
