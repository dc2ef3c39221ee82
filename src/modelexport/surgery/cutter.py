"""Cut the nodes of one module call out of a tagged graph, with everything that they need to run by themselves."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.errors import FileFormatError, UsageError
from modelexport.format import keys
from modelexport.format.call_tree import call_tree_entries, encode_call_tree
from modelexport.format.node_tags import read_source_tags, write_tags
from modelexport.graph.boundaries import CallBoundary, find_boundaries
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.owners import OWNER, owner_of

if TYPE_CHECKING:
    from modelexport.tagged.file import TaggedFile


@dataclass
class Cut:
    """A call as a model of its own; changing it leaves the model that it was cut out of as it is."""

    model: ir.Model
    inputs: list[ir.Value]
    """The values in the whole model that the inputs stand for, in the same order."""
    outputs: list[ir.Value]
    borrowed: int
    """How many nodes belong to other calls."""

    def reorder(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
        """Put some of the inputs and outputs, named by the values that they stand for, first and in this order."""
        self.inputs = _permute(self.model.graph.inputs, self.inputs, inputs)
        self.outputs = _permute(self.model.graph.outputs, self.outputs, outputs)

    def rename(self, names: Mapping[ir.Value, str]) -> None:
        """Rename inputs, named by the values that they stand for. One whose name another value has keeps its own."""
        graph = self.model.graph
        taken = {value.name for node in graph.all_nodes() for value in (*node.inputs, *node.outputs) if value}
        for value, source in zip(graph.inputs, self.inputs, strict=True):
            if source in names and names[source] not in taken:
                value.name = names[source]
                taken.add(value.name)


def _permute(new: MutableSequence[ir.Value], old: list[ir.Value], first: Sequence[ir.Value]) -> list[ir.Value]:
    """Sort both lists alike, in place and returned: the members of ``first`` in its order, then the others."""
    rank = {value: i for i, value in enumerate(first)}
    order = sorted(range(len(old)), key=lambda i: rank.get(old[i], len(rank)))
    new[:] = [new[i] for i in order]
    return [old[i] for i in order]


class Cutter:
    """Cuts calls out of one model; what all of them need to know is found out once, in time linear in the model."""

    def __init__(self, tagged: TaggedFile) -> None:
        self._tagged = tagged
        self._model = tagged.model
        self._position = {node: i for i, node in enumerate(tagged.nodes)}
        self._enclosing = {graph: node for node in tagged.nodes for graph in nested_graphs(node)}
        self._in_functions = {node for function in self._model.functions.values() for node in function.all_nodes()}
        self._own: dict[ModuleCall, list[ir.Node]] = defaultdict(list)
        for node in tagged.nodes:
            owner = owner_of(node)
            for call in owner.calls if owner is not None else ():
                self._own[call].append(node)
        self._constant: dict[ir.Node, bool] = {}
        self._repeatable: dict[ir.OperatorIdentifier, bool] = {}

    @cached_property
    def boundaries(self) -> Mapping[ModuleCall, CallBoundary]:
        """The boundary of every call in the whole model."""
        return find_boundaries(self._model, self._tagged.calls)

    def has_nodes(self, call: ModuleCall) -> bool:
        """Whether a call or one inside it owns a node."""
        return any(self._own.get(inside) for inside in self._inside(call))

    def cut(self, call: ModuleCall) -> Cut:
        """A call that has nodes, as a model of its own.

        Raises:
            UsageError: Its nodes are in the body of a function.
            FileFormatError: A value at its boundary has no type, not even one that can be inferred.
        """
        inside = set(self._inside(call))
        own = {node for each in inside for node in self._own.get(each, ())}
        if any(node in self._in_functions for node in own):
            raise UsageError(
                f"nodes of '{call}' are in functions of {self._tagged.path}: use `modelexport inline` first"
            )
        boundary = self.boundaries[call]
        self._check_types(call, [*boundary.inputs, *boundary.outputs])
        constants = {value: None for value in boundary.inputs if self._is_constant(value)}
        borrowed = set(self._behind(constants))
        others = [value for value in boundary.inputs if value not in constants]
        arguments = {value: None for value in others if not _is_size(value)}
        inputs: list[ir.Value] = []
        renewed: dict[ir.Value, _Renewed] = {}
        for value in others:
            found = self._size(value, own, arguments) if value not in arguments else None
            if found is None:
                inputs.append(value)
            else:
                borrowed |= found[0]
                renewed |= found[1]
        graph = self._copy(own | borrowed, [*inputs, *renewed], list(boundary.outputs))
        for renewal in renewed.values():
            _read_off(graph, renewal, graph.inputs.pop(len(inputs)), graph.inputs[inputs.index(renewal.source)])
        model = self._wrap(graph, call, inside)
        return Cut(model, inputs, list(boundary.outputs), len(borrowed - own) + len(renewed))

    def _inside(self, call: ModuleCall) -> Iterator[ModuleCall]:
        pending = [call]
        while pending:
            call = pending.pop()
            yield call
            pending.extend(self._tagged.calls.children[call])

    def _check_types(self, call: ModuleCall, values: Iterable[ir.Value]) -> None:
        for value in values:
            if value.type is None:
                passes.ShapeInferencePass()(self._model)
            if value.type is None:
                raise FileFormatError(
                    f"{self._tagged.path} does not say the type of '{value.name}', which '{call}' takes or returns, "
                    "and it cannot be inferred: export it again"
                )

    # --- what else is needed ---

    def _is_constant(self, value: ir.Value) -> bool:
        """Whether a value depends on initializers and constants alone."""
        pending = [producer] if (producer := value.producer()) is not None else []
        while pending:
            node = pending[-1]
            if node not in self._constant:
                taken = [(v, v.producer()) for v in values_taken(node) if not v.is_initializer()]
                known = [False if p is None else self._constant.get(p) for _, p in taken]
                if False in known or not self._is_repeatable(node):
                    self._constant[node] = False
                elif None in known:
                    pending.extend(p for (_, p), k in zip(taken, known, strict=True) if p is not None and k is None)
                    continue
                else:
                    self._constant[node] = True
            pending.pop()
        return value.is_initializer() or (producer is not None and self._constant[producer])

    def _behind(self, values: Iterable[ir.Value]) -> Iterator[ir.Node]:
        """The nodes that compute constant values."""
        pending = [producer for value in values if (producer := value.producer()) is not None]
        seen = set(pending)
        while pending:
            node = pending.pop()
            yield node
            for value in values_taken(node):
                if (producer := value.producer()) is not None and producer not in seen:
                    seen.add(producer)
                    pending.append(producer)

    def _size(
        self, value: ir.Value, own: set[ir.Node], arguments: Mapping[ir.Value, None]
    ) -> tuple[set[ir.Node], dict[ir.Value, _Renewed]] | None:
        """How to compute a size from the sizes of the cut's own values: which nodes it takes, and what to renew.

        ``None`` when it depends on more than sizes and constants, or on a size that none of the inputs has.
        """
        nodes: set[ir.Node] = set()
        renewed: dict[ir.Value, _Renewed] = {}
        pending = [value]
        while pending:
            current = pending.pop()
            producer = current.producer()
            if current.is_initializer() or producer in nodes:
                continue
            if producer is None or producer in own or not self._is_repeatable(producer):
                return None
            if producer.op_identifier() == ("", "Shape", ""):
                (measured,) = producer.inputs
                assert measured is not None
                if measured in arguments or measured.producer() in own:
                    nodes.add(producer)
                elif (renewal := _renew(producer, measured, arguments)) is not None:
                    renewed[current] = renewal
                else:
                    return None
                continue
            nodes.add(producer)
            pending.extend(values_taken(producer))
        return nodes, renewed

    def _is_repeatable(self, node: ir.Node) -> bool:
        """Whether a node computes the same each time: its operator is known and not random, nor is anything in it."""
        operator = node.op_identifier()
        if operator not in self._repeatable:
            function = self._model.functions.get(operator)
            if function is not None:
                self._repeatable[operator] = all(self._is_repeatable(inner) for inner in function)
            else:
                self._repeatable[operator] = _is_deterministic(operator, self._model.opset_imports.get(node.domain))
        return self._repeatable[operator] and all(
            self._is_repeatable(inner) for graph in nested_graphs(node) for inner in graph
        )

    # --- the copy ---

    def _copy(self, nodes: set[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Graph:
        """A flat graph of copies of these nodes; what a node among them holds stays in it."""
        chosen = [node for node in sorted(nodes, key=self._position.__getitem__) if not self._is_held(node, nodes)]
        weights = {value: None for node in chosen for value in values_taken(node) if value.is_initializer()}
        whole = self._model.graph
        return ir.GraphView(
            inputs,
            outputs,
            nodes=chosen,
            initializers=tuple(weights),
            doc_string=whole.doc_string,
            opset_imports=whole.opset_imports,
            name=whole.name,
            metadata_props=whole.metadata_props,
        ).clone()

    def _is_held(self, node: ir.Node, nodes: set[ir.Node]) -> bool:
        enclosing = self._enclosing_node(node)
        while enclosing is not None:
            if enclosing in nodes:
                return True
            enclosing = self._enclosing_node(enclosing)
        return False

    def _enclosing_node(self, node: ir.Node) -> ir.Node | None:
        return self._enclosing.get(node.graph) if isinstance(node.graph, ir.Graph) else None

    def _wrap(self, graph: ir.Graph, call: ModuleCall, inside: set[ModuleCall]) -> ir.Model:
        """A model of a graph, with the functions it uses, the whole's metadata, and the tags that concern it."""
        whole = self._model
        functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        nodes = list(graph.all_nodes())
        users = set(self._tagged.calls.stack(call)) | inside
        for node in nodes:
            users.update(_keep_owners(node, inside, self._tagged.tags))
        pending = nodes
        while pending:
            called = {node.op_identifier() for node in pending} - functions.keys()
            found = {key: whole.functions[key] for key in called if key in whole.functions}
            functions |= found
            pending = [node for function in found.values() for node in function.all_nodes()]
        for value in graph.initializers.values():
            if keys.HIERARCHY_TAGS in value.metadata_props:
                tags = {tag: None for node, _ in value.uses() for tag in read_source_tags(node.metadata_props)}
                value.metadata_props[keys.HIERARCHY_TAGS] = json.dumps(list(tags))
        calls = {above for user in users for above in self._tagged.calls.stack(user)}
        entries = call_tree_entries(
            (traced for traced in self._tagged.calls if traced.call in calls), self._tagged.tags.__getitem__
        )
        tree = {keys.CALL_TREE: encode_call_tree(entries)}
        return ir.Model(
            graph,
            ir_version=whole.ir_version,
            producer_name=whole.producer_name,
            producer_version=whole.producer_version,
            domain=whole.domain,
            model_version=whole.model_version,
            doc_string=whole.doc_string,
            functions=list(functions.values()),
            metadata_props={**whole.metadata_props, **tree},
        )


