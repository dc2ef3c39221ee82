"""Read the modules of a tagged ONNX file with `onnx` alone: python read_tags.py FILE.onnx"""

import json
import sys

import onnx


def properties(element):
    return {entry.key: entry.value for entry in element.metadata_props}


def all_nodes(graph):
    """The nodes of a graph, and of the graphs of its branches and loops."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                yield from all_nodes(inner)


def read_tags(path):
    """Address of each call to its tag, its operators, and the state_dict entries that its nodes use."""
    model = onnx.load(path, load_external_data=False)
    calls = {
        entry["call"]: {"tag": entry["tag"], "operators": [], "parameters": []}
        for entry in json.loads(properties(model)["modelexport.call_tree"])
    }
    entries = {
        tensor.name: json.loads(properties(tensor).get("modelexport.parameter", "[]"))
        for tensor in model.graph.initializer
    }
    for node in all_nodes(model.graph):
        call = calls[properties(node)["modelexport.call"]]
        call["operators"].append(node.op_type)
        for name in node.input:
            call["parameters"] += [key for key in entries.get(name, []) if key not in call["parameters"]]
    return calls


if __name__ == "__main__":
    for address, call in read_tags(sys.argv[1]).items():
        print(address or ".", call["tag"], " ".join(call["operators"]), " ".join(call["parameters"]), sep="\t")
