"""Files written from ONNX's text, for tests of single facts about graphs."""

from __future__ import annotations

from pathlib import Path

import onnx


def written(path: Path, text: str, opset: int = 18, **others: int) -> Path:
    """A file of a graph, and of functions behind it; ``others`` are the versions of further operator sets."""
    imports = ", ".join(f'"{domain}": {version}' for domain, version in {"": opset, **others}.items())
    onnx.save(onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {text}"), path)
    return path
