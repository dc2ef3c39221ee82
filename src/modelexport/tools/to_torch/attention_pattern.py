"""Attention that an exporter wrote as products and a softmax, put together again as one call of torch.

The pattern is softmax(query * a @ transposed(key) * b + mask) @ value, with any of the factors and the mask left out.
If rows that see no key are set to zero behind it, the mask is the boolean one, because PyTorch does the same with it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.tools.to_torch.entries_as_nodes import Constants
from modelexport.tools.to_torch.expressions import Number
from modelexport.tools.to_torch.simplified_indexing import is_always_true
from modelexport.tools.to_torch.size_numbers import FileNumbers, sizes_of
from modelexport.traces.tolerances import HIDES

DOMAIN = "torch"
OPERATOR = "scaled_dot_product_attention"


def put_attention_together(
    model: ir.Model, kept: Container[str | None], constants: Constants, numbers: FileNumbers
) -> None:
    """Replace the pattern by nodes of the operator ``torch.scaled_dot_product_attention``, in place.

    Args:
        kept: The names of values that calls without nodes return, and that have to stay.
        numbers: The values that are computed from sizes.
    """
    found, last_axis = False, -1 if model.opset_imports.get("", 1) >= 13 else 1
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Softmax" and not node.domain:
            pattern = _Pattern(kept, constants, numbers, owner_of(node))
            if pattern.fits(node, last_axis):
                pattern.replace()
                found = True
    if found:
        passes.RemoveUnusedNodesPass()(model)


class _Pattern:
    """One place where it is looked for."""

    def __init__(self, kept: Container[str | None], constants: Constants, numbers: FileNumbers, owner: Any) -> None:
        self.kept, self.constants, self.numbers = kept, constants, numbers
        self.call = owner.call if owner is not None else None
        self.scale = 1.0
        self.mask: ir.Value | None = None

    def fits(self, softmax: ir.Node, default_axis: int) -> bool:
        """Whether it is around a softmax; its operands are known then."""
        scores, last = softmax.inputs[0], _only_user(softmax)
        axis = softmax.attributes["axis"].value if "axis" in softmax.attributes else default_axis
        if last is None or last.op_type != "MatMul" or last.inputs[0] is not softmax.outputs[0]:
            return False
        if scores is None or scores.shape is None or axis not in (-1, len(scores.shape) - 1):
            return False
        self.last, self.value = last, last.inputs[1]
        product: ir.Value | None = scores
        if not self._is_inside(softmax):
            return False
        if (added := self._producer(scores, "Add")) is not None:
            sides = [side for side in added.inputs if self._is_product(side)]
            if len(sides) != 1:
                return False
            product, self.mask = sides[0], added.inputs[1 - list(added.inputs).index(sides[0])]
        matmul = self._producer(self._unscaled(product), "MatMul")
        if matmul is None:
            return False
        self.query, key = (self._unscaled(side) for side in matmul.inputs)
        self.key = self._untransposed(key)
        if self.key is not None:
            self._take_empty_rows()
        return self.key is not None and self.value is not None

    def replace(self) -> None:
        """Put one node in the place of the last one. A scale stays if it is not PyTorch's default but for rounding."""
        exact = self.constants.is_wide
        old, size = self.last.outputs[0], self.query.shape[-1] if self.query and self.query.shape is not None else None
        usual = isinstance(size, int) and abs(self.scale * size**0.5 - 1) < (1e-12 if exact else 1e-6)
        while (both := self.mask.producer() if self.mask is not None else None) is not None and both.op_type == "And":
            others = [each for each in both.inputs if not is_always_true(each, self.constants, self.numbers)]
            if len(others) != 1 or others[0] is None or others[0].shape is None or len(others[0].shape) != 4:
                break
            self.mask = others[0]  # under the name that arguments have
            self.mask.name = both.outputs[0].name
        hidden = self.constants.array(self.mask) if self.mask is not None else None
        if hidden is not None and hidden.dtype.kind in "bf" and (hidden == (hidden.dtype.kind == "b")).all():
            self.mask = None
        node = ir.node(OPERATOR, [self.query, self.key, self.value, self.mask], domain=DOMAIN,
                       attributes={} if usual else {"scale": self.scale}, name=self.last.name)  # fmt: skip
        new = node.outputs[0]
        new.name, new.shape, new.type = old.name, old.shape, old.type
        set_owner(node, owner_of(self.last))
        assert isinstance(self.last.graph, ir.Graph)
        self.last.graph.insert_before(self.last, node)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)

    def _is_inside(self, node: ir.Node) -> bool:
        owner = owner_of(node)
        same = (owner.call if owner is not None else None) == self.call
        return same and _only_user(node) is not None and node.outputs[0].name not in self.kept

    def _producer(self, value: ir.Value | None, *operators: str) -> ir.Node | None:
        """The node behind a value, if it has one of these operators, is of the same call, and nothing else uses it."""
        node = value.producer() if value is not None else None
        return node if node is not None and node.op_type in operators and self._is_inside(node) else None

    def _number(self, value: ir.Value | None) -> float | None:
        number = self.numbers.number(value)
        return None if number is None or isinstance(number, Number) else float(number)

    def _factor(self, value: ir.Value | None) -> tuple[ir.Value | None, float]:
        node = self._producer(value, "Mul", "Div")
        number = self._number(node.inputs[1]) if node is not None else None
        if node is None or number is None:
            return value, 1.0
        return node.inputs[0], number if node.op_type == "Mul" else 1 / number

    def _is_product(self, value: ir.Value | None) -> bool:
        return self._producer(self._factor(value)[0], "MatMul") is not None

    def _unscaled(self, value: ir.Value | None) -> ir.Value | None:
        """A value without a factor, which is in the scale then."""
        before, factor = self._factor(value)
        self.scale *= factor
        return before

    def _untransposed(self, value: ir.Value | None) -> ir.Value | None:
        """The key before its last two axes were exchanged, perhaps with the other axes joined in between."""
        joined = self._producer(value, "Reshape")
        node = self._producer(joined.inputs[0] if joined is not None else value, "Transpose")
        order = list(node.attributes["perm"].as_ints()) if node is not None and "perm" in node.attributes else []
        if node is None or order != [*range(len(order) - 2), len(order) - 1, len(order) - 2]:
            return None
        if joined is None or value is None:
            return node.inputs[0]
        split = self._producer(node.inputs[0], "Reshape")
        before = split.inputs[0] if split is not None else None
        if split is None or before is None or before.shape is None:
            return None
        *outer, length, size = sizes_of(before)
        if self._sizes(joined)[-2:] != [size, length] or self._sizes(split)[-2:] != [length, size]:
            return None
        return before if self._sizes(joined)[:-2] == outer else self._reshaped(before, joined)

    def _reshaped(self, key: ir.Value, joined: ir.Node) -> ir.Value | None:
        """A key in the shape that a reshape gives it after its last two axes were exchanged."""
        result, given = joined.outputs[0], joined.inputs[1]
        sizes = self.numbers.known.get(given, self.constants.array(given)) if given is not None else None
        if sizes is None or result.shape is None or not isinstance(joined.graph, ir.Graph):
            return None
        order = [*range(len(sizes) - 2), len(sizes) - 1, len(sizes) - 2]
        wanted = ir.Value(name=f"{result.name}_sizes", type=ir.TensorType(ir.DataType.INT64))
        self.numbers.known[wanted] = np.array(sizes.tolist(), dtype=object)[order]
        node = ir.node("Reshape", [key, wanted], version=joined.version, name=joined.name)
        node.outputs[0].name, node.outputs[0].type = result.name, result.type
        node.outputs[0].shape = ir.Shape([result.shape[axis] for axis in order])
        set_owner(node, owner_of(joined))
        joined.graph.insert_before(joined, node)
        return node.outputs[0]

    def _sizes(self, reshape: ir.Node) -> list[str]:
        """The sizes that a reshape gives."""
        sizes = reshape.inputs[1]
        numbers = self.numbers.known.get(sizes) if sizes is not None else None
        return sizes_of(reshape.outputs[0]) if numbers is None else [str(number) for number in numbers]

    def _is_of_last_axis(self, reduction: ir.Node) -> bool:
        given, value = reduction.attributes.get("axes"), reduction.inputs[0]
        axes = (
            list(given.as_ints()) if given is not None else [self.numbers.number(each) for each in reduction.inputs[1:]]
        )
        return value is not None and value.shape is not None and axes in ([-1], [len(value.shape) - 1])

    def _take_empty_rows(self) -> None:
        """Take the node behind that sets rows without a key to zero, and the boolean mask that it asks."""
        after, choice = _only_user(self.last), self.mask.producer() if self.mask is not None else None
        if after is None or choice is None or (after.op_type, choice.op_type) != ("Where", "Where"):
            return
        chain = [after.inputs[0]]
        for operator in ("Less", "ReduceSum", "Cast"):  # of how many keys a row sees, from the back
            node = chain[-1].producer() if chain[-1] is not None else None
            if node is None or node.op_type != operator:
                return
            chain.append(node.inputs[0])
            if operator == "Less" and self._number(node.inputs[1]) != 1:
                return
            if operator == "ReduceSum" and not self._is_of_last_axis(node):
                return
        zeros, hidden = [self._number(node.inputs[1]) for node in (after, choice)], self._number(choice.inputs[2])
        same = chain[-1] is choice.inputs[0] and after.inputs[2] is self.last.outputs[0]
        if same and zeros == [0.0, 0.0] and hidden is not None and hidden <= -HIDES:
            self.mask, self.last = choice.inputs[0], after


def _only_user(node: ir.Node) -> ir.Node | None:
    uses = list(node.outputs[0].uses())
    return uses[0].node if len(uses) == 1 and not node.outputs[0].is_graph_output() else None
