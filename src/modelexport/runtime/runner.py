"""Runs the models of a kit on a device, each in a process of its own, and writes results.json.

    python runner.py [PROVIDER] [OPTION=VALUE ...] [plugin:PACKAGE] [limit:SECONDS]

PROVIDER is CPUExecutionProvider if left out; PACKAGE is that of a plug-in. It needs numpy and onnxruntime.
"""

import functools
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

HERE = Path(globals().get("__file__", ".")).parent


@functools.lru_cache(maxsize=1)
def load(file: str, settings: str) -> Any:
    """A session for a file on a device, and the seconds that it took."""
    device, options, began = json.loads(settings), ort.SessionOptions(), time.perf_counter()
    options.log_severity_level = device.get("log", 4)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if device.get("library"):
        if device["provider"] not in [offered.ep_name for offered in ort.get_ep_devices()]:
            ort.register_execution_provider_library(device["provider"], device["library"])
        devices = [offered for offered in ort.get_ep_devices() if offered.ep_name == device["provider"]]
        options.add_provider_for_devices(devices[:1], device["options"])
    else:
        options.add_provider(device["provider"], device["options"])
    return ort.InferenceSession(file, options, enable_fallback=0), time.perf_counter() - began


def run_model(folder: Path, model: Any, device: Any) -> dict[str, Any]:
    """Load a model and run it; returns the errors of its outputs, its nodes by provider, and seconds."""
    session, loaded = load(str(folder / model["file"]), json.dumps(device))
    feeds = {value["name"]: read_value(folder, value) for value in model["inputs"]}
    seconds, nodes, errors = list[float](), dict[str, Any](), dict[str, Any]()
    while not seconds or (len(seconds) < 5 and sum(seconds) < 0.2):
        began = time.perf_counter()
        results = session.run([value["name"] for value in model["outputs"]], feeds)
        seconds.append(time.perf_counter() - began)
    for graph in getattr(session, "get_provider_graph_assignment_info", list)():
        nodes.setdefault(graph.ep_name, []).append([node.name for node in graph.get_nodes()])
    for value, result in zip(model["outputs"], results, strict=False):  # it gives all if none are asked for
        if "save" in value:
            np.save(folder / value["save"], result)
        else:
            errors[value["name"]] = output_error(read_value(folder, value), np.asarray(result))
    return {"errors": errors, "nodes": nodes, "load_seconds": loaded, "seconds": float(np.median(seconds))}


def read_value(folder: Path, value: Any) -> Any:
    return np.fromfile(folder / value["value"], np.dtype(value["dtype"])).reshape(value["shape"])


def output_error(right: Any, result: Any) -> float | None:
    """The relative error (of wide integers, the share that differs); None if shapes or infinite elements differ."""
    if right.shape != result.shape:
        return None
    if right.dtype.kind == "b" or (right.dtype.kind in "iu" and right.dtype.itemsize > 2):
        return float(np.mean(right != result)) if right.size else 0.0
    right, result = right.astype(np.float64), result.astype(np.float64)
    large = ~(np.abs(right) < 1e30)  # the smallest number of a mask, which is another one in each type
    alike = np.array_equal(np.sign(right[large]), np.sign(result[large]), equal_nan=True)
    if not alike or (np.abs(result[large]) < 6e4).any() or not np.isfinite(result[~large]).all():
        return None
    size, apart = (float(np.linalg.norm(array)) for array in (right[~large], (right - result)[~large]))
    error = apart / size if size else apart
    return error if np.isfinite(error) else None  # squares overflow


def serve() -> None:
    """For each line of JSON on stdin, a job, write its result as one to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    for line in sys.stdin:
        job = json.loads(line)
        try:
            result = run_model(Path(job["folder"]), job["model"], job["device"]) | {"status": "ran"}
        except Exception as error:
            result = {"status": "failed", "message": " ".join(str(error).split())[:600] or type(error).__name__}
        print(json.dumps(result), file=answers, flush=True)


def run_apart(model: Any, device: Any, limit: float) -> Any:
    job = json.dumps({"folder": str(HERE), "model": model, "device": device})
    how: Any = {"input": job, "capture_output": True, "text": True, "timeout": limit}
    try:
        done = subprocess.run([sys.executable, __file__, "--serve"], check=False, **how)
    except subprocess.TimeoutExpired:
        return {"status": "hung", "message": f"not done after {limit:g} s"}
    crashed = {"status": "crashed", "message": f"the process ended with status {done.returncode}"}
    return json.loads(done.stdout) if done.stdout.strip() else crashed


def run_kit(words: list[str]) -> None:
    settings = dict(word.split(":", 1) for word in words if word.startswith(("plugin:", "limit:")))
    options = dict(word.split("=", 1) for word in words if "=" in word)
    provider = next((word for word in words if "=" not in word and ":" not in word), "CPUExecutionProvider")
    version = f"onnxruntime {ort.__version__} on {platform.platform()}"
    device = {"name": provider, "provider": provider, "options": options, "version": version}
    if "plugin" in settings:
        device["library"] = importlib.import_module(settings["plugin"]).get_library_path()
    kit, limit = json.loads((HERE / "kit.json").read_text()), float(settings.get("limit", 300))
    parts = {model["name"]: run_apart(model, device, limit) for model in kit["parts"]}
    results = {"kit": kit["kit"], "device": device, "parts": parts}
    (HERE / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else run_kit(sys.argv[1:])
