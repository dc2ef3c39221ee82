"""ONNX Runtime sessions for files, for models in memory and for values inside them."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import onnx_ir as ir
import onnxruntime

from modelexport.core.text import error_line, reason_of
from modelexport.errors import FileFormatError, InputsError, RunError, UsageError
from modelexport.files.linked_weights import check_weights_files, names_other_files
from modelexport.files.onnx_models import load_onnx
from modelexport.files.protobuf_writing import to_proto
from modelexport.format import keys
from modelexport.graph.narrow_to_float32 import narrow_values, widened
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.graph.properties import text_of
from modelexport.graph.size_conditions import SizeCondition, check_sizes, conditions_of_formulas
from modelexport.runtime.devices import CPU, Device, add_device, find_device

Level = Literal["all", "extended", "basic", "none"]
_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
T = TypeVar("T")


def begun(work: Callable[[], T]) -> Future[T]:
    """Start some work; its result, or what it raises, is in the future. It does not keep the program from ending."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


NO_KERNEL = "NOT_IMPLEMENTED"
"""ONNX Runtime's message for an operator that it does not implement on this device for the file's types."""
NO_BFLOAT16 = "its interface to Python has no bfloat16"
NO_FALLBACK: dict[str, Any] = {"enable_fallback": 0}
"""By default a session whose device fails is silently opened and run again on the CPU."""
_LARGE = 1024
"""The size in bytes from which a weight is passed to the session instead of written into the model."""
_NO_PREPACKING = "session.disable_prepacking"
_SPINNING = "session.intra_op.allow_spinning"
_ACCURACY_LEVEL_KEY = "session.qdq_matmulnbits_accuracy_level"
"""The ``accuracy_level`` of a ``MatMulNBits`` that the runtime makes of ``DequantizeLinear`` and ``MatMul``: by default
4, activations in 8 bits, although the file says nothing of that."""
_PLACEHOLDER_LOCATION = "weights"
"""The location of weights that are passed to the session, if the model has no external data."""
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


def open_session(
    model: Path | ir.Model,
    *,
    folder: Path | None = None,
    provider: str = CPU,
    optimized: bool = False,
    runs_often: bool = False,
) -> Session:
    """A session for a model.

    Where the runtime has no kernels for the narrow floating-point types of a model in memory, the session computes in
    float32 and rounds every value to its type.

    Args:
        model: A file, or a model in memory.
        optimized: With the runtime's own fusions; without them it runs the nodes of the file one by one.
        folder: The folder of the external data of a model in memory.
        provider: The device (:func:`.devices.find_device`); ONNX Runtime runs on the CPU what it cannot.
        runs_often: Its threads keep processors busy while they wait for work, as is usual. In a session that runs once
            or twice that takes longer than it saves, and keeps PyTorch from the processors.

    Raises:
        UsageError: ONNX Runtime does not have this provider, or cannot load the model.
        FileFormatError: A weights file is missing or has changed: the runtime would read it unchecked.
    """
    try:
        return _open_as_is(model, folder, provider, optimized=optimized, runs_often=runs_often)
    except FileFormatError:
        raise
    except UsageError:
        if not isinstance(model, ir.Model) or model.functions or not (narrow := narrow_values(model)):
            raise
    # The copy still has narrow values, between the casts that round; so it is not widened again if it fails, too.
    session = _open_as_is(widened(model), folder, provider, optimized=optimized, runs_often=runs_often)
    session.narrow = {name: dtype.numpy() for name, dtype in narrow.items()}
    return session


