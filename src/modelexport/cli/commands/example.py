"""`example`."""

from __future__ import annotations

from pathlib import Path

from modelexport.core.declared_options import argument, option
from modelexport.core.text import suggest
from modelexport.errors import UsageError
from modelexport.terminal.printing import command_line, next_steps

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = {
    "tiny-bert.onnx": "a BERT of two layers with random weights, exported with dynamic axes; every command reads it",
    "sentences.txt": "64 English sentences, as --data of quantize and sensitivity",
}
"""The files that come with the package, to what each is for."""


def example(
    name: str = argument("", "tiny-bert.onnx or sentences.txt; without NAME, describe both.", metavar="NAME"),
    output: Path | None = option(
        None, "The file to write; NAME by default.", flag="-o --output", metavar="OUT", file="written alone"
    ),
) -> None:
    """Write a sample file that comes with the package."""
    if not name:
        if output is not None:
            raise UsageError(f"name the example to write to {output}: {' or '.join(EXAMPLES)}")
        width = max(map(len, EXAMPLES))
        print("\n".join(f"{example:<{width}}  {what}" for example, what in EXAMPLES.items()))
        return
    if name not in EXAMPLES:
        raise UsageError(f"there is no example {name}{suggest(name, EXAMPLES)}; the examples are {', '.join(EXAMPLES)}")
    from modelexport.files.atomic_writing import write_alone

    output, content = output or Path(name), (FOLDER / name).read_bytes()
    if not output.is_file() or output.read_bytes() != content:
        write_alone(output, content)
    follows = f"; {next_steps(command_line('tree', output))}" if output.suffix == ".onnx" else ""
    print(f"wrote {output}: {EXAMPLES[name]}{follows}")
