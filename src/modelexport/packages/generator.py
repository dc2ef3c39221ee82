"""Greedy generation with the parts of a package in ONNX Runtime, step by step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from modelexport.errors import UsageError
from modelexport.runtime.sessions import CPU, input_names, open_session, run_session

PAST, PRESENT = "past_key_values", "present"
CACHE_POSITION = "cache_position"
"""The input of a graph with a static cache: the positions in it that the new tokens take, ``[sequence]``."""
ENCODERS = ("encoder", "vision", "speech")
"""Parts that run once, before the first step."""
_PAST_AXIS = 2
_BATCH = "batch"
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


@dataclass(frozen=True)
class Step:
    """One step of a generation."""

    part: str
    feeds: Mapping[str, Any]
    """The inputs of the part."""
    logits: Any
    """The logits of the last position of each row: ``[batch, vocabulary]``."""
    tokens: Any
    """The next token of each row: ``[batch]``."""


class Generator:
    """Generates tokens with the graphs of a package.

    Args:
        files: Name of a part to its file: ``decode``; for a model with an encoder ``encoder``; for a separate first
            step ``prefill``; for one that takes images or sound ``vision`` or ``speech``, and ``embedding``.
    """

    def __init__(self, files: Mapping[str, Path], *, provider: str = CPU) -> None:
        self.sessions = {
            name: open_session(file, provider=provider, optimized=True, runs_often=True) for name, file in files.items()
        }
        if "decode" not in self.sessions:
            raise UsageError(f"the package has no part decode, so it cannot generate; it has {', '.join(files)}")
        # Asking a session for its inputs takes as long as a small graph.
        self._inputs = {
            name: {one.name: one for one in session.get_inputs()} for name, session in self.sessions.items()
        }
        inputs = self._inputs["decode"]
        self.token_input = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        self.static_cache = _static_cache(self.sessions["decode"])
        """The number of positions of the cache; ``None`` if it grows."""
        self.taken: dict[str, Mapping[str, Any]] = {}
        """Name of a part to the inputs that it last ran with."""

    def steps(
        self, inputs: Mapping[str, Any], new_tokens: int, *, eos: Collection[int] = (), pad: int = 0
    ) -> Iterator[Step]:
        """Generate greedily; ends early when every row has ended.

        Args:
            inputs: ``input_ids`` and ``attention_mask``, ``[batch, sequence]``, with rows padded on the left; for a
                model with an encoder also the encoder's inputs and ``decoder_input_ids``.
            eos: Tokens that end a row; it is continued with ``pad``.

        Raises:
            UsageError: The prompt and the new tokens are too many for a static cache, or an input is missing.
        """
        values = dict(inputs)
        values |= self.encode(values)
        if "positions" in self.sessions:
            values |= self.run("positions", values)
        tokens = np.asarray(values.pop(self.token_input), dtype=np.int64)
        self._check_length(tokens.shape[1], new_tokens)
        own_mask = self.token_input == "input_ids"
        ended = np.zeros(len(tokens), dtype=bool)
        cache = _as_past(values)
        for index in range(new_tokens):
            part = "prefill" if index == 0 and "prefill" in self.sessions else "decode"
            outputs = self.run(part, self._given(part, values, tokens, cache))
            logits = outputs["logits"][:, -1, :]
            chosen = np.where(ended, pad, logits.argmax(-1))
            yield Step(part, self.taken[part], logits, chosen)
            ended |= np.isin(chosen, list(eos))
            if ended.all():
                return
            cache |= _as_past(outputs)
            tokens = chosen[:, None].astype(np.int64)
            if own_mask and "attention_mask" in values:
                grown = np.ones((len(tokens), 1), dtype=values["attention_mask"].dtype)
                values["attention_mask"] = np.concatenate([values["attention_mask"], grown], axis=1)
            if "positions" in self.sessions:  # text goes on after the furthest position, on all axes
                last = values["position_ids"].max(axis=(0, 2), keepdims=True)
                values["position_ids"] = np.repeat(last + 1, len(values["position_ids"]), axis=0)

    def run(self, part: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a part.

        Args:
            values: Name to array; others than the inputs of the part are ignored.

        Raises:
            UsageError: An input is missing, or ONNX Runtime does not run the part.
        """
        wanted = self._inputs[part]
        if missing := [name for name in wanted if name not in values]:
            raise UsageError(f"the part {part} needs the input {missing[0]}, which was not given")
        self.taken[part] = {name: values[name] for name in wanted}
        return run_session(self.sessions[part], self.taken[part])

    def encode(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The results of the encoders of the package.

        Raises:
            UsageError: An input is missing or of another size, or ONNX Runtime does not run a part.
        """
        encoders = [name for name in ENCODERS if name in self.sessions]
        return {name: array for part in encoders for name, array in self._encoded(part, values).items()}

    def _encoded(self, part: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The results of an encoder; one that takes a fixed number of rows runs once for each so many of them."""
        rows = {name: one.shape[0] for name, one in self._inputs[part].items() if isinstance(one.shape[0], int)}
        times = {len(values[name]) / count for name, count in rows.items() if name in values}
        if not times or times == {1}:
            return self.run(part, values)
        if len(times) > 1 or (count := times.pop()) % 1:
            told = ", ".join(f"{count} of {name}" for name, count in rows.items())
            raise UsageError(
                f"the part {part} takes images of one size, {told} for each: export again with the size of yours"
            )
        shares = [
            {name: np.split(values[name], int(count))[index] for name in self._inputs[part] if name in values}
            for index in range(int(count))
        ]
        made = [self.run(part, share) for share in shares]
        given_back = self.sessions[part].get_outputs()
        empty = {value.name: np.zeros((0, *value.shape[1:]), _DTYPES[value.type]) for value in given_back}
        return {name: np.concatenate([none, *(one[name] for one in made)]) for name, none in empty.items()}

    def _on_axes(self, part: str, positions: Any) -> Any:
        """Positions of text for a model with several axes of positions, on which text has the same."""
        value = self._inputs[part].get("position_ids")
        shape = [] if value is None else value.shape
        return np.repeat(positions[None], shape[0], axis=0) if len(shape) > positions.ndim else positions

    def _check_length(self, prompt: int, new_tokens: int) -> None:
        size = self.static_cache
        if size is None or prompt + new_tokens - 1 <= size:
            return
        if prompt > size:
            raise UsageError(
                f"the prompt has {prompt} tokens, and the static cache {size} positions: give a shorter prompt, or "
                f"export with --static-cache {prompt} or more"
            )
        raise UsageError(
            f"the static cache has {size} positions, and {new_tokens} new tokens after a prompt of {prompt} need "
            f"{prompt + new_tokens - 1}: generate {size - prompt + 1} at most (--new-tokens)"
        )

    def _given(self, part: str, values: Mapping[str, Any], tokens: Any, cache: Mapping[str, Any]) -> dict[str, Any]:
        given = {**values, self.token_input: tokens}
        if "attention_mask" in values and "position_ids" not in values and self.token_input == "input_ids":
            positions = np.maximum(np.cumsum(values["attention_mask"], axis=1) - 1, 0)
            given["position_ids"] = self._on_axes(part, positions[:, -tokens.shape[1] :].astype(np.int64))
        if self.static_cache is not None:
            mask = given["attention_mask"]
            filled = mask.shape[1]
            given["attention_mask"] = np.pad(mask, ((0, 0), (0, self.static_cache - filled)))
            given[CACHE_POSITION] = np.arange(filled - tokens.shape[1], filled)
        if "embedding" in self.sessions:
            given |= self.run("embedding", given)
        for value in self._inputs[part].values():
            if value.name.startswith(PAST):
                given[value.name] = cache[value.name] if value.name in cache else _empty(value, len(tokens))
        return given


def _static_cache(session: onnxruntime.InferenceSession) -> int | None:
    if CACHE_POSITION not in input_names(session):
        return None
    past = next(value for value in session.get_inputs() if value.name.startswith(PAST))
    return int(past.shape[_PAST_AXIS])


def _as_past(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The caches among the outputs of a part, under the names with which the next one takes them."""
    return {f"{PAST}{name.removeprefix(PRESENT)}": v for name, v in outputs.items() if name.startswith(PRESENT)}


def _empty(value: onnxruntime.NodeArg, batch: int) -> Any:
    """An empty cache: dynamic sizes are 0, except the batch."""
    sizes = [size if isinstance(size, int) else batch if size == _BATCH else 0 for size in value.shape]
    return np.zeros(sizes, dtype=_DTYPES.get(value.type, np.int64))
