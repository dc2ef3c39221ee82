"""The `torchscript` front end: ``torch.jit`` tracing, then the TorchScript exporter, without folding or merging.

PyTorch keeps a map from modules to scope names (``torch.jit._trace._trace_module_map``). While it traces, each call of
a module looks its name up there, and nodes recorded inside carry the chain of names. A hook before each call puts a
name for this call into the map. ``/c0/c7/c12/MatMul`` was computed in the call that began as the thirteenth.

The tensors that a call gets and returns are added as outputs of the graph, until it is captured: so no pass of the
exporter can remove these values, and the order of the outputs identifies them.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from torch import nn

from modelexport.capture.arguments_and_parameters import by_name, state_dict_names, variable_inputs
from modelexport.capture.exported_graph import Exported
from modelexport.capture.failure_hints import (
    OTHER_OPERATIONS,
    check_returned,
    failure,
    is_of_exporter,
    line_of,
    way_out,
)
from modelexport.capture.front_end_options import DEFAULTS, TRACED_OPSETS, FrontEndOptions
from modelexport.capture.lines_of_code import LinesOfCode
from modelexport.capture.patches import private, replaced, require
from modelexport.capture.presumed_answers import Presumed
from modelexport.capture.repairs.indexing import adding_what_is_written_twice
from modelexport.capture.repairs.pooling import without_last_windows
from modelexport.capture.repairs.untraceable import translatable
from modelexport.capture.torchscript_owners import assign_owners, name_after_owners
from modelexport.capture.traced_operations import marking_operations, read_operations
from modelexport.capture.traced_size_conditions import size_conditions_of_trace
from modelexport.capture.value_decisions import NoDecisions
from modelexport.core.calls import ROOT, CallTree, ModuleCall, Port, Side, TensorSpec
from modelexport.core.collected_messages import collected
from modelexport.errors import CaptureError, UsageError
from modelexport.graph.bound_tensors import bind_tensors
from modelexport.graph.nodes import all_nodes
from modelexport.pytorch.calls.call_recorder import CallRecorder
from modelexport.pytorch.calls.traced_tree import SavedTensors, trace_calls, untouched
from modelexport.pytorch.nested_tensors import Inputs, NamedTensors, copied, output_tensors
from modelexport.pytorch.pretrained import is_pretrained
from modelexport.pytorch.private_torch import in_trace, version_of
from modelexport.pytorch.runs.questions_of_values import Site

_INPUT = "modelexport.input."


def capture_by_tracing(
    model: nn.Module,
    inputs: Inputs,
    options: FrontEndOptions = DEFAULTS,
    presumed: Presumed | None = None,
) -> Exported:
    """Trace and translate a model. The model's state is restored afterwards, also after a failure.

    Args:
        inputs: Keyword or positional arguments of ``model.forward``; not changed.
        presumed: Has the lines that may read values.

    Raises:
        CaptureError: The exporter failed, or the model's Python code depends on tensor values. Names the call and line.
        InputsError: The inputs do not fit, or the model has lazy parameters.
        UsageError: The exporter does not write this opset.
    """
    require("torchscript")
    opset = options.opset
    if opset is not None and opset not in TRACED_OPSETS:
        raise UsageError(
            f"the TorchScript exporter writes opsets {TRACED_OPSETS[0]} to {TRACED_OPSETS[-1]}, not {opset}: "
            f"choose one of these, or the front end dynamo"
        )
    args, kwargs = by_name(model, inputs)
    overwritten: SavedTensors = []
    own_args, own_kwargs = copied((args, kwargs))
    with collected():
        run = trace_calls(model, own_args, own_kwargs, overwritten)
    traced = _Traced(model, run, args, kwargs, options, presumed.fixed if presumed else {})
    names = [f"{_INPUT}{position}" for position in range(len(traced.given))]
    axes = {
        name: {
            axis: _plain(f"{argument}_{axis}") for axis, size in enumerate(tensor.shape) if options.ones or size != 1
        }
        for name, (argument, tensor) in zip(names, traced.given, strict=True)
    }
    file = io.BytesIO()
    failed: CaptureError | None = None
    kept = untouched(model, runs=False, changed=overwritten)  # modes, as one that sees writes, disturb a trace
    adding = functools.partial(adding_what_is_written_twice, opset or TRACED_OPSETS[-1])
    replacements = {**_NOTHING_MERGED, "translations": lambda translate: marking_operations(adding(translate))}
    with kept, traced.recorder.attached(), replaced(replacements), translatable(model):
        try:
            torch.onnx.export(
                traced,
                tuple(tensor for _, tensor in traced.given),
                file,  # type: ignore[arg-type]  # an open file, too
                input_names=names,
                dynamic_axes=axes if options.dynamic else None,
                opset_version=opset,
                dynamo=False,
                export_params=False,
                # Otherwise equal parameters are merged.
                keep_initializers_as_inputs=True,
                do_constant_folding=False,
                verbose=options.lines,  # doc strings
            )
        except Exception as error:  # of the model, of torch, of its exporter
            failed, cause = _explained(error, traced.recorder, way_out(model, error)), error
    if failed is not None:
        raise failed from cause
    exported = traced.result(_typed(onnx.load_model_from_string(file.getvalue()), dynamic=options.dynamic), len(names))
    if not options.dynamic:
        return exported
    return dataclasses.replace(exported, conditions=size_conditions_of_trace(model, inputs, exported.model))


def _typed(proto: onnx.ModelProto, *, dynamic: bool) -> ir.Model:
    """The model with the types of its values; without weights, so that inference is fast.

    The exporter leaves most values without a type. An output whose sizes it cannot infer has those of the example,
    which are wrong for others.
    """
    if dynamic:
        inputs = {value.name for value in proto.graph.input}
        for value in proto.graph.output:
            for size in value.type.tensor_type.shape.dim if value.name not in inputs else ():
                size.Clear()
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    while next(without_last_windows(model), None) is not None:  # sizes behind it are wrong
        for value in (value for node in all_nodes(model) for value in node.outputs):
            value.shape = None
        model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))
    return model


def _forget_invented_sizes(model: ir.Model) -> None:
    """Keep only those names of dynamic sizes that the inputs have: inference gives different sizes the same new name.

    ONNX Runtime reuses one buffer for values whose sizes have the same name.
    """
    known = {str(size) for value in model.graph.inputs for size in value.shape or ()}
    for node in all_nodes(model):
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape(
                    size if isinstance(size, int) or str(size) in known else None for size in value.shape
                )


class _Recorder(CallRecorder):
    """A recorder that works outside of the trace: inside, sizes are tensors, and reading one adds a node."""

    def _enter(self, *arguments: Any) -> None:
        with in_trace(None) as self.trace:
            super()._enter(*arguments)

    def _leave(self, *arguments: Any) -> None:
        with in_trace(None) as self.trace:
            super()._leave(*arguments)


class _Traced(nn.Module):
    """The traced module: takes the tensors in the arguments of a model by position and passes them on by keyword.

    It returns the tensors in the model's result, then those that calls get and return.

    Args:
        run: The calls of a run outside of the trace, where a size is a number, not a tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        run: CallTree,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: FrontEndOptions,
        fixed: Collection[Site],
    ) -> None:
        super().__init__()
        self.model = model
        self.given = variable_inputs(model, args, kwargs, options.constants)
        self.recorder = _Recorder(model, self._scoped, self._keep)
        self._run = run
        self._dynamic = options.dynamic
        self._fixed = fixed
        self._arguments = args, kwargs
        self._by_path = dict(model.named_modules())
        self._ports: dict[Port, str] = {}
        """The ports of calls to the names of their tensors."""
        self._copies: dict[tuple[int, int | None], tuple[torch.Tensor, Any]] = {}
        self._kept: list[tuple[torch.Tensor, Any]] = []
        """For each port a tensor of the same type and shape without memory, and its value in the traced graph."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        traced = {id(tensor): new for (_, tensor), new in zip(self.given, tensors, strict=True)}
        args, kwargs = copied(self._arguments, traced)
        with NoDecisions(self.model, self._fixed) as decisions:
            output = self.model(*args, **kwargs)
        decisions.check_nothing_caught()
        self._returned = self._without_sizes(ROOT, "outputs", output_tensors(output))
        for stand_in, value in self._kept:
            private("set value")(stand_in, value)
        return (*(tensor for _, tensor in self._returned), *(stand_in for stand_in, _ in self._kept))

    @contextmanager
    def _scoped(self, call: ModuleCall) -> Iterator[None]:
        scopes = private("scopes")
        if scopes is not None:
            scopes[self._by_path[call.path]] = f"call::c{len(self.recorder.seen) - 1}"
        yield

    def _keep(self, call: ModuleCall, side: Side, tensors: NamedTensors) -> None:
        if self.recorder.trace is None:
            return
        tensors = self._without_sizes(call, side, tensors)
        for position, (name, tensor) in enumerate(tensors):
            self._ports[Port(call, side, position)] = name
            self._kept.append(self._as_it_is_now(tensor))

    def _without_sizes(self, call: ModuleCall, side: Side, tensors: NamedTensors) -> NamedTensors:
        """The tensors without sizes: in a trace a size is a scalar tensor; in a run, a number."""
        run = self._run.by_call.get(call)
        names = {spec.name for spec in ((run.inputs if side == "inputs" else run.outputs) if run else ())}
        return [
            (name, tensor) for name, tensor in tensors if name in names or tensor.dim() or tensor.is_floating_point()
        ]

    def _as_it_is_now(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy, because later code may write into the tensor; the exporter makes no node for it."""
        with in_trace(self.recorder.trace):
            key = private("value")(tensor).unique(), version_of(tensor)
            if key not in self._copies:
                value = private("value")(tensor.clone())
                with in_trace(None):
                    stand_in = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
                self._copies[key] = stand_in, value
        return self._copies[key]

    def result(self, model: ir.Model, count: int) -> Exported:
        """The translated graph with owners, parameters and names; only the model's own outputs are kept."""
        seen = self.recorder.seen
        graph = model.graph
        read_operations(model)
        outputs = list(graph.outputs)
        graph.outputs.clear()
        graph.outputs.extend(outputs[: len(self._returned)])
        check_returned(model)
        passes.RemoveUnusedNodesPass()(model)
        ports = dict(zip(self._ports, outputs[len(self._returned) :], strict=True))
        assign_owners(model, [traced.call for traced in seen], LinesOfCode(self.model), ports)
        self._insert_parameters(graph, count)
        _forget_invented_sizes(model)
        name_after_owners(model)
        output_names = tuple(name for name, _ in self._returned)
        for value, name in zip(graph.inputs, self._input_names(output_names), strict=True):
            value.name = name
        values = {
            port: value
            for port, value in ports.items()
            if value.is_graph_input() or ((node := value.producer()) is not None and node.graph is graph)
        }
        calls = [
            dataclasses.replace(
                traced,
                inputs=tuple(self._specs(traced.call, "inputs", traced.inputs, values)),
                outputs=tuple(self._specs(traced.call, "outputs", traced.outputs, values)),
            )
            for traced in seen
        ]
        names = {port: value.name or "" for port, value in values.items()}
        return Exported(model, CallTree(tuple(calls)), state_dict_names(self.model), names, output_names, "torchscript")

    def _input_names(self, output_names: Sequence[str]) -> list[str]:
        """The names that `dynamo` uses: transformers' exporter keeps dots and renames inputs named like outputs."""
        if is_pretrained(self.model):
            return [f"input.{name}" if name in output_names else name for name, _ in self.given]
        return [_plain(name) for name, _ in self.given]

    def _specs(
        self, call: ModuleCall, side: Side, specs: Sequence[TensorSpec], values: Mapping[Port, ir.Value]
    ) -> Iterator[TensorSpec]:
        """The tensors that are not sizes, with the sizes of the trace; the graph knows which of them are dynamic."""
        position = 0
        for spec in specs:
            port = Port(call, side, position)
            if self._ports.get(port) != spec.name:
                continue
            position += 1
            value = values.get(port)
            known = value.shape if value is not None and value.shape is not None else [None] * len(spec.shape)
            symbols = [size.value if isinstance(size, ir.SymbolicDim) else size for size in known]
            sizes = (_plain(f"{spec.name}_{axis}") if size is None else size for axis, size in enumerate(symbols))
            yield dataclasses.replace(spec, shape=tuple(sizes)) if self._dynamic else spec

    def _insert_parameters(self, graph: ir.Graph, count: int) -> None:
        """Make parameters and buffers, which the exporter leaves as inputs after the given ones, initializers."""
        tensors = self.model.state_dict(keep_vars=True)
        inputs = list(graph.inputs)
        graph.inputs.clear()
        graph.inputs.extend(inputs[:count])
        for value in inputs[count:]:
            key = (value.name or "").removeprefix("model.")
            value.name = key
            bind_tensors({value: ir.tensor_adapters.TorchTensor(tensors[key], name=key)})
            graph.register_initializer(value)


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _explained(error: Exception, recorder: CallRecorder, hint: str) -> CaptureError:
    """The error in one line: what failed, the call, the model's own line of code, the first line of the reason."""
    node = _translated_node(error)
    scope = re.search(r"::c(\d+)$", node.scopeName()) if node is not None else None
    call = recorder.raised_in(error) or (recorder.seen[int(scope[1])].call if scope is not None else None)
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")[:300]
    if not hint and node is not None and scope is not None:
        hint = _without_out(node) or OTHER_OPERATIONS
    return failure(error, call, reason, f"{reason.removesuffix('.')}{hint}")


