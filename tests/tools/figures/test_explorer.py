"""Node data in Google's Model Explorer: its adapter for ONNX has every key, and its page shows our figures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

import side_packages
from browser import MISSING, browser
from exports import Exporter
from modelexport.errors import UsageError
from modelexport.tables.costs import cost
from modelexport.tables.model_explorer import write_node_data
from modelexport.tables.profiles import profile

MISSING_PACKAGES = side_packages.missing("explorer")
pytestmark = pytest.mark.skipif(bool(MISSING_PACKAGES), reason=MISSING_PACKAGES)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("explorer.py")), *map(str, arguments)]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(side_packages.folder("explorer"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["condition", "bert", "resnet"])
def test_every_key_is_a_node_of_the_graphs_that_its_adapter_makes(
    exported: Exporter, name: str, tmp_path: Path
) -> None:
    path = exported(name).path
    done = subprocess.run(command("graphs", path), env=ENVIRONMENT, capture_output=True, text=True, check=True)
    graphs: dict[str, dict[str, list[str]]] = json.loads(done.stdout)
    for table, column in ((cost(path), "flops"), (profile(path, runs=1).table, "seconds")):
        write_node_data(table, tmp_path / "data.json", column=column)
        data = json.loads((tmp_path / "data.json").read_text())
        assert data
        for graph, one in data.items():
            # As its page has it: a key is the tensor_name of an output, or else the id of a node.
            by_value = {value: node for node, values in graphs[graph].items() for value in values}
            assert [key for key in one["results"] if by_value.get(key, key) not in graphs[graph]] == []


def test_a_file_with_functions_says_what_to_do(exported: Exporter, tmp_path: Path) -> None:
    from modelexport import export
    from modelexport.exporting.options import CheckOptions, Options, TagOptions

    case = exported("blocks").case
    options = Options(tags=TagOptions(tags_as="functions"), checks=CheckOptions(check=False))
    export(case.build(), case.inputs(), tmp_path / "functions.onnx", options=options, check=False)
    with pytest.raises(UsageError, match="modelexport inline"):
        write_node_data(cost(tmp_path / "functions.onnx"), tmp_path / "data.json", column="flops")


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_its_page_adds_our_figures_up(exported: Exporter, tmp_path: Path) -> None:
    path, data = exported("bert").path, tmp_path / "data.json"
    table = cost(path)
    write_node_data(table, data, column="flops")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        command("serve", path, data, str(port)), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            asked = {
                "models": [{"url": str(path), "adapterId": "onnx_adapter"}],
                "nodeData": [str(data)],
                "nodeDataTargets": [""],
            }
            with browser("--enable-unsafe-swiftshader", "--ignore-gpu-blocklist") as window:
                for _ in range(120):
                    with socket.socket() as probe:
                        if probe.connect_ex(("127.0.0.1", port)) == 0:
                            break
                    time.sleep(0.5)
                window.open(f"http://localhost:{port}/?data={quote(json.dumps(asked))}")
                for _ in range(120):
                    text = window.run("return document.body.innerText")
                    if "Aggregated stats" in text:
                        break
                    time.sleep(0.5)
        finally:
            server.terminate()
    assert f"Sum\t{table.whole['flops']}" in text
