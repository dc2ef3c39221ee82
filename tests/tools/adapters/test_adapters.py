"""LoRA adapters that PEFT wrote, merged and as inputs, give what PEFT's own model gives."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch

import commands
import modelexport
import models
import peft_adapters
import side_packages
import truth
from exports import Exporter
from modelexport import adapters_as_inputs, load, merge_adapters, verify, verify_against, write_adapter
from modelexport.errors import FileFormatError, UsageError, WeightsError
from modelexport.format import keys
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import parameter_plan, parameter_plans
from modelexport.packages.stage_runs import run_chain
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.package import read_package
from modelexport.tools.adapters.merged_packages import merge_adapters_into_package
from modelexport.tools.cut.splitting import split
from peft_adapters import ADAPTERS, CASES, AdapterCase

TOLERANCE = 1e-5


def run(path: Path | str, case: models.ModelCase, adapter: Path | str | None = None) -> np.ndarray:
    """The first output, in ONNX Runtime with all of its optimisations."""
    options, session_options = onnxruntime.RunOptions(), onnxruntime.SessionOptions()
    session_options.log_severity_level = 3  # it warns of every input that has a default
    session = onnxruntime.InferenceSession(str(path), session_options, providers=["CPUExecutionProvider"])
    if adapter is not None:
        loaded = onnxruntime.LoraAdapter()
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
    feeds = {name: value.numpy() for name, value in case.inputs().items()}
    return session.run(None, feeds, options)[0]


def distance(one: np.ndarray, two: np.ndarray) -> float:
    return float(np.abs(one - two).max())


@pytest.mark.slow
@pytest.mark.skipif(bool(side_packages.missing("peft")), reason=side_packages.missing("peft"))
def test_the_adapters_are_those_that_peft_writes(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = ADAPTERS if request.config.getoption("--rewrite-goldens") else tmp_path
    peft_adapters.make(folder)
    for name in (adapter.name for adapter in CASES):
        made, golden = (safetensors.torch.load_file(f / name / "adapter_model.safetensors") for f in (folder, ADAPTERS))
        torch.testing.assert_close(made, golden, rtol=0, atol=1e-6)
        assert distance(np.load(folder / f"{name}.npy"), np.load(ADAPTERS / f"{name}.npy")) < TOLERANCE


@pytest.mark.sweep
@pytest.mark.parametrize("adapter", CASES, ids=lambda adapter: adapter.name)
def test_merged_it_gives_what_peft_gives(adapter: AdapterCase, exported: Exporter, tmp_path: Path) -> None:
    file = exported(adapter.model)
    expected = np.load(ADAPTERS / f"{adapter.name}.npy")
    result = merge_adapters(file.path, [ADAPTERS / adapter.name], tmp_path / "merged.onnx")
    assert distance(run(result.path, file.case), expected) < TOLERANCE
    assert distance(run(file.path, file.case), expected) > 1e-2
    assert [node.metadata_props for node in load(result.path).nodes] == [
        node.metadata_props for node in load(file.path).nodes
    ]
    assert load(result.path).hierarchy is not None


@pytest.mark.sweep
@pytest.mark.parametrize("adapter", CASES, ids=lambda adapter: adapter.name)
def test_as_inputs_it_gives_what_peft_gives_and_without_it_nothing_changes(
    adapter: AdapterCase, exported: Exporter, tmp_path: Path
) -> None:
    file = exported(adapter.model)
    result = adapters_as_inputs(file.path, [ADAPTERS / adapter.name], tmp_path / "open.onnx")
    onnx.checker.check_model(result.path, full_check=True)
    assert len(result.whole) == adapter.whole
    assert distance(run(result.path, file.case), run(file.path, file.case)) < 1e-6  # not so if any is NaN
    (written,) = result.adapters
    assert distance(run(result.path, file.case, written.path), np.load(ADAPTERS / f"{adapter.name}.npy")) < TOLERANCE


def test_adapters_are_swapped_in_one_file(exported: Exporter, tmp_path: Path) -> None:
    file = exported("llama")
    names = ["attention", "everything"]
    result = adapters_as_inputs(file.path, [ADAPTERS / name for name in names], tmp_path / "open.onnx")
    for name, written in zip(names, result.adapters, strict=True):
        assert Path(written.path).name == f"open.{name}.onnx_adapter"
        assert distance(run(result.path, file.case, written.path), np.load(ADAPTERS / f"{name}.npy")) < TOLERANCE
    again = write_adapter(result.path, ADAPTERS / "attention", tmp_path / "again.onnx_adapter")
    assert Path(again.path).read_bytes() == Path(result.adapters[0].path).read_bytes()
    with pytest.raises(WeightsError, match=r"has no inputs for what .*dora does to model.embed_tokens.weight"):
        write_adapter(result.path, ADAPTERS / "dora", tmp_path / "dora.onnx_adapter")


def test_added_nodes_belong_to_the_module_and_documents_are_true(exported: Exporter, tmp_path: Path) -> None:
    file = exported("tied-weights")
    result = adapters_as_inputs(file.path, [ADAPTERS / "tied-head"], tmp_path / "open.onnx")
    before, after = load(file.path), load(result.path)
    old = {node.name: node for node in before.nodes}
    added = [node for node in after.nodes if node.name not in old]
    assert len(added) == result.nodes == 3
    for node in added:
        assert node.metadata_props[keys.ADAPTER] == "lora"
        base = old[(node.name or "").partition("/lora")[0]]
        for key in (keys.CALL, keys.SOURCE_MODULE, keys.NAMESPACE, keys.LAYER_ANNOTATION, keys.EVIDENCE):
            assert node.metadata_props[key] == base.metadata_props[key]
    for name, node in old.items():
        assert node.metadata_props == next(n for n in after.nodes if n.name == name).metadata_props
    report = verify(file.case.build(), file.case.inputs(), result.path)
    assert report.claims == []
    assert report.agrees
    assert verify_against(file.path, result.path).agrees


@pytest.mark.slow
def test_the_graph_tells_which_axis_of_a_square_weight_is_that_of_its_results(
    exported: Exporter, tmp_path: Path
) -> None:
    """PEFT writes one word on it for all modules: that for the last, as a head behind the layers of GPT-2."""
    file, adapter = exported("gpt2"), tmp_path / "conv1d"
    shutil.copytree(ADAPTERS / "conv1d", adapter)
    configuration = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**configuration, "fan_in_fan_out": False}))
    expected = np.load(ADAPTERS / "conv1d.npy")
    assert (
        distance(run(merge_adapters(file.path, [adapter], tmp_path / "m.onnx").path, file.case), expected) < TOLERANCE
    )
    inputs = adapters_as_inputs(file.path, [adapter], tmp_path / "i.onnx")
    assert distance(run(inputs.path, file.case, inputs.adapters[0].path), expected) < TOLERANCE


@pytest.mark.slow
def test_several_are_merged_one_after_the_other(exported: Exporter, tmp_path: Path) -> None:
    path = exported("llama").path
    folders = [ADAPTERS / "attention", ADAPTERS / "everything"]
    merge_adapters(path, folders, tmp_path / "both.onnx")
    merge_adapters(path, folders[:1], tmp_path / "one.onnx")
    merge_adapters(tmp_path / "one.onnx", folders[1:], tmp_path / "two.onnx")
    for value, other in zip(
        initializers(load(tmp_path / "both.onnx").model), initializers(load(tmp_path / "two.onnx").model), strict=True
    ):
        assert value.const_value is not None
        assert other.const_value is not None
        np.testing.assert_allclose(value.const_value.numpy(), other.const_value.numpy(), rtol=0, atol=1e-6)


def test_the_other_module_keeps_a_tied_tensor(exported: Exporter, tmp_path: Path) -> None:
    file = exported("tied-weights")
    result = merge_adapters(file.path, [ADAPTERS / "tied-head"], tmp_path / "merged.onnx")
    assert result.untied == ["lm_head.weight"]
    plans = {value.name: parameter_plan(value) for value in initializers(load(result.path).model)}
    named = {tuple(plan.keys) for plan in plans.values() if plan is not None}
    assert {("embedding.weight",), ("lm_head.weight",)} <= named


class Three(torch.nn.Module):
    """Three layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))
        self.second.weight = self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).relu()).relu())


