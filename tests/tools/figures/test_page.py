"""The HTML page in a real browser: it folds, searches, zooms and shows nodes, without errors or requests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.bert.modeling_bert import BertLayer

import modelexport
from browser import MISSING, Browser, browser
from exports import Exporter
from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.tables.columns import BYTES, SECONDS, SHARE
from modelexport.tables.costs import cost
from modelexport.tables.html_page import Page, Section, write_page
from modelexport.tables.table import NodeFigures, Table
from modelexport.tools.figures.report_page import write_report_page

needs_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def window(opened: Browser) -> Iterator[Browser]:
    """The browser; what a page writes to its console fails the test that opened the page, not a later one."""
    yield opened
    assert opened.complaints() == []


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
    window.requests()
    window.open(tmp_path / "page.html")
    assert window.texts("h1") == ["bert.onnx"]
    assert "Verification" in window.texts("#sections summary")

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
    pale = "return [...document.querySelectorAll('#icicle rect')].filter(r => r.getAttribute('opacity') < 1).length"
    assert 0 < window.run(pale) < window.count("#icicle rect")
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

    assert window.run("return location.hash") == "#encoder.layer.0.attention"
    window.run("location.hash = '#pooler'; chooseLinked(); return 0")
    assert window.texts("#chosen") == ["pooler"]
    window.click("#path button")
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


@needs_browser
def test_figures_are_side_by_side_and_sort_the_rows(window: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", Page(large_table(300), "seconds"))
    window.open(tmp_path / "page.html")
    assert window.texts("#tree button.number") == ["time"]
    rows = window.texts("#tree [data-address] .label")
    window.click('#tree [data-column="seconds"]')
    assert window.texts("#count") == ["by time"]
    assert window.texts("#tree [data-address] .label")[0].startswith("model.layers.2.self_attention")
    own = window.run("return rows.map(r => r.own.seconds || 0).sort((a, b) => b - a)[0]")
    assert window.run("return rows.find(r => r.address === arguments[0]).own.seconds", first_address(window)) == own
    window.type("#search", "layers.1.")
    assert first_address(window).startswith("model.layers.1.")
    window.type("#search", "")
    window.click('#tree [data-column="seconds"]')
    assert window.texts("#tree [data-address] .label") == rows


@needs_browser
def test_what_costs_most_is_seen_first_equal_modules_together(
    exported: Exporter, window: Browser, tmp_path: Path
) -> None:
    table = cost(exported("bert").path)
    sections: list[Section] = [("Verification", [("not run", "")]), ("File", [("made by", "pytorch")])]
    write_page(tmp_path / "page.html", Page(table, "flops", sections))
    window.open(tmp_path / "page.html")
    assert window.texts("#sections summary") == ["Verification", "Largest operations", "File"]
    rows = {row.address: row.own.get("flops", 0) for row in table.rows()}
    both = rows["encoder.layer.0.output.dense"] + rows["encoder.layer.1.output.dense"]
    patterns = window.texts("#largest button")
    assert len(patterns) == 5
    assert "encoder.layer.*.output.dense" in patterns
    figures = window.texts("#largest td")[patterns.index("encoder.layer.*.output.dense")]
    assert figures.endswith(f"{100 * both / table.whole['flops']:.3g} %, 2 calls")
    window.click(f"#largest tr:nth-child({patterns.index('encoder.layer.*.output.dense') + 1}) button")
    listed = window.run("return [...document.querySelectorAll('#tree [data-address]')].map(e => e.dataset.address)")
    assert listed == ["encoder.layer.0.output.dense", "encoder.layer.1.output.dense"]
    window.click('#tree [data-column="parameters"]')
    assert window.texts("#largest-title") == ["Largest parameters"]


def first_address(window: Browser) -> str:
    return str(window.run("return document.querySelector('#tree [data-address]').dataset.address"))


@needs_browser
def test_another_figure_is_a_click_away(exported: Exporter, window: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", Page(cost(exported("bert").path), "flops"))
    window.open(tmp_path / "page.html")
    assert window.texts("#tree button.number") == ["operations", "parameters", "bits per weight"]
    window.click('#tree [data-column="parameters"]')
    assert window.run("return [column.name, document.querySelector('#column').value]") == ["parameters"] * 2
    assert window.texts("#tree button.number") == ["parameters", "bits per weight", "operations"]


@needs_browser
def test_two_files_are_beside_each_other(exported: Exporter, window: Browser, tmp_path: Path) -> None:
    case = exported("bert")
    modelexport.quantize(case.path, tmp_path / "int4.onnx", to="int4", only=["encoder.layer.0"])
    write_report_page(case.path, tmp_path / "page.html", profiled=True, against=tmp_path / "int4.onnx")
    window.open(tmp_path / "page.html")
    assert window.texts("h1") == ["bert.onnx \u2192 int4.onnx"]
    assert window.texts("#tree button.number") == ["time", "weights", "bits per weight", "relative error"]
    rows = window.run("return Object.fromEntries(rows.map(r => [r.address, r.total]))")
    quantized, kept = rows["encoder.layer.0"], rows["encoder.layer.1"]
    assert quantized["precision"] == kept["precision"] == kept["against_precision"] == 32
    assert 4 < quantized["against_precision"] < 16  # norms and biases stay float32
    assert quantized["against_bytes"] < quantized["bytes"]
    assert kept["bytes"] == kept["against_bytes"]
    assert quantized["error"] > kept["error"]
    both = {row.address: row for row in cost(tmp_path / "int4.onnx").rows()}["encoder.layer.0"]
    assert quantized["against_precision"] == pytest.approx(both.total["precision"])

    line = "return [...document.querySelector(arguments[0]).children].map(e => e.textContent)"
    cells = window.run(line, '#tree [data-address="encoder.layer.0"]')
    assert all("\u2192" in cells[place] for place in (3, 5, 6))
    window.click('#tree [data-column="precision"]')
    window.click('#tree [data-address="encoder.layer.0"]')
    assert f"32 \u2192 {both.total['precision']:.3g}" in window.texts("#detail td.number")
    of_the_file = window.count("#detail .nodes tr")
    window.click('#tree [data-column="seconds"]')
    assert 0 < window.count("#detail .nodes tr") < of_the_file  # as ONNX Runtime ran them, some of them fused
    window.click('#tree [data-address="."]')
    for width in (1300, 1001, 390):
        window.resize(width, 844)
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    window.resize(1300, 1000)


@needs_browser
def test_a_module_shows_the_nodes_of_the_modules_inside_it(exported: Exporter, window: Browser, tmp_path: Path) -> None:
    table = cost(exported("bert").path)
    write_report_page(exported("bert").path, tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    window.click('#tree [data-address="encoder.layer.0"]')
    line = inspect.getsourcelines(BertLayer)[1]
    assert window.texts("#source code") == [f"transformers.models.bert.modeling_bert:{line}"]
    inside = [node for node in table.nodes if any(str(call).startswith("encoder.layer.0") for call in node.calls)]
    assert window.count("#detail .nodes tr") == len(inside) > 0
    assert window.texts("#detail .nodes summary") == [f"{len(inside)} nodes of its parts"]


@needs_browser
def test_a_phone_and_paper_show_names_and_figures(exported: Exporter, window: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", Page(cost(exported("bert").path), "flops"))
    window.open(tmp_path / "page.html")
    outside = (
        "return [...document.querySelectorAll('#tree .number, #tree .label, #detail td')]"
        ".filter(e => e.getClientRects().length && e.getBoundingClientRect().right > innerWidth).length"
    )
    shown = "return getComputedStyle(document.querySelector(arguments[0])).display"
    window.resize(390, 844)
    assert window.run(outside) == 0
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    window.resize(1300, 1000)
    window.run("theme(true); return 0")
    window.on_paper(True)
    assert window.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert [window.run(shown, selector) for selector in ("#theme", "#tables")] == ["none", "block"]
    window.on_paper(False)
    assert window.run(shown, "#tables") == "grid"


@needs_browser
def test_ten_thousand_nodes_are_shown(window: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "large.html", Page(large_table(), "seconds"))
    window.open(tmp_path / "large.html")
    assert window.texts("#count") == ["1,101 calls"]
    window.type("#search", "layers.99.self_attention.projection_7")
    window.click("#tree [data-address]")
    assert window.count("#detail .nodes tr") == 10


@needs_browser
def test_an_address_among_the_facts_leads_to_its_module(exported: Exporter, window: Browser, tmp_path: Path) -> None:
    facts = [("Verification", [("first diverging", "#encoder.layer.1"), ("pooler", "a fact of that name")])]
    write_page(tmp_path / "page.html", Page(cost(exported("bert").path), "flops", facts))
    window.open(tmp_path / "page.html")
    assert window.texts("#sections details:first-child button") == ["encoder.layer.1"]
    window.click("#sections td button")
    assert window.texts("#chosen") == ["encoder.layer.1"]
