"""What the documents and the metadata of a file should say, compared with what they say.

They are made a second time, by the functions that write them at export, from what is known apart from them: the graph
and its owners, the modules of the model, and PyTorch's run. What then differs is a false claim. What nothing shows
stays as it is claimed: where modules were replaced, for example, which of them share parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ROOT, CallTree, ModuleCall, Side, TracedCall
from modelexport.core.json_decoding import decode_json
from modelexport.core.module_tree import ModuleTree
from modelexport.core.tags import CallFacts, CallTags, Granularity, RecordedTags, Tags, class_in_tag
from modelexport.core.text import shortened
from modelexport.errors import FileFormatError, UsageError
from modelexport.format import documents, keys
from modelexport.format.node_tags import owner_properties
from modelexport.graph.kept_outputs import exposed_outputs, requested_outputs
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import initializers, nested_graphs, sizes_of
from modelexport.graph.parameter_plans import state_dict_of, used_keys
from modelexport.graph.properties import properties_of, text_of
from modelexport.graph.size_symbols import SYMBOL, put_size
from modelexport.graph.undetermined_ranks import undetermined_ranks
from modelexport.tagged.documents.dag import dag_document
from modelexport.tagged.documents.export_facts import facts_of_sidecar, module_facts, present_values
from modelexport.tagged.documents.hierarchy_sidecar import hierarchy_document
from modelexport.tagged.documents.operations import operations_document
from modelexport.tagged.documents.reader import load_dag, load_hierarchy, load_operations
from modelexport.tagged.encodings.metadata import initializer_tags
from modelexport.tagged.file import TaggedFile
from modelexport.verify.matched_values import Matches
from modelexport.verify.verify_report import FalseClaim

Tables = tuple[Mapping[Any, Any], Mapping[Any, Any]]
"""Two tables, the claimed and the right one: a name, or a pair of a kind and a name, to its content."""


def false_claims(
    tagged: TaggedFile,
    sidecar: documents.Hierarchy | None,
    matches: Matches | None,
    tree: ModuleTree | None,
    *,
    entries: Collection[str] = (),
) -> list[FalseClaim]:
    """Everything that the metadata or documents claim and that is not true.

    Args:
        sidecar: The sidecar, if there is one.
        matches: A run of the file beside PyTorch's, if there was one.
        tree: The modules of the model, if it is available.
        entries: The keys of the model's entries, if it is available.
    """
    right = _Expected(tagged, sidecar, matches, tree)
    hierarchy, dag, operations = (tagged.path.with_suffix(suffix) for suffix in keys.DESCRIBING_SUFFIXES)
    checks: list[tuple[str, Callable[[], Tables]]] = [
        ("metadata", right.metadata),
        ("metadata", lambda: _entries(tagged.model, entries)),
    ]
    unknown = tree is not None and hierarchy.is_file()
    if matches is not None and tagged.cut is None:  # a call that was cut out has neither all calls nor the outputs
        # PyTorch may make fewer calls with these inputs if something was presumed, which only the sidecar says.
        skips = sidecar.settings.presumed if sidecar is not None else unknown
        tables = (_outputs, _exposed, _shapes) if skips else (_called, _outputs, _exposed, _shapes)
        checks += [("metadata", partial(table, matches)) for table in tables]
    if sidecar is not None or unknown:  # or was not written with the file
        checks.append(("hierarchy", lambda: right.sidecar(sidecar or load_hierarchy(hierarchy))))
    if dag.is_file():
        checks.append(("dag", lambda: (load_dag(dag, checked=False), dag_document(tagged.model, right.tags))))
    if operations.is_file():
        right_operations = partial(operations_document, tagged.model, right.tags)
        checks.append(("operations", lambda: (load_operations(operations, checked=False), right_operations())))
    claims: list[FalseClaim] = []
    for document, check in checks:
        try:
            claims.extend(_differences(document, *check()))
        except FileFormatError as error:
            claims.append(FalseClaim(document=document, where=".", claimed=str(error), found="unreadable"))
    return claims


def _differences(document: str, claimed: Mapping[Any, Any], right: Mapping[Any, Any]) -> Iterator[FalseClaim]:
    for name in dict.fromkeys([*claimed, *right]):
        where = name[-1] if isinstance(name, tuple) else name
        claimed_entry, right_entry = (msgspec.to_builtins(table.get(name)) for table in (claimed, right))
        for path, *both in _leaves("", claimed_entry, right_entry):
            claimed_text, right_text = (shortened(" ".join(str(value).split()), _LONGEST) for value in both)
            yield FalseClaim(document=document, where=where or ".", claimed=f"{path}{claimed_text}", found=right_text)


_LONGEST = 200
"""The most characters of a claim that are shown."""


def _leaves(path: str, first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """The smallest parts in which two values differ, each with its path; things with names are compared by name."""
    first, second = (
        {part["name"]: part for part in value}
        if isinstance(value, list) and all(isinstance(part, dict) and "name" in part for part in value)
        else value
        for value in (first, second)
    )
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys([*first, *second]):
            yield from _leaves(f"{path}{key}: ", first.get(key), second.get(key))
    elif first != second:
        lists = isinstance(first, list) and isinstance(second, list)
        if not (lists and path in _UNORDERED and sorted(first) == sorted(second)):
            yield path, first, second


_UNORDERED = ("tags: ", "hierarchy_tags: ", "boundary: inputs: ", "boundary: outputs: ", "nodes: ", "edges: ")
"""Lists whose order is that of the nodes, or of an initializer's users: a graph made of functions has another one."""


