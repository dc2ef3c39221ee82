"""Count the operations that carry the tag of another layer than the one that computed them, for three ways of tagging.

    python benchmarks/contamination.py [NAME ...]

- `projected`, the older way: hooks record the order of the modules in a run, and the nodes of a finished graph are
  divided among the modules in that order, each module getting the same number of nodes;
- `torchscript` and `dynamo`, the front ends.

The reference is independent of all three. In a run of PyTorch, hooks record the inputs and outputs of each layer; in a
run of the file every value is computed; a value of the file with the numbers of a layer's input or output is that
boundary. A node that is needed to compute the outputs of exactly one layer from its inputs belongs to that layer; a
node that no layer needs is outside. Nodes that several layers need (a mask that a model makes only during a capture)
are not judged. Layers are the outermost calls of modules whose name is a number and whose class is not torch's.

Needs what `make test` installs; about four minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import modelexport
from building import build
from modelexport.core.calls import ModuleCall
from modelexport.core.module_tree import ModuleTree
from modelexport.graph.copies import copy_of
from modelexport.graph.node_owners import owner_of
from modelexport.pytorch.calls.call_recorder import CallRecorder
from modelexport.pytorch.calls.module_tree_of_model import module_tree
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.inputs.named_inputs import feeds
from modelexport.pytorch.loading import load_model
from modelexport.pytorch.nested_tensors import as_array
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged_model import TaggedModel

WAYS = ("projected", "torchscript", "dynamo")
Built = tuple[nn.Module, dict[str, Any]]


def bert(layers: int) -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=64, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=128)
    return BertModel(config).eval(), tokens()


def tokens() -> dict[str, Any]:
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, -3:] = 0
    return {"input_ids": torch.randint(0, 1000, (2, 16)), "attention_mask": mask}


MODELS: dict[str, Callable[[], Built]] = {
    "bert-tiny": lambda: (load_model("bert-tiny").model, tokens()),
    "BERT, 12 layers": lambda: bert(12),
    **{name: partial(build, name) for name in ("albert", "gpt2", "llama", "t5", "vit")},
}


@dataclass(frozen=True)
class Measured:
    nodes: int
    """Tagged operations, without constants."""
    judged: int
    trace: int
    """Module calls of the run."""
    pairs: Counter[str]
    """``2 as 1``: computed in layer 2, tagged as layer 1."""
    operators: Counter[str]
    seconds: float


def layers_of(tree: ModuleTree, stack: Sequence[ModuleCall]) -> ModuleCall | None:
    """The layer that a call ran in, if any: the outermost module whose name is a number."""
    return next((c for c in stack if tree[c.path].name.isdigit() and not tree[c.path].is_torch_nn), None)


def measure(way: str, model: nn.Module, inputs: dict[str, Any], folder: Path) -> Measured:
    path = folder / f"{way}.onnx"
    began = time.process_time()
    modelexport.export(model, inputs, path, frontend="dynamo" if way == "dynamo" else "torchscript")
    seconds = time.process_time() - began
    tagged = modelexport.load(path)
    tree = module_tree(model)
    nodes = [node for node in tagged.model.graph if node.op_type != "Constant"]
    record = recorded(model, inputs)
    if way == "projected":
        began = time.process_time()
        order = [call for call, _, _ in record.values()]
        claims = [{layers_of(tree, tagged.calls.stack(order[i * len(order) // len(nodes)]))} for i in range(len(nodes))]
        seconds += time.process_time() - began
    else:
        claims = [{layers_of(tree, tagged.calls.stack(c)) for c in owner_of(node).calls} for node in nodes]
    truth = computed_in(tagged, tree, record, inputs)
    judged = [(node, claim) for node, claim in zip(nodes, claims, strict=True) if node in truth]
    wrong = [(node, claim) for node, claim in judged if truth[node] not in claim]
    return Measured(
        nodes=len(nodes),
        judged=len(judged),
        trace=len(record),
        pairs=Counter(f"{short(truth[node])} as {short(min(claim, key=str))}" for node, claim in wrong),
        operators=Counter(node.op_type for node, _ in wrong),
        seconds=seconds,
    )


def short(layer: ModuleCall | None) -> str:
    return "outside" if layer is None else str(layer).replace("encoder.", "e.").replace("decoder.", "d.")


Record = dict[ModuleCall, tuple[ModuleCall, list[Any], list[Any]]]


def recorded(model: nn.Module, inputs: dict[str, Any]) -> Record:
    """Each call of a run, in order, with the arrays that it gets and returns."""
    found: Record = {}

    def watch(call: ModuleCall, side: str, tensors: Any) -> None:
        kept = found.setdefault(call, (call, [], []))[1 if side == "inputs" else 2]
        kept.extend(as_array(tensor.detach().clone()) for _, tensor in tensors)

    recorder = CallRecorder(model, watch=watch)
    with untouched(model), recorder.attached():
        model(**inputs)
    return found


def computed_in(
    tagged: TaggedModel, tree: ModuleTree, record: Record, inputs: dict[str, Any]
) -> dict[ir.Node, ModuleCall | None]:
    """The layer's call that computed each node (``None``: outside of all), for nodes for which this is certain."""
    values = [value for node in tagged.model.graph for value in node.outputs if value.name]
    with_every = copy_of(tagged.model)
    with_every.graph.outputs[:] = [value for node in with_every.graph for value in node.outputs if value.name]
    every = open_session(with_every)
    arrays = run_session(every, feeds(inputs, every))
    inside: dict[ModuleCall, set[ir.Node]] = {}
    before: dict[ModuleCall, set[ir.Node]] = {}
    for call, got, returned in record.values():
        if layers_of(tree, tagged.calls.stack(call)) != call:
            continue
        boundaries = {v for v in values for array in got if same(arrays[v.name], array)}
        ends = {v for v in values for array in returned if same(arrays[v.name], array)}
        if not ends:
            raise SystemExit(f"no value of the file is what {call} returns")
        inside[call] = set(behind(ends, boundaries))
        before[call] = set(behind(boundaries, set()))
    claimed = Counter(node for nodes in inside.values() for node in nodes)
    found: dict[ir.Node, ModuleCall | None] = {
        node: call for call, nodes in inside.items() for node in nodes - before[call] if claimed[node] == 1
    }
    found.update((node, None) for node in tagged.model.graph if node.op_type != "Constant" and not claimed[node])
    return found


