"""Replaces a module by the graph of another file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import onnx
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.core.tags import CallTags, LevelRule
from modelexport.errors import UsageError
from modelexport.files.onnx_models import load_onnx
from modelexport.files.path_or_model import Source, as_path
from modelexport.format import documents
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.copies import copy_of, value_like
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, may_be, nodes_behind
from modelexport.graph.parameter_plans import listed_entries, parameter_plan, record_plan
from modelexport.graph.properties import is_tagged
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools.cut.call_interfaces import CallInterface, match_names, spellings
from modelexport.tools.cut.edited_calls import EditedCalls
from modelexport.tools.cut.grafted_modules import Graft, graft_calls, joined
from modelexport.tools.cut.substitutes.substitute import Parts, Site


@dataclass
class FromModel:
    """The graph of another file: its inputs and outputs are matched with those of the call by name or position."""

    file: InitVar[Source]
    mapping: Mapping[str, str] = field(default_factory=dict)
    """The names of inputs and outputs of the file to names of arguments or values of the call."""

    def __post_init__(self, file: Source) -> None:
        self.path = as_path(file)
        self.model = load_onnx(self.path)
        self._tagged: TaggedFile | None = None
        if is_tagged(self.model):
            self._tagged = read_tagged(self.path)
            self.model = self._tagged.model
        self._facts = self._tagged.facts() if self._tagged is not None else None
        self.rule: LevelRule | None = None
        """Which classes make levels in the whole model, if that is known."""
        self._weights: dict[str, ir.Value] = {}
        """The initializers shared by all calls that it replaces."""
        self._keys: dict[str, list[dict[str, None]]] = {}
        """Names of these to all names of each parameter that they are computed from."""
        self._absolute = False
        """Whether it was cut out of the same model, so that its addresses and keys are those of the whole model."""
        self._graft: Graft | None = None

    keep_body = False

    @property
    def name(self) -> str:
        return self.path.name

    def build(self, site: Site, edited: EditedCalls, used: Iterable[ModuleCall]) -> Parts:
        graph = copy_of(self.model.graph)
        values = {value.name or "": value for node in graph.all_nodes() for value in node.outputs}
        required = [value for value in graph.inputs if not value.is_initializer()]
        names = [value.name or "" for value in (*required, *graph.outputs)]
        if unknown := [name for name in self.mapping if name not in names]:
            raise UsageError(f"{self.path} has no input or output '{unknown[0]}': it has {', '.join(names)}")
        sources = self._sources(site.interface, required)
        results = self._results(site.interface, graph)
        values |= {mine.name or "": source for mine, source in sources.items()}
        owners = self._owners(site.call, graph, edited, used, values)
        nodes, outputs = _taken_out(graph, sources, results)
        return Parts(
            nodes,
            outputs,
            owners=owners,
            weights=self._adopted(site.call, graph),
            functions=[copy_of(function) for function in self.model.functions.values()],
            opsets=dict(self.model.opset_imports),
            entries=self._entries(site.call),
            graft=self._graft,
        )

    def _sources(self, interface: CallInterface, required: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
        """The values of the whole model for the inputs; an input that nothing uses may have none."""
        also = _names_in(self._tagged, "inputs")
        used = [value for value in required if value.uses() or value.is_graph_output()]
        offered = interface.offered()
        offered |= {other: value for name, value in offered.items() for other in spellings(name)[1:]}
        taken = required if len(required) == len(interface.inputs) else used
        wanted = {value.name or "": also.get(value.name or "", ()) for value in taken}
        by_name = match_names(wanted, offered, self.mapping, interface.elsewhere, interface.inputs)
        missing = [value.name or "" for value in used if value.name not in by_name]
        if folded := [name for name in missing if {name, *also.get(name, ())}.intersection(interface.missing)]:
            raise UsageError(
                f"{self.path} takes {', '.join(folded)}, which the whole model has only inside of other constants: "
                "export that with --dynamic or --no-optimize, or map another value with --map"
            )
        if missing:
            has = ", ".join(interface.called(value) for value in interface.inputs) or "no inputs"
            raise UsageError(
                f"'{interface.call}' takes {has}, and {self.path} also {', '.join(missing)}: map it to a value with "
                f"--map {missing[0]}=VALUE"
            )
        matched = {value: by_name[value.name or ""] for value in used}
        for mine, source in matched.items():
            _check_type(self.path, mine, source, f"'{interface.call}'")
        return matched

    def _results(self, interface: CallInterface, graph: ir.Graph) -> list[ir.Value]:
        """The outputs that are used in the whole model, in the order of the values that they replace."""
        if not graph.outputs:
            raise UsageError(f"{self.path} has no outputs: give a model that computes something")
        also = _names_in(self._tagged, "outputs")
        offered = {value.name or "": value for value in graph.outputs}
        for name, value in list(offered.items()):
            offered.update((each, value) for each in also.get(name, ()) if each not in offered)
        returned = [tensor.name for tensor in interface.entry.outputs] if interface.entry is not None else []
        if len(returned) == len(graph.outputs):
            offered = dict(zip(returned, graph.outputs, strict=True)) | offered
        own = {value.name for value in graph.outputs}
        is_cut = own.issuperset(value.name for value in interface.outputs)  # it was cut out of the same file
        given = {whole: name for name, whole in self.mapping.items() if name in offered}
        mapped = dict(given)
        wanted: dict[str, Sequence[str]] = {}
        for value in interface.outputs:
            name, returned_as = value.name or "", interface.results.get(value)
            wanted[name] = spellings(returned_as) if returned_as is not None else ()
            if returned_as in given:
                mapped.setdefault(name, given[returned_as])
            elif returned_as in offered and not is_cut:
                mapped.setdefault(name, returned_as)
        if unknown := [whole for whole in mapped if whole not in {*wanted, *chain(*wanted.values())}]:
            raise UsageError(
                f"'{interface.call}' has no output '{unknown[0]}' that is used: it has {', '.join(wanted)}"
            )
        by_name = match_names(wanted, offered, mapped, {}, list(graph.outputs))
        if missing := [name for name in wanted if name not in by_name]:
            raise UsageError(
                f"{self.path} has the outputs {', '.join(value.name or '' for value in graph.outputs)}, and "
                f"'{interface.call}' has {', '.join(wanted)}: map {missing[0]} with "
                f"--map {graph.outputs[0].name}={missing[0]}"
            )
        results = [by_name[value.name or ""] for value in interface.outputs]
        for value, result in zip(interface.outputs, results, strict=True):
            _check_type(self.path, result, value, f"'{interface.call}'")
        return results

    def is_part_of(self, call: ModuleCall, tags: CallTags) -> bool:
        """Whether it was cut out of the same model: it has the call with the same tag."""
        return bool(call.path) and self._tagged is not None and self._tagged.tags.get(call) == tags.tag(call)

    def _owners(
        self,
        call: ModuleCall,
        graph: ir.Graph,
        edited: EditedCalls,
        used: Iterable[ModuleCall],
        values: Mapping[str, ir.Value],
    ) -> dict[ir.Node, Owner]:
        self._graft = None
        if self._tagged is None:
            edited.remove_inside(call, used)
            return {}
        self._absolute = self.is_part_of(call, edited.tags)
        if self._absolute:
            renamed = {traced.call: traced.call for traced in self._tagged.calls}
        else:
            edited.remove_inside(call, used)
            renamed = graft_calls(self._tagged, self._facts, call, edited, self.rule)
        self._graft = Graft(call, self._facts, renamed, values, self._absolute)
        owners = {}
        for node in graph.all_nodes():
            owner = owner_of(node)
            if owner is not None:
                calls = dict.fromkeys(renamed[each] for each in owner.calls)
                owners[node] = replace(owner, calls=tuple(calls))
        return owners

    def _adopted(self, call: ModuleCall, graph: ir.Graph) -> dict[ir.Value, tuple[str, ...]]:
        """The weights that its nodes use, shared by all calls that they replace, with their new keys."""
        adopted: dict[ir.Value, tuple[str, ...]] = {}
        for name, value in list(graph.initializers.items()):
            if name in self._weights:
                ir.convenience.replace_all_uses_with(value, self._weights[name])
            elif value.uses():
                self._weights[name] = value
            else:
                continue
            adopted[self._weights[name]] = self._keys_of(name, value, call)
        graph.initializers.clear()
        return adopted

    def _keys_of(self, name: str, value: ir.Value, call: ModuleCall) -> tuple[str, ...]:
        """The keys of a weight for all calls so far: those of one parameter are adjacent."""
        plan = parameter_plan(value)
        if plan is None:
            return ()
        keys_here = [[self._key(call, key) for key in names] for names in plan.groups()]
        if name not in self._keys:
            renamed = {key: self._key(call, key) for key in plan.keys}
            record_plan(self._weights[name], ParameterPlan(list(renamed.values()), plan.renamed(renamed)))
            self._keys[name] = [dict.fromkeys(names) for names in keys_here]
        for group, names in zip(self._keys[name], keys_here, strict=True):
            group.update(dict.fromkeys(names))
        return tuple(key for group in self._keys[name] for key in group)

    def _key(self, call: ModuleCall, key: str) -> str:
        return key if self._absolute else joined(call.path, key)

    def _entries(self, call: ModuleCall) -> dict[str, documents.StateDictEntry]:
        entries = listed_entries(self.model) or {}
        return {self._key(call, key): entry for key, entry in entries.items() if entry.used or not self._absolute}


def _names_in(sub: TaggedFile | None, side: Literal["inputs", "outputs"]) -> dict[str, tuple[str, ...]]:
    """The inputs or outputs of an exported module to the names of the arguments or results that they are."""
    if sub is None or sub.hierarchy is None:
        return {}
    root = sub.calls.calls[0].call.address
    entry = next(entry for entry in sub.hierarchy.calls if entry.address == root)
    names: dict[str, tuple[str, ...]] = {}
    for tensor in entry.inputs if side == "inputs" else entry.outputs:
        if tensor.value is not None:
            names[tensor.value] = (*names.get(tensor.value, ()), tensor.name)
    return names


def _taken_out(
    graph: ir.Graph, sources: Mapping[ir.Value, ir.Value], results: Sequence[ir.Value]
) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes that results need, connected to the values of the whole model; each result gets a node of its own."""
    needed, outputs = set(nodes_behind(results)), list[ir.Value]()
    nodes = [node for node in graph if node in needed]
    graph.outputs.clear()
    graph.remove([node for node in graph if node not in needed], safe=True)
    graph.remove(nodes)
    graph.inputs.clear()
    for result in results:
        if result.producer() is None or result in outputs:
            nodes.append(ir.Node("", "Identity", [result], outputs=[value_like(result, "")]))
            outputs.append(nodes[-1].outputs[0])
        else:
            outputs.append(result)
    for mine, source in sources.items():
        ir.convenience.replace_all_uses_with(mine, source)
    return nodes, outputs


def _check_type(path: Path, mine: ir.Value, whole: ir.Value, whose: str) -> None:
    """Refuse an input or output that does not fit the value of the whole model."""
    if mine.dtype is not None and whole.dtype is not None and mine.dtype != whole.dtype:
        raise UsageError(
            f"'{mine.name}' of {path} is {mine.dtype.name}, but '{whole.name}' of {whose} is {whole.dtype.name}"
        )
    if not may_be(mine.shape, whole.shape):
        raise UsageError(
            f"'{mine.name}' of {path} has the shape {mine.shape}, but '{whole.name}' of {whose} has {whole.shape}"
        )


def check_opsets(whole: ir.Model, sub: ir.Model, path: Path) -> None:
    """Refuse a file with an operator that has another meaning in the opset of the whole model."""
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
