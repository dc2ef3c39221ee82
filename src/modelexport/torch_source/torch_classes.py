"""Modules whose nodes are exactly what a class of ``torch.nn`` computes: the call that makes an equal one.

A class is recognized by its name in the file and by all of its nodes, never by the name alone: each function here
follows the nodes from the module's input to its output, and gives ``None`` if anything else is in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from modelexport.tagged.encodings.functions_call_groups import Group
from modelexport.torch_source.call_layout import CallLayout
from modelexport.torch_source.expressions import literal
from modelexport.torch_source.module_nodes import ModuleNode


class Nodes:
    """The nodes of one call of a module, followed from its input."""

    def __init__(self, layout: CallLayout, module: ModuleNode, group: Group) -> None:
        self.layout, self.module = layout, module
        self.inputs, self.outputs = layout.inputs[group.call], layout.outputs[group.call]
        self.nodes = [item for item in group.items if isinstance(item, ir.Node) and item.op_type != "Constant"]
        self.is_leaf = all(isinstance(item, ir.Node) for item in group.items)
        self.names = [node.op_type for node in self.nodes]
        self.version = layout.tagged.model.opset_imports.get("", 1)

    def entry(self, value: ir.Value | None) -> str | None:
        """The name of the module's own entry that a value is."""
        if value is None or value not in self.layout.entries.values:
            return None
        key = self.layout.entries.values[value]
        start = f"{self.module.path}." if self.module.path else ""
        names = [
            name.removeprefix(start) for name in self.layout.entries.names.get(key, (key,)) if name.startswith(start)
        ]
        return next((name for name in names if name in self.module.entries), None)

    def has_entries(self, *names: str) -> bool:
        """Whether these are all of the module's entries."""
        return set(self.module.entries) == set(names)

    def number(self, value: ir.Value | None) -> float | None:
        """A constant of one element."""
        tensor = self.layout.constants.get(value) if value is not None else None
        return tensor.numpy().reshape(-1)[0].item() if tensor is not None and tensor.size == 1 else None

    def integers(self, value: ir.Value | None) -> list[int] | None:
        """A constant of whole numbers."""
        tensor = self.layout.constants.get(value) if value is not None else None
        return None if tensor is None else [int(each) for each in tensor.numpy().reshape(-1)]

    def attribute(self, node: ir.Node, name: str, default: Any = None) -> Any:
        """An attribute or its default; tuples as lists."""
        found = node.attributes.get(name)
        value = default if found is None else found.value
        return list(value) if isinstance(value, tuple) else value

    @property
    def is_chain(self) -> bool:
        """Whether each node takes what the one before it gives, from the only input to the only output."""
        value = self.inputs[0] if len(self.inputs) == 1 else None
        for node in self.nodes:
            if value is None or value not in node.inputs or (value.is_graph_output() and value is not self.inputs[0]):
                return False
            value = node.outputs[0]
        return self.outputs == [value]

    def shape(self, name: str) -> list[int]:
        """The shape of an entry."""
        return list(self.module.entries[name].shape)


def _call(name: str, *arguments: Any, **named: tuple[Any, Any]) -> str:
    """``nn.Name(1, 2, stride=2)``; named arguments come with their defaults, and are left out if they are these."""
    texts = [_shown(argument) for argument in arguments]
    texts += [f"{key}={_shown(value)}" for key, (value, default) in named.items() if value != default]
    return f"nn.{name}({', '.join(texts)})"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return literal(value[0]) if len(set(value)) == 1 else f"({', '.join(map(literal, value))})"
    return literal(value)


