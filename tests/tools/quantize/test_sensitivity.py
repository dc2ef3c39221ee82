"""What a session that holds all methods computes is what `quantize` writes; and few runs order the modules."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import modelexport
from commands import run
from exports import Exporter
from feeds import apart, feeds_of
from graph_texts import written
from modelexport.errors import InputsError, UsageError
from modelexport.runtime import runner_process
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools.quantize.executors import open_switched
from modelexport.tools.quantize.measured_on_device import SessionOnDevice
from modelexport.tools.quantize.methods import Method, parse_method
from modelexport.tools.quantize.metrics_and_bounds import METRICS, find_metric, parse_bound
from modelexport.tools.quantize.prepared_for_quantizers import prepared
from modelexport.tools.quantize.quantize import calibrate, quantize_model, weights_size
from modelexport.tools.quantize.recipes import resolve
from modelexport.tools.quantize.search_within_bound import recipe_for, search
from modelexport.tools.quantize.sensitivity import measure_alone, rank_correlation
from modelexport.tools.quantize.switched_model import Unit, find_units

NAMES = [pytest.param("bert", marks=pytest.mark.slow), "resnet", "tied-weights"]


def method_of(text: str) -> Method:
    method = parse_method(text)
    assert method is not None
    return method


def assigned(tagged: TaggedFile, units: list[Unit], choice: dict[int, Method]) -> dict[str, Method]:
    """Names of nodes to their methods."""
    return {name: method for index, method in choice.items() for name in units[index].nodes}


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["int8-dynamic", "int4", "float16"])
def test_a_switched_unit_computes_what_the_quantized_file_does(exported: Exporter, name: str, text: str) -> None:
    case, method = exported(name), method_of(text)
    tagged, feeds = read_tagged(case.path), feeds_of(case, 1)
    units = find_units(tagged, [method])
    if not units:
        pytest.skip(f"{name} has nothing for {text}")
    switched = open_switched(tagged, units, [method], None, None)
    right = run_session(open_session(tagged.model, optimized=True), feeds[0])[switched.output]
    assert apart(right, switched.run(feeds[0])) < 1e-6
    for index in random.Random(name).sample(range(len(units)), min(3, len(units))):
        model = quantize_model(tagged.model, assigned(tagged, units, {index: method}))
        expected = run_session(open_session(model, optimized=True), feeds[0])[switched.output]
        found = switched.run(feeds[0], {index: method})
        lost = apart(right, expected)
        # Where every node is converted, the runtime fuses the nodes of a unit and rounds fewer values.
        assert lost / 2 - 1e-6 <= apart(right, found) <= 2 * lost + 1e-6
        if method.row.operators is not None:
            assert apart(expected, found) <= 1e-6 + lost / 50
            assert weights_size(model) - weights_size(tagged.model) == switched.added[index, method]


def test_outputs_that_a_node_leaves_out_stay_left_out(tmp_path: Path) -> None:
    shapes = {"W": (1, 32, 8), "R": (1, 32, 8), "B": (1, 64)}
    weights = [
        numpy_helper.from_array(np.full(shape, 0.1, np.float32), f"{name}{kind}")
        for name in "ab" for kind, shape in shapes.items()
    ]  # fmt: skip
    nodes = [
        helper.make_node("LSTM", ["x", f"{name}W", f"{name}R", f"{name}B"], ["", name, ""], name=name, hidden_size=8)
        for name in "ab"
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in
            (("x", [4, 2, 8]), ("y", [1, 2, 8]))]  # fmt: skip
    graph = helper.make_graph([*nodes, helper.make_node("Add", ["a", "b"], ["y"])], "g", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "two.onnx")
    data = [{"x": np.random.default_rng(seed).standard_normal((4, 2, 8)).astype(np.float32)} for seed in (0, 1)]
    for method in ("float16", "int8-dynamic"):
        modelexport.quantize(tmp_path / "two.onnx", tmp_path / "out.onnx", to=method)
        nodes = onnx.load(tmp_path / "out.onnx").graph.node
        assert [node.output[0] for node in nodes if "LSTM" in node.op_type] == ["", ""]
        assert modelexport.sensitivity(tmp_path / "two.onnx", to=method, data=data).units[0].loss > 0


def test_data_for_which_the_model_computes_no_finite_number_are_refused(tmp_path: Path) -> None:
    text = "g (float[2] x) => (float[2] y) <float[2, 2] w = {1, 2, 3, 4}> { z = Log(x) y = MatMul(z, w) }"
    path, data = written(tmp_path / "log.onnx", text), [{"x": np.array([-1, -2], np.float32)}] * 2
    with pytest.raises(InputsError, match="y has no finite number for a run of the data"):
        modelexport.sensitivity(path, to="int8-dynamic", data=data)
    with pytest.raises(InputsError, match="y has no finite number for a run of the data"):
        search(path, to=["int8-dynamic"], data=data, within="error<=0.1")


def test_static_ranges_are_measured_once_for_all_modules(exported: Exporter) -> None:
    case = exported("tied-weights")
    report = modelexport.sensitivity(case.path, to="int8-static", data=feeds_of(case, 2))
    assert max(one.loss for one in report.units) > 0
    assert all(np.isfinite(one.loss) for one in report.units)


@pytest.mark.slow
def test_on_a_device_each_choice_is_a_model_of_its_own(exported: Exporter) -> None:
    case, method = exported("llama"), method_of("int8-static")
    tagged, feeds = read_tagged(case.path), feeds_of(case, 2)
    units, ranges = find_units(tagged, [method]), calibrate(tagged.model, [method], feeds)
    here = open_switched(tagged, units, [method], ranges, None)
    with SessionOnDevice(tagged, units, [method], ranges, "cpu", None) as there:
        for choice in ({0: method}, dict.fromkeys(range(len(units)), method)):
            loss = apart(here.run(feeds[0]), there.run(feeds[0], choice))
            assert loss > 1e-6, "the result is that of the quantized model"
            assert loss / 2 < apart(here.run(feeds[0]), here.run(feeds[0], choice)) < 2 * loss


CRASHES = """
import os
from modelexport.runtime import runner

