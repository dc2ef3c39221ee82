"""Devices that are wrong by design: they run regions on the processor, and spoil the results of some nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from modelexport.graph.copies import copy_of, value_like
from modelexport.runtime.devices import CPU, Device
from modelexport.runtime.runner import output_error
from modelexport.runtime.runner_process import RunnerResult
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tools.devices.device_regions import Region

Spoils = Callable[[ir.Node], bool]


class SpoiledDevice:
    """A device that multiplies the results of some nodes.

    Args:
        spoils: The nodes, in the graph of the region that is run.
        by: What their first results are multiplied by.
        lacks: Operators that the processor runs.
    """

    runs_any_region = True

    def __init__(self, spoils: Spoils, by: float = 1.2, lacks: Collection[str] = ()) -> None:
        self.device = Device(name="spoiled", provider="SpoiledExecutionProvider")
        self.measured = 0
        self._spoils, self._by, self._lacks = spoils, by, lacks

    def run(self, region: Region, *, log: bool = False) -> RunnerResult:
        self.measured += 1
        results = run_session(
            open_session(spoiled(region.model, self._spoils, self._by), folder=region.folder), region.inputs
        )
        errors = {name: output_error(right, results[name]) for name, right in region.outputs.items()}
        nodes: dict[str, list[list[str]]] = {}
        for node in region.model.graph:
            provider = CPU if node.op_type in self._lacks else self.device.provider
            nodes.setdefault(provider, [[]])[0].append(node.name or "")
        return RunnerResult(status="ran", errors=errors, nodes=nodes, log="")


def spoiled(model: ir.Model, spoils: Spoils, by: float) -> ir.Model:
    """A copy of a model in which the first results of some nodes are multiplied."""
    model = copy_of(model)
    graph = model.graph
    for node in [node for node in graph if spoils(node)]:
        result = node.outputs[0]
        factor = ir.tensor(np.array(by, dtype=result.dtype.numpy() if result.dtype else np.float32))
        constant = ir.Node("", "Constant", [], [ir.Attr("value", ir.AttributeType.TENSOR, factor)])
        before = value_like(result, f"{result.name} right")
        users = [*result.uses()]
        product = ir.Node("", "Mul", [result, constant.outputs[0]], outputs=[before])
        constant.outputs[0].name = f"{result.name} factor"
        for user, index in users:
            user.replace_input_with(index, before)
        if result.is_graph_output():
            name = result.name
            result.name, before.name = f"{name} right", name
            graph.outputs[list(graph.outputs).index(result)] = before
        graph.insert_after(node, [constant, product])
    return model


def is_operator(*names: str) -> Spoils:
    """Nodes of some operators."""
    return lambda node: node.op_type in names


def is_fused(first: str, second: str) -> Spoils:
    """Nodes of an operator whose first input is made by another in the same region: a device that fuses the two."""
    return lambda node: (
        node.op_type == second
        and any(
            value is not None and (maker := value.producer()) is not None and maker.op_type == first
            for value in node.inputs
        )
    )
