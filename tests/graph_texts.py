"""Files written from ONNX's text, for tests of single facts about graphs."""

from __future__ import annotations

from pathlib import Path

import onnx


def written(path: Path, text: str, opset: int = 18, **others: int) -> Path:
    """A file of a graph, and of functions behind it; ``others`` are the versions of further operator sets."""
    imports = ", ".join(f'"{domain}": {version}' for domain, version in {"": opset, **others}.items())
    onnx.save(onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {text}"), path)
    return path


def with_formula(path: Path, symbol: str, formula: str) -> Path:
    """The file, with a formula, which the text cannot have, for a symbol in the sizes of its inputs and outputs."""
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == symbol:
                size.dim_param = formula
    onnx.save(model, path)
    return path
