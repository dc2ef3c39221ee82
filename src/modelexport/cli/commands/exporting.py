"""`export`, and what shows a model without exporting it: `hierarchy`, `internals`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from modelexport.capture import OPSETS, FrontEnd
from modelexport.cli.json_documents import export_document
from modelexport.cli.options import (
    DtypeOption,
    ExcludeOption,
    GranularityOption,
    IncludeOption,
    InputsOption,
    JsonOption,
    ModelArgument,
    ModelClassOption,
    RemoteCodeOption,
    SeedOption,
)
from modelexport.cli.running import load_with_inputs, print_json, progress_shown
from modelexport.errors import UsageError
from modelexport.tagged.encodings import Encoding
from modelexport.weights import WeightsMode

HierarchyView = Literal["static", "traced", "compare"]


def export(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.onnx", help="The file to write.")],
    model: ModelArgument = "bert-tiny",
    frontend: Annotated[
        FrontEnd, typer.Option(help="What captures MODEL; auto: torchscript where dynamo fails.")
    ] = "auto",
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Leave every axis open that the model does.")] = False,
    opset: Annotated[int | None, typer.Option(metavar="N", help="The opset of the file.")] = None,
    inputs: InputsOption = None,
    granularity: GranularityOption = "auto",
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    no_optimize: Annotated[bool, typer.Option("--no-optimize", help="Keep the graph as it was translated.")] = False,
    keep_torch_metadata: Annotated[
        bool, typer.Option("--keep-torch-metadata", help="Keep pkg.torch.* keys, with paths of this machine.")
    ] = False,
    dag_dir: Annotated[
        Path | None, typer.Option("--dag-dir", metavar="DIR", help="Also write each module call's DAG as a file here.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every output with PyTorch's.")] = False,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="Keep the inputs and every call's values of the PyTorch run beside FILE."),
    ] = False,
    weights: Annotated[
        WeightsMode,
        typer.Option(
            help="link: they stay in MODEL's safetensors files; copy: in FILE.onnx.data; none: described, left out; "
            "auto: in FILE, or above 1 GB linked if MODEL has safetensors files and copied if not."
        ),
    ] = "auto",
    dtype: DtypeOption = None,
    tags_as: Annotated[
        Encoding,
        typer.Option(help="How FILE carries tags: metadata or attributes of nodes, or a function for each module."),
    ] = "metadata",
    model_class: ModelClassOption = None,
    trust_remote_code: RemoteCodeOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Export MODEL; without it, bert-tiny."""
    from modelexport.cli import show_export
    from modelexport.cli.garbage import only_new_garbage
    from modelexport.core.stages import Stages
    from modelexport.exporting.pipeline import export as run
    from modelexport.files.atomic import check_writable

    if opset is not None and opset not in OPSETS:
        raise UsageError(f"no front end writes opset {opset}: choose one from {OPSETS[0]} to {OPSETS[-1]}")
    code = Path(model.partition(":")[0])
    check_writable(output, [*([inputs] if inputs else []), *([code] if code.is_file() else [])])
    with progress_shown() as progress:
        stages = Stages(progress)
        loaded, example = load_with_inputs(
            model,
            inputs,
            model_class,
            trust_remote_code,
            seed,
            stages,
            dtype=dtype,
            weights="files" if weights == "link" else "auto",
        )
        with only_new_garbage():
            result = run(
                loaded.model,
                example,
                output,
                name=loaded.name,
                frontend=frontend,
                dynamic=dynamic,
                opset=opset,
                granularity=granularity,
                include=include or (),
                exclude=exclude or (),
                optimized=not no_optimize,
                weights=weights,
                source=loaded.weights,
                keep_torch_metadata=keep_torch_metadata,
                dag_dir=dag_dir,
                tags_as=tags_as,
                verify=verify,
                reference=reference,
                stages=stages,
            )
    for one in result.unrepeatable:
        from modelexport.exporting.report import told_of

        print(f"modelexport: warning: {one.kind}: {one.where}; {told_of(one.kind)}", file=sys.stderr)
    if failure := result.hierarchy.settings.dynamo_failure:
        reason = failure.splitlines()[0]
        print(f"modelexport: warning: exported with torchscript; dynamo failed: {reason}", file=sys.stderr)
    if tags_as == "attributes":
        print(
            f"modelexport: warning: onnx.checker and ONNX Runtime refuse tags as attributes; "
            f"`modelexport strip {output} -o OUT.onnx` makes a file that they take",
            file=sys.stderr,
        )
    if as_json:
        print_json(export_document(result))
    else:
        show_export.print_export(result)
    if result.verified is not None and not result.verified.agrees:
        raise typer.Exit(1)


def hierarchy(
    model: ModelArgument = "bert-tiny",
    mode: Annotated[HierarchyView, typer.Option(help="What to show.")] = "static",
    trace: Annotated[bool, typer.Option("--trace", help="Every step of the traced run as a line.")] = False,
    inputs: InputsOption = None,
    granularity: GranularityOption = "all",
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    model_class: ModelClassOption = None,
    trust_remote_code: RemoteCodeOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show the module tree of MODEL; nothing is exported."""
    from modelexport.cli import show_export
    from modelexport.core.stages import Stages
    from modelexport.pytorch.overview import hierarchy_overview

    runs = trace or mode != "static"
    with progress_shown() as progress:
        stages = Stages(progress)
        loaded, example = load_with_inputs(
            model, inputs, model_class, trust_remote_code, seed, stages, make_inputs=runs
        )
        with stages("trace"):
            overview = hierarchy_overview(
                loaded.model,
                example if runs else None,
                granularity,
                include or (),
                exclude or (),
                timed=runs and as_json,
            )
    if as_json:
        print_json(overview.document())
    else:
        show_export.print_hierarchy(
            "trace" if trace else mode,
            overview.tree,
            overview.calls,
            tags=overview.tags,
            static_tags=overview.static_tags,
            comparison=overview.comparison,
        )


def inputs(
    model: ModelArgument = "bert-tiny",
    spec: InputsOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT", help="Save them: .npz or .safetensors.")
    ] = None,
    model_class: ModelClassOption = None,
    trust_remote_code: RemoteCodeOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show the example inputs that MODEL is run with, or save them."""
    from modelexport.cli.show_export import format_inputs
    from modelexport.core.stages import Stages

    with progress_shown() as progress:
        stages = Stages(progress)
        _, example = load_with_inputs(model, spec, model_class, trust_remote_code, seed, stages)
    from modelexport.pytorch.examples import describe_inputs, save_inputs

    if output is not None:
        save_inputs(example, output)
    described = describe_inputs(example)
    if as_json:
        print_json(described)
    else:
        print(format_inputs(described))


def internals(
    model: ModelArgument = "bert-tiny",
    inputs: InputsOption = None,
    model_class: ModelClassOption = None,
    trust_remote_code: RemoteCodeOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show what PyTorch's own exporters record of MODEL's modules; nothing is written."""
    from modelexport.cli.show_internals import print_internals
    from modelexport.core.stages import Stages

    with progress_shown() as progress:
        stages = Stages(progress)
        loaded, example = load_with_inputs(model, inputs, model_class, trust_remote_code, seed, stages)
        from modelexport.capture.internals.study import study

        with stages("export"):
            found = study(loaded.model, example, loaded.name)
    if as_json:
        print_json(found)
    else:
        print_internals(found)
