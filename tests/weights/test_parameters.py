"""Every used ``state_dict`` entry is in the file, by name or through a recorded transformation of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

import models
from exports import Exporter
from modelexport import export, load, verify
from modelexport.errors import FileFormatError
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.files.path_or_model import as_path
from modelexport.format import keys
from modelexport.format.documents import StateDictEntry, TransformStep
from modelexport.format.parameter_plan import AdapterInput, ParameterPlan
from modelexport.graph.copies import copy_of
from modelexport.graph.nodes import all_nodes, held_initializers, initializers
from modelexport.graph.parameter_plans import (
    adapter_input,
    lost_entries,
    parameter_plan,
    record_adapter_input,
    record_lost,
    record_plan,
    record_state_dict,
    state_dict_of,
)
from modelexport.traces.exact_transforms import exact_step
from modelexport.verify.parameters_in_pytorch import verify_parameters
from modelexport.weights.recorded_transforms import apply_transform, decode_tensor, encode_tensor

TABLE = [case.name for case in (*models.CASES, *models.TRAINED)]


def parameters(path: Path) -> dict[str, list[str]]:
    """Initializer to the ``state_dict`` keys that it holds or comes from."""
    return {
        value.name or "": plan.keys
        for value in initializers(load(path).model)
        if (plan := parameter_plan(value)) is not None
    }


def exported_model(model: nn.Module, path: Path, **inputs: torch.Tensor) -> dict[str, list[str]]:
    export(model.eval(), inputs, path, check=False)
    report = verify_parameters(model, path)
    assert report.agrees, report
    return parameters(path)


@pytest.mark.parametrize("name", TABLE)
def test_every_used_entry_is_in_the_file_bit_for_bit(name: str, exported: Exporter) -> None:
    case = exported(name)
    report = verify_parameters(case.case.build(), case.path)
    assert report.used > 0
    assert (report.unaccounted, report.differing) == ([], [])


@pytest.mark.parametrize("name", TABLE)
def test_only_an_untransformed_entry_has_the_name_of_one(name: str, exported: Exporter) -> None:
    model = load(exported(name).path).model
    for value in initializers(model):
        if value.name in state_dict_of(model):
            plan = parameter_plan(value)
            assert plan is not None
            assert value.name in plan.keys
            assert not plan.steps


@pytest.mark.parametrize("name", TABLE)
def test_a_transform_is_small(name: str, exported: Exporter) -> None:
    for value in initializers(load(exported(name).path).model):
        for step in json.loads(value.metadata_props.get(keys.TRANSFORM, "[]")):
            if step["op_type"] == "Constant":
                assert np.size(step["attributes"]["value"]["value"]) <= 1000


@pytest.mark.parametrize("name", ["blocks", "module-dict", "tied-weights", "bert", "gpt2", "t5", "dinov2", "segformer"])
def test_the_used_parameters_are_those_that_autograd_reaches(name: str, exported: Exporter) -> None:
    case = exported(name)
    model = case.case.build()
    found = [value for value in _tensors(model(**case.case.inputs())) if value.requires_grad]
    sum(value.sum() for value in found).backward()
    reached = {key for key, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    trained = dict(model.named_parameters(remove_duplicate=False))
    entries = state_dict_of(load(case.path).model)
    assert {key for key, entry in entries.items() if entry.used and key in trained} == reached


class OnlyItsSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.unused = nn.Linear(6, 8), nn.Parameter(torch.randn(8)), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(self.layer(x)) * self.scale


@pytest.mark.parametrize("frontend", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True], ids=["static", "dynamic"])
def test_what_is_in_the_file_is_used_though_only_its_size_matters(
    frontend: Literal["dynamo", "torchscript"], dynamic: bool, tmp_path: Path
) -> None:
    model, inputs = OnlyItsSize().eval(), {"x": torch.randn(3, 6)}
    export(model, inputs, tmp_path / "m.onnx", dynamic=dynamic, frontend=frontend, check=False)
    used = {key for key, entry in state_dict_of(load(tmp_path / "m.onnx").model).items() if entry.used}
    assert used == {key for found in parameters(tmp_path / "m.onnx").values() for key in found}
    assert used == ({"scale", "layer.weight", "layer.bias"} if dynamic else {"scale"})
    report = verify(model, inputs, tmp_path / "m.onnx")
    assert report.agrees, report.claims


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("name", [case.name for case in models.CASES if case.expected.tied])
def test_a_tied_parameter_has_all_its_names(name: str, exported: Exporter) -> None:
    case = exported(name)
    entries = state_dict_of(load(case.path).model)
    groups = [set(keys) for keys in parameters(case.path).values()]
    for tied in case.case.expected.tied:
        if any(entries[key].used for key in tied if key in entries):
            assert any(set(tied) <= group for group in groups), tied


def test_parameters_of_equal_values_stay_apart(exported: Exporter) -> None:
    case = exported("equal-values")
    assert sorted(parameters(case.path).values()) == sorted([key] for key in case.case.build().state_dict())


def test_a_buffer_that_is_not_persistent_keeps_its_name(exported: Exporter) -> None:
    model = load(exported("buffers").path).model
    assert "positions" in model.graph.initializers
    assert "positions" not in state_dict_of(model)


def test_a_folded_weight_is_named_after_its_entry(exported: Exporter) -> None:
    found = parameters(exported("bert").path)
    assert found["encoder.layer.0.attention.self.query.weight.transpose"] == [
        "encoder.layer.0.attention.self.query.weight"
    ]


def test_a_weight_that_several_calls_transform_alike_is_there_once(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(torch.relu(self.block(x)))

    found = exported_model(Twice(), tmp_path / "x.onnx", x=torch.ones(2, 3, 6))
    assert sorted(found) == ["block.bias", "block.weight.transpose"]


class Neutral(nn.Module):
    """Parameters whose values have no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        nn.init.zeros_(self.conv.bias)
        self.norm = nn.BatchNorm2d(2)
        self.scale = nn.Parameter(torch.ones(()))
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) * self.scale + self.offset


