"""Every operator that ``to_torch`` writes computes what the standard says, with every attribute: onnx's own cases."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from modelexport.errors import ModelExportError
from modelexport.torch_source.layer_operators import OPERATORS
from modelexport.torch_source.to_torch import as_tensor, torch_source

OTHER = re.compile(
    # random numbers; training; texts; float8 and float4, whose rounding torch does not have; sequences as inputs
    r"bernoulli|dropout.*(training|random|_mask|zero_ratio)|batchnorm.*training|string|float8|FLOAT8|FLOAT4|float4|e8m0|E8M0"
    r"|(u?int2|u?INT2)(_|$)|optional|_seq|sequence|sce_.*log_prob|_expanded|gradient|momentum|adagrad|adam"
    # what a fixed number of axes, sizes or other facts are needed for, which these cases leave open
    r"|loop|if_|scan|range_.*|identity_opt|reshape_allowzero|peepholes|precomputed_strides|tf_crop|not_larger|not_smaller"
    # what torch does not compute in these types; sizes that the standard leaves open
    r"|uint(16|32|64)|UINT(16|32|64)|bitwise_not_3d|downsample_scales_(linear|cubic)_align_corners|off_main_diagonal"
    r"|starts_on_pad|(local|bidirectional)_window|reduce_(max|min)_empty|e4m3|e5m2|quantizelinear_u?int4|training_dropout"
)


@functools.cache
def cases() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    return [
        case
        for case in found
        if all(isinstance(each, np.ndarray) for inputs, _ in case.data_sets for each in inputs)
        and len(case.model.graph.node) == 1
        and ("", case.model.graph.node[0].op_type) in OPERATORS
        and not OTHER.search(case.name)
    ]


def ran(case: Any, inputs: Any) -> list[Any]:
    """The case with its constants in the file, as exporters write them, so that sizes are Python's numbers."""
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    feeds = dict(zip([value.name for value in model.graph.input], inputs, strict=False))
    for value in list(model.graph.input)[1:]:
        array = feeds.get(value.name)
        if isinstance(array, np.ndarray) and array.dtype.kind in "iub" and array.ndim < 2:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
            model.graph.input.remove(value)
    module = torch_source(ir.from_proto(model)).model()
    with torch.no_grad():
        result = module(*(as_tensor(feeds[value.name]) for value in model.graph.input))
    return list(result.values()) if isinstance(result, dict) else [result]


def check(case: Any) -> str:
    for inputs, expected in case.data_sets:
        found = ran(case, inputs)
        for right, tensor in zip(expected, found, strict=True):
            if not isinstance(right, np.ndarray | np.generic):
                continue
            other = tensor.to(torch.float32).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
            one = np.asarray(right)
            if one.shape != other.shape:
                return f"{list(other.shape)} instead of {list(one.shape)}"
            if one.dtype.kind in "fc" or one.dtype.name == "bfloat16":
                scale = max(1.0, float(np.abs(np.where(np.isfinite(one), one, 0)).max(initial=0)))
                tolerance = {2: 2e-2, 4: 2e-5}.get(one.dtype.itemsize, 1e-7) * scale
                if not np.allclose(one.astype(np.float64), other.astype(np.float64), 0, tolerance, equal_nan=True):
                    return "other numbers"
            elif not np.array_equal(one.astype(np.int64), other.astype(np.int64)):
                return "other numbers"
    return ""


@pytest.mark.parametrize("operator", sorted({name for domain, name in OPERATORS if not domain}))
@pytest.mark.sweep
def test_an_operator_computes_what_the_standard_says(operator: str) -> None:
    wrong = {}
    for case in cases():
        if case.model.graph.node[0].op_type == operator:
            try:
                reason = check(case)
            except ModelExportError as error:
                reason = str(error)
            if reason:
                wrong[case.name] = reason
    assert not wrong
