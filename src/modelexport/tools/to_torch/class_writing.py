"""The classes of a generated file: one for each distinct module, with its entries, its modules and its ``forward``."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.format.documents import StateDictEntry
from modelexport.format.dtypes import parse_dtype
from modelexport.graph.unique_names import free_name
from modelexport.tagged.encodings.functions_call_groups import Group
from modelexport.tools.to_torch.call_layout import CallLayout, is_below
from modelexport.tools.to_torch.entries_as_nodes import SMALL
from modelexport.tools.to_torch.expressions import identifier, is_plain, literal
from modelexport.tools.to_torch.forward_text import Built, ForwardText
from modelexport.tools.to_torch.module_nodes import ELSEWHERE, OF_MODULES, ModuleNode, ModuleNodes
from modelexport.tools.to_torch.operation import FUNCTIONS
from modelexport.tools.to_torch.recognized_torch_classes import container, runs, sequential, torch_class, uncalled
from modelexport.tools.to_torch.tested_classes import Arguments, recurrent_class, tested_class

OF_TORCH = '__module__ = "torch.nn"  # exported again, it is not a level of tags, as it was none'
"""The line of a class that was one of torch.nn, and whose code stands in the file."""
RESERVED_NAMES = frozenset(
    (*FUNCTIONS, "Any", "Callable", "F", "OrderedDict", "Path", "Sequence", "Tensor", "WEIGHTS", "attrgetter",
     "hashlib", "load", "load_file", "math", "nn", "own_weights", "torch", *dir(builtins))
)  # fmt: skip
"""Names that a generated file has already, or may have."""
_OF_CLASSES = re.compile(rf"{ELSEWHERE}|forward_\d+")
"""Attributes that a generated class may have."""


class ModuleClasses:
    """Writes the classes of a file.

    Args:
        dropout: Paths of modules to the probability with which their results are dropped in training.
    """

    def __init__(self, layout: CallLayout, nodes: ModuleNodes, *, dropout: dict[str, float]) -> None:
        self.layout, self.nodes, self.dropout = layout, nodes, dropout
        self.helpers: set[str] = set()
        self.classes: dict[str, str] = {}
        """The text of each class, by its name, callees first."""
        self.stored: set[ir.Value] = set()
        """The constants whose elements are beside the code, and not in it."""
        self.wanted: dict[str, str] = {}
        """The name that each class would have if no other had it."""
        self._equal: dict[tuple[str, str], tuple[str, list[str]]] = {}
        self._built: dict[str, Built] = {}
        self._found: dict[str, list[Arguments]] = {}
        """The arguments of classes of torch.nn that were found by running them."""
        self._statistics = {key for value, key in layout.entries.values.items() if _is_statistic(value)}
        self._taken = {*RESERVED_NAMES}
        self.ties = self._ties()

    def build(self, path: str) -> Built:
        """A module, and all inside it."""
        if path not in self._built:
            node = self.nodes.by_path[path]
            if node.alias_of is not None:
                return self.build(node.alias_of)
            self._built[path] = self._build(node)
        return self._built[path]

    def _build(self, node: ModuleNode) -> Built:
        children = {name: self.build(child.path).constructor for name, child in node.children.items()}
        if node.path not in self.dropout and (recurrent := recurrent_class(self.layout, node)) is not None:
            return Built(self._typed(recurrent[0], node) or "", recurrent=recurrent[1])
        known = self._typed(
            torch_class(self.layout, node, self._forward)
            or tested_class(self.layout, node, self._found.setdefault(node.class_name, [])),
            node,
        )
        if node.path not in self.ties and known is None:
            if not node.calls and node.path:
                known = self._parameter_list(node) or container(node, children)
            if not node.running and node.path and not any(self.layout.outputs[group.call] for group in node.calls):
                known = known or self._like_another(node) or uncalled(node)
                got = [self.layout.got.get(group.call) for group in node.calls]
                known = known if not got or (known is not None and runs(known, got)) else None
            known = known or sequential(self.layout, node, children, self._is_plain_call)
        node.is_indexed = known is not None and known.startswith("nn.Sequential(") and node.path not in self.dropout
        if known is None or node.path not in self.dropout:
            return Built(known) if known is not None else self._class(node, children)
        if known.endswith("(0.0)"):
            return Built(known.replace("(0.0)", f"({self.dropout[node.path]!r})"))
        return self._class(node, children)

    def _typed(self, constructor: str | None, node: ModuleNode) -> str | None:
        """A constructor with the floating-point type of the module's entries, if it is not float32."""
        types = {self._torch_type(entry.dtype) for entry in node.entries.values() if _is_floating(entry)} - {""}
        return constructor if constructor is None or not types else constructor[:-1] + types.pop() + ")"

    def _parameter_list(self, node: ModuleNode) -> str | None:
        if not node.is_list or not node.entries or not all(self._is_parameter(node, name) for name in node.entries):
            return None
        return f"nn.ParameterList([{', '.join(self._zeros(entry) for entry in node.entries.values())}])"

    def _like_another(self, node: ModuleNode) -> str | None:
        """The class of an equal module that the file runs."""
        equal = (other for other in self.nodes.by_path.values() if other.running and other.is_like(node))
        found = next(equal, None)
        return None if found is None else self.build(found.path).constructor

    # Entries and constants

    def _torch_type(self, dtype: str) -> str:
        name = self.layout.type_name(parse_dtype(dtype))
        return "" if name == "float32" else f", dtype=torch.{name}"

    def _zeros(self, entry: StateDictEntry) -> str:
        return f"torch.zeros({_shape(entry.shape)}{self._torch_type(entry.dtype)})"

    def _is_parameter(self, node: ModuleNode, name: str) -> bool:
        """Whether an entry has a gradient; files of other exporters do not say which entries are buffers."""
        entry, key = node.entries[name], f"{node.path}.{name}".lstrip(".")
        is_number = _is_floating(entry) or entry.dtype.startswith("complex")
        return is_number and not entry.buffer and key not in self._statistics

    def _ties(self) -> dict[str, list[tuple[str, str]]]:
        """Second names of tensors and modules with the first, by the path of the module that gives them."""
        found: dict[str, list[tuple[str, str]]] = {}
        pairs = [(node.path, node.alias_of) for node in self.nodes.by_path.values() if node.alias_of is not None]
        for names in self.layout.entries.names.values():
            kept = [name for name in names if self.has(name)]
            pairs += [(other, kept[0]) for other in kept[1:]]
        for name, first in pairs:
            found.setdefault(self._common(name, first), []).append((name, first))
        return found

    def has(self, name: str) -> bool:
        """Whether a module has an entry of this name of its own."""
        path, _, last = name.rpartition(".")
        return path in self.nodes.by_path and last in self.nodes.by_path[path].entries

    def _common(self, name: str, first: str) -> str:
        """The path of the innermost module with code of its own that two names are inside."""
        path = name.rpartition(".")[0]
        while path and not (is_below(first, path) and self.nodes.by_path[path].calls):
            path = path.rpartition(".")[0]
        return path

    def _tied(self, start: str, name: str, first: str) -> str:
        """The statement in the code of a module that gives what has the first name the other one."""
        path, _, last = name.rpartition(".")
        (before, _, behind), owner = first.rpartition("."), self.nodes.attribute(start, path)
        target, source = (ast.unparse(self.nodes.attribute(start, *of)) for of in ((path, last), (before, behind)))
        if target.startswith("getattr"):
            return f"setattr({ast.unparse(owner)}, {last!a}, {source})"
        return f"{target} = {source}"

    def _constant_line(self, value: ir.Value, name: str) -> str:
        tensor = self.layout.constants[value]
        dtype, size, shape = self.layout.type_name(tensor.dtype), tensor.size, _shape(tensor.shape.numpy())
        kind = "" if dtype == "float32" else f", dtype=torch.{dtype}"
        array = self.layout.array(value) if size else None
        first = int(array.reshape(-1)[0]) if array is not None and array.dtype == np.int64 and size > 4 else None
        if array is not None and first is not None and (array.reshape(-1) == np.arange(first, first + size)).all():
            moved = "" if array.ndim == 1 else f".reshape({', '.join(map(str, array.shape))})"
            text = f"torch.arange({f'{first}, ' if first else ''}{first + size}){moved}"
        elif array is not None and size > 1 and (array == array.reshape(-1)[0]).all():
            number = array.reshape(-1)[0]
            filled = {0: f"zeros({shape}", 1: f"ones({shape}"}.get(
                number.item(), f"full({tuple(array.shape)}, {ast.unparse(literal(number))}"
            )
            text = f"torch.{filled}{kind})"
        elif array is not None and tensor.nbytes <= SMALL:
            array = array.astype(np.float64) if array.dtype.kind not in "biufc" else array
            text = f"torch.tensor({ast.unparse(literal(array))}{'' if dtype in ('int64', 'bool') else kind})"
        else:
            text = f"torch.zeros({shape}{kind})"
            self.stored.add(value)
        return f"self.register_buffer({name!a}, {text}, persistent=False)"

    # Classes

    def _class(self, node: ModuleNode, children: dict[str, str]) -> Built:
        if node.path in self.dropout and any(len(self.layout.outputs[group.call]) != 1 for group in node.running):
            raise UsageError(f"dropout of {node.path or '.'}: it does not return one tensor; name modules inside it")
        forwards = [self._forward(group) for group in node.calls]
        constants: dict[ir.Value, str] = {}
        for forward in forwards:
            constants |= {value: name for value, name in forward.constants.items() if value not in constants}
        head = self._head(node, children)
        lines = [self._constant_line(value, name) for value, name in constants.items()]
        keys = [_neutral(forward, constants) for forward in forwards]
        neutral = [self._constant_line(value, f"constant{place}") for place, value in enumerate(constants)]
        distinct = list(dict.fromkeys(keys))
        key = "\n".join([*head, *neutral, *distinct, str(self.dropout.get(node.path)), node.qualified])
        wanted = identifier(node.class_name or _class_name(node.path), "Module")
        if (wanted, key) not in self._equal:
            texts = [forwards[keys.index(each)] for each in distinct]
            for text in texts:
                self.helpers |= text.helpers
            name = free_name(wanted, self._taken)
            self._equal[wanted, key] = name, list(constants.values())
            self.classes[name] = self._class_text(name, [*head, *lines], texts, node)
            self.wanted[name] = wanted
        name, names = self._equal[wanted, key]
        numbers = {group.call: distinct.index(each) for group, each in zip(node.calls, keys, strict=True)}
        return Built(f"{name}()", numbers, constants=dict(zip(constants, names, strict=True)))

    def _forward(self, group: Group) -> ForwardText:
        return ForwardText(self.layout, self.nodes, group, self.build)

    def _is_plain_call(self, group: Group) -> bool:
        return self.build(group.call.path).has_plain_call(group.call)

    def _head(self, node: ModuleNode, children: dict[str, str]) -> list[str]:
        names = (*children, *node.entries)
        if reserved := sorted(name for name in names if name in OF_MODULES or _OF_CLASSES.fullmatch(name)):
            where = f" of {node.path}" if node.path else ""
            raise UsageError(
                f"'{reserved[0]}'{where} has the name of an attribute of torch.nn.Module, which no entry or module can "
                f"have: give the initializer another name"
            )
        lines = []
        for name, text in children.items():
            lines.append(f"self.{name} = {text}" if is_plain(name) else f"self.add_module({name!a}, {text})")
        for name, entry in node.entries.items():
            if self._is_parameter(node, name):
                text = f"nn.Parameter({self._zeros(entry)})"
                lines.append(
                    f"self.{name} = {text}" if is_plain(name) else f"self.register_parameter({name!a}, {text})"
                )
            else:
                lines.append(f"self.register_buffer({name!a}, {self._zeros(entry)})")
        lines += [self._tied(node.path, *names) for names in self.ties.get(node.path, ())]
        for caller, paths in self.nodes.elsewhere.items() if not node.path else ():
            targets = ", ".join(ast.unparse(self.nodes.attribute("", path)) for path in paths)
            lines.append(f"{ast.unparse(self.nodes.attribute('', caller))}.{ELSEWHERE} = [{targets}]")
        return lines

    def _dropped(self, node: ModuleNode, body: list[str]) -> list[str]:
        if node.path not in self.dropout or not body[-1].startswith("return "):
            return body
        result = body[-1].removeprefix("return ")
        return [*body[:-1], f"return F.dropout({result}, {self.dropout[node.path]!r}, self.training)"]

    def _class_text(self, name: str, head: list[str], forwards: list[ForwardText], node: ModuleNode) -> str:
        methods = {"__init__(self)": ["super().__init__()", *head]} if head else {}
        for number, text in enumerate(forwards):
            signature = ", ".join(["self", *text.arguments])
            methods[f"forward{f'_{number}' if len(forwards) > 1 else ''}({signature})"] = self._dropped(
                node, text.lines
            )
        if len(forwards) > 1:
            every = ", ".join(f"self.forward_{number}" for number in range(len(forwards)))
            methods["forward(self, *arguments, call=0)"] = [f"return ({every})[call](*arguments)"]
        lines = [f"class {name}(nn.Module):"]
        if node.path and node.calls and node.qualified.startswith("torch.nn."):
            lines += [f"    {OF_TORCH}", ""]
        for method, body in methods.items():
            lines += [f"    def {method}:", *(f"        {line}" for line in body), ""]
        return "\n".join(lines if methods else [*lines, "    pass", ""])


