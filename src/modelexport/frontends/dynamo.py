"""The `dynamo` front end: ``torch.export``, then ``torch.onnx``'s translation, unoptimised.

While the model runs under ``torch.export``, forward hooks annotate every FX node with the address of the call that
made it. The annotation lives in ``node.meta["custom"]``, which decomposition carries along, and every ONNX node that
the translation makes points back to its FX node. The bodies of ``torch.cond`` and its kind are captured by TorchDynamo,
which runs no hooks but keeps a stack of ``id(module)@n`` keys for each node; those are resolved to the same addresses.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch
import torch.fx.traceback
from torch import nn

from modelexport.core import ROOT, CallTree, Evidence, ModuleCall, Owner, TracedCall
from modelexport.frontends import Exported
from modelexport.graph import OWNER

ADDRESS_KEY = "modelexport.call"


class _CallRecorder:
    """Forward hooks that annotate FX nodes with the running call and list the calls in order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.path_by_id = {str(id(module)): path for path, module in model.named_modules()}
        self.counts: dict[str, int] = {}
        self.calls: list[list[Any]] = []
        self._stack: list[tuple[int, contextlib.ExitStack]] = []
        self._step = 0

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on every module, removed at the end whatever happens."""
        with contextlib.ExitStack() as handles:
            for path, module in self.model.named_modules():
                enter = module.register_forward_pre_hook(self._make_enter(path), prepend=True, with_kwargs=True)
                handles.callback(enter.remove)
                leave = module.register_forward_hook(self._leave, always_call=True, with_kwargs=True)
                handles.callback(leave.remove)
            try:
                yield
            finally:
                while self._stack:
                    self._stack.pop()[1].close()

    def _make_enter(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_dynamo_compiling():
                return
            annotation = contextlib.ExitStack()
            if not self._stack:
                # Lets the bodies of torch.cond keep what TorchDynamo recorded of their modules.
                annotation.enter_context(torch.fx.traceback.preserve_node_meta())
            call = ModuleCall(path, self.counts.get(path, 0))
            self.counts[path] = call.index + 1
            annotation.enter_context(torch.fx.traceback.annotate({ADDRESS_KEY: call.address}))
            parent = self.calls[self._stack[-1][0]][0] if self._stack else None
            self.calls.append([call, parent, len(self._stack), self._step, None])
            self._stack.append((len(self.calls) - 1, annotation))
            self._step += 1

        return enter

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or not self._stack:
            return
        position, annotation = self._stack.pop()
        self.calls[position][4] = self._step
        self._step += 1
        annotation.close()


def export(model: nn.Module, inputs: Mapping[str, Any], *, dynamic: bool = False, opset: int | None = None) -> Exported:
    """Capture and translate a model. The model is as before afterwards, also when this fails.

    Args:
        model: In evaluation mode.
        inputs: Keyword arguments of ``model.forward``; not changed.
        dynamic: Leave every axis of every input that the model does not fix open.
        opset: The opset of the ONNX standard domain; ``None`` for the exporter's default.

    Raises:
        CaptureError: The exporter gave up. Names the module call that was running.
    """
    recorder = _CallRecorder(model)
    with recorder.attached():
        translated = _translate(model, dict(inputs), dynamic=dynamic, opset=opset)
    calls = _Owners(recorder).assign(translated)
    return Exported(translated, calls, state_dict_names(model))


def state_dict_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every ``state_dict`` key to all keys of the same tensor, itself included: tied parameters have several."""
    tensors = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for key, tensor in tensors.items():
        if torch.is_tensor(tensor):
            names.setdefault(id(tensor), []).append(key)
    return {key: tuple(keys) for keys in names.values() for key in keys}


def _translate(model: nn.Module, inputs: dict[str, Any], *, dynamic: bool, opset: int | None) -> ir.Model:
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

        config = OnnxConfig(dynamic=dynamic, opset_version=opset, optimize=False)
        program = OnnxExporter().export(model, inputs, config).program
    else:
        shapes = {name: _dynamic_axes(value) for name, value in inputs.items()} if dynamic else None
        exported = torch.onnx.export(
            model,
            (),
            kwargs=inputs,
            dynamic_shapes=shapes,
            opset_version=opset,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        assert exported is not None
        program = exported.model
    assert isinstance(program, ir.Model)
    return program


def _dynamic_axes(value: Any) -> Any:
    """``Dim.AUTO`` on every axis of every tensor in a nested value."""
    return torch.utils._pytree.tree_map(
        lambda leaf: dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO) if torch.is_tensor(leaf) else None, value
    )


class _Owners:
    """Reads the owner of each ONNX node off its FX node, and adds the calls found only in captured branches."""

    def __init__(self, recorder: _CallRecorder) -> None:
        self.path_by_id = recorder.path_by_id
        self.counts = dict(recorder.counts)
        self.calls = [TracedCall(*record) for record in recorder.calls]
        self.depth = {call.call: call.depth for call in self.calls}
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
            call = ModuleCall(path, self.counts.get(path, 0))
            self.counts[path] = call.index + 1
            self.depth[call] = self.depth[parent] + 1
            self.calls.append(TracedCall(call, parent, self.depth[call], None, None))
            self.nested[identity] = call
        return self.nested[identity]


def _fx_name(node: ir.Node) -> str | None:
    """The name of the FX node that an ONNX node was made for, as ``torch.onnx`` wrote it down."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    return ast.literal_eval(scopes)[-1] if scopes else None
