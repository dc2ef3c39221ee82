"""Operators at the ends of the range of their type: zero, tiny, large and infinite numbers, and NaN.

``docs/evidence/range-ends.md`` is generated from the tables: ``python tests/range_ends.py``. A slow test measures them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from modelexport import export

F, special, inf = nn.functional, torch.special, float("inf")
Function = Callable[..., torch.Tensor]


def _named(room: Any, names: str) -> dict[str, Function]:
    return {name: getattr(room, name) for name in names.split()}


NUMBERS: dict[str, Function] = {
    **_named(
        torch, "abs neg sign floor ceil round trunc frac exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal"
    ),
    **_named(
        torch, "square sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh sigmoid erf erfc erfinv lgamma"
    ),
    **_named(torch, "digamma logit nan_to_num isnan isinf isfinite signbit deg2rad sinc logical_not angle"),
    **_named(F, "relu relu6 elu selu celu gelu silu mish softplus softsign logsigmoid hardtanh hardsigmoid hardswish"),
    **_named(F, "tanhshrink softshrink hardshrink leaky_relu"),
    **_named(special, "entr ndtr log_ndtr erfcx"),
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus, beta": lambda x: F.softplus(x, beta=3.0, threshold=10),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp from below": lambda x: x.clamp(min=-1),
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "x ** -1": lambda x: x**-1,
    "x ** 1.7": lambda x: x**1.7,
    "2 ** x": lambda x: 2**x,
    "round, decimals": lambda x: torch.round(x, decimals=2),
    "logit, eps": lambda x: torch.logit(x, eps=1e-3),
    "nan_to_num, values": lambda x: torch.nan_to_num(x, 1.0, 2.0, -2.0),
    "x % 3": lambda x: x % 3,
    "x % -3": lambda x: x % -3,
    "fmod 3": lambda x: torch.fmod(x, 3),
    "x // 3": lambda x: x // 3,
    "x // -3": lambda x: x // -3,
    "div, trunc": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "bool": lambda x: x.bool(),
}
PAIRS: dict[str, Function] = {
    **_named(torch, "add sub mul div maximum minimum pow remainder fmod floor_divide atan2 hypot copysign logaddexp"),
    **_named(torch, "logaddexp2 xlogy eq ne lt le gt ge isclose ldexp heaviside logical_xor"),
    **_named(special, "xlog1py"),
    "clamp from below by": lambda a, b: a.clamp(min=b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b),
    "mse_loss": lambda a, b: F.mse_loss(a, b, reduction="none"),
    "smooth_l1_loss": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
    "huber_loss": lambda a, b: F.huber_loss(a, b, reduction="none"),
    "binary_cross_entropy_with_logits": lambda a, b: F.binary_cross_entropy_with_logits(a, b, reduction="none"),
    "soft_margin_loss": lambda a, b: F.soft_margin_loss(a, b.sign(), reduction="none"),
    "kl_div": lambda a, b: F.kl_div(a, b.clamp(0, 1), reduction="none"),
    "poisson_nll_loss": lambda a, b: F.poisson_nll_loss(a, b, reduction="none"),
}


def _last(name: str) -> Function:
    return lambda x: getattr(torch, name)(x, -1)


LABELS = torch.tensor([0, 1, 2, 3] * 4)
ROWS: dict[str, Function] = {
    **{name: _last(name) for name in ("sum", "mean", "std", "var", "prod", "amax", "amin", "argmax", "argmin")},
    **{name: _last(name) for name in ("logsumexp", "softmax", "log_softmax", "cumsum", "logcumsumexp", "nansum")},
    **{name: _last(name) for name in ("any", "all", "count_nonzero")},
    "max": lambda x: x.max(-1).values,
    "cummax": lambda x: x.cummax(-1).values,
    "logcumsumexp, columns": lambda x: x[:6].logcumsumexp(0),
    "median": lambda x: x.median(-1).values,
    "nanmedian": lambda x: x.nanmedian(-1).values,
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(2, -1).values,
    **{f"norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p, -1) for p in (0, 0.5, 1, 2, 3, inf, -inf)},
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0), -1),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(0)),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "masked softmax": lambda x: x.masked_fill(x > 50, -inf).softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS, reduction="none"),
    "cross_entropy, probabilities": lambda x: F.cross_entropy(x, torch.full_like(x, 0.25), reduction="none"),
    "nll_loss": lambda x: F.nll_loss(x, LABELS, reduction="none"),
    "max_pool1d": lambda x: F.max_pool1d(x[None], 2)[0],
    "avg_pool1d": lambda x: F.avg_pool1d(x[None], 2)[0],
    "scatter_reduce, amax": lambda x: torch.zeros_like(x).scatter_reduce(1, torch.zeros_like(x).long(), x, "amax"),
    "searchsorted": lambda x: torch.searchsorted(torch.tensor([-50.0, 0.0, 1.0, 99.0], dtype=x.dtype), x),
}
LAST_NAN = "a NaN that is not the first element is left out: ONNX Runtime's kernel"
ORDER_OF_NAN = "NaN is not the largest number: ONNX Runtime's kernel"
NAN = "of NaN: a number"
OVERFLOW = "where one of both overflows: sums in another order, or in float32"
INFINITE = "of infinities: another of NaN and infinity"
SIGMOID = "ONNX Runtime's kernel is off by 1e-4 of the result at -9, and zero below -18"
BESIDE_ONE = "ONNX Runtime's kernel subtracts one: numbers below 1e-7 are lost"
STEPS = "PyTorch rounds less, or more, steps to float16"
ALWAYS, NEVER, SOME = "differs", "equal", "differs on some processors"
DIFFERENT: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(("sign", "soft_margin_loss"), (ALWAYS, SOME, NAN)),
    **dict.fromkeys(("angle", "heaviside", "logit, eps", "xlogy"), (ALWAYS, ALWAYS, NAN)),
    **dict.fromkeys(("sigmoid", "silu"), (ALWAYS, NEVER, SIGMOID)),
    "lgamma": (ALWAYS, ALWAYS, "of infinities: NaN; in float32 of -1e-30: infinity, and of 1: -4e-16"),
    "digamma": (ALWAYS, ALWAYS, "of negative integers: a number or infinity, where PyTorch gives NaN"),
    **dict.fromkeys(("elu", "selu", "celu"), (ALWAYS, NEVER, BESIDE_ONE)),
    "gelu": (SOME, NEVER, INFINITE),
    "cosine_similarity": (ALWAYS, SOME, INFINITE),
    "tanhshrink": (ALWAYS, NEVER, "of 1e-30: 1e-37"),
    **dict.fromkeys(("remainder", "fmod"), (ALWAYS, NEVER, "3e38 and less than one: PyTorch gives NaN")),
    "logaddexp2": (ALWAYS, NEVER, "of -1 and -1: PyTorch gives -1e-8"),
    **dict.fromkeys(("sum", "mean", "std", "nansum"), (ALWAYS, NEVER, OVERFLOW)),
    **dict.fromkeys(("ldexp", "poisson_nll_loss"), (NEVER, SOME, OVERFLOW)),
    "normalize": (ALWAYS, SOME, OVERFLOW),
    **dict.fromkeys(("sinc", "ndtr", "lerp", "binary_cross_entropy_with_logits"), (NEVER, SOME, STEPS)),
    **dict.fromkeys(("amax", "amin", "max", "argmax", "argmin", "cummax"), (ALWAYS, ALWAYS, LAST_NAN)),
    **dict.fromkeys(("norm inf", "norm -inf", "max_pool1d", "scatter_reduce, amax"), (ALWAYS, ALWAYS, LAST_NAN)),
    **dict.fromkeys(("median", "sort", "topk"), (ALWAYS, ALWAYS, ORDER_OF_NAN)),
}
"""The operators that ONNX Runtime computes otherwise somewhere: in float32, in float16, and where or why.

