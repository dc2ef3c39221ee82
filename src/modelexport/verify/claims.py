"""Checks the tags of a file and its documents against the graph and the PyTorch run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from modelexport.core.calls import ModuleCall
from modelexport.core.decoding import decode_json
from modelexport.core.modules import ModuleTree
from modelexport.core.tags import class_in_tag
from modelexport.errors import FileFormatError
from modelexport.format import documents, keys
from modelexport.format.dtypes import dtype_name
from modelexport.format.node_tags import read_source_tags
from modelexport.graph.nodes import default_shape, initializers
from modelexport.graph.owners import owner_of
from modelexport.runtime.evidence import Evidence
from modelexport.tagged.documents.dag import dag_document
from modelexport.tagged.documents.operations import operations_document
from modelexport.tagged.documents.reading import load_dag, load_operations
from modelexport.tagged.documents.sidecar import graph_value
from modelexport.tagged.encodings.metadata import initializer_tags
from modelexport.tagged.file import FileTags, TaggedFile
from modelexport.verify.claimed_graph import (
    false_claims_of_calls,
    false_claims_of_entries,
    false_claims_of_outputs,
)
from modelexport.verify.claimed_modules import false_claim, false_claims_of_modules
from modelexport.verify.claimed_values import ValuesInRun
from modelexport.verify.matching import paths_called_as_often
from modelexport.verify.verdicts import FalseClaim
from modelexport.weights.transforms import parameter_plan


def false_claims(
    tagged: TaggedFile,
    sidecar: documents.Hierarchy | None,
    evidence: Evidence,
    values: ValuesInRun,
    tree: ModuleTree | None,
    *,
    entries: Collection[str] = (),
) -> list[FalseClaim]:
    """Everything that the tags or documents claim and that is not true.

    Args:
        sidecar: The sidecar, if it is not yet beside the file.
        values: The values of the file in the run.
        tree: The modules of the model, if it is available.
        entries: The keys of the model's entries, if it is available.
    """
    classes = {path: module.class_name for module in tree or () for path in (module.path, *module.aliases)}
    checks: list[Callable[[], Iterator[FalseClaim]]] = [
        lambda: _metadata(tagged, evidence, classes),
        lambda: false_claims_of_outputs(tagged, evidence, values.shapes),
        lambda: false_claims_of_calls(tagged, evidence),
        lambda: false_claims_of_entries(tagged.model, entries),
        lambda: _documents(tagged),
    ]
    found: list[FalseClaim] = []
    try:
        sidecar = sidecar or tagged.hierarchy
    except FileFormatError as error:
        found.append(FalseClaim(document="hierarchy", where=".", claimed=str(error), found="another"))
        sidecar = None
    if sidecar is not None:
        said = sidecar
        checks.append(lambda: _sidecar(tagged, said, evidence, values))
        checks.append(lambda: false_claims_of_modules(tagged, said, tree))
    for check in checks:
        try:
            found.extend(check())
        except FileFormatError as error:
            found.append(FalseClaim(document="documents", where=".", claimed=str(error), found="unreadable"))
    return found


def _metadata(tagged: TaggedFile, evidence: Evidence, classes: Mapping[str, str]) -> Iterator[FalseClaim]:
    tags = _ClaimedTags(tagged)
    for traced in tagged.calls:
        call, tag = traced.call, tagged.tags[traced.call]
        if call in evidence.parents:
            yield from false_claim("metadata", call.address, traced.parent, evidence.parents[call])
        if call.path in classes:
            yield from false_claim("metadata", call.address, class_in_tag(tag), classes[call.path])
        if traced.parent is not None and not tag.startswith(tags.level_above(traced.parent)):
            yield from false_claim("metadata", call.address, tag, f"inside {tags.level_above(traced.parent)}")
    for node in tagged.nodes:
        owner = owner_of(node)
        if owner is None:
            continue
        name, properties = node.name or "", node.metadata_props
        yield from false_claim("metadata", name, properties.get(keys.SOURCE_MODULE), tags.source_tag(owner.call))
        if len(owner.calls) > 1:
            listed = _listed(properties.get(keys.HIERARCHY_TAGS, "[]"))
            yield from false_claim("metadata", name, listed, [tags.source_tag(call) for call in owner.calls])
        if keys.LAYER_ANNOTATION in properties:
            yield from false_claim("metadata", name, properties[keys.LAYER_ANNOTATION], owner.call.annotation)
        if keys.NAMESPACE in properties:
            yield from false_claim("metadata", name, properties[keys.NAMESPACE], tags.namespace(owner.call))
    for value in initializers(tagged.model):
        if keys.HIERARCHY_TAGS in value.metadata_props:
            listed = _listed(value.metadata_props[keys.HIERARCHY_TAGS])
            yield from false_claim("metadata", value.name or "", sorted(listed), sorted(initializer_tags(value, tags)))


def _documents(tagged: TaggedFile) -> Iterator[FalseClaim]:
    tags = _ClaimedTags(tagged)
    dag, operations = (tagged.path.with_suffix(suffix) for suffix in (".dag.json", ".operations.json"))
    if dag.is_file():
        here = dag_document(tagged.model, tags)
        for tag, said in _pairs(load_dag(dag), here):
            yield from false_claim("dag", tag, *said)
    if operations.is_file():
        for name, said in _pairs(
            *map(_in_order, (load_operations(operations), operations_document(tagged.model, tags)))
        ):
            yield from false_claim("operations", name, *said)


def _in_order(operations: Mapping[str, documents.Operation]) -> dict[str, documents.Operation]:
    """The operations with the tags of initializers sorted: where nested graphs use one, their order has no meaning."""
    return {
        name: msgspec.structs.replace(one, tags=sorted(one.tags)) if one.op_type == "Initializer" else one
        for name, one in operations.items()
    }


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in dict.fromkeys([*one, *other]):
        yield key, (one.get(key), other.get(key))


def _sidecar(
    tagged: TaggedFile,
    sidecar: documents.Hierarchy,
    evidence: Evidence,
    values: ValuesInRun,
) -> Iterator[FalseClaim]:
    tags = _ClaimedTags(tagged)
    yield from false_claim("hierarchy", "coverage", sidecar.coverage, tagged.coverage)
    yield from false_claim("hierarchy", "opset", sidecar.model.opset, tagged.model.opset_imports.get("", 0))
    for side, there in (("inputs", tagged.model.graph.inputs), ("outputs", tagged.model.graph.outputs)):
        listed = getattr(sidecar, side)
        yield from false_claim("hierarchy", side, [value.name for value in listed], [value.name for value in there])
        for said, value in zip(listed, there, strict=False):
            yield from false_claim("hierarchy", said.name, said, graph_value(value))
    own = dict.fromkeys((traced.call.address for traced in tagged.calls), 0)
    nodes = {node.name or "": node for node in tagged.nodes}
    for node in tagged.nodes:
        if (owner := owner_of(node)) is not None:
            own[owner.call.address] += 1
    for entry in sidecar.nodes:
        node_owner = owner_of(nodes[entry.name])
        if node_owner is not None:
            several = node_owner.calls if len(node_owner.calls) > 1 else ()
            said = (entry.op_type, entry.domain, entry.source_module, entry.evidence, entry.calls, entry.hierarchy_tags)
            node = nodes[entry.name]
            so = (
                node.op_type,
                node.domain,
                tags.source_tag(node_owner.call),
                node_owner.evidence.value,
                [call.address for call in several],
                [tags.source_tag(call) for call in several],
            )
            yield from false_claim("hierarchy", entry.name, said, so)
    yield from _initializers(tagged, sidecar, tags)
    yield from _calls(tagged, sidecar, evidence, values, own)


def _initializers(tagged: TaggedFile, sidecar: documents.Hierarchy, tags: _ClaimedTags) -> Iterator[FalseClaim]:
    values = {value.name or "": value for value in initializers(tagged.model)}
    listed = {entry.name: entry for entry in sidecar.initializers}
    yield from false_claim("hierarchy", "initializers", sorted(listed), sorted(values))
    for name in listed.keys() & values.keys():
        entry, value = listed[name], values[name]
        plan = parameter_plan(value)
        said = (entry.dtype, entry.shape, entry.parameter, entry.transform, sorted(entry.hierarchy_tags))
        so = (
            dtype_name(value.dtype) if value.dtype is not None else "",
            default_shape(value),
            plan.keys if plan else [],
            plan.steps if plan else [],
            sorted(initializer_tags(value, tags)),
        )
        yield from false_claim("hierarchy", name, said, so)


def _calls(
    tagged: TaggedFile,
    sidecar: documents.Hierarchy,
    evidence: Evidence,
    values: ValuesInRun,
    own: Mapping[str, int],
) -> Iterator[FalseClaim]:
    seen = {(tensor.call.address, str(tensor.side), tensor.name): tensor for tensor in evidence.tensors}
    passed: dict[tuple[str, str], list[str]] = defaultdict(list)
    for address, side, name in seen:
        passed[address, side].append(name)
    made = {value.name or "" for node in tagged.nodes for value in node.outputs}
    made |= {value.name or "" for value in tagged.model.graph.inputs}
    made |= {value.name or "" for value in initializers(tagged.model)}
    as_often = paths_called_as_often(tagged.calls, evidence)
    for entry in sidecar.calls:
        call = ModuleCall.parse(entry.address)
        boundary = tagged.boundaries[call]
        for side in ("inputs", "outputs"):
            listed = sorted(getattr(entry.boundary, side))
            yield from false_claim(
                "hierarchy", entry.address, listed, sorted(value.name or "" for value in getattr(boundary, side))
            )
        yield from false_claim("hierarchy", entry.address, entry.nodes, own[entry.address])
        same = call.path in as_often
        for side, tensors in (("inputs", entry.inputs), ("outputs", entry.outputs)):
            names = sorted(passed[entry.address, side])
            if same and len(tensors) == len(names):  # of random numbers, nothing was kept
                yield from false_claim("hierarchy", entry.address, sorted(t.name for t in tensors), names)
            for tensor in tensors:
                where = f"{entry.address or '.'}, {tensor.name}"
                if tensor.value is not None and tensor.value not in made:
                    yield from false_claim("hierarchy", where, tensor.value, "not a value of the file")
                its = seen.get((entry.address, side, tensor.name))
                if its is None or not same:
                    continue
                yield from false_claim("hierarchy", where, *_type(tensor, its.dtype, its.shape))
                if tensor.value is not None:
                    yield from false_claim("hierarchy", where, tensor.value, values.named(tensor.value, its, evidence))


def _type(tensor: documents.CallTensor, dtype: str, shape: tuple[int, ...]) -> tuple[object, object]:
    """The claimed and the actual type and shape of a tensor; a claimed dynamic size matches any size."""
    so = [size if isinstance(said, int) else said for said, size in zip(tensor.shape, shape, strict=False)]
    return (tensor.dtype, list(tensor.shape)), (dtype, so if len(shape) == len(tensor.shape) else list(shape))


@dataclass(frozen=True)
class _ClaimedTags(FileTags):
    """The tags of the calls of a file; the levels are found from the tags themselves."""

    def source_tag(self, call: ModuleCall) -> str:
        return self._sources.get(call) or self.level_above(call)

    def level_above(self, call: ModuleCall) -> str:
        """The tag of the innermost level that a call is, or ran in."""
        for around in reversed(self.tagged.calls.stack(call)):
            if around.path in self._levels:
                return self.tagged.tags[around]
        return self.tagged.tags[self.tagged.calls.calls[0].call]

    @cached_property
    def _sources(self) -> Mapping[ModuleCall, str]:
        """The source tag on most nodes of each call, so that a node with another tag is detected."""
        votes: dict[ModuleCall, dict[str, int]] = {}
        for node in self.tagged.nodes:
            owner = owner_of(node)
            listed = read_source_tags(node.metadata_props)
            for call, said in zip(owner.calls if owner is not None else (), listed, strict=False):
                those = votes.setdefault(call, {})
                those[said] = those.get(said, 0) + 1
        return {
            call: best
            for call, those in votes.items()
            if (best := max(those, key=lambda said: those[said]))
            in {self.tagged.tags[around] for around in self.tagged.calls.stack(call)}
        }

    @cached_property
    def _levels(self) -> frozenset[str]:
        """The paths of the modules whose tags nodes have."""
        paths = {tag: call.path for call, tag in self.tagged.tags.items()}
        return frozenset(paths[tag] for tag in self._sources.values())


def _listed(text: str) -> list[str]:
    """The tags in a property; if it is not a JSON list, its whole text, which is not a tag."""
    try:
        tags: list[str] = decode_json(text, kind=list[str])
    except ValueError:
        return [text]
    return tags
