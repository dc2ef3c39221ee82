"""Recurrent layers that ONNX has no operator for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_gru, aten_lstm

from modelexport.capture.patches import private, usable
from modelexport.capture.repairs.translation_constants import ints
from modelexport.pytorch.private_torch import schema_of


def layer_by_layer(
    run: Callable[..., tuple[Any, ...]],
    steps: Any,
    states: Sequence[Any],
    params: Sequence[Any],
    layers: int,
    directions: int,
) -> tuple[Any, ...]:
    """What a recurrent layer of several layers and directions gives at each step, and its last states.

    Args:
        run: Computes one layer in one direction from its steps, its first states, its parameters and whether it goes
            backward; gives the same.
        directions: The number of directions.
    """
    each = len(params) // (layers * directions)
    last: list[Sequence[Any]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            first = [state[index : index + 1] for state in states]
            output, *ends = run(steps, first, params[index * each : (index + 1) * each], bool(direction))
            outputs.append(output)
            last.append(ends)
        steps = torch.cat(outputs, -1)
    return steps, *map(torch.cat, zip(*last, strict=True))


def projected_lstm(input: Any, hx: Sequence[Any], params: Sequence[Any], *options: Any) -> Any:
    """``nn.LSTM`` with ``proj_size``: torchlib takes the fifth parameter of a layer for the first of the next one.

    ONNX has no projection. A layer without one whose recurrent weights are those of the projected state, ``R P``, makes
    the same states before they are projected, but for the first step, whose state is given projected. Its share of that
    step comes as further columns of the input, which are zero in all other steps.
    """
    has_biases, num_layers, _, _, bidirectional, batch_first = options
    directions = 2 if bidirectional else 1
    if len(params) == (4 if has_biases else 2) * num_layers * directions:
        return NotImplemented

    def run(steps: Any, states: Sequence[Any], weights: Sequence[Any], backward: bool) -> tuple[Any, Any, Any]:
        (state, cell), (of_input, of_state, *biases, projection) = states, weights
        only_first = torch.cat([state, state.new_zeros(steps.shape[0] - 1, *state.shape[1:])])
        both = torch.cat([steps.flip(0) if backward else steps, only_first], -1)
        plain = [torch.cat([of_input, of_state], 1), of_state @ projection, *biases]
        begun = [torch.zeros_like(cell), cell]
        output, last, last_cell = torch.lstm(both, begun, plain, has_biases, 1, 0.0, False, False, False)
        output = (output.flip(0) if backward else output) @ projection.mT
        return output, last @ projection.mT, last_cell

    steps = input.transpose(0, 1) if batch_first else input
    output, *last = layer_by_layer(run, steps, hx, params, num_layers, directions)
    return output.transpose(0, 1) if batch_first else output, *last


def lstm(input: Any, hx: Sequence[Any], params: Sequence[Any], *options: Any) -> Any:
    """Torchlib reads widths from the states, whose sizes are symbols where they are arguments of the model."""
    _set_width(hx[0], params[1].shape[1])
    _set_width(hx[1], params[0].shape[0] // 4)
    return aten_lstm(input, hx, params, *options)


def gru(input: Any, hx: Any, params: Sequence[Any], *options: Any) -> Any:
    """The same."""
    _set_width(hx, params[1].shape[1])
    return aten_gru(input, hx, params, *options)


def _set_width(state: Any, width: int) -> None:
    """Write the size that the weights tell into the shape of a state; PyTorch has refused others."""
    if state.shape is not None and not isinstance(state.shape[2], int):
        state.shape = ir.Shape([*state.shape.dims[:2], width])


def rnn(activation: str) -> Callable[..., Any]:
    """``nn.RNN``, which torch.onnx writes step by step, for as many steps as the example has."""

    def translated(input: Any, hx: Any, params: Sequence[Any], *options: Any) -> Any:
        has_biases, num_layers, _, _, bidirectional, batch_first = options
        directions, each, hidden = (2 if bidirectional else 1), (4 if has_biases else 2), params[1].shape[1]
        layer_input, last = op.Transpose(input, perm=[1, 0, 2]) if batch_first else input, []
        for layer in range(num_layers):
            first = layer * directions
            of_directions = [params[index * each : (index + 1) * each] for index in range(first, first + directions)]
            weights, recurrent = (_stacked([tensors[index] for tensors in of_directions]) for index in (0, 1))
            biases = _stacked([op.Concat(*tensors[2:], axis=0) for tensors in of_directions]) if has_biases else None
            steps, state = op.RNN(
                layer_input,
                weights,
                recurrent,
                biases,
                None,
                op.Slice(hx, ints(first), ints(first + directions), ints(0)),
                activations=[activation] * directions,
                direction="bidirectional" if bidirectional else "forward",
                hidden_size=hidden,
            )
            layer_input = op.Reshape(op.Transpose(steps, perm=[0, 2, 1, 3]), ints(0, 0, -1))
            last.append(state)
        output = op.Transpose(layer_input, perm=[1, 0, 2]) if batch_first else layer_input
        return output, op.Concat(*last, axis=0)

    return translated


def _stacked(values: Sequence[Any]) -> Any:
    return op.Concat(*(op.Unsqueeze(value, ints(0)) for value in values), axis=0)


def _shapes(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in schema_of(operator).arguments]

    def shapes(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        states = list(arguments["hx"]) if isinstance(arguments["hx"], (list, tuple)) else [arguments["hx"]]
        steps = arguments["input"]
        width = states[0].shape[-1] * (2 if arguments["bidirectional"] else 1)
        return (steps.new_empty((*steps.shape[:-1], width)), *(torch.empty_like(state) for state in states))

    return shapes


@contextmanager
def steps_open() -> Iterator[None]:
    """Inside, nothing is computed by recurrent layers: the shapes of their results follow from those of their inputs.

    Only of the operators that are translated as they are.
    """
    if not usable("definitions", "kernels", "cached kernels", "dispatch keys"):
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
