"""``compare --fail-on``: a check for builds, which fails only for the requested aspects."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

import commands
import models
from exports import Exporter
from graph_texts import with_formula, written
from modelexport import export, verify_against
from modelexport.errors import UsageError
from modelexport.runtime.varied_inputs import rows_of_ids
from modelexport.tools.compare.change_checks import ASPECTS, check_changes


def changed_weight(source: Path, target: Path) -> None:
    """A copy with one parameter doubled."""
    model = onnx.load(source)
    tensor = next(t for t in model.graph.initializer if t.name.endswith("linear.weight"))
    tensor.raw_data = (numpy_helper.to_array(tensor) * 2).tobytes()
    onnx.save(model, target)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return commands.run("compare", *arguments)


EVERYTHING = ["--fail-on", "structure,weights,outputs,cost"]


@pytest.mark.slow
def test_two_exports_do_not_differ(exported: Exporter, tmp_path: Path) -> None:
    """That those of two processes are the same bytes is a test of the command line."""
    one, again = exported("blocks"), tmp_path / "again.onnx"
    export(one.case.build(), one.case.inputs(), again, check=False)
    done = run(one.path, again, *EVERYTHING, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["failed"]) == (0, [])
    assert document["changed"] == document["only_in_first"] == document["entries"] == []


def test_other_weights_fail_as_weights_and_outputs_alone(exported: Exporter, tmp_path: Path) -> None:
    path = exported("blocks").path
    changed_weight(path, tmp_path / "other.onnx")
    report = check_changes(path, tmp_path / "other.onnx", ASPECTS)
    assert report.failed == ["weights", "outputs"]
    assert report.comparison.values is not None
    assert len(report.comparison.values.different) == 1
    assert run(path, tmp_path / "other.onnx", "--fail-on", "structure,cost").returncode == 0
    done = run(path, tmp_path / "other.onnx", "--fail-on", "weights", "--markdown")
    assert done.returncode == 1
    assert "| weights | **differs** |" in done.stdout


def test_outputs_are_compared_at_the_sizes_that_one_file_fixes(tmp_path: Path) -> None:
    for name, rows, dynamic in (("four", 4, False), ("any", 3, True), ("two", 2, False)):
        export(
            torch.nn.Linear(2, 2).eval(), torch.ones(rows, 2), tmp_path / f"{name}.onnx", dynamic=dynamic, check=False
        )
    for first, second in (("any", "four"), ("four", "any")):
        done = run(tmp_path / f"{first}.onnx", tmp_path / f"{second}.onnx", "--fail-on", "outputs")
        assert done.returncode == 1, done.stderr
        assert "outputs: differs" in done.stdout
    np.savez(tmp_path / "given.npz", input=np.ones((4, 2), np.float32))
    given = check_changes(tmp_path / "any.onnx", tmp_path / "four.onnx", ["outputs"], inputs=tmp_path / "given.npz")
    assert given.failed == ["outputs"]
    done = run(tmp_path / "four.onnx", tmp_path / "two.onnx", "--fail-on", "outputs")
    assert done.returncode == 2
    assert "axis 0 of input is 4 in" in done.stderr


def test_outputs_within_the_tolerance_are_the_same_only_if_rounding_may_explain_them(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2).eval()
    export(layer, torch.ones(3, 2), tmp_path / "a.onnx", check=False)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1 + 5e-5)
    export(layer, torch.ones(3, 2), tmp_path / "b.onnx", check=False)
    for options, line in (
        ((), r"outputs: within [45]\.\de-05, 3e-04 allowed"),
        (("--markdown",), r"outputs \| within [45]"),
    ):
        done = run(tmp_path / "a.onnx", tmp_path / "b.onnx", "--fail-on", "outputs", *options)
        assert done.returncode == 0, done.stderr
        assert re.search(line, done.stdout)
    assert "outputs: the same" in run(tmp_path / "a.onnx", tmp_path / "a.onnx", "--fail-on", "outputs").stdout


HIDDEN = {
    "other numbers": ("int64[2, 8] ids", "{ y = Gather (table, ids) }",
                      "{ low = Min (ids, most)  y = Gather (table, low) }"),
    "zeros and ones": ("float[N, 8] x, int64[N, 8] mask", "{ keep = Cast <to = 9> (mask)  y = Where (keep, x, nine) }",
                       "{ y = Identity (x) }"),
    "larger and smaller numbers": ("float[N, 8] x", "{ y = Clip (x, , nine) }", "{ y = Clip (x, , three) }"),
    "other conditions": ("float[N, 8] x, bool c", "{ y = Where (c, x, nine) }", "{ y = Where (c, x, three) }"),
    "other sizes": ("float[N, 8] x", "{ y = Identity (x) }", "{ y = Slice (x, zero, two) }"),
}  # fmt: skip


@pytest.mark.parametrize("what", HIDDEN)
def test_a_change_that_a_single_draw_hides_is_found_with(what: str, tmp_path: Path) -> None:
    takes, *bodies = HIDDEN[what]
    paths = [tmp_path / "before.onnx", tmp_path / "after.onnx"]
    for path, body in zip(paths, bodies, strict=True):
        constants = (
            "float nine = {9.0}, float three = {3.0}, int64 most = {1500}, int64[1] zero = {0}, int64[1] two = {2}"
        )
        header = f'<ir_version: 10, opset_import: ["": 20]> g ({takes}) => (float[N, 8] y) <{constants}>'
        model = onnx.parser.parse_model(header + body)
        model.graph.initializer.append(numpy_helper.from_array(np.arange(5000, dtype=np.float32), "table"))
        onnx.save(model, path)
    report = check_changes(*paths, ["outputs"])
    assert report.tried[0] == "random"
    assert [output.reason.partition(":")[0] for output in report.outputs or ()] == [f"with {what}"]
    same = run(paths[0], paths[0], "--fail-on", "outputs").stdout
    assert re.search(rf"outputs: the same \(inputs: random.*, {what}", same)
    if what == "other conditions":
        assert not verify_against(*paths).agrees
        assert verify_against(paths[0], paths[0]).agrees


@pytest.mark.parametrize(
    "moved",
    ["Transpose (ids)", "Slice (ids, first, last)", "Concat <axis = 0> (ids, ids)", "Expand (ids, sizes)",
     "Gather <axis = 1> (ids, first)"],
)  # fmt: skip
def test_ids_of_all_rows_are_tried_however_the_graph_moves_them(moved: str, tmp_path: Path) -> None:
    constants = "int64 most = {1500}, int64[1] first = {0}, int64[1] last = {1}, int64[3] sizes = {2, 2, 8}"
    for name, ids in (("before", "moved"), ("after", "low")):
        body = f"{{ moved = {moved}  low = Min (moved, most)  y = Gather (table, {ids}) }}"
        header = f'<ir_version: 10, opset_import: ["": 20]> g (int64[2, 8] ids) => (float[N, M] y) <{constants}>'
        model = onnx.parser.parse_model(header + body)
        model.graph.output[0].type.tensor_type.ClearField("shape")
        model.graph.initializer.append(numpy_helper.from_array(np.arange(5000, dtype=np.float32), "table"))
        onnx.save(model, tmp_path / f"{name}.onnx")
    report = check_changes(tmp_path / "before.onnx", tmp_path / "after.onnx", ["outputs"])
    assert [output.reason.partition(":")[0] for output in report.outputs or ()] == ["with other numbers"]


def test_a_shape_is_not_taken_for_ids(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> g (int64[2] shape, int64[6] ids) => (float[] y)
        <float[7] table = {1, 2, 3, 4, 5, 6, 7}> { shaped = Reshape (ids, shape)  y = Gather (table, shaped) }"""
    assert rows_of_ids(ir.from_proto(onnx.parser.parse_model(text))) == {"ids": 7}


