"""Files on devices: a simulated NPU, OpenVINO, browsers, and devices that are wrong by design.

    pip install onnxruntime-qnn; python benchmarks/devices.py npu planted
    python benchmarks/devices.py openvino=PYTHON web=NODE_MODULES

PYTHON is that of an environment with numpy and onnxruntime-openvino and nothing else of this project; NODE_MODULES has
onnxruntime-web. Each section that is measured is written into docs/evidence/devices.md.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import onnx_ir as ir

import models
from browser import MISSING, browser
from modelexport import export, load, verify_on_device, verify_results
from modelexport.errors import ModelExportError
from modelexport.graph.node_owners import owner_of
from modelexport.runtime.devices import CPU
from modelexport.tagged.file import TaggedFile
from modelexport.tools.devices.device_check import check
from modelexport.tools.devices.device_report import DeviceReport, Fallback, RegionReport
from modelexport.tools.devices.kits import write_kit
from modelexport.traces.inputs_and_example_sizes import make_feeds
from outcomes import write_table
from spoiled_device import SpoiledDevice

PAGE = Path(__file__).parent.parent / "docs" / "evidence" / "devices.md"
NPU = ["resnet", "vit", "llama", "unet", "mobilenet-v2", "convnext", "whisper", "swin", "detr", "minilm"]
FIVE = ["resnet", "vit", "unet", "llama", "minilm"]
PLANTED = ["vit", "resnet", "llama", "unet", "t5", "wav2vec2", "clip", "gpt2-cache", "mamba", "blocks"]
OPERATORS = 10
"""Operators that are spoiled in each model."""
BY = 1.25
"""What the results of a spoiled operator are multiplied by."""
BOUND = 0.01
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def exported(name: str, folder: Path) -> Path:
    """A model of the tests' table, with fixed sizes."""
    case, path = models.case(name), folder / f"{name}.onnx"
    if not path.exists():
        export(case.build(), case.inputs(), path, reference=True)
    return path


# --- a simulated NPU ---


def npu(folder: Path) -> Iterator[str]:
    yield "| model | on the NPU | elsewhere | off by | float16 costs | wrong | after `--fix` | changes | s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in NPU:
        began = time.perf_counter()
        file = exported(name, folder)
        try:
            report = verify_on_device(file, device="qnn", fix=folder / f"{name}.fixed.onnx", limit=120)
        except ModelExportError as error:
            yield f"| {name} | {error} |"
            continue
        yield f"| {name} | {' | '.join(npu_cells(report))} | {time.perf_counter() - began:.0f} |"


def npu_cells(report: DeviceReport) -> list[str]:
    whole, fix = report.whole, report.fix
    on = whole.nodes.get(report.device.provider, 0)
    fallbacks = ", ".join(f"{len(one.nodes)} {one.operator}{helped(one)}" for one in report.fallbacks)
    changed = (
        sorted({f"{step.change}: {', '.join(step.operators[:4] or [step.address])}" for step in fix.steps})
        if fix
        else []
    )
    off_by = f"{whole.error:.1e}" if whole.error is not None else f"{whole.status}: {whole.reason[:150]}"
    cells = [str(on), fallbacks or "0", off_by, "" if whole.rounding is None else f"{whole.rounding:.1e}"]
    after = "" if fix is None or fix.error is None else f"{fix.error:.1e}{'' if fix.agrees else ' (not within)'}"
    return [*cells, named(report), after, "; ".join(changed)]


def helped(fallback: Fallback) -> str:
    changes = [change.change for change in fallback.tried if change.helps]
    return f" (runs there by {changes[0]})" if changes else ""


def named(report: DeviceReport) -> str:
    places = [
        f"`{one.address or '.'}`" + (f" ({', '.join(one.operators[:4])})" if one.node_names else "")
        for one in report.culprits
    ]
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


# --- devices that are wrong by design ---


def planted(folder: Path) -> Iterator[str]:
    rows, total, right, accused, none = [], 0, 0, 0, 0
    for name in PLANTED:
        tagged = load(exported(name, folder))
        feeds = make_feeds(tagged, tagged.path, None, {}, provider=CPU, seed=0)[0]
        operators = spoilable(tagged)
        found = missed = sound = without = 0
        for operator in operators[:OPERATORS]:
            places = {node.name for node in tagged.model.graph if node.op_type == operator}
            report = check(tagged, feeds, SpoiledDevice(lambda node, names=places: node.name in names, BY))
            if report.whole.status == "agree":
                without += 1
                continue
            named_nodes = [nodes_of(tagged, one) for one in report.culprits]
            hit = bool(named_nodes) and all(nodes & places for nodes in named_nodes)
            found, missed = found + hit, missed + (not hit)
            sound += sum(not nodes & places for nodes in named_nodes)
        total, right, accused, none = total + found + missed, right + found, accused + sound, none + without
        print(name, found, missed, sound, without, file=sys.stderr, flush=True)
        rows.append(f"| {name} | {found} of {found + missed} | {sound} | {without} |")
    yield from ["| model | named | sound modules accused | without effect |", "|---|---|---|---|", *rows]
    yield f"| **all** | {right} of {total} | {accused} | {none} |"


