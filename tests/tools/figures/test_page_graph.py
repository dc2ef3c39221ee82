"""The panel "inside" of the page: the graph of a module in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import modelexport
from browser import MISSING, Browser, browser
from exports import Exporter
from modelexport.tools.figures.report_page import write_report_page

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

BOXES = "return level.boxes.map(piece => piece.lines[0])"
LINES = "return level.lines.map(line => [line.from, line.at, [...line.values[0]].map(value => value.type)])"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(exported: Exporter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the small BERT."""
    path = tmp_path_factory.mktemp("report") / "page.html"
    write_report_page(exported("bert").path, path)
    return path


@pytest.fixture
def report(page: Path, window: Browser) -> Iterator[Browser]:
    window.requests(), window.complaints()
    window.open(page)
    yield window
    assert window.complaints() == []
    assert [address for address in window.requests() if not address.startswith(("file:", "data:"))] == []


def open_box(window: Browser, words: str) -> None:
    window.click(f'#graph-0 [data-box="{window.run(BOXES).index(words)}"]')


def test_boxes_are_the_calls_and_own_operations_of_a_module(report: Browser) -> None:
    assert report.run(BOXES) == ["BertEmbeddings", "Cast", "GatherND", "And", "BertEncoder", "BertPooler"]


def test_lines_are_values_with_type_and_shape(report: Browser) -> None:
    report.click('#tree [data-address="encoder.layer.0"]')
    assert report.run(BOXES) == ["BertAttention", "BertIntermediate", "BertOutput"]
    assert [from_and_to for *from_and_to, _ in report.run(LINES)] == [[0, 1], [1, 2], [0, 2]]
    assert all(types[0].startswith("float32[2, ") for *_, types in report.run(LINES))


def test_a_click_opens_a_box_and_the_path_leads_back(report: Browser) -> None:
    open_box(report, "BertEncoder")
    assert report.texts("#level button") == ["BertModel", "BertEncoder"]
    report.click("#level button")
    assert report.texts("#level button") == ["BertModel"]


def test_tree_chart_graph_and_address_are_one_selection(report: Browser) -> None:
    open_box(report, "BertEncoder")
    open_box(report, "BertLayer.0")
    assert report.run("return decodeURI(location.hash)") == "#encoder.layer.0"
    assert report.run("return document.querySelector('#tree .chosen').dataset.address") == "encoder.layer.0"
    assert report.run("return document.querySelector('#icicle .chosen').dataset.address") == "encoder.layer.0"


def test_a_link_points_at_a_node(report: Browser) -> None:
    open_box(report, "BertEmbeddings")
    name = report.run("return level.boxes.find(piece => piece.box.kind === 'node').box.node.name")
    report.click(f'#graph-0 [data-name="{name}"]')
    link = report.run("return location.hash")
    report.click('#tree [data-address="."]')
    report.run("location.hash = arguments[0]; chooseLinked(); return 0", link)
    assert report.run("return document.querySelector('#graph-0 .box.chosen').dataset.name") == name


def test_what_a_node_takes_and_gives_is_listed(report: Browser) -> None:
    report.run("chooseItem(graph.items.find(item => item[0].operator === 'Softmax')); return 0")
    assert report.texts("#node th")[:1] == ["Softmax"]
    assert "takes" in report.texts("#node th")
    assert "gives" in report.texts("#node th")


def test_the_search_finds_nodes(report: Browser) -> None:
    report.type("#search", "Softmax")
    assert report.count("#tree [data-node]") == 2
    report.click("#tree [data-node]")
    assert report.run("return chosenItem[0].operator") == "Softmax"


def test_the_keyboard_alone_opens_and_goes_back(report: Browser) -> None:
    report.run("document.getElementById('graph-0').focus(); return 0")
    report.press(*["ArrowDown"] * 10, "ArrowUp")
    target = report.run("return level.boxes[focused].lines[0]")
    assert target == "BertEncoder"
    report.press("Enter")
    assert report.texts("#level button") == ["BertModel", "BertEncoder"]
    report.press("Backspace")
    assert report.texts("#level button") == ["BertModel"]


def test_arrows_move_in_the_tree(report: Browser) -> None:
    report.run("document.querySelector('#tree [tabindex=\"0\"]').focus(); return 0")
    report.press("ArrowDown", "Enter")
    assert report.run("return chosen.address") == "embeddings"


def test_every_module_of_the_tree_can_be_chosen_also_one_without_nodes(report: Browser) -> None:
    assert report.run("return rows.filter(row => { choose(row); return !level.boxes.length; }).length") > 0
    assert report.texts("#graph-empty") == ["no nodes"]


