"""Tags after other packages' tools: every tool from its real package, on real models. To add a tool, add a row."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import inliner
from safetensors.numpy import save_file
from torch import nn

import modelexport
import models
from exports import Exporter
from graph_texts import written
from modelexport import load, retag, verify_against
from modelexport.cli import app
from modelexport.errors import FileFormatError, OutputError, UsageError, WeightsError
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.format import keys
from modelexport.format.versions import FORMAT_VERSION
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.graph.size_conditions import SizeCondition, conditions_of, record_conditions
from modelexport.lineage.retagging import RetagReport
from modelexport.tools.optimizers.optimize_tools import TOOLS, Optimizer, optimize_file
from modelexport.weights.recorded_transforms import compute_planned


@dataclass(frozen=True)
class ToolCase:
    """A tool, and its effect on the numbers."""

    tool: str
    lossless: bool = True
    """Whether every module computes the same as before."""
    models: tuple[str, ...] = ("bert", "resnet")


CASES = (
    ToolCase("ort-basic", models=("bert", "resnet", "condition")),
    ToolCase("ort-extended", models=("bert", "resnet", "condition")),
    ToolCase("ort-all", models=("bert", "resnet", "albert")),
    ToolCase("ort-bert", models=("bert", "resnet", "vit")),
    ToolCase("ort-gpt2", models=("gpt2", "albert")),
    ToolCase("quantize-dynamic", lossless=False, models=("bert", "resnet", "condition")),
    ToolCase("quantize-qdq", lossless=False),
    ToolCase("quantize-qoperator", lossless=False),
    ToolCase("quantize-4bit", lossless=False),
    ToolCase("float16", lossless=False, models=("bert", "resnet", "condition")),
    ToolCase("onnxslim"),
    ToolCase("onnxsim"),
    ToolCase("version-converter", models=("bert", "resnet", "condition")),
    ToolCase("onnxscript"),
    ToolCase("inliner"),
)

Optimized = Callable[[str, str], tuple[Path, Path, RetagReport]]


@pytest.fixture(scope="module")
def optimized(exported: Exporter, tmp_path_factory: pytest.TempPathFactory) -> Optimized:
    """``optimized(model, tool)``: the export, the retagged output of the tool, and the report."""
    made: dict[tuple[str, str], tuple[Path, Path, RetagReport]] = {}

    def get(model: str, tool: str) -> tuple[Path, Path, RetagReport]:
        if importlib.util.find_spec(TOOLS[tool].module) is None:
            pytest.skip(f"needs {TOOLS[tool].package}: `make test` installs it")
        if (model, tool) not in made:
            output = tmp_path_factory.mktemp(model) / f"{tool}.onnx"
            source = exported(model).path
            made[model, tool] = source, output, optimize_file(source, tool, output)
        return made[model, tool]

    return get


def owners(path: Path) -> dict[str, list[str]]:
    """The name of each node to the addresses of its owners."""
    return {
        node.name or "": [call.address for call in owner.calls]
        for node in modelexport.load(path).nodes
        if (owner := owner_of(node)) is not None
    }


def test_every_tool_has_a_row() -> None:
    assert [case.tool for case in CASES] == list(TOOLS)


def marks(tool: str, model: str) -> Any:
    """A tool that changes no numbers and one that does stay quick, with the model of the other quick tests."""
    return () if model == "bert" and tool in ("ort-extended", "quantize-dynamic") else pytest.mark.slow


@pytest.mark.parametrize(("case", "model"), [
                             pytest.param(case, model, marks=marks(case.tool, model))
                             for case in CASES for model in case.models
                         ], ids=lambda value: value.tool if isinstance(value, ToolCase) else value)  # fmt: skip
def test_what_a_tool_makes_is_a_tagged_file(case: ToolCase, model: str, optimized: Optimized) -> None:
    source, output, report = optimized(model, case.tool)
    tagged = modelexport.load(output)
    assert report.coverage == tagged.coverage
    assert (tagged.coverage.inferred, tagged.coverage.untagged) == (0, 0)
    assert tagged.hierarchy is not None, "the sidecar exists and belongs to this file"
    assert [call.address for call in tagged.hierarchy.calls] == [t.call.address for t in tagged.calls]
    assert set(json.loads(output.with_suffix(".operations.json").read_text())) == {
        *(node.name for node in tagged.nodes), *(value.name for value in initializers(tagged.model)),
    }  # fmt: skip
    compared = verify_against(source, output)
    assert any(call.per_module is not None for call in compared.calls)
    if case.lossless:
        assert compared.agrees, [call for call in compared.calls if call.status == "differ"]


def facts(path: Path) -> dict[tuple[object, ...], ir.Node]:
    """Nodes by operator and by the names of their outputs and inputs."""
    return {
        (node.op_identifier(), node.outputs[0].name, *(v.name for v in node.inputs if v is not None)): node
        for node in modelexport.load(path).nodes
    }


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=marks(case.tool, "bert")) for case in CASES], ids=lambda case: case.tool
)
def test_a_node_that_a_tool_did_not_touch_keeps_owner_and_evidence(case: ToolCase, optimized: Optimized) -> None:
    source, output, report = optimized(case.models[0], case.tool)
    merged = {node.name for node in report.fused if node.reason == "merged"}
    before, after = facts(source), facts(output)
    same = [key for key in after if key in before and after[key].name not in merged]
    assert len(same) >= 5
    assert [key for key in same if owner_of(after[key]) != owner_of(before[key])] == []


# --- fusions, by hand: what was fused, and what makes the output first

LAYER = "encoder.layer.0"
BLOCK = "transformer.h.0"
STAGE = "encoder.stages.1.layers.0"
FUSIONS = {
    "convolution and batch normalisation": (
        "resnet", "ort-basic", "Conv", "conv2d_5", "getitem_5",
        [f"{STAGE}.shortcut.normalization", f"{STAGE}.shortcut.convolution"],
    ),
    "convolution, batch normalisation and activation": (
        "resnet", "ort-extended", "FusedConv", "conv2d_3", "relu_3",
        [f"{STAGE}.layer.0.activation", f"{STAGE}.layer.0.normalization", f"{STAGE}.layer.0.convolution"],
    ),
    "the same with a skip connection, in another layout": (
        "resnet", "ort-all", "Conv", "", "",
        [f"{STAGE}.activation", f"{STAGE}.layer.1.normalization", STAGE, f"{STAGE}.layer.1.convolution"],
    ),
    "skip connection and layer normalisation": (
        "bert", "ort-extended", "SkipLayerNormalization", "", "layer_norm_1",
        [f"{LAYER}.attention.output.LayerNorm", f"{LAYER}.attention.output"],
    ),
    "linear layer and activation": (
        "bert", "ort-extended", "FusedGemm", "", "pooler_output", ["pooler.activation", "pooler.dense"],
    ),
    "scale and matrix product": (
        "bert", "ort-extended", "FusedMatMul", "", "", [f"{LAYER}.attention.self"],
    ),
    "bias and approximated activation": (
        "gpt2", "ort-gpt2", "FastGelu", "", "", [f"{BLOCK}.mlp.act", f"{BLOCK}.mlp.c_fc"],
    ),
    "bias, skip connection and layer normalisation of the next block": (
        "gpt2", "ort-gpt2", "SkipLayerNormalization", "", "FullyConnect_MatMul_3_input",
        ["transformer.h.1.ln_1", BLOCK, f"{BLOCK}.mlp.c_proj"],
    ),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_fused_node_has_the_modules_that_it_fused(fusion: str, optimized: Optimized) -> None:
    model, tool, operator, _, output, expected = FUSIONS[fusion]
    _, path, _ = optimized(model, tool)
    nodes = [node for node in modelexport.load(path).nodes if node.op_type == operator]
    if output:
        nodes = [node for node in nodes if node.outputs[0].name == output]
    # How the runtime names what it adds depends on the processor.
    found = [owner for node in nodes if (owner := owner_of(node)) and owner.call.address == expected[0]]
    assert [call.address for call in found[0].calls] == expected
    assert found[0].evidence.value == "derived"


# --- initializers


def plans(path: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Initializers with entries: their keys, and the operators that compute them."""
    return {
        value.name or "": (plan.keys, [step.op_type for step in plan.steps])
        for value in initializers(load_onnx(path))
        if (plan := parameter_plan(value)) is not None
    }


