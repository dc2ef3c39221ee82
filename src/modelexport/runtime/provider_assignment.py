"""Which ONNX Runtime execution provider runs each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from modelexport.runtime.devices import CPU, Device, find_device, plugged_in
from modelexport.runtime.sessions import open_file, session_options

SETTINGS = "session.layer_assignment_settings"
RECORD = "session.record_ep_graph_assignment_info"


def session_devices(names: Sequence[str], libraries: Mapping[str, Path]) -> list[Device]:
    """The devices of a session, in order; the processor comes last.

    Args:
        names: Devices (:func:`.devices.find_device`).
        libraries: Names of providers to the libraries that implement them.

    Raises:
        UsageError: A library cannot be loaded, or this machine does not have a device.
    """
    plugged = {name: plugged_in(name, path) for name, path in libraries.items()}
    devices = [plugged[name] if name in plugged else find_device(name) for name in names]
    return [*(device for device in devices if device.provider != CPU), find_device(CPU)]


def assigned_providers(path: Path, settings: str, devices: Sequence[Device]) -> dict[str, str]:
    """Open a session and return the provider of each node: node name to provider.

    The runtime's optimizations are off, so that the nodes are those of the file. Nodes that the runtime drops while it
    loads the model are left out.

    Args:
        settings: The value of ``session.layer_assignment_settings``.

    Raises:
        RunError: ONNX Runtime cannot load the model.
    """
    options = session_options("none", *devices)
    options.add_session_config_entry(RECORD, "1")
    if settings:
        options.add_session_config_entry(SETTINGS, settings)
    session = open_file(path, options)
    return {
        node.name: part.ep_name for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()
    }
