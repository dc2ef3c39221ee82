"""Matches values of a file with tensors of a PyTorch run by their numbers, in one run of the file."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall, Side, TracedCall
from modelexport.core.limits import BATCH_BYTES
from modelexport.graph.requested import requested_outputs
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Evidence, SeenTensor
from modelexport.runtime.fingerprints import NEAR, Fingerprint, Index, fingerprint_of
from modelexport.runtime.shapes import shapes_in_run
from modelexport.surgery.repeating import values_taken
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import UNITS, Difference, blocks, compare_arrays
from modelexport.verify.drawing import random_nodes
from modelexport.verify.segments import given_name, segmented

_HINT = 1e-3
"""The distance, in norms, up to which a value of the whole run is matched with a tensor: rounding adds up."""


WHOLE_UNITS = 4096.0
"""The error in units of roundoff up to which a value of a whole run agrees: noise adds up from call to call."""


@dataclass
class FileRun:
    """The values of a file in one run, end to end."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    prints: dict[str, Fingerprint] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    """Name of a value to the content of the PyTorch run that it has."""
    arrays: dict[str, Any] = field(default_factory=dict)
    """The requested values."""
    errors: dict[str, float] = field(default_factory=dict)
    """The distance of each recognized value from its content, in norms."""
    differences: dict[str, Difference] = field(default_factory=dict)


def run_file(
    model: ir.Model,
    folder: Path,
    feeds: Mapping[str, Any],
    evidence: Evidence,
    *,
    provider: str,
    keep: Collection[str] = (),
    given: Mapping[str, Any] | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> FileRun:
    """Run a file without the runtime's optimizer and recognize the contents of a PyTorch run in its values.

    Args:
        keep: Names of values whose arrays are in the result.
        given: Values of the main graph to the arrays that their users get instead.
    """
    drawn = {value.name or "" for node in random_nodes(model.graph) for value in node.outputs}
    reached = {tensor.content for tensor in evidence.tensors if tensor.random is not False} if drawn else set()
    contents = _Contents(evidence)
    if given:
        made = [v.name or "" for node in model.graph for v in node.outputs if v.name and not _is_sequence(v)]
        model = segmented(model, given, made, {name: array.dtype for name, array in given.items()})
        feeds = {**feeds, **{given_name(name): array for name, array in given.items()}}
    values = [v for node in model.graph for v in node.outputs if v.name and not _is_sequence(v)]
    found = FileRun()
    largest = max((prod(t.shape) for t in evidence.tensors), default=1)
    shapes = shapes_in_run(model, {name: array.shape for name, array in feeds.items()})
    sizes = {v.name or "": _width(v) * _size(shapes.get(v.name or ""), largest) for v in values}
    by_name = {v.name or "": v for v in values}
    batches = list(sessions.split_batches(sizes, batch_bytes))
    for arrays in _computed(model, folder, feeds, [[by_name[name] for name in batch] for batch in batches], provider):
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                continue
            found.shapes[name], found.dtypes[name] = array.shape, str(array.dtype)
            own = found.prints[name] = fingerprint_of(array)
            if name in keep:
                found.arrays[name] = array
            unit = UNITS.get(str(array.dtype), 0.0)
            best, error = contents.nearest(own, array, max(NEAR, 2 * unit), reached if name in drawn else None)
            if best is not None and error <= max(_HINT, 4 * unit):
                found.contents[name], found.errors[name] = best, error
                right = evidence.array(best).reshape(array.shape)
                found.differences[name] = compare_arrays(name, right, array, units=WHOLE_UNITS)
    return found


class _Member(NamedTuple):
    """A content of a group."""

    apart: float
    """Its distance from the first content of the group, in norms of that."""
    content: str
    fingerprint: Fingerprint


class _Contents:
    """The contents of a PyTorch run, in groups of those whose fingerprints are near that of the first.

    Two arrays are at least as far from each other as their distances from a third one differ. So among many contents
    that are nearly the same, as those between residual layers, the nearest one is found by a few distances.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._groups: dict[str, Index[str]] = defaultdict(Index)
        """For each element type the first contents of the groups."""
        self._members: dict[str, list[_Member]] = {}
        """The first content of each group to all, in the order of their distances from it."""
        for content in dict.fromkeys(tensor.content for tensor in evidence.tensors):
            array = evidence.array(content)
            own, groups = fingerprint_of(array), self._groups[str(array.dtype)]
            first = next(groups.near(own), None)
            if first is None:
                groups.add(own, content)
                self._members[content] = [_Member(0.0, content, own)]
            else:
                apart = distance(evidence.array(first), array)
                insort(self._members[first], _Member(apart, content, own), key=_apart)

    def nearest(
        self, own: Fingerprint, array: Any, apart: float, among: Collection[str] | None = None
    ) -> tuple[str | None, float]:
        """The content nearest to an array of those whose fingerprints are near, and how far it is, in its norms.

        Args:
            apart: The largest distance of the fingerprints.
            among: The contents that count; all by default.
        """
        best, least = None, float("inf")
        for first in self._groups[str(array.dtype)].near(own, _AROUND * apart):
            away = distance(self._evidence.array(first), array)
            for its, content, fingerprint in _outwards(self._members[first], away):
                if (max(its, away) * _ROUNDED[0] - min(its, away) * _ROUNDED[1]) * _LIKE >= least:
                    break
                if not fingerprint.near(own, apart) or (among is not None and content not in among):
                    continue
                error = away if content == first else distance(self._evidence.array(content), array)
                if error < least:
                    best, least = content, error
        return best, least


