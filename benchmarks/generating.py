"""Types of models that generate, tiny and random: exported, run by the loop of docs/generating-loop.md, compared.

    OMP_NUM_THREADS=1 python benchmarks/generating.py [TYPE...] [--tokens 24]

Each type is exported to a package. The loop, which knows only the manifest, generates from a batch of three prompts of
different lengths, padded on the left, and from each prompt alone; the tokens have to be those of `generate`. A row of
the table is a type.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from modelexport import export_package

PAGE = Path(__file__).parent.parent / "docs" / "generating-loop.md"
PROMPTS = (7, 3, 12)
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


def build(name: str, settings: Mapping[str, Any]) -> Any:
    """A tiny model with random weights, large enough that its tokens differ."""
    kind = getattr(transformers, f"{name}Config")
    accepted = kind().to_dict()
    config = kind(**{key: value for key, value in COMMON.items() if key in accepted} | dict(settings))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.std() < 0.05:
                parameter.mul_(6)
    return model


def loop_of_the_page() -> Callable[..., Any]:
    """The code of the page."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names["generate"]


def right(model: Any, inputs: Mapping[str, Any], tokens: int) -> Any:
    """What `generate` gives, ends of text ignored."""
    config = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    model.generation_config = config
    with torch.no_grad():
        made = model.generate(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    return made[:, -tokens:].numpy()


def padded(rows: list[Any]) -> dict[str, Any]:
    longest = max(len(row) for row in rows)
    ids, mask = np.zeros((2, len(rows), longest), np.int64)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def tried(name: str, settings: Mapping[str, Any], tokens: int) -> tuple[str, ...]:
    """A row of the table: the form, padded batch, alone, seconds."""
    generate = loop_of_the_page()
    start = time.perf_counter()
    try:
        model = build(name, settings)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"[:160], "", ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "package"
        try:
            result = export_package(model, path)
        except Exception as error:
            return "refused", " ".join(str(error).split())[:200], "", f"{time.perf_counter() - start:.0f}"
        how = result.manifest.generation
        random = np.random.default_rng(3)
        rows = [random.integers(3, 99, length) for length in PROMPTS]
        alone = all(same(generate, path, model, padded([row]), tokens) for row in rows)
        together = same(generate, path, model, padded(rows), tokens) if how.rows == "padded" else how.rows
        form = "/".join(part.name for part in result.manifest.parts)
        form += " one by one" if how.first in how.one_by_one else ""
        return form, told(together), told(alone), f"{time.perf_counter() - start:.0f}"


def same(generate: Callable[..., Any], path: Path, model: Any, inputs: Mapping[str, Any], tokens: int) -> bool:
    return bool(np.array_equal(generate(path, inputs, tokens), right(model, inputs, tokens)))


def told(value: bool | str) -> str:
    return {True: "equal", False: "DIFFERENT"}.get(value, str(value)) if isinstance(value, bool) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    table = {**STATES, **DECODERS}
    print("| type | parts | padded batch | alone | s |\n|---|---|---|---|---|")
    equal = {"padded batch": 0, "alone": 0}
    for name in arguments.types or table:
        row = tried(name, table.get(name, {}), arguments.tokens)
        equal["padded batch"] += row[1] == "equal"
        equal["alone"] += row[2] == "equal"
        print(f"| {name} | {' | '.join(row)} |", flush=True)
    count = len(arguments.types or table)
    print(
        f"\nOf {count} types, {equal['alone']} give the tokens of `generate` alone, {equal['padded batch']} in a batch."
    )


if __name__ == "__main__":
    main()
