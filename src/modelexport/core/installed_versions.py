"""The versions of installed packages."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def installed_version(package: str) -> str:
    """The version of an installed package, read once in a process.

    Raises:
        importlib.metadata.PackageNotFoundError: It is not installed.
    """
    return importlib.metadata.version(package)
