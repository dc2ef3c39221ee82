"""The hierarchy and the example inputs in all their uses: in Python, by path, saved, as data, on one page."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import commands
import modelexport
import models
from exports import Exporter
from modelexport.errors import OutputError
from modelexport.pytorch.inputs.example_inputs import save_inputs


class Borrower(nn.Module):
    """Calls a module that is the child of another one."""

    def __init__(self, borrowed: nn.Module) -> None:
        super().__init__()
        self.borrowed = [borrowed]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.borrowed[0](x)


class Lender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = models.Block()
        self.borrower = Borrower(self.block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.borrower(x)


def make_lender() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Lender(), {"x": torch.ones(2, 8)}


LENDER = "pytorch/test_overview.py:make_lender"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    done = commands.run(*arguments, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    return done


def test_static_and_traced_tags_are_both_given_where_they_differ() -> None:
    overview = modelexport.hierarchy(*make_lender())
    assert overview.tags_of("block") == ("/Lender/Block", "/Lender/Borrower/Block")
    assert overview.tags_of("borrower") == ("/Lender/Borrower", "/Lender/Borrower")
    shown = run("hierarchy", LENDER, "--mode", "compare", "--granularity", "auto").stdout
    assert "block: /Lender/Block by its place in the tree, /Lender/Borrower/Block by its caller" in shown


def test_static_tags_are_those_of_a_run_where_every_module_is_called_by_its_parent() -> None:
    case = models.case("bert")
    overview = modelexport.hierarchy(case.build(), case.inputs())
    assert overview.static_tags is not None
    assert overview.tags is not None
    called = {traced.call.path for traced in overview.calls or ()}
    assert all(len(set(overview.tags_of(path))) == 1 for path in called)


def test_granularity_and_classes_are_honoured_without_a_run() -> None:
    model = models.case("bert").build()
    names = modelexport.hierarchy(model, include=["LayerNorm"])
    assert names.tags_of("embeddings.LayerNorm")[0] == "/BertModel/BertEmbeddings/LayerNorm"
    path = "encoder.layer.0.output.LayerNorm"
    assert modelexport.hierarchy(model, granularity="all").tags_of(path)[0].count("/") == 5


def test_the_document_has_the_trace_and_times() -> None:
    document = json.loads(run("hierarchy", LENDER, "--mode", "traced", "--json").stdout)
    assert [step["step"] for step in document["trace"]] == list(range(len(document["trace"])))
    assert [step["event"] for step in document["trace"][:2]] == ["enter", "enter"]
    assert all(call["seconds"] > 0 for call in document["calls"])
    assert document["modules"][1]["tag"] != document["modules"][1]["traced_tag"]


def test_inputs_are_shown_and_saved(tmp_path: Path) -> None:
    case = f"{Path(__file__)}:make_lender"
    assert list(modelexport.example_inputs(case)) == ["x"]
    described = json.loads(run("inputs", case, "--json", "-o", tmp_path / "x.npz").stdout)
    assert described == {"x": {"dtype": "float32", "shape": [2, 8], "least": 1.0, "largest": 1.0}}
    with np.load(tmp_path / "x.npz") as saved:
        assert saved["x"].tolist() == np.ones((2, 8)).tolist()
    with pytest.raises(OutputError, match=r"ends in \.npz or \.safetensors"):
        save_inputs(modelexport.example_inputs(case), tmp_path / "x.txt")


def test_a_report_has_coverage_and_cost_on_one_page(exported: Exporter, tmp_path: Path) -> None:
    run("report", exported("blocks").path, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "exact" in page
    assert '"flops"' in page


def test_errors_of_a_verification_are_a_column(exported: Exporter) -> None:
    from modelexport.tables.columns import ERROR
    from modelexport.tables.costs import cost

    report = exported("blocks").verified
    table = cost(exported("blocks").path).with_column(ERROR, report.errors)
    rows = {row.address: row for row in table.rows()}
    found = {call.address or ".": call for call in report.calls}
    assert table.document()["columns"]["error"] == "error, share of size"
    assert rows["."].total["error"] == max(row.own["error"] for row in rows.values() if "error" in row.own)
    made = found["stem.linear"].per_module
    assert made is not None
    assert rows["stem.linear"].own["error"] == made.relative


def test_tables_are_pages_in_a_notebook(exported: Exporter) -> None:
    shown = modelexport.cost(exported("blocks").path)._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "<script>" not in shown
