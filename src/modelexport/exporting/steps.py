"""The steps of an export between capture and writing the file; ``pipeline.py`` has their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from modelexport.capture.exported_graph import Exported
from modelexport.core.collected_messages import collected
from modelexport.core.module_tree import ModuleTree
from modelexport.core.tags import Tags
from modelexport.core.text import root_cause
from modelexport.core.timed_stages import Stages
from modelexport.core.uncalled_modules import compare_hierarchies
from modelexport.errors import CaptureError
from modelexport.exporting.constant_folding import fold_packed, fold_quantized
from modelexport.exporting.front_end_choice import Attempt
from modelexport.exporting.graph_passes import finish, optimize_graph
from modelexport.exporting.markdown_report import report_path
from modelexport.exporting.options import GraphOptions, Options, TagOptions
from modelexport.exporting.runtime_fusion import Fusion, describe_fusion, fuse_graph
from modelexport.files.onnx_models import record_documents, save_with_references
from modelexport.files.protobuf_writing import Tensors
from modelexport.format import documents
from modelexport.format.keys import DAG_SUFFIX, OPERATIONS_SUFFIX, SIDECAR_SUFFIX
from modelexport.graph.bound_tensors import bind_tensors, detach_parameters, order_uses
from modelexport.graph.boundaries import find_boundaries
from modelexport.graph.coverage import check_coverage
from modelexport.graph.kept_outputs import record_exposed
from modelexport.graph.names_by_module import name_nodes_by_path, name_values_by_path
from modelexport.graph.nodes import all_nodes
from modelexport.graph.parameter_plans import record_state_dict
from modelexport.graph.size_conditions import SizeCondition, record_conditions
from modelexport.graph.snapshot import SourceGraph, take_snapshot
from modelexport.graph.undetermined_ranks import forget_undetermined_ranks
from modelexport.graph.unique_names import name_nodes_apart, with_unique_names
from modelexport.lineage.owners_after_passes import derive_owners
from modelexport.pytorch.calls.module_tree_of_model import containers
from modelexport.tagged.documents.dag import dag_document
from modelexport.tagged.documents.encoded_documents import encode_sidecar, encode_table
from modelexport.tagged.documents.export_facts import facts_of_export
from modelexport.tagged.documents.hierarchy_sidecar import hierarchy_document
from modelexport.tagged.documents.operations import operations_document
from modelexport.tagged.encodings.attributes import write_attributes
from modelexport.tagged.encodings.functions import FunctionsModel, write_functions
from modelexport.tagged.encodings.metadata import drop_foreign_metadata, write_tags
from modelexport.weights.bytes_of_entries import Weights, stays_in_file
from modelexport.weights.entries_of_initializers import (
    Computed,
    name_after_entries,
    record_plans,
    state_dict_entries,
    with_initializers,
)
from modelexport.weights.linked_copied_embedded import place_weights

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class AsPart:
    """How a graph is exported that becomes a part of a package."""

    name_values: Callable[[Exported], Exported]
    """Gives its inputs, outputs and axes the names that runtimes expect."""
    one_row: Mapping[str, Any] | None = None
    """Inputs of one row, with which the file is checked, if its graph, once it is fused, takes several new tokens after
    a cache for a batch of one row only."""
    batch: str = ""
    """The symbol of the batch."""


@dataclass(frozen=True)
class Unoptimized:
    """Facts about the captured graph that are needed after passes have changed it."""

    source: SourceGraph
    computed: Computed
    tensors: dict[ir.Value, ir.TensorProtocol]
    """The tensors of parameters, until the optimized graph is bound to them."""
    entries: Mapping[str, documents.StateDictEntry]


@dataclass(frozen=True)
class Tagged:
    """The tags of a graph, and what was found while they were written."""

    tags: Tags
    values: Mapping[str, ir.Value]
    """Names of values of the unoptimized graph to the values of the optimized one, for those that still exist."""
    outputs_of_any_rank: Sequence[str]
    """Names of outputs whose number of axes depends on the sizes of inputs."""


@dataclass(frozen=True)
class Fused:
    """A graph after its nodes were fused."""

    values: Mapping[str, ir.Value]
    """Names of values of the unoptimized graph to the values of the fused one, for those that still exist."""
    found: Fusion


def remember(model: nn.Module, exported: Exported, weights: Weights | None) -> Unoptimized:
    """Record the graph before it is optimized, and detach the tensors of its parameters."""
    graph = exported.model
    parameters = with_unique_names(graph, exported.parameters)
    source = take_snapshot(graph)
    computed = Computed(source, parameters, graph.opset_imports)
    entries = state_dict_entries(model, parameters, graph)
    tensors = detach_parameters(graph, parameters, {} if weights is None else weights.tensors)
    fold_packed(graph, tensors)
    fold_quantized(graph, tensors, computed)
    return Unoptimized(source, computed, tensors, entries)


def optimize_exported(exported: Exported, before: Unoptimized) -> list[str]:
    """Optimize a captured graph in place; parameters and the values at boundaries are kept.

    Returns:
        The optimizer's warnings.
    """

    def reads_file(node: ir.Node) -> bool:
        return any(value is not None and stays_in_file(before.tensors.get(value)) for value in node.inputs)

    with collected() as messages:
        try:
            optimize_graph(
                exported.model,
                parameters=before.tensors,
                may_fold=lambda node: before.computed.may_fold(node) and not reads_file(node),
                keep=frozenset(exported.values.values()),
            )
        except ir.passes.PassError as error:
            raise CaptureError(
                f"the captured graph cannot be optimized: {root_cause(error)}; --no-optimize (optimized=False) leaves "
                f"it as it is"
            ) from error
    return messages


def fuse(
    exported: Exported, before: Unoptimized, tree: ModuleTree, wanted: GraphOptions, part: AsPart | None
) -> Fused | None:
    """Fuse an optimized graph in place, and assign every node its owner."""
    if wanted.fuse is None:
        return None
    graph = exported.model
    nodes = sum(1 for _ in all_nodes(graph))
    present = derive_owners(before.source, graph)
    now = fuse_graph(graph, wanted.fuse, row=part.batch if part is not None and part.one_row is not None else None)
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
    """Assign every node its owner and write the tags into the graph, in place.

    Args:
        fused: The graph was fused, and its nodes have their owners.
    """
    graph = exported.model
    bind_tensors(before.tensors)
    present = fused.values if fused is not None else derive_owners(before.source, graph)
    finish(graph, exported.output_names, before.entries)
    of_any_rank = forget_undetermined_ranks(graph)
    check_coverage(graph)
    record_exposed(graph, exported.exposed)
    tags = tags_of(tree, exported, options)
    record_plans(before.computed, graph)
    name_after_entries(graph)
    name_nodes_apart(graph)
    if options.node_names == "path":
        name_nodes_by_path(graph)
        name_values_by_path(graph)
    if fused is not None:
        order_uses(graph)
    record_state_dict(graph, with_initializers(before.entries, graph))
    if not options.keep_torch_metadata:
        drop_foreign_metadata(graph)
    write_tags(graph, tags)
    return Tagged(tags, present, of_any_rank)


def tags_of(tree: ModuleTree, exported: Exported, options: TagOptions) -> Tags:
    """The tags of the captured calls."""
    return Tags(tree, exported.calls, granularity=options.granularity, include=options.include, exclude=options.exclude)


@dataclass(frozen=True)
class Described:
    """The documents of an export."""

    hierarchy: documents.Hierarchy
    dags: Mapping[str, documents.Dag]
    files: Mapping[str, bytes]
    """Suffix to content, as they are written."""


def describe(
    model: nn.Module,
    exported: Exported,
    before: Unoptimized,
    tagged: Tagged,
    *,
    name: str | None,
    settings: documents.Settings,
) -> Described:
    """The documents of an export."""
    graph, tags = exported.model, tagged.tags
    boundaries = find_boundaries(graph, exported.calls)
    values = {port: tagged.values.get(name) for port, name in exported.values.items()}
    facts = facts_of_export(
        name=name or tags.tree.root.class_name,
        model=graph,
        source=before.source,
        values={port: value for port, value in values.items() if value is not None},
        tags=tags,
        comparison=compare_hierarchies(tags.tree, exported.calls, containers(model)),
        settings=settings,
        boundaries=boundaries,
    )
    hierarchy = hierarchy_document(facts, graph, tags, boundaries)
    dags = dag_document(graph, tags)
    files = {
        SIDECAR_SUFFIX: encode_sidecar(hierarchy),
        DAG_SUFFIX: encode_table(dags),
        OPERATIONS_SUFFIX: encode_table(operations_document(graph, tags)),
    }
    return Described(hierarchy, dags, files)


def encode(graph: ir.Model, tags: Tags, tags_as: str) -> FunctionsModel | None:
    """Convert the tags of a graph to another encoding: in place, or as a separate model with functions."""
    if tags_as == "functions":
        return write_functions(graph, tags)
    if tags_as == "attributes":
        write_attributes(graph, tags)
    return None


def write_files(graph: ir.Model, placed: Tensors, documents: Mapping[str, bytes], staged: Path) -> None:
    """Write a model whose weights are in place to ``staged``, and its documents beside it."""
    record_documents(graph, documents)
    save_with_references(graph, staged, placed)
    for suffix, document in documents.items():
        staged.with_suffix(suffix).write_bytes(document)


def list_files(staged: Path, path: Path, dag_dir: Path | None, *, report: bool) -> list[Path]:
    """The files that exist after those beside ``staged`` are moved beside ``path``.

    Args:
        report: Whether the report is still to be written.
    """
    files = {*staged.parent.iterdir(), *([report_path(staged)] if report else [])}
    return [*(path.parent / file.name for file in sorted(files)), *([dag_dir] if dag_dir is not None else [])]


@dataclass
class StagedExport:
    """The files of an export in their staging folder: the weights once, the graph and its documents by each `write`."""

    model: nn.Module
    exported: Exported
    before: Unoptimized
    tagged: Tagged
    attempts: Sequence[Attempt]
    options: Options
    stages: Stages
    path: Path
    """Where the file will be moved."""
    staged: Path
    """Where it is written."""
    name: str | None
    """The model's name in the documents."""

    def __post_init__(self) -> None:
        with self.stages("encoding"):
            self.functions = encode(self.exported.model, self.tagged.tags, self.options.tags.tags_as)
        self.graph = self.functions.model if self.functions else self.exported.model
        asked = self.options.weights
        with self.stages("write"):
            self.placed, self.weights = place_weights(
                self.graph, self.path, self.staged.parent, mode=asked.weights, weights=asked.source
            )

    @property
    def asks_for_values(self) -> bool:
        """Whether the model asks for values; the file is then compared on other inputs, too."""
        return self.exported.answered or any(attempt.asks_for_values for attempt in self.attempts)

    def write(self, conditions: Sequence[SizeCondition]) -> None:
        """Write the file and its documents, with the conditions of sizes under which the file is right."""
        for model in (self.exported.model, self.graph):
            record_conditions(model, conditions)
        with self.stages("documents"):
            settings = self.options.settings(self.exported, self.attempts, conditions)
            self.described = describe(
                self.model, self.exported, self.before, self.tagged, name=self.name, settings=settings
            )
        with self.stages("write"):
            write_files(self.graph, self.placed, self.described.files, self.staged)
