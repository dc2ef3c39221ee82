"""The HTML page in a real browser: it folds, searches, zooms and shows nodes, without errors or requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import MISSING, Browser, browser
from exports import Exporter
from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.measure.columns import BYTES, SECONDS, SHARE
from modelexport.measure.costs import cost
from modelexport.measure.page import Page, Section, write_page
from modelexport.measure.table import NodeFigures, Table

needs_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def large_table(nodes: int = 10_000) -> Table:
    """As many nodes as in a large decoder, in blocks of a hundred calls."""
    root = ModuleCall("")
    calls = [TracedCall(root, None, 0, 0, 1)]
    tags = {root: "/LargeForCausalLM"}
    listed = []
    for block in range(nodes // 100):
        above = ModuleCall(f"model.layers.{block}")
        calls.append(TracedCall(above, root, 1, 0, 1))
        tags[above] = f"/LargeForCausalLM/LargeDecoderLayer.{block}"
        for part in range(10):
            call = ModuleCall(f"model.layers.{block}.self_attention.projection_{part}")
            calls.append(TracedCall(call, above, 2, 0, 1))
            tags[call] = f"{tags[above]}/LargeProjection.projection_{part}"
            for index in range(10):
                name = f"node_scaled_dot_product_attention_{block * 100 + part * 10 + index}"
                figures = {"seconds": 1000 * (block + 1), "bytes": 4096 * index}
                listed.append(NodeFigures(name, "MatMul" if index else "Softmax", (call,), figures))
    columns = (SECONDS, SHARE, BYTES)
    return Table(CallTree(tuple(calls)), tags, columns, tuple(listed), name="large.onnx")


def test_ten_thousand_nodes_are_below_two_megabytes_and_refer_to_nothing(tmp_path: Path) -> None:
    write_page(tmp_path / "large.html", Page(large_table(), "seconds"))
    text = (tmp_path / "large.html").read_text()
    assert len(text.encode()) < 2_000_000
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_names_of_a_model_cannot_end_the_script(tmp_path: Path) -> None:
    root = ModuleCall("")
    evil = NodeFigures("</script><script>alert(1)</script>", "Add", (root,), {"bytes": 1})
    table = Table(CallTree((TracedCall(root, None, 0, 0, 1),)), {root: "/<b>Net</b>"}, (BYTES,), (evil,))
    write_page(tmp_path / "evil.html", Page(table, "bytes"))
    assert "<script>alert" not in (tmp_path / "evil.html").read_text()
    assert "<b>Net" not in (tmp_path / "evil.html").read_text()


@needs_browser
def test_the_page_folds_searches_zooms_and_shows_nodes(exported: Exporter, window: Browser, tmp_path: Path) -> None:
    table = cost(exported("bert").path)
    sections: list[Section] = [("Verification", [("outputs", "agree")])]
    write_page(tmp_path / "page.html", Page(table, "flops", sections))
    window.requests(), window.complaints()
    window.open(tmp_path / "page.html")
    assert window.texts("h1") == ["bert.onnx"]
    assert "Verification" in window.texts("h2")

    lines = window.count("#tree [data-address]")
    window.click('#tree [data-address="encoder.layer.0"] .fold')
    assert window.count("#tree [data-address]") > lines
    assert window.count('#tree [data-address="encoder.layer.0.attention"]') == 1
    window.click('#tree [data-address="encoder.layer.0"] .fold')
    assert window.count("#tree [data-address]") == lines

    window.type("#search", "LayerNorm")
    found = window.texts("#tree [data-address] .label")
    assert found
    assert all("LayerNorm" in text for text in found)
    window.type("#search", "nothing like this")
    assert window.texts("#tree .empty") == ["nothing found"]
    window.type("#search", "")

    window.click('#tree [data-address="encoder"]')
    window.click('#tree [data-address="encoder.layer.0"]')
    window.click('#tree [data-address="encoder.layer.0"] .fold')
    window.click('#tree [data-address="encoder.layer.0.attention"]')
    assert window.texts("#chosen") == ["encoder.layer.0.attention"]
    shown = {row.address: row for row in table.rows()}["encoder.layer.0.attention"]
    assert window.run("return chosen.total.flops") == shown.total["flops"]

    before = window.count("#icicle rect")
    window.click('#icicle rect[data-address="encoder.layer.1"]')
    widest = window.run(
        "return document.querySelector('#icicle rect[data-address=\"encoder.layer.1\"]').getAttribute('width')"
        " == document.querySelector('#icicle rect').getAttribute('width')"
    )
    assert widest
    assert window.count("#icicle rect") < before
    assert "BertLayer.1" in window.texts("#path button")
    window.click("#path button")
    assert window.count("#icicle rect") == before

    window.type("#column", "parameters")
    assert window.run("return column.name") == "parameters"
    dark = window.run("return document.documentElement.classList.contains('dark')")
    window.click("#theme")
    assert window.run("return document.documentElement.classList.contains('dark')") is not dark
    assert window.complaints() == []
    assert [address for address in window.requests() if not address.startswith(("file:", "data:"))] == []


@needs_browser
def test_the_page_adds_up_as_the_table_does(exported: Exporter, window: Browser, tmp_path: Path) -> None:
    table = cost(exported("blocks").path)
    write_page(tmp_path / "page.html", Page(table, "flops"))
    window.open(tmp_path / "page.html")
    theirs = window.run("return Object.fromEntries(rows.map(r => [r.address || '.', r.total]))")
    for row in table.rows():
        for column in ("flops", "parameters", "peak_bytes", "activation_bytes"):
            if row.total.get(column):
                assert theirs[row.address][column] == row.total[column]
        if "intensity" in row.total:
            assert theirs[row.address]["intensity"] == pytest.approx(row.total["intensity"])
    assert window.complaints() == []


@needs_browser
def test_ten_thousand_nodes_are_shown(window: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "large.html", Page(large_table(), "seconds"))
    window.open(tmp_path / "large.html")
    assert window.texts("#count") == ["1,101 calls"]
    window.type("#search", "layers.99.self_attention.projection_7")
    window.click("#tree [data-address]")
    assert window.count("#nodes tr") == 10
    assert window.complaints() == []
