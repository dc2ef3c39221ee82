"""Values of a file that do not fit in memory together are computed in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from modelexport.pytorch.model_run import ModelRun
from modelexport.verify.matching import run_file
from modelexport.verify.proving import prove_calls

import models
from modelexport import export
from modelexport.pytorch.feeding import feeds
from modelexport.runtime import sessions
from modelexport.tagged.file import read_tagged


@pytest.mark.parametrize("name", ["unet", "bert"])
def test_a_run_in_batches_computes_every_node_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = models.case(name)
    model, inputs = case.build(), case.inputs()
    export(model, inputs, tmp_path / "m.onnx", check=False)
    tagged = read_tagged(tmp_path / "m.onnx")
    run = ModelRun(model, inputs)
    given = feeds(inputs, sessions.open_session(tagged.path))
    whole = run_file(tagged.model, tmp_path, given, run, provider=sessions.CPU)
    opened: list[int] = []
    open_session = sessions.open_session

    def counted(graph: Any, **options: Any) -> Any:
        opened.append(len(graph.graph))
        return open_session(graph, **options)

    monkeypatch.setattr(sessions, "open_session", counted)
    batched = run_file(tagged.model, tmp_path, given, run, provider=sessions.CPU, batch_bytes=1 << 14)
    assert (batched.shapes, batched.dtypes, batched.contents) == (whole.shapes, whole.dtypes, whole.contents)
    assert len(opened) > 5
    assert sum(opened) < len(tagged.model.graph) + len(opened)
    proofs = [prove_calls(tagged, given, run, batch_bytes=size) for size in (1 << 14, 1 << 30)]
    assert proofs[0].hints == proofs[1].hints
    assert not any(proof.differing for proof in proofs)
