"""Which execution provider of ONNX Runtime gets which node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime

from modelexport.errors import UsageError

CPU = "CPUExecutionProvider"
SETTINGS = "session.layer_assignment_settings"
RECORD = "session.record_ep_graph_assignment_info"


def session_providers(providers: Sequence[str], libraries: Mapping[str, Path]) -> list[str]:
    """Load the libraries of plug-in providers, and check that all providers are there; CPU comes last.

    Args:
        providers: Names, in order; all that this build of ONNX Runtime has if left out.
        libraries: Names of providers to the libraries that have them.

    Raises:
        UsageError: A library cannot be loaded, or a provider is not there.
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
        raise UsageError(f"ONNX Runtime has no {missing[0]} here: it has {', '.join(there)}")
    return list(dict.fromkeys([*(name for name in wanted if name != CPU), CPU]))


def assigned_providers(path: Path, settings: str, providers: Sequence[str]) -> dict[str, str]:
    """Open a session and ask where its nodes went: node name to provider.

    The runtime's optimisations are off, so that the nodes are those of the file. What it drops while it loads a model
    is left out.

    Args:
        settings: What ``session.layer_assignment_settings`` gets.
        providers: As :func:`session_providers` gives them.

    Raises:
        UsageError: ONNX Runtime does not load the model.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # what fails is raised, with the same words
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
        raise UsageError(f"ONNX Runtime does not load the model: {' '.join(str(error).split())[:600]}") from error
    return {
        node.name: part.ep_name for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()
    }


def _plugged() -> list[str]:
    return [device.ep_name for device in onnxruntime.get_ep_devices()]
