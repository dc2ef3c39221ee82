"""The owners of a graph that was translated from FX nodes, which carry the annotations of the capture."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
import torch.fx
from torch import nn

from modelexport.capture.lines_of_code import LINE_KEY
from modelexport.core.calls import ROOT, CallTree, ModuleCall, Port, TensorSpec, TracedCall
from modelexport.core.owners import Evidence, Owner
from modelexport.format import keys
from modelexport.graph.narrow_to_float32 import OPERATION
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.properties import put_texts, text_of
from modelexport.tagged.found_calls.recorded_stacks import NAME_SCOPES

ADDRESS_KEY = keys.CALL
"""The annotation of an FX node with the address of its call."""
PORTS_KEY = "modelexport.ports"
"""The annotation with the boundary ports that its value comes to, each with the item of a result of several."""


class FxOwners:
    """Reads the owner of each ONNX node from its FX node, and adds the calls found only in captured branches."""

    def __init__(
        self, model: nn.Module, calls: Sequence[TracedCall], fx_graphs: Mapping[ir.Graph, torch.fx.Graph]
    ) -> None:
        self.fx_graphs = fx_graphs
        annotated = any(map(is_annotated, fx_graphs.values())) or not fx_graphs
        # The calls of the run, where no hook annotated the nodes of the graph; else none.
        self.ran = frozenset() if annotated else frozenset(traced.call for traced in calls)
        self.path_by_id = {str(id(module)): path for path, module in model.named_modules()}
        self.counts = Counter(traced.call.path for traced in calls)
        self.calls = list(calls)
        self.traced = {traced.call: traced for traced in calls}
        self.depth = {traced.call: traced.depth for traced in calls}
        self.nested: dict[tuple[int, str], ModuleCall] = {}
        self.values: dict[Port, str] = {}
        self.replayed: set[torch.fx.Node] = set()
        """Nodes that compute a view again after its elements were written to; with the first one's annotations."""

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
        known = self.fx_graphs.get(graph) if isinstance(graph, ir.Graph) else None
        for fx_graph in dict.fromkeys([*([] if known is None else [known]), *_fx_graphs(graph)]):
            of_graph = {fx_node.name: fx_node for fx_node in fx_graph.nodes}
            fx_nodes = {**of_graph, **fx_nodes}
            owners.update(self._read_owners(fx_graph))
            self._read_ports({name: node for name, node in of_graph.items() if node not in self.replayed}, renamed)
        for node in graph:
            made_for = node.meta.pop("node", None) or fx_nodes.get(_fx_name(node))
            if made_for is not None:
                # The exporter makes tensors of the numbers of Python that an operation takes.
                number = made_for.target is torch.ops.aten.scalar_tensor.default and len(made_for.users) == 1
                node.meta[OPERATION] = self._operation(next(iter(made_for.users)) if number else made_for)
            if made_for in owners:
                set_owner(node, owners[made_for])

    def _operation(self, node: torch.fx.Node) -> object:
        """What is equal for all nodes that PyTorch's definition of an operation was decomposed into."""
        original, sources = node.meta.get("original_aten"), node.meta.get("from_node")
        if not sources or original in (None, node.target):
            return id(node)
        while sources[-1].from_node:
            sources = sources[-1].from_node
        return self._call_of(node), sources[-1].name, str(original)

    def _read_ports(self, fx_nodes: Mapping[str, torch.fx.Node], renamed: Mapping[str, str]) -> None:
        """Find the value of each marked node: the last tensor of the nodes that it was decomposed into.

        If a node with several results was decomposed, it is not known which node produces which result.
        """
        marks = {
            fx_node: ports
            for fx_node in fx_nodes.values()
            if (ports := (fx_node.meta.get("custom") or {}).get(PORTS_KEY))
        }
        counts = Counter(port for ports in marks.values() for port, _ in ports)
        for marked, ports in marks.items():
            for port, item in ports:
                fx_node = self._given_instead(marked, port)
                name, result = fx_node.name, fx_node.meta.get("val")
                if item is None and isinstance(result, torch.Tensor):
                    if self._fits(result, port):
                        self.values[port] = renamed.get(name, name)
                elif item is not None and isinstance(result, (list, tuple)) and counts[port] == 1:
                    items = [user.name for user in fx_node.users if user.args[1:] == (item,)]
                    value = items[0] if items else f"{name}__{item}"
                    self.values[port] = renamed.get(value, value)

    def _given_instead(self, node: torch.fx.Node, port: Port) -> torch.fx.Node:
        """The conversion after a node that an exporter computes in another type, if there is one; else the node.

        Before an operation that computes in another type there is a conversion, too, which gives no tensor of PyTorch.
        """
        (user,) = node.users if len(node.users) == 1 else (node,)
        spec, tensor = self._spec(port), user.meta.get("val")
        is_inserted = user.target is torch.ops.aten._to_copy.default and self._call_of(user) is None
        if not is_inserted or spec is None or not isinstance(tensor, torch.Tensor):
            return node
        return user if str(tensor.dtype).removeprefix("torch.") == spec.dtype else node

    def _fits(self, tensor: torch.Tensor, port: Port) -> bool:
        """Whether a value has the shape of PyTorch's tensor at a boundary, as far as it is known.

        A node that writes into a view is decomposed into the result and what it makes of the tensor behind the view.
        """
        spec = self._spec(port)
        if spec is None:
            return True
        pairs = list(zip(tensor.shape, spec.shape, strict=False))
        sizes = all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
        return tensor.ndim == len(spec.shape) and sizes

    def _spec(self, port: Port) -> TensorSpec | None:
        traced = self.traced.get(port.call)
        specs = () if traced is None else traced.inputs if port.side == "inputs" else traced.outputs
        return specs[port.position] if port.position < len(specs) else None

    def _read_owners(self, graph: torch.fx.Graph) -> dict[torch.fx.Node, Owner]:
        """The owner of each node of a graph, whose nodes are in the order in which they ran.

        A node that an exporter inserted as a replacement has no annotation. It gets the call of the nodes before and
        after it if they have the same one.
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
            if (later := self._later_call(call, node, owners)) is not None:
                self.replayed.add(node)
                call = later
            line = (node.meta.get("custom") or {}).get(LINE_KEY, "")
            owners[node] = Owner((call,), Evidence.EXACT, line)
            if call == before:
                owners.update(dict.fromkeys(unknown, Owner((call,), Evidence.DERIVED, line)))
            before, unknown = call, []
        # Nodes at a boundary between calls stay unknown; lineage infers their owners from their neighbors.
        return owners | {
            node: owners[source]
            for node in graph.nodes
            if node.target is operator.getitem and (source := node.args[0]) in owners
        }

    def _later_call(
        self, call: ModuleCall, node: torch.fx.Node, owners: Mapping[torch.fx.Node, Owner]
    ) -> ModuleCall | None:
        """The call that made an input of a node, if the node's own had ended before that one began."""
        traced = self.traced.get(call)
        if traced is None or traced.exit is None:
            return None
        sources = [self.traced.get(owners[source].call) for source in node.all_input_nodes if source in owners]
        later = [(s.enter, s.call) for s in sources if s is not None and s.enter is not None and s.enter > traced.exit]
        return max(later, key=operator.itemgetter(0))[1] if later else None

    def _call_of(self, fx_node: torch.fx.Node) -> ModuleCall | None:
        stack = fx_node.meta.get("nn_module_stack")
        call = annotated_call(fx_node)
        for key in stack or ():
            path = self.path_by_id.get(key.partition("@")[0])
            if path is not None:
                call = self._nested_call(fx_node.graph, key, path, call or ROOT)
        if call is None and stack:
            # Made around the root's forward: the exporter's flattening of inputs and outputs.
            return ROOT
        return call

    def _nested_call(self, graph: torch.fx.Graph, key: str, path: str, parent: ModuleCall) -> ModuleCall:
        ran = ModuleCall(path, int(key.partition("@")[2] or 0))
        if ran in self.ran:  # captured without hooks; the key numbers the calls of a module
            return ran
        identity = (id(graph), key)
        if identity not in self.nested:
            call = ModuleCall(path, self.counts[path])
            self.counts[path] += 1
            self.depth[call] = self.depth[parent] + 1
            self.calls.append(TracedCall(call, parent, self.depth[call], None, None))
            self.nested[identity] = call
        return self.nested[identity]


