"""Packages in a folder of their own in the venv, ``.venv/NAME``, with what ``tests/side/NAME.txt`` lists.

transformers and diffusers do other things where they find such a package (they load models with accelerate, import
torchvision), so only the tests that need one have it in ``sys.path``. ``--no-deps``, because some
require a torch or numpy that is pinned elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path


def folder(name: str) -> Path:
    """Where the packages of a list are, whether they are installed or not."""
    return Path(sys.prefix) / name


def add(name: str) -> None:
    """Make the packages of a list importable in this process; those in the venv itself come first."""
    if str(folder(name)) not in sys.path:
        sys.path.append(str(folder(name)))


def missing(name: str) -> str:
    """Why a test that needs the packages of a list is skipped; empty if they are there."""
    install = f"pip install --no-deps --target {folder(name)} -r tests/side/{name}.txt"
    return "" if folder(name).is_dir() else f"needs {install}"
