"""Branches and loops of a file as Python's ``if`` and ``for`` over the values of tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.tagged.encodings.functions_call_groups import Item
from modelexport.torch_source.expressions import Number, code, literal, parsed
from modelexport.torch_source.size_numbers import one_number
from modelexport.torch_source.value_scope import ValueScope


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
        array, numbers = self.constant(value), self._numbers.get(value)
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

    def _start(
        self, inner: Iterable[ir.Value], first: Iterable[ir.Value | None], kept: int
    ) -> tuple[list[str], list[str]]:
        """The names of what a loop carries along, with first values, and of the lists of what it gives each time."""
        self._flush()
        carried = [self._name(value, "state") for value in inner]
        for name, value in zip(carried, first, strict=True):
            assert value is not None
            self._emit(f"{name} = {ast.unparse(self.tensor(value))}")
        steps = [self._fresh("steps") for _ in range(kept)]
        for name in steps:
            self._emit(f"{name} = []")
        return carried, steps

    def _end(
        self, node: ir.Node, body: ir.Graph, targets: Sequence[str], steps: Sequence[str], *, condition: int
    ) -> None:
        """The body of a loop, the values that it carries along, and those that are stacked behind it."""
        with self._indented():
            results = self._body(body)
            for name, text in zip(steps, results[len(targets) :], strict=True):
                self._emit(f"{name}.append({text})")
            if targets:
                self._emit(f"{', '.join(targets)} = {', '.join(results[: len(targets)])}")
        carried = targets[condition:]
        for value, name in zip(node.outputs, carried, strict=False):
            self._env[value] = parsed(name)
        for value, name, inner in zip(node.outputs[len(carried) :], steps, body.outputs[len(targets) :], strict=True):
            sizes = tuple(size if isinstance(size, int) else 0 for size in (0, *(inner.shape or ())))
            kind = parsed(f"torch.{self.type_name(inner.dtype or ir.DataType.FLOAT)}")
            template = "torch.stack(x) if x else torch.zeros(sizes, dtype=kind, device=device)"
            self._assign(value, code(template, x=parsed(name), sizes=sizes, kind=kind, device=self.device), "stacked")

    def _loop(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        most, goes_on, *first = node.inputs
        carried, steps = self._start(body.inputs[2:], first, len(body.outputs) - len(first) - 1)
        condition, step = self._fresh("goes_on"), self._fresh("step")
        self._emit(f"{condition} = {'True' if goes_on is None else self._condition(goes_on)}")
        count = "2**63 - 1"
        if most is not None:
            count = ast.unparse(self._number(most) or code("int(x)", x=self.tensor(most)))
        self._emit(f"for {step} in range({count}):")
        with self._indented():
            self._emit(f"if not {condition}:")
            self._emit("    break")
        self._env[body.inputs[1]] = code("torch.as_tensor(x)", x=parsed(condition))
        self._numbers[body.inputs[0]] = one_number(Number(parsed(step), is_positive=True))
        self._env.update({value: parsed(name) for value, name in zip(body.inputs[2:], carried, strict=True)})
        self._end(node, body, [condition, *carried], steps, condition=1)

    def _scan(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        if any(any(node.attributes[name].as_ints()) for name in _SCAN_ORDERS if name in node.attributes):
            raise MissingOperatorError(
                f"Scan {node.name or ''} of {self.group.call} runs backwards or along another axis than the first: cut "
                "the module out with `modelexport extract`"
            )
        carried, steps = self._start(body.inputs[:count], node.inputs[:count], len(body.outputs) - count)
        each = [self._name(value, "element") for value in body.inputs[count:]]
        texts = [ast.unparse(self.tensor(value)) for value in node.inputs[count:] if value is not None]
        source = f"zip({', '.join(texts)})" if len(texts) > 1 else texts[0]
        self._emit(f"for {', '.join(each)} in {source}:")
        self._env.update({value: parsed(name) for value, name in zip(body.inputs, [*carried, *each], strict=True)})
        self._end(node, body, carried, steps, condition=0)


_SCAN_ORDERS = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
