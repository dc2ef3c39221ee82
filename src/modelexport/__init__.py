"""Export PyTorch models to ONNX with the exact module call on every node.

Importing this package imports neither torch nor anything else that is slow: each public name does when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from modelexport.inputs import example_inputs as example_inputs
    from modelexport.pipeline import ExportResult as ExportResult
    from modelexport.pipeline import export as export
    from modelexport.read import TaggedModel as TaggedModel
    from modelexport.read import load as load

_PUBLIC = {
    "ExportResult": "modelexport.pipeline",
    "TaggedModel": "modelexport.read",
    "example_inputs": "modelexport.inputs",
    "export": "modelexport.pipeline",
    "load": "modelexport.read",
}
__all__ = sorted(_PUBLIC)  # noqa: PLE0605 - the table above is the list


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
