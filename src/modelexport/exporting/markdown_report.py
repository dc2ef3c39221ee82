"""``NAME.report.md``: the report of one export, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from modelexport.core.text import on_one_line, printable, text_without_paths
from modelexport.exporting.export_result import presumption_warning
from modelexport.exporting.runtime_fusion import Fusion
from modelexport.format import keys
from modelexport.graph.nodes import all_nodes
from modelexport.tagged.encodings.functions import FunctionsModel
from modelexport.weights.linked_copied_embedded import WeightsSummary

if TYPE_CHECKING:
    from modelexport.exporting.export_result import ExportResult


def report_path(path: Path) -> Path:
    """The path of a file's report."""
    return path.with_suffix(keys.REPORT_SUFFIX)


def write_report(path: Path, result: ExportResult) -> None:
    """Write the report of an export as Markdown."""
    path.write_text(printable(format_report(result)), encoding="utf-8")


def format_report(result: ExportResult) -> str:
    """The report: tree, coverage, time by stage, modules without nodes, the weights, and the verification."""
    parts = (_summary, _right_for, _compared, _modules)
    return "\n\n".join(section for part in parts for section in part(result)) + "\n"


def _summary(result: ExportResult) -> Iterator[str]:
    hierarchy, check = result.hierarchy, result.check
    model, coverage = hierarchy.model, hierarchy.coverage
    yield f"# {on_one_line(model.name)}"
    yield (
        f"`{model.class_name}`, {model.parameters:,} parameters, {len(hierarchy.nodes):,} nodes, "
        f"{len(hierarchy.initializers):,} initializers, opset {model.opset}, "
        f"front end `{hierarchy.settings.frontend}`."
    )
    yield from result.remarks
    if result.attempts:
        yield "## Front ends that were tried first"
    for attempt in result.attempts:
        reason = attempt.reason.replace("````", "")
        yield f"`{attempt.frontend}` did not produce a usable file:\n\n````\n{reason}\n````"
    yield "## Coverage"
    yield _table(("evidence", "nodes"), [*msgspec.structs.asdict(coverage).items()])
    if result.fusion is not None:
        yield from _fusion(result.fusion)
    yield "## Check"
    if check is None:
        yield "Not requested."
    else:
        status = {"passed": "Passed", "failed": "**Failed**", "skipped": "Skipped"}[check.status]
        where = f" ({check.step})" if check.step else ""
        largest = "" if check.largest is None else f"; the largest error is {check.largest:.2e} of the output's norm"
        yield (
            "`onnx.checker`, loading in ONNX Runtime, and the outputs for the example inputs compared with PyTorch's: "
            f"{status}{where}{': ' + text_without_paths(check.reason) if check.reason else ''}{largest}."
        )


def _right_for(result: ExportResult) -> Iterator[str]:
    """The sizes, arguments and values that the file is right for."""
    settings = result.hierarchy.settings
    if result.valid_if:
        yield "## Sizes"
        yield "The file is right where these conditions hold; for other sizes the model decides otherwise."
        rows = [
            (f"`{condition.formula}`", condition.where, f"`{condition.source}`" if condition.source else "")
            for condition in result.valid_if
        ]
        yield _table(("valid for", "line of the model", "code"), rows)
    if result.fixed:
        yield "## Axes that are not dynamic"
        yield "The model accepts other sizes; with these the file fails, or differs from PyTorch."
        yield _table(
            ("input", "axis", "size", "fixed by", "with another size"),
            [
                (f"`{a.input}`", a.axis, a.size, f"`{a.call or '.'}`", text_without_paths(a.reason))
                for a in result.fixed
            ],
        )
    constants = [(f"`{name}`", f"`{value}`") for name, value in settings.constants.items()]
    if constants or result.notes:
        yield "## Arguments"
    if result.notes:
        yield "\n".join(f"- {note}" for note in result.notes)
    if constants:
        yield _table(("argument that the file does not take", "value that it keeps"), constants)
    if settings.presumed:
        yield "## Presumed"
        yield f"In Python {presumption_warning(settings.presumed)}."


