"""What the documents and the metadata of a file should say, compared with what they say.

They are made a second time, by the functions that write them at export, from what is known apart from them: the graph
and its owners, the modules of the model, and PyTorch's run. What then differs is a false claim. What nothing shows
stays as it is claimed: where modules were replaced, for example, which of them share parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ROOT, CallTree, ModuleCall, Side, TracedCall
from modelexport.core.json_decoding import decode_json
from modelexport.core.module_tree import ModuleTree
from modelexport.core.tags import CallFacts, CallTags, Granularity, RecordedTags, Tags, class_in_tag
from modelexport.core.text import shortened
from modelexport.errors import FileFormatError, UsageError
from modelexport.files.onnx_models import OLDER_FILE
from modelexport.format import documents, keys
from modelexport.format.dtypes import dtype_name
from modelexport.format.node_tags import owner_properties
from modelexport.graph.kept_outputs import exposed_outputs, requested_outputs
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import initializers, nested_graphs
from modelexport.graph.parameter_plans import state_dict_of, used_keys
from modelexport.graph.size_symbols import SYMBOL, put_size
from modelexport.tagged.documents.dag import dag_document
from modelexport.tagged.documents.hierarchy_sidecar import descended_document, module_facts
from modelexport.tagged.documents.operations import operations_document
from modelexport.tagged.documents.reader import load_dag, load_operations
from modelexport.tagged.encodings.metadata import initializer_tags
from modelexport.tagged.file import TaggedFile
from modelexport.traces.fingerprints import fingerprint_of
from modelexport.traces.tolerances import ROUNDED_CONSTANT
from modelexport.traces.trace import Content, SeenTensor
from modelexport.verify.matched_values import Matches
from modelexport.verify.verify_report import FalseClaim

_HALF = ("float16", "bfloat16")
_FLOATS = (*_HALF, "float32", "float64")
Tables = tuple[Mapping[Any, Any], Mapping[Any, Any]]
"""What is claimed, and what is right: names of things, or pairs of a kind and a name, to what is said of them."""


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
    right = _Right(tagged, sidecar, matches, tree)
    dag, operations = (tagged.path.with_suffix(suffix) for suffix in (".dag.json", ".operations.json"))
    properties = tagged.model.metadata_props
    checks: list[tuple[str, Callable[[], Tables]]] = [
        ("metadata", right.metadata),
        ("metadata", lambda: _entries(tagged.model, entries)),
    ]
    if matches is not None and tagged.cut is None:  # a call that was cut out has neither all calls nor the outputs
        skips = sidecar is not None and sidecar.settings.presumed  # PyTorch may make fewer calls with these inputs
        made = (_outputs, _exposed, _shapes) if skips else (_called, _outputs, _exposed, _shapes)
        checks += [("metadata", partial(one, matches)) for one in made]
    if sidecar is not None:
        checks.append(("hierarchy", lambda: (_by_kind(sidecar), right.sidecar(sidecar))))
    if dag.is_file():
        checks.append(("dag", lambda: (load_dag(dag, properties), dag_document(tagged.model, right.tags))))
    if operations.is_file():
        right_operations = partial(operations_document, tagged.model, right.tags)
        checks.append(("operations", lambda: (load_operations(operations, properties), right_operations())))
    found: list[FalseClaim] = []
    for document, check in checks:
        try:
            found.extend(_differences(document, *check()))
        except FileFormatError as error:
            found.append(FalseClaim(document=document, where=".", claimed=str(error), found="unreadable"))
    return found


def _differences(document: str, claimed: Mapping[Any, Any], right: Mapping[Any, Any]) -> Iterator[FalseClaim]:
    for name in dict.fromkeys([*claimed, *right]):
        where = name[-1] if isinstance(name, tuple) else name
        one, other = (msgspec.to_builtins(table.get(name)) for table in (claimed, right))
        for path, *both in _leaves("", one, other):
            said, so = (shortened(" ".join(str(value).split()), _LONGEST) for value in both)
            yield FalseClaim(document=document, where=where or ".", claimed=f"{path}{said}", found=so)


_LONGEST = 200
"""The most characters of a claim that are shown."""


def _leaves(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """The smallest parts in which two values differ, each with its path; things with names are compared by name."""
    one, other = (
        {part["name"]: part for part in value}
        if isinstance(value, list) and all(isinstance(part, dict) and "name" in part for part in value)
        else value
        for value in (one, other)
    )
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            yield from _leaves(f"{path}{key}: ", one.get(key), other.get(key))
    elif one != other:
        lists = isinstance(one, list) and isinstance(other, list)
        if not (lists and path in _UNORDERED and sorted(one) == sorted(other)):
            yield path, one, other


_UNORDERED = ("tags: ", "hierarchy_tags: ", "boundary: inputs: ", "boundary: outputs: ", "nodes: ", "edges: ")
"""Lists whose order is that of the nodes, or of an initializer's users: a graph made of functions has another one."""


