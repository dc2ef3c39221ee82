"""Both front ends: the same modules, addresses and tags for the same calls, and what each of them refuses."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import models
from exports import ExportedCase, Exporter
from modelexport import export, verify
from modelexport.capture.exported_graph import Exported
from modelexport.capture.front_end_options import TRACED_OPSETS, FrontEndOptions
from modelexport.capture.front_ends import FRONT_ENDS, FrontEnd, capture
from modelexport.errors import CaptureError, InputsError, UsageError
from modelexport.format.documents import Hierarchy
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.tools.generate.observed_state import cache_argument
from test_dynamo import assert_same, state

BOTH = tuple(FRONT_ENDS)

COMPARED = (
    "blocks", "module-dict", "recurrent", "sliced-sequential", "tied-weights", "nested-structures", "equal-values",
    "buffers", "two-parents", "residual-network", "unet", "bert", "mpnet", "gpt2", "llama", "t5", "bart", "mamba",
    "vit", "resnet", "pvt-v2", "yolos", "segformer", "wav2vec2", "clip", "torchvision-resnet18",
)  # fmt: skip

KEPT_BY_TORCHSCRIPT = {
    # `dynamo` looks up rows of these tables by constants, which is folded; `torchscript` computes the rows from sizes.
    "bert": {"embeddings.token_type_embeddings"},
    "bart": {"encoder.embed_positions"},
    # The relative positions, which `dynamo` computes during the capture.
    "mpnet": {"encoder"},
    # The mask that hides nothing, whose sizes `dynamo` knows.
    "vit": {""},
}
"""Calls that own nodes of the optimized graph only with this front end; those of the other one were folded."""

STOPPED = {
    "mixtral": r"UnsupportedOperatorError in model.layers.0.mlp.experts: Exporting the operator 'aten::_grouped_mm'",
    "qwen3-moe": r"UnsupportedOperatorError in model.layers.0.mlp.experts: Exporting the operator 'aten::_grouped_mm'",
    "condition": r"RuntimeError in \. \(models.py:\d+\): Detected that you are using FX to torch.jit.trace",
    "nested-branches": r"RuntimeError in gate \(models.py:\d+\): Detected that you are using FX to torch.jit.trace",
    "loop": r"RuntimeError in \. \(models.py:\d+\): Detected that you are using FX to torch.jit.trace",
    "data-dependent": r"DecisionError in \. \(models.py:\d+\): data-dependent: Python reads a tensor \(bool\)",
}
"""Models that `torchscript` cannot export, and the operator or line that prevents it."""

frontends = pytest.mark.parametrize("frontend", BOTH)
compared = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "blocks" else pytest.mark.slow) for name in COMPARED]
)


def captured(frontend: str, name: str) -> Exported:
    case = models.case(name)
    return FRONT_ENDS[frontend](case.build(), case.inputs())


def owning(hierarchy: Hierarchy) -> set[str]:
    return {call for node in hierarchy.nodes for call in node.calls or [node.call]}


# --- one against the other ------------------------------------------------------------------------------------------


@compared
def test_calls_have_the_same_addresses_callers_steps_and_tags(name: str, exported: Exporter) -> None:
    one, other = (exported(name, frontend=frontend).hierarchy for frontend in BOTH)
    assert [(c.address, c.parent, c.enter, c.exit, c.tag) for c in one.calls] == [
        (c.address, c.parent, c.enter, c.exit, c.tag) for c in other.calls
    ]
    assert [(m.path, m.tag, m.calls) for m in one.modules] == [(m.path, m.tag, m.calls) for m in other.modules]


@compared
def test_inputs_outputs_and_parameters_have_the_same_names(name: str, exported: Exporter) -> None:
    one, other = (exported(name, frontend=frontend).hierarchy for frontend in BOTH)
    assert one.inputs == other.inputs
    assert one.outputs == other.outputs
    assert {key for i in one.initializers for key in i.parameter or ()} == {
        key for i in other.initializers for key in i.parameter or ()
    }


@compared
def test_the_calls_that_own_nodes_differ_only_where_one_folded_them(name: str, exported: Exporter) -> None:
    dynamo, torchscript = (owning(exported(name, frontend=frontend).hierarchy) for frontend in BOTH)
    assert dynamo - torchscript == set()
    assert torchscript - dynamo == KEPT_BY_TORCHSCRIPT.get(name, set())


# --- what torchscript writes ----------------------------------------------------------------------------------------


@compared
def test_a_traced_model_is_owned_valid_and_right_at_every_call(name: str, exported: Exporter) -> None:
    export = exported(name, frontend="torchscript")
    coverage = export.document["coverage"]
    assert coverage["exact"] > 0
    assert (coverage["inferred"], coverage["untagged"]) == (0, 0)
    onnx.checker.check_model(str(export.path), full_check=True)
    assert export.hierarchy.settings.frontend == "torchscript"
    assert_every_call_agrees(export)


def assert_every_call_agrees(export: ExportedCase) -> None:
    assert export.verified.agrees, export.verified
    assert [call for call in export.verified.calls if call.status not in ("agree", "no nodes")] == []
    assert any(call.per_module is not None for call in export.verified.calls)


def test_these_are_models_of_many_families() -> None:
    assert len({models.case(name).family for name in COMPARED}) >= 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [case.name for case in (*models.CASES, *models.TRAINED) if case.name not in (*COMPARED, *STOPPED, "mask2former")],
)
def test_every_call_of_every_other_traced_model_agrees(name: str, exported: Exporter) -> None:
    assert_every_call_agrees(exported(name, frontend="torchscript"))


@pytest.mark.slow
def test_numbers_that_are_spaced_by_a_level_of_one_pixel_are_finite(tmp_path: Path) -> None:
    case = models.case("mask2former")
    export(case.build(), case.inputs(), tmp_path / "x.onnx", frontend="torchscript", check=False)
    assert verify(case.build(), case.inputs(), tmp_path / "x.onnx").agrees


@pytest.mark.parametrize(
    "name",
    [
        "sequential",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "resnet", "unet", "gpt2", "marian", "clip")),
    ],
)
def test_a_traced_model_with_dynamic_sizes_takes_other_sizes(name: str, exported: Exporter) -> None:
    export = exported(name, dynamic=True, frontend="torchscript")
    assert export.document["verify"]["agrees"]
    assert export.case.dynamic is not None
    report = verify(export.case.build(), export.case.dynamic(), export.path)
    assert report.agrees, [call for call in report.calls if call.status == "differ"]
    assert any(call.per_module is not None for call in report.calls)


# --- both alike -----------------------------------------------------------------------------------------------------


@frontends
def test_the_calls_of_a_shared_module_and_its_aliases_are_numbered_apart(
    frontend: FrontEnd, exported: Exporter
) -> None:
    hierarchy = exported("blocks", frontend=frontend).hierarchy
    assert [call.address for call in hierarchy.calls][:8] == [
        "", "stem", "stem.linear", "stem.norm", "shared", "shared.linear", "shared.norm", "down.0",
    ]  # fmt: skip
    relus = [node.call for node in hierarchy.nodes if node.op_type == "Relu"]
    assert relus == ["stem", "shared", "down.0", "down.1", "shared@1", "up.0", "up.1"]


@frontends
def test_parameters_of_equal_value_are_not_merged(frontend: str) -> None:
    names = {value.name for value in initializers(captured(frontend, "equal-values").model)}
    assert names >= {f"layers.{i}.bias" for i in range(3)} | {"shift", "offset"}


class Mixed(nn.Module):
    """Takes the same tensor by position and by keyword, and one that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, unused: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.block(x) * scale


