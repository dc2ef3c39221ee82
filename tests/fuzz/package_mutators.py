"""Damage to the folder of a package: its manifest, and which files are in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from modelexport.format.package_manifest import MANIFEST
from mutators import JUNK, Random, choose, encoded, mutate_json


def mutate_package(random: Random, folder: Path) -> str:
    """Change the manifest of a package, or which files are in its folder."""
    manifest = folder / MANIFEST
    content = json.loads(manifest.read_text())
    part = choose(random, content["parts"])
    kind = choose(
        random,
        ["json", "json", "text", "fifo", "name", "twice", "order", "part", "mixed", "link", "weights", "gone", "many"],
    )
    match kind:
        case "json":
            content = mutate_json(random, content)
        case "name":
            part[choose(random, ["file", "name", "module"])] = choose(
                random, [*JUNK, "../plain.onnx", "/etc/passwd", MANIFEST]
            )
        case "twice":
            content["parts"].append(part)
        case "order":  # each part takes what one behind it makes
            content["parts"].reverse()
        case "part":
            (folder / part["file"]).unlink()
            if random.random() < 0.5:
                os.mkfifo(folder / part["file"])
        case "mixed":
            other = choose(
                random, ["plain.onnx", "flat.onnx", "attributes.onnx", "package/model.onnx", "old-stages/stage_1.onnx"]
            )
            (folder / part["file"]).write_bytes((folder.parent / other).read_bytes())
        case "link":
            (folder / part["file"]).unlink()
            (folder / part["file"]).symlink_to(choose(random, ["../plain.onnx", "/dev/zero", part["file"], "."]))
        case "weights":
            content["weights"] = choose(
                random, [["../new.safetensors"], ["x" * 5000], [""], ["model.safetensors"] * 2, ["."]]
            )
        case "many":
            key = choose(random, ["parts", "files", "weights"])
            more = [{**part, "name": f"part_{n}"} if key == "parts" else f"{n}.onnx" for n in range(200_000)]
            content[key] = [*content.get(key, []), *more]
        case "gone":
            manifest.unlink()
    if kind == "fifo":
        manifest.unlink()
        os.mkfifo(manifest)
    elif kind == "text":
        manifest.write_text(encoded(random, choose(random, [content, content, [], "x"]))[:200_000])
    elif kind != "gone":
        manifest.write_text(json.dumps(content))
    return kind
