"""``replace``: the replacement of a module computes what it should, and nothing else changes."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from exports import ExportedCase, Exporter
from graph_texts import written
from modelexport import compare, export, load, retag, update_weights, verify, verify_against
from modelexport.core.calls import ModuleCall
from modelexport.errors import OutputError, UsageError
from modelexport.format import keys
from modelexport.graph.node_owners import owner_of
from modelexport.graph.parameter_plans import state_dict_of
from modelexport.pytorch.calls.module_tree_of_model import module_tree
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tools.cut.extraction import extract
from modelexport.tools.cut.replacing import Replaced, replace
from modelexport.tools.cut.substitutes import CustomOperator, FromModel, Identity, Substitute
from modelexport.verify.document_claims import false_claims


def nodes(path: Path) -> dict[str, bytes]:
    return {node.name: node.SerializeToString() for node in onnx.load(path, load_external_data=False).graph.node}


def outputs(path: Path, file: ExportedCase) -> dict[str, np.ndarray]:
    feeds = {name: value.numpy() for name, value in file.case.inputs().items()}
    return run_session(open_session(path), feeds)


def replaced(file: ExportedCase, selector: str, what: Substitute, output: Path, **options: bool) -> Replaced:
    """The replacement, after a check that the rest is unchanged."""
    result = replace(file.path, [selector], what, output, **options)
    onnx.checker.check_model(output, full_check=True)
    tagged, before, after = load(file.path), nodes(file.path), nodes(output)
    calls = {ModuleCall.parse(call.call) for call in result.calls}
    for node in tagged.model.graph:
        stacks = [tagged.calls.stack(call) for call in owner_of(node).calls]
        holds = any(attribute.type is ir.AttributeType.GRAPH for attribute in node.attributes.values())
        if not holds and not any(calls.intersection(stack) for stack in stacks):
            assert after[node.name] == before[node.name]
    assert load(output).coverage.untagged == 0
    assert load(output).hierarchy is not None  # it is compared with the calls and nodes of the file
    return result


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray], tolerance: float = 1e-6) -> None:
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_allclose(array, second[name], rtol=tolerance, atol=tolerance, err_msg=name)


MODULES = [
    ("blocks", "shared@1"),
    ("bert", "encoder.layer.0.attention"),
    ("unet", "middle"),
    ("llama", "model.layers.1"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "module"), MODULES)
def test_a_module_replaced_by_itself_changes_nothing(
    name: str, module: str, exported: Exporter, tmp_path: Path
) -> None:
    file = exported(name)
    extract(load(file.path), module, tmp_path / "sub.onnx")
    result = replaced(file, module, FromModel(tmp_path / "sub.onnx"), tmp_path / "out.onnx", every_call=False)
    same(outputs(file.path, file), outputs(tmp_path / "out.onnx", file))
    tags = {node.name: owner_of(node).calls for node in load(file.path).nodes}
    back = {node.name: owner_of(node).calls[:1] for node in load(tmp_path / "out.onnx").nodes}
    inside = {call for call in load(file.path).tags if str(call) == module or str(call).startswith(f"{module}.")}

    def left(calls: tuple[ModuleCall, ...]) -> tuple[ModuleCall, ...]:
        """What a node that it shared with others computes for them stays; the module has a copy of its own."""
        return tuple(call for call in calls if call not in inside) or calls

    assert {name: calls for name, calls in back.items() if name in tags} == {
        name: left(tags[name])[:1] for name in back if name in tags
    }
    assert [call.call for call in result.calls] == [module]
    entries = (state_dict_of(load(path).model) for path in (file.path, tmp_path / "out.onnx"))
    assert next(entries) == next(entries)


def test_nodes_that_a_replaced_module_shared_with_others_are_of_the_others(exported: Exporter, tmp_path: Path) -> None:
    file, module = exported("bert"), "encoder.layer.0.attention"
    shared = {node.name for node in load(file.path).nodes if is_of(node, module) and len(owner_of(node).calls) > 1}
    assert shared
    replaced(file, module, Identity(), tmp_path / "out.onnx")
    tagged = load(tmp_path / "out.onnx")
    here = {node.name: node for node in tagged.nodes}
    assert shared <= here.keys()
    assert not [name for name in shared if is_of(here[name], module)]
    assert not [call for call in tagged.tags if str(call).startswith(f"{module}.")]


def is_of(node: ir.Node, module: str) -> bool:
    """Whether a node has an owner inside a module."""
    return any(str(call) == module or str(call).startswith(f"{module}.") for call in owner_of(node).calls)


OPERATORS = [("blocks", "shared"), ("llama", "**.mlp"), ("bert", "class:LayerNorm"), ("llama", "model.layers.*")]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "selector"), OPERATORS)
def test_an_operator_with_the_old_module_as_its_body_computes_the_same(
    name: str, selector: str, exported: Exporter, tmp_path: Path
) -> None:
    file = exported(name)
    operator = CustomOperator("com.acme", "Fast", {"epsilon": 0.5, "axes": [1, 2], "mode": "wide"}, keep_body=True)
    result = replaced(file, selector, operator, tmp_path / "out.onnx")
    assert len(result.calls) > 1
    same(outputs(file.path, file), outputs(tmp_path / "out.onnx", file))
    model = ir.load(tmp_path / "out.onnx")
    (function,) = model.functions.values()
    assert list(function.attributes) == ["epsilon", "axes", "mode"]
    calls = [node for node in model.graph if node.domain == "com.acme"]
    assert len(calls) == len(result.calls)
    assert {node.metadata_props[keys.CALL] for node in calls} == {call.call for call in result.calls}
    report = verify_against(file.path, tmp_path / "out.onnx")
    assert report.agrees
    again = extract(load(tmp_path / "out.onnx"), result.calls[0].call, tmp_path / "sub.onnx")
    assert again.nodes == 1


def test_an_operator_without_a_body_gets_the_inputs_and_then_the_weights(exported: Exporter, tmp_path: Path) -> None:
    file = exported("bert")
    norm = "encoder.layer.0.attention.output.LayerNorm"
    attributes = {"axis": -1, "epsilon": 1e-12}
    replaced(file, norm, CustomOperator("", "LayerNormalization", attributes), tmp_path / "out.onnx")
    same(outputs(file.path, file), outputs(tmp_path / "out.onnx", file), 1e-5)
    chosen = CustomOperator("com.acme", "Norm", inputs=["input", f"{norm}.bias"])
    replaced(file, norm, chosen, tmp_path / "chosen.onnx")
    (node,) = (node for node in ir.load(tmp_path / "chosen.onnx").graph if node.domain == "com.acme")
    assert [value.name for value in node.inputs][1] == f"{norm}.bias"


ATTENTIONS = [
    ("bert", "encoder.layer.0.attention.self", ("query", "key", "value"), None),
    ("distilbert", "distilbert.transformer.layer.0.attention", ("q_lin", "k_lin", "v_lin"), "out_lin"),
    ("dinov2", "encoder.layer.0.attention", ("q_proj", "k_proj", "v_proj"), "o_proj"),
    ("clip", "text_model.encoder.layers.0.self_attn", ("q_proj", "k_proj", "v_proj"), "out_proj"),
]


def fused_attention(
    state: dict[str, np.ndarray], parts: Sequence[str], last: str | None, heads: int, masked: bool
) -> ir.Model:
    """An attention as ONNX Runtime's fused operator, with the weights of one that PyTorch computes in steps."""
    tape: list[ir.Node] = []
    weights: list[ir.Value] = []

    def linear(value: ir.Value, part: str) -> ir.Value:
        for kind, op_type in (("weight", "MatMul"), ("bias", "Add")):
            array = state[f"{part}.{kind}"]
            tensor = ir.tensor(array.T.copy() if kind == "weight" else array, name=f"{part}.{kind}")
            weights.append(ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(ir.DataType.FLOAT)))
            tape.append(ir.node(op_type, [value, weights[-1]]))
            value = tape[-1].outputs[0]
        return value

    width = state[f"{parts[0]}.weight"].shape[1]
    inputs = [ir.val("hidden_states", ir.DataType.FLOAT, ["b", "s", width])]
    projected = [linear(inputs[0], part) for part in parts]
    added = None
    if masked:
        inputs.append(ir.val("attention_mask", ir.DataType.BOOL, ["b", 1, "s", "s"]))
        weights.append(ir.val("low", const_value=ir.tensor(np.float32([-1e9, 0]), name="low")))
        tape.append(ir.node("Cast", [inputs[1]], {"to": ir.DataType.INT64}))
        tape.append(ir.node("Gather", [weights[-1], tape[-1].outputs[0]]))
        added = tape[-1].outputs[0]
    operands = [*projected, None, None, added]
    tape.append(ir.node("MultiHeadAttention", operands, {"num_heads": heads}, domain="com.microsoft"))
    result = tape[-1].outputs[0] if last is None else linear(tape[-1].outputs[0], last)
    result.name, result.type = "context", ir.TensorType(ir.DataType.FLOAT)
    opsets = {"": 20, "com.microsoft": 1}
    graph = ir.Graph(inputs, [result], nodes=tape, initializers=weights, opset_imports=opsets, name="fused")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(("name", "module", "parts", "last"), ATTENTIONS, ids=[each[0] for each in ATTENTIONS])
