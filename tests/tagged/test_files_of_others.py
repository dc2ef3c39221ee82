"""Every command reads files without our tags, and says in one line how it found their calls."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import modelexport
from commands import run
from exports import Exporter
from graph_texts import written
from modelexport.errors import FileFormatError, OutputError
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tools.compare.change_checks import check_changes
from modelexport.tools.optimizers.optimize_tools import optimize_file

FLOATS = TensorProto.FLOAT


def floats(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.random.default_rng(0).standard_normal(shape).astype(np.float32), name)


def chain(nodes: list[tuple[str, str, str]], path: Path, **model: str) -> Path:
    """A file of nodes in a row: operator, name, and the name of an 8x8 weight or nothing."""
    made, weights, last = [], {}, "x"
    for number, (operator, name, weight) in enumerate(nodes):
        if weight:
            weights[weight] = floats(weight, 8, 8)
        value = "y" if number == len(nodes) - 1 else f"v{number}"
        made.append(helper.make_node(operator, [last, *([weight] if weight else [])], [value], name=name))
        last = value
    ports = [helper.make_tensor_value_info(name, FLOATS, [2, 8]) for name in ("x", "y")]
    graph = helper.make_graph(made, "g", ports[:1], ports[1:], list(weights.values()))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, **model), path)
    return path


def owners(path: Path) -> list[str]:
    """The address of each node's call, in order."""
    tagged = modelexport.load(path)
    assert tagged.coverage.exact == tagged.coverage.untagged == 0
    return [row.call for row in tagged.describe_nodes(tagged.calls)]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["net/encoder/dense/MatMul", "net/encoder/dense/Relu", "net/head/dense/MatMul"],
         ["net.encoder.dense", "net.encoder.dense", "net.head.dense"]),
        (["Call/m/d/MatMul", "Call/m/d/MatMul/Relu", "Call/m/e/MatMul__12"], ["Call.m.d", "Call.m.d", "Call.m.e"]),
        (["Inline_0__/encoder/fc/MatMul", "Inline_0__/encoder/act/Relu", "Inline_0__/head/MatMul"],
         ["Inline_0__.encoder.fc", "Inline_0__.encoder.act", "Inline_0__.head"]),
        (["encoder.0.fc.MatMul", "encoder.0.act.Relu", "head.MatMul_3"], ["encoder.0.fc", "encoder.0.act", "head"]),
        (["/encoder/fc/MatMul", "/encoder/act/Relu", "/head/fc/MatMul"], ["encoder.fc", "encoder.act", "head.fc"]),
        (["a/f@1/MatMul", "a/f@1/Relu", "b/MatMul"], ["a.f%401", "a.f%401", "b"]),
        (["p2o.MatMul.0", "p2o.Relu.0", "p2o.MatMul.1"], ["", "", ""]),
        (["MatMul_0", "Relu_1", "MatMul_2"], ["", "", ""]),
    ],
)  # fmt: skip
def test_scopes_in_names_are_calls_under_any_separator(names: list[str], found: list[str], tmp_path: Path) -> None:
    path = chain(list(zip(("MatMul", "Relu", "MatMul"), names, ("w", "", "w2"), strict=True)), tmp_path / "m.onnx")
    assert owners(path) == found


def test_names_of_parameters_tell_calls_where_names_of_nodes_do_not(tmp_path: Path) -> None:
    nodes = [("MatMul", "n0", "net.0.fc.weight"), ("Relu", "n1", ""), ("MatMul", "n2", "net.0.out.weight"),
             ("Relu", "n3", ""), ("MatMul", "n4", "net.1.fc.weight"), ("Relu", "n5", "")]  # fmt: skip
    path = chain(nodes, tmp_path / "m.onnx")
    assert owners(path) == ["net.0.fc", "net.0", "net.0.out", "net", "net.1.fc", ""]
    assert modelexport.load(path).found_calls.sentence == (
        "no tags: 7 calls from the names of parameters (3 nodes); 3 nodes by neighbors; "
        "classes with ? are guesses from operators"
    )