def _linear(n: Nodes) -> str | None:
    """``MatMul`` with the transposed weight and ``Add``, or ``Gemm``."""
    if not n.has_entries("weight", "bias") and not n.has_entries("weight"):
        return None
    x, bias = n.inputs[0], "bias" in n.module.entries
    names = [name for name in n.names if name != "Transpose"]
    if names == ["Gemm"] and len(n.nodes) == 1:
        node = n.nodes[0]
        right = node.inputs[0] is x and n.entry(node.inputs[1]) == "weight" and n.attribute(node, "transB", 0) == 1
        right = right and n.attribute(node, "alpha", 1.0) == 1 and not n.attribute(node, "transA", 0)
        third = node.inputs[2] if len(node.inputs) > 2 else None
        right = right and (n.entry(third) == "bias" and n.attribute(node, "beta", 1.0) == 1 if bias else third is None)
        right = right and n.outputs == [node.outputs[0]]
    elif names == (["MatMul", "Add"] if bias else ["MatMul"]) and n.names.count("Transpose") == 1:
        turned = next(node for node in n.nodes if node.op_type == "Transpose")
        product = next(node for node in n.nodes if node.op_type == "MatMul")
        right = n.entry(turned.inputs[0]) == "weight" and n.attribute(turned, "perm", [1, 0]) == [1, 0]
        right = right and list(product.inputs) == [x, turned.outputs[0]]
        last = n.nodes[-1]
        if bias:
            right = right and product.outputs[0] in last.inputs and "bias" in [n.entry(value) for value in last.inputs]
        right = right and n.outputs == [last.outputs[0]]
    else:
        return None
    height, width = n.shape("weight")
    return _call("Linear", width, height, bias=(bias, True)) if right else None


def _embedding(n: Nodes) -> str | None:
    right = n.has_entries("weight") and n.names == ["Gather"] and n.attribute(n.nodes[0], "axis", 0) == 0
    right = right and n.entry(n.nodes[0].inputs[0]) == "weight" and n.nodes[0].inputs[1] is n.inputs[0]
    return _call("Embedding", *n.shape("weight")) if right else None


def _layer_norm(n: Nodes) -> str | None:
    if n.names != ["LayerNormalization"] or not n.is_chain:
        return None
    node = n.nodes[0]
    names = [n.entry(value) for value in node.inputs[1:]]
    shape = node.inputs[1].shape if node.inputs[1] is not None else None
    rank = len(node.inputs[0].shape) if node.inputs[0] is not None and node.inputs[0].shape is not None else None
    if shape is None or rank is None or n.attribute(node, "axis", -1) % rank != rank - len(shape):
        return None
    sizes, epsilon = list(shape.numpy()), n.attribute(node, "epsilon", 1e-5)
    eps = (float(literal(epsilon)), 1e-5)
    if names == ["weight", "bias"] or (names == ["weight"] and n.has_entries("weight")):
        return _call(
            "LayerNorm", *(sizes if len(sizes) == 1 else [tuple(sizes)]), eps=eps, bias=("bias" in names, True)
        )
    ones = n.layout.constants.get(node.inputs[1]) if node.inputs[1] is not None else None
    if not n.module.entries and ones is not None and len(node.inputs) == 2 and (ones.numpy() == 1).all():
        return _call(
            "LayerNorm", *(sizes if len(sizes) == 1 else [tuple(sizes)]), eps=eps, elementwise_affine=(False, True)
        )
    return None


def _convolution(n: Nodes) -> str | None:
    if n.names not in (["Conv"], ["ConvTranspose"]) or not n.is_chain:
        return None
    node, turned = n.nodes[0], n.names == ["ConvTranspose"]
    names = [n.entry(value) for value in node.inputs[1:] if value is not None]
    if names not in (["weight", "bias"], ["weight"]) or not n.has_entries(*[name for name in names if name]):
        return None
    weight, group = n.shape("weight"), n.attribute(node, "group", 1)
    axes = len(weight) - 2
    pads = n.attribute(node, "pads") or [0] * 2 * axes
    if (
        n.attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        or pads[:axes] != pads[axes:]
        or not 1 <= axes <= 3
    ):
        return None
    if turned and "output_shape" in node.attributes:
        return None
    width, height = (weight[0], weight[1] * group) if turned else (weight[1] * group, weight[0])
    ones, more = [1] * axes, {}
    if turned:
        more = {"output_padding": (n.attribute(node, "output_padding") or [0] * axes, [0] * axes)}
    return _call(
        f"Conv{'Transpose' if turned else ''}{axes}d", width, height, weight[2:],
        stride=(n.attribute(node, "strides") or ones, ones), padding=(pads[:axes], [0] * axes), **more,
        dilation=(n.attribute(node, "dilations") or ones, ones), groups=(group, 1), bias=(len(names) == 2, True),
    )  # fmt: skip