``SOME`` is what PyTorch's or ONNX Runtime's kernels for AVX-512 do and those for AVX2 do not, or the other way round.
"""
DTYPES = (torch.float32, torch.float16)
TABLES: dict[str, dict[str, Function]] = {"numbers": NUMBERS, "pairs": PAIRS, "rows": ROWS}


def inputs(table: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The ends of the range: single numbers, all pairs of them, or rows of four."""
    half = dtype is torch.float16
    large, tiny, square = (65504.0, 6e-8, 250.0) if half else (3e38, 1e-30, 1e19)
    if table == "rows":
        rows = [[0, 0, 0, 0], [1e-4, 2e-4, -1e-4, 0], [88, -88, 100, 90], [100, 200, -50, 100], [1e4, -1e4, 9e3, 1]]
        rows += [
            [large, -large, large / 2, 1],
            [square, square, -square, square],
            [square * 1.5, square, square * 2, 1],
        ]
        rows += [[inf, 1, 2, 3], [-inf, 1, 2, 3], [-inf] * 4, [inf, inf, 1, -inf], [math.nan, 1, 2, 3]]
        rows += [[1, math.nan, 5, inf], [3, 3, 1, 3], [-5, -4, -3, -100]]
        return (torch.tensor(rows, dtype=dtype),)
    positive = [0.0, tiny, 0.5, 1.0, 1.5, 2.5, 9.0, 20.0, 88.0, 100.0, 1e4, large, inf]
    ends = torch.tensor([*positive, *(-number for number in positive), math.nan], dtype=dtype)
    if table == "numbers":
        return (ends,)
    return tuple(grid.reshape(-1).contiguous() for grid in torch.meshgrid(ends, ends, indexing="ij"))


