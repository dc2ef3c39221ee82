"""Checks of what a serialized model depends on: its operator sets, and that no value is computed from itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from modelexport.core.limits import OPSET
from modelexport.errors import FileFormatError
from modelexport.files.tensors import graphs_in, serialized_attributes


def check_opsets(model: onnx.ModelProto) -> None:
    """Refuse versions of operator sets that onnx and ONNX Runtime cannot represent.

    Raises:
        FileFormatError: Names the operator set.
    """
    for imports in (model.opset_import, *(function.opset_import for function in model.functions)):
        for one in imports:
            if not -OPSET <= one.version <= OPSET:
                raise FileFormatError(f"the model imports version {one.version} of the operator set {one.domain!r}")


def check_acyclic(model: onnx.ModelProto) -> None:
    """Refuse graphs and functions in which a value depends on itself. Nodes may be in any order.

    Raises:
        FileFormatError: Names a node on the cycle.
    """
    pending: list[Sequence[onnx.NodeProto]] = [model.graph.node, *(function.node for function in model.functions)]
    pending += [graph.node for attribute in serialized_attributes(model) for graph in graphs_in(attribute)]
    for nodes in pending:
        if (node := _on_cycle(nodes)) is not None:
            raise FileFormatError(f"the node {node.name!r} ({node.op_type}) depends on its own outputs")


def _on_cycle(nodes: Sequence[onnx.NodeProto]) -> onnx.NodeProto | None:
    """A node of a graph that depends on itself, if there is one."""
    if _are_sorted(nodes):
        return None  # as nearly always
    maker = {name: number for number, node in enumerate(nodes) for name in node.output if name}
    needs = [sorted({maker[name] for name in _taken(node) if name in maker}) for node in nodes]
    done, running = set[int](), set[int]()
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            number = stack[-1]
            if number in done:
                stack.pop()
            elif number in running:
                running.remove(number)
                done.add(stack.pop())
            else:
                running.add(number)
                if not running.isdisjoint(needs[number]):
                    return nodes[number]
                stack.extend(before for before in needs[number] if before not in done)
    return None


def _are_sorted(nodes: Sequence[onnx.NodeProto]) -> bool:
    """Whether no node makes a value that the node itself or an earlier one takes."""
    taken: set[str] = set()
    for node in nodes:
        taken.update(_taken(node) if node.attribute else node.input)
        made = node.output
        if not taken.isdisjoint(made) and any(name and name in taken for name in made):
            return False
    return True


def _taken(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node takes, with those that its nested graphs take from outside."""
    yield from node.input
    for graph in (graph for attribute in node.attribute for graph in graphs_in(attribute)):
        inside = {name for inner in graph.node for name in inner.output}
        inside.update(value.name for value in graph.input)
        inside.update(tensor.name for tensor in graph.initializer)
        yield from (name for inner in graph.node for name in _taken(inner) if name not in inside)
