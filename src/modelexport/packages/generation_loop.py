"""Greedy generation with the parts of a package in ONNX Runtime, step by step, as the manifest says how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelexport.errors import UsageError
from modelexport.format.documents import Hierarchy
from modelexport.format.package_manifest import Generation, Rows, Start
from modelexport.runtime.devices import CPU
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.package import Package

PAST, PRESENT = "past_key_values", "present"
CACHE_ARGUMENTS = ("cache", "past_key_values")
"""The names of a cache in transformers, as an argument and as a result: ``cache`` since 5.24."""
PROMPT = "prompt"
"""The prefix of the names of outputs of a part that changes the prompt."""
CACHE_POSITION = "cache_position"
"""The input of a graph with a static cache: the positions in it that the new tokens take, ``[sequence]``."""
ENCODERS = ("encoder", "vision", "speech")
"""Parts that run once, before the first step."""
_BEFORE = (*ENCODERS, "positions")
TOKENS = ("decoder_input_ids", "input_ids", "inputs_embeds")
"""The input that has the tokens of a step, or their embeddings: the first two axes are the batch and the tokens."""
STEPWISE = frozenset({*TOKENS, "attention_mask", "position_ids", CACHE_POSITION})
"""Inputs to which the loop gives other values in each step."""
_PAST_AXIS = 2
IMAGE_SIZES = ("image_grid_thw",)
"""Inputs with the sizes of images in patches, ``[images, 3]``: a package that has one takes images of any size."""
PATCHES = "patches"
BATCH, SEQUENCE, PAST_SEQUENCE = "batch", "sequence", "past_sequence"
"""The axes of inputs: rows, new tokens, and the tokens that a cache has."""
_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
}


def generation_of(parts: Mapping[str, Hierarchy], rows: Rows, restart_after: int) -> Generation | None:
    """How parts generate, by the names that their inputs and outputs have in every package of ours.

    Args:
        parts: Name of a part to the document that describes it.
        restart_after: The number of tokens after which the model's own ``generate`` begins with a new cache.

    Returns:
        ``None`` if there is no part ``decode``.
    """
    if "decode" not in parts:
        return None
    inputs = {name: part.inputs for name, part in parts.items()}
    outputs = {name: [value.name for value in part.outputs] for name, part in parts.items()}
    step, first = "decode", "prefill" if "prefill" in inputs else "decode"
    ports = {port.name: port for part in (step, first) for port in inputs[part]}
    results = [name for part in inputs for name in outputs[part]]
    state = {name: f"{PAST}{name.removeprefix(PRESENT)}" for name in results if name.startswith(f"{PRESENT}.")}
    state |= {name: name.removeprefix(f"{PROMPT}.") for name in results if name.startswith(f"{PROMPT}.")}
    before = [part for part in inputs if part in _BEFORE]
    known = {state.get(name, name) for part in before for name in outputs[part]}
    # Before the first token, a state has rows and constant sizes; all others are 0.
    start = {
        port.name: Start(dtype=port.dtype, shape=[n if isinstance(n, int) or n == BATCH else 0 for n in port.shape])
        for port in inputs[first]
        if port.name.startswith(PAST) and port.name not in known
    }
    tokens = next((name for name in TOKENS if name in ports), TOKENS[0])
    sizes = {
        part: [p.shape[1] for p in inputs[part] if p.name == tokens and len(p.shape) > 1] for part in (first, step)
    }
    decodes_alone = tokens != "decoder_input_ids"
    positions, place = ports.get("position_ids"), ports.get(CACHE_POSITION)
    kept = [port.shape[_PAST_AXIS] for port in inputs[step] if port.name.startswith(PAST)] if place else []
    return Generation(
        tokens="input_ids" if tokens == "inputs_embeds" else tokens,
        first=first,
        step=step,
        rows=rows,
        one_by_one=[part for part, size in sizes.items() if size == [1]],
        before=before,
        embedding="embedding" if "embedding" in inputs else "",
        state=state,
        start=start,
        mask="attention_mask" if decodes_alone else "",
        positions="position_ids" if positions is not None and decodes_alone else "",
        position_axes=int(positions.shape[0] or 0) if positions is not None and len(positions.shape) > 2 else 0,
        cache_position=CACHE_POSITION if place else "",
        cache_size=next((size for size in kept if isinstance(size, int)), 0),
        restart_after=restart_after,
    )


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


class TokenLoop(ABC):
    """The loop that a manifest describes, over parts of any kind."""

    def __init__(self, how: Generation) -> None:
        self.how = how
        self.taken: dict[str, Mapping[str, Any]] = {}
        """Name of a part to the inputs that it last ran with."""

    @abstractmethod
    def run(self, part: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a part, those that the next run takes under the names of its inputs."""

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
        how, values = self.how, dict(inputs)
        for part in how.before:
            values |= self.run(part, values)
        tokens = np.asarray(values[how.tokens], dtype=np.int64)
        self._check(tokens, values.get(how.mask), new_tokens)
        text = _Text(how, tokens, values)
        sizes = {
            name: [len(tokens) if size == BATCH else size for size in start.shape] for name, start in how.start.items()
        }
        begun: dict[str, Any] = {name: np.zeros(sizes[name], start.dtype) for name, start in how.start.items()}
        values = begun | values
        ended = np.zeros(len(tokens), dtype=bool)
        part, count = how.first, 0
        while count < new_tokens:
            values |= text.next(part)
            if how.embedding:
                values |= self.run(how.embedding, values)
                for name in self.taken[how.embedding].keys() - {how.tokens}:  # features are of the prompt
                    values[name] = values[name][:0]
            values |= self.run(part, values)
            ran, part = part, how.step
            if text.waiting:
                continue
            logits = values["logits"][:, -1, :]
            chosen = np.where(ended, pad, logits.argmax(-1))
            yield Step(ran, self.taken[ran], logits, chosen)
            count += 1
            ended |= np.isin(chosen, list(eos))
            if ended.all():
                return
            text.add(chosen)
            if text.restarts():
                part = how.first
                values |= begun

    def _check(self, tokens: Any, mask: Any, new_tokens: int) -> None:
        """Refuse prompts that the package does not take."""
        (batch, prompt), size, rows = tokens.shape, self.how.cache_size, self.how.rows
        if rows == "one" and batch > 1:
            raise UsageError(f"the package takes one prompt at a time, not {batch}: so does the model")
        if rows == "equal" and mask is not None and not np.all(mask):
            raise UsageError("the package takes prompts of one length in a batch: run those of other lengths apart")
        if size and prompt > size:
            raise UsageError(
                f"the prompt has {prompt} tokens, and the static cache {size} positions: give a shorter prompt, or "
                f"export with --static-cache {prompt} or more"
            )
        if size and prompt + new_tokens - 1 > size:
            raise UsageError(
                f"the static cache has {size} positions, and {new_tokens} new tokens after a prompt of {prompt} need "
                f"{prompt + new_tokens - 1}: generate {size - prompt + 1} at most (--new-tokens)"
            )