def test_wheel_zooms_and_fit_goes_back(report: Browser) -> None:
    before = report.run("return view.scale")
    report.run(
        "document.getElementById('graph-0').dispatchEvent(new WheelEvent('wheel', {deltaY: -300, clientX: 600,"
        " clientY: 700, bubbles: true, cancelable: true})); return 0"
    )
    assert report.run("return view.scale") > before
    report.click("#fit")
    assert report.run("return view.scale") == before


def test_a_box_has_the_colour_of_the_chosen_figure(report: Browser) -> None:
    colours = "return level.boxes.map(p => document.querySelector(`#graph-0 [data-box='${p.index}'] rect`).style.fill)"
    operations = report.run(colours)
    report.type("#column", "parameters")
    assert report.run(colours) != operations


def test_branches_are_boxes_that_open(exported: Exporter, window: Browser, tmp_path: Path) -> None:
    write_report_page(exported("condition").path, tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    window.run("enter(graph.items.find(item => item[0].operator === 'If')[0].box); return 0")
    assert window.run(BOXES) == ["then branch", "else branch"]
    open_box(window, "then branch")
    assert window.texts("#level button")[-2:] == ["If", "then branch"]
    assert window.count("#graph-0 .box") > 0


def test_two_files_have_equal_boxes_at_equal_places_and_marks(
    exported: Exporter, window: Browser, tmp_path: Path
) -> None:
    modelexport.quantize(exported("bert").path, tmp_path / "int4.onnx", to="int4", only=["encoder.layer.0.output"])
    write_report_page(exported("bert").path, tmp_path / "page.html", against=tmp_path / "int4.onnx")
    window.complaints()
    window.open((tmp_path / "page.html").as_uri() + "#encoder.layer.0.output.dense")
    boxes = (
        "return Object.fromEntries([...document.querySelectorAll(`#graph-${arguments[0]} .box`)]"
        ".map(e => [e.querySelector('text').textContent, [e.getAttribute('transform'), e.getAttribute('class')]]))"
    )
    first, second = window.run(boxes, 0), window.run(boxes, 1)
    assert first["Add"] == second["Add"]
    assert "changed" in first["MatMul \u2192 MatMulNBits"][1]
    assert window.texts("#differences th") == ["changed"]
    window.click("#level button")
    assert window.texts("#differences button") == ["encoder.layer.0.output.dense"]
    assert window.texts("#sections details:nth-child(2) tr") == [
        "changed1 node",
        "encoder.layer.0.output.denseMatMul \u2192 MatMulNBits",
    ]
    window.click("#differences button")
    assert window.texts("#node th")[0] == "MatMul"
    assert window.complaints() == []


def chain(path: Path, scopes: list[str]) -> Path:
    """A file with a node in each of these scopes, one after the other."""
    nodes = [
        helper.make_node("Relu", [f"v{i}"], [f"v{i + 1}"], name=f"{scope}/Relu_{i}") for i, scope in enumerate(scopes)
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("v0", f"v{len(nodes)}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


def test_equal_layers_that_follow_each_other_are_one_box(window: Browser, tmp_path: Path) -> None:
    scopes = [f"/model/layers.{layer}/{part}" for layer in range(24) for part in ("norm", "mlp")]
    write_report_page(chain(tmp_path / "layers.onnx", ["/model/embed", *scopes]), tmp_path / "page.html")
    window.open((tmp_path / "page.html").as_uri() + "#model")
    assert window.run("return level.boxes.map(piece => [piece.box.kind, piece.box.children.length])") == [
        ["call", 1],
        ["fold", 24],
    ]
    window.click('#graph-0 [data-box="1"]')
    assert window.texts("#level button")[-1] == "\u00d724"
    assert window.run("return level.boxes.length") == 24
    window.click("#fold")
    assert window.run("return level.boxes.length") == 25


def test_a_module_with_thousands_of_operations_is_shown_in_runs_that_open(window: Browser, tmp_path: Path) -> None:
    write_report_page(chain(tmp_path / "long.onnx", ["/model/long"] * 2000), tmp_path / "page.html")
    window.open((tmp_path / "page.html").as_uri() + "#model.long")
    assert window.run("return level.boxes.every(piece => piece.box.kind === 'run')")
    assert window.run("return level.boxes.length") <= 60
    window.click('#graph-0 [data-box="1"]')
    assert 1 < window.run("return level.boxes.length") <= 60
    assert window.run("return level.boxes[0].box.kind") == "node"
    window.run("chooseItem(graph.items[1234]); return 0")
    assert window.count("#graph-0 .box.chosen") == 1