def test_two_of_three_modules_with_a_tied_tensor_get_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, pairs, folder = Three().eval(), {}, tmp_path / "adapter"
    modelexport.export(model, (torch.randn(2, 4),), tmp_path / "tied.onnx", check=False)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["first", "second"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    merged = {name: model.first.weight.detach() for name in ("first", "second", "third")}
    for name in ("first", "second"):
        down, up = torch.randn(2, 4), torch.randn(4, 2)
        pairs |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        merged[name] = merged[name] + up @ down
    safetensors.torch.save_file(pairs, folder / "adapter_model.safetensors")
    merge_adapters(tmp_path / "tied.onnx", [folder], tmp_path / "merged.onnx")
    plans = {tuple(plan.keys) for value in initializers(load(tmp_path / "merged.onnx").model)
             if (plan := parameter_plan(value)) is not None}  # fmt: skip
    assert plans == {("first.weight",), ("second.weight",), ("third.weight",)}
    apart = Three().eval()
    for name, weight in merged.items():
        getattr(apart, name).weight = torch.nn.Parameter(weight)
    assert truth.wrong(tmp_path / "merged.onnx", apart, (torch.randn(2, 4),)) == ""


def test_weights_can_be_given_along(exported: Exporter, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = exported("llama")
    state = {key: tensor.clone() * 0.5 for key, tensor in file.case.build().state_dict().items()}
    save_file(state, tmp_path / "half.safetensors")
    modelexport.update_weights(file.path, tmp_path / "half.safetensors", tmp_path / "half.onnx")
    merge_adapters(tmp_path / "half.onnx", [ADAPTERS / "attention"], tmp_path / "a.onnx")
    merge_adapters(file.path, [ADAPTERS / "attention"], tmp_path / "b.onnx", weights=tmp_path / "half.safetensors")
    assert distance(run(tmp_path / "a.onnx", file.case), run(tmp_path / "b.onnx", file.case)) == 0


def test_an_adapter_changes_one_of_two_equal_weights_of_a_quantized_package(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(3))).eval()
    model[1].weight = torch.nn.Parameter(model[0].weight.detach().clone())
    modelexport.export(model, (torch.randn(2, 16),), tmp_path / "whole.onnx", check=False)
    modelexport.split(tmp_path / "whole.onnx", tmp_path / "stages", at=["2"])
    modelexport.quantize_package(tmp_path / "stages", tmp_path / "quantized", to="int8-weights", only=["2"])
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["0"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    pair = {
        f"base_model.model.0.lora_{name}.weight": torch.ones(*sizes) for name, sizes in (("A", (1, 16)), ("B", (16, 1)))
    }
    safetensors.torch.save_file(pair, tmp_path / "adapter" / "adapter_model.safetensors")
    merge_adapters_into_package(tmp_path / "quantized", [tmp_path / "adapter"], tmp_path / "merged")
    (first, *_) = read_package(tmp_path / "merged").files.values()
    model_of_file = load(first).model
    weights = {plan.keys[0]: value.const_value.numpy() for value, plan in parameter_plans(model_of_file).items()}
    np.testing.assert_allclose(weights["0.weight"], model[0].weight.detach() + 1, rtol=1e-6)
    np.testing.assert_array_equal(weights["1.weight"], model[1].weight.detach())


@pytest.mark.slow
def test_a_package_takes_an_adapter_in_all_of_its_parts(tmp_path: Path) -> None:
    case = models.case("llama")
    model = case.build()
    model.config.use_cache = model.generation_config.use_cache = True
    modelexport.export_package(model, tmp_path / "package", weights="copy")
    result = merge_adapters_into_package(tmp_path / "package", [ADAPTERS / "attention"], tmp_path / "merged")
    assert (result.pairs, result.initializers) == (4, 4)
    (part, *_) = read_package(tmp_path / "merged").manifest.parts
    session = open_session(tmp_path / "merged" / part.file)
    feeds = {name: value.numpy() for name, value in case.inputs().items()}
    feeds["position_ids"] = np.arange(8)[None].repeat(2, 0)
    for value in session.get_inputs():
        if value.name not in feeds:
            batch, heads, _, width = (size if isinstance(size, int) else 0 for size in value.shape)
            feeds[value.name] = np.zeros((batch or 2, heads, 0, width), np.float32)
    taken = {value.name: feeds[value.name] for value in session.get_inputs()}
    assert distance(run_session(session, taken)["logits"], np.load(ADAPTERS / "attention.npy")) < TOLERANCE


def test_stages_take_the_inputs_of_their_modules(exported: Exporter, tmp_path: Path) -> None:
    file = exported("llama")
    result = adapters_as_inputs(file.path, [ADAPTERS / "attention"], tmp_path / "open.onnx")
    split(load(result.path), tmp_path / "stages", stages=2)
    feeds = {name: value.numpy() for name, value in file.case.inputs().items()}
    values = onnxruntime.AdapterFormat.read_adapter(result.adapters[0].path).get_parameters()
    feeds |= {name: value.numpy() for name, value in values.items()}
    assert distance(run_chain(tmp_path / "stages", feeds)["logits"], np.load(ADAPTERS / "attention.npy")) < TOLERANCE


@pytest.mark.parametrize(
    ("tags_as", "name", "adapter"),
    [
        ("functions", "tied-weights", "tied-head"),
        pytest.param("functions", "llama", "attention", marks=pytest.mark.slow),
        pytest.param("attributes", "llama", "attention", marks=pytest.mark.slow),
    ],
)
def test_a_file_keeps_its_encoding(tags_as: str, name: str, adapter: str, tmp_path: Path) -> None:
    case, folder = models.case(name), ADAPTERS / adapter
    modelexport.export(case.build(), case.inputs(), tmp_path / "model.onnx", tags_as=tags_as, check=False)
    merged = merge_adapters(tmp_path / "model.onnx", [folder], tmp_path / "merged.onnx")
    opened = adapters_as_inputs(tmp_path / "model.onnx", [folder], tmp_path / "open.onnx")
    assert load(merged.path).encoding == load(opened.path).encoding == tags_as
    assert load(opened.path).hierarchy is not None
    if tags_as == "functions":
        expected = np.load(ADAPTERS / f"{adapter}.npy")
        assert distance(run(merged.path, case), expected) < TOLERANCE
        assert distance(run(opened.path, case, opened.adapters[0].path), expected) < TOLERANCE


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """``changed(**options)``: a copy of an adapter with other options in its configuration."""

    def copy(**options: object) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(ADAPTERS / "attention", folder)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | options))
        return folder

    return copy


