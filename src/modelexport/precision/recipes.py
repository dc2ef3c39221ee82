"""Recipes: which modules get which method, and the methods of a file's nodes that follow from one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import onnx_ir as ir

from modelexport.core.limits import SETTINGS_BYTES
from modelexport.core.text import nearest
from modelexport.errors import UsageError
from modelexport.files.regular_files import read_regular
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import nested_graphs
from modelexport.precision.equal_method_groups import Group, find_groups
from modelexport.precision.methods import KEEP, METHODS, Method, parse_method
from modelexport.tagged.file import TaggedFile

Assignment = Mapping[str, Method]
"""Names of nodes to their methods. A node that is not in it is kept."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The modules that selectors pick get a method, or are kept."""

    select: str | tuple[str, ...]
    """One selector, or several, which are a union; ``!`` takes away."""
    method: str
    """A method with its options, or ``keep``."""

    @property
    def selectors(self) -> tuple[str, ...]:
        return (self.select,) if isinstance(self.select, str) else self.select


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rules, of which the first that picks a call counts; a call that none picks is kept."""

    rules: tuple[Rule, ...]
    notes: tuple[str, ...] = ()
    """What made it, for people."""


class Resolved(msgspec.Struct, frozen=True):
    """What a recipe means for a file."""

    assignment: dict[str, Method]
    joined: list[str]
    """A line for each group of nodes that gets another method than the rules of some of its calls say."""
    kept: list[str]
    """The addresses of the calls that no method is for, without those inside of other kept ones."""


def chosen_recipe(
    to: str | None, keep: Iterable[str] = (), only: Iterable[str] = (), recipe: Recipe | str | Path | None = None
) -> Recipe:
    """The recipe that is given, or the one for a single method.

    Args:
        to: The method.
        keep: Selectors of modules that stay what they are.
        only: Selectors of the modules that get the method; without any, all.
        recipe: A recipe or the file of one, instead of all these.

    Raises:
        UsageError: No method is given, or a recipe as well.
        FileFormatError: The file cannot be read.
    """
    keep, only = list(keep), list(only)
    if recipe is None and to is not None:
        rules = [Rule(keep[0] if len(keep) == 1 else tuple(keep), KEEP)] if keep else []
        return Recipe((*rules, Rule(tuple(only) if len(only) > 1 else only[0] if only else ".", to)))
    if recipe is None:
        raise UsageError(f"give a method with --to ({', '.join(METHODS)}), or a recipe with --recipe")
    if to or keep or only:
        raise UsageError("a recipe has its own methods: give --recipe, or --to with --keep and --only")
    return recipe if isinstance(recipe, Recipe) else read_recipe(Path(recipe))


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from YAML or JSON.

    Raises:
        FileFormatError: It cannot be read.
        UsageError: It is not a recipe; the message names the field.
    """
    data = read_regular(path, SETTINGS_BYTES)
    try:
        return msgspec.yaml.decode(data, type=Recipe)  # JSON is YAML
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path} is not a recipe ({reason}): write 'rules:' and lines '- {{select: ..., method: ...}}'"
        ) from error


def encode_recipe(recipe: Recipe) -> bytes:
    """A recipe as YAML."""
    return msgspec.yaml.encode(recipe)


def of_parts(recipe: Recipe, parts: Mapping[str, TaggedFile]) -> dict[str, Recipe]:
    """The rules for each part of a package: those that pick a module in it.

    Raises:
        UsageError: A selector matches nothing in any part.
    """
    found: dict[str, list[Rule]] = {name: [] for name in parts}
    for rule in recipe.rules:
        words = {name: [w for w in rule.selectors if _picks(w, tagged)] for name, tagged in parts.items()}
        if missing := set(rule.selectors).difference(*words.values()):
            known, word = {str(call) for tagged in parts.values() for call in tagged.tags}, min(missing)
            raise UsageError(f"no part has a module that '{word}' picks{nearest(word, known)}")
        for name, there in words.items():
            if any(not word.startswith("!") for word in there) or there == list(rule.selectors):
                found[name].append(Rule(tuple(there), rule.method))
    return {name: Recipe(tuple(rules), recipe.notes) for name, rules in found.items()}


def _picks(word: str, tagged: TaggedFile) -> bool:
    try:
        tagged.select(word)
    except UsageError:
        return False
    return True


def resolve(recipe: Recipe, tagged: TaggedFile, groups: Sequence[Group] | None = None) -> Resolved:
    """The method of every node of a file.

    A node gets the method of the first rule that picks its call. A node of several calls is kept if one of them is, and
    so is a group (:func:`find_groups`); otherwise the first rule among theirs counts.

    Raises:
        UsageError: A selector matches nothing, or a method does not exist.
    """
    methods = [parse_method(rule.method) for rule in recipe.rules]
    inside = [tagged.select(*rule.selectors).inside for rule in recipe.rules]
    last = len(methods)
    of_call = {
        traced.call: next((index for index, picked in enumerate(inside) if traced.call in picked), last)
        for traced in tagged.calls
    }

    def combined(found: set[int]) -> int:
        """The rule for what several rules are for."""
        keeping = [index for index in found if index == last or methods[index] is None]
        return min(keeping or found)

    of_node: dict[str, int] = {}
    for node in tagged.model.graph:
        owner = owner_of(node)
        if owner is not None and not nested_graphs(node) and not is_quantized(node):
            of_node[node.name or ""] = combined({of_call[call] for call in owner.calls})
    joined: list[str] = []
    for group in find_groups(tagged) if groups is None else groups:
        rules = {of_node[name] for name in group.nodes if name in of_node}
        if len({methods[index] if index < last else None for index in rules}) > 1:
            chosen = combined(rules)
            method = methods[chosen] if chosen < last else None
            why = "use one parameter" if group.why == "weight" else "are projections of one attention"
            joined.append(f"{', '.join(group.calls)} {why}: all {'kept' if method is None else f'get {method}'}")
            of_node.update(dict.fromkeys(group.nodes, chosen))
    assignment = {name: method for name, index in of_node.items() if index < last and (method := methods[index])}
    kept = {call for call, index in of_call.items() if index == last or methods[index] is None}
    for traced in reversed(tagged.calls.calls):  # callees before callers
        if traced.call not in kept and traced.parent is not None:
            kept.discard(traced.parent)
    tops = [str(traced.call) for traced in tagged.calls if traced.call in kept and traced.parent not in kept]
    return Resolved(assignment, joined, tops)


def is_quantized(node: ir.Node) -> bool:
    """Whether a node takes or makes numbers of at most eight bits: it is quantized already, and is left alone."""
    return node.op_type in _QUANTIZERS or any(
        value is not None and value.dtype in _QUANTIZED for value in (*node.inputs, *node.outputs)
    )


_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_QUANTIZED = frozenset(
    dtype
    for dtype in ir.DataType
    if dtype not in (ir.DataType.UNDEFINED, ir.DataType.STRING, ir.DataType.BOOL) and dtype.bitwidth <= 8
)
