"""The steps of an export between capture and the written file; ``pipeline.py`` has their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import onnx_ir as ir

from modelexport.capture.exported import Exported
from modelexport.core.hierarchies import compare_hierarchies
from modelexport.core.messages import collected
from modelexport.core.modules import ModuleTree
from modelexport.core.tags import Tags
from modelexport.exporting.fusion import Fusion, describe_fusion, fuse_graph
from modelexport.exporting.optimizer import finish, optimize_graph
from modelexport.exporting.options import FuseOptions, TagOptions, WeightOptions
from modelexport.format import documents
from modelexport.graph.coverage import check_coverage
from modelexport.graph.initializers import bind_tensors
from modelexport.graph.names import name_nodes_apart, with_unique_names
from modelexport.graph.nodes import all_nodes
from modelexport.graph.path_names import name_nodes_by_path
from modelexport.graph.snapshot import SourceGraph, take_snapshot
from modelexport.lineage.derivation import derive_owners
from modelexport.pytorch.static import containers
from modelexport.tagged.documents.operations import operations_document
from modelexport.tagged.documents.sidecar import hierarchy_document
from modelexport.tagged.documents.tables import encode_table
from modelexport.tagged.encodings.attributes import write_attributes
from modelexport.tagged.encodings.functions import FunctionsModel, write_functions
from modelexport.tagged.encodings.metadata import write_metadata
from modelexport.weights.origins import Computed, Origin, find_origins, name_after_entries, state_dict_entries
from modelexport.weights.placement import WeightsSummary, save_with_weights
from modelexport.weights.sources import Weights, detach_parameters, stays_in_file

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Unoptimized:
    """What has to be known of the graph as it was captured, once passes have changed it."""

    source: SourceGraph
    computed: Computed
    tensors: dict[ir.Value, ir.TensorProtocol]
    """Of parameters, until the optimised graph is bound to them."""
    entries: Mapping[str, documents.StateDictEntry]


@dataclass(frozen=True)
class Tagged:
    """What the tags of a graph are made from, and what was found while they were written."""

    tags: Tags
    coverage: documents.Coverage
    origins: Mapping[str, Origin]
    """Name of an initializer to the entries that it is, or is computed from."""
    values: Mapping[str, ir.Value]
    """Names of values of the unoptimised graph to what they are in the optimised one, where they are there."""


@dataclass(frozen=True)
class Fused:
    """A graph after its nodes were fused."""

    values: Mapping[str, ir.Value]
    """Names of values of the unoptimised graph to what they are now, where they are there."""
    found: Fusion


def remember(model: nn.Module, exported: Exported, weights: Weights | None) -> Unoptimized:
    """Record the graph before it is optimised, and take the tensors of its parameters off it."""
    graph = exported.model
    parameters = with_unique_names(graph, exported.parameters)
    source = take_snapshot(graph)
    computed = Computed(source, parameters, graph.opset_imports)
    entries = state_dict_entries(model, parameters, graph)
    return Unoptimized(source, computed, detach_parameters(graph, parameters, weights), entries)


def optimize_exported(exported: Exported, before: Unoptimized) -> list[str]:
    """Optimise a captured graph in place; parameters and the values at boundaries stay.

    Returns:
        What the optimiser warned of.
    """

    def reads_file(node: ir.Node) -> bool:
        return any(value is not None and stays_in_file(before.tensors.get(value)) for value in node.inputs)

    with collected() as messages:
        optimize_graph(
            exported.model,
            parameters=before.tensors,
            may_fold=lambda node: before.computed.may_fold(node) and not reads_file(node),
            keep=frozenset(exported.values.values()),
        )
    return messages


def fuse(exported: Exported, before: Unoptimized, tree: ModuleTree, wanted: FuseOptions) -> Fused | None:
    """Fuse an optimised graph in place, and give every node its owner."""
    if wanted.fuse is None:
        return None
    graph = exported.model
    nodes = sum(1 for _ in all_nodes(graph))
    present = derive_owners(before.source, graph)
    now = fuse_graph(graph, wanted.fuse, row=wanted.row)
    values = {name: now[value.name] for name, value in present.items() if value.name and value.name in now}
    return Fused(
        values,
        describe_fusion(
            graph, wanted.fuse, nodes, tree, exported.calls, exported.values, (present.keys(), values.keys())
        ),
    )


def tag(
    exported: Exported, before: Unoptimized, tree: ModuleTree, options: TagOptions, fused: Fused | None = None
) -> Tagged:
    """Give every node its owner and write the tags into the graph, in place.

    Args:
        fused: The graph was fused, and its nodes have their owners.

    Raises:
        UntaggedNodeError: A node has no owner.
    """
    graph = exported.model
    bind_tensors(before.tensors)
    present = fused.values if fused is not None else derive_owners(before.source, graph)
    finish(graph, exported.output_names, before.entries)
    coverage = check_coverage(graph)
    tags = Tags(tree, exported.calls, granularity=options.granularity, include=options.include, exclude=options.exclude)
    origins = name_after_entries(graph, find_origins(before.computed, graph))
    name_nodes_apart(graph)
    if options.node_names == "path":
        name_nodes_by_path(graph)
    write_metadata(graph, tags, origins, before.entries, keep_torch_metadata=options.keep_torch_metadata)
    return Tagged(tags, coverage, origins, present)


def describe(
    model: nn.Module,
    exported: Exported,
    before: Unoptimized,
    tagged: Tagged,
    *,
    name: str | None,
    settings: documents.Settings,
) -> documents.Hierarchy:
    """The sidecar of an export."""
    tree = tagged.tags.tree
    return hierarchy_document(
        name=name or tree.root.class_name,
        model=exported.model,
        source=before.source,
        tree=tree,
        calls=exported.calls,
        values={port: tagged.values[name] for port, name in exported.values.items() if name in tagged.values},
        tags=tagged.tags,
        comparison=compare_hierarchies(tree, exported.calls, containers(model)),
        origins=tagged.origins,
        coverage=tagged.coverage,
        settings=settings,
    )


def encode(graph: ir.Model, tags: Tags, tags_as: str) -> FunctionsModel | None:
    """Bring the tags of a graph into another encoding: in place, or as a model of functions beside it."""
    if tags_as == "functions":
        return write_functions(graph, tags)
    if tags_as == "attributes":
        write_attributes(graph)
    return None


def encode_documents(
    hierarchy: documents.Hierarchy, dags: Mapping[str, documents.Dag], graph: ir.Model, tags: Tags
) -> dict[str, bytes]:
    """The JSON documents of an export: suffix to content."""
    return {
        ".hierarchy.json": msgspec.json.format(msgspec.json.encode(hierarchy), indent=1),
        ".dag.json": encode_table(dags),
        ".operations.json": encode_table(operations_document(graph, tags)),
    }


def write_files(
    graph: ir.Model,
    tagged: Tagged,
    documents: Mapping[str, bytes],
    path: Path,
    staging: Path,
    options: WeightOptions,
) -> WeightsSummary:
    """Write a model and its documents to ``staging``, from where they will be moved beside ``path``."""
    weights = save_with_weights(
        graph,
        path,
        staging,
        mode=options.weights,
        parameters=tagged.origins,
        weights=options.source,
        documents=documents,
    )
    for suffix, document in documents.items():
        (staging / path.name).with_suffix(suffix).write_bytes(document)
    return weights
