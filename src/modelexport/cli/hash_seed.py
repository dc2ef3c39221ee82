"""A fixed seed for Python's hashes in the commands that run a model.

A model whose code iterates over a set of texts (``set(config.layer_types)`` in several models of transformers) calls
its modules in an order that depends on this seed, which Python draws for each process. A call has to have the same
number when the model is exported and when the file is verified.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

_VARIABLE = "PYTHONHASHSEED"
_NAME = "modelexport"


def fix_hash_seed(commands: Collection[str]) -> None:
    """Start this process again with a fixed seed, if it is one of these commands and has none. Call this first."""
    arguments = [text for text in sys.argv[1:] if not text.startswith("-")]
    if arguments and arguments[0] in commands and os.name == "posix" and _VARIABLE not in os.environ and _is_program():
        os.environ[_VARIABLE] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _is_program() -> bool:
    """Whether the process is the command, and not a program that calls ``main``."""
    given = sys.orig_argv[1:3]
    return given == ["-m", _NAME] or (len(given) > 0 and Path(given[0]).name == _NAME)
