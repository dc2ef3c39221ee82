"""LoRA adapters as PEFT writes them, swapped from run to run in one file, without an export."""

import json
import os
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import modelexport

Path("lora_swap").mkdir(exist_ok=True)
os.chdir("lora_swap")  # the files below are written here

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96, num_hidden_layers=2)).eval()
ids = torch.arange(6)[None]
modelexport.export(model, {"input_ids": ids, "use_cache": False}, "llama.onnx")


def save_adapter(name, rank):
    """What training with PEFT leaves: a configuration, and two matrices for each adapted layer."""
    folder = Path(name)
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    matrices = {}
    for path, module in model.named_modules():
        if path.endswith(("q_proj", "v_proj")):
            matrices[f"base_model.model.{path}.lora_A.weight"] = torch.randn(rank, module.in_features)
            matrices[f"base_model.model.{path}.lora_B.weight"] = torch.randn(module.out_features, rank) / 9
    save_file(matrices, folder / "adapter_model.safetensors")


for name, rank in (("french", 4), ("german", 8)):
    save_adapter(name, rank)
result = modelexport.adapters_as_inputs("llama.onnx", ["french", "german"], "open.onnx")

onnxruntime.set_default_logger_severity(3)  # it warns that optional inputs are not constants
session = onnxruntime.InferenceSession("open.onnx")
logits = {"none": session.run(["logits"], {"input_ids": ids.numpy()})[0]}
for name in ("french", "german"):
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(f"open.{name}.onnx_adapter")
    options.add_active_adapter(adapter)
    logits[name] = session.run(["logits"], {"input_ids": ids.numpy()}, options)[0]
with torch.no_grad():
    print("without an adapter as PyTorch:", np.allclose(logits["none"], model(ids).logits, atol=1e-4))
for name in ("french", "german"):
    modelexport.merge_adapters("llama.onnx", [name], "merged.onnx")
    (merged,) = onnxruntime.InferenceSession("merged.onnx").run(["logits"], {"input_ids": ids.numpy()})
    print(f"{name} as merged:", np.allclose(logits[name], merged, atol=1e-4))
