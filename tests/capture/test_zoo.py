"""Models from outside the tests' table: each is exported, tagged and right, or refused with a known reason."""

from __future__ import annotations

from pathlib import Path

import pytest

import zoo
from modelexport import export
from modelexport.errors import ModelExportError

REFUSED = {
    "branches": "data-dependent",
    "func-grad": "constant",
    "tacotron2": "output differs",  # its dropout is always on, and the file draws other numbers
    "fastspeech2": "data-dependent",
}
"""Name to part of the reason."""


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own compiler
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")  # diffusers uses it
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.family}-{case.name}", marks=() if case.name == "dict-out" else pytest.mark.slow)
        for case in zoo.cases()
        if case.family != "with transformers inside"
    ],
)
def test_a_model_is_exported_tagged_and_right(case: zoo.Case, tmp_path: Path) -> None:
    model, inputs = case()
    if case.name in REFUSED:
        with pytest.raises(ModelExportError, match=REFUSED[case.name]):
            export(model, inputs, tmp_path / "m.onnx", constants=case.constants)
        return
    result = export(model, inputs, tmp_path / "m.onnx", constants=case.constants)
    assert result.check is not None
    assert result.check.status == "passed"
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)
