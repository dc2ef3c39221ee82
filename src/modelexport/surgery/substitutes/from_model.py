"""Replaces a module by the graph of another file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.errors import UsageError
from modelexport.files.onnx_models import load_onnx
from modelexport.format import documents, keys
from modelexport.graph.nodes import all_nodes, may_be
from modelexport.graph.owners import owner_of
from modelexport.surgery.edited_tags import EditedTags
from modelexport.surgery.interfaces import match_names, offered_names
from modelexport.surgery.substitutes.parts import Parts, Site
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.weights.transforms import parameter_plan, state_dict_of


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
