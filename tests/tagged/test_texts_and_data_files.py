"""Valid files that every command reads: tensors of texts, attributes whose data are in other files, unsorted nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from commands import run
from graph_texts import written
from modelexport.errors import FileFormatError
from modelexport.tagged.file import read_tagged

WEIGHTS = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)


def labeled(path: Path, *, constant: bool) -> Path:
    """A classifier that gives the texts of its classes."""
    labels = helper.make_tensor("labels", TensorProto.STRING, [8], [b"a", b"bc", *[b"d"] * 6])
    nodes = [helper.make_node("Constant", [], ["labels"], value=labels)] if constant else []
    nodes += [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("ArgMax", ["h"], ["i"], axis=1),
              helper.make_node("Gather", ["labels", "i"], ["y"])]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, ["n", 1])],
        [numpy_helper.from_array(WEIGHTS[0], "w"), *([] if constant else [labels])])  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


@pytest.mark.parametrize("constant", [False, True], ids=["initializer", "Constant"])
def test_files_with_texts_are_counted_compared_changed_and_written(constant: bool, tmp_path: Path) -> None:
    file = labeled(tmp_path / "m.onnx", constant=constant)
    for number, command in enumerate(
        (["cost", file], ["compare", file, file, "--fail-on", "weights"], ["quantize", file, "--to", "int8-dynamic"],
         ["quantize", file, "--to", "float16"], ["optimize", file, "--with", "ort-basic"])
    ):  # fmt: skip
        output = [] if command[0] in ("cost", "compare") else ["-o", tmp_path / f"{number}.onnx"]
        done = run(*command, *output)
        assert done.returncode == 0, (command, done.stderr)


def test_operators_compute_with_texts_that_are_stored(tmp_path: Path) -> None:
    graph = 'g (string[2] x) => (string[2] y) <string[1] end = {"!"}> { y = StringConcat (x, end) }'
    done = run("values", written(tmp_path / "m.onnx", graph, opset=20))
    assert done.returncode == 0, done.stderr


def test_texts_that_differ_are_found(tmp_path: Path) -> None:
    first, second = labeled(tmp_path / "a.onnx", constant=True), tmp_path / "b.onnx"
    model = onnx.load(first)
    model.graph.node[0].attribute[0].t.string_data[0] = b"other"
    onnx.save(model, second)
    assert run("compare", first, second, "--fail-on", "structure").returncode == 1


def with_data_file(folder: Path) -> Path:
    """A file with a ``Constant`` whose data are in another one."""
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(WEIGHTS[0], "w"))
    nodes = [constant, helper.make_node("MatMul", ["x", "w"], ["y"])]
    sides = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8])] for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "g", *sides), opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 8
    folder.mkdir()
    how = {"save_as_external_data": True, "size_threshold": 0, "convert_attribute": True}
    onnx.save_model(model, folder / "m.onnx", location="w.bin", **how)
    return folder / "m.onnx"


@pytest.mark.parametrize("command", [["rename"], ["extract", "--to", "y"], ["optimize", "--with", "ort-basic"]])
def test_a_constant_in_a_data_file_is_written_elsewhere(command: list[str], tmp_path: Path) -> None:
    file, output, x = with_data_file(tmp_path / "model"), tmp_path / "new.onnx", np.ones((1, 8), np.float32)
    assert run(command[0], file, *command[1:], "-o", output).returncode == 0
    (found,) = onnxruntime.InferenceSession(output).run(None, {"x": x})
    np.testing.assert_allclose(found, x @ WEIGHTS[0], rtol=1e-5)


def test_a_constant_is_read_beside_its_model_and_not_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = with_data_file(tmp_path / "model")
    (tmp_path / "w.bin").write_bytes(WEIGHTS[1].tobytes())
    assert run("quantize", file, "--to", "float16", "-o", tmp_path / "half.onnx").returncode == 0
    monkeypatch.chdir(tmp_path)
    assert run("verify", file, "--against", tmp_path / "half.onnx").returncode == 0


def test_a_missing_data_file_of_a_constant_is_named(tmp_path: Path) -> None:
    file = with_data_file(tmp_path / "model")
    (file.parent / "w.bin").unlink()
    refused = run("verify", file, "--against", file)
    assert refused.returncode == 2
    assert "w.bin, which holds weights, is missing" in refused.stderr


def test_a_default_of_a_function_in_another_file_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "m.onnx", "g (float[2] x) => (float[2] y) { y = own.f (x) } "
                   "<domain: \"own\", opset_import: [\"\": 18]> f (a) => (b) { b = Relu (a) }", own=1)  # fmt: skip
    model = onnx.load(file)
    tensor = numpy_helper.from_array(WEIGHTS[0])
    onnx.external_data_helper.set_external_data(tensor, location="w.bin")
    tensor.ClearField("raw_data")
    model.functions[0].attribute_proto.append(helper.make_attribute("t", tensor))
    file.write_bytes(model.SerializeToString())
    with pytest.raises(FileFormatError, match="a default of the function 'f' is in another file"):
        read_tagged(file)


@pytest.mark.parametrize("command", [["cost"], ["verify", "--against", "m.onnx"], ["to-torch", "-o", "net.py"],
                                     ["quantize", "--to", "float16", "-o", "q.onnx"]])  # fmt: skip
def test_nodes_may_be_in_any_order(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [helper.make_node("MatMul", ["h", "w"], ["y"]), helper.make_node("Relu", ["x"], ["h"])]
    sides = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8])] for name in "xy"]
    graph = helper.make_graph(nodes, "g", *sides, [numpy_helper.from_array(WEIGHTS[0], "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    done = run(command[0], "m.onnx", *command[1:])
    assert done.returncode == 0, done.stderr
