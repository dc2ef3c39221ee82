"""Equal calls are decomposed once: the first of them; the others get a copy of what became of it.

``torch.onnx`` decomposes what was captured, and inserts conversions of types: both run every node again.
Each call that is equal to an earlier one (:mod:`.equal_calls`) is one node of the operator ``modelexport::repeat``
during these steps, and is replaced by copies of the first one's nodes after it. These have the annotations of the call.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.export import ExportedProgram

from modelexport.capture.once.equal_calls import FxRegion, find_repeats, is_item
from modelexport.capture.patches import usable
from modelexport.core.calls import TracedCall

_POSITION = "modelexport.position"
"""Annotation of a node of the first call of a class: which class, and which of its nodes."""
_SUFFIX = re.compile(r"_\d+$")


def _repeat(results: Any, of: Any, sizes: Any, by: Any, by_sizes: Any, number: int) -> list[torch.Tensor]:
    """Stand in for the nodes that made ``made`` from ``of`` and ``sizes``, run on ``by`` and ``by_sizes``."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in results]


torch.library.custom_op(
    "modelexport::repeat",
    _repeat,
    mutates_args=(),
    schema="(Tensor[] made, Tensor[] of, SymInt[] sizes, Tensor[] by, SymInt[] by_sizes, int number) -> Tensor[]",
).register_fake(_repeat)


class _CopyError(Exception):
    """A class of calls cannot be copied: the graph is decomposed as a whole."""


def decomposed_once(
    whole: Callable[..., ExportedProgram], calls: Sequence[TracedCall], address_key: str
) -> Callable[..., ExportedProgram]:
    """The preparation of ``torch.onnx``, which does the same work once. Nodes are named in their order.

    Args:
        calls: The calls of the capture; they are complete when decomposition begins.
        address_key: The annotation that has the address of a node's call.
    """

    def prepared(program: ExportedProgram, *args: Any, **kwargs: Any) -> ExportedProgram:
        classes = find_repeats(program.graph, calls, address_key) if usable("memory") else []
        if classes:
            graph = program.graph_module.graph
            copies = [region for equal in classes for region in equal[1:]]
            program.graph_module.graph = _reduced(graph, classes)
            try:
                result = whole(program, *args, **kwargs)
                _rebuild(result, copies, [which for which, equal in enumerate(classes) for _ in equal[1:]])
                return result
            except _CopyError:
                program.graph_module.graph = graph
        result = whole(program, *args, **kwargs)
        _rebuild(result, (), ())
        return result

    return prepared


def _reduced(graph: torch.fx.Graph, classes: Sequence[tuple[FxRegion, ...]]) -> torch.fx.Graph:
    """A copy of a graph in which each region but the first of its class is one node."""
    reduced = torch.fx.Graph()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    ends: dict[torch.fx.Node, tuple[int, FxRegion, FxRegion, bool]] = {}
    positions: dict[torch.fx.Node, tuple[int, int]] = {}
    skipped: set[torch.fx.Node] = set()
    number = 0
    for which, (first, *others) in enumerate(classes):
        positions.update({node: (which, index) for node, index in first.position.items()})
        for region in others:
            ends[region.nodes[-1]] = number, first, region, region is others[0]
            skipped.update(region.nodes)
            number += 1
    for node in graph.nodes:
        if node not in skipped:
            env[node] = reduced.node_copy(node, env.__getitem__)
            env[node].name = node.name
            if node in positions:
                env[node].meta["custom"] = {**(node.meta.get("custom") or {}), _POSITION: positions[node]}
        elif node in ends:
            _insert(reduced, env, *ends[node])
    return reduced


def _insert(
    graph: torch.fx.Graph,
    env: dict[torch.fx.Node, torch.fx.Node],
    number: int,
    first: FxRegion,
    region: FxRegion,
    tells: bool,
) -> None:
    """Append the node that takes the place of a region.

    Args:
        tells: Whether it tells what the first region of its class gets. Once is enough, and PyTorch wraps, hashes and
            traces each tensor that a node gets several times.
    """
    first_results = [env[first.nodes[index]] for index in first.outputs]
    args = (first_results, *_split(first.inputs if tells else (), env), *_split(region.inputs, env), number)
    node = graph.call_function(torch.ops.modelexport.repeat.default, args)
    results = [region.nodes[index] for index in region.outputs]
    node.meta["val"] = [result.meta["val"] for result in results]
    for index, result in enumerate(results):
        env[result] = graph.call_function(operator.getitem, (node, index))
        env[result].meta["val"] = result.meta["val"]


def _split(
    nodes: Sequence[torch.fx.Node], env: Mapping[torch.fx.Node, torch.fx.Node]
) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """Tensors, and sizes."""
    tensors = [env[node] for node in nodes if isinstance(node.meta["val"], torch.Tensor)]
    return tensors, [env[node] for node in nodes if not isinstance(node.meta["val"], torch.Tensor)]


