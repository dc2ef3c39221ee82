"""Which ONNX Runtime execution provider runs each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime

from modelexport.errors import RunError, UsageError

CPU = "CPUExecutionProvider"
SETTINGS = "session.layer_assignment_settings"
RECORD = "session.record_ep_graph_assignment_info"


def session_providers(providers: Sequence[str], libraries: Mapping[str, Path]) -> list[str]:
    """Load the libraries of plug-in providers, and check that all providers are available; CPU comes last.

    Args:
        providers: Names, in order; by default all that this build of ONNX Runtime has.
        libraries: Names of providers to the libraries that implement them.

    Raises:
        UsageError: A library cannot be loaded, or a provider is not available.
    """
    known = onnxruntime.get_available_providers()
    for name, path in libraries.items():
        if name not in _plugged():
            try:
                onnxruntime.register_execution_provider_library(name, str(path))
            except Exception as error:  # its exception types are not public
                text = " ".join(str(error).split())[:300]
                raise UsageError(f"{path} cannot be loaded as the provider {name}: {text}") from error
    there = list(dict.fromkeys([*known, *_plugged()]))
    wanted = list(providers) or [name for name in known if name == CPU]
    if missing := [name for name in wanted if name not in there]:
        raise UsageError(f"this ONNX Runtime does not have {missing[0]}: it has {', '.join(there)}")
    return list(dict.fromkeys([*(name for name in wanted if name != CPU), CPU]))


def assigned_providers(path: Path, settings: str, providers: Sequence[str]) -> dict[str, str]:
    """Open a session and return the provider of each node: node name to provider.

    The runtime's optimizations are off, so that the nodes are those of the file. Nodes that the runtime drops while it
    loads the model are left out.

    Args:
        settings: The value of ``session.layer_assignment_settings``.
        providers: The result of :func:`session_providers`.

    Raises:
        UsageError: ONNX Runtime cannot load the model.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # errors are raised anyway, with the same text
    options.add_session_config_entry(RECORD, "1")
    if settings:
        options.add_session_config_entry(SETTINGS, settings)
    plugged = [device for device in onnxruntime.get_ep_devices() if device.ep_name in providers]
    built_in = [name for name in providers if name in onnxruntime.get_available_providers()]
    try:
        if any(device.ep_name not in built_in for device in plugged):
            for name in providers:
                if devices := [device for device in plugged if device.ep_name == name][:1]:
                    options.add_provider_for_devices(devices, {})
            session = onnxruntime.InferenceSession(path, options)
        else:
            session = onnxruntime.InferenceSession(path, options, providers=built_in)
    except Exception as error:  # its exception types are not public
        raise RunError(f"ONNX Runtime cannot load the model: {' '.join(str(error).split())[:600]}") from error
    return {
        node.name: part.ep_name for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()
    }


def _plugged() -> list[str]:
    return [device.ep_name for device in onnxruntime.get_ep_devices()]
