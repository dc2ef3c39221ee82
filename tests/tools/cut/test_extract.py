"""A module call, cut out of a tagged file, is a model that computes what the call computes in the whole file."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import commands
import modelexport
import models
from exports import ExportedCase, Exporter
from graph_texts import written
from modelexport import load
from modelexport.core.calls import ModuleCall
from modelexport.errors import FileFormatError, OutputError, UsageError
from modelexport.files import onnx_models
from modelexport.format.documents import CallTensor
from modelexport.graph.boundaries import find_boundaries, match_values
from modelexport.graph.node_owners import owned_operators, owner_of
from modelexport.graph.nodes import all_nodes, initializers, nested_graphs
from modelexport.pytorch.nested_tensors import tensors_in
from modelexport.regions.graph_cutter import Cutter
from modelexport.tagged.tree_display import tree_rows
from modelexport.tagged_model import TaggedModel
from modelexport.tools.cut import extraction

TABLE = [case.name for case in (*models.CASES, *models.TRAINED)]


def run(model: Path | bytes, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output, computed without optimization."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    values = session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
    return dict(zip([value.name for value in session.get_outputs()], values, strict=True))


def every_value(path: Path, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every value that a file computes outside of nested graphs, and its inputs."""
    model = ir.load(path)
    graph = model.graph
    arrays = {name: tensor.numpy() for name, tensor in tensors_in(inputs)}
    names = [value.name or "" for value in graph.inputs]
    feeds = arrays if set(names) <= arrays.keys() else dict(zip(names, arrays.values(), strict=True))
    shown = {value.name for value in graph.outputs}
    values = [value for node in graph for value in node.outputs if value.name and value.name not in shown]
    graph.outputs.extend(value for value in values if value.type is not None)
    return run(ir.to_proto(model).SerializeToString(), feeds) | feeds


def calls_with_nodes(tagged: TaggedModel) -> list[ModuleCall]:
    cutter = Cutter(tagged)
    return [call for call in tagged.tags if cutter.has_nodes(call)]


def check_every_call(exported: ExportedCase, inputs: dict[str, Any], folder: Path) -> None:
    """Each call's cut is valid, tagged, and computes what the whole file does; those inside branches have to load."""
    tagged = load(exported.path)
    values = every_value(exported.path, inputs)
    calls = calls_with_nodes(tagged)
    for extracted in extraction.extract_all(tagged, [str(call) for call in calls], folder):
        path = Path(extracted.path)
        onnx.checker.check_model(path, full_check=True)
        assert load(path).coverage.untagged == 0
        if not all(value.value in values for value in (*extracted.inputs, *extracted.outputs)):
            ort.InferenceSession(path, providers=["CPUExecutionProvider"])
            continue
        got = run(path, {value.name: values[value.value] for value in extracted.inputs})
        for value in extracted.outputs:
            assert got[value.name].dtype == values[value.value].dtype, (extracted.call, value)
            np.testing.assert_allclose(
                got[value.name], values[value.value], rtol=1e-6, atol=1e-6, err_msg=extracted.call
            )


@pytest.mark.sweep
@pytest.mark.sweep
@pytest.mark.parametrize("name", TABLE)
def test_every_call_gives_what_it_gives_in_the_whole_file(name: str, exported: Exporter, tmp_path: Path) -> None:
    whole = exported(name)
    check_every_call(whole, whole.case.inputs(), tmp_path / "calls")


