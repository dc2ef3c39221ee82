"""Devices: the providers of ONNX Runtime with their options, under one short name each, built in or plugged in.

A vendor's plug-in is a wheel with ``get_library_path()`` and ``get_ep_names()``; those that are installed are found.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import pkgutil
import platform
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import onnxruntime

from modelexport.core.text import reason_of, suggest
from modelexport.errors import UsageError
from modelexport.runtime import CPU as CPU  # noqa: PLC0414 - others know it from here
from modelexport.runtime.saturating_products import saturates_here

THROUGH = " through "
"""The word between a device and the command that reaches it: ``cpu through ssh board``."""
_END = "ExecutionProvider"
_PREFIX = "onnxruntime_"
"""How the names of packages of plug-ins begin."""


class _Vendor(NamedTuple):
    """What is known about a provider before it is installed."""

    wheel: str
    """The package that contains it."""
    runs: str
    options: tuple[str, ...] = ()
    """The options that matter."""
    computes: str = "float32"
    """The type in which it computes what a file has in float32, unless an option says otherwise."""
    by_node: bool = False
    """Whether ONNX Runtime runs it node by node, so that modules can be timed."""


KNOWN_DEVICES: Mapping[str, _Vendor] = {
    "cpu": _Vendor("onnxruntime", "every operator, on the CPU", by_node=True),
    "cuda": _Vendor(
        "onnxruntime-gpu", "float32, float16 and int8 on NVIDIA's GPUs", ("device_id", "use_tf32"), by_node=True
    ),
    "tensorrt": _Vendor(
        "onnxruntime-gpu", "engines for NVIDIA's GPUs", ("device_id", "trt_fp16_enable", "trt_engine_cache_enable")
    ),
    "migraphx": _Vendor("onnxruntime-migraphx", "float32 and float16 on AMD's GPUs", ("device_id",)),
    "openvino": _Vendor(
        "onnxruntime-openvino", "Intel's processors, GPUs and NPUs", ("device_type", "num_of_threads", "cache_dir")
    ),
    "qnn": _Vendor(
        "onnxruntime-qnn",
        "float16 and quantized models on Qualcomm's NPUs; on x86 a simulator of one",
        ("backend_path", "soc_model", "enable_htp_fp16_precision", "htp_performance_mode", "profiling_level"),
        "float16",
    ),
    "dml": _Vendor("onnxruntime-directml", "DirectX 12 on Windows", ("device_id",), by_node=True),
    "webgpu": _Vendor("onnxruntime-ep-webgpu", "GPUs through WebGPU", ("preferredLayout",), by_node=True),
    "coreml": _Vendor(
        "onnxruntime", "Apple's GPUs and Neural Engine, on macOS", ("MLComputeUnits", "ModelFormat"), "float16"
    ),
    "xnnpack": _Vendor(
        "onnxruntime", "float32 on ARM and x86, where it is built in", ("intra_op_num_threads",), by_node=True
    ),
    "nnapi": _Vendor("onnxruntime-android", "Android's accelerators"),
    "vitisai": _Vendor("onnxruntime-vitisai", "quantized models on AMD's NPUs", ("config_file", "cache_dir")),
}
"""Short names to vendors. A provider that is not listed has a short name all the same (:func:`short_name`)."""
_SERVICES = {"AzureExecutionProvider"}
"""Providers that send inputs to a service: no device."""
_OFF = {"enable_htp_fp16_precision": "0"}
"""Options that, with this value, stop a device from computing in float16."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A provider of ONNX Runtime with its options."""

    name: str
    """Its short name."""
    asked: str = ""
    """How it was named: ``NAME[,option=value...]``."""
    provider: str
    options: dict[str, str] = {}
    library: str | None = None
    """The library of a plug-in."""
    version: str = ""
    """The package that brings it, with its version."""
    computes: str = "float32"
    simulated: bool = False
    through: tuple[str, ...] = ()
    """The command in front of the Python that runs it, on another machine, in a container or in an emulator."""
    compiles: bool = False
    """Whether it compiles many nodes into one, so that ONNX Runtime has no times of nodes."""

    def __str__(self) -> str:
        return self.asked or self.name

    @property
    def is_this_processor(self) -> bool:
        """Whether it is the processor that this process runs on."""
        return self.provider == CPU and not self.through


