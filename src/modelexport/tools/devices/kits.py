"""``kit``: a folder that runs the modules of a file on a machine without modelexport, and its results read back."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from modelexport.core.json_decoding import decode_json
from modelexport.core.limits import SETTINGS_BYTES
from modelexport.core.result_display import Written
from modelexport.core.text import on_one_line, shortened
from modelexport.core.timed_stages import with_progress
from modelexport.errors import FileFormatError, UsageError
from modelexport.files.linked_weights import data_files
from modelexport.files.output_folders import check_output_folder
from modelexport.files.path_or_model import Source
from modelexport.files.regular_files import read_regular
from modelexport.runtime import runner
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.runtime.devices import CPU, Device, described
from modelexport.runtime.runner_process import RunnerResult, write_for_runner
from modelexport.tagged.file import TaggedFile, as_tagged, read_tagged
from modelexport.tools.devices.device_check import check
from modelexport.tools.devices.device_regions import ReferenceRegion, RegionCutter
from modelexport.tools.devices.device_report import DeviceReport
from modelexport.tools.devices.judged_regions import NoResultError
from modelexport.traces.inputs_and_example_sizes import make_feeds
from modelexport.traces.tolerances import ON_A_DEVICE, check_bound

_RUNNERS = {"runner.py": Path(runner.__file__)}
_RUNNERS |= {name: Path(__file__).with_name(name) for name in ("runner.mjs", "index.html")}
_AGAIN = "run the runner of the kit again"
_OF_OTHERS = "was made from another file or with other inputs: run a kit of this file, or give its --inputs"


class KitOf(msgspec.Struct, frozen=True):
    """What a kit was made from."""

    file: str
    digest: str
    """SHA-256 of the file, of its weights files and of the inputs."""
    seed: int


class Kit(Written, msgspec.Struct, frozen=True):
    """A kit that was written."""

    path: str
    parts: list[str]
    """The addresses of the calls; ``.`` is the whole."""
    skipped: list[str]
    """Calls that cannot be cut out, or depend on no input."""


class KitResults(msgspec.Struct, frozen=True):
    """What the runner of a kit wrote."""

    kit: KitOf
    device: Device
    parts: dict[str, RunnerResult]


def write_kit(
    file: Source,
    output: Path,
    *,
    modules: Sequence[str] = (),
    inputs: Mapping[str, Any] | Path | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda step: None,
) -> Kit:
    """Write the parts of a file, their inputs and right outputs, and runners for Python, Node and browsers.

    Args:
        modules: Selectors of the calls that become parts, beside the whole; by default all.
        inputs, seed: As :func:`.device_verification.verify_on_device` has them.
    """
    check_output_folder(output)
    tagged = read_tagged(file)
    calls = tagged.select(*modules).calls if modules else [traced.call for traced in tagged.calls]
    feeds, _ = make_feeds(tagged, tagged.path, inputs, {}, provider=CPU, seed=seed)
    regions, parts, skipped = RegionCutter(tagged, feeds), [], list[str]()
    with checked_and_written(output, [tagged.path], make=True, check=False) as staging:
        (staging / "values").mkdir()
        seen = {tagged.nodes}
        parts.append(_write(regions.whole(), staging, 0))
        for call in with_progress(calls):
            tell(str(call))
            try:
                region = regions.of_call(call)
            except UsageError:
                region = None
            if region is None:
                skipped += [str(call)] if call.path else []
            elif region.nodes not in seen:  # else a call inside it is all of it
                seen.add(region.nodes)
                parts.append(_write(region, staging, len(parts)))
        made_from = KitOf(tagged.path.name, _digest(tagged, feeds), seed)
        kit = {"kit": made_from, "parts": parts}
        (staging / "kit.json").write_bytes(msgspec.json.format(msgspec.json.encode(kit), indent=1))
        for name, source in _RUNNERS.items():
            shutil.copyfile(source, staging / name)
    return Kit(str(output), [part["name"] for part in parts], skipped)


def verify_results(
    file: Source | TaggedFile,
    results: str | Path,
    *,
    inputs: Mapping[str, Any] | str | Path | None = None,
    bound: float = ON_A_DEVICE,
) -> DeviceReport:
    """The report of a file on a device where its kit was run.

    Raises:
        FileFormatError: The results cannot be read, or are of a kit of another file.
        UsageError: As :func:`.device_verification.verify_on_device`.
    """
    check_bound(bound)
    content = read_regular(Path(results), SETTINGS_BYTES)
    damaged = f"{results} is not a file of results"
    read = decode_json(content, kind=KitResults, damaged=damaged, then=_AGAIN)
    if not re.fullmatch(r"\w+", read.device.provider):
        raise FileFormatError(f"{damaged} (it has no name of a provider): {_AGAIN}")
    tagged = as_tagged(file)
    feeds, source = make_feeds(tagged, tagged.path, inputs, {}, provider=CPU, seed=read.kit.seed)
    if _digest(tagged, feeds) != read.kit.digest:
        raise FileFormatError(f"the kit of {results} {_OF_OTHERS}")
    return check(RegionCutter(tagged, feeds), _ResultsOfKit(read), inputs=source, bound=bound)


class _ResultsOfKit:
    """A device on which the parts of a kit were run, and nothing else can be."""

    runs_any_region = False
    measured = 0

    def __init__(self, results: KitResults) -> None:
        self.device, self._parts = described(results.device), results.parts

    def run(self, region: ReferenceRegion, *, log: bool = False) -> RunnerResult:
        """The result of a part."""
        part = region.name if region.name != "." else "the whole file"
        if (result := self._parts.get(region.name)) is None:
            raise NoResultError(f"the results have nothing of {part}: {_AGAIN}, to its end")
        if result.status == "ran" and not result.is_of(region.outputs):
            raise FileFormatError(f"the results of {part} are damaged: {_AGAIN}")
        return msgspec.structs.replace(result, message=shortened(on_one_line(result.message), 600))


def _write(region: ReferenceRegion, folder: Path, number: int) -> dict[str, Any]:
    how = {"name": region.name, "stem": f"part{number}", "values": "values"}
    return write_for_runner(region.model, region.inputs, region.outputs, folder, **how)


def _digest(tagged: TaggedFile, feeds: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for path in (tagged.path, *data_files(tagged.path)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    for name, array in sorted(feeds.items()):
        digest.update(name.encode() + str(array.dtype).encode() + array.tobytes())
    return digest.hexdigest()
