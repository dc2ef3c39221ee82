"""``export``: a PyTorch model becomes a tagged ONNX file and the documents beside it. The page to read first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from modelexport.capture import FrontEnd
from modelexport.capture.choice import capture, check_opset
from modelexport.core.exclusive import exclusive
from modelexport.core.stages import Stages
from modelexport.exporting.checks import run_checks
from modelexport.exporting.options import Keywords, Options
from modelexport.exporting.report import write_report
from modelexport.exporting.result import ExportResult
from modelexport.exporting.steps import describe, encode, encode_documents, optimize_exported, remember, tag
from modelexport.files.atomic import Replacement, check_writable
from modelexport.format.documents import Settings
from modelexport.graph.owners import owned_operators
from modelexport.pytorch.repeatability import find_unrepeatable
from modelexport.pytorch.static import module_tree
from modelexport.tagged.documents.dag import check_dag_directory, dag_document, write_dag_files
from modelexport.tagged.tree import tree_rows
from modelexport.weights.placement import reachable, save_with_weights

if TYPE_CHECKING:
    from torch import nn


@exclusive
def export(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    path: str | Path,
    *,
    name: str | None = None,
    frontend: FrontEnd = "auto",
    dynamic: bool = False,
    opset: int | None = None,
    optimized: bool = True,
    options: Options | None = None,
    dag_dir: str | Path | None = None,
    stages: Stages | None = None,
    **keywords: Unpack[Keywords],
) -> ExportResult:
    """Export a model to ``path``, every node tagged with the module call it came from.

    The model is exported in evaluation mode and is as before afterwards.

    Args:
        model: Any ``nn.Module``.
        inputs: Example inputs: keyword arguments of ``forward``, or positional ones.
        path: ``DIR/NAME.onnx``; the documents are written beside it.
        name: What the documents call the model; its class if left out.
        frontend: ``dynamo``, ``torchscript``, or ``auto``: `torchscript` where `dynamo` fails.
        dynamic: Leave every axis of every input that the model does not fix open.
        opset: The opset of the standard domain; the exporter's default if left out.
        optimized: Fold constants, rewrite and merge equal nodes.
        options: How it is tagged, where its weights go, how it is checked; each option is a keyword as well.
        dag_dir: A folder for the entries of ``NAME.dag.json`` as files of their own; made if need be.
        stages: Times the stages of the export; says on the way which one is running.

    Raises:
        CaptureError: The model cannot be exported.
        UsageError: The front end does not write this opset, or a class named in the options is not in the model.
        InputsError: The inputs do not fit.
        OutputError: The files cannot be written. What was there before is still there.
        UntaggedNodeError: A node has no owner. Nothing is written.
    """
    path, stages = Path(path), stages or Stages()
    options = (options or Options()).replaced_by(keywords)
    check_opset(opset)
    check_writable(path)
    if dag_dir is not None:
        check_dag_directory(Path(dag_dir))
    with stages("repeat"):
        unrepeatable = [] if options.weights.source is not None else find_unrepeatable(model, inputs)
    with stages("capture"):
        tree = module_tree(model)
        exported = capture(model, inputs, frontend, dynamic=dynamic, opset=opset)
    with stages("optimize"):
        before = remember(model, exported, options.weights.source)
        messages = [*exported.messages, *(optimize_exported(exported, before) if optimized else ())]
    with stages("tag"):
        tagged = tag(exported, before, tree, options.tags)
    with stages("documents"):
        settings = Settings(
            frontend=exported.frontend,
            dynamo_failure=exported.dynamo_failure,
            granularity=options.tags.granularity,
            include=sorted(options.tags.include),
            exclude=sorted(options.tags.exclude),
            dynamic=dynamic,
            optimize=optimized,
        )
        hierarchy = describe(model, exported, before, tagged, name=name, settings=settings)
        dags = dag_document(exported.model, tagged.tags)
        documents = encode_documents(hierarchy, dags, exported.model, tagged.tags)
    with stages("encoding"):
        functions = encode(exported.model, tagged.tags, options.tags.tags_as)
    with Replacement() as replacement:
        staging = replacement.folder(path.parent)
        staged = staging / path.name
        with stages("write"):
            written = functions.model if functions else exported.model
            weights = save_with_weights(
                written,
                path,
                staging,
                mode=options.weights.weights,
                parameters=tagged.origins,
                weights=options.weights.source,
                documents=documents,
            )
            for suffix, document in documents.items():
                staged.with_suffix(suffix).write_bytes(document)
        with reachable(staging, path, weights) if options.checks.any else nullcontext():
            verified = run_checks(model, inputs, staged, hierarchy, options, stages)
        write_report(
            staged.with_suffix(".report.md"),
            hierarchy,
            stages.seconds,
            verified,
            functions,
            weights,
            messages,
            unrepeatable,
        )
        files = [path.parent / file.name for file in sorted(staging.iterdir())]
        if dag_dir is not None:
            write_dag_files(replacement, Path(dag_dir), dags)
            files.append(Path(dag_dir))
    return ExportResult(
        path=path,
        hierarchy=hierarchy,
        tree=tree_rows(owned_operators(exported.model), exported.calls, tagged.tags.tag),
        seconds=stages.seconds,
        verified=verified,
        files=files,
        functions=functions,
        weights=weights,
        messages=messages,
        unrepeatable=unrepeatable,
    )
