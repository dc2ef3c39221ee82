"""Work of ``torch.export`` and ``torch.onnx`` whose results an export does not read, left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import torch.export
import torch.fx
from onnx_ir.schemas import OpSignature

# Not public, but what torch.compile does with its own graphs; tests/capture/test_templates.py is the canary.
from torch.fx._lazy_graph_module import _get_graph_module_cls, _use_lazy_graph_module

from modelexport.core.attributes import attribute_set


@contextmanager
def only_what_is_read(*, stack_traces: bool = False) -> Iterator[None]:
    """Leave out, inside the block, what costs a fifth of a capture.

    - The lines of Python that each FX node comes from are not formatted, unless they are wanted.
    - A graph becomes Python code when it is run, and not each time that a pass has changed it.
    - What ONNX says of an operator is read once, and not for each node.
    """
    without = torch.fx.config.do_not_emit_stack_traces or not stack_traces
    with (
        attribute_set(torch.fx.config, "do_not_emit_stack_traces", without),
        attribute_set(OpSignature, "from_op_schema", _read_once()),
        attribute_set(torch.export, "export", _strict_is_eager()),
        attribute_set(torch.fx.GraphModule, "__new__", _lazily_made()),
        _use_lazy_graph_module(True),
    ):
        yield


def _strict_is_eager() -> Any:
    """``torch.export.export``, whose strict mode reads what only the code of a graph defines."""
    capture = torch.export.export

    def export(*args: Any, strict: bool = False, **kwargs: Any) -> Any:
        with _use_lazy_graph_module(not strict):
            return capture(*args, strict=strict, **kwargs)

    return export


def _lazily_made() -> Any:
    """``GraphModule.__new__``, which makes lazy ones also where ``torch.export`` asks for others."""
    make = torch.fx.GraphModule.__new__

    def new(cls: type[torch.fx.GraphModule], *args: Any, **kwargs: Any) -> Any:
        return make(_get_graph_module_cls() if cls is torch.fx.GraphModule else cls, *args, **kwargs)

    return new


def _read_once() -> Any:
    read = OpSignature.from_op_schema
    known: dict[tuple[str, str, int], OpSignature] = {}

    def from_op_schema(cls: type[OpSignature], schema: onnx.defs.OpSchema) -> OpSignature:
        key = schema.domain, schema.name, schema.since_version
        if key not in known:
            known[key] = read(schema)
        return known[key]

    return classmethod(from_op_schema)
