"""Functions of PyTorch that no front end can capture as they are: they read values where nothing can follow them."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from modelexport.capture.patches import replaced
from modelexport.capture.repairs import attention, integers, special_functions
from modelexport.capture.repairs.decompositions import drawn_below, embedding_bag
from modelexport.capture.repairs.packed_sequences import packed_sequences, unless_packed
from modelexport.capture.repairs.sized_tensors import SIZED
from modelexport.capture.repairs.special_functions import rounded_once, rounded_with_its_number


@contextmanager
def values_not_read(model: torch.nn.Module) -> Iterator[None]:
    """Inside, PyTorch itself reads no values in order to warn of them or to refuse them, and the model converts modules
    in the graph.

    Its distributions do so by default, in Python, and some functions in C++, as packed sequences do with lengths. No
    front end can follow either.
    """
    names: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(("states", "cells"), unless_packed),
        "roots": functools.partial(_also_of_sizes, torch.sym_sqrt),
        "powers": functools.partial(_also_of_sizes, lambda number: math.e**number),
        "validation": lambda _: False,
        "conversions": lambda _: functools.partialmethod(converted, _shared_entries(model)),
        "quotients": lambda _: quotient_and_rest,
        "rounding": lambda _: rounded,
    }
    with replaced(names), Rewritten({**REWRITTEN, **packed_sequences()}):
        yield


@contextmanager
def translatable(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the same holds, and functions that the TorchScript exporter does not translate are computed by others."""
    with values_not_read(model), Rewritten(TRANSLATABLE):
        yield


