"""Checks MODEL, as a command gets it, before torch is imported: whether such a folder, file or package exists."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from modelexport.errors import ModelLoadError

BERT_TINY = "bert-tiny"
"""The built-in example: the configuration of google/bert_uncased_L-2_H-128_A-2, with seeded random weights."""
WAYS_TO_NAME_IT = "a directory with config.json and model.safetensors, package:folder, bert-tiny, or file.py:factory"
"""How a model can be named, for messages."""
_DESCRIPTIONS = ("config.json", "model_index.json", "modules.json")
"""The files of which a folder with a model has at least one: of transformers, diffusers and sentence-transformers."""


def named_folder(spec: str) -> Path | None:
    """The folder that ``spec`` names, if it is one: a path, or ``package:folder`` in a package that is installed.

    A folder named bert-tiny has to be given as ./bert-tiny.
    """
    folder = Path(spec).expanduser()
    if spec != BERT_TINY and folder.is_dir():
        return folder
    package, _, inside = spec.partition(":")
    module = find_spec(package) if inside and package.isidentifier() else None
    places = module.submodule_search_locations if module is not None else None  # of a package, which is not imported
    folders = [Path(place) / inside for place in places or ()]
    return next((f for f in folders if any((f / name).is_file() for name in _DESCRIPTIONS)), None)


def models_in_package(name: str) -> list[str]:
    """``package:folder`` for each folder with a model that lies in an installed package, which is not imported.

    Args:
        name: The package, or its distribution, which may have hyphens.
    """
    package = name.replace("-", "_")
    module = find_spec(package) if package.isidentifier() else None
    places = module.submodule_search_locations if module is not None else None
    folders = {
        path.parent.name for place in places or () for kind in _DESCRIPTIONS for path in Path(place).glob(f"*/{kind}")
    }
    return [f"{package}:{folder}" for folder in sorted(folders)]


def check_named(spec: str) -> None:
    """Check what can be checked without importing the model's code or libraries.

    Args:
        spec: A folder, the name of a model on a hub, ``package:folder`` of a package that is installed,
            ``file.py:factory``, ``package.module:factory`` or ``bert-tiny``.

    Raises:
        ModelLoadError: The folder has no description of a model, the file does not exist, or ``spec`` is neither a
            folder nor a possible name.
    """
    path = Path(spec).expanduser()
    if (folder := named_folder(spec)) is not None:
        if any((folder / name).is_file() for name in _DESCRIPTIONS):
            return
        if gguf := next(folder.glob("*.gguf"), None):
            raise ModelLoadError(
                f"the weights in {folder} are a GGUF file: give file.py:factory, a function that returns "
                f"from_pretrained({str(folder)!r}, gguf_file={gguf.name!r})"
            )
        raise ModelLoadError(f"{folder} has no config.json: give {WAYS_TO_NAME_IT}")
    if ":" in spec:
        place, _, attribute = spec.rpartition(":")
        if not place or not attribute:
            raise ModelLoadError(f"{spec} does not name a factory: give file.py:factory or package.module:factory")
        if "-" in place and (models := models_in_package(place)):
            raise ModelLoadError(f"{spec} has the name of a distribution: give {' or '.join(models)}")
        if place.endswith(".py") and not Path(place).expanduser().is_file():
            raise ModelLoadError(f"no such file: {place} (for {spec})")
    elif spec != BERT_TINY and path.is_file():
        hint = f"name its factory: {spec}:FACTORY" if path.suffix == ".py" else f"give {WAYS_TO_NAME_IT}"
        raise ModelLoadError(f"{spec} is a file: {hint}")
    elif spec != BERT_TINY and "/" not in spec and (models := models_in_package(spec)):
        raise ModelLoadError(f"{spec} is a package: give {' or '.join(models)}")
    elif not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", spec):
        raise ModelLoadError(f"no such directory: {spec}; give {WAYS_TO_NAME_IT}")