@pytest.mark.parametrize(
    "name", ["blocks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "llama"))]
)
def test_calls_of_a_dynamic_export_run_at_other_sizes(name: str, exported: Exporter, tmp_path: Path) -> None:
    whole = exported(name, dynamic=True)
    assert whole.case.dynamic is not None
    check_every_call(whole, whole.case.dynamic(), tmp_path / "calls")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_dynamic_layer_reads_sizes_off_its_inputs_and_keeps_their_names(
    name: str, exported: Exporter, tmp_path: Path
) -> None:
    tagged = load(exported(name, dynamic=True).path)
    layers = {"bert": "encoder.layer.1", "llama": "model.layers.1"}
    extracted = tagged.extract(layers[name], tmp_path / "layer.onnx")
    inputs = {value.name: value for value in extracted.inputs}
    batch, length, _ = inputs["hidden_states"].shape
    assert isinstance(batch, str)
    assert inputs["attention_mask"].shape == [batch, 1, length, length]
    assert all(value.dtype != "int64" for value in extracted.inputs)
    assert extracted.borrowed > 0


def test_calls_inside_branches_give_what_their_modules_give(exported: Exporter, tmp_path: Path) -> None:
    whole = exported("condition")
    tagged, model = load(whole.path), whole.case.build()
    x = torch.linspace(-2, 2, 16).reshape(2, 8)
    for address in ("positive.0", "positive.0@1", "negative", "before@1"):
        extracted = tagged.extract(address, tmp_path / "call.onnx")
        with torch.no_grad():
            expected = model.get_submodule(ModuleCall.parse(address).path)(x)
        (got,) = run(tmp_path / "call.onnx", {extracted.inputs[0].name: x.numpy()}).values()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_call_with_branches_keeps_them_whole(exported: Exporter, tmp_path: Path) -> None:
    tagged = load(exported("condition").path)
    tagged.extract(".", tmp_path / "root.onnx")
    held = [len(list(graph)) for node in load(tmp_path / "root.onnx").nodes for graph in nested_graphs(node)]
    assert held == [len(list(graph)) for node in tagged.nodes for graph in nested_graphs(node)] != []


@pytest.mark.parametrize("name", ["bert", "t5", "clip", "detr", "nested-structures", "two-parents", "whisper"])
def test_an_input_named_after_an_argument_is_that_argument(name: str, exported: Exporter) -> None:
    whole = exported(name)
    tagged, values = load(whole.path), every_value(whole.path, whole.case.inputs())
    arguments = arguments_of_calls(whole.case.build(), whole.case.inputs())
    entries = {entry.address: entry for entry in whole.hierarchy.calls}
    boundaries = find_boundaries(tagged.model, tagged.calls)
    compared = 0
    for call in calls_with_nodes(tagged):
        for value, argument in match_values(list(boundaries[call].inputs), entries[call.address].inputs).items():
            # The exporter makes a mask where the model itself has none.
            if argument.name in arguments[call]:
                expected = arguments[call][argument.name]
                np.testing.assert_allclose(
                    values[value.name or ""], expected, rtol=1e-3, atol=1e-4, err_msg=f"{call} {argument.name}"
                )
                compared += 1
    assert compared >= len(calls_with_nodes(tagged)) / 2


def arguments_of_calls(model: nn.Module, inputs: dict[str, Any]) -> dict[ModuleCall, dict[str, np.ndarray]]:
    """The arguments of ``forward`` at each call."""
    seen: dict[ModuleCall, dict[str, np.ndarray]] = {}
    counts: Counter[str] = Counter()

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[ModuleCall(path, counts[path])] = {
                name: tensor.clone().numpy() for name, tensor in tensors_in(named(module, args, kwargs))
            }
            counts[path] += 1

        return hook

    for path, module in model.named_modules():
        module.register_forward_pre_hook(note(path), with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    return seen


def named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``forward`` by their names."""
    signature = inspect.signature(module.forward)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name in [name for name in arguments if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD]:
        arguments |= arguments.pop(name)
    return arguments


# --- what a cut is made of ---


def test_what_all_layers_share_is_in_each_of_them_and_no_output_of_any(exported: Exporter, tmp_path: Path) -> None:
    tagged = load(exported("bert").path)
    shared = [node for node in tagged.nodes if (owner := owner_of(node)) and len(owner.calls) > 1]
    assert shared
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        extracted = tagged.extract(layer, tmp_path / "layer.onnx")
        cut = load(tmp_path / "layer.onnx")
        names = {node.name for node in cut.nodes}
        assert {node.name for node in shared} <= names
        assert len(extracted.outputs) == 1
        owners = {call.path for node in cut.nodes if (owner := owner_of(node)) for call in owner.calls}
        assert all(path.startswith(layer) for path in owners)


def test_a_cut_has_its_own_weights_and_no_others(exported: Exporter, tmp_path: Path) -> None:
    tagged = load(exported("bert").path)
    tagged.extract("encoder.layer.1", tmp_path / "layer.onnx")
    cut = load(tmp_path / "layer.onnx").model
    used = {value.name for node in all_nodes(cut) for value in node.inputs if value is not None}
    assert {value.name for value in initializers(cut)} <= used
    keys = {key for v in initializers(cut) for key in json.loads(v.metadata_props.get("modelexport.parameter", "[]"))}
    state = exported("bert").case.build().state_dict()
    assert keys == {key for key in state if key.startswith("encoder.layer.1.")}


def test_tags_opset_and_metadata_are_those_of_the_whole(exported: Exporter, tmp_path: Path) -> None:
    tagged = load(exported("bert").path)
    tagged.extract("encoder.layer.1", tmp_path / "layer.onnx")
    cut = load(tmp_path / "layer.onnx")
    assert cut.model.opset_imports == tagged.model.opset_imports
    assert cut.model.metadata_props.keys() == tagged.model.metadata_props.keys() | {"modelexport.cut_from"}
    assert all(tagged.tags[call] == tag for call, tag in cut.tags.items())
    rows = {row.address: row for row in tree_rows(owned_operators(cut.model), cut.calls, cut.tags.__getitem__)}
    assert rows["encoder.layer.1"].nodes == rows[""].nodes == len(cut.nodes)
    assert "encoder.layer.0" not in rows
    tags = {tag for v in initializers(cut.model) for tag in json.loads(v.metadata_props["modelexport.hierarchy_tags"])}
    assert all(tag.startswith("/BertModel/BertEncoder/BertLayer.1") for tag in tags)


def test_a_cut_can_be_cut_again(exported: Exporter, tmp_path: Path) -> None:
    tagged = load(exported("bert").path)
    tagged.extract("encoder.layer.1", tmp_path / "layer.onnx")
    twice = load(tmp_path / "layer.onnx").extract("encoder.layer.1.attention", tmp_path / "twice.onnx")
    once = tagged.extract("encoder.layer.1.attention", tmp_path / "once.onnx")
    assert fingerprints(tmp_path / "twice.onnx") == fingerprints(tmp_path / "once.onnx")
    assert twice.nodes == once.nodes


def test_the_whole_returns_what_the_file_returns_inputs_and_weights_too(tmp_path: Path) -> None:
    typed = onnx.helper.make_tensor_value_info
    values = [typed(name, onnx.TensorProto.FLOAT, [3]) for name in ("y", "x", "r", "scale")]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["r"], name="/a/Relu")],
        "passing",
        values[:2],
        [values[0], *values[2:]],
        [onnx.numpy_helper.from_array(np.ones(3, np.float32), "scale")],
    )
    opsets = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "passing.onnx")
    cut = load(tmp_path / "passing.onnx").extract(".", tmp_path / "cut.onnx")
    assert [value.name for value in cut.inputs] == ["y", "x"]
    assert [value.name for value in cut.outputs] == ["y", "r", "scale"]
    assert modelexport.verify_against(tmp_path / "passing.onnx", tmp_path / "cut.onnx").agrees


class Scaling(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale


class Computed(nn.Module):
    """Passes its child a value that depends only on a weight, and noise, which does not depend on anything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.child = Scaling()
        self.noisy = Scaling()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noisy(self.child(x, torch.exp(self.weight).sum()), torch.rand(3))


def test_what_depends_on_weights_alone_comes_along_and_what_is_random_does_not(tmp_path: Path) -> None:
    path = tmp_path / "computed.onnx"
    modelexport.export(Computed().eval(), {"x": torch.ones(2, 3)}, path, optimized=False, check=False)
    tagged = load(path)
    child = tagged.extract("child", tmp_path / "child.onnx")
    assert ([value.name for value in child.inputs], child.borrowed) == (["x"], 2)
    (got,) = run(tmp_path / "child.onnx", {"x": np.ones((2, 3), np.float32)}).values()
    np.testing.assert_allclose(got, np.full((2, 3), np.exp([1, 2, 3]).sum()), rtol=1e-6)
    assert len(tagged.extract("noisy", tmp_path / "noisy.onnx").inputs) == 2


# --- the same as exporting the module alone ---

ALONE: list[tuple[str, str, dict[str, int], str]] = [
    *(("minilm", f"encoder.layer.{i}", {}, "") for i in range(6)),
    ("blocks", "down.1", {}, ""),
    ("residual-network", "2", {}, ""),
    ("unet", "up.0", {}, ""),
    (
        "nested-structures",
        "left",
        {"Identity": 1},
        "the root returns the block's output twice, and outputs of a graph are distinct values",
    ),
    (
        "llama",
        "model.layers.1",
        {"Unsqueeze": -2},
        "the rotary embedding depends on constants alone in the whole model: it is a folded constant, not an argument",
    ),
    ("bert", "encoder.layer.1", {}, ""),
]
"""Case, call, the operators that the cut has more (or fewer) of than the module exported alone, and why."""


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "address", "difference", "reason"), ALONE, ids=[f"{c[0]}-{c[1]}" for c in ALONE])
def test_a_cut_is_what_exporting_the_module_alone_gives(
    name: str, address: str, difference: dict[str, int], reason: str, exported: Exporter, tmp_path: Path
) -> None:
    whole = exported(name)
    load(whole.path).extract(address, tmp_path / "cut.onnx")
    export_alone(whole.case.build(), address, whole.case.inputs(), tmp_path / "alone.onnx")
    cut, alone = (Counter(node.op_type for node in load(tmp_path / f"{n}.onnx").nodes) for n in ("cut", "alone"))
    assert {op: cut[op] - alone[op] for op in cut | alone if cut[op] != alone[op]} == difference, reason
    if not difference:
        assert fingerprints(tmp_path / "cut.onnx") == fingerprints(tmp_path / "alone.onnx")


