"""``TaggedFile``: a tagged ONNX file in memory, and its readers. Needs neither torch nor the PyTorch model."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ROOT, CallTree, ModuleCall
from modelexport.core.collected_messages import READING
from modelexport.core.selectors import Selection, find_call, select_calls
from modelexport.core.tags import RecordedTags
from modelexport.errors import FileFormatError, NoSuchCallError
from modelexport.files.document_digests import check_document
from modelexport.files.linked_weights import check_present_weights_files
from modelexport.files.onnx_models import load_onnx
from modelexport.files.path_or_model import Source, as_path
from modelexport.format import documents
from modelexport.format.call_tree import read_call_tree, recorded_tags
from modelexport.format.cut_record import CutRecord
from modelexport.format.keys import CALL_TREE, CUT_FROM, SIDECAR_SUFFIX
from modelexport.format.node_tags import OwnerReader
from modelexport.format.versions import check_version
from modelexport.graph.boundaries import CallBoundary, find_boundaries
from modelexport.graph.names_by_module import name_by_path
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes
from modelexport.graph.properties import format_version, is_tagged, properties_of, text_of
from modelexport.tagged.documents.export_facts import ExportFacts, facts_of_sidecar, present_values
from modelexport.tagged.documents.reader import load_hierarchy
from modelexport.tagged.encodings.encoded import encoded
from modelexport.tagged.encodings.metadata import write_tags
from modelexport.tagged.encodings.reading import unpack_tags
from modelexport.tagged.found_calls.find_calls import FoundCalls, find_calls


@dataclass(frozen=True, eq=False)
class TaggedFile:
    """An ONNX model whose nodes carry the module calls they came from.

    :class:`modelexport.TaggedModel` extends it for interactive use.
    """

    path: Path
    model: ir.Model
    """Flat. Its nodes have owners (:mod:`modelexport.graph.node_owners`), which count; the text of their tags is what
    the file has. :func:`modelexport.tagged.encodings.encoded.encoded` makes it again before a model is written."""
    call_tags: RecordedTags
    """The calls, and what their tags are made of."""
    encoding: str = "metadata"
    """The encoding of the tags in the file."""
    found_calls: FoundCalls | None = None
    """How the calls were found, if the file has no tags."""
    by_value: bool = False
    """Whether its calls and parameters are those of a model, found by the values that both compute."""

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def calls(self) -> CallTree:
        """Every call of the file."""
        return self.call_tags.calls

    @property
    def tags(self) -> Mapping[ModuleCall, str]:
        """The tag of every call."""
        return self.call_tags.tags

    def encoded(self) -> ir.Model:
        """The model as it is written: with the tags of its calls, in the encoding that the file had."""
        return encoded(self.model, self.call_tags, self.encoding)

    @cached_property
    def nodes(self) -> tuple[ir.Node, ...]:
        """Every node, those of nested graphs after their enclosing node."""
        return tuple(all_nodes(self.model))

    @cached_property
    def coverage(self) -> documents.Coverage:
        """How many nodes have an owner by each kind of evidence."""
        return documents.Coverage.of(None if owner is None else owner.evidence for owner in map(owner_of, self.nodes))

    @cached_property
    def hierarchy(self) -> documents.Hierarchy | None:
        """The sidecar, which also has facts that the graph cannot contain; ``None`` if there is none.

        One that cannot be read, or was not written with this file, is not used; a line says so.
        """
        path = self.path.with_suffix(SIDECAR_SUFFIX)
        if self.found_calls is not None or not path.exists():
            return None
        try:
            sidecar = load_hierarchy(path)
            if [call.address for call in sidecar.calls] != [traced.call.address for traced in self.calls]:
                raise FileFormatError(f"{path} does not belong to {self.path}: it has other calls")
            check_document(self.path, self.model, SIDECAR_SUFFIX)
        except FileFormatError as error:
            READING.info("not used: %s", error)
            return None
        return sidecar

    def facts(self) -> ExportFacts | None:
        """What the sidecar knows besides the graph, with the values of the graph, which may be edited afterwards."""
        if self.hierarchy is None:
            return None
        return facts_of_sidecar(self.hierarchy, {value.name or "": value for value in present_values(self.model)})

    @cached_property
    def cut(self) -> CutRecord | None:
        """Which call of which file this file is, if ``extract`` wrote it."""
        cut: CutRecord | None = self.model.meta.get(CUT_FROM)
        if cut is not None and ModuleCall.parse(cut.call) not in self.tags:
            raise FileFormatError(
                f"{self.path} was cut out as the call '{cut.call}', which it does not have: cut it again"
            )
        return cut

    @property
    def top(self) -> ModuleCall:
        """The call that the file is: the root, or the one that ``extract`` cut out."""
        return ROOT if self.cut is None else ModuleCall.parse(self.cut.call)

    def find(self, name: str) -> ModuleCall:
        """The call with an address (``.``, ``encoder.layer.0``, ``shared@1``) or a tag.

        The end of either (``layer.0``, ``BertLayer.0``) or a class will do if only one call has it.
        """
        with self._named_by_node(name):
            return find_call(name, self.tags, where=self.path)

    def select(self, *selectors: str) -> Selection:
        """The calls that selectors pick (see :mod:`modelexport.core.selectors`); without selectors, all."""
        with self._named_by_node(*selectors):
            return select_calls(selectors, self.calls, self.tags, where=self.path)

    @contextmanager
    def _named_by_node(self, *names: str) -> Iterator[None]:
        """Tell the call of a node, or of a node's value, whose name was given as that of a call."""
        try:
            yield
        except NoSuchCallError as error:
            for node, owner in ((node, owner_of(node)) for node in self.nodes):
                given = {node.name, *(value.name for value in node.outputs)}.intersection(filter(None, names))
                if given and owner is not None:
                    kind = "node" if node.name in given else "value"
                    raise NoSuchCallError(
                        f"'{given.pop()}' is a {kind} of the call '{owner.call}' of {self.path}: give this address"
                    ) from error
            raise

    def class_of(self, call: ModuleCall) -> str:
        """The name of the class of the module that was called."""
        return self.call_tags.class_of(call)

    @cached_property
    def boundaries(self) -> Mapping[ModuleCall, CallBoundary]:
        """The values that enter and leave the nodes of each call."""
        return find_boundaries(self.model, self.calls)

    def nodes_of(self, call: ModuleCall) -> Iterator[ir.Node]:
        """The nodes of a call and of the calls inside it, in the order of the graph."""
        return (self.nodes[index] for index in self._node_indices[call])

    @cached_property
    def _node_indices(self) -> Mapping[ModuleCall, list[int]]:
        indices: dict[ModuleCall, list[int]] = {traced.call: [] for traced in self.calls}
        for index, node in enumerate(self.nodes):
            owner = owner_of(node)
            for call in {around for owned in owner.calls for around in self.calls.stack(owned)} if owner else ():
                indices[call].append(index)
        return indices

    def describe_nodes(self, calls: Container[ModuleCall]) -> list[NodeRow]:
        """The nodes that calls own, as rows, in the order of the graph."""
        rows = []
        for node in self.nodes:
            owner = owner_of(node)
            if owner is None or not any(call in calls for call in owner.calls):
                continue
            rows.append(
                NodeRow(
                    node.name or "",
                    node.op_type,
                    owner.call.address,
                    self.call_tags.source_tag(owner.call),
                    owner.evidence.value,
                    [value.name or "" if value is not None else "" for value in node.inputs],
                    [value.name or "" for value in node.outputs],
                    [other.address for other in owner.calls[1:]],
                    owner.line,
                )
            )
        return rows


