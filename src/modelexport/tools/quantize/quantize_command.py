"""`quantize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from modelexport.core.declared_options import option
from modelexport.errors import UsageError
from modelexport.terminal.printing import document_of_parts, print_result
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import (
    COMPARED,
    DEVICE,
    FILE_OR_FOLDER,
    JOBS,
    JSON,
    METRIC,
    THROUGH,
    CalibrationData,
    device_text,
    parsed_bytes,
)

if TYPE_CHECKING:
    from modelexport.tools.quantize.quantize import QuantizeResult


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which module gets which method: --to with --keep or --only, or --recipe"""

    to: Sequence[str] = option(
        (),
        "int8-dynamic, int8-static, int8-weights, int4, float16; with options as in int4:block=64. For "
        "devices: uint8, apart, definition, int16, float, processor.",
        metavar="METHOD",
    )
    keep: Sequence[str] = option((), "Modules that stay the same bit for bit.", metavar="SELECTOR")
    only: Sequence[str] = option((), "Quantize only these modules.", metavar="SELECTOR")
    recipe: Path | None = option(
        None,
        "Rules of a selector and a method; the first rule that matches applies.",
        metavar="RECIPE.yaml",
        file="read",
    )


@dataclass(frozen=True, kw_only=True)
class Within:
    """A search for the cheapest methods: several --to may be given, and every module may be kept"""

    least: Literal["bytes", "time"] = option(
        "bytes",
        "With --within: find the smallest file, or the one that takes the least time on this processor or device.",
    )
    within: str | None = option(None, "error<=0.05, cosine>=0.999, kl<=0.01, top1>=0.99, f.py:f<=1.", metavar="BOUND")
    budget: str | None = option(
        None, "Find the smallest error (--metric) with weights of at most this size, such as 25MB.", metavar="SIZE"
    )
    metric: str = METRIC
    output_name: str | None = COMPARED
    provider: str = DEVICE
    through: str | None = THROUGH
    jobs: int | None = JOBS


def quantize(
    file: Path = FILE_OR_FOLDER,
    output: Path = option(
        ..., "The file or folder to write.", flag="-o --output", metavar="OUT.onnx|OUT/", file="written"
    ),
    *,
    rules: Rules,
    bounds: Within,
    calibration: CalibrationData,
    runtime_check: bool = option(True, "Do not load and run the result before it is written."),
    as_json: bool = JSON,
) -> None:
    """Quantize modules of FILE with ONNX Runtime's quantizers; all others stay the same bit for bit."""
    from modelexport.tools.quantize import quantize_text
    from modelexport.tools.quantize.quantize import quantize as run
    from modelexport.tools.quantize.quantized_packages import quantize_package

    how: dict[str, Any] = {
        "keep": rules.keep,
        "only": rules.only,
        "data": calibration.data,
        "processor": calibration.processor,
        "check_runtime": runtime_check,
    }
    stages = stages_on_line()
    if bounds.within is not None or bounds.budget is not None:
        _search(file, output, rules, bounds, how | {"stages": stages}, as_json=as_json)
        return
    if dataclasses.replace(bounds, least=Within.least) != Within():
        raise UsageError("--metric, --compare, --device, --through, --jobs are for a search: give --within or --budget")
    if len(rules.to) > 1:
        raise UsageError("several --to are for a search: give --within or --budget, or a recipe with --recipe")
    how |= {"to": rules.to[0] if rules.to else None, "recipe": rules.recipe}
    if bounds.least != Within.least:
        raise UsageError("--least is what a search looks for: give --within")
    with stages(f"quantize to {how['to'] or rules.recipe}"):
        results = quantize_package(file, output, **how) if file.is_dir() else {"": run(file, output, **how)}
    timed, untimed = _with_times(results, file, output, how, Within.provider)
    text = quantize_text.format_quantized(timed, file, output, calibration.data)
    print_result(document_of_parts(timed), lambda: "\n".join([text, *untimed]), as_json=as_json)
    if not any(result.changed for result in results.values()):
        raise typer.Exit(1)


def _search(file: Path, output: Path, rules: Rules, bounds: Within, how: dict[str, Any], *, as_json: bool) -> None:
    from modelexport.tools.quantize import quantize_text
    from modelexport.tools.quantize.quantized_packages import quantize_within

    if rules.recipe is not None:
        raise UsageError("a recipe says which method a module gets: give --recipe, or --within or --budget")
    if bounds.within is not None and bounds.metric != Within.metric:
        raise UsageError("--metric goes with --budget: the bound of --within begins with its own")
    if how["data"] is None:
        raise UsageError("a search measures errors on inputs like those that the model will get: give --data")
    how |= dataclasses.asdict(bounds)
    how["device"] = device_text(how.pop("provider"), how.pop("through"))
    how["executor"] = how.pop("jobs")
    how["budget"] = parsed_bytes(bounds.budget) if bounds.budget is not None else None
    result, written = quantize_within(file, output, to=rules.to, **how)
    timed, untimed = _with_times(written, file, output, how, how["device"])
    texts = [quantize_text.format_search(result)]
    texts += [quantize_text.format_quantized(timed, file, output, how["data"])] if timed else []
    texts += untimed
    print_result({"search": result, "written": timed or None}, lambda: "\n".join(texts), as_json=as_json)
    if not result.of_use:
        raise typer.Exit(1)


def _with_times(
    results: Mapping[str, QuantizeResult], file: Path, output: Path, how: Mapping[str, Any], device: str
) -> tuple[Mapping[str, QuantizeResult], list[str]]:
    """Results with the time of what was written beside that of FILE, unless nothing is run; and why there is none."""
    from modelexport.core.text import error_line
    from modelexport.errors import ModelExportError
    from modelexport.runtime.devices import find_device
    from modelexport.tagged.file import read_tagged
    from modelexport.tools.quantize.quantized_packages import with_times
    from modelexport.traces.calibration_data import read_data

    if not how["check_runtime"] or not any(result.changed for result in results.values()):
        return results, []
    where = find_device(device)
    if where.compiles:
        why = "is behind a command" if where.through else "compiles its graphs, and would compile both files again"
        return results, [f"not timed: {device} {why}"]
    try:
        inputs = None
        if how["data"] is not None and not file.is_dir():
            (inputs,) = read_data(how["data"], read_tagged(file).model, how["processor"] or file.parent, limit=1)
        with stages_on_line()("time both in turns"):
            return with_times(results, file, output, inputs, device), []
    except ModelExportError as error:
        return results, [f"not timed: {error_line(error)}"]