def _by_kind(sidecar: documents.Hierarchy) -> dict[tuple[str, str], Any]:
    """The entries of a sidecar by their kind and what they describe; inputs and outputs also in their order."""
    plain = msgspec.to_builtins(sidecar)
    found = {("", key): plain[key] for key in ("model", "coverage")}
    for kind, key in _NAMED_BY.items():
        found |= {(kind, entry[key]): entry for entry in plain[kind]}
    return found | {("", side): [entry["name"] for entry in plain[side]] for side in _SIDES}


_SIDES: tuple[Side, Side] = ("inputs", "outputs")
_NAMED_BY = {**dict.fromkeys((*_SIDES, "nodes", "initializers"), "name"), "modules": "path", "calls": "address"}


@dataclass(frozen=True)
class _Right:
    """What documents and metadata should say."""

    tagged: TaggedFile
    said: documents.Hierarchy | None
    matches: Matches | None
    tree: ModuleTree | None

    @cached_property
    def tags(self) -> CallTags:
        """The tags of the calls: made from the modules, or those of the file if some of them were replaced."""
        parents = self.matches.truth.parents if self.matches is not None else {}
        found: dict[ModuleCall, TracedCall] = {}
        for traced in self.tagged.calls:
            parent = parents.get(traced.call)
            found[traced.call] = replace(traced, parent=parent) if parent in found else traced
        calls, tree = CallTree(tuple(found.values())), self.tree
        if self.said is None or tree is None or self._replaced or any(call.path not in tree for call in found):
            return RecordedTags(calls, {call: self._with_class(call) for call in found})
        said = self.said.settings
        try:
            granularity = msgspec.convert(said.granularity, Granularity)
            return Tags(tree, calls, granularity=granularity, include=said.include, exclude=said.exclude)
        except (UsageError, ValueError) as error:
            raise FileFormatError(f"the settings in the sidecar are not those of the export: {error}") from error

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
        return keys.REPLACED in self.tagged.model.metadata_props

    def metadata(self) -> Tables:
        """Of the calls, nodes and initializers of the file. What they leave out is not claimed."""
        said: dict[Any, Any] = {}
        so: dict[Any, Any] = {}
        for call, tag in self.tagged.tags.items():
            said["call", call.address] = {"parent": self.tagged.calls[call].parent, "tag": tag}
            so["call", call.address] = {"parent": self.tags.calls[call].parent, "tag": self.tags.tag(call)}
            if not self.tagged.model.meta.get(OLDER_FILE):
                for table, tags in ((said, self.tagged.call_tags), (so, self.tags)):
                    table["call", call.address]["class_name"] = tags.class_of(call)
                    table["call", call.address]["level"] = tags.is_level_call(call)
        for node in self.tagged.nodes:
            if (owner := owner_of(node)) is not None:
                right, properties = owner_properties(owner, self.tags), node.metadata_props
                said["node", node.name] = {key: _lists(properties[key]) for key in right if key in properties}
                so["node", node.name] = {key: _lists(text) for key, text in right.items() if key in properties}
        for value in initializers(self.tagged.model):
            if (text := value.metadata_props.get(keys.HIERARCHY_TAGS)) is not None:
                said["initializer", value.name] = {"hierarchy_tags": _lists(text)}
                so["initializer", value.name] = {"hierarchy_tags": initializer_tags(value, self.tags)}
        return said, so

    def sidecar(self, said: documents.Hierarchy) -> dict[tuple[str, str], Any]:
        """The entries of the sidecar."""
        document = descended_document(
            said,
            model=self.tagged.model,
            values=self._values,
            tags=self.tags,
            coverage=self.tagged.coverage,
        )
        right = _by_kind(document)
        captured = {entry.address for entry in said.calls if entry.enter is None}  # in a branch that did not run
        ran = [call for call in self.tagged.tags if call.address not in captured]
        stacks = {call: self.tags.calls.stack(call) for call in ran}
        inside = Counter(around for stack in stacks.values() for around in stack)
        for number, call in enumerate(ran):
            entry = right["calls", call.address]
            if not self._replaced:  # before a call begins, all before it began, and those not around it ended
                enter = 2 * number + 1 - len(stacks[call])
                entry |= {"enter": enter, "exit": enter + 2 * inside[call] - 1}
            if self.matches is not None and call.path in self._as_often:
                entry |= {side: self._tensors(call, side, entry[side], self.matches) for side in _SIDES}
        return right if self.tree is None else self._with_modules(right, self.tree)

    def _with_modules(self, right: dict[tuple[str, str], Any], tree: ModuleTree) -> dict[tuple[str, str], Any]:
        """The entries with the facts of the model; modules that others were put in the place of stay listed."""
        right = {key: one for key, one in right.items() if key[0] != "modules" or key[1] in tree or self._replaced}
        kept = {"trainable", "qualified_class"} | ({"parameters"} if self._replaced else set())
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

    def _tensors(self, call: ModuleCall, side: Side, said: list[Any], matches: Matches) -> list[dict[str, Any]]:
        """The tensors that a call got or returned; a size that is said to be dynamic may be any."""
        known, found = {tensor["name"]: tensor for tensor in said}, []
        seen_there = matches.truth.side(call, side)
        if not seen_there:  # hooks of scripts do not say what they get
            return said
        for seen in seen_there:
            one = known.get(seen.place.name, {})
            if not one and seen.content not in matches.found:  # it is not in the file, as what a cache had before
                continue
            sizes = zip_longest(one.get("shape", [])[: len(seen.shape)], seen.shape)
            shape = [own if isinstance(own, str) else size for own, size in sizes]
            value = self._value(one["value"], seen, matches) if "value" in one else None
            # A run in float64 does not show the types of a model that has several: the file's own may.
            dtype = str(one.get("dtype", ""))
            is_half = seen.dtype in _HALF and dtype in (*_HALF, "float32")
            its = self._values[value].dtype if value is not None else None
            is_files = dtype in _FLOATS and (its is None or dtype_name(its) == dtype)
            if not (is_half or (is_files and seen.dtype in _FLOATS)):
                dtype = seen.dtype
            found.append({"name": seen.place.name, "dtype": dtype, "shape": shape, "value": value})
        return found

    @cached_property
    def _as_often(self) -> set[str]:
        there = Counter(call.path for call in (self.matches.truth.parents if self.matches is not None else ()))
        return {path for path, count in Counter(t.call.path for t in self.tagged.calls).items() if there[path] == count}

    def _value(self, claimed: str, tensor: SeenTensor, matches: Matches) -> str | None:
        """The name of the value that is a tensor: the claimed one, unless that is known to be another."""
        value, content = self._values[claimed], tensor.content
        known = matches.alike.get(value, ())
        is_parameter = value.is_initializer() and not content.computed  # which may have other numbers in this run
        if content in known or is_parameter or _is_constant(value, content):
            return claimed
        right = [one for one, contents in matches.alike.items() if content in contents]
        if right:
            return min(right, key=lambda one: matches.trace.shapes.get(one) != tensor.shape).name
        return None if known else claimed

    @cached_property
    def _values(self) -> Mapping[str, ir.Value]:
        made = [value for node in self.tagged.nodes for value in node.outputs]
        return {v.name: v for v in (*made, *initializers(self.tagged.model), *self.tagged.model.graph.inputs) if v.name}


