"""During an export: the ``state_dict`` entries that each initializer is or is computed from, found in the graph.

An initializer that the exporter made keeps its entry's name. A folded one keeps the name of the value that it had in
the unoptimized graph, so that graph holds its computation. :class:`Computed` finds these values before the
optimization: a rewrite must not read them, since a decision based on a parameter's values would not hold for other
weights, and folding must skip those whose computation cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.format.documents import StateDictEntry, TransformStep
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.nodes import initializers, nested_graphs
from modelexport.graph.operator_kinds import CASTS, READ_SIZES_ONLY, SELECTS_ELEMENTS
from modelexport.graph.parameter_plans import parameter_plans, record_plan, used_keys
from modelexport.graph.snapshot import SourceGraph, SourceNode
from modelexport.graph.unique_names import free_name
from modelexport.weights.entries_from_file import OPPOSITE
from modelexport.weights.packed import repacking as packed
from modelexport.weights.recorded_transforms import encode_tensor, run_operator, since_version, tensor_attributes

_T = TypeVar("_T")

RECORDED_ELEMENTS = 1_000
"""Elements of the largest constant that is written into a transform."""

_EVALUATED_ELEMENTS = 8_192
"""Elements of the largest constant that is computed on the way to one that is recorded."""

_EXPANDS_SINCE = 13
"""The version of ``Expand`` by which a constant of equal elements is recorded."""

_NAMED_OPERATORS = 3
"""The largest number of operators in the name of a folded initializer."""

_UNREAD_INPUTS = dict.fromkeys(READ_SIZES_ONLY | {"EyeLike"}, 0) | {"CastLike": 1}
"""ONNX operators to the input of which they read only the shape or the element type."""


def state_dict_entries(module: Any, names: Mapping[str, tuple[str, ...]], graph: ir.Model) -> dict[str, StateDictEntry]:
    """Every tensor in the ``state_dict`` of an ``nn.Module``, whether an output of the unoptimized graph depends on it,
    and whether it is a buffer.
    """
    buffers = {key for key, _ in module.named_buffers(remove_duplicate=False)}
    used = {key for name in _used_initializers(graph) for key in names.get(name, ())}
    return {
        key: StateDictEntry(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), key in used, key in buffers)
        for key, tensor in module.state_dict().items()
        if hasattr(tensor, "dtype")
    }


def with_initializers(entries: Mapping[str, StateDictEntry], model: ir.Model) -> dict[str, StateDictEntry]:
    """The entries, where those that an initializer of the written graph is or is computed from are used, too.

    The size of what they are in may be all that the outputs depend on.
    """
    there = used_keys(model)
    return {key: msgspec.structs.replace(entry, used=entry.used or key in there) for key, entry in entries.items()}


def _used_initializers(model: ir.Model) -> Iterator[str]:
    """The initializers whose elements an output of the graph depends on."""
    pending = list(model.graph.outputs)
    seen = set(pending)
    while pending:
        value = pending.pop()
        if value.is_initializer():
            yield value.name or ""
        node = value.producer()
        if node is None:
            continue
        needed = _read_inputs(node.op_identifier(), node.inputs)
        for graph in nested_graphs(node):
            needed.extend(graph.outputs)
            needed.extend(used for inner in graph.all_nodes() for used in inner.inputs)
        for used in needed:
            if used is not None and used not in seen:
                seen.add(used)
                pending.append(used)


@dataclass(frozen=True)
class Computed:
    """The values of an unoptimized graph that are computed only from ``state_dict`` entries and constants."""

    source: SourceGraph
    names: Mapping[str, tuple[str, ...]]
    """The name of an initializer to its ``state_dict`` keys."""
    opsets: Mapping[str, int]
    """The opsets of the graph: domain to version."""
    recordable: dict[str, bool] = field(init=False, default_factory=dict)
    """The name of a computed value to whether its computation can be recorded and undone."""
    _changes: dict[str, str] = field(init=False, default_factory=dict)
    """The name of a computed value to what was done to the entries that it has: ``moved`` or ``scaled``."""
    _constants: dict[str, np.ndarray | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.source.nodes:
            if self._computes(node):
                ready = all(self._input_recordable(name) for name in node.inputs if name is not None)
                ready = ready and since_version(node.op, self.opsets) is not None and self._can_be_undone(node)
                self.recordable.update(dict.fromkeys(node.outputs, ready))

    def _can_be_undone(self, node: SourceNode) -> bool:
        read = [name for name in _read_inputs(node.op, node.inputs) if name is not None and self.depends(name)]
        changes = {self._changes[name] for name in read if name in self._changes}
        only_first = read == [node.inputs[0]]
        of_data = only_first or node.op[1] == "Concat"  # an entry that is an index is lost
        moves = of_data and node.op[1] in SELECTS_ELEMENTS | CASTS
        if node.op[0] == packed.DOMAIN or (moves and changes <= {"moved"}):
            self._changes.update(dict.fromkeys(node.outputs, "moved"))
        elif node.op[1] in OPPOSITE and only_first and changes <= {"scaled"}:
            self._changes.update(dict.fromkeys(node.outputs, "scaled"))
        else:
            return False
        return True

    def depends(self, name: str | None) -> bool:
        """Whether the value of this name is a ``state_dict`` entry or computed from one."""
        return name in self.names or name in self.recordable

    def may_fold(self, node: ir.Node) -> bool:
        """Whether a node can be folded without losing a parameter or making a second copy of one.

        True if it uses none, or if its computation can be recorded and undone, and no other node needs the parameter
        unchanged: the transposed copy of a tied embedding, which the head uses, would be a second parameter. What
        cannot be undone, as ``exp`` and the norm of ``weight_norm``, runtimes fold when they load the file.
        """
        inputs = _read_inputs(node.op_identifier(), node.inputs)
        if not any(value is not None and self.depends(value.name) for value in inputs):
            return True
        if any(value is not None and value.name in self.names and self._stays(value) for value in inputs):
            return False
        return all(self.recordable.get(value.name or "", False) for value in node.outputs)

    def _stays(self, parameter: ir.Value) -> bool:
        """Whether a node whose inputs are not only weights and constants uses a parameter."""
        return any(
            value.name not in self.source.constant
            for user, _ in parameter.uses()
            for value in user.outputs
            if value.name
        )

    def _computes(self, node: SourceNode) -> bool:
        return self.source.constant.issuperset(node.outputs) and any(  # most are not constant
            self.depends(name) for name in _read_inputs(node.op, node.inputs)
        )

    def _input_recordable(self, name: str) -> bool:
        if name in self.names:
            return True
        if name in self.recordable:
            return self.recordable[name]
        constant = self._constant(name)
        if constant is None or 0 in constant.shape[:-1]:
            return False
        return constant.size <= RECORDED_ELEMENTS or _is_uniform(constant)

    def _constant(self, name: str) -> np.ndarray | None:
        """A value that depends on parameters only by their shapes; ``None`` if it is large or cannot be computed."""
        for index in sorted(
            self._behind(name, lambda value: value in self.source.producer and value not in self._constants)
        ):
            node = self.source.nodes[index]
            for taken in node.inputs:
                if taken is not None and taken not in self._constants:
                    self._constants[taken] = self._stored(taken)
            self._constants.update(self._run(node))
        return self._constants[name] if name in self._constants else self._stored(name)

    def _stored(self, name: str) -> np.ndarray | None:
        tensor = self.source.initializers.get(name)
        if tensor is None:
            return None
        if name in self.names:  # only its shape matters: an array of that shape that takes no memory
            return np.broadcast_to(np.zeros((), tensor.dtype.numpy()), tensor.shape.numpy())
        return tensor.numpy() if tensor.size <= _EVALUATED_ELEMENTS else None

    def _run(self, node: SourceNode) -> dict[str, np.ndarray | None]:
        nothing = dict.fromkeys(node.outputs, None)
        if node.op[1] == "Constant" and not node.op[0]:
            return dict.fromkeys(node.outputs, _constant_value(node))
        inputs = [None if name is None else self._constants[name] for name in node.inputs]
        version = since_version(node.op, self.opsets)
        if version is None or any(v is None and n is not None for v, n in zip(inputs, node.inputs, strict=True)):
            return nothing
        try:
            results = run_operator(node.op[0], node.op[1], version, inputs, tensor_attributes(node.attributes))
        except Exception:  # the reference implementation lacks some operators and raises various errors for them
            return nothing
        dependent = any(self.depends(name) for name in node.outputs)
        return {
            name: result if dependent or _is_kept(result) else None
            for name, result in zip(node.outputs, results, strict=False)
        } | dict.fromkeys(node.outputs[len(results) :], None)

    def plan(self, name: str) -> ParameterPlan:
        """How a value is computed from ``state_dict`` entries. Each constant on the way becomes one step."""
        keys: dict[str, None] = {}
        labels: dict[str, str] = {}
        steps: list[TransformStep] = []

        def label(value: str | None) -> str:
            if value is None:
                return ""
            if value in self.names:
                key = self.names[value][0]
                keys.update(dict.fromkeys(self.names[value]))
                return key
            if value not in labels:
                constant = self._constant(value)
                assert constant is not None, "only recordable values are folded"
                shape = np.array(constant.shape, np.int64)
                parts = [constant] if constant.size <= RECORDED_ELEMENTS else [constant.reshape(-1)[0], shape]
                inputs = [f"%{len(steps) + index}" for index in range(len(parts))]
                steps.extend(TransformStep("Constant", attributes={"value": encode_tensor(p)}) for p in parts)
                if len(parts) > 1:
                    steps.append(TransformStep("Expand", inputs, {}, _EXPANDS_SINCE))
                labels[value] = f"%{len(steps) - 1}"
            return labels[value]

        for index in sorted(
            self._behind(name, self.recordable.__contains__)
        ):  # the steps between entries and the value
            node = self.source.nodes[index]
            inputs = [label(value) for value in node.inputs]
            number = len(steps)
            labels.update((output, f"%{number}:{i}" if i else f"%{number}") for i, output in enumerate(node.outputs))
            attributes = {name: _json_attribute(attribute) for name, attribute in node.attributes.items()}
            version = since_version(node.op, self.opsets) or 0
            steps.append(TransformStep(node.op[1], inputs, attributes, version, node.op[0]))
        return ParameterPlan(list(keys), steps)

    def plan_if_small(self, name: str) -> ParameterPlan | None:
        """The plan of a value; ``None`` if a constant or an operator on the way cannot be recorded."""
        nodes = [self.source.nodes[index] for index in self._behind(name, self.recordable.__contains__)]
        taken = {value for node in nodes for value in node.inputs if value is not None and value not in self.recordable}
        known = all(since_version(node.op, self.opsets) is not None for node in nodes)
        return self.plan(name) if known and all(map(self._input_recordable, taken)) else None

    def _behind(self, name: str, wanted: Callable[[str], bool]) -> set[int]:
        """The source nodes behind a value, as far as their outputs are wanted."""
        needed: set[int] = set()
        pending: list[str | None] = [name]
        while pending:
            value = pending.pop()
            if value is not None and wanted(value) and (index := self.source.producer[value]) not in needed:
                needed.add(index)
                pending.extend(self.source.nodes[index].inputs)
        return needed


def record_plans(computed: Computed, model: ir.Model) -> None:
    """Record how every initializer of the optimized ``model`` is computed that comes from ``state_dict`` entries."""
    for value in initializers(model):
        name = value.name or ""
        if name in computed.names:
            record_plan(value, ParameterPlan([*computed.names[name]]))
        elif name in computed.recordable:
            record_plan(value, computed.plan(name))


def name_after_entries(model: ir.Model) -> None:
    """Name each folded initializer after its entry and the operators applied to it, in place.

    ``val_56`` becomes ``encoder.layer.0.attention.self.query.weight.transpose``. Initializers that are computed in the
    same way from the same entries, as for the calls of a shared module, are merged. An initializer that is computed
    from several parameters keeps its name.
    """
    plans = parameter_plans(model)
    taken = {value.name for graph in model.graphs() for node in graph for value in node.outputs}
    taken.update(value.name for graph in model.graphs() for value in graph.inputs)
    taken.update(value.name for value in initializers(model))
    taken.update(key for plan in plans.values() for key in plan.keys)
    same: dict[tuple[ir.Graph | None, bytes], ir.Value] = {}
    for value, plan in plans.items():
        if plan.steps:
            assert isinstance(value.graph, ir.Graph)
            duplicate = same.setdefault((value.graph, msgspec.json.encode(plan)), value)
            if duplicate is not value and not value.is_graph_output():
                value.replace_all_uses_with(duplicate)
                value.graph.initializers.pop(value.name or "")
                continue
            entries = {name for step in plan.steps for name in step.inputs if name in plan.keys}
            if plan.steps[-1].domain == packed.DOMAIN or plan.quantizes:  # named after the first tensor of the weight
                entries = {_first_entry(plan)}
            if len(entries) == 1:
                operators = [step.op_type.lower() for step in plan.steps if step.op_type != "Constant"]
                base = ".".join([*entries, *(operators if len(operators) <= _NAMED_OPERATORS else ["transformed"])])
                value.name = free_name(base, taken, first=1)


def _is_kept(result: Any) -> bool:
    return isinstance(result, np.ndarray) and (result.size <= _EVALUATED_ELEMENTS or _is_uniform(result))


def _is_uniform(array: np.ndarray) -> bool:
    return bool((array == array.reshape(-1)[0]).all())


def _first_entry(plan: ParameterPlan) -> str:
    """The entry that the first inputs of steps lead back to."""
    name = plan.steps[-1].inputs[0]
    while name not in plan.keys:
        name = plan.steps[int(name.removeprefix("%").partition(":")[0])].inputs[0]
    return name


def _read_inputs(operator: ir.OperatorIdentifier, inputs: Sequence[_T]) -> list[_T]:
    """The inputs whose elements a node's result depends on."""
    domain, op_type, _ = operator
    unread = None if domain else _UNREAD_INPUTS.get(op_type)
    return [value for index, value in enumerate(inputs) if index != unread]


def _constant_value(node: SourceNode) -> np.ndarray | None:
    attribute = next(iter(node.attributes.values()))
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return tensor.numpy() if tensor.size <= _EVALUATED_ELEMENTS else None
    if attribute.type in (ir.AttributeType.INT, ir.AttributeType.INTS):
        return np.array(attribute.value, dtype=np.int64)
    if attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
        return np.array(attribute.value, dtype=np.float32)
    return None


def _json_attribute(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        return encode_tensor(attribute.as_tensor().numpy())
    if attribute.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS):
        return list(attribute.value)
    return attribute.value
