"""What tools that go by the names of nodes find in an export, before and after `modelexport rename`.

    pip install --no-deps --target APART olive-ai==0.13.0 nvidia-modelopt==0.47.0 onnx-graphsurgeon pydantic \\
        pydantic-core annotated-types typing-inspection pyyaml torchmetrics lightning-utilities optuna colorlog lief \\
        pillow nvidia-ml-py opentelemetry-sdk opentelemetry-api opentelemetry-semantic-conventions
    OMP_NUM_THREADS=1 python benchmarks/names.py APART

The packages themselves run, on a Llama of two layers: Olive's `SplitModel` with the two layers assigned to two parts,
Olive's layer annotation by a part of the name (the rule of ONNX Runtime's own tool), and from ModelOpt the default that
keeps `/lm_head` out of quantization and the default mix of 8 and 4 bits. They lie apart, because they ask for other
versions of what this project pins. Under a minute.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import onnx
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import modelexport
import models  # noqa: F401 - makes torchvision, whose only wheel for this torch is built for CUDA, importable for Olive


def olive_parts(path: Path, folder: Path) -> list[int]:
    """How many nodes Olive puts into each part."""
    from olive.model import ONNXModelHandler
    from olive.passes.olive_pass import create_pass_from_dict
    from olive.passes.onnx.split import SplitModel

    options = {"split_assignments": {"model.layers.0": 0, "model.layers.1": 1}}
    split = create_pass_from_dict(SplitModel, options, disable_search=True)
    made = split.run(ONNXModelHandler(model_path=str(path)), str(folder / f"{path.stem}-olive"))
    return [len(onnx.load(part.model_path).graph.node) for part in made.model_components]


def olive_annotations(path: Path) -> int:
    """How many nodes Olive annotates as the first layer's."""
    from olive.passes.onnx.layer_annotation import annotate_proto_model

    model = onnx.load(path)
    annotate_proto_model(model, {"first": ["/model/layers.0/"]})
    marks = [entry for node in model.graph.node for entry in node.metadata_props if entry.key == "layer_ann"]
    return sum(entry.value == "first" for entry in marks)


def modelopt_kept(path: Path) -> list[str]:
    """The nodes that ModelOpt keeps out of quantization by default."""
    import onnx_graphsurgeon
    from modelopt.onnx.quantization.graph_utils import expand_node_names_from_patterns

    return list(expand_node_names_from_patterns(onnx_graphsurgeon.import_onnx(onnx.load(path)), ["/lm_head"]))


def modelopt_bits(path: Path) -> dict[int, int]:
    """How many weights get 8 and 4 bits in ModelOpt's default mix."""
    from modelopt.onnx.quantization.graph_utils import get_layer_precision_mapping

    mapping = get_layer_precision_mapping(onnx.load(path))
    return dict(Counter(entry["precision"] for entry in mapping.values()))


def main() -> None:
    """Print what each tool finds; fails where it finds nothing after the renaming."""
    if len(sys.argv) != 2:
        print("benchmarks/names.py: left out, give the folder of the packages")
        return
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = transformers.LlamaForCausalLM(config).eval()
        modelexport.export(model, {"input_ids": torch.arange(8)[None]}, folder / "llama.onnx")
        modelexport.rename(folder / "llama.onnx", folder / "named.onnx", values=True)
        sys.path.append(sys.argv[1])  # not before: transformers would find packages that it does not work with
        found = {}
        for name in ("llama", "named"):
            path = folder / f"{name}.onnx"
            found[name] = (olive_parts(path, folder), olive_annotations(path), modelopt_kept(path), modelopt_bits(path))
            print(f"{name}: Olive's parts have {found[name][0]} nodes and it annotates {found[name][1]};")
            print(f"  ModelOpt keeps {found[name][2]} and gives 8 and 4 bits to {found[name][3]} weights")
    parts, annotated, kept, bits = found["named"]
    if len(parts) != 2 or not annotated or not kept or 8 not in bits:
        sys.exit(1)


if __name__ == "__main__":
    main()
