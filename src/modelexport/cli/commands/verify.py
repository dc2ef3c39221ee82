"""`verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modelexport.core.declared_options import option
from modelexport.errors import InputsError, UsageError
from modelexport.format.package_manifest import MANIFEST
from modelexport.terminal.model_argument import Loading, ModelChoice, load_to_verify
from modelexport.terminal.printing import format_headings, print_result
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import FILE, INPUTS, THROUGH, device_text

if TYPE_CHECKING:
    from modelexport.core.timed_stages import Stages
    from modelexport.verification import Report


@dataclass(frozen=True, kw_only=True)
class Other:
    """What FILE is compared with; without one of these, the values that `export --reference` stored"""

    model: str | None = option(None, "The model that FILE was exported from.", metavar="MODEL", file="read")
    against: Path | None = option(
        None, "A file that was made from FILE, for example by quantization.", metavar="OTHER.onnx", file="read"
    )
    results: Path | None = option(
        None, "The results that a runner of FILE's kit wrote on another machine.", metavar="results.json", file="read"
    )
    bound: float | None = option(
        None,
        "The largest error allowed: of outputs with --against [the bound of OTHER's recipe], of calls with --device "
        "[0.01].",
        metavar="SHARE",
    )
    data: Path | None = option(
        None, "With --against: inputs to measure on, as for `quantize`.", metavar="DATA", file="read"
    )
    processor: Path | None = option(
        None, "With --data: the folder of tokenizer.json, if it is not next to FILE.", metavar="FOLDER", file="read"
    )


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What is compared"""

    modules: Sequence[str] = option(
        (),
        "Only these calls and the calls inside them: address, glob, class:NAME, !.",
        flag="--module",
        metavar="SELECTOR",
    )
    weights_sample: int | None = option(
        None,
        "Only N random calls and those of --module, each extracted and run alone: for a FILE too large to run.",
        metavar="N",
        least=0,
    )
    new_tokens: int = option(
        64, "For a FOLDER/ that generates text: the number of tokens to generate.", metavar="N", least=1
    )
    steps: int = option(4, "For a FOLDER/ of diffusers: the number of steps of the scheduler.", metavar="N", least=1)
    perturb: bool | None = option(
        None,
        "Change all weights in memory, in MODEL and FILE, first; by default constant, tiny and equal ones.",
        flag="--perturb/--no-perturb",
    )


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """A device, on which the results of FILE are compared with the correct ones"""

    device: str | None = option(
        None,
        "The device: NAME[,option=value...], such as cpu, qnn or cuda,device_id=1; see `modelexport devices`. With "
        "MODEL or OTHER, what outputs are computed on.",
        flag="--device --provider",
        metavar="NAME",
    )
    through: str | None = THROUGH
    limit: float = option(300.0, "Seconds that a module may take on the device.", metavar="SECONDS")
    fix: bool = option(False, "Also find changes that make FILE correct on the device, and write OUT.onnx.")
    output: Path | None = option(
        None, "With --fix: the changed file to write.", flag="-o --output", metavar="OUT.onnx", file="written"
    )
    fresh: bool = option(False, "Ignore the stored results of earlier runs.")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is shown"""

    as_csv: bool = option(False, "Print a table of cost and error of each call as CSV.", flag="--csv")
    html: Path | None = option(
        None, "Also write a page with the error of each call.", metavar="OUT.html", file="written alone"
    )
    as_json: bool = option(False, "Print one JSON document and nothing else.", flag="--json")
    verbose: bool = option(False, "Also print how many calls of nodes are confirmed.", flag="-v --verbose")


def verify(
    file: Path = FILE,
    inputs: Path | None = INPUTS,
    *,
    other: Other,
    extent: Extent,
    on_device: OnDevice,
    loading: Loading,
    shown: Shown,
) -> None:
    """Compare FILE module by module: with MODEL, with OTHER, with the values that `export --reference` stored, or with
    the correct values on a device."""
    _check_options(file, other, inputs, extent, on_device, loading, shown)
    if on_device.through is not None:
        if other.model is not None or other.against is not None or other.results is not None:
            raise UsageError(
                "--through reaches the device on which FILE alone is compared: leave out --model, --against"
            )
        on_device = replace(on_device, device=device_text(on_device.device or "cpu", on_device.through))
    report = _compared(file, other, inputs, extent, on_device, loading)
    if shown.html is not None or shown.as_csv:
        _show_errors(file, report, shown.html, as_csv=shown.as_csv)
    if not shown.as_csv:
        document, text = _shown(report, verbose=shown.verbose)
        print_result(document, lambda: text, as_json=shown.as_json)
    if not report.agrees:
        raise typer.Exit(1)


def _check_options(
    file: Path, other: Other, inputs: Path | None, extent: Extent, on_device: OnDevice, loading: Loading, shown: Shown
) -> None:
    if sum(source is not None for source in (other.model, other.against, other.results)) > 1:
        raise UsageError("give one of --model, --against and --results")
    if other.against is not None and other.against.is_dir() and file.is_file():
        raise UsageError(f"--against takes a file with a folder: give verify {other.against} --against {file}")
    alone = other.model is None and other.against is None
    alone &= on_device.device is not None or other.results is not None
    if ((other.against is None and not alone) or file.is_dir()) and other.bound is not None:
        raise UsageError("--bound goes with --against OTHER.onnx, or with --device")
    if (other.against is None or file.is_dir()) and other.data is not None:
        raise UsageError("--data goes with --against OTHER.onnx")
    if other.data is None and other.processor is not None:
        raise UsageError("--processor goes with --data")
    if other.model is None and not alone and (inputs is not None or loading.asked):
        raise UsageError("--inputs, --model-class, --dtype and --trust-remote-code go with --model")
    if other.model is None and (extent.weights_sample is not None or extent.perturb is not None):
        raise UsageError("--weights-sample and --perturb go with --model")
    if shown.as_csv and shown.as_json:
        raise UsageError("give --csv or --json, not both")
    if other.results is not None and (on_device.device is not None or extent.modules):
        raise UsageError("--results has its own device and modules: leave out --device and --module")
    if on_device.fix != (on_device.output is not None) or (on_device.fix and on_device.device is None):
        raise UsageError("--fix goes with --device, and with -o OUT.onnx for the changed file")
    if file.is_dir() and (shown.as_csv or shown.html is not None):
        raise UsageError(f"{file} is a folder: --csv and --html go with a file")
    if file.is_dir() and (extent.modules or extent.weights_sample is not None):
        raise UsageError(f"{file} is a folder: --module and --weights-sample go with a file")


def _compared(
    file: Path, other: Other, inputs: Path | None, extent: Extent, on_device: OnDevice, loading: Loading
) -> Report:
    from modelexport.verification import verify as run

    stages = stages_on_line()
    how: dict[str, Any] = {"modules": () if file.is_dir() else extent.modules}
    how |= {"provider": on_device.device} if on_device.device is not None else {}
    if other.model is None:
        if other.against is not None:
            how |= {"against": other.against, "seed": loading.seed, "data": other.data}
            how |= {"processor": other.processor}
        elif other.results is not None:
            how = {"results": other.results, "inputs": inputs}
        elif on_device.device is not None and not file.is_dir():
            how = {"device": on_device.device, "modules": extent.modules, "inputs": inputs, "seed": loading.seed}
            how |= {"limit": on_device.limit, "keep": not on_device.fresh, "fix": on_device.output}
            how["progress"] = stages.tell
        how["bound"] = other.bound
        with stages("verify"):
            alone: Report = run(file, **how)
        return alone
    choice = ModelChoice(other.model, inputs, loading)
    if file.is_dir():
        return _package(file, choice, extent, stages, how)
    try:
        return _file_and_model(file, choice, extent, stages, how)
    except InputsError as error:
        if inputs is None and (file.parent / MANIFEST).is_file():
            raise InputsError(
                f"{error}; {file.name} is a part of a package: verify {file.parent}/, or give its inputs with --inputs"
            ) from error
        raise


def _file_and_model(file: Path, choice: ModelChoice, extent: Extent, stages: Stages, how: dict[str, Any]) -> Report:
    from modelexport.verification import verify as run

    loaded, example = choice.of_file(file).load(stages, weights="auto")
    if choice.inputs is None:
        from modelexport.pytorch.inputs.inputs_that_fit import inputs_that_fit
        from modelexport.tagged.file import read_tagged

        example = inputs_that_fit(example, read_tagged(file))
    how["weights"] = loaded.weights
    with stages("verify"):
        if extent.weights_sample is None:
            report: Report = run(loaded.model, example, file, perturb=extent.perturb, progress=stages.tell, **how)
            return report
        from modelexport.verify.sampled_calls import verify_sample

        return verify_sample(loaded.model, example, file, count=extent.weights_sample, seed=choice.loading.seed, **how)


def _package(folder: Path, choice: ModelChoice, extent: Extent, stages: Stages, how: dict[str, Any]) -> Report:
    from modelexport.packages.package_kinds import kind_of_package
    from modelexport.tagged.package import read_package
    from modelexport.verification import verify as run

    package = read_package(folder)
    loaded, example = load_to_verify(choice, package.manifest.kind, stages)
    kind, seed = kind_of_package(package, loaded.model), choice.loading.seed
    values = {
        "new_tokens": extent.new_tokens, "steps": extent.steps, "seed": seed, "weights": loaded.weights,
        "progress": stages.tell,
    }  # fmt: skip
    how |= {name: values[name] for name in kind.verified_with if name in values}
    if kind.takes == "sizes":
        example = kind.inputs_for_verification(loaded.model, loaded.directory, package.manifest, example, seed)
    with stages(kind.does or "verify"):
        report: Report = run(loaded.model, example, folder, **how)
    return report


def _shown(report: Any, *, verbose: bool) -> tuple[Any, str]:
    """A report as a document and as text."""
    import msgspec

    from modelexport.terminal import show_verification
    from modelexport.tools.compare import loss_text
    from modelexport.tools.devices import device_text as show_devices

    match type(report).__name__:
        case "PartReports":
            parts = {name: _shown(part, verbose=verbose) for name, part in report.parts.items()}
            texts = {name: text for name, (_, text) in parts.items()}
            return {"parts": {name: document for name, (document, _) in parts.items()}}, format_headings(texts)
        case "StagesReport":
            return report.outputs, show_verification.format_chain(report.outputs)
        case "VerifyReport":
            facts: dict[str, Any] = {"verdict": report.verdict, "agrees": report.agrees, "diverging": report.diverging}
            text = show_verification.format_verify(report, verbose=verbose)
        case "AgainstReport":
            ranked = [call.address for call in report.ranked]
            facts = {"verdict": report.verdict, "agrees": report.agrees, "ranked": ranked}
            text = loss_text.format_losses(report)
        case "DeviceReport":
            facts = {"verdict": report.verdict, "agrees": report.agrees}
            text = show_devices.format_device(report)
        case name:
            from modelexport.packages.package_kinds import package_kinds

            texts_of_kinds = (kind.text_of_report(report) for kind in package_kinds())
            facts, text = {"agrees": report.agrees}, next(filter(None, texts_of_kinds), name)
    return facts | msgspec.structs.asdict(report), text


def _show_errors(file: Path, report: Any, html: Path | None, *, as_csv: bool) -> None:
    from modelexport.tables.html_page import Page, write_page
    from modelexport.terminal import show_table
    from modelexport.verification import error_table

    table = error_table(file, report)
    if html is not None:
        write_page(html, Page(table, "error"))
    if as_csv:
        print(show_table.format_csv({"": (table, table.rows())}), end="")