class NodeRow(msgspec.Struct, frozen=True):
    """One node, as shown by ``modelexport nodes``."""

    name: str
    op_type: str
    call: str
    source_module: str
    evidence: str
    inputs: list[str]
    outputs: list[str]
    also: list[str]
    """The other calls that own it."""
    line: str
    """The line of the model's code that made it, ``net:12``; empty if it is not known."""


def read_tagged(path: Source, *, checked: bool = True) -> TaggedFile:
    """Read any ONNX file. Weights are read from the file when they are first used.

    The calls are those of its tags. In a file without tags, or with none left at its nodes, they are looked for
    (:func:`find_calls`).

    Args:
        checked: Also check that its weights files, if they exist, are unchanged.

    Raises:
        FileFormatError: The file is missing, is not an ONNX file, or has tags of an unknown format version; or a
            weights file is not the one that was written with it.
    """
    path = as_path(path)
    model = load_onnx(path)
    if not is_tagged(model):
        return read_untagged(path, model)
    check_version(path, format_version(model))
    try:
        entries = read_call_tree(text_of(model, CALL_TREE) or "[]")
        encoding = unpack_tags(model, entries)
        owners = OwnerReader(CallTree(tuple(entries)))
        for node in all_nodes(model):
            set_owner(node, owners.read(properties_of(node)))
        tags = recorded_tags(entries)
        if encoding == "functions":
            name_by_path(model)
            write_tags(model, tags)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{path} has damaged tags ({error}): export it again") from error
    if checked:
        check_present_weights_files(model)
    nodes = list(all_nodes(model))
    if nodes and all(owner_of(node) is None for node in nodes):
        return read_untagged(path, model, were_lost=True)
    return TaggedFile(path, model, tags, encoding)


def as_tagged(source: Source | TaggedFile) -> TaggedFile:
    """A file that was read already as it is; any other is read."""
    return source if isinstance(source, TaggedFile) else read_tagged(source)


def read_untagged(path: Path, model: ir.Model, *, were_lost: bool = False) -> TaggedFile:
    """A file without tags, with the calls that were found; the model is tagged in place."""
    try:
        found_calls = find_calls(model, were_lost=were_lost)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from error
    READING.info("%s has %s", path, found_calls.sentence)
    return TaggedFile(path, model, found_calls.tags.recorded(), found_calls=found_calls)
