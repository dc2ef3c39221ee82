"""Models that decide by sizes in Python: is each file right at every size that it does not exclude?

    OMP_NUM_THREADS=1 python benchmarks/size_decisions.py [NAME,...] [--frontend dynamo|torchscript]
    OMP_NUM_THREADS=1 python benchmarks/size_decisions.py --study one|two [--share 0.1] [--seed 0]

Each model is exported with `--dynamic`. Then the model and the file, in ONNX Runtime, run with other sizes of each
dynamic axis, one axis at a time and several together; sizes that the model refuses do not count. Columns: the
conditions of the file; axes that are fixed; sizes within the conditions at which the file is right, or *wrong*; sizes
that it excludes, at which it differs or fails, or *is right*. Ends with status 1 if a file is wrong within its
conditions, or a condition excludes only sizes at which the file is right. Needs what `make test` installs; about ten
minutes.

`--study` exports the small models of `tests/sized_models.py`, 150 with one axis that matters or 60 that compare two,
with example sizes 1, 2 and 5, positional or named inputs, named axes or `--dynamic`, and both front ends; `--share` of
these exports, drawn. Each file that is written has to be right at all of 40 pairs of sizes that it declares. It prints
the files that are not, those that `verify` accuses, and a line of counts; about 0.7 s of processor time an export.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import modelexport
import models  # noqa: F401  it makes torchvision and pillow importable
from modelexport.exporting.requested_names import RequestedNames
from modelexport.graph.size_conditions import SizeCondition, broken, conditions_of
from modelexport.pytorch.inputs.other_sizes import changeable_sizes, inputs_of_file, symbol_sizes, with_sizes
from modelexport.pytorch.nested_tensors import output_tensors, run_arguments, tensors_in
from modelexport.runtime.sessions import run_session
from modelexport.tagged.file import read_tagged

TOLERANCE = 1e-3
"""The largest distance of an output in float32 from PyTorch's, relative to its size."""


class Plain(nn.Module):
    """A model that is one function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.function(x) if y is None else self.function(x, y)


class Net(nn.Module):
    """A U-Net that resizes where an odd size does not fit its skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = functional.interpolate(self.up(functional.max_pool2d(self.down(x), 2)), scale_factor=2)
        if up.shape != x.shape:
            up = functional.interpolate(up, size=x.shape[2:])
        return self.out(up + x)


class Window(nn.Module):
    """Attention in windows of four, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        if length % 4:
            x = functional.pad(x, (0, 0, 0, 4 - length % 4))
        windows = x.reshape(-1, 4, width)
        return self.attention(windows, windows, windows)[0].reshape(batch, -1, width)[:, :length]


class Chunked(nn.Module):
    """Attention whose queries run in chunks once there are more than eight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] <= 8:
            return functional.scaled_dot_product_attention(x, x, x)
        parts = [functional.scaled_dot_product_attention(part, x, x) for part in x.split(4, dim=1)]
        return torch.cat(parts, dim=1)


