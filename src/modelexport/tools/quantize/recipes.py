"""Recipes: which modules get which method, and the methods of a file's nodes that follow from one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.core.selectors import nearest_selectors
from modelexport.errors import UsageError
from modelexport.files.recipe_files import Recipe, Rule, read_recipe
from modelexport.graph.node_owners import calls_text, owner_of
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.operator_kinds import QUANTIZERS
from modelexport.graph.weighted_operators import row_of, summed_axis
from modelexport.runtime.half_precision import reach
from modelexport.tagged.file import TaggedFile
from modelexport.tools.quantize.blockwise_weights import TABLES_SINCE
from modelexport.tools.quantize.changes_for_devices import CHANGES
from modelexport.tools.quantize.equal_method_groups import find_groups
from modelexport.tools.quantize.methods import KEEP, METHODS, Method, parse_method
from modelexport.tools.quantize.weights_behind import MOVES_WEIGHTS, weight_behind, weights_behind
from modelexport.traces.calibration_data import RunInputs
from modelexport.traces.value_ranges import measure_values

Assignment = Mapping[str, Method]
"""Names of nodes to their methods. A node that is not in it is kept."""
_QUANTIZED = frozenset(
    dtype
    for dtype in ir.DataType
    if dtype not in (ir.DataType.UNDEFINED, ir.DataType.STRING, ir.DataType.BOOL) and dtype.bitwidth <= 8
)


class Resolved(msgspec.Struct, frozen=True):
    """What a recipe means for a file."""

    assignment: dict[str, Method]
    joined: list[str]
    """A line for each group of nodes that gets another method than the rules of some of its calls say.

    Also for each node that stays in float32 for its numbers, and if not all runs were looked at for such numbers.
    """
    kept: list[str]
    """The addresses of the calls that have no method, without those inside other kept calls."""


def chosen_recipe(
    to: str | None, keep: Iterable[str] = (), only: Iterable[str] = (), recipe: Recipe | str | Path | None = None
) -> Recipe:
    """The recipe that is given, or the one for a single method."""
    keep, only = list(keep), list(only)
    if recipe is None and to is not None:
        rules = [Rule(keep[0] if len(keep) == 1 else tuple(keep), KEEP)] if keep else []
        return Recipe((*rules, Rule(tuple(only) if len(only) > 1 else only[0] if only else ".", to)))
    if recipe is None:
        raise UsageError(f"give a method with --to ({', '.join(METHODS)}), or a recipe with --recipe")
    if to or keep or only:
        raise UsageError("a recipe has its own methods: give --recipe, or --to with --keep and --only")
    return recipe if isinstance(recipe, Recipe) else read_recipe(Path(recipe))


def of_parts(recipe: Recipe, parts: Mapping[str, TaggedFile]) -> dict[str, Recipe]:
    """The rules for each part of a package: those that pick a module in it."""
    rules_of: dict[str, list[Rule]] = {name: [] for name in parts}
    for rule in recipe.rules:
        words = {name: [w for w in rule.selectors if _picks(w, tagged)] for name, tagged in parts.items()}
        if missing := set(rule.selectors).difference(*words.values()):
            known, word = {str(call) for tagged in parts.values() for call in tagged.tags}, min(missing)
            raise UsageError(f"no part has a module that '{word}' picks{nearest_selectors(word, known)}")
        for name, there in words.items():
            if any(not word.startswith("!") for word in there) or there == list(rule.selectors):
                rules_of[name].append(msgspec.structs.replace(rule, select=tuple(there)))
    return {name: msgspec.structs.replace(recipe, rules=tuple(rules)) for name, rules in rules_of.items()}


def _picks(word: str, tagged: TaggedFile) -> bool:
    try:
        tagged.select(word)
    except UsageError:
        return False
    return True


def resolve(recipe: Recipe, tagged: TaggedFile) -> Resolved:
    """The method of every node of a file.

    A node gets the method of the first rule that picks its call. A node of several calls is kept if one of them is, and
    so is a group (:func:`find_groups`); otherwise the first rule among theirs counts.
    """
    rules = [rule for rule in recipe.rules if rule.method not in CHANGES]
    if wrong := next((rule for rule in rules if rule.nodes), None):
        raise UsageError(f"a rule of '{wrong.method}' names nodes: those go with {', '.join(CHANGES)}")
    methods = [parse_method(rule.method) for rule in rules]
    inside = [tagged.select(*rule.selectors).inside for rule in rules]
    last = len(methods)
    of_call = {
        traced.call: next((index for index, picked in enumerate(inside) if traced.call in picked), last)
        for traced in tagged.calls
    }

    def combined(indices: set[int]) -> int:
        """The rule that counts for a node or a group for which there are several."""
        keeping = [index for index in indices if index == last or methods[index] is None]
        return min(keeping or indices)

    of_node: dict[str, int] = {}
    for node in tagged.model.graph:
        owner = owner_of(node)
        if owner is not None and not nested_graphs(node) and not is_quantized(node):
            of_node[node.name or ""] = combined({of_call[call] for call in owner.calls})
    joined: list[str] = []
    for group in find_groups(tagged):
        indices = {of_node[name] for name in group.nodes if name in of_node}
        if len({methods[index] if index < last else None for index in indices}) > 1:
            chosen = combined(indices)
            method = methods[chosen] if chosen < last else None
            why = "use one parameter" if group.why == "weight" else "are projections of one attention"
            joined.append(f"{', '.join(group.calls)} {why}: all {'kept' if method is None else f'get {method}'}")
            of_node.update(dict.fromkeys(group.nodes, chosen))
    assignment = {name: method for name, index in of_node.items() if index < last and (method := methods[index])}
    left = left_alone((node, assignment[node.name or ""]) for node in tagged.model.graph if node.name in assignment)
    assignment = {name: method for name, method in assignment.items() if name not in left}
    joined += left.values()
    changes = (rule for rule in recipe.rules if rule.method in CHANGES)
    changed = {call for rule in changes for call in tagged.select(*rule.selectors).inside}
    kept = {call for call, index in of_call.items() if index == last or methods[index] is None} - changed
    for traced in reversed(tagged.calls.calls):  # callees before callers
        if traced.call not in kept and traced.parent is not None:
            kept.discard(traced.parent)
    tops = [str(traced.call) for traced in tagged.calls if traced.call in kept and traced.parent not in kept]
    return Resolved(assignment, joined, tops)


def within_range(resolved: Resolved, tagged: TaggedFile, data: RunInputs) -> Resolved:
    """Leaves out the nodes that take or return values beyond the range of their method's numbers.

    Args:
        data: Inputs of runs, of which the first ``_RUNS`` are made.
    """
    limited = sorted({str(method) for method in resolved.assignment.values() if method.row.largest is not None})
    if not limited:
        return resolved
    ranges = measure_values(tagged, data[:_RUNS]).ranges
    assignment, kept = dict(resolved.assignment), list(resolved.joined)
    if len(data) > _RUNS:
        kept.insert(0, f"{_RUNS} of {len(data)} runs looked at for values beyond the range of {', '.join(limited)}")
    for node in tagged.model.graph:
        method = assignment.get(node.name or "")
        largest = None if method is None else method.row.largest
        looked_at = (value for value in (*node.inputs, *node.outputs) if value is not None and value in ranges)
        reached = max((ranges[value].reach for value in looked_at), default=0.0)
        if largest is not None and reached > largest:
            del assignment[node.name or ""]
            what = f"{node.name} has values up to {reached:,.0f}, beyond {method}"
            kept.append(f"{calls_text([node])}: {what}: it stays in float32")
    return msgspec.structs.replace(resolved, assignment=assignment, joined=kept)


_RUNS = 8
"""The most runs that are looked at: each computes all values node by node."""


def is_quantized(node: ir.Node) -> bool:
    """Whether a node is quantized already, and is left alone.

    It takes or makes numbers of at most eight bits, or its weight, or its input if it has none, comes from them.
    """
    row = row_of(node)
    looked_at = node.inputs if row is None else node.inputs[row.weight : row.weight + 1]
    return (
        node.op_type in QUANTIZERS
        or any(value is not None and value.dtype in _QUANTIZED for value in (*node.inputs, *node.outputs))
        or any(_is_dequantized(value) for value in looked_at)
    )


def _is_dequantized(value: ir.Value | None) -> bool:
    """Whether a value, or one of those that it is joined of, is a ``DequantizeLinear``'s, moved or not."""
    behind = [value]
    for each in behind:
        producer = each.producer() if each is not None else None
        if producer is not None and producer.op_type == "DequantizeLinear":
            return True
        if producer is not None and producer.op_type in MOVES_WEIGHTS:
            moved = producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
            behind += [other for other in moved if other not in behind]
    return False


