"""Records the reference values of a model beside its file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from modelexport.core.locking import exclusive
from modelexport.format import documents
from modelexport.pytorch.returned import returned_by
from modelexport.tagged.file import read_tagged
from modelexport.traces.reference import reference_path, write_reference
from modelexport.verify.parameters import parameter_digests
from modelexport.verify.sides import Inputs, Sides
from modelexport.weights.sources import Weights


@exclusive
def record_reference(
    model: nn.Module,
    inputs: Inputs,
    path: str | Path,
    *,
    modules: Sequence[str] = (),
    sidecar: documents.Hierarchy | None = None,
    announce: Callable[[int], None] = lambda size: None,
    weights: Weights | None = None,
) -> Path:
    """Run a model and store its inputs, its outputs and the boundary values of its calls beside its file.

    Args:
        path: A tagged file of the model; ``NAME.reference.safetensors`` is written beside it.
        modules: Selectors of the calls whose values to store, with those inside them; by default all.
        sidecar: ``NAME.hierarchy.json``; by default the document beside the file.
        announce: Called with the size in bytes before anything is written.
        weights: The places of the weights of a model that was built without them.

    Returns:
        The file that was written.

    Raises:
        FileFormatError: The file has no tags.
        InputsError: The inputs do not fit the file.
        OutputError: There is not enough space for them.
        UsageError: A module does not exist.
    """
    tagged = read_tagged(path)
    chosen = tagged.select(*modules).calls if modules else ()
    sides = Sides.of(model, inputs, tagged, weights)
    trace = sides.trace(inputs, {})
    target = reference_path(tagged.path)
    write_reference(
        target,
        tagged,
        trace,
        dtype=sides.dtype,
        inputs=sides.feeds(inputs),
        outputs=returned_by(model, inputs) if weights is None else trace.outputs,
        weights=parameter_digests(tagged.model),
        modules=chosen,
        sidecar=sidecar or tagged.hierarchy,
        announce=announce,
    )
    return target
