"""The ``forward`` of a module as text: the nodes of one of its calls, and the calls inside it.

A value that is used once is written where it is used, if the line stays short. What is computed from sizes alone is
Python's arithmetic. Branches and loops are Python's ``if`` and ``for``.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.format.documents import CallTensor
from modelexport.format.dtypes import parse_dtype
from modelexport.graph.nodes import nested_graphs
from modelexport.tagged.encodings.functions_call_groups import Group, Item
from modelexport.tools.to_torch.call_layout import CallLayout, is_below
from modelexport.tools.to_torch.expressions import LEFT_OUT, Number, code, identifier, idiomatic, literal, parsed
from modelexport.tools.to_torch.layer_operators import OPERATORS
from modelexport.tools.to_torch.module_nodes import ModuleNodes
from modelexport.tools.to_torch.nested_graphs import MissingOperatorError, NestedGraphs
from modelexport.tools.to_torch.operation import FUNCTIONS, Operation, UnwrittenError
from modelexport.tools.to_torch.tested_classes import RecurrentCall
from modelexport.tools.to_torch.value_scope import with_names_used_again

_OF_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The errors that rows of the table raise for impossible numbers, such as a kernel of size 0 or an axis that is not
there. No row checks them all."""


@dataclass(eq=False)
class Built:
    """A module as code."""

    constructor: str
    """The call that makes it."""
    forwards: dict[ModuleCall, int] = field(default_factory=dict)
    """Which forward each call runs, for a module whose calls compute differently; otherwise 0."""
    recurrent: Mapping[ModuleCall, RecurrentCall] = field(default_factory=dict)
    """How the calls of a recurrent class are written."""
    constants: dict[ir.Value, str] = field(default_factory=dict)
    """The names of the constants that it has."""

    def has_plain_call(self, call: ModuleCall) -> bool:
        """Whether a call runs the only ``forward`` of the module."""
        return not self.forwards.get(call) and not self.recurrent


