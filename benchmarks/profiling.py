"""The cost of `modelexport profile` above a plain profiled run of ONNX Runtime, on files with many nodes.

    python benchmarks/profiling.py [--runs N] [NODES ...]

Each file is a tagged chain of blocks of eight nodes. `plain` is a session with profiling, opened and run as often, with
its profile read as JSON; `profile` is the command's function; `beyond` is `profile` without the time that its own
sessions take to open and to run; `processor` is `beyond` in seconds of a processor, for a busy machine.

Needs the project alone; about one minute.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from modelexport.format import keys
from modelexport.format.versions import FORMAT_VERSION
from modelexport.tables import onnxruntime_profiler, profiles
from modelexport.tables.costs import cost
from modelexport.tables.html_page import Page, format_page

OPERATORS = ("MatMul", "Add", "Relu", "Mul", "Sub", "Tanh", "Div", "Sigmoid")


def chain(nodes: int, path: Path) -> None:
    """Write a tagged file with this number of nodes."""
    blocks = nodes // len(OPERATORS)
    weight = numpy_helper.from_array(np.eye(64, dtype=np.float32), "weight")
    bias = numpy_helper.from_array(np.ones(64, dtype=np.float32), "bias")
    made, value = [], "x"
    calls = [{"call": "", "tag": "/Chain"}]
    for block in range(blocks):
        address, tag = f"blocks.{block}", f"/Chain/Block.{block}"
        calls.append({"call": address, "tag": tag, "parent": ""})
        for operator in OPERATORS:
            result = f"{operator}_{block}"
            binary = {"MatMul": ["weight"], "Add": ["bias"], "Mul": ["bias"], "Sub": ["bias"], "Div": ["bias"]}
            node = helper.make_node(operator, [value, *binary.get(operator, [])], [result], name=f"node_{result}")
            said = {keys.SOURCE_MODULE: tag, keys.CALL: address, keys.EVIDENCE: "exact"}
            node.metadata_props.extend(onnx.StringStringEntryProto(key=k, value=v) for k, v in said.items())
            made.append(node)
            value = result
    kind = helper.make_tensor_value_info
    graph = helper.make_graph(
        made, "main_graph", [kind("x", TensorProto.FLOAT, [64, 64])], [kind(value, TensorProto.FLOAT, [64, 64])],
        [weight, bias],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    properties = {
        keys.FORMAT_VERSION_KEY: FORMAT_VERSION,
        keys.CALL_TREE: json.dumps(calls),
        keys.STATE_DICT: "{}",
    }
    helper.set_model_props(model, properties)
    onnx.save(model, path)


def plain(path: Path, folder: Path, count: int) -> float:
    """Seconds of a profiled run without this package."""
    began = time.perf_counter()
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "plain")
    session = onnxruntime.InferenceSession(path, options)
    x = np.ones((64, 64), np.float32)
    for _ in range(count):
        session.run(None, {"x": x})
    json.loads(Path(session.end_profiling()).read_text())
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("nodes", nargs="*", type=int, default=[1_000, 10_000])
    arguments = parser.parse_args()
    print("| nodes | plain, s | `profile`, s | ratio | beyond, s | processor, s | `cost`, s | page, s | page, kB |")
    print("|---" * 9 + "|")
    for nodes in arguments.nodes:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            path = folder / "chain.onnx"
            chain(nodes, path)
            alone = plain(path, folder, arguments.runs + 2)
            inside, inside_processor = [0.0], [0.0]
            time_runs, profiled = profiles.time_runs, onnxruntime_profiler._profiled

            def timed(function, inside=inside, processor=inside_processor):  # type: ignore[no-untyped-def]
                def run(*args, **kwargs):  # type: ignore[no-untyped-def]
                    began, before = time.perf_counter(), time.process_time()
                    try:
                        return function(*args, **kwargs)
                    finally:
                        inside[0] += time.perf_counter() - began
                        processor[0] += time.process_time() - before

                return run

            profiles.time_runs, onnxruntime_profiler._profiled = timed(time_runs), timed(profiled)
            x = {"x": np.ones((64, 64), np.float32)}
            began, before = time.perf_counter(), time.process_time()
            found = profiles.profile(path, x, runs=arguments.runs)
            whole, processor = time.perf_counter() - began, time.process_time() - before - inside_processor[0]
            profiles.time_runs, onnxruntime_profiler._profiled = time_runs, profiled
            began = time.perf_counter()
            table = cost(path)
            costs = time.perf_counter() - began
            began = time.perf_counter()
            page = format_page(Page(found.table, "seconds"))
            drawn = time.perf_counter() - began
            assert table.whole["macs"] == nodes // 8 * 64**3
            assert found.facts.attributed > 0.99
            print(
                f"| {nodes:,} | {alone:.2f} | {whole:.2f} | {whole / alone:.2f} | {whole - inside[0]:.2f} "
                f"| {processor:.2f} | {costs:.2f} | {drawn:.2f} | {len(page.encode()) / 1000:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
