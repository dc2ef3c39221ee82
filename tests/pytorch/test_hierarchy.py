"""Module tree, traced calls, their comparison, and how they are shown."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from modelexport.cli.show_models import format_hierarchy
from modelexport.core.calls import CallTree, ModuleCall, TensorSpec
from modelexport.core.module_tree import ModuleTree
from modelexport.core.tags import Tags
from modelexport.core.uncalled_modules import Status, compare_hierarchies
from modelexport.errors import InputsError
from modelexport.pytorch.calls.module_tree_of_model import containers, module_tree
from modelexport.pytorch.calls.traced_tree import trace_calls
from modelexport.pytorch.hierarchy_overview import HierarchyOverview

X = torch.ones(2, 4)


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    return transformers.BertModel(
        transformers.BertConfig(
            vocab_size=30522, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
        )
    )


@pytest.fixture(scope="module")
def bert_tree(bert: nn.Module) -> ModuleTree:
    return module_tree(bert)


@pytest.fixture(scope="module")
def bert_calls(bert: nn.Module) -> CallTree:
    return trace_calls(bert, (), {"input_ids": torch.ones(1, 8, dtype=torch.long)})


class Twins(nn.Module):
    """One linear layer under two names, a second that shares its weight, a list, and a child left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.holder = nn.ModuleDict({"b": self.a})
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4).requires_grad_(False)
        self.left_out = None
        self.missing = nn.Identity()
        self.missing = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.tied(self.holder["b"](self.a(x))))


