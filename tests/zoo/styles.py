"""Modules as people write them: what they take and return, how they hold their parameters, what they call inside.

Over 400 lines because each is a few lines of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

from zoo import Built, Case, floats, ids

F = nn.functional
X = floats(2, 6, 8)
IMAGE = floats(2, 3, 16, 16)


class Of(nn.Module):
    """A function of a linear layer's output, and of what else is given."""

    def __init__(self, function: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 8)
        self.function = function

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        return self.function(self.inner(x), *more)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(F.gelu(self.up(self.norm(x))))


# --- what is taken and given back -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] = ()


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class ReturnsDataclass(Block):
    def forward(self, x):  # type: ignore[override, no-untyped-def]
        y = super().forward(x)
        return Result(y.sum(-1), None, (x, y))


class ReturnsDict(Block):
    def forward(self, x):  # type: ignore[override, no-untyped-def]
        y = super().forward(x)
        return collections.OrderedDict(out=y, none=None, nested={"a": [y * 2, y + 1]}, flag=True, size=3)


class ReturnsNested(Block):
    def forward(self, x):  # type: ignore[override, no-untyped-def]
        y = super().forward(x)
        return (y, [x, (y * 2, None)], Pair(y, x + 1))


class ReturnsParameter(Block):
    def forward(self, x):  # type: ignore[override, no-untyped-def]
        return {"weight": self.up.weight, "norm.weight": self.norm.weight.exp(), "y": super().forward(x)}


class ReturnsInput(Block):
    def forward(self, x):  # type: ignore[override, no-untyped-def]
        return super().forward(x), x


class TakesKeywords(Block):
    def forward(self, x, **kwargs):  # type: ignore[override, no-untyped-def]
        y = super().forward(x)
        return y + kwargs["shift"] if "shift" in kwargs else y


class TakesPositional(Block):
    def forward(self, *xs):  # type: ignore[override, no-untyped-def]
        return super().forward(torch.stack(xs).sum(0))


class TakesNested(Block):
    def forward(self, batch, extra=None):  # type: ignore[override, no-untyped-def]
        y = super().forward(batch["x"] + batch["parts"][0])
        return y if extra is None else y * extra[1]


class TakesFlags(Block):
    """Flags, names and scalars beside tensors."""

    def forward(self, x, mode="plain", times=1, scale=1.0, double=False, sizes=(2, 3)):  # type: ignore[override, no-untyped-def]
        for _ in range(times):
            x = super().forward(x, scale)
        x = x * 2 if double else x
        return x.reshape(*x.shape[:1], sizes[0], sizes[1], -1) if mode == "split" else x


class Settings:
    def __init__(self, factor: float, steps: int) -> None:
        self.factor, self.steps = factor, steps


class TakesObject(Block):
    def forward(self, x, settings):  # type: ignore[override, no-untyped-def]
        for _ in range(settings.steps):
            x = super().forward(x, settings.factor)
        return x


class TakesDataclass(Block):
    def forward(self, given):  # type: ignore[override, no-untyped-def]
        return super().forward(given.logits) + given.hidden[0]


class TakesCallable(Block):
    def forward(self, x, activation=F.relu, dtype=None):  # type: ignore[override, no-untyped-def]
        return activation(super().forward(x)).to(dtype or x.dtype)


class TakesLength(nn.Module):
    """Its structure comes from the values of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 8)
        for step in range(int(length.max().item())):
            state = self.cell(x[:, step], state)
        return state


class TakesLengths(nn.Module):
    """Packs by the values of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = [row[: int(n)].mean(0) for row, n in zip(x, lengths.tolist(), strict=True)]
        return self.out(torch.stack(rows))


class TakesLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x, labels=None):  # type: ignore[no-untyped-def]
        logits = self.out(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class TakesList(Block):
    def forward(self, features):  # type: ignore[override, no-untyped-def]
        return [super(TakesList, self).forward(one) for one in features]


# --- how parameters and buffers are held ----------------------------------------------------------------------------


class Counts(Block):
    """Writes into a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("table", torch.arange(48.0).reshape(6, 8), persistent=False)

    def forward(self, x):  # type: ignore[override, no-untyped-def]
        self.steps += 1
        return super().forward(x) + self.table


class Lazily(Block):
    """Makes a buffer at its first run, and keeps it."""

    def forward(self, x):  # type: ignore[override, no-untyped-def]
        if not hasattr(self, "positions"):
            self.positions = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return super().forward(x) + self.positions


class Caches(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}

    def forward(self, x):  # type: ignore[override, no-untyped-def]
        if x.shape[1] not in self.cache:
            self.cache[x.shape[1]] = torch.linspace(0, 1, x.shape[1])[:, None]
        self.last = super().forward(x) + self.cache[x.shape[1]]
        return self.last


class ListedParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(floats(8, 8) / 3) for _ in range(3)])
        self.bs = nn.ParameterDict({"a": nn.Parameter(floats(8)), "b": nn.Parameter(floats(8))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.ws:
            x = torch.tanh(x @ w + self.bs["a"])
        return x + self.bs["b"]


class PlainTensors(nn.Module):
    """Holds tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = floats(8, 8)
        self.many = [floats(8), floats(8, 1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w + self.many[0] + self.many[1].sum()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight
        self.drop = nn.Dropout(0.1)
        self.act = nn.ReLU()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.act(self.embed(tokens)))
        return self.out(self.drop(self.act(x * 2)))


class Hyper(nn.Module):
    """One layer makes another's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(4, 8 * 8 + 8)

    def forward(self, x: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        made = self.make(code)
        return F.linear(x, made[:64].reshape(8, 8), made[64:])


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).mT


def parametrized() -> nn.Module:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh())


def old_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(8, 4)))


def hooked() -> nn.Module:
    model = nn.Sequential(Block(), Block())
    model[0].register_forward_hook(lambda module, given, out: out * 2)
    model[1].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    return model


def lazies() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    model(X)
    return model


# --- what runs inside -----------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.ModuleList([nn.Linear(8, 2) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(*x.shape[:-1], 8)
        for i, f in enumerate(self.f):
            out[..., 2 * i : 2 * i + 2] = f(x)
        out[out < 0] *= 0.1
        out[:, 0].add_(1.0)
        return out.clamp_(max=2.0)


class Recursive(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.below = Recursive(depth - 1) if depth else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x))
        return y + self.below(y) if self.below is not None else y


class Implicit(nn.Module):
    """Iterates a cell to a fixed point, a fixed number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.zeros_like(x)
        for _ in range(6):
            z = torch.tanh(0.5 * self.cell(z) + x)
        return z


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w)
        return x * w * 2

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, w = ctx.saved_tensors
        return grad * w * 2, (grad * x * 2).sum()


class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: self.a(v), lambda v: self.b(v) * 2, (x,))  # noqa: PLW0108 - torch.cond takes functions


class Branches(Block):
    """Decides in Python by values."""

    def forward(self, x):  # type: ignore[override, no-untyped-def]
        return super().forward(x) if x.mean() > 0 else x * 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))


class Graph(nn.Module):
    """Message passing: gather by edges, scatter to nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        messages = self.message(x)[edges[0]]
        added = torch.zeros_like(x).index_add(0, edges[1], messages)
        count = torch.zeros(len(x)).scatter_add(0, edges[1], torch.ones(edges.shape[1]))
        largest = torch.zeros_like(x).scatter_reduce(0, edges[1][:, None].expand(-1, 8), messages, "amax")
        return self.update(added / count.clamp(min=1)[:, None] + largest)


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(n, 4) for n in (5, 7, 3)])
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Sequential(nn.Linear(18, 16), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(16, 1))

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        return torch.sigmoid(self.head(torch.cat([*found, self.norm(numbers)], -1))).squeeze(-1)


class Boxes(nn.Module):
    """A detection head that keeps what scores best, all of it in tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.conv(x).flatten(2).transpose(1, 2)
        scores, order = y[..., 4].sigmoid().topk(5)
        boxes = y[..., :4].gather(1, order[..., None].expand(-1, -1, 4))
        grid = torch.stack(torch.meshgrid(torch.arange(16), torch.arange(16), indexing="xy"), -1).reshape(-1, 2)
        return {"scores": scores, "boxes": boxes + grid[order].repeat(1, 1, 2)}


class Masked(nn.Module):
    """Writes rows where a mask says so, and reads them back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(20, 8), nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        made = self.project(features).reshape(-1, 8)
        return x.masked_scatter((tokens == 3)[..., None].expand_as(x), made) * 2


class Assigned(Masked):
    def forward(self, tokens, features):  # type: ignore[override, no-untyped-def]
        x = self.embed(tokens).clone()
        x[tokens == 3] = self.project(features).reshape(-1, 8)[: x.shape[0]].mean(0)
        return x


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Parameter(floats(8, 8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bti,ijk,btj->btk", x, self.core, x)
        return torch.einsum("btk,bsk->bts", y, y).diagonal(dim1=1, dim2=2)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(floats(8, 5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=-1)
        return torch.fft.irfft(torch.einsum("btf,hf->bth", spectrum, torch.view_as_complex(self.weight)), n=14).abs()


class Stft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        made = torch.stft(wave, 32, 8, window=self.window, return_complex=True)
        return made.abs().pow(2).clamp(min=1e-10).log10()


class Istft(Stft):
    def forward(self, wave):  # type: ignore[override, no-untyped-def]
        made = torch.stft(wave, 32, 8, window=self.window, return_complex=True)
        return torch.istft(made * 0.5, 32, 8, window=self.window)


class Rotary(nn.Module):
    """Complex numbers in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.outer(torch.arange(x.shape[1]).float(), 1.0 / 10 ** torch.linspace(0, 1, 4))
        turn = torch.polar(torch.ones_like(angle), angle)
        y = torch.view_as_complex(x.float().reshape(*x.shape[:-1], 4, 2))
        return torch.view_as_real(y * turn).flatten(2)


class ComplexParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.complex(floats(8, 8), floats(8, 8, 1)[..., 0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.w).abs()


class StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(floats(8, 4) / 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, outputs = torch.zeros(x.shape[0], 8, 4), []
        for step in range(x.shape[1]):
            state = torch.exp(-self.a.abs()) * state + x[:, step, :, None] * self.b
            outputs.append((state * self.c).sum(-1))
        return torch.stack(outputs, 1)


class Fields(nn.Module):
    """Fourier features and sine activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", floats(8, 16))
        self.layers = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 2 * math.pi * x @ self.b
        return torch.sin(30 * self.layers(torch.cat([y.sin(), y.cos()], -1)))


class Quantizer(nn.Module):
    """Vector quantization with a straight-through estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.cdist(x.flatten(0, 1), self.codes.weight).argmin(-1)
        found = self.codes(index).reshape(x.shape)
        return x + (found - x).detach(), F.one_hot(index, 16).float().mean(0)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
        return out


class UsesNumpy(Block):
    def forward(self, x):  # type: ignore[override, no-untyped-def]
        import numpy as np

        table = torch.from_numpy(np.sin(np.arange(x.shape[1] * 8, dtype=np.float32)).reshape(-1, 8))
        return super().forward(x) + table


class Grad(nn.Module):
    """Its own derivative, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda v: self.net(v).sum()))(x)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = {name: p * 0.5 for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, parameters, (x,))


class Scripted(nn.Module):
    """A part is a ScriptModule."""

    def __init__(self) -> None:
        super().__init__()
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.part = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.part(x)) + 1


class Traced(Scripted):
    def __init__(self) -> None:
        super().__init__()
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.part = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), X)


def whole_script() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))


class Stubs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import DeQuantStub, QuantStub

        self.quant, self.dequant, self.inner = QuantStub(), DeQuantStub(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dequant(self.inner(self.quant(x)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.inner, x, use_reentrant=False)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8).half(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x.half()).float())


class Autocast(Block):
    def forward(self, x):  # type: ignore[override, no-untyped-def]
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            return super().forward(x)


class Vertical(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.ModuleDict({"a": Block(), "b.c".replace(".", "_"): Block()}), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("a", "b_c", "a"):
            x = self.first[name](x)
        return self.second(x)


class Crf(nn.Module):
    """The forward algorithm and the best path, by loops over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.moves = nn.Linear(8, 4), nn.Parameter(floats(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.out(x)
        alpha, best, back = scores[:, 0], scores[:, 0], []
        for step in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.moves, 1) + scores[:, step]
            best, found = (best[:, :, None] + self.moves).max(1)
            back.append(found)
            best = best + scores[:, step]
        path = [best.argmax(-1)]
        for found in reversed(back):
            path.append(found.gather(1, path[-1][:, None])[:, 0])
        return alpha.logsumexp(-1), torch.stack(path[::-1], 1)


def _of(function: Callable[..., Any], *more: torch.Tensor) -> Callable[[], Built]:
    return lambda: (Of(function), (X, *more))


def _made(build: Callable[[], nn.Module], *inputs: Any, **named: Any) -> Callable[[], Built]:
    return lambda: (build(), named or inputs)


EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]])
TOKENS = torch.tensor([[1, 3, 5, 7], [3, 2, 2, 3]])
FLAGS = {"mode": "split", "times": 2, "scale": 0.5, "double": True, "sizes": (2, 3)}