def annotated_call(node: torch.fx.Node) -> ModuleCall | None:
    """The call that ran while a node was captured, as the hooks annotated it."""
    annotation = node.meta.get("custom") or {}
    return ModuleCall.parse(annotation[ADDRESS_KEY]) if ADDRESS_KEY in annotation else None


def is_annotated(graph: torch.fx.Graph) -> bool:
    """Whether hooks ran while a graph was captured; true for a graph without operations."""
    operations = [node for node in graph.nodes if node.op == "call_function"]
    return not operations or any(ADDRESS_KEY in (node.meta.get("custom") or {}) for node in operations)


def _fx_graphs(graph: ir.Graph | ir.Function) -> list[torch.fx.Graph]:
    """The FX graphs that a graph was translated from: also of the condition of a loop, in its body and before it.

    A graph that a translation made has none.
    """
    return list(dict.fromkeys(fx_node.graph for node in graph if (fx_node := node.meta.get("node")) is not None))


def _own_nested(graph: ir.Graph, owner: Owner | None = None) -> None:
    """Assign the nodes of a nested graph that a translation made the owner of their enclosing node."""
    for node in graph:
        if owner is not None and owner_of(node) is None:
            set_owner(node, owner)
        for nested in nested_graphs(node):
            _own_nested(nested, owner_of(node))


def name_of_fx_node(fx_node: torch.fx.Node, ir_node: ir.Node) -> None:
    """Record at an ONNX node which FX node it was made for, and nothing else that ``torch.onnx`` records."""
    put_texts(ir_node, {NAME_SCOPES: repr([fx_node.name])})


def _fx_name(node: ir.Node) -> str:
    """The name of the FX node that an ONNX node was made for, as recorded by ``torch.onnx``."""
    scopes = text_of(node, NAME_SCOPES)
    return str(ast.literal_eval(scopes)[-1]) if scopes else ""
