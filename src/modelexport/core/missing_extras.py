"""Says which extra of this package installs a library that is missing."""

from __future__ import annotations

_EXTRAS = {
    "torch": "torch",
    "onnxscript": "torch",
    "transformers": "transformers",
    "tokenizers": "transformers",
    "diffusers": "diffusers",
    "onnxruntime_genai": "genai",
    "sentence_transformers": "sentences",
}
"""Package to the extra of modelexport that installs it."""


def missing_extra(error: ImportError) -> str:
    """How to install what an import lacked, on one line; empty if no extra has it."""
    package, *inside = (error.name or "").split(".")
    if package == "modelexport" and inside[:1] == ["tools"] and len(inside) > 1:
        return f"this needs the tool {inside[1]} of modelexport, which is not installed: install the whole package"
    if not isinstance(error, ModuleNotFoundError) or package not in _EXTRAS:
        return ""
    return f"this needs {package}, which is not installed: pip install 'modelexport[{_EXTRAS[package]}]'"
