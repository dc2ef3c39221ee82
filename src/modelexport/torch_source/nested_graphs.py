"""Branches and loops of a file as Python's ``if`` and ``for`` over the values of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.tagged.encodings.functions_call_groups import Item
from modelexport.torch_source.expressions import Expression, Number, Numbers, listed, literal, type_name
from modelexport.torch_source.value_scope import ValueScope


class MissingOperatorError(UsageError):
    """An operator of the file has no counterpart in the table of operators."""


class NestedGraphs(ValueScope):
    """Writes ``If``, ``Loop`` and ``Scan``."""

    def _items(self, items: Sequence[Item]) -> None:
        """Write nodes, and the calls among them."""
        raise NotImplementedError

    def _body(self, graph: ir.Graph, names: Sequence[str] | None) -> list[str]:
        """The nodes of a nested graph; its results are assigned to names, or given back."""
        self._items(self.layout.items[graph])
        texts = []
        for number, value in enumerate(graph.outputs):
            text = self.tensor(value).text
            self._pending.pop(value, None)
            if names is not None and names[number] != text:
                self._emit(f"{names[number]} = {text}")
            texts.append(text)
        return texts

    def _flush(self) -> None:
        for value in list(self._pending):
            self._name_pending(value)

    def _condition(self, value: ir.Value) -> str:
        numbers = self._numbers.get(value)
        return numbers.items[0].text if numbers is not None else self._composed(lambda: self.tensor(value).text, len)

    def _if(self, node: ir.Node) -> None:
        assert node.inputs[0] is not None
        condition = self._condition(node.inputs[0])
        self._flush()
        names = [self._name(value, "result") for value in node.outputs]
        for start, branch in ((f"if {condition}:", "then_branch"), ("else:", "else_branch")):
            self._emit(start)
            with self._indented():
                before = len(self.lines)
                self._body(node.attributes[branch].as_graph(), names)
                self._flush()
                if len(self.lines) == before:
                    self._emit("pass")
        for value, name in zip(node.outputs, names, strict=True):
            self._env[value] = Expression(name)

    def _loop(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        most, goes_on, *first = node.inputs
        self._flush()
        carried = [self._name(value, "state") for value in body.inputs[2:]]
        for name, value in zip(carried, first, strict=True):
            assert value is not None
            self._emit(f"{name} = {self.tensor(value).text}")
        kept = [self._fresh("steps") for _ in body.outputs[1 + len(carried) :]]
        for name in kept:
            self._emit(f"{name} = []")
        condition = self._fresh("goes_on")
        self._emit(f"{condition} = {'True' if goes_on is None else self._condition(goes_on)}")
        step = self._fresh("step")
        count = "2**63 - 1" if most is None else self._size(most)
        self._emit(f"for {step} in range({count}):")
        with self._indented():
            self._emit(f"if not {condition}:")
            self._emit("    break")
            self._env[body.inputs[1]] = Expression(f"torch.as_tensor({condition})")
            self._numbers[body.inputs[0]] = Numbers((Number(Expression(step), True),), True)
            self._env.update({value: Expression(name) for value, name in zip(body.inputs[2:], carried, strict=True)})
            results = self._body(body, None)
            for name, text in zip(kept, results[1 + len(carried) :], strict=True):
                self._emit(f"{name}.append({text})")
            self._emit(f"{', '.join([condition, *carried])} = {', '.join(results[: 1 + len(carried)])}")
        for value, name in zip(node.outputs, carried, strict=False):
            self._env[value] = Expression(name)
        self._stack(node.outputs[len(carried) :], kept, body.outputs[1 + len(carried) :])

    def _size(self, value: ir.Value) -> str:
        array, numbers = self.constant(value), self._numbers.get(value)
        if array is not None:
            return literal(array.reshape(-1)[0])
        return numbers.items[0].text if numbers is not None else f"int({self.tensor(value).text})"

    def _stack(self, values: Sequence[ir.Value], kept: Sequence[str], inner: Sequence[ir.Value]) -> None:
        for value, name, each in zip(values, kept, inner, strict=True):
            sizes = [str(size) if isinstance(size, int) else "0" for size in each.shape or ()]
            dtype = type_name(each.dtype, self.wide) if each.dtype is not None else "float32"
            empty = f"torch.zeros({listed(['0', *sizes])}, dtype=torch.{dtype}{self.device})"
            result = self._name(value, "stacked")
            self._emit(f"{result} = torch.stack({name}) if {name} else {empty}")
            self._env[value] = Expression(result)

    def _scan(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        count = node.attributes["num_scan_inputs"].as_int()
        states, sequences = node.inputs[: len(node.inputs) - count], node.inputs[len(node.inputs) - count :]
        if any(any(node.attributes[name].as_ints()) for name in _SCAN_ORDERS if name in node.attributes):
            raise MissingOperatorError(
                f"Scan {node.name or ''} of {self.group.call} runs backwards or along another axis than the first: cut "
                "the module out with `modelexport extract`"
            )
        self._flush()
        carried = [self._name(value, "state") for value in body.inputs[: len(states)]]
        for name, value in zip(carried, states, strict=True):
            assert value is not None
            self._emit(f"{name} = {self.tensor(value).text}")
        kept = [self._fresh("steps") for _ in body.outputs[len(carried) :]]
        for name in kept:
            self._emit(f"{name} = []")
        each = [self._name(value, "element") for value in body.inputs[len(states) :]]
        texts = [self.tensor(value).text for value in sequences if value is not None]
        source = f"zip({', '.join(texts)})" if len(texts) > 1 else texts[0]
        self._emit(f"for {', '.join(each)} in {source}:")
        with self._indented():
            self._env.update(
                {value: Expression(name) for value, name in zip(body.inputs, [*carried, *each], strict=True)}
            )
            results = self._body(body, None)
            for name, text in zip(kept, results[len(carried) :], strict=True):
                self._emit(f"{name}.append({text})")
            if carried:
                self._emit(f"{', '.join(carried)} = {', '.join(results[: len(carried)])}")
        for value, name in zip(node.outputs, carried, strict=False):
            self._env[value] = Expression(name)
        self._stack(node.outputs[len(carried) :], kept, body.outputs[len(carried) :])


_SCAN_ORDERS = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
