"""Faults: each is planted in a sound file, found, and located in the call whose nodes or weights it changes.

A row names a model of the table, a node by its call and operator, what is done to it, and the call that has to be
named if it is not the node's own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from exports import Exporter
from modelexport import export, verify
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.format import keys
from modelexport.terminal.show_verification import format_verify
from modelexport.verify.model_and_file import ModelRuns

Plant = Callable[[ir.Node], object]


# --- what is done to a node -------------------------------------------------------------------------------------------


def constant(node: ir.Node, name: str, array: Any) -> ir.Value:
    """A new initializer of the node's graph."""
    tensor = ir.tensor(np.array(array, order="C"), name=name)
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    assert isinstance(node.graph, ir.Graph)
    node.graph.initializers.add(value)
    return value


def weight(change: Callable[[Any], Any], index: int = 1) -> Plant:
    """Other numbers in an initializer."""

    def plant(node: ir.Node) -> None:
        value = node.inputs[index]
        assert value is not None
        assert value.const_value is not None
        value.const_value = ir.tensor(np.ascontiguousarray(change(value.const_value.numpy())), name=value.name)

    return plant


def other_constant(index: int) -> Plant:
    """A constant, one percent off, for this node only."""

    def plant(node: ir.Node) -> None:
        value = node.inputs[index]
        assert value is not None
        known = value.const_value if value.const_value is not None else value.producer().attributes["value"].as_tensor()  # type: ignore[union-attr]
        node.replace_input_with(index, constant(node, "planted", known.numpy() * np.float32(1.01)))

    return plant


def attribute(name: str, change: Callable[[Any], Any]) -> Plant:
    def plant(node: ir.Node) -> None:
        old = node.attributes[name]
        node.attributes[name] = ir.Attr(name, old.type, change(old.value))

    return plant


def after(op_type: str, *arrays: Any, then: str = "", **attributes: int) -> Plant:
    """An operation behind the node, of the same call; ``then`` is another one behind that."""

    def plant(node: ir.Node) -> None:
        value, graph, chain = node.outputs[0], node.graph, []
        assert graph is not None
        users, last = list(value.uses()), value
        for number, one in enumerate(filter(None, (op_type, then))):
            given = (
                [constant(node, f"planted{i}", np.asarray(array)) for i, array in enumerate(arrays)]
                if not number
                else []
            )
            to = {"to": ir.DataType.FLOAT.value} if number else attributes
            made = ir.Node(
                "", one, [last, *given], [ir.AttrInt64(*pair) for pair in to.items()], name=f"planted_{number}",
                metadata_props=dict(node.metadata_props),
            )  # fmt: skip
            chain.append(made)
            last = made.outputs[0]
            dtype = ir.DataType(attributes["to"]) if "to" in attributes and not number else value.dtype
            last.name, last.type, last.shape = f"planted_{number}_0", ir.TensorType(dtype), value.shape  # type: ignore[arg-type]
        graph.insert_after(node, chain)
        for user, index in users:
            user.replace_input_with(index, last)
        for index, output in enumerate(graph.outputs):
            if output is value:
                value.name, last.name = f"{value.name}_before", value.name
                graph.outputs[index] = last

    return plant


def exchanged(node: ir.Node) -> None:
    first, second = node.inputs
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)


def takes(name: str, index: int = 0) -> Plant:
    """Another value for an input."""

    def plant(node: ir.Node) -> None:
        assert node.graph is not None
        values = {value.name: value for one in node.graph for value in one.outputs}
        node.replace_input_with(index, values[name])

    return plant


def bypassed(node: ir.Node) -> None:
    """Its users take what the node took."""
    for user, index in list(node.outputs[0].uses()):
        user.replace_input_with(index, node.inputs[0])


def operator(op_type: str) -> Plant:
    return lambda node: setattr(node, "op_type", op_type)


