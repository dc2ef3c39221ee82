"""Operators that are written in others before translation, and what else the capture makes possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.errors import CaptureError
from truth import wrong

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
SQUARE = X[0, :4, :4] @ X[0, :4, :4].mT + torch.eye(4)
WEIGHT = torch.complex(X[0, :, :3], X[1, :, :3])


class Computes(nn.Module):
    """A linear layer, and a function of what it returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.inner(x))


def _complex(y: torch.Tensor) -> torch.Tensor:
    return torch.complex(y, y.flip(-1))


def _assigned(y: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(2, 6, 8, dtype=torch.cfloat)
    made[:, :3] = _complex(y)[:, :3]
    made[:, 3:, 2] = 1j
    return torch.view_as_real(made)


def _round_trip(y: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(16)
    made = torch.stft(y.reshape(2, -1), 16, 4, window=window, return_complex=True)
    return torch.istft(made * (1 + 0.5j), 16, 4, window=window)


def _written(y: torch.Tensor) -> torch.Tensor:
    y.diagonal(dim1=1, dim2=2).add_(3)
    y.diagonal(1, 1, 2)[:] = 7
    y[:, 1:].copy_(y[:, 0][:, None])
    y.as_strided((2, 3, 4), (48, 16, 2)).mul_(2)
    y.put_(torch.tensor([0, -1]), torch.tensor([1.0, 2.0]))
    return y


def _low_rank(y: torch.Tensor) -> torch.Tensor:
    u, s, v = torch.linalg.svd(y, full_matrices=False)
    return u[..., :2] * s[..., None, :2] @ v[..., :2, :]


def _square_root(y: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(y)
    return (vectors * values.clamp(min=0.1).sqrt()[..., None, :]) @ vectors.mT


CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "complex: products": lambda y: torch.view_as_real(torch.einsum("bli,io->blo", _complex(y)[:, :, :6], WEIGHT)),
    "complex: several types": lambda y: (
        torch.view_as_real(_complex(y) * _complex(y.double()) + y.double()),
        torch.view_as_real(_complex(y.double()).to(torch.complex64) / y),
        torch.real(_complex(y)).double() - torch.view_as_real(y.to(torch.complex128)).sum(-1),
    ),
    "complex: functions": lambda y: ((1j * y).exp().real, (_complex(y) + 3).sqrt().imag, torch.tanh(_complex(y)).abs()),
    "complex: written into": _assigned,
    "complex: padded": lambda y: torch.view_as_real(nn.functional.pad(_complex(y), (1, 2))),
    "complex: short-time transforms": _round_trip,
    "an integer beside a fraction": lambda y: (
        *(y.clamp(0, 0.5), y.clamp(-0.5, y.shape[0]), (y * 9).long().clamp(0.5, 3), y.clone().clamp_(-1, 0.5)),
        *(torch.copysign(y, -1), torch.copysign((y * 9).long(), -0.0), torch.stack([y, (y * 9).long()])),
    ),
    "triangles": lambda y: torch.linalg.solve_triangular(SQUARE.tril(), y[:, :4, :3], upper=False),
    "reflections": lambda y: torch.linalg.qr(y.mT),
    "determinants": lambda y: torch.linalg.slogdet(y[:, :6, :6])[1],
    "singular values": lambda y: (torch.linalg.svdvals(y[..., :3]), _low_rank(y[:, :4])),
    "eigenvalues": lambda y: (torch.linalg.eigvalsh(y[:, :3] @ y[:, :3].mT), _square_root(y[..., :4].mT @ y[..., :4])),
    "signs": lambda y: (torch.copysign(y, y.flip(1)), torch.copysign(y, -y * 0), torch.signbit(y * 0)),
    "written through views": lambda y: _written(y.clone()),
    "numbers": lambda y: (torch.digamma(y), torch.hypot(y, y + 1), torch.hamming_window(12) * torch.arange(-2, 10.0)),
    "scattered, reduced": lambda y: [
        torch.ones(2, 6, 8).scatter_reduce(1, (y > 0).long() + (x > 1), y, kind, include_self=included)
        for x in [y.flip(1)]
        for kind in ("sum", "prod", "mean", "amax", "amin")
        for included in (True, False)
    ],
    "searched": lambda y: (
        torch.searchsorted(y[0, 0].sort()[0], 0.1),
        torch.searchsorted(y[0, 0].sort()[0], torch.where(y[1] > 0, y[1], float("nan")), right=True),
        torch.bucketize(0.1, y[0, 0].sort()[0], right=True),
        torch.where(y > 0, 0, y.round()).unique_consecutive(return_inverse=True, return_counts=True),
        (y > 0).unique_consecutive(),
        y.masked_select(y[..., :1] > 0),
        torch.aminmax(y),
    ),
    "observations": lambda y: (
        *(torch.cov(y[0]), torch.corrcoef(y[0]), y[0].cov(correction=0), torch.cov(y[0, 0])),
        torch.cov(y[0], fweights=torch.arange(1, 9), aweights=y[1, 0].abs()),
        *(torch.combinations(y[0, 0]), torch.combinations(y[0, 0, :4], 3, True)),
    ),
    "numbers among others": lambda y: [
        one
        for z in [torch.where(y > 0.3, float("nan"), y)]
        for one in (z.nanmedian(), z.nanmedian(1)[0], torch.full_like(z, float("nan")).nanmedian(0)[0])
    ],
    "householder": lambda y: torch.linalg.householder_product(y.mT[..., :4], y[:, 0, :4]),
    "a loss that checks": lambda y: nn.functional.gaussian_nll_loss(y, y.flip(1), y.abs() + 1, full=True),
    "scattered": lambda y: [
        y.scatter(1, torch.tensor([[[0], [0]]] * 2).expand(2, 2, 8), source, reduce="add") for source in (y[:, :2], 3.0)
    ],
    "distributions": lambda y: torch.distributions.Normal(y, y.abs() + 1).log_prob(y * 2),
}


@pytest.mark.slow
def test_the_windows_of_an_inverse_transform_are_written_at_once(tmp_path: Path) -> None:
    export(Computes(_round_trip).eval(), (X,), tmp_path / "m.onnx", frontend="dynamo", check=False)
    written = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node if node.op_type.startswith("Scatter")]
    assert len(written) == 2  # the signal and the sum of the windows


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_exported_rightly(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Computes(CASES[name]).eval()
    result = export(model, (X,), tmp_path / "m.onnx", frontend="dynamo", check=False)
    assert not wrong(tmp_path / "m.onnx", model, (X,))
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)


def test_singular_values_of_large_matrices_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="of 48 columns: up to 24"):
        export(
            Computes(lambda y: torch.linalg.eigvalsh(y.new_ones(48, 48))).eval(),
            (X,),
            tmp_path / "m.onnx",
            frontend="dynamo",
        )