def test_a_weight_in_half_precision_is_its_entry_cast(optimized: Optimized) -> None:
    source, output, _ = optimized("bert", "float16")
    key = "encoder.layer.0.attention.output.dense.weight"
    assert plans(output)[f"{key}.transpose"] == ([key], ["Transpose", "Cast"])
    assert plans(output)["embeddings.word_embeddings.weight"][1] == ["Cast"]
    entries = {plan.keys[0]: value.const_value.numpy() for value in initializers(load_onnx(source))
               if (plan := parameter_plan(value)) is not None and not plan.steps and value.const_value}  # fmt: skip
    for value in initializers(load_onnx(output)):
        plan = parameter_plan(value)
        if plan is not None and plan.recorded and set(plan.inputs()) <= entries.keys():
            assert value.const_value is not None
            assert compute_planned(plan, entries).tobytes() == value.const_value.tobytes()


@pytest.mark.sweep
@pytest.mark.parametrize("tool", ["quantize-dynamic", "quantize-qdq", "quantize-qoperator", "quantize-4bit"])
def test_quantized_weights_their_scales_and_zero_points_belong_to_the_entry(tool: str, optimized: Optimized) -> None:
    _, output, report = optimized("bert", tool)
    key = "encoder.layer.0.intermediate.dense.weight"
    found = {name: plan for name, plan in plans(output).items() if key in plan[0]}
    assert len(found) >= 3
    assert all(plan == ([key], ["Unrecorded"]) for plan in found.values())
    assert report.unrecorded >= 3
    assert report.lost == []


