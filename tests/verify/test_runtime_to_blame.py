"""Files that are right and that ONNX Runtime computes otherwise: the runtime is named, and no call is accused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from graph_texts import written
from modelexport import ModelExportError, export, to_torch, verify, verify_against
from modelexport.packages.stage_runs import verify_stages
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import read_tagged
from modelexport.tools.compare.change_checks import check_changes
from modelexport.tools.compare.loss_text import format_losses
from modelexport.tools.cut.splitting import split
from modelexport.tools.optimizers.optimize_tools import optimize_file
from modelexport.verify.onnxruntime_outputs import output_steps
from runtime_files import runtime_files

FILES = {file.name: file for file in runtime_files()}
KINDS = {
    "nearest 20 to 12": "ONNX Runtime's kernel of Resize /resize/Resize",
    "float16 added, 1000": "ONNX Runtime, which computes nodes together otherwise than one by one,",
    "transposed by (0, 2, 1)": "ONNX Runtime's optimizer QDQPropagationTransformer",
    "5 places of axis 0 reversed": "ONNX Runtime's optimizer GatherToSliceFusion",
}


@pytest.mark.parametrize("moved", ["Flatten (d)", "Transpose (d)", "Expand (d, sizes)", "Slice (d, one, two)"])
def test_an_output_has_the_step_of_the_integers_whose_elements_it_has(moved: str) -> None:
    constants = (
        "float step = {0.5}, uint8 zero = {3}, int64[3] sizes = {2, 2, 4}, int64[1] one = {1}, int64[1] two = {2}"
    )
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[2, 4] x) => (float[] y) <{constants}> {{
            q = QuantizeLinear (x, step, zero)  d = DequantizeLinear (q, step, zero)  y = {moved}
        }}""")
    assert output_steps(model) == {"y": 0.5}


