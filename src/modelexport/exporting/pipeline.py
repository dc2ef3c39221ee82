"""``export``: a PyTorch model becomes a tagged ONNX file and the documents beside it. The page to read first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from modelexport.core.hierarchies import compare_hierarchies
from modelexport.core.quiet import quiet
from modelexport.core.stages import Stages
from modelexport.core.tags import Granularity, Tags
from modelexport.exporting.optimizer import finish, optimize_graph
from modelexport.exporting.report import write_report
from modelexport.exporting.result import ExportResult
from modelexport.files.atomic import check_writable, written_together
from modelexport.format import documents
from modelexport.graph.coverage import check_coverage
from modelexport.graph.names import name_nodes_apart, with_unique_names
from modelexport.graph.owners import owned_operators
from modelexport.graph.snapshot import snapshot
from modelexport.lineage.derivation import derive_owners
from modelexport.tagged.documents.dag import check_dag_directory, dag_document, write_dag_files
from modelexport.tagged.documents.operations import operations_document
from modelexport.tagged.documents.sidecar import hierarchy_document
from modelexport.tagged.documents.tables import encode_table
from modelexport.tagged.encodings.attributes import write_attributes
from modelexport.tagged.encodings.functions import write_functions
from modelexport.tagged.encodings.metadata import write_metadata
from modelexport.tagged.flattening import runnable
from modelexport.tagged.tree import tree_rows
from modelexport.weights.origins import Computed, find_origins, name_after_entries, state_dict_entries
from modelexport.weights.placement import reachable, save_with_weights, stays_in_file, use_weights

if TYPE_CHECKING:
    from torch import nn

    from modelexport.capture.choice import FrontEnd
    from modelexport.weights.sources import Weights


def export(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    path: str | Path,
    *,
    name: str | None = None,
    frontend: FrontEnd = "auto",
    dynamic: bool = False,
    opset: int | None = None,
    granularity: Granularity = "auto",
    include: Collection[str] = (),
    exclude: Collection[str] = (),
    optimized: bool = True,
    weights: Literal["auto", "link", "copy", "none"] = "auto",
    source: Weights | None = None,
    keep_torch_metadata: bool = False,
    dag_dir: str | Path | None = None,
    tags_as: Literal["metadata", "attributes", "functions"] = "metadata",
    verify: bool = False,
    reference: bool | Sequence[str] = False,
    stages: Stages | None = None,
) -> ExportResult:
    """Export a model to ``path``, every node tagged with the module call it came from.

    The model is exported in evaluation mode and is as before afterwards.

    Args:
        model: Any ``nn.Module``.
        inputs: Example inputs: keyword arguments of ``forward``, or positional ones.
        path: ``DIR/NAME.onnx``. ``NAME.hierarchy.json``, ``NAME.dag.json``, ``NAME.operations.json`` and
            ``NAME.report.md`` are written beside it.
        name: What the documents call the model; its class if left out.
        frontend: ``dynamo``, ``torchscript``, or ``auto``: `torchscript` where `dynamo` fails.
        dynamic: Leave every axis of every input that the model does not fix open.
        opset: The opset of the standard domain; the exporter's default if left out.
        granularity: Which modules get a segment in the tags (see :class:`~modelexport.core.tags.Tags`).
        include: Classes that get a segment as well.
        exclude: Classes that get none.
        optimized: Fold constants, rewrite and merge equal nodes.
        weights: ``link`` leaves the weights in the files of ``source``, ``copy`` puts them into ``NAME.onnx.data``,
            ``none`` describes them and leaves them out. ``auto`` links where there is a ``source``, and otherwise
            copies above 1 GB and embeds below.
        source: Where the weights of a model are that was built without them
            (:func:`modelexport.pytorch.loading.load_model` with ``weights="files"``).
        keep_torch_metadata: Keep the exporter's own ``pkg.torch.*`` keys, which hold paths of this machine.
        dag_dir: A folder for the entries of ``NAME.dag.json`` as files of their own; made if need be.
        tags_as: How the file carries the tags: ``metadata`` of nodes, ``attributes`` of nodes (which ONNX Runtime
            refuses until :func:`modelexport.strip` removes them), or ``functions``, one for each distinct module.
        verify: Run both models on ``inputs`` and compare every output.
        reference: Keep the inputs and boundary values of every call, or of the calls with these addresses or tags and those
            inside them, in ``NAME.reference.safetensors``: they prove the file without PyTorch.
        stages: Times the stages of the export; says on the way which one is running.

    Raises:
        CaptureError: The model cannot be exported.
        UsageError: The front end does not write this opset.
        InputsError: The inputs do not fit.
        OutputError: The files cannot be written. What was there before is still there.
        UntaggedNodeError: A node has no owner. Nothing is written.
    """
    from modelexport.capture.choice import capture
    from modelexport.pytorch.static import containers, module_tree

    path = Path(path)
    check_writable(path)
    if dag_dir is not None:
        check_dag_directory(Path(dag_dir))
    stages = stages or Stages()
    with stages("capture"):
        tree = module_tree(model)
        exported = capture(model, inputs, frontend, dynamic=dynamic, opset=opset)
        graph = exported.model
    with stages("optimize"):
        parameters = with_unique_names(graph, exported.parameters)
        if source is not None:
            use_weights(graph, parameters, source)
        unoptimized = snapshot(graph)
        computed = Computed(unoptimized, parameters, graph.opset_imports)
        entries = state_dict_entries(model, parameters, graph)
        if optimized:
            with quiet():
                optimize_graph(
                    graph,
                    is_parameter=computed.depends,
                    may_fold=lambda node: computed.may_fold(node) and not any(map(stays_in_file, node.inputs)),
                    keep=frozenset(exported.values.values()),
                )
    with stages("tag"):
        present = derive_owners(unoptimized, graph)
        finish(graph, exported.output_names)
        coverage = check_coverage(graph)
        tags = Tags(tree, exported.calls, granularity=granularity, include=include, exclude=exclude)
        found = name_after_entries(graph, find_origins(computed, graph))
        name_nodes_apart(graph)
        write_metadata(graph, tags, found, entries, keep_torch_metadata=keep_torch_metadata)
    with stages("documents"):
        hierarchy = hierarchy_document(
            name=name or tree.root.class_name,
            model=graph,
            source=unoptimized,
            tree=tree,
            calls=exported.calls,
            values={port: present[name] for port, name in exported.values.items() if name in present},
            tags=tags,
            comparison=compare_hierarchies(tree, exported.calls, containers(model)),
            origins=found,
            coverage=coverage,
            settings=documents.Settings(
                frontend=exported.frontend,
                dynamo_failure=exported.dynamo_failure,
                granularity=granularity,
                include=sorted(include),
                exclude=sorted(exclude),
                dynamic=dynamic,
                optimize=optimized,
            ),
        )
        dags = dag_document(graph, tags)
        written_documents = {
            ".hierarchy.json": msgspec.json.format(msgspec.json.encode(hierarchy), indent=1),
            ".dag.json": encode_table(dags),
            ".operations.json": encode_table(operations_document(graph, tags)),
        }
    functions = None
    with stages("encoding"):
        if tags_as == "functions":
            functions = write_functions(graph, tags)
        elif tags_as == "attributes":
            write_attributes(graph)
    verified = None
    with written_together(path.parent) as staging:
        with stages("write"):
            written = functions.model if functions else graph
            summary = save_with_weights(written, path, staging, mode=weights, parameters=found, weights=source)
            for suffix, document in written_documents.items():
                (staging / path.name).with_suffix(suffix).write_bytes(document)
        with reachable(staging, path, summary) if verify or reference else nullcontext():
            if verify:
                from modelexport.verify.model import verify as verify_file

                with stages("verify"), runnable(staging / path.name, tags_as) as file:
                    verified = verify_file(model, inputs, file, sidecar=hierarchy, weights=source)
            if reference:
                from modelexport.verify.model import record_reference

                with stages("reference values"):
                    record_reference(
                        model,
                        inputs,
                        staging / path.name,
                        modules=() if isinstance(reference, bool) else reference,
                        sidecar=hierarchy,
                        announce=lambda size: stages.tell(f"reference values, {size / 1e6:,.1f} MB"),
                        weights=source,
                    )
        write_report(
            (staging / path.name).with_suffix(".report.md"), hierarchy, stages.seconds, verified, functions, summary
        )
        files = [path.parent / file.name for file in sorted(staging.iterdir())]
        if dag_dir is not None:
            write_dag_files(Path(dag_dir), dags)
            files.append(Path(dag_dir))
    return ExportResult(
        path=path,
        hierarchy=hierarchy,
        tree=tree_rows(owned_operators(graph), exported.calls, tags.tag),
        seconds=stages.seconds,
        verified=verified,
        files=files,
        functions=functions,
        weights=summary,
    )