_AROUND = 2.1
"""How far the first of a group may be, in distances that its members may be from it, and from what is looked for."""
_LIKE = 0.9
"""Less than the norm of the first of a group, in norms of any content near what is near it."""
_ROUNDED = (1 - 1e-5, 1 + 1e-5)
"""More than the rounding of distances."""


def _apart(member: _Member) -> float:
    return member.apart


def _outwards(members: Sequence[_Member], away: float) -> Iterator[_Member]:
    """The members of a group, those first that are about as far from its first content."""
    after = bisect_left(members, away, key=_apart)
    before = after - 1
    while before >= 0 or after < len(members):
        if after == len(members) or (before >= 0 and away - members[before].apart < members[after].apart - away):
            yield members[before]
            before -= 1
        else:
            yield members[after]
            after += 1


def _computed(
    model: ir.Model, folder: Path, feeds: Mapping[str, Any], batches: Sequence[Sequence[ir.Value]], provider: str
) -> Iterator[dict[str, Any]]:
    """The values of each batch of the graph's values, in their order; each goes on from what is computed already."""
    last_uses = _last_uses(model.graph) if len(batches) > 1 else {}
    held: dict[str, Any] = {}
    for batch in batches:
        given = {**feeds, **{given_name(name): array for name, array in held.items()}}
        if len(batches) > 1:  # the runtime runs what no output needs, too
            names, dtypes = [value.name or "" for value in batch], {name: array.dtype for name, array in held.items()}
            session = sessions.open_session(segmented(model, held, names, dtypes), folder=folder, provider=provider)
        else:
            with _outputs(model, batch):
                session = sessions.open_session(model, folder=folder, provider=provider)
        arrays = sessions.run_session(session, {name: given[name] for name in sessions.input_names(session)})
        del session, given
        held.update((v.name or "", arrays[v.name or ""]) for v in batch if _can_be_given(v, arrays[v.name or ""]))
        ends = last_uses.get(batch[-1].producer(), 0)
        held = {name: array for name, array in held.items() if last_uses.get(name, -1) >= ends}
        yield arrays


def _last_uses(graph: ir.Graph) -> dict[Any, int]:
    """The index of each node, and for each name of a value that of the last node that uses it."""
    found: dict[Any, int] = {}
    for index, node in enumerate(graph):
        found[node] = index
        found.update((value.name or "", index) for value in values_taken(node))
    return found


def _can_be_given(value: ir.Value, array: Any) -> bool:
    """Whether a value can be an input, too. If not, it is computed again where it is needed."""
    return (
        isinstance(array, np.ndarray)
        and value.dtype is not None
        and value.dtype.numpy() == array.dtype
        and (array.dtype.kind in "fiub")
    )


@contextmanager
def _outputs(model: ir.Model, values: Sequence[ir.Value]) -> Iterator[None]:
    """Other outputs of a model inside the block: a copy of a large graph takes longer than to load it."""
    outputs = model.graph.outputs
    before = list(outputs)
    outputs.clear()
    outputs.extend(values)
    try:
        yield
    finally:
        outputs.clear()
        outputs.extend(before)


