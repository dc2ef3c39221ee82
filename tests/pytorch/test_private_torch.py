"""What this project uses of torch's private names does what it is used for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from modelexport.pytorch.private_torch import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    in_trace,
    is_functorch_wrapped_tensor,
    operator_utilities,
    outside_of_modes,
    peek_interpreter_stack,
    schema_of,
    tracing_state,
    tree_leaves,
    tree_map,
    tree_structure,
    treespec_dumps,
    version_of,
    written_by,
)


def test_a_model_runs_without_values() -> None:
    model = nn.Linear(3, 4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output = model(mode.from_tensor(torch.ones(2, 3)))
    assert isinstance(output, FakeTensor)
    assert (output.shape, output.dtype) == (torch.Size([2, 4]), torch.float32)


def test_what_needs_values_says_so() -> None:
    with FakeTensorMode() as mode:
        tensor = mode.from_tensor(torch.ones(3))
        with pytest.raises(DynamicOutputShapeException):
            tensor.nonzero()
        with pytest.raises(DataDependentOutputException):
            tensor.sum().item()


def test_function_modes_do_not_see_what_is_not_intercepted() -> None:
    seen: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Watch():
        with DisableTorchFunction():
            assert x.shape == (2,)
        assert seen == []
        assert x.shape == (2,)
    assert len(seen) == 1


def test_a_dispatch_mode_sees_what_operations_get_and_return() -> None:
    seen: list[tuple[str, Any, Any]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            seen.append((str(func), args, output))
            return output

    x = torch.ones(2)
    with Watch():
        y = x.relu()
        with outside_of_modes():
            x.neg()
    assert [name for name, _, _ in seen] == ["aten.relu.default"]
    assert seen[0][1][0] is x
    assert seen[0][2] is y


def test_operations_say_which_of_their_arguments_they_write_to() -> None:
    aten = torch.ops.aten
    assert written_by(aten.embedding_renorm_.default, ("weight", "indices", 1.0, 2.0), {}) == ["weight"]
    assert written_by(aten.add.out, ("one", "other"), {"out": "result"}) == ["result"]
    assert written_by(aten.add.Tensor, ("one", "other"), None) == []
    assert written_by(torch.ops.higher_order.cond, (), {}) == []


def test_writes_to_memory_are_counted_in_all_its_views() -> None:
    x = torch.ones(4)
    view, before = x.view(2, 2), version_of(x)
    with torch.no_grad():
        x.add_(1)
    assert version_of(view) == version_of(x) != before
    with torch.inference_mode():
        assert version_of(torch.ones(2)) is None


def test_nested_values_are_taken_apart_and_put_together() -> None:
    nested = {"a": [1, (2, None)], "b": 3}
    assert tree_leaves(nested) == [1, 2, None, 3]
    assert tree_map(lambda leaf: leaf and leaf * 2, nested) == {"a": [2, (4, None)], "b": 6}
    assert _pytree.treespec_loads(treespec_dumps(tree_structure(nested))) == tree_structure(nested)


def test_writing_into_a_tensor_is_counted() -> None:
    tensor = torch.ones(2)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version == before + 1


def test_children_are_found_below_every_name_that_they_have() -> None:
    model = nn.Sequential(child := nn.ReLU(), child)
    assert list(model._modules.items()) == [("0", child), ("1", child)]


def test_a_module_keeps_its_tensors_and_hooks_by_name() -> None:
    model = nn.BatchNorm1d(2)
    hook, before = model.register_forward_hook(print), model.register_forward_pre_hook(print)
    assert (list(model._parameters), list(model._forward_hooks), list(model._forward_pre_hooks)) == (
        ["weight", "bias"],
        [hook.id],
        [before.id],
    )
    assert "running_mean" in model._buffers


def test_auto_classes_say_which_models_they_are_for() -> None:
    assert hasattr(transformers.AutoModel, "_model_mapping")
    assert not hasattr(transformers.BertConfig, "_model_mapping")


def test_operators_say_what_they_write_into() -> None:
    assert isinstance(torch.ops.aten.add_.Tensor, OpOverload)
    schema = schema_of(torch.ops.aten.add_.Tensor)
    written, other = (argument.alias_info for argument in schema.arguments[:2])
    assert written.is_write
    assert other is None
    assert schema.returns[0].alias_info is not None


def test_a_view_knows_the_tensor_whose_memory_it_shows() -> None:
    tensor = torch.ones(2, 2)
    assert tensor.view(4)._base is tensor
    assert tensor._base is None


def test_tensors_of_a_transform_and_the_transform_that_runs_are_known() -> None:
    seen: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.extend([is_functorch_wrapped_tensor(x), peek_interpreter_stack() is not None])
        return x

    torch.func.vmap(function)(x := torch.ones(2))
    assert seen == [True, True]
    assert not is_functorch_wrapped_tensor(x)
    assert peek_interpreter_stack() is None


def test_torch_cond_compiles_its_branches_where_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled() -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(operator_utilities, "setup_compilation_env", compiled)
    with pytest.raises(ZeroDivisionError):
        torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(2),))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_a_trace_is_taken_away_and_given_back() -> None:
    seen: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with in_trace(None) as trace:
            seen.extend([trace is not None, tracing_state()])
            x = x * 3  # which the trace does not have
        return x + 1

    graph = torch.jit.trace(function, torch.ones(2), check_trace=False).graph
    assert seen == [True, None]
    assert "aten::mul" not in str(graph)


def test_convolutions_and_normalizations_have_a_class_in_common() -> None:
    assert isinstance(nn.ConvTranspose2d(1, 1, 1), nn.modules.conv._ConvNd)
    assert isinstance(nn.InstanceNorm1d(1), nn.modules.batchnorm._NormBase)
