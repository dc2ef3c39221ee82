"""Operators that are written in other operators of PyTorch before translation, where that is simpler than in ONNX's.

They are handed over to ``ExportedProgram.run_decompositions``, which every way to ``torch.onnx`` goes through.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument

from modelexport.capture.aliases import views_made_again
from modelexport.capture.patches import private, replaced, usable
from modelexport.capture.repairs.complex_numbers import complex_decompositions
from modelexport.capture.repairs.singular_values import eigenvalues, singular_values
from modelexport.pytorch.private_torch import OpOverload, schema_of

Decompositions = dict[Any, Callable[..., Any]]


def scatter_with(self: Any, dim: int, index: Any, src: Any, reduce: str) -> Any:
    """``scatter(reduce=...)``, which nothing translates, as ``scatter_reduce``, which is."""
    names = {"add": "sum", "multiply": "prod"}
    return torch.scatter_reduce(self, dim, index, src, names[reduce], include_self=True)


def scatter_number_with(self: Any, dim: int, index: Any, value: float, reduce: str) -> Any:
    """The same of one number."""
    return scatter_with(self, dim, index, torch.full_like(index, value, dtype=self.dtype), reduce)


def scatter_reduced(self: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """Torchlib writes the last element for ``mean``, and takes the lowest finite number for the lowest one."""
    if reduce == "mean":
        ones, old = torch.ones_like(self), self
        if not include_self:
            ones, old = ones.scatter(dim, index, 0), old.scatter(dim, index, 0)
        count = ones.scatter_add(dim, index, torch.ones_like(index, dtype=self.dtype)).clamp(min=1)
        total = old.scatter_add(dim, index, src)
        rounded = None if self.is_floating_point() or self.is_complex() else "floor"
        return torch.div(total, count, rounding_mode=rounded)
    if include_self:
        return NotImplemented
    if reduce in ("sum", "prod"):
        neutral: float = 0 if reduce == "sum" else 1
    elif self.is_floating_point():
        neutral = float("-inf" if reduce == "amax" else "inf")
    else:
        neutral = torch.iinfo(self.dtype).min if reduce == "amax" else torch.iinfo(self.dtype).max
    return torch.scatter_reduce(self.scatter(dim, index, neutral), dim, index, src, reduce, include_self=True)


def copied(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """``copy_`` of a tensor that is broadcast: torchlib copies it as it is."""
    return NotImplemented if self.shape == src.shape else src.to(self.dtype).expand(self.shape)


def diagonal_written(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """``diagonal_scatter``, as what writes into a diagonal becomes. PyTorch's own decomposition writes in place."""
    places = torch.arange(src.shape[-1])
    rows, columns = places + max(-offset, 0), places + max(offset, 0)
    moved = self.movedim((dim1, dim2), (0, 1))
    return torch.index_put(moved, (rows, columns), src.movedim(-1, 0)).movedim((0, 1), (dim1, dim2))