def _compared(result: ExportResult) -> Iterator[str]:
    verified = result.verified
    if result.unrepeatable:
        yield "## Not the same in every run"
        rows = [(f"`{behavior.where}`", behavior.kind, behavior.instead) for behavior in result.unrepeatable]
        yield _table(("where", "what", "what the file does instead"), rows)
    if verified is not None:
        yield "## Against PyTorch"
        yield f"On `{verified.provider}`."
        yield _table(
            ("output", "status", "type", "shape", "absolute", "relative", "NaN", "reason"),
            [
                (f"`{o.name}`", o.status, o.dtype, o.shape, _number(o.absolute), _number(o.relative), o.nans, o.reason)
                for o in verified.outputs
            ],
        )


def _modules(result: ExportResult) -> Iterator[str]:
    hierarchy = result.hierarchy
    yield "## Time by stage"
    yield _table(("stage", "seconds"), [(stage, f"{spent:.2f}") for stage, spent in result.seconds.items()])
    yield "## Modules"
    yield "Every call, with the number of nodes that it owns itself."
    yield _table(
        ("call", "tag", "nodes"),
        [(f"`{call.address or '.'}`", f"`{call.tag}`", call.nodes) for call in hierarchy.calls],
    )
    yield "## Modules without nodes"
    yield _table(
        ("module", "class", "why"),
        [(f"`{m.path or '.'}`", f"`{m.class_name}`", m.reason) for m in hierarchy.modules if m.reason],
    )
    if result.functions is not None:
        yield from _functions(result.functions)
    if result.weights is not None and result.weights.is_apart:
        yield from _weights(result.weights)
    if result.messages:
        yield "## Warnings of the exporter"
        yield "\n".join(f"- {message}" for message in result.messages)


def _fusion(fusion: Fusion) -> Iterator[str]:
    yield f"## Fused for {fusion.target}"
    yield f"{fusion.before:,} nodes became {fusion.after:,}."
    yield _table(
        ("operator", "nodes", "calls of", "with it", "without it"),
        [
            (
                f"`{operator.op_type}`",
                operator.nodes,
                f"`{operator.module_class}`",
                f"{operator.calls} of {operator.of}",
                _values(operator.without),
            )
            for operator in fusion.operators
        ],
    )
    yield "### Attention that is not GroupQueryAttention"
    yield _table(("call", "why"), [(f"`{address or '.'}`", reason) for address, reason in fusion.unfused.items()])
    yield "### Calls whose results are not in the graph any more"
    yield _values([address or "." for address in fusion.lost]) or "None."


def _functions(functions: FunctionsModel) -> Iterator[str]:
    calls = Counter(node.op_identifier() for node in all_nodes(functions.model))
    yield "## Functions"
    yield _table(
        ("function", "nodes", "call nodes"),
        [
            (f"`{function.name}`", len(function), calls[name])
            for name, function in functions.model.functions.items()
            if function.domain == keys.FUNCTIONS_DOMAIN
        ],
    )
    yield "## Calls that are not functions"
    yield _values([call.address for call in functions.flat]) or "None."


def _weights(weights: WeightsSummary) -> Iterator[str]:
    yield "## Weights"
    yield (
        f"{weights.linked_bytes:,} bytes linked, {weights.copied_bytes:,} in the data file, "
        f"{weights.absent_bytes:,} left out."
    )
    if weights.linked:
        yield "### Linked files"
        yield _table(("file", "how"), [(f"`{location}`", how) for location, how in weights.linked.items()])
    if weights.made:
        yield "### Changed from the checkpoint"
        rows = [(f"`{name}`", operations) for name, operations in weights.made.items()]
        yield _table(("initializer", "computed by"), rows)


def _values(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _table(header: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    if not rows:
        return "None."
    lines = [header, tuple("---" for _ in header), *rows]
    cells = (" | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {line} |" for line in cells)