def _rebuild(program: ExportedProgram, copies: Sequence[FxRegion], classes: Sequence[int]) -> None:
    """Write the graph of a decomposed program anew, in place, with the nodes of every call.

    Names are counted in the order of the nodes, so that they do not depend on which of them are copies.

    Args:
        copies: The calls that one node took the place of, by its number.
        classes: Which class each of them belongs to.

    Raises:
        _CopyError: Before anything is changed.
    """
    old = program.graph_module.graph
    new = torch.fx.Graph()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in old.nodes:
        if node.op == "placeholder":  # first, so that nothing else has their names
            env[node] = new.node_copy(node)
            env[node].name = node.name  # also one that torch.fx avoids, such as `input`
    bodies: dict[int, _Body] = {}
    for node in old.nodes:
        if node in env:
            continue
        if _is_repeat(node):
            which = classes[node.args[5]]
            if which not in bodies:
                bodies[which] = _body(node, copies[node.args[5]])
            results = _copied(new, env, node, bodies[which], copies[node.args[5]])
            env.update((user, results[user.args[1]]) for user in node.users if is_item(user))
        elif not (is_item(node) and _is_repeat(node.args[0])):
            env[node] = _copy(new, node, env.__getitem__)
    names = {node.name: env[node].name for node in env}
    for spec in program.graph_signature.output_specs:
        if hasattr(spec.arg, "name"):
            spec.arg.name = names.get(spec.arg.name, spec.arg.name)
    program.graph_module.graph = new


def _is_repeat(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is torch.ops.modelexport.repeat.default


def _copy(
    graph: torch.fx.Graph, node: torch.fx.Node, transform: Callable[[torch.fx.Node], torch.fx.Node]
) -> torch.fx.Node:
    """Append a copy of a node, without our mark, named after what it does and its place in the graph."""
    args = torch.fx.node.map_arg(node.args, transform)
    kwargs = torch.fx.node.map_arg(node.kwargs, transform)
    name = _SUFFIX.sub("", node.name) if node.op == "call_function" else node.name
    copy = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    copy.meta = dict(node.meta)
    custom = copy.meta.get("custom")
    if custom and _POSITION in custom:
        copy.meta["custom"] = {key: value for key, value in custom.items() if key != _POSITION}
    return copy


@dataclass(frozen=True)
class _Body:
    """The decomposed nodes of the first call of a class, what it got and what it made."""

    nodes: Sequence[torch.fx.Node]
    tensors: Sequence[torch.fx.Node]
    sizes: Sequence[Any]
    """Nodes and numbers."""
    made: Sequence[torch.fx.Node]


def _body(repeat: torch.fx.Node, region: FxRegion) -> _Body:
    """The decomposed nodes of the first call of a class, in order, by the first of its repeats.

    Raises:
        _CopyError: They use a tensor from outside that is not an input of the call, or the first repeat was removed,
            because nothing uses its results.
    """
    arguments: Any = repeat.args  # of the operator above, whose types torch.fx does not know
    results, tensors, sizes = arguments[:3]
    if len(tensors) + len(sizes) != len(region.inputs):
        raise _CopyError
    outside = {*tensors, *(size for size in sizes if isinstance(size, torch.fx.Node))}
    inside: set[torch.fx.Node] = set()
    pending = [node for node in results if node not in outside]
    while pending:
        node = pending.pop()
        if node in inside:
            continue
        if _position(node) is None:
            if node.op != "get_attr" and isinstance(node.meta.get("val"), torch.Tensor):
                raise _CopyError
            continue  # a size or a constant that all calls have in common
        inside.add(node)
        pending.extend(source for source in node.all_input_nodes if source not in outside)
    return _Body(sorted(inside), tensors, sizes, results)


def _position(node: torch.fx.Node) -> int | None:
    """Which node of its call a decomposed node comes from. Decomposition makes the items of a result anew, unmarked."""
    made_by: Any = node.args[0] if is_item(node) else node
    mark = (made_by.meta.get("custom") or {}).get(_POSITION)
    return None if mark is None else mark[1]


def _copied(
    graph: torch.fx.Graph,
    env: Mapping[torch.fx.Node, torch.fx.Node],
    repeat: torch.fx.Node,
    body: _Body,
    region: FxRegion,
) -> list[torch.fx.Node]:
    """Append the nodes of a call that is equal to another one.

    Returns:
        The nodes of its results.
    """
    arguments: Any = repeat.args
    by, by_sizes = arguments[3:5]
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for source, target in [*zip(body.tensors, by, strict=True), *zip(body.sizes, by_sizes, strict=True)]:
        if isinstance(source, torch.fx.Node):
            copies[source] = env[target]

    def transform(node: torch.fx.Node) -> torch.fx.Node:
        return copies[node] if node in copies else env[node]

    for node in body.nodes:
        copies[node] = _copy(graph, node, transform)
        position = _position(node)
        assert position is not None  # as it is for every node of a body
        captured = region.nodes[position].meta
        for key in ("custom", "nn_module_stack", "stack_trace"):
            if copies[node].meta.pop(key, None) is not None and captured.get(key):
                copies[node].meta[key] = captured[key]
    return [transform(node) for node in body.made]
