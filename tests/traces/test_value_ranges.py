"""The range of what a file computes, and where its first NaN or infinity comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.helper import make_node

from exports import Exporter
from modelexport.tagged.file import read_tagged
from modelexport.traces.value_ranges import BFLOAT16, ValueRange, ValueRanges, measure_values

BLOCKS = 5
Plant = Callable[[str], list[NodeProto]]


def planted(*operators: str) -> Plant:
    """Nodes in a row: each takes the value before it and the constants that its name says."""

    def nodes(value: str) -> list[NodeProto]:
        made = []
        for index, words in enumerate(operators):
            operator, *constants = words.split()
            name = "plant" if index == len(operators) - 1 else f"before_{index}"
            inputs = [value, *constants]
            made.append(make_node(operator, [each.replace("value", value) for each in inputs], [f"{name}_of_{value}"]))
            value = f"{name}_of_{value}"
        return made

    return nodes


PLANTS: dict[str, tuple[Plant, str]] = {
    "overflow": (planted("Mul ten_thousand"), "infinity"),
    "logarithm of zero": (planted("Sub value", "Log"), "infinity"),
    "zero by zero": (planted("Sub value", "Div zero"), "NaN"),
    "one by zero": (planted("Sub value", "Reciprocal"), "infinity"),
    "root of a negative number": (planted("Abs", "Neg", "Sub one", "Sqrt"), "NaN"),
    "rows masked whole": (planted("Where_all", "Softmax"), "NaN"),
    "an infinity of a mask": (planted("Mul lowest", "Sub value"), "NaN"),
    "exponential": (planted("Abs", "Mul thousand", "Exp"), "infinity"),
    "a weight": (planted("Mul broken"), "NaN"),
}
CONSTANTS = {
    "ten_thousand": 1e4, "zero": 0.0, "one": 1.0, "thousand": 1e3, "lowest": -np.inf, "scale": 1.5, "broken": np.nan,
}  # fmt: skip


def network(path: Path, plant: Plant | None, block: int, dtype: type = np.float32) -> Path:
    """Five blocks of a product and a sum, with nodes planted in one of them."""
    nodes, value = [], "x"
    for index in range(BLOCKS):
        made = [make_node("Mul", [value, "scale"], [f"product_{index}"])]
        made.append(make_node("Add", [f"product_{index}", "one"], [f"sum_{index}"]))
        if plant is not None and index == block:
            made += plant(f"sum_{index}")
        for node in made:
            if node.op_type == "Where_all":
                node.op_type, node.input[:] = "Where", ["never", node.input[0], "lowest"]
            node.name = f"/net/block.{index}/{node.output[0]}"
        nodes += made
        value = made[-1].output[0]
    constants = [numpy_helper.from_array(np.array(number, dtype), name) for name, number in CONSTANTS.items()]
    constants.append(numpy_helper.from_array(np.array(False), "never"))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ends = [helper.make_tensor_value_info(name, kind, [2, 3]) for name in ("x", value)]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def inputs(dtype: type = np.float32) -> dict[str, np.ndarray]:
    return {"x": np.arange(1, 7).reshape(2, 3).astype(dtype)}


def measured(path: Path, *runs: dict[str, np.ndarray]) -> ValueRanges:
    return measure_values(read_tagged(path), runs or [inputs()])


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("name", PLANTS)
def test_what_makes_the_first_nan_or_infinity_is_named(name: str, block: int, tmp_path: Path) -> None:
    plant, what = PLANTS[name]
    dtype = np.float16 if name == "overflow" else np.float32
    first = measured(network(tmp_path / "net.onnx", plant, block, dtype), inputs(dtype)).first
    assert first is not None
    assert (first.kind, first.what) == ("weight" if name == "a weight" else "node", what)
    assert ("broken" if name == "a weight" else "plant_of") in first.name
    assert str(first.call) == f"net.block.{block}"


@pytest.mark.parametrize("run", range(BLOCKS))
def test_an_input_that_has_nan_is_named_with_its_run(run: int, tmp_path: Path) -> None:
    runs = [inputs() for _ in range(BLOCKS)]
    runs[run]["x"][1, 2] = np.nan
    first = measured(network(tmp_path / "net.onnx", None, 0), *runs).first
    assert first is not None
    assert (first.kind, first.name, first.run) == ("input", "x", run)


def test_the_numbers_that_make_it_are_told(tmp_path: Path) -> None:
    first = measured(network(tmp_path / "net.onnx", PLANTS["zero by zero"][0], 1)).first
    assert first is not None
    assert [taken.element for taken in first.takes] == [0.0, 0.0]
    assert first.place == (0, 0)


def test_the_infinity_before_a_nan_is_named(tmp_path: Path) -> None:
    plant = planted("Sub value", "Log", "Mul zero")
    first = measured(network(tmp_path / "net.onnx", plant, 1)).first
    assert first is not None
    assert first.node is not None
    assert first.node.op_type == "Log"


def test_infinities_that_no_output_has_are_listed_apart(tmp_path: Path) -> None:
    found = measured(network(tmp_path / "net.onnx", planted("Sub value", "Log", "Max zero"), 1))
    assert found.first is None
    assert [origin.node.op_type for origin in found.inside if origin.node is not None] == ["Log"]


def test_a_mask_that_hides_some_is_finite(tmp_path: Path) -> None:
    nodes = [
        make_node("Where", ["mask", "x", "lowest"], ["hidden"], "/net/where"),
        make_node("Softmax", ["hidden"], ["y"], "/net/softmax"),
    ]
    constants = [numpy_helper.from_array(np.array([[True, False]]), "mask")]
    constants.append(numpy_helper.from_array(np.array(-np.inf, np.float32), "lowest"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    found = measured(tmp_path / "m.onnx", {"x": np.ones((1, 2), np.float32)})
    assert found.first is None


BODIES = {
    "an untaken branch": """<ir_version: 9, opset_import: ["" : 18]> m (float[3] x) => (float[3] y) {
        never = Constant <value = bool {0}> ()
        inside = If (never) <then_branch = g () => (float[3] t) { z = Sub (x, x)  t = Log (z) },
                             else_branch = h () => (float[3] e) { e = Neg (x) }>
        w = Sub (inside, inside)
        y = Log (w)
    }""",
    "a loop": """<ir_version: 9, opset_import: ["" : 18]> m (float[3] x) => (float[3] y)
        <int64 n = {2}, bool on = {1}> {
        z = Sub (x, x)
        o = Log (z)
        r = Sqrt (x)
        w = Log (r)
        p, q = Loop (n, on, o, w) <body = b (int64 i, bool c, float[3] a, float[3] s) =>
                                   (bool d, float[3] f, float[3] g) { d = Identity (c)  f = Neg (a)  g = Abs (s) }>
        y = Neg (q)
    }""",
    "a weight into a scan": """<ir_version: 9, opset_import: ["" : 18]> m (float[3] x) => (float y)
        <float low = {-inf}> {
        z = Sub (x, x)
        o = Log (z)
        y, k = Scan (low, x) <num_scan_inputs = 1, body = b (float a, float s) => (float f, float g)
                              { f = Min (a, s)  g = Identity (s) }>
    }""",
    "an input into a function": """<ir_version: 9, opset_import: ["" : 18, "own" : 1]> m (float[3] x) => (float[3] y) {
        z = Sub (x, x)
        o = Log (z)
        y = own.F (x)
    }
    <domain: "own", opset_import: ["" : 18]> F (a) => (b) { b = Neg (a) }""",
}


@pytest.mark.parametrize(
    ("body", "x", "first"),
    [
        ("an untaken branch", 1.0, ("node", "y")),
        ("a loop", -1.0, ("node", "r")),
        ("a weight into a scan", 1.0, ("weight", "low")),
        ("an input into a function", np.inf, ("input", "x")),
    ],
)
def test_what_comes_into_bodies_and_branches_is_traced_to_what_made_it(
    body: str, x: float, first: tuple[str, str], tmp_path: Path
) -> None:
    onnx.save(onnx.parser.parse_model(BODIES[body]), tmp_path / "m.onnx")
    found = measured(tmp_path / "m.onnx", {"x": np.full(3, x, np.float32)})
    assert found.first is not None
    assert (found.first.kind, found.first.value or found.first.name) == first


def test_the_largest_number_of_bfloat16_is_that_of_its_type() -> None:
    assert float(ml_dtypes.finfo(ml_dtypes.bfloat16).max) == BFLOAT16


def test_finite_files_have_none(exported: Exporter) -> None:
    case = exported("bert")
    arrays = {key: tensor.numpy() for key, tensor in case.case.inputs().items()}
    assert measure_values(read_tagged(case.path), [arrays]).first is None


def test_ranges_are_those_over_all_runs_with_the_run_of_each_end(tmp_path: Path) -> None:
    runs = [{"x": array} for array in (inputs()["x"], inputs()["x"] * 10, -inputs()["x"])]
    found = measured(network(tmp_path / "net.onnx", None, 0), *runs)
    numbers = next(numbers for value, numbers in found.ranges.items() if value.name == "product_0")
    assert (numbers.smallest, numbers.smallest_run) == (-9.0, 2)
    assert (numbers.largest, numbers.largest_run) == (90.0, 1)
    assert numbers.elements == 18


def test_elements_are_counted_by_powers_of_two(tmp_path: Path) -> None:
    found = measured(network(tmp_path / "net.onnx", None, 0), {"x": np.array([[1, 1.5, 2], [3, 4, 0]], np.float32)})
    numbers = next(numbers for value, numbers in found.ranges.items() if value.name == "x")
    assert dict(numbers.powers) == {1: 2, 2: 2, 3: 1}
    assert numbers.zeros == 1


@pytest.mark.parametrize(
    ("numbers", "reach"),
    [([3.0, float(np.finfo(np.float32).min)], 3.0), ([3.0, -1e5], 1e5), ([-1e5], 1e5), ([np.inf, 2.0], 2.0)],
)
def test_the_lowest_number_of_float32_by_which_a_mask_hides_needs_no_room(numbers: list[float], reach: float) -> None:
    found = ValueRange()
    found.add(np.array(numbers, np.float32), 0)
    assert found.reach == reach
