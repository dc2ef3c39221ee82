"""Models whose own ``generate`` lets one of their modules generate: a first part prepares what that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_states import made, the_loop
from torch import nn

import modelexport
from decoders import SMALL
from modelexport.errors import CaptureError

SETTINGS = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}


class Captioner(transformers.PreTrainedModel, transformers.GenerationMixin):
    """Encodes images, and its text decoder goes on with a prompt that it cuts to ``kept`` tokens after a first one."""

    config_class = transformers.GPT2Config
    main_input_name = "pixel_values"
    input_modalities = ("image", "text")

    def __init__(self, config: Any, kept: int | None = None) -> None:
        super().__init__(config)
        self.kept = kept
        self.encoder = nn.Conv2d(3, 32, 4, 4)
        self.decoder = transformers.GPT2LMHeadModel(config)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor, attention_mask: Any = None) -> Any:
        states = self.encoder(pixel_values).flatten(2).transpose(1, 2).contiguous()
        return self.decoder(input_ids, attention_mask=attention_mask, encoder_hidden_states=states)

    @torch.no_grad()
    def generate(self, pixel_values: torch.Tensor, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        states = self.encoder(pixel_values).flatten(2).transpose(1, 2).contiguous()
        input_ids[:, 0] = 5
        kept = input_ids.shape[1] - 1 if self.kept is None else self.kept
        mask = None if self.kept or attention_mask is None else attention_mask[:, :kept]
        return self.decoder.generate(
            input_ids=input_ids[:, :kept], attention_mask=mask, encoder_hidden_states=states, **options
        )


def captioner(kept: int | None = None) -> Any:
    config = transformers.GPT2Config(
        **SETTINGS, add_cross_attention=True, bos_token_id=1, eos_token_id=None, tie_word_embeddings=False
    )
    config.image_size, config.num_channels = 8, 3
    return made(lambda: Captioner(config, kept))


@pytest.mark.parametrize("kept", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_the_loop_of_the_page_generates_what_the_model_does(kept: int | None, tmp_path: Path) -> None:
    model = captioner(kept)
    result = modelexport.export_package(model, tmp_path / "out", inputs={"pixel_values": torch.randn(1, 3, 8, 8)})
    assert [part.name for part in result.manifest.parts] == ["encoder", "prefill", "decode"]
    assert "decoder.transformer.h.0.attn" in modelexport.load(tmp_path / "out" / "decode.onnx")
    given = {
        "pixel_values": torch.randn(2, 3, 8, 8),
        "input_ids": torch.randint(6, 60, (2, 7)),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]),
    }
    arrays = {name: one.numpy().copy() for name, one in given.items()}
    right = model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert the_loop()(tmp_path / "out", arrays, 8).tolist() == right[:, -8:].tolist()


class WithEmbeddings(Captioner):
    """Gives its decoder embeddings instead of tokens."""

    def generate(self, pixel_values: torch.Tensor, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        return self.decoder.generate(inputs_embeds=self.decoder.transformer.wte(input_ids), **options)


def test_one_that_takes_no_tokens_is_refused_in_a_line(tmp_path: Path) -> None:
    model = made(lambda: WithEmbeddings(transformers.GPT2Config(**SETTINGS, add_cross_attention=True)))
    with pytest.raises(CaptureError, match=r"its module decoder generate from embeddings.*use --parts whole"):
        modelexport.export_package(model, tmp_path / "out", inputs={"pixel_values": torch.randn(1, 3, 8, 8)})
    assert not (tmp_path / "out").exists()


def test_a_model_that_generates_itself_delegates_nothing() -> None:
    from modelexport.packages.greedy_reference import find_delegation

    model = made(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)))
    assert find_delegation(model, {"input_ids": torch.ones(1, 3, dtype=torch.long)}) is None