def _batch_norm(n: Nodes) -> str | None:
    if n.names != ["BatchNormalization"] or not n.is_chain or not n.module.class_name.startswith("BatchNorm"):
        return None
    node = n.nodes[0]
    if [n.entry(value) for value in node.inputs[1:]] != ["weight", "bias", "running_mean", "running_var"]:
        return None
    if n.attribute(node, "training_mode", 0):
        return None
    tracked = "num_batches_tracked" in n.module.entries
    rank = len(node.inputs[0].shape) if node.inputs[0] is not None and node.inputs[0].shape is not None else 0
    fits = {"BatchNorm1d": (2, 3), "BatchNorm2d": (4,), "BatchNorm3d": (5,)}.get(n.module.class_name, ())
    if not tracked or rank not in fits:
        return None
    eps = float(literal(n.attribute(node, "epsilon", 1e-5)))
    return _call(n.module.class_name, n.shape("weight")[0], eps=(eps, 1e-5))


def _group_norm(n: Nodes) -> str | None:
    """Opset 21 has it; before, ``InstanceNormalization`` of reshaped channels, scaled."""
    node = n.nodes[0] if n.names == ["GroupNormalization"] and n.is_chain else None
    if node is None or [n.entry(value) for value in node.inputs[1:]] != ["weight", "bias"] or n.version < 21:
        return None
    eps = float(literal(n.attribute(node, "epsilon", 1e-5)))
    return _call("GroupNorm", n.attribute(node, "num_groups"), n.shape("weight")[0], eps=(eps, 1e-5))


def _pool(n: Nodes) -> str | None:
    if n.names not in (["MaxPool"], ["AveragePool"]) or not n.is_chain or n.module.entries:
        return None
    node, maximum = n.nodes[0], n.names == ["MaxPool"]
    kernel = n.attribute(node, "kernel_shape")
    axes = len(kernel)
    pads, ones = n.attribute(node, "pads") or [0] * 2 * axes, [1] * axes
    dilations = n.attribute(node, "dilations") or ones
    if n.attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID") or pads[:axes] != pads[axes:]:
        return None
    name = f"{'Max' if maximum else 'Avg'}Pool{axes}d"
    if n.module.class_name != name or (not maximum and dilations != ones):
        return None
    named: dict[str, tuple[Any, Any]] = {"dilation": (dilations, ones)} if maximum else {}
    if not maximum and any(pads):
        named["count_include_pad"] = (bool(n.attribute(node, "count_include_pad", 0)), True)
    return _call(name, kernel, stride=(n.attribute(node, "strides") or ones, kernel), padding=(pads[:axes], [0] * axes),
                 ceil_mode=(bool(n.attribute(node, "ceil_mode", 0)), False), **named)  # fmt: skip


def _single(operator: str, text: Callable[[Nodes, ir.Node], str | None] | str) -> Callable[[Nodes], str | None]:
    """A module that is one node without entries."""

    def recognize(n: Nodes) -> str | None:
        if n.names != [operator] or not n.is_chain or n.module.entries:
            return None
        return text if isinstance(text, str) else text(n, n.nodes[0])

    return recognize


def _clip(n: Nodes, node: ir.Node) -> str | None:
    bounds = [n.number(value) for value in node.inputs[1:]]
    if None in bounds or len(bounds) != 2:
        return None
    return "nn.ReLU6()" if bounds == [0, 6] else _call("Hardtanh", *bounds)


def _silu(n: Nodes) -> str | None:
    right = n.names == ["Sigmoid", "Mul"] and len(n.inputs) == 1 and n.outputs == [n.nodes[1].outputs[0]]
    x = n.inputs[0] if right else None
    right = right and n.nodes[0].inputs[0] is x and set(n.nodes[1].inputs) == {x, n.nodes[0].outputs[0]}
    return "nn.SiLU()" if right and not n.module.entries else None


def _flatten(n: Nodes, node: ir.Node) -> str | None:
    return "nn.Flatten()" if n.attribute(node, "axis", 1) == 1 else None


