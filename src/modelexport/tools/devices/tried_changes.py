"""Replaces a node that a device does not run by equivalent nodes, each of them tried on the device."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from modelexport.core.text import shortened
from modelexport.graph.copies import copy_of
from modelexport.tools.devices.device_regions import ReferenceRegion
from modelexport.tools.devices.device_report import TriedChange, count_nodes
from modelexport.tools.devices.judged_regions import RegionRunner, judge
from modelexport.tools.quantize.changes_for_devices import change_nodes

_CHANGES = ("definition", "float")


def tried_changes(region: ReferenceRegion, node: ir.Node, runs: RegionRunner, bound: float) -> Iterator[TriedChange]:
    """Try changes of a node on a device.

    Args:
        region: The node alone.
    """
    for change in _CHANGES:
        model = copy_of(region.model)
        if change_nodes(model, change, [node.name]):
            yield TriedChange(change, _result(region, model, runs, bound))


def _result(region: ReferenceRegion, model: ir.Model, runs: RegionRunner, bound: float) -> str:
    if (changed := region.with_model(model)) is None:
        return "cannot be computed"
    result = runs.run(changed)
    if result.status != "ran":
        return f"{result.status}: {shortened(result.message.removeprefix('[ONNXRuntimeError] : '), 100)}"
    status, _ = judge(changed, result, runs.device, bound)
    if status not in ("agree", "rounding"):
        return f"is off by {result.error:.2g}"
    elsewhere = sum(count for provider, count in count_nodes(result).items() if provider != runs.device.provider)
    return "not there either" if elsewhere else ""
