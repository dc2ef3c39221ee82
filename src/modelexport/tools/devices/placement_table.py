"""Where the nodes of each module run, and what is wrong there, as a table of figures."""

from __future__ import annotations

from modelexport.core.calls import ModuleCall
from modelexport.tables.columns import ERROR, Column
from modelexport.tables.table import Table
from modelexport.tagged.file import TaggedFile
from modelexport.tools.devices.device_report import DeviceReport

ON_DEVICE = Column("on_device", "nodes")
OFF_DEVICE = Column("off_device", "nodes")


def placement_table(tagged: TaggedFile, report: DeviceReport) -> Table:
    """The nodes of each call on the device and elsewhere, and the errors of the calls that were run alone."""
    figures: dict[str, dict[ModuleCall, float]] = {ON_DEVICE.name: {}, OFF_DEVICE.name: {}, ERROR.name: {}}
    for address, providers in report.placed.items():
        call, on = ModuleCall.parse(address), providers.get(report.device.provider, 0)
        figures[ON_DEVICE.name][call] = on
        figures[OFF_DEVICE.name][call] = sum(providers.values()) - on
    for region in report.regions:
        if region.error is not None and not region.node_names:
            figures[ERROR.name][ModuleCall.parse(region.address)] = region.error
    columns = (ON_DEVICE, OFF_DEVICE, ERROR)
    notes = (f"on {report.device}: nodes there and elsewhere; errors of calls run alone", *report.notes)
    return Table(tagged.calls, tagged.tags, columns, direct=figures, name=tagged.path.name, notes=notes)