class Generator(TokenLoop):
    """Generates tokens with the graphs of a package.

    Args:
        files: Name of a part to its file.
        how: How they run, as the manifest says.
    """

    def __init__(self, files: Mapping[str, Path], how: Generation, *, provider: str = CPU) -> None:
        super().__init__(how)
        self.sessions = {
            name: open_session(file, provider=provider, optimized=True, runs_often=True) for name, file in files.items()
        }
        # Asking a session for its inputs takes as long as a small graph.
        self._inputs = {
            name: {value.name: value for value in session.get_inputs()} for name, session in self.sessions.items()
        }

    @classmethod
    def of(cls, package: Package, *, provider: str = CPU) -> Generator:
        """A generator for a package."""
        if package.manifest.generation is None:
            raise UsageError(f"{package.folder} does not generate: its manifest does not say how its parts run")
        return cls(package.files, package.manifest.generation, provider=provider)

    def run(self, part: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a part, those that the next run takes under the names of its inputs.

        Args:
            values: Name to array; others than the inputs of the part are ignored.
        """
        wanted, values = self._inputs[part], {**self._without_images(part, values), **values}
        if missing := [name for name in wanted if name not in values]:
            raise UsageError(f"the part {part} needs the input {missing[0]}, which was not given")
        taken = {name: values[name] for name in wanted}
        shares = self._shares(part, taken) if part in ENCODERS else [taken]
        self.taken[part] = shares[-1] if shares else taken
        session = self.sessions[part]
        results = [run_session(session, share) for share in shares]
        outputs = results[0] if results else {}
        if len(results) != 1:
            empty = {
                value.name: np.zeros((0, *value.shape[1:]), _DTYPES[value.type]) for value in session.get_outputs()
            }
            outputs = {
                name: np.concatenate([none, *(value[name] for value in results)]) for name, none in empty.items()
            }
        return {self.how.state.get(name, name): array for name, array in outputs.items()}

    def _without_images(self, part: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a part for images, without rows, if a prompt has none."""
        of_images = self._inputs[part].keys() - {self.how.tokens, self.how.mask}
        if not self.how.embedding or part not in self.how.before or of_images & values.keys():
            return {}
        ports = (self._inputs[part][name] for name in of_images)
        return {
            port.name: np.zeros([0, *(n if isinstance(n, int) else 0 for n in port.shape[1:])], _DTYPES[port.type])
            for port in ports
        }

    def _shares(self, part: str, taken: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """What an encoder gets in each run: one that takes a fixed number of rows runs once for each that many."""
        if not all(map(len, taken.values())):  # a prompt without an image
            return []
        rows = {name: value.shape[0] for name, value in self._inputs[part].items() if isinstance(value.shape[0], int)}
        times = {len(taken[name]) / count for name, count in rows.items()}
        if not times or times == {1}:
            return [taken]
        if len(times) > 1 or (count := times.pop()) % 1:
            counts = ", ".join(f"{count} of {name}" for name, count in rows.items())
            raise UsageError(
                f"the part {part} takes images of one size, {counts} for each: export again with the size of yours"
            )
        times_of = {name: np.split(array, int(count)) for name, array in taken.items()} if count else {}
        return [{name: parts[index] for name, parts in times_of.items()} for index in range(int(count))]


class _Text:
    """The tokens of all rows with their mask and their positions, and how many of them have run."""

    def __init__(self, how: Generation, tokens: Any, values: Mapping[str, Any]) -> None:
        self._how, self._tokens, self._ran = how, tokens, 0
        self._mask = values.get(how.mask)
        self._positions = values.get(how.positions)
        if self._positions is None and self._mask is not None:
            positions = np.maximum(np.cumsum(self._mask, axis=1) - 1, 0).astype(np.int64)
            self._positions = np.stack([positions] * how.position_axes) if how.position_axes else positions

    @property
    def waiting(self) -> bool:
        """Whether there are tokens that have not run."""
        return self._ran < len(self._tokens[0])

    def next(self, part: str) -> dict[str, Any]:
        """The inputs of the next run: all tokens that have not run, or one of them."""
        how, start = self._how, self._ran
        end = self._ran = start + 1 if part in how.one_by_one else self._tokens.shape[1]
        feeds = {how.tokens: self._tokens[:, start:end]}
        if self._mask is not None:
            missing = max(how.cache_size - end, 0)
            feeds[how.mask] = np.pad(self._mask[:, :end], ((0, 0), (0, missing)))
        if self._positions is not None:
            feeds[how.positions] = self._positions[..., start:end]
        if how.cache_position:
            feeds[how.cache_position] = np.arange(start, end)
        return feeds

    def restarts(self) -> bool:
        """Whether all tokens run again, because the text has got longer than the number of ``restart_after``."""
        again = bool(0 < self._ran <= self._how.restart_after < self._tokens.shape[1])
        self._ran = 0 if again else self._ran
        return again

    def add(self, tokens: Any) -> None:
        """Add a token to each row."""
        self._tokens = np.concatenate([self._tokens, tokens[:, None].astype(np.int64)], axis=1)
        if self._mask is not None:
            grown = np.ones((len(tokens), 1), self._mask.dtype)
            self._mask = np.concatenate([self._mask, grown], axis=1)
        if self._positions is not None:  # after the furthest position, on all axes
            axes = (0, 2) if self._positions.ndim > 2 else (1,)
            last = self._positions.max(axis=axes, keepdims=True) + 1
            last = np.broadcast_to(last, (*self._positions.shape[:-1], 1))
            self._positions = np.concatenate([self._positions, last], axis=-1)