def test_update_weights_refuses_what_it_cannot_compute(optimized: Optimized, tmp_path: Path) -> None:
    source, output, _ = optimized("bert", "quantize-dynamic")
    entries = json.loads(ir.load(source).metadata_props[keys.STATE_DICT])
    weights = {key: np.zeros(shape, dtype) for key, (dtype, shape, *_) in entries.items()}
    save_file(weights, tmp_path / "weights.safetensors")
    with pytest.raises(WeightsError, match=r"another tool has changed .*_quantized.* run the tool on that again"):
        modelexport.update_weights(output, tmp_path / "weights.safetensors", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_an_optimised_file_takes_new_weights_where_all_are_known(optimized: Optimized, tmp_path: Path) -> None:
    source, output, report = optimized("bert", "ort-extended")
    assert (report.unrecorded, report.lost) == (0, [])
    assert ["Gather"] in [steps[-1:] for _, steps in plans(output).values()], "folded by the tool, and recorded"
    entries = json.loads(ir.load(source).metadata_props[keys.STATE_DICT])
    weights = {key: np.zeros(shape, dtype) for key, (dtype, shape, used, _) in entries.items() if used}
    modelexport.update_weights(output, weights, tmp_path / "out.onnx")
    for value in initializers(load_onnx(tmp_path / "out.onnx")):
        assert keys.PARAMETER not in value.metadata_props or not value.const_value.numpy().any()  # type: ignore[union-attr]


def test_equal_weights_that_a_tool_merged_have_the_keys_of_all(exported: Exporter, tmp_path: Path) -> None:
    source = exported("equal-values").path
    optimize_file(source, "onnxscript", tmp_path / "out.onnx")
    assert ["shift", "offset"] in [keys for keys, _ in plans(tmp_path / "out.onnx").values()]


def test_update_weights_names_the_entries_that_a_tool_folded_away(exported: Exporter, tmp_path: Path) -> None:
    source = exported("equal-values").path
    report = optimize_file(source, "onnxscript", tmp_path / "out.onnx")
    assert report.lost == ["layers.0.bias", "layers.1.bias", "layers.2.bias"], "they are zero, and were dropped"
    entries = json.loads(ir.load(source).metadata_props[keys.STATE_DICT])
    weights = {key: np.zeros(shape, dtype) for key, (dtype, shape, *_) in entries.items()}
    with pytest.raises(WeightsError, match=r"another tool has lost layers.0.bias, layers.1.bias, layers.2.bias in"):
        modelexport.update_weights(tmp_path / "out.onnx", weights, tmp_path / "no.onnx")


def test_a_result_that_takes_what_the_file_computes_is_refused(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) {
        o = Optional(x) h = OptionalHasElement(o)
        y = If(h) <then_branch = t () => (float[2] p) { p = OptionalGetElement(o) },
                   else_branch = e () => (float[2] q) { q = Neg(x) }> }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=r"onnxsim fails on .*m.onnx: its result takes y as an input"):
        optimize_file(tmp_path / "m.onnx", "onnxsim", tmp_path / "o.onnx")


