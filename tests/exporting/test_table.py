"""The content of the exports of the table's models, compared with the golden.

The files are read with plain onnx. For each model the golden has counts that can be reviewed and a digest of the whole
content: nodes, their inputs and outputs, tags and evidence, initializers, their entries and transforms. Their bytes are
compared with the model's when the fixture verifies the export; random ones are others on other processors.
``pytest tests/exporting/test_table.py --rewrite-goldens`` rewrites it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from filelock import FileLock

import models
from exports import Exporter

GOLDEN = Path(__file__).parent.parent / "golden" / "table.json"


def walk(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from walk(attribute.g.node)
            for graph in attribute.graphs:
                yield from walk(graph.node)


def properties(proto: onnx.NodeProto | onnx.TensorProto) -> dict[str, str]:
    """All but the line of code, which changes with every line above it."""
    return {entry.key: entry.value for entry in proto.metadata_props if entry.key != "modelexport.line"}


def said_by(path: Path) -> dict[str, Any]:
    """Counts and a digest of a file's content."""
    model = onnx.load(path)
    nodes = [
        [node.name, node.op_type, node.domain, list(node.input), list(node.output), properties(node)]
        for node in walk(model.graph.node)
    ]
    initializers = [[tensor.name, list(tensor.dims), properties(tensor)] for tensor in model.graph.initializer]
    # From 5.24 on, transformers calls its output `past_key_values` `cache`.
    text = json.dumps([nodes, sorted(initializers)], sort_keys=True).replace('"cache.', '"past_key_values.')
    return {
        "nodes": len(nodes),
        "evidence": dict(sorted(Counter(node[5].get("modelexport.evidence", "untagged") for node in nodes).items())),
        "tags": len({node[5].get("modelexport.source_module") for node in nodes}),
        "parameters": sum("modelexport.parameter" in tensor[2] for tensor in initializers),
        "transformed": sum("modelexport.transform" in tensor[2] for tensor in initializers),
        "digest": hashlib.sha256(text.encode()).hexdigest(),
    }


@pytest.mark.parametrize("name", models.NAMES)
def test_an_export_says_what_it_said(exported: Exporter, name: str, request: pytest.FixtureRequest) -> None:
    said = said_by(exported(name).path)
    if request.config.getoption("--rewrite-goldens"):
        with FileLock(f"{GOLDEN}.lock"):
            table = json.loads(GOLDEN.read_bytes()) if GOLDEN.exists() else {}
            table[name] = said
            GOLDEN.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
    assert said == json.loads(GOLDEN.read_bytes())[name], "if the change is intended, run this with --rewrite-goldens"