MODULES: dict[str, Callable[[], Built]] = {
    "dataclass-out": _made(ReturnsDataclass, X),
    "dict-out": _made(ReturnsDict, X),
    "nested-out": _made(ReturnsNested, X),
    "parameter-out": _made(ReturnsParameter, X),
    "input-out": _made(ReturnsInput, X),
    "keywords": _made(TakesKeywords, x=X, shift=X * 0.1),
    "positional": _made(TakesPositional, X, X + 1, X * 2),
    "nested-in": _made(TakesNested, batch={"x": X, "parts": [X]}, extra=(None, X)),
    "list-in": _made(TakesList, features=[X, X[:, :3], X[:1]]),
    "flags": _made(TakesFlags, x=X, **FLAGS),
    "object-in": _made(TakesObject, x=X, settings=Settings(0.3, 2)),
    "dataclass-in": _made(TakesDataclass, given=Result(X, None, (X * 2,))),
    "callable-in": _made(TakesCallable, x=X, activation=torch.tanh, dtype=torch.float64),
    "length-in": _made(TakesLength, x=X, length=torch.tensor([3, 5])),
    "lengths-in": _made(TakesLengths, x=X, lengths=torch.tensor([3, 5])),
    "labels-in": _made(TakesLabels, x=X, labels=ids(4, 2, 6)),
    "buffer-written": _made(Counts, X),
    "lazy-buffer": _made(Lazily, X),
    "caches": _made(Caches, X),
    "parameter-list": _made(ListedParameters, X),
    "plain-tensors": _made(PlainTensors, X),
    "shared": _made(Shared, TOKENS),
    "hyper": _made(Hyper, X, floats(4)),
    "parametrized": _made(parametrized, X),
    "weight-norm": _made(old_weight_norm, X),
    "weight-norm-new": _made(lambda: parametrizations.weight_norm(nn.Conv1d(6, 4, 3)), X),
    "spectral-norm": _made(lambda: parametrizations.spectral_norm(nn.Linear(8, 4)), X),
    "orthogonal": _made(lambda: parametrizations.orthogonal(nn.Linear(8, 8)), X),
    "hooks": _made(hooked, X),
    "lazies": _made(lazies, X),
    "in-place": _made(InPlace, X),
    "recursive": _made(lambda: Recursive(3), X),
    "implicit": _made(Implicit, X),
    "autograd-function": _of(lambda y: Doubled.apply(y, y.mean()), *()),
    "cond": _made(Cond, X),
    "branches": _made(Branches, X),
    "attention": _made(Attention, X),
    "attention-masked": _made(Attention, X, torch.ones(6, 6).tril().bool()),
    "graph": _made(Graph, X[0], EDGES % 6),
    "tabular": _made(Tabular, ids(3, 4, 3), floats(4, 6)),
    "boxes": _made(Boxes, IMAGE),
    "masked-scatter": _made(Masked, TOKENS, floats(3, 4)),
    "masked-assign": _made(Assigned, TOKENS, floats(3, 4)),
    "einsum": _made(Einsum, X),
    "fft": _made(Spectral, floats(2, 6, 8)),
    "stft": _made(Stft, floats(2, 256)),
    "istft": _made(Istft, floats(2, 256)),
    "rotary-complex": _made(Rotary, X),
    "complex-parameter": _made(ComplexParameter, X),
    "state-space": _made(StateSpace, X),
    "fields": _made(Fields, X),
    "quantizer": _made(Quantizer, X),
    "experts": _made(Experts, X),
    "numpy": _made(UsesNumpy, X),
    "func-grad": _made(Grad, X[0]),
    "func-call": _made(Functional, X),
    "scripted-part": _made(Scripted, X),
    "traced-part": _made(Traced, X),
    "scripted": _made(whole_script, X),
    "stubs": _made(Stubs, X),
    "checkpointed": _made(Checkpointed, X),
    "half": _made(Half, X),
    "autocast": _made(Autocast, X),
    "module-dict": _made(Vertical, X),
    "crf": _made(Crf, X),
    "compiled": _made(lambda: torch.compile(Block()), X),
    "compiled-part": _made(lambda: nn.Sequential(torch.compile(Block()), nn.ReLU()), X),
    "data-parallel": _made(lambda: nn.DataParallel(Block()), X),
    "lstm-projected": _made(lambda: nn.LSTM(8, 6, 2, proj_size=3, batch_first=True), X),
    "lstm-both-ways": _made(lambda: nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True), X),
}
FUNCTIONS: dict[str, Callable[[], Built]] = {
    "inverse": _of(lambda y: torch.linalg.inv(y[..., :6, :6] @ y[..., :6, :6].mT + torch.eye(6))),
    "determinant": _of(lambda y: torch.linalg.det(y[:, :6, :6])),
    "solve": _of(lambda y: torch.linalg.solve(y[:, :4, :4] @ y[:, :4, :4].mT + torch.eye(4), y[:, :4, 4:])),
    "cholesky": _of(lambda y: torch.linalg.cholesky(y @ y.mT + 3 * torch.eye(6))),
    "svd": _of(torch.linalg.svdvals),
    "product": _of(lambda y: (y.prod(), y.prod(-1), torch.cumprod(y, 1))),
    "diff": _of(lambda y: (torch.diff(y), torch.diff(y, dim=1, n=2))),
    "sort": _of(lambda y: (y.sort(-1, descending=True)[0], y.median(-1)[0], y.kthvalue(2)[0])),
    "cumulative": _of(lambda y: (y.cumsum(1), y.logcumsumexp(1), y.cummax(1)[0])),
    "norms": _of(lambda y: (y.norm(), y.norm(1, -1), torch.linalg.vector_norm(y, 3, -1), torch.linalg.matrix_norm(y))),
    "search": _of(lambda y: (torch.searchsorted(torch.linspace(-2, 2, 9), y), torch.bucketize(y, torch.arange(-2, 3)))),
    "roll": _of(lambda y: (y.roll(2, 1), y.flip(-1), y.rot90(1, (1, 2)), y.repeat_interleave(2, 1))),
    "unfold": _of(lambda y: (y.unfold(1, 3, 2), F.unfold(y[:, None], 3), F.pad(y, (1, 2), "circular"))),
    "grid-sample": _of(
        lambda y: F.grid_sample(y[:, None], F.affine_grid(torch.eye(2, 3).expand(2, 2, 3), (2, 1, 4, 4)))
    ),
    "interpolate": _of(
        lambda y: (
            F.interpolate(y[:, None], scale_factor=1.7, mode="bilinear", align_corners=False),
            F.interpolate(y[:, None], size=(5, 5), mode="bicubic", antialias=True),
            F.interpolate(y, size=13, mode="nearest-exact"),
        )
    ),
    "statistics": _of(lambda y: (y.std(-1), y.var(1, correction=0), torch.cov(y[0]), torch.corrcoef(y[0]))),
    "special": _of(
        lambda y: (torch.special.erf(y), torch.special.expit(y), torch.lgamma(y.abs() + 1), torch.erfinv(y * 0.1))
    ),
    "integer": _of(lambda y: ((y * 10).int() // 3, (y * 10).long() % 3, (y * 10).int() & 6, (y * 10).int() << 1)),
    "nan": _of(lambda y: (torch.nan_to_num(y / (y > 0)), (y.log()).nanmean(), y.where(y > 0, float("nan")).nansum(-1))),
    "index": _of(
        lambda y: (
            y[:, [0, 2, 4]],
            y[..., ::2, None],
            y[torch.tensor([1, 0]), torch.tensor([2, 3])],
            y.take_along_dim(y.argsort(-1), -1),
        )
    ),
    "small-constants": _of(
        lambda y: (y.relu() * (y.relu() + 1e-9).log(), y / (y.sum() * 0 + 1e-12 + y.abs()), y * 1.000009)
    ),
    "triangles": _of(
        lambda y: (y.tril(), y.triu(1), torch.tril_indices(3, 3), torch.diag_embed(y), torch.block_diag(y[0], y[1]))
    ),
    "distances": _of(
        lambda y: (torch.cdist(y, y), torch.pdist(y[0]), F.pairwise_distance(y, y + 1), F.cosine_similarity(y, y + 1))
    ),
    "unique": _of(lambda y: (y * 2).int().unique()),
    "nonzero": _of(lambda y: (y[y > 0].sum(), (y > 0).nonzero().float().mean(0))),
    "histogram": _of(lambda y: (torch.histc(y, 5), torch.bincount((y.flatten() * 2).abs().int()))),
    "random": _of(lambda y: y + torch.rand_like(y) * 0),
    "matrix-exp": _of(lambda y: torch.matrix_exp(y[:, :6, :6] * 0.1)),
    "trapezoid": _of(
        lambda y: (torch.trapezoid(y), torch.cross(y[..., :3], y[..., 3:6], dim=-1), torch.kron(y[0], y[1]))
    ),
    "scatter": _of(
        lambda y: (
            y.scatter(1, torch.zeros(2, 1, 8, dtype=torch.long), 3.0),
            y.index_fill(1, torch.tensor([1]), 0.5),
            y.index_copy(1, torch.tensor([0, 2]), y[:, :2] * 9),
            y.index_put((torch.tensor([0, 1]), torch.tensor([1, 1])), y[:, 0], accumulate=True),
        )
    ),
}

CASES = [
    *(
        Case("module styles", name, build, ("length",) if name == "length-in" else ())
        for name, build in MODULES.items()
    ),
    *(Case("operators", name, build) for name, build in FUNCTIONS.items()),
]
