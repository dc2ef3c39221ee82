"""Makes commands start faster: slow modules are imported when they are used, and torch reads no lines of source.

Half of the time of a short command went into modules that few commands need, and a tenth of that of an export.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from modelexport.core.replaced_attributes import attribute_set

_WHEN_USED: Mapping[str, Sequence[str]] = {
    "sympy": (),
    "onnx_ir._symbolic_shapes": (),
    "scipy.optimize": ("linear_sum_assignment",),  # transformers imports it for the loss of a few models
    "networkx": ("DiGraph",),  # torch imports it to choose what a step of training computes again
}
"""Modules that run when one of their names is used, and functions that are used when they are called."""

_RUN = "_modelexport_run"


class _UntilUsed(ModuleType):
    """A module that has not run."""

    def __getattr__(self, name: str) -> Any:
        if name in _WHEN_USED[self.__name__]:
            return partial(_called, self, name)
        return getattr(_imported(self), name)


def _called(module: ModuleType, name: str, *arguments: Any, **keywords: Any) -> Any:
    return getattr(_imported(module), name)(*arguments, **keywords)


def _imported(module: ModuleType) -> ModuleType:
    if type(module) is _UntilUsed:
        run = module.__dict__.pop(_RUN)
        module.__class__ = ModuleType  # type: ignore[assignment]
        run(module)
    return module


def _run_when_used(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    module.__dict__[_RUN] = run
    module.__class__ = _UntilUsed


def _run_without_lines(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Torch asks for the line of source of each of its operators, which takes long, and uses only its number."""
    import inspect  # which help and the version do not need

    with attribute_set(inspect, "getframeinfo", partial(inspect.getframeinfo, context=0)):
        run(module)


def _run_with_short_texts(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Transformers looks for ``__all__`` in each of its files, line by line; it is near the end."""
    run(module)
    names_of: Any = vars(module).get("fetch__all__")
    if names_of is not None:
        vars(module)["fetch__all__"] = lambda file_content: names_of(
            file_content[file_content.rfind("\n__all__") + 1 :]
        )


_OTHERWISE: Mapping[str, Callable[[Callable[[ModuleType], None], ModuleType], None]] = {
    **dict.fromkeys(_WHEN_USED, _run_when_used),
    "torch": _run_without_lines,
    "transformers.utils.import_utils": _run_with_short_texts,
}
"""Modules to what runs them."""


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (package := sys.modules.get(fullname.rpartition(".")[0])) is not None:
            _imported(package)
        if fullname not in _OTHERWISE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = partial(_OTHERWISE[fullname], spec.loader.exec_module)
            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def import_when_used() -> None:
    """From now on, import modules so; for the process of a command."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
