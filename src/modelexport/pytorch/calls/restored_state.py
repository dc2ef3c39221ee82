"""Saving and restoring a model's state: only what changed, compared by identity, without calling user methods.

A module's attributes are inspected one by one, with their contents: lists, dictionaries, sets, deques and objects with
attributes, subclasses included. Entries that are still the same objects are not written, so a container that refuses
writes (a frozen dictionary) is only read. Changed entries are restored with the methods of the built-in type, even if
a subclass overrides them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelexport.pytorch.private_torch import FakeTensor

_DEPTH = 6
"""The depth to which containers and objects inside a module's attributes are followed."""

_LONGEST_CONTAINER = 100_000
"""Entries of the largest container that is saved: a longer one is a table, not state."""

_FOLLOWED = (nn.Module, dict, list, set, deque, tuple)
_NOT_FOLLOWED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.Tensor,
    torch.Generator,
    torch.dtype,
    torch.device,
)


class KeptState:
    """The state of a model at the time of construction, which can be restored any number of times.

    Attributes:
        tensors: Every parameter, buffer and other tensor of the modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: set[int] = set()
        self._modules = [(module, type(module), module.training) for module in model.modules()]
        self._dictionaries: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self.tensors: dict[torch.Tensor, None] = dict.fromkeys([*model.parameters(), *model.buffers()])
        for module in model.modules():
            self._remember(module, 0)
        self._caches: list[tuple[Any, int]] = []
        for space in {id(space): space for module in model.modules() for space in _namespaces(module)}.values():
            self._remember_namespace(space)
        self._data = [
            (tensor, tensor.data, tensor.requires_grad)
            for tensor in self.tensors
            if not is_lazy(tensor) and not isinstance(tensor, FakeTensor)
        ]

    def restore(self) -> None:
        """Restore everything that changed. If one item cannot be restored, the others still are."""
        for module, kind, _ in self._modules:
            if type(module) is not kind:
                with contextlib.suppress(TypeError):
                    module.__class__ = kind
        for dictionary, entries in self._dictionaries:
            if (entries or dict.__len__(dictionary)) and not _has_entries(dictionary, entries):
                with contextlib.suppress(Exception):  # a user's container may refuse even this
                    _restore_mapping(dictionary, entries)
        for module, _, training in self._modules:
            if module.training != training:  # not a Python attribute of a ScriptModule
                module.training = training
        for container, before in self._containers:
            with contextlib.suppress(Exception):  # so may its methods
                _restore_container(container, before)
        for place, (cached, misses) in enumerate(self._caches):
            if cached.cache_info().misses != misses:  # its results may have the types of a run that was not the user's
                cached.cache_clear()
                self._caches[place] = cached, 0
        for tensor, data, requires_grad in self._data:
            if not _same_memory(tensor, data):
                tensor.data = data
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)

    def _remember_namespace(self, namespace: Mapping[str, Any]) -> None:
        """Remember what functions of a module or a class keep: containers, and results of ``functools.cache``."""
        for value in list(namespace.values()):
            function = getattr(value, "__func__", value) if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, functools._lru_cache_wrapper):
                self._caches.append((function, function.cache_info().misses))
            elif type(value) in (dict, list, set, deque):
                self._remember(value, 1)

    def _remember(self, value: object, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(value)
            return
        if id(value) in self._seen or depth > _DEPTH:
            return
        # In this order: torch's classes take a hundred times as long to ask as the built-in ones.
        if not isinstance(value, _FOLLOWED) and isinstance(value, _NOT_FOLLOWED):
            return
        if isinstance(value, nn.Module) and depth:
            return  # handled separately, or not a part of the model
        inside: list[Any] = []
        if isinstance(value, (dict, list, set, deque)):
            if len(value) > _LONGEST_CONTAINER:
                return
            self._seen.add(id(value))
            if isinstance(value, dict):
                self._keep_dictionary(value, inside)
            else:
                self._containers.append((value, list(_builtin_iter(value))))
                inside += self._containers[-1][1]
        elif isinstance(value, tuple):
            inside += value if len(value) <= _LONGEST_CONTAINER else ()
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._seen.add(id(value))
            self._keep_dictionary(attributes, inside)
        for part in inside:
            if type(part) not in _LEAVES:
                self._remember(part, depth + 1)

    def _keep_dictionary(self, dictionary: dict[Any, Any], inside: list[Any]) -> None:
        entries = dict(dict.items(dictionary)) if dict.__len__(dictionary) else _EMPTY
        self._dictionaries.append((dictionary, entries))
        inside += entries.values()


def _namespaces(module: nn.Module) -> Iterator[Mapping[str, Any]]:
    """The attributes of the classes of a module, and of the Python modules that define them, but for PyTorch's own."""
    for kind in type(module).__mro__:
        if kind is not object and not kind.__module__.startswith("torch."):
            yield kind.__dict__
            yield vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}


_EMPTY: dict[Any, Any] = {}
"""The entries of every dictionary without any: a module has a dozen of these, for its hooks."""

_LEAVES = frozenset((str, bytes, int, float, complex, bool, type(None)))


def _builtin_iter(value: Any) -> Iterator[Any]:
    """Iterate over a list, set or deque with the method of the built-in type."""
    kinds: tuple[Any, ...] = (list, set, deque)
    for kind in kinds:
        if isinstance(value, kind):
            yield from kind.__iter__(value)


def _restore_container(container: Any, before: Any) -> None:
    now = list(_builtin_iter(container))
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    kind: Any = next(kind for kind in (list, set, deque) if isinstance(container, kind))
    kind.clear(container)
    (set.update if kind is set else kind.extend)(container, before)


def _has_entries(dictionary: dict[Any, Any], entries: Mapping[Any, Any]) -> bool:
    """Whether the keys and values of a dictionary are these very objects, in this order."""
    return (
        dict.__len__(dictionary) == len(entries)
        and all(map(operator.is_, dict.keys(dictionary), entries))
        and all(map(operator.is_, dict.values(dictionary), entries.values()))
    )


def _restore_mapping(entries: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Restore the entries of a dictionary, in their order."""
    kind = OrderedDict if isinstance(entries, OrderedDict) else dict
    kind.clear(entries)
    for key, value in before.items():
        kind.__setitem__(entries, key, value)


def _same_memory(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether a tensor still uses the same memory."""
    if isinstance(tensor, FakeTensor) or type(tensor.data) is not type(data):
        return False
    facts = [
        (each_tensor.dtype, each_tensor.device, each_tensor.shape, each_tensor.layout) for each_tensor in (tensor, data)
    ]
    if facts[0] != facts[1]:
        return False
    if tensor.layout is not torch.strided or tensor.is_meta:
        return not tensor.is_meta
    return bool(tensor.data_ptr() == data.data_ptr() and tensor.stride() == data.stride())