def _by_kind(sidecar: documents.Hierarchy) -> dict[tuple[str, str], Any]:
    """The entries of a sidecar by their kind and what they describe; inputs and outputs also in their order."""
    plain = msgspec.to_builtins(sidecar)
    entries = {("", key): plain[key] for key in ("model", "coverage")}
    for kind, key in _NAMED_BY.items():
        entries |= {(kind, entry[key]): entry for entry in plain[kind]}
    return entries | {("", side): [entry["name"] for entry in plain[side]] for side in _SIDES}


_SIDES: tuple[Side, Side] = ("inputs", "outputs")
_NAMED_BY = {**dict.fromkeys((*_SIDES, "nodes", "initializers"), "name"), "modules": "path", "calls": "address"}


@dataclass(frozen=True)
class _Expected:
    """What documents and metadata should say."""

    tagged: TaggedFile
    said: documents.Hierarchy | None
    matches: Matches | None
    tree: ModuleTree | None

    @cached_property
    def tags(self) -> CallTags:
        """The tags of the calls: made from the modules, or those of the file if some of them were replaced."""
        parents = self.matches.reference.parents if self.matches is not None else {}
        traced_calls: dict[ModuleCall, TracedCall] = {}
        for traced in self.tagged.calls:
            parent = parents.get(traced.call)
            traced_calls[traced.call] = replace(traced, parent=parent) if parent in traced_calls else traced
        calls, tree = CallTree(tuple(traced_calls.values())), self.tree
        recorded = RecordedTags(calls, {call: self._with_class(call) for call in traced_calls})
        if self.said is None or tree is None or self._replaced or any(call.path not in tree for call in traced_calls):
            return recorded
        settings = self.said.settings
        with suppress(UsageError, ValueError):  # settings that are not those of the export
            granularity = msgspec.convert(settings.granularity, Granularity)
            by_settings = Tags(tree, calls, granularity=granularity, include=settings.include, exclude=settings.exclude)
            levels = (by_settings.is_level_call(call) == recorded.is_level_call(call) for call in traced_calls)
            if all(levels):
                return by_settings
        include = {recorded.class_of(call) for call in traced_calls if call != ROOT and recorded.is_level_call(call)}
        exclude = {recorded.class_of(call) for call in traced_calls if call != ROOT} - include
        return Tags(tree, calls, granularity="model", include=include, exclude=exclude)

    def _with_class(self, call: ModuleCall) -> CallFacts:
        """What the file records of a call, with the class of its module in the model."""
        facts = self.tagged.call_tags.facts[call]
        if self.tree is None or call.path not in self.tree:
            return facts
        name = self.tree[call.path].class_name
        above, slash, last = facts.segment.rpartition("/")
        segment = f"{above}{slash}{name}{last.removeprefix(class_in_tag(last))}"
        return CallFacts(name, facts.level, segment)

    @property
    def _replaced(self) -> bool:
        return keys.REPLACED in self.tagged.model.meta

    def metadata(self) -> Tables:
        """The tables for the metadata of calls, nodes and initializers; absent metadata claims nothing."""
        claimed: dict[Any, Any] = {}
        right_entries: dict[Any, Any] = {}
        for call, tag in self.tagged.tags.items():
            claimed["call", call.address] = {"parent": self.tagged.calls[call].parent, "tag": tag}
            right_entries["call", call.address] = {"parent": self.tags.calls[call].parent, "tag": self.tags.tag(call)}
            for table, tags in ((claimed, self.tagged.call_tags), (right_entries, self.tags)):
                table["call", call.address]["class_name"] = tags.class_of(call)
                table["call", call.address]["level"] = tags.is_level_call(call)
        for node in self.tagged.nodes:
            if (owner := owner_of(node)) is not None:
                right, properties = owner_properties(owner, self.tags), properties_of(node)
                claimed["node", node.name] = {key: _lists(properties[key]) for key in right if key in properties}
                right_entries["node", node.name] = {
                    key: _lists(text) for key, text in right.items() if key in properties
                }
        for value in initializers(self.tagged.model):
            if (text := text_of(value, keys.HIERARCHY_TAGS)) is not None:
                claimed["initializer", value.name] = {"hierarchy_tags": _lists(text)}
                right_entries["initializer", value.name] = {"hierarchy_tags": initializer_tags(value, self.tags)}
        return claimed, right_entries

    def sidecar(self, sidecar: documents.Hierarchy) -> Tables:
        """The entries of the sidecar, and what they should be."""
        values = {value.name: value for value in present_values(self.tagged.model) if value.name}
        right = _by_kind(hierarchy_document(facts_of_sidecar(sidecar, values), self.tagged.model, self.tags))
        return _by_kind(sidecar), right if self.tree is None else self._with_modules(right, self.tree)

    def _with_modules(self, right: dict[tuple[str, str], Any], tree: ModuleTree) -> dict[tuple[str, str], Any]:
        """The entries with the facts of the model; modules that others were put in the place of stay listed."""
        right = {
            key: claimed for key, claimed in right.items() if key[0] != "modules" or key[1] in tree or self._replaced
        }
        kept = {"trainable", "qualified_class", "line"} | ({"parameters"} if self._replaced else set())
        for module in tree:
            entry = right.setdefault(("modules", module.path), {})
            entry |= {key: fact for key, fact in module_facts(module).items() if key not in kept}
            if isinstance(self.tags, Tags):
                entry |= {"tag": self.tags.module_tag(module.path), "level": self.tags.is_level(module.path)}
            elif (call := ModuleCall(module.path)) in self.tagged.calls:
                entry["tag"] = self.tags.tag(call)
        model = right["", "model"]
        if model["class_name"].rpartition(".")[2] != tree.root.class_name:  # where it is depends on how it was imported
            model["class_name"] = tree.root.qualified_class
        if not self._replaced:
            model["parameters"] = tree.root.parameters
        return right