def test_an_attention_becomes_the_runtimes_fused_operator(
    name: str, module: str, parts: Sequence[str], last: str | None, exported: Exporter, tmp_path: Path
) -> None:
    file = exported(name)
    model = file.case.build()
    state = {key.rpartition(f"{module}.")[2]: value.numpy() for key, value in model.state_dict().items()}
    masked = any(value.dtype is ir.DataType.BOOL for value in load(file.path)[module].inputs)
    heads = getattr(model.config, "text_config", model.config).num_attention_heads
    ir.save(fused_attention(state, parts, last, heads, masked), tmp_path / "fused.onnx")
    result = replaced(file, module, FromModel(tmp_path / "fused.onnx"), tmp_path / "out.onnx")
    assert result.calls[0].added == 7 + 2 * masked + 2 * (last is not None)
    same(outputs(file.path, file), outputs(tmp_path / "out.onnx", file), 1e-4)


LAYERS = [("llama", "model.layers.1"), ("bert", "encoder.layer.1"), ("gpt2", "transformer.h.0"), ("vit", "layers.1")]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_a_layer_that_is_an_identity_is_a_model_without_it(
    name: str, layer: str, exported: Exporter, tmp_path: Path
) -> None:
    file = exported(name)
    result = replaced(file, layer, Identity(), tmp_path / "out.onnx")
    assert result.calls[0].added == 1
    assert without(file, layer, tmp_path / "out.onnx") < 1e-4
    assert not verify_against(file.path, tmp_path / "out.onnx").agrees