def export_alone(model: nn.Module, address: str, inputs: dict[str, Any], path: Path) -> None:
    """Export a submodule by itself with the inputs that it gets inside the model."""
    module = model.get_submodule(address)
    seen: dict[str, Any] = {}
    handle = module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(named(module, args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    if isinstance(model, PreTrainedModel):
        # transformers' exporter takes only whole models, and translates attention differently.
        module = Shell(model.config, module).eval()
        seen = {name: value for name, value in seen.items() if value is not None}
    modelexport.export(module, seen, path, check=False)


class Shell(PreTrainedModel):
    """A model that consists of one module of another."""

    _supports_sdpa = True

    def __init__(self, config: Any, inner: nn.Module) -> None:
        super().__init__(config)
        self.inner = inner

    def forward(self, **arguments: Any) -> Any:
        return self.inner(**arguments)


def fingerprints(path: Path) -> list[str]:
    """The computation of each output: operators, attributes, connections, constants, weights, and inputs by name."""
    known: dict[ir.Value, str] = {}

    def digest(*parts: object) -> str:
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def of(value: ir.Value | None) -> str:
        if value is not None and value not in known:
            tensor = value.const_value
            assert tensor is not None
            known[value] = digest(tensor.dtype, list(tensor.shape.numpy()), tensor.tobytes())
        return "" if value is None else known[value]

    def attribute(attr: ir.Attr) -> object:
        if attr.type == ir.AttributeType.TENSOR:
            return attr.as_tensor().tobytes()
        return [[of(v) for v in walk(attr.as_graph())] if attr.type == ir.AttributeType.GRAPH else attr.value]

    def walk(graph: ir.Graph) -> list[ir.Value]:
        known.update((value, f"input {value.name}") for value in graph.inputs)
        for node in graph:
            attributes = sorted((name, repr(attribute(attr))) for name, attr in node.attributes.items())
            made = digest(node.op_identifier(), attributes, [of(value) for value in node.inputs])
            known.update((value, f"{made}:{i}") for i, value in enumerate(node.outputs))
        return list(graph.outputs)

    return [known[value] for value in walk(ir.load(path).graph)]


# --- names, files, errors ---


def test_a_file_is_given_by_its_path_as_an_open_model_or_loaded(exported: Exporter, tmp_path: Path) -> None:
    path, output = exported("blocks").path, tmp_path / "sub.onnx"
    first = modelexport.extract(path, "up.0", output)
    assert modelexport.extract(load(path), "up.0", output) == first
    for opened in (onnx.load(path), ir.load(path)):  # which have no sidecar
        extracted = modelexport.extract(opened, "up.0", output)
        assert (extracted.tag, extracted.nodes, extracted.bytes) == (first.tag, first.nodes, first.bytes)


@pytest.mark.parametrize("name", ["encoder.layer.0", "/BertModel/BertEncoder/BertLayer.0", "layer.0", "BertLayer.0"])
def test_a_call_is_found_by_address_by_tag_and_by_the_end_of_either(name: str, exported: Exporter) -> None:
    assert load(exported("bert").path).find(name) == ModuleCall("encoder.layer.0")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("BertLayer", "could be encoder.layer.0, encoder.layer.1;"),
        ("dense", "and 2 more"),
        ("encoder.layer.9", "did you mean encoder.layer.1 or encoder.layer.0"),
        ("encoder.layer.0.output.dropout", "has no nodes"),
    ],
)
def test_a_name_that_is_not_a_call_with_nodes_is_refused_and_nothing_is_written(
    name: str, told: str, exported: Exporter, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        load(exported("bert").path).extract(name, tmp_path / "layer.onnx")
    assert told in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_each_writes_every_call_of_a_class_to_a_folder(exported: Exporter, tmp_path: Path) -> None:
    tagged = load(exported("bert").path)
    extracted = extraction.extract_all(tagged, ["class:BertLayer"], tmp_path / "layers")
    assert [one.call for one in extracted] == ["encoder.layer.0", "encoder.layer.1"]
    assert sorted(file.name for file in (tmp_path / "layers").iterdir()) == [f"encoder.layer.{i}.onnx" for i in (0, 1)]
    with pytest.raises(UsageError, match="did you mean BertLayer"):
        extraction.extract_all(tagged, ["class:BertLayr"], tmp_path / "layers")
    with pytest.raises(UsageError, match="has no nodes in "):
        extraction.extract_all(tagged, ["class:Dropout"], tmp_path / "layers")


def test_several_calls_are_written_all_or_none(exported: Exporter, tmp_path: Path) -> None:
    tagged = load(exported("bert").path)
    with pytest.raises(UsageError, match="has no nodes in"):
        extraction.extract_all(tagged, ["embeddings", "encoder.layer.0.output.dropout"], tmp_path / "calls")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "stem"),
    [
        (ModuleCall(""), "@0"),
        (ModuleCall("layer.0", 2), "layer.0@2"),
        (ModuleCall("experts.a/b@1"), "experts.a%2Fb%401"),
    ],
)
def test_file_names_are_safe_and_tell_calls_apart(call: ModuleCall, stem: str) -> None:
    assert extraction.file_stem(call) == stem
    long = [extraction.file_stem(ModuleCall("x" * 300 + end)) for end in "ab"]
    assert long[0] != long[1]
    assert max(map(len, long)) < 200