def test_costs_are_compared_at_the_same_sizes(tmp_path: Path) -> None:
    for name, rows, body in (
        ("any", "N", "Relu(x)"), ("nine", "9", "Relu(x)"), ("named", "M", "Relu(x)"), ("other", "8", "Relu(x)"),
        ("twice", "9", "Add(x, x) z = Relu(w)"), ("even", "E", "Relu(x)"), ("sum", "S", "Relu(x)"),
    ):  # fmt: skip
        result, output = (body.replace("Add", "w = Add"), "z") if "z" in body else (f"y = {body}", "y")
        written(tmp_path / f"{name}.onnx", f"g (float[{rows}, 8] x) => (float[{rows}, 8] {output}) {{ {result} }}")
    with_formula(tmp_path / "even.onnx", "E", "2*N")
    with_formula(tmp_path / "sum.onnx", "S", "N + M")

    def failed(first: str, second: str) -> list[str]:
        return check_changes(tmp_path / f"{first}.onnx", tmp_path / f"{second}.onnx", ["cost"]).failed

    assert failed("any", "nine") == failed("nine", "any") == failed("any", "named") == failed("nine", "named") == []
    assert failed("any", "twice") == ["cost"]
    assert failed("even", "other") == failed("other", "even") == failed("even", "any") == failed("any", "even") == []
    for first, size, second in (("nine", "9", "other"), ("even", r"2\*N", "nine"), ("sum", r"N \+ M", "nine")):
        number = 8 if second == "other" else 9
        with pytest.raises(
            UsageError, match=rf"axis 0 of x is {size} in .*{first}\.onnx and {number} in .*{second}\.onnx"
        ):
            failed(first, second)


