"""Two devices: rules by module for one session of ONNX Runtime, or two stages with a session each."""

import json
import os
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

import modelexport

Path("two_devices").mkdir(exist_ok=True)
os.chdir("two_devices")  # the files below are written here


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


x = torch.randn(2, 7, 32)
modelexport.export(Net(), {"x": x}, "net.onnx")
feeds = {"x": x.numpy()}

onnxruntime.set_default_logger_severity(4)  # a device that is not there is an error in its log, and is told below

# One session: ONNX Runtime is told which module goes where, and asked where the nodes went.
placement = modelexport.place("net.onnx", ["gpu: encoder", "cpu: head"])
options = onnxruntime.SessionOptions()
for key, value in placement.session_options()["config_entries"].items():
    options.add_session_config_entry(key, value)
(whole,) = onnxruntime.InferenceSession("net.onnx", options).run(None, feeds)
for call in placement.calls:
    print(call.call, "asked for", call.device, "got", *call.providers)

# Two sessions: cut at a module, each stage with a provider of its own.
modelexport.split("net.onnx", "stages", at=["head"])
for part in json.loads(Path("stages/modelexport.json").read_text())["parts"]:
    stage = onnxruntime.InferenceSession(f"stages/{part['file']}", providers=["CPUExecutionProvider"])
    made = stage.run(part["outputs"], {name: feeds[name] for name in part["inputs"]})
    feeds |= dict(zip(part["outputs"], made, strict=True))
    print(part["file"], ", ".join(part["inputs"]), "->", ", ".join(part["outputs"]))
print("same outputs:", np.allclose(whole, made[0], atol=1e-5))
