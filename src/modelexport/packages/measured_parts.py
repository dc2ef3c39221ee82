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
from modelexport.errors import InputsError, UsageError
from modelexport.files.given_models import Source, as_path
from modelexport.measure.costs import CostTable, cost
from modelexport.measure.profiled_runs import Level
from modelexport.measure.profiles import ModuleProfile, profile
from modelexport.measure.run_inputs import random_feeds, read_feeds
from modelexport.packages.generator import ENCODERS, PAST, Generator
from modelexport.runtime.sessions import CPU, open_session, run_session
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.package import read_package

PREFILL, DECODE = "prefill", "decode"
_PROMPT = 32
"""Tokens of a prompt whose length is not given."""
_TOKENS = ("decoder_input_ids", "input_ids", "inputs_embeds")
"""The input that has the tokens of a step, or their embeddings: the first two axes are the batch and the tokens."""
_IDS = 4096
"""How many tokens are embedded at once."""

Feeds = dict[str, tuple[dict[str, Any], str]]
"""Name of a use of a part to its inputs, and where they come from."""


def symbols_of(tagged: TaggedFile) -> Iterator[str]:
    """The names of the dynamic axes of a file's inputs."""
    return (symbol for value in tagged.model.graph.inputs for symbol in _open(value))


def _open(value: ir.Value) -> list[str]:
    sizes = (size for size in value.shape or () if isinstance(size, ir.SymbolicDim))
    return [size.value for size in sizes if size.value is not None and size.value.isidentifier()]


def cache_axes(tagged: TaggedFile) -> tuple[str, list[str]]:
    """The dynamic axes of a part that generates: of the tokens (empty if fixed), and those that only its cache has."""
    others = {value.name or "": _open(value) for value in tagged.model.graph.inputs}
    own = [name for name in others if name.startswith(PAST) and ".encoder." not in name]
    cached = {symbol for name in own for symbol in others[name]}
    cached -= {symbol for name, symbols in others.items() if not name.startswith(PAST) for symbol in symbols}
    tokens = _token_axes(tagged)
    return (tokens[-1] if len(tokens) == 2 else ""), sorted(cached)


def _token_axes(tagged: TaggedFile) -> list[str]:
    inputs = {value.name: value for value in tagged.model.graph.inputs}
    return next((_open(inputs[name]) for name in _TOKENS if name in inputs), [])


def generation_feeds(
    generator: Generator,
    uses: Mapping[str, TaggedFile],
    given: Mapping[str, Any],
    sizes: Mapping[str, int],
    provider: str,
    seed: int,
) -> Feeds:
    """What the parts get in the first step, and the decoder in the second, after a prompt as long as its cache.

    Raises:
        InputsError: The prompt is too short for the image or the sound that the package takes.
        UsageError: An input is missing, or ONNX Runtime does not run a part.
    """
    step = uses[DECODE]
    query, past = cache_axes(step)
    prompts = _Prompts(uses, generator, given, sizes, provider, seed)
    length = sizes.get(query, 1 if "encoder" in uses else 0)
    first = prompts.of(length)
    length = first[generator.how.tokens].shape[1]
    cached = next((sizes[symbol] for symbol in past if symbol in sizes), length)
    by_use = {PREFILL: first, DECODE: first if cached == length or given else prompts.of(cached)}
    found: Feeds = {}
    for name, index in ((PREFILL, 0), (DECODE, 1)):
        steps = list(generator.steps(by_use[name], index + 1))
        tokens = plural(by_use[name][generator.how.tokens].shape[1], "token")
        text = f"a random prompt of {tokens}" if index == 0 else f"the step after a random prompt of {tokens}"
        if index == 0:
            before = [part for part in uses if part not in (PREFILL, DECODE)]
            found = {part: (dict(generator.taken[part]), _source(given, "random")) for part in before}
        found[name] = dict(steps[index].feeds), _source(given, text)
    return found


