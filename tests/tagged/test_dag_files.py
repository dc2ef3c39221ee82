"""``--dag-dir``: the entries of ``NAME.dag.json`` as separate files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from modelexport.cli import app
from modelexport.errors import OutputError
from modelexport.exporting.pipeline import export
from modelexport.files.atomic_writing import replaced_together
from modelexport.format import documents
from modelexport.tagged.documents.dag import dag_file_name, write_dag_files


def test_the_single_files_hold_the_objects_of_the_merged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text("import models\nbuild = lambda: (models.Blocks(), models.ROWS())\n")
    command = ["modelexport", "export", "model.py:build", "-o", "x.onnx", "--dag-dir", "dags", "--json", "--no-check"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as status:
        app.main()
    assert status.value.code == 0
    merged = json.loads((tmp_path / "x.dag.json").read_bytes())
    single = {file.name: json.loads(file.read_bytes()) for file in (tmp_path / "dags").iterdir()}
    assert single == {dag_file_name(tag): dag for tag, dag in merged.items()}
    assert len(single) == len(merged) > 10


def test_a_dag_folder_that_cannot_be_one_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "no" / "where"):
        with pytest.raises(OutputError, match=str(folder)):
            export(nn.ReLU(), [torch.ones(2)], tmp_path / "x.onnx", dag_dir=folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_else_is_in_the_dag_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with replaced_together() as replacement:
        write_dag_files(replacement, tmp_path, {"/A": documents.Dag(["a", "b"], [("a", "b")])})
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert json.loads((tmp_path / dag_file_name("/A")).read_text()) == {"nodes": ["a", "b"], "edges": [["a", "b"]]}


def test_the_file_of_a_call_has_a_name_that_a_person_recognises() -> None:
    name = dag_file_name("/BertModel/BertEncoder/BertLayer.0/BertAttention@1")
    assert re.fullmatch(r"BertModel-BertEncoder-BertLayer\.0-BertAttention@1-[0-9a-f]{8}\.json", name)


@pytest.mark.parametrize(
    "tags",
    [
        ["/Model/Block", "/Model/block", "/model/Block"],
        ["/Model/A.x:y", "/Model/A.x*y", "/Model/A.x_y", "/Model/A.x%2Fy"],
        ["/A/B-C", "/A-B/C", "/A/B/C"],
        ["/CON", "/Con", "/aux"],
        ["/" + "A" * 400 + "/B", "/" + "A" * 401 + "/B"],
        ["/Modèle/Bloc.été", "/Mod_le/Bloc._t_"],
    ],
)
def test_files_of_different_calls_have_different_names_on_every_file_system(tags: list[str]) -> None:
    names = [dag_file_name(tag) for tag in tags]
    assert len({name.casefold() for name in names}) == len(tags)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9_.@-]{1,143}", name)
        assert name.split(".")[0].casefold() not in {"con", "aux", "nul", "prn"}
