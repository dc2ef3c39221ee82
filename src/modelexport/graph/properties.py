"""The properties of a file: values in ``meta`` in memory, text in ``metadata_props`` in the file.

This is the only code that reads or writes the text. A model that was read keeps the text until another value is
recorded, for those who write it with ``onnx_ir``. The properties of nodes are text in memory, too: their owners count
(:mod:`modelexport.graph.node_owners`), and :mod:`modelexport.tagged.encodings` makes the text again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
import onnx_ir as ir

from modelexport.core.json_decoding import decode_json
from modelexport.errors import FileFormatError
from modelexport.format import documents, keys
from modelexport.format.cut_record import CutRecord
from modelexport.format.parameter_plan import AdapterInput, ParameterPlan
from modelexport.graph.nodes import all_nodes, held_initializers

HasProperties: TypeAlias = ir.Model | ir.Graph | ir.Function | ir.Node | ir.Value
"""The elements of a model that have ``metadata_props``."""

_TYPES: Mapping[str, Any] = {
    keys.STATE_DICT: dict[str, documents.StateDictEntry],
    keys.LOST: list[str],
    keys.PARAMETER: list[str],
    keys.TRANSFORM: list[documents.TransformStep],
    keys.ADAPTER: AdapterInput,
    keys.OUTPUTS: list[bool],
    keys.EXPOSED: list[str],
    keys.REPLACED: dict[str, str],
    keys.CUT_FROM: CutRecord,
}
"""The properties of models and initializers that become values when a file is read, to the types of their content."""
_TYPES_WHEN_ASKED: Mapping[str, Any] = {
    keys.WEIGHTS: dict[str, documents.WeightsFile],
    keys.DATA: dict[str, documents.DataFile],
    keys.DOCUMENTS: dict[str, str],
    keys.ADOPTED: dict[str, int],
    keys.VALID_IF: list[str],
}
"""Those that are decoded when somebody asks for them."""


def record(element: ir.Value | ir.Model, key: str, content: Any) -> None:
    """Let an initializer or a model carry what a property of a file says, or nothing, in its ``meta``."""
    element.meta.pop(key, None)
    if content is not None:
        element.meta[key] = content
    element.metadata_props.pop(key, None)
    if key == keys.PARAMETER:
        element.metadata_props.pop(keys.TRANSFORM, None)


def recorded(element: ir.Value | ir.Model, key: str, *, damaged: str = "the file has damaged metadata") -> Any:
    """What an initializer or a model carries of a property; ``None`` if it has none.

    Args:
        damaged: What the message says of a text that is not of the property's type.

    Raises:
        FileFormatError: The text is damaged.
    """
    if key not in element.meta and key in _TYPES_WHEN_ASKED and key in element.metadata_props:
        element.meta[key] = decode_json(element.metadata_props[key], kind=_TYPES_WHEN_ASKED[key], damaged=damaged)
    return element.meta.get(key)


def read_properties(model: ir.Model) -> None:
    """Make values of the text of a model that was read from a file, and of that of its initializers, in place.

    Raises:
        FileFormatError: The text is damaged.
    """
    model.meta.update(_decoded(model.metadata_props, "the file"))
    for value in held_initializers(model):
        content = _decoded(value.metadata_props, f"initializer {value.name}")
        if names := content.pop(keys.PARAMETER, None):
            content[keys.PARAMETER] = ParameterPlan(names, content.pop(keys.TRANSFORM, []))
        value.meta.update(content)


def _decoded(properties: Mapping[str, str], what: str) -> dict[str, Any]:
    texts = {key: properties[key] for key in _TYPES if key in properties}
    if texts.get(keys.PARAMETER) == "[]":
        raise FileFormatError(f"{what} has damaged metadata (it comes from no parameter): export it again")
    damaged = f"{what} has damaged metadata: the property"
    return {key: decode_json(text, kind=_TYPES[key], damaged=f"{damaged} {key}") for key, text in texts.items()}


def properties_of(element: HasProperties) -> dict[str, str]:
    """The properties of an element as a file has them."""
    content = {key: element.meta[key] for key in (*_TYPES, *_TYPES_WHEN_ASKED) if element.meta.get(key) is not None}
    properties = {key: msgspec.json.encode(each).decode() for key, each in content.items()}
    if (plan := content.get(keys.PARAMETER)) is not None:
        properties[keys.PARAMETER] = json.dumps(plan.keys)
        if plan.steps:
            properties[keys.TRANSFORM] = msgspec.json.encode(plan.steps).decode()
    return properties | element.metadata_props


def text_of(element: HasProperties, key: str) -> str | None:
    """The text of a property, ours or another tool's; ``None`` if there is none."""
    return element.metadata_props.get(key)


def format_version(model: ir.Model) -> str | None:
    """The version of the format in which a file has tags; ``None`` if it has none."""
    return text_of(model, keys.FORMAT_VERSION_KEY)


def is_tagged(model: ir.Model) -> bool:
    """Whether a file has tags."""
    return format_version(model) is not None


def put_texts(element: HasProperties, texts: Mapping[str, str], *, only: bool = False) -> None:
    """Set the text of properties of an element.

    Args:
        only: Remove the text of all others.
    """
    if only:
        element.metadata_props.clear()
    element.metadata_props.update(texts)


def copy_facts(source: ir.Node, *targets: ir.Node) -> None:
    """Give nodes that compute a part of what another does its properties, and what travels with it in memory."""
    for node in targets:
        node.meta.update(source.meta)
        node.metadata_props.update(source.metadata_props)


def drop_texts(elements: Iterable[HasProperties], dropped: Container[str] | Callable[[str], bool]) -> None:
    """Remove the text of some properties, in place.

    Args:
        dropped: Their names, or what tells them.
    """
    for element in elements:
        for key in list(element.metadata_props):
            if dropped(key) if callable(dropped) else key in dropped:
                del element.metadata_props[key]


def drop_tag_attributes(model: ir.Model) -> None:
    """Remove tags that are attributes of nodes, which ONNX Runtime refuses, in place."""
    for node in all_nodes(model):
        node.attributes.pop(keys.SOURCE_MODULE_ATTRIBUTE, None)
        node.attributes.pop(keys.HIERARCHY_TAGS_ATTRIBUTE, None)


def take_properties(value: ir.Value, *, shared: bool = False) -> None:
    """Give an initializer the properties of its tensor, where files have them.

    Args:
        shared: The tensor is that of somebody else's model, too; otherwise it loses them.
    """
    tensor = value.const_value
    if tensor is None:
        return
    value.metadata_props.update(tensor.metadata_props)
    if not shared:
        tensor.metadata_props.clear()
        if isinstance(tensor, ir.TensorProtoTensor):  # is written as it was read, with its old properties
            del tensor.raw.metadata_props[:]


def forget_values(model: ir.Model) -> None:
    """Remove what a model and its initializers carry, in place: it may no longer hold for them. The text stays."""
    for meta in (model.meta, *(value.meta for value in held_initializers(model))):
        for key in _TYPES:
            meta.pop(key, None)
