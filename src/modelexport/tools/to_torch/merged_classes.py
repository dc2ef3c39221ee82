"""Classes that differ in numbers alone become one class, with the numbers as arguments of its constructor.

``Block`` with ``nn.Linear(8, 16)`` and ``Block_2`` with ``nn.Linear(8, 32)`` become ``Block(out_features)``.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from modelexport.graph.unique_names import free_name
from modelexport.tools.to_torch.class_writing import OF_TORCH
from modelexport.tools.to_torch.expressions import identifier, parsed

_LINE_OF_TORCH = f"\n    {ast.unparse(ast.parse(OF_TORCH))}\n"
"""The line of a class without its comment. No text of the file has such a line: its line breaks are quoted."""


@dataclass
class _Number:
    """A number that is an argument in a constructor."""

    parent: Any
    """The list of arguments, or the keyword."""
    place: int | str
    label: str
    """How the function calls the argument."""
    target: str
    """The attribute that gets what the function makes."""

    @property
    def code(self) -> ast.expr:
        """The expression at this place of the call."""
        return self.parent[self.place] if isinstance(self.place, int) else self.parent.value

    def put(self, code: ast.expr) -> None:
        """Replace the expression at this place."""
        if isinstance(self.place, int):
            self.parent[self.place] = code
        else:
            self.parent.value = code


class MergedClasses:
    """The classes of a file, merged.

    Args:
        classes: The text of each class by its name, callees first.
        wanted: The name that each class should have; several classes may have the same.
        root: The class that has to stay without arguments.
        taken: Names that no class can have.
    """

    def __init__(
        self, classes: Mapping[str, str], wanted: Mapping[str, str], root: str, taken: Collection[str]
    ) -> None:
        self._trees: dict[str, Any] = {name: ast.parse(text).body[0] for name, text in classes.items()}
        self._calls: dict[str, ast.Call] = {}
        """The call that makes each of the given classes now."""
        self._parameters: dict[str, list[str]] = {}
        self.texts: dict[str, str] = {}
        """The merged classes by their names, callees first."""
        names = {*taken, root}
        for level in self._levels():
            groups: dict[tuple[str, str], list[str]] = {}
            for name in level:
                _Calls(self._calls).visit(self._trees[name])
                groups.setdefault((wanted[name], name if name == root else self._loose(name)), []).append(name)
            for (base, _), group in groups.items():
                new = root if root in group else free_name(base, names)
                self._merge(group, new)
                tree = self._trees[group[0]]
                tree.name = new
                text = ast.unparse(tree).replace(":\n\n    def", ":\n    def", 1)
                self.texts[new] = text.replace(_LINE_OF_TORCH, f"\n    {OF_TORCH}\n", 1)
                if new != base:  # exported again, it has the name that it had
                    self.texts[new] += f'\n\n\n{new}.__name__ = "{base}"'

    def _levels(self) -> list[list[str]]:
        """The names of the classes by level: classes of level 1 make no others, those of level 2 only these."""
        heights: dict[str, int] = {}
        for name, tree in self._trees.items():
            made = (heights.get(node.id, 0) for node in ast.walk(tree) if isinstance(node, ast.Name))
            heights[name] = 1 + max(made, default=0)
        return [[name for name in heights if heights[name] == level] for level in sorted({*heights.values()})]

    def _loose(self, name: str) -> str:
        """The code of a class without its name and numbers, and without the keywords that have numbers."""
        tree = copy.deepcopy(self._trees[name])
        tree.name = ""
        for number in self._numbers(tree):
            number.put(parsed("_"))
        for call in _made(tree):
            call.keywords = [each for each in call.keywords if ast.unparse(each.value) != "_"]
        return ast.unparse(tree)

    def _merge(self, group: Sequence[str], new: str) -> None:
        """Give the first class of a group the arguments in which the others differ."""
        if len(group) > 1:
            _write_defaults([list(_made(self._trees[name])) for name in group])
        rows = list(zip(*(list(self._numbers(self._trees[name])) for name in group), strict=True))
        values: dict[tuple[str, ...], Sequence[_Number]] = {}
        for row in rows:
            key = tuple(ast.unparse(each.code) for each in row)
            if len(set(key)) > 1:
                values.setdefault(key, row)
        labels = [row[0].label for row in values.values()]
        names: dict[tuple[str, ...], str] = {}
        for key, (first, *_) in values.items():
            label = first.label if labels.count(first.label) == 1 else f"{first.target}_{first.label}"
            names[key] = free_name(identifier(label, "size"), {"self", *names.values()})
        given = [{name: parsed(key[place]) for key, name in names.items()} for place in range(len(group))]
        for row in rows:
            if (name := names.get(tuple(ast.unparse(each.code) for each in row))) is not None:
                row[0].put(parsed(name))
        self._parameters[new] = list(names.values())
        are_named = len(names) > 3 or any(isinstance(each, ast.Constant) and isinstance(each.value, bool)
                                          for each in (given[0].values() if given else ()))  # fmt: skip
        for name, arguments in zip(group, given, strict=True):
            keywords = [ast.keyword(key, each) for key, each in arguments.items()] if are_named else []
            positional = [] if are_named else list(arguments.values())
            self._calls[name] = ast.Call(ast.Name(new, ast.Load()), positional, keywords)
        for method in self._trees[group[0]].body:
            if names and isinstance(method, ast.FunctionDef) and method.name == "__init__":
                method.args.args += [ast.arg(name) for name in names.values()]

    def _numbers(self, tree: Any) -> Iterator[_Number]:
        """The numbers that functions of torch and constructors get in the constructor of a class."""
        for statement in _constructor(tree):
            target = (
                ast.unparse(statement.targets[0]).removeprefix("self.") if isinstance(statement, ast.Assign) else ""
            )
            for call in _made(statement):
                labels = self._labels(call)
                for place, each in enumerate(call.args):
                    if _is_number(each):
                        yield _Number(call.args, place, labels[place] if place < len(labels) else "size", target)
                for keyword in call.keywords:
                    if _is_number(keyword.value):
                        yield _Number(keyword, "value", keyword.arg or "", target)

    def _labels(self, call: ast.Call) -> list[str]:
        if isinstance(call.func, ast.Name):
            return self._parameters.get(call.func.id, ["depth"])
        return list(_parameters(call))


class _Calls(ast.NodeTransformer):
    """Replaces the calls that make classes."""

    def __init__(self, calls: Mapping[str, ast.Call]) -> None:
        self.calls = calls

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) and not node.args else ""
        return copy.deepcopy(self.calls.get(name, node))


def _constructor(tree: Any) -> list[ast.stmt]:
    return next((each.body for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), [])


def _made(tree: Any) -> Iterator[ast.Call]:
    """The calls in a constructor that make modules and tensors of zeros, and those that count them."""
    statements = _constructor(tree) if isinstance(tree, ast.ClassDef) else [tree]
    for node in (each for statement in statements for each in ast.walk(statement)):
        text = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and (
            text.startswith(("nn.", "torch.zeros", "torch.ones", "torch.full"))
            or (isinstance(node.func, ast.Name) and text != "super")
        ):
            yield node


def _parameters(call: ast.Call) -> Mapping[str, inspect.Parameter]:
    """The parameters of the class of ``torch.nn`` that is called; none if it is something else."""
    name = ast.unparse(call.func).removeprefix("nn.")
    known = getattr(nn, name, None) if ast.unparse(call.func) == f"nn.{name}" else None
    if not inspect.isclass(known):
        return {}
    recurrent = issubclass(known, nn.RNNBase)  # its classes take what they pass on to it, behind a mode
    parameters = inspect.signature(nn.RNNBase if recurrent else known).parameters
    return dict(list(parameters.items())[recurrent:])


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return all(map(_is_number, node.elts))
    plain = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(plain, ast.Constant) and isinstance(plain.value, int | float | None)


def _write_defaults(rows: Sequence[Sequence[ast.Call]]) -> None:
    """Write the keywords that one of several equal calls has in all of them."""
    for calls in zip(*rows, strict=True):
        names = list(dict.fromkeys(each.arg for call in calls for each in call.keywords))
        for call in calls:
            given = {each.arg: each for each in call.keywords}
            if given.keys() != set(names) and isinstance(call.func, ast.Attribute):
                known = _parameters(call)
                given |= {
                    name: ast.keyword(name, parsed(repr(known[name].default))) for name in names if name not in given
                }
            call.keywords = [given[name] for name in names]