BRANCHES = """g (bool c, float[2, 2] x) => (float[2, 2] y) {
    y = If (c) <then_branch = t () => (float[2, 2] p) <float[2, 2] w = {1.0, 2.0, 3.0, 4.0}>
                   { h = MatMul (x, w)  k = Add (h, x)  p = Relu (k) },
               else_branch = e () => (float[2, 2] p) <float[2, 2] w = {1.0, 2.0, 3.0, 5.0}>
                   { h = MatMul (x, w)  k = Mul (h, x)  p = Sigmoid (k) }> }"""


@pytest.mark.parametrize("tool", ["ort-extended", "onnxslim"])
def test_branches_may_have_equal_names_of_values(tool: str, tmp_path: Path) -> None:
    model = onnx.load(written(tmp_path / "file.onnx", BRANCHES))
    for branch in model.graph.node[0].attribute:
        for name, node in zip("lmn", branch.g.node, strict=True):
            node.name = f"/{branch.name}/{name}/{node.op_type}"
    onnx.save(model, tmp_path / "file.onnx")
    modelexport.adopt(tmp_path / "file.onnx", tmp_path / "tagged.onnx")
    optimize_file(tmp_path / "tagged.onnx", tool, tmp_path / "out.onnx")
    of_branches = [calls for name, calls in owners(tmp_path / "out.onnx").items() if "/" in name or "fused" in name]
    then, other = ([f"{name}_branch.{leaf}" for leaf in "lmn"] for name in ("then", "else"))
    fused = [[then[2], *then[:2]]] if tool == "ort-extended" else [[call] for call in then]
    assert sorted(of_branches) == sorted([*fused, *([call] for call in other)])


def test_a_tool_may_give_branches_equal_names(tmp_path: Path) -> None:
    text = """g (bool c, float[2, 2] x) => (float[2, 2] y) {
        y = If (c) <then_branch = t () => (float[2, 2] p) { ["/yes/Sinh"] h = Sinh (x)  ["/yes/Relu"] p = Relu (h) },
                   else_branch = e () => (float[2, 2] %s) {
                       ["/no/Sinh"] %s = Sinh (x)  ["/no/Relu"] %s = Relu (%s) }> }"""
    modelexport.adopt(written(tmp_path / "file.onnx", text % ("q", "i", "q", "i")), tmp_path / "tagged.onnx")
    changed = onnx.load(written(tmp_path / "changed.onnx", text % ("p", "h", "p", "h")))
    for branch in changed.graph.node[0].attribute:
        for node in branch.g.node:
            node.name = f"{branch.name} {node.op_type}"
    onnx.save(changed, tmp_path / "changed.onnx")
    modelexport.retag(tmp_path / "changed.onnx", source=tmp_path / "tagged.onnx", output=tmp_path / "out.onnx")
    of_nodes = owners(tmp_path / "out.onnx")
    assert {call for name, calls in of_nodes.items() if "then" in name for call in calls} == {"yes"}
    assert "yes" not in {call for name, calls in of_nodes.items() if "else" in name for call in calls}


# --- encodings, functions, weights beside the file


