"""`verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelexport.cli.options import (
    DtypeOption,
    FileArgument,
    InputsOption,
    JsonOption,
    ModelClassOption,
    RemoteCodeOption,
    SeedOption,
)
from modelexport.cli.running import (
    ModelChoice,
    load_for_package,
    load_with_inputs,
    print_json,
    progress_shown,
    read_sizes,
)
from modelexport.errors import UsageError

if TYPE_CHECKING:
    from modelexport.core.stages import Stages
    from modelexport.tagged.package import Package
    from modelexport.verify.descendant import AgainstReport
    from modelexport.verify.verdicts import VerifyReport


def verify(
    file: FileArgument,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The model that FILE was exported from.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="OTHER.onnx", help="A tagged descendant of FILE.")
    ] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--module", metavar="SELECTOR", help="Calls, with those inside them: address, glob, class:NAME, !."
        ),
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
            help="Only N random calls and those of --module, each cut out and run alone: for a FILE too large to run.",
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", metavar="N", min=1, help="Tokens to generate with a FOLDER/ that generates.")
    ] = 64,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps of the scheduler for a FOLDER/ of diffusers.")
    ] = 4,
    perturb: Annotated[
        bool | None,
        typer.Option(
            "--perturb/--no-perturb",
            help="Compare calls with changed weights, in memory, on both sides; by default if MODEL has equal ones.",
        ),
    ] = None,
    model_class: ModelClassOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: RemoteCodeOption = False,
    seed: SeedOption = 0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table of cost and error of each call as CSV.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="Also write a page with the error of each call.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare FILE module by module: with MODEL, with OTHER, or with the values that `export --reference` stored."""
    from modelexport.cli import show_verification
    from modelexport.core.stages import Stages

    if model is not None and against is not None:
        raise UsageError("give --model or --against, not both")
    if model is None and (inputs is not None or model_class is not None or trust_remote_code):
        raise UsageError("--inputs, --model-class and --trust-remote-code go with --model")
    if model is None and (weights_sample is not None or dtype is not None or perturb is not None):
        raise UsageError("--weights-sample, --perturb and --dtype go with --model")
    if as_csv and as_json:
        raise UsageError("give --csv or --json, not both")
    if file.is_dir():
        if as_csv or html is not None:
            raise UsageError(f"{file} is a folder: --csv and --html go with a file")
        if modules or weights_sample is not None or (model is None and against is None):
            raise UsageError(
                f"{file} is a folder: give the exported model with --model, or for stages the split file with --against"
            )
        if against is not None:
            _verify_stages(file, against, provider, seed, as_json=as_json)
            return
        assert model is not None
        choice = ModelChoice(model, inputs, model_class, trust_remote_code, seed, dtype)
        _verify_package(file, choice, new_tokens, steps, provider, as_json=as_json)
        return
    with progress_shown() as progress:
        stages = Stages(progress)
        found: VerifyReport | AgainstReport
        if against is not None:
            from modelexport.verify.descendant import verify_against

            with stages("verify"):
                found = losses = verify_against(file, against, modules=modules or (), provider=provider, seed=seed)
            agrees, document = losses.agrees, show_verification.against_document(losses)
            text = show_verification.format_losses(losses)
        else:
            if model is None:
                from modelexport.verify.reference import verify_reference

                with stages("verify"):
                    report = verify_reference(file, modules=modules or (), provider=provider)
            else:
                loaded, example = load_with_inputs(
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
                            perturb=perturb,
                            tell=stages.tell,
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
            found = report
            agrees, document = report.agrees, show_verification.verify_document(report)
            text = show_verification.format_verify(report)
    if html is not None or as_csv:
        _show_errors(file, found, html, as_csv=as_csv)
    if as_json:
        print_json(document)
    elif not as_csv:
        print(text)
    if not agrees:
        raise typer.Exit(1)


def _show_errors(file: Path, report: VerifyReport | AgainstReport, html: Path | None, *, as_csv: bool) -> None:
    from modelexport.cli import show_table
    from modelexport.measure.page import Page, write_page
    from modelexport.packages.report_page import error_table

    table = error_table(file, report)
    if html is not None:
        write_page(html, Page(table, "error"))
    if as_csv:
        print(show_table.format_csv({"": (table, table.rows())}), end="")


def _verify_package(
    folder: Path, choice: ModelChoice, new_tokens: int, steps: int, provider: str, *, as_json: bool
) -> None:
    from modelexport.cli import show_package
    from modelexport.core.stages import Stages
    from modelexport.tagged.package import read_package

    package = read_package(folder)
    with progress_shown() as progress:
        stages = Stages(progress)
        match package.manifest.kind:
            case "generate":
                agrees, document, text = _verify_generation(folder, choice, new_tokens, provider, stages)
            case "pipeline" | "whole":
                loaded, example = load_for_package(choice, package.manifest.kind, stages)
                if hasattr(loaded.model, "pipeline"):
                    from modelexport.packages.verifying_pipelines import verify_pipeline

                    with stages("verify"):
                        found = verify_pipeline(
                            loaded.model,
                            folder,
                            arguments=example,
                            steps=steps,
                            provider=provider,
                            seed=choice.seed,
                        )
                    agrees, document, text = (
                        found.agrees,
                        show_package.pipeline_document(found),
                        show_package.format_pipeline(found),
                    )
                else:
                    agrees, document, text = _verify_parts(package, loaded, example, provider, stages)
            case kind:
                raise UsageError(f"{folder} is a package of kind {kind}: give the split file with --against")
    if as_json:
        print_json(document)
    else:
        print(text)
    if not agrees:
        raise typer.Exit(1)


def _verify_generation(
    folder: Path, choice: ModelChoice, new_tokens: int, provider: str, stages: Stages
) -> tuple[bool, Any, str]:
    from modelexport.cli import show_package
    from modelexport.packages.generation_parts import can_generate
    from modelexport.packages.greedy import example_prompts
    from modelexport.packages.verifying_generation import verify_generation

    loaded, _ = choice.load(stages, make_inputs=False)
    if not can_generate(loaded.model):
        raise UsageError(
            f"{type(loaded.model).__name__} cannot generate: give the model that {folder} was exported from"
        )
    with stages("generate"):
        sizes = read_sizes(choice, loaded)
        prompts = example_prompts(loaded.model, loaded.directory, seed=choice.seed, sizes=sizes)
        report = verify_generation(loaded.model, folder, prompts, new_tokens=new_tokens, provider=provider)
    return report.agrees, show_package.generation_document(report), show_package.format_generation(report)


def _verify_parts(package: Package, loaded: Any, example: Any, provider: str, stages: Stages) -> tuple[bool, Any, str]:
    """Compare each part of a package module by module, on the inputs that it was exported with."""
    from modelexport.cli import show_package, show_verification
    from modelexport.packages.sentence_pipelines import SentencePipeline, pipeline_parts
    from modelexport.verify.model import verify as run

    whole = not isinstance(loaded.model, SentencePipeline)
    inputs = {"model": example} if whole else {part.name: part.inputs for part in pipeline_parts(loaded.model)}
    with stages("verify"):
        reports = {
            name: run(loaded.model, inputs[name], file, provider=provider, weights=loaded.weights, tell=stages.tell)
            for name, file in package.files.items()
            if name in inputs
        }
    document = {"parts": {name: show_verification.verify_document(report) for name, report in reports.items()}}
    text = show_package.format_headings(
        {name: show_verification.format_verify(report) for name, report in reports.items()}
    )
    return all(report.agrees for report in reports.values()), document, text


def _verify_stages(folder: Path, against: Path, provider: str, seed: int, *, as_json: bool) -> None:
    from modelexport.cli import show_surgery
    from modelexport.verify.stages import verify_stages

    differences = verify_stages(folder, against, provider=provider, seed=seed)
    if as_json:
        print_json(differences)
    else:
        print(show_surgery.format_chain(differences))
    if any(difference.status != "agree" for difference in differences):
        raise typer.Exit(1)
