"""The figures of a package, each of its parts apart: with the sizes and inputs that a part has when the package runs.

A graph that takes a prompt as well as single tokens is measured as both, ``prefill`` and ``decode``. A file is a
package of one part without a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from modelexport.core.text import plural, suggest
from modelexport.errors import InputsError, UsageError
from modelexport.files.path_or_model import Source, as_path
from modelexport.packages.generation_loop import (
    BATCH,
    ENCODERS,
    IMAGE_SIZES,
    PAST_SEQUENCE,
    PATCHES,
    SEQUENCE,
    TOKENS,
    Generator,
)
from modelexport.runtime.devices import CPU
from modelexport.runtime.fitted_inputs import check_names
from modelexport.runtime.input_files import read_feeds
from modelexport.runtime.sessions import Level, open_session, run_session
from modelexport.tables.costs import CostTable, cost
from modelexport.tables.profiles import ModuleProfile, profile, profile_in_turns, time_in_turns
from modelexport.tables.side_by_side import profile_against
from modelexport.tables.table import Table
from modelexport.tables.turns import Turns
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.package import files_of, read_package
from modelexport.traces.inputs_and_example_sizes import random_feeds, sizes_of_other

PREFILL, DECODE = "prefill", "decode"
_PROMPT = 32
"""Tokens of a prompt whose length is not given."""
_IMAGE = (1, 8, 8)
"""The size of an image in patches, for a part that takes any: whole blocks of patches that become one token."""
_IDS = 4096
"""How many tokens are embedded at once."""

AnyTable = TypeVar("AnyTable", bound=Table)
PartFeeds = dict[str, tuple[dict[str, Any], str]]
"""Name of a use of a part to its inputs, and where they come from."""


def _open(tagged: TaggedFile, *inputs: str) -> list[str]:
    """The names of the dynamic axes of those inputs of a file that it has; by default of all."""
    values = [value for value in tagged.model.graph.inputs if not inputs or value.name in inputs]
    sizes = [size.value for value in values for size in value.shape or () if isinstance(size, ir.SymbolicDim)]
    return [size for size in sizes if size is not None and size.isidentifier()]


def generation_feeds(
    generator: Generator,
    uses: Mapping[str, TaggedFile],
    user_inputs: Mapping[str, Any],
    sizes: Mapping[str, int],
    provider: str,
    seed: int,
) -> PartFeeds:
    """The inputs of the parts in the first step, and of the decoder after a prompt as long as its cache."""
    random_prompt = _prompts(generator, uses, user_inputs, sizes, provider, seed)
    token_input = generator.how.tokens
    asked = sizes.get(SEQUENCE) if SEQUENCE in _open(uses[DECODE], *TOKENS) else None
    first = random_prompt(asked or int("encoder" in uses))
    length = first[token_input].shape[1]
    cached = sizes.get(PAST_SEQUENCE, length)
    second = first if cached == length or user_inputs else random_prompt(cached)
    *_, prefill = generator.steps(first, 1)
    before = [part for part in uses if part not in (PREFILL, DECODE)]
    feeds: PartFeeds = {part: (dict(generator.taken[part]), _source(user_inputs, "random")) for part in before}
    *_, decode = generator.steps(second, 2)
    for name, ran, prompt, text in ((PREFILL, prefill, first, ""), (DECODE, decode, second, "the step after ")):
        tokens = f"a random prompt of {plural(prompt[token_input].shape[1], 'token')}"
        feeds[name] = dict(ran.feeds), _source(user_inputs, text + tokens)
    return feeds


def _prompts(
    generator: Generator,
    uses: Mapping[str, TaggedFile],
    user_inputs: Mapping[str, Any],
    sizes: Mapping[str, int],
    provider: str,
    seed: int,
) -> Callable[[int], dict[str, Any]]:
    """A function that makes random prompts of n tokens (0: any number), all with the same image or sound."""
    token_input = generator.how.tokens
    logits = next((value.shape for value in uses[DECODE].model.graph.outputs if value.name == "logits"), None)
    vocabulary = logits[-1] if logits is not None and isinstance(logits[-1], int) else 10
    batch = sizes.get(BATCH, 1) if BATCH in _open(uses[DECODE], *TOKENS) else 1
    encoded: dict[str, Any] = {}
    for part in ENCODERS:
        if part in uses:  # as many rows as there are prompts, or so many times those that it always takes
            encoder = uses[part]
            shapes = [value.shape for value in encoder.model.graph.inputs if value.shape]
            rows = {str(shape[0]) for shape in shapes}
            axes = {symbol: sizes.get(symbol, batch if symbol in rows else _PROMPT) for symbol in _open(encoder)}
            taken = {value.name for value in encoder.model.graph.inputs}
            known = {name: np.array([_IMAGE] * batch) for name in IMAGE_SIZES if name in taken} | dict(user_inputs)
            if known.keys() & {*IMAGE_SIZES}:
                axes[PATCHES] = sum(int(np.prod(each)) for name in IMAGE_SIZES for each in known.get(name, ()))
            drawn = random_feeds(encoder, encoder.path, axes, known=known, provider=provider, seed=seed)
            times = batch if all(isinstance(shape[0], int) for shape in shapes) else 1
            encoded |= {name: np.concatenate([array] * times) for name, array in drawn.items()}
    places: list[int] = []
    if "embedding" in uses and token_input not in user_inputs:
        places = _placeholders(generator, encoded, vocabulary, batch)

    def prompt(length: int) -> dict[str, Any]:
        length = length or max(_PROMPT, len(places) + 2)
        if len(places) >= length:
            raise InputsError(
                f"an image or sound takes {len(places)} tokens of a prompt: --size sequence has to be larger than that"
            )
        random = np.random.default_rng(seed)
        ids = random.integers(1, max(vocabulary, 2), (batch, length)).astype(np.int64)
        if places:
            ids[np.isin(ids, places)] = next(token for token in range(1, vocabulary) if token not in places)
            ids[:, 1 : len(places) + 1] = places
        values = {**encoded, token_input: np.asarray(user_inputs.get(token_input, ids))}
        if token_input == "input_ids":
            values["attention_mask"] = np.ones_like(values[token_input])
        return values | {name: np.asarray(array) for name, array in user_inputs.items()}

    return prompt


def _placeholders(generator: Generator, encoded: Mapping[str, Any], vocabulary: int, batch: int) -> list[int]:
    """The placeholder token, once for each feature of a row: the token whose embedding is a feature."""
    features: dict[str, Any] = {}
    for part in generator.how.before:
        if part in ENCODERS:
            features |= generator.run(part, encoded)
    others = {name: array + 1 for name, array in features.items()}
    tokens: list[int] = []
    for start in range(0, vocabulary, _IDS):
        ids = np.arange(start, min(start + _IDS, vocabulary), dtype=np.int64)[None]
        first, second = (
            generator.run("embedding", {generator.how.tokens: ids, **encodings})["inputs_embeds"]
            for encodings in (features, others)
        )
        tokens += ids[(first != second).any(-1)].tolist()
    return tokens[:1] * (min((len(array) for array in features.values()), default=0) // batch)


def chained_feeds(uses: Mapping[str, PartUse], user_inputs: Mapping[str, Any], provider: str, seed: int) -> PartFeeds:
    """What each part gets where they run one after the other."""
    values, feeds_of_parts = dict(user_inputs), {}
    for name, use in uses.items():
        tagged = use.tagged
        feeds = random_feeds(tagged, tagged.path, use.sizes, known=values, provider=provider, seed=seed)
        before = [name for name in feeds if name in values and name not in user_inputs]
        text = f"random, and {', '.join(before)} of parts before it" if before else "random"
        feeds_of_parts[name] = feeds, _source(user_inputs, text)
        values |= feeds
        values |= run_session(open_session(tagged.path, provider=provider, optimized=True), feeds)
    return feeds_of_parts


def _source(user_inputs: Mapping[str, Any], text: str) -> str:
    return f"given ({', '.join(user_inputs)}), else {text}" if user_inputs else text


@dataclass(frozen=True)
class PartUse:
    """One use of one part."""

    tagged: TaggedFile
    sizes: Mapping[str, int]
    """Of its dynamic axes: those given, and those that follow from the use."""
    part: str
    """The name of the part, and in parentheses what it runs if it has two uses."""

    def named(self, table: AnyTable, folder: Path) -> AnyTable:
        """A table with the name of the package and of the part; that of a file keeps its own."""
        return replace(table, name=f"{folder.resolve().name}: {self.part}", part=self.part) if self.part else table


def cost_parts(path: Source, sizes: Mapping[str, int] | None = None) -> dict[str, CostTable]:
    """:func:`modelexport.cost` of a file, or of each part of a package by name.

    Args:
        sizes: Names of dynamic axes to sizes. The length of a prompt is also that of the cache that a step then finds.

    Raises:
        FileFormatError: A file is missing, or the folder is not a package.
        UsageError: No part has a dynamic axis of a name in ``sizes``.
    """
    path = as_path(path)
    return {name: use.named(cost(use.tagged, use.sizes), path) for name, use in uses_of(path, sizes or {}).items()}


def profile_parts(
    path: Source,
    inputs: Mapping[str, Any] | str | Path | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    runs: int = 10,
    warmup: int = 2,
    level: Level = "all",
    provider: str = CPU,
    seed: int = 0,
    against: Source | None = None,
) -> dict[str, ModuleProfile]:
    """:func:`modelexport.profile` of a file, or of each part of a package by name.

    What generates runs a prompt and a step after it, with the cache that the prompt left. Other packages run their
    parts in order; a part gets what parts before it give under the name of its input. All else is random.

    Args:
        inputs: Name to array, or a file of them, for the package as a whole.
        sizes: Of dynamic axes: ``sequence`` is the length of the prompt, ``past_sequence`` that of the cache.
        runs, warmup, level, provider, seed: As for a file.
        against: Another file or package of the same model, whose time stands beside. Both run in turns, on the same
            inputs; those that the other does not have are left out, as a tool removes those that nothing reads.

    Raises:
        FileFormatError: A file is missing or damaged, or the folder is not a package.
        InputsError: The inputs do not fit, or no random ones do.
        UsageError: ONNX Runtime does not run a part, or no part has a dynamic axis of a name in ``sizes``.
    """
    how: dict[str, Any] = {"runs": runs, "warmup": warmup, "level": level, "provider": provider, "seed": seed}
    path = as_path(path)
    uses = _uses_with_inputs(path, inputs, sizes or {}, provider, seed)
    others: dict[str, TaggedFile] = {}
    if against is not None:
        uses, others = _same_uses(path, as_path(against), uses)
    profiles = {}
    for name, use in uses.items():
        how |= {"inputs": use.inputs, "sizes": use.sizes, "inputs_from": use.source}
        if name in others:
            measured = profile_against(*profile_in_turns(use.tagged, others[name], **how))
        else:
            measured = profile(use.tagged, **how)
        profiles[name] = replace(measured, table=use.named(measured.table, path))
    return profiles


def time_parts_in_turns(
    path: Source, other: Source, inputs: Mapping[str, Any] | None = None, *, provider: str = CPU
) -> dict[str, Turns]:
    """The time of two files in turns, or of each part of two packages by name.

    Args:
        inputs: Of a file; by default those of its reference values, or random ones, as for the parts of a package.

    Raises:
        FileFormatError, InputsError, UsageError: As for :func:`profile_parts`.
    """
    path, other = as_path(path), as_path(other)
    uses, others = _same_uses(path, other, _uses_with_inputs(path, inputs, {}, provider, 0))
    return {
        name: time_in_turns(use.tagged, others[name], use.inputs, sizes=use.sizes, provider=provider)
        for name, use in uses.items()
    }


@dataclass(frozen=True)
class _PartRun(PartUse):
    """One use of one part, with its inputs and where they come from."""

    inputs: Mapping[str, Any] | str | Path | None
    source: str = ""


def _uses_with_inputs(
    path: Path, inputs: Mapping[str, Any] | str | Path | None, sizes: Mapping[str, int], provider: str, seed: int
) -> dict[str, _PartRun]:
    """The uses of the parts of a package with their inputs; a file is a package of one part without a name."""
    uses = uses_of(path, sizes)
    if "" in uses:
        return {"": _PartRun(uses[""].tagged, sizes, "", inputs)}
    user_inputs = read_feeds(Path(inputs), seed) if isinstance(inputs, str | Path) else dict(inputs or {})
    taken = (value.name or "" for use in uses.values() for value in use.tagged.model.graph.inputs)
    check_names(user_inputs, taken, str(path))
    if DECODE in uses:
        generator = Generator.of(read_package(path), provider=provider)
        tagged = {name: use.tagged for name, use in uses.items()}
        feeds_of_parts = generation_feeds(generator, tagged, user_inputs, sizes, provider, seed)
    else:
        feeds_of_parts = chained_feeds(uses, user_inputs, provider, seed)
    return {
        name: _PartRun(uses[name].tagged, {}, uses[name].part, feeds, source)
        for name, (feeds, source) in feeds_of_parts.items()
    }


def common_sizes(path: Source, other: Source, sizes: Mapping[str, int]) -> dict[str, int]:
    """``sizes``, and those of the dynamic axes of a file that another one of the same model fixes.

    Of packages, ``sizes`` alone.

    Raises:
        FileFormatError: A file is missing or not ONNX.
        InputsError: No inputs fit both files.
    """
    if as_path(path).is_dir() or as_path(other).is_dir():
        return dict(sizes)
    return _sizes_for_both(read_tagged(path), read_tagged(other), sizes)


def _sizes_for_both(first: TaggedFile, second: TaggedFile, sizes: Mapping[str, int]) -> dict[str, int]:
    sizes_of_other(second, first, sizes)
    return {**sizes_of_other(first, second, {}), **sizes}


def _same_uses(
    path: Path, other: Path, uses: Mapping[str, _PartRun]
) -> tuple[dict[str, _PartRun], dict[str, TaggedFile]]:
    """The uses, with sizes that both files have where no inputs were given, and the other file or its parts for them.

    Raises:
        FileFormatError: A file is missing or damaged, or the folder is not a package.
        InputsError: No inputs fit both files.
        UsageError: It does not have these parts.
    """
    others = {name: use.tagged for name, use in uses_of(other, {}).items()}
    if others.keys() != uses.keys():
        raise UsageError(
            f"{other} is not of the same parts: it has {', '.join(others) if '' not in others else 'one file'}, and "
            f"{path} {', '.join(uses) if '' not in uses else 'is one file'}; give two files, or two packages"
        )
    both = {
        name: use
        if use.inputs is not None
        else replace(use, sizes=_sizes_for_both(use.tagged, others[name], use.sizes))
        for name, use in uses.items()
    }
    return both, others


def uses_of(path: str | Path, sizes: Mapping[str, int]) -> dict[str, PartUse]:
    """The uses of the parts of a package by name, in the order in which they run; a file is one without a name."""
    files = {name: read_tagged(file) for name, file in files_of(path).items()}
    if "" in files:
        return {"": PartUse(files[""], sizes, "")}
    symbols = {name: _open(tagged) for name, tagged in files.items()}
    known = [symbol for of_part in symbols.values() for symbol in of_part]
    for name in sizes:
        if name not in known:
            has = f"they have {', '.join(dict.fromkeys(known))}" if known else "all of their sizes are fixed"
            raise UsageError(f"the parts of {path} have no dynamic axis '{name}'{suggest(name, known)}; {has}")
    uses = {
        name: PartUse(tagged, {symbol: size for symbol, size in sizes.items() if symbol in symbols[name]}, name)
        for name, tagged in files.items()
    }
    if DECODE not in uses:
        return uses
    step = uses.pop(DECODE)
    past = [symbol for symbol in (PAST_SEQUENCE,) if symbol in symbols[DECODE]]
    if PREFILL not in uses:
        uses[PREFILL] = replace(step, sizes={**step.sizes, **dict.fromkeys(past, 0)}, part=f"{DECODE} ({PREFILL})")
        step = replace(step, part=f"{DECODE} (one token)")
    before = dict.fromkeys(past, sizes[SEQUENCE]) if SEQUENCE in sizes else {}
    now = {SEQUENCE: 1} if SEQUENCE in symbols[DECODE] else {}
    uses[DECODE] = replace(step, sizes={**before, **step.sizes, **now})
    return uses
