"""Arguments and options that several commands share, and what their values mean."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from modelexport.core.declared_options import argument, option
from modelexport.errors import UsageError
from modelexport.runtime import CPU

MODEL = argument(
    "bert-tiny",
    "A Hugging Face directory or hub name, package:folder, package.module:factory or file.py:factory (a callable that "
    "returns the module, or the module and its inputs), or bert-tiny, the built-in example.",
    metavar="MODEL",
    file="model",
)
FILE = argument(..., "An ONNX file.", metavar="FILE.onnx", file="read file")
FILE_OR_FOLDER = argument(..., "An ONNX file, or a package of several.", metavar="FILE.onnx|FOLDER/", file="read")
JSON = option(False, "Print one JSON document and nothing else.", flag="--json")
SELECTORS = argument(
    ...,
    "Calls: encoder.layer.0 (. is the root, path@1 a second call), encoder.layer.[0-3], *.dense, a tag, "
    "class:LayerNorm; !SELECTOR removes calls.",
    metavar="SELECTOR...",
)
# A declared option that dataclasses share has to have one name in all of them: the field object keeps the last one.
DEVICE = option(
    CPU,
    "The device to run on: NAME[,option=value...], such as qnn or cuda,device_id=1; see `modelexport devices`.",
    flag="--device --provider",
    metavar="NAME",
)
THROUGH = option(
    None,
    "A command in front of the Python that runs the device: 'ssh board', 'docker run -i IMAGE', "
    "'qemu-x86_64 -cpu Haswell'. It needs Python 3, numpy and onnxruntime there, and no shared folder.",
    flag="--through",
    metavar="COMMAND",
)
JOBS = option(
    None, "Measure modules in N processes; in Python, `executor=` spreads them over machines.", metavar="N", least=1
)
INPUTS = option(
    None,
    'Example inputs: {"name": {"dtype", "shape", "range"|"value"}}, or arrays by name (.npz, .safetensors).',
    flag="--inputs",
    metavar="SPEC.json",
    file="read",
)
ARRAYS = option(None, "Arrays by name: .npz, .safetensors, or a JSON description.", metavar="FILE", file="read")
OUTPUT = option(..., "The file to write.", flag="-o --output", metavar="OUT.onnx", file="written")
SHARING = option("auto", "External weights: link the files next to the output, or copy the used weights.")
METRIC = option("error", "The metric: error, cosine, kl, top1, or file.py:function.", metavar="METRIC")
COMPARED = option(
    None, "The output to compare; by default the first floating-point output.", flag="--compare", metavar="NAME"
)


def device_text(provider: str, through: str | None) -> str:
    """A device as the functions of Python take it: with the command that reaches it."""
    return provider if through is None else f"{provider} through {through}"


def check_processor(data: Path | None, processor: Path | None) -> None:
    """Refuse a processor without data, which would have no effect."""
    if processor is not None and data is None:
        raise UsageError("--processor goes with --data")


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """Inputs to measure with"""

    data: Path | None = option(
        None, ".npz, .safetensors, .jsonl, text (one run per line), or a folder of images.", metavar="DATA", file="read"
    )
    processor: Path | None = option(
        None, "The folder of tokenizer.json, if it is not next to FILE.", metavar="FOLDER", file="read"
    )

    def __post_init__(self) -> None:
        check_processor(self.data, self.processor)


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kMG]i?)?B?")
_UNITS = {None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def parsed_bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"'{text}' is not a size: write a number of bytes, kB, MB or GB, as in 25MB")
    return round(float(match[1]) * _UNITS[match[2]])


def parsed_sizes(texts: Iterable[str]) -> dict[str, int]:
    sizes = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not name or not number.removeprefix("-").isdecimal():
            raise UsageError(f"'{text}' is not NAME=N: give the name of a dynamic axis and its size, as in batch=8")
        if int(number) < 1:
            raise UsageError(f"'{text}': a size is at least 1, as in {name}=8")
        sizes[name] = int(number)
    return sizes


def parsed_pairs(option: str, texts: Iterable[str], value: str = "VALUE") -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise UsageError(f"{option} {text}: write NAME={value}")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}
