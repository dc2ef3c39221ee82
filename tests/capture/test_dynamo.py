"""The dynamo front end: exact owners, and canaries for the undocumented interfaces of torch that it uses."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import models
from modelexport import export
from modelexport.capture import dynamo
from modelexport.errors import CaptureError, InputsError
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes
from truth import wrong


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Everything(nn.Module):
    """An alias, a repeated call, slices, and a branch that calls a module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()
        self.alias = self.shared
        self.items = nn.ModuleList(Block() for _ in range(3))
        self.chain = nn.Sequential(Block(), Block(), nn.Tanh())
        self.inner = Block()
        self.other = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.alias(self.shared(x))
        for item in self.items[1:]:
            x = item(x)
        x = self.chain[:2](x)
        return torch.cond(x.sum() > 0, lambda v: self.inner(self.inner(v)) * 2, self.other, (x,))


INPUTS = {"x": torch.ones(2, 4)}


@pytest.fixture(scope="module")
def everything() -> dynamo.Exported:
    return dynamo.capture_by_dynamo(Everything().eval(), INPUTS)


def test_each_call_is_numbered_under_the_modules_canonical_path(everything: dynamo.Exported) -> None:
    assert [str(traced.call) for traced in everything.calls] == [
        ".", "shared", "shared.linear", "shared@1", "shared.linear@1", "items.1", "items.1.linear", "items.2",
        "items.2.linear", "chain.0", "chain.0.linear", "chain.1", "chain.1.linear", "inner", "inner.linear", "inner@1",
        "inner.linear@1", "other",
    ]  # fmt: skip


def test_every_node_is_owned_by_the_call_that_made_it(everything: dynamo.Exported) -> None:
    relus = [str(owner_of(node).call) for node in all_nodes(everything.model) if node.op_type == "Relu"]
    assert relus == ["shared", "shared@1", "items.1", "items.2", "chain.0", "chain.1", "inner", "inner@1"]
    outside = [str(owner_of(node).call) for node in all_nodes(everything.model) if node.op_type in ("If", "Mul")]
    assert outside == [".", "."]


def test_calls_in_a_branch_know_their_caller_and_were_not_run(everything: dynamo.Exported) -> None:
    calls = {str(traced.call): traced for traced in everything.calls}
    assert str(calls["inner.linear@1"].parent) == "inner@1"
    assert str(calls["inner"].parent) == "."
    assert calls["inner"].enter is None
    assert calls["shared"].enter == 1


def test_onnx_nodes_still_point_to_their_fx_nodes_and_those_still_carry_annotations() -> None:
    with torch.fx.traceback.annotate({"canary": 1}):
        pass
    recorder_key = dynamo.ADDRESS_KEY
    seen = []

    class Listening(dynamo.FxOwners):
        def _call_of(self, fx_node: torch.fx.Node | None) -> object:
            seen.append(fx_node is not None and recorder_key in (fx_node.meta.get("custom") or {}))
            return super()._call_of(fx_node)

    original, dynamo.FxOwners = dynamo.FxOwners, Listening
    try:
        dynamo.capture_by_dynamo(Block().eval(), INPUTS)
    finally:
        dynamo.FxOwners = original
    assert seen
    assert all(seen), "torch.onnx no longer links nodes to FX nodes, or torch.export drops annotations"


def state(model: nn.Module) -> object:
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m.training, "forward" in vars(m)) for m in model.modules()
    ]
    return hooks, {key: value.clone() for key, value in model.state_dict().items()}, torch.random.get_rng_state()


def assert_same(before: object, after: object) -> None:
    assert before[0] == after[0]  # type: ignore[index]
    assert before[1].keys() == after[1].keys()  # type: ignore[index]
    assert all(torch.equal(before[1][key], after[1][key]) for key in before[1])  # type: ignore[index]
    assert torch.equal(before[2], after[2])  # type: ignore[index]


@pytest.mark.parametrize("case", models.FAILING, ids=lambda case: case.name)
def test_a_model_that_cannot_be_exported_is_as_it_was_and_the_error_names_the_call(case: models.ModelCase) -> None:
    model = case.build().train()
    before = state(model)
    with pytest.raises(CaptureError, match=case.expected.failure) as raised:
        dynamo.capture_by_dynamo(model, case.inputs())
    assert raised.value.address is not None
    assert raised.value.__cause__ is not None
    assert_same(before, state(model))


def test_inputs_that_do_not_fit_are_told_from_a_model_that_cannot_be_exported() -> None:
    with pytest.raises(InputsError, match="Block does not run with x"):
        dynamo.capture_by_dynamo(Block(), {"x": torch.ones(2, 5)})


def test_positional_inputs_get_the_names_of_the_arguments() -> None:
    exported = dynamo.capture_by_dynamo(Block().eval(), (torch.ones(2, 4),))
    assert [value.name for value in exported.model.graph.inputs] == ["x"]


def test_tied_parameters_have_all_their_names() -> None:
    case = models.case("tied-weights")
    names = dynamo.state_dict_names(case.build())
    for keys in case.expected.tied:
        assert all(names[key] == keys for key in keys)


def test_a_layer_of_transformers_by_itself_is_exported_as_in_its_model(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralModel

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_hidden_layers": 1,
        "vocab_size": 20,
    }
    layer = MixtralModel(MixtralConfig(**sizes, **heads)).eval().layers[0].mlp
    inputs = (torch.randn(2, 8, 16),)
    export(layer, inputs, tmp_path / "m.onnx", frontend="dynamo", check=False)
    assert wrong(tmp_path / "m.onnx", layer, inputs) == ""


class Two(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_a_named_tuple_has_dynamic_axes(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def forward(self, two: Two) -> torch.Tensor:
            return two.first * two.second

    inputs = (Two(torch.rand(2, 3), torch.rand(2, 3)),)
    result = export(Takes(), inputs, tmp_path / "x.onnx", frontend="dynamo", dynamic=True)
    assert isinstance(result.session().get_inputs()[0].shape[0], str)


def test_a_model_that_only_a_capture_runs_is_refused(tmp_path: Path) -> None:
    class Overlapping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            y[1:] += y[:-1]
            return y

    with pytest.raises(InputsError, match="Overlapping does not run with its inputs: RuntimeError: unsupported"):
        export(Overlapping(), (torch.rand(4, 5),), tmp_path / "x.onnx")
