"""Loading ``package.module:factory`` or ``file.py:factory``: the module that the factory returns."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from modelexport.core.text import error_line
from modelexport.errors import ModelLoadError
from modelexport.files.named_models import models_in_package
from modelexport.pytorch.loading.loaded import LoadedModel
from modelexport.pytorch.nested_tensors import arguments_of


def load_from_factory(spec: str) -> LoadedModel:
    place, _, attribute = spec.rpartition(":")
    file = Path(place).expanduser().resolve() if place.endswith(".py") else None
    # The console script puts neither the working directory nor the file's directory on sys.path.
    with _import_path(file.parent if file else Path.cwd()):
        if file is not None:
            module = _run(lambda: _import_file(file), f"{place} cannot be imported", file)
        else:
            module = _run(lambda: importlib.import_module(place), f"module {place} cannot be imported", None)
        try:
            factory = operator.attrgetter(attribute)(module)
        except AttributeError as error:
            callables = [name for name, value in vars(module).items() if callable(value)]
            models = [name.rpartition(":")[2] for name in models_in_package(place)] if file is None else []
            close = difflib.get_close_matches(attribute, [*models, *callables], 1)
            hint = f"did you mean {place}:{close[0]}?" if close else "name a callable that returns the module"
            raise ModelLoadError(f"{place} has no {attribute}: {hint}") from error
        if not callable(factory):
            raise ModelLoadError(f"{spec} is {_article(factory)}, not a callable: name one that returns the module")
        if not isinstance(factory, torch.nn.Module) and (lacks := _lacking(factory)):
            raise ModelLoadError(f"{spec} needs arguments ({lacks}): give a function that returns the module")
        source = file or Path(getattr(module, "__file__", None) or place)
        returned = factory if isinstance(factory, torch.nn.Module) else _run(factory, f"{spec} failed", source)
    model, example = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    inputs = arguments_of(example) if isinstance(example, torch.Tensor) else example
    if not isinstance(model, torch.nn.Module):
        raise ModelLoadError(f"{spec} returned {_article(returned)}: return the torch.nn.Module, or it and its inputs")
    if inputs is not None and not isinstance(inputs, dict | tuple):
        raise ModelLoadError(
            f"{spec} returned {_article(inputs)} as inputs: return a dict of keyword arguments or a tuple of arguments"
        )
    return LoadedModel(model, inputs, attribute.rpartition(".")[2])


def _lacking(factory: Callable[..., Any]) -> str:
    """What is missing for a call without arguments; empty if nothing is, or it cannot be known."""
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        return str(error)
    except ValueError:  # it has no signature
        return ""
    return ""


def _article(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _run(call: Callable[[], Any], failed: str, file: Path | None) -> Any:
    """Run the user's code; an exception becomes one line with the place in ``file`` that it came from."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        not_of_user = (__file__, importlib.__file__, "<string>", "<frozen")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(not_of_user)]
        places = [(f.filename, f.lineno) for f in [f for f in frames if Path(f.filename) == file] or frames]
        reason = error
        if isinstance(error, SyntaxError) and error.filename:
            places, reason = [(error.filename, error.lineno)], SyntaxError(error.msg)
        where = f" ({Path(places[-1][0]).name}, line {places[-1][1]})" if places else ""
        raise ModelLoadError(f"{failed}: {error_line(reason)}{where}") from error


@contextmanager
def _import_path(directory: Path) -> Iterator[None]:
    """Put ``directory`` first on ``sys.path`` inside the block."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(str(directory))


def _import_file(file: Path) -> ModuleType:
    """Run a Python file as a module named after it.

    It and the files beside it that it imports stay in ``sys.modules``, where their classes look up their module.
    """
    _forget_siblings_of_others(file.parent)
    taken = sys.modules.get(file.stem)
    # A file named json.py must not replace the json module.
    name = file.stem if taken is None or getattr(taken, "__file__", None) == str(file) else f"_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _forget_siblings_of_others(directory: Path) -> None:
    """Drop modules that have the name of a file in ``directory`` but were loaded for a factory of another directory.

    Modules on ``sys.path`` are ordinary imports and are kept.
    """
    for entry in directory.iterdir():
        is_package = (entry / "__init__.py").is_file()
        if not is_package and entry.suffix != ".py":
            continue
        file = getattr(sys.modules.get(entry.stem), "__file__", None)
        if file is None:
            continue
        root = Path(file).parents[1] if Path(file).name == "__init__.py" else Path(file).parent
        if root != directory and str(root) not in sys.path:
            for name in [n for n in sys.modules if n == entry.stem or n.startswith(f"{entry.stem}.")]:
                del sys.modules[name]
