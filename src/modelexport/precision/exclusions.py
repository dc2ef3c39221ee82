"""The nodes of modules in the form that other quantizers take, for those who quantize elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from modelexport.errors import UsageError
from modelexport.graph.owners import owner_of
from modelexport.tagged.file import TaggedFile


def excluded(tagged: TaggedFile, selectors: Sequence[str], form: str) -> str:
    """The nodes of the calls that selectors pick, as text for a tool (:data:`FORMS`), with the final line break.

    A node of several calls is among them if one of its calls is picked.

    Raises:
        UsageError: A selector matches nothing, or the modules have no nodes of their own.
    """
    calls = tagged.select(*selectors).inside
    names = [
        node.name or ""
        for node in tagged.nodes
        if (owner := owner_of(node)) is not None and any(call in calls for call in owner.calls)
    ]
    if not names:
        raise UsageError(f"'{' '.join(selectors)}' has no nodes in {tagged.path}: nothing has to be excluded")
    return FORMS[form](names) + "\n"


def _listed(names: Sequence[str]) -> str:
    return json.dumps(list(names), indent=1)


FORMS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "ort": _listed,
    "modelopt": lambda names: " ".join(f"'^{re.escape(name)}$'" for name in names),
    "olive": lambda names: json.dumps({"nodes_to_exclude": list(names)}, indent=1),
    "trt": lambda names: "--precisionConstraints=obey --layerPrecisions=" + ",".join(f"'{n}':fp32" for n in names),
    "nncf": lambda names: json.dumps({"names": list(names)}, indent=1),
}
"""Tool to what its option takes."""
