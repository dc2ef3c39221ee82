"""``compare`` tells constants, and compares a file that has lost its tags with the one that it was made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import commands
from exports import Exporter
from graph_texts import written
from modelexport import compare, verify_against
from modelexport.testing import assert_exports
from modelexport.tools.compare.change_checks import check_changes
from modelexport.tools.optimizers.optimize_tools import TOOLS

CONSTANTS = {
    "a number": ("<float c = {0.5}> { ['/a/Mul'] y = Mul(x, c) }", "0.5", "0.6"),
    "a number in a Constant node": (
        "{ ['/a/Constant'] c = Constant<value_float = 0.5>() ['/a/Mul'] y = Mul(x, c) }",
        "0.5",
        "0.6",
    ),
    "an axis": ("<int64[1] c = {0}> { ['/a/ReduceMean'] y = ReduceMean(x, c) }", "{0}", "{1}"),
    "a limit": ("<float c = {0.0}, float d = {6.0}> { ['/a/Clip'] y = Clip(x, c, d) }", "6.0", "8.0"),
    "an exponent": ("<float c = {2.0}> { ['/a/Pow'] y = Pow(x, c) }", "2.0", "3.0"),
    "a table": ("<float[2] c = {1.0, 2.0}> { ['/a/Add'] y = Add(x, c) }", "2.0", "2.5"),
    "the pads of an axis": ("<int64[4] c = {0,0,0,1}> { ['/a/Pad'] y = Pad(x, c) }", "0,1", "1,0"),
    "its type": ("<float c = {2.0}> { ['/a/Pow'] y = Pow(x, c) }", "float c", "double c"),
    "two that changed places": ("<float c = {1.0}, float d = {2.0}> { ['/a/Clip'] y = Clip(x, c, d) }", "c, d", "d, c"),
    "one in a branch": (
        "<bool b = {1}, float c = {0.5}> { ['/a/If'] y = If(b) <then_branch = t () => (p) "
        "{ ['/a/Mul'] p = Mul(x, c) }, else_branch = e () => (q) { ['/a/Identity'] q = Identity(x) }> }",
        "0.5",
        "0.6",
    ),
}


@pytest.mark.parametrize("what", CONSTANTS)
def test_another_constant_is_a_difference_of_its_call(what: str, tmp_path: Path) -> None:
    body, before, after = CONSTANTS[what]
    text = f"g (float[2,2] x) => (float[?,?] y) {body}".replace("'", '"').replace("?", "N")
    files = [
        tagged(written(tmp_path / f"{number}.onnx", each))
        for number, each in enumerate((text, text.replace(before, after)))
    ]
    assert [change.address for change in compare(*files).changed] == ["a"]


def tagged(file: Path) -> Path:
    """The file with tags and without parameters: what it stores are constants."""
    adopted = file.with_suffix(".adopted.onnx")
    commands.run("adopt", file, "-o", adopted)
    model = onnx.load(adopted)
    for entry in [entry for entry in model.metadata_props if entry.key == "modelexport.state_dict"]:
        entry.value = "{}"
    for tensor in (*model.graph.initializer, *(value for value in model.graph.value_info)):
        del tensor.metadata_props[:]
    onnx.save(model, adopted)
    return adopted


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


def test_an_export_with_another_number_is_not_like_the_earlier_one(tmp_path: Path) -> None:
    inputs = {"x": torch.ones(2, 4)}
    assert_exports(Scaled(0.5), inputs, path=tmp_path / "kept.onnx")
    assert_exports(Scaled(0.5), inputs, like=tmp_path / "kept.onnx")
    with pytest.raises(AssertionError, match="other constants: 1 Mul"):
        assert_exports(Scaled(0.6), inputs, like=tmp_path / "kept.onnx")


@pytest.fixture(scope="module")
def fused(exported: Exporter, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An export, and what ONNX Runtime's optimizer made of it, without tags."""
    source, target = exported("bert").path, tmp_path_factory.mktemp("fused") / "fused.onnx"
    TOOLS["ort-extended"].run(source, target, dict)
    return source, target


def test_a_fused_file_is_compared_module_by_module(fused: tuple[Path, Path]) -> None:
    report = check_changes(*fused)
    assert {"encoder.layer.0.output.LayerNorm", "pooler.activation"} <= {
        change.address for change in report.comparison.changed
    }
    assert not report.comparison.entries


def test_a_fused_file_may_come_first(fused: tuple[Path, Path]) -> None:
    source, target = fused
    first, second = (check_changes(*files).comparison for files in ((source, target), (target, source)))
    assert [change.address for change in second.changed] == [change.address for change in first.changed]


def test_a_file_that_was_made_from_another_is_told_to_have_its_calls(fused: tuple[Path, Path]) -> None:
    (note,) = check_changes(*fused).comparison.notes
    assert note.endswith("as `retag` finds them")


def test_a_file_that_was_not_made_from_the_other_is_one_module(fused: tuple[Path, Path], tmp_path: Path) -> None:
    other = written(tmp_path / "a.onnx", 'g (float[2] x) => (float[2] y) { ["/a/Relu"] r = Relu(x) y = Neg(r) }')
    (note,) = check_changes(fused[0], other).comparison.notes
    assert note.endswith("each file is compared as one module")


def words(folder: Path) -> Path:
    """A folder with a tokenizer that knows two words."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_texts_are_read_with_the_tokenizer_of_another_folder(tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.eye(2, dtype=np.float32), "table.weight")
    ends = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "n"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "n", 2]),
    ]
    node = helper.make_node("Gather", ["table.weight", "input_ids"], ["y"], name="/table/Gather")
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [table])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "a.onnx")
    (tmp_path / "texts.txt").write_text("a b\nb a b\n")
    file = tmp_path / "a.onnx"
    given = ["--data", tmp_path / "texts.txt", "--processor", words(tmp_path / "tokenizer")]
    done = commands.run("verify", file, "--against", file, *given)
    assert (done.returncode, "inputs: 2 runs of" in done.stdout) == (0, True), done.stderr


def test_what_a_node_without_tags_computes_is_lost_by_the_call_of_the_first_file(tmp_path: Path) -> None:
    """A quantizer's new nodes have no tags; every call agreed, and the output differed."""
    text = """g (float[2,2] x) => (float[2,2] y) <float s = {%s}>
        { ["/a/Relu"] h = Relu(x) ["/b/Mul"] i = Mul(h, s) ["/c/Neg"] y = Neg(i) }"""
    first, second = (tagged(written(tmp_path / f"{factor}.onnx", text % factor)) for factor in ("1.0", "2.0"))
    changed = onnx.load(second)
    (node,) = [node for node in changed.graph.node if node.op_type == "Mul"]
    del node.metadata_props[:]
    onnx.save(changed, second)
    assert verify_against(first, second)["b"].status == "differ"
