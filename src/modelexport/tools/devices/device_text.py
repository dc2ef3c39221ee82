"""Devices, and files on them, as text and as JSON. ``format_*`` returns text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from modelexport.core.result_display import error_text
from modelexport.core.text import align, first_few, indent, plural, shortened
from modelexport.terminal.printing import Style, styled
from modelexport.traces.tolerances import ADDED_IN_ANOTHER_ORDER

if TYPE_CHECKING:
    from modelexport.runtime.devices import FoundDevice
    from modelexport.tools.devices.device_report import DeviceReport, FoundChanges, RegionReport

_MEANING = (
    "ERROR: of what a module returns on the device, with right values at its inputs, as a share of its size; ROUNDING: "
    "the same on the processor in the device's type"
)


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
    rows += [_cells(region, report.device.provider) for region in report.regions]
    lines = [align(rows, right={3, 4, 5, 6}), _MEANING, ""]
    lines += list(_where(report))
    for region in report.culprits:
        lines.append(f"wrong on {report.device.name}: {_named(region)}")
    lines += list(_fixed(report.fix)) if report.fix is not None else []
    whole = report.whole if report.fix is None else report.fix
    result = f"off by {whole.error:.2g} of its size" if whole.error is not None else report.whole.status
    if whole.rounding is not None:
        result += f", and by {whole.rounding:.2g} on the processor in the device's type"
    named = "file" if report.fix is None else "changed file"
    summary = (
        f"{report.verdict}: on {report.device} the {named} is {result}; "
        f"bound {report.bound:g}; inputs: {report.inputs}; {plural(report.measured, 'region')} measured now"
    )
    colour: Style = "green" if report.agrees else "red" if report.verdict == "differ" else "yellow"
    return "\n".join([*lines, *report.notes, styled(summary, colour)])


def _where(report: DeviceReport) -> Iterator[str]:
    from modelexport.tools.quantize.changes_for_devices import CHANGES

    on = report.whole.nodes.get(report.device.provider, 0)
    off = sum(report.whole.nodes.values()) - on
    if report.whole.nodes:
        values = plural(report.crossings, "value", "cross")
        yield f"{plural(on, 'node')} on {report.device.name}, {off} elsewhere; {values} between them in a run"
    for fallback in report.fallbacks:
        calls = first_few(call or "." for call in fallback.calls)
        yield f"not on {report.device.name}: {plural(len(fallback.nodes), fallback.operator)} in {calls}"
        yield from (f"  {line}" for line in (fallback.example, *fallback.reasons))
        for one in (one for one in fallback.tried if one.helps):
            change = CHANGES.get(one.change)
            words = "export again with this version of ONNX's operators" if change is None else change.words
            yield f"  tried: {fallback.nodes[0]} runs there, and right, by '{one.change}': {words}"
        in_vain = [f"{one.change} ({one.result})" for one in fallback.tried if not one.helps]
        yield from [f"  tried in vain: {', '.join(in_vain)}"] if in_vain else []


def _fixed(fix: FoundChanges) -> Iterator[str]:
    from modelexport.tools.quantize.changes_for_devices import CHANGES

    for step in fix.steps:
        errors = "did not run" if step.before is None else f"off by {step.before:.2g}"
        errors += "" if step.after is None else f", now {step.after:.2g}"
        operators = f", {first_few(step.operators, 4)}" if step.operators else ""
        yield f"changed: {step.address or '.'}{operators} {CHANGES[step.change].words}: {errors}"
    if fix.unchanged:
        yield f"no change that was tried makes right: {first_few(name or '.' for name in fix.unchanged)}"
    if not fix.path:
        yield "nothing was written"
        return
    yield f"written: {fix.path}, and {fix.recipe}, with which `modelexport quantize --recipe` makes these changes again"
    if fix.moved > ADDED_IN_ANOTHER_ORDER:
        yield f"the changed file is quantized less: in exact numbers it is {fix.moved:.2g} away from the file itself"


def _named(region: RegionReport) -> str:
    name = f"{region.address or '.'}  {region.tag}"
    if region.node_names:
        pairs = zip(region.node_names, region.operators, strict=True)
        name += f", nodes {first_few((f'{node} ({operator})' for node, operator in pairs), 4)}"
        name += ": right one by one, wrong together" if len(region.node_names) > 1 else ""
    return f"{name}: {region.reason or f'off by {region.error:.2g} of its size'}"


def _cells(region: RegionReport, provider: str) -> tuple[str, ...]:
    depth = region.tag.count("/") - 1
    name = f"{plural(len(region.node_names), 'node')} of it" if region.node_names else region.tag.rpartition("/")[2]
    on = region.nodes.get(provider, 0)
    off = sum(region.nodes.values()) - on
    errors = (error_text(region.error), error_text(region.rounding))
    reason = shortened(region.reason or " ".join(region.operators), 60)
    return (indent(depth, name), region.address or ".", region.status, *errors, str(on), str(off), reason)
