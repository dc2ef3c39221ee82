"""``replace``: replace modules of a tagged file by another model, an operator, or nothing; the rest is unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.core.result_display import Written
from modelexport.errors import UsageError
from modelexport.files.path_or_model import Source, as_path
from modelexport.files.replaceable_files import check_writable
from modelexport.format import keys
from modelexport.graph.missing_types import infer_shapes
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes, with_nested
from modelexport.graph.parameter_plans import adapter_input, listed_entries, record_state_dict, used_keys
from modelexport.graph.properties import put_texts, record
from modelexport.regions import Sharing
from modelexport.regions.graph_cutter import Cut, Cutter
from modelexport.regions.region import Region, put, weights_of
from modelexport.regions.shared_files import save_edited
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools.cut.call_interfaces import CallInterface, interface_of
from modelexport.tools.cut.edited_calls import EditedCalls
from modelexport.tools.cut.grafted_modules import Graft, grafted_facts, rule_of
from modelexport.tools.cut.replaced_entries import write_keys
from modelexport.tools.cut.substitutes import FromModel, Parts, Site, Substitute
from modelexport.tools.cut.substitutes.custom_operator import canonical, is_weight
from modelexport.tools.cut.substitutes.from_model import check_opsets


class ReplacedCall(msgspec.Struct, frozen=True):
    """One call that was replaced."""

    call: str
    tag: str
    removed: int
    """The number of removed nodes of the old module."""
    added: int
    inputs: list[str]
    """Values of the whole model that the new nodes use, without weights."""
    outputs: list[str]


class Replaced(Written, msgspec.Struct, frozen=True, kw_only=True):
    """A file in which modules were replaced."""

    path: str
    by: str
    calls: list[ReplacedCall]
    kept: int
    """The number of unchanged nodes."""
    weights: list[str]
    """The weights files beside it."""


def replace(
    path: Source,
    selectors: Sequence[str],
    substitute: Substitute,
    output: str | Path,
    *,
    every_call: bool = True,
    weights: Sharing = "auto",
) -> Replaced:
    """Write a tagged file with other nodes in the place of modules.

    The nodes outside the modules are the same, byte for byte, and so are the names of the values that enter and leave
    the modules. New nodes carry the tag of the module and ``modelexport.replaced``, which names the substitute.
    The documents beside the file are written for the new one.

    Args:
        selectors: The modules: see :mod:`modelexport.core.selectors`.
        substitute: The replacement.
        every_call: Replace all calls of a selected module, or only the calls that the selectors name.
        weights: How external weights are handled.

    Raises:
        UsageError: A selector matches nothing, a module has no nodes, or the replacement does not fit.
        FileFormatError: A file cannot be read.
        OutputError: ``output`` cannot be written. An existing file of that name is unchanged.
    """
    path, output = as_path(path), Path(output)
    check_writable(output, [path])
    tagged = read_tagged(path)
    facts, replacer = tagged.facts(), _Replacer(tagged)
    calls = replacer.calls(selectors, every_call)
    if isinstance(substitute, FromModel):
        check_opsets(tagged.model, substitute.model, substitute.path)
        substitute.rule = rule_of(facts) if facts is not None else None
    sites = [replacer.call_before(call, copied=substitute.keep_body) for call in calls]
    if isinstance(substitute, FromModel):
        replacer.clear([site for site in sites if not substitute.is_part_of(site.call, replacer.edited.tags)])
    replaced = [replacer.replace(site, substitute) for site in sites]
    replacer.finish()
    kept = sum(id(node) in replacer.before for node in all_nodes(tagged.model))
    edited = dataclasses.replace(tagged, call_tags=replacer.edited.tags)
    if facts is not None:
        facts = grafted_facts(facts, replacer.grafts, edited.call_tags).moved(replacer.now)
    with checked_and_written(output.parent, [tagged.path]) as staging:
        files = save_edited(edited, facts, output, staging, weights)
    return Replaced(path=str(output), by=substitute.name, calls=replaced, kept=kept, weights=files)


@dataclass(frozen=True)
class _CallBefore:
    """A call and its boundary before anything was replaced."""

    call: ModuleCall
    region: Region
    """Without constants and sizes among its inputs."""
    borrowed: list[ir.Value]
    """The weights from which nodes of other calls compute constants for it, such as a weight of one in 8 bits."""
    cut: Cut | None


class _Replacer:
    """Replaces calls in one model, in place."""

    def __init__(self, tagged: TaggedFile) -> None:
        self._tagged = tagged
        self._model = tagged.model
        self._cutter = Cutter(tagged)
        self.now: dict[ir.Value, ir.Value] = {}
        """Values that replaced modules computed, to the values that replace them."""
        self.edited = EditedCalls(tagged.call_tags)
        self.grafts: list[Graft] = []
        self.replaced: list[ModuleCall] = []
        self._keys: dict[ir.Value, tuple[str, ...]] = {}
        self._entries = dict(listed_entries(self._model) or {})
        self._record: dict[str, str] = dict(self._model.meta.get(keys.REPLACED, {}))
        self._dirty: set[ir.Value] = set()
        self.before = {id(node) for node in tagged.nodes}

    def calls(self, selectors: Sequence[str], every_call: bool) -> list[ModuleCall]:
        """The calls to replace, without those inside another of them."""
        selected = dict.fromkeys(self._tagged.select(*selectors).calls)
        if every_call:
            paths = {call.path for call in selected}
            selected.update((traced.call, None) for traced in self._tagged.calls if traced.call.path in paths)
        outermost = [call for call in selected if not any(c in selected for c in self._tagged.calls.stack(call)[:-1])]
        replaceable = [call for call in outermost if self._cutter.has_nodes(call)]
        if not replaceable:
            raise UsageError(
                f"'{outermost[0]}' has no nodes in {self._tagged.path}: it returns its input, or was folded away; name "
                "the module that it is in"
            )
        return replaceable

    def call_before(self, call: ModuleCall, *, copied: bool) -> _CallBefore:
        """A call and its boundary, before anything is replaced."""
        region = self._cutter.region_of(call)
        if not region.outputs:
            raise UsageError(f"nothing outside '{call}' uses what it computes: there is nothing to replace it by")
        if any(value.type is None for value in (*region.inputs, *region.outputs)):
            infer_shapes(self._model)  # most exporters of others leave types out
        needs = self._cutter.needs(region)
        self._graph_of(call, region)
        cut = self._cutter.cut_call(call) if copied else None
        recomputed = needs.recomputed - region.nodes.keys()
        weights = weights_of(node for node in self._tagged.nodes if node in recomputed)
        borrowed = [value for value in weights if is_weight(value)]
        return _CallBefore(call, Region(region.nodes, needs.inputs, region.outputs), borrowed, cut)

    def _interface(self, place: _CallBefore, inside: ir.Graph | None) -> CallInterface:
        """The interface of a call with the values that are there now."""
        usable: dict[str, ir.Value] = {}
        """The values that nodes in the place of the call can use, by name."""
        while inside is not None:
            computed = (value for node in inside if node not in place.region.nodes for value in node.outputs)
            values = (*inside.inputs, *inside.initializers.values(), *computed)
            usable = {value.name or "": value for value in values} | usable
            around = self._cutter.enclosing.get(inside)
            inside = around.graph if around is not None and isinstance(around.graph, ir.Graph) else None
        sides = place.region.inputs, place.region.outputs
        inputs, outputs = ([self.now.get(value, value) for value in values] for values in sides)
        interface = interface_of(self._tagged, place.call, inputs, outputs, usable)
        if place.cut is not None:
            place.cut.inputs = [self.now.get(value, value) for value in place.cut.inputs]
            place.cut.outputs = [self.now.get(value, value) for value in place.cut.outputs]
            place.cut.reorder(interface.inputs, interface.outputs)
        return interface

    def replace(self, place: _CallBefore, substitute: Substitute) -> ReplacedCall:
        """Replace a call."""
        graph = self._graph_of(place.call, place.region)
        weights = weights_of(place.region.nodes)
        site = Site(self._interface(place, graph), list(dict.fromkeys([*weights, *place.borrowed])), place.cut)
        parts = substitute.build(site, self.edited, self._owners_beside([place]))
        outputs, nodes = site.interface.outputs, [each for node in parts.nodes for each in with_nested(node)]
        for node in nodes:
            put_texts(node, {keys.REPLACED: substitute.name}, only=True)
        owners = dict.fromkeys(nodes, Owner((place.call,))) | dict(parts.owners)
        region = Region(place.region.nodes, site.interface.inputs, outputs)
        try:
            removed = put(
                self._model, parts.nodes, parts.outputs, region, owners, weights=parts.weights, label=str(place.call)
            )
        except ValueError as error:
            raise UsageError(
                f"'{place.call}' cannot be replaced as a whole: it takes values that are computed from its own; "
                "replace the modules in it"
            ) from error
        for old, new in zip(outputs, parts.outputs, strict=True):
            self.now.update((value, new) for value, now in list(self.now.items()) if now is old)
            self.now[old] = new
        self._dirty.update(weights, weights_of(nodes))
        self._record[str(place.call)] = substitute.name
        self._merge(parts, place.call)
        self.replaced.append(place.call)
        if parts.graft is not None:
            self.grafts.append(parts.graft)
        return ReplacedCall(
            str(place.call),
            self.edited.tags.tag(place.call),
            removed,
            len(nodes),
            [value.name or "" for value in Region.of(parts.nodes).inputs],
            [value.name or "" for value in parts.outputs],
        )

    def clear(self, places: Sequence[_CallBefore]) -> None:
        """Remove the calls inside calls that are replaced, so that new calls get their numbers in their order."""
        beside = self._owners_beside(places)
        for place in places:
            self.edited.remove_inside(place.call, beside)

    def _owners_beside(self, places: Sequence[_CallBefore]) -> set[ModuleCall]:
        """The calls that own nodes outside of some calls, or share nodes with them, which may remain."""
        nodes = {node for place in places for node in place.region.nodes}
        inside = {call for place in places for call in self._tagged.calls.inside(place.call)}
        owners = ((node, owner) for node in all_nodes(self._model) if (owner := owner_of(node)) is not None)
        beside = (owner for node, owner in owners if node not in nodes or not inside.issuperset(owner.calls))
        return {call for owner in beside for call in owner.calls}

    def _graph_of(self, call: ModuleCall, region: Region) -> ir.Graph:
        """The one graph that the nodes of a call are in."""
        graphs = {node.graph for node in region.nodes if not self._cutter.is_nested_in(node, region.nodes)}
        if len(graphs) != 1:
            raise UsageError(f"'{call}' ran both inside and outside of a branch: replace the calls one by one")
        (graph,) = graphs
        assert isinstance(graph, ir.Graph)
        return graph

    def _merge(self, parts: Parts, call: ModuleCall) -> None:
        """Add weights, functions and opsets to the model."""
        for value, names in parts.weights.items():
            self._keys[value] = names
            if value.name not in self._model.graph.initializers:
                self._model.graph.initializers.add(value)
                if adapter_input(value) is not None:
                    self._model.graph.inputs.append(value)
            self._dirty.add(value)
        self._entries.update(parts.entries)
        for function in parts.functions:
            there = self._model.functions.setdefault(function.identifier(), function)
            if there is function:
                continue
            if canonical(there) != canonical(function):
                raise UsageError(
                    f"'{call}' computes something else than the {function.domain}:{function.name} that is there, but "
                    "one operator has one body: give an operator of another name"
                )
            for mine, other in zip(there, function, strict=True):  # a node of a shared body belongs to all calls
                if (owner := owner_of(mine)) is not None and (more := owner_of(other)) is not None:
                    set_owner(mine, dataclasses.replace(owner, calls=tuple(dict.fromkeys([*owner.calls, *more.calls]))))
        for domain, version in parts.opsets.items():
            self._model.opset_imports.setdefault(domain, version)

    def finish(self) -> None:
        """Update the metadata."""
        write_keys(self._model, self._dirty, self._keys, [place.path for place in self.replaced if place.path])
        self._release()
        used = used_keys(self._model)
        entries = {key: msgspec.structs.replace(entry, used=key in used) for key, entry in self._entries.items()}
        record_state_dict(self._model, entries)
        record(self._model, keys.REPLACED, self._record)

    def _release(self) -> None:
        """Take replaced calls from the owners of the nodes that they shared with others: these alone use them now.

        What a replaced call computes, its new nodes compute. A node of before that is still there is used by its other
        owners, and is not in the call, nor in one inside it.
        """
        gone = {call for replaced in self.replaced for call in self._tagged.calls.inside(replaced)}
        used: set[ModuleCall] = set()
        for node in all_nodes(self._model):
            owner = owner_of(node)
            if owner is None:
                continue
            left = tuple(call for call in owner.calls if call not in gone)
            if left and left != owner.calls and id(node) in self.before:
                owner = dataclasses.replace(owner, calls=left)
                set_owner(node, owner)
            used.update(owner.calls)
        for call in self.replaced:
            self.edited.remove_inside(call, used)