def reading_no_values(capture: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.export.export``, inside of which the same holds: then the code of a model runs.

    The steps after it ask for the shapes and types of tensors a hundred thousand times, and each would be intercepted.
    Strict mode reads what only the code of a graph defines.
    """

    def export(mod: torch.nn.Module, *args: Any, strict: bool = False, **kwargs: Any) -> Any:
        with values_not_read(mod), replaced({"lazy graphs": lambda _: False} if strict else {}):
            return capture(mod, *args, strict=strict, **kwargs)

    return export


class Rewritten(TorchFunctionMode):
    """Inside, some functions are computed by others."""

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))


def converted(module: Any, places: _Places, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """``Module._apply``, by which ``half`` and ``to`` convert a module: its weights become results of the graph, also
    in other modules that share them.

    Args:
        places: For each entry of a module that is shared, all entries that hold it.
    """
    for child in module.children() if recurse else ():
        child._apply(fn)
    for entries in (module._parameters, module._buffers):
        for name, tensor in entries.items():
            if tensor is not None:
                result = fn(tensor)
                for holding, other in places.get((id(entries), name), [(entries, name)]):
                    holding[other] = result
    return module


_Places = Mapping[tuple[int, str], list[tuple[dict[str, Any], str]]]


def _shared_entries(model: torch.nn.Module) -> _Places:
    """The parameters and buffers of a model that several modules share: the dictionary and name of each, to all."""
    places = defaultdict[int, list[tuple[dict[str, Any], str]]](list)
    for module in model.modules():
        for entries in (module._parameters, module._buffers):
            for name, tensor in entries.items():
                if tensor is not None:
                    places[id(tensor)].append((entries, name))
    return {(id(entries), name): found for found in places.values() if len(found) > 1 for entries, name in found}


def quotient_and_rest(number: Any, other: Any) -> Any:
    """``divmod``, which sizes of a capture do not have."""
    return number // other, number % other


def rounded(number: Any, digits: int | None = None) -> Any:
    """``round`` of a number that is made of sizes, to the even one of two integers that are equally near."""
    if digits is not None:
        raise NotImplementedError("round(..., digits) of what is made of sizes: leave out the digits, or scale by hand")
    above, below = math.floor(number + 0.5), math.ceil(number - 0.5)
    return above - (above - below) * (above % 2)


def _also_of_sizes(of_sizes: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``math`` that takes sizes, too. Python's own converts them to numbers, which fixes the axes."""
    return lambda number: (of_sizes if isinstance(number, torch.SymInt | torch.SymFloat) else function)(number)


def covariance(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """``torch.cov``, which warns of too few observations."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    if fweights is None and aweights is None:
        x = x - x.mean(1, keepdim=True)
        return (x @ x.mH / max(x.shape[1] - correction, 0)).squeeze()
    weight = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total = weight.sum()
    norm = total - correction * (1 if aweights is None else (weight * aweights).sum() / total)
    x = x - ((x * weight).sum(1) / total).unsqueeze(1)
    return (x @ (x * weight).mH / norm.clamp(min=0)).squeeze()


def correlation(input: Any) -> Any:
    """``torch.corrcoef``."""
    together = covariance(input)
    if together.dim() == 0:
        return together / together
    variance = together.diagonal()
    deviation = (variance.real if variance.is_complex() else variance).sqrt()
    shares = together / deviation[:, None] / deviation
    if shares.is_complex():
        return torch.complex(shares.real.clamp(-1, 1), shares.imag.clamp(-1, 1))
    return shares.clamp(-1, 1)


def combinations(input: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """``torch.combinations``, which selects by a mask of a known number of elements."""
    length: Any = input.shape[0]
    if type(length) is not int:
        places = torch.meshgrid([torch.arange(length)] * r, indexing="ij")
        pairs = [a <= b if with_replacement else a < b for a, b in itertools.pairwise(places)]
        return input[functools.reduce(torch.logical_and, pairs).nonzero()]
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    return input[torch.tensor(list(choose(range(len(input)), r)), dtype=torch.long).reshape(-1, r)]


def gaussian_loss(*args: Any, **kwargs: Any) -> Any:
    """``gaussian_nll_loss`` without its check that no variance is negative."""
    with replaced({"any": lambda _: lambda condition: False}):
        return torch.nn.functional.gaussian_nll_loss(*args, **kwargs)


REWRITTEN: Mapping[Any, Callable[..., Any]] = {
    torch.cov: covariance,
    torch.Tensor.cov: covariance,
    torch.corrcoef: correlation,
    torch.Tensor.corrcoef: correlation,
    torch.combinations: combinations,
    torch.Tensor.nbytes.__get__: lambda x: x.numel() * x.element_size(),  # type: ignore[attr-defined]  # a descriptor
    torch.nn.functional.gaussian_nll_loss: gaussian_loss,
    attention.ATTENTION: attention.attention_of_equal_sizes,
    **SIZED,
}


def difference(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """``torch.diff``."""
    parts = [part for part in (prepend, input, append) if part is not None]
    one_row = input.narrow(dim, 0, 1).shape
    x = torch.cat([part if part.dim() else part.expand(one_row) for part in parts], dim)
    for _ in range(min(n, x.shape[dim])):
        size = x.shape[dim]
        after, before = x.narrow(dim, 1, size - 1), x.narrow(dim, 0, size - 1)
        x = after ^ before if x.dtype == torch.bool else after - before
    return x


def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """``torch.bilinear``."""
    left = torch.matmul(input1.unsqueeze(-2).unsqueeze(-2), weight).squeeze(-2)
    product = torch.matmul(left, input2.unsqueeze(-1)).squeeze(-1)
    return product if bias is None else product + bias


def running_sum(input: Any, dim: int, **kwargs: Any) -> Any:
    """``torch.cumsum``, which takes conditions as numbers; ONNX's ``CumSum`` does not."""
    return torch.cumsum(input.long() if input.dtype == torch.bool else input, dim, **kwargs)


def floored_quotient(input: Any, other: Any) -> Any:
    """``torch.floor_divide``, which is truncated; also of sizes, which are scalars of a trace and may be negative."""
    quotient = special_functions.floored_quotient(input, other)
    if quotient is not NotImplemented:
        return quotient
    return torch.div(input, other, rounding_mode="floor") if input.dim() else (input - input % other) // other


def shifted_right(input: Any, other: Any) -> Any:
    """``torch.bitwise_right_shift``, which is floored; the exporter's is truncated, and so are its quotients."""
    with Rewritten({torch.Tensor.__floordiv__: functools.partial(torch.div, rounding_mode="floor")}):
        return integers.shifted_right(input, other)


def quotient(input: Any, other: Any, **options: Any) -> Any:
    """``torch.div``, whose quotients are rounded before they are floored, and truncated as integers."""
    if options == {"rounding_mode": "floor"}:
        return rounded_once(floored_quotient)(input, other)
    if options == {"rounding_mode": "trunc"} and torch.result_type(input, other).is_floating_point:
        return rounded_once(special_functions.quotient)(input, other, **options)
    return torch.div(input, other, **options)


def remainder(input: Any, other: Any, **options: Any) -> Any:
    """``torch.remainder``, for which the quotient is rounded."""
    rest = NotImplemented if options else special_functions.remainder(input, other)
    return torch.remainder(input, other, **options) if rest is NotImplemented else rest


def any_of(input: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.any``, which numbers below one are not true for."""
    return torch.any(input != 0, *args, **kwargs)


def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """``torch.cosine_similarity``: the exporter compares the product of both norms with ``eps``, and their squares
    overflow.
    """
    if x1.dtype != x2.dtype:
        x1, x2 = x1.to(dtype := torch.result_type(x1, x2)), x2.to(dtype)
    if x1.dim() != x2.dim() or x1.shape[dim] != x2.shape[dim]:
        x1, x2 = torch.broadcast_tensors(x1, x2)
    first, second = (x / torch.linalg.vector_norm(x, 2, dim, keepdim=True).clamp(min=eps) for x in (x1, x2))
    return (first * second).sum(dim)


def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    """``torch.pairwise_distance``: the exporter leaves out ``eps``, and signs where ``p`` is odd."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


def bags(input: Any, weight: Any, offsets: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``embedding_bag``: the largest of an empty bag is zero; the exporter's is minus infinity."""
    given = _OF_BAGS.bind(input, weight, offsets, *args, **kwargs)
    given.apply_defaults()
    how = given.arguments
    if how["max_norm"] is not None:
        return torch.nn.functional.embedding_bag(input, weight, offsets, *args, **kwargs)
    weights, flat = how["per_sample_weights"], input.reshape(-1)
    offsets = torch.arange(0, input.numel(), input.shape[1]) if input.dim() == 2 else offsets
    return embedding_bag(
        weight,
        flat,
        offsets,
        mode=("sum", "mean", "max").index(how["mode"]),
        per_sample_weights=None if weights is None else weights.reshape(-1),
        include_last_offset=how["include_last_offset"],
        padding_idx=how["padding_idx"],
    )[0]


_OF_BAGS = inspect.signature(torch.nn.functional.embedding_bag)


def selected(input: Any, index: Any) -> Any:
    """``Tensor.__getitem__``: places of several tensors are computed by the exporter, of negative ones as they are."""
    parts = index if isinstance(index, tuple) else (index,)
    if sum(isinstance(part, list) or (isinstance(part, torch.Tensor) and part.dim() > 0) for part in parts) < 2:
        return torch.Tensor.__getitem__(input, index)
    places, axis = [], 0
    for position, part in enumerate(parts):
        counts = isinstance(part, torch.Tensor) and part.dtype in (torch.int64, torch.int32) and part.dim() > 0
        places.append(torch.where(part < 0, part + input.shape[axis], part) if counts else part)
        axis = input.dim() - sum(map(_axes, parts[position + 1 :])) if part is ... else axis + _axes(part)
    return torch.Tensor.__getitem__(input, tuple(places))


def _axes(part: Any) -> int:
    """How many axes a part of an index takes."""
    if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 0 if part is None or part is ... or isinstance(part, bool) else 1


TRANSLATABLE: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.bernoulli, torch.Tensor.bernoulli), drawn_below),
    torch.Tensor.bernoulli_: lambda x, p=0.5, **options: x.copy_(drawn_below(x, p)),
    **dict.fromkeys(
        (torch.floor_divide, torch.Tensor.floor_divide, torch.Tensor.__floordiv__), rounded_once(floored_quotient)
    ),
    **dict.fromkeys(
        (torch.bitwise_right_shift, torch.Tensor.bitwise_right_shift, torch.Tensor.__rshift__), shifted_right
    ),
    **dict.fromkeys(
        (torch.Tensor.bitwise_right_shift_, torch.Tensor.__irshift__), lambda x, by: x.copy_(shifted_right(x, by))
    ),
    torch.Tensor.__rrshift__: lambda x, number: shifted_right(number, x),
    **dict.fromkeys((torch.div, torch.Tensor.div, torch.divide, torch.Tensor.divide), quotient),
    **dict.fromkeys((torch.remainder, torch.Tensor.remainder), rounded_with_its_number(remainder)),
    **dict.fromkeys((torch.fmod, torch.Tensor.fmod), rounded_with_its_number(torch.fmod)),
    **dict.fromkeys((torch.trunc, torch.Tensor.trunc, torch.fix, torch.Tensor.fix), special_functions.truncated),
    **dict.fromkeys((torch.frac, torch.Tensor.frac), special_functions.fraction),
    **dict.fromkeys(
        (torch.atan2, torch.Tensor.atan2, torch.arctan2, torch.Tensor.arctan2), rounded_once(special_functions.angle)
    ),
    **dict.fromkeys((torch.any, torch.Tensor.any), any_of),
    torch.cosine_similarity: cosine_similarity,
    torch.pairwise_distance: pairwise_distance,
    torch.Tensor.__getitem__: selected,
    torch.nn.functional.embedding_bag: bags,
    torch.diff: difference,
    torch.Tensor.diff: difference,
    torch.bilinear: bilinear,
    torch.nn.functional.bilinear: bilinear,
    torch.histc: special_functions.histogram,
    torch.Tensor.histc: special_functions.histogram,
    torch.nn.functional.logsigmoid: rounded_once(special_functions.log_sigmoid),
    torch.nn.functional.scaled_dot_product_attention: attention.traced_attention,
    torch.nn.functional.multi_head_attention_forward: attention.traced_heads,
    torch.cumsum: running_sum,
    torch.Tensor.cumsum: running_sum,
}
