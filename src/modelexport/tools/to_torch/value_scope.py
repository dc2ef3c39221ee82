"""The values that the code of one call has: their names, their expressions, and the lines written so far."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.graph.unique_names import free_name
from modelexport.tagged.encodings.functions_call_groups import Group
from modelexport.tools.to_torch.attention_pattern import OPERATOR
from modelexport.tools.to_torch.call_layout import CallLayout
from modelexport.tools.to_torch.expressions import LEFT_OUT, Number, code, identifier, literal, parsed, replaced_names
from modelexport.tools.to_torch.module_nodes import OF_MODULES, ModuleNodes
from modelexport.tools.to_torch.operation import FUNCTIONS
from modelexport.tools.to_torch.size_numbers import Numbers, size_of

WIDTH = 88
"""How long an expression may be before its operands get names; every name counts as six characters."""
_PENDING = 8
_NAMES = re.compile(r"\b[a-z_]\w*\b(?!\()")


class ValueScope:
    """The values of one call. It is what the table of operators asks for operands."""

    def __init__(self, layout: CallLayout, nodes: ModuleNodes, group: Group) -> None:
        self.layout, self.nodes, self.file_numbers, self.group = layout, nodes, layout.numbers, group
        self.helpers: set[str] = set()
        self.constants: dict[ir.Value, str] = {}
        """The attributes under which the module has its constants."""
        self.device: Any = LEFT_OUT
        self.path = group.call.path
        self.is_root = group is layout.root
        self.lines: list[str] = []
        self._indent = 0
        self._operator = "value"
        module = nodes.by_path[self.path]
        self._attributes = {*module.children, *module.entries, *OF_MODULES}
        self._names = set(FUNCTIONS)
        self._env: dict[ir.Value, ast.expr] = {}
        self._pending: dict[ir.Value, ast.expr] = {}
        """Values that are used once, and whose expression has not been written yet."""
        self._numbers: dict[ir.Value, Numbers] = {}
        self._size_names: dict[str, str] = {}
        """The names of sizes of inputs to those in the code."""
        self._taken: Counter[ir.Value] = Counter()
        """How often the expression that is being composed has each value."""

    # Names

    def _fresh(self, base: str) -> str:
        return free_name(base, self._names, first=1)

    def _name(self, value: ir.Value, operator: str = "value", expression: ast.expr | None = None) -> str:
        """A name that resembles the value's in the file, without the number that exporters put behind equal names."""
        name = (value.name or "").rpartition("/")[2].rpartition(".")[2]
        base = re.sub(r"(_?\d+)+$", "", name) or name
        called = expression
        while (
            isinstance(called, ast.Call)
            and isinstance(called.func, ast.Attribute)
            and isinstance(called.func.value, ast.Call)
        ):
            called = called.func.value  # what a module's result is reshaped to is named after the module
        module = called.func if isinstance(called, ast.Call) else None
        if value in self.layout.boundary:
            base = value.name or ""
        elif isinstance(module, ast.Attribute) and ast.unparse(module.value) == "self":
            base = module.attr
        elif isinstance(module, ast.Attribute) and module.attr == OPERATOR:
            base = "attn_output"
        elif (known := self._name_of_argument(value)) is not None:
            base = known
        elif base in ("val", "v", "value", "") or not base.isascii():
            base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", operator).lower()
        return self._fresh(identifier(base))

    def _name_of_argument(self, value: ir.Value) -> str | None:
        """The name with which the first call, or attention, that takes a value has it as an argument."""
        depth = len(self.layout.around[self.group.call])
        for use in value.uses():
            if use.node.op_type == OPERATOR:
                return ("query", "key", "value", "mask")[use.idx]
            chain = self.layout.chain.get(use.node, ())
            name = self.layout.arguments.get(chain[depth], {}).get(value.name or "") if len(chain) > depth else None
            if name and name != "input" and not name.startswith("args"):
                return name
        return None

    def _bind(self, value: ir.Value, name: str) -> None:
        """A value has a name from here on; one that is computed from sizes is Python's number, or a tuple of them."""
        self._env[value] = parsed(name)
        known = self.file_numbers.known.get(value)
        if known is not None:
            named = np.array(known)
            for place, number in np.ndenumerate(known):
                expression = code("x[place]", x=parsed(name), place=place[0]) if place else parsed(name)
                named[place] = Number(expression, isinstance(number, Number) and number.is_positive)
            self._numbers[value] = named

    # Operands: what the table of operators asks

    def tensor(self, value: ir.Value) -> ast.expr:
        """A value as an expression."""
        if value.dtype == ir.DataType.STRING:
            raise UsageError(
                f"{value.name} is a tensor of texts, which PyTorch does not have: cut out the nodes before it with "
                "`modelexport extract`"
            )
        self._taken[value] += 1
        numbers = self.numbers(value)
        if numbers is not None:
            dtype = value.dtype or ir.DataType.INT64
            kind = LEFT_OUT if dtype == ir.DataType.INT64 else parsed(f"torch.{self.type_name(dtype)}")
            shown = literal(numbers.tolist())
            return code("torch.tensor(x, dtype=kind, device=device)", x=shown, kind=kind, device=self.device)
        found = self._env.get(value) or self._pending.get(value)
        if found is not None:
            return found
        if value in self.layout.entries.values:
            return self._entry(self.layout.entries.values[value])
        if value in self.layout.constants:
            return self._constant(value)
        raise UsageError(f"the file uses {value.name}, which nothing computes: export it again")

    def numbers(self, value: ir.Value) -> Numbers | None:
        """A value that is computed from sizes, as Python numbers."""
        if value not in self._numbers and self.layout.has_sizes_of(value, self.group.call):
            self._numbers[value] = np.array(self.file_numbers.known[value])
            for place, number in np.ndenumerate(self._numbers[value]):
                if isinstance(number, Number):
                    named = replaced_names(number.code, self._size_names)
                    self._numbers[value][place] = Number(named, number.is_positive)
        return self._numbers.get(value)

    def size(self, value: ir.Value, axis: int) -> Any:
        """A size of a tensor: a number, the name of one that an input has, or read from the tensor."""
        size = size_of(value, axis)
        if not isinstance(size, Number):
            return size
        if (known := self._size_names.get(ast.unparse(size.code))) is not None:
            return Number(parsed(known), True)
        if value in self._pending:
            self._name_pending(value)
        return Number(code("x.shape[axis]", x=self.tensor(value), axis=axis), True)

    def constant(self, value: ir.Value) -> Any:
        """A small constant as an array, unless the call gets it from its caller."""
        return None if (value, self.group.call) in self.layout.entries.given else self.layout.array(value)

    def type_name(self, dtype: ir.DataType) -> str:
        """PyTorch's name of an element type."""
        return self.layout.type_name(dtype)

    def is_exact(self) -> bool:
        """Whether numbers stand in the code as the file has them, and not as short as a person writes them."""
        return self.layout.is_wide

    def _entry(self, key: str) -> ast.expr:
        names = self.layout.entries.names.get(key, (key,))
        name = next(name for name in names if not self.path or name.startswith(f"{self.path}."))
        path, _, last = name.rpartition(".")
        return self.nodes.attribute(self.path, path, last)

    def _constant(self, value: ir.Value) -> ast.expr:
        home = self.layout.homes.get(value, self.path)
        if value not in self.constants:
            name = re.sub(r"(_?\d+)+$", "", (value.name or "").rpartition(".")[2])
            base = "constant" if name in ("val", "") or not name.isascii() else identifier(name, "constant")
            self.constants[value] = free_name(base, self._attributes, first=1)
        return self.nodes.attribute(self.path, home, self.constants[value])

    # Statements

    def _emit(self, text: str) -> None:
        self.lines.append("    " * self._indent + text)

    @contextmanager
    def _indented(self) -> Iterator[None]:
        self._indent += 1
        yield
        self._indent -= 1

    def _assign(self, value: ir.Value, expression: ast.expr, operator: str = "value") -> None:
        name = self._name(value, operator, expression)
        self._emit(f"{name} = {ast.unparse(expression)}")
        self._bind(value, name)

    def _name_pending(self, value: ir.Value, operator: str = "value") -> None:
        self._assign(value, self._pending.pop(value), operator)

    def _composed(self, write: Callable[[], ast.expr]) -> ast.expr:
        """What a writer gives; operands that make it too long, or are used twice in it, get names first."""
        while True:
            self._taken.clear()
            written = write()
            pending = {value: length(self._pending[value]) for value in self._taken if value in self._pending}
            twice = [value for value in pending if self._taken[value] > 1 and pending[value] > 16]
            is_operand = any(written is self._pending[value] for value in pending)
            too_long = bool(pending) and not is_operand and length(written) > WIDTH - 4 * self._indent
            if not twice and not too_long:
                break
            longest = sorted(twice or pending, key=lambda value: -pending[value])
            for value in longest[: max(1, len(longest) - _PENDING)]:  # one by one, many would take quadratic time
                self._name_pending(value, self._operator)
        for value in pending:
            del self._pending[value]
        return written


