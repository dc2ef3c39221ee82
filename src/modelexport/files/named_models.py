"""What can be known about MODEL, as a person names it, before torch is imported: whether it is there."""

from __future__ import annotations

import ast
import difflib
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from modelexport.core.limits import SETTINGS_BYTES
from modelexport.errors import ModelExportError, ModelLoadError
from modelexport.files.regular_files import read_regular

BERT_TINY = "bert-tiny"
"""The built-in example: the configuration of google/bert_uncased_L-2_H-128_A-2, with seeded random weights."""
LOCAL = "a directory with config.json and model.safetensors, bert-tiny, or file.py:factory"
"""What to give instead, in messages."""
_DESCRIPTIONS = ("config.json", "model_index.json", "modules.json")
"""The files of which a folder with a model has at least one: of transformers, diffusers and sentence-transformers."""


def named_folder(spec: str) -> Path | None:
    """The folder that ``spec`` names, if it is one. A folder named bert-tiny has to be given as ./bert-tiny."""
    folder = Path(spec).expanduser()
    return folder if spec != BERT_TINY and folder.is_dir() else None


def check_named(spec: str) -> None:
    """Check what can be checked without importing the model's code or libraries.

    Args:
        spec: A folder, the name of a model on a hub, ``file.py:factory``, ``package.module:factory`` or ``bert-tiny``.

    Raises:
        ModelLoadError: The folder has no description of a model, the file or its factory does not exist, or ``spec``
            is neither a folder nor a possible name.
    """
    if (folder := named_folder(spec)) is not None:
        _check_folder(folder)
    elif ":" in spec:
        _check_factory(spec)
    elif spec != BERT_TINY:
        _check_name(spec)


def _check_folder(folder: Path) -> None:
    if any((folder / name).is_file() for name in _DESCRIPTIONS):
        return
    if gguf := next(folder.glob("*.gguf"), None):
        raise ModelLoadError(
            f"the weights in {folder} are a GGUF file: give file.py:factory, a function that returns "
            f"from_pretrained({str(folder)!r}, gguf_file={gguf.name!r})"
        )
    raise ModelLoadError(f"{folder} has no config.json: give {LOCAL}")


def _check_name(spec: str) -> None:
    path = Path(spec).expanduser()
    if path.is_file():
        hint = f"name its factory: {spec}:FACTORY" if path.suffix == ".py" else f"give {LOCAL}"
        raise ModelLoadError(f"{spec} is a file: {hint}")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", spec):
        raise ModelLoadError(f"no such directory: {spec}; give {LOCAL}")


def _check_factory(spec: str) -> None:
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise ModelLoadError(f"{spec} does not name a factory: give file.py:factory or package.module:factory")
    file = Path(place).expanduser() if place.endswith(".py") else _source_of(place)
    if file is None:
        return
    if not file.is_file():
        raise ModelLoadError(f"no such file: {place} (for {spec})")
    names = _names_in(file)
    name = attribute.partition(".")[0]
    if names is not None and name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {place}:{close[0]}?" if close else "name a callable that returns the module"
        raise ModelLoadError(f"{place} has no {attribute}: {hint}")


def _source_of(module: str) -> Path | None:
    """The source file of a module, found without importing anything; ``None`` if only an import can tell."""
    search, source = [str(Path.cwd()), *sys.path], None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, search)
        if spec is None or spec.origin is None:
            return None
        search, source = list(spec.submodule_search_locations or ()), spec.origin
    return Path(source) if source is not None and source.endswith(".py") else None


def _names_in(file: Path) -> set[str] | None:
    """Every name that a file's code may bind, in any scope; ``None`` if other code or a text may bind more."""
    try:
        tree = ast.parse(read_regular(file, SETTINGS_BYTES))
    except (ModelExportError, SyntaxError, ValueError, RecursionError):
        return None  # importing it says what is wrong
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if name == "__getattr__":
                    return None
                names.add(name)
            case ast.Name(id=name):
                if name in ("globals", "exec", "setattr", "vars"):
                    return None
                names.add(name)
            case ast.alias(name=name, asname=alias):
                if name == "*":
                    return None
                names.add(alias or name.partition(".")[0])
    return names
