"""The figures of a package, each of its parts apart: with the sizes and inputs that a part has when the package runs.

A graph that takes a prompt as well as single tokens is measured as both, ``prefill`` and ``decode``. A file is a
package of one part without a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelexport.core.text import nearest
from modelexport.errors import UsageError
from modelexport.files.given import Source, as_path
from modelexport.measure.costs import CostTable, cost
from modelexport.measure.feeds import read_feeds
from modelexport.measure.profiles import ModuleProfile, profile
from modelexport.measure.runs import Level
from modelexport.packages.part_feeds import DECODE, PREFILL, cache_axes, chained_feeds, generation_feeds, symbols_of
from modelexport.runtime.sessions import CPU
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.package import read_package


@dataclass(frozen=True)
class PartUse:
    """One use of one part."""

    tagged: TaggedFile
    sizes: Mapping[str, int]
    """Of its dynamic axes: those given, and those that follow from the use."""


def cost_parts(path: Source, sizes: Mapping[str, int] | None = None) -> dict[str, CostTable]:
    """:func:`modelexport.cost` of a file, or of each part of a package by name.

    Args:
        sizes: Names of dynamic axes to sizes. The length of a prompt is also that of the cache that a step then finds.

    Raises:
        FileFormatError: A file is missing, or has no tags; or the folder is not a package.
        UsageError: No part has a dynamic axis of a name in ``sizes``.
    """
    path = as_path(path)
    if not path.is_dir():
        return {"": cost(path, sizes)}
    uses = uses_of(path, sizes or {})
    return {name: replace(cost(use.tagged, use.sizes), name=_title(path, name)) for name, use in uses.items()}


def profile_parts(
    path: Source,
    inputs: Mapping[str, Any] | Path | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    runs: int = 10,
    warmup: int = 2,
    level: Level = "all",
    provider: str = CPU,
    seed: int = 0,
) -> dict[str, ModuleProfile]:
    """:func:`modelexport.profile` of a file, or of each part of a package by name.

    What generates runs a prompt and a step after it, with the cache that the prompt left. Other packages run their
    parts in order; a part gets what parts before it give under the name of its input. All else is random.

    Args:
        inputs: Name to array, or a file of them, for the package as a whole.
        sizes: Of dynamic axes: ``sequence`` is the length of the prompt, ``past_sequence`` that of the cache.
        runs, warmup, level, provider, seed: As for a file.

    Raises:
        FileFormatError: A file is missing, or has no tags; or the folder is not a package.
        InputsError: The inputs do not fit, or no random ones do.
        UsageError: ONNX Runtime does not run a part, or no part has a dynamic axis of a name in ``sizes``.
    """
    how: dict[str, Any] = {"runs": runs, "warmup": warmup, "level": level, "provider": provider, "seed": seed}
    path = as_path(path)
    if not path.is_dir():
        return {"": profile(path, inputs, sizes=sizes, **how)}
    uses = uses_of(path, sizes or {})
    given = read_feeds(inputs, seed) if isinstance(inputs, Path) else dict(inputs or {})
    tagged = {name: use.tagged for name, use in uses.items()}
    if DECODE in uses:
        made = generation_feeds(tagged, given, sizes or {}, provider, seed)
    else:
        made = chained_feeds(tagged, {name: use.sizes for name, use in uses.items()}, given, provider, seed)
    found = {}
    for name, (feeds, source) in made.items():
        measured = profile(uses[name].tagged, feeds, inputs_from=source, **how)
        found[name] = replace(measured, table=replace(measured.table, name=_title(path, name)))
    return found


def profile_same(path: str | Path, measured: Mapping[str, ModuleProfile], **how: Any) -> dict[str, ModuleProfile]:
    """Run another file or package of the same model on the inputs that one was measured with.

    Raises:
        FileFormatError: A file is missing, or has no tags; or the folder is not a package.
        InputsError: It takes other inputs.
        UsageError: It does not have these parts, or ONNX Runtime does not run one.
    """
    others = {name: use.tagged for name, use in uses_of(path, {}).items()} if Path(path).is_dir() else {"": path}
    if others.keys() != measured.keys():
        raise UsageError(
            f"{path} is not of the same parts: it has {', '.join(others) if '' not in others else 'one file'}, and "
            f"the other {', '.join(measured) if '' not in measured else 'is one file'}; give two files, or two packages"
        )
    return {name: profile(others[name], one.feeds, **how) for name, one in measured.items()}


def uses_of(path: str | Path, sizes: Mapping[str, int]) -> dict[str, PartUse]:
    """The uses of the parts of a package by name, in the order in which they run."""
    files = {name: read_tagged(file) for name, file in read_package(path).files.items()}
    symbols = {name: dict.fromkeys(symbols_of(tagged)) for name, tagged in files.items()}
    known = [symbol for of_part in symbols.values() for symbol in of_part]
    for name in sizes:
        if name not in known:
            has = f"they have {', '.join(dict.fromkeys(known))}" if known else "all of their sizes are fixed"
            raise UsageError(f"the parts of {path} have no dynamic axis '{name}'{nearest(name, known)}; {has}")
    uses = {
        name: PartUse(tagged, {symbol: size for symbol, size in sizes.items() if symbol in symbols[name]})
        for name, tagged in files.items()
    }
    if DECODE not in uses:
        return uses
    step = uses.pop(DECODE)
    query, past = cache_axes(step.tagged)
    if PREFILL not in uses:
        uses[PREFILL] = replace(step, sizes={**step.sizes, **dict.fromkeys(past, 0)})
    before = dict.fromkeys(past, sizes[query]) if query in sizes else {}
    uses[DECODE] = replace(step, sizes={**before, **step.sizes, **({query: 1} if query else {})})
    return uses


def _title(path: str | Path, part: str) -> str:
    return f"{Path(path).resolve().name}: {part}"