@frontends
def test_inputs_are_named_as_arguments_whatever_the_signature(frontend: str) -> None:
    made = FRONT_ENDS[frontend](Mixed().eval(), {"unused": torch.ones(1), "x": torch.ones(2, 4), "scale": 2.0})
    assert sorted(value.name for value in made.model.graph.inputs) == ["unused", "x"]
    positional = FRONT_ENDS[frontend](nn.Linear(4, 4).eval(), (torch.ones(2, 4),))
    assert [value.name for value in positional.model.graph.inputs] == ["input"]


@frontends
def test_nested_outputs_are_flattened_and_named(frontend: str) -> None:
    assert captured(frontend, "nested-structures").output_names == ("parts.0", "parts.1", "more.sum", "more.same.0")


@pytest.mark.parametrize("frontend", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
def test_the_tensors_of_a_cache_are_named(frontend: FrontEnd, exported: Exporter) -> None:
    names = [output.name for output in exported("gpt2-cache", frontend=frontend).hierarchy.outputs]
    argument = cache_argument(models.case("gpt2-cache").build())
    assert names[:3] == ["logits", f"{argument}.layers.0.keys", f"{argument}.layers.0.values"]


@frontends
@pytest.mark.parametrize("name", ["residual-network", pytest.param("bert", marks=pytest.mark.slow)])
def test_the_model_is_as_before(frontend: str, name: str) -> None:
    case = models.case(name)
    model, inputs = case.build().train(), case.inputs()
    before, given = state(model), copy.deepcopy(inputs)
    FRONT_ENDS[frontend](model, inputs)
    assert_same(before, state(model))
    assert all(torch.equal(inputs[key], given[key]) for key in given)
    assert torch._C._get_tracing_state() is None


@frontends
def test_a_model_that_cannot_be_exported_is_as_before(frontend: str) -> None:
    case = models.case("data-dependent")
    model = case.build().train()
    before = state(model)
    with pytest.raises(CaptureError, match="data-dependent") as raised:
        FRONT_ENDS[frontend](model, case.inputs())
    assert raised.value.__cause__ is not None
    assert_same(before, state(model))


@frontends
def test_inputs_that_do_not_fit_are_the_inputs_fault(frontend: str) -> None:
    with pytest.raises(InputsError, match="mat1 and mat2 shapes cannot be multiplied"):
        FRONT_ENDS[frontend](nn.Linear(4, 4), {"input": torch.ones(2, 5)})


def benchmark() -> Any:
    path = Path(__file__).parent.parent.parent / "benchmarks" / "contamination.py"
    spec = importlib.util.spec_from_file_location("contamination", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["contamination"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_no_operation_has_another_layers_tag_and_the_older_way_is_found_out(tmp_path: Path) -> None:
    contamination = benchmark()
    model, inputs = contamination.bert(2)
    wrong = {way: contamination.measure(way, model, inputs, tmp_path).pairs.total() for way in contamination.WAYS}
    assert wrong["projected"] > 0
    assert (wrong["torchscript"], wrong["dynamo"]) == (0, 0)


# --- torchscript alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name not in ("loop", "data-dependent") else ()) for name in STOPPED],
)
def test_a_model_that_cannot_be_traced_names_operator_or_line_in_one_line(name: str) -> None:
    with pytest.raises(CaptureError, match=STOPPED[name]) as raised:
        captured("torchscript", name)
    assert "\n" not in str(raised.value)


class Boundaries(nn.Module):
    """Two transpositions with a boundary between them, and one that is equal in two calls."""

    class Turn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1).transpose(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = self.Turn(), self.Turn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).transpose(0, 1) * self.two(x).transpose(0, 1)


def test_the_exporters_passes_merge_nothing_across_boundaries() -> None:
    made = FRONT_ENDS["torchscript"](Boundaries().eval(), {"x": torch.ones(2, 3)})
    owners = [(str(owner_of(n).call), n.op_type) for n in all_nodes(made.model) if n.op_type != "Constant"]
    assert owners == [
        ("one", "Add"), ("one", "Transpose"), (".", "Transpose"), ("two", "Add"), ("two", "Transpose"),
        (".", "Transpose"), (".", "Mul"),
    ]  # fmt: skip
    assert set(made.values.values()) == {"x", "/one/Transpose_output_0", "/two/Transpose_output_0", "/Mul_output_0"}


class InPlace(nn.Module):
    """The output of a module is written into afterwards, as ``ReLU(inplace=True)`` does, and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.linear(x))
        x = self.last(x)
        x[0] *= 2
        return x


@frontends
def test_what_a_call_returns_is_what_it_was_then(frontend: FrontEnd, tmp_path: Path) -> None:
    model, inputs = InPlace().eval(), {"x": torch.randn(3, 4)}
    export(model, inputs, tmp_path / "x.onnx", frontend=frontend, check=False)
    report = verify(model, inputs, tmp_path / "x.onnx")
    assert report.agrees
    assert {str(c.address): c.status for c in report.calls if c.address} == dict.fromkeys(
        ["linear", "relu", "last"], "agree"
    )


@frontends
def test_a_module_that_the_model_converts_converts_the_weights_that_others_share(
    frontend: FrontEnd, tmp_path: Path
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.head.half()(x.half())
            return self.table(x.to(self.table.weight.dtype)).float() + y.float()

    how: dict[str, Any] = {"frontend": frontend, "verify": True, "check": False}
    report = export(Tied(), torch.randn(3, 4), tmp_path / "x.onnx", **how).verified
    assert report is not None
    assert report.agrees


@frontends
def test_a_module_that_the_model_converts_rounds_in_the_file_and_is_as_before(
    frontend: FrontEnd, tmp_path: Path
) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head.half()(x.half()).float()

    model = Narrow()
    how: dict[str, Any] = {"frontend": frontend, "verify": True, "check": False}
    report = export(model, torch.randn(3, 4), tmp_path / "x.onnx", **how).verified
    assert report is not None
    assert (report.agrees, model.head.weight.dtype) == (True, torch.float32)


Forward = Callable[[torch.Tensor], torch.Tensor]


class Reading(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.forward_of_x = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_of_x(x)


def written_into(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(4)
    made[0] = x[0, 0]
    return x * made.tolist()[0]


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x.max().item(),
        lambda x: x * float(x.detach()[0, 0]),
        lambda x: x * torch.tensor([x[0, 0], 1.0, 1.0, 1.0]),
        lambda x: x * x.data,
        lambda x: x if torch.equal(x, x) else -x,
        lambda x: x if 1.0 in x else -x,
        lambda x: x * len(x[x > 0]),
        lambda x: x[:, : int(x.nonzero().shape[0])],
        lambda x: sum(row for row in x[x[:, 0] > 0]) + x,
        written_into,
    ],
)  # fmt: skip
def test_what_python_reads_of_values_is_not_frozen(forward: Forward) -> None:
    with pytest.raises(CaptureError, match="data-dependent"):
        FRONT_ENDS["torchscript"](Reading(forward), {"x": torch.ones(3, 4)})


def size_of_fourth_axis(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * x.shape[3]
    except IndexError:
        return x + 1


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x if x.shape[0] > 1 else -x,
        lambda x: x.reshape(int(x.shape[0]) * 2, -1),
        lambda x: sum(row for row in x),
        lambda x: x[x > 0],
        lambda x: x * float(torch.arange(4)[1]),
        size_of_fourth_axis,
    ],
)  # fmt: skip
def test_what_python_reads_of_sizes_is_allowed(forward: Forward) -> None:
    assert FRONT_ENDS["torchscript"](Reading(forward), {"x": torch.ones(3, 4)}).frontend == "torchscript"


def pairs_if_even(x: torch.Tensor) -> torch.Tensor:
    try:
        return x.view(-1, 2, 4).sum(1)
    except RuntimeError:
        return x


def test_a_caught_error_of_an_operation_is_refused_before_it_ends_the_process() -> None:
    with pytest.raises(CaptureError, match="the model catches the RuntimeError of an operation"):
        FRONT_ENDS["torchscript"](Reading(pairs_if_even), {"x": torch.ones(3, 4)})


class PadsToStride(nn.Module):
    """Decides by sizes and a buffer that is no entry, into which its initialization wrote, as EnCodec does."""

    def __init__(self, written_while_it_runs: bool) -> None:
        super().__init__()
        self.stride = nn.Buffer(torch.zeros((), dtype=torch.int64), persistent=False)
        self.stride.fill_(4)
        self._written_while_it_runs = written_while_it_runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._written_while_it_runs:
            self.stride.copy_(x[0, 0].long())
        missing = -x.shape[1] % self.stride
        return nn.functional.pad(x, (0, int(missing))) if missing > 0 else x


def test_what_was_written_into_a_buffer_before_the_trace_is_constant() -> None:
    inputs = {"x": torch.ones(3, 6)}
    assert FRONT_ENDS["torchscript"](PadsToStride(False), inputs).frontend == "torchscript"
    with pytest.raises(CaptureError, match="data-dependent"):
        FRONT_ENDS["torchscript"](PadsToStride(True), inputs)


@pytest.mark.parametrize("operation", [torch.add, torch.div])
def test_a_result_that_is_written_to_a_given_tensor_is_refused_by_a_trace_with_its_line(
    operation: Callable[..., Any],
) -> None:
    class Given(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = torch.empty_like(x)
            operation(x, 2.0, out=result)
            return result + 1

    with pytest.raises(CaptureError, match=r"`out=` in test_frontends\.py:\d+ is not translated: assign the result"):
        capture(Given(), (torch.randn(2, 3),), "torchscript")


def test_an_opset_that_the_exporter_does_not_write_is_refused() -> None:
    with pytest.raises(UsageError, match="writes opsets 9 to 20, not 23"):
        capture(nn.Linear(4, 4), (torch.ones(2, 4),), "torchscript", FrontEndOptions(opset=23))


def test_torch_still_has_what_the_front_end_relies_on() -> None:
    from torch.onnx import _constants

    assert TRACED_OPSETS[-1] == _constants.ONNX_TORCHSCRIPT_EXPORTER_MAX_OPSET
    for name in ("_jit_pass_cse", "_jit_pass_onnx_peephole", "_jit_onnx_log", "_get_value_trace", "_set_value_trace"):
        assert hasattr(torch._C, name), f"torch._C.{name} is gone"
    made = captured("torchscript", "blocks")
    assert {owner_of(node).evidence for node in all_nodes(made.model)} == {"exact"}, "scopes no longer reach node names"
    for side in ("inputs", "outputs"):
        ports = {port.call for port in made.values if port.side == side}
        assert ports == {traced.call for traced in made.calls}, "boundary values no longer leave the trace as outputs"


# --- auto -----------------------------------------------------------------------------------------------------------


class OnlyTraced(nn.Module):
    """`torch.export` does not know the length of a list that depends on a count in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            raise NotImplementedError("not for compilers")
        return self.linear(x)


def test_auto_is_dynamo_where_that_works(tmp_path: Path) -> None:
    settings = export(nn.ReLU(), torch.ones(2), tmp_path / "x.onnx", check=False).hierarchy.settings
    assert (settings.frontend, settings.dynamo_failure) == ("dynamo", "")


def test_auto_takes_torchscript_where_dynamo_fails_and_the_report_has_the_reason(tmp_path: Path) -> None:
    result = export(OnlyTraced(), {"x": torch.ones(2, 4)}, tmp_path / "x.onnx", verify=True)
    settings = result.hierarchy.settings
    assert settings.frontend == "torchscript"
    assert "not for compilers" in settings.dynamo_failure
    assert "not for compilers" in (tmp_path / "x.report.md").read_text()
    assert result.verified is not None
    assert result.verified.agrees


def test_auto_tells_both_reasons_where_both_fail(tmp_path: Path) -> None:
    case = models.case("data-dependent")
    with pytest.raises(CaptureError, match=r"(?s)GuardOnData.*the front end torchscript failed too:.*DecisionError"):
        export(case.build(), case.inputs(), tmp_path / "x.onnx")
