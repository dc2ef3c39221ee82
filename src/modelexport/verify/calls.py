"""Does each module of a file compute what the PyTorch module computes? Needs no PyTorch, only the values of its run.

Two runs of the file are compared with PyTorch's, at every value that a module gets or returns:

- *end to end*: the file as it is, from its inputs to its outputs;
- *per module*: the file cut at all those values, each stretch between them fed with PyTorch's, so that an error shows
  where it is made (:mod:`modelexport.segments`).

And the tags themselves: what enters and leaves the nodes of a call has to be what its module gets and returns.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.limits import BATCH_BYTES
from modelexport.errors import FileFormatError
from modelexport.format import documents
from modelexport.format.dtypes import dtype_name
from modelexport.graph.boundaries import CallBoundary, find_boundaries
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import Difference, compare_arrays, worst
from modelexport.verify.segments import GIVEN, owners_between, segmented
from modelexport.verify.verdicts import CallVerdict


class Reference(Protocol):
    """Where the right values come from: a run of the PyTorch model, or what an earlier one left in a file."""

    @property
    def available(self) -> Collection[str]:
        """Names of the values of the file that it has."""

    def __call__(self, names: Collection[str]) -> Mapping[str, Any]:
        """The arrays of some of them."""


def sidecar_of(tagged: TaggedFile) -> documents.Hierarchy:
    """The sidecar of a file.

    Raises:
        FileFormatError: It is missing, or contradicts the file.
    """
    if tagged.hierarchy is None:
        sidecar = tagged.path.with_suffix(".hierarchy.json")
        raise FileFormatError(f"{sidecar} is missing: it says which values of {tagged.path} the modules get and return")
    return tagged.hierarchy


@dataclass(frozen=True)
class _Ports:
    """The values of the file at the boundaries of its modules, as the sidecar knows them."""

    tagged: TaggedFile
    sidecar: documents.Hierarchy
    available: Collection[str]

    @cached_property
    def of_call(self) -> Mapping[str, tuple[set[str], set[str]]]:
        """Address to the names of the values that the module gets and returns."""
        return {
            call.address: (
                {tensor.value for tensor in call.inputs if tensor.value is not None},
                {tensor.value for tensor in call.outputs if tensor.value is not None},
            )
            for call in self.sidecar.calls
        }

    @cached_property
    def made(self) -> Mapping[str, ir.Node]:
        """Name of a value of the main graph to the node that makes it."""
        return {value.name or "": node for node in self.tagged.model.graph for value in node.outputs}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Every boundary value that a node of the main graph makes and the reference has, in order, to its bytes.

        A dynamic size counts as the largest size of any tensor that is known.
        """
        tensors = {t.value: t for call in self.sidecar.calls for t in (*call.inputs, *call.outputs) if t.value}
        known = [size for tensor in tensors.values() for size in tensor.shape if isinstance(size, int)]
        largest = max(known, default=1)
        return {
            name: 8 * prod(size if isinstance(size, int) else largest for size in tensors[name].shape)
            for name, node in self.made.items()
            if name in tensors and name in self.available and _is_of_type(node, name, tensors[name])
        }


def verify_calls(
    tagged: TaggedFile,
    sidecar: documents.Hierarchy,
    feeds: Mapping[str, Any],
    given: Reference,
    *,
    provider: str = "CPUExecutionProvider",
    modules: Collection[ModuleCall] = (),
    batch_bytes: int = BATCH_BYTES,
) -> list[CallVerdict]:
    """Compare every call of a file, or those of ``modules`` alone, with the values of a PyTorch run.

    Args:
        feeds: The inputs of the file.
        given: The right values; asked once for each batch of them.
        provider: The execution provider of ONNX Runtime.

    Raises:
        UsageError: ONNX Runtime does not load the file, or does not have the provider.
    """
    ports = _Ports(tagged, sidecar, given.available)
    shown = [call for call in sidecar.calls if not modules or ModuleCall.parse(call.address) in modules]
    wanted = _wanted(ports, shown, everything=not modules)
    end_to_end: dict[str, Difference] = {}
    per_module: dict[str, Difference] = {}
    folder = tagged.path.parent
    for batch in sessions.split_batches({name: ports.sizes[name] for name in wanted}, batch_bytes):
        cut = segmented(tagged.model, ports.sizes, batch)
        needed = {str(value.name).removesuffix(GIVEN) for value in cut.graph.inputs} - set(feeds)
        right = given({*batch, *needed})
        values = [_output(ports.made[name], name) for name in batch]
        whole = sessions.open_session(sessions.with_outputs(tagged.model, values), folder=folder, provider=provider)
        actual = sessions.run_session(whole, {name: feeds[name] for name in sessions.input_names(whole)})
        end_to_end.update((name, compare_arrays(name, right[name], array)) for name, array in actual.items())
        del whole
        pieces = sessions.open_session(cut, folder=folder, provider=provider)
        inputs = {
            name: right[name.removesuffix(GIVEN)] if name.endswith(GIVEN) else feeds[name]
            for name in sessions.input_names(pieces)
        }
        actual = sessions.run_session(pieces, inputs)
        per_module.update((name, compare_arrays(name, right[name], array)) for name, array in actual.items())
    return list(_verdicts(ports, shown, end_to_end, per_module))


