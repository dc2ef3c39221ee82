"""What the `torch.export`-based exporter records about modules, before and after each of its stages."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from modelexport.capture.internals.internals_report import ExporterStage, key_facts
from modelexport.capture.patches import replaced
from modelexport.graph.nodes import all_nodes
from modelexport.graph.properties import properties_of, text_of
from modelexport.pytorch.nested_tensors import run_arguments
from modelexport.pytorch.pretrained import is_pretrained
from modelexport.tagged.found_calls.recorded_stacks import NAME_SCOPES

TEXT = ("from_node", "nn_module_stack", "original_aten", "source_fn_stack", "stack_trace", "torch_fn")
"""Keys of FX nodes that say where a node comes from; the others are values, shapes and numbers."""


def look_at_dynamo(model: nn.Module, inputs: Any, stages: list[ExporterStage]) -> None:
    """Export the model, and append each stage as it is reached; if the exporter fails, the earlier stages remain.

    A model of transformers goes through its own exporter, which patches what ``torch.onnx`` cannot translate.

    Raises:
        Exception: Any exception of the exporter.
    """
    args, kwargs = run_arguments(inputs)

    def recording(decompose: Callable[..., Any]) -> Callable[..., Any]:
        def run_decompositions(program: torch.export.ExportedProgram, *args: Any, **options: Any) -> Any:
            parts = program.graph_module.modules()
            graphs = [part.graph for part in parts if isinstance(part, torch.fx.GraphModule)]
            stages.append(_fx_stage("captured", graphs))
            return decompose(program, *args, **options)

        return run_decompositions

    with replaced({"decompose": recording}):
        if is_pretrained(model) and not args:
            from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

            translated: ir.Model = OnnxExporter().export(model, kwargs, OnnxConfig(optimize=False)).program
        else:
            captured = torch.export.export(model, args, kwargs, strict=False)
            program = torch.onnx.export(captured, (), dynamo=True, optimize=False, verbose=False)
            assert program is not None
            translated = program.model
    # The graph that was translated is found by the FX nodes of the ONNX nodes.
    fx_nodes = (node.meta["node"] for node in all_nodes(translated) if "node" in node.meta)
    stages.append(_fx_stage("decomposed", {fx_node.graph for fx_node in fx_nodes}))
    stages.append(_onnx_stage("translated", translated))
    optimised = torch.onnx.ONNXProgram(translated, None)
    if is_pretrained(model):
        from transformers.exporters.utils import apply_patches

        # Its only patch of the optimizer keeps constant Resize nodes from being folded, which takes minutes.
        with apply_patches("onnx"):
            optimised.optimize()
    else:
        optimised.optimize()
    stages.append(_onnx_stage("optimised", optimised.model))


def _fx_stage(name: str, graphs: Iterable[torch.fx.Graph]) -> ExporterStage:
    sizes: dict[str, list[int | None]] = defaultdict(list, {key: [] for key in TEXT})
    calls: set[tuple[str, str]] = set()
    computing = [node for graph in graphs for node in graph.nodes if node.op.startswith("call_")]
    for node in computing:
        for key, value in node.meta.items():
            sizes[key].append(len(str(value).encode()) if key in TEXT else None)
        # The keys number the calls of a module, the values name it; keys are spelled differently in nested graphs.
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            calls.add((path, key.partition("@")[2]))
    located = sum(bool(node.meta.get("nn_module_stack")) for node in computing)
    return ExporterStage(name, "FX", len(computing), located, len(calls), key_facts(sizes))


def _onnx_stage(name: str, model: ir.Model) -> ExporterStage:
    sizes: dict[str, list[int | None]] = defaultdict(list)
    nodes = list(all_nodes(model))
    for node in nodes:
        for key, text in properties_of(node).items():
            sizes[key].append(len(key.encode()) + len(text.encode()))
    # The paths of the modules that a node ran in; the last of its name scopes is the FX node's own name.
    scopes = [ast.literal_eval(text_of(node, NAME_SCOPES) or "[]")[:-1] for node in nodes]
    calls = {str(scope) for of_node in scopes for scope in of_node}
    return ExporterStage(name, "ONNX", len(nodes), sum(map(bool, scopes)), len(calls), key_facts(sizes))
