"""An exported module in the place of another: its calls, tags and documents become those of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.tags import CallTags, LevelRule, level_rule
from modelexport.format import documents
from modelexport.surgery.edited_calls import EditedCalls, NewCall
from modelexport.tagged.file import TaggedFile


@dataclass(frozen=True)
class Graft:
    """A module of another file in the place of a call."""

    call: ModuleCall
    sub: TaggedFile
    calls: Mapping[ModuleCall, ModuleCall]
    """Calls of the file to calls of the whole model."""
    values: Mapping[str, ir.Value]
    """Names of values in the file to the values in the whole model."""
    absolute: bool
    """Whether the file was cut out of the same model, so that its calls have the same addresses."""

    def path(self, path: str) -> str:
        """The path in the whole model of a module of the file."""
        return path if self.absolute else joined(self.call.path, path)


def joined(path: str, inner: str) -> str:
    """The path, or the key of an entry, of what is inside a module."""
    return f"{path}.{inner}" if path and inner else path or inner


def rule_of(sidecar: documents.Hierarchy) -> LevelRule:
    """Which classes make levels in an exported model."""
    settings = sidecar.settings
    called = ((each.class_name, _is_torch_nn(each)) for each in sidecar.modules if each.path and each.calls)
    return level_rule(settings.granularity, settings.include, settings.exclude, called)


def _is_torch_nn(module: documents.ModuleEntry) -> bool:
    return module.qualified_class.startswith("torch.nn.")


def graft_calls(
    sub: TaggedFile, call: ModuleCall, edited: EditedCalls, rule: LevelRule | None
) -> dict[ModuleCall, ModuleCall]:
    """Give a call the class of the root of an exported module, and add the calls inside that; returns their new names.

    Args:
        rule: Which classes make levels in the whole model; the calls of the module keep theirs if it is not known.
    """
    theirs, sidecar = sub.call_tags, sub.hierarchy
    levels = {each: theirs.is_level_call(each) for each in sub.tags}
    root = sub.calls.calls[0].call
    levels[root] = edited.tags.is_level_call(call)
    if rule is not None and sidecar is not None:
        known = {each.path: each for each in sidecar.modules}
        for each in levels:
            module = known[each.path]
            levels[each] = rule.makes_level(module.class_name, is_torch_nn=_is_torch_nn(module))
    order = {traced.call: place for place, traced in enumerate(sub.calls.calls[1:])}
    inside = [
        NewCall(
            joined(call.path, traced.call.path),
            order.get(traced.parent) if traced.parent is not None else None,
            theirs.class_of(traced.call),
            levels[traced.call],
        )
        for traced in sub.calls.calls[1:]
    ]
    level = levels[root] or edited.tags.calls[call].parent is None
    added = edited.graft(call, theirs.class_of(root), level=level, inside=inside)
    return {root: call, **dict(zip(order, added, strict=True))}


def grafted_sidecar(
    before: documents.Hierarchy, grafts: Sequence[Graft], tags: CallTags
) -> tuple[documents.Hierarchy, dict[str, ir.Value]]:
    """The sidecar of a file as though what was put into it had always been there.

    Returns:
        The sidecar, and names that it has for values that were put in, to these values.
    """
    calls = {entry.address: entry for entry in before.calls}
    modules = {entry.path: entry for entry in before.modules}
    values: dict[str, ir.Value] = {}
    entered: dict[str, documents.ModuleEntry] = {}
    for number, graft in enumerate(grafts):
        if graft.absolute:
            values.update(graft.values)
            continue
        marked = {name: f"\0{number}\0{name}" for name in graft.values}
        values.update((marked[name], value) for name, value in graft.values.items())
        sidecar = graft.sub.hierarchy
        theirs = {entry.address: entry for entry in sidecar.calls} if sidecar is not None else {}
        for inner, call in graft.calls.items():
            if call != graft.call:
                calls.pop(call.address, None)
                if (entry := theirs.get(inner.address)) is not None:
                    inputs, outputs = (
                        [msgspec.structs.replace(each, value=marked.get(each.value or "")) for each in tensors]
                        for tensors in (entry.inputs, entry.outputs)
                    )
                    calls[call.address] = msgspec.structs.replace(
                        entry, address=call.address, enter=None, exit=None, inputs=inputs, outputs=outputs
                    )
        _count(modules, graft)
        entered = _module_entries(modules, graft, tags) | entered  # a module's entry is that of its first call
        modules.update(entered)
    root = msgspec.structs.replace(before.model, parameters=modules[""].parameters) if "" in modules else before.model
    amended = msgspec.structs.replace(before, model=root, calls=list(calls.values()), modules=list(modules.values()))
    return amended, values


def _module_entries(
    modules: Mapping[str, documents.ModuleEntry], graft: Graft, tags: CallTags
) -> dict[str, documents.ModuleEntry]:
    """The entries of the modules that were put in; those without one in their own sidecar have only a class."""
    sidecar = graft.sub.hierarchy
    theirs = sidecar.modules if sidecar is not None else []
    old = modules.get(graft.call.path)
    depth, aliases = (old.depth, old.aliases) if old is not None else (graft.call.path.count(".") + 1, [])
    first = {call.path: call for call in reversed(list(graft.calls.values()))}
    placed: dict[str, documents.ModuleEntry] = {}
    for entry in theirs:
        path = graft.path(entry.path)
        call = first.get(path)
        below_root = "".join(f"/{segment}" for segment in entry.tag.split("/")[2:])
        placed[path] = msgspec.structs.replace(
            entry,
            path=path,
            tag=tags.tag(call) if call is not None else tags.tag(graft.call) + below_root,
            depth=depth + entry.depth,
            aliases=[joined(graft.call.path, alias) for alias in entry.aliases] if entry.path else aliases,
            level=tags.is_level_call(call) if call is not None else entry.level,
        )
    if old is not None and graft.call.path not in placed:
        name = tags.class_of(graft.call)
        about = {} if name == old.class_name else {"class_name": name, "qualified_class": name, "line": 0}
        placed[graft.call.path] = msgspec.structs.replace(old, tag=tags.tag(graft.call), **about)
    return placed


def _count(modules: dict[str, documents.ModuleEntry], graft: Graft) -> None:
    """Count the parameters of the modules around a module that is replaced, if those of both are known."""
    old, sidecar = modules.get(graft.call.path), graft.sub.hierarchy
    if old is None or sidecar is None or graft.call.index:
        return
    more = sidecar.model.parameters - old.parameters
    trainable = sidecar.modules[0].trainable - old.trainable
    for path, entry in modules.items():
        if graft.call.path != path and (not path or graft.call.path.startswith(f"{path}.")):
            modules[path] = msgspec.structs.replace(
                entry, parameters=entry.parameters + more, trainable=entry.trainable + trainable
            )
