"""Modules of a user's own that have a model of transformers inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo import Built, Case, floats, ids

TEXT = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
}
SEQ = {
    "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "pad_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip
TOKENS, MASK = ids(40, 2, 9), torch.ones(2, 9, dtype=torch.long)


def pretrained(name: str, **options: Any) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**options)).eval()


class Head(nn.Module):
    """A classifier on a backbone's last layer."""

    def __init__(self, backbone: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.backbone, self.out = backbone, nn.Linear(width, 3)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.backbone(**inputs).last_hidden_state.mean(1))


class Text(Head):
    def forward(self, input_ids, attention_mask):  # type: ignore[override, no-untyped-def]
        return self.out(self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0])


class Pixels(Head):
    def forward(self, x):  # type: ignore[override, no-untyped-def]
        return self.out(self.backbone(pixel_values=x).last_hidden_state.mean(1)[:, :16])


class Maps(Head):
    def forward(self, x):  # type: ignore[override, no-untyped-def]
        return self.out(self.backbone(pixel_values=x).last_hidden_state.mean((-1, -2)))


class Seq(Head):
    def forward(self, input_ids, decoder_input_ids):  # type: ignore[override, no-untyped-def]
        return self.out(self.backbone(input_ids=input_ids, decoder_input_ids=decoder_input_ids).last_hidden_state)


class Wave(Head):
    def forward(self, wave):  # type: ignore[override, no-untyped-def]
        return self.out(self.backbone(wave).last_hidden_state)


class Whole(nn.Module):
    """Gives back all that the model gives, its cache included."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None):  # type: ignore[no-untyped-def]
        return self.model(input_ids, attention_mask=attention_mask, use_cache=True)


class Both(nn.Module):
    """Two towers and their similarity."""

    def __init__(self, text: nn.Module, image: nn.Module) -> None:
        super().__init__()
        self.text, self.image, self.scale = text, image, nn.Parameter(torch.tensor(2.0))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        one = self.text(input_ids, attention_mask=attention_mask).pooler_output
        other = self.image(pixels).pooler_output
        return self.scale.exp() * nn.functional.normalize(one, dim=-1) @ nn.functional.normalize(other, dim=-1).T


class Projected(nn.Module):
    """Features go into a language model in place of tokens' embeddings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.project, self.model = nn.Linear(6, 16), model

    def forward(self, features: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        embeds = torch.cat([self.project(features), self.model.get_input_embeddings()(input_ids)], 1)
        return self.model(inputs_embeds=embeds).last_hidden_state


def _case(
    kind: Callable[..., nn.Module], backbone: Callable[[], nn.Module], *inputs: Any, **named: Any
) -> Callable[[], Built]:
    return lambda: (kind(backbone()), named or inputs)


def _text(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: pretrained(name, **options)


PADDED = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
MOE = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

BUILDS: dict[str, Callable[[], Built]] = {
    "bert": _case(Text, _text("BertModel", **TEXT), TOKENS, PADDED),
    "bert-full-mask": _case(Text, _text("BertModel", **TEXT), TOKENS, MASK),
    "llama": _case(Text, _text("LlamaModel", **DECODER), TOKENS, PADDED),
    "llama-cache": _case(Whole, _text("LlamaForCausalLM", **DECODER), TOKENS, PADDED),
    "llama-embeds": _case(Projected, _text("LlamaModel", **DECODER, use_cache=False), floats(2, 3, 6), TOKENS),
    "gpt2-cache": _case(
        Whole,
        _text("GPT2LMHeadModel", vocab_size=40, n_positions=40, n_embd=16, n_layer=2, n_head=2),
        TOKENS,
        PADDED,
    ),
    "t5": _case(Seq, _text("T5Model", **SEQ), TOKENS, ids(40, 2, 5)),
    "mixtral": _case(Text, _text("MixtralModel", **DECODER, num_local_experts=4), TOKENS, PADDED),
    "qwen3-moe": _case(Text, _text("Qwen3MoeModel", **MOE), TOKENS, PADDED),
    "gemma3": _case(Text, _text("Gemma3TextModel", **DECODER, sliding_window=4), TOKENS, PADDED),
    "vit": _case(Pixels, _text("ViTModel", **IMAGE), floats(2, 3, 32, 32)),
    "swin": _case(
        Pixels,
        _text("SwinModel", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
        floats(2, 3, 32, 32),
    ),
    "convnext": _case(
        Maps, _text("ConvNextModel", hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1]), floats(2, 3, 64, 64)
    ),
    "towers": lambda: (
        Both(pretrained("BertModel", **TEXT), pretrained("ViTModel", **IMAGE)),
        (TOKENS, PADDED, floats(2, 3, 32, 32)),
    ),
    "mamba": _case(
        Whole, _text("MambaModel", vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=2), TOKENS
    ),
    "wav2vec2": _case(
        Wave,
        _text(
            "Wav2Vec2Model",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            conv_dim=(8, 8),
            conv_kernel=(10, 3),
            conv_stride=(5, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        ),
        floats(2, 1000),
    ),
}

CASES = [Case("with transformers inside", name, build) for name, build in BUILDS.items()]