def owner(*calls: str) -> Plant:
    """Other owners, with the tags of a node that has them."""

    def plant(node: ir.Node) -> None:
        assert node.graph is not None
        props = [one.metadata_props for one in node.graph]
        tags = {one["modelexport.call"]: one for one in props if "modelexport.calls" not in one}
        for key in ("modelexport.call", "modelexport.source_module", "namespace"):
            node.metadata_props[key] = tags[calls[0]][key]
        node.metadata_props.pop("modelexport.calls", None)
        node.metadata_props.pop("modelexport.hierarchy_tags", None)
        if len(calls) > 1:
            node.metadata_props["modelexport.calls"] = json.dumps(calls)
            node.metadata_props["modelexport.hierarchy_tags"] = json.dumps(
                [tags[call]["modelexport.source_module"] for call in calls]
            )

    return plant


def random(node: ir.Node) -> None:
    """Dropout in training mode behind the node."""
    after("Dropout", np.float32(0.1), np.bool_(True))(node)


def zero(array: Any) -> Any:
    return array * 0


def a_little_more(array: Any) -> Any:
    return array * np.float32(1.0009)


def one_element(array: Any) -> Any:
    changed = array.copy()
    changed.reshape(-1)[0] += 1
    return changed


def turned(array: Any) -> Any:
    return array.T if array.ndim > 1 and array.shape[0] == array.shape[1] else np.flip(array)


def halved(array: Any) -> Any:
    return array.astype(np.float16).astype(np.float32)


SCALED, NEGATED, ZERO = after("Mul", np.float32(1.00002)), after("Neg"), after("Mul", np.float32(0))
CLIPPED = after("Clip", np.float32(-0.5), np.float32(0.5))
HALF = after("Cast", then="Cast", to=ir.DataType.FLOAT16.value)
TANH = attribute("approximate", lambda value: "tanh")


# --- the table --------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    model: str
    call: str
    op_type: str
    fault: str
    plant: Plant
    expected: str | None = None
    """The call that is named; by default the node's own."""


