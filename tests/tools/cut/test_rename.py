"""``rename`` and ``export --node-names path``: names that tools which go by module paths understand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers

import modelexport
from commands import run
from exports import ExportedCase, Exporter
from modelexport import compare, load, rename, retag, verify, verify_against
from modelexport.core.calls import ModuleCall
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.tools.optimizers.optimize_tools import optimize_file

NAMED = ["blocks", "condition", "llama", "swin", "recurrent", "albert"]


def path_of(call: ModuleCall) -> str:
    """What a node's name begins with, written the way exporters of old wrote it."""
    return re.sub(r"/(\d+)(?=/|$)", r".\1", "".join(f"/{part}" for part in call.path.split(".") if part))


def names_of(path: Path) -> list[str]:
    return [node.name or "" for node in load(path).nodes]


@pytest.mark.parametrize("name", NAMED)
def test_every_node_is_named_after_its_module_and_its_operator(name: str, exported: Exporter, tmp_path: Path) -> None:
    file = exported(name)
    rename(file.path, tmp_path / "named.onnx")
    onnx.checker.check_model(tmp_path / "named.onnx", full_check=True)
    tagged = load(tmp_path / "named.onnx")
    names = [node.name or "" for node in tagged.nodes]
    assert len(set(names)) == len(names)
    values = {value.name for node in tagged.nodes for value in node.outputs}
    assert not values.intersection(names)
    for node in tagged.nodes:
        owner = owner_of(node)
        assert owner is not None
        assert re.fullmatch(rf"{re.escape(path_of(owner.call))}/{node.op_type}(_\d+)?", node.name or "")


@pytest.mark.parametrize("name", ["llama", "condition"])
def test_values_are_named_after_the_nodes_and_nothing_else_changes(
    name: str, exported: Exporter, tmp_path: Path
) -> None:
    file = exported(name)
    result = rename(file.path, tmp_path / "named.onnx", values=True)
    onnx.checker.check_model(tmp_path / "named.onnx", full_check=True)
    before, after = load(file.path), load(tmp_path / "named.onnx")
    kept = {value.name for value in (*before.model.graph.inputs, *before.model.graph.outputs)}
    kept |= {value.name for value in initializers(before.model)}
    for old, new in zip(before.nodes, after.nodes, strict=True):
        assert (old.op_type, old.metadata_props) == (new.op_type, new.metadata_props)
        for index, (one, two) in enumerate(zip(old.outputs, new.outputs, strict=True)):
            assert two.name == (one.name if one.name in kept else f"{new.name}_output_{index}")
            assert result.values.get(one.name or "", one.name) == two.name
    feeds = {key: value.numpy() for key, value in file.case.inputs().items()}
    for one, two in zip(outputs(file.path, feeds), outputs(tmp_path / "named.onnx", feeds), strict=True):
        np.testing.assert_array_equal(one, two)


def outputs(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)


def test_names_are_stable(exported: Exporter, tmp_path: Path) -> None:
    path = exported("llama").path
    rename(path, tmp_path / "once.onnx", values=True)
    again = rename(tmp_path / "once.onnx", tmp_path / "twice.onnx", values=True)
    assert not again.renamed
    assert not again.values
    assert names_of(tmp_path / "once.onnx") == names_of(tmp_path / "twice.onnx")


def test_an_export_with_such_names_is_the_renamed_export(exported: Exporter, tmp_path: Path) -> None:
    file = exported("blocks")
    modelexport.export(file.case.build(), file.case.inputs(), tmp_path / "named.onnx", node_names="path", check=False)
    rename(file.path, tmp_path / "renamed.onnx", values=True)
    one, two = (load(tmp_path / name).model for name in ("named.onnx", "renamed.onnx"))
    assert [(node.name, [value.name for value in node.outputs]) for node in all_nodes(one)] == [
        (node.name, [value.name for value in node.outputs]) for node in all_nodes(two)
    ]


@pytest.mark.slow
def test_every_part_of_a_package_has_them(tmp_path: Path) -> None:
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    modelexport.export_package(model, tmp_path / "package", node_names="path")
    parts = {path.stem: ir.load(path) for path in (tmp_path / "package").glob("*.onnx")}
    assert parts.keys() == {"encoder", "decode"}
    for name, part in parts.items():
        names = [node.name or "" for node in part.graph]
        assert len(set(names)) == len(names)
        assert sum(each.startswith(f"/{'encoder' if name == 'encoder' else 'decoder'}/block.1/") for each in names) > 5


@pytest.mark.parametrize(
    ("name", "values"), [("blocks", True), *(pytest.param("llama", v, marks=pytest.mark.slow) for v in (True, False))]
)
def test_the_other_commands_still_work_on_it(name: str, values: bool, exported: Exporter, tmp_path: Path) -> None:
    file: ExportedCase = exported(name)
    path = tmp_path / "named.onnx"
    rename(file.path, path, values=values)
    assert load(path).hierarchy is not None
    assert str(load(path)) == str(load(file.path))
    report = verify(file.case.build(), file.case.inputs(), path)
    assert report.agrees
    assert not report.claims
    assert verify_against(file.path, path).agrees
    assert not compare(file.path, path).differs
    optimized = optimize_file(path, "ort-extended", tmp_path / "optimized.onnx")
    assert optimized.coverage.untagged == 0
    assert not optimized.unclear


def test_without_values_a_file_made_of_the_renamed_one_descends_from_the_old_one(
    exported: Exporter, tmp_path: Path
) -> None:
    path = exported("llama").path
    rename(path, tmp_path / "named.onnx")
    ir.save(ir.load(tmp_path / "named.onnx"), tmp_path / "changed.onnx")
    report = retag(tmp_path / "changed.onnx", source=path, output=tmp_path / "back.onnx")
    assert report.coverage.untagged == 0
    assert report.common == report.values


def test_the_sidecar_follows_values_to_their_new_names(tmp_path: Path) -> None:
    """Arguments that are computed, and those that were folded into constants."""

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
            return x.exp() * factors

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x.sin(), torch.arange(3.0) * 2)

    modelexport.export(Net().eval(), (torch.rand(3),), tmp_path / "net.onnx", check=False)
    rename(tmp_path / "net.onnx", tmp_path / "named.onnx", values=True)
    for name, values in (("net", ["sin", "mul"]), ("named", ["/Sin_output_0", "mul"])):
        sidecar = load(tmp_path / f"{name}.onnx").hierarchy
        assert sidecar is not None
        assert [tensor.value for tensor in sidecar.calls[1].inputs] == values


def test_the_command_renames(exported: Exporter, tmp_path: Path) -> None:
    done = run("rename", exported("blocks").path, "-o", "named.onnx", "--values", cwd=tmp_path)
    assert re.fullmatch(r"named\.onnx: \d+ nodes and \d+ values renamed\n", done.stdout)
    assert (tmp_path / "named.hierarchy.json").exists()
