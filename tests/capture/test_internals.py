"""The records of PyTorch's exporters, for models whose modules and calls are known; canaries of private names."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch

import commands
import models
from modelexport.capture.internals.both_exporters import study
from modelexport.capture.internals.internals_report import (
    ExporterStage,
    FrontEnd,
    Internals,
    MapEntry,
    Quality,
    quality,
)
from modelexport.cli.show_models import format_internals

STAGES = {
    "dynamo": ["captured", "decomposed", "translated", "optimised"],
    "torchscript": ["captured", "translated", "optimised", "written"],
}


def by_name(found: Internals) -> dict[str, FrontEnd]:
    return {front_end.name: front_end for front_end in found.front_ends}


def stages(found: Internals) -> dict[tuple[str, str], ExporterStage]:
    return {(one.name, stage.name): stage for one in found.front_ends for stage in one.stages}


@functools.cache
def studied(name: str, train: bool = False) -> tuple[Internals, torch.nn.Module, dict[str, torch.Tensor]]:
    """What is found, and the model and its inputs afterwards."""
    model, inputs = models.case(name).build().train(train), models.case(name).inputs()
    return study(model, inputs, name), model, inputs


@pytest.fixture
def blocks() -> Internals:
    return studied("blocks", train=True)[0]


def test_every_module_is_in_the_map_by_class_and_own_name(blocks: Internals) -> None:
    modules = dict(models.case("blocks").build().named_modules())
    assert [entry.path for entry in blocks.module_map] == list(modules)
    for entry in blocks.module_map:
        # PyTorch skips numbers to find a name: `down.0`, not `0`.
        parts = entry.path.split(".")
        start = max(index for index, part in enumerate(parts) if not part.isdecimal())
        assert entry.scope == f"{torch.typename(modules[entry.path])}::{'.'.join(parts[start:])}"
    different = len({entry.scope for entry in blocks.module_map})
    assert blocks.map_quality == Quality(0, 0, len(modules) - 1, 1, different)
    assert different < len(modules)


def test_scopes_on_captured_nodes_are_whole_hierarchies(blocks: Internals) -> None:
    assert blocks.scope_quality.full_hierarchies == blocks.scope_quality.different > 0
    assert (blocks.scope_quality.plain, blocks.scope_quality.class_scopes) == (0, 0)


def test_both_exporters_come_through_all_stages(blocks: Internals) -> None:
    assert (blocks.calls, blocks.modules_called, blocks.modules) == (23, 20, 22)
    assert {one.name: [stage.name for stage in one.stages] for one in blocks.front_ends} == STAGES
    assert all(one.error is None for one in blocks.front_ends)
    found = stages(blocks)
    captured = found["dynamo", "captured"]
    assert captured.nodes == captured.located == captured.keys["nn_module_stack"].nodes
    assert captured.calls == found["torchscript", "captured"].calls == 23
    # Only a strict capture, which is not the default, records where a function was called from.
    assert captured.keys["source_fn_stack"].nodes == 0
    translated = found["dynamo", "translated"]
    assert translated.keys["pkg.torch.onnx.name_scopes"].nodes == translated.nodes >= captured.nodes
    assert translated.bytes == sum(key.bytes or 0 for key in translated.keys.values()) > captured.bytes
    written = found["torchscript", "written"]
    assert (written.keys["metadata_props"].nodes, written.keys["doc_string"].nodes) == (0, 0)
    assert written.located < written.nodes


def test_translation_loses_the_number_of_a_call_and_capture_has_it(blocks: Internals) -> None:
    repeated = {path for path, times in models.case("blocks").expected.repeated.items() if times == 2}
    assert repeated == {"shared"}
    # The second call of the block, of its linear layer and of its norm.
    assert blocks.calls == blocks.modules_called + 3
    counts = {key: stage.calls - blocks.modules_called for key, stage in stages(blocks).items()}
    assert counts == {
        ("dynamo", "captured"): 3,
        ("dynamo", "decomposed"): 3,
        ("dynamo", "translated"): 0,
        ("dynamo", "optimised"): 0,
        ("torchscript", "captured"): 3,
        ("torchscript", "translated"): 0,
        ("torchscript", "optimised"): 0,
        ("torchscript", "written"): 3,
    }


@pytest.mark.slow
def test_a_model_that_torchscript_cannot_export_is_one_line_and_the_rest_is_there() -> None:
    found, *_ = studied("condition")
    front_ends = by_name(found)
    assert front_ends["dynamo"].error is None
    assert [stage.name for stage in front_ends["dynamo"].stages] == STAGES["dynamo"]
    error = front_ends["torchscript"].error
    assert error is not None
    assert "torch.jit.trace a dynamo-optimized function" in error
    assert front_ends["torchscript"].stages == []
    # The map is made before the model runs.
    assert [entry.path for entry in found.module_map] == [
        path for path, _ in models.case("condition").build().named_modules()
    ]
    text = format_internals(found)
    assert f"torchscript failed: {error}" in text.splitlines()
    # Nothing is recorded about the modules in the branches.
    captured = stages(found)["dynamo", "captured"]
    assert 0 < captured.located < captured.nodes


def test_a_model_that_dynamo_cannot_export_is_one_line_and_the_rest_is_there() -> None:
    front_ends = by_name(studied("data-dependent")[0])
    assert "data-dependent" in (front_ends["dynamo"].error or "")
    assert front_ends["dynamo"].stages == []
    assert [stage.name for stage in front_ends["torchscript"].stages] == STAGES["torchscript"]


@pytest.mark.slow
def test_nested_inputs_and_outputs_reach_both_exporters() -> None:
    found, *_ = studied("nested-structures")
    assert [one.error for one in found.front_ends] == [None, None]
    assert {stage.calls for stage in stages(found).values()} == {found.calls}


def test_the_model_is_as_before() -> None:
    _, model, inputs = studied("blocks", train=True)
    weights, given = models.case("blocks").build().state_dict(), models.case("blocks").inputs()
    assert "forward" not in vars(model)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, given[name]) for name, tensor in inputs.items())
    assert torch.jit._trace._trace_module_map is None


def test_quality_tells_plain_names_classes_and_hierarchies_apart() -> None:
    root = "models.Net::"
    names = [
        "__module.block",
        "models.Block::block",
        root,
        f"{root}/models.Block::block",
        "",
        None,
        "models.Block::block",
    ]
    assert quality(names, root) == Quality(none=2, plain=1, class_scopes=2, full_hierarchies=2, different=4)
    assert quality([], "") == Quality(0, 0, 0, 0, 0)


def test_pytorch_has_the_private_names_that_show_its_stages(blocks: Internals) -> None:
    """A canary: ``internals/torchscript_stages.py`` has to be adapted when this fails."""
    from torch.onnx._internal.torchscript_exporter import utils

    assert torch.jit._trace._trace_module_map is None
    assert torch._C._get_tracing_state() is None
    graphs = stages(blocks)
    assert callable(utils._optimize_graph)
    assert callable(utils._model_to_graph)
    assert {name: graphs["torchscript", name].graph for name in STAGES["torchscript"]} == {
        "captured": "TorchScript",
        "translated": "TorchScript",
        "optimised": "TorchScript",
        "written": "ONNX",
    }


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "net.py").write_text(
        "import torch\n"
        "def bilinear(): return torch.nn.Bilinear(3, 3, 2), {'input1': torch.ones(2, 3), 'input2': torch.ones(2, 3)}\n"
        "def misfit(): return torch.nn.Linear(3, 2), {'input': torch.ones(2, 5)}\n"
    )
    return commands.run("internals", *arguments, cwd=folder)


def test_the_command_prints_one_json_document_and_nothing_of_what_the_exporter_says(tmp_path: Path) -> None:
    done = run(tmp_path, "net.py:bilinear", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    shown = msgspec.convert(json.loads(done.stdout), Internals)
    scope = "torch.nn.modules.linear.Bilinear::"
    assert (shown.model, shown.calls, shown.module_map) == ("bilinear", 1, [MapEntry("", "Bilinear", scope)])
    assert [stage.name for stage in by_name(shown)["dynamo"].stages] == STAGES["dynamo"]
    assert "aten::bilinear" in (by_name(shown)["torchscript"].error or "")
    assert [stage.name for stage in by_name(shown)["torchscript"].stages] == ["captured"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["net.py"]


def test_inputs_that_do_not_fit_are_one_line_and_status_2(tmp_path: Path) -> None:
    done = run(tmp_path, "net.py:misfit")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("modelexport: the model raised RuntimeError while running . (Linear): ")
    assert done.stderr.count("\n") == 1
