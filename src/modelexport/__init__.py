"""Export PyTorch models to ONNX with the exact module call on every node.

Importing this package imports neither torch nor anything else that is slow: each public name does when it is used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from modelexport.adopt import adopt as adopt
    from modelexport.against import verify_against as verify_against
    from modelexport.carriers import inline as inline
    from modelexport.carriers import strip as strip
    from modelexport.compare import FileComparison as FileComparison
    from modelexport.compare import compare as compare
    from modelexport.inputs import example_inputs as example_inputs
    from modelexport.pipeline import export as export
    from modelexport.read import TaggedModel as TaggedModel
    from modelexport.read import load as load
    from modelexport.result import ExportResult as ExportResult
    from modelexport.retag import retag as retag
    from modelexport.update_weights import update_weights as update_weights
    from modelexport.vectors import verify_vectors as verify_vectors
    from modelexport.verdicts import VerifyReport as VerifyReport
    from modelexport.verify import verify as verify

_PUBLIC = {
    "adopt": "modelexport.adopt",
    "VerifyReport": "modelexport.verdicts",
    "ExportResult": "modelexport.result",
    "FileComparison": "modelexport.compare",
    "TaggedModel": "modelexport.read",
    "compare": "modelexport.compare",
    "example_inputs": "modelexport.inputs",
    "export": "modelexport.pipeline",
    "inline": "modelexport.carriers",
    "load": "modelexport.read",
    "retag": "modelexport.retag",
    "strip": "modelexport.carriers",
    "update_weights": "modelexport.update_weights",
    "verify": "modelexport.verify",
    "verify_against": "modelexport.against",
    "verify_vectors": "modelexport.vectors",
}
__all__ = sorted(_PUBLIC)  # noqa: PLE0605 - the table above is the list


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


class _Package(ModuleType):
    """Keeps a public name from being replaced by the submodule of that name when that is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
