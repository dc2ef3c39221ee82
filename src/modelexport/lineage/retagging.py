"""``retag``: a file that another tool made of a tagged one becomes a tagged file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.errors import FileFormatError, UntaggedNodeError, UsageError
from modelexport.files.atomic import check_writable, written_together
from modelexport.files.linked import check_files
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.format import documents, keys
from modelexport.format.node_tags import read_source_tags
from modelexport.graph.coverage import count_coverage
from modelexport.graph.names import name_nodes_apart
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.graph.owners import owner_of
from modelexport.graph.snapshot import snapshot
from modelexport.lineage.descent import Descent, trace_owners
from modelexport.lineage.inheritance import Inheritance, inherited
from modelexport.tagged.documents.dag import dag_document
from modelexport.tagged.documents.operations import operations_document
from modelexport.tagged.documents.sidecar import descended_document
from modelexport.tagged.documents.tables import encode_table
from modelexport.tagged.encodings.metadata import write_metadata
from modelexport.tagged.encodings.unpacking import unpack_tags
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.weights.transforms import state_dict_of

RELATED = 0.4
"""The share of its values that a file has to have from the tagged one."""


class SeveralOwners(msgspec.Struct, frozen=True):
    """A node that the tool made, with several owners."""

    name: str
    op_type: str
    calls: list[str]
    """Addresses, the one that produces the output first."""
    reason: str


class UnclearInitializer(msgspec.Struct, frozen=True):
    """An initializer that no name tells of."""

    name: str
    parameter: list[str]
    """All entries that it may be computed from."""


class RetagReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, and how much of it is known."""

    path: str
    files: list[str]
    coverage: documents.Coverage
    common: int
    """Values of the changed file that are values of the tagged one, or variants of them."""
    values: int
    """Values of the changed file, initializers included."""
    fused: list[SeveralOwners]
    """Nodes that hold what was several nodes, of several calls."""
    unclear: list[SeveralOwners]
    """New nodes between several calls, which might be any one's."""
    initializers: list[UnclearInitializer]
    """Initializers of which it cannot be told which of several parameters they come from."""
    unrecorded: int
    """Initializers with known entries that were quantized, packed or fused, so that they cannot be computed again."""
    lost: list[str]
    """Entries that an output of the tagged file depends on and that no initializer comes from."""
    gone: list[str]
    """Calls that have no nodes any more."""
    inlined: bool
    """Whether local functions of the changed file were replaced by their bodies."""


def retag(changed: str | Path, *, source: str | Path, output: str | Path) -> RetagReport:
    """Give a file that another tool made of a tagged one its tags back.

    The result has everything that an exported file has; beside it the documents that lie beside ``source``, for it.
    Local functions are replaced by their bodies: a body is shared by calls of different modules.

    Args:
        changed: What the tool wrote.
        source: The tagged file that it read.
        output: The file to write; may be ``changed``.

    Raises:
        FileFormatError: A file is missing, damaged, or without its weights, or ``source`` has no tags.
        UsageError: The files are not related: says how many values they have in common.
        UntaggedNodeError: A node could not be given an owner, though all of ``source`` have one. Nothing is written.
        OutputError: The output cannot be written. What was there before is still there.
    """
    changed, output = Path(changed), Path(output)
    check_writable(output)
    tagged = read_tagged(source)
    if tagged.coverage.untagged == len(tagged.nodes):
        raise FileFormatError(
            f"no node of {source} has tags: another tool has dropped them; give the file as it was exported"
        )
    check_files(tagged.path, tagged.model)
    model, inlined = _flat(changed, tagged)
    check_files(changed, model)
    before = snapshot(tagged.model)
    descent = trace_owners(before, model)
    _check_related(changed, tagged, descent)
    coverage, untagged = count_coverage(model)
    if untagged and not tagged.coverage.untagged:
        raise UntaggedNodeError(untagged)
    name_nodes_apart(model)
    inheritance = inherited(tagged.model, before, model, descent)
    tags = _FileTags(tagged)
    entries = state_dict_of(tagged.model)
    _write(model, tagged, tags, inheritance, entries)
    documents = _documents(tagged, model, tags, descent, inheritance, coverage)
    with written_together(output.parent) as staging:
        save_model(model, staging / output.name)
        for suffix, document in documents.items():
            (staging / output.name).with_suffix(suffix).write_bytes(document)
        files = [str(output.parent / file.name) for file in sorted(staging.iterdir())]
    several = [
        SeveralOwners(node.name or "", node.op_type, [str(call) for call in owner.calls], reason)
        for node, reason in descent.several.items()
        if (owner := owner_of(node)) is not None
    ]
    there = {key for origin in inheritance.origins.values() for key in origin.keys}
    return RetagReport(
        path=str(output),
        files=files,
        coverage=coverage,
        common=descent.common,
        values=descent.total,
        fused=[one for one in several if not one.reason.startswith("new")],
        unclear=[one for one in several if one.reason.startswith("new")],
        initializers=[UnclearInitializer(name, list(keys)) for name, keys in inheritance.unclear.items()],
        unrecorded=sum(
            any(step.domain == keys.UNRECORDED_DOMAIN for step in origin.transform)
            for origin in inheritance.origins.values()
        ),
        lost=[key for key, entry in entries.items() if entry.used and key not in there],
        gone=_gone(tagged, model),
        inlined=inlined,
    )