def test_the_file_that_is_cut_is_never_overwritten(exported: Exporter) -> None:
    path = exported("bert").path
    before = path.read_bytes()
    with pytest.raises(OutputError, match="another name"):
        load(path).extract("encoder", path)
    assert path.read_bytes() == before


# --- weights in a file of their own ---


@pytest.fixture
def external(exported: Exporter, tmp_path: Path) -> Path:
    """BERT with all its weights in ``whole.onnx.data``."""
    path = tmp_path / "whole.onnx"
    shutil.copy(exported("bert").path.with_suffix(".hierarchy.json"), path.with_suffix(".hierarchy.json"))
    model = ir.load(exported("bert").path)
    ir.save(model, path, external_data="whole.onnx.data", size_threshold_bytes=0)
    return path


def test_weights_of_other_calls_are_not_read(external: Path, exported: Exporter, tmp_path: Path) -> None:
    data = external.with_name("whole.onnx.data")
    wanted = [value.const_value for value in initializers(Cutter(load(external)).cut_call(ModuleCall("pooler")).model)]
    kept = {(tensor.offset or 0, tensor.nbytes) for tensor in wanted if isinstance(tensor, ir.ExternalTensor)}
    content = data.read_bytes()
    # Weights that are not needed become NaN, which would show if they were used. The end of the file has its digest.
    blank = bytearray(b"\xff" * len(content))
    for offset, length in [*kept, (len(content) - 32, 32)]:
        blank[offset : offset + length] = content[offset : offset + length]
    data.write_bytes(blank)
    load(external).extract("pooler", tmp_path / "pooler.onnx")
    load(exported("bert").path).extract("pooler", tmp_path / "expected.onnx")
    assert fingerprints(tmp_path / "pooler.onnx") == fingerprints(tmp_path / "expected.onnx")
    assert not (tmp_path / "pooler.onnx.data").exists()