def values_taken(node: ir.Node) -> Iterator[ir.Value]:
    """The values that a node takes from around it, those that its nested graphs use included."""
    yield from (value for value in node.inputs if value is not None)
    for graph in nested_graphs(node):
        for inner in graph:
            yield from (value for value in values_taken(inner) if value.graph is not graph)
        yield from (value for value in graph.outputs if value.graph is not graph)


def _is_deterministic(operator: ir.OperatorIdentifier, version: int | None) -> bool:
    domain, op_type, _ = operator
    try:
        known = onnx.defs.get_schema(op_type, version or 1, domain)
    except onnx.defs.SchemaError:  # an operator that onnx does not know may do anything
        return False
    # onnx has it, its type stubs do not.
    determinism = known.node_determinism  # type: ignore[attr-defined]
    return bool(determinism != onnx.defs.OpSchema.NodeDeterminism.NonDeterministic)


def _is_size(value: ir.Value) -> bool:
    """Whether a value has the form of a size or of a list of sizes: integers, at most one axis, of fixed length."""
    if value.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or value.shape is None:
        return False
    return len(value.shape) <= 1 and value.shape.is_static()


@dataclass(frozen=True, slots=True)
class _Renewed:
    """A ``Shape`` of a value outside the cut, and where an input of the cut has the same sizes."""

    node: ir.Node
    source: ir.Value
    start: int


