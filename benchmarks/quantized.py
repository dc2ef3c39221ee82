"""An int4 model of ONNX Runtime's own quantizer, through a GPTQ checkpoint: the same codes in the file, equal tokens.

    OMP_NUM_THREADS=1 PYTHONPATH=tests python benchmarks/quantized.py MODEL [--block 32] [--tokens 64] [--keep FOLDER]

MODEL is a folder of transformers with a decoder in float32. It is exported, and ONNX Runtime's quantizer
(``MatMulNBitsQuantizer``, round to nearest, zero points, ``accuracy_level`` 0) makes ``MatMulNBits`` of every linear
layer but the head. Its codes, scales and zero points are written as a GPTQ checkpoint by the writer of the tests, which
`modelexport export` reads. Compared are the bytes of each ``MatMulNBits``, greedy tokens of the two files, and sizes.

Needs what `make test` installs.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import transformers
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import packing
from modelexport.packages.generation_loop import Generator
from modelexport.tagged.package import read_package

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, a fox", "Water boils at")


def export(source: Path, output: Path, *options: str) -> None:
    how = ("--weights", "copy", *options)  # onnx refuses linked files
    command = [sys.executable, "-m", "modelexport", "export", str(source), "-o", f"{output}/", *how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)


def quantized(path: Path, block: int, output: Path) -> dict[str, list[np.ndarray]]:
    """Quantize a file whose weights are transposed at run time; layer to codes, scales and zero points."""
    model = onnx.load(path)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    layers, head = {}, next(node for node in model.graph.node if "logits" in node.output)
    for node in [n for n in model.graph.node if n.op_type == "Transpose" and n.input[0] in weights]:
        if node.output[0] in head.input:
            continue
        array = onnx.numpy_helper.to_array(weights[node.input[0]]).T
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.copy(), node.output[0]))
        names = {p.key: p.value for p in weights[node.input[0]].metadata_props}["modelexport.parameter"]
        layers[node.output[0]] = json.loads(names)[0].removesuffix(".weight")
        model.graph.node.remove(node)
    maker = MatMulNBitsQuantizer(model, block_size=block, accuracy_level=0)
    logging.disable(logging.INFO)
    maker.process()
    made = maker.model.model
    onnx.save(made, output, save_as_external_data=True, location=f"{output.name}.data")
    arrays = arrays_of(onnx.load(output))
    return {layers[name.split("_Q")[0]]: parts for name, parts in arrays.items()}


def arrays_of(model: onnx.ModelProto, called: bool = False) -> dict[str, list[np.ndarray]]:
    """Each ``MatMulNBits`` by the name of its codes, or by its call, to its codes, scales and zero points."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {}
    for node in [n for n in model.graph.node if n.op_type == "MatMulNBits"]:
        name = {p.key: p.value for p in node.metadata_props}["modelexport.call"] if called else node.input[1]
        found[name] = [onnx.numpy_helper.to_array(weights[given]) for given in node.input[1:4]]
    return found


def plain(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> packing.Plain:
    rows, blocks, half = codes.shape
    numbers = np.stack([codes & 15, codes >> 4], axis=3).reshape(rows, -1)
    zeros = zeros.reshape(rows, -1)
    zeros = np.stack([zeros & 15, zeros >> 4], axis=2).reshape(rows, -1)[:, :blocks]
    return packing.Plain(numbers, scales.reshape(rows, blocks), zeros, np.arange(blocks).repeat(half * 2), 4)


def main(source: Path, block: int, tokens: int, folder: Path) -> None:
    export(source, folder / "float", "--no-check")
    theirs = quantized(folder / "float" / "decode.onnx", block, folder / "quantized.onnx")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": block, "desc_act": False, "sym": False}

    def pack(layer: str, _: np.ndarray) -> Any:
        made = plain(*theirs[layer])
        return made, packing.gptq(made), {}

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    packing.write(folder / "gptq", model, settings, pack)
    export(folder / "gptq", folder / "package")

    ours = arrays_of(onnx.load(folder / "package" / "decode.onnx"), called=True)
    same = [[a.tobytes() == b.tobytes() for a, b in zip(ours[name], theirs[name], strict=True)] for name in theirs]
    codes, scales, zeros = (sum(one) for one in zip(*same, strict=True))
    print(f"{len(theirs)} layers, {len(ours)} in the file; equal bytes: codes {codes}, scales {scales}, zeros {zeros}")

    package = read_package(folder / "package")
    assert package.manifest.generation is not None
    files = (package.files, {"decode": folder / "quantized.onnx"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    texts = [tokenizer(prompt, return_tensors="np") for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        mine, other = (list(Generator(one, package.manifest.generation).steps(dict(text), tokens)) for one in files)
        equal = sum(a.tokens[0] == b.tokens[0] for a, b in zip(mine, other, strict=True))
        off = max(float(np.abs(a.logits - b.logits).max()) for a, b in zip(mine, other, strict=True))
        words = len({int(step.tokens[0]) for step in mine})
        print(f"{prompt!r}: {equal} of {tokens} tokens equal, {words} different ones; logits at most {off:.1e} apart")

    for what in ("gptq", "package"):
        sizes = {file.name: file.stat().st_size / 1e6 for file in sorted((folder / what).iterdir())}
        print(f"{what}: {', '.join(f'{name} {size:.1f} MB' for name, size in sizes.items() if size > 1)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--keep", type=Path, help="a folder for everything that is made; by default a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(given.model, given.block, given.tokens, given.keep or Path(temporary))