class FoundDevice(msgspec.Struct, frozen=True):
    """A device of this machine, or a reason why one cannot be used."""

    name: str
    provider: str
    package: str
    """The package that brings it, with its version."""
    runs: str
    """What it can run."""
    options: list[str]
    """The options that matter; with ``=``, what a value is if none is given."""
    unavailable: str = ""
    saturates: bool = False
    """Whether it computes some products of uint8 with int8 weights wrong (:mod:`.saturating_products`)."""


def short_name(provider: str) -> str:
    """``qnn`` for ``QNNExecutionProvider``."""
    return provider.removesuffix(_END).lower()


def find_devices() -> list[FoundDevice]:
    """The devices that this machine has: built into ONNX Runtime, or of plug-ins that are installed."""
    devices = []
    for name, provider in {**_built_in(), **{name: provider for name, (provider, _) in _plug_ins().items()}}.items():
        vendor, reason = KNOWN_DEVICES.get(name, _Vendor("", "")), ""
        try:
            device = find_device(name)
        except UsageError as error:
            device, reason = Device(name=name, provider=provider), str(error)
        listed = [*vendor.options, *(key for key in device.options if key not in vendor.options)]
        shown = [f"{key}={device.options[key]}" if key in device.options else key for key in listed]
        saturates = provider == CPU and saturates_here()
        devices.append(FoundDevice(name, provider, device.version, vendor.runs, shown, reason, saturates))
    return devices


@cache
def find_device(text: str, limit: float = math.inf) -> Device:
    """The device that ``NAME[,option=value...]`` names; NAME is a short name or a provider's own.

    Args:
        limit: Seconds that a command in front of it may take to begin, if they are fewer than a minute.
    """
    text, through, command = text.partition(THROUGH)
    if through:
        return _behind(text, _words(command), limit)
    name, *pairs = (part.strip() for part in text.split(","))
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise UsageError(f"'{wrong[0]}' in the device '{text}' is not an option: write NAME,option=value")
    options_asked = dict(pair.split("=", 1) for pair in pairs)
    typed, name, built_in, plugged = name, short_name(name), _built_in(), _plug_ins()
    if name in plugged:
        provider, package = plugged[name]
        library: str | None = str(package.get_library_path())
        _register(provider, str(library))
        version, options = _version(package.__name__), _defaults(name, package)
    elif name in built_in:
        provider, library, options = built_in[name], None, {}
        version = f"onnxruntime {onnxruntime.__version__}"
    else:
        raise UsageError(_missing(typed, name, [*built_in, *plugged]))
    if unknown := [key for key in options_asked if not _takes(provider, library, key)]:
        known = KNOWN_DEVICES[name].options if name in KNOWN_DEVICES else ()
        options_known = f"; it has {', '.join(known)}" if known else ""
        raise UsageError(f"the device {name} has no option '{unknown[0]}'{suggest(unknown[0], known)}{options_known}")
    options |= options_asked
    return Device(
        name=name,
        asked=",".join([name, *pairs]),
        provider=provider,
        options=options,
        library=library,
        version=version,
        computes=_computes(name, options),
        simulated=name == "qnn" and _is_x86(),
        compiles=name not in KNOWN_DEVICES or not KNOWN_DEVICES[name].by_node,
    )


def _words(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"--through {command}: {error}; write it as a shell takes it") from error
    if not words or not words[0]:
        raise UsageError("--through is empty: give a command, such as 'ssh board'")
    return words


def _behind(text: str, command: tuple[str, ...], limit: float) -> Device:
    """A device of the ONNX Runtime behind a command."""
    from modelexport.runtime.runner_commands import facts_behind

    name, *pairs = (part.strip() for part in text.split(","))
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise UsageError(f"'{wrong[0]}' in the device '{text}' is not an option: write NAME,option=value")
    facts = facts_behind(command, limit)
    there = {short_name(provider): provider for provider in facts.providers if provider not in _SERVICES}
    name = short_name(name)
    if name not in there:
        raise UsageError(
            f"`{shlex.join(command)}` has no device {name}{suggest(name, there)}; it has {', '.join(there)} "
            f"(onnxruntime {facts.onnxruntime})"
        )
    options = dict(pair.split("=", 1) for pair in pairs)
    return Device(
        name=name,
        asked=f"{text}{THROUGH}{shlex.join(command)}",
        provider=there[name],
        options=options,
        version=f"onnxruntime {facts.onnxruntime} on {facts.platform}",
        computes=_computes(name, options),
        through=command,
        compiles=True,  # what runs there is a part of its own, not a session here
    )