@pytest.mark.slow
def test_every_export_of_a_recurrent_layer_in_a_process_has_an_open_number_of_steps(tmp_path: Path) -> None:
    for attempt in range(2):
        path = tmp_path / f"{attempt}.onnx"
        model = nn.LSTM(8, 6, batch_first=True).eval()
        export(model, (X,), path, dynamic=True, frontend="dynamo", check=False)
        graph = onnx.load(path).graph
        for value in (graph.input[0], graph.output[0]):
            assert all(size.dim_param for size in value.type.tensor_type.shape.dim[:2])


class WritesIntoItsInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2


def test_the_inputs_of_the_user_are_not_written_into(tmp_path: Path) -> None:
    given = X.clone()
    result = export(WritesIntoItsInput(), (given,), tmp_path / "m.onnx", verify=True, check=False)
    assert torch.equal(given, X)
    assert result.verified is not None
    assert result.verified.agrees


def test_modules_called_inside_a_vmap_and_with_nested_tensors_do_not_end_an_export(tmp_path: Path) -> None:
    model = Computes(lambda y: y)
    model.function = torch.func.vmap(nn.Tanh())
    export(model.eval(), (X,), tmp_path / "vmap.onnx", check=False)
    assert wrong(tmp_path / "vmap.onnx", model, (X,)) == ""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    padded = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    result = export(encoder, {"src": X, "src_key_padding_mask": padded}, tmp_path / "encoder.onnx", check=False)
    assert [one.kind for one in result.unrepeatable] == ["fused"]


def test_a_graph_module_is_exported_with_its_calls(tmp_path: Path) -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU())).eval()
    result = export(model, (X,), tmp_path / "m.onnx", check=False)
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)


class ClampsItsWeights(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_writes_into_the_data_of_a_parameter_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"clamp_.* writes into the data of a parameter"):
        export(ClampsItsWeights(8, 8).eval(), (X,), tmp_path / "m.onnx", frontend="dynamo")


def test_random_orders_are_orders(tmp_path: Path) -> None:
    model = Computes(lambda y: torch.randperm(6) + 0 * y[0, :, 0].long()).eval()
    result = export(model, (X,), tmp_path / "m.onnx", frontend="dynamo")
    assert result.check is not None
    assert result.check.status == "skipped"
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert sorted(session.run(None, {"x": X.numpy()})[0].tolist()) == list(range(6))


def test_numbers_of_a_generator_are_numbers_from_0_to_1(tmp_path: Path) -> None:
    generator = torch.Generator()
    model = Computes(
        lambda y: torch.rand(6, generator=generator) + 0 * torch.randn(6, generator=generator) + 0 * y[0, 0, 0]
    ).eval()
    export(model, (X,), tmp_path / "m.onnx", frontend="dynamo")
    (drawn,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": X.numpy()})
    assert len({number for number in drawn.tolist() if 0 <= number < 1}) == 6


class InTraining(nn.Module):
    """It normalizes by the statistics of its inputs, in evaluation mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.train()
        return self.norm(x * 3 + 1)


def test_batch_normalization_in_training_mode_takes_the_statistics_of_its_inputs(tmp_path: Path) -> None:
    model = InTraining().eval()
    export(model, (X,), tmp_path / "m.onnx", frontend="dynamo", check=False)
    assert not model.norm.training
    assert model.norm.num_batches_tracked == 0
    assert not wrong(tmp_path / "m.onnx", model, (X,))
