"""The command line: parse, call, render. Heavy imports wait until a command needs them, so that ``--help`` is quick.

Over 400 lines because every command and option is declared here, each with the help that it shows.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.exceptions import Abort, TyperException

from modelexport.core.version import __version__
from modelexport.errors import ModelExportError, UsageError

app = typer.Typer(
    help="Export PyTorch models to ONNX with the exact module call on every node.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

MODEL_HELP = (
    "A Hugging Face directory or hub name, package.module:factory, file.py:factory (a callable that returns the "
    "module, or the module and its inputs), or bert-tiny, the built-in example."
)
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE.onnx", help="A tagged ONNX file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
InputsOption = Annotated[
    Path | None,
    typer.Option(
        "--inputs", metavar="SPEC.json", help='Example inputs: {"name": {"dtype", "shape", "range"|"value"}}.'
    ),
]
ModelClassOption = Annotated[str | None, typer.Option(help="The transformers class to load a directory with.")]
RemoteCodeOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the model's repository.")]
DtypeOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="float32, float16, bfloat16: convert the weights while loading.")
]
SeedOption = Annotated[int, typer.Option(help="For random weights and inputs.")]
IncludeOption = Annotated[
    list[str] | None, typer.Option("--include", metavar="CLASS", help="A class that gets a segment in tags as well.")
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="CLASS", help="A class that gets no segment in tags.")
]


class GranularityChoice(StrEnum):
    AUTO = "auto"
    MODEL = "model"
    ALL = "all"


class FrontEndChoice(StrEnum):
    AUTO = "auto"
    DYNAMO = "dynamo"
    TORCHSCRIPT = "torchscript"


class WeightsChoice(StrEnum):
    AUTO = "auto"
    LINK = "link"
    COPY = "copy"
    NONE = "none"


class EncodingChoice(StrEnum):
    METADATA = "metadata"
    ATTRIBUTES = "attributes"
    FUNCTIONS = "functions"


class ModeChoice(StrEnum):
    STATIC = "static"
    TRACED = "traced"
    COMPARE = "compare"


GranularityOption = Annotated[
    GranularityChoice, typer.Option(help="Which modules get a segment: model classes, all, or whichever fits.")
]


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def export(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.onnx", help="The file to write.")],
    model: ModelArgument = "bert-tiny",
    frontend: Annotated[
        FrontEndChoice, typer.Option(help="What captures MODEL; auto: torchscript where dynamo fails.")
    ] = FrontEndChoice.AUTO,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Leave every axis open that the model does.")] = False,
    opset: Annotated[int | None, typer.Option(metavar="N", help="The opset of the file.")] = None,
    inputs: InputsOption = None,
    granularity: GranularityOption = GranularityChoice.AUTO,
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
        WeightsChoice,
        typer.Option(
            help="link: they stay in MODEL's safetensors files; copy: in FILE.onnx.data; none: described, left out; "
            "auto: in FILE, or above 1 GB linked if MODEL has safetensors files and copied if not."
        ),
    ] = WeightsChoice.AUTO,
    dtype: DtypeOption = None,
    tags_as: Annotated[
        EncodingChoice,
        typer.Option(help="How FILE carries tags: metadata or attributes of nodes, or a function for each module."),
    ] = EncodingChoice.METADATA,
    model_class: ModelClassOption = None,
    trust_remote_code: RemoteCodeOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Export MODEL; without it, bert-tiny."""
    from modelexport.cli import show_export
    from modelexport.core.stages import Stages
    from modelexport.exporting.pipeline import export as run
    from modelexport.files.atomic import check_writable

    check_writable(output)
    with _progress() as progress:
        stages = Stages(progress)
        loaded, example = _load(
            model, inputs, model_class, trust_remote_code, seed, stages, dtype=dtype, weights=_sources(weights)
        )
        result = run(
            loaded.model,
            example,
            output,
            name=loaded.name,
            frontend=frontend.value,
            dynamic=dynamic,
            opset=opset,
            granularity=granularity.value,
            include=include or (),
            exclude=exclude or (),
            optimized=not no_optimize,
            weights=weights.value,
            source=loaded.weights,
            keep_torch_metadata=keep_torch_metadata,
            dag_dir=dag_dir,
            tags_as=tags_as.value,
            verify=verify,
            reference=reference,
            stages=stages,
        )
    if failure := result.hierarchy.settings.dynamo_failure:
        reason = failure.splitlines()[0]
        print(f"modelexport: warning: exported with torchscript; dynamo failed: {reason}", file=sys.stderr)
    if tags_as is EncodingChoice.ATTRIBUTES:
        print(
            f"modelexport: warning: onnx.checker and ONNX Runtime refuse tags as attributes; "
            f"`modelexport strip {output} -o OUT.onnx` makes a file that they take",
            file=sys.stderr,
        )
    if as_json:
        _print_json(result.document())
    else:
        show_export.print_export(result)
    if result.verified is not None and not result.verified.agrees:
        raise typer.Exit(1)


