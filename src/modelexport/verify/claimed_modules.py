"""Checks what the sidecar says of the model, its modules and the order of its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import get_args
from urllib.parse import unquote

from modelexport.core.calls import ModuleCall
from modelexport.core.decoding import decode_json
from modelexport.core.modules import Module, ModuleTree
from modelexport.core.tags import Granularity, Tags, classes_in_tag
from modelexport.errors import FileFormatError, UsageError
from modelexport.format import documents, keys
from modelexport.graph.owners import owner_of
from modelexport.tagged.file import TaggedFile
from modelexport.verify.verdicts import FalseClaim


def false_claim(document: str, where: str, claimed: object, found: object) -> Iterator[FalseClaim]:
    """A claim, unless it is true."""
    if claimed != found:
        yield FalseClaim(document=document, where=where or ".", claimed=_text(claimed), found=_text(found))


def _text(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def false_claims_of_modules(
    tagged: TaggedFile, sidecar: documents.Hierarchy, tree: ModuleTree | None
) -> Iterator[FalseClaim]:
    """The false claims of a sidecar on the model, its modules and the steps of its calls.

    Args:
        tree: The modules of the model, if it is available.
    """
    yield from _modules(tagged, sidecar)
    yield from _steps(sidecar)
    if tree is not None:
        yield from _against(tree, tagged, sidecar)


def _modules(tagged: TaggedFile, sidecar: documents.Hierarchy) -> Iterator[FalseClaim]:
    counts = Counter(traced.call.path for traced in tagged.calls)
    with_nodes = {
        around.path
        for node in tagged.nodes
        if (owner := owner_of(node)) is not None
        for call in owner.calls
        for around in tagged.calls.stack(call)
    }
    for module in sidecar.modules:
        yield from false_claim("hierarchy", module.path, module.calls, counts[module.path])
        yield from false_claim("hierarchy", module.path, not module.reason, module.path in with_nodes)


def _steps(sidecar: documents.Hierarchy) -> Iterator[FalseClaim]:
    """Calls begin in the order in which they are listed, at a step of their own, and end before the one around them."""
    taken: dict[int, str] = {}
    known: Mapping[str, documents.CallEntry] = {call.address: call for call in sidecar.calls}
    last = -1
    for call in sidecar.calls:
        if call.enter is None or call.exit is None:
            continue
        parent = known.get(call.parent) if call.parent is not None else None
        begins, ends = (
            (parent.enter, parent.exit)
            if parent is not None and parent.enter is not None and parent.exit is not None
            else (-1, call.exit + 1)
        )
        steps = f"steps {call.enter} to {call.exit}"
        in_order = max(last, begins) < call.enter < call.exit < ends and not taken.keys() & {call.enter, call.exit}
        yield from false_claim("hierarchy", call.address, steps, steps if in_order else "not in the order of the calls")
        last = call.enter
        taken.update({call.enter: call.address, call.exit: call.address})
    inner = [step for step, address in taken.items() if address]
    if inner and sorted(inner) == list(range(1, len(inner) + 1)):  # no call is gone
        root = sorted(step for step, address in taken.items() if not address)
        yield from false_claim("hierarchy", "", root, [0, len(inner) + 1])


def _against(tree: ModuleTree, tagged: TaggedFile, sidecar: documents.Hierarchy) -> Iterator[FalseClaim]:
    """What the sidecar says of the model, and how it is."""
    listed = {module.path: module for module in sidecar.modules}
    others = {module.path for module in sidecar.modules if module.calls and ModuleCall(module.path, 0) in tagged.calls}
    yield from false_claim("hierarchy", "modules", [path for path in tree.modules if path not in listed], [])
    # A module that another one replaced stays listed.
    extra = [path for path in listed if path not in tree and path in others]
    yield from false_claim("hierarchy", "modules", extra, [])
    yield from false_claim("hierarchy", "model", _last(sidecar.model.class_name), tree.root.class_name)
    replaced = _replaced(tagged)
    # `replace` does not know whether what it puts in still shares a parameter with a module outside, which a module
    # around both counts once.
    around = (
        {"", *(path[:end] for path in replaced for end, sign in enumerate(path) if sign == ".")} if replaced else {}
    )
    root = tree.root.parameters if not replaced else listed[""].parameters if "" in listed else None
    yield from false_claim("hierarchy", "model", sidecar.model.parameters, root)
    for module in tree:
        if (entry := listed.get(module.path)) is not None:
            claimed, actual = _claimed(entry), _actual(module)
            left_out = {"parameters"} if module.path in around else set()
            yield from false_claim("hierarchy", module.path, _without(claimed, left_out), _without(actual, left_out))
    if replaced and all(traced.call.path in tree for traced in tagged.calls):
        yield from _classes_in_tags(tree, tagged, sidecar)
    elif listed.keys() == set(tree.modules) and not replaced:
        yield from _tags(tree, tagged, sidecar)


def _replaced(tagged: TaggedFile) -> set[str]:
    """The paths of the modules that `replace` put others in the place of; empty if the file was not changed so."""
    text = tagged.model.metadata_props.get(keys.REPLACED)
    if text is None:
        return set()
    try:
        calls = decode_json(text, kind=dict[str, str])
    except ValueError as error:
        raise FileFormatError(f"the property {keys.REPLACED} is damaged ({error}): make the file again") from error
    return {ModuleCall.parse(address).path for address in calls}


_GRANULARITIES: Sequence[Granularity] = get_args(Granularity)


def _last(qualified: str) -> str:
    """The name of a class without the place of its definition, which depends on how it was imported."""
    return qualified.rpartition(".")[2]


def _without(facts: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    return {name: fact for name, fact in facts.items() if name not in names}


def _claimed(entry: documents.ModuleEntry) -> dict[str, object]:
    return {
        "class": entry.class_name,
        "qualified": _last(entry.qualified_class),
        "depth": entry.depth,
        "leaf": entry.leaf,
        "aliases": sorted(entry.aliases),
        "parameters": entry.parameters,
        "shapes": entry.shapes,
    }


def _actual(module: Module) -> dict[str, object]:
    return {
        "class": module.class_name,
        "qualified": module.class_name,
        "depth": module.depth,
        "leaf": module.is_leaf,
        "aliases": sorted(module.aliases),
        "parameters": module.parameters,
        "shapes": {name: list(shape) for name, shape in module.shapes.items()},
    }


def _tags(tree: ModuleTree, tagged: TaggedFile, sidecar: documents.Hierarchy) -> Iterator[FalseClaim]:
    said = sidecar.settings
    granularity: Granularity = next((known for known in _GRANULARITIES if known == said.granularity), "auto")
    yield from false_claim("hierarchy", "settings", said.granularity, granularity)
    try:
        tags = Tags(tree, tagged.calls, granularity=granularity, include=said.include, exclude=said.exclude)
    except UsageError as error:
        yield from false_claim("hierarchy", "settings", said, str(error))
        return
    for entry in sidecar.modules:
        found = (tags.module_tag(entry.path), tags.is_level(entry.path))
        yield from false_claim("hierarchy", entry.path, (entry.tag, entry.level), found)
    for call in sidecar.calls:
        if (its := ModuleCall.parse(call.address)) in tagged.calls:
            yield from false_claim("hierarchy", call.address, call.tag, tags.tag(its))


def _classes_in_tags(tree: ModuleTree, tagged: TaggedFile, sidecar: documents.Hierarchy) -> Iterator[FalseClaim]:
    """The false tags in a file in which modules were replaced, by the classes of their segments.

    The modules that stay keep their tags, so that suffixes and numbers may be others than in a fresh export: a class
    may be there once now that was there twice. What `auto` chose for the model before is not known either.
    """
    there = {module.class_name for module in tree}
    said = sidecar.settings
    chosen = {"include": there.intersection(said.include), "exclude": there.intersection(said.exclude)}
    given = said.granularity if said.granularity in ("model", "all") else None
    found = [
        list(_other_classes(Tags(tree, tagged.calls, granularity=granularity, **chosen), tagged, sidecar))
        for granularity in _GRANULARITIES
        if granularity == given or (given is None and granularity != "auto")
    ]
    yield from min(found, key=len)


def _other_classes(tags: Tags, tagged: TaggedFile, sidecar: documents.Hierarchy) -> Iterator[FalseClaim]:
    for entry in sidecar.modules:
        if entry.path in tags.tree:
            right = classes_in_tag(tags.module_tag(entry.path)), tags.is_level(entry.path)
            yield from false_claim("hierarchy", entry.path, (classes_in_tag(entry.tag), entry.level), right)
            yield from _other_suffix(entry.path, entry.tag, entry.path)
    for call in sidecar.calls:
        if (its := ModuleCall.parse(call.address)) in tagged.calls:
            yield from false_claim("hierarchy", call.address, classes_in_tag(call.tag), classes_in_tag(tags.tag(its)))
            yield from _other_suffix(call.address, call.tag, its.path)


def _other_suffix(where: str, tag: str, path: str) -> Iterator[FalseClaim]:
    """A suffix, however long, is the end of its module's path."""
    suffix = unquote(tag.rpartition("/")[2].partition("@")[0].partition(".")[2])
    if suffix and not f".{path}".endswith(f".{suffix}"):
        yield from false_claim("hierarchy", where, tag, f"a suffix that {path} ends in")