def can_quantize(method: Method, node: ir.Node, weighted: Collection[ir.Node], among: Collection[ir.Node] = ()) -> bool:
    """Whether a method quantizes a node.

    Args:
        among: Nodes that have the same method: a sequence, whose type no node converts, stays among these.
    """
    if nested_graphs(node) or is_quantized(node):
        return False
    if (operators := method.row.operators) is not None:
        is_table = node.op_type == "Gather" and "embeddings" in method.row.options and method.option("embeddings")
        has_type = node.outputs[0].dtype in (None, *method.row.types)
        is_for = node in weighted and has_type and (node.op_type in operators or is_table)
        return is_for and not _obstacle(method, node)
    # A weight whose elements are moved is read where it is used; half precision is left alone.
    half = (None, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.name]
    is_left = any(
        value.dtype in half or not (isinstance(value.type, ir.TensorType) or _stays_among(value, among))
        for value in values
    )
    return weight_behind(node.outputs[0]) is None and not is_left and not _obstacle(method, node)


def _stays_among(sequence: ir.Value, nodes: Collection[ir.Node]) -> bool:
    """Whether all nodes that make and take a sequence are among these."""
    ends = [sequence.producer(), *sequence.consumers()]
    return (
        isinstance(sequence.type, ir.SequenceType)
        and not sequence.is_graph_output()
        and all(end in nodes for end in ends)
    )


