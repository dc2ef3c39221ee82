"""The ``forward`` of a module as text: the nodes of one of its calls, and the calls inside it.

A value that is used once is written where it is used, if the line stays short. What is computed from sizes alone is
Python's arithmetic. Branches and loops are Python's ``if`` and ``for``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.nodes import nested_graphs
from modelexport.tagged.encodings.functions_call_groups import Group, Item
from modelexport.torch_source.call_layout import CallLayout, is_below
from modelexport.torch_source.expressions import ATOM, Expression, Number, Numbers
from modelexport.torch_source.layer_operators import OPERATORS
from modelexport.torch_source.module_nodes import ModuleNodes
from modelexport.torch_source.nested_graphs import MissingOperatorError, NestedGraphs
from modelexport.torch_source.operation import Operation, Several, UnwrittenError
from modelexport.torch_source.recurrent_classes import RecurrentCall
from modelexport.torch_source.size_numbers import FileNumbers


class ForwardText(NestedGraphs):
    """Writes one call.

    Args:
        call_number: Which of the forwards of a module another call of it runs; 0 for modules with one forward.
        constructor: The call that makes the module with a path.
        recurrent: How a call of ``nn.LSTM`` and the like is written.
        scope: The other arguments of :class:`~modelexport.torch_source.value_scope.ValueScope`.
    """

    def __init__(
        self,
        layout: CallLayout,
        nodes: ModuleNodes,
        numbers: FileNumbers,
        group: Group,
        *,
        call_number: Callable[[ModuleCall], int],
        constructor: Callable[[str], str],
        recurrent: Callable[[ModuleCall], RecurrentCall | None],
        **scope: Any,
    ) -> None:
        super().__init__(layout, nodes, numbers, group, **scope)
        self.call_number, self.constructor, self.recurrent = call_number, constructor, recurrent
        self._uses: Counter[ir.Value] = Counter()
        self._passed = self._unchanged_calls()
        self.arguments = [self._argument(value) for value in layout.inputs[group.call]]
        self._count(group.items)
        self._uses.update(layout.outputs[group.call])
        first = next(
            (value for value in layout.inputs[group.call] if value not in numbers.known and self._is_tensor(value)),
            None,
        )
        self.device = f", device={self._env[first].text}.device" if first is not None else ""
        for value in layout.inputs[group.call]:
            self._pass(value)
        self._items(group.items)
        self._return()

    @staticmethod
    def _is_tensor(value: ir.Value) -> bool:
        return value.type is None or isinstance(value.type, ir.TensorType)

    def _count(self, items: Iterable[Item], inner: ir.Graph | None = None) -> None:
        """How often values are used. A use in a nested graph counts double for a value from outside, which so gets a
        name before the graph."""
        for item in items:
            used = (
                self.layout.inputs[item.call] if isinstance(item, Group) else [v for v in item.inputs if v is not None]
            )
            self._use(used, inner)
            for graph in nested_graphs(item) if isinstance(item, ir.Node) else ():
                self._count(self.layout.items[graph], graph)
                self._use(graph.outputs, graph)

    def _use(self, values: Iterable[ir.Value], inner: ir.Graph | None) -> None:
        for value in values:
            self._uses[value] += 1 if inner is None or value.graph is inner else 2

    def _assign(self, value: ir.Value, expression: Expression, operator: str) -> None:
        if self._uses[value] <= 1:
            self._pending[value] = expression
        else:
            name = self._name(value, operator, expression.text)
            self._emit(f"{name} = {expression.text}")
            self._env[value] = Expression(name)
            self._pass(value)

    def _pass(self, value: ir.Value) -> None:
        """Write the calls without nodes that get a value: they return it, or what the file has as constants."""
        for call in self._passed.pop(value.name or "", ()):
            text = f"{self.nodes.module(self.path, call)}({self.tensor(value).text})"
            if call in self.layout.constant_results:
                if value in self._pending:
                    self._name_pending(value)
                    text = f"{self.nodes.module(self.path, call)}({self.tensor(value).text})"
                self._emit(f"{text}  # what it returns are constants of the file")
            elif self._uses[value] <= 1:
                self._env.pop(value, None)
                self._pending[value] = Expression(text)
            else:
                self._emit(f"{self._env[value].text} = {text}")

    def _items(self, items: Sequence[Item]) -> None:
        done: set[Group] = set()
        for item in items:
            if isinstance(item, Group):
                if item not in done:
                    run = self._run_of_layers(items, item)
                    done.update(run)
                    self._loop_over(run) if len(run) > 1 else self._call(item)
            elif item.op_type == "Constant" and not item.domain:
                continue
            else:
                self._node(item)

    def _run_of_layers(self, items: Sequence[Item], first: Group) -> list[Group]:
        """Calls of the modules of a list in order, each of which takes what the one before gives, and else the same."""
        run, layout = [first], self.layout
        base, _, number = first.call.path.rpartition(".")
        following = [item for item in items[items.index(first) + 1 :] if isinstance(item, Group)]
        if not number.isdigit() or not base or base == self.path or not self.nodes.by_path[base].is_list:
            return run
        for group in following:
            before = run[-1].call
            given, taken = layout.inputs[before], layout.inputs[group.call]
            changed = [
                place for place, value in enumerate(taken) if len(given) == len(taken) and value is not given[place]
            ]
            if (
                group.call.path != f"{base}.{int(number) + len(run)}"
                or group.call.index
                or self.call_number(group.call)
            ):
                break
            if (
                len(layout.outputs[before]) != 1
                or len(changed) != 1
                or taken[changed[0]] is not layout.outputs[before][0]
            ):
                break
            if self._uses[layout.outputs[before][0]] > 1 or any(taken[changed[0]].name == n for n in self._passed):
                break
            run.append(group)
        same = len({self.constructor(group.call.path) for group in run}) == 1
        return run if same and is_below(base, self.path) else [first]

    def _loop_over(self, run: Sequence[Group]) -> None:
        """``for layer in self.layers: x = layer(x, mask)``"""
        first, last = run[0].call, run[-1].call
        base, _, number = first.path.rpartition(".")
        place = next(p for p, v in enumerate(self.layout.inputs[last]) if v is self.layout.outputs[run[-2].call][0])
        value, end = self.layout.inputs[first][place], int(number) + len(run)
        modules = self.nodes.attribute(self.path, base)
        if number != "0" or end < len(self.nodes.by_path[base].children):
            modules += f"[{number}:{end}]" if number != "0" else f"[:{end}]"
        name = self._argument_text(value)
        if value in self._pending or self._uses[value] > 1 or not name.isidentifier():
            self._pending.pop(value, None)
            start, name = name, self._name(self.layout.outputs[last][0], "x")
            self._emit(f"{name} = {start}")
        texts = [name if p == place else self._argument_text(v) for p, v in enumerate(self.layout.inputs[first])]
        layer = self._fresh("layer")
        self._emit(f"for {layer} in {modules}:")
        self._emit(f"    {name} = {layer}({', '.join(texts)})")
        self._env[self.layout.outputs[last][0]] = Expression(name)
        self._pass(self.layout.outputs[last][0])

    def _call(self, group: Group) -> None:
        outputs = self.layout.outputs[group.call]
        number, recurrent = self.call_number(group.call), self.recurrent(group.call)
        extra = [f"call={number}"] if number else []

        def write() -> str:
            texts = [self._argument_text(value) for value in self.layout.inputs[group.call]]
            texts = recurrent.arguments(texts) if recurrent is not None else texts
            return f"{self.nodes.module(self.path, group.call)}({', '.join([*texts, *extra])})"

        self._operator = "x"
        text = self._composed(write, len)
        name = group.call.path.rpartition(".")[2]
        if recurrent is not None and len(outputs) > 1:
            names = {slot: self._name(value, name) for slot, value in zip(recurrent.slots, outputs, strict=True)}
            self._emit(f"{recurrent.results(names)} = {text}")
            for slot, value in zip(recurrent.slots, outputs, strict=True):
                self._env[value] = Expression(names[slot])
                self._pass(value)
            return
        text += recurrent.accessor(recurrent.slots[0]) if recurrent is not None and outputs else ""
        if len(outputs) == 1:
            if outputs[0] in self.file_numbers.known:
                self._name_result(outputs[0], text)
            else:
                self._assign(outputs[0], Expression(text), name if not name.isdigit() else "x")
                self._pass(outputs[0])
        elif outputs:
            self._unpack(outputs, text, name)
        else:
            self._emit(text)

    def _argument_text(self, value: ir.Value) -> str:
        numbers = self._numbers.get(value)
        return numbers.text if numbers is not None else self.tensor(value).text

    def _name_result(self, value: ir.Value, text: str) -> None:
        name = self._name(value)
        self._emit(f"{name} = {text}")
        self._env[value] = Expression(name)
        self._name_numbers(value, name)

    def _unpack(self, values: Sequence[ir.Value | None], text: str, operator: str) -> None:
        names = []
        for value in values:
            used = value is not None and (self._uses[value] or value.is_graph_output())
            names.append(self._name(value, operator) if used and value is not None else "_")
            if used and value is not None:
                self._env[value] = Expression(names[-1])
                self._name_numbers(value, names[-1])
        self._emit(f"{', '.join(names)} = {text}")
        for value in values:
            if value is not None:
                self._pass(value)

    def _node(self, node: ir.Node) -> None:
        walks = {"If": self._if, "Loop": self._loop, "Scan": self._scan}
        if node.op_type in walks and not node.domain:
            walks[node.op_type](node)
            return
        numbers = self.file_numbers.known.get(node.outputs[0])
        if numbers is not None:
            self._number_node(node)
            return
        writer = OPERATORS.get((node.domain if node.domain != "ai.onnx" else "", node.op_type))
        version = self.layout.tagged.model.opset_imports.get(node.domain, 1)
        operation = Operation(node, node.version or version, self)
        self._operator = node.op_type
        try:
            if writer is None:
                raise UnwrittenError("it has no row in the table")
            written = self._composed(lambda: writer(operation), _length)
        except UnwrittenError as error:
            domain = f"{node.domain}." if node.domain else ""
            raise MissingOperatorError(
                f"{domain}{node.op_type} {node.name or ''} of {self.group.call} has no counterpart in torch ({error}): "
                "add a row to OPERATORS of modelexport/torch_source/layer_operators.py, or cut the module out with "
                "`modelexport extract`"
            ) from error
        self._write(node, written)

    def _write(self, node: ir.Node, written: Expression | list[Expression] | Several) -> None:
        outputs = list(node.outputs)
        if isinstance(written, Several):
            used = [number for number, value in enumerate(outputs) if self._uses[value]]
            if len(used) == 1 and written.count > 1:
                self._assign(outputs[used[0]], Expression(f"{written.text}[{used[0]}]"), node.op_type)
                self._pass(outputs[used[0]])
            elif used or written.count > 1:
                padded: list[ir.Value | None] = [*outputs, *[None] * (written.count - len(outputs))]
                if written.count == 1:
                    self._assign(outputs[0], Expression(f"{written.text}[0]"), node.op_type)
                else:
                    self._unpack(padded, written.text, node.op_type)
            return
        for value, expression in zip(outputs, written if isinstance(written, list) else [written], strict=False):
            if value.name and self._uses[value]:
                self._assign(value, expression, node.op_type)
                self._pass(value)

    def _number_node(self, node: ir.Node) -> None:
        def text(value: ir.Value) -> str:
            if value in self._pending:
                self._name_pending(value)
            return self.tensor(value).within(ATOM)

        found = self.file_numbers.of_node(node, self._numbers.get, text)
        assert found is not None
        items = []
        for item in found.items:
            if len(item.text) > 30 and item.literal is None:
                name = self._fresh("size")
                self._emit(f"{name} = {item.text}")
                items.append(Number(Expression(name), item.is_positive))
            else:
                items.append(item)
        self._numbers[node.outputs[0]] = Numbers(tuple(items), found.is_scalar)

    def _return(self) -> None:
        outputs = self.layout.outputs[self.group.call]

        def write() -> str:
            if self.is_root:
                texts = [self.tensor(value).text for value in outputs]
                if len(outputs) == 1 and (outputs[0].name or "").startswith("output"):
                    return f"return {texts[0]}"
                pairs = [f"{value.name!a}: {text}" for value, text in zip(outputs, texts, strict=True)]
                return f"return {{{', '.join(pairs)}}}"
            return f"return {', '.join(self._argument_text(value) for value in outputs)}"

        self._operator = "result"
        self._emit(self._composed(write, len))


def _length(written: Any) -> int:
    texts = [each.text for each in written] if isinstance(written, list) else [written.text]
    return max(map(len, texts)) + 8
