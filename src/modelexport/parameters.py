"""Which ``state_dict`` entries an initializer is, and how it is computed from them.

An initializer that the exporter made keeps its entry's name. One that was folded keeps the name of the value that the
unoptimised graph computed it as, so the computation can be read off that graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from modelexport.graph import initializers
from modelexport.lineage import Source
from modelexport.schema import TransformStep, dtype_name


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an initializer's value comes from."""

    keys: tuple[str, ...]
    """``state_dict`` keys; several names of one tied parameter where there is no transform."""
    transform: tuple[TransformStep, ...] = ()


def origins(source: Source, names: Mapping[str, tuple[str, ...]], model: ir.Model) -> dict[str, Origin]:
    """The origin of every initializer of ``model`` that comes from ``state_dict`` entries.

    Args:
        source: The unoptimised graph.
        names: The names of its initializers to the ``state_dict`` keys that they are.
        model: The optimised graph.
    """
    found: dict[str, Origin] = {}
    for value in initializers(model):
        name = value.name or ""
        if name in names:
            found[name] = Origin(names[name])
        elif name in source.constant and name in source.producer:
            origin = _computed(source, names, name)
            if origin is not None:
                found[name] = origin
    return found


def _computed(source: Source, names: Mapping[str, tuple[str, ...]], name: str) -> Origin | None:
    """The steps from ``state_dict`` entries to a folded value; ``None`` when no entry is involved."""
    order = sorted(_needed(source, name))
    keys: dict[str, None] = {}
    labels: dict[str, str] = {}
    steps: list[TransformStep] = []

    def add(op_type: str, inputs: list[str], attributes: dict[str, Any], outputs: Iterable[str]) -> None:
        label = f"%{len(steps)}"
        labels.update((output, f"{label}:{i}" if i else label) for i, output in enumerate(outputs))
        steps.append(TransformStep(op_type, inputs, attributes))

    for index in order:
        node = source.nodes[index]
        inputs: list[str] = []
        for value in node.inputs:
            if value is not None and value in names:
                key = names[value][0]
                keys[key] = None
                inputs.append(key)
                continue
            if value is not None and value not in labels:
                tensor = source.initializers[value]
                add("Constant", [], {"value": _tensor(tensor)} if tensor is not None else {}, [value])
            inputs.append("" if value is None else labels[value])
        attributes = {name: _attribute(attribute) for name, attribute in node.attributes.items()}
        add(node.op[1], inputs, attributes, node.outputs)
    return Origin(tuple(keys), tuple(steps)) if keys else None


def _needed(source: Source, name: str) -> set[int]:
    """The source nodes that a constant value is computed by."""
    needed: set[int] = set()
    pending: list[str | None] = [name]
    while pending:
        value = pending.pop()
        index = source.producer.get(value) if value is not None else None
        if index is not None and index not in needed:
            needed.add(index)
            pending.extend(source.nodes[index].inputs)
    return needed


def _attribute(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        return _tensor(attribute.as_tensor())
    if attribute.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS):
        return list(attribute.value)
    return attribute.value


def _tensor(tensor: ir.TensorProtocol) -> dict[str, Any]:
    return {"dtype": dtype_name(tensor.dtype), "value": tensor.numpy().tolist()}