@app.command()
def hierarchy(
    model: ModelArgument = "bert-tiny",
    mode: Annotated[ModeChoice, typer.Option(help="What to show.")] = ModeChoice.STATIC,
    trace: Annotated[bool, typer.Option("--trace", help="Every step of the traced run as a line.")] = False,
    inputs: InputsOption = None,
    granularity: GranularityOption = GranularityChoice.ALL,
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

    runs = trace or mode is not ModeChoice.STATIC
    with _progress() as progress:
        stages = Stages(progress)
        loaded, example = _load(model, inputs, model_class, trust_remote_code, seed, stages, make_inputs=runs)
        with stages("trace"):
            overview = hierarchy_overview(
                loaded.model, example if runs else None, granularity.value, include or (), exclude or ()
            )
    if as_json:
        _print_json(overview.document())
    else:
        show_export.print_hierarchy(
            "trace" if trace else mode.value,
            overview.tree,
            overview.calls,
            tags=overview.tags,
            comparison=overview.comparison,
        )


@app.command()
def tree(
    file: FileArgument,
    depth: Annotated[int | None, typer.Option(metavar="N", help="Show N levels below the root.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also look whether the files that hold its weights are as they were.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the module tree in FILE, with the nodes of each call."""
    from modelexport.cli import show_export
    from modelexport.tagged.skim import skim
    from modelexport.tagged.tree import tree_rows, untagged_operators

    found = skim(file)
    if found is None:
        from modelexport.tagged.file import read_tagged

        found = read_tagged(file).skimmed
    untagged = untagged_operators(found.nodes)
    rows = tree_rows(found.nodes, found.calls, found.tags.__getitem__)
    shown = [row for row in rows if depth is None or row.depth <= depth]
    faults: list[str] = []
    if check:
        from modelexport.files.linked import changed_files
        from modelexport.tagged.file import read_tagged

        faults = changed_files(file, read_tagged(file).model)
    if as_json:
        checked = {"weights": faults} if check else {}
        document = {"path": str(file), "coverage": found.coverage, "tree": shown, "untagged": untagged}
        _print_json(document | checked)
    else:
        show_export.print_tree(shown, found.coverage, untagged)
        for fault in faults:
            print(fault)
    if faults:
        raise typer.Exit(1)


@app.command()
def nodes(
    file: FileArgument,
    module: Annotated[str, typer.Argument(metavar="ADDRESS|TAG", help="A call: . is the root, path@1 a second call.")],
    as_json: JsonOption = False,
) -> None:
    """List the nodes of a module call and of the calls inside it."""
    from modelexport.cli import show_export
    from modelexport.tagged.file import read_tagged

    tagged = read_tagged(file)
    listed = tagged.describe_nodes(tagged.find(module))
    if as_json:
        _print_json(listed)
    else:
        show_export.print_nodes(listed)


@app.command()
def strip(
    file: FileArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.onnx", help="The file to write.")],
) -> None:
    """Make a file with tags as attributes one that ONNX Runtime takes, with tags as metadata."""
    from modelexport.tagged.flattening import strip as run

    run(file, output)
    print(output)


@app.command()
def inline(
    file: FileArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.onnx", help="The file to write.")],
) -> None:
    """Make a file with a function for each module flat."""
    from modelexport.tagged.flattening import inline as run

    run(file, output)
    print(output)


@app.command()
def adopt(
    file: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="An ONNX file of another exporter.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.onnx", help="The file to write.")],
    keep_torch_metadata: Annotated[
        bool, typer.Option("--keep-torch-metadata", help="Keep pkg.torch.* keys, with paths of the exporting machine.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a tagged file of one that another exporter wrote, from what that left in it."""
    from modelexport.cli import show_lineage
    from modelexport.lineage.adoption import adopt as run

    adopted = run(file, output, keep_torch_metadata=keep_torch_metadata)
    if as_json:
        _print_json(adopted.document())
    else:
        show_lineage.print_adopted(adopted)


@app.command("update-weights")
def update_weights(
    file: FileArgument,
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS.safetensors", help="A state_dict of the same module.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.onnx", help="The file to write.")],
    as_json: JsonOption = False,
) -> None:
    """Put other weights of the same shapes into FILE, without exporting again."""
    from modelexport.weights.updates import update_weights as run

    result = run(file, weights, output)
    if as_json:
        _print_json(result)
    else:
        print(
            f"{result.path}: {result.used} entries in {result.replaced} initializers, {result.transformed} of them "
            f"transformed; {result.unused} entries are not used, {result.kept} initializers are no parameters"
        )


@app.command()
def extract(
    file: FileArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="SUB.onnx", help="The file to write; a folder for several calls.")
    ],
    modules: Annotated[
        list[str] | None, typer.Argument(metavar="ADDRESS|TAG", help="A call: path@1 is the second of a module.")
    ] = None,
    each: Annotated[str | None, typer.Option("--each", metavar="CLASS", help="Every call of modules of CLASS.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write module calls as models of their own."""
    from modelexport.cli import show_export
    from modelexport.surgery import extraction as cutting
    from modelexport.tagged.file import read_tagged

    if bool(modules) == bool(each):
        raise UsageError("name the calls to extract, or a class with --each")
    tagged = read_tagged(file)
    if each:
        extracted = cutting.extract_each(tagged, each, output)
    elif modules and len(modules) > 1:
        extracted = cutting.extract_all(tagged, modules, output)
    else:
        extracted = [cutting.extract(tagged, name, output) for name in modules or ()]
    if as_json:
        _print_json(extracted)
    else:
        show_export.print_extracted(extracted)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.onnx", help="A tagged ONNX file.")],
    second: Annotated[Path, typer.Argument(metavar="B.onnx", help="Another one.")],
    values: Annotated[bool, typer.Option("--values", help="Compare the elements of parameters: reads all.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how two tagged files differ, module by module; status 0 also where they do."""
    from modelexport.cli.show_comparison import print_comparison
    from modelexport.tagged.comparison import compare as run

    comparison = run(first, second, values=values)
    if as_json:
        _print_json(comparison)
    else:
        print_comparison(comparison)


@app.command()
def verify(
    file: FileArgument,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="What FILE was exported from.")] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="OTHER.onnx", help="A tagged descendant of FILE.")
    ] = None,
    modules: Annotated[
        list[str] | None, typer.Option("--module", metavar="ADDRESS", help="A call, with the calls inside it.")
    ] = None,
    provider: Annotated[
        str, typer.Option(metavar="NAME", help="The execution provider of ONNX Runtime.")
    ] = "CPUExecutionProvider",
    inputs: InputsOption = None,
    weights_sample: Annotated[
        int | None,
        typer.Option(
            "--weights-sample",
            metavar="N",
            min=0,
            help="Only N drawn calls and those of --module, each cut out and run alone: for a FILE too large to run.",
        ),
    ] = None,
    model_class: ModelClassOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: RemoteCodeOption = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare FILE module by module: with MODEL, with OTHER, or with the values that `export --reference` kept."""
    from modelexport.cli import show_verification
    from modelexport.core.stages import Stages

    if model is not None and against is not None:
        raise UsageError("give --model or --against, not both")
    if model is None and (inputs is not None or model_class is not None or trust_remote_code):
        raise UsageError("--inputs, --model-class and --trust-remote-code go with --model")
    if model is None and (weights_sample is not None or dtype is not None):
        raise UsageError("--weights-sample and --dtype go with --model")
    with _progress() as progress:
        stages = Stages(progress)
        if against is not None:
            from modelexport.verify.descendant import verify_against

            with stages("verify"):
                losses = verify_against(file, against, modules=modules or (), provider=provider, seed=seed)
            agrees, document = losses.agrees, show_verification.against_document(losses)
            text = show_verification.format_losses(losses)
        else:
            if model is None:
                from modelexport.verify.reference import verify_reference

                with stages("verify"):
                    report = verify_reference(file, modules=modules or (), provider=provider)
            else:
                loaded, example = _load(
                    model, inputs, model_class, trust_remote_code, seed, stages, dtype=dtype, weights="auto"
                )
                from modelexport.verify.model import verify as run
                from modelexport.verify.model import verify_sample

                with stages("verify"):
                    if weights_sample is None:
                        report = run(
                            loaded.model,
                            example,
                            file,
                            modules=modules or (),
                            provider=provider,
                            weights=loaded.weights,
                        )
                    else:
                        report = verify_sample(
                            loaded.model,
                            example,
                            file,
                            count=weights_sample,
                            modules=modules or (),
                            provider=provider,
                            seed=seed,
                            weights=loaded.weights,
                        )
            agrees, document = report.agrees, show_verification.verify_document(report)
            text = show_verification.format_verify(report)
    if as_json:
        _print_json(document)
    else:
        print(text)
    if not agrees:
        raise typer.Exit(1)


@app.command()
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

    with _progress() as progress:
        stages = Stages(progress)
        loaded, example = _load(model, inputs, model_class, trust_remote_code, seed, stages)
        from modelexport.capture.internals.study import study

        with stages("export"):
            found = study(loaded.model, example, loaded.name)
    if as_json:
        _print_json(found)
    else:
        print_internals(found)


@app.command()
def retag(
    changed: Annotated[Path, typer.Argument(metavar="CHANGED.onnx", help="What another tool made of TAGGED.")],
    source: Annotated[Path, typer.Option("--from", metavar="TAGGED.onnx", help="The tagged file that the tool read.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.onnx", help="The file to write.")],
    as_json: JsonOption = False,
) -> None:
    """Give a file that another tool made of a tagged one its tags back."""
    from modelexport.cli import show_lineage
    from modelexport.lineage.retagging import retag as run

    report = run(changed, source=source, output=output)
    if as_json:
        _print_json(report)
    else:
        print(show_lineage.format_retag(report))


@app.command()
def optimize(
    file: FileArgument,
    tool: Annotated[str, typer.Option("--with", metavar="TOOL", help="ort-extended, onnxslim, float16, ...")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.onnx", help="The file to write.")],
    as_json: JsonOption = False,
) -> None:
    """Run another package's optimiser, quantizer or converter on FILE, and give the result its tags back."""
    from modelexport.cli import show_lineage
    from modelexport.core.stages import Stages
    from modelexport.lineage.tools import optimize_file as run

    with _progress() as progress, Stages(progress)(tool):
        report = run(file, tool, output)
    if as_json:
        _print_json(report)
    else:
        print(show_lineage.format_retag(report))


def _load(
    model: str,
    inputs: Path | None,
    model_class: str | None,
    trust_remote_code: bool,
    seed: int,
    stages: Callable[[str], Any],
    *,
    make_inputs: bool = True,
    dtype: str | None = None,
    weights: Literal["memory", "files", "auto"] = "memory",
) -> tuple[Any, Any]:
    with stages("load"):
        from modelexport.pytorch.loading import load_model

        loaded = load_model(
            model,
            model_class=model_class,
            trust_remote_code=trust_remote_code,
            seed=seed,
            dtype=dtype,
            weights=weights,
        )
        for warning in loaded.warnings:
            print(f"modelexport: warning: {warning}", file=sys.stderr)
    if not make_inputs or (loaded.inputs is not None and inputs is None):
        return loaded, loaded.inputs
    with stages("inputs"):
        from modelexport.pytorch.inputs import example_inputs

        return loaded, example_inputs(
            loaded.model,
            spec=inputs,
            directory=loaded.directory,
            seed=seed,
            has_weights=loaded.weights is None,
        )


def _sources(weights: WeightsChoice) -> Literal["memory", "files", "auto"]:
    """How to load for a way of writing: those that copy or leave out do without loading where they can."""
    return "files" if weights is WeightsChoice.LINK else "auto"


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says on a terminal what stage the work is in; silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda stage: None
        return
    erase = "\r\x1b[K"
    try:
        yield lambda stage: print(f"{erase}{stage} ...", end="", file=sys.stderr, flush=True)
    finally:
        print(erase, end="", file=sys.stderr, flush=True)


def _print_json(document: Any) -> None:
    import msgspec

    print(json.dumps(msgspec.to_builtins(document), indent=1))


def main() -> None:
    """The ``modelexport`` command: 0 done, 1 a check said no, 2 the input was wrong or missing."""
    # Most of a short command is imports, whose objects stay: looking for garbage among them took a seventh of its time.
    gc.set_threshold(50_000, 20, 100)
    try:
        status = typer.main.get_command(app)(standalone_mode=False)
    except ModelExportError as error:
        status = _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except TyperException as error:
        status = _fail(f"{' '.join(error.format_message().split())}; see `modelexport --help`", 2)
    except (Abort, KeyboardInterrupt):
        status = _fail("interrupted; nothing was written", 2)
    except BrokenPipeError:  # `modelexport tree x.onnx | head`
        sys.stderr.close()
        status = 0
    except Exception as error:
        status = _fail(f"internal error: {type(error).__name__}: {error}; run with --debug and report it", 2)
    sys.exit(status or 0)


def _fail(message: str, status: int) -> int:
    if "--debug" in sys.argv:
        traceback.print_exc()
    print(f"modelexport: {message}", file=sys.stderr)
    return status