def _shape(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else str(tuple(sizes))


def _is_statistic(value: ir.Value) -> bool:
    """Whether a value is a mean or variance of a batch normalization, which has no gradient."""
    return any(use.node.op_type == "BatchNormalization" and use.idx in (3, 4) for use in value.uses())


def _is_floating(entry: StateDictEntry) -> bool:
    return parse_dtype(entry.dtype).is_floating_point()


def _class_name(path: str) -> str:
    parts = [part for part in path.split(".") if not part.isdigit()] or ["Module"]
    return "".join(word.capitalize() for word in parts[-1].split("_")) or "Module"


def _neutral(forward: ForwardText, constants: Mapping[ir.Value, str]) -> str:
    """A forward with numbers in the place of its own names and of its module's constants: equal code is equal text."""
    body = "\n".join(f"    {line}" for line in forward.lines)
    tree = ast.parse(f"def forward({', '.join(forward.arguments)}):\n{body}")
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names = {name: f"v{number}" for number, name in enumerate(forward.arguments)}
    places = {name: f"constant{place}" for place, name in enumerate(constants.values())}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (node.id in own or node.id in names):
            node.id = names.setdefault(node.id, f"v{len(names)}")
        elif isinstance(node, ast.arg):
            node.arg = names[node.arg]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            node.attr = places.get(node.attr, node.attr)
    return ast.unparse(tree)