class _Prompts:
    """Random prompts of any length, with the same image or sound."""

    def __init__(
        self,
        uses: Mapping[str, TaggedFile],
        generator: Generator,
        given: Mapping[str, Any],
        sizes: Mapping[str, int],
        provider: str,
        seed: int,
    ) -> None:
        self._generator, self._given, self._seed = generator, given, seed
        graph = uses[DECODE].model.graph
        logits = next((value.shape for value in graph.outputs if value.name == "logits"), None)
        self._vocabulary = logits[-1] if logits is not None and isinstance(logits[-1], int) else 10
        symbols = _token_axes(uses[DECODE])
        self._batch = sizes.get(symbols[0], 1) if symbols else 1
        self._encoded: dict[str, Any] = {}
        for part in ENCODERS:
            if part in uses:
                self._encoded |= self._drawn_for(uses[part], sizes, provider)
        self._places = self._placeholders() if "embedding" in uses and generator.how.tokens not in given else []

    def of(self, length: int) -> dict[str, Any]:
        """What generation begins with: what is given, and random tokens and inputs of the encoders.

        Args:
            length: The number of tokens; 0 for any.
        """
        token_input, places = self._generator.how.tokens, self._places
        length = length or max(_PROMPT, len(places) + 2)
        if len(places) >= length:
            raise InputsError(
                f"an image or sound takes {len(places)} tokens of a prompt: --size sequence has to be larger than that"
            )
        random = np.random.default_rng(self._seed)
        drawn = random.integers(1, max(self._vocabulary, 2), (self._batch, length)).astype(np.int64)
        if places:
            drawn[np.isin(drawn, places)] = next(token for token in range(1, self._vocabulary) if token not in places)
            drawn[:, 1 : len(places) + 1] = places
        values = dict(self._encoded)
        values[token_input] = np.asarray(self._given.get(token_input, drawn))
        if token_input == "input_ids":
            values["attention_mask"] = np.ones_like(values[token_input])
        return values | {name: np.asarray(array) for name, array in self._given.items()}

    def _drawn_for(self, encoder: TaggedFile, sizes: Mapping[str, int], provider: str) -> dict[str, Any]:
        """The inputs of an encoder: as many rows as there are prompts, or so many times those that it always takes."""
        shapes = [value.shape for value in encoder.model.graph.inputs if value.shape]
        rows = {str(shape[0]) for shape in shapes}
        axes = {symbol: sizes.get(symbol, self._batch if symbol in rows else _PROMPT) for symbol in symbols_of(encoder)}
        how: dict[str, Any] = {"given": self._given, "provider": provider, "seed": self._seed}
        drawn = random_feeds(encoder, encoder.path, axes, **how)
        times = self._batch if all(isinstance(shape[0], int) for shape in shapes) else 1
        return {name: np.concatenate([array] * times) for name, array in drawn.items()}

    def _placeholders(self) -> list[int]:
        """The placeholder token, once for each feature of a row: the token whose embedding is a feature."""
        features: dict[str, Any] = {}
        for part in self._generator.how.before:
            if part in ENCODERS:
                features |= self._generator.run_before(part, self._encoded)
        found: list[int] = []
        for start in range(0, self._vocabulary, _IDS):
            ids = np.arange(start, min(start + _IDS, self._vocabulary), dtype=np.int64)[None]
            one, other = (
                self._generator.run("embedding", {self._generator.how.tokens: ids, **features_})["inputs_embeds"]
                for features_ in (features, {name: array + 1 for name, array in features.items()})
            )
            found += ids[(one != other).any(-1)].tolist()
        rows = min((len(array) for array in features.values()), default=0)
        return found[:1] * (rows // self._batch)


def chained_feeds(
    uses: Mapping[str, TaggedFile],
    sizes: Mapping[str, Mapping[str, int]],
    given: Mapping[str, Any],
    provider: str,
    seed: int,
) -> Feeds:
    """What each part gets where they run one after the other.

    Args:
        sizes: Of the dynamic axes of each part.

    Raises:
        InputsError, UsageError: No random inputs fit, or ONNX Runtime does not run a part.
    """
    values, found = dict(given), {}
    for name, tagged in uses.items():
        feeds = random_feeds(tagged, tagged.path, sizes[name], given=values, provider=provider, seed=seed)
        before = [name for name in feeds if name in values and name not in given]
        text = f"random, and {', '.join(before)} of parts before it" if before else "random"
        found[name] = feeds, _source(given, text)
        values |= feeds
        values |= run_session(open_session(tagged.path, provider=provider, optimized=True), feeds)
    return found


def _source(given: Mapping[str, Any], text: str) -> str:
    return f"given ({', '.join(given)}), else {text}" if given else text


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
        generator = Generator.of(read_package(path), provider=provider)
        made = generation_feeds(generator, tagged, given, sizes or {}, provider, seed)
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
