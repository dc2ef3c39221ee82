"""``NAME.report.md``: the report of one export, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.capture.front_ends import Attempt
from modelexport.core.text import printable, without_paths
from modelexport.exporting.checks import FileCheck
from modelexport.exporting.fixed_axes import FixedAxis
from modelexport.exporting.fusion import Fusion
from modelexport.format import keys
from modelexport.graph.nodes import all_nodes
from modelexport.tagged.encodings.functions import FunctionsModel
from modelexport.weights.storage import WeightsSummary

if TYPE_CHECKING:
    from modelexport.exporting.result import ExportResult
    from modelexport.pytorch.repeatability import Unrepeatable
    from modelexport.verify.verdicts import VerifyReport


def report_path(path: Path) -> Path:
    """The path of a file's report."""
    return path.with_suffix(keys.REPORT_SUFFIX)


def write_report(path: Path, result: ExportResult) -> None:
    """Write the report of an export as Markdown."""
    path.write_text(printable(format_report(result)), encoding="utf-8")


def format_report(result: ExportResult) -> str:
    """The report: tree, coverage, time by stage, modules without nodes, the weights, and the verification."""
    hierarchy = result.hierarchy
    model, coverage = hierarchy.model, hierarchy.coverage
    sections = [
        f"# {model.name}",
        f"`{model.class_name}`, {model.parameters:,} parameters, {len(hierarchy.nodes):,} nodes, "
        f"{len(hierarchy.initializers):,} initializers, opset {model.opset}, "
        f"front end `{hierarchy.settings.frontend}`.",
        *_attempts(result.attempts),
        "## Coverage",
        _table(
            ("evidence", "nodes"),
            [
                ("exact", coverage.exact),
                ("derived", coverage.derived),
                ("inferred", coverage.inferred),
                ("untagged", coverage.untagged),
            ],
        ),
        *_fusion(result.fusion),
        *_check(result.check),
        *_fixed(result.fixed),
        *_arguments(hierarchy.settings.constants, result.notes),
        *_unrepeatable(result.unrepeatable),
        *_verification(result.verified),
        "## Time by stage",
        _table(("stage", "seconds"), [(stage, f"{spent:.2f}") for stage, spent in result.seconds.items()]),
        "## Modules",
        "Every call, with the number of nodes that it owns itself.",
        _table(
            ("call", "tag", "nodes"),
            [(f"`{call.address or '.'}`", f"`{call.tag}`", call.nodes) for call in hierarchy.calls],
        ),
        "## Modules without nodes",
        _table(
            ("module", "class", "why"),
            [(f"`{m.path or '.'}`", f"`{m.class_name}`", m.reason) for m in hierarchy.modules if m.reason],
        ),
        "## Nodes with several owners",
        _table(
            ("node", "operator", "calls, the one that produces the output first"),
            [
                (f"`{node.name}`", node.op_type, ", ".join(f"`{call or '.'}`" for call in node.calls))
                for node in hierarchy.nodes
                if node.calls
            ],
        ),
        *_functions(result.functions),
        *_weights(result.weights),
        *_messages(result.messages),
        "## Environment",
        _table(("package", "version"), [*hierarchy.environment.items()]),
    ]
    return "\n\n".join(sections) + "\n"


def _messages(messages: Sequence[str]) -> list[str]:
    if not messages:
        return []
    return ["## Warnings of the exporter", "\n".join(f"- {message}" for message in messages)]


def _attempts(attempts: Sequence[Attempt]) -> list[str]:
    if not attempts:
        return []
    return [
        "## Front ends that were tried first",
        *(
            f"`{one.frontend}` did not produce a usable file:\n\n````\n{one.reason.replace('````', '')}\n````"
            for one in attempts
        ),
    ]


def _check(check: FileCheck | None) -> list[str]:
    if check is None:
        return ["## Check", "Not requested."]
    told = {"passed": "Passed", "failed": "**Failed**", "skipped": "Skipped"}[check.status]
    where = f" ({check.step})" if check.step else ""
    largest = "" if check.largest is None else f"; the largest error is {check.largest:.2e} of the output's norm"
    return [
        "## Check",
        "`onnx.checker`, loading in ONNX Runtime, and the outputs for the example inputs compared with PyTorch's: "
        f"{told}{where}{': ' + without_paths(check.reason) if check.reason else ''}{largest}.",
    ]


