"""`assert_exports` passes where a file is right, and says otherwise what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from modelexport.errors import UsageError
from modelexport.testing import assert_exports


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Undecided(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.mean() > 0 else x


X = {"x": torch.ones(2, 4)}


def test_a_model_that_exports_gives_the_comparison_of_its_calls(tmp_path: Path) -> None:
    report = assert_exports(Net(), X, dynamic=True)
    assert report["first"].status == "agree"
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_export_fails_with_the_reason() -> None:
    with pytest.raises(
        AssertionError, match=r"^Undecided does not export: the model cannot be exported: .*data-dependent"
    ) as failure:
        assert_exports(Undecided(), X)
    assert failure.value.__suppress_context__, "a test report of hundreds of lines would hide the reason"


def test_a_file_like_an_earlier_one_may_have_other_weights_and_no_other_modules(tmp_path: Path) -> None:
    kept = tmp_path / "net.onnx"
    assert_exports(Net(), X, path=kept)
    assert_exports(Net(), X, like=kept)
    with pytest.raises(AssertionError, match=r"(?s)^the export of Net changed:.*first.weight.*float32\[8, 4\]"):
        assert_exports(Net(8), X, like=kept)


def test_a_file_that_differs_fails_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelexport.exporting import steps

    write = steps.write_files

    def wrong(graph, *rest):  # type: ignore[no-untyped-def]
        (relu,) = [node for node in graph.graph if node.op_type == "Relu"]
        relu.op_type = "Sigmoid"
        return write(graph, *rest)

    monkeypatch.setattr(steps, "write_files", wrong)
    with pytest.raises(AssertionError, match=r"(?s)^the file of Net differs from it:\nfirst diverging: .*differ"):
        assert_exports(Net(), X, check=False)


def test_options_that_do_not_go_together_are_not_a_failure_of_the_model() -> None:
    with pytest.raises(UsageError, match="optimised graph is fused"):
        assert_exports(Net(), X, fuse="ort-cpu", optimized=False)
