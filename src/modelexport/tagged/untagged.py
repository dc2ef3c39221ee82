"""Reading a file without tags as one call that owns all nodes, to compare it by names and structure."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from modelexport.core.calls import ROOT, CallTree, TracedCall
from modelexport.core.owners import Evidence, Owner
from modelexport.files.given import Source, as_path
from modelexport.files.onnx_models import load_onnx
from modelexport.format import keys
from modelexport.graph.nodes import all_nodes
from modelexport.graph.owners import OWNER
from modelexport.tagged.file import UNTAGGED, TaggedFile, read_tagged


def read_either(path: Source) -> TaggedFile:
    """Read a file with or without tags.

    Raises:
        FileFormatError: The file is missing, is not an ONNX file, or has an unknown format version.
    """
    path = as_path(path)
    model = load_onnx(path)
    return read_tagged(path) if keys.FORMAT_VERSION_KEY in model.metadata_props else _untagged(path, model)


def without_tags(tagged: TaggedFile) -> TaggedFile:
    """A tagged file, treated as if it had no tags."""
    return tagged if tagged.encoding == UNTAGGED else _untagged(tagged.path, tagged.model)


def _untagged(path: Path, model: ir.Model) -> TaggedFile:
    owner = Owner((ROOT,), Evidence.INFERRED)
    for node in all_nodes(model):
        node.meta[OWNER] = owner
    calls = CallTree((TracedCall(ROOT, None, 0, None, None),))
    return TaggedFile(path, model, calls, {ROOT: "/Model"}, UNTAGGED)