# fmt: off
ROWS = (
    Row("blocks", "stem.linear", "Gemm", "weight zero", weight(zero)),
    Row("blocks", "up.0.linear", "Gemm", "weight transposed", weight(turned)),
    Row("blocks", "down.1.linear", "Gemm", "one element of a bias", weight(one_element, 2)),
    Row("blocks", "up.1.norm", "LayerNormalization", "weight a little larger", weight(a_little_more)),
    Row("blocks", "shared.norm@1", "LayerNormalization", "epsilon", attribute("epsilon", lambda e: e * 10)),
    Row("blocks", "head", "Gemm", "weight in half precision", weight(halved)),
    Row("blocks", "down.0.linear", "Gemm", "alpha", attribute("alpha", lambda a: 1.001)),
    Row("blocks", "shared.linear@1", "Gemm", "input of another call", takes("layer_norm")),
    Row("blocks", "down.1.norm", "LayerNormalization", "left out before a call that uses it", bypassed, ""),
    Row("blocks", "", "Add", "another operation", operator("Sub")),
    Row("blocks", "shared@1", "Relu", "another operation", operator("Sigmoid")),
    Row("blocks", "up.0", "Relu", "output scaled", SCALED),
    Row("blocks", "head", "Gemm", "output negated", NEGATED),
    Row("blocks", "down.0.norm", "LayerNormalization", "output clipped", CLIPPED),
    Row("blocks", "stem.norm", "LayerNormalization", "half precision in between", HALF),
    Row("blocks", "shared.linear", "Gemm", "dropout in training mode", random),
    Row("blocks", "down.0.linear", "Gemm", "given to another call", owner("down.1.linear"), "down.1.linear"),
    Row("blocks", "down.0.linear", "Gemm", "given to the call around", owner("down.0"), "down.0"),
    Row("blocks", "up.0", "Relu", "given to a call inside", owner("up.0.linear"), "up.0.linear"),
    Row("blocks", "shared.linear@1", "Gemm", "given to another call of its module",
        owner("shared.linear"), "shared.linear"),
    Row("blocks", "up.1.linear", "Gemm", "an owner too many", owner("up.1.linear", "up.0.linear")),

    Row("equal-values", "layers.1", "Gemm", "bias not zero", weight(one_element, 2)),
    Row("equal-values", "", "Add", "a buffer one percent off", other_constant(1)),
    Row("equal-values", "", "Tanh", "another operation", operator("Sigmoid")),
    Row("equal-values", "layers.2", "Gemm", "input of another call", takes("add")),
    Row("equal-values", "layers.0", "Gemm", "given to another call", owner("layers.2"), "layers.2"),

    Row("recurrent", "lstm", "LSTM", "a weight zero", weight(zero)),
    Row("recurrent", "lstm", "LSTM", "a bias a little larger", weight(a_little_more, 3)),
    Row("recurrent", "gru", "GRU", "a hidden weight turned", weight(turned, 2)),
    Row("recurrent", "gru", "GRU", "output scaled", SCALED),
    Row("recurrent", "gru", "GRU", "reset before the product", attribute("linear_before_reset", lambda one: 0)),

    Row("condition", "before.linear", "Gemm", "output scaled", SCALED),
    Row("condition", "negative", "Gemm", "weight turned", weight(turned)),
    Row("condition", "before.norm@1", "LayerNormalization", "epsilon", attribute("epsilon", lambda e: e * 10)),
    Row("condition", "before@1", "Relu", "another operation", operator("Sigmoid")),

    Row("loop", "block@1", "Relu", "in the iterations", operator("Sigmoid")),
    Row("loop", "block.norm@2", "LayerNormalization", "after them", SCALED),
    Row("loop", "last", "Gemm", "weight zero", weight(zero)),
    Row("loop", "block.linear", "Gemm", "before them", NEGATED),

    Row("bert", "encoder.layer.0.attention.self.query", "MatMul", "weight transposed", weight(turned)),
    Row("bert", "encoder.layer.1.attention.self.key", "Add", "bias not zero", weight(one_element)),
    Row("bert", "embeddings.LayerNorm", "LayerNormalization", "weight a little larger", weight(a_little_more)),
    Row("bert", "encoder.layer.0.intermediate.intermediate_act_fn", "Gelu", "approximate", TANH),
    Row("bert", "encoder.layer.0.attention.self", "Softmax", "axis", attribute("axis", lambda a: -2)),
    Row("bert", "encoder.layer.1.attention.self", "Transpose", "permutation",
        attribute("perm", lambda p: (0, 2, 3, 1))),
    Row("bert", "encoder.layer.1.attention.output", "Add", "residual of another layer", takes("layer_norm", 1)),
    Row("bert", "encoder.layer.0.attention.self", "Mul", "a constant one percent off", other_constant(1)),
    Row("bert", "encoder.layer.0.output.dense", "MatMul", "output scaled", SCALED),
    Row("bert", "encoder.layer.1.output.LayerNorm", "LayerNormalization", "half precision in between", HALF),
    Row("bert", "encoder.layer.0.attention.self", "Softmax", "dropout in training mode", random),
    Row("bert", "encoder.layer.0.attention.self", "Softmax", "given to another call",
        owner("encoder.layer.1.attention.self"), "encoder.layer.1.attention.self"),
    Row("bert", "encoder.layer.0.intermediate.dense", "MatMul", "given to the root", owner(""), ""),

    Row("gpt2", "transformer.h.0.attn", "Softmax", "axis", attribute("axis", lambda a: -2)),
    Row("gpt2", "transformer.h.1.ln_2", "LayerNormalization", "epsilon", attribute("epsilon", lambda e: e * 10)),
    Row("gpt2", "transformer.h.0.mlp.act", "Tanh", "output clipped", CLIPPED),
    Row("gpt2", "lm_head", "MatMul", "output scaled", SCALED),
    Row("gpt2", "transformer.h.1", "Add", "left out before a call that uses it", bypassed, "transformer.h.1.ln_2"),

    Row("t5", "encoder.block.0.layer.0.SelfAttention", "Softmax", "output scaled", SCALED),
    Row("t5", "decoder.block.1.layer.1.EncDecAttention.q", "MatMul", "weight transposed", weight(turned)),
    Row("t5", "decoder.block.0.layer.1.EncDecAttention", "Softmax", "axis", attribute("axis", lambda a: -2)),
    Row("t5", "encoder.final_layer_norm", "Mul", "output negated", NEGATED),

    Row("mixtral", "model.layers.0.mlp.gate", "Gemm", "a router's weight a little larger", weight(a_little_more)),
    Row("mixtral", "model.layers.1.mlp.gate", "Div", "output scaled", SCALED),
    Row("mixtral", "model.layers.1.self_attn.v_proj", "MatMul", "weight zero", weight(zero)),

    Row("vit", "layers.1.layernorm_before", "LayerNormalization", "epsilon", attribute("epsilon", lambda e: e * 1e7)),
    Row("vit", "embeddings.patch_embeddings.projection", "Conv", "weight a little larger", weight(a_little_more)),
    Row("vit", "embeddings", "Concat", "inputs exchanged", exchanged),

    Row("unet", "middle", "InstanceNormalization", "epsilon", attribute("epsilon", lambda e: e * 10)),
    Row("unet", "stem", "Conv", "padding on one side", attribute("pads", lambda p: (2, 2, 0, 0))),
    Row("unet", "down.1.conv", "Conv", "one element of a weight", weight(one_element)),
    Row("unet", "time.1", "Sigmoid", "another operation", operator("Tanh")),
    Row("unet", "", "Concat", "inputs exchanged", exchanged),
    Row("unet", "up.0.act", "Relu", "output scaled", SCALED),

    Row("llama+dynamic", "model.layers.0.input_layernorm", "Pow", "another operation", operator("Mul")),
    Row("llama+dynamic", "model.layers.1.mlp.act_fn", "Sigmoid", "another operation", operator("Tanh")),
    Row("llama+dynamic", "model.layers.0.self_attn", "Softmax", "half precision in between", HALF),
    Row("llama+dynamic", "model.layers.1.mlp", "Mul", "input of another call", takes("silu")),
    Row("llama+dynamic", "model.rotary_emb", "Cos", "a tenth of a percent more", after("Mul", np.float32(1.001))),
)
# fmt: on


