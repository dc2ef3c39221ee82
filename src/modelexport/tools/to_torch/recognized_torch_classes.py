"""Modules whose ``forward`` is exactly what a class of ``torch.nn`` computes, and containers: the calls that make them.

A class is recognized by its name in the file and by all of its code, never by the name alone: a row has the expression
that a module of the class returns, with names in the place of what differs, and the call that makes such a module.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from modelexport.format.documents import CallTensor
from modelexport.tagged.encodings.functions_call_groups import Group
from modelexport.tools.to_torch.call_layout import CallLayout
from modelexport.tools.to_torch.expressions import code, is_plain, matches, parsed
from modelexport.tools.to_torch.forward_text import ForwardText
from modelexport.tools.to_torch.module_nodes import ModuleNode

_LINEAR = (
    ("x @ self.weight.T + self.bias", "Linear(w1, w0)"),
    ("self.bias + x @ self.weight.T", "Linear(w1, w0)"),
    ("x @ self.weight.T", "Linear(w1, w0, bias=False)"),
)
_ROWS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Linear", _LINEAR), ("NonDynamicallyQuantizableLinear", _LINEAR),
    ("Embedding", (("self.weight[x]", "Embedding(w0, w1)"),)),
    ("LayerNorm", (("F.layer_norm(x, size, self.weight, self.bias, **more)", "LayerNorm(size, **more)"),
                   ("F.layer_norm(x, size, self.weight, **more)", "LayerNorm(size, bias=False, **more)"),
                   ("F.layer_norm(x, size, **more)", "LayerNorm(size, elementwise_affine=False, **more)"))),
    ("GroupNorm", (("F.group_norm(x, groups, self.weight, self.bias, **more)", "GroupNorm(groups, w0, **more)"),)),
    (r"BatchNorm\dd", (("F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, **more)",
                        "NAME(w0, **more)"),)),
    (r"Conv\dd", (("F.NAME(x, self.weight, self.bias, **more)", "NAME(channels, w0, kernel, **more)"),
                  ("F.NAME(x, self.weight, **more)", "NAME(channels, w0, kernel, bias=False, **more)"))),
    (r"ConvTranspose\dd", (("F.NAME(x, self.weight, self.bias, **more)", "NAME(w0, channels, kernel, **more)"),
                           ("F.NAME(x, self.weight, **more)", "NAME(w0, channels, kernel, bias=False, **more)"))),
    (r"(Max|Avg)Pool\dd", (("F.NAME(x, kernel, **more)", "NAME(kernel, **more)"),)),
    (r"AdaptiveAvgPool1d", (("x.mean(2, **more)", "NAME(1)"),)),
    (r"AdaptiveAvgPool2d", (("x.mean((2, 3), **more)", "NAME(1)"),)),
    (r"AdaptiveAvgPool3d", (("x.mean((2, 3, 4), **more)", "NAME(1)"),)),
    ("ReLU|SELU|SiLU|Tanh|Sigmoid|Hardswish|Mish|Softplus|Softsign", (
        ("torch.NAME(x)", "NAME()"), ("F.NAME(x)", "NAME()"),
        ("1.0507010221481323 * F.elu(x, 1.6732631921768188)", "NAME()"))),
    ("GELU", (("F.gelu(x, **more)", "GELU(**more)"),)), ("ReLU6", (("x.clamp(min=0.0, max=6.0)", "ReLU6()"),)),
    ("Hardtanh", (("x.clamp(min=low, max=high)", "Hardtanh(low, high)"),)),
    ("LeakyReLU", (("F.leaky_relu(x, alpha)", "LeakyReLU(alpha)"),)),
    ("ELU|CELU", (("F.NAME(x, alpha)", "NAME(alpha)"),)), ("Softmax", (("x.softmax(axis)", "Softmax(axis)"),)),
    ("LogSoftmax", (("x.log_softmax(axis)", "LogSoftmax(axis)"),)), ("Flatten", (("x.flatten(1)", "Flatten()"),)),
    ("Identity|Sequential", (("x", "NAME()"),)), (r"(Feature)?(Alpha)?Dropout(\dd)?", (("x", "NAME(0.0)"),)),
)  # fmt: skip
"""Names of classes, what they return, and how they are made. ``NAME`` is the class's name, in a function as torch has
it; ``w0`` and ``w1`` are sizes of the weight, ``channels`` is its other side."""
_UNCHANGED = ("nn.Identity()", "nn.Dropout(0.0)")
_FUNCTIONS = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")


def torch_class(layout: CallLayout, module: ModuleNode, forward: Callable[[Group], ForwardText]) -> str | None:
    """The call of a class of ``torch.nn`` that makes an equal module; ``None`` if none does."""
    name = module.class_name
    if not module.is_from_torch or module.children:
        return None
    rows = [row for pattern, of_class in _ROWS if re.fullmatch(pattern, name) for row in of_class]
    calls = [group for group in module.calls if layout.outputs[group.call]]
    if not rows or any(len(layout.inputs[group.call]) != 1 or len(group.items) > 5 for group in calls):
        return None
    found = {_recognized(rows, layout, module, group, forward(group)) for group in calls}
    return found.pop() if len(found) == 1 else None


def _recognized(
    rows: Iterable[tuple[str, str]], layout: CallLayout, module: ModuleNode, group: Group, text: ForwardText
) -> str | None:
    value, name = layout.inputs[group.call][0], module.class_name
    rank, axes = len(value.shape) if value.shape is not None else 0, re.search(r"(\d)d$", name)
    if text.result is None or (axes and rank != int(axes[1]) + 2 and not (name == "BatchNorm1d" and rank == 2)):
        return None
    for template, constructor in rows:
        pattern = template.replace("F.NAME", f"F.{_FUNCTIONS.sub('_', name).lower()}")
        pattern = pattern.replace("torch.NAME", f"torch.{name.lower()}")
        own = set(re.findall(r"self\.(\w+)", pattern))  # a constant may have one of these names, too
        holes: dict[str, Any] = {"x": parsed(text.arguments[0])}
        if own != module.entries.keys() - {"num_batches_tracked"} or not matches(parsed(pattern), text.result, holes):
            continue
        weight = list(module.entries["weight"].shape) if "weight" in own else []
        holes |= {f"w{axis}": size for axis, size in enumerate(weight)}
        groups = holes.get("more", {}).get("groups")
        if len(weight) > 2:
            kernel = tuple(weight[2:])
            holes["channels"] = weight[1] * int(ast.unparse(groups) if groups is not None else 1)
            holes["kernel"] = kernel[0] if len(set(kernel)) == 1 else kernel
        if isinstance(size := holes.get("size"), ast.Tuple) and len(size.elts) == 1:
            holes["size"] = size.elts[0]
        return _shortened(code(f"nn.{constructor.replace('NAME', name)}", **holes))
    return None


def _shortened(call: ast.expr) -> str:
    """A call of a class without the arguments that have their defaults."""
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    defaults = {name: ast.unparse(parsed(repr(parameter.default))) if isinstance(parameter.default, int | float) else ""
                for name, parameter in inspect.signature(getattr(nn, call.func.attr)).parameters.items()}  # fmt: skip
    call.keywords = [each for each in call.keywords if ast.unparse(each.value) != defaults.get(each.arg or "")]
    while call.args and ast.unparse(call.args[-1]) == list(defaults.values())[len(call.args) - 1]:
        call.args.pop()
    return ast.unparse(call)


def container(node: ModuleNode, children: Mapping[str, str]) -> str | None:
    """A list or dictionary of modules that is never called; ``None`` if it is something else."""
    if node.class_name == "ModuleDict" and node.is_from_torch and not node.entries:
        return f"nn.ModuleDict({{{', '.join(f'{name!a}: {text}' for name, text in children.items())}}})"
    if not node.is_list or node.entries:
        return None
    texts, chained = list(children.values()), node.class_name == "Sequential"
    are_equal = len(texts) > 1 and len(set(texts)) == 1
    elements = f"[{texts[0]} for _ in range({len(texts)})]" if are_equal else f"[{', '.join(texts)}]"
    return (
        f"nn.Sequential({f'*{elements}' if are_equal else elements[1:-1]})" if chained else f"nn.ModuleList({elements})"
    )


def sequential(
    layout: CallLayout, node: ModuleNode, children: Mapping[str, str], is_plain_call: Callable[[Group], bool]
) -> str | None:
    """A ``Sequential`` each of whose calls runs its modules, in order, and nothing else.

    Args:
        is_plain_call: Whether a call runs the only ``forward`` of its module.
    """
    if node.class_name != "Sequential" or node.entries or not children or not node.is_from_torch:
        return None
    if not node.calls or not all(_is_chain(layout, children, g, is_plain_call) for g in node.running):
        return None
    if list(children) == [str(number) for number in range(len(children))]:
        return f"nn.Sequential({', '.join(children.values())})"
    named = ", ".join(f"{name}={text}" for name, text in children.items())
    return f"nn.Sequential(OrderedDict({named}))" if all(is_plain(name) for name in children) else None


def _is_chain(
    layout: CallLayout, children: Mapping[str, str], group: Group, is_plain_call: Callable[[Group], bool]
) -> bool:
    """Whether a call gives its only input through all its modules, and returns what the last one gives."""
    inputs, items = layout.inputs[group.call], list(group.items)
    value = inputs[0] if len(inputs) == 1 else None
    for name, constructor in children.items():
        item = items.pop(0) if items else None
        path = f"{group.call.path}.{name}".lstrip(".")
        if item is None or isinstance(item, ir.Node) or item.call.path != path or not is_plain_call(item):
            return False
        if not layout.inputs[item.call] and constructor in _UNCHANGED:
            continue
        if layout.inputs[item.call] != [value] or len(layout.outputs[item.call]) != 1:
            return False
        value = layout.outputs[item.call][0]
    return not items and layout.outputs[group.call] == [value]


def runs(constructor: str, tensors: Iterable[CallTensor | None]) -> bool:
    """Whether a module of ``torch.nn`` takes tensors of such types and shapes."""
    if not constructor.startswith("nn."):
        return False
    with warnings.catch_warnings(action="ignore"):
        try:
            module = eval(constructor, {"nn": nn, "torch": torch, "OrderedDict": OrderedDict})
            for tensor in tensors:
                if tensor is not None:
                    sizes = [size if isinstance(size, int) else 1 for size in tensor.shape]
                    module(torch.zeros(sizes, dtype=getattr(torch, tensor.dtype)))
        except Exception:  # each module refuses in its own way, and classes of the file do not exist here
            return False
    return True


def uncalled(node: ModuleNode) -> str | None:
    """A module of ``torch.nn`` that the file does not run, made after the shapes of its entries."""
    shapes = {name: list(entry.shape) for name, entry in node.entries.items()}
    kind = getattr(nn, node.class_name, None)
    if node.qualified.startswith("torch.nn.") and isinstance(kind, type) and not node.children and not shapes:
        parameters = inspect.signature(kind).parameters.values()
        needed = [each for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
        return None if needed else f"nn.{node.class_name}({'0.0' if 'Dropout' in node.class_name else ''})"
    if node.children or not node.is_from_torch or {entry.dtype for entry in node.entries.values()} != {"float32"}:
        return None
    weight = shapes.get("weight", [])
    if node.class_name == "Linear" and shapes.keys() in ({"weight", "bias"}, {"weight"}):
        return f"nn.Linear({weight[1]}, {weight[0]}{'' if 'bias' in shapes else ', bias=False'})"
    return (
        f"nn.Embedding({weight[0]}, {weight[1]})"
        if node.class_name == "Embedding" and shapes.keys() == {"weight"}
        else None
    )
