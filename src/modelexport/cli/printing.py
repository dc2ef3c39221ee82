"""How commands print results: as text or as one JSON document, of a file or of each part of a package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def named_files(path: Path) -> dict[str, Path]:
    """The files of FILE: the file itself with an empty name, or the parts of a package by name."""
    if not path.is_dir():
        return {"": path}
    from modelexport.tagged.package import read_package

    return read_package(path).files


def print_json(document: Any) -> None:
    """Print a value as a JSON document."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(document), indent=1))


def print_result(document: Any, text: Callable[[], str], *, as_json: bool) -> None:
    """Print a result as a JSON document, or as the text for a person."""
    if as_json:
        print_json(document)
    else:
        print(text())


def print_parts(results: Mapping[str, T], text: Callable[[T], str], *, as_json: bool) -> None:
    """Print the result for a file, which is under an empty name, or those for the parts of a package by name."""
    if as_json:
        print_json(results.get("", {"parts": results}))
    else:
        print(format_headings({name: text(result) for name, result in results.items()}))


def format_headings(texts: Mapping[str, str]) -> str:
    """The text of each part under its name; for a single file, without a name."""
    return "\n\n".join(f"{name}:\n{text}" if name else text for name, text in texts.items())
