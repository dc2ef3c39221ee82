"""Computes the steps of a weight in float64, as :mod:`.file_run` computes the nodes of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.format.documents import TransformStep
from modelexport.traces.node_computation import widen_attributes
from modelexport.traces.numpy_kernels import KERNELS, makes_whole_numbers, without_last_bits
from modelexport.weights.recorded_transforms import run_step, step_attributes


def exact_step(step: TransformStep, inputs: Sequence[Any], later: Sequence[TransformStep]) -> tuple[Any, ...]:
    """The outputs of a step whose numbers are all in float64."""
    if step.domain:
        return run_step(step, inputs)
    if step.op_type == "Constant":
        (array,) = run_step(step, inputs)
        return (array if array.dtype.kind in "biu" else array.astype(np.float64),)
    to = ir.DataType(step.attributes["to"]) if step.op_type == "Cast" else None
    if to is not None and to.is_floating_point():
        wider = any(one.op_type == "Cast" and ir.DataType(one.attributes["to"]).bitwidth > to.bitwidth for one in later)
        rounds = wider and to.bitwidth < ir.DataType.FLOAT.bitwidth  # there and back; float32 stands for float64 here
        return ((inputs[0].astype(to.numpy()) if rounds else inputs[0]).astype(np.float64),)
    if makes_whole_numbers(step.op_type, to):
        inputs = [without_last_bits(array) if array.dtype == np.float64 else array for array in inputs]
    from onnx.reference.ops import load_op  # slow to import

    kernel = KERNELS.get(step.op_type) or load_op("", step.op_type, step.version)
    with np.errstate(all="ignore"):
        implementation = kernel.create(len(inputs), **step_attributes(step))
        widen_attributes(implementation)
        return tuple(implementation.run(*inputs))
