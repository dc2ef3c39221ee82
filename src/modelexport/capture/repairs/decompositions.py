"""Operators that are written in other operators of PyTorch before translation, where that is simpler than in ONNX's.

They are handed over to ``ExportedProgram.run_decompositions``, which every way to ``torch.onnx`` goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram

from modelexport.capture.repairs.complex_numbers import complex_decompositions
from modelexport.core.attributes import attribute_set

Decompositions = dict[Any, Callable[..., Any]]


def scatter_with(self: Any, dim: int, index: Any, src: Any, reduce: str) -> Any:
    """``scatter(reduce=...)``, which nothing translates, as ``scatter_reduce``, which is."""
    names = {"add": "sum", "multiply": "prod"}
    return torch.scatter_reduce(self, dim, index, src, names[reduce], include_self=True)


def scatter_number_with(self: Any, dim: int, index: Any, value: float, reduce: str) -> Any:
    """The same of one number."""
    return scatter_with(self, dim, index, torch.full_like(index, value, dtype=self.dtype), reduce)


def hypotenuse(self: Any, other: Any) -> Any:
    """Nothing translates ``hypot``. Without squares of large numbers."""
    self, other = torch.abs(self), torch.abs(other)
    longer = torch.maximum(self, other)
    share = torch.minimum(self, other) / torch.where(longer == 0, 1, longer)
    return longer * torch.sqrt(1 + share * share)


def randn(size: Any, *, generator: Any = None, **options: Any) -> Any:
    """Random numbers of a generator: ONNX has no generators."""
    return torch.randn(size, **options)


def rand(size: Any, *, generator: Any = None, **options: Any) -> Any:
    """The same of evenly distributed ones."""
    return torch.rand(size, **options)


def cholesky_solve(self: Any, factor: Any, upper: bool = False) -> Any:
    """Two triangular systems."""
    lower = factor.mH if upper else factor
    between = torch.linalg.solve_triangular(lower, self, upper=False)
    return torch.linalg.solve_triangular(lower.mH, between, upper=True)


def decompositions() -> Decompositions:
    """FX operator to what it is in other operators."""
    aten = torch.ops.aten
    return {
        aten.scatter.reduce: scatter_with,
        aten.scatter.value_reduce: scatter_number_with,
        aten.hypot.default: hypotenuse,
        aten.randn.generator: randn,
        aten.rand.generator: rand,
        aten.cholesky_solve.default: cholesky_solve,
    }


@contextmanager
def decompositions_added() -> Iterator[None]:
    """Add these decompositions to every decomposition of a program inside the block."""
    whole = ExportedProgram.run_decompositions

    def run_decompositions(
        self: ExportedProgram, decomp_table: Mapping[Any, Callable[..., Any]] | None = None, **options: Any
    ) -> ExportedProgram:
        table = dict((torch.export.default_decompositions() if decomp_table is None else decomp_table).items())
        table.update(decompositions())
        _forget_who_made_constants(self)
        if _has_complex(self):
            table.update(complex_decompositions(table))
        return whole(self, table, **options)

    with attribute_set(ExportedProgram, "run_decompositions", run_decompositions):
        yield


def _forget_who_made_constants(program: ExportedProgram) -> None:
    """Remove PyTorch's annotation of the function that made a constant; it refuses a constant that has two of them."""
    for node in program.graph.find_nodes(op="placeholder"):
        if custom := node.meta.get("custom"):
            node.meta["custom"] = {key: value for key, value in custom.items() if not str(key).startswith(_INTERNAL)}


_INTERNAL = "_torchdynamo_disable"


def _has_complex(program: ExportedProgram) -> bool:
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                value = node.meta.get("val")
                values = value if isinstance(value, (list, tuple)) else (value,)
                if any(isinstance(one, torch.Tensor) and one.is_complex() for one in values):
                    return True
    return False
