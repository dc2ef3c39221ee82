"""Recurrent layers that ONNX has no operator for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_gru, aten_lstm

from modelexport.capture.patches import private, usable
from modelexport.capture.repairs.translation_constants import ints
from modelexport.pytorch.private_torch import schema_of

_END = np.iinfo(np.int64).max


def lstm(
    input: Any,
    hx: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Torchlib takes the fifth parameter of a layer with ``proj_size`` for the first of the next layer.

    ONNX has no projection. A layer without one whose recurrent weights are those of the projected state, ``W P``, makes
    the same states before they are projected, except in the first step, whose state is given projected: that step is
    written out. No issue of torch.onnx is known; https://github.com/k2-fsa/icefall/pull/621 works around the same gap.
    """
    _set_width(hx[0], params[1].shape[1])
    _set_width(hx[1], params[0].shape[0] // 4)
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    if each == (4 if has_biases else 2):
        return aten_lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    given = op.Transpose(input, perm=[1, 0, 2]) if batch_first else input
    states: list[Any] = []
    cells: list[Any] = []
    for layer in range(num_layers):
        made = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = params[index * each : (index + 1) * each]
            first = [op.Squeeze(op.Slice(one, ints(index), ints(index + 1), ints(0)), ints(0)) for one in hx]
            output, state, cell = _projected(given, first[0], first[1], weights, reverse=bool(direction))
            made.append(output)
            states.append(op.Unsqueeze(state, ints(0)))
            cells.append(op.Unsqueeze(cell, ints(0)))
        given = made[0] if directions == 1 else op.Concat(*made, axis=-1)
    output = op.Transpose(given, perm=[1, 0, 2]) if batch_first else given
    return output, op.Concat(*states, axis=0), op.Concat(*cells, axis=0)


def gru(input: Any, hx: Any, params: Sequence[Any], *options: Any) -> Any:
    """Torchlib reads the width from the state, whose sizes are symbols where it is an argument of the model."""
    _set_width(hx, params[1].shape[1])
    return aten_gru(input, hx, params, *options)


def _set_width(state: Any, width: int) -> None:
    """Write the size that the weights tell into the shape of a state; PyTorch has refused others."""
    if state.shape is not None and not isinstance(state.shape[2], int):
        state.shape = ir.Shape([*state.shape.dims[:2], width])


def _projected(x: Any, state: Any, cell: Any, weights: Sequence[Any], *, reverse: bool) -> tuple[Any, Any, Any]:
    """One layer in one direction: what it gives at each step, and the last state and cell."""
    w, r, projection = weights[0], weights[1], weights[-1]
    biases = weights[2:4] if len(weights) == 5 else ()
    hidden = r.shape[0] // 4
    first, rest = (ints(-1), ints(_END)), (ints(0), ints(-1))
    if not reverse:
        first, rest = (ints(0), ints(1)), (ints(1), ints(_END))
    step = op.Squeeze(op.Slice(x, *first, ints(0)), ints(0))
    gates = op.Add(op.MatMul(step, _turned(w)), op.MatMul(state, _turned(r)))
    for bias in biases:
        gates = op.Add(gates, bias)
    i, f, g, o = (op.Slice(gates, ints(k * hidden), ints((k + 1) * hidden), ints(-1)) for k in range(4))
    cell = op.Add(op.Mul(op.Sigmoid(f), cell), op.Mul(op.Sigmoid(i), op.Tanh(g)))
    plain = op.Mul(op.Sigmoid(o), op.Tanh(cell))
    given = [
        op.Slice(x, *rest, ints(0)),
        op.Unsqueeze(_reordered(w, hidden), ints(0)),
        op.Unsqueeze(_reordered(op.MatMul(r, projection), hidden), ints(0)),
        op.Unsqueeze(op.Concat(*(_reordered(bias, hidden) for bias in biases), axis=0), ints(0)) if biases else None,
        None,
        op.Unsqueeze(plain, ints(0)),
        op.Unsqueeze(cell, ints(0)),
    ]
    y, last, last_cell = op.LSTM(*given, hidden_size=hidden, direction="reverse" if reverse else "forward")
    both = [op.Unsqueeze(plain, ints(0)), op.Squeeze(y, ints(1))]
    steps = op.Concat(*(reversed(both) if reverse else both), axis=0)
    turned = _turned(projection)
    # Of a sequence of one step nothing is left, for which the operator has no last state.
    alone = op.Equal(op.Shape(x, start=0, end=1), ints(1))
    last = op.Where(alone, plain, op.Squeeze(last, ints(0)))
    last_cell = op.Where(alone, cell, op.Squeeze(last_cell, ints(0)))
    return op.MatMul(steps, turned), op.MatMul(last, turned), last_cell


def _turned(matrix: Any) -> Any:
    return op.Transpose(matrix, perm=[1, 0])


def _reordered(weights: Any, hidden: int) -> Any:
    """PyTorch has the gates as i, f, g, o, ONNX as i, o, f, g."""
    parts = [op.Slice(weights, ints(k * hidden), ints((k + 1) * hidden), ints(0)) for k in (0, 3, 1, 2)]
    return op.Concat(*parts, axis=0)


def rnn(activation: str) -> Callable[..., Any]:
    """``nn.RNN``, which torch.onnx writes step by step, for as many steps as the example has."""

    def translated(
        input: Any,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        directions, each, hidden = (2 if bidirectional else 1), (4 if has_biases else 2), params[1].shape[1]
        given, last = op.Transpose(input, perm=[1, 0, 2]) if batch_first else input, []
        for layer in range(num_layers):
            first = layer * directions
            ways = [params[way * each : (way + 1) * each] for way in range(first, first + directions)]
            weights, recurrent = (_stacked([way[index] for way in ways]) for index in (0, 1))
            biases = _stacked([op.Concat(*way[2:], axis=0) for way in ways]) if has_biases else None
            steps, state = op.RNN(
                given,
                weights,
                recurrent,
                biases,
                None,
                op.Slice(hx, ints(first), ints(first + directions), ints(0)),
                activations=[activation] * directions,
                direction="bidirectional" if bidirectional else "forward",
                hidden_size=hidden,
            )
            given = op.Reshape(op.Transpose(steps, perm=[0, 2, 1, 3]), ints(0, 0, -1))
            last.append(state)
        output = op.Transpose(given, perm=[1, 0, 2]) if batch_first else given
        return output, op.Concat(*last, axis=0)

    return translated


def _stacked(values: Sequence[Any]) -> Any:
    return op.Concat(*(op.Unsqueeze(value, ints(0)) for value in values), axis=0)


def _shapes(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in schema_of(operator).arguments]

    def shapes(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        states = list(given["hx"]) if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
        steps = given["input"]
        width = states[0].shape[-1] * (2 if given["bidirectional"] else 1)
        return (steps.new_empty((*steps.shape[:-1], width)), *(torch.empty_like(state) for state in states))

    return shapes


@contextmanager
def steps_open() -> Iterator[None]:
    """Inside, nothing is computed by recurrent layers: the shapes of their results follow from those of their inputs.

    Only of the operators that are translated as they are.
    """
    if not usable("definitions", "kernels", "kernels' cache", "dispatch keys"):
        yield
        return
    table = private("definitions")
    aten = torch.ops.aten
    known = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
    operators = [operator for operator in known if operator in table]
    before = {operator: (table[operator], dict(operator.py_kernels)) for operator in operators}
    dispatch = private("dispatch keys")
    keys = (dispatch.CompositeImplicitAutograd, dispatch.Autograd)
    try:
        for operator in operators:
            table[operator] = _shapes(operator)
            operator.py_kernels.update(dict.fromkeys(keys, table[operator]))
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, (decomposition, kernels) in before.items():
            table[operator] = decomposition
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()
