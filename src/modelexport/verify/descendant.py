"""``verify A --against B``: the loss of a file's descendant (half precision, quantized, optimized) in each module.

Both run on the same inputs, without PyTorch. The loss in each call of the descendant is measured twice: *end to end*,
in one run of each file, and *per module*, with the values of the first file fed to each segment of the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.limits import BATCH_BYTES
from modelexport.errors import InputsError, UsageError
from modelexport.graph.boundaries import find_boundaries
from modelexport.graph.nodes import may_be, required_inputs
from modelexport.graph.owners import owner_of
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import CPU, open_session, run_session, split_batches, with_outputs
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.flattening import runnable
from modelexport.traces.reference import open_reference, reference_path
from modelexport.verify.differences import ALLOWED_UNITS, UNITS, Difference, Verdict, compare_arrays
from modelexport.verify.matching import WHOLE_UNITS
from modelexport.verify.segments import GIVEN, owners_between, segmented
from modelexport.verify.verdicts import CallStatus

_MOST = 0.03
"""The limit for the loss of a whole run, if many units would exceed it: in half precision."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """One value in both files."""

    difference: Difference
    """The verdict with the looser tolerance of the two element types."""
    norm: float | None = None
    """The norm of the difference divided by the norm of the value in the first file."""
    cosine: float | None = None
    """The cosine of the angle between the two as vectors; ``None`` if one is zero."""


class CallLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one call."""

    address: str
    tag: str
    status: CallStatus
    reason: str = ""
    nodes: int = 0
    """Its own nodes in the second file."""
    end_to_end: Loss | None = None
    """The worst of the values that it returns, in one run of each file."""
    per_module: Loss | None = None
    """The worst of the values that its own nodes compute from the first file's values."""