class Sound(NamedTuple):
    """A model, built once, with its sound file and the runs of the model."""

    path: Path
    model: nn.Module
    inputs: dict[str, Any]
    runs: ModelRuns


@pytest.fixture(scope="module")
def sound(exported: Exporter) -> Callable[[str], Sound]:
    made: dict[str, Sound] = {}

    def get(name: str) -> Sound:
        if name not in made:
            one = exported(name.partition("+")[0], dynamic=name.endswith("+dynamic"))
            model = one.case.build()
            made[name] = Sound(one.path, model, one.case.inputs(), ModelRuns(model))
        return made[name]

    return get


def find(model: ir.Model, row: Row) -> ir.Node:
    for node in model.graph.all_nodes():
        props = node.metadata_props
        if (node.op_type, props["modelexport.call"]) == (row.op_type, row.call) and "modelexport.calls" not in props:
            return node
    raise LookupError(f"{row.call} has no {row.op_type}")


def is_quick(row: Row) -> bool:
    """All faults of a small model, which are of every kind, and the first of a state, of branches and of a loop."""
    first = next(one for one in ROWS if one.model == row.model)
    like_another = row.fault in ("weight zero", "weight transposed", "output negated")
    return (row.model == "blocks" and not like_another) or (
        row == first and row.model in ("recurrent", "condition", "loop")
    )


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if is_quick(row) else pytest.mark.slow) for row in ROWS],
    ids=lambda row: f"{row.model}-{row.call}-{row.op_type}-{row.fault}",
)
def test_a_fault_is_found_in_its_call(row: Row, sound: Callable[[str], Sound], tmp_path: Path) -> None:
    path, model, inputs, runs = sound(row.model)
    file = load_onnx(path)
    row.plant(find(file, row))
    save_model(file, tmp_path / "faulty.onnx")
    report = verify(model, inputs, tmp_path / "faulty.onnx", runs=runs)
    assert report.verdict == "differ"
    assert report.diverging is not None
    expected = row.call if row.expected is None else row.expected
    assert report.diverging.address == expected, report.diverging.reason