def same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool(np.allclose(one, other, 1e-3, 1e-4))


def behind(values: set[ir.Value], boundaries: set[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that compute values, from boundaries on."""
    pending = list(values)
    seen: set[ir.Node] = set()
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in seen and node.op_type != "Constant":
            seen.add(node)
            yield node
            pending.extend(value for value in node.inputs if value is not None and value not in boundaries)


def tables(results: dict[tuple[str, str], Measured]) -> str:
    lines = ["| model | trace | way | operations | judged | contaminated | CPU s |", "|---|---|---|---|---|---|---|"]
    details = ["| model | contaminated, by layers (computed in, tagged as) | by operator |", "|---|---|---|"]
    for (name, way), m in results.items():
        bad = m.pairs.total()
        lines.append(f"| {name} | {m.trace} | {way} | {m.nodes} | {m.judged} | {bad} | {m.seconds:.1f} |")
        if bad:
            details.append(f"| {name}, {way} | {listed(m.pairs)} | {listed(m.operators)} |")
    return "\n".join([*lines, "", *details])


def listed(counts: Counter[str]) -> str:
    shown = ", ".join(f"{name} {count}" for name, count in counts.most_common(6))
    return shown + (f" and {len(counts) - 6} more" if len(counts) > 6 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results: dict[tuple[str, str], Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        for front in ("torchscript", "dynamo"):  # the first export of each kind imports what it needs
            modelexport.export(*bert(1), Path(folder) / "warm.onnx", frontend=front)
        for name in arguments.names or MODELS:
            torch.manual_seed(0)
            model, inputs = MODELS[name]()
            for way in WAYS:
                results[name, way] = measure(way, model, inputs, Path(folder))
                print(f"{name}, {way}: {results[name, way].pairs.total()} contaminated", file=sys.stderr)
    print(tables(results))
    if any(m.pairs for (_, way), m in results.items() if way != "projected"):
        raise SystemExit("a front end gave an operation another layer's tag")


if __name__ == "__main__":
    main()
