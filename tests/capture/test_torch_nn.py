"""Every public class of ``torch.nn`` that can be called: exported, tagged and right, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_nn
from modelexport import export
from modelexport.errors import ModelExportError
from truth import wrong

QUICK = torch_nn.CASES[::6]
"""The other classes run with the slow tests."""


def test_the_table_has_every_public_class() -> None:
    assert {case.name for case in torch_nn.CASES} | set(torch_nn.NOT_CALLED) == set(torch_nn.public_classes())
    assert len({case.label for case in torch_nn.CASES}) == len(torch_nn.CASES)


def test_the_page_is_that_of_the_table() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "evidence" / "torch-nn.md"
    assert page.read_text(encoding="utf-8") == torch_nn.page()
    assert set(torch_nn.REASONS) == {case.label for case in torch_nn.CASES if case.failure}


def _check(case: torch_nn.NnCase, folder: Path) -> None:
    path = folder / "m.onnx"
    model = case.build()
    if case.failure:
        with pytest.raises(ModelExportError, match=case.failure):
            export(model, tuple(case.inputs()), path)
        assert not path.exists()
        return
    result = export(model, tuple(case.inputs()), path, check=False)
    assert result.hierarchy.settings.frontend == case.frontend
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)
    assert wrong(path, model, tuple(case.inputs())) == ""


@pytest.mark.sweep
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.label)
def test_a_class_is_exported_tagged_and_right(case: torch_nn.NnCase, tmp_path: Path) -> None:
    _check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in torch_nn.CASES if c not in QUICK], ids=lambda case: case.label)
def test_every_other_class_is_exported_tagged_and_right(case: torch_nn.NnCase, tmp_path: Path) -> None:
    _check(case, tmp_path)