def test_a_class_that_operators_tell_is_marked_as_a_guess(tmp_path: Path) -> None:
    path = chain(
        [("MatMul", "/a/fc/MatMul", "w"), ("Relu", "/a/act/Relu", ""), ("Neg", "/b/Neg", "")], tmp_path / "m.onnx"
    )
    tagged = modelexport.load(path)
    assert {str(call): tagged.class_of(call) for call in tagged.tags} == {
        ".": "Module", "a": "a", "a.fc": "Linear?", "a.act": "ReLU?", "b": "b",
    }  # fmt: skip
    assert [str(call) for call in tagged.select("class:Linear?").calls] == ["a.fc"]


@pytest.mark.parametrize("operator", ["Flatten", "Identity"])
def test_an_operator_that_gives_its_input_another_shape_hides_no_class(operator: str, tmp_path: Path) -> None:
    path = chain([(operator, f"/a/fc/{operator}", ""), ("MatMul", "/a/fc/MatMul", "w")], tmp_path / "m.onnx")
    assert [str(call) for call in modelexport.load(path).select("class:Linear?").calls] == ["a.fc"]


def test_a_file_without_a_tree_shows_what_it_has_and_every_command_takes_it(tmp_path: Path) -> None:
    path = chain([("MatMul", "MatMul_0", "w"), ("Relu", "Relu_1", "")], tmp_path / "m.onnx", producer_name="keras2onnx")
    shown = run("tree", path, cwd=tmp_path)
    assert shown.returncode == 0
    assert shown.stderr == f"{path} has no tags, and nothing that names modules: taken as one module\n"
    for fact in (
        "keras2onnx",
        "ai.onnx 17; IR version 8",
        "x  float32[2, 8]",
        "MatMul 1, Relu 1",
        "1 tensor of 256 bytes",
    ):
        assert fact in shown.stdout
    table = json.loads(run("cost", path, "--json", cwd=tmp_path).stdout)
    assert (table["rows"][0]["total"]["parameters"], table["rows"][0]["total"]["macs"]) == (64, 128)
    for command in (("optimize", path, "--with", "ort-basic", "-o", "o.onnx"), ("adopt", path, "-o", "a.onnx"),
                    ("compare", path, path, "--fail-on", "structure,weights,cost")):  # fmt: skip
        assert run(*command, cwd=tmp_path).returncode == 0
    assert [str(call) for call in modelexport.load(tmp_path / "o.onnx").tags] == ["."]


