"""Small files of every kind that the commands read, made once for all workers: the input of the mutators."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors.numpy import save_file
from torch import nn

from modelexport import export, export_package, load, strip, update_weights
from modelexport.files.safetensors_files import read_header
from modelexport.format import documents, keys
from modelexport.tools.cut.splitting import split


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x)) + x


class Tiny(nn.Module):
    """Two equal blocks, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(12), Block(12)])
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


def tiny() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Tiny(), {"x": torch.rand(2, 12)}


def make_corpus(folder: Path) -> None:
    """Write the files, with descriptive names."""
    model, inputs = tiny()
    tagged = {"frontend": "torchscript", "granularity": "all", "check": False}
    export(model, inputs, folder / "plain.onnx", reference=True, **tagged)
    export(model, inputs, folder / "copied.onnx", weights="copy", **tagged)
    export(model, inputs, folder / "functions.onnx", tags_as="functions", **tagged)
    export(model, inputs, folder / "attributes.onnx", tags_as="attributes", **tagged)
    _link(folder / "plain.onnx", folder / "linked.onnx", folder / "linked.safetensors")
    arrays = {name: tensor.numpy() + 1 for name, tensor in model.state_dict().items()}
    save_file(arrays, folder / "new.safetensors")
    make_adapter(folder / "adapter")
    strip(folder / "attributes.onnx", folder / "flat.onnx")
    (folder / "factory.py").write_text(FACTORY)
    update_weights(folder / "plain.onnx", folder / "new.safetensors", folder / "other.onnx")
    load(folder / "plain.onnx").extract("head", folder / "sub.onnx")
    split(load(folder / "other.onnx"), folder / "old-stages", stages=3)
    export_package(model, folder / "package", inputs=inputs, parts="whole", **tagged)


def make_adapter(folder: Path) -> None:
    """A LoRA adapter for two modules of the model, as PEFT writes it, with a bias of a third."""
    random, pairs = seeded("adapter"), {"blocks.0.inner": (12, 12), "head": (3, 12)}
    arrays = {"base_model.model.blocks.1.inner.bias": np.ones(12, np.float32)}
    for module, (outside, inside) in pairs.items():
        arrays[f"base_model.model.{module}.lora_A.weight"] = random.random((2, inside), np.float32)
        arrays[f"base_model.model.{module}.lora_B.weight"] = random.random((outside, 2), np.float32)
    folder.mkdir()
    save_file(arrays, folder / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(pairs), "bias": "all"}
    options |= {"rank_pattern": {"head": 2}, "alpha_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(options))


FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x, mask=None):
        return self.linear(x)

def make():
    torch.manual_seed(0)
    return Net(), {"x": torch.rand(2, 4)}
"""


def _link(source: Path, target: Path, weights: Path) -> None:
    """A file whose weights are in a safetensors file, as ``--weights link`` writes it."""
    model = onnx.load(source)
    large = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) > 256]
    save_file({tensor.name: numpy_helper.to_array(tensor) for tensor in large}, weights)
    header = read_header(weights)
    for tensor in large:
        place = header.tensors[tensor.name]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", weights.name), ("offset", place.offset), ("length", place.length)):
            tensor.external_data.add(key=key, value=str(value))
    recorded = {weights.name: documents.WeightsFile(header.size, header.header)}
    set_property(model, keys.WEIGHTS, msgspec.json.encode(recorded).decode())
    set_property(model, keys.DOCUMENTS, "{}")
    target.write_bytes(model.SerializeToString())


def properties(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def set_property(proto: Any, key: str, value: str) -> None:
    entries = [entry for entry in proto.metadata_props if entry.key == key]
    (entries[0] if entries else proto.metadata_props.add(key=key)).value = value


def make_checkpoint(folder: Path) -> None:
    """A directory of a small transformers model, as ``save_pretrained`` writes it, in two files."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(folder, max_shard_size="4KB")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1


def copied(source: Path, target: Path) -> Path:
    """A copy of the corpus that a case may change."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


def seeded(*parts: object) -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.default_rng([hash_of(str(part)) for part in parts])


def hash_of(text: str) -> int:
    import zlib

    return zlib.crc32(text.encode())