def test_weights_above_the_limit_go_to_a_file_of_their_own(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(external).extract("pooler", tmp_path / "embedded.onnx")
    monkeypatch.setattr(onnx_models, "LARGE_WEIGHTS", 100)
    extracted = load(external).extract("pooler", tmp_path / "pooler.onnx")
    assert extracted.bytes == expected.bytes
    tensors = [value.const_value for value in initializers(ir.load(tmp_path / "pooler.onnx"))]
    assert {tensor.location for tensor in tensors if isinstance(tensor, ir.ExternalTensor)} == {"pooler.onnx.data"}
    feeds = {extracted.inputs[0].name: np.linspace(-1, 1, 256, dtype=np.float32).reshape(2, 8, 16)}
    assert [v.tolist() for v in run(tmp_path / "pooler.onnx", feeds).values()] == [
        v.tolist() for v in run(tmp_path / "embedded.onnx", feeds).values()
    ]


@pytest.mark.parametrize("length", [None, 10])
def test_missing_weights_are_named(external: Path, tmp_path: Path, length: int | None) -> None:
    data = external.with_name("whole.onnx.data")
    if length is None:
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:length])
    with pytest.raises(FileFormatError, match=r"whole\.onnx\.data(, which holds weights, is missing| is cut off)"):
        load(external).extract("encoder.layer.1", tmp_path / "layer.onnx")
    assert not (tmp_path / "layer.onnx").exists()


