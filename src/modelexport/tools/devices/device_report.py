"""What a file does on a device, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from modelexport.core.result_display import Report, Rows, error_text
from modelexport.runtime.devices import Device
from modelexport.runtime.runner_process import RunnerResult

RegionStatus = Literal["agree", "rounding", "off", "failed", "crashed", "hung", "not compared"]
"""``rounding``: beyond the bound, and no further off than the type of the device is on the CPU."""


class RegionReport(msgspec.Struct, frozen=True, kw_only=True):
    """One region of the file, run alone on the device with right values at its inputs."""

    address: str
    """The call; for a smaller region, the call that it is in."""
    tag: str
    status: RegionStatus
    error: float | None = None
    """The largest error of its outputs, as a share of their size; ``None`` if it did not run or is not a number."""
    rounding: float | None = None
    """The error on the CPU in the type of the device; measured only if ``error`` exceeds the bound."""
    reason: str = ""
    nodes: dict[str, int] = {}
    """Providers to the number of nodes that they run of it."""
    node_names: list[str] = []
    """The names of the nodes, if it is smaller than a call."""
    operators: list[str] = []
    """The operators of these nodes."""
    seconds: float = 0.0
    """The time of a run; that of a simulator tells nothing about the device."""

    @property
    def is_faulty(self) -> bool:
        """Whether the device is to blame."""
        return self.status in ("off", "failed", "crashed", "hung")


class TriedChange(msgspec.Struct, frozen=True):
    """A change that was tried on a node that the device does not run."""

    change: str
    """One of :data:`modelexport.tools.quantize.changes_for_devices.CHANGES`, or ``opset`` with a version."""
    result: str
    """Empty if the changed node runs on the device and is right; else what goes wrong."""

    @property
    def helps(self) -> bool:
        """Whether the node runs on the device then, and is right."""
        return not self.result


class Fallback(msgspec.Struct, frozen=True):
    """An operator of which nodes run on the CPU."""

    operator: str
    nodes: list[str]
    calls: list[str]
    example: str
    """The first node, with the shapes that it takes and returns."""
    reasons: list[str]
    """Lines of the provider's log that name it."""
    tried: list[TriedChange]


class FoundChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was tried on the device, and makes a region right."""

    address: str
    change: str
    """One of :data:`modelexport.tools.quantize.changes_for_devices.CHANGES`."""
    nodes: list[str]
    """The nodes of the file that are changed."""
    operators: list[str] = []
    before: float | None = None
    """The error of the region on the device."""
    after: float | None = None
    """The error with the change; ``None`` if the change was chosen by the error of the whole file."""


class FoundChanges(msgspec.Struct, frozen=True, kw_only=True):
    """A changed file that is less wrong on the device."""

    path: str
    """The file; empty if none was written, because no change made a region right."""
    recipe: str
    """The recipe of the changes, for ``quantize --recipe``."""
    steps: list[FoundChange]
    unchanged: list[str]
    """Addresses of wrong regions that no change made right."""
    status: RegionStatus
    error: float | None
    """The error of the changed file on the device."""
    rounding: float | None
    """As :attr:`RegionReport.rounding`."""
    moved: float
    """The difference of the changed file from the file in exact arithmetic; not 0 if less of it is quantized."""
    nodes: dict[str, int]
    """Providers to the number of nodes that they run of the changed file."""

    @property
    def agrees(self) -> bool:
        """Whether its outputs are within the bound."""
        return self.status == "agree"


class DeviceReport(Report, msgspec.Struct, frozen=True, kw_only=True):
    """A file on a device."""

    file: str
    device: Device
    inputs: str
    bound: float
    regions: list[RegionReport]
    """The regions that were run, in order: the whole file first, then calls and smaller regions."""
    culprits: list[RegionReport]
    """The smallest regions that are wrong."""
    placed: dict[str, dict[str, int]]
    """Addresses of calls to providers to the number of the call's own nodes."""
    crossings: int
    """How many values go from one provider to another in a run."""
    fallbacks: list[Fallback]
    measured: int
    """Regions that were run now; the results of the others were kept."""
    notes: list[str] = []
    fix: FoundChanges | None = None

    @property
    def whole(self) -> RegionReport:
        """The whole file."""
        return self.regions[0]

    @property
    def verdict(self) -> Literal["agree", "differ", "not compared"]:
        """Of the whole file, or of the changed one; ``not compared`` if an output has no right numbers and the others
        agree.
        """
        status = (self.whole if self.fix is None else self.fix).status
        return status if status in ("agree", "not compared") else "differ"

    def __repr__(self) -> str:
        named = ", ".join(region.address or "." for region in self.culprits)
        wrong = f"; wrong in {named}" if named else ""
        return f"<DeviceReport {self.file} on {self.device}: {self.whole.status}{wrong}>"

    def _table(self) -> Rows:
        yield "call", "status", "error", "rounding"
        for region in self.regions:
            yield region.address or ".", region.status, error_text(region.error), error_text(region.rounding)


def count_nodes(result: RunnerResult) -> dict[str, int]:
    """Providers to the number of nodes that they run."""
    return {provider: sum(map(len, graphs)) for provider, graphs in result.nodes.items()}