def load(file, settings, real=runner.load):
    if b"layers.1.mlp.down_proj.weight.transpose_quantized" in open(file, "rb").read():
        os.abort()
    return real(file, settings)

runner.load = load
runner.serve()
"""


def test_a_module_that_a_device_does_not_survive_is_named_and_the_others_are_measured(
    exported: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runner.py").write_text(CRASHES)
    monkeypatch.setattr(runner_process.runner, "__file__", str(tmp_path / "runner.py"))
    tagged, method, told = read_tagged(exported("llama").path), method_of("int8-dynamic"), list[str]()
    feeds, units = feeds_of(exported("llama"), 1), find_units(tagged, [method])[-3:]
    with SessionOnDevice(tagged, units, [method], None, "cpu", None) as device:
        choices = [(index, method) for index in range(len(units))]
        losses, _ = measure_alone(device, choices, feeds, METRICS["error"], tell=told.append)
    crashed = [i for i, unit in enumerate(units) if any(call.endswith("layers.1.mlp.down_proj") for call in unit.calls)]
    assert [index for index, loss in enumerate(losses[0]) if np.isinf(loss)] == crashed
    assert len(crashed) == 1
    assert all(0 < loss < 0.1 for index, loss in enumerate(losses[0]) if index not in crashed)
    name = units[crashed[0]].calls[0]
    assert told == [f"{name} in int8-dynamic does not run: crashed: the process ended with signal 6"]


@pytest.mark.parametrize("name", NAMES)
def test_the_order_is_that_of_every_run_of_every_module(exported: Exporter, name: str) -> None:
    """Against the truth: a model for each module, quantized by itself, run on everything."""
    case, method = exported(name), method_of("int8-dynamic")
    tagged, feeds = read_tagged(case.path), feeds_of(case)
    report = modelexport.sensitivity(case.path, to=str(method), data=feeds)
    found = {one.calls: one.loss for one in report.units}
    units = find_units(tagged, [method])
    floats = open_session(tagged.model, optimized=True)
    output = floats.get_outputs()[0].name
    truth = []
    for index in range(len(units)):
        session = open_session(quantize_model(tagged.model, assigned(tagged, units, {index: method})), optimized=True)
        errors = [apart(run_session(floats, one)[output], run_session(session, one)[output]) for one in feeds]
        truth.append(np.mean(errors))
    if len(units) > 2:
        assert rank_correlation(truth, [found[unit.calls] for unit in units]) >= 0.9


def test_runs_end_when_they_agree(exported: Exporter) -> None:
    case, method = exported("bert"), method_of("int8-dynamic")
    tagged, feeds = read_tagged(case.path), feeds_of(case, 3)
    units = find_units(tagged, [method])
    switched = open_switched(tagged, units, [method], None, None)
    pairs = [(index, method) for index in range(len(units))]
    few, agreement = measure_alone(switched, pairs, feeds, METRICS["error"], steady=-1)
    every, _ = measure_alone(switched, pairs, feeds, METRICS["error"], steady=2)
    assert len(few) == 2
    assert len(every) == 3
    assert agreement is not None
    assert -1 <= agreement <= 1
    assert np.array_equal(few, every[:2])


@pytest.mark.slow
def test_the_note_judges_the_order_by_what_ended_the_runs(exported: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    case = exported("bert")
    monkeypatch.setattr("modelexport.tools.quantize.sensitivity.rank_correlation", lambda *_: 0.7)
    report = modelexport.sensitivity(case.path, to="int8-dynamic", data=feeds_of(case, 3), steady=0.5)
    assert "\n" not in repr(report)
    assert report.runs == 2
    assert "the last run did not change the order of the modules: rank correlation 0.70" in report.table.notes


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_any_choice_of_methods(exported: Exporter, name: str) -> None:
    tagged = read_tagged(exported(name).path)
    methods = [method_of("int8-dynamic"), method_of("float16")]
    units = find_units(tagged, methods)
    assert len({name for unit in units for name in unit.nodes}) == sum(len(unit.nodes) for unit in units)
    draw = random.Random(0)
    for _ in range(20):
        picks = {index: draw.choice([None, *methods]) for index in range(len(units))}
        choice = {index: method for index, method in picks.items() if method is not None}
        resolved = resolve(recipe_for(tagged, units, choice), tagged).assignment
        expected = assigned(tagged, units, choice)
        assert {name: resolved.get(name) for unit in units for name in unit.nodes} == {
            name: expected.get(name) for unit in units for name in unit.nodes
        }


def test_query_key_and_value_are_one_unit(exported: Exporter) -> None:
    units = find_units(read_tagged(exported("bert").path), [method_of("int4")])
    attention = "encoder.layer.0.attention.self"
    assert (f"{attention}.query", f"{attention}.key", f"{attention}.value") in [unit.calls for unit in units]


RIGHT = np.array([[0.0, 1.0, 2.0], [4.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("name", "found", "figure"),
    [
        ("error", RIGHT * 1.1, 0.1),
        ("cosine", RIGHT * 3, 1.0),
        ("cosine", RIGHT[:, ::-1], 0.1),
        ("kl", RIGHT + 7, 0.0),
        ("top1", np.array([[0.0, 3.0, 2.0], [4.0, 0.0, 0.0]]), 0.5),
    ],
)
def test_metrics_of_known_arrays(name: str, found: Any, figure: float) -> None:
    metric = METRICS[name]
    assert metric.measure(RIGHT, found) == pytest.approx(figure)
    assert metric.loss(RIGHT, RIGHT) == 0
    assert metric.loss(RIGHT, RIGHT * np.nan) == float("inf")
    assert metric.loss(RIGHT, RIGHT[:1]) == float("inf"), "another shape"
    assert metric.loss(np.float32(3), np.float32(3)) == 0, "a number without axes"


def test_kl_is_that_of_the_definition() -> None:
    one, other = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    assert METRICS["kl"].measure(one, other) == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1))


def test_a_metric_may_be_a_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def largest(right, found):\n    return abs(right - found).max()\n")
    metric = find_metric(f"{tmp_path}/mine.py:largest")
    assert metric.loss(RIGHT, RIGHT + 2) == 2
    assert parse_bound(f"{tmp_path}/mine.py:largest <= 1e-3").limit == 1e-3
    (tmp_path / "wrong.py").write_text("def raises(a, b):\n    return 1 / 0\n\ndef text(a, b):\n    return 'x'\n")
    for function in ("raises", "text"):
        with pytest.raises(UsageError, match=rf"wrong\.py:{function} does not give a number: \w+Error: "):
            find_metric(f"{tmp_path}/wrong.py:{function}").loss(RIGHT, RIGHT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5%", "is not a bound: write a metric, a sign and a number, as in error<=0.05 .* error, cosine"),
        ("cosin>=0.9", "there is no metric 'cosin'; did you mean cosine?"),
        ("cosine<=0.9", "is not even met by equal outputs"),
        ("kl<=1e", "is not a number"),
        ("missing.py:f<=1", "cannot be loaded"),
    ],
)
def test_what_is_not_a_bound_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        parse_bound(text)


def test_a_bound_may_be_in_percent() -> None:
    assert str(parse_bound("error <= 5%")) == "error<=0.05"


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0
    assert rank_correlation([1], [2]) == rank_correlation([0, 0], [3, 3]) == 1


def test_the_command_shows_the_table_and_refuses_what_does_not_fit(exported: Exporter, tmp_path: Path) -> None:
    case = exported("bert")
    feeds = feeds_of(case, 2)
    data = tmp_path / "data.npz"
    np.savez(data, **{name: np.stack([one[name] for one in feeds]) for name in feeds[0]})
    shown = run("sensitivity", case.path, "--to", "int4", "--data", data, "encoder.layer.0")
    assert "SENSITIVITY TOTAL" in shown.stdout
    assert "encoder.layer.0.attention.self.query" in shown.stdout
    for arguments, message in (
        (["--to", "keep", "--data", data], "give a method"),
        (["--to", "int4"], "give --data"),
        (["--to", "int4", "--data", data, "--compare", "logit"], "has no output 'logit'"),
        (["--to", "int4", "--data", tmp_path / "none.npz"], "none.npz"),
    ):
        refused = run("sensitivity", case.path, *arguments)
        assert refused.returncode == 2
        assert message in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_model_without_weights_to_quantize_is_refused(tmp_path: Path) -> None:
    model, inputs = torch.nn.Conv2d(1, 3, 1), {"input": torch.ones(1, 1, 4, 4)}
    path = modelexport.export(model, inputs, tmp_path / "m.onnx", check=False).path
    with pytest.raises(UsageError, match="can quantize"):
        modelexport.sensitivity(path, to="int4:embeddings=true", data=[{"input": inputs["input"].numpy()}])
    for data, message in (
        ([], "no inputs"),
        ([1], r"data takes Sequence\[Mapping"),
        ([{"y": 1}], "data does not fit: .* missing"),
    ):
        with pytest.raises(UsageError, match=message):
            modelexport.sensitivity(path, to="int8-dynamic", data=data)


def test_values_without_types_get_them(exported: Exporter) -> None:
    case, method = exported("tied-weights"), method_of("int8-dynamic")
    tagged, feeds = read_tagged(case.path), feeds_of(case, 1)
    for value in (value for node in tagged.model.graph for value in node.outputs if not value.is_graph_output()):
        value.type = None
    switched = open_switched(prepared(tagged), find_units(tagged, [method]), [method], feeds, None)
    assert np.isfinite(switched.run(feeds[0], {0: method})).all()


def test_a_token_that_both_rule_out_adds_nothing_to_a_divergence() -> None:
    one, other = np.log([0.5, 0.5]), np.log([0.9, 0.1])
    masked = [np.append(logits, -np.inf) for logits in (one, other)]
    assert METRICS["kl"].measure(*masked) == pytest.approx(METRICS["kl"].measure(one, other))
