"""Branches and loops of a file as Python's ``if`` and ``for`` over the values of tensors."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.tagged.encodings.functions_call_groups import Item
from modelexport.tools.to_torch.expressions import Number, code, literal, parsed
from modelexport.tools.to_torch.size_numbers import one_number
from modelexport.tools.to_torch.value_scope import ValueScope


class MissingOperatorError(UsageError):
    """An operator of the file has no counterpart in the table of operators."""


class NestedGraphs(ValueScope):
    """Writes ``If``, ``Loop`` and ``Scan``."""

    def _items(self, items: Sequence[Item]) -> None:
        """Write nodes, and the calls among them."""
        raise NotImplementedError

    def _body(self, graph: ir.Graph) -> list[str]:
        """The nodes of a nested graph, and its results."""
        self._items(self.layout.items[graph])
        results = [ast.unparse(self.tensor(value)) for value in graph.outputs]
        for value in graph.outputs:
            self._pending.pop(value, None)
        return results

    def _flush(self) -> None:
        for value in list(self._pending):
            self._name_pending(value)

    def _number(self, value: ir.Value) -> ast.expr | None:
        """A value that is one Python number already."""
        array, numbers = self.constant(value), self.numbers(value)
        if array is not None:
            return literal(array.reshape(-1)[0])
        return None if numbers is None else literal(numbers.reshape(-1)[0])

    def _condition(self, value: ir.Value) -> str:
        return ast.unparse(self._number(value) or self._composed(lambda: self.tensor(value)))

    def _if(self, node: ir.Node) -> None:
        assert node.inputs[0] is not None
        condition = self._condition(node.inputs[0])
        self._flush()
        names = [self._name(value, "result") for value in node.outputs]
        for start, branch in ((f"if {condition}:", "then_branch"), ("else:", "else_branch")):
            self._emit(start)
            with self._indented():
                results = self._body(node.attributes[branch].as_graph())
                for name, result in zip(names, results, strict=True):
                    self._emit(f"{name} = {result}")
                if not names:
                    self._emit("pass")
        for value, name in zip(node.outputs, names, strict=True):
            self._env[value] = parsed(name)

    def _loop(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        most, goes_on, *first = node.inputs
        self._flush()
        condition, step = self._fresh("goes_on"), self._fresh("step")
        carried = [self._name(value, "state") for value in body.inputs[2:]]
        starts = [ast.unparse(self.tensor(value)) for value in first if value is not None]
        starts.append("True" if goes_on is None else self._condition(goes_on))
        for name, start in zip((*carried, condition), starts, strict=True):
            self._emit(f"{name} = {start}")
        count = code("2**63 - 1") if most is None else self._number(most) or code("int(x)", x=self.tensor(most))
        self._env[body.inputs[1]] = code("torch.as_tensor(x)", x=parsed(condition))
        self._numbers[body.inputs[0]] = one_number(Number(parsed(step), is_positive=True))
        self._env.update({value: parsed(name) for value, name in zip(body.inputs[2:], carried, strict=True)})
        head = [f"for {step} in range({ast.unparse(count)}):", f"    if not {condition}:", "        break"]
        self._repeat(node, body, head, [condition, *carried])

    def _scan(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        if any(any(node.attributes[name].as_ints()) for name in _SCAN_ORDERS if name in node.attributes):
            raise MissingOperatorError(
                f"Scan {node.name or ''} of {self.group.call} runs backwards or along another axis than the first: "
                "replace the module with `modelexport replace`, or convert the modules beside it, each cut out with "
                "`modelexport extract`"
            )
        self._flush()
        names = [self._name(value, "state" if place < count else "element") for place, value in enumerate(body.inputs)]
        texts = [ast.unparse(self.tensor(value)) for value in node.inputs if value is not None]
        for name, text in zip(names[:count], texts[:count], strict=True):
            self._emit(f"{name} = {text}")
        source = f"zip({', '.join(texts[count:])})" if len(texts) > count + 1 else texts[count]
        self._env.update({value: parsed(name) for value, name in zip(body.inputs, names, strict=True)})
        self._repeat(node, body, [f"for {', '.join(names[count:])} in {source}:"], names[:count])

    def _repeat(self, node: ir.Node, body: ir.Graph, head: Sequence[str], carried: Sequence[str]) -> None:
        """The lines of a loop, which carries values from one step to the next, and keeps others in lists."""
        inner = body.outputs[len(carried) :]
        kept = [self._fresh("steps") for _ in inner]
        for name in kept:
            self._emit(f"{name} = []")
        for line in head:
            self._emit(line)
        with self._indented():
            results = self._body(body)
            for name, text in zip(kept, results[len(carried) :], strict=True):
                self._emit(f"{name}.append({text})")
            if carried:
                self._emit(f"{', '.join(carried)} = {', '.join(results[: len(carried)])}")
        results_of = carried[len(carried) + len(kept) - len(node.outputs) :]
        self._env.update({value: parsed(name) for value, name in zip(node.outputs, results_of, strict=False)})
        for value, name, element in zip(node.outputs[len(results_of) :], kept, inner, strict=True):
            sizes = tuple(size if isinstance(size, int) else 0 for size in (0, *(element.shape or ())))
            kind = parsed(f"torch.{self.type_name(element.dtype or ir.DataType.FLOAT)}")
            template = "torch.stack(x) if x else torch.zeros(sizes, dtype=kind, device=device)"
            self._assign(value, code(template, x=parsed(name), sizes=sizes, kind=kind, device=self.device), "stacked")


_SCAN_ORDERS = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
