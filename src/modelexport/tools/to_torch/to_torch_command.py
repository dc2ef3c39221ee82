"""`to-torch`: a file as code of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelexport.core.declared_options import option
from modelexport.core.text import first_few, plural
from modelexport.errors import UsageError
from modelexport.terminal.printing import print_result
from modelexport.terminal.shared_options import FILE, JSON


def to_torch(
    file: Path = FILE,
    output: Path = option(
        ..., "The source file to write; the weights are written next to it, as MODEL.safetensors.", flag="-o --output",
        metavar="MODEL.py", file="written alone",
    ),
    dropout: Sequence[str] = option(
        (), "Modules that apply dropout in training, and its probability: 'encoder.layer.*=0.1'.", metavar="SELECTOR=P"
    ),
    as_json: bool = JSON,
) -> None:  # fmt: skip
    """Write FILE as a module of PyTorch that can be read, changed, trained, and exported again."""
    from modelexport.tools.to_torch.to_torch import source_and_weights, torch_source

    chosen = {}
    for text in dropout:
        selector, sign, number = text.rpartition("=")
        try:
            chosen[selector] = float(number)
        except ValueError:
            sign = ""
        if not sign:
            raise UsageError(f"--dropout {text}: give a selector and a probability, as 'encoder.layer.*=0.1'")
    source_and_weights(output)  # before the work
    source = torch_source(file, dropout=chosen)
    not_compared = source.write(output)
    lines = [
        f"wrote {output}: {source.class_name}, {plural(source.text.count(chr(10)), 'line')}; weights in "
        f"{output.with_suffix('.safetensors').name}: {plural(len(source.tensors), 'tensor')}"
    ]
    if source.lost:
        lines.append(
            f"{plural(len(source.lost), 'tensor')} of the state_dict cannot be computed from what the file holds: "
            f"zeros that nothing uses, {first_few(source.lost)}"
        )
    if source.unnamed:
        lines.append(
            f"{plural(len(source.unnamed), 'weight')} without a name in the file became parameters: "
            f"{first_few(source.unnamed)}"
        )
    if not_compared:
        lines.append(f"not compared with {file.name}: {not_compared}")
    result = {
        "path": str(output),
        "class": source.class_name,
        "tensors": len(source.tensors),
        "lost": list(source.lost),
        "unnamed": list(source.unnamed),
        "not_compared": not_compared,
    }
    print_result(result, lambda: "\n".join(lines), as_json=as_json)
