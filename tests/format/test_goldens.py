"""Files of the current format version can be read, and the current export equals its golden.

``pytest tests/format/test_goldens.py --rewrite-goldens`` writes the goldens of the current version; review the diff.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import onnx_ir as ir
import pytest
import torch

from golden_model import golden_model
from modelexport import load, verify
from modelexport.core.calls import ModuleCall
from modelexport.errors import FileFormatError
from modelexport.exporting.pipeline import export
from modelexport.format import keys, schemas
from modelexport.format.versions import FORMAT_VERSION
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.tagged.documents import reader

GOLDEN = Path(__file__).parent.parent / "golden"
DOCUMENTS = ("hierarchy", "dag", "operations", "properties")


def properties(model: ir.Model) -> dict[str, Any]:
    """All of our properties in the model, in a form that can be reviewed."""
    return {
        "model": dict(model.metadata_props),
        "nodes": {node.name: dict(node.metadata_props) for node in all_nodes(model)},
        "initializers": {value.name: dict(value.const_value.metadata_props) for value in initializers(model)},
    }


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder of the current export; with --rewrite-goldens, the folder of the goldens."""
    rewrite = request.config.getoption("--rewrite-goldens")
    directory = GOLDEN / FORMAT_VERSION if rewrite else tmp_path_factory.mktemp("today")
    directory.mkdir(exist_ok=True, parents=True)
    # Three axes, so that the weights are transposed and Gemm is not used.
    export(golden_model(), {"x": torch.ones(1, 2, 2)}, directory / "golden.onnx", check=False)
    (directory / "golden.report.md").unlink()  # it contains times
    document = json.dumps(properties(ir.load(directory / "golden.onnx")), indent=1)
    (directory / "golden.properties.json").write_text(document + "\n")
    return directory


def without_versions(name: str, document: dict[str, Any]) -> dict[str, Any]:
    """The document without the versions of packages, which change without the format."""
    if name == "hierarchy":
        document["environment"] = dict.fromkeys(document["environment"])
        document["modelexport_version"] = ""
    elif name == "properties":
        document["model"][keys.VERSION_KEY] = ""
    return document


@pytest.mark.parametrize("name", DOCUMENTS)
def test_todays_export_is_the_golden_of_its_version(today: Path, name: str) -> None:
    golden, made = (
        without_versions(name, json.loads((directory / f"golden.{name}.json").read_bytes()))
        for directory in (GOLDEN / FORMAT_VERSION, today)
    )
    assert made == golden, (
        "if the change is intended, run this file with --rewrite-goldens, and give the format a new version"
    )


def test_the_goldens_are_read() -> None:
    path = GOLDEN / FORMAT_VERSION / "golden.onnx"
    tagged = load(path)
    dags = reader.load_dag(path.with_suffix(".dag.json"))
    operations = reader.load_operations(path.with_suffix(".operations.json"))
    assert tagged.hierarchy.format_version == FORMAT_VERSION
    assert list(dags) == list(tagged.tags.values())
    assert {node.name for node in tagged.nodes} < set(operations)
    assert tagged.calls.stack(ModuleCall("shared.linear", 1)) == (
        ModuleCall(""), ModuleCall("shared", 1), ModuleCall("shared.linear", 1),
    )  # fmt: skip
    assert [module.aliases for module in tagged.hierarchy.modules if module.path == "stem"] == [["entry"]]
    assert {owner_of(node).calls for node in tagged.nodes if len(owner_of(node).calls) > 1} == {
        (ModuleCall("left"), ModuleCall("right"))
    }
    assert dags["/Golden/Block.inner"].nodes, "a module that runs in a branch has operations"


def test_a_file_that_is_read_is_written_as_it_was() -> None:
    golden = ir.load(GOLDEN / FORMAT_VERSION / "golden.onnx")
    again = load(GOLDEN / FORMAT_VERSION / "golden.onnx").encoded()
    assert {node.name: dict(node.metadata_props) for node in all_nodes(again)} == {
        node.name: dict(node.metadata_props) for node in all_nodes(golden)
    }


def test_the_golden_file_is_right() -> None:
    """Also what ran in a branch, where no hooks show the calls."""
    report = verify(golden_model(), {"x": torch.ones(1, 2, 2)}, GOLDEN / FORMAT_VERSION / "golden.onnx")
    assert (report.verdict, report.claims) == ("agree", [])


def test_an_older_file_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    model = ir.load(GOLDEN / FORMAT_VERSION / "golden.onnx")
    model.metadata_props[keys.FORMAT_VERSION_KEY] = "2026-11-22"
    ir.save(model, tmp_path / "older.onnx")
    with pytest.raises(FileFormatError, match=r"format version 2026-11-22, .*: export it again"):
        load(tmp_path / "older.onnx")


def test_the_goldens_have_every_key_of_the_format() -> None:
    kept = json.loads((GOLDEN / FORMAT_VERSION / "golden.properties.json").read_bytes())
    found = {where: {key for one in kept[where].values() for key in one} for where in ("nodes", "initializers")}
    assert {
        keys.SOURCE_MODULE, keys.CALL, keys.EVIDENCE, keys.NAMESPACE, keys.HIERARCHY_TAGS, keys.CALLS,
        keys.LAYER_ANNOTATION, keys.LINE,
    } == found["nodes"]  # fmt: skip
    assert {keys.PARAMETER, keys.TRANSFORM, keys.HIERARCHY_TAGS} == found["initializers"]
    assert {keys.FORMAT_VERSION_KEY, keys.VERSION_KEY, keys.CALL_TREE, keys.STATE_DICT} <= set(kept["model"])


@pytest.mark.parametrize("name", ["hierarchy", "dag", "operations"])
def test_the_goldens_of_todays_version_fit_the_shipped_schemas(name: str) -> None:
    document = json.loads((GOLDEN / FORMAT_VERSION / f"golden.{name}.json").read_bytes())
    jsonschema.validate(document, json.loads((schemas.DIRECTORY / f"{name}.json").read_bytes()))