class Table(nn.Module):
    """Position embeddings that are interpolated for other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table
        if x.shape[2] != table.shape[2]:
            table = functional.interpolate(table, size=x.shape[2])
        return x + table


def _pad(x: torch.Tensor) -> torch.Tensor:
    return functional.pad(x, (0, 0, 0, 4 - x.shape[1] % 4)).cumsum(1) if x.shape[1] % 4 else x.cumsum(1)


X, Y, IMAGE = torch.randn(2, 8, 3), torch.randn(2, 6, 3), torch.randn(2, 3, 8, 12)
PLAIN: Mapping[str, tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]] = {
    "threshold": (lambda x: x * (2.0 if x.shape[1] >= 24 else 1.0), [X]),
    "tensor_split": (lambda x: x.tensor_split(2, 1)[0].sum(1), [X]),
    "parity": (lambda x: x.cumsum(1) if x.shape[1] % 2 == 0 else x, [X]),
    "pad to four": (_pad, [X]),
    "truncated": (lambda x: (x[:, :20] if x.shape[1] > 20 else x).sum(1), [X]),
    "two inputs": (lambda x, y: x.sum(1) + (y.sum(1) if x.shape[1] > y.shape[1] else 0), [X, Y]),
    "equal inputs": (lambda x, y: x.sum(1) + (y.sum(1) if x.shape[1] == y.shape[1] else 0), [X, Y]),
    "product": (lambda x: x * (2 if x.shape[1] * x.shape[2] > 100 else 1), [X]),
    "ratio": (lambda x: x * (2 if x.shape[2] / x.shape[3] > 0.9 else 1), [IMAGE]),
    "between": (lambda x: x * (2 if 6 < x.shape[1] < 12 else 1), [X]),
    "below": (lambda x: x * (2 if x.shape[1] < 5 else 1), [X]),
    "minimum": (lambda x: x[:, : min(x.shape[1], 20)].sum(1), [X]),
    "maximum": (lambda x: functional.pad(x, (0, 0, 0, max(12 - x.shape[1], 0))).cumsum(1), [X]),
    "one": (lambda x: x.squeeze(1).sum(-1) if x.shape[1] == 1 else x.sum(1).sum(-1) * 2, [X]),
    "chunks": (lambda x: torch.cat([part.mean(1, keepdim=True) for part in x.split(4, 1)], 1), [X]),
    "constant": (lambda x: x / math.sqrt(x.shape[1]), [X]),
    "rows": (lambda x: torch.stack([row * row.sum() for row in x]), [X]),
    "nothing": (lambda x: (x if x.shape[1] % 2 else x + 0).sum(1), [X]),
    "by a tensor": (lambda x: x * 2 if torch.arange(x.shape[1]).max() > 5 else x, [X]),
}
TEXT = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 64}  # fmt: skip
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "longformer": {**TEXT, "attention_window": 4, "max_position_embeddings": 66},
    "big_bird": {**TEXT, "block_size": 4, "num_random_blocks": 1},
    "funnel": {"vocab_size": 32, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24},
    "xlnet": {"vocab_size": 32, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
    "nystromformer": {**TEXT, "segment_means_seq_len": 16, "num_landmarks": 4},
    "mamba2": {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 4,
    },
    "fnet": {k: v for k, v in TEXT.items() if k != "num_attention_heads"},
    "canine": {**TEXT, "local_transformer_stride": 4, "num_hash_buckets": 32, "downsampling_rate": 4},
    "swin": SWIN,
    "swinv2": SWIN,
}
TIMM = ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "gcvit_xxtiny",
        "samvit_base_patch16", "twins_pcpvt_small", "focalnet_tiny_srf")  # fmt: skip
DIFFUSERS = ("unet-2d", "unet-condition", "unet-1d", "vae", "vae-tiny", "sd3", "vq")

Built = tuple[nn.Module, Any]


def builders() -> dict[str, Callable[[], Built]]:
    """Name to what gives the model and its inputs."""
    from zoo import diffusion, vision

    def plain(name: str) -> Callable[[], Built]:
        function, inputs = PLAIN[name]
        return lambda: (Plain(function), dict(zip("xy", inputs, strict=False)))

    found: dict[str, Callable[[], Built]] = {name: plain(name) for name in PLAIN}
    found |= {
        "U-Net": lambda: (Net(), {"x": IMAGE}),
        "window attention": lambda: (Window(), {"x": torch.randn(2, 8, 8)}),
        "chunked attention": lambda: (Chunked(), {"x": torch.randn(2, 8, 4)}),
        "interpolated table": lambda: (Table(), {"x": torch.randn(2, 4, 8)}),
    }
    found |= {f"transformers {name}": lambda name=name: pretrained(name) for name in TRANSFORMERS}
    for case in (*vision.CASES, *diffusion.CASES):
        if case.name in (*TIMM, *DIFFUSERS):
            found[f"{case.family} {case.name}"] = case
    return found


def pretrained(name: str) -> Built:
    """A tiny model of transformers with random weights."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(name, **TRANSFORMERS[name])
    ids = torch.randint(1, 32, (2, 16))
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32)} if "image_size" in TRANSFORMERS[name] else {"input_ids": ids}
    return AutoModel.from_config(config), inputs


