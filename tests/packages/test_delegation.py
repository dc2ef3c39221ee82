"""Models whose own ``generate`` lets one of their modules generate are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_states import made

import modelexport
from modelexport.errors import CaptureError


class Captioner(transformers.PreTrainedModel, transformers.GenerationMixin):
    """Changes the prompt, and lets its text decoder generate."""

    config_class = transformers.GPT2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.decoder = transformers.GPT2LMHeadModel(config)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        return self.decoder(input_ids, **others)

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return self.decoder.generate(input_ids=input_ids[:, :-1], **options)


def test_a_model_that_lets_a_module_generate_is_refused_in_a_line(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    with pytest.raises(CaptureError, match=r"its module decoder generates, .* use --parts whole"):
        modelexport.export_package(made(lambda: Captioner(config)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
