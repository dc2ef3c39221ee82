"""Families of timm and torchvision: their smallest members, or a member made smaller."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

import models
from zoo import Built, Case, floats

TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 64},
    "botnet26t_256": {"img": 256},
    "cait_xxs24_224": {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 64},
    "coat_tiny": {"img": 224},
    "convit_tiny": {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 64},
    "convmixer_768_32": {"img": 64},
    "convnextv2_atto": {"img": 64},
    "crossvit_tiny_240": {"img": 240},
    "cspresnet50": {"img": 64},
    "davit_tiny": {
        "depths": (1, 1, 1, 1),
        "embed_dims": (16, 32, 64, 128),
        "num_heads": (1, 2, 4, 8),
        "num_groups": None,
        "img": 64,
    },
    "densenet121": {"growth_rate": 8, "block_config": (2, 2, 2), "img": 64},
    "dla34": {"img": 64},
    "edgenext_xx_small": {"img": 64},
    "efficientformer_l1": {"img": 224},
    "efficientnet_lite0": {"img": 64},
    "eva02_tiny_patch14_224": {"depth": 2, "img": 224},
    "fastvit_t8": {"img": 64},
    "focalnet_tiny_srf": {"img": 64},
    "gcvit_xxtiny": {"img": 224},
    "ghostnetv2_100": {"img": 64},
    "hgnet_tiny": {"img": 64},
    "hiera_tiny_224": {"img": 224},
    "hrnet_w18_small": {"img": 64},
    "levit_128s": {"img": 224},
    "maxvit_rmlp_pico_rw_256": {"img": 256},
    "mixer_s32_224": {"img": 224},
    "mobilenetv4_conv_small": {"img": 64},
    "mobilevitv2_050": {"img": 64},
    "mvitv2_tiny": {"img": 224},
    "nfnet_l0": {"img": 64},
    "pit_ti_224": {"img": 224},
    "poolformer_s12": {"img": 64},
    "pvt_v2_b0": {"img": 64},
    "regnety_002": {"img": 64},
    "repvit_m0_9": {"img": 64},
    "resnest14d": {"img": 64},
    "resnetv2_50x1_bit": {"img": 64},
    "rexnet_100": {"img": 64},
    "sequencer2d_s": {"layers": (1, 1, 1, 1), "img": 224},
    "swinv2_tiny_window8_256": {"depths": (1, 1, 1, 1), "embed_dim": 24, "img_size": 128},
    "swin_tiny_patch4_window7_224": {"depths": (2, 1, 1, 1), "embed_dim": 24, "img_size": 112},
    "tnt_s_patch16_224": {"depth": 2, "img": 224},
    "twins_pcpvt_small": {"depths": (1, 1, 1, 1), "img": 64},
    "visformer_tiny": {"img": 224},
    "vit_relpos_small_patch16_224": {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 64},
    "samvit_base_patch16": {
        "depth": 2,
        "embed_dim": 32,
        "num_heads": 2,
        "img_size": 64,
        "global_attn_indexes": (1,),
        "window_size": 2,
    },
    "volo_d1_224": {"img": 224},
    "xcit_nano_12_p16_224": {"img": 64},
    "inception_next_tiny": {"depths": (1, 1, 1, 1), "img": 64},
    "mambaout_femto": {"img": 64},
}
"""Name to options; ``img`` is the edge of an image where the model takes any."""

TORCHVISION: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "alexnet": ({"num_classes": 4}, (2, 3, 64, 64)),
    "deeplabv3_mobilenet_v3_large": ({"weights_backbone": None}, (2, 3, 64, 64)),
    "fcn_resnet50": ({"weights_backbone": None, "num_classes": 3}, (1, 3, 64, 64)),
    "googlenet": ({"init_weights": True}, (2, 3, 64, 64)),
    "inception_v3": ({"init_weights": True}, (2, 3, 96, 96)),
    "lraspp_mobilenet_v3_large": ({"weights_backbone": None}, (2, 3, 64, 64)),
    "maxvit_t": ({}, (1, 3, 224, 224)),
    "r2plus1d_18": ({}, (1, 3, 4, 32, 32)),
    "raft_small": ({}, (1, 3, 128, 128)),
    "s3d": ({}, (1, 3, 16, 224, 224)),
    "shufflenet_v2_x0_5": ({}, (2, 3, 64, 64)),
    "squeezenet1_1": ({}, (2, 3, 64, 64)),
    "swin_v2_t": ({}, (1, 3, 64, 64)),
    "vit_b_32": ({}, (1, 3, 224, 224)),
}


def _timm(name: str, options: dict[str, Any]) -> Callable[[], Built]:
    options = dict(options)
    edge = options.pop("img", None) or options["img_size"]
    return lambda: (models.timm_model(name, **options)(), {"x": floats(2, 3, edge, edge)})


def _torchvision(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> Callable[[], Built]:
    def build() -> Built:
        images = [floats(*shape), floats(*shape).flip(-1)][: 2 if name.startswith("raft") else 1]
        return models.torchvision_model(name, **options)(), tuple(torch.clone(one) for one in images)

    return build


def _mvit() -> Built:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    kernel = [3, 3, 3]
    blocks = [
        MSBlockConfig(1, 16, 32, kernel, kernel, [1, 1, 1], [1, 4, 4]),
        MSBlockConfig(2, 32, 32, kernel, kernel, [1, 2, 2], [1, 2, 2]),
    ]
    options = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
    return MViT((64, 64), 4, blocks, **options), (floats(1, 3, 4, 64, 64),)


CASES = [
    *(
        Case("timm", name, _timm(name, options))
        for name, options in TIMM.items()
        if importlib.util.find_spec("timm") is not None
    ),
    *(
        Case("torchvision", name, _torchvision(name, *made))
        for name, made in TORCHVISION.items()
        if importlib.util.find_spec("torchvision") is not None
    ),
    *([Case("torchvision", "mvit", _mvit)] if importlib.util.find_spec("torchvision") is not None else []),
]
