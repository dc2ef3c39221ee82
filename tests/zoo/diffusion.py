# ruff: noqa: E501
"""Parts of diffusers: denoisers, autoencoders, adapters, made small."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from zoo import Built, Case, floats, ids

T = torch.tensor([3])
LATENT, TEXT, WIDE = floats(1, 4, 8, 8), floats(1, 5, 16), floats(1, 5, 32)
UNET = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 16,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 2,
}  # fmt: skip
VAE = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
DOWN2, UP2 = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
IDS = torch.zeros(16, 3)


def _of(name: str, inputs: dict[str, Any], **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import diffusers

        torch.manual_seed(0)
        return getattr(diffusers, name)(**options), inputs

    return build


BUILDS: dict[str, Callable[[], Built]] = {
    "unet-2d": _of(
        "UNet2DModel", {"sample": floats(1, 3, 16, 16), "timestep": T}, block_out_channels=(8, 16), layers_per_block=1,
        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, sample_size=16,
    ),
    "unet-2d-scalar-step": _of(
        "UNet2DModel", {"sample": floats(1, 3, 16, 16), "timestep": 7, "return_dict": False}, block_out_channels=(8, 16),
        layers_per_block=1, norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, sample_size=16,
    ),
    "unet-1d": _of(
        "UNet1DModel", {"sample": floats(1, 4, 32), "timestep": T}, sample_size=32, in_channels=4, out_channels=4,
        extra_in_channels=64, block_out_channels=(32, 32, 64), time_embedding_type="fourier",
    ),
    "unet-condition": _of(
        "UNet2DConditionModel", {"sample": LATENT, "timestep": T, "encoder_hidden_states": TEXT}, **UNET,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), sample_size=8,
    ),
    "unet-added-conditions": _of(
        "UNet2DConditionModel",
        {
            "sample": LATENT, "timestep": T, "encoder_hidden_states": TEXT,
            "added_cond_kwargs": {"text_embeds": floats(1, 16), "time_ids": torch.ones(1, 6)},
        },
        **UNET, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), sample_size=8, addition_embed_type="text_time",
        addition_time_embed_dim=4, projection_class_embeddings_input_dim=40,
    ),
    "unet-3d": _of(
        "UNet3DConditionModel", {"sample": floats(1, 4, 3, 8, 8), "timestep": T, "encoder_hidden_states": TEXT},
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    "controlnet": _of(
        "ControlNetModel",
        {"sample": LATENT, "timestep": T, "encoder_hidden_states": TEXT, "controlnet_cond": floats(1, 3, 64, 64)},
        **UNET, conditioning_embedding_out_channels=(8, 8, 8, 8),
    ),
    "vae": _of("AutoencoderKL", {"sample": floats(1, 3, 16, 16)}, **VAE, down_block_types=DOWN2, up_block_types=UP2),
    "vae-asymmetric": _of(
        "AsymmetricAutoencoderKL", {"sample": floats(1, 3, 16, 16)}, down_block_types=DOWN2, up_block_types=UP2,
        down_block_out_channels=(8, 16), up_block_out_channels=(8, 16), norm_num_groups=4,
    ),
    "vae-tiny": _of(
        "AutoencoderTiny", {"sample": floats(1, 3, 16, 16)}, encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1),
    ),
    "vae-dc": _of(
        "AutoencoderDC", {"sample": floats(1, 3, 16, 16)}, latent_channels=4, attention_head_dim=4,
        encoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
    ),
    "vae-video": _of(
        "AutoencoderKLTemporalDecoder", {"sample": floats(2, 3, 16, 16), "num_frames": 2}, block_out_channels=(32,),
        latent_channels=4,
    ),
    "vae-audio": _of(
        "AutoencoderOobleck", {"sample": floats(1, 2, 64)}, encoder_hidden_size=8, downsampling_ratios=[2, 4],
        channel_multiples=[1, 2], decoder_channels=8, decoder_input_channels=4,
    ),
    "vae-wan": _of(
        "AutoencoderKLWan", {"sample": floats(1, 3, 5, 16, 16)}, base_dim=4, z_dim=4, dim_mult=[1, 1],
        num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ),
    "vq": _of(
        "VQModel", {"sample": floats(1, 3, 16, 16)}, **VAE, down_block_types=DOWN2, up_block_types=UP2,
        num_vq_embeddings=16, latent_channels=3,
    ),
    "flux": _of(
        "FluxTransformer2DModel",
        {
            "hidden_states": floats(1, 16, 4), "encoder_hidden_states": TEXT, "pooled_projections": floats(1, 8),
            "timestep": torch.tensor([0.3]), "img_ids": IDS, "txt_ids": torch.zeros(5, 3), "guidance": torch.tensor([2.0]),
        },
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=8, guidance_embeds=True, axes_dims_rope=(4, 2, 2),
    ),
    "sd3": _of(
        "SD3Transformer2DModel",
        {"hidden_states": LATENT, "encoder_hidden_states": TEXT, "pooled_projections": floats(1, 8), "timestep": T},
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=8, pos_embed_max_size=8,
    ),
    "pixart": _of(
        "PixArtTransformer2DModel",
        {
            "hidden_states": LATENT, "encoder_hidden_states": TEXT, "timestep": T,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        num_attention_heads=2, attention_head_dim=8, num_layers=2, cross_attention_dim=16, sample_size=8,
        caption_channels=16, use_additional_conditions=False,
    ),
    "dit": _of(
        "DiTTransformer2DModel", {"hidden_states": LATENT, "timestep": T, "class_labels": ids(10, 1)},
        num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=8, num_embeds_ada_norm=10,
    ),
    "hunyuan-dit": _of(
        "HunyuanDiT2DModel",
        {
            "hidden_states": LATENT, "timestep": torch.tensor([3.0]), "encoder_hidden_states": TEXT, "text_embedding_mask": torch.ones(1, 5).bool(),
            "encoder_hidden_states_t5": floats(1, 6, 16), "text_embedding_mask_t5": torch.ones(1, 6).bool(),
            "image_meta_size": torch.ones(1, 6), "style": torch.zeros(1, dtype=torch.long),
            "image_rotary_emb": (floats(16, 8), floats(16, 8)),
        },
        num_attention_heads=2, attention_head_dim=8, in_channels=4, patch_size=2, sample_size=8, hidden_size=16,
        num_layers=2, cross_attention_dim=16, cross_attention_dim_t5=16, pooled_projection_dim=8, text_len=5,
        text_len_t5=6,
    ),
    "ltx-video": _of(
        "LTXVideoTransformer3DModel",
        {
            "hidden_states": floats(1, 8, 4), "encoder_hidden_states": TEXT, "timestep": T,
            "encoder_attention_mask": torch.ones(1, 5), "num_frames": 2, "height": 2, "width": 2,
        },
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        num_layers=1, caption_channels=16,
    ),
    "wan": _of(
        "WanTransformer3DModel",
        {"hidden_states": floats(1, 4, 2, 4, 4), "timestep": T, "encoder_hidden_states": TEXT},
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=24, num_layers=1, rope_max_seq_len=16,
    ),
    "cogvideox": _of(
        "CogVideoXTransformer3DModel",
        {"hidden_states": floats(1, 2, 4, 8, 8), "encoder_hidden_states": TEXT, "timestep": T},
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=1, sample_width=8, sample_height=8, sample_frames=5, max_text_seq_length=5,
    ),
    "sana": _of(
        "SanaTransformer2DModel", {"hidden_states": LATENT, "encoder_hidden_states": TEXT, "timestep": T},
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16, sample_size=8,
    ),
    "auraflow": _of(
        "AuraFlowTransformer2DModel", {"hidden_states": LATENT, "encoder_hidden_states": TEXT, "timestep": T},
        sample_size=8, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pos_embed_max_size=64,
    ),
    "lumina2": _of(
        "Lumina2Transformer2DModel",
        {
            "hidden_states": LATENT, "timestep": torch.tensor([0.3]), "encoder_hidden_states": TEXT,
            "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool),
        },
        sample_size=8, in_channels=4, hidden_size=24, num_layers=1, num_refiner_layers=1, num_attention_heads=3,
        num_kv_heads=1, multiple_of=8, axes_dim_rope=(4, 2, 2), axes_lens=(16, 16, 16), cap_feat_dim=16,
    ),
    "stable-audio": _of(
        "StableAudioDiTModel",
        {
            "hidden_states": floats(1, 4, 8), "timestep": torch.tensor([0.3]), "encoder_hidden_states": TEXT,
            "global_hidden_states": floats(1, 1, 12), "rotary_embedding": (floats(9, 4), floats(9, 4)),
        },
        sample_size=8, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        num_key_value_attention_heads=1, out_channels=4, cross_attention_dim=16, time_proj_dim=8,
        global_states_input_dim=12, cross_attention_input_dim=16,
    ),
    "latte": _of(
        "LatteTransformer3DModel", {"hidden_states": floats(1, 4, 2, 8, 8), "timestep": T, "encoder_hidden_states": TEXT},
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=1,
        cross_attention_dim=16, sample_size=8, patch_size=2, num_embeds_ada_norm=100, norm_type="ada_norm_single",
        norm_elementwise_affine=False, caption_channels=16, video_length=2, activation_fn="gelu-approximate",
    ),
    "uvit": _of(
        "UVit2DModel",
        {
            "input_ids": ids(16, 1, 4, 4), "encoder_hidden_states": TEXT, "pooled_text_emb": floats(1, 16),
            "micro_conds": torch.ones(1, 5),
        },
        hidden_size=32, cond_embed_dim=16, micro_cond_encode_dim=2, micro_cond_embed_dim=10, encoder_hidden_size=16,
        vocab_size=20, codebook_size=16, in_channels=16, block_out_channels=16, num_res_blocks=1, block_num_heads=2,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, sample_size=4,
    ),
    "prior": _of(
        "PriorTransformer",
        {"hidden_states": floats(1, 16), "timestep": T, "proj_embedding": floats(1, 16), "encoder_hidden_states": TEXT},
        num_attention_heads=2, attention_head_dim=8, num_layers=1, embedding_dim=16, num_embeddings=5,
    ),
    "qwen-image": _of(
        "QwenImageTransformer2DModel",
        {
            "hidden_states": floats(1, 16, 4), "encoder_hidden_states": TEXT,
            "encoder_hidden_states_mask": torch.ones(1, 5, dtype=torch.long), "timestep": torch.tensor([0.3]),
            "img_shapes": [[(1, 4, 4)]],
        },
        in_channels=4, out_channels=1, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 2, 2),
    ),
    "cogview4": _of(
        "CogView4Transformer2DModel",
        {
            "hidden_states": LATENT, "encoder_hidden_states": TEXT, "timestep": T, "original_size": torch.ones(1, 2),
            "target_size": torch.ones(1, 2), "crop_coords": torch.zeros(1, 2),
        },
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, text_embed_dim=16,
        time_embed_dim=8, condition_dim=4, pos_embed_max_size=8, sample_size=8, rope_axes_dim=(8, 8),
    ),
    "z-image": _of(
        "ZImageTransformer2DModel",
        {"x": [floats(4, 1, 8, 8)], "t": torch.tensor([0.3]), "cap_feats": [floats(5, 16)]},
        in_channels=4, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[8, 4, 4], axes_lens=[64, 32, 32],
    ),
    "adapter": _of("T2IAdapter", {"x": floats(1, 3, 32, 32)}, channels=[8, 8], num_res_blocks=1, downscale_factor=8),
}  # fmt: skip

CONSTANTS = {"lumina2": ("encoder_attention_mask",)}
CASES = [
    Case("diffusers", name, build, CONSTANTS.get(name, ()))
    for name, build in BUILDS.items()
    if importlib.util.find_spec("diffusers") is not None
]
