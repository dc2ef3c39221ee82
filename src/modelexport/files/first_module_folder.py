"""The folder of the first module of a model that sentence-transformers wrote, which may be inside the model's."""

from __future__ import annotations

import json
from pathlib import Path

from modelexport.core.limits import SETTINGS_BYTES
from modelexport.errors import ModelLoadError, raised_as
from modelexport.files.regular_files import read_regular

SENTENCE_TRANSFORMER = "modules.json"


def first_module_folder(folder: Path) -> Path:
    """The folder with the transformer and the tokenizer of a model: its own, or such as ``0_Transformer`` inside it.

    Raises:
        ModelLoadError: ``modules.json`` is not a list of modules, or names a folder outside the model's.
    """
    modules = folder / SENTENCE_TRANSFORMER
    if (folder / "config.json").is_file() or not modules.is_file():
        return folder
    with raised_as(lambda _: ModelLoadError(f"{modules} is not a list of modules: copy or download it again")):
        first = folder / json.loads(read_regular(modules, SETTINGS_BYTES))[0]["path"]
    if not first.resolve().is_relative_to(folder.resolve()):
        raise ModelLoadError(f"{modules} names a folder outside {folder}: copy or download it again")
    return first