def described(device: Device) -> Device:
    """A device of another machine, of which only the provider and its options are known, with its short name."""
    name = short_name(device.provider)
    return msgspec.structs.replace(device, name=name, computes=_computes(name, device.options))


def plugged_in(provider: str, library: Path) -> Device:
    """A device of a plug-in's library, which need not be a package."""
    _register(provider, str(library))
    return Device(name=short_name(provider), provider=provider, library=str(library))


def add_device(options: onnxruntime.SessionOptions, device: Device) -> None:
    """Make the sessions with these options run on a device; the CPU gets what the device cannot run."""
    if device.library is None:
        options.add_provider(device.provider, device.options)
    else:
        devices = [part for part in onnxruntime.get_ep_devices() if part.ep_name == device.provider]
        options.add_provider_for_devices(devices[:1], device.options)


def _computes(name: str, options: Mapping[str, str]) -> str:
    off = any(options.get(key) == value for key, value in _OFF.items())
    return KNOWN_DEVICES[name].computes if name in KNOWN_DEVICES and not off else "float32"


def _built_in() -> dict[str, str]:
    """Short names of the providers that this ONNX Runtime was built with, to their own names; the CPU first."""
    names = reversed(onnxruntime.get_available_providers())
    return {short_name(provider): provider for provider in names if provider not in _SERVICES}


@cache
def _plug_ins() -> dict[str, tuple[str, ModuleType]]:
    """Short names of the providers of installed plug-ins, to their own names and the packages."""
    plug_ins = {}
    for module in pkgutil.iter_modules():
        if not module.name.startswith(_PREFIX):
            continue
        spec = importlib.util.find_spec(module.name)
        source = Path(spec.origin) if spec is not None and spec.origin else None
        if source is None or source.suffix != ".py" or b"def get_library_path" not in source.read_bytes():
            continue  # importing it would have effects, and it is not a plug-in
        package = importlib.import_module(module.name)
        names = package.get_ep_names() if hasattr(package, "get_ep_names") else [package.get_ep_name()]
        plug_ins.update({short_name(provider): (provider, package) for provider in names})
    return plug_ins


@cache
def _register(provider: str, library: str) -> None:
    """Load a plug-in."""
    if provider not in (device.ep_name for device in onnxruntime.get_ep_devices()):
        try:
            onnxruntime.register_execution_provider_library(provider, library)
        except Exception as error:  # its exception types are not public
            raise UsageError(f"{library} cannot be loaded as the provider {provider}: {reason_of(error)}") from error
    if provider not in (device.ep_name for device in onnxruntime.get_ep_devices()):
        raise UsageError(f"the plug-in {library} is installed, but offers no device on this machine")


def _defaults(name: str, package: Any) -> dict[str, str]:
    """The options without which a plug-in does not run models of floating-point numbers."""
    if name != "qnn":
        return {}
    simulator = {"soc_model": "60"} if _is_x86() else {}
    return {"backend_path": str(package.get_qnn_htp_path()), "enable_htp_fp16_precision": "1"} | simulator


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _takes(provider: str, library: str | None, option: str) -> bool:
    """Whether a provider knows an option: plug-ins ignore others, and the name is in the library of one that does not.

    Providers that are built in refuse others themselves, but for the CPU, which has none.
    """
    return provider != CPU if library is None else option.encode() in Path(library).read_bytes()


def _version(module: str) -> str:
    name = module.replace("_", "-")
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return name


def _missing(typed: str, name: str, there: list[str]) -> str:
    everything = {short_name(provider): provider for provider in onnxruntime.get_all_providers()}
    has = f"this machine has {', '.join(dict.fromkeys(there))}"
    if name not in KNOWN_DEVICES and name not in everything:
        return f"there is no device '{typed}'{suggest(name, {*KNOWN_DEVICES, *everything})}; {has}"
    wheel = KNOWN_DEVICES[name].wheel if name in KNOWN_DEVICES else ""
    if wheel in ("", "onnxruntime"):
        return f"this ONNX Runtime is built without the device {name}; {has}"
    return f"the device {name} needs the package {wheel}: pip install {wheel}; {has}"
