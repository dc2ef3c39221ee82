"""The cost of tags: `modelexport.export`, with both front ends, compared with the bare exporter, export and save.

Time, peak memory and the size of the graph file; each ratio compares the column before it with the bare exporter's.

    python benchmarks/overhead.py [--runs N] [--cpu] [--dynamic] [--sides bare dynamo] [NAME ...]

Each run is a separate process, which builds the model, exports a tiny one to warm up, and then measures. The sides
alternate, and the ratios are those of the medians in the same table. Seconds are wall time; `--cpu` measures processor
time, for a machine that has other work. With `--dynamic` the exports have dynamic axes (those of the bare exporter for
models of transformers only). `PYTHONPATH=OTHER/src` measures another checkout.

Needs the project alone; about fifteen minutes for the first six models, five with `--runs 1`. The others, whose names
have to be given, show how the cost grows with depth (`deep`), and where layers are not all equal (`kinds`): with
`--runs 1 --sides bare dynamo -- deep kinds` seven minutes. `linked` is one export of a Llama of seven billion
parameters (half a minute): the weights are files of zeros, which take no space and are not read.

`benchmarks/survival.py --cost` measures `retag`.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outcomes import measured

Built = tuple[Any, dict[str, Any]]


def from_config(kind: str, **options: Any) -> Built:
    """A model of transformers for tokens."""
    import torch
    import transformers

    family = kind.split("For", maxsplit=1)[0].removesuffix("Model")
    config = getattr(transformers, f"{family}Config")(**{"vocab_size": 100} | options)
    ids = torch.randint(0, 100, (2, 16))
    return getattr(transformers, kind)(config).eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 12}
HEADS = {"num_key_value_heads": 2, "use_cache": False}


def encoder(hidden: int, layers: int) -> Built:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": hidden // 64}
    return from_config("BertModel", vocab_size=30522, num_hidden_layers=layers, **sizes)


def decoder(layers: int) -> Built:
    return from_config("LlamaForCausalLM", **SMALL | HEADS | {"num_hidden_layers": layers})


def hierarchy() -> Built:
    import torch
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(
        image_size=64, patch_size=2, embed_dim=16, depths=[2, 2, 6, 2], num_heads=[2, 2, 4, 4], window_size=4
    )
    return SwinModel(config).eval(), {"pixel_values": torch.randn(1, 3, 64, 64)}


def transformer_of_images(edge: int, patch: int, **options: Any) -> Built:
    import torch
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(image_size=edge, patch_size=patch, **SMALL | options)).eval()
    return model, {"pixel_values": torch.randn(2, 3, edge, edge)}


def u_net(width: int = 32, levels: int = 3, blocks: int = 3) -> Built:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(8, before), nn.Conv2d(before, after, 3, padding=1)
            self.norm_2, self.conv_2 = nn.GroupNorm(8, after), nn.Conv2d(after, after, 3, padding=1)
            self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(nn.functional.silu(self.norm(x)))
            return self.skip(x) + self.conv_2(nn.functional.silu(self.norm_2(y)))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [width * 2**level for level in range(levels)]
            self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
            self.down = nn.ModuleList(nn.Sequential(*[Block(w, w) for _ in range(blocks)]) for w in widths)
            self.shrink = nn.ModuleList(nn.Conv2d(w, 2 * w, 3, stride=2, padding=1) for w in widths[:-1])
            self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[:-1])
            self.up = nn.ModuleList(
                nn.Sequential(Block(2 * w, w), *[Block(w, w) for _ in range(blocks - 1)]) for w in widths[:-1]
            )

        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            x = self.first(sample)
            kept = []
            for level, down in enumerate(self.down):
                x = down(x)
                if level < len(self.shrink):
                    kept.append(x)
                    x = self.shrink[level](x)
            for grow, up, before in reversed(list(zip(self.grow, self.up, kept, strict=True))):
                x = up(torch.cat((grow(x), before), dim=1))
            return self.last(x)

    return UNet().eval(), {"sample": torch.randn(1, 3, 32, 32)}


MODELS: dict[str, Callable[[], Built]] = {
    "bert-tiny (4 M)": lambda: encoder(128, 2),
    "bert-small (29 M)": lambda: encoder(512, 4),
    "bert-base (110 M)": lambda: encoder(768, 12),
    "decoder, 2 layers": lambda: decoder(2),
    "decoder, 8 layers": lambda: decoder(8),
    "decoder, 24 layers": lambda: decoder(24),
}
DEEP: dict[str, Callable[[], Built]] = {
    "decoder, 2 layers": lambda: decoder(2),
    "decoder, 24 layers": lambda: decoder(24),
    "decoder, 48 layers": lambda: decoder(48),
    "decoder, 80 layers": lambda: decoder(80),
}
KINDS: dict[str, Callable[[], Built]] = {
    "mixture of experts, 12 layers": lambda: from_config(
        "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, **SMALL, **HEADS
    ),
    "Swin, 2 + 2 + 6 + 2 blocks": hierarchy,
    "ViT, 2 layers, 32 pixels": lambda: transformer_of_images(32, 8, num_hidden_layers=2),
    "ViT, 12 layers, 224 pixels": lambda: transformer_of_images(
        224, 16, hidden_size=192, intermediate_size=768, num_attention_heads=3
    ),
    "U-Net, 15 blocks": u_net,
    "ALBERT, 12 layers shared": lambda: from_config("AlbertModel", embedding_size=32, **SMALL),
    "hybrid, 12 layers of two kinds": lambda: from_config(
        "Lfm2ForCausalLM", layer_types=["conv", "conv", "full_attention"] * 4, **SMALL, **HEADS
    ),
}
ALL = {**MODELS, **DEEP, **KINDS}


def bare(model: Any, inputs: dict[str, Any], path: Path, **options: Any) -> None:
    import torch
    from transformers import PreTrainedModel
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    if not isinstance(model, PreTrainedModel):
        torch.onnx.export(model, kwargs=inputs, dynamo=True).save(path, external_data=True)
        return
    exporter = OnnxExporter()
    program = exporter.export(model, inputs, OnnxConfig(**options)).program
    exporter.save_program(program, path)


def ours(frontend: str) -> Callable[..., None]:
    def run(model: Any, inputs: dict[str, Any], path: Path, **options: Any) -> None:
        import modelexport

        # As the bare exporter saves: the weights in a separate file.
        modelexport.export(model, inputs, path, frontend=frontend, weights="copy", **options)

    return run


SIDES: dict[str, Callable[..., None]] = {"bare": bare, "dynamo": ours("dynamo"), "torchscript": ours("torchscript")}


def measure(side: str, name: str, **options: Any) -> None:
    """In a separate process: export one model and print seconds, peak memory and the size of the graph file."""
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    run = SIDES[side]
    torch.manual_seed(0)
    model, inputs = ALL[name]()
    with tempfile.TemporaryDirectory() as folder:
        run(*decoder(1), Path(folder) / "warm.onnx", **options)
        began, cpu = time.perf_counter(), time.process_time()
        run(model, inputs, Path(folder) / "model.onnx", **options)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        size = (Path(folder) / "model.onnx").stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("\n" + json.dumps({"seconds": seconds, "cpu": cpu, "megabytes": peak, "graph": size}))


def measure_linked(size: str) -> None:
    """In a separate process: load and export a checkpoint of zeros with linked weights."""
    import modelexport
    from modelexport.pytorch.inputs.generated_inputs import generate_inputs
    from modelexport.pytorch.loading import load_model
    from scale import write_checkpoint

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        modelexport.export(*decoder(1), Path(folder) / "warm.onnx")
        parameters, _ = write_checkpoint(Path(folder, "checkpoint"), size, sparse=True)
        began = time.process_time()
        loaded = load_model(str(Path(folder, "checkpoint")), weights="files")
        inputs = generate_inputs(loaded.model, directory=loaded.directory, has_weights=False)
        path = Path(folder, "checkpoint", "model.onnx")
        modelexport.export(loaded.model, inputs, path, weights="link", source=loaded.weights)
        spent = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("\n" + json.dumps({"cpu": spent, "megabytes": peak, "parameters": parameters}))


def in_process(*arguments: str) -> dict[str, float]:
    result: dict[str, float] = json.loads(measured([sys.executable, __file__, *arguments])[-1].splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="measure processor time, not wall time")
    parser.add_argument("--dynamic", action="store_true", help="exports with dynamic axes")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--measure-linked", metavar="SIZE", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(["deep", "kinds", "linked", *ALL]))
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*arguments.measure, **{"dynamic": True} if arguments.dynamic else {})
        return
    if arguments.measure_linked:
        measure_linked(arguments.measure_linked)
        return
    if arguments.names == ["linked"]:
        linked = in_process("--measure-linked", "7")
        print("| | processor s | peak MB |\n|---|---|---|")
        billions = linked["parameters"] / 1e9
        print(
            f"| Llama, {billions:.1f} billion parameters, linked | {linked['cpu']:.1f} | {linked['megabytes']:,.0f} |"
        )
        return
    results: dict[str, dict[str, dict[str, float]]] = {}
    groups = {"deep": list(DEEP), "kinds": list(KINDS)}
    for name in [one for given in arguments.names or MODELS for one in groups.get(given, [given])]:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES if side in arguments.sides}
        for _ in range(arguments.runs):
            for side, done in runs.items():
                done.append(in_process("--measure", side, name, *["--dynamic"] * arguments.dynamic))
        results[name] = {
            side: {key: statistics.median(one[key] for one in done) for key in done[0]} for side, done in runs.items()
        }
        print(name, results[name], file=sys.stderr)
    print(table(results, "cpu" if arguments.cpu else "seconds", "s", 1, ".2f"), end="\n\n")
    print(table(results, "megabytes", "peak MB", 1, ",.0f"), end="\n\n")
    print(table(results, "graph", "graph kB", 1000, ",.0f"))


def table(results: dict[str, dict[str, dict[str, float]]], key: str, unit: str, scale: int, form: str) -> str:
    """One figure of all sides, and its ratio to the bare exporter's, as Markdown."""
    others = [side for side in next(iter(results.values())) if side != "bare"]
    lines = [f"| model, {unit} | bare |" + "".join(f" `{side}` | ratio |" for side in others)]
    lines.append("|---|---|" + "---|---|" * len(others))
    for name, sides in results.items():
        least = sides.get("bare", {}).get(key, math.nan)
        cells = "".join(f" {sides[side][key] / scale:{form}} | {sides[side][key] / least:.2f} |" for side in others)
        lines.append(f"| {name} | {least / scale:{form}} |{cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
