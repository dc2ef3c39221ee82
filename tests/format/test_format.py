"""A file is read as `docs/format.md` describes: with onnx and json, without modelexport."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ops

import models
from exports import Exporter

NAMES = ("bert", "tied-weights", "condition")


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for nested in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from graphs(nested)


def properties(tensor: onnx.TensorProto) -> dict[str, str]:
    read = {entry.key: entry.value for entry in tensor.metadata_props}
    assert len(read) == len(tensor.metadata_props), f"{tensor.name} has a property twice"
    return read


def decoded(tensor: dict[str, Any]) -> np.ndarray:
    return np.array(tensor["value"], dtype=tensor["dtype"])


def run(steps: list[dict[str, Any]], entries: dict[str, np.ndarray]) -> np.ndarray:
    """The last step's result."""
    values: dict[str, Any] = {"": None, **entries}
    for number, step in enumerate(steps):
        attributes = step.get("attributes", {})
        if step["op_type"] == "Constant":
            results: tuple[Any, ...] = (decoded(attributes["value"]),)
        else:
            inputs = [values[name] for name in step["inputs"]]
            operator = ops.load_op(step.get("domain", ""), step["op_type"], step["version"])
            results = operator.eval(*inputs, **attributes)
            results = results if isinstance(results, tuple) else (results,)
        values |= {f"%{number}:{index}": result for index, result in enumerate(results)} | {f"%{number}": results[0]}
    last: np.ndarray = values[f"%{len(steps) - 1}"]
    return last


@pytest.mark.parametrize("name", NAMES)
def test_initializers_are_the_entries_that_their_tensors_say(exported: Exporter, name: str) -> None:
    model = onnx.load(exported(name).path)
    entries = {key: tensor.numpy() for key, tensor in models.case(name).build().state_dict().items()}
    found: set[str] = set()
    for tensor in (tensor for graph in graphs(model.graph) for tensor in graph.initializer):
        told = properties(tensor)
        if "modelexport.parameter" not in told:
            assert "modelexport.transform" not in told
            continue
        keys = json.loads(told["modelexport.parameter"])
        steps = json.loads(told.get("modelexport.transform", "[]"))
        expected = run(steps, entries) if steps else entries[keys[0]]
        assert np.array_equal(numpy_helper.to_array(tensor), expected), tensor.name
        found.update(keys)
    recorded = json.loads({entry.key: entry.value for entry in model.metadata_props}["modelexport.state_dict"])
    assert found == {key for key, (_, _, used, _) in recorded.items() if used}
    assert found


@pytest.mark.parametrize("name", NAMES)
def test_initializers_have_no_other_properties_and_no_value_info(exported: Exporter, name: str, tmp_path: Path) -> None:
    for graph in graphs(onnx.load(exported(name).path).graph):
        named = {tensor.name for tensor in graph.initializer}
        assert not named & {value.name for value in graph.value_info}
        for value in (*graph.input, *graph.output):
            assert value.name not in named or not value.metadata_props
