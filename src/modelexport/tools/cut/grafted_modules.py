"""An exported module in the place of another: its calls, tags and facts become those of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.tags import CallTags, LevelRule, level_rule
from modelexport.format import documents
from modelexport.tagged.documents.export_facts import ExportFacts
from modelexport.tagged.file import TaggedFile
from modelexport.tools.cut.edited_calls import EditedCalls, NewCall


@dataclass(frozen=True)
class Graft:
    """A module of another file in the place of a call."""

    call: ModuleCall
    facts: ExportFacts | None
    """What is known of the file besides its graph."""
    calls: Mapping[ModuleCall, ModuleCall]
    """Calls of the file to calls of the whole model."""
    values: Mapping[str, ir.Value]
    """Names of values in the file to the values in the whole model."""
    absolute: bool
    """Whether the file was cut out of the same model, so that its calls have the same addresses."""

    def value_for(self, value: ir.Value) -> ir.Value | None:
        """The value in the whole model for one of the file."""
        return self.values.get(value.name or "")


def joined(path: str, inner: str) -> str:
    """The path, or the key of an entry, of what is inside a module."""
    return f"{path}.{inner}" if path and inner else path or inner


def rule_of(facts: ExportFacts) -> LevelRule:
    """Which classes make levels in an exported model."""
    settings = facts.settings
    called = ((each.class_name, _is_torch_nn(each)) for each in facts.modules.values() if each.path and each.calls)
    return level_rule(settings.granularity, settings.include, settings.exclude, called)


def _is_torch_nn(module: documents.ModuleEntry) -> bool:
    return module.qualified_class.startswith("torch.nn.")


def graft_calls(
    sub: TaggedFile, facts: ExportFacts | None, call: ModuleCall, edited: EditedCalls, rule: LevelRule | None
) -> dict[ModuleCall, ModuleCall]:
    """Give a call the class of the root of an exported module, and add the calls inside that; returns their new names.

    Args:
        rule: Which classes make levels in the whole model; the calls of the module keep theirs if it is not known.
    """
    theirs = sub.call_tags
    levels = {each: theirs.is_level_call(each) for each in sub.tags}
    root = sub.calls.calls[0].call
    levels[root] = edited.tags.is_level_call(call)
    if rule is not None and facts is not None:
        for each in levels:
            module = facts.modules[each.path]
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


def grafted_facts(facts: ExportFacts, grafts: Sequence[Graft], tags: CallTags) -> ExportFacts:
    """The facts of a model as though what was put into it had always been there."""
    back = {name: value for graft in grafts if graft.absolute for name, value in graft.values.items()}
    calls = {
        call: run.with_values(lambda value: back.get(value.name or "", value)) for call, run in facts.calls.items()
    }
    modules = dict(facts.modules)
    entered: dict[str, documents.ModuleEntry] = {}
    for graft in grafts:
        theirs = graft.facts
        if theirs is None or graft.absolute:
            continue
        for inner, call in graft.calls.items():
            if call != graft.call:
                calls.pop(call, None)
                if (run := theirs.calls.get(inner)) is not None:
                    run = run.with_values(graft.value_for)
                    calls[call] = replace(run, enter=None, exit=None)
        _count(modules, graft.call, theirs)
        entered = _module_entries(modules, graft, theirs, tags) | entered  # a module's entry is that of its first call
        modules.update(entered)
    model = msgspec.structs.replace(facts.model, parameters=modules[""].parameters) if "" in modules else facts.model
    return replace(facts, model=model, calls=calls, modules=modules)


def _module_entries(
    modules: Mapping[str, documents.ModuleEntry], graft: Graft, theirs: ExportFacts, tags: CallTags
) -> dict[str, documents.ModuleEntry]:
    """The entries of the modules that were put in; modules that are called get their tags when the sidecar is made."""
    old = modules.get(graft.call.path)
    depth, aliases = (old.depth, old.aliases) if old is not None else (graft.call.path.count(".") + 1, [])
    return {
        path: msgspec.structs.replace(
            entry,
            path=path,
            tag=tags.tag(graft.call) + "".join(f"/{segment}" for segment in entry.tag.split("/")[2:]),
            depth=depth + entry.depth,
            aliases=[joined(graft.call.path, alias) for alias in entry.aliases] if entry.path else aliases,
        )
        for entry in theirs.modules.values()
        for path in [joined(graft.call.path, entry.path)]
    }


def _count(modules: dict[str, documents.ModuleEntry], call: ModuleCall, theirs: ExportFacts) -> None:
    """Count the parameters of the modules around a module that is replaced, if it is known."""
    old = modules.get(call.path)
    if old is None or call.index:
        return
    more = theirs.model.parameters - old.parameters
    trainable = theirs.modules[""].trainable - old.trainable
    for path, entry in modules.items():
        if call.path != path and (not path or call.path.startswith(f"{path}.")):
            modules[path] = msgspec.structs.replace(
                entry, parameters=entry.parameters + more, trainable=entry.trainable + trainable
            )
