"""The conditions that runs with symbolic sizes record: a trace records none, and a capture only one side of each."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import operator
from collections.abc import Callable, Collection
from functools import partialmethod
from itertools import islice
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from modelexport.capture.patches import private, replaced, usable
from modelexport.capture.python_kernels import PythonKernels
from modelexport.capture.recorded_conditions import RecordedConditions
from modelexport.capture.repairs.recurrent import steps_open
from modelexport.core.replaced_attributes import attribute_set
from modelexport.graph.size_conditions import SizeCondition, renamed, sizes_against
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.inputs.other_sizes import (
    inputs_of_file,
    symbol_sizes,
    symbols_by_input,
    too_large,
    with_sizes,
)
from modelexport.pytorch.nested_tensors import Inputs, run_arguments, tensors_in
from modelexport.pytorch.private_torch import FakeTensorMode, tree_map


def with_implied(
    model: nn.Module, inputs: Inputs, graph: ir.Model, recorded: Collection[SizeCondition]
) -> tuple[SizeCondition, ...]:
    """Recorded conditions, and those that runs with symbolic sizes record on the other side of each.

    Where ``n > 6`` is known, ``n > 4`` is not recorded; of ``n > 6 and m > 6`` not the second if the first is false.
    """
    sizes, found = symbol_sizes(inputs, graph), list(recorded)
    asked = [(condition, sizes) for condition in found if decides(condition) and {*condition.symbols} <= sizes.keys()]
    runs = 0
    for condition, base in asked:  # which grows
        others = islice(sizes_against(condition, base), 2)
        # Sizes without 1 come first: torch has a plain number for a size 1, not a symbol, and records nothing of it.
        other = min(others, key=lambda each: 1 in each.values(), default=None)
        if other is None or too_large(inputs, graph, other):
            continue
        beyond = conditions_by_symbols(model, with_sizes(inputs, graph, other), graph)
        implied = [each for each in beyond if decides(each) and each.holds(sizes) and each not in found]
        runs += not implied
        if runs == _RUNS:  # each costs a part of an export, and few models have such a decision
            break
        found += implied
        asked += [(each, other) for each in implied]
    return tuple(found)


_RUNS = 2
"""After how many runs that recorded nothing new no more are made."""


def decides(condition: SizeCondition) -> bool:
    """Whether the model's own code compares sizes, and does not only make numbers of them, as the text of an error."""
    return condition.in_model and not condition.makes_number


def conditions_by_symbols(
    model: nn.Module, inputs: Inputs, graph: ir.Model, *, lengths_are_numbers: bool = False
) -> tuple[SizeCondition, ...]:
    """The conditions that a run with symbolic sizes records before it ends, and if it fails, those of a second run.

    Args:
        lengths_are_numbers: What ``len`` returns is an ``int`` for the model, as a dictionary and ``isinstance`` need.
    """
    if not usable("symbols", "comparisons", "ranges", "formulas"):
        return ()
    shapes, recorded = private("symbols"), RecordedConditions()
    axes, in_file = symbols_by_input(graph), inputs_of_file(inputs, graph)
    names = {id(tensor): in_file.get(name, "") for name, tensor in tensors_in(inputs)}
    env = shapes.ShapeEnv()
    fake, symbols = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True), dict[str, str]()

    def symbolic(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        sizes = axes.get(names.get(id(value), ""), [None] * value.dim())
        kinds = [shapes.DimDynamic.STATIC if size is None else shapes.DimDynamic.DYNAMIC for size in sizes]
        context = shapes.StatelessSymbolicContext(dynamic_sizes=kinds)
        tensor = fake.from_tensor(value, symbolic_context=context)
        for size, symbol in zip(sizes, tensor.shape, strict=False):
            if size is not None and not isinstance(symbol, int):
                symbols[str(symbol)] = size
                dynamic.append(symbol)
        return tensor

    def length(of: Any, builtin: Callable[[Any], int] = len) -> Any:
        """What ``len`` returns, with the symbol of a tensor's size: Python takes only a number from ``__len__``."""
        if not isinstance(of, torch.Tensor) or not of.dim():
            return builtin(of)
        lengths.append(of.shape[0])
        return _number(lengths[-1]) if lengths_are_numbers else lengths[-1]

    def plain(size: Any, name: str, convert: Callable[..., Any], *spec: str) -> Any:
        """What a method makes of the number of the example, to which torch would make the size equal from then on."""
        noted = recorded.note_number(size)
        return getattr(size.node.hint, name)(*spec) if noted or spec else convert(size)

    def whole(size: Any, rounding: Callable[..., Any]) -> Any:
        """What ``math.floor`` and ``math.ceil`` make of a size, which is a plain number in the trace."""
        number = rounding(size)
        if isinstance(number, torch.SymInt):
            recorded.note_number(number)
        return number

    failed, lengths, dynamic = False, list[Any](), list[Any]()
    try:
        with untouched(model, runs=False), torch.no_grad(), contextlib.ExitStack() as stack:
            args, kwargs = run_arguments(tree_map(symbolic, inputs))
            stack.enter_context(replaced({"comparisons": recorded.answering}))
            stack.enter_context(steps_open())
            stack.enter_context(attribute_set(builtins, "len", length))
            quotient_and_rest = attribute_set(torch.SymInt, "__divmod__", lambda *of: (of[0] // of[1], of[0] % of[1]))
            stack.enter_context(quotient_and_rest)
            for name in ("__floor__", "__ceil__"):
                rounding = getattr(torch.SymFloat, name)
                stack.enter_context(attribute_set(torch.SymFloat, name, partialmethod(whole, rounding)))
            for kind, name in itertools.product((torch.SymInt, torch.SymFloat), _TO_NUMBERS):
                if convert := getattr(kind, name, None):
                    stack.enter_context(attribute_set(kind, name, partialmethod(plain, name, convert)))
            with fake, PythonKernels(recorded):
                model(*args, **kwargs)
    except Exception as error:  # of the model, and of operations that do not take symbols
        failed = True
        recorded.note_end(error, dynamic)
    again = failed and lengths and not lengths_are_numbers
    more = conditions_by_symbols(model, inputs, graph, lengths_are_numbers=True) if again else ()
    return (*renamed(recorded.conditions(), symbols), *more)


_TO_NUMBERS = ("__int__", "__index__", "__float__", "__repr__", "__format__")
"""The methods by which Python makes a plain number, or a text, of a symbolic one."""


class _Number(int):
    """A length that is a number, except that a symbol computes and compares in its place."""

    symbol: torch.SymInt


def _number(value: Any) -> Any:
    """The number that a symbolic one is in the example."""
    if not isinstance(value, torch.SymInt) or value.node.hint is None:
        return bool(value) if isinstance(value, torch.SymBool) else value
    number = _Number(value.node.hint)
    number.symbol = value
    return number


def _of_symbols(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that the symbols of its numbers do."""
    return lambda *of: _number(operation(*(each.symbol if isinstance(each, _Number) else each for each in of)))


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    setattr(_Number, f"__{_name}__", _of_symbols(getattr(operator, _name)))
    setattr(_Number, f"__r{_name}__", _of_symbols(lambda own, other, name=_name: getattr(operator, name)(other, own)))
for _name in ("lt", "le", "eq", "ne", "gt", "ge", "neg"):
    setattr(_Number, f"__{_name}__", _of_symbols(getattr(operator, _name)))