def _without_out(node: torch.Node) -> str:
    """What to do about a node for whose result the model's code gives a tensor; empty if it gives none."""
    frames = re.findall(r"^(.+)\((\d+)\): (.*)", str(node.sourceRange()), re.MULTILINE)
    stack = traceback.StackSummary.from_list([(file, int(line), name, None) for file, line, name in reversed(frames)])
    last = next((frame for frame in reversed(stack) if not is_of_exporter(frame)), None)
    if last is None or not re.search(r"\bout\s*=[^=]", last.line or ""):
        return ""
    return f"; `out=` in {line_of(stack)} is not translated: assign the result, or use dynamo"


def _translated_node(error: Exception) -> torch.Node | None:
    """The node that was being translated, read from the exporter's stack frame."""
    nodes = (frame.f_locals.get("node") for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((node for node in nodes if isinstance(node, torch.Node) and "::c" in node.scopeName()), None)


def _between_boundaries(peephole: Callable[..., Any]) -> Callable[..., None]:
    def run(graph: Any, *options: Any) -> None:
        boundaries = [
            _boundary(graph, value) for value in {value.unique(): value for value in graph.outputs()}.values()
        ]
        for conversion in graph.findAllNodes("onnx::Cast", recurse=True):
            if conversion.i("to") == onnx.TensorProto.COMPLEX128:  # the exporter's number of bfloat16
                conversion.i_("to", onnx.TensorProto.BFLOAT16)
        peephole(graph, *options)
        for boundary in boundaries:
            boundary.output().replaceAllUsesWith(boundary.input())
            boundary.destroy()

    return run


def _boundary(graph: Any, value: Any) -> Any:
    """Insert a node that no pass knows between a value and its users."""
    boundary = graph.create("modelexport::boundary", [value], 1)
    if value.node().kind() == "prim::Param":
        graph.prependNode(boundary)
    else:
        boundary.insertAfter(value.node())
    boundary.output().setType(value.type())
    value.replaceAllUsesAfterNodeWith(boundary, boundary.output())
    return boundary


_NOTHING_MERGED: Mapping[str, Callable[[Any], Any]] = {
    "merging": lambda _: lambda graph: False,
    "fusing": _between_boundaries,
    "log": lambda _: lambda *lines: None,
}
"""Functions of the exporter that are replaced, besides that of translations, which depends on the opset.

- Equal nodes are not merged. Our own optimizer does that, and records all owners.
- Nodes before and after a value that a call gets or returns are not fused, such as two transpositions of which only one
  is in the call.
- When the exporter fails, it does not print its graph, which bypasses ``sys.stdout``.
"""
