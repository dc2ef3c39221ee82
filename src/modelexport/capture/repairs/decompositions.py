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
from torch.fx.node import map_arg

from modelexport.capture.patches import private, replaced, usable
from modelexport.capture.repairs import (
    attention,
    fourier,
    indexing,
    integers,
    linear_algebra,
    losses,
    pooling,
    recurrent,
    resizing,
    sorting,
    special_functions,
)
from modelexport.capture.repairs.complex_numbers import Decompositions, complex_decompositions
from modelexport.capture.repairs.singular_values import eigenvalues, pseudo_inverse, singular_values
from modelexport.capture.shared_memory import views_made_again
from modelexport.pytorch.private_torch import tensor_leaves, written_by


def scatter_with(self: Any, dim: int, index: Any, src: Any, reduce: str) -> Any:
    """``scatter(reduce=...)`` of a tensor or a number, which nothing translates, as ``scatter_reduce``, which is."""
    source = src if isinstance(src, torch.Tensor) else torch.full_like(index, src, dtype=self.dtype)
    return torch.scatter_reduce(self, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])


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
    if include_self or reduce not in ("amax", "amin") or not self.is_floating_point():
        return NotImplemented
    begun = self.scatter(dim, index, float("-inf" if reduce == "amax" else "inf"))
    return torch.scatter_reduce(begun, dim, index, src, reduce, include_self=True)


