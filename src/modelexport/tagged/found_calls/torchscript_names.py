"""Read the module stack of a node from the names that the TorchScript exporter gives to nodes and values.

A node is named ``/encoder/layer.0/attention/MatMul_1`` and its value ``/encoder/layer.0/attention/MatMul_1_output_0``:
a part for each running module, then the operator. The names do not contain classes, and three ambiguities have to be
resolved. The source of these names is ``torch/csrc/jit/passes/onnx/naming.cpp``, as of torch 2.13.

- A part is only the last name in the module's path with the numbers after it: ``layer.0``, whether ``encoder`` or
  ``encoder.layer`` called it, and ``query`` in any ``ModuleDict``. The names of parameters, which are complete,
  decide; without them, numbers after a part that begins like the part above belong to that part's path.
- The second call of a module that has operations of its own has a number after the last part
  (``/encoder/shared_1/MatMul``), but an attribute may have the name ``shared_1`` as well.
- The names do not contain the numbers of the enclosing calls.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir

from modelexport.core.limits import CALL_DEPTH
from modelexport.core.owners import Evidence
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.tagged.found_calls.recorded_stacks import CallSource, Found, StackEntry

_NUMBERED = re.compile(r"(.+)_(\d+)")
_VALUE = re.compile(r"(/.*)?/[^/]+_output_\d+")

_Parts = tuple[str, ...]
"""The parts of a name that name running modules, from the root down."""


def read_torchscript_names(model: ir.Model) -> dict[ir.Node, Found]:
    """The stacks of the nodes that have such a name, or whose value has one.

    The evidence is ``derived`` if all calls have number 0. If a module was called more than once it is ``inferred``:
    the enclosing calls are numbered as though each had made the same number of calls.
    """
    parts = {node: names for node in all_nodes(model) if (names := _parts(node)) is not None}
    # A node that replaces an initializer of equal value has its name.
    computed = (value.name or "" for node in all_nodes(model) for value in node.outputs)
    named = {value.name or "" for value in initializers(model)}.union(name for name in computed if name[:1] != "/")
    calls = _Calls(set(parts.values()), {name for name in named if name.count(".") <= CALL_DEPTH})
    return {node: calls.found(names) for node, names in parts.items()}


def _parts(node: ir.Node) -> _Parts | None:
    name = node.name or ""
    if name.startswith("/"):
        last = name.rpartition("/")[2]
        # Quantizers name what they make after a node or its value: MatMul_quant, Relu_output_0_QuantizeLinear.
        if re.fullmatch(rf"{re.escape(node.op_type)}(_\d+)?", last) or onnx.defs.has(last.partition("_")[0]):
            return tuple(name.split("/")[1:-1][:CALL_DEPTH])
    for value in node.outputs:
        if match := _VALUE.fullmatch(value.name or ""):
            return tuple((match[1] or "").split("/")[1:][:CALL_DEPTH])
    return None


class _Calls:
    """Finds modules, numbers of calls, and callers from names."""

    def __init__(self, scopes: set[_Parts], names: Iterable[str]) -> None:
        self.scopes = scopes
        # Only the last part of a name is ever numbered, so the parts before it are used unchanged.
        self.certain = {scope[:end] for scope in scopes for end in range(len(scope))}
        self.modules = {name[:dot] for name in names for dot, letter in enumerate(name) if letter == "."}
        self.below: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for module in self.modules:
            for above in ["", *(module[:dot] for dot, letter in enumerate(module) if letter == ".")]:
                self.below[above, _tail(module)].append(module)
        self.paths: dict[_Parts, str] = {(): ""}
        self.repeats: dict[_Parts, int] = {}
        self.resolved = {scope: self._resolve(scope) for scope in scopes}
        self.counts = self._count()
        self.shared = Counter(self._path(module) for module in self.counts)

    def _path(self, parts: _Parts) -> str:
        """The path of the module that was running last."""
        if parts not in self.paths:
            above, part = self._path(parts[:-1]), parts[-1]
            head, _, number = part.rpartition(".")
            numbered = f"{above}.{number}" if number.isdecimal() and head == _tail(above) != "" else None
            plain = f"{above}.{part}" if above else part
            candidates = [path for path in (numbered, plain) if path in self.modules] or self.below.get(
                (above, part), []
            )
            self.paths[parts] = candidates[0] if len(candidates) == 1 and candidates[0] else numbered or plain
        return self.paths[parts]

    def _resolve(self, scope: _Parts) -> tuple[_Parts, int]:
        """The module and the number of its call."""
        match = _NUMBERED.fullmatch(scope[-1]) if scope else None
        if match is None or scope in self.certain or self._path(scope) in self.modules:
            return scope, 0
        base, number = (*scope[:-1], match[1]), int(match[2])
        return (base, number) if 0 < number <= self._repeats(base) else (scope, 0)

    def _repeats(self, base: _Parts) -> int:
        """How many scopes have the name of a module with 1, 2, ... appended; 0 if the module itself has no scope."""
        if base not in self.repeats:
            count = 0
            if base in self.scopes or base in self.certain:
                while (*base[:-1], f"{base[-1]}_{count + 1}") in self.scopes:
                    count += 1
            self.repeats[base] = count
        return self.repeats[base]

    def _count(self) -> Mapping[_Parts, int]:
        """How often each module was called.

        A module with operations of its own has a number for each call; a module without was called as often as the
        greatest common divisor of the counts of the modules below it.
        """
        counts: dict[_Parts, int] = {}
        for module, number in self.resolved.values():
            counts[module] = max(counts.get(module, 0), number + 1)
        below: defaultdict[_Parts, list[int]] = defaultdict(list)
        modules = {module[:end] for module in counts for end in range(len(module) + 1)}
        for module in sorted(modules, key=len, reverse=True):
            if module not in counts:
                counts[module] = math.gcd(*below[module])
            if module:
                below[module[:-1]].append(counts[module])
        return counts | {(): 1}

    def found(self, scope: _Parts) -> Found:
        module, index = self.resolved[scope]
        stack: list[StackEntry] = []
        for end in range(len(module), -1, -1):
            parts = module[:end]
            if end < len(module):
                each, rest = divmod(self.counts[module[: end + 1]], self.counts[parts])
                index = index // each if each and not rest else 0
            path = self._path(parts)
            # A module that was called by several others is numbered by each of them.
            number = index if self.shared[path] == 1 else None
            stack.append(StackEntry(path, index=number, identity=(parts, index)))
        repeated = any(self.counts[module[:end]] > 1 for end in range(1, len(module) + 1))
        evidence = Evidence.INFERRED if repeated else Evidence.DERIVED
        return Found(tuple(reversed(stack)), evidence, CallSource.NODE_NAMES)


def _tail(path: str) -> str:
    """The last name in a path with the numbers after it, or the whole path if it has only numbers."""
    parts = path.split(".")
    start = next((i for i in range(len(parts) - 1, -1, -1) if not parts[i].isdecimal()), 0)
    return ".".join(parts[start:])