def nodes_of(tagged: TaggedFile, culprit: RegionReport) -> set[str | None]:
    """The nodes that a culprit names, with those that compute constants for them, such as transposed weights."""
    names = set(culprit.node_names) or {node.name for node in tagged.nodes_of(tagged.find(culprit.address or "."))}
    pending = [node for node in tagged.model.graph if node.name in names]
    while pending:
        for value in pending.pop().inputs:
            maker = value.producer() if value is not None else None
            if maker is not None and all(one is None or one.is_initializer() for one in maker.inputs):
                names.add(maker.name)
                pending.append(maker)
    return names


def spoilable(tagged: TaggedFile) -> list[str]:
    """Operators of the main graph with floating-point results that depend on inputs, the most frequent first."""
    counts: dict[str, int] = {}
    for node in tagged.model.graph:
        if node.op_type not in ("Constant", "Shape", "Cast") and node.outputs[0].dtype in FLOATS and owner_of(node):
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return sorted(counts, key=lambda operator: -counts[operator])


# --- elsewhere ---


def elsewhere(
    folder: Path, names: Sequence[str], run: Callable[[Path, str], None], labels: Sequence[str]
) -> Iterator[str]:
    """A kit of each model, run by each of several runners."""
    yield f"| model | parts | {' | '.join(labels)} |"
    yield f"|---|---|{'---|' * len(labels)}"
    for name in names:
        file, kit = exported(name, folder), folder / f"kit-{name}"
        shutil.rmtree(kit, ignore_errors=True)
        written = write_kit(file, kit, modules=("*", "encoder.layer.0") if name == "minilm" else ())  # it is large
        cells = []
        for label in labels:
            began = time.perf_counter()
            (kit / "results.json").unlink(missing_ok=True)
            try:
                run(kit, label)
                report = verify_results(file, results=kit / "results.json")
                ran = sum(one.status != "not compared" for one in report.regions)
                results = json.loads((kit / "results.json").read_text())["parts"].values()
                failed = sum(one["status"] != "ran" for one in results)
                off = f"off by {report.whole.error:.1e}" if report.whole.error is not None else report.whole.reason[:80]
                on = sum(count for provider, count in report.whole.nodes.items() if provider != CPU)
                more = f", {on} of {sum(report.whole.nodes.values())} nodes there" if on else ""
                more += f", {failed} parts failed alone" if failed else ""
                more += f"; wrong: {named(report)}" if report.culprits else ""
                assert ran
                cells.append(f"{off}{more}; {time.perf_counter() - began:.0f} s")
            except (ModelExportError, subprocess.SubprocessError, AssertionError, OSError) as error:
                cells.append(f"failed: {str(error)[:100]}")
        yield f"| {name} | {len(written.parts)} | {' | '.join(cells)} |"


def openvino(folder: Path, python: str) -> Iterator[str]:
    def run(kit: Path, label: str) -> None:
        words = ["OpenVINOExecutionProvider", "device_type=CPU"] if label.startswith("OpenVINO") else []
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run([python, "-I", kit / "runner.py", *words], check=True, timeout=600, env=environment)

    yield from elsewhere(folder, FIVE, run, ["OpenVINO, CPU device", "CPU provider of that runtime"])


def web(folder: Path, modules: str) -> Iterator[str]:
    def run(kit: Path, label: str) -> None:
        if label == "Node, WASM":
            (kit / "node_modules").symlink_to(modules)
            try:
                subprocess.run(["node", kit / "runner.mjs"], check=True, timeout=300)
            finally:
                (kit / "node_modules").unlink()
        else:
            in_browser(kit, Path(modules), label.partition(", ")[2].split()[0].lower())

    labels = ["Node, WASM"] if MISSING else ["Node, WASM", "Chromium, WASM", "Chromium, WebGPU in software"]
    yield from elsewhere(folder, FIVE, run, labels)


def in_browser(kit: Path, modules: Path, provider: str) -> None:
    """Run a kit in headless Chromium."""
    shutil.copytree(modules / "onnxruntime-web" / "dist", kit / "ort", dirs_exist_ok=True)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def guess_type(self, path: Any) -> str:
            kinds = {".mjs": "text/javascript", ".wasm": "application/wasm"}
            return kinds.get(Path(path).suffix) or super().guess_type(path)

        def log_message(self, *words: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(kit)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"] if provider == "webgpu" else []
    try:
        with browser(*flags) as window:
            window.open(f"http://127.0.0.1:{server.server_port}/index.html?run={provider}")
            end = time.monotonic() + 300
            while time.monotonic() < end:
                state = window.texts("#state")[0]
                if state.startswith(("done", "failed")):
                    break
                time.sleep(0.5)
            results = window.run("return window.results ? JSON.stringify(window.results) : null")
    finally:
        server.shutdown()
    if results is None:
        raise OSError(f"the browser gave no results: {state}")
    (kit / "results.json").write_text(results)


SECTIONS: dict[str, Callable[..., Iterator[str]]] = {"npu": npu, "planted": planted, "openvino": openvino, "web": web}


def main() -> None:
    """Measure the sections that are asked for, and write them into the page."""
    asked = dict(word.partition("=")[::2] for word in sys.argv[1:])
    if not asked:
        print(f"benchmarks/devices.py: left out, give some of {', '.join(SECTIONS)}")
        return
    folder = Path(os.environ.get("MODELS") or tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    for name, value in asked.items():
        lines = []
        for line in SECTIONS[name](folder, *([value] if value else [])):
            print(line, flush=True)
            lines.append(line)
        write_table(PAGE, f"<!-- figures: devices.py {name} -->", "\n".join(lines))


if __name__ == "__main__":
    main()
