"""Find the module calls of a model without tags of ours, and tag it in memory as though it had them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.tags import Tags
from modelexport.core.text import plural
from modelexport.format import keys
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, initializers, inputs_and_results, required_inputs
from modelexport.graph.parameter_plans import record_own_names
from modelexport.graph.properties import record, text_of
from modelexport.graph.unique_names import name_nodes_apart
from modelexport.tagged.encodings.metadata import write_tags
from modelexport.tagged.found_calls.calls_from_stacks import place_by_stacks
from modelexport.tagged.found_calls.local_functions import inline_functions
from modelexport.tagged.found_calls.operator_classes import MARK
from modelexport.tagged.found_calls.owners_from_neighbors import infer_owners
from modelexport.tagged.found_calls.parameter_names import read_parameter_names
from modelexport.tagged.found_calls.recorded_stacks import CallSource, read_fx_nodes, read_metadata
from modelexport.tagged.found_calls.scoped_names import read_scoped_names
from modelexport.tagged.found_calls.torchscript_names import read_torchscript_names

_SPECIFICATION = "pkg.torch.export.graph_signature.InputSpec."
"""The prefix of ``torch.onnx``'s properties of an initializer: its ``kind``, and if a buffer is ``persistent``."""
_SENTENCES = {
    CallSource.FX_NODE: "the exporter's FX nodes",
    CallSource.FX_NAME: "the exporter's FX nodes",
    CallSource.TORCH_METADATA: "the metadata of torch.onnx",
    CallSource.NAMESPACE: "the namespaces of nodes",
    CallSource.FUNCTIONS: "local functions",
    CallSource.NODE_NAMES: "the scopes in names of nodes",
    CallSource.PARAMETER_NAMES: "the names of parameters",
}


@dataclass(frozen=True, eq=False)
class FoundCalls:
    """The calls of a model that has no tags, and how they were found. Every node of the model has an owner."""

    tags: Tags
    sources: Counter[CallSource]
    """Each source to the number of nodes that got their call from it."""
    repeated: Sequence[str]
    """Paths of modules whose parameters are used repeatedly in what looks like one call but may be several."""
    were_lost: bool = False
    """Whether it was an export, whose nodes have lost their tags in another tool."""

    @property
    def kinds(self) -> frozenset[CallSource]:
        """The sources of the calls: calls of two files can be paired if they were found in the same ones."""
        return frozenset(self.sources) - {CallSource.NEIGHBOURS}

    @property
    def sentence(self) -> str:
        """Where the calls were found."""
        tags = "no tags left (`modelexport retag` restores those of the export)" if self.were_lost else "no tags"
        counted = Counter[str]()
        for source, count in self.sources.items():
            if source in _SENTENCES and count:
                counted[_SENTENCES[source]] += count
        if not counted:
            return f"{tags}, and nothing that names modules: taken as one module"
        listed = ", ".join(f"{text} ({plural(count, 'node')})" for text, count in counted.items())
        inferred = self.sources[CallSource.NEIGHBOURS]
        rest = f"; {plural(inferred, 'node')} by neighbors" if inferred else ""
        guesses = any(module.class_name.endswith(MARK) for module in self.tags.tree)
        marked = f"; classes with {MARK} are guesses from operators" if guesses else ""
        return f"{tags}: {plural(len(self.tags.calls), 'call')} from {listed}{rest}{marked}"


def find_calls(model: ir.Model, *, were_lost: bool = False) -> FoundCalls:
    """Find the calls of a model, in place: functions are inlined, nodes get names, owners and tags, and the model the
    call tree and the list of parameters that a tagged file has.

    Calls are looked for, most reliable first, in FX nodes (of an exporter in the same process), the metadata of
    ``torch.onnx``, namespaces, local functions, scopes in names, and, if names of nodes have none, names of parameters.
    A model with none of these is one module. The parameters are those that ``torch.onnx`` recorded, or else all
    initializers, under their own names.
    """
    _name_open_sizes(model)
    in_functions = inline_functions(model)
    by_name = read_torchscript_names(model)
    by_name |= read_scoped_names(model, by_name)
    stacks = by_name | in_functions | read_metadata(model) | read_fx_nodes(model)
    if not stacks:
        stacks = read_parameter_names(model)
    placing = place_by_stacks(model, stacks)
    if inferred := infer_owners(model, placing.calls):
        placing.sources[CallSource.NEIGHBOURS] = inferred
    tags = Tags(placing.module_tree(all_nodes(model)), placing.calls)
    name_nodes_apart(model)
    parameters = [value for value in initializers(model) if is_recorded_parameter(value)]
    repeated = _repeated(model, {node for node, known in stacks.items() if known.stack[-1].index is None})
    write_tags(model, tags)
    record_own_names(model, parameters or None)
    record_sources(model, placing.sources)
    return FoundCalls(tags, placing.sources, repeated, were_lost)


def _name_open_sizes(model: ir.Model) -> None:
    """Make sizes below zero, as some converters write dynamic axes, open ones, and name the open ones of inputs."""
    inputs = {value: re.sub(r"\W", "_", value.name or "input") for value in required_inputs(model)}
    for value in (*inputs_and_results(model), *model.graph.outputs):
        sizes = [None if isinstance(size, int) and size < 0 else size for size in value.shape or ()]
        for axis, size in enumerate(sizes):
            if value in inputs and (size is None or (isinstance(size, ir.SymbolicDim) and size.value is None)):
                sizes[axis] = ir.SymbolicDim(f"{inputs[value]}_{axis}")
        if sizes != list(value.shape or ()):
            value.shape = ir.Shape(sizes)


def record_sources(model: ir.Model, sources: Counter[CallSource]) -> None:
    """Let a model carry how the calls of its nodes were found."""
    record(model, keys.ADOPTED, {source.value: sources[source] for source in CallSource if sources[source]})


def _repeated(model: ir.Model, unnumbered: set[ir.Node]) -> list[str]:
    """The modules with a parameter that the same operator uses more than once in what looks like one call.

    Args:
        model: A model whose nodes have owners.
        unnumbered: The nodes whose module is known, but not the number of the call.
    """
    paths: dict[str, None] = {}
    for value in initializers(model):
        enclosing = (value.name or "").rpartition(".")[0]
        uses: Counter[tuple[ModuleCall, str]] = Counter()
        for node, _ in value.uses():
            if node in unnumbered and (owner := owner_of(node)) is not None and owner.call.path == enclosing != "":
                uses[owner.call, node.op_type] += 1
        if any(count > 1 for count in uses.values()):
            paths[enclosing] = None
    return list(paths)


def is_recorded_parameter(value: ir.Value) -> bool:
    """Whether ``torch.onnx`` recorded an initializer as something that is in the ``state_dict``."""
    return _recorded_kind(value) is not None and not is_recorded_constant(value)


def is_recorded_constant(value: ir.Value) -> bool:
    """Whether ``torch.onnx`` recorded an initializer as something that is not in the ``state_dict``."""
    return _recorded_kind(value) not in (None, "PARAMETER", "BUFFER") or (
        _recorded_kind(value) == "BUFFER" and text_of(value, f"{_SPECIFICATION}persistent") == "False"
    )


def _recorded_kind(value: ir.Value) -> str | None:
    return text_of(value, f"{_SPECIFICATION}kind")
