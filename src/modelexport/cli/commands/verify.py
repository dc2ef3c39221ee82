"""`verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modelexport.core.declared_options import option
from modelexport.core.limits import DEVICE_SECONDS, NEW_TOKENS, SCHEDULER_STEPS
from modelexport.errors import InputsError, UsageError
from modelexport.format.package_manifest import MANIFEST
from modelexport.runtime import CPU
from modelexport.terminal.model_argument import Loading, ModelChoice, load_to_verify
from modelexport.terminal.printing import format_headings, print_result
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import FILE, INPUTS, THROUGH, CalibrationData, device_text
from modelexport.terminal.show_verification import format_verify
from modelexport.tools import function_of_option
from modelexport.traces.tolerances import ON_A_DEVICE

if TYPE_CHECKING:
    from modelexport.core.result_display import Report
    from modelexport.core.timed_stages import Stages
    from modelexport.tables.table import Table
    from modelexport.verify.verify_report import VerifyReport


@dataclass(frozen=True, kw_only=True)
class ComparedWith:
    """What FILE is compared with; without MODEL and results, the values that `export --reference` stored"""

    model: str | None = option(None, "The model that FILE was exported from.", metavar="MODEL", file="read")
    results: Path | None = option(
        None, "The results that a runner of FILE's kit wrote on another machine.", metavar="results.json", file="read"
    )
    against: Path | None = option(
        None, "The earlier spelling of `compare FILE OTHER --numbers`, with its options.", metavar="OTHER", file="read"
    )
    bound: float | None = option(None, f"With --device: the largest error of calls [{ON_A_DEVICE:g}].", metavar="SHARE")


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
    new_tokens: int | None = option(
        None, f"For a FOLDER/ that generates text: the number of new tokens [{NEW_TOKENS}].", metavar="N", least=1
    )
    steps: int | None = option(
        None, f"For a FOLDER/ of diffusers: the steps of the scheduler [{SCHEDULER_STEPS}].", metavar="N", least=1
    )
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
        "MODEL, what outputs are computed on.",
        flag="--device --provider",
        metavar="NAME",
    )
    through: str | None = THROUGH
    limit: float | None = option(
        None, f"Seconds that a module may take on the device [{DEVICE_SECONDS:g}].", metavar="SECONDS"
    )
    fix: bool = option(False, "Also find changes that make FILE correct on the device, and write OUT.onnx.")
    output: Path | None = option(
        None, "With --fix: the changed file to write.", flag="-o --output", metavar="OUT.onnx", file="written"
    )
    fresh: bool = option(False, "Ignore the stored results of earlier runs.")


@dataclass(frozen=True, kw_only=True)
class PrintedAs:
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
    other: ComparedWith,
    extent: Extent,
    on_device: OnDevice,
    measured: CalibrationData,
    loading: Loading,
    shown: PrintedAs,
) -> None:
    """Compare FILE module by module with MODEL, with the values that `export --reference` stored, or with the correct
    values on a device. Two files are compared by `compare --numbers`.
    """
    _check_options(file, other, inputs, extent, on_device, measured, loading, shown)
    if other.against is not None:
        how: dict[str, Any] = {"bound": other.bound, "provider": on_device.device, "seed": loading.seed}
        how |= {"as_csv": shown.as_csv, "html": shown.html, "as_json": shown.as_json}
        function_of_option("verify --against")(file, other.against, extent.modules, measured, **how)
        return
    report: Any
    table: Table | None = None
    if file.is_dir():
        choice = ModelChoice(other.model or "", inputs, loading)
        report, text = _package(file, choice, on_device.device or CPU, extent, verbose=shown.verbose)
    elif (extent.new_tokens, extent.steps) != (None, None):
        raise UsageError(f"{file} is a file: --new-tokens and --steps go with a folder")
    elif other.model is None and (
        on_device.device is not None or on_device.through is not None or other.results is not None
    ):
        report, text, table = _on_device(file, other, inputs, on_device, extent, loading.seed)
    else:
        report = _file(file, other.model, inputs, on_device, extent, loading)
        text = format_verify(report, verbose=shown.verbose)
    if shown.html is not None or shown.as_csv:
        from modelexport.tables.costs import cost
        from modelexport.terminal.show_table import show_errors

        show_errors(table or cost(file), None if table else report.errors, shown.html, as_csv=shown.as_csv)
    if not shown.as_csv:
        print_result(report.document, lambda: text, as_json=shown.as_json)
    if not report.agrees:
        raise typer.Exit(1)


def _check_options(
    file: Path,
    other: ComparedWith,
    inputs: Path | None,
    extent: Extent,
    on_device: OnDevice,
    measured: CalibrationData,
    loading: Loading,
    shown: PrintedAs,
) -> None:
    if sum(source is not None for source in (other.model, other.against, other.results)) > 1:
        raise UsageError("give one of --model, --against and --results")
    alone = other.model is None and other.against is None
    if on_device.through is not None and not (alone and other.results is None):
        raise UsageError("--through reaches the device on which FILE alone is compared: leave out --model, --against")
    runs_there = alone and other.results is None and (on_device.device is not None or on_device.through is not None)
    if not runs_there and (on_device.limit is not None or on_device.fresh):
        raise UsageError("--limit and --fresh are for FILE alone on a device: give --device or --through")
    alone &= runs_there or other.results is not None
    if other.model is None and not alone and (inputs is not None or loading.asked):
        raise UsageError("--inputs, --model-class, --dtype and --trust-remote-code go with --model")
    if other.model is None and (extent.weights_sample is not None or extent.perturb is not None):
        raise UsageError("--weights-sample and --perturb go with --model")
    if shown.as_csv and shown.as_json:
        raise UsageError("give --csv or --json, not both")
    if other.results is not None and (on_device.device is not None or extent.modules):
        raise UsageError("--results has its own device and modules: leave out --device and --module")
    if on_device.fix != (on_device.output is not None) or (on_device.fix and not (runs_there and on_device.device)):
        raise UsageError("--fix goes with --device and FILE alone, and with -o OUT.onnx for the changed file")
    if other.against is None and (measured != CalibrationData() or (other.bound is not None and not alone)):
        raise UsageError("--bound goes with --against OTHER.onnx, or with --device; --data with --against")
    if file.is_dir() and other.against is None:
        if shown.as_csv or shown.html is not None or extent.modules or extent.weights_sample is not None:
            raise UsageError(f"{file} is a folder: --csv, --html, --module and --weights-sample go with a file")
        if other.model is None:
            raise UsageError(f"{file} is a folder: give the exported model with --model, or compare it with a file")


def _on_device(
    file: Path, other: ComparedWith, inputs: Path | None, on_device: OnDevice, extent: Extent, seed: int
) -> tuple[Any, str, Table]:
    """The report of a file on a device of this machine, or where its kit was run, its text, and where nodes run."""
    device = device_text(on_device.device or "cpu", on_device.through)
    how = {"modules": extent.modules, "keep": not on_device.fresh, "fix": on_device.output, "seed": seed}
    given: dict[str, Any] = {"inputs": inputs, "bound": other.bound, "limit": on_device.limit}
    how |= {name: value for name, value in given.items() if value is not None}
    return function_of_option("verify --device")(file, device, other.results, **how)


def _file(
    file: Path, model: str | None, inputs: Path | None, on_device: OnDevice, extent: Extent, loading: Loading
) -> VerifyReport:
    stages, provider = stages_on_line(), on_device.device or CPU
    if model is None:
        from modelexport.verify.against_reference import verify_reference

        with stages("verify"):
            return verify_reference(file, modules=extent.modules, provider=provider)
    try:
        return _file_and_model(file, ModelChoice(model, inputs, loading), extent, provider, stages)
    except InputsError as error:
        if inputs is None and (file.parent / MANIFEST).is_file():
            raise InputsError(
                f"{error}; {file.name} is a part of a package: verify {file.parent}/, or give its inputs with --inputs"
            ) from error
        raise


def _file_and_model(file: Path, choice: ModelChoice, extent: Extent, provider: str, stages: Stages) -> VerifyReport:
    from modelexport.tagged.file import read_tagged
    from modelexport.verify.sampled_calls import verify_sample
    from modelexport.verify.verify import verify as verify_file

    loaded, example = choice.of_file(file).load(stages, weights="auto")
    tagged = read_tagged(file)
    if choice.inputs is None:
        from modelexport.pytorch.inputs.inputs_that_fit import inputs_that_fit

        example = inputs_that_fit(example, tagged)
    how: dict[str, Any] = {"modules": extent.modules, "provider": provider, "weights": loaded.weights}
    with stages("verify"):
        if extent.weights_sample is None:
            return verify_file(loaded.model, example, tagged, perturb=extent.perturb, progress=stages.tell, **how)
        return verify_sample(
            loaded.model, example, tagged, count=extent.weights_sample, seed=choice.loading.seed, **how
        )


def _package(folder: Path, choice: ModelChoice, provider: str, extent: Extent, *, verbose: bool) -> tuple[Report, str]:
    """The report of a package, and its text."""
    from modelexport.packages.package_kinds import kind_of_package, verify_package
    from modelexport.tagged.package import read_package

    stages, seed = stages_on_line(), choice.loading.seed
    package = read_package(folder)
    loaded, example = load_to_verify(choice, package.manifest.kind, stages)
    kind = kind_of_package(package, loaded.model)
    if kind.takes == "sizes":
        example = kind.inputs_for_verification(loaded, package.manifest, example, seed)
    with stages(kind.does or "verify"):
        report = verify_package(
            loaded.model, example, package, provider=provider, new_tokens=extent.new_tokens, steps=extent.steps,
            seed=seed, weights=loaded.weights, progress=stages.tell,
        )  # fmt: skip
    text = kind.text_of_report(report)
    if text is None:
        text = format_headings({name: format_verify(part, verbose=verbose) for name, part in report.parts.items()})
    return report, text