class Wrapped(nn.Module):
    """Runs a function on its input and child, to put any behaviour into a forward."""

    def __init__(self, function: Any, child: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.child = child

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def test_bert_tiny_has_47_modules_below_the_root_and_its_known_number_of_parameters(bert_tree: ModuleTree) -> None:
    assert len(bert_tree) - 1 == 47
    assert bert_tree.root.parameters == bert_tree.root.trainable == 4_385_920


def test_the_tree_is_that_of_named_modules(bert: nn.Module, bert_tree: ModuleTree) -> None:
    assert [module.path for module in bert_tree] == [path for path, _ in bert.named_modules()]
    for path, module in bert.named_modules():
        node = bert_tree[path]
        assert node.qualified_class == f"{type(module).__module__}.{type(module).__qualname__}"
        assert node.parameters == sum(parameter.numel() for parameter in module.parameters())
        assert [bert_tree[child].name for child in node.children] == [name for name, _ in module.named_children()]
        assert all(bert_tree[child].parent == path for child in node.children)
        assert node.depth == (path.count(".") + 1 if path else 0)


def test_a_module_of_two_names_appears_once_with_its_alias() -> None:
    tree = module_tree(Twins())
    assert [module.path for module in tree] == ["", "a", "holder", "tied", "norm"]
    assert tree["a"].aliases == ("holder.b",)
    assert tree["holder"].children == ("a",)
    assert tree["a"].parent == ""


def test_shared_parameters_are_counted_once_wherever_they_can_be_reached() -> None:
    model = Twins()
    tree = module_tree(model)
    counts = {module.path: (module.parameters, module.trainable) for module in tree}
    assert counts == {"": (28, 20), "a": (20, 20), "holder": (20, 20), "tied": (16, 16), "norm": (8, 0)}
    assert counts[""][0] == sum(parameter.numel() for parameter in model.parameters())


def test_shapes_are_a_modules_own_parameters_and_buffers() -> None:
    tree = module_tree(Twins())
    assert tree[""].shapes == {}
    assert tree["a"].shapes == {"weight": (4, 4), "bias": (4,)}
    assert tree["norm"].shapes.keys() == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert tree["norm"].shapes["num_batches_tracked"] == ()


def test_a_module_that_contains_itself_is_listed_once() -> None:
    outer, inner = nn.Module(), nn.Linear(2, 2)
    outer.inner = inner
    inner.outer = outer
    tree = module_tree(outer)
    assert [(module.path, module.parameters) for module in tree] == [("", 6), ("inner", 6)]


def test_a_weight_on_the_device_meta_is_named() -> None:
    with pytest.raises(InputsError, match="weight is on the device meta and has no numbers: load the weights"):
        trace_calls(nn.Linear(4, 4).to("meta"), (X,))


def test_parameters_that_are_not_made_yet_count_as_none() -> None:
    lazy = nn.Sequential(nn.LazyLinear(2))
    tree = module_tree(lazy)
    assert (tree["0"].parameters, tree["0"].shapes) == (0, {})
    with pytest.raises(InputsError, match="run it once"):
        trace_calls(lazy, (X,))


def test_bert_tiny_calls_45_modules_in_order(bert_calls: CallTree, bert_tree: ModuleTree) -> None:
    assert len({traced.call.path for traced in bert_calls}) == len(bert_calls) == 45
    assert bert_calls.calls[0].call == ModuleCall("")
    assert bert_calls[ModuleCall("encoder.layer.1")].parent == ModuleCall("encoder")
    assert {traced.call.path for traced in bert_calls} <= set(bert_tree.modules)


def test_entering_and_leaving_a_call_are_one_step_each_and_calls_nest(bert_calls: CallTree) -> None:
    steps = sorted(step for traced in bert_calls for step in (traced.enter, traced.exit))
    assert steps == list(range(2 * len(bert_calls)))
    for traced in bert_calls.calls[1:]:
        above = bert_calls[traced.parent]
        assert above.enter < traced.enter < traced.exit < above.exit
        assert traced.depth == above.depth + 1


def test_with_layer_norm_and_embedding_as_levels_bert_tiny_takes_50_steps_six_deep(
    bert_tree: ModuleTree, bert_calls: CallTree
) -> None:
    tags = Tags(bert_tree, bert_calls, include=["LayerNorm", "Embedding"])
    comparison = compare_hierarchies(bert_tree, bert_calls, ())
    text = format_hierarchy("traced", HierarchyOverview(bert_tree, bert_calls, tags, comparison))
    assert text.endswith("\n\n25 modules below the root, 25 calls, 50 steps, 6 deep")


def test_each_call_of_a_module_has_its_index_and_one_path_independent_of_its_name() -> None:
    calls = trace_calls(Twins(), (X,))
    assert [str(traced.call) for traced in calls] == [".", "a", "a@1", "tied", "norm"]


def test_a_module_may_call_itself() -> None:
    model = Wrapped(lambda self, x: self(x[1:]) if len(x) else x)
    assert [(str(t.call), str(t.parent)) for t in trace_calls(model, (X,))] == [
        (".", "None"),
        ("@1", "."),
        ("@2", "@1"),
    ]


@dataclasses.dataclass
class Pair:
    logits: torch.Tensor
    extra: Any = None


Point = namedtuple("Point", "x y")
SPEC = ("float32", (2, 4))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (X, [("output", *SPEC)]),
        ((X, None, [X, 3]), [("output.0", *SPEC), ("output.2.0", *SPEC)]),
        ({"a": X, "b": (X,)}, [("a", *SPEC), ("b.0", *SPEC)]),
        (Pair(X, Pair(X)), [("logits", *SPEC), ("extra.logits", *SPEC)]),
        (Point(X, X), [("x", *SPEC), ("y", *SPEC)]),
        (transformers.modeling_outputs.BaseModelOutput(last_hidden_state=X), [("last_hidden_state", *SPEC)]),
        ((Pair(X),), [("output.0.logits", *SPEC)]),
        (torch.ones(3, dtype=torch.bool), [("output", "bool", (3,))]),
        (torch.ones((), dtype=torch.bfloat16), [("output", "bfloat16", ())]),
        (None, []),
        ("text", []),
        ({}, []),
    ],
)
def test_output_tensors_are_named_by_the_way_to_them(output: object, expected: list[tuple[Any, ...]]) -> None:
    calls = trace_calls(Wrapped(lambda self, x: output), (X,))
    assert calls.calls[0].outputs == tuple(TensorSpec(*spec) for spec in expected)


