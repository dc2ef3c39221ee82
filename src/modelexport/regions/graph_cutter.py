"""Cuts regions out of a tagged graph as models, with everything that they need to run by themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir
from msgspec.structs import replace

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.tags import RecordedTags
from modelexport.errors import FileFormatError, UsageError
from modelexport.format import keys
from modelexport.graph.copies import copy_of, model_like
from modelexport.graph.missing_types import infer_shapes
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import enclosing_nodes, nodes_behind, required_inputs
from modelexport.graph.parameter_plans import listed_entries, record_state_dict, used_keys
from modelexport.graph.properties import properties_of, put_texts, record, text_of
from modelexport.regions.recomputed_values import Recomputable, SizeFromInput, insert_shape_node, is_size
from modelexport.regions.region import Region, weights_of
from modelexport.tagged.encodings.encoded import encoded

if TYPE_CHECKING:
    from modelexport.tagged.file import TaggedFile


@dataclass
class Cut:
    """A region as a model of its own; changing it does not change the model that it was cut out of."""

    model: ir.Model
    inputs: list[ir.Value]
    """The values in the whole model that correspond to the required inputs, in the same order."""
    outputs: list[ir.Value]
    borrowed: int
    """The number of nodes that belong to other calls."""

    def reorder(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
        """Put some of the inputs and outputs, given as values of the whole model, first and in this order."""
        self.inputs = _permute(self.model.graph.inputs, self.inputs, inputs)
        self.outputs = _permute(self.model.graph.outputs, self.outputs, outputs)

    def rename(self, names: Mapping[ir.Value, str]) -> None:
        """Rename inputs, given as values of the whole model. An input keeps its name if the new one is taken."""
        graph = self.model.graph
        taken = {value.name for node in graph.all_nodes() for value in (*node.inputs, *node.outputs) if value}
        for value, source in zip(required_inputs(self.model), self.inputs, strict=True):
            if source in names and names[source] not in taken:
                value.name = names[source]
                taken.add(value.name)


def _permute(new: MutableSequence[ir.Value], old: list[ir.Value], first: Sequence[ir.Value]) -> list[ir.Value]:
    """Sort both lists in the same way, in place, and return the second: ``first`` in its order, then the others.

    What the new list has beyond the old one stays behind it.
    """
    rank = {value: i for i, value in enumerate(first)}
    order = sorted(range(len(old)), key=lambda i: rank.get(old[i], len(rank)))
    new[:] = [*(new[i] for i in order), *new[len(old) :]]
    return [old[i] for i in order]


@dataclass(frozen=True)
class Needs:
    """The requirements of a region besides its weights."""

    inputs: list[ir.Value]
    """Values that become inputs."""
    recomputed: set[ir.Node]
    """Nodes of other calls that are recomputed."""
    sizes_from_inputs: dict[ir.Value, SizeFromInput]
    """Sizes of values outside the cut, which are read from the inputs."""


class Cutter:
    """Cuts regions out of one model; shared facts are computed once, in time linear in the size of the model."""

    def __init__(self, tagged: TaggedFile) -> None:
        self._tagged = tagged
        self._model = tagged.model
        self._position = {node: i for i, node in enumerate(tagged.nodes)}
        self.enclosing = enclosing_nodes(tagged.nodes)
        self._in_functions = {
            node: name for name, function in self._model.functions.items() for node in function.all_nodes()
        }
        self.recomputable = Recomputable(self._model)

    def has_nodes(self, call: ModuleCall) -> bool:
        """Whether a call or one inside it owns a node."""
        return any(True for _ in self._tagged.nodes_of(call))

    def region_of(self, call: ModuleCall) -> Region:
        """The nodes of a call and of the calls inside it; for a function that is called in them, only the call node."""
        nodes = dict.fromkeys(self._tagged.nodes_of(call))
        called = {node.op_identifier() for node in nodes}
        nodes = {node: None for node in nodes if self._in_functions.get(node) not in called}
        if any(node in self._in_functions for node in nodes):
            raise UsageError(
                f"nodes of '{call}' are in functions of {self._tagged.path}: use `modelexport inline` first"
            )
        boundary = self._tagged.boundaries[call]
        return Region(nodes, list(boundary.inputs), list(boundary.outputs))

    def cut_call(self, call: ModuleCall) -> Cut:
        """A call that has nodes, as a model of its own.

        Raises:
            UsageError: Its nodes are in the body of a function.
            FileFormatError: A value at its boundary has no type, and none can be inferred.
        """
        region, calls = self.region_of(call), self._tagged.calls
        if call == self._tagged.top:  # it also returns inputs and weights, which no node computes
            returned = list(self._model.graph.outputs)
            taken = [value for value in required_inputs(self._model) if value in (*region.inputs, *returned)]
            region = Region(region.nodes, taken, returned)
        return self.cut(region, f"'{call}'", inside=calls.inside(call), above=calls.stack(call))

    def needs(self, region: Region) -> Needs:
        """What a region needs for the values that it takes from other nodes, or returns without computing them.

        Constants are recomputed, and so are sizes that depend on the sizes of values that are needed anyway.
        """
        elsewhere = [value for value in region.outputs if value.producer() not in region.nodes]
        constant = {value for value in (*region.inputs, *elsewhere) if self.recomputable.is_constant(value)}
        computed = [value for value in region.inputs if value not in constant]
        needs = Needs([], set(nodes_behind(constant)), {})
        arguments = {value: None for value in computed if not is_size(value)}
        for value in computed:
            repeated = self.recomputable.size(value, region.nodes, arguments) if value not in arguments else None
            if repeated is None:
                needs.inputs.append(value)
            else:
                needs.recomputed.update(repeated[0])
                needs.sizes_from_inputs.update(repeated[1])
        return needs

    def cut(self, region: Region, what: str, *, inside: set[ModuleCall], above: Iterable[ModuleCall]) -> Cut:
        """Copies of nodes, with everything that they need, as a flat model; nodes in their nested graphs stay nested.

        Nodes, values and initializers keep their names; :meth:`Cut.rename` changes those of inputs.

        Args:
            what: A description of the region, for messages.
            inside: The calls that the nodes belong to; other owners are removed if one of these remains.
            above: Calls that stay in the call tree even if they own no node of it.
        """
        needs, outputs = self.needs(region), region.outputs
        values = [*needs.inputs, *outputs]
        if untyped := [v for v in values if v.type is None and text_of(v, keys.VALUE_TYPE) is None]:
            infer_shapes(self._model)
            if unknown := [value.name for value in untyped if value.type is None]:
                raise FileFormatError(
                    f"{self._tagged.path} has no type for '{unknown[0]}', which {what} takes or returns, and it cannot "
                    "be inferred: export it again"
                )
        copied, whole = needs.recomputed.union(region.nodes), self._model.graph
        chosen = [
            node for node in sorted(copied, key=self._position.__getitem__) if not self.is_nested_in(node, copied)
        ]
        weights = weights_of(chosen) | {value: None for value in outputs if value.is_initializer()}
        graph = copy_of(
            ir.GraphView(
                [*needs.inputs, *needs.sizes_from_inputs],
                outputs,
                nodes=chosen,
                initializers=tuple(weights),
                doc_string=whole.doc_string,
                opset_imports=whole.opset_imports,
                name=whole.name,
            )
        )
        put_texts(graph, properties_of(whole))
        for renewal in needs.sizes_from_inputs.values():
            size = graph.inputs.pop(len(needs.inputs))
            insert_shape_node(graph, renewal, size, graph.inputs[needs.inputs.index(renewal.source)])
        optional = {value.name for value in whole.inputs if value.is_initializer()}
        graph.inputs.extend(value for name, value in graph.initializers.items() if name in optional)
        model = self._wrap(graph, inside, above)
        others = len(needs.recomputed - region.nodes.keys()) + len(needs.sizes_from_inputs)
        return Cut(model, list(needs.inputs), list(outputs), others)

    def is_nested_in(self, node: ir.Node, nodes: Container[ir.Node]) -> bool:
        """Whether a node is in a nested graph of one of these nodes."""
        graph = node.graph
        while isinstance(graph, ir.Graph) and (around := self.enclosing.get(graph)) is not None:
            if around in nodes:
                return True
            graph = around.graph
        return False

    def _wrap(self, graph: ir.Graph, inside: set[ModuleCall], above: Iterable[ModuleCall]) -> ir.Model:
        """A model of a graph, with its functions, the metadata of the whole model, and the tags of its calls."""
        whole = self._model
        functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        pending, users = list(graph.all_nodes()), {*above, *inside}
        while pending:
            for node in pending:
                if (owner := owner_of(node)) is not None:
                    kept = tuple(call for call in owner.calls if call in inside) or owner.calls
                    set_owner(node, dataclasses.replace(owner, calls=kept))
                    users.update(kept)
            called = {node.op_identifier() for node in pending} - functions.keys()
            copied = {key: copy_of(whole.functions[key]) for key in called if key in whole.functions}
            functions |= copied
            pending = [node for function in copied.values() for node in function.all_nodes()]
        calls = {above for user in users for above in self._tagged.calls.stack(user)}
        known = self._tagged.call_tags
        tags = RecordedTags(CallTree(tuple(traced for traced in known.calls if traced.call in calls)), known.facts)
        is_whole = [value.name for value in graph.outputs] == [value.name for value in whole.graph.outputs]
        model = encoded(model_like(whole, graph, functions.values()), tags)
        for key in () if is_whole else (keys.OUTPUTS, keys.EXPOSED):
            record(model, key, None)
        if (listed := listed_entries(whole)) is not None:
            used = used_keys(model)
            entries = {key: replace(entry, used=entry.used and key in used) for key, entry in listed.items()}
            record_state_dict(model, entries)
        return model