def distance(right: Any, found: Any) -> float:
    """The distance of two arrays in norms, independent of their shapes; infinite if they cannot be compared."""
    if right.size != found.size or right.dtype != found.dtype:
        return float("inf")
    if found.dtype.kind in "iub":
        return 0.0 if np.array_equal(right.reshape(-1), found.reshape(-1)) else float("inf")
    if found.dtype == np.float32:
        with np.errstate(invalid="ignore", over="ignore"):  # masks are of minus infinity
            sums = [0.0, 0.0]
            for a, b in blocks(right.reshape(-1), found.reshape(-1)):
                apart = b - a
                sums = [sums[0] + float(a @ a), sums[1] + float(apart @ apart)]
            size, error = (float(np.sqrt(one)) for one in sums)
        if 1e-12 < size < 1e12 and error < 1e12:  # its squares neither vanish nor overflow
            return error / size
    one, two = right.reshape(-1).astype(np.float64), found.reshape(-1).astype(np.float64)
    # A mask's minus infinity may be another large number in the file.
    finite = (np.abs(one) < 1e18) & (np.abs(two) < 1e18)
    if np.count_nonzero(finite) != np.count_nonzero(np.abs(one) < 1e18):
        return float("inf")
    if not np.array_equal(one[~finite], two[~finite], equal_nan=True):
        return float("inf")
    one, two = one[finite], two[finite]
    size = float(np.linalg.norm(one))
    error = float(np.linalg.norm(two - one))
    return error / size if size else 0.0 if error == 0 else float("inf")


def _is_sequence(value: ir.Value) -> bool:
    return isinstance(value.type, ir.SequenceType | ir.OptionalType)


def _width(value: ir.Value) -> int:
    """Bytes of an element."""
    return max(int(value.dtype.itemsize), 1) if value.dtype is not None else 8


def _size(shape: Sequence[int | None] | None, largest: int) -> int:
    """Elements of a value in a run; an unknown size is taken to be that of the largest recorded tensor."""
    if shape is None:
        return largest
    known = prod(size for size in shape if size is not None)
    return known if None not in shape else max(known, largest)


def first_makers(evidence: Evidence) -> dict[str, ModuleCall]:
    """Each content to the call that computed it, found from the first boundary that it crosses.

    A tensor that first appears when a call returns was computed by that call; one that first appears when a call begins
    was computed by its caller. Inputs of the root were not computed by a call.
    """
    makers: dict[str, ModuleCall] = {}
    given: set[str] = set()
    for tensor in evidence.tensors:
        if tensor.content in makers or tensor.content in given:
            continue
        if tensor.side == "outputs":
            makers[tensor.content] = tensor.call
        elif (parent := evidence.parents[tensor.call]) is not None:
            makers[tensor.content] = parent
        else:
            given.add(tensor.content)
    return makers


def returned_values(tagged: TaggedFile, evidence: Evidence) -> list[tuple[str, SeenTensor]]:
    """The names of the file's outputs, each with what the model returns there; none if their numbers differ."""
    root = tagged.calls.calls[0].call
    returned = [tensor for tensor in evidence.tensors if tensor.call == root and tensor.side == "outputs"]
    requested = requested_outputs(tagged.model.metadata_props, returned)
    right = [tensor for tensor in requested if 0 not in tensor.shape]  # what holds nothing is left out
    values = [value.name or "" for value in tagged.model.graph.outputs]
    return list(zip(values, right, strict=True)) if len(right) == len(values) else []


def paths_called_as_often(calls: Iterable[TracedCall], evidence: Evidence) -> set[str]:
    """The modules that PyTorch called as often as some calls of the file do: those of others have other numbers there.

    A module may be called for each group of tokens in one and once in the other.
    """
    there, here = Counter(call.path for call in evidence.parents), Counter(traced.call.path for traced in calls)
    return {path for path, count in here.items() if there[path] == count}


def tensors_by_call(evidence: Evidence, side: Side) -> dict[ModuleCall, list[SeenTensor]]:
    """The tensors that each call got, or returned."""
    return tensors_of_calls(evidence.tensors, side)


def tensors_of_calls(tensors: Iterable[SeenTensor], side: Side) -> dict[ModuleCall, list[SeenTensor]]:
    """Those of some tensors that each call got, or returned."""
    found: dict[ModuleCall, list[SeenTensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.side == side:
            found[tensor.call].append(tensor)
    return found