REFUSED = [
    ({"peft_type": "IA3"}, "is an adapter of the kind IA3"),
    ({"r": 5}, "has a pair of rank 4 for 'model.layers.0.self_attn.q_proj'"),
    ({"use_qalora": True}, "uses use_qalora, which modelexport cannot apply"),
    ({"an_option_of_tomorrow": 1}, "uses an_option_of_tomorrow"),
    ({"init_lora_weights": "pissa"}, "changes the base model too"),
    ({"rank_pattern": {"(": 2}}, "has a pattern '(' that is not a regular expression"),
    ({"r": "four"}, "is damaged or another document"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_applied_is_refused_in_one_line(
    options: dict[str, object], message: str, changed: Callable[..., Path], exported: Exporter, tmp_path: Path
) -> None:
    with pytest.raises((WeightsError, FileFormatError)) as caught:
        merge_adapters(exported("llama").path, [changed(**options)], tmp_path / "out.onnx")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.onnx").exists()


def test_an_adapter_of_another_model_and_missing_files_are_named(
    exported: Exporter, changed: Callable[..., Path], tmp_path: Path
) -> None:
    path, out = exported("llama").path, tmp_path / "out.onnx"
    with pytest.raises(WeightsError, match=r"is for another model: .* does not have transformer\.h\.0\.attn\.c_attn"):
        merge_adapters(path, [ADAPTERS / "conv1d"], out)
    folder = changed()
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileFormatError, match=r"has no adapter_model\.safetensors"):
        merge_adapters(path, [folder], out)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(FileFormatError, match=r"has no adapter_config\.json"):
        merge_adapters(path, [folder], out)
    with pytest.raises(UsageError, match="two of the adapters are folders of the same name"):
        adapters_as_inputs(path, [ADAPTERS / "attention", ADAPTERS / "attention"], out)


def test_the_command_says_what_it_wrote(exported: Exporter, tmp_path: Path) -> None:
    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        return commands.run("update-weights", *arguments, cwd=tmp_path)

    path, adapter = exported("llama").path, ADAPTERS / "attention"
    done = command(path, "--adapter", adapter, "--as-inputs", "-o", "open.onnx")
    assert done.stdout.splitlines() == [
        "open.onnx: 4 low-rank pairs taken as 8 optional inputs, 12 nodes added",
        "open.attention.onnx_adapter: 8 inputs, 2,648 bytes",
    ]
    assert command("open.onnx", "--adapter", adapter, "-o", "more.onnx_adapter").returncode == 0
    document = json.loads(command(path, "--adapter", adapter, "-o", "merged.onnx", "--json").stdout)
    assert (document["pairs"], document["initializers"]) == (4, 4)
    failed = command(path, "-o", "out.onnx")
    assert failed.returncode == 2
    assert failed.stderr == "modelexport: give WEIGHTS.safetensors, or --adapter DIR\n"