def _lists(text: str) -> Any:
    """The list that a text is in JSON; any other text as it is."""
    try:
        return decode_json(text, kind=list[str])
    except ValueError:
        return text


def _is_constant(value: ir.Value, content: Content) -> bool:
    """Whether an initializer has the elements of a tensor, up to the rounding of its type."""
    if value.const_value is None or value.const_value.size != content.fingerprint.size:
        return False
    return fingerprint_of(value.const_value.numpy()).alike(content.fingerprint, ROUNDED_CONSTANT)


def _entries(model: ir.Model, of_model: Collection[str]) -> Tables:
    """The entries of the model, and whether they are used: those are that an initializer is computed from."""
    listed = state_dict_of(model)
    used = used_keys(model)
    said = {key: listed[key].used if key in listed else None for key in sorted({*of_model, *used})}
    return {"state_dict": said}, {"state_dict": {key: key in used or bool(one) for key, one in said.items()}}


def _called(matches: Matches) -> Tables:
    """The calls that only the file or only PyTorch made, if one of the two made all that the other did.

    A captured module may call others than in Python: then both have some of their own, or extra calls have nodes.
    Branches have calls that did not run.
    """
    said, so = {*matches.tagged.tags}, {*matches.truth.parents}
    bodies = any(nested_graphs(node) for node in matches.tagged.model.graph)
    alone = {call for call in said - so if not any(matches.tagged.nodes_of(call))} if {ROOT} <= so <= said else set()
    if so > said and not bodies:
        alone = so - said
    return {call.address: call in said for call in alone}, {call.address: call in so for call in alone}