class AgainstReport(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two tagged files."""

    outputs: list[Loss]
    calls: list[CallLoss]
    """Every call of the first file, in the order in which they began."""
    inputs: str
    """``reference values`` of the first file, or ``random``."""
    provider: str

    @property
    def agrees(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.verdict == "agree"

    @property
    def verdict(self) -> Verdict:
        """``differ`` if anything does, ``not compared`` if nothing was, else ``agree``."""
        statuses = {loss.difference.status for loss in self.outputs} | {call.status for call in self.calls}
        return "differ" if "differ" in statuses else "agree" if "agree" in statuses else "not compared"

    @property
    def ranked(self) -> list[CallLoss]:
        """The calls whose own results can be compared, the largest loss first."""
        measured = [call for call in self.calls if call.per_module is not None]
        return sorted(measured, key=lambda call: -_weight(call.per_module))


def verify_against(
    path: str | Path,
    other: str | Path,
    *,
    modules: Sequence[str] = (),
    provider: str = CPU,
    seed: int = 0,
    batch_bytes: int = BATCH_BYTES,
) -> AgainstReport:
    """Compare a tagged file with a descendant of it, module by module, without PyTorch.

    Values of the two files are paired if both sidecars assign them to the same place of the same call, or else if they
    have the same name.

    Args:
        path: The tagged file to compare with. The inputs of its reference values are used if it has them.
        other: A tagged file with the same calls, whose loss is measured.
        modules: Selectors of the calls to compare, with those inside them; by default all.
        provider: The execution provider of ONNX Runtime, for both.
        seed: For random inputs.

    Raises:
        FileFormatError: A file is missing or has no tags.
        InputsError: The files do not take the same inputs, or no random ones fit.
        UsageError: ONNX Runtime cannot load a file, a module or provider does not exist, or the files have no value in
            common.
    """
    one, two = read_tagged(path), read_tagged(other)
    chosen = one.select(*modules).inside if modules else frozenset()
    given, source = _inputs(one, provider, seed)
    comparison = _Comparison(one, two, _pairs(one, two), given, _fit(given, two), provider, batch_bytes)
    if not comparison.pairs:
        raise UsageError(f"{other} has no value of a module in common with {path}: it is not a descendant of it")
    outputs = comparison.outputs()
    end_to_end, types = comparison.end_to_end()
    per_module = comparison.per_module(types)
    return AgainstReport(
        outputs=outputs,
        calls=list(_calls(one, two, comparison.pairs, end_to_end, per_module, chosen)),
        inputs=source,
        provider=provider,
    )


@dataclass(frozen=True)
class _Comparison:
    """Runs of two files, and the losses of the second."""

    one: TaggedFile
    two: TaggedFile
    pairs: Mapping[str, str]
    """Boundary values of the first file to their values in the second."""
    given: Mapping[str, Any]
    """Inputs of the first file."""
    fed: Mapping[str, Any]
    """The same for the second."""
    provider: str
    batch_bytes: int

    def _batches(self) -> Iterator[list[str]]:
        """The values to compare, in batches that fit in memory."""
        return split_batches(_sizes(self.one, self.pairs), self.batch_bytes)

    def outputs(self) -> list[Loss]:
        """The losses of the outputs."""
        first, second = self.one.model.graph.outputs, self.two.model.graph.outputs
        if len(first) != len(second):
            raise UsageError(
                f"{self.one.path} and {self.two.path} have different numbers of outputs: they are not of one model"
            )
        names = {a.name or "": b.name or "" for a, b in zip(first, second, strict=True)}
        right = _whole(self.one, self.given, names, self.provider)
        found = _whole(self.two, self.fed, names.values(), self.provider)
        return [_loss(name, right[name], found[names[name]], WHOLE_UNITS) for name in names]

    def end_to_end(self) -> tuple[dict[str, Loss], dict[str, Any]]:
        """The loss of each value in one run of each file, and the element types of the second file's values."""
        losses: dict[str, Loss] = {}
        types: dict[str, Any] = {}
        for batch in self._batches():
            right = _values(self.one, self.given, batch, self.provider)
            found = _values(self.two, self.fed, [self.pairs[name] for name in batch], self.provider)
            types.update((name, array.dtype) for name, array in found.items())
            losses.update((name, _loss(name, right[name], found[self.pairs[name]], WHOLE_UNITS)) for name in batch)
        return losses, types

    def per_module(self, types: Mapping[str, Any]) -> dict[str, Loss]:
        """The loss of each value if the segment of the second file before it gets the first file's values."""
        _set_types(self.two.model, types)
        losses: dict[str, Loss] = {}
        back = {b: a for a, b in self.pairs.items()}
        for batch in self._batches():
            cut = segmented(self.two.model, back, [self.pairs[name] for name in batch])
            needed = [str(value.name) for value in required_inputs(cut)]
            boundaries = {name: back[name.removesuffix(GIVEN)] for name in needed if name.endswith(GIVEN)}
            right = _values(self.one, self.given, {*batch, *boundaries.values()}, self.provider)
            pieces = open_session(cut, folder=self.two.path.parent, provider=self.provider)
            feeds = {
                name: right[boundaries[name]].astype(types[name.removesuffix(GIVEN)])
                if name in boundaries
                else self.fed[name]
                for name in needed
            }
            found = run_session(pieces, feeds)
            losses.update((name, _loss(name, right[name], found[self.pairs[name]])) for name in batch)
        return losses


def _inputs(tagged: TaggedFile, provider: str, seed: int) -> tuple[Mapping[str, Any], str]:
    if reference_path(tagged.path).is_file():
        with open_reference(tagged) as reference:
            return reference.inputs, "reference values"
    with runnable(tagged.path, tagged.encoding) as file:
        return make_random_inputs(
            tagged.model, open_session(file, provider=provider, optimized=True), seed=seed
        ), "random"


def _fit(given: Mapping[str, Any], tagged: TaggedFile) -> dict[str, Any]:
    """Inputs with the names and element types of another file: by name, or by order if names differ."""
    wanted = required_inputs(tagged.model)
    if len(wanted) != len(given):
        raise InputsError(
            f"{tagged.path} takes {len(wanted)} inputs, not {len(given)}: it is not a descendant of the file"
        )
    names = [value.name or "" for value in wanted]
    arrays = [given[name] for name in names] if set(names) == set(given) else list(given.values())
    return {
        name: array.astype(value.dtype.numpy()) if value.dtype is not None else array
        for name, value, array in zip(names, wanted, arrays, strict=True)
    }


def _whole(tagged: TaggedFile, feeds: Mapping[str, Any], names: Collection[str], provider: str) -> dict[str, Any]:
    """The outputs of a file, which may include inputs or initializers themselves."""
    with runnable(tagged.path, tagged.encoding) as file:
        found = run_session(open_session(file, provider=provider), feeds)
    return {name: found[name] for name in names}


def _values(tagged: TaggedFile, feeds: Mapping[str, Any], names: Collection[str], provider: str) -> dict[str, Any]:
    made = _made(tagged.model)
    model = with_outputs(tagged.model, [made[name] for name in names])
    return run_session(open_session(model, folder=tagged.path.parent, provider=provider), feeds)


def _made(model: ir.Model) -> dict[str, ir.Value]:
    return {value.name or "": value for node in model.graph for value in node.outputs}


def _ports(tagged: TaggedFile) -> dict[tuple[str, str, int], str]:
    """Call, side and position to the name of a value; without a sidecar, those at the boundary of the call's nodes."""
    if tagged.hierarchy is None:
        return {
            (call.address, side, index): value.name or ""
            for call, boundary in find_boundaries(tagged.model, tagged.calls).items()
            for side, values in (("inputs", boundary.inputs), ("outputs", boundary.outputs))
            for index, value in enumerate(values)
        }
    return {
        (call.address, side, index): tensor.value
        for call in tagged.hierarchy.calls
        for side, tensors in (("inputs", call.inputs), ("outputs", call.outputs))
        for index, tensor in enumerate(tensors)
        if tensor.value is not None
    }


def _pairs(one: TaggedFile, two: TaggedFile) -> dict[str, str]:
    """Boundary values of the first file to their values in the second, in the order of the first."""
    known, made = _made(one.model), _made(two.model)
    ports = _ports(one)
    places = _ports(two) if one.hierarchy is not None and two.hierarchy is not None else {}
    # A tool that fuses nodes may keep the old name for a new value; the sidecar then has the right one.
    renamed = {name for port, name in places.items() if ports.get(port, name) != name}
    found: dict[str, str] = {}
    taken: set[str] = set()
    for port, name in ports.items():
        same = places.get(port)
        match = same if same in made else name if name in made and name not in renamed else None
        if match is not None and name in known and not may_be(known[name].shape, made[match].shape):
            continue  # a tool may move a reshape and keep the name at its old place
        if name in known and match is not None and match not in taken and name not in found:
            found[name] = match
            taken.add(match)
    return {name: found[name] for name in known if name in found}


def _sizes(tagged: TaggedFile, names: Collection[str]) -> dict[str, int]:
    """Sizes in bytes; an unknown one is taken to be the largest known of any value."""
    made = _made(tagged.model)
    shapes = {name: list(shape) if (shape := made[name].shape) is not None else [None] * 4 for name in names}
    largest = max((size for shape in shapes.values() for size in shape if isinstance(size, int)), default=1)
    return {name: 8 * prod(size if isinstance(size, int) else largest for size in shapes[name]) for name in names}


def _set_types(model: ir.Model, types: Mapping[str, Any]) -> None:
    """Set the element types of values to those of a run: tools may omit them, and an input needs one."""
    for name, value in _made(model).items():
        if name in types and value.dtype is None:
            value.dtype = ir.DataType.from_numpy(types[name])


def _loss(name: str, right: Any, found: Any, units: float = ALLOWED_UNITS) -> Loss:
    floats = str(right.dtype) in UNITS and str(found.dtype) in UNITS
    if right.shape != found.shape or not floats:
        return Loss(difference=compare_arrays(name, right, found))
    unit = max(UNITS[str(right.dtype)], UNITS[str(found.dtype)])
    a, b = right.astype(np.float64), found.astype(np.float64)
    units = min(units, max(ALLOWED_UNITS, _MOST / unit))
    difference = compare_arrays(name, a, b, units=units * unit / UNITS["float64"])
    difference = msgspec.structs.replace(difference, dtype=str(found.dtype), noise=unit)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    length, other = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    return Loss(
        difference=difference,
        norm=float(np.linalg.norm(b - a)) / length if length else None,
        cosine=float(a @ b) / (length * other) if length and other else None,
    )


def _weight(loss: Loss | None) -> float:
    """The order of losses: values that cannot be compared are worst, the others by the norm."""
    if loss is None:
        return -1.0
    if loss.difference.nans or (loss.norm is None and loss.difference.status == "differ"):
        return float("inf")
    return loss.norm if loss.norm is not None else loss.difference.absolute or 0.0


def _calls(
    one: TaggedFile,
    two: TaggedFile,
    pairs: Mapping[str, str],
    end_to_end: Mapping[str, Loss],
    per_module: Mapping[str, Loss],
    modules: Collection[ModuleCall],
) -> Iterator[CallLoss]:
    boundaries = set(pairs.values())
    producers = {value.name or "": node for node in two.model.graph for value in node.outputs}
    own: dict[str, list[Loss]] = defaultdict(list)
    for name, loss in per_module.items():
        for address in owners_between(producers[pairs[name]], boundaries):
            own[address].append(loss)
    returned: dict[str, list[Loss]] = defaultdict(list)
    for (address, side, _), name in _ports(one).items():
        if side == "outputs" and name in end_to_end:
            returned[address].append(end_to_end[name])
    counts: dict[str, int] = defaultdict(int)
    inside: set[str] = set()
    for node in two.nodes:
        owner = owner_of(node)
        if owner is not None:
            counts[owner.call.address] += 1
            for call in owner.calls:
                inside.update(above.address for above in two.calls.stack(call) if call in two.calls)
    for traced in one.calls:
        if modules and traced.call not in modules:
            continue
        address = traced.call.address
        made = max(own[address], key=_weight, default=None)
        through = max(returned[address], key=_weight, default=None)
        decisive = made or through
        status: CallStatus
        if address not in inside:
            status, reason = "no nodes", ""
        elif decisive is None:
            status, reason = "not compared", "none of the values that it returns is in both files"
        else:
            status, reason = decisive.difference.status, decisive.difference.reason
        yield CallLoss(
            address=address,
            tag=one.tags[traced.call],
            status=status,
            reason=reason,
            nodes=counts[address],
            end_to_end=through,
            per_module=made,
        )
