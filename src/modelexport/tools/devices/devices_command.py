"""`devices`."""

from __future__ import annotations

from modelexport.terminal.printing import print_result
from modelexport.terminal.shared_options import JSON


def devices(as_json: bool = JSON) -> None:
    """Show the devices of this machine and their main options, for `--device NAME[,option=value...]`."""
    from modelexport.runtime.devices import find_devices
    from modelexport.tools.devices.device_text import format_devices

    devices_here = find_devices()
    print_result({"devices": devices_here}, lambda: format_devices(devices_here), as_json=as_json)
