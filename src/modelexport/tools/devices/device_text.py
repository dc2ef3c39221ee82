"""Devices, and files on them, as text and as JSON. ``format_*`` returns text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from modelexport.core.result_display import error_text
from modelexport.core.text import align, first_few, indent, plural, shortened
from modelexport.terminal.printing import Style, styled

if TYPE_CHECKING:
    from modelexport.runtime.devices import FoundDevice
    from modelexport.tools.devices.device_report import DeviceReport, Fix, PieceReport

_MEANING = (
    "ERROR: of what a module returns on the device, with right values at its inputs, as a share of its size; ROUNDING: "
    "the same on the processor in the device's type"
)


_SAME = 1e-4
"""Up to this share of their size, results of two files differ by the order in which numbers are added."""


def format_devices(devices: Sequence[FoundDevice]) -> str:
    """A line for each device, with its options below it."""
    lines = []
    for device in devices:
        line = f"{device.name:<10} {device.provider}, {device.package}"
        lines.append(line + (f": {device.runs}" if device.runs else ""))
        lines += [f"{'':<10} options: {', '.join(device.options)}"] if device.options else []
        lines += [f"{'':<10} cannot be used: {device.unavailable}"] if device.unavailable else []
        lines += [f"{'':<10} without VNNI: products of int8 weights saturate"] if device.saturates else []
    return "\n".join(lines)


def format_device(report: DeviceReport) -> str:
    """What runs there, what does not and why, what is wrong, and a summary line."""
    rows: list[tuple[str, ...]] = [("MODULE", "CALL", "STATUS", "ERROR", "ROUNDING", "ON DEVICE", "OFF", "")]
    rows += [_cells(piece, report.device.provider) for piece in report.pieces]
    lines = [align(rows, right={3, 4, 5, 6}), _MEANING, ""]
    lines += list(_where(report))
    for piece in report.culprits:
        lines.append(f"wrong on {report.device.name}: {_named(piece)}")
    lines += list(_fixed(report.fix)) if report.fix is not None else []
    whole = report.whole if report.fix is None else report.fix
    result = f"off by {whole.error:.2g} of its size" if whole.error is not None else report.whole.status
    if whole.rounding is not None:
        result += f", and by {whole.rounding:.2g} on the processor in the device's type"
    named = "file" if report.fix is None else "changed file"
    summary = (
        f"{report.verdict}: on {report.device} the {named} is {result}; "
        f"bound {report.bound:g}; inputs: {report.inputs}; {plural(report.measured, 'piece')} measured now"
    )
    colour: Style = "green" if report.agrees else "red" if report.verdict == "differ" else "yellow"
    return "\n".join([*lines, *report.notes, styled(summary, colour)])


def _where(report: DeviceReport) -> Iterator[str]:
    from modelexport.tools.quantize.recipes import CHANGES

    on = report.whole.nodes.get(report.device.provider, 0)
    off = sum(report.whole.nodes.values()) - on
    if report.whole.nodes:
        values = plural(report.crossings, "value")
        yield f"{plural(on, 'node')} on {report.device.name}, {off} elsewhere; {values} cross between them in a run"
    for fallback in report.fallbacks:
        calls = first_few(call or "." for call in fallback.calls)
        yield f"not on {report.device.name}: {plural(len(fallback.nodes), fallback.operator)} in {calls}"
        yield from (f"  {line}" for line in (fallback.example, *fallback.reasons))
        for remedy in (remedy for remedy in fallback.remedies if remedy.helps):
            change = CHANGES.get(remedy.change, "export again with this version of ONNX's operators")
            yield f"  tried: {fallback.nodes[0]} runs there, and right, by '{remedy.change}': {change}"
        in_vain = [f"{remedy.change} ({remedy.result})" for remedy in fallback.remedies if not remedy.helps]
        yield from [f"  tried in vain: {', '.join(in_vain)}"] if in_vain else []


def _fixed(fix: Fix) -> Iterator[str]:
    from modelexport.tools.quantize.recipes import CHANGES

    for step in fix.steps:
        errors = "did not run" if step.before is None else f"off by {step.before:.2g}"
        errors += "" if step.after is None else f", now {step.after:.2g}"
        operators = f", {first_few(step.operators, 4)}" if step.operators else ""
        yield f"changed: {step.address or '.'}{operators} {CHANGES[step.change]}: {errors}"
    if fix.unchanged:
        yield f"no change that was tried makes right: {first_few(name or '.' for name in fix.unchanged)}"
    if not fix.path:
        yield "nothing was written"
        return
    yield f"written: {fix.path}, and {fix.recipe}, with which `modelexport quantize --recipe` makes these changes again"
    if fix.moved > _SAME:
        yield f"the changed file is quantized less: in exact numbers it is {fix.moved:.2g} away from the file itself"


def _named(piece: PieceReport) -> str:
    name = f"{piece.address or '.'}  {piece.tag}"
    if piece.span:
        pairs = zip(piece.span, piece.operators, strict=True)
        name += f", nodes {first_few((f'{node} ({operator})' for node, operator in pairs), 4)}"
        name += ": right one by one, wrong together" if len(piece.span) > 1 else ""
    return f"{name}: {piece.reason or f'off by {piece.error:.2g} of its size'}"


def _cells(piece: PieceReport, provider: str) -> tuple[str, ...]:
    depth = piece.tag.count("/") - 1
    name = f"{plural(len(piece.span), 'node')} of it" if piece.span else piece.tag.rpartition("/")[2]
    on = piece.nodes.get(provider, 0)
    off = sum(piece.nodes.values()) - on
    errors = (error_text(piece.error), error_text(piece.rounding))
    reason = shortened(piece.reason or " ".join(piece.operators), 60)
    return (indent(depth, name), piece.address or ".", piece.status, *errors, str(on), str(off), reason)
