"""What the evaluator or the translation of an operator lacks accuses no right file and fixes no axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import parser
from torch import nn
from torch.nn import functional

import modelexport
from graph_texts import written
from modelexport.capture import FrontEnd
from modelexport.errors import LimitedFileWarning
from modelexport.exporting.fixed_axes import Tried
from modelexport.exporting.unrecorded_decisions import UnrecordedDecisions
from modelexport.graph.undetermined_ranks import undetermined_ranks
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import open_session
from modelexport.tools.compare.against_file import verify_against


class Fourier(nn.Module):
    """A Fourier unit, whose transforms have half of a dynamic axis."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfftn(x, dim=(-2, -1), norm="ortho")
        parts = torch.relu(self.conv(torch.cat([spectrum.real, spectrum.imag], 1)))
        return torch.fft.irfftn(torch.complex(*parts.chunk(2, 1)), s=x.shape[-2:], dim=(-2, -1), norm="ortho")


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fourier, self.norm = Fourier(), nn.RMSNorm(8)
        self.table = nn.Parameter(torch.randn(1, 3, 4, 4))
        self.gate, self.scale = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            self.fourier(x),
            self.norm(x),
            functional.pad(x, (2, -2, -1, 1)),
            torch.erfinv(torch.tanh(x / 4)),
            (x.double() * 0.1 + 1 / x.shape[2]).float(),
            x * self.gate.detach().sigmoid().item() + float(self.scale.detach().exp()),
            functional.scaled_dot_product_attention(x, x, x),
            functional.interpolate(x, scale_factor=0.7, mode="bilinear"),
            functional.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=True),
            torch.logcumsumexp(x.masked_fill(x[:, :, :1] > 0, -torch.inf), 1),
            functional.interpolate(self.table, size=(7, 5), mode="bicubic"),
            functional.conv1d(x.mean(2)[1:], torch.ones(4, 3, 3)).sum(0),
        )