def _lists(text: str) -> Any:
    """The list that a text is in JSON; any other text as it is."""
    try:
        return decode_json(text, kind=list[str])
    except ValueError:
        return text


def _entries(model: ir.Model, of_model: Collection[str]) -> Tables:
    """The entries of the model, and whether they are used: those are that an initializer is computed from."""
    listed = state_dict_of(model)
    used = used_keys(model)
    claimed = {key: listed[key].used if key in listed else None for key in sorted({*of_model, *used})}
    return {"state_dict": claimed}, {
        "state_dict": {key: key in used or bool(is_used) for key, is_used in claimed.items()}
    }


def _called(matches: Matches) -> Tables:
    """The calls that only the file or only PyTorch made, if one of the two made all that the other did.

    A captured module may call others than in Python: then both have some of their own, or extra calls have nodes.
    Branches have calls that did not run.
    """
    claimed, right = {*matches.tagged.tags}, {*matches.reference.parents}
    bodies = any(nested_graphs(node) for node in matches.tagged.model.graph)
    alone = (
        {call for call in claimed - right if not any(matches.tagged.nodes_of(call))}
        if {ROOT} <= right <= claimed
        else set()
    )
    if right > claimed and not bodies:
        alone = right - claimed
    return {call.address: call in claimed for call in alone}, {call.address: call in right for call in alone}


