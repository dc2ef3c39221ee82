"""The `dynamo` front end: ``torch.export``, then ``torch.onnx``'s translation, unoptimised.

While the model runs under ``torch.export``, forward hooks annotate every FX node with the address of the call that
made it. The annotation lives in ``node.meta["custom"]``, which decomposition carries along, and every ONNX node that
the translation makes points back to its FX node. The bodies of ``torch.cond`` and its kind are captured by TorchDynamo,
which runs no hooks but keeps a stack of ``id(module)@n`` keys for each node; those are resolved to the same addresses.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
import torch.fx.traceback
from torch import nn

from modelexport.core import ROOT, CallTree, Evidence, ModuleCall, Owner, TracedCall
from modelexport.errors import CaptureError
from modelexport.frontends import Exported
from modelexport.graph import OWNER
from modelexport.hierarchy.recorder import CallRecorder
from modelexport.hierarchy.traced import untouched
from modelexport.hierarchy.values import run_arguments
from modelexport.inputs import check_inputs
from modelexport.quiet import quiet

ADDRESS_KEY = "modelexport.call"


def export(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    *,
    dynamic: bool = False,
    opset: int | None = None,
) -> Exported:
    """Capture and translate a model. It is as before afterwards, also when this fails.

    Args:
        inputs: Keyword or positional arguments of ``model.forward``; not changed.
        dynamic: Leave every axis of every input that the model does not fix open.
        opset: The opset of the ONNX standard domain; ``None`` for the exporter's default.

    Raises:
        CaptureError: The exporter gave up. Names the module call that was running.
        InputsError: The model has lazy parameters.
    """
    recorder = CallRecorder(model, _annotated)
    args, kwargs = _by_name(model, *run_arguments(copy.deepcopy(inputs)))
    with untouched(model, runs=False), recorder.attached(), quiet():
        failure: CaptureError | None = None
        try:
            translated, output_names = _translate(model, args, kwargs, dynamic=dynamic, opset=opset)
        except Exception as error:
            failure, cause = _explained(error, recorder), error
    if failure is not None:
        check_inputs(model, inputs if isinstance(inputs, Mapping) else tuple(inputs))
        raise failure from cause
    passes.InlinePass()(translated)
    calls = _Owners(model, recorder.seen).assign(translated)
    if output_names is None:
        output_names = tuple(spec.name for spec in recorder.seen[0].outputs)
    if len(output_names) != len(translated.graph.outputs):
        output_names = tuple(value.name or "" for value in translated.graph.outputs)
    return Exported(translated, calls, state_dict_names(model), output_names)


@contextlib.contextmanager
def _annotated(call: ModuleCall) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if call == ROOT:
            # Lets the bodies of torch.cond keep what TorchDynamo recorded of their modules.
            stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(torch.fx.traceback.annotate({ADDRESS_KEY: call.address}))
        yield


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments by name, so that the inputs of the graph have those names; as they are if that cannot be."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the model will say it better
        return args, kwargs
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match bound.signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.POSITIONAL_ONLY:
                return args, kwargs
            case inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            case _:
                named[name] = value
    return (), named


def _explained(error: Exception, recorder: CallRecorder) -> CaptureError:
    """What failed and where, and the exporter's own reason: the exception at the bottom of the chain."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    call = recorder.running
    where = f" in {call}" if call is not None else ""
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    reason = "\n".join(line[:200] for line in lines[:_REASON_LINES])
    message = f"the model cannot be exported: {type(cause).__name__}{where}: {reason}"
    return CaptureError(message, address=None if call is None else call.address, reason=reason)


_REASON_LINES = 12
"""What fits a screen; the rest is in the chained exception."""


def state_dict_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every ``state_dict`` key to all keys of the same tensor, itself included: tied parameters have several."""
    tensors = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for key, tensor in tensors.items():
        if torch.is_tensor(tensor):
            names.setdefault(id(tensor), []).append(key)
    return {key: tuple(keys) for keys in names.values() for key in keys}


def _translate(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool, opset: int | None
) -> tuple[ir.Model, tuple[str, ...] | None]:
    """The translated graph, and the names of its outputs where the exporter knows them."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) and not args:
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

        config = OnnxConfig(dynamic=dynamic, opset_version=opset, optimize=False)
        program = OnnxExporter().export(model, kwargs, config).program
        return program, tuple(value.name for value in program.graph.outputs)
    shapes = _dynamic_axes(args or kwargs) if dynamic else None
    exported = torch.onnx.export(
        model,
        args,
        kwargs=kwargs,
        dynamic_shapes=shapes,
        opset_version=opset,
        dynamo=True,
        optimize=False,
        verbose=False,
    )
    assert exported is not None
    return exported.model, None


def _dynamic_axes(value: Any) -> Any:
    """``Dim.AUTO`` on every axis of every tensor in a nested value."""
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)
    if isinstance(value, Mapping):
        return {key: _dynamic_axes(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_dynamic_axes(part) for part in value)
    return None


class _Owners:
    """Reads the owner of each ONNX node off its FX node, and adds the calls found only in captured branches."""

    def __init__(self, model: nn.Module, calls: Sequence[TracedCall]) -> None:
        self.path_by_id = {str(id(module)): path for path, module in model.named_modules()}
        self.counts = Counter(traced.call.path for traced in calls)
        self.calls = list(calls)
        self.depth = {traced.call: traced.depth for traced in calls}
        self.nested: dict[tuple[int, str], ModuleCall] = {}

    def assign(self, model: ir.Model) -> CallTree:
        for graph in model.graphs():
            self._assign_graph(graph)
        for function in model.functions.values():
            self._assign_graph(function)
        return CallTree(tuple(self.calls))

    def _assign_graph(self, graph: ir.Graph | ir.Function) -> None:
        fx_nodes: dict[str, torch.fx.Node] = {}
        for node in graph:
            if not fx_nodes and (fx_node := node.meta.get("node")) is not None:
                fx_nodes = {fx_node.name: fx_node for fx_node in fx_node.graph.nodes}
            call = self._call_of(node.meta.pop("node", None) or fx_nodes.get(_fx_name(node)))
            if call is not None:
                node.meta[OWNER] = Owner((call,), Evidence.EXACT)

    def _call_of(self, fx_node: torch.fx.Node | None) -> ModuleCall | None:
        if fx_node is None:
            return None
        annotation = fx_node.meta.get("custom") or {}
        stack = fx_node.meta.get("nn_module_stack")
        call = ModuleCall.parse(annotation[ADDRESS_KEY]) if ADDRESS_KEY in annotation else None
        for key in stack or ():
            path = self.path_by_id.get(key.partition("@")[0])
            if path is not None:
                call = self._nested_call(fx_node.graph, key, path, call or ROOT)
        if call is None and stack is not None:
            # Made while the root ran, around its forward: the exporter's own flattening of inputs and outputs.
            return ROOT
        return call

    def _nested_call(self, graph: torch.fx.Graph, key: str, path: str, parent: ModuleCall) -> ModuleCall:
        identity = (id(graph), key)
        if identity not in self.nested:
            call = ModuleCall(path, self.counts[path])
            self.counts[path] += 1
            self.depth[call] = self.depth[parent] + 1
            self.calls.append(TracedCall(call, parent, self.depth[call], None, None))
            self.nested[identity] = call
        return self.nested[identity]


def _fx_name(node: ir.Node) -> str:
    """The name of the FX node that an ONNX node was made for, as ``torch.onnx`` wrote it down."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    return str(ast.literal_eval(scopes)[-1]) if scopes else ""
