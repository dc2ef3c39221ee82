"""Makes the module tree (:mod:`modelexport.core.module_tree`) of a PyTorch model, from ``named_modules()``."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

from modelexport.core.calls import LATER_CALL
from modelexport.core.module_tree import Module, ModuleTree
from modelexport.errors import InputsError


def module_tree(model: nn.Module) -> ModuleTree:
    """Every module of the model, parents before children.

    A module that is registered in several places appears once, under its first path; the others are its aliases.
    Parameters that lazy modules have not created yet are not counted.
    """
    paths = {module: path for path, module in model.named_modules()}
    for path in paths.values():
        if (later := LATER_CALL.fullmatch(path)) is not None:
            number = int(later["index"]) + 1
            raise InputsError(
                f"the module '{path}' has the name of call {number} of '{later['path'] or '.'}': give it a name that "
                "does not end with @ and a number"
            )
    aliases: dict[nn.Module, list[str]] = {module: [] for module in paths}
    for path, module in _all_paths(model, "", set()):
        if path != paths[module]:
            aliases[module].append(path)
    lines = {kind: _line_of(kind) for kind in {type(module) for module in paths}}
    modules: dict[str, Module] = {}
    for module, path in paths.items():
        above, _, name = path.rpartition(".")
        parent = above if path else None
        parameters = [parameter for parameter in module.parameters() if not is_lazy(parameter)]
        modules[path] = Module(
            path=path,
            class_name=type(module).__name__,
            class_module=type(module).__module__,
            parent=parent,
            name=name,
            depth=0 if parent is None else modules[parent].depth + 1,
            children=tuple(paths[child] for child in module.children()),
            aliases=tuple(aliases[module]),
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            shapes={
                key: tuple(tensor.shape)
                for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
                if not is_lazy(tensor)
            },
            line=lines[type(module)],
        )
    return ModuleTree(modules)


def _line_of(kind: type) -> int:
    """The line of a class in its file, or in its cell of a notebook; 0 if it is not known.

    ``inspect`` parses the whole file for each class, and does not know classes of notebooks.
    """
    codes = [inspect.unwrap(item).__code__ for item in vars(kind).values() if inspect.isfunction(item)]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    file = file or next((code.co_filename for code in codes), "")
    text = "".join(linecache.getlines(file))
    classes = re.finditer(rf"^[ \t]*class {kind.__name__}\b", text, re.M)
    lines = [text.count("\n", 0, each.start()) + 1 for each in classes]
    first = min((code.co_firstlineno for code in codes if code.co_filename == file), default=sys.maxsize)
    return max((line for line in lines if line <= first), default=0)


def containers(model: nn.Module) -> frozenset[str]:
    """The paths of the modules that have no ``forward`` and so cannot be called: module lists and the like."""
    return frozenset(path for path, module in model.named_modules() if not _has_forward(module))


def check_has_forward(model: nn.Module) -> None:
    """Refuse a value that is not a module, and a module without ``forward``, which hooks and exports need."""
    if not isinstance(model, nn.Module):
        raise InputsError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module: give the module, or a name to the command "
            f"`modelexport export NAME -o FILE.onnx`"
        )
    if _has_forward(model):
        return
    if type(model).__call__ is nn.Module.__call__:
        raise InputsError(f"{type(model).__name__} has no forward, so it cannot run: export a module that has one")
    raise InputsError(
        f"{type(model).__name__} has a __call__ in the place of a forward: rename it to forward, which PyTorch calls "
        f"with the hooks of the module"
    )


def _has_forward(module: nn.Module) -> bool:
    forward = inspect.getattr_static(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in vars(module)


def _all_paths(module: nn.Module, path: str, above: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Like ``named_modules(remove_duplicate=False)``, but ends at modules that contain themselves."""
    yield path, module
    for name, child in module._modules.items():
        if child is not None and child is not module and child not in above:
            yield from _all_paths(child, f"{path}.{name}" if path else name, above | {module})
