"""Models with rows that are masked whole: texts padded at the left, or without a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import decoders
from modelexport import export
from truth import wrong

IDS = torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(1))
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
EMPTY = LEFT.clone()
EMPTY[1] = 0
SMALL = {**decoders.SMALL, "vocab_size": 64}
TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PARTS = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48,
         "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}  # fmt: skip


class Output(nn.Module):
    """The first tensor that a model of transformers returns for ids and a mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        options = {} if isinstance(self.model, transformers.BertModel) else {"use_cache": False}
        found: torch.Tensor = self.model(input_ids=ids, attention_mask=mask, **options)[0]
        return found


CASES: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {
    "llama": (lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL)), LEFT),
    "qwen2": (lambda: transformers.Qwen2Model(transformers.Qwen2Config(**SMALL)), LEFT),
    "gpt2": (
        lambda: transformers.GPT2Model(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
        LEFT,
    ),
    "bert": (lambda: transformers.BertModel(transformers.BertConfig(**TEXT)), EMPTY),
    "bart": (lambda: transformers.BartModel(transformers.BartConfig(**PARTS)), EMPTY),
    "t5": (lambda: transformers.T5EncoderModel(transformers.T5Config(vocab_size=64, d_model=32, d_ff=48)), EMPTY),
}


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("case", CASES)
def test_rows_without_keys(case: str, opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, mask = CASES[case]
    model = Output(build()).eval()
    export(model, (IDS, torch.ones_like(mask)), tmp_path / "m.onnx", frontend="dynamo", opset=opset, check=False)
    assert torch.isfinite(model(IDS, mask)).all()
    assert wrong(tmp_path / "m.onnx", model, (IDS, mask)) == ""
