"""The values of a captured program that are computed from the entries of its ``state_dict`` alone."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg

_KEPT = 1 << 16
"""Elements of the largest value that is kept once it was computed."""


class ProgramState:
    """The ``state_dict`` entries of a program, and values that are computed from them alone."""

    def __init__(self, program: ExportedProgram) -> None:
        signature, constants = program.graph_signature, program.constants
        self._keys = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self._entries: dict[str, Any] = {
            name: program.state_dict[key] if key in program.state_dict else constants.get(key)
            for name, key in {**self._keys, **signature.inputs_to_lifted_tensor_constants}.items()
        }
        self._module = program.graph_module
        self._has: dict[torch.fx.Node, bool] = {}
        self._values: dict[torch.fx.Node, Any] = {}

    def has(self, value: Any) -> bool:
        """Whether a value is a number, or computed from entries with values."""
        if not isinstance(value, torch.fx.Node):
            return True
        if value not in self._has:
            entry = self._entries.get(value.name) if value.op == "placeholder" else None
            computed = value.op == "call_function" and bool(value.all_input_nodes)
            self._has[value] = (
                value.op == "get_attr"
                or (entry is not None and not entry.is_meta)
                or (computed and all(map(self.has, value.all_input_nodes)))
            )
        return self._has[value]

    def value(self, of: Any) -> Any:
        """Compute a value for which :meth:`has` is true."""
        if not isinstance(of, torch.fx.Node):
            return of
        if of.op == "placeholder":
            return self._entries[of.name]
        if of.op == "get_attr":
            return operator.attrgetter(str(of.target))(self._module)
        if of in self._values:
            return self._values[of]
        args, kwargs = map_arg((of.args, of.kwargs), self.value)
        with torch.no_grad():
            result: Any = of.target(*args, **kwargs)  # type: ignore[operator]  # a function here
        if not isinstance(result, torch.Tensor) or result.numel() <= _KEPT:
            self._values[of] = result
        return result

    def numbers(self, of: Any) -> torch.Tensor:
        """Compute such a value as a tensor of float64."""
        return torch.as_tensor(self.value(of)).double()

    def equal(self, first: Any, second: Any) -> bool:
        """Whether two values are equal after they are broadcast to one shape."""
        numbers = [self.numbers(each) for each in (first, second)]
        try:
            return first is second or torch.equal(*torch.broadcast_tensors(*numbers))
        except RuntimeError:  # their shapes do not go together
            return False

    def home(self, entry: torch.fx.Node) -> str:
        """The path of the module that an entry is of."""
        return str(self._keys.get(entry.name, "")).rpartition(".")[0]

    def beside(self, entry: torch.fx.Node) -> list[torch.Tensor]:
        """The entries of the module that an entry is of, and of those inside it."""
        home = self.home(entry)
        return [self._entries[name] for name, key in self._keys.items() if home and key.startswith(f"{home}.")]


def behind(node: torch.fx.Node) -> set[torch.fx.Node]:
    """A node and all nodes that it is computed from, directly or not."""
    pending, seen = [node], {node}
    while pending:
        new = set(pending.pop().all_input_nodes) - seen
        seen |= new
        pending += new
    return seen
