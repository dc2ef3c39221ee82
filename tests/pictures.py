"""The pictures in docs/images, taken of what the programs write: python tests/pictures.py [NAME ...]

Terminal output is an SVG by rich, what a browser shows is a PNG by Chromium (see browser.py). Without names all are
made, in about three minutes; `device` needs onnxruntime-qnn (`make test-devices` puts it into `.venv/qnn`). Those of
Netron and Model Explorer are made by hand: docs/encodings.md, docs/measure.md.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import chdir
from io import StringIO
from pathlib import Path

import onnx
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from browser import browser

IMAGES = Path(__file__).parent.parent / "docs" / "images"
COLUMNS = 100
WIDE = {"device": 144}
"""Names of pictures to other numbers of columns."""
TERMINALS = {
    "export": (
        "modelexport export bert-tiny -o bert.onnx --verify",
        "modelexport tree bert.onnx --depth 3",
    ),
    "verify": ("modelexport verify faulty.onnx --model bert-tiny",),
    "cost": ("modelexport cost bert.onnx --depth 2",),
    "profile": ("modelexport profile bert.onnx --by class --sort seconds",),
    "compare": ("modelexport compare bert.onnx opset18.onnx",),
    "values": ("modelexport values half.onnx encoder.layer.1.output",),
    "device": ("modelexport verify bert.onnx --device qnn --fix -o fixed.onnx",),
}
"""Name of a picture to the commands whose output it shows."""
SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""As rich's, without its font, which would come from the network."""


def command(line: str) -> list[str]:
    return [sys.executable, "-m", "modelexport", *shlex.split(line)[1:]]


def run(line: str) -> None:
    subprocess.run(command(line), check=True, stdout=subprocess.DEVNULL)


def on_a_terminal(line: str, columns: int) -> str:
    """What a command prints on a terminal, with its colours."""
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {
        "TERM": "xterm-256color",
        "COLUMNS": str(columns),
    }
    with subprocess.Popen(command(line), stdout=writing, stderr=subprocess.DEVNULL, env=environment):
        os.close(writing)
        printed = b""
        try:
            while some := os.read(reading, 65536):
                printed += some
        except OSError:  # how Linux ends the reading of a terminal
            pass
        os.close(reading)
    return printed.decode().replace("\r\n", "\n").rstrip()


def terminal(name: str) -> None:
    columns = WIDE.get(name, COLUMNS)
    console = Console(record=True, width=columns, file=StringIO(), highlight=False)
    for index, line in enumerate(TERMINALS[name]):
        console.print(
            *[""] * bool(index), Text(f"$ {line}", "bold"), Text.from_ansi(on_a_terminal(line, columns)), sep="\n"
        )
    picture = console.export_svg(title="", theme=MONOKAI, code_format=SVG, unique_id=name)
    (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")


def plant_a_fault() -> None:
    """The first exact Gelu becomes its approximation by tanh."""
    model = onnx.load("bert.onnx")
    gelu = next(node for node in model.graph.node if node.op_type == "Gelu")
    del gelu.attribute[:]
    gelu.attribute.append(onnx.helper.make_attribute("approximate", "tanh"))
    onnx.save(model, "faulty.onnx")


def make_it_overflow() -> None:
    """A file in float16 in which a product of the second layer is too large."""
    run("modelexport quantize bert.onnx -o half.onnx --to float16")
    model = onnx.load("half.onnx")
    product = next(node for node in model.graph.node if "encoder.layer.1.output.dense" in str(node.metadata_props))
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == product.input[1])
    array = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array((array.astype("float32") * 400_000).astype(array.dtype), weight.name))
    onnx.save(model, "half.onnx")


def save_a_decoder() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96, num_hidden_layers=2)).save_pretrained("llama")


