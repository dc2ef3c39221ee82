"""A model of one's own with a custom operator: a module becomes one node, whose body runs until a kernel is there."""

import os
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

import modelexport

Path("custom_operator").mkdir(exist_ok=True)
os.chdir("custom_operator")  # the files below are written here


class Norm(nn.Module):
    """Divides by the root mean square."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(Norm(16) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


x = torch.randn(4, 16)
modelexport.export(Net(), {"x": x}, "net.onnx")
operator = modelexport.CustomOperator("com.acme", "FastNorm", keep_body=True)
modelexport.replace("net.onnx", ["class:Norm"], operator, "custom.onnx")

for view in modelexport.load("custom.onnx").values():
    if view.class_name == "Norm":
        (node,) = (node for node in view.nodes if node.domain == "com.acme")
        print(f"{view.address}: {node.domain}:{node.op_type}, with {', '.join(view.parameters)}")
sessions = (onnxruntime.InferenceSession(name) for name in ("net.onnx", "custom.onnx"))
before, after = (session.run(None, {"x": x.numpy()})[0] for session in sessions)
print("same outputs:", np.array_equal(before, after))
