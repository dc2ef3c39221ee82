"""Loading MODEL, as given on the command line, as a module in eval mode."""

from __future__ import annotations

from typing import Literal

import torch

from modelexport.errors import ModelLoadError
from modelexport.files.named_models import BERT_TINY, check_named, named_folder
from modelexport.pytorch.loading.factories import load_from_factory
from modelexport.pytorch.loading.hugging_face import load_hugging_face
from modelexport.pytorch.loading.loaded import LoadedModel


def load_model(
    spec: str | None = None,
    *,
    model_class: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    dtype: str | None = None,
    weights: Literal["memory", "files", "auto"] = "memory",
) -> LoadedModel:
    """Load the module that ``spec`` names, in eval mode. The caller's random state is not changed.

    Args:
        spec: A Hugging Face directory or hub name, ``package:folder``, ``package.module:factory``, ``file.py:factory``,
            or ``bert-tiny``, which is also the meaning of ``None``. A factory returns the module, or the module and its
            inputs: a dict of keyword arguments, or a tuple of positional ones.
        model_class: A class of transformers, which may be an ``Auto`` class, instead of the one that the config names.
        trust_remote_code: Whether Python code from the model's own repository may run.
        seed: The seed of generated weights: those of ``bert-tiny``, of a factory, and those a checkpoint lacks.
        dtype: ``float32``, ``float16``, ...; ``None`` keeps the type of the checkpoint or the factory.
        weights: ``files`` builds the module without weights: it cannot run by itself, and ``LoadedModel.weights`` has
            their places. ``auto`` does so if the checkpoint is in safetensors files of more than 1 GB.

    Raises:
        ModelLoadError: The model does not exist, is damaged, has no weights, needs code that is not trusted, or its
            factory failed.
        WeightsError: With ``weights="files"``, a safetensors file is missing or damaged.
    """
    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ModelLoadError(f"unknown dtype {dtype!r}: give float32, float16 or bfloat16")
    spec = spec or BERT_TINY
    check_named(spec)
    is_code = named_folder(spec) is None and (spec == BERT_TINY or ":" in spec)
    if is_code and model_class is not None:
        raise ModelLoadError(f"--model-class {model_class} needs a Hugging Face directory or hub name, not {spec}")
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        if not is_code:
            return load_hugging_face(spec, model_class, trust_remote_code, dtype, weights)
        if weights == "files":
            raise ModelLoadError(
                f"the weights of {spec} are not in safetensors files: give a Hugging Face directory or hub name"
            )
        loaded = _bert_tiny() if spec == BERT_TINY else load_from_factory(spec)
    loaded.model.eval()
    if dtype is not None:
        loaded.model.to(getattr(torch, dtype))
    return loaded


def _bert_tiny() -> LoadedModel:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30522,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=512,
    )
    return LoadedModel(BertModel(config), None, BERT_TINY, about=f"{BERT_TINY} is an example with random weights")
