"""The figures of a package, each of its parts apart: with the sizes and inputs that a part has when the package runs.

A graph that takes a prompt as well as single tokens is measured as both, ``prefill`` and ``decode``. A file is a
package of one part without a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.text import nearest, plural
from modelexport.errors import UsageError
from modelexport.measure.costs import CostTable, cost
from modelexport.measure.feeds import random_feeds, read_feeds
from modelexport.measure.profiles import ModuleProfile, profile
from modelexport.measure.runs import Level
from modelexport.runtime.generation import PAST, Generator
from modelexport.runtime.sessions import CPU, open_session, run_session
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.package import read_package

PREFILL, DECODE = "prefill", "decode"
_PROMPT = 32
"""Tokens of a prompt whose length is not given."""


@dataclass(frozen=True)
class PartUse:
    """One use of one part."""

    tagged: TaggedFile
    sizes: Mapping[str, int]
    """Of its dynamic axes: those given, and those that follow from the use."""


def cost_parts(path: str | Path, sizes: Mapping[str, int] | None = None) -> dict[str, CostTable]:
    """:func:`modelexport.cost` of a file, or of each part of a package by name.

    Args:
        sizes: Names of dynamic axes to sizes. The length of a prompt is also that of the cache that a step then finds.

    Raises:
        FileFormatError: A file is missing, or has no tags; or the folder is not a package.
        UsageError: No part has a dynamic axis of a name in ``sizes``.
    """
    if not Path(path).is_dir():
        return {"": cost(path, sizes)}
    uses = uses_of(path, sizes or {})
    return {name: replace(cost(use.tagged, use.sizes), name=_title(path, name)) for name, use in uses.items()}


def profile_parts(
    path: str | Path,
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
    if not Path(path).is_dir():
        return {"": profile(path, inputs, sizes=sizes, **how)}
    uses = uses_of(path, sizes or {})
    given = read_feeds(inputs, seed) if isinstance(inputs, Path) else dict(inputs or {})
    make = _generation_feeds if DECODE in uses else _chained_feeds
    found = {}
    for name, (feeds, source) in make(uses, given, sizes or {}, provider, seed).items():
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
    symbols = {name: dict.fromkeys(_symbols(tagged)) for name, tagged in files.items()}
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
    query, past = _axes(step.tagged)
    if PREFILL not in uses:
        uses[PREFILL] = replace(step, sizes={**step.sizes, **dict.fromkeys(past, 0)})
    before = dict.fromkeys(past, sizes[query]) if query in sizes else {}
    uses[DECODE] = replace(step, sizes={**before, **step.sizes, **({query: 1} if query else {})})
    return uses


def _title(path: str | Path, part: str) -> str:
    return f"{Path(path).resolve().name}: {part}"


def _symbols(tagged: TaggedFile) -> Iterator[str]:
    """The names of the dynamic axes of a file's inputs."""
    return (symbol for value in tagged.model.graph.inputs for symbol in _open(value))


def _open(value: ir.Value) -> list[str]:
    sizes = (size for size in value.shape or () if isinstance(size, ir.SymbolicDim))
    return [size.value for size in sizes if size.value is not None and size.value.isidentifier()]


def _axes(tagged: TaggedFile) -> tuple[str, list[str]]:
    """The dynamic axes of a part that generates: of the tokens (empty if fixed), and those that only its cache has."""
    others = {value.name or "": _open(value) for value in tagged.model.graph.inputs}
    own = [name for name in others if name.startswith(PAST) and ".encoder." not in name]
    cached = {symbol for name in own for symbol in others[name]}
    cached -= {symbol for name, symbols in others.items() if not name.startswith(PAST) for symbol in symbols}
    tokens = others.get(_token_input(tagged), [])
    return (tokens[-1] if len(tokens) == 2 else ""), sorted(cached)


def _token_input(tagged: TaggedFile) -> str:
    names = [value.name or "" for value in tagged.model.graph.inputs]
    return next((name for name in ("decoder_input_ids", "input_ids") if name in names), "")


