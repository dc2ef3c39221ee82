"""``quantize`` within a bound: methods are searched for a file or for the graph of a package, which is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from modelexport.errors import UsageError
from modelexport.files.given_models import Source, as_path
from modelexport.packages.quantized_packages import quantize_package
from modelexport.precision.quantize import Feeds, QuantizeResult, quantize
from modelexport.precision.search import SearchResult, search
from modelexport.precision.sensitivity import given_feeds
from modelexport.tagged.file import read_tagged
from modelexport.tagged.package import read_package


class Searched(NamedTuple):
    """What was chosen, and what was written: nothing if the bound is not met."""

    found: SearchResult
    written: dict[str, QuantizeResult]
    """Name of a part to what was written; a file has no name."""


def quantize_within(
    file: Source,
    output: str | Path,
    *,
    to: Sequence[str],
    data: Feeds | str | Path,
    processor: str | Path | None = None,
    check_runtime: bool = True,
    **options: Any,
) -> Searched:
    """Quantize a file, or a package of one graph, by the methods that :func:`.search` finds for its modules.

    Args:
        file: A tagged file, or a package.
        output: The file or the folder to write.
        to, data, processor: As for :func:`.search`. Ranges are measured on the inputs that it chooses by.
        check_runtime: Refuse methods for which the runtime of this machine has no kernel.
        options: Of :func:`.search`: ``within`` or ``budget``, and others.

    Raises:
        UsageError, FileFormatError, InputsError, OutputError: As for :func:`.search` and :func:`.quantize`.
    """
    path = as_path(file)
    graph = graph_of(path)
    feeds = given_feeds(read_tagged(graph), data, processor)
    found = search(graph, to=to, data=feeds, **options)
    if not found.met:
        return Searched(found, {})
    how: dict[str, Any] = {
        "recipe": found.recipe,
        "data": feeds[: found.runs[0]],
        "check_runtime": check_runtime,
    }
    if path.is_dir():
        return Searched(found, quantize_package(path, output, **how))
    return Searched(found, {"": quantize(path, output, **how)})


def graph_of(file: str | Path) -> Path:
    """The file itself, or that of the only graph of a package.

    Raises:
        UsageError: The package has several.
    """
    if not Path(file).is_dir():
        return Path(file)
    files = read_package(file).files
    if len(files) > 1:
        raise UsageError(f"data are inputs of one graph, and {file} has {len(files)}: give one of its files")
    return next(iter(files.values()))