def sweep() -> None:
    """How many files agree with PyTorch, from the last row of the table of docs/evidence/sweep.md."""
    page = (IMAGES.parent / "evidence" / "sweep.md").read_text(encoding="utf-8")
    heads, row = (re.search(rf"^\| {name} \|.*$", page, re.M) for name in ("family", "all"))
    assert heads is not None
    assert row is not None
    figures = row[0].split("|")
    whole = int(figures[2])
    ours, bare = (int(figures[n]) for n, head in enumerate(heads[0].split("|")) if head.strip() == "agrees")
    bars = ""
    for index, (name, count) in enumerate((("modelexport", ours), ("torch.onnx", bare))):
        y = 12 + 30 * index
        bars += f'<text x="0" y="{y + 15}">{name}</text><rect class="all" x="120" y="{y}" width="500" height="20"/>'
        bars += f'<rect class="bar{index}" x="120" y="{y}" width="{500 * count / whole:.0f}" height="20"/>'
        bars += f'<text x="630" y="{y + 15}">{count} of {whole} agree with PyTorch</text>\n'
    style = (
        "text { font: 14px system-ui, sans-serif; fill: #333 } .all { fill: #ddd } .bar0 { fill: #3b7dd8 } "
        ".bar1 { fill: #8a94a3 } @media (prefers-color-scheme: dark) { text { fill: #ddd } .all { fill: #444 } }"
    )
    picture = f'<svg viewBox="0 0 880 74" xmlns="http://www.w3.org/2000/svg"><style>{style}</style>\n{bars}</svg>\n'
    (IMAGES / "sweep.svg").write_text(picture, encoding="utf-8")


def pages() -> None:
    """The HTML report, light, dark and on a phone, of two files, and of a package."""
    run("modelexport report bert.onnx -o report.html --profile")
    run("modelexport quantize bert.onnx -o int8.onnx --to int8-dynamic --keep 'encoder.layer.1'")
    run("modelexport report bert.onnx --against int8.onnx -o both.html --profile")
    save_a_decoder()
    run("modelexport export llama -o llama-onnx/ --separate-prefill")
    run("modelexport profile llama-onnx/ --html parts.html")
    with browser() as window:
        window.open(Path("report.html").resolve())
        window.click('#tree [data-address="encoder.layer.0"]')  # its column of nodes shows something
        for name in ("light", "dark"):
            if window.run("return document.documentElement.classList.contains('dark')") is not (name == "dark"):
                window.click("#theme")
            window.picture(IMAGES / f"report-{name}.png")
        window.click("#theme")
        window.resize(390, 844)
        window.picture(IMAGES / "report-phone.png")
        window.resize(1300, 1000)
        window.open(Path("both.html").resolve())
        window.click('#tree [data-address="encoder.layer.0"]')
        if window.run("return document.documentElement.classList.contains('dark')"):
            window.click("#theme")
        window.picture(IMAGES / "report-against.png")
        window.open(Path("parts.html").resolve())
        window.type("#part", "decode")
        window.picture(IMAGES / "package.png")


def graphs() -> None:
    """The graph inside a module: light, dark, on a phone, of two files, and with an infinity that was found."""
    run("modelexport report bert.onnx -o report.html --values")
    run("modelexport quantize bert.onnx -o int8.onnx --to int8-dynamic --only encoder.layer.0.intermediate")
    run("modelexport report bert.onnx --against int8.onnx -o both.html")
    run("modelexport report half.onnx -o half.html --values")
    show = "theme(arguments[0]); location.hash = arguments[1]; chooseLinked(); inside.scrollIntoView(); return 0"
    infinite = "chooseItem(graph.items.find(([node]) => node.outputs[0].figures?.[5])); return 0"
    with browser() as window:
        for name, page, place, dark, size in (
            ("graph-light", "report", "encoder.layer.0.attention.self", False, (1300, 1000)),
            ("graph-dark", "report", "encoder.layer.0.attention.self", True, (1300, 1000)),
            ("graph-phone", "report", "encoder.layer.0.attention.self", False, (390, 844)),
            ("graph-against", "both", "encoder.layer.0.intermediate.dense", False, (1300, 1000)),
            ("graph-infinity", "half", "encoder.layer.1.output", False, (1300, 1000)),
        ):
            window.resize(*size)
            window.open(Path(f"{page}.html").resolve())
            window.run(show, dark, place)
            if name == "graph-infinity":
                window.type("#column", "infinite")
                window.run(infinite)
                window.run("inside.scrollIntoView(); return 0")
            window.picture(IMAGES / f"{name}.png")


def main(names: list[str]) -> None:
    others = {"sweep": sweep, "pages": pages, "graphs": graphs}
    known = [*TERMINALS, *others]
    if unknown := set(names) - set(known):
        raise SystemExit(f"there is no picture {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        run("modelexport export bert-tiny -o bert.onnx --reference")
        run("modelexport export bert-tiny -o opset18.onnx --opset 18")
        plant_a_fault()
        make_it_overflow()
        for name in names or known:
            others[name]() if name in others else terminal(name)
            print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
