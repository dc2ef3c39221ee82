"""What a file says of itself is a value in memory and text in the file; one file of the source knows the text."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

import modelexport
from modelexport.errors import FileFormatError
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.format import keys
from modelexport.format.documents import DataFile
from modelexport.graph.properties import put_texts, record, recorded, text_of
from modelexport.graph.size_conditions import SizeCondition, conditions_of, record_conditions


@pytest.fixture
def model() -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n"]))
    node = ir.node("Relu", [x])
    node.outputs[0].name = "y"
    return ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 20}), ir_version=10)


def test_what_is_recorded_is_read_back(model: ir.Model, tmp_path: Path) -> None:
    record_conditions(model, [SizeCondition("n < 24")])
    record(model, keys.REPLACED, {"encoder": "other.onnx"})
    save_model(model, tmp_path / "m.onnx")
    again = load_onnx(tmp_path / "m.onnx")
    assert [condition.formula for condition in conditions_of(again)] == ["n < 24"]
    assert recorded(again, keys.REPLACED) == {"encoder": "other.onnx"}
    assert recorded(again, keys.DOCUMENTS) == {}


def test_recording_removes_the_text_of_the_former_value(model: ir.Model, tmp_path: Path) -> None:
    record_conditions(model, [SizeCondition("n < 24")])
    save_model(model, tmp_path / "m.onnx")
    again = load_onnx(tmp_path / "m.onnx")
    assert text_of(again, keys.VALID_IF) == '["n < 24"]'
    record_conditions(again, [])
    assert text_of(again, keys.VALID_IF) is None
    assert conditions_of(again) == []


def test_records_of_files_are_values(model: ir.Model) -> None:
    put_texts(model, {keys.DATA: '{"m.onnx.data": {"size": 3, "sha256": "ab"}}'})
    assert recorded(model, keys.DATA) == {"m.onnx.data": DataFile(3, "ab")}


def test_damaged_text_is_refused(model: ir.Model) -> None:
    put_texts(model, {keys.DATA: "[1]"})
    with pytest.raises(FileFormatError, match="damaged"):
        recorded(model, keys.DATA)


def test_no_other_code_knows_the_text() -> None:
    source = Path(modelexport.__file__).parent
    knowing = {path.name for path in source.rglob("*.py") if ".metadata_props" in path.read_text()}
    assert knowing == {"properties.py", "protobuf_writing.py", "map_types.py"}
