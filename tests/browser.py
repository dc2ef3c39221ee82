"""Headless Chromium, driven over the WebDriver protocol: enough to click, type, read the page and its console."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "needs Chromium and its driver: apt-get install chromium chromium-driver"
"""Why no browser can be used on this machine; empty if one can."""


KEYS = {
    "Backspace": "\ue003", "Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "ArrowLeft": "\ue012",
    "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015",
}  # fmt: skip
"""Names of keys to what the WebDriver protocol calls them."""


class Browser:
    """One window."""

    def __init__(self, address: str, *drawing: str) -> None:
        self._address = address
        drawing = drawing or ("--disable-gpu",)
        options = {"args": ["--headless=new", "--no-sandbox", *drawing, "--window-size=1300,1000"]}
        asked = {
            "browserName": "chrome",
            "goog:chromeOptions": options | {"binary": CHROMIUM},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._session = f"/session/{answer['sessionId']}"

    def open(self, page: Path | str) -> None:
        """Open a file or an address."""
        self._call("POST", f"{self._session}/url", {"url": page if isinstance(page, str) else page.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script and return its result."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """Click the first element of a CSS selector, as a user does or, for drawings, by an event."""
        assert self.run(
            "const e = document.querySelector(arguments[0]); if (!e) return false;"
            "e.dispatchEvent(new MouseEvent('click', {bubbles: true})); return true;",
            selector,
        ), f"no element matches {selector}"

    def type(self, selector: str, text: str) -> None:
        """Type a text into an input."""
        self.run(
            "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change'));",
            selector,
            text,
        )

    def press(self, *keys: str) -> None:
        """Press keys one after the other, as a user does: letters, and names such as ``ArrowDown``."""
        codes = [KEYS.get(key, key) for key in keys]
        steps = [{"type": kind, "value": code} for code in codes for kind in ("keyDown", "keyUp")]
        self._call("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def texts(self, selector: str) -> list[str]:
        texts_of_elements: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
        )
        return texts_of_elements

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def complaints(self) -> list[str]:
        """The messages written to the console."""
        return [entry["message"] for entry in self._log("browser")]

    def requests(self) -> list[str]:
        """The requested URLs, of files and of the network."""
        messages = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def resize(self, width: int, height: int) -> None:
        """Give the page this size, smaller than a window may be too: that of a phone."""
        what = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._emulate("setDeviceMetricsOverride", what)

    def on_paper(self, printed: bool) -> None:
        """Show the page as it is printed, or as on a screen."""
        self._emulate("setEmulatedMedia", {"media": "print" if printed else "screen"})

    def _emulate(self, what: str, parameters: dict[str, Any]) -> None:
        command = {"cmd": f"Emulation.{what}", "params": parameters}
        self._call("POST", f"{self._session}/goog/cdp/execute", command)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", f"{self._session}/screenshot")))

    def close(self) -> None:
        self._call("DELETE", self._session)

    def _log(self, kind: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._call("POST", f"{self._session}/se/log", {"type": kind})
        return entries

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:  # the driver says in it what the page's script raised
            raise AssertionError(json.load(error)["value"]["message"].partition("\n")[0]) from None


@contextmanager
def browser(*drawing: str) -> Iterator[Browser]:
    """A browser of its own, ended whatever happens.

    Args:
        drawing: Chromium's options about drawing, for pages that need WebGL.
    """
    assert DRIVER is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            window = Browser(f"http://127.0.0.1:{port}", *drawing)
            try:
                yield window
            finally:
                window.close()
        finally:
            driver.terminate()
