"""`devices`."""

from __future__ import annotations

from modelexport.cli.printing import print_json
from modelexport.cli.shared_options import JSON


def devices(as_json: bool = JSON) -> None:
    """Show the devices of this machine, with the options that matter; `--device NAME[,option=value...]` takes one."""
    from modelexport.cli.show_devices import format_devices
    from modelexport.runtime.devices import find_devices

    found = find_devices()
    if as_json:
        print_json({"devices": found})
    else:
        print(format_devices(found))
