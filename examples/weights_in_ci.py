"""Weights updated in CI: the export is made and checked once; each training run only brings new numbers.

The job needs neither the model's code nor an export: `update_weights` and ONNX Runtime are enough.
"""

import os
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from safetensors.torch import save_file
from torch import nn

import modelexport

Path("weights_in_ci").mkdir(exist_ok=True)
os.chdir("weights_in_ci")  # the files below are written here


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()


# Once, by whoever changes the model's code.
x = torch.randn(4, 8)
modelexport.export(make_model(0), (x,), "release.onnx", verify=True)

# After each training run.
trained = make_model(1)
save_file(trained.state_dict(), "trained.safetensors")
modelexport.update_weights("release.onnx", "trained.safetensors", "next.onnx")

# The check: the graph is the same, the outputs are those of the trained model.
comparison = modelexport.compare("release.onnx", "next.onnx")
print("same calls and operators:", not comparison.differs)
session = onnxruntime.InferenceSession("next.onnx")
(found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
with torch.no_grad():
    print("outputs of the trained model:", np.allclose(found, trained(x), atol=1e-5))

# A checkpoint that does not fit is one line, and no file.
save_file({"0.weight": torch.zeros(8, 8)}, "wrong.safetensors")
try:
    modelexport.update_weights("release.onnx", "wrong.safetensors", "wrong.onnx")
except modelexport.errors.ModelExportError as error:
    print(error)
