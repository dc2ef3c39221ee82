"""Models from outside the tests' table: each is exported, tagged and right, or refused with a known reason."""

from __future__ import annotations

from pathlib import Path

import pytest

import zoo
from modelexport import export
from modelexport.errors import ModelExportError

QUICK = {
    *("dict-out", "in-place", "masked-scatter", "graph", "tabular", "boxes", "recursive", "shared", "hyper"),
    *("beit_base_patch16_224", "cait_xxs24_224", "convit_tiny", "densenet121", "vit_relpos_small_patch16_224"),
    *("twins_pcpvt_small", "squeezenet1_1", "tnt_s_patch16_224"),
    *("hubert", "sew-d", "ast", "bark-semantic", "patchtst", "hifi-gan", "dac"),
    *("adapter", "prior", "vae-tiny", "vae", "vae-asymmetric", "cogview4", "controlnet"),
}
"""A third of the models of each kind, those that take a few seconds; the rest is run with the slow tests."""
REFUSED = {
    "branches": "data-dependent",
    "func-grad": "constant",
    "tacotron2": "output differs",  # its dropout is always on, and the file draws other numbers
    "fastspeech2": "data-dependent",
}
"""Name to part of the reason."""
CASES = [case for case in zoo.cases() if case.family != "with transformers inside"]


def _check(case: zoo.Case, path: Path) -> None:
    model, inputs = case()
    if case.name in REFUSED:
        with pytest.raises(ModelExportError, match=REFUSED[case.name]):
            export(model, inputs, path, constants=case.constants)
        return
    result = export(model, inputs, path, constants=case.constants)
    assert result.check is not None
    assert result.check.status == "passed"
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("case", [c for c in CASES if c.name in QUICK], ids=lambda case: case.name)
def test_a_model_is_exported_tagged_and_right(case: zoo.Case, tmp_path: Path) -> None:
    _check(case, tmp_path / "m.onnx")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own compiler
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")  # diffusers uses it
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name not in QUICK], ids=lambda case: f"{case.family}-{case.name}"
)
def test_every_other_model(case: zoo.Case, tmp_path: Path) -> None:
    _check(case, tmp_path / "m.onnx")