def sampled_calls(tagged: TaggedFile, count: int, *, seed: int = 0) -> list[ModuleCall]:
    """Some of the calls that own nodes, in the order in which they began; all if there are no more than ``count``."""
    owning = {call for node in tagged.nodes if (owner := owner_of(node)) is not None for call in owner.calls}
    calls = [traced.call for traced in tagged.calls if traced.call in owning]
    chosen = set(random.Random(seed).sample(range(len(calls)), min(count, len(calls))))
    return [call for index, call in enumerate(calls) if index in chosen]


def verify_alone(
    tagged: TaggedFile,
    sidecar: documents.Hierarchy,
    feeds: Mapping[str, Any],
    given: Reference,
    calls: Collection[ModuleCall],
    *,
    provider: str = sessions.CPU,
) -> tuple[list[CallVerdict], set[str]]:
    """Compare what the nodes of some calls compute from PyTorch's values, each call cut out and run by itself.

    Args:
        calls: The calls themselves; those inside them only where they are listed too.

    Returns:
        What was found, and the names of the initializers that were needed for it.

    Raises:
        UsageError: ONNX Runtime does not load a cut, or does not have the provider.
    """
    ports = _Ports(tagged, sidecar, given.available)
    shown = [call for call in sidecar.calls if ModuleCall.parse(call.address) in calls]
    cuts: list[tuple[ir.Model, list[str]]] = []
    needed: set[str] = set()
    weights: set[str] = set()
    for call in shown:
        if wanted := _wanted(ports, [call], everything=False):
            cut = segmented(tagged.model, ports.sizes, wanted)
            cuts.append((cut, wanted))
            needed.update(wanted, (str(value.name).removesuffix(GIVEN) for value in cut.graph.inputs))
            weights.update(value.name or "" for value in initializers(cut))
    right = given(needed - set(feeds))
    per_module: dict[str, Difference] = {}
    for cut, wanted in cuts:
        session = sessions.open_session(cut, folder=tagged.path.parent, provider=provider)
        names = sessions.input_names(session)
        inputs = {n: right[n.removesuffix(GIVEN)] if n.endswith(GIVEN) else feeds[n] for n in names}
        actual = sessions.run_session(session, inputs)
        per_module.update((name, compare_arrays(name, right[name], actual[name])) for name in wanted)
    return list(_verdicts(ports, shown, {}, per_module)), weights


def boundary_values(
    tagged: TaggedFile, sidecar: documents.Hierarchy, available: Collection[str], modules: Collection[ModuleCall] = ()
) -> list[str]:
    """The values that :func:`verify_calls` asks its reference for, of those that it has, in the order of the file."""
    ports = _Ports(tagged, sidecar, available)
    if not modules:
        return list(ports.sizes)
    shown = [call for call in sidecar.calls if ModuleCall.parse(call.address) in modules]
    wanted = _wanted(ports, shown, everything=False)
    cut = segmented(tagged.model, ports.sizes, wanted)
    needed = {*wanted, *(str(value.name).removesuffix(GIVEN) for value in cut.graph.inputs)}
    return [name for name in ports.sizes if name in needed]


def _wanted(ports: _Ports, shown: Sequence[documents.CallEntry], *, everything: bool) -> list[str]:
    if everything:
        return list(ports.sizes)
    addresses = {call.address for call in shown}
    outputs = {name for address in addresses for name in ports.of_call[address][1]}
    return [
        name
        for name in ports.sizes
        if name in outputs or ((owner := owner_of(ports.made[name])) and owner.call.address in addresses)
    ]


