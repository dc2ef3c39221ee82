"""The result of `export` as text, its warnings, and its JSON document."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.core.text import first_few, plural
from modelexport.graph.size_conditions import conditions_in_words
from modelexport.tagged.tree_display import format_coverage
from modelexport.terminal.printing import command_line, next_steps, styled
from modelexport.terminal.show_verification import format_verification

if TYPE_CHECKING:
    from modelexport.exporting.export_result import ExportResult
    from modelexport.exporting.options import Options
    from modelexport.exporting.output_checks import FileCheck
    from modelexport.exporting.runtime_fusion import Fusion
    from modelexport.format.documents import Hierarchy
    from modelexport.weights.linked_copied_embedded import WeightsSummary

_SHOWN_VALUES = 6
"""How many inputs or outputs are shown."""


def format_export(result: ExportResult, page: Path | None = None) -> str:
    """The result of an export: what was written, what was proven, and what to do next.

    Args:
        page: The page of `export --report`, if it was written.
    """
    calls, shown = sum(row.nodes > 0 for row in result.tree), result.hierarchy
    lines = [styled(f"wrote {result.path}: {plural(result.tree[0].nodes, 'node')} of {plural(calls, 'call')}", "bold")]
    lines += format_interface(shown)
    lines += [f"  {remark}" for remark in result.remarks]
    lines += [f"  {format_coverage(result.coverage)}"]
    beside = [file.name for file in (*result.files, *([page] if page is not None else [])) if file != result.path]
    lines += [f"  beside it: {', '.join(beside)}"] if beside else []
    lines += [f"  {line}" for line in format_weights(result.weights)]
    if result.fusion is not None:
        lines += format_fusion(result.fusion)
    if result.valid_if:
        lines.append(styled(conditions_in_words(result.valid_if), "bold"))
    if constants := result.hierarchy.settings.constants:
        lines.append(f"kept as in the example: {', '.join(f'{name} = {value}' for name, value in constants.items())}")
    if result.check is not None:
        lines.append(styled(_format_check(result.check), "red" if result.check.status == "failed" else "green"))
    if result.verified is not None:
        lines.append(styled(format_verification(result.verified), "green" if result.verified.agrees else "red"))
    slowest = sorted(result.seconds.items(), key=lambda stage: -stage[1])[:3]
    most = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in slowest)
    lines.append(styled(f"{sum(result.seconds.values()):.1f} s: {most}", "dim"))
    return "\n".join([*lines, _next_steps(result, page)])


def format_interface(hierarchy: Hierarchy) -> list[str]:
    """A line for the inputs and one for the outputs, with their types and sizes."""
    return [
        f"  in   {first_few(hierarchy.inputs, _SHOWN_VALUES)}",
        f"  out  {first_few(hierarchy.outputs, _SHOWN_VALUES)}",
    ]


def _next_steps(result: ExportResult, page: Path | None) -> str:
    steps = [command_line("tree", result.path)]
    if result.verified is None and result.check is not None and result.check.status == "passed":
        steps.append("export with --verify to compare every module call")
    shown = command_line("report", result.path, "-o", result.path.with_suffix(".html"))
    return next_steps(*steps, shown if page is None else f"open {page} in a browser")


def format_fusion(fusion: Fusion) -> list[str]:
    """What was fused where: a line for all, one for each reason why an attention was not, one for lost boundaries."""
    where = ", ".join(
        f"{operator.op_type} in {operator.calls:,} of {operator.of:,} {operator.module_class}"
        for operator in fusion.operators
    )
    lines = [f"fused for {fusion.target}: {fusion.before:,} nodes became {fusion.after:,}; {where or 'nothing found'}"]
    reasons: dict[str, list[str]] = {}
    for address, reason in fusion.unfused.items():
        reasons.setdefault(reason, []).append(address)
    lines += [f"no GroupQueryAttention in {_some(addresses)}: {reason}" for reason, addresses in reasons.items()]
    if fusion.lost:
        lines.append(
            f"not in the graph any more: what {_some(fusion.lost)} {'returns' if len(fusion.lost) == 1 else 'return'}"
        )
    return lines


def _some(addresses: Sequence[str]) -> str:
    return first_few((address or "." for address in addresses), 3)


def _format_check(check: FileCheck) -> str:
    where = f" ({check.step})" if check.step else ""
    if check.status == "passed":
        if check.largest is None:
            return "check: the file loads and runs; no output was compared"
        return f"check: passed; outputs within {check.largest:.1e} of PyTorch's"
    return f"check: {check.status}{where}: {check.reason}"


def format_weights(weights: WeightsSummary) -> list[str]:
    """The places of weights outside the model file, a line for each."""
    lines = []
    if weights.linked:
        how = ", ".join(f"{file} ({how})" for file, how in weights.linked.items())
        lines.append(f"weights: {weights.linked_bytes / 1e9:,.3f} GB linked, in {how}")
    if "hard link" in weights.linked.values():
        lines.append(
            "  a hard link is the same file under a second name: ONNX Runtime accepts it, onnx.checker refuses it, and "
            "changing one in place changes the other"
        )
    if weights.copied_bytes:
        lines.append(f"weights: {weights.copied_bytes / 1e9:,.3f} GB in the data file")
    if weights.absent_bytes:
        lines.append(f"weights: {weights.absent_bytes / 1e9:,.3f} GB left out")
    if weights.made:
        some = [f"{name} ({operations})" for name, operations in list(weights.made.items())[:3]]
        more = f", and {len(weights.made) - 3} more, which the report lists" if len(weights.made) > 3 else ""
        lines.append(f"computed during loading, changed from the checkpoint: {', '.join(some)}{more}")
    return lines


def print_warnings(result: ExportResult, options: Options) -> None:
    """Write to standard error what a person has to know about the file."""
    lines = [*result.notes, *result.limits]
    if result.attempts:
        reasons = "; ".join(f"{item.frontend} failed: {item.reason.splitlines()[0]}" for item in result.attempts)
        lines.append(f"exported with {result.hierarchy.settings.frontend}; {reasons}")
    if options.tags.tags_as == "attributes":
        lines.append(
            "onnx.checker and ONNX Runtime refuse tags as attributes; "
            f"`modelexport strip {result.path} -o OUT.onnx` makes a file that they accept"
        )
    if options.quantized.quantized_as == "qdq":
        lines.append(
            "ONNX Runtime computes DequantizeLinear and MatMul with activations in 8 bits, about 1 % off, unless "
            "session.qdq_matmulnbits_accuracy_level is 0, as in the check"
        )
    if result.check is not None and result.check.status == "passed" and result.check.reason:
        lines.append(f"check: {result.check.reason}")
    for line in lines:
        print(f"modelexport: warning: {line}", file=sys.stderr)


def export_document(result: ExportResult) -> dict[str, Any]:
    """The document that ``modelexport export --json`` prints."""
    document: dict[str, Any] = {
        "path": str(result.path),
        "files": [str(file) for file in result.files],
        "model": result.hierarchy.model,
        "frontend": result.hierarchy.settings.frontend,
        "coverage": result.coverage,
        "seconds": result.seconds,
        "messages": result.messages,
        "tree": result.tree,
    }
    verified = result.verified
    optional: dict[str, Any] = {
        "valid_if": result.valid_if,
        "fixed": result.fixed,
        "unrepeatable": result.unrepeatable,
        "fusion": result.fusion,
        "weights": result.weights if result.weights.is_apart else None,
        "check": result.check,
        "attempts": [{"frontend": failed.frontend, "reason": failed.reason} for failed in result.attempts],
        "verify": verified
        and {
            "verdict": verified.verdict,
            "agrees": verified.agrees,
            "largest_difference": verified.largest,
            "outputs": verified.outputs,
            "calls": verified.counts,
            "parameters": verified.parameters,
        },
    }
    return document | {name: facts for name, facts in optional.items() if facts}
