"""Recurrent layers over packed sequences compute what PyTorch does, for lengths that the file is given when it runs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from modelexport import export
from modelexport.errors import CaptureError


class Packing(nn.Module):
    """Returns every step, the lengths and the last states; between, the rows of the packed sequence are changed."""

    def __init__(self, layer: nn.Module, *, whole: bool) -> None:
        super().__init__()
        self.layer, self.whole = layer, whole

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        first = self.layer.batch_first
        packed = pack_padded_sequence(x, lengths, first, enforce_sorted=False)
        packed = PackedSequence(torch.tanh(packed.data), *packed[1:])
        steps, last = self.layer(packed)
        total = x.shape[1 if first else 0] if self.whole else None
        return *pad_packed_sequence(steps, first, padding_value=-2.0, total_length=total), last


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> Any:
        return self.layer(PackedSequence(x, sizes))[1]


LAYERS = {
    "lstm": lambda: Packing(nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), whole=False),
    "gru": lambda: Packing(nn.GRU(3, 4, bias=False), whole=True),
    "rnn": lambda: Packing(nn.RNN(3, 4), whole=True),
}


def _agree(model: nn.Module, path: Path, x: torch.Tensor, lengths: list[int]) -> None:
    given = torch.tensor(lengths)
    steps, ends, last = model(x, given)
    states = last if isinstance(last, tuple) else [last]
    made = ort.InferenceSession(path).run(None, {"x": x.numpy(), "lengths": given.numpy()})
    for one, other in zip([steps, ends, *states], made, strict=True):
        np.testing.assert_allclose(other, one.detach().numpy(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["rnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lstm", "gru"))])
def test_any_lengths_in_any_order(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = LAYERS[name]().eval(), tmp_path / "m.onnx"
    result = export(
        model, (torch.randn(4, 4, 3), torch.tensor([2, 4, 1, 3])), path, dynamic=True, verify=True, check=False
    )
    assert result.verified is not None
    assert result.verified.agrees
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)
    _agree(model, path, torch.randn(4, 4, 3), [4, 1, 3, 3])
    _agree(model, path, torch.randn(4, 4, 3), [1, 3, 1, 2])  # shorter than the padded sequences
    _agree(model, path, torch.randn(5, 5, 3), [5, 1, 2, 4, 1])


@pytest.mark.slow
def test_the_older_front_end_says_nothing_on_the_way(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, path = Packing(nn.GRU(3, 4, bidirectional=True), whole=False).eval(), tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(model, (torch.randn(4, 5, 3), torch.tensor([2, 4, 1, 3, 4])), path, frontend="torchscript", check=False)
    assert "prim::PackPadded" not in capfd.readouterr().err
    _agree(model, path, torch.randn(4, 5, 3), [1, 3, 1, 2, 3])


def test_a_packed_sequence_that_comes_from_outside_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="that forward packs itself"):
        export(Given(), (torch.randn(5, 3), torch.tensor([3, 2])), tmp_path / "m.onnx", frontend="dynamo")
