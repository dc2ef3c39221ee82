"""The smallest model of each operator that torch.onnx translates wrongly or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.capture.repairs.special_functions import error_inverse
from modelexport.capture.repairs.translations import translations
from modelexport.errors import CaptureError
from truth import wrong

A, B = torch.linspace(-2, 3, 40).reshape(2, 4, 5), torch.tensor([[0, 3], [1, -100]])
IDS = torch.tensor([1, 2, 9, 2, 0, 5])
BAGS = torch.tensor([0, 2, 2, 4])
WELL = torch.linspace(0, 1, 32).reshape(2, 4, 4).sin() + 3 * torch.eye(4)
SWAPPED = torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.0, 3.0], [2.0, 1.0, 0.0]])
MIXED = (torch.linspace(0, 9, 40) * 7).sin().reshape(2, 4, 5)


class Computes(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.table = nn.Parameter(torch.linspace(-1, 1, 40).reshape(10, 4))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self.table, *inputs)


F = nn.functional
LOGITS = torch.linspace(-1, 2, 24).reshape(2, 4, 3).sin()
LABELS = torch.tensor([[0, 3, 1], [2, -100, 1]])
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "squeeze an axis of another size": (lambda t, x: x.squeeze(1) * 1.5, (A,)),
    "squeeze an axis of size 1": (lambda t, x: x[:, :1].squeeze(1) * 1.5, (A,)),
    "label smoothing": (lambda t, x, y: F.cross_entropy(x, y, label_smoothing=0.2), (LOGITS, LABELS)),
    "label smoothing, weighted": (
        lambda t, x, y: F.cross_entropy(x, y, t[0].exp(), label_smoothing=0.2),
        (LOGITS, LABELS),
    ),
    "label smoothing, each": (
        lambda t, x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="none"),
        (LOGITS, LABELS),
    ),
    "class probabilities": (lambda t, x, y: F.cross_entropy(x, y), (LOGITS[..., 0], LOGITS[..., 1].softmax(-1))),
    "bags": (lambda t, i, o: F.embedding_bag(i, t, o), (IDS, BAGS)),
    "bags, weighted": (lambda t, i, o: F.embedding_bag(i, t, o, mode="sum", per_sample_weights=i * 0.5), (IDS, BAGS)),
    "bags, the largest": (lambda t, i, o: F.embedding_bag(i, t, o, mode="max"), (IDS, BAGS)),
    "bags, padded": (lambda t, i, o: F.embedding_bag(i, t, o, padding_idx=2), (IDS, BAGS)),
    "adaptive maxima": (
        lambda t, x: [pool(x, 3, return_indices=True) for pool in (F.adaptive_max_pool2d, F.adaptive_max_pool3d)],
        (torch.cat([A, A + 1, A])[None].clone(),),
    ),
    "floored quotients": (lambda t, x: torch.div(x, 0.1 + 0 * x, rounding_mode="floor"), (torch.arange(-9.0, 9.0),)),
    "floored by zero": (lambda t, x: torch.div(x, 0.0, rounding_mode="floor"), (torch.arange(-9.0, 9.0),)),
    "floored in half precision": (
        lambda t, x: x.half().div(0.1, rounding_mode="floor").float(),
        (torch.tensor([7.5, -7.5, 6.0]),),
    ),
    "sums of large logarithms": (lambda t, x: torch.logaddexp2(x * 300, x * 299), (A,)),
    "histogram": (lambda t, x: torch.histc(x, 6, -1.0, 2.0), (A,)),
    "histogram of all": (lambda t, x: torch.histc(x, 6), (A,)),
    "functions of numbers": (
        lambda t, x: (
            *(x.prod(), x.prod(-1), torch.lgamma(x + 0.05), torch.lgamma(x * x * 9 + 1e-3)),
            torch.erfinv(x / 3.001),
        ),
        (A,),
    ),
    "linear algebra": (
        lambda t, x, y: (
            *(torch.linalg.inv(x), torch.linalg.inv(y), torch.linalg.matrix_exp(x - 3)),
            *(torch.linalg.solve(x, x[..., :2] * 2 + 1), torch.linalg.solve(x, x[..., 0] + 1)),
            torch.linalg.solve(x, x[:, :2] + 1, left=False),
            *(torch.linalg.cholesky(x @ x.mT), torch.linalg.cholesky(x @ x.mT, upper=True)),
            *(torch.linalg.inv_ex(y + 1), torch.linalg.solve_ex(y + 1, y), torch.linalg.cholesky_ex(x @ x.mT + 1)),
        ),
        (WELL, SWAPPED),
    ),
    "solutions and pseudo inverses": (
        lambda t, x: (
            torch.cholesky_solve(x[..., :2], torch.linalg.cholesky(x @ x.mT)),
            torch.linalg.pinv(x[0, :2, :1] @ x[0, :1, :2], atol=0.1, rtol=0.01),
        ),
        (WELL,),
    ),
    "distances": (
        lambda t, x: [
            *(torch.cdist(x, x + 1, p) for p in (0.0, 1.0, 2.0, 3.0, float("inf"))),
            *(F.pdist(x[0]), F.pdist(x[1], 1.0)),
        ],
        (A,),
    ),
    "order": (
        lambda t, x: (
            *(x.median(), x.median(-1), x.median(1, True), x[0, 0].median(), x.kthvalue(2), x.kthvalue(3, 1, True)),
            *(x.cummax(1), x.cummin(-1), x.cummax(0)[0]),
            *(
                torch.searchsorted(x.sort(-1)[0], x[..., :3] + 0.1, side=side, out_int32=side == "left")
                for side in ("left", "right")
            ),
            *(torch.bucketize(x, t[:, 0]), torch.bucketize(x, t[:, 0], right=True)),
        ),
        (MIXED,),
    ),
    "indices of 32 bits": (lambda t, x, i: (x[:, i], x[i, :, i], t[i.long(), i], t[i]), (A, IDS[:2].int() % 2)),
    "written at indices of 32 bits": (
        lambda t, x, i: (
            _assigned(x.clone(), i, x[:1]),
            t.index_put((i,), t[:1], accumulate=True),
            torch.ops.aten._unsafe_index_put(t, [i], t[:1], True),
        ),
        (A, IDS[:2].int() % 2),
    ),
    "different elements": (lambda t, x: x.unique(return_counts=True, return_inverse=True), (IDS.int(),)),
    "written by a mask": (
        lambda t, x: (
            _assigned(x.clone(), x > 0, t[0, 0]),
            _assigned(x.clone(), x > 9, x[x > 9]),
            _assigned(x.clone(), x[..., 0] > 0, t[0].repeat(2)[:5]),
            _assigned(x.clone(), x[..., 0] > 0, x[x[..., 0] > 0] * 2),
            x.masked_scatter(x > 0, x.flatten() * 2),
            x.masked_scatter(x[..., :1] > 9, x.flatten()[:0]),
        ),
        (A,),
    ),
    "the largest of what is padded": (lambda t, x: F.max_pool2d(F.pad(x - 9, (1, 1, 1, 1)), 3, 2), (A[None],)),
    "the largest of what is padded with a number": (
        lambda t, x: [
            *(_pooled(F.max_pool1d, x[0], 1), _pooled(F.max_pool2d, x, 2), _pooled(F.max_pool3d, x[None], 3)),
            _pooled(F.max_pool1d, x[0], 1, return_indices=True)[0],
            _pooled(F.max_pool2d, x, 2, return_indices=True)[0],
            _pooled(F.max_pool3d, x[None], 3, return_indices=True)[0],
        ],
        (A[None],),
    ),
}


def _pooled(pool: Callable[..., Any], x: torch.Tensor, axes: int, **how: bool) -> Any:
    """Each pool gets a padding of its own, because ONNX Runtime folds none that two nodes read."""
    return pool(F.pad(x - 9 - axes - len(how) / 2, (1, 1) * axes, value=0.0), 3, 2, **how)


def _assigned(x: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    x[places] = values
    return x


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_the_file_computes_what_pytorch_does(case: str, tmp_path: Path) -> None:
    function, inputs = CASES[case]
    model = Computes(function).eval()
    result = export(model, inputs, tmp_path / "m.onnx", frontend="dynamo", check=False)
    assert wrong(tmp_path / "m.onnx", model, inputs) == ""
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)


def test_bags_are_summed_without_a_loop(tmp_path: Path) -> None:
    function, inputs = CASES["bags"]
    export(Computes(function).eval(), inputs, tmp_path / "m.onnx", frontend="dynamo", check=False)
    assert not {"Loop", "If"} & {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}


TRACED: dict[str, Callable[..., Any]] = {
    "differences": lambda t, x: (
        *(x.diff(), torch.diff(x, n=2, dim=0), x.diff(prepend=x[..., :2], append=x[..., :1])),
        (x > 0).diff(),
    ),
    "histogram": lambda t, x: (x.histc(7), torch.histc(x, bins=5, min=-0.5, max=0.5), torch.histc(x, 3, 2, 4)),
    "two linear": lambda t, x: (
        F.bilinear(x, x + 1, t[0, 0] * torch.ones(2, 5, 5)),
        F.bilinear(x, x[..., :2], torch.linspace(-1, 1, 3 * 2 * x.shape[-1]).reshape(3, -1, 2), torch.arange(3.0)),
    ),
    "sums of conditions": lambda t, x: ((x > 0).cumsum(-1), torch.cumsum(x, 1)),
    "far below zero": lambda t, x: F.logsigmoid(x * 80),
    "cosines of small and of large vectors": lambda t, x: [
        *(F.cosine_similarity(x * size, x.flip(-1) * size) for size in (1e-6, 1e12)),
        nn.CosineSimilarity(2, eps=2.0)(x, x[:1] + 1),
    ],
    "cosines of vectors of other shapes and types": lambda t, x: (
        *(F.cosine_similarity(x, other, -1) for other in (x[0, 0], x[..., :1], x[:, :1].double(), (x * 9).long())),
    ),
    "distances of equal rows, and of odd powers": lambda t, x: [
        F.pairwise_distance(x, x) * 1e6,
        *(F.pairwise_distance(x, x.flip(-1), p=p, keepdim=True) for p in (1, 2.5, 3, float("inf"))),
    ],
    "truncated": lambda t, x: (
        *(torch.div(x * size, 0.7, rounding_mode="trunc") for size in (9.0, 1e25)),
        *(rounded(x * 1e25) for rounded in (torch.trunc, torch.fix)),
        (x * 9).frac(),
    ),
    "quotients of half precision by a number that it does not have": lambda t, x: (
        *(torch.div(x.half() * 9, 0.3, rounding_mode=rounded).float() for rounded in ("floor", "trunc")),
        (x.half() * 9 // 0.3).float(),
    ),
    "certain choices": lambda t, x: (
        torch.bernoulli((x > 0).float(), out=torch.empty_like(x)),
        x.clone().bernoulli_(1.0),
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", TRACED)
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_both_front_ends_compute_what_pytorch_does(case: str, frontend: Any, tmp_path: Path) -> None:
    model = Computes(TRACED[case]).eval()
    result = export(model, (A,), tmp_path / "m.onnx", frontend=frontend, check=False)
    assert wrong(tmp_path / "m.onnx", model, (A,)) == ""
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)


ADDED: dict[str, Callable[..., torch.Tensor]] = {
    "index_put": lambda t, i, x: t.index_put((i,), x, accumulate=True),
    "index_put of two axes": lambda t, i, x: t.index_put((i, i % 4), x[:, 0], accumulate=True),
    "index_put from the end": lambda t, i, x: t.index_put((-1 - i,), x, accumulate=True),
    "index_add": lambda t, i, x: t.index_add(0, i, x),
    "scatter_add": lambda t, i, x: t.scatter_add(0, i[:, None].expand(-1, 4), x),
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", ADDED)
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_what_is_written_twice_is_added_twice_also_if_the_example_writes_once(
    case: str, frontend: Any, tmp_path: Path
) -> None:
    model, x = Computes(ADDED[case]).eval(), torch.linspace(1, 2, 20).reshape(5, 4)
    export(model, (torch.tensor([0, 1, 2, 5, 7]), x), tmp_path / "m.onnx", frontend=frontend)
    assert wrong(tmp_path / "m.onnx", model, (torch.tensor([3, 1, 3, 3, 1]), x)) == ""


SELECTED: dict[str, Callable[..., torch.Tensor]] = {
    "a column of each row": lambda t, i: t[torch.arange(4), i],
    "two inputs": lambda t, i: t[i, i],
    "behind other axes": lambda t, i: t.expand(3, 10, 4)[..., i, None, i.int()],
    "apart": lambda t, i: t.expand(2, 10, 4)[i % 2, :, i],
    "beside a condition": lambda t, i: t[True, i, i],
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", SELECTED)
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_indices_count_from_the_end_also_if_none_of_the_example_does(case: str, frontend: Any, tmp_path: Path) -> None:
    model = Computes(SELECTED[case]).eval()
    export(model, (torch.tensor([0, 2, 1, 3]),), tmp_path / "m.onnx", frontend=frontend)
    assert wrong(tmp_path / "m.onnx", model, (torch.tensor([-1, 3, -4, -2]),)) == ""


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_negative_integers_are_shifted_down_also_if_the_example_has_none(
    dtype: torch.dtype, frontend: Any, tmp_path: Path
) -> None:
    model = Computes(lambda t, x, by: (x >> 2, x >> by, torch.bitwise_right_shift(x, by))).eval()
    inputs = torch.tensor([[1, 40, 100], [0, 1, 3]], dtype=dtype)
    export(model, (*inputs,), tmp_path / "m.onnx", frontend=frontend)
    assert wrong(tmp_path / "m.onnx", model, (-inputs[0] - 2, inputs[1])) == ""


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_integers_that_are_shifted_by_all_their_bits_are_0_or_minus_1(
    dtype: torch.dtype, frontend: Any, tmp_path: Path
) -> None:
    bits = torch.iinfo(dtype).bits
    model = Computes(lambda t, x, by: (x >> by, x >> bits - 1, -3 >> by, x.clone().bitwise_right_shift_(by))).eval()
    inputs = torch.tensor([[-3, 40, 100], [bits - 1, bits - 1, bits]], dtype=dtype)
    export(model, (*inputs,), tmp_path / "m.onnx", frontend=frontend)
    assert wrong(tmp_path / "m.onnx", model, (*inputs,)) == ""
    assert wrong(tmp_path / "m.onnx", model, (inputs[0].flip(0), inputs[1] - 1)) == ""


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_an_empty_bag_is_zero_also_if_the_example_has_none(mode: str, frontend: Any, tmp_path: Path) -> None:
    model = Computes(lambda t, ids, starts: F.embedding_bag(ids, t, starts, mode=mode, padding_idx=9)).eval()
    export(model, (IDS, torch.tensor([0, 1, 3, 4])), tmp_path / "m.onnx", frontend=frontend)
    assert wrong(tmp_path / "m.onnx", model, (IDS, BAGS)) == ""


@pytest.mark.parametrize("case", ["index_put", "index_add", "scatter_add"])
def test_a_trace_that_adds_is_refused_for_opsets_whose_writes_do_not_add(case: str, tmp_path: Path) -> None:
    inputs = torch.tensor([0, 1, 2, 5, 7]), torch.ones(5, 4)
    with pytest.raises(CaptureError, match="a write that adds needs opset 16, and not 15"):
        export(Computes(ADDED[case]).eval(), inputs, tmp_path / "m.onnx", frontend="torchscript", opset=15)


def test_a_trace_that_adds_by_a_mask_is_refused(tmp_path: Path) -> None:
    model = Computes(lambda t, x: x.index_put((x > 0,), torch.tensor(2.0), accumulate=True)).eval()
    with pytest.raises(CaptureError, match="a write by a mask that adds is not translated"):
        export(model, (-torch.ones(2, 3),), tmp_path / "m.onnx", frontend="torchscript")


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(8, 6, 1, proj_size=2, bias=False),
        pytest.param(nn.LSTM(8, 6, 2, proj_size=3, batch_first=True), marks=pytest.mark.slow),
        pytest.param(nn.LSTM(8, 6, 2, proj_size=3, bidirectional=True), marks=pytest.mark.slow),
    ],
)
def test_a_recurrent_layer_with_projection(layer: nn.LSTM, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 96).reshape(2, 6, 8).sin()
    ways = 2 if layer.bidirectional else 1
    batch = 2 if layer.batch_first else 6
    state = torch.linspace(-1, 1, 600)[: layer.num_layers * ways * batch * layer.proj_size]
    cell = torch.linspace(1, -1, 600)[: layer.num_layers * ways * batch * layer.hidden_size]
    inputs = (x, (state.reshape(-1, batch, layer.proj_size), cell.reshape(-1, batch, layer.hidden_size)))
    for given in ((x,), inputs):
        result = export(layer.eval(), given, tmp_path / "m.onnx", frontend="dynamo", check=False)
        assert wrong(tmp_path / "m.onnx", layer, given) == ""
        assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)


@pytest.mark.slow
def test_a_recurrent_layer_with_projection_may_get_one_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.LSTM(8, 6, proj_size=3).eval(), (torch.randn(4, 2, 8),)
    export(layer, inputs, tmp_path / "m.onnx", frontend="dynamo", dynamic=True, check=False)
    for steps in (4, 2, 1):
        assert wrong(tmp_path / "m.onnx", layer, (torch.randn(steps, 2, 8),)) == ""


def test_padding_belongs_to_the_module_that_pads(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Tanh(), nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, 2)).eval()
    result = export(model, (A[None] - 9,), tmp_path / "m.onnx", frontend="dynamo", verify=True, check=False)
    assert {node.op_type: node.call for node in result.hierarchy.nodes} == {"Tanh": "0", "Pad": "1", "MaxPool": "2"}
    assert result.verified is not None
    assert result.verified.agrees


def test_every_operator_of_the_table_is_there() -> None:
    """A canary: if torch dropped a name, the error would appear far away."""
    operators = translations().keys() - {torch.sym_sqrt}
    assert all(isinstance(operator, torch._ops.OpOverload) for operator in operators)


def test_the_inverse_of_the_error_function_is_exact_up_to_its_ends() -> None:
    x = torch.tanh(torch.linspace(-18.7, 18.7, 1001, dtype=torch.float64))
    torch.testing.assert_close(error_inverse(x), torch.erfinv(x), rtol=1e-14, atol=0)


def test_the_inverse_of_the_error_function_is_infinite_at_its_ends() -> None:
    ends = torch.tensor([-1.0, 1.0])
    assert torch.equal(error_inverse(ends), torch.erfinv(ends))
