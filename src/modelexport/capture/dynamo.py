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
import io
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
import torch.fx.traceback
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from modelexport.capture.aliases import is_written_later, passed_on
from modelexport.capture.arguments import by_name, state_dict_names
from modelexport.capture.exported import Exported
from modelexport.capture.hints import check_returned, way_out
from modelexport.capture.opsets import convert_to_opset, translated_opset
from modelexport.capture.repairs import translations_added
from modelexport.capture.reuse import decomposed_once
from modelexport.core.calls import ROOT, CallTree, ModuleCall, Port, Side, TracedCall
from modelexport.core.messages import collected
from modelexport.core.owners import Evidence, Owner
from modelexport.errors import CaptureError
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.owners import OWNER, owner_of
from modelexport.graph.sizes import rename_sizes
from modelexport.pytorch.inputs import check_inputs
from modelexport.pytorch.recorder import CallRecorder
from modelexport.pytorch.traced import trace_calls, untouched
from modelexport.pytorch.values import NamedTensors, run_arguments

ADDRESS_KEY = "modelexport.call"
PORTS_KEY = "modelexport.ports"


def capture_by_dynamo(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    *,
    dynamic: bool = False,
    opset: int | None = None,
    reuse: bool = True,
) -> Exported:
    """Capture and translate a model. It is as before afterwards, also when this fails.

    Args:
        inputs: Keyword or positional arguments of ``model.forward``; not changed.
        dynamic: Leave every axis of every input that the model does not fix open.
        opset: The opset of the ONNX standard domain; ``None`` for the exporter's default.
        reuse: Decompose calls whose captured graphs are equal once. The result is the same without.

    Raises:
        CaptureError: The exporter gave up. Names the module call that was running.
        InputsError: The model has lazy parameters.
        UsageError: There is no such opset.
    """
    translated_in = translated_opset(opset)
    watcher = _TensorWatcher()
    recorder = CallRecorder(model, _annotated, watcher.watch)
    args, kwargs = by_name(model, *run_arguments(copy.deepcopy(inputs)))
    once = decomposed_once(recorder.seen, ADDRESS_KEY, reuse=reuse)
    with untouched(model, runs=False), recorder.attached(), translations_added() as programs, once, collected():
        failure: CaptureError | None = None
        try:
            translated, output_names = _translate(model, args, kwargs, dynamic=dynamic, opset=translated_in)
        except Exception as error:
            failure, cause = _explained(error, recorder, way_out(model, error)), error
    if failure is not None:
        check_inputs(model, inputs if isinstance(inputs, Mapping) else tuple(inputs))
        raise failure from cause
    check_returned(translated)
    # Where all of a graph comes from functions that were inlined, no node has its FX node, only the name.
    program = programs[-1].exported_program
    fx_graphs = {} if program is None else {translated.graph: program.graph}
    passes.InlinePass()(translated)
    seen: Sequence[TracedCall] = recorder.seen
    if program is not None and not _is_annotated(program.graph):
        # torch.onnx fell back to strict capture, which runs no hooks: a run of the model has its calls.
        with collected():
            seen = trace_calls(model, *copy.deepcopy((args, kwargs))).calls
    owners = _Owners(model, seen, fx_graphs)
    calls = owners.assign(translated)
    if output_names is None:
        output_names = tuple(spec.name for spec in seen[0].outputs)
    if len(output_names) != len(translated.graph.outputs):
        output_names = tuple(value.name or "" for value in translated.graph.outputs)
    returned = _returned(seen, translated)
    values = {**watcher.graph_inputs(translated), **owners.values, **returned}
    if opset is not None:
        convert_to_opset(translated, opset)
    return Exported(translated, calls, state_dict_names(model), values, output_names, "dynamo")


class _TensorWatcher:
    """Marks, while the model is captured, the FX nodes that make the tensors which calls get and return."""

    def __init__(self) -> None:
        self._from_inputs: dict[torch.fx.Node, list[Port]] = {}

    def watch(self, call: ModuleCall, side: Side, tensors: NamedTensors) -> None:
        mode = get_proxy_mode()
        if mode is None:
            return
        for index, (_, tensor) in enumerate(tensors):
            slot = get_proxy_slot(tensor, mode.tracer, None)
            if slot is None:  # a parameter, or made outside the capture
                continue
            node, port, item = slot.proxy.node, Port(call, side, index), None
            if node.op == "placeholder":
                self._from_inputs.setdefault(node, []).append(port)
                continue
            if is_written_later(node):  # through a view, so that the node has what was there before
                continue
            if node.target is operator.getitem:  # decomposition makes these anew, without annotations
                node, item = node.args
            while node is not None and node.op != "placeholder":
                custom = node.meta.get("custom") or {}
                # A dictionary of its own: nodes of one call share theirs.
                node.meta["custom"] = {**custom, PORTS_KEY: (*custom.get(PORTS_KEY, ()), (port, item))}
                node = passed_on(node) if item is None else None

    def graph_inputs(self, model: ir.Model) -> dict[Port, str]:
        """The ports through which the inputs of the graph come in as they are, in the order of the root's inputs."""
        of_root: dict[int, list[Port]] = {}
        for ports in self._from_inputs.values():
            of_root.update((port.position, ports) for port in ports if port.call == ROOT and port.side == "inputs")
        inputs = [of_root[index] for index in sorted(of_root)]
        if len(inputs) != len(model.graph.inputs):
            return {}
        return {
            port: value.name or "" for ports, value in zip(inputs, model.graph.inputs, strict=True) for port in ports
        }


