"""A tagged file, read back. Needs neither torch nor the PyTorch model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import onnx_ir as ir

from modelexport import schema
from modelexport.boundaries import CallBoundary, boundaries
from modelexport.call_tree import check_version, read_call_tree
from modelexport.core import CallTree, Evidence, ModuleCall, Owner
from modelexport.documents import check_same_calls, check_same_nodes, load_hierarchy
from modelexport.embedded import load_without_weights
from modelexport.errors import FileFormatError, UsageError
from modelexport.garbage import only_new_garbage
from modelexport.graph import OWNER, all_nodes, owned_operators, owner_of
from modelexport.names import nearest
from modelexport.skim import Skimmed
from modelexport.tree import tree_rows, untagged_operators
from modelexport.unpack import unpack
from modelexport.view import ModuleView
from modelexport.weights import read_linked

if TYPE_CHECKING:
    from modelexport.extract import Extracted


@dataclass(frozen=True, eq=False)
class TaggedModel:
    """An ONNX model whose nodes carry the module calls they came from.

    ``tagged["encoder.layer.0"]`` is a call, by address or tag; iteration gives every call, callers before callees.
    Printed, and in a notebook, it is a tree.
    """

    path: Path
    model: ir.Model
    calls: CallTree
    tags: Mapping[ModuleCall, str]
    """The tag of every call."""
    carrier: str = "metadata"
    """How the file carries the tags. The model in memory is flat, with tags as metadata, whatever this is."""

    @cached_property
    def nodes(self) -> tuple[ir.Node, ...]:
        """Every node, those of nested graphs after the node that holds them."""
        return tuple(all_nodes(self.model))

    @cached_property
    def coverage(self) -> schema.Coverage:
        """How many nodes have an owner by which evidence."""
        counts = Counter(None if owner is None else owner.evidence for owner in map(owner_of, self.nodes))
        return schema.Coverage(*(counts[kind] for kind in (*Evidence, None)))

    @property
    def skimmed(self) -> Skimmed:
        """What its tree shows."""
        return Skimmed(self.calls, dict(self.tags), list(owned_operators(self.model)), self.coverage)

    @cached_property
    def hierarchy(self) -> schema.Hierarchy | None:
        """The sidecar, which also knows what the graph cannot hold; ``None`` if there is none.

        Raises:
            FileFormatError: It cannot be read, or was not written for this file. Says what differs first.
        """
        path = self.path.with_suffix(".hierarchy.json")
        if not path.exists():
            return None
        sidecar = load_hierarchy(path)
        entries = [
            schema.CallTreeEntry(
                traced.call.address, self.tags[traced.call], None if traced.parent is None else traced.parent.address
            )
            for traced in self.calls
        ]
        check_same_calls(path, sidecar, entries)
        check_same_nodes(path, sidecar, self.nodes)
        return sidecar

    def __getitem__(self, name: str) -> ModuleView:
        """The call that an address or a tag names (see :meth:`find`)."""
        return ModuleView(self, self.find(name))

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self.find(name) is not None
        except UsageError:
            return False

    def __iter__(self) -> Iterator[ModuleView]:
        return (ModuleView(self, traced.call) for traced in self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __str__(self) -> str:
        from modelexport.render import format_tree

        nodes = self.skimmed.nodes
        return format_tree(
            tree_rows(nodes, self.calls, self.tags.__getitem__), self.coverage, untagged_operators(nodes)
        )

    def __repr__(self) -> str:
        return f"<TaggedModel {self.path}: {len(self.calls)} calls, {len(self.nodes)} nodes>"

    def _repr_html_(self) -> str:
        return self["."]._repr_html_()

    def find(self, name: str) -> ModuleCall:
        """The call that an address (``.``, ``encoder.layer.0``, ``shared@1``) or a tag names.

        The end of either (``layer.0``, ``BertLayer.0``) or a class does as well where only one call has it.

        Raises:
            UsageError: There is none, or there are several; names those, or the nearest that there are.
        """
        by_name = {str(call): call for call in self.tags} | {tag: call for call, tag in self.tags.items()}
        if name in by_name:
            return by_name[name]
        ends = (f".{name}", f"/{name.removeprefix('/')}")
        meant = [
            call
            for call, tag in self.tags.items()
            if str(call).endswith(ends[0]) or tag.endswith(ends[1]) or self.class_of(call) == name
        ]
        if len(meant) == 1:
            return meant[0]
        if meant:
            some = ", ".join(map(str, meant[:5])) + (f" and {len(meant) - 5} more" if len(meant) > 5 else "")
            raise UsageError(f"'{name}' is ambiguous in {self.path}: it could be {some}; give one of these")
        known = [known for known in by_name if known.startswith("/") == name.startswith("/")]
        raise UsageError(
            f"{self.path} has no module call '{name}'{nearest(name, known)}; `modelexport tree {self.path}` lists them"
        )

    def class_of(self, call: ModuleCall) -> str:
        """The name of the class of the module that was called."""
        segment = self.tags[call].rpartition("/")[2]
        return segment.partition("@")[0].partition(".")[0]

    def extract(self, name: str, output: str | Path) -> Extracted:
        """Write one module call as a model of its own: see :func:`modelexport.extract.extract`."""
        from modelexport.extract import extract

        return extract(self, name, output)

    @cached_property
    def borders(self) -> Mapping[ModuleCall, CallBoundary]:
        """The values that enter and leave the nodes of each call."""
        return boundaries(self.model, self.calls)

    def nodes_of(self, call: ModuleCall) -> Iterator[ir.Node]:
        """The nodes of a call and of the calls inside it, in the order of the graph."""
        return (self.nodes[index] for index in self._node_indices[call])

    @cached_property
    def _node_indices(self) -> Mapping[ModuleCall, list[int]]:
        found: dict[ModuleCall, list[int]] = {traced.call: [] for traced in self.calls}
        for index, node in enumerate(self.nodes):
            owner = owner_of(node)
            for call in {around for owned in owner.calls for around in self.calls.stack(owned)} if owner else ():
                found[call].append(index)
        return found

    def describe_nodes(self, call: ModuleCall) -> list[NodeRow]:
        """The nodes of a call and of the calls inside it, as values."""
        rows = []
        for node in self.nodes_of(call):
            owner = owner_of(node)
            assert owner is not None
            rows.append(
                NodeRow(
                    node.name or "",
                    node.op_type,
                    owner.call.address,
                    node.metadata_props[schema.SOURCE_MODULE],
                    owner.evidence.value,
                    [value.name or "" if value is not None else "" for value in node.inputs],
                    [value.name or "" for value in node.outputs],
                    [other.address for other in owner.calls[1:]],
                )
            )
        return rows


class NodeRow(msgspec.Struct, frozen=True):
    """One node, as ``modelexport nodes`` shows it."""

    name: str
    op_type: str
    call: str
    source_module: str
    evidence: str
    inputs: list[str]
    outputs: list[str]
    also: list[str]
    """The other calls that own it."""


@only_new_garbage()
def load(path: str | Path) -> TaggedModel:
    """Read a tagged ONNX file. Weights are read when they are used, from the file as it was.

    Raises:
        FileFormatError: It is missing, not an ONNX file, has no tags, or has those of an unknown format version.
    """
    path = Path(path)
    model = load_onnx(path)
    check_version(path, model.metadata_props)
    try:
        calls, tags = read_call_tree(model.metadata_props)
        carrier = unpack(model, calls, tags)
        owners: dict[tuple[str, str], Owner] = {}
        for node in all_nodes(model):
            owner = _read_owner(node, owners)
            if owner is not None:
                node.meta[OWNER] = owner
    except (LookupError, ValueError, TypeError) as error:
        raise FileFormatError(f"{path} has damaged tags ({error}): export it again") from error
    return TaggedModel(path, model, calls, tags, carrier)


def load_onnx(path: Path) -> ir.Model:
    """Read any ONNX file.

    Raises:
        FileFormatError: It is missing, empty, or not an ONNX file.
    """
    if not path.is_file():
        raise FileFormatError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise FileFormatError(f"{path} is empty: it was not written completely; export it again")
    try:
        model = load_without_weights(path)
    except Exception as error:  # protobuf's exception type is not public, and damage shows in many ways
        raise FileFormatError(f"{path} is not an ONNX file, or damaged ({type(error).__name__})") from error
    read_linked(model, path.parent)
    if not model.opset_imports and not len(model.graph):
        raise FileFormatError(f"{path} is not an ONNX file: it has no operator set and no nodes")
    return model


def _read_owner(node: ir.Node, known: dict[tuple[str, str], Owner]) -> Owner | None:
    """What a node's metadata says; nodes of which it says the same share one object."""
    properties = node.metadata_props
    if schema.CALL not in properties:
        return None
    calls, evidence = properties.get(schema.CALLS) or json.dumps([properties[schema.CALL]]), properties[schema.EVIDENCE]
    if (calls, evidence) not in known:
        owner = Owner(tuple(ModuleCall.parse(call) for call in json.loads(calls)), Evidence(evidence))
        known[calls, evidence] = owner
    return known[calls, evidence]