class Signature(nn.Module):
    def forward(self, hidden_states, /, *more, past=None, **options):  # type: ignore[no-untyped-def]
        return None


@pytest.mark.parametrize(
    ("args", "kwargs", "names"),
    [
        ((X,), {}, ["hidden_states"]),
        ((X, X, [X]), {}, ["hidden_states", "more.0", "more.1.0"]),
        ((1,), {"past": ((X, X), {"key": X})}, ["past.0.0", "past.0.1", "past.1.key"]),
        ((X,), {"mask": X, "flags": {"a": X}}, ["hidden_states", "mask", "flags.a"]),
        (([],), {}, []),
    ],
)
def test_inputs_are_named_as_the_arguments_of_forward(args: Any, kwargs: Any, names: list[str]) -> None:
    assert [spec.name for spec in trace_calls(Signature(), args, kwargs).calls[0].inputs] == names


def test_hooks_of_others_are_inside_the_model_and_around_each_module_in_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: (args[0][:1],))
        module.register_forward_hook(lambda module, args, output: output[0])
    shapes = [[spec.shape for spec in (*each.inputs, *each.outputs)] for each in trace_calls(model, (X,)).calls]
    assert shapes == [[(2, 4), ()], [(1, 4), (1, 4)]]


def branch(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, self.inner, torch.neg, (self.outer(x),))


def test_a_branch_runs_though_its_calls_are_not_seen() -> None:
    model = Wrapped(branch)
    model.inner, model.outer = nn.Linear(4, 4), nn.ReLU()
    calls = trace_calls(model, (X,))
    assert [str(traced.call) for traced in calls] == [".", "outer"]
    assert calls.calls[0].outputs == (TensorSpec("output", *SPEC),)