def test_a_value_that_is_a_sequence_of_maps_keeps_its_type(tmp_path: Path) -> None:
    maps = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(FLOATS, None))
    output = helper.make_value_info("p", helper.make_sequence_type_proto(maps))
    zipped = helper.make_node("ZipMap", ["x"], ["p"], name="z", domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    graph = helper.make_graph([zipped], "g", [helper.make_tensor_value_info("x", FLOATS, [1, 2])], [output])
    domains = [helper.make_opsetid("", 15), helper.make_opsetid("ai.onnx.ml", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=8)
    before = model.SerializeToString()
    modelexport.adopt(model, tmp_path / "a.onnx")
    assert model.SerializeToString() == before
    optimize_file(tmp_path / "a.onnx", "ort-basic", tmp_path / "o.onnx")
    for name in ("a.onnx", "o.onnx"):
        written = onnx.load(tmp_path / name).graph.output[0]
        assert (written.type, list(written.metadata_props)) == (output.type, [])


def test_products_in_branches_are_counted(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("MatMul", ["h", f"{name}.weight"], [f"{name}_m"], name=f"/{name}/MatMul"),
            helper.make_node("Relu", [f"{name}_m"], [f"{name}_o"], name=f"/{name}/Relu"),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_o", FLOATS, [1, 8])])

    nodes = [
        helper.make_node("Relu", ["x"], ["h"], name="/enc/Relu"),
        helper.make_node("If", ["c"], ["y"], name="/dec/If", then_branch=branch("a"), else_branch=branch("b")),
    ]
    ports = [helper.make_tensor_value_info(name, FLOATS, [1, 8]) for name in ("x", "y")]
    graph = helper.make_graph(
        nodes, "g", [ports[0], helper.make_tensor_value_info("c", TensorProto.BOOL, [])], ports[1:],
        [floats("a.weight", 8, 8), floats("b.weight", 8, 8)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    table = modelexport.cost(model)
    assert table.numbers(table.whole)["macs"] == 128


def test_a_file_of_one_module_is_split_anywhere(tmp_path: Path) -> None:
    nodes = [("MatMul", f"MatMul_{number}", f"w{number}") for number in range(4)]
    path = chain(nodes, tmp_path / "m.onnx")
    split = modelexport.split(path, tmp_path / "stages", stages=2)
    assert [stage.nodes for stage in split.stages] == [2, 2]
    x = np.ones((2, 8), np.float32)
    chained = modelexport.run_chain(tmp_path / "stages", {"x": x})["y"]
    np.testing.assert_array_equal(chained, modelexport.load(path).session().run(None, {"x": x})[0])


def test_parts_between_values_are_extracted_also_from_branches(tmp_path: Path) -> None:
    inner = [helper.make_node("MatMul", ["h", "w"], ["m"]), helper.make_node("Relu", ["m"], ["o"])]
    other = [helper.make_node("Neg", ["h"], ["p"])]
    branches = [
        helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, FLOATS, [2, 8])])
        for nodes, name in ((inner, "o"), (other, "p"))
    ]
    nodes = [
        helper.make_node("Add", ["x", "z"], ["h"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    ports = {name: helper.make_tensor_value_info(name, FLOATS, [2, 8]) for name in "xzy"}
    ports["c"] = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "g", [ports["x"], ports["z"], ports["c"]], [ports["y"]], [floats("w", 8, 8)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "m.onnx")

    done = run("extract", "m.onnx", "--to", "m", "-o", "part.onnx", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    part = onnx.load(tmp_path / "part.onnx").graph
    assert [node.op_type for node in part.node] == ["Add", "MatMul"]
    assert [value.name for value in (*part.input, *part.output)] == ["x", "z", "m"]
    run("extract", "m.onnx", "--from", "h", "--to", "o", "-o", "part.onnx", cwd=tmp_path)
    part = onnx.load(tmp_path / "part.onnx").graph
    assert [value.name for value in (*part.input, *part.output)] == ["h", "o"]
    for arguments, told in ((("--to", "q"), "no value 'q'"), (("--to", "x"), "no node computes 'x'"),
                            (("--to", "y", "--from", "h"), "also depends on c: give it with --from"),
                            (("--from", "h"), "with --to and --from")):  # fmt: skip
        done = run("extract", "m.onnx", *arguments, "-o", "part.onnx", cwd=tmp_path)
        assert done.returncode == 2
        assert told in done.stderr


def test_inputs_are_made_for_sizes_and_numbers_that_a_file_asks_for(tmp_path: Path) -> None:
    """Sizes of -1 are dynamic; a number that is compared with a constant is that constant; a NaN is no obstacle."""
    nodes = [
        helper.make_node("Equal", ["rate", "fast"], ["is_fast"]),
        helper.make_node("Where", ["is_fast", "frames", "others"], ["shape"]),
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("Sqrt", ["r"], ["y"]),
    ]
    numbers = {"fast": 16_000, "frames": [-1, 512], "others": [-1, 7]}
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(*port) for port in (("x", FLOATS, [-1, -1]), ("rate", TensorProto.INT64, []))],
        [helper.make_tensor_value_info("y", FLOATS, None)],
        [numpy_helper.from_array(np.array(number), name) for name, number in numbers.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    done = run("profile", "m.onnx", "--runs", 1, cwd=tmp_path)
    assert "x float32[1, 512], rate int64[]" in done.stdout, done.stderr


def test_a_scan_gets_inputs_with_which_it_has_something_to_scan(tmp_path: Path) -> None:
    """ONNX Runtime ends the process if it has nothing: here, with fewer than 100 columns."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["s"], ["t"]), helper.make_node("Neg", ["a"], ["b"])], "body",
        [helper.make_tensor_value_info("s", FLOATS, [1]), helper.make_tensor_value_info("a", FLOATS, [2])],
        [helper.make_tensor_value_info("t", FLOATS, [1]), helper.make_tensor_value_info("b", FLOATS, [2])],
    )  # fmt: skip
    nodes = [
        helper.make_node("Slice", ["x", "first", "end", "axis"], ["rest"]),
        helper.make_node("Scan", ["state", "rest"], ["last", "y"], num_scan_inputs=1, scan_input_axes=[1], body=body),
    ]
    numbers = {"first": [100], "end": [100_000], "axis": [1]}
    weights = [numpy_helper.from_array(np.array(number), name) for name, number in numbers.items()]
    ports = [helper.make_tensor_value_info("x", FLOATS, [2, "n"]), helper.make_tensor_value_info("y", FLOATS, None)]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [*weights, floats("state", 1)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    done = run("profile", "m.onnx", "--runs", 1, cwd=tmp_path)
    assert "x float32[2, 512]" in done.stdout, done.stderr


def test_float16_with_which_the_runtime_ends_the_process_is_told_and_runs(tmp_path: Path) -> None:
    """A ``Transpose`` before a ``MatMul`` of float16: ONNX Runtime 1.31 ends the process at its usual level."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["t", "w"], ["y"]),
    ]
    ports = [
        helper.make_tensor_value_info("x", FLOATS, ["n", 1, 8]),
        helper.make_tensor_value_info("y", FLOATS, [1, "n", 8]),
    ]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [floats("w", 8, 8)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    with pytest.warns(modelexport.ModelExportWarning, match=r"h\.onnx has a MatMul of float16 behind a Transpose"):
        modelexport.quantize(tmp_path / "m.onnx", tmp_path / "h.onnx", to="float16")
    for arguments in (["profile", "h.onnx", "--runs", 1], ["compare", "m.onnx", "h.onnx", "--numbers"]):
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_tags_come_back_after_a_tool_that_writes_many_nodes_for_one(tmp_path: Path) -> None:
    loss = helper.make_node(
        "SoftmaxCrossEntropyLoss", ["x", "labels"], ["y"], name="/head/loss/SoftmaxCrossEntropyLoss"
    )
    labels = helper.make_tensor_value_info("labels", TensorProto.INT64, [2])
    x, y = helper.make_tensor_value_info("x", FLOATS, [2, 8]), helper.make_tensor_value_info("y", FLOATS, [])
    graph = helper.make_graph([loss], "g", [x, labels], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    done = run("optimize", "m.onnx", "--with", "ort-basic", "-o", "o.onnx", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(onnx.load(tmp_path / "o.onnx").graph.node) > 3
    assert set(owners(tmp_path / "o.onnx")) == {"head.loss"}


def test_cost_of_open_sizes_is_that_of_an_example(tmp_path: Path) -> None:
    """Sizes that depend on the data are those of the run; an axis without a name gets one."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Cast", ["places"], ["floats"], to=FLOATS),
        helper.make_node("MatMul", ["w", "floats"], ["y"]),
    ]
    ports = [
        helper.make_tensor_value_info("x", FLOATS, ["rows", None]),
        helper.make_tensor_value_info("y", FLOATS, None),
    ]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [floats("w", 3, 2)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    done = run("cost", "m.onnx", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert document["rows"][0]["total"]["macs"] == 3 * 2 * (2 * 8)
    shown = run("cost", "m.onnx", cwd=tmp_path).stdout
    assert "small ones with which the file runs: rows=2, x_1=8 (give others with --size NAME=N)" in shown
    document = json.loads(run("cost", "m.onnx", "--json", "--size", "rows=5", "--size", "x_1=7", cwd=tmp_path).stdout)
    assert document["rows"][0]["total"]["macs"] == 3 * 2 * (5 * 7)
    changes = check_changes(tmp_path / "m.onnx", tmp_path / "m.onnx", ["cost"]).costs
    assert {change.column: change.first for change in changes or ()}["macs"] == 3 * 2 * (2 * 8)


def test_weights_beside_a_file_are_found_from_any_folder_and_copied_where_nothing_records_them(tmp_path: Path) -> None:
    path = chain([("MatMul", "/a/MatMul", "a.weight"), ("Relu", "/b/Relu", "")], tmp_path / "inside.onnx")
    file, feeds = tmp_path / "file.onnx", {"x": np.ones((2, 8), np.float32)}
    onnx.save(onnx.load(path), file, save_as_external_data=True, location="file.bin", size_threshold=0)
    right = run_session(open_session(path), feeds)["y"]
    modelexport.rename(file, tmp_path / "renamed.onnx")
    by = modelexport.CustomOperator("acme", "Relu", keep_body=True)
    modelexport.replace(file, ["b"], by, tmp_path / "replaced.onnx")
    assert modelexport.quantize(file, tmp_path / "quantized.onnx", to="int8-dynamic").changed
    for name in ("renamed.onnx", "replaced.onnx"):
        assert np.array_equal(run_session(open_session(tmp_path / name), feeds)["y"], right)
    with pytest.raises(OutputError, match=r"file\.bin was not written by modelexport, .* use --weights copy"):
        modelexport.replace(file, ["b"], by, tmp_path / "linked.onnx", weights="link")


def test_a_file_that_calls_a_function_which_a_tool_lost_is_damaged(tmp_path: Path) -> None:
    text = """g (float[2] x) => (float[2] y) { ["/a/Neg"] h = Neg(x) ["/b/Twice"] y = mine.Twice(h) }
        <domain: "mine", opset_import: ["": 18]> Twice (p) => (q) { q = Add(p, p) }"""
    file = written(tmp_path / "file.onnx", text, mine=1)
    changed = onnx.load(file)
    del changed.functions[:]
    onnx.save(changed, tmp_path / "changed.onnx")
    modelexport.adopt(file, tmp_path / "tagged.onnx")
    with pytest.raises(FileFormatError, match="it calls Twice, a function that the tool lost"):
        modelexport.retag(tmp_path / "changed.onnx", source=file, output=tmp_path / "out.onnx")


def test_a_module_returns_its_input_also_if_the_file_has_no_types(tmp_path: Path) -> None:
    path = chain([("Abs", "/a/Abs", ""), ("Relu", "/b/Relu", ""), ("Neg", "/c/Neg", "")], tmp_path / "file.onnx")
    modelexport.replace(path, ["b"], modelexport.Identity(), tmp_path / "out.onnx")
    assert [node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node] == ["Abs", "Identity", "Neg"]


def test_a_file_with_tags_keeps_its_sidecar_beside_one_without(exported: Exporter, tmp_path: Path) -> None:
    """Calls found in another way are compared as one module, to which no sidecar belongs."""
    path = chain([("MatMul", "/a/fc/MatMul", "w"), ("Relu", "/a/act/Relu", "")], tmp_path / "m.onnx")
    source = exported("blocks").path
    assert source.with_suffix(".hierarchy.json").exists()
    done = run("compare", source, path, cwd=tmp_path)
    coverage = modelexport.load(source).coverage
    assert done.returncode == 0
    assert f"{coverage.exact} exact, {coverage.derived} derived" in done.stdout
    assert "each file is compared as one module" in done.stdout
    assert done.stderr.startswith(f"{path} has no tags: 4 calls from the scopes in names of nodes (2 nodes)")
    assert done.stderr.count("\n") == 1


def test_weights_in_constant_nodes_count_as_weights(tmp_path: Path) -> None:
    """As paddle2onnx writes all of them."""
    path = chain([("MatMul", "/a/MatMul", "w"), ("MatMul", "/b/MatMul", "v")], tmp_path / "m.onnx")
    model = onnx.load(path)
    for held in model.graph.initializer:
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [held.name], value=held))
    del model.graph.initializer[:]
    onnx.save(model, path)
    (cut,) = json.loads(run("extract", path, "a", "-o", "a.onnx", "--json", cwd=tmp_path).stdout)
    assert cut["bytes"] == 256
    stages = json.loads(run("split", path, "-o", "s/", "--stages", 2, "--json", cwd=tmp_path).stdout)["stages"]
    assert [stage["bytes"] for stage in stages] == [256, 256]
    constants = json.loads(run("compare", path, path, "--json", cwd=tmp_path).stdout)["first"]["constants"]
    assert constants == {"float32": {"initializers": 2, "bytes": 512}}
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, path)
    assert "2 tensors of 512 bytes" in run("tree", path, cwd=tmp_path).stdout


def test_a_parameter_whose_name_tells_no_module_is_counted_for_the_module_that_uses_it(tmp_path: Path) -> None:
    path = chain([("MatMul", "/a/fc/MatMul", "w"), ("Relu", "/b/Relu", "")], tmp_path / "m.onnx")
    (weight,) = onnx.load(path).graph.initializer
    own = {row["address"]: row["own"]["parameters"] for row in json.loads(run("cost", path, "--json").stdout)["rows"]}
    size = int(np.prod(weight.dims))
    assert {module: count for module, count in own.items() if count} == {"a.fc": size}
