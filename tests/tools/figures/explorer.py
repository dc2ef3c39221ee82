"""Run by a test, where Model Explorer is installed: its adapter's graphs, and its server.

python explorer.py graphs FILE.onnx              {graph: {node id: [its values' tensor_name]}} as JSON
python explorer.py serve FILE.onnx DATA.json PORT
"""

from __future__ import annotations

import json
import sys

import model_explorer
from model_explorer_onnx.main import ONNXAdapter


def graphs(path: str) -> dict[str, dict[str, list[str]]]:
    return {
        graph.id: {
            node.id: [
                pair.value for output in node.outputsMetadata for pair in output.attrs if pair.key == "tensor_name"
            ]
            for node in graph.nodes
        }
        for graph in ONNXAdapter().convert(path, {})["graphs"]
    }


def serve(path: str, data: str, port: str) -> None:
    config = model_explorer.config().add_model_from_path(path, adapterId=ONNXAdapter.metadata.id)
    config.add_node_data_from_path(data)
    model_explorer.visualize_from_config(
        config, port=int(port), no_open_in_browser=True, extensions=["model_explorer_onnx"]
    )


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "graphs":
        print(json.dumps(graphs(*arguments)))
    else:
        serve(*arguments)
