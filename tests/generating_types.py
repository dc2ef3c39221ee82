"""Types of models that generate, tiny and random: the settings of each, for ``benchmarks/generating.py``.

Over 400 lines because it is a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LINEAR = {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
STATES: Mapping[str, Mapping[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 4, "expand": 2},
    "FalconMamba": {"state_size": 8},
    "Jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
        **MOE,
    },
    "RecurrentGemma": {
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": 16,
        "num_key_value_heads": 1,
    },
    "Rwkv": {"attention_hidden_size": 32},
    "Bamba": {"attn_layer_indices": [1], **MAMBA2},
    "Zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "Zamba2": {
        "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 4,
        "use_mamba_kernels": False,
        "num_mem_blocks": 1,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "num_key_value_heads": 4,
    },
    "FalconH1": {"mamba_d_ssm": 64, **MAMBA2},
    "NemotronH": {
        "layers_block_type": ["mamba", "attention", "mamba"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 4,
        "use_mamba_kernels": False,
    },
    "GraniteMoeHybrid": {
        "layer_types": ["mamba", "attention"],
        "layers_block_type": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
        **MAMBA2,
    },
    "Qwen3Next": {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "shared_expert_intermediate_size": 16,
        **LINEAR,
        **MOE,
    },
    "Qwen3_5Text": {"num_hidden_layers": 4, "linear_num_key_heads": 2, **LINEAR},
    "OlmoHybrid": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, **LINEAR},
    "xLSTM": {"hidden_size": 128, "num_heads": 2, "num_blocks": 2, "chunk_size": 16},
    "MiniMax": {
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **MOE},
}
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Mixtral": {"num_local_experts": 2},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": dict(MOE),
    "Gemma": {},
    "Gemma2": {"sliding_window": 8},
    "Gemma3Text": {"sliding_window": 8},
    "Phi": {},
    "Phi3": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 8},
    "GPTNeoX": {},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "GPTBigCode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "Falcon": {"alibi": True, "new_decoder_architecture": False},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "CodeGen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "Olmo": {},
    "Olmo2": {},
    "Cohere": {},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 8},
    "Granite": {},
    "DeepseekV3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
}


IMAGE = 90
"""The placeholder token."""
UNTIED: Mapping[str, Any] = {"tie_word_embeddings": False}
"""A model whose embeddings are also its last layer repeats its last token while its weights are random."""
TEXT = {**COMMON, **UNTIED}
PAIR = {
    "vocab_size": 99,
    "d_model": 32,
    "max_position_embeddings": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    **UNTIED,
}
T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
    **UNTIED,
}
SOUND = {key: value for key, value in PAIR.items() if key != "max_position_embeddings"}
PATCHED = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 8,
}
LLAMA, CLIP = {"model_type": "llama", **TEXT}, {"model_type": "clip_vision_model", **PATCHED}
SIGLIP = {"model_type": "siglip_vision_model", **PATCHED}
QWEN = {
    "text_config": {
        **TEXT,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    },
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
PATCHES = {"depth": 1, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
PIXELS = {"pixel_values": (1, 3, 16, 16)}
GRID: Mapping[str, Any] = {"pixel_values": (16, 96), "image_grid_thw": np.array([[1, 4, 4]])}
SIZED: Mapping[str, Any] = {"pixel_values": (1, 3, 16, 16), "image_sizes": np.array([[16, 16]])}


@dataclass(frozen=True)
class Case:
    """A type of models with an encoder, or that takes images or sound."""

    name: str
    """Of the class, and of its configuration, without their ends."""
    settings: Mapping[str, Any]
    beside: Mapping[str, Any] = field(default_factory=dict)
    """What belongs to a prompt besides tokens: shapes of random numbers, or arrays."""
    placeholders: int | None = None
    """The placeholder tokens of a prompt; ``None``: it has no tokens."""
    types: str = ""
    """The input that says of each token whether it is text: 1 for placeholders."""
    given: Sequence[str] = ()
    """The inputs of an example that `export` cannot make."""
    ending: str = "ForConditionalGeneration"


def vision_pair(encoder: str, settings: Mapping[str, Any], decoder: str, of_decoder: Mapping[str, Any]) -> Any:
    first, second = (
        getattr(transformers, f"{kind}Config")(**own) for kind, own in ((encoder, settings), (decoder, of_decoder))
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(first, second)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, 2
    return transformers.VisionEncoderDecoderModel(config)


GPT2 = {**UNTIED, "vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
TROCR = {
    "vocab_size": 99,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    **UNTIED,
}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
PAIRS: Mapping[str, tuple[Any, ...]] = {
    "TrOCR": ("ViT", PATCHED, "TrOCR", TROCR),
    "ViT-GPT2": ("ViT", PATCHED, "GPT2", GPT2),
    "Donut": ("DonutSwin", SWIN, "MBart", {**PAIR, "is_decoder": True}),
}
FLATTENED = np.random.default_rng(1).standard_normal((1, 6, 50)).astype(np.float32)
FLATTENED[..., 0], FLATTENED[..., 1] = np.arange(6) // 3 + 1, np.arange(6) % 3 + 1
MLLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 4,
    "intermediate_size": 64,
    "vision_output_dim": 64,
    "image_size": 16,
    "patch_size": 8,
    "max_num_tiles": 1,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]],
}
IDEFICS = {"vision_config": PATCHED, "text_config": LLAMA, "image_token_id": IMAGE, "scale_factor": 1}
MORE: Mapping[str, Case] = {
    "T5": Case("T5", T5, placeholders=0),
    "MT5": Case("MT5", T5, placeholders=0),
    "BART": Case("Bart", PAIR, placeholders=0),
    "MBart": Case("MBart", PAIR, placeholders=0),
    "Pegasus": Case("Pegasus", PAIR, placeholders=0),
    "Marian": Case("Marian", PAIR, placeholders=0, ending="MTModel"),
    "M2M100": Case("M2M100", PAIR, placeholders=0),
    "T5Gemma": Case("T5Gemma", {"encoder": TEXT, "decoder": TEXT, "vocab_size": 99, **UNTIED}, placeholders=0),
    "Whisper": Case(
        "Whisper",
        {
            **PAIR,
            "num_mel_bins": 8,
            "max_source_positions": 50,
            "max_target_positions": 64,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        {"input_features": (1, 8, 100)},
    ),
    "Moonshine": Case(
        "Moonshine",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
            "encoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "pad_token_id": 0,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": 4,
            **UNTIED,
        },
        {"input_values": (1, 2000)},
    ),
    "Speech2Text": Case(
        "Speech2Text",
        {
            **SOUND,
            "num_conv_layers": 2,
            "conv_channels": 16,
            "input_feat_per_channel": 8,
            "max_source_positions": 100,
            "max_target_positions": 64,
        },
        {"input_features": (1, 40, 8)},
    ),
    "TrOCR": Case("", {}, PIXELS),
    "ViT-GPT2": Case("", {}, PIXELS),
    "Donut": Case("", {}, PIXELS),
    "Pix2Struct": Case(
        "Pix2Struct",
        {
            "text_config": {
                "vocab_size": 99,
                "hidden_size": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 4,
                "decoder_start_token_id": 1,
                "pad_token_id": 0,
                "eos_token_id": 2,
            },
            "vision_config": {
                "hidden_size": 32,
                "patch_embed_hidden_size": 48,
                "d_ff": 64,
                "d_kv": 8,
                "seq_len": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            },
        },
        {"flattened_patches": FLATTENED},
        given=("flattened_patches",),
    ),
    "BLIP": Case("Blip", {"text_config": {**TEXT, "encoder_hidden_size": 32}, "vision_config": PATCHED}, PIXELS, 0),
    "GIT": Case(
        "Git",
        {
            **{key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")},
            "vision_config": PATCHED,
        },
        PIXELS,
        0,
        ending="ForCausalLM",
    ),
    "LLaVA": Case(
        "Llava",
        {"vision_config": CLIP, "text_config": LLAMA, "image_token_index": IMAGE, "image_seq_length": 4},
        PIXELS,
        4,
    ),
    "LLaVA-NeXT": Case(
        "LlavaNext",
        {
            "vision_config": CLIP,
            "text_config": LLAMA,
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[16, 16]],
            "image_seq_length": 4,
        },
        {"pixel_values": (1, 2, 3, 16, 16), "image_sizes": np.array([[16, 16]])},
        10,
        given=("pixel_values", "image_sizes"),
    ),
    "Qwen2-VL": Case(
        "Qwen2VL",
        {**QWEN, "vision_config": {**PATCHES, "embed_dim": 32, "mlp_ratio": 2}},
        GRID,
        4,
        "mm_token_type_ids",
        ("image_grid_thw",),
    ),
    "Qwen2.5-VL": Case(
        "Qwen2_5_VL",
        {
            **QWEN,
            "vision_config": {
                **PATCHES,
                "intermediate_size": 64,
                "out_hidden_size": 32,
                "window_size": 16,
                "fullatt_block_indexes": [0],
            },
        },
        GRID,
        4,
        "mm_token_type_ids",
        ("image_grid_thw",),
    ),
    "Qwen3-VL": Case(
        "Qwen3VL",
        {
            **QWEN,
            "vision_config": {
                **PATCHES,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
        GRID,
        4,
        "mm_token_type_ids",
        ("image_grid_thw",),
    ),
    "PaliGemma": Case(
        "PaliGemma",
        {
            "vision_config": SIGLIP,
            "text_config": {"model_type": "gemma", **TEXT},
            **UNTIED,
            "image_token_index": IMAGE,
            "projection_dim": 32,
            "hidden_size": 32,
            "vocab_size": 99,
        },
        {**PIXELS, "token_type_ids": 0},
        4,
    ),
    "Gemma3": Case(
        "Gemma3",
        {
            "vision_config": SIGLIP,
            "text_config": {**TEXT, "sliding_window": 8},
            **UNTIED,
            "image_token_index": IMAGE,
            "mm_tokens_per_image": 4,
            "boi_token_index": 91,
            "eoi_token_index": 92,
        },
        PIXELS,
        4,
        "token_type_ids",
    ),
    "Idefics3": Case("Idefics3", IDEFICS, {"pixel_values": (1, 1, 3, 16, 16)}, 4),
    "SmolVLM": Case("SmolVLM", IDEFICS, {"pixel_values": (1, 1, 3, 16, 16)}, 4),
    "Mistral3": Case(
        "Mistral3",
        {
            "vision_config": {"model_type": "pixtral", **PATCHED, "patch_size": 4},
            "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            **UNTIED,
        },
        SIZED,
        4,
        given=("pixel_values", "image_sizes"),
    ),
    "Mllama": Case(
        "Mllama",
        {
            "vision_config": MLLAMA,
            "text_config": {
                **{key: value for key, value in TEXT.items() if key != "head_dim"},
                "num_hidden_layers": 3,
                "cross_attention_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "image_token_index": IMAGE,
        },
        {
            "pixel_values": (1, 1, 1, 3, 16, 16),
            "aspect_ratio_ids": np.array([[1]]),
            "aspect_ratio_mask": np.array([[[1]]]),
            "cross_attention_mask": 1,
        },
        1,
        given=("input_ids", "pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"),
    ),
    "InternVL": Case(
        "InternVL",
        {
            "vision_config": {**PATCHED, "image_size": [16, 16], "patch_size": [8, 8]},
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_id": IMAGE,
            **UNTIED,
            "image_seq_length": 1,
            "downsample_ratio": 0.5,
        },
        PIXELS,
        1,
    ),
    "Voxtral": Case(
        "Voxtral",
        {
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_mel_bins": 8,
                "max_source_positions": 16,
            },
            "text_config": LLAMA,
            "audio_token_id": IMAGE,
        },
        {"input_features": (1, 8, 32)},
        4,
    ),
}


def build(name: str) -> Any:
    """A tiny model with random weights, large enough that its tokens differ."""
    torch.manual_seed(0)
    if name in PAIRS:
        model = vision_pair(*PAIRS[name])
    elif name in MORE:
        case = MORE[name]
        config = getattr(transformers, f"{case.name}Config")(**case.settings)
        model = getattr(transformers, f"{case.name}{case.ending}")(config)
    else:
        kind = getattr(transformers, f"{name}Config")
        accepted = kind().to_dict()
        settings = {key: value for key, value in COMMON.items() if key in accepted}
        config = kind(**settings | dict({**STATES, **DECODERS}.get(name, {})))
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.eval().parameters():
            if parameter.dim() > 1 and parameter.std() < 0.05:
                parameter.mul_(6)
            elif parameter.numel() == 1 and not parameter.any():
                parameter.fill_(0.7)  # a gate that is closed until it is trained
    return model
