"""`verify`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelexport.cli.options import FileArgument, InputsOption, JsonOption, ProviderOption
from modelexport.cli.progress import LINE
from modelexport.cli.running import (
    Loading,
    ModelChoice,
    load_for_package,
    print_json,
    read_sizes,
)
from modelexport.errors import UsageError

if TYPE_CHECKING:
    from modelexport.core.stages import Stages
    from modelexport.tagged.package import Package
    from modelexport.verify.against import AgainstReport
    from modelexport.verify.verdicts import VerifyReport


@dataclass(frozen=True, kw_only=True)
class Other:
    """What FILE is compared with; without one of these, the values that `export --reference` stored"""

    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The model that FILE was exported from.")
    ] = None
    against: Annotated[
        Path | None, typer.Option("--against", metavar="OTHER.onnx", help="A tagged descendant of FILE.")
    ] = None
    bound: Annotated[
        float | None,
        typer.Option(
            "--bound", metavar="SHARE", help="With --against: name the first call further off than this. [0.05]"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What is compared"""

    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--module", metavar="SELECTOR", help="Calls, with those inside them: address, glob, class:NAME, !."
        ),
    ] = None
    weights_sample: Annotated[
        int | None,
        typer.Option(
            "--weights-sample",
            metavar="N",
            min=0,
            help="Only N random calls and those of --module, each cut out and run alone: for a FILE too large to run.",
        ),
    ] = None
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", metavar="N", min=1, help="Tokens to generate with a FOLDER/ that generates.")
    ] = 64
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps of the scheduler for a FOLDER/ of diffusers.")
    ] = 4
    perturb: Annotated[
        bool | None,
        typer.Option(
            "--perturb/--no-perturb",
            help="Compare calls with changed weights, in memory, on both sides; by default if MODEL has equal ones.",
        ),
    ] = None
    provider: ProviderOption = "CPUExecutionProvider"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is shown"""

    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table of cost and error of each call as CSV.")] = False
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="Also write a page with the error of each call.")
    ] = None
    as_json: JsonOption = False


def verify(
    file: FileArgument, inputs: InputsOption = None, *, other: Other, extent: Extent, loading: Loading, shown: Shown
) -> None:
    """Compare FILE module by module: with MODEL, with OTHER, or with the values that `export --reference` stored."""
    _check_options(other, inputs, extent, loading, shown)
    if file.is_dir():
        _verify_folder(file, other, inputs, extent, loading, shown)
        return
    from modelexport.cli import show_verification
    from modelexport.core.stages import Stages

    stages = Stages(LINE.tell)
    found: VerifyReport | AgainstReport
    if other.against is not None:
        from modelexport.verify.against import BOUND, verify_against

        with stages("verify"):
            found = losses = verify_against(
                file,
                other.against,
                modules=extent.modules or (),
                provider=extent.provider,
                seed=loading.seed,
                bound=BOUND if other.bound is None else other.bound,
            )
        document, text = show_verification.against_document(losses), show_verification.format_losses(losses)
    else:
        if other.model is None:
            from modelexport.verify.reference import verify_reference

            with stages("verify"):
                found = report = verify_reference(file, modules=extent.modules or (), provider=extent.provider)
        else:
            found = report = _verify_model(file, ModelChoice(other.model, inputs, loading), extent, stages)
        document, text = show_verification.verify_document(report), show_verification.format_verify(report)
    if shown.html is not None or shown.as_csv:
        _show_errors(file, found, shown.html, as_csv=shown.as_csv)
    if shown.as_json:
        print_json(document)
    elif not shown.as_csv:
        print(text)
    if not found.agrees:
        raise typer.Exit(1)


def _check_options(other: Other, inputs: Path | None, extent: Extent, loading: Loading, shown: Shown) -> None:
    if other.model is not None and other.against is not None:
        raise UsageError("give --model or --against, not both")
    if other.against is None and other.bound is not None:
        raise UsageError("--bound goes with --against")
    if other.model is None and (inputs is not None or loading.asked):
        raise UsageError("--inputs, --model-class, --dtype and --trust-remote-code go with --model")
    if other.model is None and (extent.weights_sample is not None or extent.perturb is not None):
        raise UsageError("--weights-sample and --perturb go with --model")
    if shown.as_csv and shown.as_json:
        raise UsageError("give --csv or --json, not both")


def _verify_model(file: Path, choice: ModelChoice, extent: Extent, stages: Stages) -> VerifyReport:
    loaded, example = choice.load(stages, weights="auto")
    from modelexport.verify.sampling import verify_sample
    from modelexport.verify.verify import verify as run

    how: dict[str, Any] = {"modules": extent.modules or (), "provider": extent.provider, "weights": loaded.weights}
    with stages("verify"):
        if extent.weights_sample is None:
            return run(loaded.model, example, file, perturb=extent.perturb, tell=stages.tell, **how)
        return verify_sample(loaded.model, example, file, count=extent.weights_sample, seed=choice.loading.seed, **how)


def _verify_folder(
    folder: Path, other: Other, inputs: Path | None, extent: Extent, loading: Loading, shown: Shown
) -> None:
    if shown.as_csv or shown.html is not None:
        raise UsageError(f"{folder} is a folder: --csv and --html go with a file")
    if other.against is not None and not extent.modules:
        _verify_stages(folder, other.against, extent.provider, loading.seed, as_json=shown.as_json)
        return
    if extent.modules or extent.weights_sample is not None or other.model is None:
        raise UsageError(
            f"{folder} is a folder: give the exported model with --model, or for stages the split file with --against"
        )
    _verify_package(folder, ModelChoice(other.model, inputs, loading), extent, as_json=shown.as_json)


def _show_errors(file: Path, report: VerifyReport | AgainstReport, html: Path | None, *, as_csv: bool) -> None:
    from modelexport.cli import show_table
    from modelexport.measure.page import Page, write_page
    from modelexport.packages.report_page import error_table

    table = error_table(file, report)
    if html is not None:
        write_page(html, Page(table, "error"))
    if as_csv:
        print(show_table.format_csv({"": (table, table.rows())}), end="")


def _verify_package(folder: Path, choice: ModelChoice, extent: Extent, *, as_json: bool) -> None:
    from modelexport.cli import show_package
    from modelexport.core.stages import Stages
    from modelexport.tagged.package import read_package

    package = read_package(folder)
    stages = Stages(LINE.tell)
    match package.manifest.kind:
        case "generate":
            agrees, document, text = _verify_generation(folder, choice, extent, stages)
        case "pipeline" | "whole":
            loaded, example = load_for_package(choice, package.manifest.kind, stages)
            if hasattr(loaded.model, "pipeline"):
                from modelexport.packages.verifying_pipelines import verify_pipeline

                with stages("verify"):
                    found = verify_pipeline(
                        loaded.model,
                        folder,
                        arguments=example,
                        steps=extent.steps,
                        provider=extent.provider,
                        seed=choice.loading.seed,
                    )
                agrees, document, text = (
                    found.agrees,
                    show_package.pipeline_document(found),
                    show_package.format_pipeline(found),
                )
            else:
                agrees, document, text = _verify_parts(package, loaded, example, extent.provider, stages)
        case kind:
            raise UsageError(f"{folder} is a package of kind {kind}: give the split file with --against")
    if as_json:
        print_json(document)
    else:
        print(text)
    if not agrees:
        raise typer.Exit(1)


def _verify_generation(folder: Path, choice: ModelChoice, extent: Extent, stages: Stages) -> tuple[bool, Any, str]:
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
        prompts = example_prompts(loaded.model, loaded.directory, seed=choice.loading.seed, sizes=sizes)
        report = verify_generation(
            loaded.model, folder, prompts, new_tokens=extent.new_tokens, provider=extent.provider
        )
    return report.agrees, show_package.generation_document(report), show_package.format_generation(report)


def _verify_parts(package: Package, loaded: Any, example: Any, provider: str, stages: Stages) -> tuple[bool, Any, str]:
    """Compare each part of a package module by module, on the inputs that it was exported with."""
    from modelexport.cli import show_package, show_verification
    from modelexport.packages.sentence_pipelines import SentencePipeline, pipeline_parts
    from modelexport.verify.verify import verify as run

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
    from modelexport.surgery.chain import verify_stages

    differences = verify_stages(folder, against, provider=provider, seed=seed)
    if as_json:
        print_json(differences)
    else:
        print(show_surgery.format_chain(differences))
    if any(difference.status != "agree" for difference in differences):
        raise typer.Exit(1)