def session_options(level: Level, *devices: str | Device) -> onnxruntime.SessionOptions:
    """The options of a session as users open it on devices, at an optimization level."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = _LEVELS[level]
    options.log_severity_level = 4  # errors are raised anyway, with the same text
    for device in devices:
        add_device(options, find_device(device) if isinstance(device, str) else device)
    return options


def open_file(path: Path, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    """A session for a file."""
    arguments = _safe_arguments(path, options)
    try:
        return onnxruntime.InferenceSession(path, options, **NO_FALLBACK, **arguments)
    except Exception as error:  # its exception types are not public
        raise RunError(f"ONNX Runtime cannot load {path}: {_reason_in(path, error)}") from error


def ends_the_process(model: ir.Model) -> bool:
    """Whether it has what ONNX Runtime 1.31 ends the process on in its last optimizer (``NchwcTransformer``)."""
    for node in all_nodes(model):
        if node.op_type == "MatMul":
            makers = {value.producer() for value in node.inputs if value is not None}
            behind = any(maker is not None and maker.op_type == "Transpose" for maker in makers)
            if behind and any(
                v is not None and v.is_initializer() and v.dtype == ir.DataType.FLOAT16 for v in node.inputs
            ):
                return True
    return False


def _safe_arguments(model: Path | ir.Model, options: onnxruntime.SessionOptions) -> dict[str, Any]:
    """What a session is opened with so that none of the runtime's optimizers ends the process.

    Raises:
        FileFormatError: A weights file is missing, or has changed, which the runtime does not see.
    """
    checks = not isinstance(model, Path) or names_other_files(model)
    optimizes = options.graph_optimization_level == _LEVELS["all"]
    if checks or optimizes:
        with nullcontext() if checks else suppress(FileFormatError):  # of a file that only the runtime reads
            graph = load_onnx(model) if isinstance(model, Path) else model
            if checks:
                check_weights_files(graph)
            if optimizes and ends_the_process(graph):
                return {"disabled_optimizers": ["NchwcTransformer"]}
    return {}


def _open_as_is(
    model: Path | ir.Model, folder: Path | None, provider: str, *, optimized: bool, runs_often: bool
) -> Session:
    """A session that computes in the types of the model."""
    options = session_options("all" if optimized else "none", provider)
    if not optimized:
        # Such a session runs once or twice: prepacking weights would take longer than it saves.
        options.add_session_config_entry(_NO_PREPACKING, "1")
    if not runs_often:
        options.add_session_config_entry(_SPINNING, "0")
    options.add_session_config_entry(_ACCURACY_LEVEL_KEY, "0")
    arguments = _safe_arguments(model, options)
    try:
        if isinstance(model, Path):
            session = Session(model, options, **NO_FALLBACK, **arguments)
        else:
            shared = find_device(provider).provider == CPU and not optimized
            session = _open_in_memory(model, folder, options, shared=shared, **arguments)
        if any("bfloat16" in value.type for value in (*session.get_inputs(), *session.get_outputs())):
            raise TypeError(f"{NO_BFLOAT16}, of which an input or an output is")
    except UsageError:  # of its weights files
        raise
    except Exception as error:  # its exception types are not public
        raise RunError(f"ONNX Runtime cannot load the model: {_reason_in(model, error)}") from error
    session.source = model
    return session


def _reason_in(model: Path | ir.Model | None, error: BaseException) -> str:
    """The runtime's message, with the call and the line of code of the node that it names."""
    text = reason_of(error)
    if model is not None and (named := _NAMED_NODE.search(text)):
        with suppress(Exception):  # the message alone is right, too
            graph = load_onnx(model) if isinstance(model, Path) else model
            node = next(node for node in all_nodes(graph) if node.name == (named[1] or named[2]))
            owner = owner_of(node)
            call = text_of(node, keys.CALL) if owner is None else owner.call.address
            line = text_of(node, keys.LINE) if owner is None else owner.line
            if call is not None:
                return f"{text} (the node is of {', '.join(filter(None, [call or 'the root', line]))})"
    return text


_NAMED_NODE = re.compile(r"Name:'([^']+)'|[Nn]ode ?\(([^)]+)\)")
"""How the runtime names a node that fails, and one that it cannot load."""


def _open_in_memory(
    model: ir.Model, folder: Path | None, options: onnxruntime.SessionOptions, *, shared: bool, **arguments: Any
) -> Session:
    """A session for a model in memory, to which its large weights are passed.

    Args:
        folder: The folder of the external data.
        shared: The runtime uses the floating-point weights where they are. Its optimizer would read them from their
            file, and another device than the CPU needs copies.
        arguments: Others of the session.
    """
    external = (v.const_value.location for v in initializers(model) if isinstance(v.const_value, ir.ExternalTensor))
    place = str(next(external, ""))
    held: list[object] = []
    apart: dict[str, Any] = {}
    left_out: dict[ir.Value, ir.TensorProtocol] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        # The runtime drops unused initializers, and those that are inputs have to be in the model.
        if tensor is None or isinstance(tensor, ir.ExternalTensor) or not value.uses() or value.is_graph_input():
            continue
        if tensor.nbytes < _LARGE or tensor.dtype.numpy().isbuiltin != 1:  # it takes no other types from NumPy
            continue
        name, shape = value.name or "", ir.Shape(tensor.shape.numpy())
        array = tensor.numpy()
        weight = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        held += [array, weight]
        if shared and tensor.dtype.is_floating_point():
            options.add_initializer(name, weight)
        else:
            apart[name] = weight
        # The file has to exist and is not read.
        left_out[value] = ir.ExternalTensor(
            place or _PLACEHOLDER_LOCATION, 0, tensor.nbytes, tensor.dtype, shape=shape, name=name
        )
    source = to_proto(model, left_out).SerializeToString()
    options.add_external_initializers(list(apart), list(apart.values()))
    with tempfile.TemporaryDirectory(prefix="modelexport-") as empty:
        if left_out and not place:
            folder = Path(empty)
            (folder / _PLACEHOLDER_LOCATION).touch()
        if folder is not None:
            options.add_session_config_entry(_EXTERNAL_FOLDER, str(folder.absolute()))
        session = Session(source, options, **NO_FALLBACK, **arguments)
    session.weights = held
    return session