@dataclass(frozen=True)
class _FileTags:
    """The tags of the calls of a tagged file."""

    tagged: TaggedFile

    @property
    def calls(self) -> CallTree:
        return self.tagged.calls

    def tag(self, call: ModuleCall) -> str:
        return self.tagged.tags[call]

    def namespace(self, call: ModuleCall) -> str:
        return self.tagged.tags[call].removeprefix("/")

    def source_tag(self, call: ModuleCall) -> str:
        return self._source_tags[call]

    @cached_property
    def _source_tags(self) -> Mapping[ModuleCall, str]:
        found: dict[ModuleCall, str] = {}
        for node in self.tagged.nodes:
            owner = owner_of(node)
            if owner is not None:
                found.update(zip(owner.calls, read_source_tags(node.metadata_props), strict=True))
        return found


def _flat(path: Path, tagged: TaggedFile) -> tuple[ir.Model, bool]:
    """What a tool wrote, without functions and without what it may have kept of our tags."""
    model = load_onnx(path)
    inlined = bool(model.functions)
    if inlined and tagged.encoding == "functions":
        try:  # a tool that kept the functions may have kept what they say about names in the flat graph
            model.metadata_props.setdefault(keys.ENCODING, tagged.encoding)
            unpack_tags(model, tagged.calls, tagged.tags)
        except (LookupError, ValueError, TypeError):
            model = load_onnx(path)
    if model.functions:
        _forget_names(model)
        passes.InlinePass()(model)
        # Its constructor has no annotations.
        passes.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
        passes.RemoveUnusedOpsetsPass()(model)
    try:
        model.graph.sort()  # some tools put new nodes at the end
    except ValueError as error:
        raise FileFormatError(f"{path} is damaged: its nodes depend on each other in a circle") from error
    stores = [node.metadata_props for node in all_nodes(model)]
    stores += [value.metadata_props for value in initializers(model)]
    for store in (model.metadata_props, *stores):
        for key in [key for key in store if key.startswith("modelexport.")]:
            del store[key]
    if tagged.encoding == "attributes":
        for node in all_nodes(model):
            node.attributes.pop(keys.SOURCE_MODULE_ATTRIBUTE, None)
            node.attributes.pop(keys.HIERARCHY_TAGS_ATTRIBUTE, None)
    return model, inlined


def _forget_names(model: ir.Model) -> None:
    """Give what is in the bodies of functions names that mean nothing, in place.

    What one body calls ``linear`` is another value for each call, and one of the flat graph's is called so.
    """
    number = 0
    for function in model.functions.values():
        for node in function.all_nodes():
            node.name = None
            for value in node.outputs:
                value.name = f"inlined_{number}"
                number += 1


def _check_related(changed: Path, tagged: TaggedFile, descent: Descent) -> None:
    """Refuse what was not made of the tagged file.

    Raises:
        UsageError: Too few values are in both.
    """
    share = descent.common / max(descent.total, 1)
    if share < RELATED:
        count = f"{descent.common:,} of its {descent.total:,} values ({share:.0%})"
        raise UsageError(
            f"{changed} was not made of {tagged.path}: {count} come from there; give the tagged file "
            "that the tool read, and let the tool keep the names of values"
        )


def _write(
    model: ir.Model,
    tagged: TaggedFile,
    tags: _FileTags,
    inheritance: Inheritance,
    entries: Mapping[str, documents.StateDictEntry],
) -> None:
    """Write the metadata of a tagged file into the model, in place."""
    for key, text in tagged.model.metadata_props.items():
        if not key.startswith("modelexport."):
            model.metadata_props.setdefault(key, text)
    write_metadata(model, tags, inheritance.origins, entries)


def _documents(
    tagged: TaggedFile,
    model: ir.Model,
    tags: _FileTags,
    descent: Descent,
    inheritance: Inheritance,
    coverage: documents.Coverage,
) -> dict[str, bytes]:
    """The documents that lie beside the tagged file, for what the tool made of it."""
    documents: dict[str, bytes] = {}
    if tagged.hierarchy is not None:
        hierarchy = descended_document(
            tagged.hierarchy,
            model=model,
            values=descent.values,
            tags=tags,
            origins=inheritance.origins,
            coverage=coverage,
        )
        documents[".hierarchy.json"] = msgspec.json.format(msgspec.json.encode(hierarchy), indent=1)
    if coverage.untagged:
        return documents
    if tagged.path.with_suffix(".dag.json").is_file():
        documents[".dag.json"] = encode_table(dag_document(model, tags))
    if tagged.path.with_suffix(".operations.json").is_file():
        documents[".operations.json"] = encode_table(operations_document(model, tags))
    return documents


def _gone(tagged: TaggedFile, model: ir.Model) -> list[str]:
    """The calls that had nodes of their own and have none any more."""
    left = _owners(all_nodes(model))
    return [str(call) for call in _owners(tagged.nodes) if call not in left]


def _owners(nodes: Iterable[ir.Node]) -> dict[ModuleCall, None]:
    return {call: None for node in nodes if (owner := owner_of(node)) is not None for call in owner.calls}
