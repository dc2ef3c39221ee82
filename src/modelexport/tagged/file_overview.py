"""The inputs, outputs, operators and largest parameters of a file without a module tree, for ``modelexport tree``."""

from __future__ import annotations

from collections import Counter

import msgspec
import onnx_ir as ir

from modelexport.core.text import align, first_few, plural, shortened
from modelexport.format.dtypes import dtype_name
from modelexport.graph.nodes import stored_tensors
from modelexport.tagged.file import TaggedFile

_LISTED_PARAMETERS = 10
"""The number of parameters that are listed by name."""


class FileOverview(msgspec.Struct, frozen=True):
    """The facts about a file that need no tree."""

    producer: str
    """Its name and its version; empty if it did not say."""
    opsets: dict[str, int]
    ir_version: int
    inputs: dict[str, str]
    """Name to type and shape; the inputs that have to be given."""
    outputs: dict[str, str]
    operators: dict[str, int]
    """Operator to the number of such nodes, the most frequent first."""
    parameters: int
    """The number of initializers and constants."""
    parameter_bytes: int
    largest: dict[str, tuple[str, int]]
    """The largest of these, largest first: name to type and shape, and bytes."""


def overview(tagged: TaggedFile) -> FileOverview:
    """The facts about a file that need no tree."""
    model = tagged.model
    held = [(value.name or "", tensor) for value, tensor in stored_tensors(model)]
    tensors = dict(sorted(held, key=lambda item: -item[1].nbytes))
    counts = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in tagged.nodes)
    return FileOverview(
        producer=" ".join(filter(None, (model.producer_name, model.producer_version))),
        opsets=dict(model.opset_imports),
        ir_version=model.ir_version or 0,
        inputs={value.name or "": _typed(value) for value in model.graph.inputs if not value.is_initializer()},
        outputs={value.name or "": _typed(value) for value in model.graph.outputs},
        operators=dict(counts.most_common()),
        parameters=len(tensors),
        parameter_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        largest={
            name: (f"{dtype_name(tensor.dtype)}{list(tensor.shape.numpy())}", tensor.nbytes)
            for name, tensor in list(tensors.items())[:_LISTED_PARAMETERS]
        },
    )


def _typed(value: ir.Value) -> str:
    dtype = dtype_name(value.dtype) if value.dtype is not None else "unknown type"
    if value.shape is None:
        return f"{dtype} of unknown rank"
    sizes = (str(size) if isinstance(size, int) else size.value or "?" for size in value.shape)
    return f"{dtype}[{', '.join(sizes)}]"


def format_overview(facts: FileOverview, file: str) -> str:
    """The facts as text, with the commands that show more."""
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in facts.opsets.items())
    operators = first_few([f"{operator} {count:,}" for operator, count in facts.operators.items()], 12)
    rows: list[tuple[object, ...]] = [
        ("producer", facts.producer or "not said"),
        ("opset", f"{opsets}; IR version {facts.ir_version}"),
        *(("input", f"{name}  {typed}") for name, typed in facts.inputs.items()),
        *(("output", f"{name}  {typed}") for name, typed in facts.outputs.items()),
        ("operators", f"{plural(sum(facts.operators.values()), 'node')}: {operators}"),
        ("parameters", f"{plural(facts.parameters, 'tensor')} of {facts.parameter_bytes:,} bytes"),
    ]
    largest = [(shortened(name, 60), typed, size) for name, (typed, size) in facts.largest.items()]
    more = (
        f"to see more: modelexport cost {file} (operations and memory), modelexport profile {file} (time), "
        f"modelexport nodes {file} . (every node), modelexport extract {file} --to VALUE -o PART.onnx (the nodes "
        "up to a value)"
    )
    return "\n".join([align(rows), *(["", "largest parameters:", align(largest)] if largest else []), "", more])