def strided_written(self: Any, src: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """``as_strided_scatter``, as what writes into strides becomes; of a tensor whose elements lie in their order."""
    places = torch.full((), storage_offset or 0, dtype=torch.long)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(count) * step
        places = places + along.reshape(-1, *[1] * (len(size) - axis - 1))
    return put(self, places, src)


def put(self: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Nothing translates it."""
    flat = self.reshape(-1)
    index = index.reshape(-1)
    index = torch.where(index < 0, index + flat.shape[0], index)
    return torch.index_put(flat, (index,), source.reshape(-1), accumulate).reshape(self.shape)


def median_of_numbers(self: Any) -> Any:
    """``nanmedian`` of all elements."""
    return median_of_numbers_along(self.reshape(-1), 0)[0]


def median_of_numbers_along(self: Any, dim: int, keepdim: bool = False) -> Any:
    """``nanmedian``: the lower of the middle two of those elements that are numbers."""
    missing = torch.isnan(self)
    ordered, order = torch.where(missing, float("inf"), self).sort(dim)
    count = (~missing).sum(dim, keepdim=True)
    middle = ((count - 1) // 2).clamp(min=0)
    values = torch.where(count == 0, float("nan"), ordered.gather(dim, middle))
    found = values, order.gather(dim, middle)
    return found if keepdim else tuple(one.squeeze(dim) for one in found)


def random_order(n: int, **options: Any) -> Any:
    """``randperm``, which nothing translates: the order of random numbers."""
    return torch.rand(n).argsort().to(options.get("dtype") or torch.long)


def batch_normalized(
    input: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Batch normalization in training mode, for which torchlib takes the running statistics as well."""
    if not training:
        return NotImplemented
    own = private("definitions")[torch.ops.aten._native_batch_norm_legit_functional.default]
    return own(input, weight, bias, mean, variance, training, momentum, eps)


def search_for_number(sorted_sequence: Any, self: Any, **options: Any) -> Any:
    """``searchsorted`` of one number of Python."""
    return torch.searchsorted(sorted_sequence, torch.full((), self), **options)


def bucket_of_number(self: Any, boundaries: Any, **options: Any) -> Any:
    """``bucketize`` of one number of Python."""
    return torch.bucketize(torch.full((), self), boundaries, **options)


def product_of_reflections(input: Any, tau: Any) -> Any:
    """``householder_product``: the reflections of the columns one after another, from the last to the first."""
    rows, columns = input.shape[-2:]
    unit = torch.eye(rows, columns, dtype=input.dtype)
    vectors = input.tril(-1) + unit
    product = unit.expand(input.shape)
    for k in reversed(range(tau.shape[-1])):
        v = vectors[..., k : k + 1]
        product = product - tau[..., k, None, None] * v @ (v.mH @ product)
    return product


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


def solve_triangular(self: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """As any other system, of the triangle."""
    triangle = torch.triu(self, 1 if unitriangular else 0) if upper else torch.tril(self, -1 if unitriangular else 0)
    if unitriangular:
        triangle = triangle + torch.eye(self.shape[-1], dtype=self.dtype)
    outer = torch.broadcast_shapes(triangle.shape[:-2], B.shape[:-2])
    right = B.expand(*outer, *B.shape[-2:])
    return torch.linalg.solve(triangle.expand(*outer, *triangle.shape[-2:]), right, left=left)


def sign_and_logarithm(A: Any) -> Any:
    """``slogdet`` by the determinant. Its factors, which nothing uses, are the matrix."""
    determinant = torch.linalg.det(A)
    pivots = torch.zeros(A.shape[:-1], dtype=torch.int32)
    return torch.sign(determinant), torch.log(torch.abs(determinant)), A, pivots


def reflections(A: Any, mode: str = "reduced") -> Any:
    """``qr`` by Householder's reflections, in LAPACK's signs."""
    rows, columns = A.shape[-2:]
    count = min(rows, columns)
    right = A
    left = torch.eye(rows, dtype=A.dtype).expand(*A.shape[:-2], rows, rows)
    places = torch.arange(rows)
    for k in range(count if rows > columns else count - 1):
        column = torch.where(places >= k, right[..., k], 0)
        first = column[..., k : k + 1]
        length = torch.linalg.vector_norm(column, dim=-1, keepdim=True) * torch.where(first >= 0, -1.0, 1.0).to(A.dtype)
        v = column - torch.where(places == k, length, 0)
        square = (v * v).sum(-1)[..., None, None]
        v = v[..., None]
        share = torch.where(square > 0, 2 / torch.where(square > 0, square, 1), 0)
        right = right - share * v @ (v.mT @ right)
        left = left - share * (left @ v) @ v.mT
    if mode == "complete":
        return left, torch.triu(right)
    right = torch.triu(right[..., :count, :])
    return (left[..., :count] if mode == "reduced" else A.new_zeros(0)), right


def digamma(self: Any) -> Any:
    """Nothing translates it. Its asymptotic series beyond 6; recurrence below; reflection for negative numbers."""
    x = self.to(torch.float64)
    negative = x < 0.5
    z = torch.where(negative, 1 - x, x)
    below = torch.zeros_like(z)
    for _ in range(6):
        below = below + 1 / z
        z = z + 1
    inverse = 1 / (z * z)
    series = torch.zeros_like(z)
    for coefficient in (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12):
        series = (series + coefficient) * inverse
    value = torch.log(z) - 0.5 / z - series - below
    angle = torch.pi * x  # ONNX Runtime has no tangent in double precision
    return torch.where(negative, value - torch.pi * torch.cos(angle) / torch.sin(angle), value).to(self.dtype)


def hamming_window(
    window_length: int,
    periodic: bool = True,
    alpha: float = 0.54,
    beta: float = 0.46,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """ONNX's has other coefficients, 25/46 and 21/46."""
    dtype = dtype or torch.get_default_dtype()
    if window_length == 1:
        return torch.ones(1, dtype=dtype)
    places = torch.arange(window_length, dtype=dtype)
    return alpha - beta * torch.cos(places * (2 * math.pi / (window_length - (0 if periodic else 1))))


def decompositions() -> Decompositions:
    """FX operator to what it is in other operators."""
    aten = torch.ops.aten
    return {
        aten.scatter.reduce: scatter_with,
        aten.scatter.value_reduce: scatter_number_with,
        aten.scatter_reduce.two: scatter_reduced,
        aten.copy.default: copied,
        aten.diagonal_scatter.default: diagonal_written,
        aten._native_batch_norm_legit_functional.default: batch_normalized,
        aten.as_strided_scatter.default: strided_written,
        aten.put.default: put,
        aten.nanmedian.default: median_of_numbers,
        aten.nanmedian.dim: median_of_numbers_along,
        aten.randperm.default: random_order,
        aten.searchsorted.Scalar: search_for_number,
        aten.bucketize.Scalar: bucket_of_number,
        aten.linalg_householder_product.default: product_of_reflections,
        aten.hypot.default: hypotenuse,
        aten.randn.generator: randn,
        aten.rand.generator: rand,
        aten.cholesky_solve.default: cholesky_solve,
        aten.linalg_solve_triangular.default: solve_triangular,
        aten._linalg_slogdet.default: sign_and_logarithm,
        aten.linalg_qr.default: reflections,
        aten._linalg_svd.default: singular_values,
        aten._linalg_eigh.default: eigenvalues,
        aten.digamma.default: digamma,
        aten.hamming_window.default: hamming_window,
        aten.hamming_window.periodic: hamming_window,
        aten.hamming_window.periodic_alpha: hamming_window,
        aten.hamming_window.periodic_alpha_beta: hamming_window,
    }


def with_decompositions(decompose: Callable[..., ExportedProgram]) -> Callable[..., ExportedProgram]:
    """``ExportedProgram.run_decompositions`` with these decompositions, after which nodes keep their annotations."""

    def run_decompositions(
        program: ExportedProgram, decomp_table: Mapping[Any, Callable[..., Any]] | None = None, **options: Any
    ) -> ExportedProgram:
        table = dict((torch.export.default_decompositions() if decomp_table is None else decomp_table).items())
        table.update(decompositions())
        _refuse_written_constants(program)
        _forget_who_made_constants(program)
        if _has_complex(program) and usable("complex tensors", "complex operators", "registry", "definitions"):
            table.update(complex_decompositions(table))
        with replaced({"autocast": _interpreting, "gradients": _interpreting}):
            result = decompose(program, table, **options)
        for made, captured in list(views_made_again(program.graph, result.graph)):
            _annotate_as(made, captured)
        _annotate_outputs(program, result)
        return result

    return run_decompositions


def outputs_converted_back(prepare: Callable[..., ExportedProgram]) -> Callable[..., ExportedProgram]:
    """The preparation of ``torch.onnx``, which also leaves outputs in the types of the model's.

    It computes a sum of half-precision numbers in float32 and converts the result back for all nodes that use it. The
    outputs of a graph are taken from the signature of its program, which still names the node before the conversion.
    """

    def prepared(program: ExportedProgram, *args: Any, **options: Any) -> ExportedProgram:
        ready = prepare(program, *args, **options)
        specs, returned = ready.graph_signature.output_specs, ready.graph.output_node().args[0]
        assert isinstance(returned, (tuple, list))
        for index, (spec, node) in enumerate(zip(specs, returned, strict=True)):
            if isinstance(spec.arg, TensorArgument) and isinstance(node, torch.fx.Node):
                specs[index] = dataclasses.replace(spec, arg=TensorArgument(node.name))
        return ready

    return prepared


def _interpreting(call: Callable[..., Any]) -> Callable[..., Any]:
    """The operator of a part under ``torch.autocast`` or ``no_grad``, which interprets its graph.

    ``torch.export`` puts such code into graphs of their own, which decomposition runs as Python functions, so that it
    forgets everything that is known of their nodes. As interpreted graphs they are decomposed node by node.
    """

    def with_interpreters(operator: Any, *args: Any) -> Any:
        graph = torch.fx.GraphModule
        return call(operator, *(torch.fx.Interpreter(one).run if isinstance(one, graph) else one for one in args))

    return with_interpreters


def _refuse_written_constants(program: ExportedProgram) -> None:
    """Refuse a program in which strict mode took ``parameter.data`` for a constant that an operator writes into.

    The file would not have what is written, and torch ends the process with a segmentation fault when it decomposes it.

    Raises:
        RuntimeError: An operator writes into a constant.
    """
    kinds = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.CONSTANT_TENSOR}
    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        for argument, given in zip(schema_of(node.target).arguments, node.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(given, torch.fx.Node) and given.name in kinds:
                raise RuntimeError(
                    f"{node.target} writes into the data of a parameter or a constant, which no file keeps; "
                    "compute a new tensor instead"
                )


def _annotate_outputs(before: ExportedProgram, after: ExportedProgram) -> None:
    """Give the views that decomposition makes anew for the outputs of a program their annotations."""
    ended = zip(before.graph_signature.user_outputs, after.graph_signature.user_outputs, strict=True)
    old_nodes, new_nodes = ({node.name: node for node in one.graph.nodes} for one in (before, after))
    for old_name, new_name in ended:
        old, new = old_nodes.get(str(old_name)), new_nodes.get(str(new_name))
        while old is not None and new is not None and old.meta.get("custom") and not new.meta.get("custom"):
            if new.op != "call_function":
                break
            _annotate_as(new, old)
            old, new = (next(iter(node.all_input_nodes), None) for node in (old, new))


def _annotate_as(node: torch.fx.Node, other: torch.fx.Node) -> None:
    for key in ("custom", "nn_module_stack", "stack_trace"):
        if key in other.meta:
            node.meta[key] = other.meta[key]


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
