"""Every operator that ``to_torch`` writes computes what the standard says, with every attribute: onnx's own cases."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.backend.test.case import node

from modelexport.tools.to_torch.layer_operators import OPERATORS
from modelexport.tools.to_torch.nested_graphs import MissingOperatorError
from modelexport.tools.to_torch.to_torch import as_tensor, torch_source

OTHER = re.compile(
    # random numbers; training; texts; float8 and float4, whose rounding torch does not have; sequences as inputs
    r"bernoulli|dropout.*(training|random|_mask|zero_ratio)|batchnorm.*training|string|float8|FLOAT8|FLOAT4|float4|e8m0|E8M0"
    r"|(u?int2|u?INT2)(_|$)|optional|_seq|sequence_(?!batch|time)|sce_.*log_prob|_expanded|gradient|momentum|adagrad|adam"
    # what a fixed number of axes, sizes or other facts are needed for, which these cases leave open
    r"|loop|if_|scan|range_.*|identity_opt|reshape_allowzero"
    # what torch does not compute in these types; sizes that the standard leaves open
    r"|uint(16|32|64)|UINT(16|32|64)|bitwise_not_3d|starts_on_pad|reduce_(max|min)_empty|e4m3|e5m2"
    r"|quantizelinear_u?int4|training_dropout|qk_matmul"
)


def cases(operator: str) -> list[Any]:
    """The cases of an operator: onnx makes them as it imports the modules that name it."""
    with warnings.catch_warnings(action="ignore"):
        for file in Path(node.__file__).parent.glob("*.py"):
            if f'"{operator}"' in file.read_text(encoding="utf-8"):
                importlib.import_module(f"{node.__name__}.{file.stem}")
    with mock.patch.object(node, "import_recursive"):
        found = node.collect_testcases()
    return [
        case
        for case in found
        if all(isinstance(each, np.ndarray | np.generic) for inputs, _ in case.data_sets for each in inputs)
        and len(case.model.graph.node) == 1
        and case.model.graph.node[0].op_type == operator
        and not OTHER.search(case.name)
    ]


def ran(case: Any, inputs: Any, *, outputs: int) -> list[Any]:
    """The case with its constants in the file, as exporters write them, so that sizes are Python's numbers."""
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    feeds = dict(zip([value.name for value in model.graph.input], inputs, strict=False))
    del model.graph.output[outputs:]
    for value in list(model.graph.input)[1:]:
        array = feeds.get(value.name)
        if array.ndim < 2 and (array.dtype.kind in "iub" or value.name in ("scales", "sizes")):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
            model.graph.input.remove(value)
    module = torch_source(ir.from_proto(model)).model()
    with torch.no_grad():
        result = module(*(as_tensor(feeds[value.name]) for value in model.graph.input))
    return list(result.values()) if isinstance(result, dict) else [result]


def check(case: Any) -> str:
    """What is wrong; empty if nothing is."""
    for inputs, expected in case.data_sets:
        try:
            found = ran(case, inputs, outputs=len(expected))
        except MissingOperatorError:  # of its other outputs, which files do not use outside of training
            found = ran(case, inputs, outputs=1)
        for right, tensor in zip(expected, found, strict=False):
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


CORNERS_OF_WHOLE_SIZES = {f"test_resize_downsample_scales_{mode}_align_corners" for mode in ("linear", "cubic")}
"""PyTorch and ONNX Runtime take whole sizes for the places of corners; these cases, a size times the scale."""


WITHOUT_CASES = {
    "Cast", "CastLike", "ConcatFromSequence", "GRU", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike", "Range", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceLength",
    "SimplifiedLayerNormalization",
}  # fmt: skip
"""Operators whose cases are left out (``OTHER``), have random results, or do not exist; other tests have them."""


@pytest.mark.parametrize("operator", sorted({name for domain, name in OPERATORS if not domain} - WITHOUT_CASES))
@pytest.mark.sweep
def test_an_operator_computes_what_the_standard_says(operator: str) -> None:
    """It may be refused instead, with some attributes, but not with all."""
    wrong, refused, of_operator = {}, [], cases(operator)
    for case in of_operator:
        try:
            if reason := check(case):
                wrong[case.name] = reason
        except MissingOperatorError:
            refused.append(case.name)
    assert wrong.keys() <= CORNERS_OF_WHOLE_SIZES
    assert len(refused) < len(of_operator)
