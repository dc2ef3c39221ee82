"""An independent judge of an exported file: it uses no code of the project, so errors of the project cannot hide.

It uses only torch, NumPy, onnx and onnxruntime, and reads the metadata as described on the format page.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

CLOSE = 1e-3
"""The tolerance in norms: above the rounding of a small model, and far below the distance of another tensor."""


def judge_outputs(model: nn.Module, inputs: Mapping[str, Any], path: Path) -> int:
    """Check that the file computes the model's outputs; returns the number of outputs that were compared."""
    session = onnxruntime.InferenceSession(str(path))
    outputs = session.run(None, _feeds(inputs, [value.name for value in session.get_inputs()]))
    with torch.no_grad():
        right = [tensor.numpy() for tensor in _tensors(model(**inputs)) if tensor.numel()]
    assert len(outputs) == len(right)
    for computed, other in zip(outputs, right, strict=True):
        assert computed.shape == other.shape
        assert computed.dtype == other.dtype
        assert _apart(computed, other) < CLOSE
    return len(right)


def judge_parameters(model: nn.Module, path: Path) -> int:
    """Check that initializers have the bytes of the entries that they name; returns their number."""
    entries = model.state_dict()
    count = 0
    for tensor in onnx.load(path).graph.initializer:
        properties = {prop.key: prop.value for prop in tensor.metadata_props}
        if "modelexport.parameter" not in properties:
            continue
        names = json.loads(properties["modelexport.parameter"])
        assert names
        assert all(name in entries for name in names), names
        if "modelexport.transform" not in properties:
            array = onnx.numpy_helper.to_array(tensor, base_dir=str(path.parent))
            for name in names:
                assert array.tobytes() == entries[name].contiguous().numpy().tobytes(), name
        elif all(step["op_type"] == "Transpose" for step in json.loads(properties["modelexport.transform"])):
            array = onnx.numpy_helper.to_array(tensor, base_dir=str(path.parent))
            assert np.array_equal(np.sort(array, axis=None), np.sort(entries[names[0]].numpy(), axis=None)), names
        count += 1
    return count


def judge_tags(model: nn.Module, inputs: Mapping[str, Any], path: Path) -> int:
    """Check that the outputs of each call are computed by nodes of that call, or of a call inside it.

    Parameters are made different from each other for this, in the model and in the file in the same way.
    Returns the number of calls that could be judged: those whose outputs are in the file and are not their inputs.
    """
    file = onnx.load(path)
    onnx.load_external_data_for_model(file, str(path.parent)) if not file.graph.initializer else None
    model = _shaken(model, file)
    returned, got = _record(model, inputs)
    names = [name for node in file.graph.node for name in node.output if name]
    del file.graph.output[:]
    file.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(file.SerializeToString(), options)
    values = dict(zip(names, session.run(names, _feeds(inputs, [v.name for v in session.get_inputs()])), strict=True))
    owners = {name: _owners(node) for node in file.graph.node for name in node.output}
    within = _tree(file)
    judged = 0
    for address, tensors in returned.items():
        for tensor in tensors:
            if not _tells(tensor) or any(_is(tensor, other) for other in got[address]):
                continue
            where = [
                owners[name] for name, value in values.items() if isinstance(value, np.ndarray) and _is(tensor, value)
            ]
            if where:
                judged += 1
                inside = within[address]
                assert any(inside & callers for callers in where), f"{address} returns what only {where} compute"
    return judged


def _shaken(model: nn.Module, file: onnx.ModelProto) -> nn.Module:
    """A copy of a model with changed parameters, and the file with the same changes in its initializers.

    A file that contains a parameter only in a transformed form is judged with unchanged parameters.
    """
    plain: dict[str, onnx.TensorProto] = {}
    for tensor in file.graph.initializer:
        properties = {prop.key: prop.value for prop in tensor.metadata_props}
        if "modelexport.parameter" in properties:
            for name in json.loads(properties["modelexport.parameter"]):
                if "modelexport.transform" not in properties and name not in plain:
                    plain[name] = tensor
                else:
                    plain.pop(name, None)
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    done: dict[int, torch.Tensor] = {}
    parameters = dict(other.named_parameters(remove_duplicate=False))
    uses = Counter(id(tensor) for tensor in plain.values())
    for name, tensor in plain.items():
        if name not in parameters or parameters[name].dtype != torch.float32 or uses[id(tensor)] > 1:
            continue
        parameter = parameters[name]
        if parameter.ndim == 1 and id(parameter) not in done:  # norms and biases, which are initially equal
            with torch.no_grad():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).abs())
            done[id(parameter)] = parameter
            fresh = onnx.numpy_helper.from_array(parameter.detach().numpy(), tensor.name)
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            tensor.raw_data = fresh.raw_data
    return other


def _record(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Address of each call to its outputs, and to its inputs."""
    counts: Counter[str] = Counter()
    running: list[str] = []
    returned: dict[str, list[Any]] = {}
    got: dict[str, list[Any]] = {}
    handles = []

    def arrays(value: Any) -> list[Any]:
        return [tensor.detach().clone().numpy() for tensor in _tensors(value)]

    for path, module in model.named_modules():

        def enter(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            address = f"{path}@{counts[path]}" if counts[path] else path
            counts[path] += 1
            running.append(address)
            got[address] = arrays((args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            returned[running.pop()] = arrays(output)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return returned, got


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        yield from _tensors(vars(value))


def _feeds(inputs: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    arrays = [tensor.numpy() for tensor in _tensors(inputs)]
    if set(names) <= set(inputs):
        return {name: inputs[name].numpy() for name in names}
    assert len(arrays) == len(names)
    return dict(zip(names, arrays, strict=True))


def _owners(node: onnx.NodeProto) -> set[str]:
    properties = {prop.key: prop.value for prop in node.metadata_props}
    calls = properties.get("modelexport.calls")
    return set(json.loads(calls)) if calls else {properties["modelexport.call"]}


def _tree(file: onnx.ModelProto) -> dict[str, set[str]]:
    """Each call to itself and the calls inside it."""
    properties = {prop.key: prop.value for prop in file.metadata_props}
    entries = json.loads(properties["modelexport.call_tree"])
    inside: dict[str, set[str]] = {entry["call"]: {entry["call"]} for entry in entries}
    for entry in reversed(entries):
        if entry.get("parent") is not None:
            inside[entry["parent"]] |= inside[entry["call"]]
    return inside


def _tells(array: Any) -> bool:
    return array.dtype.kind == "f" and array.size > 3 and np.unique(array[np.isfinite(array)]).size > 3


def _is(first: Any, other: Any) -> bool:
    return (
        first.dtype == other.dtype and first.size == other.size and _apart(first.reshape(-1), other.reshape(-1)) < CLOSE
    )


def _apart(first: Any, other: Any) -> float:
    if first.dtype.kind != "f":
        return 0.0 if np.array_equal(first, other) else float("inf")
    a, b = np.clip(first.astype(np.float64), -1e9, 1e9), np.clip(other.astype(np.float64), -1e9, 1e9)
    size = float(np.linalg.norm(a))
    return float(np.linalg.norm(a - b)) / size if size else float(np.linalg.norm(b))
