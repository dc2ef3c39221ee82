"""Tensors that a file has in another layout: with other axes first, or with its rows in another order.

An exporter drops two transposes that undo each other around a recurrence, and batched experts compute their tokens in
the order of the experts. A norm does not depend on an order: of all values only those of one norm are looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.limits import BATCH_BYTES
from modelexport.runtime import sessions
from modelexport.runtime.choices import Choice
from modelexport.runtime.evidence import Computed, Decision, Evidence, RandomPart, SeenTensor
from modelexport.runtime.fingerprints import NEAR, fingerprint_of
from modelexport.verify.drawing import random_nodes
from modelexport.verify.matching import FileRun
from modelexport.verify.segments import given_name, segmented

_CLOSE = 1e-3
"""How far, in norms, a value of a whole run may be from a tensor and still be it."""
_MOST_AXES = 5


class LaidOut:
    """A PyTorch run, with contents that are those of tensors in another order."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._arrays: dict[str, Any] = {}
        self._bases: dict[str, str] = {}

    @property
    def tensors(self) -> Sequence[SeenTensor]:
        return self._evidence.tensors

    @property
    def computed(self) -> Sequence[Computed]:
        return self._evidence.computed

    @property
    def quiet(self) -> Sequence[Computed]:
        return self._evidence.quiet

    @property
    def choices(self) -> Sequence[Choice]:
        return self._evidence.choices

    @property
    def decisions(self) -> Sequence[Decision]:
        return self._evidence.decisions

    @property
    def random(self) -> RandomPart:
        return self._evidence.random

    @property
    def outputs(self) -> Sequence[Any]:
        return self._evidence.outputs

    @property
    def parents(self) -> Mapping[ModuleCall, ModuleCall | None]:
        return self._evidence.parents

    def array(self, content: str) -> Any:
        return self._arrays[content] if content in self._arrays else self._evidence.array(content)

    def in_float64(self, given: Collection[str] = ()) -> Evidence | None:
        return self._evidence.in_float64({self.base(content) for content in given})

    def rounded_otherwise(self, given: Collection[str] = ()) -> Evidence | None:
        return self._evidence.rounded_otherwise({self.base(content) for content in given})

    def base(self, content: str) -> str:
        """The content of a tensor as PyTorch has it."""
        return self._bases.get(content, content)

    def add(self, content: str, name: str, array: Any) -> str:
        """A content in the layout of a value of the file."""
        laid = f"{content} as {name}"
        self._arrays[laid], self._bases[laid] = np.ascontiguousarray(array).reshape(-1), content
        return laid


def other_layouts(evidence: LaidOut, laid: str, name: str, shape: tuple[int, ...]) -> Iterator[str]:
    """The contents that a value may be instead of one in another order of its axes: that of PyTorch, and other orders.

    Nothing for a content with its rows in another order, of which there are too many.
    """
    content, now = evidence.base(laid), evidence.array(laid)
    shapes = {tensor.shape for tensor in evidence.tensors if tensor.content == content}
    for whole in shapes:
        right = evidence.array(content).reshape(whole)
        orders = [one.reshape(-1) for one in _permutations(right, shape)]
        if any(np.array_equal(now, one) for one in orders):
            for index, one in enumerate([right.reshape(-1), *orders]):
                if not np.array_equal(now, one):
                    yield evidence.add(content, f"{name} in order {index}", one)


def with_rows_of(evidence: LaidOut, laid: str, width: int, content: str, name: str, other: int) -> str | None:
    """A content with its rows in the order that those of another one have, which is added.

    Args:
        laid: A content with its rows in another order.
        width: The length of its rows.
        content: As PyTorch has it, or in any order.
        name: The value that it is for.
        other: The length of its rows.

    Returns:
        ``None`` if it does not have as many rows, or has them in this order already.
    """
    base = evidence.base(content)
    right, now, rows = evidence.array(evidence.base(laid)), evidence.array(laid), evidence.array(base)
    if not width or not other or right.size // width * other != rows.size:
        return None
    ordered = rows.reshape(-1, other)[_order_of_rows(right.reshape(-1, width), now.reshape(-1, width))]
    if np.array_equal(ordered.reshape(-1), evidence.array(content).reshape(-1)):
        return None
    return evidence.add(base, f"{name} in rows of {laid}", ordered)


