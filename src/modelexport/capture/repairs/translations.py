"""The translations and how they are handed over: ``torch.onnx.export(custom_translation_table=...)``.

So every node that they make belongs to the FX node that it was made for. Each says what was wrong; the smallest model
of each is in ``tests/capture/test_repairs.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelexport.capture import USUAL_FORM, QuantizedForm
from modelexport.capture.repairs import elements, linalg, losses, numbers, ordering, pooling, quantized, recurrent

Table = dict[Callable[..., Any], Callable[..., Any]]


def translations(form: QuantizedForm = USUAL_FORM) -> Table:
    """FX operator to the function that makes its ONNX nodes."""
    aten, prims = torch.ops.aten, torch.ops.prims
    return {
        aten.squeeze.dim: elements.squeeze,
        aten.masked_scatter.default: elements.masked_scatter,
        aten.masked_select.default: elements.masked_select,
        aten._unique2.default: elements.unique,
        aten.unique_consecutive.default: elements.unique_in_turn,
        aten.embedding_bag.padding_idx: elements.embedding_bag,
        aten.embedding_bag.default: elements.embedding_bag,
        aten.histc.default: elements.histc,
        aten.arange.start: elements.numbers_from,
        aten.arange.start_step: elements.numbers_by_step,
        aten.cross_entropy_loss.default: losses.cross_entropy,
        aten.multilabel_margin_loss.default: losses.multilabel_margin_loss,
        aten.rrelu.default: losses.rrelu,
        aten.adaptive_max_pool2d.default: pooling.adaptive_max_pool,
        aten.adaptive_max_pool3d.default: pooling.adaptive_max_pool,
        aten._adaptive_avg_pool3d.default: pooling.adaptive_average_pool,
        aten.fractional_max_pool2d.default: pooling.fractional_max_pool,
        aten.fractional_max_pool3d.default: pooling.fractional_max_pool,
        **pooling.max_pools(),
        aten.inverse.default: linalg.inverse,
        aten.linalg_inv.default: linalg.inverse,
        aten.linalg_inv_ex.default: linalg.inverse_ex,
        aten.linalg_solve.default: linalg.solve,
        aten._linalg_solve_ex.default: linalg.solve_ex,
        aten.linalg_cholesky.default: linalg.cholesky,
        aten.linalg_cholesky_ex.default: linalg.cholesky_ex,
        aten.linalg_matrix_exp.default: linalg.matrix_exponential,
        aten._cdist_forward.default: linalg.distances,
        aten._pdist_forward.default: linalg.distances_within,
        aten.log_sigmoid.default: numbers.log_sigmoid,
        aten.lgamma.default: numbers.log_gamma,
        prims.lgamma.default: numbers.log_gamma,
        aten.erfinv.default: numbers.error_inverse,
        prims.erf_inv.default: numbers.error_inverse,
        prims.prod.default: numbers.product,
        prims.signbit.default: numbers.is_negative,
        aten.median.dim: ordering.median,
        aten.median.default: ordering.median_of_all,
        aten.kthvalue.default: ordering.kth_value,
        aten.amax.default: ordering.largest,
        aten.amin.default: ordering.smallest,
        aten.cummax.default: ordering.running_maximum,
        aten.cummin.default: ordering.running_minimum,
        aten.searchsorted.Tensor: ordering.search,
        aten.bucketize.Tensor: ordering.bucket,
        aten.lstm.input: recurrent.lstm,
        **quantized.linear(form),
    }


def overriding() -> Table:
    """Those that go before what the exporter of transformers has for the same operator."""
    aten = torch.ops.aten
    return {
        aten.index_put.default: elements.index_put,
        aten._unsafe_index_put.default: elements.index_put,
        aten.squeeze.dim: elements.squeeze,
    }


def with_translations(export: Callable[..., Any], programs: list[Any], ours: Table) -> Callable[..., Any]:
    """``torch.onnx.export`` with these translations.

    The exporter of transformers gives it a table of its own. What ``torch.onnx.export`` returned is added to the list:
    that exporter keeps of it the graph alone, and not what the graph was translated from.
    """

    def with_more(*args: Any, custom_translation_table: Table | None = None, **kwargs: Any) -> Any:
        table = {**ours, **(custom_translation_table or {}), **overriding()}
        programs.append(export(*args, custom_translation_table=table, **kwargs))
        return programs[-1]

    return with_more