def overwrite(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    self.counter.add_(1)
    self.replaced = self.replaced + 1
    self.added = nn.Parameter(x)
    self.weight.data.mul_(2)
    self.moved.data = self.moved.data[:1] + 1
    self.frozen.requires_grad_(True)
    self.child.running_mean.fill_(float("nan"))
    return self.child(x) + torch.rand(1)


def break_off(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    overwrite(self, x)
    raise RuntimeError("no further")


def hooks_of(model: nn.Module) -> list[Any]:
    names = [name for name in vars(model) if "hook" in name]
    return [(type(m).__name__, name, list(vars(m)[name] or ())) for m in model.modules() for name in names]


@pytest.mark.parametrize("function", [overwrite, break_off])
def test_the_model_is_as_it_was_whether_it_ran_or_not(function: Any) -> None:
    model = Wrapped(function, nn.BatchNorm1d(4))
    model.register_buffer("counter", torch.zeros(1))
    model.register_buffer("replaced", torch.zeros(1))
    model.weight = nn.Parameter(torch.ones(2))
    model.moved = nn.Parameter(torch.ones(2))
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    model.child.register_forward_hook(lambda *_: None)
    model.train()
    model.child.eval()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    before = {name: (tensor, tensor.detach().clone(), tensor.requires_grad) for name, tensor in tensors.items()}
    hooks, random_state = hooks_of(model), torch.get_rng_state()

    if function is break_off:
        with pytest.raises(InputsError, match="no further"):
            trace_calls(model, (X,))
    else:
        trace_calls(model, (X,))

    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert after.keys() == before.keys()
    for name, (tensor, value, requires_grad) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)
        assert tensor.requires_grad == requires_grad
    assert (model.training, model.child.training) == (True, False)
    assert hooks_of(model) == hooks
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_run_is_in_evaluation_mode_without_gradients() -> None:
    seen = []
    model = Wrapped(lambda self, x: seen.append((self.training, self.child.training, torch.is_grad_enabled())))
    model.child = nn.Dropout()
    trace_calls(model.train(), (X,))
    assert seen == [(False, False, False)]
    assert torch.is_grad_enabled()


def test_an_embedding_that_renormalises_its_weight_keeps_it() -> None:
    model = nn.Embedding(3, 4, max_norm=0.1)
    weight = model.weight.detach().clone()
    trace_calls(model, (torch.tensor([0, 2]),))
    assert torch.equal(model.weight, weight)


def test_a_gradient_that_is_under_way_can_still_be_taken() -> None:
    model = Twins().eval()
    loss = model(X).sum()
    trace_calls(model, (X,))
    loss.backward()
    assert model.a.weight.grad is not None


def test_a_model_without_values_can_be_traced() -> None:
    with torch.device("meta"):
        model = Twins()
    assert trace_calls(model, (X.to("meta"),)).calls[0].outputs == (TensorSpec("output", *SPEC),)


def fail(self: nn.Module, x: torch.Tensor) -> None:
    raise ValueError("bad shape\nand much more")


def test_an_error_names_the_innermost_running_call_and_keeps_the_reason() -> None:
    inner = Wrapped(lambda self, x: fail(self, x) if x.sum() > 8 else x)
    model = Wrapped(lambda self, x: self.child(self.child(x) + 1), inner)
    with pytest.raises(InputsError) as raised:
        trace_calls(model, (X,))
    expected = "the model raised ValueError while running child@1 (Wrapped): bad shape; check the example inputs"
    assert str(raised.value) == expected
    assert isinstance(raised.value.__cause__, ValueError)


def test_inputs_that_do_not_fit_are_an_error_of_the_root() -> None:
    with pytest.raises(InputsError, match=r"TypeError while running \. \(Twins\): .*nonsense"):
        trace_calls(Twins(), (), {"nonsense": X})


def attempt(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    try:
        return self.child(x)
    except ValueError:
        return self.other(x)


def test_an_error_that_the_model_catches_leaves_the_nesting_right() -> None:
    model = Wrapped(attempt, Wrapped(fail))
    model.other = Wrapped(lambda self, x: self.child(x), nn.ReLU())
    calls = trace_calls(model, (X,))
    assert [(str(t.call), str(t.parent)) for t in calls] == [
        (".", "None"),
        ("child", "."),
        ("other", "."),
        ("other.child", "other"),
    ]
    assert calls[ModuleCall("child")].outputs == ()
    assert calls[ModuleCall("other")].outputs == (TensorSpec("output", *SPEC),)


def test_an_error_in_the_second_attempt_names_the_second() -> None:
    model = Wrapped(attempt, Wrapped(fail))
    model.other = Wrapped(lambda self, x: self.child(x, 1), nn.ReLU())
    with pytest.raises(InputsError, match=r"TypeError while running other\.child \(ReLU\)"):
        trace_calls(model, (X,))


def test_a_hook_of_the_models_own_that_raises_is_an_error_of_its_caller() -> None:
    model = nn.Sequential(nn.ReLU())
    model[0].register_forward_pre_hook(fail)
    with pytest.raises(InputsError, match=r"ValueError while running \. \(Sequential\)"):
        trace_calls(model, (X,))


def test_bert_tiny_never_calls_its_list_and_the_dropouts_of_its_attention(
    bert: nn.Module, bert_tree: ModuleTree, bert_calls: CallTree
) -> None:
    comparison = compare_hierarchies(bert_tree, bert_calls, containers(bert))
    assert len(comparison.called) == 45
    assert {module.path: module.status for module in comparison.never_called} == {
        "encoder.layer": Status.CONTAINER,
        "encoder.layer.0.attention.self.dropout": Status.NOT_CALLED,
        "encoder.layer.1.attention.self.dropout": Status.NOT_CALLED,
    }


def test_every_module_has_the_reason_why_it_was_called_or_not() -> None:
    class MyList(nn.ModuleList):
        pass

    class MyCallableList(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Wrapped(lambda self, x: self.indexed[0](self.twice(self.twice(self.patched(x)))))
    model.indexed = nn.Sequential(nn.ReLU())
    model.twice = nn.ReLU()
    model.list = MyList([nn.ReLU()])
    model.callable_list = MyCallableList()
    model.patched = nn.Module()
    model.patched.forward = lambda x: x

    comparison = compare_hierarchies(module_tree(model), trace_calls(model, (X,)), containers(model))
    assert {module.path: (module.status, module.calls) for module in comparison.modules} == {
        "": (Status.CALLED, 1),
        "indexed": (Status.BYPASSED, 0),
        "indexed.0": (Status.CALLED, 1),
        "twice": (Status.CALLED, 2),
        "list": (Status.CONTAINER, 0),
        "list.0": (Status.NOT_CALLED, 0),
        "callable_list": (Status.NOT_CALLED, 0),
        "patched": (Status.CALLED, 1),
    }
    assert [module.reason for module in comparison.modules[:4]] == [
        "called once",
        "never called itself, but modules below it were",
        "called once",
        "called 2 times",
    ]


def shown(mode: Any, *, levels: bool = False) -> list[str]:
    torch.manual_seed(0)
    model = Twins()
    tree, calls = module_tree(model), trace_calls(model, (X,))
    tags = Tags(tree, calls, include=["BatchNorm1d"]) if levels else None
    comparison = compare_hierarchies(tree, calls, containers(model))
    return format_hierarchy(mode, HierarchyOverview(tree, calls, tags, comparison)).splitlines()


def test_the_module_tree_lists_modules_classes_and_parameters() -> None:
    assert shown("static") == [
        "MODULE    CLASS        PARAMETERS",
        ".         Twins                28",
        "  a       Linear               20  also holder.b",
        "  holder  ModuleDict           20",
        "  tied    Linear               16",
        "  norm    BatchNorm1d           8",
        "",
        "4 modules below the root, 28 parameters, 20 trainable",
    ]


def test_the_traced_tree_lists_calls_with_their_steps_and_shapes() -> None:
    assert shown("traced") == [
        "CALL    CLASS        STEPS  INPUTS -> OUTPUTS",
        ".       Twins               float32[2,4] -> float32[2,4]",
        "  a     Linear         1-2  float32[2,4] -> float32[2,4]",
        "  a@1   Linear         3-4  float32[2,4] -> float32[2,4]",
        "  tied  Linear         5-6  float32[2,4] -> float32[2,4]",
        "  norm  BatchNorm1d    7-8  float32[2,4] -> float32[2,4]",
        "",
        "3 modules below the root, 4 calls, 8 steps, 2 deep",
    ]


def test_with_tags_only_levels_are_shown_under_their_segments() -> None:
    assert shown("trace", levels=True) == [
        "STEP         CALL         ADDRESS  TENSORS",
        "   1  enter  BatchNorm1d  norm     input float32[2,4]",
        "   2  exit   BatchNorm1d  norm     output float32[2,4]",
        "",
        "1 module below the root, 1 call, 2 steps, 2 deep",
    ]


def test_the_comparison_says_how_often_and_why_not() -> None:
    assert shown("compare") == [
        "MODULE    CLASS        CALLS",
        ".         Twins            1",
        "  a       Linear           2",
        "  holder  ModuleDict       0  container",
        "  tied    Linear           1",
        "  norm    BatchNorm1d      1",
        "",
        "5 modules, the root included: 4 called, 1 never called",
        "  holder: a container: it has no forward of its own",
    ]


def test_a_call_that_was_captured_but_not_run_is_shown_without_steps(bert_tree: ModuleTree) -> None:
    calls = trace_calls(Twins(), (X,))
    tree = module_tree(Twins())
    captured = [dataclasses.replace(traced, enter=None, exit=None) for traced in calls.calls[1:]]
    seen = CallTree((calls.calls[0], *captured))
    overview = HierarchyOverview(tree, seen, comparison=compare_hierarchies(tree, seen, ()))
    lines = format_hierarchy("traced", overview).splitlines()
    assert all("not run" in line for line in lines[2:6])
    assert lines[-1].endswith("4 calls, 0 steps, 2 deep")
