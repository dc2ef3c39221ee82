"""Equal FX nodes are promoted and translated once; canaries for the private names of torch that this needs."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from typing import Any

import onnxscript.function_libs.torch_lib.ops as torchlib
import pytest
import torch
from onnxscript import evaluator
from torch import nn
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.onnx._internal.exporter import _building, _core, _dispatching
from torch.onnx._internal.exporter._tensors import SymbolicTensor
from torch.onnx._internal.fx.passes.type_promotion import _TypePromotionInterpreter

from modelexport.capture import promotions, templates
from modelexport.capture.dynamo import capture_by_dynamo
from modelexport.capture.exported import Exported
from modelexport.capture.repairs import functions
from modelexport.capture.unread import only_what_is_read


class Layer(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).to(torch.float16) * self.number
        first, second = torch.split(y, 4, dim=-1)
        return x + torch.cat((second, first), dim=-1) + torch.arange(8)


class Stack(nn.Module):
    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, numbers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def exported(*numbers: float, **options: Any) -> Exported:
    return capture_by_dynamo(Stack(*numbers).eval(), {"x": torch.randn(3, 8)}, **options)


def nodes(graph: Exported) -> list[Any]:
    return [
        (
            node.name,
            node.op_type,
            [v and v.name for v in node.inputs],
            [str(v) for v in node.outputs],
            node.metadata_props,
        )
        for node in graph.model.graph
    ]


def calls_of(layers: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each translation is called in the export of a stack."""
    seen: Counter[str] = Counter()
    dispatch = _dispatching.dispatch

    def counted(node: Any, registry: Any) -> Any:
        function, message = dispatch(node, registry)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen[str(node.target)] += 1
            return function(*args, **kwargs)

        known = calls.setdefault(function, call)
        return known, message

    calls: dict[Any, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(_dispatching, "dispatch", counted)
        exported(*[2.0] * layers)
    return seen


def test_more_equal_layers_call_no_more_translations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of(2, monkeypatch).total() == calls_of(6, monkeypatch).total() > 4


@pytest.mark.parametrize("numbers", [(2.0, 2.0, 2.0), (2.0, 3.0, 2.0, 0.0, -0.0)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_graph_is_the_one_without_templates(numbers: tuple[float, ...], dynamic: bool) -> None:
    torch.manual_seed(0)
    assert nodes(exported(*numbers, dynamic=dynamic)) == nodes(exported(*numbers, dynamic=dynamic, reuse=False))


def test_tensors_of_constants_are_not_shared() -> None:
    graph = exported(2.0, 2.0, 2.0).model.graph
    tensors = [
        node.attributes["value"].value for node in graph if node.op_type == "Constant" and "value" in node.attributes
    ]
    assert len({id(tensor) for tensor in tensors}) == len(tensors)


def test_stack_traces_are_recorded_for_those_who_keep_them() -> None:
    key = "pkg.torch.onnx.stack_trace"
    for wanted in (True, False):
        traces = {node.metadata_props.get(key, "") for node in exported(2.0, stack_traces=wanted).model.graph}
        assert any("in forward" in trace for trace in traces) == wanted


def test_a_translation_that_reads_producers_is_called_each_time() -> None:
    pools = [nn.Sequential(nn.ConstantPad1d(1, value), nn.MaxPool1d(3, 1)) for value in (0.0, 1.0, 0.0)]
    model = nn.Sequential(*pools).eval()
    inputs = {"input": -torch.rand(1, 2, 8)}
    assert nodes(capture_by_dynamo(model, inputs)) == nodes(capture_by_dynamo(model, inputs, reuse=False))


def test_torchlib_reads_no_more_of_its_arguments_than_their_types_shapes_and_contents() -> None:
    for name in ("common", "core", "fft", "linalg", "nn", "prims", "special"):
        source = inspect.getsource(importlib.import_module(f"{torchlib.__name__}.{name}"))
        assert not [text for text in (".producer(", ".uses(", ".consumers(", ".meta[") if text in source]


def test_torch_still_has_what_is_replaced() -> None:
    assert list(inspect.signature(_dispatching.dispatch).parameters) == ["node", "registry"]
    assert "_dispatching.dispatch(node, registry)" in inspect.getsource(_core)
    assert list(inspect.signature(_core._set_node_metadata).parameters) == ["fx_node", "ir_node"]
    assert list(inspect.signature(_TypePromotionInterpreter.run_node).parameters) == ["self", "n"]
    assert list(inspect.signature(_core._prepare_exported_program_for_export).parameters) == [
        "exported_program",
        "registry",
    ]
    assert hasattr(templates, "translated_once") and hasattr(promotions, "promoted_once")


def test_the_recorder_of_torch_still_has_its_nodes_and_constants() -> None:
    from onnxscript import opset18

    recorder = _building.OpRecorder(opset18, {})
    with evaluator.default_as(recorder):
        result = opset18.Add(SymbolicTensor(opset18, name="x"), 1.0)
    assert evaluator.default() is not recorder
    assert isinstance(result, SymbolicTensor)
    assert [node.op_type for node in recorder.nodes] == ["Constant", "Add"]
    assert list(recorder.constant_farm.values()) == [recorder.nodes[0].outputs[0]]


def test_lazy_graphs_become_code_when_they_run() -> None:
    with _use_lazy_graph_module(True):
        module = torch.fx.symbolic_trace(nn.ReLU())
    assert isinstance(module, _LazyGraphModule)
    assert module(torch.tensor(-1.0)) == 0


def test_graphs_made_while_a_model_is_captured_are_lazy_and_others_are_not() -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    graph = torch.fx.symbolic_trace(positive).graph
    with only_what_is_read():
        inside = torch.fx.GraphModule({}, graph)
        with _use_lazy_graph_module(False):  # as in strict mode
            strict = torch.fx.GraphModule({}, graph)
    outside = torch.fx.GraphModule({}, graph)
    assert [isinstance(one, _LazyGraphModule) for one in (inside, strict, outside)] == [True, False, False]
    assert inside(torch.tensor(-1.0)) == strict(torch.tensor(-1.0)) == 0
    assert inside.code == strict.code == outside.code


def test_functions_are_replaced_only_while_a_model_is_captured() -> None:
    intercepted = []

    def noted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        intercepted.append(func)
        return func(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions._Rewritten, "__torch_function__", noted)
        with functions.values_not_read_in_captures():
            torch.ones(2).add(1)
            assert intercepted == []
            torch.export.export(Stack(1.0).eval(), (torch.randn(3, 8),))
            assert torch.split in intercepted
            intercepted.clear()
            torch.ones(2).add(1)
    assert intercepted == []