def _outputs(matches: Matches) -> Tables:
    """The outputs that have the name of something that the model returns, and the names in the order of the model."""
    returned = requested_outputs(matches.tagged.model, matches.reference.side(ROOT, "outputs"))
    right = [tensor.place.name for tensor in returned if tensor.content.fingerprint.size]
    exposed = exposed_outputs(matches.tagged.model)
    claimed = [value.name or "" for value in matches.tagged.model.graph.outputs if value.name not in exposed]
    named = {
        claimed_name: name
        for claimed_name, name in zip(claimed, right, strict=False)
        if claimed_name in right and len(claimed) == len(right)
    }
    return {claimed_name: claimed_name for claimed_name in named}, named


def _exposed(matches: Matches) -> Tables:
    """The outputs that have the address of a call, and that of a call that returned the tensor."""
    claimed, right_names = dict[str, Any](), dict[str, Any]()
    values = {value.name or "": value for value in matches.tagged.model.graph.outputs}
    returned = {call.address: matches.reference.side(call, "outputs") for call in matches.reference.parents}
    for name in exposed_outputs(matches.tagged.model):
        claimed[name] = right_names[name] = name if name in returned else name.rpartition(":")[0]
        known = matches.equal_in_any_order.get(values[name], ()) if name in values else ()
        right = {address for address, tensors in returned.items() if any(tensor.content in known for tensor in tensors)}
        if (known or name not in values) and claimed[name] not in right:
            right_names[name] = max(right, key=len, default="not returned by any call")
    return claimed, right_names


def _shapes(matches: Matches) -> Tables:
    """The sizes of values; a symbol has that of the first axis that declares it alone."""
    graph, of_any_rank = matches.tagged.model.graph, undetermined_ranks(matches.tagged.model)
    input_shapes = {tensor.place.name: tensor.shape for tensor in matches.reference.side(ROOT, "inputs")}
    shapes = {
        value: input_shapes[value.name] for value in graph.inputs if value.name in input_shapes
    } | matches.trace.shapes
    claimed, right_shapes, symbols = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for value, shape in shapes.items():
        if value.shape is None or value.graph is not graph:
            continue
        declared, right = sizes_of(value), list[Any](shape)
        if len(declared) != len(shape) and value.is_graph_output() and value in of_any_rank:  # ONNX requires a rank
            continue
        for axis, size_text in enumerate(declared if len(declared) == len(shape) else ()):
            if isinstance(size_text, str) and SYMBOL.fullmatch(size_text):
                symbols.setdefault(size_text, str(shape[axis]))
            size = put_size(size_text, symbols) if isinstance(size_text, str) else size_text
            if size == shape[axis] or not isinstance(size, int):  # a symbol that is not known claims nothing
                right[axis] = size_text
        claimed[value.name or ""], right_shapes[value.name or ""] = declared, right
    return claimed, right_shapes
