"""A file against the values that PyTorch computed, kept beside it: needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelexport.errors import UsageError
from modelexport.runtime.sessions import CPU, input_names, open_session, run_session
from modelexport.tagged.file import read_tagged
from modelexport.tagged.flattening import runnable
from modelexport.tagged.reference import open_reference, reference_path
from modelexport.verify.calls import sidecar_of, verify_calls
from modelexport.verify.differences import TOLERANCES, compare_outputs
from modelexport.verify.verdicts import VerifyReport


def verify_reference(path: str | Path, *, modules: Sequence[str] = (), provider: str = CPU) -> VerifyReport:
    """Compare every output and every call of a file with the values of the PyTorch run beside it. Imports no torch.

    Args:
        path: A tagged file with ``NAME.reference.safetensors`` and the sidecar beside it.
        modules: Selectors of the calls to look at, with those inside them; all that were kept if left out.
        provider: The execution provider of ONNX Runtime.

    Raises:
        FileFormatError: The file has no tags, no sidecar or no reference.
        UsageError: There is no such module or provider, or the values of a module were not kept.
    """
    tagged = read_tagged(path)
    sidecar = sidecar_of(tagged)
    selection = tagged.select(*modules)
    with open_reference(tagged) as reference:
        for call in selection.calls if modules else ():
            if reference.modules and set(reference.modules).isdisjoint(tagged.calls.stack(call)):
                kept = ", ".join(map(str, reference.modules))
                raise UsageError(f"{reference_path(tagged.path)} has no values of {call}: it has those of {kept}")
        kept_calls = tagged.select(*map(str, reference.modules)).inside if reference.modules else frozenset()
        with runnable(tagged.path, tagged.encoding) as file:
            whole = open_session(file, provider=provider, optimized=True)
            outputs = run_session(whole, {name: reference.inputs[name] for name in input_names(whole)})
            del whole
        return VerifyReport(
            outputs=compare_outputs(
                list(outputs), [reference.read(n) for n in reference.outputs], list(outputs.values())
            ),
            calls=verify_calls(
                tagged,
                sidecar,
                reference.inputs,
                reference,
                provider=provider,
                modules=selection.inside if modules else kept_calls,
            ),
            provider=provider,
            tolerances=TOLERANCES,
            parameters=None,
        )
