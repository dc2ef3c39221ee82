"""What the `torch.export`-based exporter records about modules, before and after each of its stages."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from modelexport.capture.internals.internals_report import Stage, key_facts
from modelexport.graph.nodes import all_nodes
from modelexport.graph.properties import properties_of, text_of
from modelexport.pytorch.nested_tensors import run_arguments
from modelexport.pytorch.pretrained import is_pretrained

TEXT = ("from_node", "nn_module_stack", "original_aten", "source_fn_stack", "stack_trace", "torch_fn")
"""Keys of FX nodes that say where a node comes from; the others are values, shapes and numbers."""
NAME_SCOPES = "pkg.torch.onnx.name_scopes"


def look_at_dynamo(model: nn.Module, inputs: Any, stages: list[Stage]) -> None:
    """Export the model, and append each stage as it is reached; if the exporter fails, the earlier stages remain.

    A model of transformers goes through its own exporter, which patches what ``torch.onnx`` cannot translate.

    Raises:
        Exception: Any exception of the exporter.
    """
    args, kwargs = run_arguments(inputs)
    if is_pretrained(model) and not args:
        translated = _from_transformers(model, kwargs, stages)
    else:
        captured = torch.export.export(model, args, kwargs, strict=False)
        stages.append(_fx_stage("captured", captured.graph_module))
        program = torch.onnx.export(captured, (), dynamo=True, optimize=False, verbose=False)
        assert program is not None
        translated = program.model
    stages.append(_decomposed(translated))
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


def _from_transformers(model: nn.Module, kwargs: dict[str, Any], stages: list[Stage]) -> ir.Model:
    from transformers.exporters.exporter_dynamo import DynamoExporter
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    class Recording(DynamoExporter):
        """Records the exported program when it is passed to the other exporter, before it is changed in place."""

        def export_program(self, *args: Any, **options: Any) -> Any:
            made = super().export_program(*args, **options)
            stages.append(_fx_stage("captured", made[0].graph_module))
            return made

    class Exporter(OnnxExporter, Recording):
        pass

    program: ir.Model = Exporter().export(model, kwargs, OnnxConfig(optimize=False)).program
    return program


def _decomposed(model: ir.Model) -> Stage:
    """The stage of the FX graph that was translated, found through the FX nodes of the ONNX nodes."""
    fx_nodes = (node.meta["node"] for node in all_nodes(model) if "node" in node.meta)
    graphs = {fx_node.graph for fx_node in fx_nodes}
    return _stage_of([node for graph in graphs for node in graph.nodes], "decomposed")


def _fx_stage(name: str, module: torch.fx.GraphModule) -> Stage:
    graphs = [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    return _stage_of([node for graph in graphs for node in graph.nodes], name)


def _stage_of(nodes: list[torch.fx.Node], name: str) -> Stage:
    found: dict[str, list[int | None]] = defaultdict(list)
    for key in TEXT:
        found[key] = []
    calls: set[tuple[str, str]] = set()
    computing = [node for node in nodes if node.op in ("call_function", "call_module", "call_method")]
    for node in computing:
        for key, value in node.meta.items():
            found[key].append(len(str(value).encode()) if key in TEXT else None)
        # The keys number the calls of a module, the values name it; keys are spelled differently in nested graphs.
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            calls.add((path, key.partition("@")[2]))
    located = sum(bool(node.meta.get("nn_module_stack")) for node in computing)
    return Stage(name, "FX", len(computing), located, len(calls), key_facts(found))


def _onnx_stage(name: str, model: ir.Model) -> Stage:
    found: dict[str, list[int | None]] = defaultdict(list)
    calls: set[str] = set()
    nodes = list(all_nodes(model))
    located = 0
    for node in nodes:
        for key, text in properties_of(node).items():
            found[key].append(len(key.encode()) + len(text.encode()))
        scopes = list(_scopes(node))
        located += bool(scopes)
        calls.update(scopes)
    return Stage(name, "ONNX", len(nodes), located, len(calls), key_facts(found))


def _scopes(node: ir.Node) -> Iterator[str]:
    """The paths of the modules that a node ran in; the last of its name scopes is the FX node's own name."""
    if scopes := text_of(node, NAME_SCOPES):
        yield from map(str, ast.literal_eval(scopes)[:-1])