def left_alone(nodes: Iterable[tuple[ir.Node, Method]]) -> dict[str, str]:
    """The names of the nodes whose method cannot store their weights, to a line about each: they stay as they are."""
    return {
        node.name or "": f"{calls_text([node])}: a weight of {node.name} {why}: it stays as it is"
        for node, method in nodes
        if (why := _obstacle(method, node))
    }


def _obstacle(method: Method, node: ir.Node) -> str:
    """Why a method cannot store a weight of a node, as the end of a sentence; empty if it can."""
    row = row_of(node)
    if method.row.largest is not None:
        taken = [*node.inputs, *(node.outputs if node.op_type == "Constant" else ())]
    else:
        taken = list(node.inputs[row.weight : row.weight + 3]) if row is not None else []  # with the bias
    weights = [weight for value in taken if value is not None for weight in weights_behind(value) or [value]]
    tensors = [tensor for weight in weights if (tensor := ir.convenience.get_const_tensor(weight)) is not None]
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point()]
    if method.row.largest is not None:
        matrices = [tensor for tensor in floats if row is not None and len(tensor.shape) > 1]
        above = any(reach(tensor.numpy()) > method.row.largest for tensor in floats)
        below = any(0 < reach(tensor.numpy()) < float(np.finfo(np.float16).smallest_normal) for tensor in matrices)
        return f"is {'beyond' if above else 'below'} the range of {method}" if above or below else ""
    if any(not tensor.size or not _fits_twice(tensor.numpy()) for tensor in floats):
        return "has no numbers, or some are not finite or beyond half of the range of their type"
    algorithm = method.option("algorithm") if "algorithm" in method.row.options else "rtn"
    if row is None or algorithm == "rtn" or node.op_type not in (method.row.operators or ()):
        return _obstacle_of_table(method, node) if node.op_type == "Gather" and floats else ""
    if any(tensor.dtype == ir.DataType.BFLOAT16 for tensor in floats):
        return f"is in bfloat16, which the library cannot read for {algorithm} (algorithm=rtn can)"
    shape = taken[0].shape if taken[0] is not None else None
    if algorithm == "k_quant" and method.row.bits == 4 and shape is not None and shape.is_static() and len(shape) == 2:
        summed = shape.numpy()[summed_axis(node)]
        blocks, columns = -(-summed // method.option("block")), math.prod(shape.numpy()) // summed
        if blocks % 2 and columns > 1:
            return f"has an odd number of blocks, {blocks}, which k_quant cannot write (algorithm=rtn can)"
    return ""


def _fits_twice(array: np.ndarray) -> bool:
    """Whether their type has numbers of twice the size: quantizers subtract the smallest number from the largest."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(array.dtype.type(2) * max(array.max(), -array.min())))


def _obstacle_of_table(method: Method, table: ir.Node) -> str:
    """Why a method cannot store the table of a ``Gather``: it shares the codes of a product, or the library cannot
    write it.
    """
    how, rows, graph = {name: method.option(name) for name in method.row.options}, table.inputs[0], table.graph
    if rows is None or graph is None or not how.get("embeddings"):
        return ""
    version = graph.opset_imports[""]
    if method.row.bits == 4 and how["algorithm"] == "rtn" and version >= TABLES_SINCE:
        return ""
    products = [each for each in graph if each.op_type in (method.row.operators or ())]
    same = [each for each in products if weights_behind(each.inputs[1]) == weights_behind(rows)]
    is_whole = rows.shape is not None and rows.shape.numpy()[-1] % how["block"] == 0
    if is_whole and any(not _obstacle(method, each) for each in same):
        return ""
    return (
        "is a table that no product has in whole blocks, which only int4:algorithm=rtn can write, from opset "
        f"{TABLES_SINCE} (the file has {version})"
    )
