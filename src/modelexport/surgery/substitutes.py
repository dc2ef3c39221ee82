"""Replacements for a module: another model, one operator, or nothing.

Over 400 lines because the three kinds share the code that fits them to the values at the module's boundary.
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
from modelexport.surgery.edited_tags import EditedTags, source_tags
from modelexport.surgery.interfaces import Interface, match_names, offered_names
from modelexport.surgery.repeating import values_taken
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.weights.transforms import parameter_plan, state_dict_of


@dataclass(frozen=True)
class Site:
    """A call that is replaced: its current values, and its original nodes."""

    interface: Interface
    weights: Sequence[ir.Value]
    """The initializers that its nodes use, in the order of the nodes."""
    cut: Cut | None
    """The call as a model of its own, if the substitute needs it."""

    @property
    def call(self) -> ModuleCall:
        return self.interface.call


@dataclass
class Parts:
    """The parts that are inserted into the graph."""

    nodes: list[ir.Node]
    outputs: list[ir.Value]
    """The values that replace the site's outputs, in their order."""
    owners: Mapping[ir.Node, Owner] = field(default_factory=dict)
    """The owners of the nodes that the replaced call does not own itself, with those of nested graphs."""
    weights: Mapping[ir.Value, tuple[str, ...]] = field(default_factory=dict)
    """New initializers to their ``state_dict`` keys; empty for those that do not come from entries."""
    functions: Sequence[ir.Function] = ()
    opsets: Mapping[str, int] = field(default_factory=dict)
    entries: Mapping[str, documents.StateDictEntry] = field(default_factory=dict)


class Substitute(Protocol):
    """Builds the replacement of a call."""

    @property
    def keep_body(self) -> bool:
        """Whether it needs the call as a model of its own."""

    @property
    def name(self) -> str:
        """Its name in the metadata of nodes."""

    def build(self, site: Site, tags: EditedTags, used: Iterable[ModuleCall]) -> Parts:
        """New nodes for a call; changes the calls inside it in ``tags``.

        Args:
            used: The calls that own other nodes.
        """


class Identity:
    """Makes the call return its inputs: for each output the first input of its type and shape."""

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
    """One node of another operator, with the inputs of the call and then its weights."""

    domain: str
    op_type: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    keep_body: bool = False
    """With a function of the same name whose body is the old module, for runtimes without a kernel."""
    inputs: Sequence[str] = ()
    """Names of the node's inputs, instead of the default: arguments, values, ``state_dict`` keys."""
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
                "an operator with the old module as its body has the inputs of the module: leave out --input"
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
        """The weights that are inputs of the function, and the function if it does not exist yet."""
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
                    f"'{site.call}' computes something else than the other calls that {self.name} replaces, but one "
                    "operator has one body: replace them by operators of different names"
                )
            for mine, other in zip(known, function, strict=True):
                _add_owners(mine, other)
            return weights, []
        self._bodies.append((function, text))
        return weights, [function]


@dataclass
class FromModel:
    """The graph of another file: its inputs and outputs are matched with those of the call by name or position."""

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
        """The initializers shared by all calls that it replaces."""
        self._absolute = False
        """Whether it was cut out of the same model, so that its addresses and keys are those of the whole model."""

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
        """The nodes, connected to the values of the whole model; a result without a node of its own gets one."""
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
        """Whether it was cut out of the same model: it has the call with the same tag."""
        assert self._tagged is not None
        return bool(call.path) and self._tagged.tags.get(call) == tags.tag(call)

    def _grafted(self, call: ModuleCall, tags: EditedTags) -> dict[ModuleCall, ModuleCall]:
        """The calls of the file, as calls inside the call that it replaces."""
        assert self._tagged is not None
        sub, base = self._tagged, tags.source_tag(call)
        sources = source_tags(sub.nodes)
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
        """The weights, shared by all calls that they replace, with their new keys."""
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
            f"'{value}' cannot be the value of an attribute ({error}): give a number, a text, or a list"
        ) from error


def _is_input(value: ir.Value) -> bool:
    """Whether a weight of a module becomes an input of a function: parameters do, small constants do not."""
    tensor = value.const_value
    return keys.PARAMETER in value.metadata_props or tensor is None or tensor.nbytes > 1024


def _loaded(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return ir.Tensor(value.const_value.numpy().copy(), dtype=value.const_value.dtype, name=value.name)


def _depth_first(outputs: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes that values depend on, in an order that follows only from their connections."""
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
    """The computation of a function as text, without the names of its values and nodes."""
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
    """Add the owners of another call's node: a node of a shared body belongs to all calls."""
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
    """Refuse an input or output that does not fit the value of the whole model.

    Raises:
        UsageError: Their types or shapes differ.
    """
    if mine.dtype is not None and whole.dtype is not None and mine.dtype != whole.dtype:
        raise UsageError(
            f"'{mine.name}' of {path} is {mine.dtype.name}, but '{whole.name}' of {whose} is {whole.dtype.name}"
        )
    if not may_be(mine.shape, whole.shape):
        raise UsageError(
            f"'{mine.name}' of {path} has the shape {mine.shape}, but '{whole.name}' of {whose} has {whole.shape}"
        )


def check_opsets(whole: ir.Model, sub: ir.Model, path: Path) -> None:
    """Refuse a file with an operator that has another meaning in the opset of the whole model.

    Raises:
        UsageError: Names the operator.
    """
    for node in all_nodes(sub):
        mine, other = sub.opset_imports.get(node.domain), whole.opset_imports.get(node.domain)
        if mine is None or other is None or mine == other:
            continue
        try:
            same = onnx.defs.get_schema(node.op_type, mine, node.domain).since_version
            same -= onnx.defs.get_schema(node.op_type, other, node.domain).since_version
        except onnx.defs.SchemaError:  # onnx knows only the versions of its own operators
            continue
        if same:
            raise UsageError(
                f"{path} has opset {mine} and the whole model {other}, and {node.op_type} differs between them: "
                f"export it with --opset {other}"
            )
