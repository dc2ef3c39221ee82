"""The tag grammar, rule by rule, and its promises over random models."""

from __future__ import annotations

import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.core.tags import Tags
from modelexport.errors import UsageError
from modelexport.pytorch.calls.module_tree_of_model import module_tree
from modelexport.pytorch.calls.traced_tree import trace_calls

X = torch.ones(1, 4)
IDS = torch.ones(1, 4, dtype=torch.long)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Model(nn.Module):
    """Calls the modules named in ``order``, which may be below its children, one after the other."""

    def __init__(self, order: str = "", **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.order = order.split() or list(children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for path in self.order:
            x = self.get_submodule(path)(x)
        return x


class Caller(nn.Module):
    """Calls a module that is not its child."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = (other,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other[0](x)


def tags_of(model: nn.Module, *args: object, **options: object) -> Tags:
    inputs = {} if args else ({"x": X} if not isinstance(model, transformers.PreTrainedModel) else {"input_ids": IDS})
    kwargs = {name: options.pop(name) for name in list(options) if name not in ("granularity", "include", "exclude")}
    return Tags(module_tree(model), trace_calls(model, args, {**inputs, **kwargs}), **options)


def addressed(tags: Tags, *, levels_only: bool = True) -> dict[str, str]:
    """Address to tag, of the levels or of every call."""
    return {
        str(traced.call): tags.tag(traced.call)
        for traced in tags.calls
        if not levels_only or tags.is_level(traced.call.path)
    }


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    return transformers.BertModel(
        transformers.BertConfig(
            vocab_size=100, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
        )
    )


def test_the_segments_of_bert_are_its_own_classes(bert: nn.Module) -> None:
    tags = tags_of(bert)
    call = ModuleCall("encoder.layer.0.attention.self")
    assert tags.tag(call) == "/BertModel/BertEncoder/BertLayer.0/BertAttention/BertSelfAttention"
    assert tags.tag(ModuleCall("")) == "/BertModel"
    assert not tags.is_level("encoder.layer")


def test_a_torch_nn_call_has_a_tag_but_its_nodes_carry_that_of_the_level_above(bert: nn.Module) -> None:
    tags = tags_of(bert)
    dense = ModuleCall("encoder.layer.1.output.dense")
    assert tags.level(dense) == ModuleCall("encoder.layer.1.output")
    assert tags.source_tag(dense) == "/BertModel/BertEncoder/BertLayer.1/BertOutput"
    assert tags.tag(dense) == "/BertModel/BertEncoder/BertLayer.1/BertOutput/Linear"
    assert tags.namespace(dense) == "BertModel/BertEncoder/BertLayer.1/BertOutput/Linear"
    assert tags.tag(ModuleCall("encoder.layer.1.attention.self.key")).endswith("/BertSelfAttention/Linear.key")


def test_included_classes_become_levels_and_excluded_ones_give_theirs_up(bert: nn.Module) -> None:
    tags = tags_of(bert, include=["Embedding"], exclude=["BertAttention"])
    embeddings = {str(call): tag for call, tag in tags.tags.items() if "Embedding." in tag}
    assert embeddings == {
        "embeddings.word_embeddings": "/BertModel/BertEmbeddings/Embedding.word_embeddings",
        "embeddings.token_type_embeddings": "/BertModel/BertEmbeddings/Embedding.token_type_embeddings",
        "embeddings.position_embeddings": "/BertModel/BertEmbeddings/Embedding.position_embeddings",
    }
    assert all(tags.is_level(path) for path in embeddings)
    assert not tags.is_level("embeddings.LayerNorm")
    assert (
        tags.tag(ModuleCall("encoder.layer.0.attention.self")) == "/BertModel/BertEncoder/BertLayer.0/BertSelfAttention"
    )
    assert tags.tag(ModuleCall("encoder.layer.0.attention")) == "/BertModel/BertEncoder/BertLayer.0/BertAttention"


def test_bert_has_25_levels_below_the_root_six_deep_with_layer_norm_and_embedding(bert: nn.Module) -> None:
    tags = tags_of(bert, include=["LayerNorm", "Embedding"])
    assert len(tags.levels - {""}) == 25
    assert max(tag.count("/") for tag in addressed(tags).values()) == 6


def test_modules_that_were_never_called_get_the_tag_that_their_parent_would_have_given_them(bert: nn.Module) -> None:
    tags = tags_of(bert)
    assert tags.module_tag("encoder.layer") == "/BertModel/BertEncoder/ModuleList"
    self_attention = "/BertModel/BertEncoder/BertLayer.0/BertAttention/BertSelfAttention"
    assert tags.module_tag("encoder.layer.0.attention.self.dropout") == f"{self_attention}/Dropout"
    assert tags.module_tag("encoder.layer.0.attention.self") == self_attention


def test_albert_counts_the_calls_of_its_one_layer() -> None:
    config = transformers.AlbertConfig(
        vocab_size=100, embedding_size=8, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8
    )
    tags = addressed(tags_of(transformers.AlbertModel(config)))
    group = "/AlbertModel/AlbertTransformer/AlbertLayerGroup.0"
    layers = "encoder.albert_layer_groups.0.albert_layers.0"
    assert tags[f"{layers}.attention"] == f"{group}/AlbertLayer.0/AlbertAttention"
    assert tags[f"{layers}.attention@1"] == f"{group}@1/AlbertLayer.0/AlbertAttention"
    assert tags[f"{layers}.attention@2"] == f"{group}@2/AlbertLayer.0/AlbertAttention"


def test_the_two_attentions_of_a_bart_decoder_layer_are_told_apart_by_name() -> None:
    config = transformers.BartConfig(
        vocab_size=100,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
    )
    tags = addressed(tags_of(transformers.BartModel(config)))
    layer = "/BartModel/BartDecoder/BartDecoderLayer.0"
    assert tags["decoder.layers.0.self_attn"] == f"{layer}/BartAttention.self_attn"
    assert tags["decoder.layers.0.encoder_attn"] == f"{layer}/BartAttention.encoder_attn"
    assert tags["encoder.layers.0.self_attn"] == "/BartModel/BartEncoder/BartEncoderLayer.0/BartAttention"


def test_a_sequential_that_is_iterated_over_gets_no_segment() -> None:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 4], depths=[1, 2], layer_type="basic")
    model = transformers.ResNetModel(config)
    tags = Tags(module_tree(model), trace_calls(model, (), {"pixel_values": torch.ones(1, 3, 32, 32)}))
    basic = "/ResNetModel/ResNetEncoder/ResNetStage.1/ResNetBasicLayer.1"
    assert tags.tag(ModuleCall("encoder.stages.1.layers.1")) == basic
    assert tags.tag(ModuleCall("encoder.stages.1.layers.1.layer")) == f"{basic}/Sequential"
    assert tags.tag(ModuleCall("encoder.stages.1.layers.1.layer.0")) == f"{basic}/ResNetConvLayer.0"
    assert tags.module_tag("encoder.stages.1.layers") == "/ResNetModel/ResNetEncoder/ResNetStage.1/Sequential"


SHARED = Block()
TWICE = Block()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(Model("a a", a=Block()), {"a": "/Model/Block", "a@1": "/Model/Block@1"}, id="called twice"),
        pytest.param(
            Model(down=nn.Sequential(Block(), Block()), up=nn.Sequential(Block())),
            {"down.0": "/Model/Block.down.0", "down.1": "/Model/Block.1", "up.0": "/Model/Block.up.0"},
            id="two lists of equal blocks, told apart only where they must be",
        ),
        pytest.param(Model("a.0", a=nn.ModuleList([Block()])), {"a.0": "/Model/Block.0"}, id="a list of one"),
        pytest.param(
            Model("a.x a.y", a=nn.ModuleDict({"x": Block(), "y": Block()})),
            {"a.x": "/Model/Block.x", "a.y": "/Model/Block.y"},
            id="a dictionary",
        ),
        pytest.param(
            Model("a.u/v a.w@x a.u%2Fv", a=nn.ModuleDict({"u/v": Block(), "w@x": Block(), "u%2Fv": Block()})),
            {"a.u/v": "/Model/Block.u%2Fv", "a.w@x": "/Model/Block.w%40x", "a.u%2Fv": "/Model/Block.u%252Fv"},
            id="keys with the characters that mean something in a tag",
        ),
        pytest.param(
            Model(a=SHARED, b=SHARED), {"a": "/Model/Block", "a@1": "/Model/Block@1"}, id="one module, two names"
        ),
        pytest.param(
            Model(a=Block(), b=Model(a=Block())),
            {"a": "/Model/Block", "b": "/Model/Model", "b.a": "/Model/Model/Block"},
            id="levels tell apart what lies below them",
        ),
        pytest.param(
            Model(a=Block(), b=nn.Sequential(nn.Sequential(Block()))),
            {"a": "/Model/Block.a", "b.0.0": "/Model/Block.0"},
            id="a name against a number",
        ),
        pytest.param(
            Model("a b.a", a=Block(), b=nn.ModuleDict({"a": Block()})),
            {"a": "/Model/Block.a", "b.a": "/Model/Block.b.a"},
            id="one path is the end of the other",
        ),
        pytest.param(
            Model("s.0 s.1", s=nn.Sequential(Block(), Block())),
            {"s.0": "/Model/Block.0", "s.1": "/Model/Block.1"},
            id="a Sequential that is indexed and so never called",
        ),
        pytest.param(
            Model("s s", s=nn.Sequential(TWICE, TWICE)),
            {f"s.0{n}": f"/Model/Block.0{n}" for n in ("", "@1", "@2", "@3")},
            id="calls are counted below the level above, through what is none",
        ),
        pytest.param(
            Model("a a", a=Model("b b", b=Block())),
            {
                "a": "/Model/Model",
                "a.b": "/Model/Model/Block",
                "a.b@1": "/Model/Model/Block@1",
                "a@1": "/Model/Model@1",
                "a.b@2": "/Model/Model@1/Block",
                "a.b@3": "/Model/Model@1/Block@1",
            },
            id="and from nought in every call of it",
        ),
        pytest.param(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            {"0": "/Sequential/Linear.0", "1": "/Sequential/ReLU.1"},
            id="torch.nn alone: everything is a level",
        ),
    ],
)
def test_levels_have_the_tags(model: nn.Module, expected: dict[str, str]) -> None:
    assert {address: tag for address, tag in addressed(tags_of(model, X)).items() if address != "."} == expected


def test_a_module_called_by_one_that_does_not_hold_it_lies_below_its_caller() -> None:
    block = Block()
    model = Model(a=Model(shared=block), b=Caller(block))
    assert addressed(tags_of(model)) == {
        ".": "/Model",
        "a": "/Model/Model",
        "a.shared": "/Model/Model/Block",
        "b": "/Model/Caller",
        "a.shared@1": "/Model/Caller/Block",
    }


def test_a_module_below_the_caller_and_one_beside_it_of_the_same_path_are_told_apart() -> None:
    outside = Block()
    caller = Caller(outside)
    caller.x = Block()
    tags = tags_of(Model("a x", x=outside, a=caller))
    assert tags.tag(ModuleCall("x")) == "/Model/Caller/Block.x"
    assert tags.module_tag("a.x") == "/Model/Caller/Block.a.x"


def test_a_level_and_a_torch_nn_module_of_the_same_class_name_are_told_apart() -> None:
    class Linear(Block):
        pass

    tags = addressed(tags_of(Model(a=Linear(), b=nn.Linear(4, 4))), levels_only=False)
    assert (tags["a"], tags["b"]) == ("/Model/Linear.a", "/Model/Linear.b")


def test_a_member_that_was_not_called_does_not_change_the_tags_of_the_others() -> None:
    experts = nn.ModuleList([Block(), Block()])
    some = tags_of(Model("a experts.0", a=Block(), experts=experts))
    both = tags_of(Model("a experts.0 experts.1", a=Block(), experts=experts))
    assert addressed(some).items() <= addressed(both).items()
    assert some.module_tag("experts.1") == both.module_tag("experts.1") == "/Model/Block.1"
    assert not some.is_level("experts.1")


def test_a_torch_nn_member_of_a_list_has_the_same_tag_called_or_not() -> None:
    some, both = (tags_of(Model(order, a=nn.ModuleList([nn.ReLU(), nn.ReLU()]))) for order in ("a.0", "a.0 a.1"))
    assert some.module_tag("a.0") == both.module_tag("a.0")
    assert some.module_tag("a.1") == both.module_tag("a.1")


def test_a_module_that_calls_itself_has_a_tag_for_each_call() -> None:
    model = Caller(nn.Identity())
    model.forward = lambda x: model(x[1:]) if len(x) else x
    tags = tags_of(model, torch.ones(2))
    assert [*tags.tags.values()] == ["/Caller", "/Caller/Caller", "/Caller/Caller/Caller"]


def test_a_whole_branch_that_was_never_called_is_tagged_as_though_it_had_been() -> None:
    model = Model("a", a=Block(), unused=Model(layers=nn.Sequential(Block(), nn.ReLU())))
    tags = tags_of(model)
    assert tags.module_tag("unused.layers.0") == "/Model/Model/Block.0"
    assert tags.module_tag("unused.layers.1") == "/Model/Model/Sequential/ReLU.1"
    assert tags.module_tag("unused.layers.0.linear") == "/Model/Model/Block.0/Linear"


@pytest.mark.parametrize(
    ("options", "levels"),
    [
        ({}, {"", "a"}),
        ({"granularity": "model"}, {"", "a"}),
        ({"granularity": "all"}, {"", "a", "a.linear", "s", "s.0"}),
        ({"include": ["Linear"]}, {"", "a", "a.linear"}),
        ({"granularity": "all", "exclude": ["Linear"]}, {"", "a", "s", "s.0"}),
        ({"granularity": "model", "exclude": ["Block"]}, {""}),
        ({"exclude": ["Block"]}, {"", "a.linear", "s", "s.0"}),
        ({"exclude": ["Model"]}, {"", "a"}),
    ],
)
def test_granularity_include_and_exclude_choose_the_levels(options: dict[str, object], levels: set[str]) -> None:
    tags = tags_of(Model("a s", a=Block(), s=nn.Sequential(nn.ReLU()), never=Block()), **options)
    assert tags.levels == levels


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["LayerNorm"]}, "no class LayerNorm; its classes are Block, Linear, Model"),
        ({"exclude": ["block", "Nope"]}, "no class Nope, block; its classes are"),
        ({"include": ["Linear"], "exclude": ["Linear"]}, "Linear cannot be both"),
    ],
)
def test_class_names_that_make_no_sense_are_refused(options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tags_of(Model(a=Block()), **options)


def test_tags_need_no_torch() -> None:
    code = "import sys, modelexport.core.tags, modelexport.core.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Runner(nn.Module):
    """Calls the modules in its program, its children or not."""

    def __init__(self, children: list[tuple[str, nn.Module]], program: list[nn.Module]) -> None:
        super().__init__()
        for name, child in children:
            if isinstance(child, nn.Module):
                self.add_module(name, child)
        self.program = tuple(program)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.program:
            x = module(x)
        return x


class Other(Runner):
    pass


# With the name of a class of torch.nn, so that a level and a module that is not a level have the same class name.
Namesake = type("Identity", (Runner,), {})


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Modules with earlier ones as children, under one or more names, some called up to three times."""
    built: list[nn.Module] = [nn.Identity()]
    for _ in range(draw(st.integers(1, 7))):
        names = st.sampled_from(["a", "b", "0", "1", "a/b", "a@1"])
        children = draw(st.lists(st.tuples(names, st.sampled_from(built)), max_size=4, unique_by=lambda pair: pair[0]))
        kind = draw(st.sampled_from([Runner, Other, Namesake, nn.Sequential, nn.ModuleDict, nn.Identity]))
        if issubclass(kind, Runner):
            callable_ones = [module for module in built if not isinstance(module, nn.ModuleDict)]
            built.append(kind(children, draw(st.lists(st.sampled_from(callable_ones), max_size=3))))
        elif kind is nn.ModuleDict:
            built.append(nn.ModuleDict(dict(children)))
        elif kind is nn.Sequential:
            built.append(nn.Sequential(*(child for _, child in children if not isinstance(child, nn.ModuleDict))))
        else:
            built.append(nn.Identity())
    return Runner([(str(index), module) for index, module in enumerate(built)], draw(st.permutations(built[-3:])))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models(), st.sampled_from(["auto", "model", "all"]), st.sampled_from([[], ["Identity"], ["Runner"]]))
def test_every_call_has_a_tag_of_its_own_below_its_levels(model: Runner, granularity: str, exclude: list[str]) -> None:
    model.program = tuple(module for module in model.program if not isinstance(module, nn.ModuleDict))
    tree, calls = module_tree(model), trace_calls(model, (X,))
    names = {module.class_name for module in tree}
    tags = Tags(tree, calls, granularity=granularity, exclude=[name for name in exclude if name in names])

    assert len({*tags.tags.values()}) == len(calls)
    assert len({tags.module_tag(module.path) for module in tree}) == len(tree)
    assert tags.levels <= {traced.call.path for traced in calls}
    for traced in calls:
        tag = tags.tag(traced.call)
        assert len(tag.split("/")) <= traced.depth + 2
        assert tags.level(traced.call) == next(c for c in reversed(calls.stack(traced.call)) if tags.is_level(c.path))
        if traced.parent is not None:
            assert tag.startswith(tags.source_tag(traced.parent) + "/")
            if not tags.is_level(traced.call.path):
                assert tag.startswith(tags.tag(traced.parent) + "/")