@pytest.mark.parametrize("encoding", ["attributes", pytest.param("functions", marks=pytest.mark.slow)])
def test_a_file_with_another_encoding_is_optimised_and_retagged(encoding: str, tmp_path: Path) -> None:
    case = models.case("blocks")
    modelexport.export(case.build(), case.inputs(), tmp_path / "a.onnx", tags_as=encoding, check=False)  # type: ignore[arg-type]
    report = optimize_file(tmp_path / "a.onnx", "ort-extended", tmp_path / "out.onnx")
    assert (report.coverage.inferred, report.coverage.untagged) == (0, 0)
    assert verify_against(tmp_path / "a.onnx", tmp_path / "out.onnx").agrees


def inlined_by_the_runtime(source: Path, target: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def inlined_by_onnx(source: Path, target: Path) -> None:
    onnx.save(inliner.inline_local_functions(onnx.load(source)), target)


def without_metadata(source: Path, target: Path) -> None:
    """The outputs of tools that keep functions but drop the metadata of their nodes."""
    model = onnx.load(source)
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        del node.metadata_props[:]
    onnx.save(model, target)


CHANGES: Mapping[str, Callable[[Path, Path], object]] = {
    "inlined by ONNX Runtime, and fused": inlined_by_the_runtime,
    "inlined by onnx": inlined_by_onnx,
    "functions without metadata": without_metadata,
    "functions as they were": shutil.copyfile,
}


@pytest.fixture(scope="module", params=["blocks", pytest.param("bert", marks=pytest.mark.slow)])
def functions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with a function for each distinct module."""
    case = models.case(request.param)
    path = tmp_path_factory.mktemp("functions") / f"{request.param}.onnx"
    modelexport.export(case.build(), case.inputs(), path, tags_as="functions", check=False)
    return path


@pytest.mark.sweep
@pytest.mark.parametrize("change", CHANGES)
def test_equal_layers_that_were_one_function_are_told_apart(
    change: str, functions: Path, exported: Exporter, tmp_path: Path
) -> None:
    CHANGES[change](functions, tmp_path / "changed.onnx")
    report = retag(tmp_path / "changed.onnx", source=functions, output=tmp_path / "out.onnx")
    assert (report.coverage.inferred, report.coverage.untagged) == (0, 0)
    flat = exported(functions.stem).path
    assert verify_against(flat, tmp_path / "out.onnx").agrees
    if "ONNX Runtime" not in change:
        assert own_nodes(modelexport.load(flat)) == own_nodes(modelexport.load(tmp_path / "out.onnx"))


def own_nodes(tagged: modelexport.TaggedModel) -> Counter[str]:
    """The number of own nodes of each call, without constants, which may be initializers."""
    return Counter(
        owner.call.address
        for node in tagged.nodes
        if (owner := owner_of(node)) is not None and node.op_type != "Constant"
    )


def test_weights_beside_the_file_stay_beside_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).eval()
    modelexport.export(model, (torch.ones(2, 32),), tmp_path / "a.onnx", weights="copy", check=False)
    optimize_file(tmp_path / "a.onnx", "ort-extended", tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").is_file()
    assert verify_against(tmp_path / "a.onnx", tmp_path / "out.onnx").agrees


def test_a_file_is_not_retagged_over_itself_or_its_source(optimized: Optimized, tmp_path: Path) -> None:
    source, output, _ = optimized("bert", "onnxscript")
    before = output.read_bytes(), source.read_bytes()
    for target in (output, source):
        with pytest.raises(OutputError, match="is the file to read: give another name"):
            retag(output, source=source, output=target)
    assert (output.read_bytes(), source.read_bytes()) == before


def test_a_retagged_file_can_be_changed_and_retagged_again(optimized: Optimized, tmp_path: Path) -> None:
    _, output, _ = optimized("bert", "onnxscript")
    report = optimize_file(output, "quantize-dynamic", tmp_path / "again.onnx")
    assert (report.coverage.inferred, report.coverage.untagged) == (0, 0)


def test_extract_takes_a_fused_module(optimized: Optimized, tmp_path: Path) -> None:
    _, output, _ = optimized("bert", "ort-extended")
    extracted = modelexport.load(output).extract("encoder.layer.0.attention", tmp_path / "sub.onnx")
    onnxruntime.InferenceSession(tmp_path / "sub.onnx", providers=["CPUExecutionProvider"])
    assert extracted.nodes >= 10


# --- bad input


def without_node_tags(path: Path, tmp_path: Path) -> Path:
    model = ir.load(path)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
    ir.save(model, tmp_path / "dropped.onnx")
    return tmp_path / "dropped.onnx"


def renamed(path: Path, tmp_path: Path) -> Path:
    model = ir.load(path)
    for number, node in enumerate(model.graph):
        node.name = None
        for value in node.outputs:
            value.name = f"v{number}"
    for number, value in enumerate(list(model.graph.initializers.values())):
        value.name = f"w{number}"
    for number, value in enumerate(model.graph.inputs):
        value.name = f"i{number}"
    ir.save(model, tmp_path / "renamed.onnx")
    return tmp_path / "renamed.onnx"


def truncated(path: Path, tmp_path: Path) -> Path:
    (tmp_path / "cut.onnx").write_bytes(path.read_bytes()[:5000])
    return tmp_path / "cut.onnx"


def without_weights(path: Path, tmp_path: Path) -> Path:
    ir.save(ir.load(path), tmp_path / "beside.onnx", external_data="beside.data")
    (tmp_path / "beside.data").unlink()
    return tmp_path / "beside.onnx"


def test_files_of_different_models_are_not_related(exported: Exporter, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"llama.onnx was not made from .*bert.onnx: \d+ of its \d+ values \(\d+%\)"):
        retag(exported("llama").path, source=exported("bert").path, output=tmp_path / "out.onnx")
    with pytest.raises(UsageError, match="was not made from"):
        retag(exported("gpt2-cache").path, source=exported("bert").path, output=tmp_path / "out.onnx")


def test_a_file_whose_names_were_replaced_is_not_guessed_at(exported: Exporter, tmp_path: Path) -> None:
    path = exported("bert").path
    with pytest.raises(UsageError, match="let the tool keep the names of values"):
        retag(renamed(path, tmp_path), source=path, output=tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_a_file_without_nodes_has_lost_no_tags(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])
    path = tmp_path / "empty.onnx"
    opsets = [onnx.helper.make_opsetid("", 18)]
    model = onnx.helper.make_model(onnx.helper.make_graph([], "empty", [value], [value]), opset_imports=opsets)
    onnx.save(model, path)
    report = retag(path, source=path, output=tmp_path / "out.onnx")
    assert set(msgspec.structs.astuple(report.coverage)) == {0}
    assert (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    ("spoil", "where", "message"),
    [
        (without_node_tags, "source", "no node of .* has tags: another tool has dropped them"),
        (truncated, "source", "is not an ONNX file, or damaged"),
        (truncated, "changed", "is not an ONNX file, or damaged"),
        (without_weights, "changed", "beside.data, which holds weights, is missing"),
        (without_weights, "source", "beside.data, which holds weights, is missing"),
    ],
)
def test_spoilt_files_are_named(
    spoil: Callable[[Path, Path], Path], where: str, message: str, exported: Exporter, tmp_path: Path
) -> None:
    path = exported("bert").path
    files = {"changed": path, "source": path} | {where: spoil(path, tmp_path)}
    with pytest.raises(FileFormatError, match=message):
        retag(files["changed"], source=files["source"], output=tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_an_output_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there is no folder"):
        retag("a.onnx", source="b.onnx", output=tmp_path / "no" / "out.onnx")


def test_a_tool_that_is_not_there_is_named(exported: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = exported("bert").path
    with pytest.raises(UsageError, match="there is no tool 'onnxslin'; did you mean onnxslim"):
        optimize_file(path, "onnxslin", tmp_path / "out.onnx")
    missing = Optimizer(TOOLS["inliner"].run, "", "some-package", "some_module_that_is_not_there")
    monkeypatch.setattr("modelexport.tools.optimizers.optimize_tools.TOOLS", {"some": missing})
    with pytest.raises(UsageError, match=r"some needs another package .*: pip install some-package"):
        optimize_file(path, "some", tmp_path / "out.onnx")


def test_what_a_tool_raises_is_one_line_and_leaves_nothing(
    exported: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(source: Path, target: Path, inputs: object) -> None:
        target.write_bytes(b"half")
        raise ValueError("cannot\ndo this")

    monkeypatch.setattr("modelexport.tools.optimizers.optimize_tools.TOOLS", {"failing": Optimizer(fails, "")})
    with pytest.raises(UsageError, match=r"failing fails on .*: ValueError: cannot do this"):
        optimize_file(exported("bert").path, "failing", tmp_path / "out.onnx")
    assert list(tmp_path.iterdir()) == []


# --- command line


def test_the_commands_print_a_document(
    exported: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["modelexport", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        assert not ended.value.code
        return capsys.readouterr().out

    path, changed = exported("bert").path, tmp_path / "changed.onnx"
    inlined_by_the_runtime(path, changed)
    shown = command("retag", changed, "--from", path, "-o", tmp_path / "out.onnx")
    assert "0 inferred, 0 untagged" in shown
    assert "SkipLayerNormalization" in shown
    document = json.loads(command("optimize", path, "--with", "ort-basic", "-o", tmp_path / "o.onnx", "--json"))
    assert document["coverage"]["untagged"] == 0
    assert set(document) == set(RetagReport.__struct_fields__)


def test_a_tool_that_loses_what_nodes_use_is_named(exported: Exporter, tmp_path: Path) -> None:
    source, lost = exported("condition").path, tmp_path / "lost.onnx"
    model = onnx.load(source)
    del model.graph.initializer[0]
    onnx.save(model, lost)
    with pytest.raises(FileFormatError, match=r"use .*, which nothing computes: the tool lost it"):
        retag(lost, source=source, output=tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_names_of_the_graph_that_a_fusion_repeats_in_a_branch_are_made_unique(tmp_path: Path) -> None:
    """ONNX Runtime does not load what its own MatMulAddFusion writes of a branch."""
    source = Path(__file__).parents[1] / "golden" / FORMAT_VERSION / "golden.onnx"
    optimize_file(source, "ort-basic", tmp_path / "fused.onnx")
    names = Counter(value.name for node in load(tmp_path / "fused.onnx").nodes for value in node.outputs)
    assert names["gemm_input_reshape_arg"] == names["gemm_input_reshape_arg_2"] == max(names.values()) == 1
    assert verify_against(source, tmp_path / "fused.onnx").agrees


def test_conditions_of_sizes_survive_a_tool(exported: Exporter, tmp_path: Path) -> None:
    model = load_onnx(exported("blocks").path)
    record_conditions(model, [SizeCondition("n < 24")])
    save_model(model, tmp_path / "a.onnx")
    retag(exported("blocks").path, source=tmp_path / "a.onnx", output=tmp_path / "b.onnx")
    stated = conditions_of(load(tmp_path / "b.onnx").model)
    assert [condition.formula for condition in stated] == ["n < 24"]


def test_a_packed_weight_that_a_tool_left_alone_is_still_its_entry(tmp_path: Path) -> None:
    text = """g (float[2,2] x) => (float[2,2] y) <float "a.s" = {0.5}>
        { ["/a/DequantizeLinear"] w = DequantizeLinear("a.q", "a.s") ["/a/MatMul"] y = MatMul(x, w) }"""
    model = onnx.load(written(tmp_path / "file.onnx", text, 21))
    model.graph.initializer.append(onnx.helper.make_tensor("a.q", onnx.TensorProto.INT4, [2, 2], [1, 2, 3, 4]))
    onnx.save(model, tmp_path / "file.onnx")
    modelexport.adopt(tmp_path / "file.onnx", tmp_path / "tagged.onnx")
    report = retag(tmp_path / "file.onnx", source=tmp_path / "tagged.onnx", output=tmp_path / "again.onnx")
    assert report.unrecorded == 0