def find_layouts(
    model: ir.Model,
    folder: Path,
    feeds: Mapping[str, Any],
    run: FileRun,
    evidence: LaidOut,
    *,
    given: Mapping[str, Any],
    provider: str,
) -> dict[str, str]:
    """Values that are tensors of a PyTorch run in another layout, to the contents in that layout, which are added.

    Args:
        given: As for :func:`run_file`.

    Raises:
        UsageError: ONNX Runtime does not run the file.
    """
    pairs = list(_alike(model, run, evidence))
    if not pairs:
        return {}
    names = list(dict.fromkeys(name for name, _ in pairs))
    cut = segmented(model, given, names, {name: array.dtype for name, array in given.items()})
    session = sessions.open_session(cut, folder=folder, provider=provider)
    inputs = {**feeds, **{given_name(name): array for name, array in given.items()}}
    arrays = sessions.run_session(session, {name: inputs[name] for name in sessions.input_names(session)})
    found: dict[str, str] = {}
    for name, tensor in pairs:
        if name in found or tensor.content in (evidence.base(content) for content in found.values()):
            continue
        right = evidence.array(tensor.content).reshape(tensor.shape)
        laid = _laid_out(right, arrays[name])
        if laid is not None:
            found[name] = evidence.add(tensor.content, name, laid)
    return found


def _alike(model: ir.Model, run: FileRun, evidence: LaidOut) -> Iterator[tuple[str, SeenTensor]]:
    """Values and tensors of one size, type and norm, neither of which is recognised.

    Rows that are in another order in each run are in none of PyTorch's.
    """
    drawn = random_nodes(model.graph)
    seen = set(run.contents.values())
    values: dict[tuple[str, int], list[str]] = {}
    size = 0
    for node in model.graph:
        for value in node.outputs if node not in drawn else ():
            name = value.name or ""
            if name in run.prints and name not in run.contents and run.prints[name].telling:
                values.setdefault((run.dtypes[name], run.prints[name].size), []).append(name)
    for tensor in evidence.tensors:
        if tensor.content in seen or len(tensor.shape) < 2:
            continue
        seen.add(tensor.content)
        count = int(np.prod(tensor.shape))
        here = values.get((tensor.dtype, count), [])
        norm = fingerprint_of(evidence.array(tensor.content)).norm if here else 0.0
        for name in here:
            if abs(run.prints[name].norm - norm) <= NEAR * norm and size < BATCH_BYTES:
                size += 8 * count
                yield name, tensor


def _laid_out(right: Any, value: Any) -> Any | None:
    """A tensor in the layout of a value; ``None`` if it is not in any."""
    for permuted in _permutations(right, value.shape):
        if _is_near(permuted, value):
            return permuted
    return _in_rows(right, value)


def _permutations(right: Any, shape: tuple[int, ...]) -> Iterator[Any]:
    plain = np.squeeze(right)
    wanted = tuple(size for size in shape if size != 1)
    if not 2 <= plain.ndim <= _MOST_AXES or sorted(plain.shape) != sorted(wanted):
        return
    for axes in itertools.permutations(range(plain.ndim)):
        if tuple(plain.shape[axis] for axis in axes) == wanted and list(axes) != sorted(axes):
            yield plain.transpose(axes)


def _in_rows(right: Any, value: Any) -> Any | None:
    """A tensor with its rows in the order that a value has them."""
    width = right.shape[-1]
    if width < 2 or not value.ndim or value.shape[-1] != width or right.size // width < 2:
        return None
    one, two = right.reshape(-1, width), value.reshape(-1, width)
    laid = one[_order_of_rows(one, two)]
    return laid if _is_near(laid, two) else None


def _order_of_rows(right: Any, found: Any) -> Any:
    """For each row of a matrix the index of that row of another which it is, if they have the same rows."""
    direction = np.random.default_rng(isqrt(right.size)).standard_normal(right.shape[-1])
    one, two = (np.argsort(rows.astype(np.float64) @ direction, kind="stable") for rows in (right, found))
    order = np.empty_like(one)
    order[two] = one
    return order


def _is_near(right: Any, value: Any) -> bool:
    one, two = right.reshape(-1).astype(np.float64), value.reshape(-1).astype(np.float64)
    if not np.isfinite(one).all() or not np.isfinite(two).all():
        return False
    return bool(np.linalg.norm(one - two) <= _CLOSE * np.linalg.norm(one))
