"""Export PyTorch models to ONNX with the exact module call on every node, and work on ONNX files by module.

    result = modelexport.export(model, inputs, "bert.onnx")     # a file, tagged; checked against the model
    tagged = modelexport.load("bert.onnx")                      # the tree of modules in it; needs no torch
    tagged["encoder.layer.0"].nodes                             # a module's nodes, inputs, outputs, parameters
    modelexport.verify(model, inputs, "bert.onnx")              # every module call compared with PyTorch
    modelexport.extract("bert.onnx", "encoder.layer.0", "layer.onnx")

Export and check: export, export_package, verify, verify_package, verify_reference, verify_on_device.
Two files: compare, verify_against, verify_stages.
Look: load, cost, profile, values, sensitivity, hierarchy.
Change: extract, split, replace, place, rename, quantize, update_weights, merge_adapters, adapters_as_inputs.
Files of others: adopt, retag, strip, inline. Back to PyTorch: to_torch.

``help`` of each shows its arguments, results and errors. Every error that is raised on purpose is a
``ModelExportError`` whose text says what was wrong and what to do. Importing this package is fast: torch and other
slow packages are imported when a public name is first used.
"""

# The folders of this package are called rooms; docs/architecture.md lists them, and what each may import.

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from modelexport.core.missing_extras import missing_extra
from modelexport.core.version import __version__ as __version__

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
_PUBLIC = {alias.name: str(each.module) for each in _STUB if isinstance(each, ast.ImportFrom) for alias in each.names}
"""The public names to the modules that have them, from the stub that type checkers read, too."""
__all__ = sorted(_PUBLIC)  # noqa: PLE0605 - the stub is the list


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        public = getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if lacking := missing_extra(error):
            raise ImportError(f"modelexport.{name}: {lacking}", name=error.name) from error
        raise
    if not isinstance(public, FunctionType):
        return public
    from modelexport.core.checked_arguments import with_checked_arguments

    return with_checked_arguments(public)


class _Package(ModuleType):
    """Keeps a public name when the submodule of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