@pytest.fixture(scope="module")
def neutral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("neutral") / "x.onnx"
    exported_model(Neutral(), path, x=torch.ones(1, 2, 3, 3))
    return path


def test_no_parameter_is_left_out_because_of_its_value(neutral: Path) -> None:
    found = parameters(neutral)
    assert {key for keys in found.values() for key in keys} == {
        key for key in Neutral().state_dict() if not key.endswith("num_batches_tracked")
    }


def test_the_graph_does_not_depend_on_the_values_of_the_weights(neutral: Path, tmp_path: Path) -> None:
    model = Neutral()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    exported_model(model, tmp_path / "x.onnx", x=torch.ones(1, 2, 3, 3))
    first, second = (
        [(node.op_type, [v and v.name for v in node.inputs]) for node in all_nodes(load(path).model)]
        for path in (neutral, tmp_path / "x.onnx")
    )
    assert first == second


def test_a_parameter_may_have_the_name_of_an_output(tmp_path: Path) -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.output

    assert exported_model(Clash(), tmp_path / "x.onnx", x=torch.ones(3)) == {"output": ["output"]}


@pytest.mark.parametrize(
    ("size", "change", "folded"),
    [(10, "", True), pytest.param(10, "exp", False, marks=pytest.mark.slow), (2000, "", False)],
)
def test_a_weight_is_folded_if_that_can_be_undone_and_needs_no_large_constant(
    tmp_path: Path, size: int, change: str, folded: bool
) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.rand(20))
            self.register_buffer("index", torch.arange(size) % 20, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (self.table.exp() if change else self.table)[self.index]

    assert list(exported_model(Lookup(), tmp_path / "x.onnx", x=torch.ones(size)).values()) == [["table"]]
    assert (len(load(tmp_path / "x.onnx").nodes) == 1) == folded


def test_a_weight_whose_blocks_become_channels_is_folded_and_found(tmp_path: Path) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = nn.Parameter(torch.rand(1, 4, 3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.pixel_shuffle(self.grid, 2)

    assert list(exported_model(Blocks(), tmp_path / "x.onnx", x=torch.ones(1, 1, 6, 6)).values()) == [["grid"]]
    assert [node.op_type for node in load(tmp_path / "x.onnx").nodes] == ["Add"]


def test_a_changed_weight_is_found(exported: Exporter) -> None:
    case = exported("blocks")
    model = case.case.build()
    with torch.no_grad():
        model.down[1].linear.bias[3] += 1e-6
    assert verify_parameters(model, case.path).differing == ["down.1.linear.bias"]


def test_an_entry_that_the_file_does_not_name_is_found(exported: Exporter, tmp_path: Path) -> None:
    case = exported("blocks")
    tagged = load(case.path).model
    del tagged.graph.initializers["head.bias"].metadata_props[keys.PARAMETER]
    ir.save(tagged, tmp_path / "x.onnx")
    assert verify_parameters(case.case.build(), tmp_path / "x.onnx").unaccounted == ["head.bias"]


def test_plans_travel_with_copies_and_are_text_only_in_files(tmp_path: Path) -> None:
    """In the main graph, in a branch, and in a branch in a function; with onnx_ir's writer only as they were read."""

    def weight(name: str) -> ir.Value:
        return ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape([2]),
            const_value=ir.tensor(np.ones(2, np.float32), name=name),
        )

    def branches(condition: ir.Value, *inside: ir.Value) -> ir.Node:
        graphs = []
        for value in inside:
            node = ir.node("Neg", [value])
            graphs.append(ir.Graph([], node.outputs, nodes=[node], initializers=[value], name=f"of_{value.name}"))
        named = {"then_branch": graphs[0], "else_branch": graphs[-1]}
        return ir.node("If", [condition], attributes=named)

    outer, left, right, in_function, other = values = [weight(name) for name in ("outer", "l", "r", "f", "g")]
    steps = [TransformStep("Transpose", ["w"], {"perm": [1, 0]}, 13)]
    plans = {value.name: ParameterPlan([f"tied.{value.name}", "w"], steps) for value in values}
    for value in values:
        record_plan(value, plans[value.name])
    record_adapter_input(outer, AdapterInput("w", "a", "linear"))

    def condition() -> ir.Value:
        return ir.Value(name="c", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))

    body_condition, main_condition = condition(), condition()
    body = branches(body_condition, in_function, other)
    function = ir.Function(
        "f", "F", graph=ir.Graph([body_condition], body.outputs, nodes=[body], opset_imports={"": 20}), attributes=[]
    )
    call = ir.node("F", [main_condition], domain="f")
    chosen = branches(main_condition, left, right)
    total = ir.node("Sum", [outer, chosen.outputs[0], call.outputs[0]])
    total.outputs[0].name, total.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [main_condition], total.outputs, nodes=[chosen, call, total], initializers=[outer], name="main",
        opset_imports={"": 20, "f": 1},
    )  # fmt: skip
    model = ir.Model(graph, ir_version=10, functions=[function])
    record_state_dict(model, {"w": StateDictEntry("float32", [2], True)})
    record_lost(model, ["gone"])

    save_model(copy_of(model), tmp_path / "x.onnx")
    read = load_onnx(tmp_path / "x.onnx")
    ir.save(read, tmp_path / "by_onnx_ir.onnx")
    for again in (read, load_onnx(tmp_path / "by_onnx_ir.onnx"), load_onnx(as_path(read)), load_onnx(as_path(model))):
        assert {value.name: parameter_plan(value) for value in held_initializers(again)} == plans
        assert adapter_input(again.graph.initializers["outer"]) == AdapterInput("w", "a", "linear")
        assert (state_dict_of(again), lost_entries(again)) == (state_dict_of(model), ["gone"])
    record_plan(read.graph.initializers["outer"], ParameterPlan(["new"]))
    save_model(read, tmp_path / "y.onnx")
    assert parameter_plan(load_onnx(tmp_path / "y.onnx").graph.initializers["outer"]) == ParameterPlan(["new"])


