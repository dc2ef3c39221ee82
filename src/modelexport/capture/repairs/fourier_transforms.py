"""One-sided Fourier transforms along an axis of any size.

ONNX's inference, also the one in ONNX Runtime, takes the size of the result to be that of the input where that is not a
number: the runtime then puts the result into memory of another size, and fails. So the size of the input is hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from modelexport.graph.nodes import all_nodes


def with_sizes_of_transforms(model: ir.Model) -> Iterator[ir.Node]:
    """Hide the size of the axis of each such node from inference, in place; yields the node after that.

    Args:
        model: A translated graph, before inference.
    """
    if all(isinstance(size, int) for value in model.graph.inputs for size in value.shape or ()):
        return
    for node in list(all_nodes(model)):
        if node.op_type != "DFT" or node.attributes.get_int("onesided", 0) == 0:
            continue
        given = node.inputs[2] if len(node.inputs) > 2 else None  # below opset 20, it is an attribute
        axis = ir.convenience.get_const_tensor(given) if given is not None else None
        place = int(axis.numpy().item()) if axis is not None else node.attributes.get_int("axis", 1)
        assert node.graph is not None
        first, last = (ir.node("Constant", [], {"value_ints": [number]}) for number in (0, place))
        end = ir.node("Shape", node.inputs[:1], {"start": place, "end": place + 1})
        whole = ir.node("Slice", [node.inputs[0], first.outputs[0], end.outputs[0], last.outputs[0]])
        node.graph.insert_before(node, [first, last, end, whole])
        for made in (first, last, end, whole):
            made.metadata_props.update(node.metadata_props)
            if "node" in node.meta:
                made.meta["node"] = node.meta["node"]
        node.replace_input_with(0, whole.outputs[0])
        yield node
