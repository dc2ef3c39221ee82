"""The encodings: all have the same content, `strip` and `inline` convert them back, the runtime agrees."""

from __future__ import annotations

import cProfile
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import models
from commands import run
from exports import ExportedCase, Exporter
from modelexport import errors, export, inline, load, strip
from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.module_tree import Module, ModuleTree
from modelexport.core.owners import Evidence, Owner
from modelexport.core.tags import Tags
from modelexport.format import keys
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.pytorch.inputs.named_inputs import feeds
from modelexport.tagged.encodings.attributes import write_attributes
from modelexport.tagged.encodings.functions import FunctionsModel, write_functions
from modelexport.tagged.encodings.functions_call_groups import Group, Grouping, Item, group_calls
from modelexport.tagged.encodings.metadata import write_tags

QUICK = ("blocks", "condition", "bert", "albert", "t5")
"""Shared modules, branches, repeated calls, an encoder and a decoder of one class."""
CASES = [
    pytest.param(case.name, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in models.CASES
]
DYNAMIC = [
    pytest.param(case.name, id=case.name, marks=() if case.name == "blocks" else pytest.mark.slow)
    for case in models.CASES
    if case.dynamic is not None
]


# --- every model of the table


def tags_of(case: ExportedCase) -> Tags:
    """The tags of an exported model, from its sidecar and its file."""
    document = case.hierarchy
    modules = {
        entry.path: Module(
            path=entry.path,
            class_name=entry.class_name,
            class_module=entry.qualified_class.removesuffix(f".{entry.class_name}"),
            parent=entry.path.rpartition(".")[0] if entry.path else None,
            name=entry.path.rpartition(".")[2],
            depth=entry.depth,
            aliases=tuple(entry.aliases),
        )
        for entry in document.modules
    }
    chosen = document.settings
    return Tags(
        ModuleTree(modules),
        load(case.path).calls,
        granularity=chosen.granularity,
        include=chosen.include,
        exclude=chosen.exclude,
    )


def content(model: ir.Model, *, shapes: bool = True) -> dict[str, Any]:
    """The content of a model by the names of values, independent of the order of its nodes.

    Args:
        shapes: Those of values between the nodes, which bodies of functions have as far as their calls agree.
    """
    graph = ir.to_proto(model.graph)
    return {
        "inputs": [value.SerializeToString() for value in graph.input],
        "outputs": [value.SerializeToString() for value in graph.output],
        "nodes": {node.outputs[0].name: described(node, shapes) for node in model.graph},
        "owners": {node.name: owner_of(node) for node in all_nodes(model)},
        "initializers": {
            value.name: (value.const_value.dtype, value.const_value.tobytes(), properties(value))
            for value in initializers(model)
        },
        # The files beside a model are not part of it.
        "metadata": {
            key: value for key, value in model.metadata_props.items() if key not in (keys.DOCUMENTS, keys.DATA)
        },
    }


def described(node: ir.Node, shapes: bool) -> tuple[object, ...]:
    attributes = {
        attribute.name: {inner.outputs[0].name: described(inner, shapes) for inner in attribute.as_graph()}
        if attribute.type == ir.AttributeType.GRAPH
        else ir.to_proto(attribute).SerializeToString()
        for attribute in node.attributes.values()
    }
    inputs = [None if value is None else value.name for value in node.inputs]
    outputs = [(value.name, str(value.type), str(value.shape) if shapes else "") for value in node.outputs]
    return node.op_identifier(), node.name, inputs, outputs, attributes, dict(node.metadata_props)


def properties(initializer: ir.Value) -> dict[str, object]:
    known: dict[str, object] = dict(initializer.metadata_props)
    known[keys.HIERARCHY_TAGS] = set(json.loads(initializer.metadata_props[keys.HIERARCHY_TAGS]))
    return known


def outputs(path: Path, inputs: Mapping[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds(inputs, session))


def check_functions_variant(case: ExportedCase, folder: Path) -> FunctionsModel:
    flat, path, inputs = load(case.path), folder / "functions.onnx", case.case.inputs()
    variant = write_functions(flat.model, tags_of(case))
    ir.save(variant.model, path)
    onnx.checker.check_model(path, full_check=True)
    for expected, actual in zip(outputs(case.path, inputs), outputs(path, inputs), strict=True):
        assert (actual.dtype, actual.shape, actual.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    inline(path, folder / "inlined.onnx")
    onnx.checker.check_model(folder / "inlined.onnx", full_check=True)
    assert content(load(folder / "inlined.onnx").model, shapes=False) == content(flat.model, shapes=False)
    assert content(load(path).model) == content(load(folder / "inlined.onnx").model)
    assert load(path).tags == flat.tags
    assert load(path).calls == flat.calls
    return variant


@pytest.mark.parametrize("name", CASES)
def test_functions_compute_the_same_bits_and_inline_gives_the_flat_file(
    name: str, exported: Exporter, tmp_path: Path
) -> None:
    variant = check_functions_variant(exported(name), tmp_path)
    bodies = [
        [(node.op_identifier(), dict(node.metadata_props)) for node in function]
        for function in variant.model.functions.values()
        if function.domain == keys.FUNCTIONS_DOMAIN
    ]
    assert bodies
    assert all(keys.CALL in metadata for body in bodies for _, metadata in body)


@pytest.mark.parametrize("name", DYNAMIC)
def test_functions_of_a_dynamic_model_too(name: str, exported: Exporter, tmp_path: Path) -> None:
    check_functions_variant(exported(name, dynamic=True), tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_attributes_are_read_back_unchanged_and_strip_makes_the_file_runnable(
    name: str, exported: Exporter, tmp_path: Path
) -> None:
    case = exported(name)
    model = load(case.path).model
    write_attributes(model, load(case.path).call_tags)
    ir.save(model, tmp_path / "attributes.onnx")
    for node in all_nodes(ir.load(tmp_path / "attributes.onnx")):
        assert node.attributes["source_module"].as_string() == node.attributes["hierarchy_tags"].as_strings()[0]
    with pytest.raises(onnx.checker.ValidationError, match=r"source_module|hierarchy_tags"):
        onnx.checker.check_model(tmp_path / "attributes.onnx")
    expected = content(load(case.path).model)
    assert content(load(tmp_path / "attributes.onnx").model) == expected
    strip(tmp_path / "attributes.onnx", tmp_path / "stripped.onnx")
    onnx.checker.check_model(tmp_path / "stripped.onnx", full_check=True)
    assert content(load(tmp_path / "stripped.onnx").model) == expected


def test_equal_layers_are_one_function_with_the_class_as_its_name(exported: Exporter) -> None:
    case = exported("bert")
    variant = write_functions(load(case.path).model, tags_of(case))
    called = [node.op_type for node in all_nodes(variant.model) if node.domain == keys.FUNCTIONS_DOMAIN]
    assert called.count("BertLayer") == 2
    assert not any(name.startswith("BertLayer_") for name in called)
    top = [node for node in variant.model.graph if node.domain == keys.FUNCTIONS_DOMAIN]
    assert [node.metadata_props[keys.CALL] for node in top] == ["embeddings", "encoder", "pooler"]
    assert top[1].attributes["source_module"].as_string() == "/BertModel/BertEncoder"
    assert list(top[1].attributes["hierarchy_tags"].as_strings()) == ["/BertModel/BertEncoder"]


@pytest.mark.slow
def test_24_layers_are_one_function_ten_times_fewer_nodes_and_a_quarter_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    tokens = {"input_ids": torch.arange(16).reshape(2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    path = tmp_path / "functions.onnx"
    result = export(LlamaForCausalLM(config), tokens, path, weights="copy", tags_as="functions")
    assert result.functions is not None
    assert not result.functions.flat
    onnx.checker.check_model(path, full_check=True)
    inline(path, tmp_path / "flat.onnx")
    expected, actual = (outputs(file, tokens)[0] for file in (tmp_path / "flat.onnx", path))
    assert actual.tobytes() == expected.tobytes()
    written = list(all_nodes(result.functions.model))
    assert [node.op_type for node in written].count("LlamaDecoderLayer") == 24
    assert "LlamaDecoderLayer_1" not in {node.op_type for node in written}
    assert len(load(tmp_path / "flat.onnx").nodes) >= 10 * len(written)
    assert (tmp_path / "flat.onnx").stat().st_size >= 4 * path.stat().st_size
    report = path.with_suffix(".report.md").read_text()
    assert "| `LlamaDecoderLayer` | 6 | 24 |" in report


# --- random graphs


@st.composite
def random_models(draw: st.DrawFn) -> tuple[ir.Model, Tags]:
    """Calls of a few classes, and nodes of any owners that use any earlier values."""
    modules = {"": Module("", "Root", "user", None, "", 0)}
    calls = [TracedCall(ModuleCall(""), None, 0, None, None)]
    for number in range(draw(st.integers(1, 7))):
        above = draw(st.sampled_from(calls))
        path = f"{above.call.path}.{number}".removeprefix(".")
        known = draw(st.sampled_from([None, *(p for p in modules if p and not above.call.path.startswith(p))]))
        if known is None:
            class_name = draw(st.sampled_from(["A", "B"]))
            where = draw(st.sampled_from(["user", "torch.nn"]))
            modules[path] = Module(path, class_name, where, above.call.path, str(number), above.depth + 1)
        path = known or path
        call = ModuleCall(path, sum(traced.call.path == path for traced in calls))
        calls.append(TracedCall(call, above.call, above.depth + 1, None, None))
    tags = Tags(ModuleTree(modules), CallTree(tuple(calls)))
    x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
    weights = [
        ir.Value(name=f"w_{i}", const_value=ir.tensor([1.0, float(draw(st.integers(0, 1)))]), shape=ir.Shape([2]))
        for i in range(2)
    ]
    for weight in weights:
        weight.type = ir.TensorType(ir.DataType.FLOAT)
    values, nodes = [x, *weights], []
    for number in range(draw(st.integers(1, 14))):
        owners = draw(st.lists(st.sampled_from(calls), min_size=1, max_size=draw(st.sampled_from([1, 1, 1, 2]))))
        output = ir.Value(name=f"v_{number}", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
        inputs = [draw(st.sampled_from(values)) for _ in range(2)]
        node = ir.Node("", draw(st.sampled_from(["Add", "Mul"])), inputs, outputs=[output], name=f"node_{number}")
        set_owner(node, Owner(tuple(dict.fromkeys(traced.call for traced in owners)), Evidence.EXACT))
        nodes.append(node)
        values.append(output)
    graph = ir.Graph([x], [values[-1]], nodes=nodes, initializers=weights, opset_imports={"": 20}, name="g")
    model = ir.Model(graph, ir_version=10)
    write_tags(model, tags)
    return model, tags


@settings(max_examples=20, deadline=None)
@given(random_models())
def test_reading_the_functions_encoding_of_any_graph_gives_the_graph(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[ir.Model, Tags]
) -> None:
    model, tags = drawn
    path = tmp_path_factory.getbasetemp() / "random.onnx"
    variant = write_functions(model, tags)
    ir.save(variant.model, path)
    onnx.checker.check_model(path, full_check=True)
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert content(load(path).model) == content(model)


@settings(max_examples=40)
@given(random_models())
def test_groups_hold_every_node_once_in_an_order_that_runs(drawn: tuple[ir.Model, Tags]) -> None:
    model, tags = drawn
    grouping = group_calls(model, tags.calls)
    order = list(flattened(grouping.items[model.graph]))
    assert sorted(node.name or "" for node in order) == sorted(node.name or "" for node in model.graph)
    position = {node: index for index, node in enumerate(order)}
    for node in order:
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            assert producer is None or position[producer] < position[node]


def flattened(items: list[Item]) -> Any:
    for item in items:
        if isinstance(item, Group):
            yield from flattened(item.items)
        else:
            yield item


# --- calls that cannot be one node


def chain(*owners: str, uses: Mapping[int, tuple[int, ...]] | None = None) -> Grouping:
    """Group nodes 0, 1, ... of the given calls, each of which uses the one before it, or those in ``uses``."""
    x = ir.Value(name="x")
    nodes: list[ir.Node] = []
    calls = {"": TracedCall(ModuleCall(""), None, 0, None, None)}
    for number, owned in enumerate(owners):
        used = (uses or {}).get(number, (number - 1,))
        inputs = [nodes[index].outputs[0] if index >= 0 else x for index in used]
        node = ir.Node("", "Sum", inputs, outputs=[ir.Value(name=f"v{number}")])
        for path in owned.split("+"):
            parts = path.split(".") if path else []
            for depth in range(1, len(parts) + 1):
                call, above = ".".join(parts[:depth]), ".".join(parts[: depth - 1])
                calls.setdefault(call, TracedCall(ModuleCall(call), ModuleCall(above), depth, None, None))
        set_owner(node, Owner(tuple(ModuleCall(path) for path in owned.split("+"))))
        nodes.append(node)
    graph = ir.Graph([x], [nodes[-1].outputs[0]], nodes=nodes, opset_imports={"": 20})
    return group_calls(ir.Model(graph, ir_version=10), CallTree(tuple(calls.values())))


def addresses(calls: Iterable[ModuleCall]) -> list[str]:
    return [call.address for call in calls]


def groups(grouping: Grouping) -> list[str]:
    (items,) = grouping.items.values()
    return [item.call.path for item in items if isinstance(item, Group)]


def nodes_of(grouping: Grouping, path: str) -> list[str | None]:
    """The results of the nodes that are in the group of a call, without those of groups inside."""
    (pending,) = (list(items) for items in grouping.items.values())
    for item in pending:
        if isinstance(item, Group):
            if item.call.path == path:
                return [inner.outputs[0].name for inner in item.items if isinstance(inner, ir.Node)]
            pending.extend(item.items)
    raise AssertionError(f"{path} is not a group")


def test_a_call_that_a_value_leaves_and_returns_to_stays_flat() -> None:
    grouping = chain("a", "", "a", "b")
    assert addresses(grouping.flat) == ["a"]


def test_a_call_inside_a_flat_call_is_still_a_group() -> None:
    grouping = chain("a.inner", "a.inner", "", "a")
    assert addresses(grouping.flat) == ["a"]
    assert groups(grouping) == ["a.inner"]


def test_of_calls_that_wait_for_each_other_one_stays_flat() -> None:
    grouping = chain("a", "b", "b", "a", uses={0: (-1,), 1: (0,), 2: (-1,), 3: (2,)})
    assert addresses(grouping.flat) == ["a"]


def test_only_the_call_to_blame_stays_flat_where_others_lie_on_the_way() -> None:
    grouping = chain("a", "b", "a", "c")
    assert addresses(grouping.flat) == ["a"]


def test_a_node_of_several_calls_is_in_the_call_that_contains_them() -> None:
    grouping = chain("m.a", "m.a+m.b", "m.a", "m.b", uses={1: (-1,), 2: (0, 1), 3: (1, 2)})
    assert not grouping.flat
    assert nodes_of(grouping, "m") == ["v1"]


def test_a_node_of_several_calls_is_in_one_of_them_if_its_value_would_return() -> None:
    grouping = chain("m.a", "m.a+m.b", "m.a", "m.b", uses={2: (1,), 3: (1, 2)})
    assert not grouping.flat
    assert nodes_of(grouping, "m.a") == ["v0", "v1", "v2"]


def test_a_call_all_of_whose_nodes_belong_to_others_too_is_named() -> None:
    grouping = chain("a", "a+b")
    assert addresses(grouping.flat) == ["b"]


def test_a_call_in_both_branches_of_a_condition_stays_flat() -> None:
    root, call = ModuleCall(""), ModuleCall("a")
    branches = []
    for number in range(2):
        node = ir.Node("", "Constant", [], [ir.AttrInt64("value_int", 1)], outputs=[ir.Value(name=f"c{number}")])
        set_owner(node, Owner((call,)))
        branches.append(ir.Graph([], [node.outputs[0]], nodes=[node], name=f"branch{number}"))
    x = ir.Value(name="x")
    names = ("then_branch", "else_branch")
    held = [ir.AttrGraph(name, branch) for name, branch in zip(names, branches, strict=True)]
    enclosing = ir.Node("", "If", [x], held, outputs=[ir.Value(name="y")])
    set_owner(enclosing, Owner((root,)))
    graph = ir.Graph([x], [enclosing.outputs[0]], nodes=[enclosing], opset_imports={"": 20})
    calls = CallTree((TracedCall(root, None, 0, None, None), TracedCall(call, root, 1, None, None)))
    grouping = group_calls(ir.Model(graph, ir_version=10), calls)
    assert addresses(grouping.flat) == ["a"]


@pytest.mark.parametrize("owners", [("a", ""), ("a", "b", "c", "")], ids=["comes back", "interleaved"])
def test_grouping_takes_work_in_proportion_to_the_nodes(owners: tuple[str, ...]) -> None:
    def work(nodes: int) -> int:
        """Function calls that the grouping makes: the same in every run."""
        named = [f"{owners[i % len(owners)]}{i // 40 if owners[i % len(owners)] else ''}" for i in range(nodes)]
        with cProfile.Profile() as profile:
            chain(*named)
        return sum(entry.callcount for entry in profile.getstats())

    assert work(2000) < 8.5 * work(250)


# --- what a person meets


def test_the_command_says_that_the_runtime_refuses_attributes_and_strip_is_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch\nbuild = lambda: (torch.nn.Linear(2, 2), (torch.ones(1, 2),))\n")
    done = run("export", "net.py:build", "-o", "a.onnx", "--tags-as", "attributes", "--verify", cwd=tmp_path)
    assert done.returncode == 0
    assert "modelexport strip a.onnx" in done.stderr
    with pytest.raises(Exception, match=r"source_module|hierarchy_tags"):
        onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    done = run("strip", "a.onnx", "-o", "b.onnx", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b.onnx\n", "")
    onnxruntime.InferenceSession(tmp_path / "b.onnx", providers=["CPUExecutionProvider"])


def test_the_wrong_encoding_is_said_in_one_line_and_nothing_is_written(exported: Exporter, tmp_path: Path) -> None:
    flat = exported("blocks").path
    with pytest.raises(errors.UsageError, match="its tags as metadata: there is nothing to inline"):
        inline(flat, tmp_path / "out.onnx")
    with pytest.raises(errors.UsageError, match="its tags as metadata: there is nothing to strip"):
        strip(flat, tmp_path / "out.onnx")
    with pytest.raises(errors.OutputError, match="no folder"):
        inline(flat, tmp_path / "missing" / "out.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", [keys.CALL, keys.SOURCE_MODULE])
def test_a_functions_file_without_what_the_calls_say_is_damaged(key: str, exported: Exporter, tmp_path: Path) -> None:
    case = exported("blocks")
    variant = write_functions(load(case.path).model, tags_of(case))
    for node in variant.model.graph:
        if node.domain == keys.FUNCTIONS_DOMAIN:
            del node.metadata_props[key]
    ir.save(variant.model, tmp_path / "damaged.onnx")
    with pytest.raises(errors.FileFormatError, match="damaged tags"):
        load(tmp_path / "damaged.onnx")


def test_inline_copies_weights_in_a_separate_file(exported: Exporter, tmp_path: Path) -> None:
    case = exported("bert")
    flat = load(case.path).model
    ir.save(
        write_functions(flat, tags_of(case)).model, tmp_path / "functions.onnx", external_data="functions.onnx.data"
    )
    (tmp_path / "elsewhere").mkdir()
    inline(tmp_path / "functions.onnx", tmp_path / "elsewhere" / "flat.onnx")
    (tmp_path / "functions.onnx.data").unlink()
    inlined = load(tmp_path / "elsewhere" / "flat.onnx").model
    assert content(inlined, shapes=False) == content(flat, shapes=False)
