"""Compares a package of stages with the file that was split: the stages in sequence must give the same outputs."""

from __future__ import annotations

from pathlib import Path

from modelexport.errors import UsageError
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import open_session, run_session
from modelexport.surgery.chain import read_stages, run_chain
from modelexport.tagged.file import read_tagged
from modelexport.traces.differences import Difference, compare_arrays


def verify_stages(
    folder: str | Path, whole: str | Path, *, provider: str = "CPUExecutionProvider", seed: int = 0
) -> list[Difference]:
    """Run the stages one after the other, and the whole file, on the same random inputs, and compare every output.

    Raises:
        FileFormatError: The folder is not a package of stages, or the file cannot be read.
        InputsError: No random inputs fit.
        UsageError: ONNX Runtime cannot run a file, or the stages are not of this file.
    """
    read_stages(folder)
    tagged = read_tagged(whole)
    session = open_session(Path(whole), provider=provider)
    inputs = make_random_inputs(tagged.model, session, seed=seed)
    expected = run_session(session, inputs)
    made = run_chain(folder, inputs, opened=lambda path: open_session(path, provider=provider)) | inputs
    if missing := [name for name in expected if name not in made]:
        raise UsageError(f"{folder} does not return {', '.join(missing)}: it was not made from {whole}")
    return [compare_arrays(name, array, made[name]) for name, array in expected.items()]