def _returned(calls: Sequence[TracedCall], model: ir.Model) -> dict[Port, str]:
    """What the root returns is what the graph gives out, in order."""
    specs = calls[0].outputs if calls else ()
    if len(specs) != len(model.graph.outputs):
        return {}
    return {
        Port(ROOT, "outputs", index): value.name or ""
        for index, value in enumerate(model.graph.outputs)
        if value.producer() is not None
    }


@contextlib.contextmanager
def _annotated(call: ModuleCall) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if call == ROOT:
            # Lets the bodies of torch.cond keep what TorchDynamo recorded of their modules.
            stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(torch.fx.traceback.annotate({ADDRESS_KEY: call.address}))
        yield


def _explained(error: Exception, recorder: CallRecorder, hint: str = "") -> CaptureError:
    """What failed and where, and the exporter's own reason: the exception at the bottom of the chain."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    call = recorder.running
    where = f" in {call}" if call is not None else ""
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    reason = "\n".join(line[:200] for line in lines[:_REASON_LINES])
    problem = f"{type(cause).__name__}{where}: {reason}{hint}"
    return CaptureError(problem, address=None if call is None else call.address, reason=reason)


_REASON_LINES = 12
"""What fits a screen; the rest is in the chained exception."""


def _translate(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool, opset: int | None
) -> tuple[ir.Model, tuple[str, ...] | None]:
    """The translated graph, and the names of its outputs where the exporter knows them."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) and not args:
        from transformers.exporters.exporter_onnx import OnnxConfig

        config = OnnxConfig(dynamic=dynamic, opset_version=opset, optimize=False)
        with contextlib.ExitStack() as translation:
            program = _transformers_exporter(translation).export(model, kwargs, config).program
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
    program = exported.exported_program
    # torch.onnx writes a symbol also for an axis of which the capture found that it can only have one size.
    ranges = program.range_constraints if program is not None else {}
    rename_sizes(exported.model, {str(s): str(int(r.lower)) for s, r in ranges.items() if r.lower == r.upper})
    return exported.model, None