class Chosen(nn.Module):
    """Chooses rows by scores that are equal in float32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = (1 + 1e-9 * score(x)[:, 0] for score in (self.first, self.second))
        return tuple(table[each.topk(20).indices] for each in scores)


def test_rows_that_only_float64_chooses_accuse_no_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Chosen(), (torch.randn(50, 4), torch.randn(50, 4))
    assert (
        modelexport.export(model, inputs, tmp_path / "x.onnx", frontend="dynamo", verify=True).check.status == "passed"
    )


def test_a_choice_among_equal_scores_that_the_file_makes_twice_accuses_no_file(tmp_path: Path) -> None:
    class Best(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            best = torch.cat([x, x], 1).argmax(1)
            return best, best * 2

    inputs = {"x": torch.rand(6, 4)}
    modelexport.export(Best(), inputs, tmp_path / "once.onnx")
    model = onnx.load(tmp_path / "once.onnx")
    (choice,) = (node for node in model.graph.node if node.op_type == "ArgMax")
    (last,) = (each for each in choice.attribute if each.name == "select_last_index")
    last.i = 1
    again = onnx.NodeProto()
    again.CopyFrom(choice)
    again.name = again.output[0] = "again"
    (user,) = (node for node in model.graph.node if node.op_type == "Mul")
    user.input[:] = ["again" if name == choice.output[0] else name for name in user.input]
    model.graph.node.insert([*model.graph.node].index(choice) + 1, again)
    onnx.save(model, tmp_path / "twice.onnx")
    assert modelexport.verify(Best(), inputs, tmp_path / "twice.onnx").agrees


def test_a_dropout_that_does_not_train_accuses_no_file(tmp_path: Path) -> None:
    text = """g (float[N,4] x) => (float[N,4] y) <float r = {0.5}, bool trains = {0}>
        { ["/a/Exp"] h = Exp(x) ["/b/Dropout"] n = Dropout(h, r, trains) ["/c/Exp"] y = Exp(n) }"""
    file = written(tmp_path / "x.onnx", text)
    assert modelexport.verify(modelexport.to_torch(file), {"x": torch.rand(2, 4)}, file).agrees


def test_other_random_numbers_than_the_stored_ones_accuse_no_file(tmp_path: Path) -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn_like(x)

    modelexport.export(Noisy(), {"x": torch.rand(2, 4)}, tmp_path / "x.onnx", reference=True)
    assert modelexport.verify_reference(tmp_path / "x.onnx").agrees


@pytest.mark.slow
def test_what_numpy_or_the_standard_lacks_accuses_no_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(2, 3, 10, 8)
    result = modelexport.export(model, {"x": x}, tmp_path / "x.onnx", opset=23, dynamic=True)
    assert not result.fixed
    report = modelexport.verify(model, {"x": x}, tmp_path / "x.onnx")
    assert report.agrees, report
    assert {one.status for one in report.others} == {"agree"}
    other = torch.randn(3, 3, 20, 8)
    for right, found in zip(model(other), result.session().run(None, {"x": other.numpy()}), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), right, rtol=1e-4, atol=1e-5)


def test_numbers_in_float64_keep_their_digits(tmp_path: Path) -> None:
    class Filled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.1 + torch.full_like(x, 0.3) + x.new_full((3,), 0.7)

    x = torch.randn(2, 3, dtype=torch.float64)
    result = modelexport.export(Filled(), {"x": x}, tmp_path / "x.onnx", frontend="dynamo", check=False)
    np.testing.assert_allclose(result.session().run(None, {"x": x.numpy()})[0], Filled()(x), rtol=1e-15)


# --- what is due to a size --------------------------------------------------------------------------------------------

SIZES = {"batch": 2, "length": 5, "height": 8, "width": 8}


def tried_with(differs: Callable[[Mapping[str, int]], bool]) -> UnrecordedDecisions:
    """What is found of a file that differs at some sizes."""
    found = UnrecordedDecisions(SIZES, lambda sizes: Tried("differ" if differs(sizes) else "agree", "it differs"))
    found.find([])
    return found


@pytest.mark.parametrize("guilty", ["length", "width"])
def test_only_the_size_that_does_it_is_fixed(guilty: str) -> None:
    assert set(tried_with(lambda sizes: sizes[guilty] != SIZES[guilty]).fixed) == {guilty}


@pytest.mark.parametrize("guilty", [["batch", "length", "width"], ["length", "height", "width"]])
def test_of_three_sizes_that_do_it_together_the_last_is_fixed(guilty: list[str]) -> None:
    assert set(tried_with(lambda sizes: all(sizes[one] != SIZES[one] for one in guilty)).fixed) == {guilty[-1]}


def test_an_order_of_two_sizes_is_a_condition() -> None:
    found = tried_with(lambda sizes: sizes["batch"] > sizes["length"])
    assert [condition.formula for condition in found.conditions] == ["batch <= length"]


def test_what_differs_with_the_sizes_of_the_example_fixes_none() -> None:
    assert not tried_with(lambda sizes: True).fixed


def test_what_cannot_be_compared_fixes_none() -> None:
    found = UnrecordedDecisions(SIZES, lambda sizes: Tried("not compared"))
    found.find([])
    assert not found.fixed


# --- files of others --------------------------------------------------------------------------------------------------

OTHERS = {
    "sequences": "g (float[2, 6] x) => (float[2, 6] y, seq(float[2, n]) s) "
    "{ s = SplitToSequence <axis = 1> (x)  y = ConcatFromSequence <axis = 1> (s) }",
    "SequenceMap": "g (float[2, 6] x) => (float[2, 6] y) { s = SplitToSequence <axis = 1> (x) "
    "  m = SequenceMap <body = b (float[2, n] e) => (float[2, n] f) { f = Neg (e) }> (s) "
    "  y = ConcatFromSequence <axis = 1> (m) }",
    "Scan": "g (float[5, 3] x) => (float[3] t, float[5, 3] y) <float[3] z = {0, 0, 0}> { w = Neg (x) "
    "  t, y = Scan <num_scan_inputs = 1, body = b (float[3] s, float[3] e) => (float[3] a, float[3] o) "
    "  { a = Add (s, e)  o = Identity (a) }> (z, w) }",
    "sizes": "g (int64[3] size, float[1] x) => (float[a, b, c] y) "
    "{ one = Shape (x)  more = Add (size, one)  y = Expand (x, more) }",
    "quantized": "g (float[1, 2, 6, 6] x) => (float[1, 2, 4, 4] y) <float s = {0.1}, uint8 z = {3}, "
    "  int8[2, 2, 3, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, 1, 2, 3, -4, 5, 6, 7, 8, 9, "
    "  1, -2, 3, 4, 5, -6, 7, 8, 9, 1, 2, 3, -4, 5, 6, 7, 8, 9}> "
    "{ q = QuantizeLinear (x, s, z)  i = ConvInteger (q, w, z)  f = Cast <to = 1> (i)  d = DequantizeLinear (q, s, z) "
    "  m = ReduceMean (d)  y = Add (f, m) }",
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_others_are_compared(name: str, tmp_path: Path) -> None:
    version = 13 if name == "quantized" else 18
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {version}]> {OTHERS[name]}')
    for number, node in enumerate(proto.graph.node):
        node.name = f"/{'first' if number == 0 else 'second'}/{node.op_type}"
    onnx.save(proto, tmp_path / "m.onnx")
    modelexport.adopt(tmp_path / "m.onnx", output=tmp_path / "a.onnx")
    report = verify_against(tmp_path / "a.onnx", tmp_path / "a.onnx")
    assert report.agrees
    assert "agree" in {call.status for call in report.calls}


def test_random_sizes_are_small() -> None:
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (int64[3] size, int64[9] ids) => (float[a, b, c] y, int64[9] z) '
        "{ y = ConstantOfShape (size)  z = Neg (ids) }"
    )
    model = ir.serde.deserialize_model(proto)
    found = make_random_inputs(model, open_session(model))
    assert found["size"].max() <= 8 < found["ids"].max()


@pytest.mark.parametrize("frontend", [pytest.param("dynamo", marks=pytest.mark.slow), "torchscript"])
def test_a_rank_that_depends_on_a_size_is_not_declared(frontend: FrontEnd, tmp_path: Path) -> None:
    class Squeezed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.squeeze().relu() * 2

    with pytest.warns(LimitedFileWarning, match="number of axes of output depends"):
        report = modelexport.export(
            Squeezed(), torch.randn(1, 4), tmp_path / "x.onnx", frontend=frontend, dynamic=True, verify=True
        ).verified
    assert report is not None
    assert report.agrees, report


def test_a_shape_that_is_an_attribute_determines_a_rank() -> None:
    graph = '<ir_version: 3, opset_import: ["" : 4]> g (float[n] x) => (float[m] y) { y = Reshape <shape = [-1]> (x) }'
    assert not undetermined_ranks(ir.serde.deserialize_model(parser.parse_model(graph)))


class InHalf(nn.Module):
    """Numbers that half precision has only roughly: 0.3 becomes 0.3008 beside it, and 1e-5 is among its smallest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.first(x)
        return x // 0.3, x.div(0.3, rounding_mode="trunc"), x.float() % 0.3, x / (x.var(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_that_half_precision_rounds_accuse_no_file(
    dtype: torch.dtype, frontend: FrontEnd, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(24, 4).to(dtype)}
    model = InHalf().to(dtype)
    modelexport.export(model, inputs, tmp_path / "m.onnx", frontend=frontend)
    report = modelexport.verify(model, inputs, tmp_path / "m.onnx")
    assert report.agrees, report