def test_outputs_without_a_finite_number_are_not_compared(tmp_path: Path) -> None:
    path = written(tmp_path / "log.onnx", "g (float[2] x) => (float[2] y) { z = Abs(x) n = Neg(z) y = Log(n) }")
    done = run(path, path, "--fail-on", "outputs")
    assert done.returncode == 1
    assert "y: not compared (no element is a finite number)" in done.stdout


def test_a_larger_model_fails_as_cost(exported: Exporter, tmp_path: Path) -> None:
    torch.manual_seed(0)
    wide = torch.nn.Sequential(models.Block(), models.Block(8)).eval()
    deep = torch.nn.Sequential(models.Block(), models.Block(8), models.Block(8)).eval()
    export(wide, {"input": torch.randn(2, 8)}, tmp_path / "a.onnx", check=False)
    export(deep, {"input": torch.randn(2, 8)}, tmp_path / "b.onnx", check=False)
    report = check_changes(tmp_path / "a.onnx", tmp_path / "b.onnx", ["cost", "structure"])
    assert report.failed == ["structure", "cost"]
    assert {change.column for change in report.costs or () if change.worse} >= {"parameters", "macs", "flops"}
    assert check_changes(tmp_path / "b.onnx", tmp_path / "a.onnx", ["cost"]).failed == []


def test_files_without_tags_are_compared_by_names_and_structure(exported: Exporter, tmp_path: Path) -> None:
    path, plain, other = exported("blocks").path, tmp_path / "plain.onnx", tmp_path / "other.onnx"
    model = onnx.load(path)
    del model.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]
    onnx.save(model, plain)
    assert check_changes(path, plain, ["structure", "weights", "outputs"]).agrees
    changed_weight(plain, other)
    assert check_changes(plain, other, ["structure", "weights", "outputs"]).failed == ["weights", "outputs"]
    model.graph.node[0].op_type = "Sigmoid" if model.graph.node[0].op_type != "Sigmoid" else "Relu"
    del model.graph.node[0].input[1:]
    onnx.save(model, other)
    assert check_changes(plain, other, ["structure"]).failed == ["structure"]


def test_selectors_leave_out_the_rest(exported: Exporter, tmp_path: Path) -> None:
    path, other = exported("blocks").path, tmp_path / "other.onnx"
    shutil.copy(path, other)
    model = onnx.load(other)
    node = next(node for node in model.graph.node if node.op_type == "Relu")
    node.op_type = "Tanh"
    call = next(prop.value for prop in node.metadata_props if prop.key == "modelexport.call")
    onnx.save(model, other)
    assert check_changes(path, other, ["structure"]).failed == ["structure"]
    assert check_changes(path, other, ["structure"], modules=[f"!{call}"]).failed == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--fail-on", "speed"], "--fail-on takes structure, weights, outputs, cost, not speed"),
     (["--json", "--markdown"], "not both")],
)  # fmt: skip
def test_what_is_wrong_is_said(exported: Exporter, arguments: list[str], message: str) -> None:
    done = run(exported("blocks").path, exported("blocks").path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("order", [1, -1])
def test_parameters_that_only_one_file_has_are_not_the_same(tmp_path: Path, order: int) -> None:
    head, weight = "g (float[2,2] x) => (float[2,2] y)", "{1, 2, 3, 4}"
    has = written(
        tmp_path / "has.onnx", f'{head} <float[2,2] "a.w" = {weight}> {{ ["/a/MatMul"] y = MatMul(x, "a.w") }}'
    )
    lacks = written(
        tmp_path / "lacks.onnx",
        f'{head} {{ ["/a/C"] w = Constant <value = float[2,2] {weight}>() ["/a/MatMul"] y = MatMul(x, w) }}',
    )
    assert check_changes(*[has, lacks][::order], ["weights"]).failed == ["weights"]
