"""The values that the code of one call has: their names, their texts, and the lines written so far."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isfunction
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.tagged.encodings.functions_call_groups import Group
from modelexport.torch_source import functions_of_layers, functions_of_quantized, functions_of_tensors
from modelexport.torch_source.call_layout import CallLayout
from modelexport.torch_source.expressions import Expression, Number, Numbers, identifier, type_name
from modelexport.torch_source.module_nodes import ModuleNodes
from modelexport.torch_source.size_numbers import FileNumbers

HELPER_NAMES = frozenset(
    name
    for file in (functions_of_layers, functions_of_quantized, functions_of_tensors)
    for name, function in vars(file).items()
    if isfunction(function)
)
"""The names of the functions that a generated file may have, which no value gets."""
WIDTH = 100
"""How long a line of a body may be before its operands get names."""
_FEW = 8
_BODY = 8
"""The columns that a line of a method is indented by."""


class ValueScope:
    """The values of one call. It is what the table of operators asks for operands.

    Args:
        plain: Give values the names ``v0``, ``v1``, ..., with which equal calls are equal texts.
        wide: The floating-point type that is float64 instead.
        constant_name: The attribute under which the module has a constant.
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
    ) -> None:
        self.layout, self.nodes, self.file_numbers, self.group = layout, nodes, numbers, group
        self.plain, self.wide, self.constant_name = plain, wide, constant_name
        self.helpers: set[Callable[..., Any]] = set()
        self.device = ""
        self.path = group.call.path
        self.is_root = group is layout.root
        self.lines: list[str] = []
        self._indent = 0
        self._operator = "value"
        self._names = set(HELPER_NAMES)
        self._env: dict[ir.Value, Expression] = {}
        self._pending: dict[ir.Value, Expression] = {}
        """Values that are used once, and whose text has not been written yet."""
        self._numbers: dict[ir.Value, Numbers] = {}
        self._taken: Counter[ir.Value] = Counter()
        """How often the text that is being composed has each value."""

    # Names

    def _fresh(self, base: str) -> str:
        base = "v" if self.plain else base
        name, number = (f"{base}0", 0) if self.plain else (base, 0)
        while name in self._names:
            number += 1
            name = f"{base}{number}" if self.plain else f"{base}_{number}"
        self._names.add(name)
        return name

    def _name(self, value: ir.Value, operator: str = "value", text: str = "") -> str:
        """A name that resembles the value's in the file, without the number that exporters put behind equal names."""
        name = (value.name or "").rpartition("/")[2].rpartition(".")[2]
        base = re.sub(r"(_?\d+)+$", "", name) or name
        called = re.match(r"self\.([a-z]\w*)\(", text)
        if called is not None and value not in self.layout.graph.outputs:
            base = called[1]  # what follows a module's call is named after the module
        elif value in self.layout.graph.outputs or value in self.layout.graph.inputs:
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
        self.lines.append("    " * self._indent + text)

    @contextmanager
    def _indented(self) -> Iterator[None]:
        self._indent += 1
        yield
        self._indent -= 1

    def _name_pending(self, value: ir.Value, operator: str = "value") -> None:
        expression = self._pending.pop(value)
        name = self._name(value, operator, expression.text)
        self._emit(f"{name} = {expression.text}")
        self._env[value] = Expression(name)

    def _composed(self, write: Callable[[], Any], length: Callable[[Any], int]) -> Any:
        """What a writer gives; operands that make it too long, or are used twice in it, get names first."""
        while True:
            self._taken.clear()
            written = write()
            pending = [value for value in self._taken if value in self._pending]
            twice = [value for value in pending if self._taken[value] > 1 and len(self._pending[value].text) > 12]
            too_long = length(written) > WIDTH - _BODY - 4 * self._indent
            if not twice and not (too_long and pending):
                break
            longest = sorted(twice or pending, key=lambda value: -len(self._pending[value].text))
            for value in longest[: max(1, len(longest) - _FEW)]:  # one by one, many would take quadratic time
                self._name_pending(value, self._operator)
        for value in pending:
            del self._pending[value]
        return written
