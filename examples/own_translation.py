"""An operator of torch.library that only its author can translate: export it yourself, then adopt the file."""

import os
from pathlib import Path

import torch
from onnxscript import opset18 as op
from torch import nn

import modelexport

Path("own_translation").mkdir(exist_ok=True)
os.chdir("own_translation")  # the files below are written here


@torch.library.custom_op("acme::scaled_tanh", mutates_args=())
def scaled_tanh(x: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * torch.tanh(x)


scaled_tanh.register_fake(lambda x, scale: torch.empty_like(x))


def translated(x, scale=1.0):
    return op.Mul(op.Tanh(x), scale)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Activation(), nn.Linear(8, 2))

    def forward(self, x):
        return self.inner(x)


class Activation(nn.Module):
    def forward(self, x):
        return scaled_tanh(x, 2.0)


table = {torch.ops.acme.scaled_tanh.default: translated}
x = torch.randn(3, 8)
program = torch.onnx.export(Net().eval(), (x,), dynamo=True, custom_translation_table=table, verbose=False)
modelexport.adopt(program, "net.onnx")
for view in modelexport.load("net.onnx").values():
    if view.own_nodes:
        print(view.address, *(node.op_type for node in view.own_nodes))