def without(file: ExportedCase, layer: str, path: Path) -> float:
    """How far a file's first output is from that of the PyTorch model in which a layer returns its input."""
    model = file.case.build()
    module = model.get_submodule(layer)
    module.register_forward_hook(
        lambda _, inputs, output: inputs[0] if torch.is_tensor(output) else (inputs[0], *output[1:])
    )
    with torch.no_grad():
        expected = model(**file.case.inputs())[0].numpy()
    got = next(iter(outputs(path, file).values()))
    return float(np.abs(got - expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_a_file_with_functions_stays_one(name: str, layer: str, exported: Exporter, tmp_path: Path) -> None:
    file = exported(name)
    export(file.case.build(), file.case.inputs(), tmp_path / "f.onnx", tags_as="functions", check=False)
    for what, output in ((Identity(), "identity.onnx"), (CustomOperator("a", "B", keep_body=True), "operator.onnx")):
        replace(tmp_path / "f.onnx", [layer], what, tmp_path / output)
        onnx.checker.check_model(tmp_path / output, full_check=True)
        tagged = load(tmp_path / output)
        assert tagged.encoding == "functions"
        assert tagged.coverage.untagged == 0
        assert tagged.hierarchy is not None
    assert without(file, layer, tmp_path / "identity.onnx") < 1e-4
    same(outputs(file.path, file), outputs(tmp_path / "operator.onnx", file))


class Wider(nn.Module):
    """A changed feed-forward network: another activation and another inner width."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.Linear(8, 20)
        self.out = nn.Linear(20, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(torch.sigmoid(self.into(hidden)))


@pytest.mark.parametrize("tags_as", ["metadata", pytest.param("functions", marks=pytest.mark.slow)])
def test_a_submodule_becomes_one_exported_from_changed_code(tags_as: str, exported: Exporter, tmp_path: Path) -> None:
    file = exported("blocks")
    wider = Wider().eval()
    export(wider, {"hidden": torch.ones(2, 8)}, tmp_path / "wider.onnx", check=False)
    source = file.path
    if tags_as == "functions":
        source = tmp_path / "f.onnx"
        export(file.case.build(), file.case.inputs(), source, tags_as="functions", check=False)
    result = replace(source, ["down.1", "up.0"], FromModel(tmp_path / "wider.onnx"), tmp_path / "out.onnx")
    model = copy.deepcopy(file.case.build())
    model.down[1] = model.up[0] = wider
    with torch.no_grad():
        expected = model(**file.case.inputs()).numpy()
    tagged = load(tmp_path / "out.onnx")
    assert tagged.encoding == tags_as
    assert tagged.hierarchy is not None
    assert [entry.name for entry in tagged.hierarchy.nodes] == [node.name for node in tagged.nodes]
    (got,) = outputs(tmp_path / "out.onnx", file).values()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert [call.call for call in result.calls] == ["down.1", "up.0"]
    assert tagged["down.1.into"].nodes
    assert tagged["up.0.out"].tag.startswith(tagged["up.0"].tag)
    assert not {"down.1.linear", "down.1.norm"} & {str(call) for call in tagged.tags}
    if tags_as == "metadata":  # a function's body may be that of modules that were not replaced
        assert all(keys.REPLACED in node.metadata_props for node in tagged["down.1"].nodes)
    assert not any(keys.REPLACED in node.metadata_props for node in tagged["down.0"].nodes)
    assert json.loads(tagged.model.metadata_props[keys.REPLACED]) == {"down.1": "wider.onnx", "up.0": "wider.onnx"}
    entries = {key for key, entry in state_dict_of(tagged.model).items() if entry.used}
    assert {"down.1.into.weight", "up.0.into.weight"} <= entries
    assert "down.1.linear.weight" not in entries


def test_false_tags_are_found_where_other_modules_were_replaced(exported: Exporter, tmp_path: Path) -> None:
    file, wider = exported("blocks"), Wider().eval()
    export(wider, {"hidden": torch.ones(2, 8)}, tmp_path / "wider.onnx", check=False)
    replace(file.path, ["down.1"], FromModel(tmp_path / "wider.onnx"), tmp_path / "out.onnx")
    model = file.case.build()
    model.down[1] = wider
    tagged, tree = load(tmp_path / "out.onnx"), module_tree(model)
    sound = tagged.hierarchy
    assert not false_claims(tagged, sound, None, tree)

    def accused(part: str, place: str, **said: object) -> set[str]:
        entries = [
            msgspec.structs.replace(entry, **said) if place == (entry.path if part == "modules" else entry.address)
            else entry
            for entry in getattr(sound, part)
        ]  # fmt: skip
        assert entries != getattr(sound, part)
        wrong = msgspec.structs.replace(sound, **{part: entries})
        return {claim.where for claim in false_claims(tagged, wrong, None, tree)}

    assert accused("modules", "down.0", tag="/Blocks/Other.down.0") == {"down.0"}
    assert accused("modules", "up.1", tag="/Blocks/Block.up.0") == {"up.1"}
    assert accused("modules", "down.1.into", tag="/Blocks/Wider/Other.into") == {"down.1.into"}
    assert accused("calls", "shared@1", tag="/Other/Block.shared@1") == {"shared@1"}
    assert accused("calls", "down.1", tag="/Blocks/Block.down.1") == {"down.1"}


CHANGED = [
    ("tied-weights", "embedding"),
    ("unet", "down.1"),
    ("llama", "model.layers.1.mlp"),
    ("bert", "encoder.layer.0"),
    ("mixtral", "model.norm"),
    ("t5", "encoder.block.1"),
    ("albert", "encoder.albert_layer_groups.0"),
]


def arguments_of(model: nn.Module, path: str, inputs: dict[str, torch.Tensor]) -> dict[str, object]:
    """The arguments of the first call of a module."""
    found: list[dict[str, object]] = []
    module = model.get_submodule(path)

    def keep(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if name != "kwargs"} | dict(bound.get("kwargs", {}))
        found.append({name: value for name, value in given.items() if value is not None})

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return found[0]


def changed_code(module: nn.Module) -> nn.Module:
    """A module of a class with another ``forward`` and one more parameter, with other weights."""
    old, new = type(module), copy.deepcopy(module)

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        output = old.forward(self, *args, **kwargs)
        first = output if torch.is_tensor(output) else output[0]
        changed = first * self.extra_gain + torch.tanh(first)
        return changed if torch.is_tensor(output) else (changed, *output[1:])

    forward.__signature__ = inspect.signature(old.forward)
    new.__class__ = type(f"Changed{old.__name__}", (old,), {"forward": forward, "__module__": __name__})
    new.extra_gain = nn.Parameter(torch.tensor(0.7))
    return new.eval()


@pytest.mark.sweep
@pytest.mark.parametrize("tags_as", ["metadata", pytest.param("functions", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "path"), CHANGED, ids=[each[0] for each in CHANGED])
def test_changed_code_in_place_of_a_module_is_the_changed_model(
    name: str, path: str, tags_as: str, exported: Exporter, tmp_path: Path
) -> None:
    file = exported(name)
    model, inputs, source = file.case.build(), file.case.inputs(), file.path
    if tags_as == "functions":
        source = tmp_path / "f.onnx"
        export(model, inputs, source, tags_as="functions", check=False)
    new = changed_code(model.get_submodule(path))
    export(new, arguments_of(model, path, inputs), tmp_path / "sub.onnx", tags_as=tags_as, check=False)
    replace(source, [path], FromModel(tmp_path / "sub.onnx"), tmp_path / "out.onnx")
    onnx.checker.check_model(tmp_path / "out.onnx", full_check=True)
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)
    report = verify(model, inputs, tmp_path / "out.onnx")
    assert report.agrees
    assert not report.claims
    tagged = load(tmp_path / "out.onnx")
    assert tagged.encoding == tags_as
    assert tagged.coverage.untagged == 0
    assert tagged.class_of(ModuleCall(path)) == type(new).__name__


def test_inputs_are_matched_by_what_map_says(exported: Exporter, tmp_path: Path) -> None:
    file = exported("blocks")
    export(Wider().eval(), {"hidden": torch.ones(2, 8)}, tmp_path / "wider.onnx", check=False)
    taken = replace(file.path, ["down.1"], FromModel(tmp_path / "wider.onnx"), tmp_path / "out.onnx").calls[0].inputs
    named = FromModel(tmp_path / "wider.onnx", {"hidden": taken[0]})
    assert replace(file.path, ["down.1"], named, tmp_path / "named.onnx").calls[0].inputs == taken
    with pytest.raises(UsageError, match="has no value 'nothing'"):
        replace(file.path, ["down.1"], FromModel(tmp_path / "wider.onnx", {"hidden": "nothing"}), tmp_path / "x.onnx")
    with pytest.raises(UsageError, match="has no input or output 'what'"):
        replace(file.path, ["down.1"], FromModel(tmp_path / "wider.onnx", {"what": "x"}), tmp_path / "x.onnx")


def test_what_does_not_fit_is_said_and_nothing_is_written(exported: Exporter, tmp_path: Path) -> None:
    file = exported("blocks")
    export(Wider().eval(), {"hidden": torch.ones(2, 8)}, tmp_path / "wider.onnx", check=False)
    wider, output = FromModel(tmp_path / "wider.onnx"), tmp_path / "out.onnx"
    with pytest.raises(UsageError, match="has the shape"):
        replace(file.path, ["head"], wider, output)
    with pytest.raises(UsageError, match="cannot be an identity"):
        replace(file.path, ["head"], Identity(), output)
    with pytest.raises(UsageError, match="'nothing'"):
        replace(file.path, ["nothing"], Identity(), output)
    with pytest.raises(OutputError, match="give another name"):
        replace(file.path, ["stem"], Identity(), file.path)
    with pytest.raises(UsageError, match="one operator has one body"):
        replace(file.path, ["stem", "head"], CustomOperator("a", "B", keep_body=True), output)
    assert not output.exists()


def test_every_call_of_a_module_or_one(exported: Exporter, tmp_path: Path) -> None:
    file = exported("blocks")
    assert [c.call for c in replaced(file, "shared", Identity(), tmp_path / "all.onnx").calls] == ["shared", "shared@1"]
    one = replaced(file, "shared@1", Identity(), tmp_path / "one.onnx", every_call=False)
    assert [c.call for c in one.calls] == ["shared@1"]


def test_the_other_commands_work_on_what_was_replaced(exported: Exporter, tmp_path: Path) -> None:
    file = exported("blocks")
    path = tmp_path / "out.onnx"
    replaced(file, "class:LayerNorm", CustomOperator("com.acme", "Norm", keep_body=True), path)
    report = verify(file.case.build(), file.case.inputs(), path)
    assert report.agrees
    assert not report.claims
    assert "LayerNorm" in str(load(path))
    assert compare(file.path, path).differs
    ir.save(ir.load(path), tmp_path / "changed.onnx")
    again = retag(tmp_path / "changed.onnx", source=path, output=tmp_path / "again.onnx")
    assert again.coverage.untagged == 0
    listed = {module.path: module for module in load(path).hierarchy.modules}
    assert listed["shared.norm"].calls == 2
    replace(file.path, ["down.1"], Identity(), tmp_path / "without.onnx")
    listed = {module.path: module for module in load(tmp_path / "without.onnx").hierarchy.modules}
    assert listed["down.1.linear"].calls == 0
    assert listed["down.1.linear"].reason


def test_a_module_inside_a_branch_is_replaced_there(exported: Exporter, tmp_path: Path) -> None:
    file = exported("condition")
    replaced(file, "positive.0", CustomOperator("a", "B", keep_body=True), tmp_path / "out.onnx", every_call=False)
    same(outputs(file.path, file), outputs(tmp_path / "out.onnx", file))
    held = [node for node in ir.load(tmp_path / "out.onnx").graph.all_nodes() if node.domain == "a"]
    assert len(held) == 1
    assert held[0] not in list(ir.load(tmp_path / "out.onnx").graph)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(self.a(x)))


def test_weights_of_one_call_have_no_name_that_another_call_still_uses(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, other = Twice().eval(), nn.Linear(4, 4).eval()
    export(whole, (torch.randn(2, 4),), tmp_path / "whole.onnx", check=False)
    export(other, {"input": torch.randn(2, 4)}, tmp_path / "sub.onnx", check=False)
    replace(tmp_path / "whole.onnx", ["a@1"], FromModel(tmp_path / "sub.onnx"), tmp_path / "out.onnx", every_call=False)
    named = [initializer.parameter for initializer in load(tmp_path / "out.onnx").hierarchy.initializers]
    assert sorted(name for names in named for name in names or ()) == ["a.bias", "a.weight", "b.bias", "b.weight"]
    save_file(dict(whole.state_dict()), tmp_path / "same.safetensors")
    update_weights(tmp_path / "out.onnx", tmp_path / "same.safetensors", tmp_path / "updated.onnx")
    x = torch.randn(2, 4)
    with torch.no_grad():
        expected = other(whole.b(whole.a(x))).numpy()
    session = open_session(tmp_path / "updated.onnx")
    (actual,) = run_session(session, {session.get_inputs()[0].name: x.numpy()}).values()
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_weights_files_of_one_name_are_linked_each_with_its_own_record(tmp_path: Path) -> None:
    x, whole, other = torch.rand(2, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), nn.Linear(16, 16)
    for name, module in (("whole", whole), ("other", other)):
        (tmp_path / name).mkdir()
        export(module, {"input": x}, tmp_path / name / "model.onnx", weights="copy", check=False)
    substitute, output = FromModel(tmp_path / "other/model.onnx"), tmp_path / "out.onnx"
    result = replace(tmp_path / "whole/model.onnx", ["1"], substitute, output, weights="link")
    assert result.weights == ["other/model.onnx.data", "whole/model.onnx.data"]
    (computed,) = run_session(open_session(load(output).path), {"input": x.numpy()}).values()  # files are checked
    np.testing.assert_allclose(computed, other(whole[0](x)).detach().numpy(), rtol=1e-5, atol=1e-6)


TWO_BLOCKS = """g (float[2,4] x) => (float[2,4] y)
    { ["/a/Relu"] r = Relu(x) ["/b/%s"] s = %s(r) ["/c/Neg"] y = Neg(s) }"""


def test_a_second_operator_of_one_name_shares_an_equal_body_and_no_other(tmp_path: Path) -> None:
    feeds, by = (
        {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)},
        CustomOperator("acme", "Block", keep_body=True),
    )
    for operator in ("Relu", "Tanh"):
        file = written(tmp_path / f"{operator}.onnx", TWO_BLOCKS.replace("%s", operator))
        replace(file, ["a"], by, tmp_path / "first.onnx")
        if operator == "Tanh":
            with pytest.raises(UsageError, match=r"'b' computes something else than the acme:Block that is there"):
                replace(tmp_path / "first.onnx", ["b"], by, tmp_path / "second.onnx")
        else:
            replace(tmp_path / "first.onnx", ["b"], by, tmp_path / "both.onnx")
            same(run_session(open_session(file), feeds), run_session(open_session(tmp_path / "both.onnx"), feeds))
            assert len(onnx.load(tmp_path / "both.onnx").functions) == 1
    body = """s (float[2,4] u) => (float[2,4] v) { v = acme.Block(u) }
        <domain: "acme", opset_import: ["": 18]> Block (p) => (q) { q = Abs(p) }"""
    with pytest.raises(UsageError, match="one operator has one body"):
        replace(
            tmp_path / "first.onnx",
            ["b"],
            FromModel(written(tmp_path / "sub.onnx", body, acme=1)),
            tmp_path / "third.onnx",
        )


def test_a_module_with_a_branch_becomes_the_body_of_an_operator(tmp_path: Path) -> None:
    file = written(
        tmp_path / "branch.onnx",
        """g (float[2] x, bool c) => (float[2] y) {
            ["/a/Neg"] n = Neg(x)
            ["/b/If"] i = If (c) <then_branch = t () => (p) { ["/b/Exp"] p = Exp(n) },
                                  else_branch = e () => (q) { ["/b/Add"] q = Add(n, x) }>
            ["/d/Abs"] y = Abs(i) }""",
    )
    replace(file, ["b"], CustomOperator("acme", "Branch", keep_body=True), tmp_path / "out.onnx")
    for chosen in (True, False):
        feeds = {"x": np.array([1, 2], np.float32), "c": np.array(chosen)}
        same(*(run_session(open_session(path), feeds) for path in (file, tmp_path / "out.onnx")))


def test_a_substitute_of_the_same_class_gives_each_output_to_its_own(tmp_path: Path) -> None:
    """The outputs of the file have the names that the outputs of the substitute have, in another order."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x * 3

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two = Two()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x + 1, *self.two(x)

    x = torch.ones(2, 4)
    export(Three(), (x,), tmp_path / "three.onnx", check=False)
    export(Two(), (x,), tmp_path / "two.onnx", check=False)
    replace(tmp_path / "three.onnx", ["two"], FromModel(tmp_path / "two.onnx"), tmp_path / "replaced.onnx")
    session = open_session(tmp_path / "replaced.onnx")
    results = run_session(session, {session.get_inputs()[0].name: x.numpy()})
    assert [result[0, 0] for result in results.values()] == [2, 2, 3]
