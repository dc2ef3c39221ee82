"""The pictures in docs/images, taken of what the program writes: python tests/pictures.py FILE.onnx PACKAGE/

FILE.onnx has reference values beside it. A picture of Model Explorer needs it installed (test_explorer.py).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from browser import browser

IMAGES = Path(__file__).parent.parent / "docs" / "images"


def run(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "modelexport", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def main(file: Path, package: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as window:
        page, parts = Path(folder) / "report.html", Path(folder) / "parts.html"
        run("report", file, "-o", page, "--profile")
        run("profile", package, "--html", parts)
        window.open(page)
        # Its column of nodes shows something.
        window.click('#tree [data-address="encoder.layer.0"]')
        for name in ("light", "dark"):
            if window.run("return document.documentElement.classList.contains('dark')") is not (name == "dark"):
                window.click("#theme")
            window.picture(IMAGES / f"report-{name}.png")
        window.open(parts)
        window.type("#part", "decode")
        window.picture(IMAGES / "package.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
