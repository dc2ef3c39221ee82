"""`export`, and commands that show a model without exporting it: `hierarchy`, `inputs`, `internals`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from modelexport.capture import FrontEnd, check_opset
from modelexport.cli.guards import WRITTEN, WRITTEN_FOLDER
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
from modelexport.cli.running import ModelChoice, load_with_inputs, print_json, progress_shown
from modelexport.errors import UsageError
from modelexport.exporting import FuseFor
from modelexport.packages.modes import PartsMode
from modelexport.tagged.encodings import Encoding
from modelexport.weights import WeightsMode

if TYPE_CHECKING:
    pass

NodeNames = Literal["exporter", "path"]
HierarchyView = Literal["static", "traced", "compare"]


def export(
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="FILE.onnx|FOLDER/", help="The file to write, or a package."),
        WRITTEN,
    ],
    model: ModelArgument = "bert-tiny",
    parts: Annotated[
        PartsMode | None,
        typer.Option(
            help="The parts of FOLDER/: one graph, those of generation, or those of a pipeline; auto: as fits MODEL."
        ),
    ] = None,
    static_cache: Annotated[
        int | None,
        typer.Option("--static-cache", metavar="N", min=1, help="A FOLDER/ whose decoder has a cache of N positions."),
    ] = None,
    separate_prefill: Annotated[
        bool, typer.Option("--separate-prefill", help="A FOLDER/ with another graph for prompts, without a cache.")
    ] = False,
    frontend: Annotated[
        FrontEnd, typer.Option(help="The front end that captures MODEL; auto: torchscript if dynamo fails.")
    ] = "auto",
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Make every axis dynamic that the model does not fix.")
    ] = False,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--axes",
            metavar="SPEC",
            help="Names of dynamic axes: batch,sequence (the first of every input) or input_ids:0=batch.",
        ),
    ] = None,
    input_names: Annotated[
        str | None, typer.Option("--input-names", metavar="NAMES", help="New names of all inputs, or old=new, ...")
    ] = None,
    output_names: Annotated[
        str | None, typer.Option("--output-names", metavar="NAMES", help="New names of all outputs, or old=new, ...")
    ] = None,
    outputs: Annotated[
        str | None, typer.Option("--outputs", metavar="NAMES", help="Keep only these outputs; * matches any.")
    ] = None,
    opset: Annotated[int | None, typer.Option(metavar="N", help="The opset of the file.")] = None,
    inputs: InputsOption = None,
    constant: Annotated[
        list[str] | None,
        typer.Option(
            "--constant",
            metavar="NAME",
            help="An argument whose value the file keeps instead of taking it; auto: those without which it fails.",
        ),
    ] = None,
    granularity: GranularityOption = "auto",
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    no_optimize: Annotated[bool, typer.Option("--no-optimize", help="Do not optimize the graph.")] = False,
    no_reuse: Annotated[
        bool, typer.Option("--no-reuse", help="Export equal layers one by one: the same file, more slowly.")
    ] = False,
    fuse: Annotated[
        FuseFor | None, typer.Option(help="Fuse nodes into operators of ONNX Runtime, for its CPU or CUDA provider.")
    ] = None,
    keep_torch_metadata: Annotated[
        bool, typer.Option("--keep-torch-metadata", help="Keep pkg.torch.* keys, which contain paths of this machine.")
    ] = False,
    node_names: Annotated[
        NodeNames, typer.Option(help="path: name nodes after their modules: /encoder/layer.0/attention/self/MatMul_1.")
    ] = "exporter",
    dag_dir: Annotated[
        Path | None,
        typer.Option("--dag-dir", metavar="DIR", help="Also write each module call's DAG to a file in DIR."),
        WRITTEN_FOLDER,
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not run the file to check its outputs against MODEL's.")
    ] = False,
    keep_anyway: Annotated[
        bool, typer.Option("--keep-anyway", help="Write the file even if that check fails; the exit status is 1.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every module call with PyTorch as well.")] = False,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="Store the inputs and every call's values of the PyTorch run beside FILE."),
    ] = False,
    weights: Annotated[
        WeightsMode,
        typer.Option(
            help="link: leave them in MODEL's safetensors files; copy: write FILE.onnx.data; none: leave them out; "
            "auto: embed up to 1 GB, above link if MODEL has safetensors files, otherwise copy."
        ),
    ] = "auto",
    dtype: DtypeOption = None,
    tags_as: Annotated[
        Encoding,
        typer.Option(help="How tags are stored: metadata or attributes of nodes, or a function for each module."),
    ] = "metadata",
    model_class: ModelClassOption = None,
    trust_remote_code: RemoteCodeOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Export MODEL to a file, or to a folder with all of its parts; without MODEL, bert-tiny."""
    from modelexport.cli import show_export
    from modelexport.cli.interfaces import read_interface
    from modelexport.core.stages import Stages
    from modelexport.exporting.interface import widened
    from modelexport.exporting.options import (
        CaptureOptions,
        CheckOptions,
        FuseOptions,
        Options,
        TagOptions,
        WeightOptions,
    )
    from modelexport.exporting.pipeline import export as run

    check_opset(opset)
    options = Options(
        capture=CaptureOptions(constants=constant or (), reuse=not no_reuse),
        tags=TagOptions(
            granularity=granularity,
            include=include or (),
            exclude=exclude or (),
            tags_as=tags_as,
            keep_torch_metadata=keep_torch_metadata,
            node_names=node_names,
        ),
        weights=WeightOptions(weights=weights),
        checks=CheckOptions(check=not no_check, keep_anyway=keep_anyway, verify=verify, reference=reference),
        fusing=FuseOptions(fuse=fuse),
    )
    if parts is not None or output.endswith("/") or Path(output).is_dir():
        if dag_dir is not None or axes or input_names or output_names or outputs:
            raise UsageError(
                "--dag-dir, --axes, --input-names, --output-names and --outputs go with a FILE.onnx: "
                "the names in a package are fixed by its runtimes"
            )
        from modelexport.cli.packages import export_folder

        choice = ModelChoice(model, inputs, model_class, trust_remote_code, seed, dtype)
        forms = {"static_cache": static_cache, "separate_prefill": separate_prefill}
        settings = {"frontend": frontend, "opset": opset, "optimized": not no_optimize}
        export_folder(choice, Path(output), parts or "auto", options, forms | settings, as_json=as_json)
        return
    if static_cache is not None or separate_prefill:
        raise UsageError(f"--static-cache and --separate-prefill go with a FOLDER/: -o {Path(output).stem}/")
    interface = read_interface(input_names, output_names, outputs, axes or ())
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
        result = run(
            loaded.model,
            widened(example, interface) if isinstance(example, Mapping) else example,
            output,
            name=loaded.name,
            frontend=frontend,
            dynamic=dynamic or bool(axes),
            opset=opset,
            optimized=not no_optimize,
            interface=interface,
            options=options,
            source=loaded.weights,
            dag_dir=dag_dir,
            stages=stages,
        )
    for note in result.notes:
        print(f"modelexport: warning: {note}", file=sys.stderr)
    for one in result.unrepeatable:
        from modelexport.exporting.report import told_of

        print(f"modelexport: warning: {one.kind}: {one.where}; {told_of(one.kind)}", file=sys.stderr)
    for axis in result.fixed:
        print(
            f"modelexport: warning: axis {axis.axis} of {axis.input} is not dynamic, it is {axis.size}: "
            f"{axis.call or 'the model itself'} fixes it ({axis.reason})",
            file=sys.stderr,
        )
    if result.attempts:
        taken = result.hierarchy.settings.frontend
        reasons = "; ".join(f"{one.frontend} failed: {one.reason.splitlines()[0]}" for one in result.attempts)
        print(f"modelexport: warning: exported with {taken}; {reasons}", file=sys.stderr)
    if tags_as == "attributes":
        print(
            f"modelexport: warning: onnx.checker and ONNX Runtime refuse tags as attributes; "
            f"`modelexport strip {output} -o OUT.onnx` makes a file that they accept",
            file=sys.stderr,
        )
    if as_json:
        print_json(export_document(result))
    else:
        show_export.print_export(result)
    failed = result.check is not None and result.check.status == "failed"
    if failed or (result.verified is not None and not result.verified.agrees):
        raise typer.Exit(1)


def hierarchy(
    model: ModelArgument = "bert-tiny",
    mode: Annotated[HierarchyView, typer.Option(help="What to show.")] = "static",
    trace: Annotated[bool, typer.Option("--trace", help="Show every step of the traced run on a line.")] = False,
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
        text = show_export.format_hierarchy(
            "trace" if trace else mode,
            overview.tree,
            overview.calls,
            tags=overview.tags,
            static_tags=overview.static_tags,
            comparison=overview.comparison,
        )
        print(text)


def inputs(
    model: ModelArgument = "bert-tiny",
    spec: InputsOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT", help="Save them: .npz or .safetensors."), WRITTEN
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
    """Show what PyTorch's own exporters record about MODEL's modules; nothing is written."""
    from modelexport.cli.show_internals import print_internals
    from modelexport.core.stages import Stages

    with progress_shown() as progress:
        stages = Stages(progress)
        loaded, example = load_with_inputs(model, inputs, model_class, trust_remote_code, seed, stages)
        from modelexport.capture.internals.exporters import study

        with stages("export"):
            found = study(loaded.model, example, loaded.name)
    if as_json:
        print_json(found)
    else:
        print_internals(found)
