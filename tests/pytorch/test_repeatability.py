"""Models that draw so few numbers that two runs may draw the same are known as random."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.errors import LimitedFileWarning
from modelexport.pytorch.runs.repeatability import find_unrepeatable

X = torch.ones(4, 4)


class Chooses(nn.Module):
    """Draws one number, which matters in one of four runs."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        super().__init__()
        self.draw, self.generator = draw, torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + int(self.draw() < 0.25)


class ChoosesInTheFile(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(1) < 0.25) + x


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_a_model_that_draws_one_number_is_exported_whatever_was_drawn(frontend: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    result = export(ChoosesInTheFile(), (X,), tmp_path / "x.onnx", frontend=frontend)
    assert [(one.kind, one.where) for one in result.unrepeatable] == [("random", "output")]
    assert result.check is not None
    assert result.check.status != "failed"


def test_what_is_random_is_not_compared_with_hidden_rows_of_what_may_be_a_mask(tmp_path: Path) -> None:
    class Noise(nn.Module):
        def forward(self, mask: torch.Tensor) -> torch.Tensor:
            return mask + 1e-4 * torch.rand_like(mask) + (1 - mask) * torch.rand_like(mask)

    check = export(Noise(), (torch.ones(3, 4),), tmp_path / "noise.onnx").check
    assert check is not None
    assert check.status != "failed"


def test_numbers_of_all_generators_are_random() -> None:
    random.seed(1)
    np.random.seed(0)
    own = Chooses(lambda: float(torch.rand(1, generator=own.generator)))
    for model in (own, Chooses(random.random), Chooses(np.random.rand), ChoosesInTheFile()):
        assert [one.kind for one in find_unrepeatable(model, (X,))] == ["random"]


@pytest.mark.parametrize("draw", [random.random, pytest.param(np.random.rand, marks=pytest.mark.slow)])
def test_a_file_with_a_number_that_python_drew_is_compared_with_the_run_that_drew_it(
    draw: Callable[[], float], tmp_path: Path
) -> None:
    class Scales(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1 + draw())

    result = export(Scales(), (X,), tmp_path / "x.onnx", verify=True)
    assert [one.kind for one in result.unrepeatable] == ["random"]
    assert result.verified is not None
    assert result.verified.agrees


def test_numbers_without_effect_are_not_random() -> None:
    for model in (Chooses(lambda: 1 + random.random()), nn.Linear(4, 4), nn.Dropout()):
        assert find_unrepeatable(model, (X,)) == []


def test_buffers_of_the_model_are_put_back_between_the_runs() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return x + self.steps + 0 * torch.rand(1)

    model = Counts()
    assert [one.kind for one in find_unrepeatable(model, (X,))] == ["buffer"]
    assert model.get_buffer("steps") == 0


def test_a_model_that_counts_its_runs_does_not_compute_otherwise_with_a_mask() -> None:
    class Counts(nn.Module):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return x * self.runs

    assert [one.kind for one in find_unrepeatable(Counts(), (X,))] == ["state"]


def test_a_model_whose_result_depends_on_earlier_runs_is_a_warning_in_python(tmp_path: Path) -> None:
    class Averages(nn.Module):
        mean = torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return x - self.mean

    with pytest.warns(LimitedFileWarning, match="state: output; the file always computes what a first run does"):
        export(Averages(), (X,), tmp_path / "x.onnx")


@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("padded", [True, False])
def test_the_fused_encoder_is_told_of_with_a_mask_that_hides_nothing_too(padded: bool, length: int) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.tensor([[False] * length, [False] * (length - 1) + [padded]])
    found = find_unrepeatable(model, {"src": torch.rand(2, length, 8), "src_key_padding_mask": mask})
    assert [one.kind for one in found] == ["fused"]
    assert not find_unrepeatable(model, {"src": torch.rand(2, length, 8)})
