"""The types of a module tree: what is known of every module of a model, called or not. Does not know torch.

``pytorch/calls/module_tree_of_model.py`` makes the tree of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the module tree, whether it is ever called or not."""

    path: str
    """Its first key in ``named_modules()``; the root's is the empty string."""
    class_name: str
    class_module: str
    """Where its class is defined: ``torch.nn.modules.linear``."""
    parent: str | None
    """The path of its parent module; ``None`` for the root."""
    name: str
    """Its name in its parent: ``0`` for ``encoder.layer.0``."""
    depth: int
    children: tuple[str, ...] = ()
    """Canonical paths of its children, in order of registration; a shared module's may be outside this module."""
    aliases: tuple[str, ...] = ()
    """The other paths that ``named_modules(remove_duplicate=False)`` gives for it."""
    parameters: int = 0
    """Elements of its own and its descendants' parameters, each tensor counted once."""
    trainable: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Its own parameters and buffers (not its descendants'): name to shape."""
    line: int = 0
    """The line of its class in its Python module; 0 if it is not known."""

    @property
    def qualified_class(self) -> str:
        return f"{self.class_module}.{self.class_name}"

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def is_torch_nn(self) -> bool:
        """Whether its class is defined under ``torch.nn``; no other fact about a class changes an export."""
        return self.class_module == "torch.nn" or self.class_module.startswith("torch.nn.")


@dataclass(frozen=True)
class ModuleTree:
    """Every module of a model, in the order of ``named_modules()``: the root first, parents before children."""

    modules: Mapping[str, Module]

    def __getitem__(self, path: str) -> Module:
        return self.modules[path]

    def __contains__(self, path: object) -> bool:
        return path in self.modules

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())

    def __len__(self) -> int:
        return len(self.modules)

    @property
    def root(self) -> Module:
        return self.modules[""]
