"""A tagged file as an object: calls by name, iteration, trees for terminals and notebooks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import modelexport
from exports import Exporter
from modelexport.errors import FileFormatError, UsageError
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.graph.properties import properties_of


@pytest.fixture(scope="module")
def bert(exported: Exporter) -> modelexport.TaggedModel:
    return modelexport.load(exported("bert").path)


def test_a_call_is_found_by_address_and_by_tag(bert: modelexport.TaggedModel) -> None:
    layer = bert["encoder.layer.0"]
    assert layer.tag == "/BertModel/BertEncoder/BertLayer.0"
    assert bert[layer.tag].call == layer.call
    assert layer.class_name == "BertLayer"
    assert "encoder.layer.0" in bert
    assert "encoder.layer.7" not in bert


def test_a_view_has_what_a_module_has(bert: modelexport.TaggedModel) -> None:
    attention = bert["encoder.layer.0.attention.self"]
    assert [child.address.rpartition(".")[2] for child in attention.children] == ["query", "key", "value"]
    assert sorted(attention.parameters) == sorted(
        f"encoder.layer.0.attention.self.{name}.{kind}"
        for name in ("query", "key", "value")
        for kind in ("weight", "bias")
    )
    assert "embeddings" not in {value.name for value in attention.outputs}
    assert len(attention.outputs) == 1
    assert len(attention.nodes) == len(attention.own_nodes) + sum(len(child.nodes) for child in attention.children)


def test_the_root_has_the_inputs_and_outputs_of_the_graph(bert: modelexport.TaggedModel) -> None:
    root = bert["."]
    assert {value.name for value in root.inputs} <= {value.name for value in bert.model.graph.inputs}
    assert {value.name for value in root.outputs} == {value.name for value in bert.model.graph.outputs}
    assert len(root.nodes) == len(bert.nodes)


def as_in_a_file(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnx_ir's serialization, with properties of initializers on their tensors and without their ``value_info``."""
    infos = {value.name: value for value in model.graph.value_info}
    for tensor in model.graph.initializer:
        told = [infos.pop(tensor.name)] if tensor.name in infos else []
        properties = {entry.key: entry.value for holder in (tensor, *told) for entry in holder.metadata_props}
        onnx.helper.set_metadata_props(tensor, dict(sorted(properties.items())))
        for output in model.graph.output:
            if output.name == tensor.name:
                del output.metadata_props[:]
    del model.graph.value_info[:]
    model.graph.value_info.extend(infos.values())
    return model


def test_a_model_that_was_read_is_what_its_file_holds(bert: modelexport.TaggedModel) -> None:
    expected = as_in_a_file(ir.serde.serialize_model(ir.load(bert.path)))
    assert as_in_a_file(ir.serde.serialize_model(modelexport.load(bert.path).model)) == expected


def test_what_was_read_stays_what_it_was_when_the_file_is_replaced(exported: Exporter, tmp_path: Path) -> None:
    path = tmp_path / "blocks.onnx"
    path.write_bytes(exported("blocks").path.read_bytes())
    before = {name: value.const_value.tobytes() for name, value in ir.load(path).graph.initializers.items()}
    tagged = modelexport.load(path)
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "other").replace(path)
    assert {name: value.const_value.tobytes() for name, value in tagged.model.graph.initializers.items()} == before


@pytest.mark.parametrize("dtype", [ir.DataType.INT4, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.BOOL])
def test_a_file_is_written_as_protobuf_would_write_it(dtype: ir.DataType, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 2, (64, 65)).astype(dtype.numpy())
    value = ir.val("weight", dtype, array.shape, const_value=ir.Tensor(array, name="weight", doc_string="a weight"))
    value.metadata_props["key"] = "value"
    small = ir.val("small", const_value=ir.tensor([1.0, 2.0], name="small"))
    graph = ir.Graph([], [value], nodes=[], initializers=[small, value], opset_imports={"": 21}, name="graph")
    model = ir.Model(graph, ir_version=10)
    save_model(model, tmp_path / "x.onnx", external=False)
    model.metadata_props.update(properties_of(model))
    assert (tmp_path / "x.onnx").read_bytes() == as_in_a_file(ir.to_proto(model)).SerializeToString()
    again = load_onnx(tmp_path / "x.onnx")
    read = again.graph.initializers["weight"].const_value
    assert read is not None
    assert np.array_equal(read.numpy(), array)
    save_model(again, tmp_path / "y.onnx", external=False)
    assert (tmp_path / "x.onnx").read_bytes() == (tmp_path / "y.onnx").read_bytes()


def test_iteration_gives_every_call_callers_before_callees(bert: modelexport.TaggedModel) -> None:
    addresses = list(bert)
    assert len(addresses) == len(bert) == len(set(addresses))
    assert addresses[0] == "."
    assert addresses.index("encoder.layer.1") < addresses.index("encoder.layer.1.output.dense")


def test_a_view_knows_the_other_calls_of_its_module(exported: Exporter) -> None:
    repeated = modelexport.load(exported("blocks").path)["shared@1"]
    assert [view.address for view in repeated.calls] == ["shared", "shared@1"]
    assert {len(view.nodes) for view in repeated.calls} == {len(repeated.nodes)}


def test_a_tree_is_text_in_a_terminal_and_unfolds_in_a_notebook(bert: modelexport.TaggedModel) -> None:
    assert "    BertLayer.0" in str(bert)
    assert repr(bert).startswith("<TaggedModel ")
    page = bert._repr_html_()
    assert page.count("<details") == page.count("</details>") > 10
    assert "BertLayer.0" in page


def test_a_view_is_cut_out(bert: modelexport.TaggedModel, tmp_path: Path) -> None:
    bert["pooler"].extract(tmp_path / "pooler.onnx")
    assert len(modelexport.load(tmp_path / "pooler.onnx").nodes) >= len(bert["pooler"].nodes)


def test_names_that_are_not_there_are_told_the_nearest(bert: modelexport.TaggedModel) -> None:
    with pytest.raises(UsageError, match=r"did you mean .*encoder\.layer\.0"):
        bert["encoder.layr.0"]
    with pytest.raises(UsageError, match="ambiguous"):
        bert["dense"]


def test_a_file_whose_tags_are_damaged_is_refused(bert: modelexport.TaggedModel, tmp_path: Path) -> None:
    content = bert.path.read_bytes().replace(b'"call":"embeddings"', b'"lost":"embeddings"', 1)
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(FileFormatError, match="damaged tags"):
        modelexport.load(tmp_path / "x.onnx")
