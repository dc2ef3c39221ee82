"""What the parts of a package get when it runs: a prompt and a step after it, or parts one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.text import plural
from modelexport.errors import InputsError
from modelexport.measure.feeds import random_feeds
from modelexport.packages.generator import ENCODERS, PAST, Generator
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import TaggedFile

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
    uses: Mapping[str, TaggedFile], given: Mapping[str, Any], sizes: Mapping[str, int], provider: str, seed: int
) -> Feeds:
    """What the parts get in the first step, and the decoder in the second, after a prompt as long as its cache.

    Raises:
        InputsError: The prompt is too short for the image or the sound that the package takes.
        UsageError: An input is missing, or ONNX Runtime does not run a part.
    """
    step = uses[DECODE]
    files = {name: tagged.path for name, tagged in uses.items() if tagged is not step} | {DECODE: step.path}
    generator = Generator(files, provider=provider)
    query, past = cache_axes(step)
    prompts = _Prompts(uses, generator, given, sizes, provider, seed)
    length = sizes.get(query, 1 if "encoder" in uses else 0)
    first = prompts.of(length)
    length = first[generator.token_input].shape[1]
    cached = next((sizes[symbol] for symbol in past if symbol in sizes), length)
    by_use = {PREFILL: first, DECODE: first if cached == length or given else prompts.of(cached)}
    found: Feeds = {}
    for name, index in ((PREFILL, 0), (DECODE, 1)):
        steps = list(generator.steps(by_use[name], index + 1))
        tokens = plural(by_use[name][generator.token_input].shape[1], "token")
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
        self._places = self._placeholders() if "embedding" in uses and generator.token_input not in given else []

    def of(self, length: int) -> dict[str, Any]:
        """What generation begins with: what is given, and random tokens and inputs of the encoders.

        Args:
            length: The number of tokens; 0 for any.
        """
        token_input, places = self._generator.token_input, self._places
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
        features = self._generator.encode(self._encoded)
        found: list[int] = []
        for start in range(0, self._vocabulary, _IDS):
            ids = np.arange(start, min(start + _IDS, self._vocabulary), dtype=np.int64)[None]
            one, other = (
                self._generator.run("embedding", {self._generator.token_input: ids, **features_})["inputs_embeds"]
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