def other_sizes(sizes: Mapping[str, int], dynamic: Sequence[str]) -> Iterator[dict[str, int]]:
    """Sizes of which one is another, and then several, drawn."""
    choices = {s: sorted({1, n - 1, n + 1, n + 2, n + 3, 2 * n, 2 * n + 1, 3 * n, n // 2} - {n, 0})
               for s, n in sizes.items() if s in dynamic}  # fmt: skip
    for symbol, values in choices.items():
        yield from ({**sizes, symbol: value} for value in values if value <= 300)
    draw = random.Random(0)
    for _ in range(8 if len(choices) > 1 else 0):
        yield {**sizes, **{symbol: min(draw.choice(values), 300) for symbol, values in choices.items()}}


def off(file: Any, session: Any, model: nn.Module, inputs: Any) -> float | None:
    """How far the file is from the model; infinite if it fails; ``None`` if the model does."""
    args, kwargs = run_arguments(inputs)
    try:
        with torch.no_grad():
            right = [tensor.numpy() for _, tensor in output_tensors(model(*args, **kwargs))]
    except Exception:
        return None
    names = inputs_of_file(inputs, file.model)
    try:
        made = run_session(session, {names[n]: t.numpy() for n, t in tensors_in(inputs) if n in names})
    except Exception:
        return math.inf
    worst = 0.0
    for one, other in zip(right, made.values(), strict=False):
        if one.shape != other.shape:
            return math.inf
        if one.dtype.kind == "f" and one.size:
            distance = float(np.linalg.norm((one - other).astype(np.float64)))
            worst = max(worst, distance / (float(np.linalg.norm(one.astype(np.float64))) or 1.0))
        elif one.dtype.kind != "f" and not np.array_equal(one, other):
            worst = math.inf
    return 0.0 if math.isnan(worst) else worst  # both are NaN where the model is


def row(name: str, build: Callable[[], Built], frontend: str, folder: Path) -> tuple[list[str], bool]:
    """A row of the table, and whether the file is as it says."""
    torch.manual_seed(0)
    try:
        model, inputs = build()
    except Exception as error:
        return [name, f"not built: {type(error).__name__}: {str(error)[:100]}", "", "", ""], False
    model.eval()
    try:
        result = modelexport.export(model, inputs, folder / "x.onnx", dynamic=True, frontend=frontend)  # type: ignore[arg-type]
    except modelexport.ModelExportError as error:
        return [name, f"refused: {str(error)[:120]}", "", "", ""], True
    file, session = read_tagged(folder / "x.onnx"), result.session()
    conditions = conditions_of(file.model)
    sizes = symbol_sizes(inputs, file.model)
    within, wrong, without, needless = 0, [], 0, 0
    used = dict.fromkeys((one.formula for one in conditions), False)
    for changed in other_sizes(sizes, list(changeable_sizes(inputs, file.model))):
        found = off(file, session, model, with_sizes(inputs, file.model, changed))
        failing: list[SizeCondition] = broken(conditions, changed)
        if found is None:
            continue
        if not failing:
            within += 1
            if found > TOLERANCE:
                wrong.append(f"{ {s: n for s, n in changed.items() if n != sizes[s]} }")
        elif found > TOLERANCE:
            without += 1
            used.update({one.formula: True for one in failing})
        else:
            needless += 1
    unused = [one.formula for one, was in zip(conditions, used.values(), strict=True) if not was]
    fixed = ", ".join(f"{one.input}:{one.axis}" for one in result.fixed)
    told = ", ".join(f"`{one.formula}`" for one in conditions)
    return [
        name,
        told or "-",
        fixed or "-",
        f"{within - len(wrong)}" + (f", **wrong {len(wrong)}**: {wrong[0]}" if wrong else ""),
        f"{without}" + (f", right at {needless}" if needless else "") + (f"; not seen: {unused}" if unused else ""),
    ], not wrong


def study(which: str, share: float, seed: int) -> bool:
    """Export the small models in many ways; whether no file is wrong within what it declares."""
    from sized_models import models_of_one_axis, models_of_two_sizes

    named = dict(models_of_one_axis() if which == "one" else models_of_two_sizes())
    sizes = (
        ((1, 5), (2, 5), (5, 2), (5, 1), (1, 1), (5, 5)) if which == "one" else ((5, 5), (5, 3), (3, 5), (1, 4), (4, 1))
    )
    ways = [(*way,) for way in itertools.product(named, sizes, ("tuple", "mapping"), ("axes", "dynamic"), FRONT_ENDS)]
    drawn = random.Random(seed).sample(ways, max(int(share * len(ways)), 1))
    counts, begin = Counter[str](), time.process_time()
    for name, example, given, asked, frontend in drawn:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said, wrong = _exported(named[name].eval(), example, given, asked, frontend, Path(folder) / "x.onnx")
        counts[said] += 1
        if wrong:
            counts["wrong"] += 1
            print(f"{name}; {example} as {given}, {asked}, {frontend}; {said}: {wrong}", flush=True)
    seconds = (time.process_time() - begin) / len(drawn)
    print(
        f"{len(drawn)} of {len(ways)} exports of {len(named)} models, {seconds:.2f} s each: {dict(counts)}", flush=True
    )
    return not counts["wrong"]


FRONT_ENDS = ("dynamo", "torchscript")


def _exported(
    model: nn.Module, example: tuple[int, int], given: str, asked: str, frontend: Any, path: Path
) -> tuple[str, str]:
    """What an export says of its sizes, and at which sizes that it declares it is wrong; empty if at none."""
    two = model.forward.__name__ == "forward"
    drawn = [torch.randn(size, 4) for size in example] if two else [torch.randn(*example, 4)]
    inputs: Any = dict(zip("xy", drawn, strict=False)) if given == "mapping" else tuple(drawn)
    axes = {("x", 0): "n", ("y", 0) if two else ("x", 1): "m"}
    interface = {"interface": RequestedNames(axes=axes)} if asked == "axes" else {}
    try:
        result = modelexport.export(
            model, inputs, path, dynamic=True, frontend=frontend, documents=False, verify=True, **interface
        )
    except modelexport.ModelExportError:
        return "refused", ""
    if result.verified is not None and not result.verified.agrees:
        return "verified: differs", repr(result.verified)
    file, session = read_tagged(path), result.session()
    said = "a condition" if result.valid_if else "a fixed axis" if result.fixed else "open"
    conditions, wrong = conditions_of(file.model), []
    shapes = [[str(size) for size in value.shape or ()] for value in file.model.graph.inputs]
    for pair in itertools.product((1, 2, 3, 4, 5, 6, 9), repeat=2):
        others = [torch.randn(size, 4) for size in pair] if two else [torch.randn(*pair, 4)]
        declared = [*zip(itertools.chain(*shapes), itertools.chain(*(t.shape for t in others)), strict=False)]
        named = {size: number for size, number in declared if not size.isdigit()}
        if any(
            named.get(size, number) != number or (size.isdigit() and int(size) != number) for size, number in declared
        ):
            continue
        if broken(conditions, named):
            continue
        found = off(
            file, session, model, dict(zip("xy", others, strict=False)) if given == "mapping" else tuple(others)
        )
        if found is not None and found > TOLERANCE:
            wrong.append(pair)
    return said, ", ".join(f"{one}x{other}" for one, other in wrong[:6])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", choices=("one", "two"))
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="?", default="")
    parser.add_argument("--frontend", default="auto")
    options = parser.parse_args()
    if options.study:
        sys.exit(not study(options.study, options.share, options.seed))
    chosen = {
        name: build for name, build in builders().items() if not options.names or name in options.names.split(",")
    }
    print("| model | valid for | fixed axes | sizes right | sizes excluded, and different |\n|---|---|---|---|---|")
    sound = True
    for name, build in chosen.items():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cells, good = row(name, build, options.frontend, Path(folder))
        sound &= good
        print("| " + " | ".join(cells) + " |", flush=True)
    sys.exit(not sound)


if __name__ == "__main__":
    main()
