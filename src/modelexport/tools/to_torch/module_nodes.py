"""The tree of modules of a file: every path, its class, its entries, and how code reaches one module from another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.core.limits import CALL_DEPTH
from modelexport.core.text import shortened
from modelexport.errors import UsageError
from modelexport.format.documents import StateDictEntry
from modelexport.tagged.encodings.functions_call_groups import Group
from modelexport.tagged.found_calls.operator_classes import MARK
from modelexport.tools.to_torch.call_layout import CallLayout
from modelexport.tools.to_torch.expressions import attribute, code, parsed


@dataclass(eq=False)
class ModuleNode:
    """One module."""

    path: str
    class_name: str = ""
    qualified: str = ""
    """The class with its module, where the sidecar tells it."""
    children: dict[str, ModuleNode] = field(default_factory=dict)
    entries: dict[str, StateDictEntry] = field(default_factory=dict)
    """Its own parameters and buffers by name."""
    calls: list[Group] = field(default_factory=list)
    is_indexed: bool = False
    """Whether its code is an ``nn.Sequential``."""
    alias_of: str | None = None
    """The path of the module that it is."""

    @property
    def is_list(self) -> bool:
        """Whether it is a container whose modules have numbers."""
        names = [*self.children, *self.entries]
        numbered = bool(names) and names == [str(number) for number in range(len(names))]
        return numbered and not self.calls and not (self.children and self.entries)

    @property
    def running(self) -> list[Group]:
        """Its calls that have nodes or calls inside them."""
        return [group for group in self.calls if group.items]

    @property
    def is_from_torch(self) -> bool:
        """Whether its class is one of ``torch.nn``, as far as it is known."""
        return not self.qualified or self.qualified.startswith("torch.nn.")

    def is_like(self, other: ModuleNode) -> bool:
        """Whether another has modules and entries of the same names, classes, types and shapes."""
        return (
            self.class_name == other.class_name
            and {name: (e.dtype, e.shape) for name, e in self.entries.items()}
            == {name: (e.dtype, e.shape) for name, e in other.entries.items()}
            and list(self.children) == list(other.children)
            and all(child.is_like(other.children[name]) for name, child in self.children.items())
        )


class ModuleNodes:
    """The modules of a file by path."""

    def __init__(self, layout: CallLayout) -> None:
        self.by_path: dict[str, ModuleNode] = {"": ModuleNode("")}
        self.elsewhere: dict[str, list[str]] = {}
        """Callers to the paths of the modules that they call and that are not inside them."""
        tagged, entries = layout.tagged, layout.entries
        sidecar = tagged.hierarchy
        aliases: dict[str, str] = {}
        for module in sidecar.modules if sidecar is not None else ():
            node = self._node(module.path)
            node.class_name, node.qualified = module.class_name, module.qualified_class
            aliases.update(dict.fromkeys(module.aliases, module.path))
        for traced in tagged.calls:
            node = self._node(traced.call.path)
            node.class_name = node.class_name or tagged.class_of(traced.call).removesuffix(MARK)
            if traced.call in layout.groups:
                node.calls.append(layout.groups[traced.call])
        for key, entry in entries.shapes.items():
            if key.count(".") > CALL_DEPTH:
                raise UsageError(
                    f"the file has an entry {shortened(key, 60)} of modules nested more than {CALL_DEPTH} deep"
                )
            path, _, name = key.rpartition(".")
            if not any(above in aliases for above in _paths_above(path)):
                self._node(path).entries[name] = entry
        for value, key in entries.values.items():
            for name in entries.names.get(key, (key,)):
                path, _, last = name.rpartition(".")
                if name not in entries.shapes and value.dtype is not None and value.shape is not None:
                    self._node(path).entries[last] = StateDictEntry(
                        value.dtype.numpy().name, list(value.shape.numpy()), True
                    )
        self._aliases: dict[str, list[str]] = {}
        for alias, path in aliases.items():
            self._node(alias).alias_of = path
            self._aliases.setdefault(path, []).append(alias)
        self._sort()

    def _node(self, path: str) -> ModuleNode:
        if path not in self.by_path:
            above, _, name = path.rpartition(".")
            self.by_path[path] = self._node(above).children[name] = ModuleNode(path)
        return self.by_path[path]

    def _sort(self) -> None:
        """Numbered modules by their numbers; others stay in the order in which the file names them."""
        for node in self.by_path.values():
            if all(name.isdigit() for name in node.children):
                node.children = dict(sorted(node.children.items(), key=lambda item: int(item[0])))

    def entries(self) -> Iterator[str]:
        """The names of all entries."""
        for path, node in self.by_path.items():
            yield from (f"{path}.{name}".lstrip(".") for name in node.entries)

    def attribute(self, start: str, path: str, name: str = "") -> ast.expr:
        """The expression for a module, or an entry of it, in the code of a module above it.

        Args:
            start: The path of the module whose code it is.
            name: The name of the entry.
        """
        expression, node = parsed("self"), self.by_path[start]
        rest = path[len(start) :].strip(".")
        for part in rest.split(".") if rest else []:
            expression = _attribute(expression, node, part)
            node = node.children[part] if node.alias_of is None else self.by_path[node.alias_of].children[part]
        return _attribute(expression, node, name) if name else expression

    def module(self, caller: str, call: ModuleCall) -> ast.expr:
        """The expression for the module of a call in the code of its caller. One that is not inside the caller, nor by
        another name, is kept in a list there, which PyTorch does not take for a module of the caller.
        """
        for path in (call.path, *self._aliases.get(call.path, ())):
            if path != caller and (not caller or path.startswith(f"{caller}.")):
                return self.attribute(caller, path)
        others = self.elsewhere.setdefault(caller, [])
        if call.path not in others:
            others.append(call.path)
        return parsed(f"self.{ELSEWHERE}[{others.index(call.path)}]")


ELSEWHERE = "modules_elsewhere"
"""The attribute for modules that a module calls and that are not inside it."""
OF_MODULES = frozenset(dir(nn.Module())) - {"T_destination", "dump_patches"}
"""Names that entries and modules of a module cannot have."""


def _paths_above(path: str) -> Iterator[str]:
    """A path, and those of the modules that it is inside."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _attribute(owner: ast.expr, node: ModuleNode, name: str) -> ast.expr:
    if node.class_name == "ModuleDict" and node.is_from_torch and name in node.children:
        return code("x[name]", x=owner, name=name)
    if (node.is_list or node.is_indexed) and name.isdigit():
        return code("x[name]", x=owner, name=int(name))
    return attribute(owner, name)