Feeds = dict[str, tuple[dict[str, Any], str]]
"""Name of a use to its inputs, and where they come from."""


def _generation_feeds(
    uses: Mapping[str, PartUse], given: Mapping[str, Any], sizes: Mapping[str, int], provider: str, seed: int
) -> Feeds:
    """What the parts get in the first step, and the decoder in the second, after a prompt as long as its cache."""
    step = uses[DECODE].tagged
    files = {name: use.tagged.path for name, use in uses.items() if use.tagged is not step} | {DECODE: step.path}
    generator = Generator(files, provider=provider)
    query, past = _axes(step)
    length = sizes.get(query, 1 if "encoder" in uses else _PROMPT)
    cached = next((sizes[symbol] for symbol in past if symbol in sizes), length)
    first = _prompt(uses, given, sizes, length, provider, seed)
    prompts = {PREFILL: first, DECODE: first}
    if cached != length and not given:
        prompts[DECODE] = _prompt(uses, given, sizes, cached, provider, seed)
    found: Feeds = {}
    if "encoder" in uses:
        names = [value.name or "" for value in uses["encoder"].tagged.model.graph.inputs]
        found["encoder"] = {name: first[name] for name in names}, _source(given, "random")
    for name, index in ((PREFILL, 0), (DECODE, 1)):
        steps = list(generator.steps(prompts[name], index + 1))
        tokens = plural(prompts[name][generator.token_input].shape[1], "token")
        text = f"a random prompt of {tokens}" if index == 0 else f"the step after a random prompt of {tokens}"
        found[name] = dict(steps[index].feeds), _source(given, text)
    return found


def _prompt(
    uses: Mapping[str, PartUse],
    given: Mapping[str, Any],
    sizes: Mapping[str, int],
    length: int,
    provider: str,
    seed: int,
) -> dict[str, Any]:
    """What generation begins with: what is given, and random tokens and inputs of the encoder."""
    step = uses[DECODE].tagged
    token_input, graph = _token_input(step), step.model.graph
    tokens = next((value for value in graph.inputs if value.name == token_input), None)
    symbols = _open(tokens) if tokens is not None else []
    batch = sizes.get(symbols[0], 1) if symbols else 1
    values: dict[str, Any] = {}
    if "encoder" in uses:
        encoder = uses["encoder"].tagged
        open_sizes = {symbol: sizes.get(symbol, _PROMPT) for symbol in _symbols(encoder)} | {
            symbol: batch for symbol in symbols[:1] if symbol in _symbols(encoder)
        }
        values |= random_feeds(encoder, encoder.path, open_sizes, given=given, provider=provider, seed=seed)
    logits = next((value.shape for value in graph.outputs if value.name == "logits"), None)
    vocabulary = logits[-1] if logits is not None and isinstance(logits[-1], int) else 10
    drawn = np.random.default_rng(seed).integers(1, max(vocabulary, 2), (batch, length)).astype(np.int64)
    if token_input:
        values[token_input] = np.asarray(given.get(token_input, drawn))
        if token_input == "input_ids":
            values["attention_mask"] = np.ones_like(values[token_input])
    return values | {name: np.asarray(array) for name, array in given.items()}


def _chained_feeds(
    uses: Mapping[str, PartUse], given: Mapping[str, Any], sizes: Mapping[str, int], provider: str, seed: int
) -> Feeds:
    """What each part gets where they run one after the other."""
    values, found = dict(given), {}
    for name, use in uses.items():
        feeds = random_feeds(use.tagged, use.tagged.path, use.sizes, given=values, provider=provider, seed=seed)
        before = [name for name in feeds if name in values and name not in given]
        text = f"random, and {', '.join(before)} of parts before it" if before else "random"
        found[name] = feeds, _source(given, text)
        values |= feeds
        values |= run_session(open_session(use.tagged.path, provider=provider, optimized=True), feeds)
    return found


def _source(given: Mapping[str, Any], text: str) -> str:
    return f"given ({', '.join(given)}), else {text}" if given else text