def with_names_used_again(arguments: Sequence[str], lines: Sequence[str]) -> list[str]:
    """The lines of a function where ``add_1`` is ``add``, if nothing uses the other ``add`` from there on."""
    body = "\n".join(f"    {line}" for line in lines)
    function: Any = ast.parse(f"def forward({', '.join(arguments)}):\n{body}").body[0]
    used = [[node for node in ast.walk(each) if isinstance(node, ast.Name)] for each in function.body]
    places: dict[str, list[tuple[int, ast.Name]]] = {}
    for place, node in ((place, node) for place, nodes in enumerate(used) for node in nodes):
        places.setdefault(node.id, []).append((place, node))
    stored, read = set(arguments), set[str]()  # so far
    for place, statement in enumerate(function.body):
        for node in used[place]:
            (stored if isinstance(node.ctx, ast.Store) else read).add(node.id)
        target: Any = statement.targets[0] if isinstance(statement, ast.Assign) else None
        name = target.id if isinstance(target, ast.Name) else ""
        base = re.sub(r"_\d+$", "", name)
        base = base if identifier(base) == base else name  # class_1 cannot be class
        is_free = base in stored or base not in read
        if base != name and is_free and places.get(base, [(-1, target)])[-1][0] <= place:
            later = [(at, node) for at, node in places.pop(name) if at > place]
            for _, node in [(place, target), *later]:
                node.id = base
            places[base] = later or [(place, target)]
            stored.add(base)
    return ast.unparse(function.body).splitlines() if lines else []


def length(expression: ast.expr) -> int:
    """How long an expression is, in characters; equal code has equal length, whatever its names."""
    return len(_NAMES.sub("sixsix", ast.unparse(expression)))
