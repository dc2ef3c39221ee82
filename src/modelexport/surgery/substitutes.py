"""What takes the place of a module: another model, one operator, or nothing.

Over 400 lines because the three kinds share how they are fitted to the values around the module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import onnx
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.errors import UsageError
from modelexport.files.onnx_models import load_onnx
from modelexport.format import documents, keys
from modelexport.graph.initializers import detach_tensors
from modelexport.graph.nodes import all_nodes, may_be
from modelexport.graph.owners import OWNER, owner_of
from modelexport.surgery.cutter import Cut
from modelexport.surgery.edited_tags import EditedTags
from modelexport.surgery.interfaces import Interface, match_names, offered_names
from modelexport.surgery.repeating import values_taken
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.weights.transforms import parameter_plan, state_dict_of


@dataclass(frozen=True)
class Site:
    """A call that is replaced: its values as they are by now, and its nodes as they were."""

    interface: Interface
    weights: Sequence[ir.Value]
    """The initializers that its nodes use, in the order of the nodes."""
    cut: Cut | None
    """The call as a model of its own, where the substitute wants it."""

    @property
    def call(self) -> ModuleCall:
        return self.interface.call


@dataclass
class Parts:
    """What is put into the graph."""

    nodes: list[ir.Node]
    outputs: list[ir.Value]
    """In the order of the site's outputs."""
    owners: Mapping[ir.Node, Owner] = field(default_factory=dict)
    """Of the nodes that the replaced call does not own itself; those of nested graphs included."""
    weights: Mapping[ir.Value, tuple[str, ...]] = field(default_factory=dict)
    """New initializers to their ``state_dict`` keys; empty for those that come from none."""
    functions: Sequence[ir.Function] = ()
    opsets: Mapping[str, int] = field(default_factory=dict)
    entries: Mapping[str, documents.StateDictEntry] = field(default_factory=dict)


class Substitute(Protocol):
    """Makes what takes a call's place."""

    @property
    def keep_body(self) -> bool:
        """Whether it wants the call as a model of its own."""

    @property
    def name(self) -> str:
        """What the tags say of it."""

    def build(self, site: Site, tags: EditedTags, used: Iterable[ModuleCall]) -> Parts:
        """New nodes for a call; changes the calls inside it in ``tags``.

        Args:
            used: The calls that own other nodes.
        """


class Identity:
    """The call gives back what it takes: for each output the first input of its type and shape."""

    name = "identity"
    keep_body = False

    def build(self, site: Site, tags: EditedTags, used: Iterable[ModuleCall]) -> Parts:
        nodes = []
        for output in site.interface.outputs:
            fitting = [value for value in site.interface.inputs if _fits(value, output)]
            if not fitting:
                raise UsageError(
                    f"'{site.call}' cannot be an identity: none of its inputs has the type and shape of its output "
                    f"'{output.name}'"
                )
            same = [value for value in fitting if _sizes(value) == _sizes(output)]
            nodes.append(ir.Node("", "Identity", [(same or fitting)[0]]))
        tags.remove_inside(site.call, used)
        return Parts(nodes, [node.outputs[0] for node in nodes])