# --- the command ---


def test_the_command_writes_files_and_prints_one_document(exported: Exporter, tmp_path: Path) -> None:
    path = tmp_path / "bert.onnx"
    for suffix in (".onnx", ".hierarchy.json"):
        shutil.copy(exported("bert").path.with_suffix(suffix), path.with_suffix(suffix))

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return commands.run("extract", "bert.onnx", *arguments, cwd=tmp_path)

    one = command("encoder.layer.0", "-o", "layer.onnx", "--json")
    (document,) = json.loads(one.stdout)
    assert (one.returncode, one.stderr, document["path"]) == (0, "", "layer.onnx")
    assert [value["name"] for value in document["inputs"]] == ["hidden_states", "attention_mask"]
    each = command("--each", "BertLayer", "-o", "layers")
    assert (each.returncode, each.stderr) == (0, "")
    assert "encoder.layer.1 -> layers/encoder.layer.1.onnx" in each.stdout
    assert "\n  in  hidden_states float32[2, 8, 16]\n" in each.stdout
    wrong = command("BertLayer", "-o", "x.onnx")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


# --- matching ---


def value(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def test_values_are_matched_where_there_is_no_choice_and_only_there() -> None:
    hidden, mask = value("v0", ir.DataType.FLOAT, "s0", 4), value("v1", ir.DataType.BOOL, "s0", 1)
    one, two = value("v2", ir.DataType.INT64, 4), value("v3", ir.DataType.INT64, 4)
    own = value("named", ir.DataType.FLOAT, 4)
    arguments = [
        CallTensor("mask", "bool", ["s9", 1]),
        CallTensor("hidden_states", "float32", ["s9", 4]),
        CallTensor("first", "int64", [4]),
        CallTensor("second", "int64", [4]),
        CallTensor("other", "float32", [4]),
        CallTensor("named", "float32", [4]),
        CallTensor("unused", "float32", [4, 4, 4]),
    ]
    known = value("v4", ir.DataType.FLOAT, 4)
    arguments.append(CallTensor("known", "float32", [4], "v4"))
    matched = match_values([hidden, mask, one, two, own, known], arguments)
    assert [(value.name, tensor.name) for value, tensor in matched.items()] == [
        ("v1", "mask"),
        ("v0", "hidden_states"),
        ("named", "named"),
        ("v4", "known"),
    ]


def test_a_size_that_no_operator_of_an_old_file_reads_off_an_input_is_an_input(tmp_path: Path) -> None:
    text = """g (float[n,4] x) => (float[n,4] y) <float[n,4] h, float[n,4] i, int64[2] s> {
        ["/a/Neg"] h = Neg(x) ["/a/Shape"] s = Shape(h) ["/b/Relu"] i = Relu(h)
        ["/c/Abs"] j = Abs(i) ["/c/Reshape"] y = Reshape(j, s) }"""
    for opset, inputs in ((13, ["i", "s"]), (15, ["i"])):
        cut = modelexport.extract(written(tmp_path / f"{opset}.onnx", text, opset), "c", tmp_path / "c.onnx")
        assert [value.value for value in cut.inputs] == inputs


def test_a_wrong_shape_in_a_loop_does_not_hide_the_types_of_what_is_outside(tmp_path: Path) -> None:
    """ONNX Runtime merges such shapes; paddle2onnx writes them."""
    branches = [
        f"{name}_branch = {name} () => (int64 {name}_u) {{ {name}_u = Identity (s) }}" for name in ("then", "else")
    ]
    text = f"""g (float[N, 4] x, int64 m, bool k, int64[1] z) => (float[N, 4] y, int64[1] e) {{
        a = Relu (x)
        y = Sigmoid (a)
        e = Loop (m, k, z) <body = b (int64 i, bool c, int64[1] s) => (bool d, int64 t) {{
            t = If (c) <{", ".join(branches)}>
            d = Identity (c) }}> }}"""
    done = commands.run("extract", written(tmp_path / "m.onnx", text), "--to", "a", "-o", tmp_path / "part.onnx")
    assert done.returncode == 0, done.stderr