class Flat(nn.Module):
    """Returns the result of its ``Relu`` in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)).flatten(1)


@pytest.mark.parametrize("moves", ["Flatten", "Reshape"])
def test_a_wrong_call_is_found_whichever_operator_gives_the_value_another_shape(moves: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Flat(), nn.Linear(18, 4)).eval(), (torch.randn(2, 3, 4),)
    export(model, inputs, tmp_path / "x.onnx", frontend="dynamo", check=False)
    file = load_onnx(tmp_path / "x.onnx")
    for node in file.graph:
        if node.op_type == "Reshape":
            assert list(node.attributes) == ["allowzero"]
            node.op_type = moves
            if moves == "Flatten":
                node.attributes.clear()
                node.resize_inputs(1)
        elif node.op_type == "Relu":
            owner("0.linear")(node)
    save_model(file, tmp_path / "faulty.onnx")
    report = verify(model, inputs, tmp_path / "faulty.onnx")
    assert report.diverging is not None
    assert report.diverging.address == "0.linear"


class Gate(nn.Module):
    """Decides which of two modules is called."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.mean() > 0, lambda y: self.yes(y) * 2, lambda y: self.no(y) - y, (x,))


CHOSEN = [
    Row("", "1", "Greater", "the other branch, whose result PyTorch has, too", after("Not")),
    Row(
        "",
        "0",
        "Gemm",
        "another value leaves a call than the one that it computes",
        after("Mul", np.eye(2, 1, dtype=np.float32)),
    ),
]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    model, inputs = nn.Sequential(nn.Linear(4, 4), Gate(), nn.Linear(4, 4)), {"input": torch.randn(2, 4)}
    path = export(model, inputs, tmp_path_factory.mktemp("chosen") / "m.onnx", check=False).path
    return Sound(path, model, inputs, ModelRuns(model))


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.op_type)
def test_a_fault_before_branches_accuses_no_call_in_or_behind_them(row: Row, chosen: Sound, tmp_path: Path) -> None:
    file = load_onnx(chosen.path)
    row.plant(find(file, row))
    save_model(file, tmp_path / "faulty.onnx")
    report = verify(chosen.model, chosen.inputs, tmp_path / "faulty.onnx", runs=chosen.runs)
    assert {call.address for call in report.calls if call.status == "differ"} == {row.call}


