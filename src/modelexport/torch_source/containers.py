"""Modules that only hold or chain others, as calls of the containers of ``torch.nn``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from modelexport.tagged.encodings.functions_call_groups import Group
from modelexport.torch_source.call_layout import CallLayout
from modelexport.torch_source.expressions import is_plain
from modelexport.torch_source.module_nodes import ModuleNode


def container(node: ModuleNode, children: Mapping[str, str]) -> str | None:
    """A list or dictionary of modules that is never called; ``None`` if it is something else."""
    if node.class_name == "ModuleDict" and node.is_from_torch and not node.entries:
        return f"nn.ModuleDict({{{', '.join(f'{name!a}: {text}' for name, text in children.items())}}})"
    if not node.is_list or node.entries:
        return None
    kind, texts = "Sequential" if node.class_name == "Sequential" else "ModuleList", list(children.values())
    repeated = f"{texts[0]} for _ in range({len(texts)})" if len(texts) > 1 and len(set(texts)) == 1 else ""
    if kind == "Sequential":
        return f"nn.Sequential(*({repeated}))" if repeated else f"nn.Sequential({', '.join(texts)})"
    return f"nn.ModuleList({repeated or _in_brackets(texts)})"


def _in_brackets(texts: Sequence[str]) -> str:
    return f"[{', '.join(texts)}]"


def sequential(
    layout: CallLayout, node: ModuleNode, children: Mapping[str, str], is_plain_call: Callable[[Group], bool]
) -> str | None:
    """A ``Sequential`` each of whose calls runs its modules, in order, and nothing else.

    Args:
        is_plain_call: Whether a call runs the only ``forward`` of its module.
    """
    if node.class_name != "Sequential" or node.entries or not children or not node.is_from_torch:
        return None
    if not (node.calls or node.is_unchanged) or not all(_is_chain(layout, node, g, is_plain_call) for g in node.calls):
        return None
    if list(children) == [str(number) for number in range(len(children))]:
        return f"nn.Sequential({', '.join(children.values())})"
    named = ", ".join(f"{name}={text}" for name, text in children.items())
    return f"nn.Sequential(OrderedDict({named}))" if all(is_plain(name) for name in children) else None


def _is_chain(layout: CallLayout, node: ModuleNode, group: Group, is_plain_call: Callable[[Group], bool]) -> bool:
    """Whether a call gives its only input through all its modules, and returns what the last one gives."""
    inputs, items = layout.inputs[group.call], list(group.items)
    value = inputs[0] if len(inputs) == 1 else None
    unchanged = {call.path: name for name, call in layout.unchanged.get(group.call, ())}
    for child in node.children.values():
        if value is not None and unchanged.get(child.path) == value.name:
            continue
        item = items.pop(0) if items else None
        if item is None or isinstance(item, ir.Node) or item.call.path != child.path or not is_plain_call(item):
            return False
        if layout.inputs[item.call] != [value] or len(layout.outputs[item.call]) != 1:
            return False
        value = layout.outputs[item.call][0]
    return not items and layout.outputs[group.call] == [value]


def uncalled(node: ModuleNode) -> str | None:
    """A module of ``torch.nn`` that the file does not run, made after the shapes of its entries."""
    shapes = {name: entry.shape for name, entry in node.entries.items()}
    is_single = {entry.dtype for entry in node.entries.values()} == {"float32"}
    if node.class_name == "Dropout" and node.qualified.startswith("torch.nn.") and not node.children and not shapes:
        return "nn.Dropout(0.0)"
    if node.children or not node.is_from_torch or not is_single:
        return None
    if node.class_name == "Linear" and shapes.keys() in ({"weight", "bias"}, {"weight"}):
        height, width = shapes["weight"]
        return f"nn.Linear({width}, {height}{'' if 'bias' in shapes else ', bias=False'})"
    if node.class_name == "Embedding" and shapes.keys() == {"weight"}:
        return f"nn.Embedding({shapes['weight'][0]}, {shapes['weight'][1]})"
    return None