def _fusion(fusion: Fusion | None) -> list[str]:
    if fusion is None:
        return []
    return [
        f"## Fused for {fusion.target}",
        f"{fusion.before:,} nodes became {fusion.after:,}.",
        _table(
            ("operator", "nodes", "calls of", "with it", "without it"),
            [
                (
                    f"`{one.op_type}`",
                    one.nodes,
                    f"`{one.module_class}`",
                    f"{one.calls} of {one.of}",
                    _values(one.without),
                )
                for one in fusion.operators
            ],
        ),
        "### Attention that is not GroupQueryAttention",
        _table(("call", "why"), [(f"`{address or '.'}`", reason) for address, reason in fusion.unfused.items()]),
        "### Calls whose results are not in the graph any more",
        _values([address or "." for address in fusion.lost]) or "None.",
    ]


def _fixed(axes: Sequence[FixedAxis]) -> list[str]:
    if not axes:
        return []
    rows = [(f"`{a.input}`", a.axis, a.size, f"`{a.call or '.'}`", without_paths(a.reason)) for a in axes]
    return [
        "## Axes that are not dynamic",
        "The capture left them dynamic, but with another size the file fails or differs from PyTorch.",
        _table(("input", "axis", "size", "fixed by", "with another size"), rows),
    ]


def _arguments(constants: Mapping[str, str], notes: Sequence[str]) -> list[str]:
    if not constants and not notes:
        return []
    kept = [(f"`{name}`", f"`{value}`") for name, value in constants.items()]
    return [
        "## Arguments",
        *(["\n".join(f"- {note}" for note in notes)] if notes else []),
        *([_table(("argument that the file does not take", "value that it keeps"), kept)] if kept else []),
    ]


def _unrepeatable(found: Sequence[Unrepeatable]) -> list[str]:
    if not found:
        return []
    rows = [(f"`{one.where}`", one.kind, told_of(one.kind)) for one in found]
    return ["## Not the same in every run", _table(("where", "what", "what the file does instead"), rows)]


def told_of(kind: str) -> str:
    """What a file does instead of behavior that changes from run to run."""
    return {
        "random": "it draws its own numbers, or uses those of the captured run: it cannot agree with PyTorch",
        "mask": "it computes with the attention mask; PyTorch leaves out a mask that hides nothing, and then computes "
        "something else",
        "fused": "it computes every position; PyTorch's fused operator of encoder layers gives zeros where a mask "
        "hides padding",
        "autocast": "it computes in the types of the weights; torch.autocast rounds to half precision",
        "buffer": "it always computes with the value that the buffer had before the run",
        "no output": "it returns nothing",
        "empty output": "it returns an empty tensor, or omits the output",
    }[kind]


def _verification(verified: VerifyReport | None) -> list[str]:
    if verified is None:
        return []
    rows = [
        (f"`{o.name}`", o.status, o.dtype, o.shape, _number(o.absolute), _number(o.relative), o.nans, o.reason)
        for o in verified.outputs
    ]
    header = ("output", "status", "type", "shape", "absolute", "relative", "NaN", "reason")
    return ["## Against PyTorch", f"On `{verified.provider}`.", _table(header, rows)]


def _functions(functions: FunctionsModel | None) -> list[str]:
    if functions is None:
        return []
    calls = Counter(node.op_identifier() for node in all_nodes(functions.model))
    return [
        "## Functions",
        _table(
            ("function", "nodes", "call nodes"),
            [
                (f"`{function.name}`", len(function), calls[name])
                for name, function in functions.model.functions.items()
                if function.domain == keys.FUNCTIONS_DOMAIN
            ],
        ),
        "## Calls that are not functions",
        _table(
            ("call", "why", "values"),
            [(f"`{call.address}`", call.reason, _values(call.values)) for call in functions.flat],
        ),
        "## Nodes outside the calls that own them",
        _table(
            ("are in", "owners", "values"),
            [(f"`{h.address}`", _values(h.owners), _values(h.values)) for h in functions.hoisted],
        ),
    ]


def _weights(weights: WeightsSummary | None) -> list[str]:
    if weights is None or not weights.is_apart:
        return []
    sections = [
        "## Weights",
        f"{weights.linked_bytes:,} bytes linked, {weights.copied_bytes:,} in the data file, "
        f"{weights.absent_bytes:,} left out.",
    ]
    if weights.linked:
        files = [(f"`{location}`", how) for location, how in weights.linked.items()]
        sections += ["### Linked files", _table(("file", "how"), files)]
    if weights.made:
        made = [(f"`{name}`", operations) for name, operations in weights.made.items()]
        sections += ["### Changed from the checkpoint", _table(("initializer", "computed by"), made)]
    return sections


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
