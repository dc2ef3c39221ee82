"""A model is the same object with the same contents after an export, and after every kind of failure."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.errors import ModelExportError
from modelexport.pytorch.calls.restored_state import KeptState
from modelexport.pytorch.calls.traced_tree import ModelState, untouched
from modelexport.pytorch.dispatch_modes import OperationMode


class Frozen(OrderedDict[str, Any]):
    """A dictionary that refuses every change, as the configuration of a diffusers model does."""

    def __setitem__(self, key: str, value: Any) -> None:
        if getattr(self, "frozen", False):
            raise TypeError("frozen")
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        raise TypeError("frozen")

    def clear(self) -> None:
        super().clear()
        raise TypeError("frozen")

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")


class Holder:
    def __init__(self) -> None:
        self.count = 0
        self.log: list[int] = []


class Restless(nn.Module):
    """Has containers of all kinds and changes them, its class, its children and buffers in every run."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor], rebuilds: bool = True) -> None:
        super().__init__()
        self.rebuilds = rebuilds
        self.linear = nn.Linear(4, 4)
        self.then = then
        self.frozen = Frozen(a=1, b=[1, 2])
        self.frozen.frozen = True
        self.names = {"b": 1, "a": 2}
        self.ordered = OrderedDict(x=1, y=2)
        self.items = [1, [2, 3]]
        self.chosen = {1, 2}
        self.recent = deque([1, 2], maxlen=2)
        self.holder = Holder()
        self.plain = torch.zeros(3)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.names["c"] = 3
        self.names["b"] = 5
        del self.ordered["x"]
        self.ordered["x"] = 4
        self.items[1].append(4)
        self.items.append(5)
        self.chosen.add(3)
        self.recent.append(3)
        self.holder.count += 1
        self.holder.log.append(1)
        if self.rebuilds:  # which torch.export does not follow
            self.late = torch.ones(2)
            self.extra = nn.Linear(2, 2)
            self.__class__ = Changed
        return self.then(self.linear(x))


class Changed(Restless):
    pass


def _state(model: nn.Module) -> list[Any]:
    """The state of a model: values, and identities of their containers."""
    own = vars(model)
    containers = [own[name] for name in ("frozen", "names", "ordered", "items", "chosen", "recent", "holder", "plain")]
    return [
        type(model),
        list(own),
        [id(one) for one in (*containers, *own.values())],
        [list(own[name].items()) for name in ("frozen", "names", "ordered")],
        [*model.items[:1], list(model.items[1]), id(model.items[1]), len(model.items)],
        sorted(model.chosen),
        list(model.recent),
        [model.holder.count, list(model.holder.log)],
        list(model._modules),
        [(name, None if b is None else (id(b), b.tolist())) for name, b in model._buffers.items()],
        [(id(p), p.data_ptr(), p.requires_grad, p.tolist()) for p in model.parameters()],
        [module.training for module in model.modules()],
        model.plain.tolist(),
        list(model._forward_hooks) + list(model._forward_pre_hooks),
    ]


def _fails(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the model fails")


def _cannot_be_captured(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def _is_computed_otherwise(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.compiler.is_exporting() else x


ENDS = {"success": torch.relu, "raises": _fails, "data-dependent": _cannot_be_captured, "wrong": _is_computed_otherwise}


@pytest.mark.sweep
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_the_model_holds_what_it_held(end: str, frontend: Any, tmp_path: Path) -> None:
    model = Restless(ENDS[end], rebuilds=end not in ("success", "wrong"))
    model.train()
    before = _state(model)
    failed = False
    try:
        export(model, (torch.ones(2, 4),), tmp_path / "m.onnx", frontend=frontend)
    except ModelExportError:
        failed = True
    assert failed or end == "success" or (end, frontend) == ("wrong", "torchscript")
    assert failed != (tmp_path / "m.onnx").exists()
    assert _state(model) == before


def test_a_container_that_refuses_to_be_written_is_restored_all_the_same() -> None:
    model = Restless(torch.relu)
    kept = KeptState(model)
    OrderedDict.__setitem__(model.frozen, "a", 7)
    OrderedDict.__delitem__(model.frozen, "b")
    kept.restore()
    assert list(model.frozen.items()) == [("a", 1), ("b", [1, 2])]


@functools.cache
def _doubled(number: int) -> int:
    return 2 * number


def _after_several_runs(read: Callable[[Restless], Any]) -> list[Any]:
    """What is read of one model before its runs and after each, of which each writes attributes, a buffer, a cache."""
    model = Restless(torch.relu)
    model.running = nn.Buffer(torch.zeros(2))
    _doubled(9)  # which the user called
    found, state = [read(model)], ModelState(model)
    for run in range(3):
        with untouched(model, state=state):
            model(torch.ones(2, 4))
            model.running += run + 1
            _doubled(run)
        found.append(read(model))
    return found


@pytest.mark.parametrize("read", [_state, lambda model: model.running.tolist()], ids=["attributes", "buffer"])
def test_one_state_is_restored_after_each_of_several_runs(read: Callable[[Restless], Any]) -> None:
    before, *after = _after_several_runs(read)
    assert after == [before] * 3


def test_a_cache_is_empty_after_each_of_several_runs() -> None:
    assert _after_several_runs(lambda _: _doubled.cache_info().currsize)[1:] == [0, 0, 0]


def test_what_did_not_change_is_not_written() -> None:
    class Watched(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            raise AssertionError("written")

    model = nn.Linear(2, 2)
    model.watched = Watched(a=1)
    kept = KeptState(model)
    versions = [parameter._version for parameter in model.parameters()]
    kept.restore()
    assert [parameter._version for parameter in model.parameters()] == versions
    assert model.watched == {"a": 1}


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.one, self.two, (x,))


class Passing(OperationMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_model_with_branches_runs_after_its_operations_were_seen() -> None:
    model, x = Branching().eval(), torch.ones(2, 4)
    with torch.no_grad(), Passing():
        model(x)
    torch.testing.assert_close(model(x), model.one(x))
    model.double()(x.double())


def test_a_model_that_sets_the_default_type_leaves_it_as_it_was_after_an_export(tmp_path: Path) -> None:
    class SetsType(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.set_default_dtype(torch.float64)
            return x + torch.ones(4).float()

    try:
        export(SetsType(), (torch.randn(2, 4),), tmp_path / "x.onnx")
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_state_from_before_what_an_export_replaces_can_be_restored() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = transformers.LlamaConfig(hidden_size=16, num_attention_heads=2, rope_parameters=rope)
    model = LlamaRotaryEmbedding(config)
    state = ModelState(model)
    with untouched(model, masks=True, state=state):
        assert "forward" in vars(model)
    assert "forward" not in vars(model)