def test_an_output_that_is_joined_of_integers_and_others_has_no_step() -> None:
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2, 4] x) => (float[] y) <float step = {100}, uint8 zero = {3}> {
            q = QuantizeLinear (x, step, zero)  d = DequantizeLinear (q, step, zero)  r = Relu (x)
            y = Concat <axis = 0> (d, r)
        }""")
    assert output_steps(model) == {"y": None}


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    onnx.save(FILES[request.param].model, tmp_path / "f.onnx")
    return str(request.param)


def test_onnx_runtime_is_to_blame_where_the_model_and_the_nodes_of_the_file_agree(name: str, tmp_path: Path) -> None:
    inputs = {key: torch.from_numpy(np.array(array)) for key, array in FILES[name].inputs.items()}
    report = verify(to_torch(tmp_path / "f.onnx"), inputs, tmp_path / "f.onnx")
    assert (report.verdict, report.cause) == ("differ", KINDS[name])
    assert "differ" not in {call.status for call in report.calls}


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in FILES if name not in KINDS], indirect=True)
def test_onnx_runtime_is_named_and_no_call_is_accused(name: str, tmp_path: Path) -> None:
    inputs = {key: torch.from_numpy(np.array(array)) for key, array in FILES[name].inputs.items()}
    report = verify(to_torch(tmp_path / "f.onnx"), inputs, tmp_path / "f.onnx")
    assert "ONNX Runtime" in report.cause
    assert "differ" not in {call.status for call in report.calls}


def with_noise(path: Path) -> Path:
    """The file with another output, of random numbers."""
    model = onnx.load(path)
    name = "/noise/RandomNormal"
    model.graph.node.append(onnx.helper.make_node("RandomNormal", [], ["noise"], name=name, shape=[3]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("noise", onnx.TensorProto.FLOAT, [3]))
    onnx.save(model, path)
    return path


@pytest.mark.filterwarnings("ignore:the model was not compared")
@pytest.mark.parametrize("name", ["nearest 20 to 12"], indirect=True)
def test_random_numbers_of_another_output_do_not_hide_what_onnx_runtime_makes_wrong(name: str, tmp_path: Path) -> None:
    inputs = {key: torch.from_numpy(np.array(array)) for key, array in FILES[name].inputs.items()}
    file = with_noise(tmp_path / "f.onnx")
    report = verify(to_torch(file), inputs, file)
    assert ([output.status for output in report.outputs], report.cause) == (["differ", "not compared"], KINDS[name])
    assert KINDS[name] in verify_against(file, file).notes[0]


def test_whole_numbers_below_which_another_result_begins_do_not_excuse_the_optimizer(tmp_path: Path) -> None:
    text = """g (float[N,M] x) => (float y) <int64 axis = {0}, int64 back = {-1}>
        { ["/b/Shape"] shape = Shape(x) ["/b/Gather"] size = Gather(shape, axis) ["/b/Add"] last = Add(size, back)
          ["/b/Range"] places = Range(last, back, back) ["/c/Gather"] turned = Gather(x, places)
          ["/d/Floor"] whole = Floor(turned) ["/e/ReduceSum"] y = ReduceSum<keepdims = 0>(whole) }"""
    file = written(tmp_path / "f.onnx", text)
    report = verify(to_torch(file), {"x": torch.arange(25.0).reshape(5, 5)}, file)
    assert (report.verdict, report.cause) == ("differ", "ONNX Runtime's optimizer GatherToSliceFusion")


def test_two_files_that_onnx_runtime_computes_otherwise_in_the_same_way_agree(name: str, tmp_path: Path) -> None:
    report = verify_against(tmp_path / "f.onnx", tmp_path / "f.onnx")
    assert report.agrees
    assert KINDS[name] in report.notes[0]
    assert report.notes[0] in format_losses(report)


def test_what_the_optimizer_breaks_in_the_first_file_is_not_laid_to_the_second(tmp_path: Path) -> None:
    onnx.save(FILES["transposed by (0, 2, 1)"].model, tmp_path / "f.onnx")
    optimize_file(tmp_path / "f.onnx", "version-converter", tmp_path / "new.onnx")
    report = verify_against(tmp_path / "f.onnx", tmp_path / "new.onnx")
    assert report.agrees
    assert "optimizer QDQPropagationTransformer" in report.notes[0]
    assert check_changes(tmp_path / "f.onnx", tmp_path / "new.onnx", ["outputs"]).failed == []


def test_a_file_with_the_optimizer_s_fault_in_it_differs_though_both_run_alike(tmp_path: Path) -> None:
    wrong = """g (int8[2,3,3] x) => (float[2,3,3] y) <float s = {0.05}>
        { ["/a/Cast"] u = Cast<to = 2>(x) ["/a/DequantizeLinear"] y = DequantizeLinear(u, s) }"""
    right = """g (int8[2,3,3] x) => (float[2,3,3] y) <float s = {0.05}>
        { ["/a/DequantizeLinear"] y = DequantizeLinear(x, s) }"""
    first, second = (written(tmp_path / f"{k}.onnx", text, 19) for k, text in (("right", right), ("wrong", wrong)))
    assert verify_against(first, second).verdict == "differ"


DRAWN = """g (float[N,4] x) => (float[N,4] y, float[N,4] z) <float s = {%s}>
    { ["/a/Mul"] h = Mul(x, s) ["/noise/RandomNormalLike"] %s = RandomNormalLike(h)
      ["/noise/Add"] n = Add(h, %s) ["/b/Mul"] y = Mul(n, s) ["/c/Mul"] z = Mul(h, h) }"""


@pytest.mark.parametrize(("factor", "verdict"), [("2", "agree"), ("3", "differ")])
def test_files_that_draw_random_numbers_are_compared_with_the_same_ones(
    factor: str, verdict: str, tmp_path: Path
) -> None:
    first = written(tmp_path / "first.onnx", DRAWN % ("2", "r", "r"))
    second = written(tmp_path / "second.onnx", DRAWN % (factor, "other", "other"))
    report = verify_against(first, second)
    assert report.verdict == verdict
    assert {loss.difference.status for loss in report.outputs} == {verdict}


def test_outputs_that_depend_on_other_random_numbers_are_not_compared(tmp_path: Path) -> None:
    first = written(tmp_path / "first.onnx", DRAWN % ("2", "r", "r"))
    text = (DRAWN % ("2", "r", "r")).replace("RandomNormalLike(h)", "Mul(h, h)")
    second = written(tmp_path / "second.onnx", text)
    later = (DRAWN % ("2", "r", "r")).replace("Mul(x, s)", "Mul(p, s)").replace("{ [", '{ ["/a/Not"] p = Identity(x) [')
    report = check_changes(first, written(tmp_path / "later.onnx", later), ["outputs"])
    assert [output.status for output in report.outputs or ()] == ["not compared", "agree"]
    statuses = [loss.difference.status for loss in verify_against(second, first).outputs]
    assert statuses == ["not compared", "agree"]


def test_stages_that_draw_random_numbers_are_not_accused(tmp_path: Path) -> None:
    whole = written(tmp_path / "first.onnx", DRAWN % ("2", "r", "r"))
    split(read_tagged(whole), tmp_path / "stages", stages=2)
    assert [output.status for output in verify_stages(tmp_path / "stages", whole).outputs] == ["not compared", "agree"]


def test_a_tool_writes_nothing_wrong_and_names_the_optimizer(tmp_path: Path) -> None:
    file = FILES["transposed by (0, 2, 1)"]
    onnx.save(file.model, tmp_path / "f.onnx")
    with pytest.raises(ModelExportError, match="ONNX Runtime's optimizer does the same"):
        optimize_file(tmp_path / "f.onnx", "ort-basic", tmp_path / "o.onnx")
    assert not (tmp_path / "o.onnx").exists()
    plain = run_session(open_session(tmp_path / "f.onnx"), file.inputs)["y"]
    assert np.allclose(plain, file.right, atol=1e-4)


def test_an_output_of_another_type_is_told_where_onnx_runtime_does_not_run_the_file(tmp_path: Path) -> None:
    """Its CPU provider has no Gemm for bfloat16."""
    model, x = torch.nn.Linear(4, 4).bfloat16().eval(), torch.randn(2, 4).bfloat16()
    export(model, (x,), tmp_path / "f.onnx", frontend="torchscript")
    proto = onnx.load(tmp_path / "f.onnx")
    (output,) = proto.graph.output
    proto.graph.node.append(onnx.helper.make_node("Cast", [output.name], ["wide"], to=onnx.TensorProto.FLOAT))
    output.name, output.type.tensor_type.elem_type = "wide", onnx.TensorProto.FLOAT
    onnx.save(proto, tmp_path / "f.onnx")
    (found,) = verify(model, (x,), tmp_path / "f.onnx").outputs
    assert found.reason == "expected bfloat16[2, 4], got float32[2, 4]"