class Session(onnxruntime.InferenceSession):
    """A session that keeps references to the weights that it was given: the runtime reads them without a copy."""

    source: Path | ir.Model | None = None
    """What it was opened for."""
    weights: Sequence[object] = ()
    narrow: Mapping[str, Any] = MappingProxyType({})
    """The values that it computes in float32 to NumPy's types for them."""

    def run(self, names: Any, feeds: Mapping[str, Any], options: Any = None) -> Any:
        """Run it; what goes in and comes out has the types of the model."""
        if not self.narrow:
            return super().run(names, feeds, options)
        wide = {name: array.astype(np.float32) if name in self.narrow else array for name, array in feeds.items()}
        results = zip(names, super().run(names, wide, options), strict=True)
        return [array.astype(self.narrow[name]) if name in self.narrow else array for name, array in results]

    @cached_property
    def _conditions(self) -> Sequence[SizeCondition]:
        formulas = self.get_modelmeta().custom_metadata_map.get(keys.VALID_IF, "[]")
        with suppress(msgspec.DecodeError):
            return conditions_of_formulas(msgspec.json.decode(formulas, type=list[str]))
        return []

    def check_sizes(self, feeds: Mapping[str, Any]) -> None:
        """Refuse inputs with sizes that the conditions of the model exclude."""
        if self._conditions:
            shapes = {value.name: value.shape for value in self.get_inputs()}
            pairs = [zip(shapes[name], np.shape(array), strict=False) for name, array in feeds.items()]
            sizes = {symbol: size for pair in pairs for symbol, size in pair if isinstance(symbol, str)}
            check_sizes(self._conditions, sizes)


def input_names(session: onnxruntime.InferenceSession) -> list[str]:
    """The names of a session's inputs, in order."""
    return [value.name for value in session.get_inputs()]


def run_session(session: onnxruntime.InferenceSession, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run a session, in a thread of its own; returns output names to arrays.

    Python handles signals in the main thread, between two of its own instructions, so that thread must not be inside
    of the runtime: a graph may loop for hours.

    Raises:
        RunError: The inputs do not have the model's names, types or shapes, or a node fails.
        UsageError: They have sizes that the conditions of the model exclude.
    """
    if isinstance(session, Session):
        session.check_sizes(feeds)
    names, options = [output.name for output in session.get_outputs()], onnxruntime.RunOptions()
    running = begun(lambda: session.run(names, dict(feeds), options))
    try:
        return dict(zip(names, running.result(), strict=True))
    except Exception as error:  # its exception types are not public
        model = session.source if isinstance(session, Session) else None
        raise RunError(f"ONNX Runtime cannot run the model: {_reason_in(model, error)}") from error
    finally:
        if not running.done():
            options.terminate = True  # is seen between two nodes
            wait([running], _SECONDS_TO_END)


def array_of_input(name: str, value: Any) -> Any:
    """A value for an input as an array."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputsError(f"NumPy cannot read {name} ({error_line(error)}): give an array") from error


def arrays_in(results: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays in the results of a run: those of a sequence by position, of a map its keys and its values."""
    arrays: dict[str, Any] = {}
    for name, result in results.items():
        if isinstance(result, list):
            arrays |= arrays_in({f"{name}[{position}]": part for position, part in enumerate(result)})
        elif isinstance(result, dict):
            keys = sorted(result)
            arrays |= {f"{name}.keys": np.array(keys), f"{name}.values": np.array([result[key] for key in keys])}
        else:
            arrays[name] = result
    return arrays


_SECONDS_TO_END = 5
"""How long a run that was told to end is waited for: the runtime should not be torn down under it."""