def _renew(node: ir.Node, measured: ir.Value, arguments: Iterable[ir.Value]) -> _Renewed | None:
    """Sizes of the same name are equal everywhere in a graph."""
    wanted = _sizes(measured)
    if wanted is None:
        return None
    wanted = wanted[slice(_int(node, "start"), _int(node, "end"))]
    if None in wanted:
        return None
    for source in arguments:
        sizes = _sizes(source) or []
        for start in range(len(sizes) - len(wanted) + 1):
            if sizes[start : start + len(wanted)] == wanted:
                return _Renewed(node, source, start)
    return None


def _sizes(value: ir.Value) -> list[int | str | None] | None:
    if value.shape is None:
        return None
    return [size if isinstance(size, int) else size.value for size in value.shape]


def _int(node: ir.Node, name: str) -> int | None:
    return node.attributes[name].as_int() if name in node.attributes else None


def _read_off(graph: ir.Graph, renewal: _Renewed, size: ir.Value, source: ir.Value) -> None:
    """Make ``size``, an input no longer, the size of another input."""
    assert size.shape is not None
    (length,) = size.shape.numpy()
    node = ir.Node(
        "",
        "Shape",
        [source],
        [ir.AttrInt64("start", renewal.start), ir.AttrInt64("end", renewal.start + length)],
        outputs=[size],
        name=renewal.node.name,
        metadata_props=dict(renewal.node.metadata_props),
    )
    node.meta.update(renewal.node.meta)
    graph.insert_before(graph[0], node)


def _keep_owners(node: ir.Node, inside: set[ModuleCall], tags: Mapping[ModuleCall, str]) -> tuple[ModuleCall, ...]:
    """Of several owners leave those that are inside the cut, if any is; returns the owners."""
    owner = owner_of(node)
    if owner is None:
        return ()
    kept = [i for i, call in enumerate(owner.calls) if call in inside]
    if not kept or len(kept) == len(owner.calls):
        return owner.calls
    calls = tuple(owner.calls[i] for i in kept)
    properties = node.metadata_props
    source_tags = read_source_tags(properties)
    write_tags(properties, [call.address for call in calls], [source_tags[i] for i in kept], owner.evidence)
    properties[keys.NAMESPACE] = tags[calls[0]][1:]
    node.meta[OWNER] = Owner(calls, owner.evidence)
    return calls
