"""Where modules were placed, as text and as code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.core.text import align, plural

if TYPE_CHECKING:
    from modelexport.tools.devices.placing import Placement


_STATES = {"torn": "split", "elsewhere": "elsewhere", "no provider": "no provider available"}


def format_placement(placement: Placement, output: Path | None, libraries: Mapping[str, Path]) -> str:
    """The device of each module and where it runs, the faults, and Python code that opens such a session."""
    rows = [("MODULE", "RULE", "WENT TO", "")]
    for call in placement.calls:
        went = ", ".join(f"{provider} {count}" for provider, count in call.providers.items()) or "-"
        rows.append((call.call, call.device, went, _STATES.get(call.state or "", "")))
    sent = ", ".join(f"{plural(count, 'node')} to {device}" for device, count in placement.nodes.items())
    lines = [align(rows), f"{sent}; {plural(placement.unplaced, 'node')} without a rule", ""]
    return "\n".join([*lines, _python(placement, output, libraries)])


def _python(placement: Placement, output: Path | None, libraries: Mapping[str, Path]) -> str:
    lines = ["import onnxruntime", ""]
    lines += [
        f'onnxruntime.register_execution_provider_library("{name}", "{path}")' for name, path in libraries.items()
    ]
    lines.append("options = onnxruntime.SessionOptions()")
    if output is not None:
        lines[0] = "import json\n\nimport onnxruntime"
        lines.append(f'for key, value in json.load(open("{output}"))["config_entries"].items():')
        lines.append("    options.add_session_config_entry(key, value)")
    else:
        lines.append(f'options.add_session_config_entry("session.layer_assignment_settings", "{placement.settings}")')
    names = [name for name in placement.providers if name not in libraries]
    if libraries:
        lines.append("for device in onnxruntime.get_ep_devices():")
        lines.append(f"    if device.ep_name in {list(libraries)}:")
        lines.append("        options.add_provider_for_devices([device], {})")
        lines.append(f'session = onnxruntime.InferenceSession("{placement.path}", options)')
    else:
        lines.append(f'session = onnxruntime.InferenceSession("{placement.path}", options, providers={names})')
    return "\n".join(lines)