class ForwardText(NestedGraphs):
    """Writes one call.

    Args:
        build: The code of the module with a path.
    """

    def __init__(self, layout: CallLayout, nodes: ModuleNodes, group: Group, build: Callable[[str], Built]) -> None:
        super().__init__(layout, nodes, group)
        self.build = build
        self.result: ast.expr | None = None
        """The expression that ``forward`` returns, if it is a single one."""
        self._uses: Counter[ir.Value] = Counter()
        inputs = layout.inputs[group.call]
        self.arguments = [self._argument(value) for value in inputs]
        self._count(group.items)
        self._uses.update(layout.outputs[group.call])
        tensors = [
            value
            for value in inputs
            if value not in self.file_numbers.known and isinstance(value.type, ir.TensorType | None)
        ]
        self._size_names = {name: self._fresh(identifier(name.strip("<>"))) for name in layout.sizes[group.call]}
        if tensors:
            self.device = code("x.device", x=self._env[tensors[0]])
        self._items(group.items)
        self._return()

    def _argument(self, value: ir.Value) -> str:
        known = self.layout.arguments.get(self.group.call, {}).get(value.name or "")
        name = self._fresh(identifier(known)) if known and not self.is_root else self._name(value, "x")
        self._bind(value, name)
        return name

    def _count(self, items: Iterable[Item], inner: ir.Graph | None = None) -> None:
        """How often values are used. A use in a nested graph counts double for a value from outside, which so gets a
        name before the graph.
        """
        for item in items:
            self._use(self._taken_by(item) if isinstance(item, Group) else item.inputs, inner)
            for graph in nested_graphs(item) if isinstance(item, ir.Node) else ():
                self._count(self.layout.items[graph], graph)
                self._use(graph.outputs, graph)

    def _taken_by(self, group: Group) -> list[ir.Value]:
        """The inputs of a call, without one that the call returns: from there on, the value is the result."""
        return [value for value in self.layout.inputs[group.call] if value is not self.layout.unchanged.get(group.call)]

    def _use(self, values: Iterable[ir.Value | None], inner: ir.Graph | None) -> None:
        for value in values:
            if value is not None:
                self._uses[value] += 1 if inner is None or value.graph is inner else 2

    def _give(self, value: ir.Value, expression: ast.expr, operator: str) -> None:
        """A value that is computed: written where it is used, or under a name if it is used more than once."""
        if self._uses[value] <= 1:
            self._pending[value] = expression
        else:
            self._assign(value, expression, operator)

    def _items(self, items: Sequence[Item]) -> None:
        groups = [item for item in items if isinstance(item, Group)]
        done = 0
        for item in items:
            if isinstance(item, Group):
                if done < len(groups) and item is groups[done]:
                    run = self._run_of_layers(groups, done)
                    done += len(run)
                    self._loop_over(run) if len(run) > 1 else self._call(item)
            elif item.op_type != "Constant" or item.domain:
                self._node(item)

    def _run_of_layers(self, groups: Sequence[Group], start: int) -> Sequence[Group]:
        """Calls of the modules of a list in order, each of which takes what the one before gives, and else the same."""
        first, layout = groups[start], self.layout
        run = [first]
        base, _, number = first.call.path.rpartition(".")
        if not number.isdigit() or not base or base == self.path or not self.nodes.by_path[base].is_list:
            return run
        for group in islice(groups, start + 1, None):
            before, changed = run[-1].call, _changed(layout, run[-1], group)
            given = layout.outputs[before][0] if layout.outputs[before] else None
            is_next = group.call == ModuleCall(f"{base}.{int(number) + len(run)}") and self.build(
                group.call.path
            ).has_plain_call(group.call)
            if not is_next or changed is None or given is None or self._uses[given] > 1:
                break
            run.append(group)
        same = len({self.build(group.call.path).constructor for group in run}) == 1
        return run if same and is_below(base, self.path) else [first]

    def _loop_over(self, run: Sequence[Group]) -> None:
        """``for layer in self.layers: x = layer(x, mask)``"""
        first, last = run[0].call, run[-1].call
        base, _, number = first.path.rpartition(".")
        place = _changed(self.layout, run[-2], run[-1])
        assert place is not None
        value, end, result = self.layout.inputs[first][place], int(number) + len(run), self.layout.outputs[last][0]
        modules = ast.unparse(self.nodes.attribute(self.path, base))
        if number != "0" or end < len(self.nodes.by_path[base].children):
            modules += f"[{number if number != '0' else ''}:{end}]"
        start = self._argument_of(value)
        if value in self._pending or self._uses[value] > 1 or not isinstance(start, ast.Name):
            self._pending.pop(value, None)
            name = self._name(result, "x")
            self._emit(f"{name} = {ast.unparse(start)}")
        else:
            name = start.id
        given = [parsed(name) if p == place else self._argument_of(v) for p, v in enumerate(self.layout.inputs[first])]
        layer = self._fresh("layer")
        self._emit(f"for {layer} in {modules}:")
        self._emit(f"    {name} = {ast.unparse(code('layer(*given)', layer=parsed(layer), given=given))}")
        self._env[result] = parsed(name)

    def _call(self, group: Group) -> None:
        outputs, module = self.layout.outputs[group.call], self.nodes.module(self.path, group.call)
        built = self.build(group.call.path)
        number, recurrent = built.forwards.get(group.call, 0), built.recurrent.get(group.call)
        extra = {"call": number} if number else {}

        def write() -> ast.expr:
            given = [self._argument_of(value) for value in self.layout.inputs[group.call]]
            given = recurrent.arguments(given) if recurrent is not None else given
            if not given and group.call in self.layout.got and built.constructor.startswith("nn."):
                given = [self._zeros(self.layout.got[group.call])]
            return code("module(*given, **extra)", module=module, given=given, extra=extra)

        self._operator = "x"
        written = write() if self.layout.inputs[group.call] == outputs else self._composed(write)
        name = group.call.path.rpartition(".")[2]
        if group.call in self.layout.unchanged:
            value = outputs[0]
            known = self._env.pop(value, None)
            if known is not None and self._uses[value] > 1:
                self._emit(f"{ast.unparse(known)} = {ast.unparse(written)}")
                self._env[value] = known
            else:
                self._pending[value] = written
        elif recurrent is not None and len(outputs) > 1:
            named = {slot: self._name(value, name) for slot, value in zip(recurrent.slots, outputs, strict=True)}
            self._emit(f"{recurrent.results(named)} = {ast.unparse(written)}")
            for slot, value in zip(recurrent.slots, outputs, strict=True):
                self._env[value] = parsed(named[slot])
        elif len(outputs) == 1:
            written = recurrent.result(written, recurrent.slots[0]) if recurrent is not None else written
            if outputs[0] in self.file_numbers.known:
                self._assign(outputs[0], written, "x")
            else:
                self._give(outputs[0], written, name if not name.isdigit() else "x")
        elif outputs:
            self._unpack(outputs, written, name)
        else:
            self._emit(ast.unparse(written))

    def _zeros(self, tensor: CallTensor) -> ast.expr:
        """Zeros for an argument that the file does not have, because no result depends on it."""
        dtype, floating = parse_dtype(tensor.dtype), None
        sizes = tuple(parsed(self._size_names.get(f"<{n}>", "1")) if isinstance(n, str) else n for n in tensor.shape)
        for value, name in zip(self.layout.inputs[self.group.call], self.arguments, strict=True):
            if value.dtype is not None and value.dtype.is_floating_point():
                floating = floating or parsed(name)
        if floating is not None and dtype.is_floating_point():
            return code("x.new_zeros(sizes)", x=floating, sizes=sizes)
        kind = LEFT_OUT if self.type_name(dtype) == "float32" else parsed(f"torch.{self.type_name(dtype)}")
        return code("torch.zeros(sizes, dtype=kind, device=device)", sizes=sizes, kind=kind, device=self.device)

    def _argument_of(self, value: ir.Value) -> ast.expr:
        numbers = self.numbers(value) if value in self.file_numbers.known else None  # a called module knows no others
        if numbers is None:
            return self.tensor(value)
        return literal(tuple(numbers) if numbers.ndim else numbers.item())

    def _unpack(self, values: Sequence[ir.Value], written: ast.expr, operator: str, *, more: bool = False) -> None:
        """Names for the elements of a tuple, which may have more than values for them."""
        is_used = [bool(self._uses[value]) or value.is_graph_output() for value in values]
        last = max((place for place, used in enumerate(is_used) if used), default=-1)
        if is_used.count(True) == 1:
            self._give(values[last], code("x[place]", x=written, place=last), operator)
            return
        names = [self._name(value, operator) if used else "_" for value, used in zip(values, is_used, strict=True)]
        names = [*names[: last + 1], "*_"] if more else names
        self._emit(f"{', '.join(names)} = {ast.unparse(written)}")
        for value, name, used in zip(values, names, is_used, strict=False):
            if used:
                self._bind(value, name)

    def _node(self, node: ir.Node) -> None:
        walks = {"If": self._if, "Loop": self._loop, "Scan": self._scan}
        if node.op_type in walks and not node.domain:
            try:
                walks[node.op_type](node)
            except (LookupError, ValueError) as error:
                name = f"{node.op_type} {node.name or ''}".strip()
                raise UsageError(f"the inputs and outputs of {name} are not those of its graphs: {error!r}") from error
        elif node.outputs[0] in self.file_numbers.known:
            self._number_node(node)
        else:
            self._operator = node.op_type
            self._write(node, self._composed(lambda: self._expression(node)))

    def _expression(self, node: ir.Node) -> ast.expr:
        """A node as an expression.

        Raises:
            MissingOperatorError: The table does not have its operator, or not with these attributes.
        """
        row = OPERATORS.get((node.domain if node.domain != "ai.onnx" else "", node.op_type))
        version = self.layout.tagged.model.opset_imports.get(node.domain, 1)
        operation = Operation(node, node.version or version, self)
        try:
            if row is None:
                raise UnwrittenError("the operator is not known")
            written = operation.write(row) if isinstance(row, str) else row(operation)
            operation.check_attributes()
        except (UnwrittenError, *_OF_DAMAGE) as error:
            domain = f"{node.domain}." if node.domain else ""
            reason = error if isinstance(error, UnwrittenError) else f"its inputs or attributes do not fit: {error!r}"
            raise MissingOperatorError(
                f"{domain}{node.op_type} {node.name or ''} of {self.group.call} cannot be written in PyTorch "
                f"({reason}): replace the module with `modelexport replace`, or convert the modules beside it, each "
                "cut out with `modelexport extract`"
            ) from error
        return idiomatic(written)

    def _write(self, node: ir.Node, written: ast.expr) -> None:
        function = written.func if isinstance(written, ast.Call) else None
        name = getattr(function, "id", "")
        gives_tuple = name in FUNCTIONS and FUNCTIONS[name].__annotations__["return"].startswith("tuple")
        if gives_tuple or getattr(function, "attr", "") in ("split", "chunk"):
            self._unpack(node.outputs, written, node.op_type, more=gives_tuple)
            return
        results = written.elts if isinstance(written, ast.Tuple) else [written]
        for value, result in zip(node.outputs, results, strict=False):
            if value.name and self._uses[value]:
                self._give(value, result, node.op_type)

    def _number_node(self, node: ir.Node) -> None:
        value, known = node.outputs[0], self.file_numbers.known
        numbers = self.numbers(value)
        if numbers is None:
            numbers = self.file_numbers.of_node(node, self.numbers, self.size)
        elif not value.is_graph_output() and all(use.node.outputs[0] in known for use in value.uses()):
            return  # what is computed of it is an expression of the sizes as well, and needs no name for it
        assert numbers is not None
        short = numbers.copy()
        for place, number in np.ndenumerate(numbers):
            if isinstance(number, Number) and len(ast.unparse(number.code)) > 30:
                name = self._fresh("size")
                self._emit(f"{name} = {ast.unparse(number.code)}")
                short[place] = Number(parsed(name), number.is_positive)
        self._numbers[value] = short

    def _return(self) -> None:
        outputs = self.layout.outputs[self.group.call]
        if not outputs:
            self._write_unused()
            self.lines = [*self._size_lines(), *self.lines] or ["pass"]
            return

        def write() -> ast.expr:
            if self.is_root and self.layout.results == "dict":
                return ast.Dict([literal(value.name) for value in outputs], [self.tensor(value) for value in outputs])
            results = [self.tensor(value) if self.is_root else self._argument_of(value) for value in outputs]
            return results[0] if len(results) == 1 else ast.Tuple(results, ast.Load())

        self._operator = "result"
        written = self._composed(write)
        self._write_unused()
        shown = ast.unparse(written)
        is_tuple = isinstance(written, ast.Tuple) and len(outputs) > 1
        self._emit(f"return {shown[1:-1] if is_tuple else shown}")
        self.result = written if len(self.lines) == 1 else None
        self.lines = with_names_used_again(self.arguments, [*self._size_lines(), *self.lines])

    def _write_unused(self) -> None:
        """Calls that return what they get, and whose result nothing uses in the end."""
        for item in self.group.items:
            value = self.layout.unchanged.get(item.call) if isinstance(item, Group) else None
            if value in self._pending:
                self._emit(ast.unparse(self._pending.pop(value)))

    def _size_lines(self) -> list[str]:
        """``batch, length = input_ids.shape``, for the sizes that the code uses."""
        arguments = dict(zip(self.layout.inputs[self.group.call], self.arguments, strict=True))
        words = {word for line in self.lines for word in re.findall(r"\w+", line)}
        used: dict[ir.Value, dict[int, str]] = {}
        for name, (value, axis) in self.layout.sizes[self.group.call].items():
            if self._size_names[name] in words:
                used.setdefault(value, {})[axis] = self._size_names[name]
        lines = []
        for value, names in used.items():
            shape, last = f"{arguments[value]}.shape", max(names)
            if last == 0 or len(names) == 1:
                lines.append(f"{names[last]} = {shape}[{last}]")
            else:
                cut = "" if value.shape is not None and last == len(value.shape) - 1 else f"[:{last + 1}]"
                lines.append(f"{', '.join(names.get(axis, '_') for axis in range(last + 1))} = {shape}{cut}")
        return lines


def _changed(layout: CallLayout, before: Group, after: Group) -> int | None:
    """The only input that differs between two calls, if it is what the first returns."""
    first, second, given = layout.inputs[before.call], layout.inputs[after.call], layout.outputs[before.call]
    if len(first) != len(second) or len(given) != 1:
        return None
    changed = [place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] is not pair[1]]
    return changed[0] if len(changed) == 1 and second[changed[0]] is given[0] else None
