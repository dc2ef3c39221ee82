"""The ``forward`` of a module as text: the nodes of one of its calls, and the calls inside it.

A value that is used once is written where it is used, if the line stays short. What is computed from sizes alone is
Python's arithmetic. Branches and loops are Python's ``if`` and ``for``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.graph.nodes import nested_graphs
from modelexport.tagged.encodings.functions_call_groups import Group, Item
from modelexport.torch_source.call_layout import SMALL, CallLayout
from modelexport.torch_source.expressions import ATOM, Expression, Number, Numbers, identifier, listed, literal, type_name
from modelexport.torch_source.layer_operators import OPERATORS
from modelexport.torch_source.module_nodes import ModuleNodes
from modelexport.torch_source.operation import Operation, Several, Unwritten
from modelexport.torch_source.size_numbers import computed_numbers, constant_numbers, kind_of

WIDTH = 100
"""How long a line of a body may be before its operands get names."""
_BODY = 8
"""The columns that a line of a method is indented by."""


class MissingOperatorError(UsageError):
    """An operator of the file has no counterpart in the table of operators."""


class FileNumbers:
    """Which values of a file are computed from sizes alone, and so are Python numbers in its code."""

    def __init__(self, layout: CallLayout) -> None:
        self.layout = layout
        self._arrays: dict[ir.Value, Any] = {}
        self.known: dict[ir.Value, Numbers] = {}
        for node in layout.graph.all_nodes():
            found = self.of_node(node, lambda value: self.known.get(value), lambda value: "x")
            if found is not None:
                self.known[node.outputs[0]] = found

    def array(self, value: ir.Value) -> Any:
        """A small constant as an array; ``None`` for others."""
        tensor = self.layout.constants.get(value)
        if tensor is None or tensor.nbytes > 16 * SMALL or tensor.dtype == ir.DataType.STRING:
            return None
        if value not in self._arrays:
            self._arrays[value] = tensor.numpy()
        return self._arrays[value]

    def of_node(
        self, node: ir.Node, numbers: Callable[[ir.Value], Numbers | None], text: Callable[[ir.Value], str]
    ) -> Numbers | None:
        """What a node gives as numbers.

        Args:
            numbers: What is known of a value.
            text: A tensor as text.
        """
        if node.domain or not node.inputs or node.inputs[0] is None or len(node.outputs) != 1 or nested_graphs(node):
            return None
        first = node.inputs[0]
        if node.op_type == "Shape" and first.shape is not None and not isinstance(first.type, ir.SequenceType):
            start, end = (int(node.attributes[k].value) if k in node.attributes else d for k, d in (("start", 0), ("end", None)))
            axes = range(len(first.shape))[start:end]
            return Numbers(tuple(Number(Expression(f"{text(first)}.shape[{axis}]"), True) for axis in axes), False)
        if node.op_type == "Size" and first.shape is not None:
            return Numbers((Number(Expression(f"{text(first)}.numel()"), True),), True)
        given = [None if value is None else numbers(value) for value in node.inputs]
        if not any(found is not None for found in given):
            return None
        full = [
            found if found is not None or value is None else constant_numbers(self.array(value))
            for found, value in zip(given, node.inputs, strict=True)
        ]
        kinds = [kind_of(value.dtype) if value is not None else "O" for value in (*node.inputs, node.outputs[0])]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        return computed_numbers(node.op_type, full, attributes, kinds)


class ForwardText:
    """Writes one call.

    Args:
        plain: Give values the names ``v0``, ``v1``, ..., with which equal calls are equal texts.
        wide: The floating-point type that is float64 instead.
        constant_name: The attribute under which the module has a constant.
        call_number: Which of the forwards of a module another call of it runs; 0 for modules with one forward.
    """

    def __init__(
        self,
        layout: CallLayout,
        nodes: ModuleNodes,
        numbers: FileNumbers,
        group: Group,
        *,
        plain: bool,
        wide: str | None,
        constant_name: Callable[[ir.Value, str], str],
        call_number: Callable[[ModuleCall], int],
    ) -> None:
        self.layout, self.nodes, self.file_numbers, self.group = layout, nodes, numbers, group
        self.plain, self.wide, self.constant_name, self.call_number = plain, wide, constant_name, call_number
        self.helpers: set[Callable[..., Any]] = set()
        self.path = group.call.path
        self.lines: list[str] = []
        self.indent = 0
        self._names: set[str] = set()
        self._env: dict[ir.Value, Expression] = {}
        self._pending: dict[ir.Value, Expression] = {}
        self._numbers: dict[ir.Value, Numbers] = {}
        self._taken: Counter[ir.Value] = Counter()
        self._uses: Counter[ir.Value] = Counter()
        self._passed = self._unchanged_calls()
        self.device = ""
        self.is_root = group is layout.root
        self.arguments = [self._argument(value) for value in layout.inputs[group.call]]
        self._count(group.items, 1)
        self._uses.update(layout.outputs[group.call])
        first = next((value for value in layout.inputs[group.call] if value not in numbers.known and self._is_tensor(value)), None)
        self.device = f", device={self._env[first].text}.device" if first is not None else ""
        for value in layout.inputs[group.call]:
            self._pass(value)
        self._items(group.items)
        self._return()

    @staticmethod
    def _is_tensor(value: ir.Value) -> bool:
        return value.type is None or isinstance(value.type, ir.TensorType)

    # Names

    def _fresh(self, base: str) -> str:
        base = "v" if self.plain else base
        name, number = (f"{base}0", 0) if self.plain else (base, 0)
        while name in self._names:
            number += 1
            name = f"{base}{number}" if self.plain else f"{base}_{number}"
        self._names.add(name)
        return name

    def _name(self, value: ir.Value, operator: str = "value") -> str:
        """A name that resembles the value's in the file, without the number by which exporters tell equal ones apart."""
        text = (value.name or "").rpartition("/")[2].rpartition(".")[2]
        base = re.sub(r"(_?\d+)+$", "", text) or text
        if value in self.layout.graph.outputs or value in self.layout.graph.inputs:
            base = value.name or ""
        elif base in ("val", "v", "value", "") or not base.isascii():
            base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", operator).lower()
        return self._fresh(identifier(base))

    def _argument(self, value: ir.Value) -> str:
        known = self.layout.arguments.get(self.group.call, {}).get(value.name or "")
        name = self._fresh(identifier(known)) if known and not self.is_root else self._name(value, "x")
        self._env[value] = Expression(name)
        self._name_numbers(value, name)
        return name

    def _name_numbers(self, value: ir.Value, name: str) -> None:
        known = self.file_numbers.known.get(value)
        if known is not None:
            items = [
                Number(Expression(name if known.is_scalar else f"{name}[{place}]"), item.is_positive)
                for place, item in enumerate(known.items)
            ]
            self._numbers[value] = Numbers(tuple(items), known.is_scalar)

    def _unchanged_calls(self) -> dict[str, list[ModuleCall]]:
        found: dict[str, list[ModuleCall]] = {}
        for name, call in self.layout.unchanged.get(self.group.call, ()):
            found.setdefault(name, []).append(call)
        return found

    # Operands: what the table of operators asks

    def tensor(self, value: ir.Value) -> Expression:
        """A value as text."""
        self._taken[value] += 1
        numbers = self._numbers.get(value)
        if numbers is not None:
            dtype = value.dtype.name if value.dtype is not None else "INT64"
            kind = "" if dtype == "INT64" else f", dtype=torch.{type_name(ir.DataType[dtype], self.wide)}"
            text = numbers.text if numbers.is_scalar else f"[{', '.join(item.text for item in numbers.items)}]"
            return Expression(f"torch.tensor({text}{kind}{self.device})")
        found = self._env.get(value) or self._pending.get(value)
        if found is not None:
            return found
        if value in self.layout.entries.values:
            return Expression(self._entry(self.layout.entries.values[value]))
        if value in self.layout.constants:
            return self._constant(value)
        raise UsageError(f"the file uses {value.name}, which nothing computes: export it again")

    def numbers(self, value: ir.Value) -> Numbers | None:
        """A value that is computed from sizes, as Python numbers."""
        return self._numbers.get(value)

    def constant(self, value: ir.Value) -> Any:
        """A small constant as an array."""
        return self.file_numbers.array(value)

    def _entry(self, key: str) -> str:
        names = self.layout.entries.names.get(key, (key,))
        name = next(name for name in names if not self.path or name.startswith(f"{self.path}."))
        path, _, last = name.rpartition(".")
        return self.nodes.attribute(self.path, path, last)

    def _constant(self, value: ir.Value) -> Expression:
        home = self.layout.homes.get(value, self.path)
        name = re.sub(r"(_?\d+)+$", "", value.name or "")
        name = "constant" if self.plain or name in ("val", "") or not name.isascii() else identifier(name, "constant")
        return Expression(self.nodes.attribute(self.path, home, self.constant_name(value, name)))

    # Statements

    def _emit(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    @contextmanager
    def _indented(self) -> Iterator[None]:
        self.indent += 1
        yield
        self.indent -= 1

    def _count(self, items: Iterable[Item], weight: int) -> None:
        """How often values are used; in a nested graph each use counts double, so that the value gets a name."""
        for item in items:
            if isinstance(item, Group):
                self._uses.update({value: weight for value in self.layout.inputs[item.call]})
                continue
            self._uses.update({value: weight * item.inputs.count(value) for value in set(item.inputs) if value is not None})
            for graph in nested_graphs(item):
                self._count(self.layout.items[graph], 2)
                self._uses.update(dict.fromkeys(graph.outputs, 2))

    def _name_pending(self, value: ir.Value, operator: str = "value") -> None:
        expression = self._pending.pop(value)
        name = self._name(value, operator)
        self._emit(f"{name} = {expression.text}")
        self._env[value] = Expression(name)

    def _composed(self, write: Callable[[], Any], length: Callable[[Any], int]) -> Any:
        """What a writer gives; operands that make it too long, or are used twice in it, get names first."""
        while True:
            self._taken.clear()
            written = write()
            pending = [value for value in self._taken if value in self._pending]
            twice = [value for value in pending if self._taken[value] > 1 and len(self._pending[value].text) > 12]
            too_long = length(written) > WIDTH - _BODY - 4 * self.indent
            if not twice and not (too_long and pending):
                break
            self._name_pending(max(twice or pending, key=lambda value: len(self._pending[value].text)), self._operator)
        for value in pending:
            del self._pending[value]
        return written

    _operator = "value"

    def _assign(self, value: ir.Value, expression: Expression, operator: str) -> None:
        if self._uses[value] <= 1:
            self._pending[value] = expression
        else:
            name = self._name(value, operator)
            self._emit(f"{name} = {expression.text}")
            self._env[value] = Expression(name)
            self._pass(value)

    def _pass(self, value: ir.Value) -> None:
        """The calls that return what they get, of a value that has just been computed."""
        for call in self._passed.pop(value.name or "", ()):
            text = f"{self.nodes.module(self.path, call)}({self.tensor(value).text})"
            if self._uses[value] <= 1:
                self._env.pop(value, None)
                self._pending[value] = Expression(text)
            else:
                self._emit(f"{self._env[value].text} = {text}")

    def _items(self, items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, Group):
                self._call(item)
            elif item.op_type == "Constant" and not item.domain:
                continue
            else:
                self._node(item)

    def _call(self, group: Group) -> None:
        outputs = self.layout.outputs[group.call]
        number = self.call_number(group.call)
        extra = [f"call={number}"] if number else []

        def write() -> str:
            texts = [self._argument_text(value) for value in self.layout.inputs[group.call]]
            return f"{self.nodes.module(self.path, group.call)}({', '.join([*texts, *extra])})"

        self._operator = "x"
        text = self._composed(write, len)
        name = group.call.path.rpartition(".")[2]
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
                raise Unwritten("it has no row in the table")
            written = self._composed(lambda: writer(operation), _length)
        except Unwritten as error:
            domain = f"{node.domain}." if node.domain else ""
            raise MissingOperatorError(
                f"{domain}{node.op_type} {node.name or ''} of {self.group.call} cannot be written with torch ({error}): add "
                "a row to OPERATORS in modelexport/torch_source/layer_operators.py, or cut the module out with `modelexport "
                "extract`"
            ) from error
        self._write(node, written)

    def _write(self, node: ir.Node, written: Expression | list[Expression] | Several) -> None:
        outputs = [value for value in node.outputs]
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
                item = Number(Expression(name), item.is_positive)
            items.append(item)
        self._numbers[node.outputs[0]] = Numbers(tuple(items), found.is_scalar)

    def _return(self) -> None:
        outputs = self.layout.outputs[self.group.call]

        def write() -> str:
            if self.is_root:
                texts = [self.tensor(value).text for value in outputs]
                if len(outputs) == 1:
                    return f"return {texts[0]}"
                pairs = [f"{ascii(value.name)}: {text}" for value, text in zip(outputs, texts, strict=True)]
                return f"return {{{', '.join(pairs)}}}"
            return f"return {', '.join(self._argument_text(value) for value in outputs)}"

        self._operator = "result"
        self._emit(self._composed(write, len))

    # Graphs inside nodes

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
            raise MissingOperatorError(f"Scan {node.name or ''} of {self.group.call} runs backwards or along another axis, "
                                       "which cannot be written with torch yet: cut the module out with `modelexport extract`")  # fmt: skip
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
            self._env.update({value: Expression(name) for value, name in zip(body.inputs, [*carried, *each], strict=True)})
            results = self._body(body, None)
            for name, text in zip(kept, results[len(carried) :], strict=True):
                self._emit(f"{name}.append({text})")
            if carried:
                self._emit(f"{', '.join(carried)} = {', '.join(results[: len(carried)])}")
        for value, name in zip(node.outputs, carried, strict=False):
            self._env[value] = Expression(name)
        self._stack(node.outputs[len(carried) :], kept, body.outputs[len(carried) :])


_SCAN_ORDERS = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")


def _length(written: Any) -> int:
    texts = [each.text for each in written] if isinstance(written, list) else [written.text]
    return max(map(len, texts)) + 8