class Computes(nn.Module):
    """Some operators of one input, or of two."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: function(*x) for name, function in self.functions.items()}


def different(
    table: str, dtype: torch.dtype, folder: Path, only: Mapping[str, Function] | None = None
) -> dict[str, str]:
    """The operators that ONNX Runtime computes otherwise than PyTorch, each with its first differences.

    Zeros are equal whatever their sign: ONNX Runtime's ``Where`` does not keep it.
    """
    arguments = inputs(table, dtype)
    table_of = only or TABLES[table]
    functions = {name: function for name, function in table_of.items() if _has_kernel(function, arguments)}
    model = Computes(functions)
    plain = tuple(torch.linspace(0.1, 0.9, tensor.numel(), dtype=dtype).reshape(tensor.shape) for tensor in arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(model, plain, folder / "m.onnx", frontend="dynamo", check=False)
        right = model(*arguments)
    session = onnxruntime.InferenceSession(folder / "m.onnx")
    feeds = {value.name: tensor.numpy() for value, tensor in zip(session.get_inputs(), arguments, strict=True)}
    results = session.run(None, feeds)
    texts = {}
    for (name, expected), other in zip(right.items(), results, strict=True):
        places = list(_apart(expected.numpy(), other, 4e-3 if dtype is torch.float16 else 2e-5))
        if places:
            of = [
                tuple(float(x[place[: x.dim()]]) if x.dim() <= len(place) else x[place].tolist() for x in arguments)
                for place in places[:3]
            ]
            texts[name] = f"{len(places)}: " + ", ".join(
                f"{o} gives {other[p]} not {expected.numpy()[p]}" for o, p in zip(of, places, strict=False)
            )
    return texts


def _has_kernel(function: Function, arguments: tuple[torch.Tensor, ...]) -> bool:
    try:
        function(*arguments)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _apart(right: Any, actual: Any, allowed: float) -> Iterator[tuple[int, ...]]:
    assert (right.shape, right.dtype) == (actual.shape, actual.dtype), (
        right.shape,
        right.dtype,
        actual.shape,
        actual.dtype,
    )
    first, other = right.astype(np.float64), actual.astype(np.float64)
    with np.errstate(all="ignore"):
        smallest = np.finfo(right.dtype).tiny if right.dtype.kind == "f" else 0
        close = np.abs(first - other) <= allowed * np.abs(first) + smallest
    return map(tuple, np.argwhere(~((first == other) | (np.isnan(first) & np.isnan(other)) | close)).tolist())


def page() -> str:
    """``docs/evidence/range-ends.md``."""
    count = sum(map(len, TABLES.values()))
    lines = [
        "# Operators at the ends of their range",
        "",
        f"{count} operators, exported by `dynamo` from plain inputs and run in ONNX Runtime at 0, 1e-30, 1, 88,",
        "1e4, 3e38 (in float16 6e-8 and 65504), infinity, all of these below zero, NaN, and all pairs of them, or",
        "rows with them; compared with PyTorch in float32 and float16: within 2e-5 and 4e-3 of each number, however",
        "small. The table is in `tests/range_ends.py`, which prints this page; a slow test measures it, on processors",
        "with and without AVX-512. Zeros are equal whatever their sign, which ONNX Runtime's `Where` does not keep.",
        "",
        "| operator | float32 | float16 | where it differs |",
        "|---|---|---|---|",
    ]
    for table, functions in TABLES.items():
        arguments = [inputs(table, dtype) for dtype in DTYPES]
        for name, function in functions.items():
            *cells, reason = DIFFERENT.get(name, (NEVER, NEVER, ""))
            for column, ends in enumerate(arguments):
                if not _has_kernel(function, ends):
                    cells[column] = "not in PyTorch"
            lines.append(f"| `{name}` | {cells[0]} | {cells[1]} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "evidence" / "range-ends.md").write_text(page(), encoding="utf-8")