def _global_average(n: Nodes) -> str | None:
    axes = n.module.class_name.removeprefix("AdaptiveAvgPool").removesuffix("d")
    value = n.inputs[0]
    rank = len(value.shape) if value.shape is not None else 0
    right = axes.isdigit() and rank == int(axes) + 2 and n.is_chain and not n.module.entries
    if right and n.names == ["GlobalAveragePool"]:
        return f"nn.{n.module.class_name}(1)"
    if right and n.names == ["ReduceMean"] and n.attribute(n.nodes[0], "keepdims", 1):
        found = n.integers(n.nodes[0].inputs[1]) if len(n.nodes[0].inputs) > 1 else n.attribute(n.nodes[0], "axes")
        if found is not None and sorted(axis % rank for axis in found) == list(range(2, rank)):
            return f"nn.{n.module.class_name}(1)"
    return None


def _activation_text(n: Nodes, node: ir.Node) -> str | None:
    defaults = {"LeakyRelu": ("LeakyReLU", 0.01), "Elu": ("ELU", 1.0), "Celu": ("CELU", 1.0)}
    name, default = defaults[node.op_type]
    alpha = float(literal(n.attribute(node, "alpha", default)))
    standard = {"LeakyReLU": 0.01}.get(name, 1.0)
    return _call(name, *([alpha] if alpha != standard else []))


def _with_axis(name: str) -> Callable[[Nodes, ir.Node], str | None]:
    return lambda n, node: _call(name, n.attribute(node, "axis", -1)) if n.version >= 13 else None


def _gelu(n: Nodes, node: ir.Node) -> str:
    return 'nn.GELU("tanh")' if n.attribute(node, "approximate", "none") == "tanh" else "nn.GELU()"


_RECOGNIZED: dict[str, Callable[[Nodes], str | None]] = {
    "Linear": _linear, "NonDynamicallyQuantizableLinear": _linear, "Embedding": _embedding, "LayerNorm": _layer_norm,
    **{f"Conv{turned}{axes}d": _convolution for turned in ("", "Transpose") for axes in (1, 2, 3)},
    **{f"BatchNorm{axes}d": _batch_norm for axes in (1, 2, 3)}, "GroupNorm": _group_norm,
    **{f"{kind}Pool{axes}d": _pool for kind in ("Max", "Avg") for axes in (1, 2, 3)},
    **{f"AdaptiveAvgPool{axes}d": _global_average for axes in (1, 2, 3)}, "SiLU": _silu,
    **{name: _single(operator, f"nn.{name}()") for name, operator in (
        ("ReLU", "Relu"), ("SELU", "Selu"), ("Tanh", "Tanh"), ("Sigmoid", "Sigmoid"), ("Hardswish", "HardSwish"),
        ("Mish", "Mish"), ("Softplus", "Softplus"), ("Softsign", "Softsign"))},
    "GELU": _single("Gelu", _gelu), "ReLU6": _single("Clip", _clip), "Hardtanh": _single("Clip", _clip),
    "LeakyReLU": _single("LeakyRelu", _activation_text), "ELU": _single("Elu", _activation_text),
    "CELU": _single("Celu", _activation_text), "Softmax": _single("Softmax", _with_axis("Softmax")),
    "LogSoftmax": _single("LogSoftmax", _with_axis("LogSoftmax")), "Flatten": _single("Flatten", _flatten),
}  # fmt: skip


def torch_class(layout: CallLayout, module: ModuleNode) -> str | None:
    """The call of a class of ``torch.nn`` that makes an equal module; ``None`` if none does."""
    if not module.is_from_torch or module.children:
        return None
    if module.is_unchanged and not module.calls and not module.entries:
        if module.class_name.startswith(("Dropout", "AlphaDropout", "FeatureAlphaDropout")):
            return f"nn.{module.class_name}(0.0)" if module.class_name in _DROPOUTS else None
        return "nn.Identity()" if module.class_name == "Identity" else None
    found = set()
    for group in module.calls:
        nodes = Nodes(layout, module, group)
        if not nodes.is_leaf or len(nodes.inputs) != 1 or len(nodes.outputs) != 1:
            return None
        recognize = _RECOGNIZED.get(module.class_name)
        found.add(recognize(nodes) if recognize is not None else None)
    return found.pop() if len(found) == 1 else None


_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")