def copied(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """``copy_`` of a tensor that is broadcast: torchlib copies it as it is."""
    return NotImplemented if self.shape == src.shape else src.to(self.dtype).expand(self.shape).clone()


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
    """``put``, which torch.onnx does not translate: ``index_put`` into the flattened tensor."""
    flat = self.reshape(-1)
    index = index.reshape(-1)
    index = torch.where(index < 0, index + flat.shape[0], index)
    return torch.index_put(flat, (index,), source.reshape(-1), accumulate).reshape(self.shape)


def random_order(n: int, **options: Any) -> Any:
    """``randperm``, which nothing translates: the order of random numbers."""
    return torch.rand(n).argsort().to(options.get("dtype") or torch.long)


def drawn_below(input: Any, p: Any = None, *, generator: Any = None, out: Any = None) -> Any:
    """``bernoulli``, as uniform numbers below a probability: ONNX Runtime's operator gives 1 where they are above."""
    drawn = (torch.rand_like(input, dtype=torch.float32) < (input if p is None else p)).to(input.dtype)
    return drawn if out is None else out.zero_().add_(drawn)


def batch_normalized(
    input: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Batch normalization in training mode, for which torchlib takes the running statistics as well."""
    if not training:
        return NotImplemented
    definition = private("definitions")[torch.ops.aten._native_batch_norm_legit_functional.default]
    return definition(input, weight, bias, mean, variance, training, momentum, eps)


def without_generator(draw: Callable[..., Any]) -> Callable[..., Any]:
    """``rand`` and ``randn`` of a generator: ONNX has no generators."""

    def drawn(size: Any, *, generator: Any = None, **options: Any) -> Any:
        return draw(size, **options)

    return drawn


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """A sum with a table that maps indices to bags, instead of torchlib's loop over a sequence.

    The loop's nodes do not refer to an FX node, so their module would be unknown.
    """
    starts = offsets[:-1] if include_last_offset else offsets
    count = indices.shape[0]
    positions = torch.arange(count, dtype=starts.dtype)
    ends = torch.cat([starts[1:], torch.full((1,), count, dtype=starts.dtype)])
    inside = (positions >= starts.unsqueeze(1)) & (positions < ends.unsqueeze(1))
    if padding_idx is not None:
        inside = inside & (indices != padding_idx % weight.shape[0])
    rows = weight[indices]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    sizes = inside.sum(1)
    if mode == 2:
        largest = torch.where(inside.unsqueeze(2), rows, float("-inf")).amax(1)
        result = torch.where(sizes.unsqueeze(1) > 0, largest, 0)
    else:
        result = inside.to(weight.dtype) @ rows
        result = result / sizes.clamp(min=1).unsqueeze(1) if mode == 1 else result
    return result, positions, sizes, sizes.clone()


def _overloads(function: Callable[..., Any], *names: str) -> Decompositions:
    """All overloads of some operators to a function, without those that write into an argument."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return {
        getattr(packet, name): function for packet in packets for name in packet.overloads() if not name.endswith("out")
    }


def decompositions() -> Decompositions:
    """FX operators to decompositions into others; torch.onnx does not translate most of them."""
    aten, prims = torch.ops.aten, torch.ops.prims
    return {
        aten.scatter.reduce: scatter_with,
        aten.scatter.src: indexing.with_source_of_index(aten.scatter.src),
        aten.scatter_add.default: indexing.with_source_of_index(aten.scatter_add.default),
        aten.scatter.value_reduce: scatter_with,
        aten.scatter_reduce.two: scatter_reduced,
        aten.copy.default: copied,
        aten.diagonal_scatter.default: diagonal_written,
        aten.as_strided_scatter.default: strided_written,
        aten.put.default: put,
        aten.unfold_backward.default: fourier.windows_added,
        aten._native_batch_norm_legit_functional.default: batch_normalized,
        aten.scaled_dot_product_attention.default: attention.attention,
        aten.index.Tensor: indexing.with_long_indices(aten.index.Tensor),
        aten.split.Tensor: indexing.split,
        aten.repeat_interleave.self_int: indexing.repeated,
        aten.roll.default: fourier.rolled,
        aten.fft_fftfreq.default: fourier.frequencies,
        aten.fft_rfftfreq.default: fourier.half_the_frequencies,
        aten.upsample_linear1d.vec: resizing.linear,
        aten.pixel_shuffle.default: resizing.pixels_of_channels,
        aten.lstm.input: recurrent.projected_lstm,
        aten.embedding_bag.padding_idx: embedding_bag,
        aten.embedding_bag.default: embedding_bag,
        aten.randperm.default: random_order,
        aten.bernoulli.default: drawn_below,
        aten.bernoulli.p: drawn_below,
        aten.bernoulli.Tensor: drawn_below,
        aten.randn.generator: without_generator(torch.randn),
        aten.rand.generator: without_generator(torch.rand),
        **_overloads(integers.shifted_left, "__lshift__", "bitwise_left_shift"),
        **_overloads(integers.shifted_right, "__rshift__", "bitwise_right_shift"),
        **_overloads(integers.with_sizes_as_tensors(torch.pow), "pow"),
        **_overloads(integers.with_sizes_as_tensors(torch.bitwise_and), "bitwise_and"),
        **_overloads(integers.with_sizes_as_tensors(torch.bitwise_or), "bitwise_or"),
        **_overloads(integers.with_sizes_as_tensors(torch.bitwise_xor), "bitwise_xor"),
        aten.remainder.Scalar_Tensor: integers.with_sizes_as_tensors(torch.remainder),
        aten.rsub.Scalar: integers.taken_from,
        aten.clamp.default: integers.between,
        aten.copysign.Scalar: integers.with_sign_of,
        aten.stack.default: integers.stacked,
        aten.relu.default: integers.without_negative,
        aten.floor.default: integers.whole,
        aten.ceil.default: integers.whole,
        aten.round.default: integers.whole,
        aten.trunc.default: integers.whole,
        aten.sort.stable: sorting.stable,
        aten.median.dim: sorting.median,
        aten.median.default: sorting.median_of_all,
        aten.nanmedian.default: sorting.median_of_numbers,
        aten.nanmedian.dim: sorting.median_of_numbers_along,
        aten.kthvalue.default: sorting.kth_value,
        aten.amax.default: sorting.of_all(torch.amax),
        aten.amin.default: sorting.of_all(torch.amin),
        aten.cummax.default: sorting.running(torch.amax),
        aten.cummin.default: sorting.running(torch.amin),
        **_overloads(sorting.search, "searchsorted"),
        **_overloads(sorting.bucket, "bucketize"),
        aten.cross_entropy_loss.default: losses.cross_entropy,
        aten.multilabel_margin_loss.default: losses.multilabel_margin_loss,
        aten.rrelu.default: losses.rrelu,
        aten.adaptive_max_pool2d.default: pooling.adaptive_max_pool,
        aten.adaptive_max_pool3d.default: pooling.adaptive_max_pool,
        aten.avg_pool2d.default: pooling.average_with_divisor(torch.nn.functional.avg_pool2d, 2),
        aten.avg_pool3d.default: pooling.average_with_divisor(torch.nn.functional.avg_pool3d, 3),
        aten._adaptive_avg_pool2d.default: pooling.adaptive_average_pool,
        aten._adaptive_avg_pool3d.default: pooling.adaptive_average_pool,
        aten.fractional_max_pool2d.default: pooling.fractional_max_pool,
        aten.fractional_max_pool3d.default: pooling.fractional_max_pool,
        aten.linalg_inv.default: linear_algebra.inverse,
        aten.linalg_inv_ex.default: linear_algebra.inverse_ex,
        aten.linalg_solve.default: linear_algebra.solve,
        aten._linalg_solve_ex.default: linear_algebra.solve_ex,
        aten.linalg_solve_triangular.default: linear_algebra.solve_triangular,
        aten.linalg_cholesky.default: linear_algebra.cholesky,
        aten.linalg_cholesky_ex.default: linear_algebra.cholesky_ex,
        aten.cholesky_solve.default: linear_algebra.cholesky_solve,
        aten.linalg_matrix_exp.default: linear_algebra.matrix_exponential,
        aten.linalg_householder_product.default: linear_algebra.product_of_reflections,
        aten.linalg_qr.default: linear_algebra.reflections,
        aten._linalg_slogdet.default: linear_algebra.sign_and_logarithm,
        aten._linalg_svd.default: singular_values,
        aten._linalg_eigh.default: eigenvalues,
        aten.linalg_pinv.atol_rtol_tensor: pseudo_inverse,
        aten._cdist_forward.default: linear_algebra.distances,
        aten._pdist_forward.default: linear_algebra.distances_within,
        aten.log1p.default: special_functions.log_plus_one,
        aten.expm1.default: special_functions.exponential_minus_one,
        aten.logaddexp.default: special_functions.log_of_sum(math.e, torch.exp),
        aten.logaddexp2.default: special_functions.log_of_sum(2, torch.exp2),
        aten.logcumsumexp.default: special_functions.running_log_of_sum,
        aten.erfc.default: special_functions.error_complement,
        aten.special_erfcx.default: special_functions.scaled_error_complement,
        aten.remainder.Tensor: special_functions.remainder,
        aten.remainder.Scalar: special_functions.remainder,
        aten.floor_divide.default: special_functions.rounded_once(special_functions.floored_quotient),
        aten.div.Tensor_mode: special_functions.rounded_once(special_functions.quotient),
        aten.atan2.default: special_functions.angle,
        aten.hypot.default: special_functions.hypotenuse,
        aten._weight_norm_interface.default: special_functions.weight_normalized,
        aten.digamma.default: special_functions.digamma,
        aten.lgamma.default: special_functions.log_gamma,
        aten.erfinv.default: special_functions.error_inverse,
        aten.log_sigmoid.default: special_functions.rounded_once(special_functions.log_sigmoid),
        aten.histc.default: special_functions.histogram,
        aten.fmax.default: special_functions.but_nan(torch.gt),
        aten.fmin.default: special_functions.but_nan(torch.lt),
        prims.prod.default: special_functions.product_along,
        prims.signbit.default: special_functions.is_negative,
        aten.signbit.default: special_functions.is_negative,
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
        for view, captured in list(views_made_again(program.graph, result.graph)):
            _annotate_as(view, captured)
        _annotate_outputs(program, result)
        _write_known_sizes(result)
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
        return call(operator, *(torch.fx.Interpreter(part).run if isinstance(part, graph) else part for part in args))

    return with_interpreters


def _refuse_written_constants(program: ExportedProgram) -> None:
    """Refuse a program in which strict mode took ``parameter.data`` for a constant that an operator writes into.

    The file would not have what is written, and torch ends the process with a segmentation fault when it decomposes it.

    Raises:
        RuntimeError: An operator writes into a constant.
    """
    inputs = program.graph_signature.input_specs
    constants = {spec.arg.name for spec in inputs if spec.kind is InputKind.CONSTANT_TENSOR}
    for node in program.graph.nodes:
        for argument in written_by(node.target, node.args, node.kwargs):
            if isinstance(argument, torch.fx.Node) and argument.name in constants:
                raise RuntimeError(
                    f"{node.target} writes into the data of a parameter or a constant, which no file keeps; "
                    "compute a new tensor instead"
                )


def _write_known_sizes(program: ExportedProgram) -> None:
    """Write the numbers of sizes of which the capture found one value: attributes of operators take no others."""
    fixed = {symbol: size.lower for symbol, size in program.range_constraints.items() if size.lower == size.upper}
    known = {
        node: int(number)
        for node in program.graph.nodes
        if isinstance(size := node.meta.get("val"), torch.SymInt) and (number := size.node.expr.subs(fixed)).is_number
    }
    for user in {user for node in known for user in node.users if user.op == "call_function"}:
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda node: known.get(node, node))


def _annotate_outputs(before: ExportedProgram, after: ExportedProgram) -> None:
    """Give the views that decomposition makes anew for the outputs of a program their annotations."""
    ended = zip(before.graph_signature.user_outputs, after.graph_signature.user_outputs, strict=True)
    old_nodes, new_nodes = ({node.name: node for node in program.graph.nodes} for program in (before, after))
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
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    values = tensor_leaves([node.meta.get("val") for graph in graphs for node in graph.nodes])
    return any(value.is_complex() for value in values)