class HardlyDepends(nn.Module):
    """What follows from the first layer is, in one place, as exact as PyTorch's whatever the layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.first(x)
        return x.tanh() + made * 1e-8, self.last(made)


def test_what_hardly_depends_on_a_value_does_not_vouch_for_it(tmp_path: Path) -> None:
    model, inputs = HardlyDepends(), {"x": torch.randn(4, 8)}
    path = export(model, inputs, tmp_path / "m.onnx", check=False).path
    file = load_onnx(path)
    row = Row("", "first", "Gemm", "a thousandth more", weight(lambda array: array * np.float32(1.001)))
    row.plant(find(file, row))
    save_model(file, tmp_path / "faulty.onnx")
    report = verify(model, inputs, tmp_path / "faulty.onnx")
    assert report.diverging is not None
    assert report.diverging.address == "first"


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["blocks", "gpt2", "t5", "vit", "bert", "unet"])
def test_everything_given_to_the_root_is_found(name: str, sound: Callable[[str], Sound], tmp_path: Path) -> None:
    path, model, inputs, runs = sound(name)
    file = load_onnx(path)
    tag = "/" + type(model).__name__
    root = {
        "modelexport.call": "",
        "modelexport.source_module": tag,
        "namespace": tag[1:],
        "modelexport.evidence": "exact",
    }
    for node in file.graph.all_nodes():
        node.metadata_props.clear()
        node.metadata_props.update(root)
    save_model(file, tmp_path / "faulty.onnx")
    report = verify(model, inputs, tmp_path / "faulty.onnx", runs=runs)
    assert report.verdict == "differ"
    assert report.owners.contradicted > report.owners.confirmed / 2


# --- documents --------------------------------------------------------------------------------------------------------


def entry(document: Any, part: str, **of: Any) -> dict[str, Any]:
    """The entry of a part of a document that has these fields."""
    found: dict[str, Any] = next(one for one in document[part] if all(one.get(key) == of[key] for key in of))
    return found


class Claim(NamedTuple):
    suffix: str
    fault: str
    change: Callable[[Any], object]
    where: str
    """What the claim is about."""


CLAIMS = (
    Claim(
        ".hierarchy.json",
        "tag of a call",
        lambda d: entry(d, "calls", address="up.0").update(tag="/Blocks/Block.up.1"),
        "up.0",
    ),
    Claim(
        ".hierarchy.json",
        "class of a module",
        lambda d: entry(d, "modules", path="head").update(class_name="Conv1d"),
        "head",
    ),
    Claim(
        ".hierarchy.json",
        "number of parameters",
        lambda d: entry(d, "modules", path="stem").update(parameters=1),
        "stem",
    ),
    Claim(
        ".hierarchy.json",
        "parent of a call",
        lambda d: entry(d, "calls", address="up.0.norm").update(parent="up.1"),
        "up.0.norm",
    ),
    Claim(
        ".hierarchy.json", "number of nodes", lambda d: entry(d, "calls", address="down.0").update(nodes=7), "down.0"
    ),
    Claim(
        ".hierarchy.json",
        "boundary of a call",
        lambda d: entry(d, "calls", address="down.1")["boundary"].update(inputs=["x"]),
        "down.1",
    ),
    Claim(
        ".hierarchy.json",
        "call of a node",
        lambda d: entry(d, "nodes", name="node_relu").update(call="head"),
        "node_relu",
    ),
    Claim(
        ".hierarchy.json",
        "a node left out",
        lambda d: d["nodes"].remove(entry(d, "nodes", name="node_relu")),
        "node_relu",
    ),
    Claim(
        ".hierarchy.json",
        "parameter of an initializer",
        lambda d: entry(d, "initializers", name="head.bias").update(parameter=["head.weight"]),
        "head.bias",
    ),
)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.fault)
def test_a_false_claim_of_a_document_is_a_note(claim: Claim, sound: Callable[[str], Sound], tmp_path: Path) -> None:
    """The file is right nevertheless."""
    path, model, inputs, runs = sound("blocks")
    document = json.loads(path.with_suffix(claim.suffix).read_text())
    claim.change(document)
    text = json.dumps(document).encode()
    (tmp_path / "x.onnx").with_suffix(claim.suffix).write_bytes(text)
    file = load_onnx(path)
    digests = json.loads(file.metadata_props[keys.DOCUMENTS])
    digests[claim.suffix] = hashlib.sha256(text).hexdigest()
    file.metadata_props[keys.DOCUMENTS] = json.dumps(digests)
    save_model(file, tmp_path / "x.onnx", same_graph=True)
    report = verify(model, inputs, tmp_path / "x.onnx", runs=runs, others=False)
    assert report.verdict == "agree"
    (note,) = [one for one in report.claims if one.where == claim.where]
    assert f"note: the document {note.document} says of {note.where}: " in format_verify(report)


@pytest.mark.parametrize("other", ["settings", "model"])
def test_documents_that_were_not_written_with_a_file_never_make_it_wrong(
    other: str, sound: Callable[[str], Sound], tmp_path: Path
) -> None:
    path, model, inputs, runs = sound("blocks")
    for suffix in (".onnx", ".onnx.data"):
        if path.with_suffix(suffix).exists():
            shutil.copy(path.with_suffix(suffix), tmp_path / f"x{suffix}")
    for suffix in keys.DESCRIBING_SUFFIXES:
        document = json.loads((sound("bert")[0] if other == "model" else path).with_suffix(suffix).read_bytes())
        if suffix == ".hierarchy.json" and other == "settings":
            document["settings"].update(granularity="all", include=["Linear"])
        (tmp_path / "x.onnx").with_suffix(suffix).write_text(json.dumps(document))
    report = verify(model, inputs, tmp_path / "x.onnx", runs=runs, others=False)
    assert report.verdict == "agree"
    assert {claim.document for claim in report.claims} == (
        {"hierarchy", "dag", "operations"} if other == "model" else set()
    )


def test_the_documents_of_a_sound_file_claim_nothing_false(sound: Callable[[str], Sound]) -> None:
    path, model, inputs, runs = sound("blocks")
    assert verify(model, inputs, path, runs=runs).claims == []