@dataclass
class CustomOperator:
    """One node of another operator, which gets the inputs of the call and then its weights."""

    domain: str
    op_type: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    keep_body: bool = False
    """With a function of the same name whose body is the old module: for where there is no kernel."""
    inputs: Sequence[str] = ()
    """Names of what the node gets, instead: arguments, values, ``state_dict`` keys."""
    _bodies: list[tuple[ir.Function, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.domain}:{self.op_type}" if self.domain else self.op_type

    def build(self, site: Site, tags: EditedTags, used: Iterable[ModuleCall]) -> Parts:
        interface = site.interface
        attributes = [_attribute(name, value) for name, value in self.attributes.items()]
        if not self.keep_body:
            inputs = self._chosen(site) if self.inputs else [*interface.inputs, *site.weights]
            node = ir.Node(self.domain, self.op_type, inputs, attributes, num_outputs=len(interface.outputs))
            tags.remove_inside(site.call, used)
            return Parts([node], list(node.outputs), opsets={self.domain: 1})
        if self.inputs:
            raise UsageError(
                "an operator with the old module as its body takes what the module takes: leave out --input"
            )
        weights, new = self._body(site)
        node = ir.Node(
            self.domain,
            self.op_type,
            [*interface.inputs, *weights],
            attributes,
            num_outputs=len(interface.outputs),
        )
        return Parts([node], list(node.outputs), functions=new, opsets={self.domain: 1})

    def _chosen(self, site: Site) -> list[ir.Value]:
        offered = offered_names(site.interface, site.interface.inputs)
        for value in site.weights:
            plan = parameter_plan(value)
            offered |= {value.name or "": value} | dict.fromkeys(plan.keys if plan is not None else (), value)
        if unknown := [name for name in self.inputs if name not in offered]:
            raise UsageError(f"'{site.call}' has no value '{unknown[0]}': it has {', '.join(offered)}")
        return [offered[name] for name in self.inputs]

    def _body(self, site: Site) -> tuple[list[ir.Value], list[ir.Function]]:
        """The weights that the function takes as inputs, and the function if it is not there yet."""
        assert site.cut is not None
        graph = site.cut.model.graph
        by_name = {value.name: value for value in site.weights}
        inside = {name: value for name, value in graph.initializers.items() if not _is_input(value)}
        outside = [value for name, value in graph.initializers.items() if name not in inside]
        for value in inside.values():
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", _loaded(value))], outputs=None, name=value.name)
            node.outputs[0].name, node.outputs[0].type = value.name, value.type
            node.outputs[0].shape = value.shape
            user = next(iter(value.uses())).node
            node.metadata_props.update(user.metadata_props)
            node.meta.update(user.meta)
            ir.convenience.replace_all_uses_with(value, node.outputs[0])
        nodes = _depth_first(graph.outputs)
        used = {value: index for index, value in enumerate(v for node in nodes for v in values_taken(node))}
        outside.sort(key=lambda value: used.get(value, len(used)))
        graph.remove(list(graph))
        inputs, outputs = [*graph.inputs, *outside], list(graph.outputs)
        graph.inputs.clear()
        graph.outputs.clear()
        graph.initializers.clear()
        detach_tensors(outside)
        for value in outside:
            value.metadata_props.clear()
        body = ir.Graph(inputs, outputs, nodes=nodes, opset_imports=dict(graph.opset_imports), name=self.op_type)
        declared = [ir.Attr(name, _attribute(name, value).type, None) for name, value in self.attributes.items()]
        function = ir.Function(self.domain, self.op_type, graph=body, attributes=declared)
        weights = [by_name[value.name] for value in outside]
        text = _canonical(function)
        for known, same in self._bodies:
            if same != text:
                raise UsageError(
                    f"'{site.call}' computes something else than the other calls that {self.name} replaces, and one "
                    "operator has one body: replace them by operators of different names"
                )
            for mine, other in zip(known, function, strict=True):
                _add_owners(mine, other)
            return weights, []
        self._bodies.append((function, text))
        return weights, [function]


@dataclass
class FromModel:
    """The graph of another file: its inputs and outputs are those of the call, by name or by position."""

    path: Path
    mapping: Mapping[str, str] = field(default_factory=dict)
    """The names of inputs and outputs of the file to names of arguments or values of the call."""

    def __post_init__(self) -> None:
        self.model = load_onnx(self.path)
        self._tagged: TaggedFile | None = None
        if keys.FORMAT_VERSION_KEY in self.model.metadata_props:
            self._tagged = read_tagged(self.path)
            self.model = self._tagged.model
        self._weights: dict[str, ir.Value] = {}
        """Shared by all calls that it replaces."""
        self._absolute = False
        """Whether it was cut out of the same model, so that its addresses and keys are those of the whole."""

    keep_body = False

    @property
    def name(self) -> str:
        return self.path.name

    def build(self, site: Site, tags: EditedTags, used: Iterable[ModuleCall]) -> Parts:
        graph = self.model.graph.clone()
        interface, whose = site.interface, f"'{site.call}'"
        ins = [value.name or "" for value in graph.inputs]
        outs = [value.name or "" for value in graph.outputs]
        given = {name: whole for name, whole in self.mapping.items() if name in ins}
        returned = {name: whole for name, whole in self.mapping.items() if name in outs}
        if unknown := [name for name in self.mapping if name not in {*ins, *outs}]:
            raise UsageError(f"{self.path} has no input or output '{unknown[0]}': it has {', '.join([*ins, *outs])}")
        sources = match_names(ins, offered_names(interface, interface.inputs), given, "inputs", whose)
        whole_outs = [value.name or "" for value in interface.outputs]
        offered = dict(zip(outs, graph.outputs, strict=True))
        back = {whole: name for name, whole in returned.items()}
        results = match_names(whole_outs, offered, back, "outputs", f"{self.path}")
        for mine, source in zip(graph.inputs, sources, strict=True):
            _check_type(self.path, mine, source, whose)
        for result, output in zip(results, interface.outputs, strict=True):
            _check_type(self.path, result, output, whose)
        owners = self._owners(site.call, graph, tags, used)
        nodes, results = self._taken_out(graph, sources, results)
        return Parts(
            nodes,
            results,
            owners=owners,
            weights=self._adopted(site.call, graph),
            functions=[function.clone() for function in self.model.functions.values()],
            opsets=dict(self.model.opset_imports),
            entries=self._entries(site.call),
        )

    def _taken_out(
        self, graph: ir.Graph, sources: Sequence[ir.Value], results: Sequence[ir.Value]
    ) -> tuple[list[ir.Node], list[ir.Value]]:
        """The nodes, on the values of the whole; a result that is no node's own gets a node."""
        inputs, found = list(graph.inputs), []
        nodes = list(graph)
        graph.remove(nodes)
        graph.inputs.clear()
        graph.outputs.clear()
        for result in results:
            if result.producer() is None or result in found:
                nodes.append(ir.Node("", "Identity", [result]))
                nodes[-1].outputs[0].type, nodes[-1].outputs[0].shape = result.type, result.shape
                found.append(nodes[-1].outputs[0])
            else:
                found.append(result)
        for mine, source in zip(inputs, sources, strict=True):
            ir.convenience.replace_all_uses_with(mine, source)
        return nodes, found

    def _owners(
        self, call: ModuleCall, graph: ir.Graph, tags: EditedTags, used: Iterable[ModuleCall]
    ) -> dict[ir.Node, Owner]:
        if self._tagged is None:
            tags.remove_inside(call, used)
            return {}
        sub = self._tagged
        if self._is_part_of(call, tags):
            renamed = {traced.call: traced.call for traced in sub.calls}
            self._absolute = True
        else:
            tags.remove_inside(call, used)
            renamed = self._grafted(call, tags)
        owners = {}
        for node in graph.all_nodes():
            owner = owner_of(node)
            if owner is not None:
                calls = dict.fromkeys(renamed[each] for each in owner.calls)
                owners[node] = Owner(tuple(calls), owner.evidence)
        return owners

    def _is_part_of(self, call: ModuleCall, tags: EditedTags) -> bool:
        """Whether it was cut out of the same model: it has the call under the same tag."""
        assert self._tagged is not None
        return bool(call.path) and self._tagged.tags.get(call) == tags.tag(call)

    def _grafted(self, call: ModuleCall, tags: EditedTags) -> dict[ModuleCall, ModuleCall]:
        """The calls of the file, under the call that it replaces."""
        assert self._tagged is not None
        sub, base = self._tagged, tags.source_tag(call)
        sources = sub.source_tags
        renamed: dict[ModuleCall, ModuleCall] = {}
        root = ""
        for traced in sub.calls:
            tag = sub.tags[traced.call]
            if traced.parent is None:
                renamed[traced.call], root = call, tag
                continue
            path = f"{call.path}.{traced.call.path}" if call.path else traced.call.path
            source = sources.get(traced.call, tag)
            renamed[traced.call] = tags.add(
                path, renamed[traced.parent], base + tag.removeprefix(root), base + source.removeprefix(root)
            )
        return renamed

    def _adopted(self, call: ModuleCall, graph: ir.Graph) -> dict[ir.Value, tuple[str, ...]]:
        """The weights, once for all calls that they replace, with the keys that they get."""
        found: dict[ir.Value, tuple[str, ...]] = {}
        for name, value in list(graph.initializers.items()):
            plan = parameter_plan(value)
            names = tuple(self._key(call, key) for key in plan.keys) if plan is not None else ()
            if name in self._weights:
                ir.convenience.replace_all_uses_with(value, self._weights[name])
            else:
                self._weights[name] = value
            found[self._weights[name]] = names
        graph.initializers.clear()
        return found

    def _key(self, call: ModuleCall, key: str) -> str:
        return key if self._absolute or not call.path else f"{call.path}.{key}"

    def _entries(self, call: ModuleCall) -> dict[str, documents.StateDictEntry]:
        if keys.STATE_DICT not in self.model.metadata_props:
            return {}
        entries = state_dict_of(self.model)
        return {self._key(call, key): entry for key, entry in entries.items() if entry.used or not self._absolute}


def _attribute(name: str, value: Any) -> ir.Attr:
    try:
        return ir.convenience.convert_attribute(name, value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"'{value}' is not a value of an attribute ({error}): give a number, a text, or a list"
        ) from error


def _is_input(value: ir.Value) -> bool:
    """Whether a weight of a module becomes an input of a function: parameters do, small constants do not."""
    tensor = value.const_value
    return keys.PARAMETER in value.metadata_props or tensor is None or tensor.nbytes > 1024


def _loaded(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return ir.Tensor(value.const_value.numpy().copy(), dtype=value.const_value.dtype, name=value.name)


def _depth_first(outputs: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes that values depend on, in an order that follows from how they are connected and nothing else."""
    found: dict[ir.Node, None] = {}
    pending = [producer for value in reversed(list(outputs)) if (producer := value.producer()) is not None]
    while pending:
        node = pending[-1]
        before = [p for v in values_taken(node) if (p := v.producer()) is not None and p not in found]
        if before and node not in found:
            pending.extend(reversed(before))
            continue
        found[pending.pop()] = None
    return list(found)


def _canonical(function: ir.Function) -> str:
    """What a function computes, without the names of its values and nodes."""
    names: dict[ir.Value, str] = {}
    lines: list[str] = []
    for value in function.inputs:
        names[value] = str(len(names))
    _describe(function, names, lines)
    return "\n".join([*lines, ",".join(names[value] for value in function.outputs)])


def _describe(graph: Iterable[ir.Node], names: dict[ir.Value, str], lines: list[str]) -> None:
    for node in graph:
        proto = [
            ir.serde.serialize_attribute(attribute).SerializeToString(deterministic=True).hex()
            for _, attribute in sorted(node.attributes.items())
            if attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS, ir.AttributeType.TENSOR)
        ]
        for _, attribute in sorted(node.attributes.items()):
            if attribute.type is ir.AttributeType.TENSOR:
                tensor = attribute.as_tensor()
                proto.append(f"{tensor.dtype}{tensor.shape}{tensor.tobytes().hex()}")
            elif attribute.type is ir.AttributeType.GRAPH:
                inner = attribute.as_graph()
                names.update((value, str(len(names))) for value in inner.inputs)
                _describe(inner, names, lines)
        names.update((value, f"{len(names) + index}") for index, value in enumerate(node.outputs))
        taken = ["" if value is None else names.get(value, value.name or "") for value in node.inputs]
        lines.append(json.dumps([node.domain, node.op_type, taken, proto]))


def _add_owners(node: ir.Node, other: ir.Node) -> None:
    """A node of a body that several calls share belongs to all of them."""
    mine, more = owner_of(node), owner_of(other)
    if mine is None or more is None:
        return
    calls = tuple(dict.fromkeys([*mine.calls, *more.calls]))
    node.meta[OWNER] = Owner(calls, mine.evidence)


def _fits(value: ir.Value, other: ir.Value) -> bool:
    return value.dtype == other.dtype and may_be(value.shape, other.shape)


def _sizes(value: ir.Value) -> list[object]:
    return [] if value.shape is None else [size if isinstance(size, int) else size.value for size in value.shape]


def _check_type(path: Path, mine: ir.Value, whole: ir.Value, whose: str) -> None:
    """Refuse an input or output that cannot be the value of the whole.

    Raises:
        UsageError: Their types or shapes differ.
    """
    if mine.dtype is not None and whole.dtype is not None and mine.dtype != whole.dtype:
        raise UsageError(
            f"'{mine.name}' of {path} is {mine.dtype.name} and '{whole.name}' of {whose} {whole.dtype.name}"
        )
    if not may_be(mine.shape, whole.shape):
        raise UsageError(
            f"'{mine.name}' of {path} has the shape {mine.shape} and '{whole.name}' of {whose} {whole.shape}"
        )


def check_opsets(whole: ir.Model, sub: ir.Model, path: Path) -> None:
    """Refuse a file with an operator that means something else in the opset of the whole.

    Raises:
        UsageError: There is one.
    """
    for node in all_nodes(sub):
        mine, other = sub.opset_imports.get(node.domain), whole.opset_imports.get(node.domain)
        if mine is None or other is None or mine == other:
            continue
        try:
            same = onnx.defs.get_schema(node.op_type, mine, node.domain).since_version
            same -= onnx.defs.get_schema(node.op_type, other, node.domain).since_version
        except onnx.defs.SchemaError:  # only the operators of onnx itself have versions that it knows
            continue
        if same:
            raise UsageError(
                f"{path} has opset {mine} and the whole {other}, and {node.op_type} differs between them: "
                f"export it with --opset {other}"
            )