def _outputs(matches: Matches) -> Tables:
    """The outputs that have the name of something that the model returns, and the names in the order of the model."""
    returned = requested_outputs(matches.tagged.model.metadata_props, matches.truth.side(ROOT, "outputs"))
    right = [tensor.place.name for tensor in returned if tensor.content.fingerprint.size]
    exposed = exposed_outputs(matches.tagged.model.metadata_props)
    said = [value.name or "" for value in matches.tagged.model.graph.outputs if value.name not in exposed]
    named = {one: name for one, name in zip(said, right, strict=False) if one in right and len(said) == len(right)}
    return {one: one for one in named}, named


def _exposed(matches: Matches) -> Tables:
    """The outputs that have the address of a call, and that of a call that returned the tensor."""
    said, so = dict[str, Any](), dict[str, Any]()
    values = {value.name or "": value for value in matches.tagged.model.graph.outputs}
    returned = {call.address: matches.truth.side(call, "outputs") for call in matches.truth.parents}
    for name in exposed_outputs(matches.tagged.model.metadata_props):
        said[name] = so[name] = name if name in returned else name.rpartition(":")[0]
        known = matches.alike.get(values[name], ()) if name in values else ()
        right = {address for address, tensors in returned.items() if any(one.content in known for one in tensors)}
        if (known or name not in values) and said[name] not in right:
            so[name] = max(right, key=len, default="not returned by any call")
    return said, so


def _shapes(matches: Matches) -> Tables:
    """The sizes of values; a symbol has that of the first axis that declares it alone."""
    graph = matches.tagged.model.graph
    given = {tensor.place.name: tensor.shape for tensor in matches.truth.side(ROOT, "inputs")}
    shapes = {value: given[value.name] for value in graph.inputs if value.name in given} | matches.trace.shapes
    said, so, symbols = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for value, shape in shapes.items():
        if value.shape is None or value.graph is not graph:
            continue
        declared = [size if isinstance(size, int) else size.value for size in value.shape]
        right: list[Any] = list(shape)
        for axis, one in enumerate(declared if len(declared) == len(shape) else ()):
            if isinstance(one, str) and SYMBOL.fullmatch(one):
                symbols.setdefault(one, str(shape[axis]))
            size = put_size(one, symbols) if isinstance(one, str) else one
            if size == shape[axis] or not isinstance(size, int):  # a symbol that is not known claims nothing
                right[axis] = one
        said[value.name or ""], so[value.name or ""] = declared, right
    return said, so