@settings(max_examples=30)
@given(
    st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_, ml_dtypes.bfloat16]).flatmap(
        lambda dtype: arrays.arrays(
            np.float32 if dtype is ml_dtypes.bfloat16 else dtype, arrays.array_shapes(min_dims=0, max_side=3)
        ).map(lambda array: array.astype(dtype))
    )
)
def test_a_constant_is_read_as_it_was_written(array: np.ndarray) -> None:
    read = decode_tensor(json.loads(json.dumps(encode_tensor(array), allow_nan=False)))
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert np.array_equal(read, array, equal_nan=array.dtype.kind not in "biu")


def test_steps_name_entries_and_earlier_steps() -> None:
    steps = [
        TransformStep("Split", ["w"], {"axis": 0, "num_outputs": 2}, 18),
        TransformStep("Constant", attributes={"value": {"dtype": "float32", "value": [1.0, "-inf"]}}),
        TransformStep("Add", ["%0:1", "%1"], version=14),
    ]
    result = apply_transform(steps, {"w": np.arange(4, dtype=np.float32)})
    assert result.tolist() == [3.0, -np.inf]


def test_a_step_that_cannot_be_run_is_named() -> None:
    with pytest.raises(FileFormatError, match="step 0 of a transform, Transpose, cannot be run"):
        apply_transform([TransformStep("Transpose", ["w"], {"perm": [1, 0]}, 13)], {"w": np.ones(3)})


def test_float32_between_conversions_rounds_nothing_in_a_run_in_float64() -> None:
    steps = [TransformStep("Cast", ["w"], {"to": 1}, 13), TransformStep("Cast", ["%0"], {"to": 11}, 13)]
    assert apply_transform(steps, {"w": np.array(1 / 3)}, exact_step) == 1 / 3
