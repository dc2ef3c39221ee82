"""What of a PyTorch model one finds again in the ONNX file of each exporter: the table of the README.

    OMP_NUM_THREADS=1 python benchmarks/alternatives.py

Two small models with random weights: a Llama of two layers, and an ALBERT whose one layer runs three times (which the
model builder of onnxruntime-genai does not know). Each export runs in a process of its own. Nothing is asked of a file
but texts: a node names a module if its name or metadata have the module's path, with dots or with slashes; the longest
counts. A call is told apart from others of its module if the metadata that say where its nodes come from differ. A
`state_dict` entry counts if an initializer has its name, or names it in its metadata.

Five minutes on a busy machine.
"""

from __future__ import annotations

import ast
import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import torch
from torch import nn

from modelexport import __version__
from outcomes import measured

TOOLS = {
    "modelexport": "modelexport",
    "torch.onnx": "torch",
    "transformers": "transformers",
    "genai": "onnxruntime-genai",
}
"""Name of an exporter to the package whose version the table gives."""
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 96, "num_hidden_layers": 2}


def make(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    torch.manual_seed(0)
    ids = torch.arange(1, 9)[None].repeat(2, 1)
    if name == "llama":
        config = transformers.LlamaConfig(
            **SIZES, num_key_value_heads=2, use_cache=False, bos_token_id=1, eos_token_id=2
        )
        model: nn.Module = transformers.LlamaForCausalLM(config)
        inputs = {"input_ids": ids}
    else:
        config = transformers.AlbertConfig(**SIZES | {"num_hidden_layers": 3}, embedding_size=16)
        model, inputs = transformers.AlbertModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for parameter in model.parameters():  # as trained: no two parameters are equal
        nn.init.normal_(parameter)
    return model.eval(), inputs


def export(tool: str, name: str, path: Path) -> None:
    """In a process of its own."""
    model, inputs = make(name)
    if tool == "modelexport":
        import modelexport

        modelexport.export(model, inputs, path)
    elif tool == "torch.onnx":
        program = torch.onnx.export(model, (), kwargs=dict(inputs), dynamo=True, verbose=False)
        assert program is not None
        program.save(str(path))
    elif tool == "transformers":
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

        onnx_ir.save(OnnxExporter().export(model, inputs, OnnxConfig(dynamic=False)).program, path)
    else:
        built_by_genai(model, path)


def built_by_genai(model: Any, path: Path) -> None:
    import onnxruntime_genai
    import tokenizers
    import transformers

    folder = path.parent / "checkpoint"
    model.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{index}": index for index in range(96)}, unk_token="w0")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="w0")
    fast.save_pretrained(folder)
    models = Path(onnxruntime_genai.__file__).parent / "models"
    options = ["-m", str(folder), "-o", str(path.parent), "-p", "fp32", "-e", "cpu", "-c", str(folder)]
    subprocess.run([sys.executable, str(models / "builder.py"), *options], check=True, cwd=models, stdout=sys.stderr)
    (path.parent / "model.onnx").rename(path)


def texts(element: Any) -> list[str]:
    return [element.name, *(entry.value for entry in element.metadata_props)]


def paths_of(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if path and not isinstance(module, nn.ModuleList)}


def innermost(node: onnx.NodeProto, paths: set[str]) -> str:
    """The longest module path in a node's texts; empty if there is none."""
    words = {re.sub(r"[/.]+", ".", word).strip(".") for text in texts(node) for word in re.findall(r"[\w./]+", text)}
    found = {""}
    for word in words:
        parts = word.split(".")
        found |= paths & {".".join(parts[a:b]) for a in range(len(parts)) for b in range(a + 1, len(parts) + 1)}
    return max(found, key=len)


def measure(tool: str, name: str, folder: Path) -> dict[str, str]:
    _, seconds, _, _ = measured([sys.executable, __file__, tool, name, str(folder / "m.onnx")])
    model, _ = make(name)
    file = onnx.load(folder / "m.onnx")
    nodes = [node for node in file.graph.node if node.op_type != "Constant"]
    paths = paths_of(model)
    named = {innermost(node, paths) for node in nodes} - {""}
    entries = {key for key, _ in model.named_parameters()}
    known = {word for one in file.graph.initializer for text in texts(one) for word in re.findall(r"[\w.]+", text)}
    size = sum(entry.ByteSize() for node in nodes for entry in node.metadata_props) / len(nodes)
    here = {str(Path(torch.__file__).parent.parent), str(Path(__file__).parent)}
    leaks = any(path in text for node in nodes for text in texts(node) for path in here)
    return {
        "nodes": f"{len(nodes)}",
        "modules that nodes name": f"{len(named)} of {len(paths)}",
        "parameters under their name": f"{len(entries & known)} of {len(entries)}",
        "bytes of metadata a node": f"{size:,.0f}",
        "paths of this machine in the file": "yes" if leaks else "no",
        "processor seconds, with imports": f"{seconds:.0f}",
    }


def calls_told_apart(folder: Path) -> str:
    """How many calls of a `Linear` that runs three times have nodes that say so."""
    model, _ = make("albert")
    paths = paths_of(model)
    path = next(p for p, module in model.named_modules() if p.endswith("ffn") and isinstance(module, nn.Linear))
    calls = {
        json.dumps([source(entry) for entry in node.metadata_props])
        for node in onnx.load(folder / "m.onnx").graph.node
        if node.op_type in ("MatMul", "Gemm") and innermost(node, paths) == path
    }
    return f"{len(calls)} of 3"


def source(entry: Any) -> Any:
    """Where a node comes from, if an entry of its metadata says so. The last scope is its own operation's name."""
    if entry.key == "pkg.torch.onnx.name_scopes":
        return ast.literal_eval(entry.value)[:-1]
    return entry.value if entry.key == "modelexport.call" else None


def main() -> None:
    rows: dict[str, list[str]] = {}
    for tool in TOOLS:
        print(tool, "...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(tool, "llama", Path(scratch))
        apart = "model not known"
        if tool != "genai":
            with tempfile.TemporaryDirectory() as scratch:
                measure(tool, "albert", Path(scratch))
                apart = calls_told_apart(Path(scratch))
        for name, figure in (found | {"calls of one module told apart": apart}).items():
            rows.setdefault(name, []).append(figure)
    versions = [importlib.metadata.version(package).partition("+")[0] for package in TOOLS.values()]
    heads = [f"{tool} {version}" for tool, version in zip(TOOLS, [__version__, *versions[1:]], strict=True)]
    print(f"| {datetime.datetime.now(tz=datetime.UTC).date()} | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    for name, figures in rows.items():
        print(f"| {name} | {' | '.join(figures)} |")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        export(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        main()