def _transformers_exporter(translation: contextlib.ExitStack) -> Any:
    """transformers' exporter, which does not print what ``torch.onnx`` says while it translates.

    It prints, and has no option not to. What the model itself prints, while it is captured before that, is shown.
    """
    from transformers.exporters.exporter_dynamo import DynamoExporter
    from transformers.exporters.exporter_onnx import OnnxExporter

    class Captured(DynamoExporter):
        def export_program(self, *args: Any, **kwargs: Any) -> Any:
            captured = super().export_program(*args, **kwargs)
            translation.enter_context(contextlib.redirect_stdout(io.StringIO()))
            return captured

    class Silent(OnnxExporter, Captured):
        pass

    return Silent()


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

    def __init__(
        self, model: nn.Module, calls: Sequence[TracedCall], fx_graphs: Mapping[ir.Graph, torch.fx.Graph]
    ) -> None:
        self.fx_graphs = fx_graphs
        annotated = any(map(_is_annotated, fx_graphs.values())) or not fx_graphs
        self.ran = frozenset() if annotated else frozenset(traced.call for traced in calls)
        self.path_by_id = {str(id(module)): path for path, module in model.named_modules()}
        self.counts = Counter(traced.call.path for traced in calls)
        self.calls = list(calls)
        self.depth = {traced.call: traced.depth for traced in calls}
        self.nested: dict[tuple[int, str], ModuleCall] = {}
        self.values: dict[Port, str] = {}

    def assign(self, model: ir.Model) -> CallTree:
        for graph in model.graphs():
            self._assign_graph(graph)
        for function in model.functions.values():
            self._assign_graph(function)
        _own_nested(model.graph)
        return CallTree(tuple(self.calls))

    def _assign_graph(self, graph: ir.Graph | ir.Function) -> None:
        renamed = {}
        for value in graph.outputs:
            producer = value.producer()
            if producer is not None:  # whose name still has the value's first one
                renamed[(producer.name or "").removeprefix("node_")] = value.name or ""
        fx_nodes: dict[str, torch.fx.Node] = {}
        owners: dict[torch.fx.Node, Owner] = {}
        fx_graph = self.fx_graphs.get(graph) if isinstance(graph, ir.Graph) else None
        fx_graph = fx_graph or _fx_graph(graph)
        if fx_graph is not None:
            fx_nodes = {fx_node.name: fx_node for fx_node in fx_graph.nodes}
            self._read_ports(fx_nodes, renamed)
            owners = self._read_owners(fx_graph)
        for node in graph:
            made_for = node.meta.pop("node", None) or fx_nodes.get(_fx_name(node))
            if made_for in owners:
                node.meta[OWNER] = owners[made_for]

    def _read_ports(self, fx_nodes: Mapping[str, torch.fx.Node], renamed: Mapping[str, str]) -> None:
        """Of the nodes that one marked node was decomposed into, the last tensor is its value, under its own name.

        Of a node with several results that was decomposed, nothing says which node makes which of them.
        """
        marks = {
            fx_node: ports
            for fx_node in fx_nodes.values()
            if (ports := (fx_node.meta.get("custom") or {}).get(PORTS_KEY))
        }
        made_by = Counter(port for ports in marks.values() for port, _ in ports)
        for fx_node, ports in marks.items():
            name, made = fx_node.name, fx_node.meta.get("val")
            for port, item in ports:
                if item is None and isinstance(made, torch.Tensor):
                    self.values[port] = renamed.get(name, name)
                elif item is not None and isinstance(made, (list, tuple)) and made_by[port] == 1:
                    items = [user.name for user in fx_node.users if user.args[1:] == (item,)]
                    value = items[0] if items else f"{name}__{item}"
                    self.values[port] = renamed.get(value, value)

    def _read_owners(self, graph: torch.fx.Graph) -> dict[torch.fx.Node, Owner]:
        """The owner of each node; a node is in the order in which it ran.

        One that an exporter put in another's place has no annotation: between two nodes of one call it ran in that.
        """
        owners: dict[torch.fx.Node, Owner] = {}
        before: ModuleCall | None = None
        unknown: list[torch.fx.Node] = []
        for node in graph.nodes:
            if node.op != "call_function" or node.target is operator.getitem:
                continue
            call = self._call_of(node)
            if call is None:
                unknown.append(node)
                continue
            owners[node] = Owner((call,), Evidence.EXACT)
            if call == before:
                owners.update(dict.fromkeys(unknown, Owner((call,), Evidence.DERIVED)))
            before, unknown = call, []
        # Those at a boundary between calls stay unknown here; lineage looks at what is around them.
        return owners | {
            node: owners[source]
            for node in graph.nodes
            if node.target is operator.getitem and (source := node.args[0]) in owners
        }

    def _call_of(self, fx_node: torch.fx.Node) -> ModuleCall | None:
        annotation = fx_node.meta.get("custom") or {}
        stack = fx_node.meta.get("nn_module_stack")
        call = ModuleCall.parse(annotation[ADDRESS_KEY]) if ADDRESS_KEY in annotation else None
        for key in stack or ():
            path = self.path_by_id.get(key.partition("@")[0])
            if path is not None:
                call = self._nested_call(fx_node.graph, key, path, call or ROOT)
        if call is None and stack:
            # Made while the root ran, around its forward: the exporter's own flattening of inputs and outputs.
            return ROOT
        return call

    def _nested_call(self, graph: torch.fx.Graph, key: str, path: str, parent: ModuleCall) -> ModuleCall:
        ran = ModuleCall(path, int(key.partition("@")[2] or 0))
        if ran in self.ran:  # captured without hooks; the key counts the calls of a module
            return ran
        identity = (id(graph), key)
        if identity not in self.nested:
            call = ModuleCall(path, self.counts[path])
            self.counts[path] += 1
            self.depth[call] = self.depth[parent] + 1
            self.calls.append(TracedCall(call, parent, self.depth[call], None, None))
            self.nested[identity] = call
        return self.nested[identity]


def _is_annotated(graph: torch.fx.Graph) -> bool:
    """Whether the hooks of a capture ran while a graph was made; one without operations counts as such."""
    made = [node for node in graph.nodes if node.op == "call_function"]
    return not made or any(ADDRESS_KEY in (node.meta.get("custom") or {}) for node in made)


def _fx_graph(graph: ir.Graph | ir.Function) -> torch.fx.Graph | None:
    """The FX graph that a graph was translated from; ``None`` for one that a translation made."""
    return next((fx_node.graph for node in graph if (fx_node := node.meta.get("node")) is not None), None)


def _own_nested(graph: ir.Graph, owner: Owner | None = None) -> None:
    """Give the nodes of a nested graph that a translation made the owner of the node that holds it."""
    for node in graph:
        if owner is not None and owner_of(node) is None:
            node.meta[OWNER] = owner
        for nested in nested_graphs(node):
            _own_nested(nested, owner_of(node))


def _fx_name(node: ir.Node) -> str:
    """The name of the FX node that an ONNX node was made for, as ``torch.onnx`` wrote it down."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    return str(ast.literal_eval(scopes)[-1]) if scopes else ""