def _output(node: ir.Node, name: str) -> ir.Value:
    return next(value for value in node.outputs if value.name == name)


def _is_of_type(node: ir.Node, name: str, tensor: documents.CallTensor) -> bool:
    """Whether the file's value can be what PyTorch's tensor is: an exporter may make a mask of another type."""
    value = _output(node, name)
    return value.dtype is None or dtype_name(value.dtype) == tensor.dtype


def _verdicts(
    ports: _Ports,
    shown: Sequence[documents.CallEntry],
    end_to_end: Mapping[str, Difference],
    per_module: Mapping[str, Difference],
) -> Iterator[CallVerdict]:
    blamed: dict[str, list[Difference]] = defaultdict(list)
    for name, difference in per_module.items():
        for address in _makers(ports, name, segment=difference.status != "agree"):
            blamed[address].append(difference)
    misplaced = _misplaced(ports)
    reasons = {module.path: module.reason for module in ports.sidecar.modules}
    inside = _addresses_with_nodes(ports.tagged)
    for call in shown:
        outputs = [end_to_end[name] for name in ports.of_call[call.address][1] if name in end_to_end]
        own, chain = worst(blamed[call.address]), worst(outputs)
        status, reason = _status(call, own, chain, misplaced.get(call.address, ""), call.address in inside, reasons)
        yield CallVerdict(
            address=call.address,
            tag=call.tag,
            status=status,
            reason=reason,
            nodes=call.nodes,
            end_to_end=chain,
            per_module=own,
        )


def _status(
    call: documents.CallEntry,
    own: Difference | None,
    chain: Difference | None,
    misplaced: str,
    has_nodes: bool,
    reasons: Mapping[str, str],
) -> tuple[str, str]:
    if not has_nodes:
        return "no nodes", reasons.get(ModuleCall.parse(call.address).path, "")
    if misplaced:
        return "differ", misplaced
    if own is not None and own.status == "differ" and chain is not None and chain.status == "agree":
        # An unstable sort, say: rows in another order inside, the same result.
        return "agree", f"it computes {own.name} otherwise than PyTorch, and returns the same"
    decisive = own or chain
    if decisive is not None:
        return decisive.status, decisive.reason
    if call.enter is None:
        return "not comparable", "inside a branch, of which PyTorch shows no values"
    return "not comparable", "PyTorch and the file have no value in common that it returns"


def _makers(ports: _Ports, name: str, *, segment: bool) -> set[str]:
    """The calls whose nodes make a boundary value; with ``segment`` all that compute between the boundaries and it."""
    node = ports.made[name]
    if segment:
        return owners_between(node, ports.sizes)
    owner = owner_of(node)
    return {owner.call.address} if owner is not None else set()


def _misplaced(ports: _Ports) -> dict[str, str]:
    """Calls whose nodes take or give values that their modules, by the sidecar, do not: their tags are wrong."""
    free = _free_of_inputs(ports.tagged.model)
    recorded = {call.address: call.boundary for call in ports.sidecar.calls}
    found: dict[str, str] = {}
    for call, boundary in find_boundaries(ports.tagged.model, ports.tagged.calls).items():
        gets, returns = ports.of_call.get(call.address, (set(), set()))
        known = recorded.get(call.address)
        taken = _names(boundary, "inputs") - gets - free - set(known.inputs if known else ())
        left = _names(boundary, "outputs") - returns - free - set(known.outputs if known else ())
        if taken or left:
            told = [f"takes {', '.join(sorted(taken))}"] if taken else []
            told += [f"gives {', '.join(sorted(left))}"] if left else []
            found[call.address] = f"its nodes' tags are wrong: it {' and '.join(told)}, which its module does not"
    return found


def _names(boundary: CallBoundary, side: str) -> set[str]:
    return {value.name or "" for value in getattr(boundary, side)}


def _free_of_inputs(model: ir.Model) -> set[str]:
    """Values that depend on sizes, initializers and constants alone."""
    free = {value.name or "" for value in initializers(model)}
    for node in all_nodes(model):
        if node.op_type in ("Shape", "Size") or all(value is None or value.name in free for value in node.inputs):
            free.update(value.name or "" for value in node.outputs)
    return free


def _addresses_with_nodes(tagged: TaggedFile) -> set[str]:
    """The calls that have nodes, of their own or inside."""
    return {
        around.address
        for node in tagged.nodes
        if (owner := owner_of(node)) is not None
        for call in owner.calls
        for around in tagged.calls.stack(call)
    }
