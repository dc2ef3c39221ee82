"""ONNX Runtime sessions for files, for models in memory and for values inside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from modelexport.errors import UsageError
from modelexport.files.linked import check_tensors, check_weight_files
from modelexport.files.serializing import to_proto
from modelexport.graph.copies import copy_of
from modelexport.graph.nodes import initializers
from modelexport.graph.widening import narrow_values, widened

CPU = "CPUExecutionProvider"
_LARGE = 1024
"""The size in bytes from which a weight is passed to the session instead of written into the model."""
_NO_PREPACKING = "session.disable_prepacking"
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


def open_session(
    model: Path | ir.Model, *, folder: Path | None = None, provider: str = CPU, optimized: bool = False
) -> Session:
    """A session for a model.

    Where the runtime has no kernels for the narrow floating-point types of a model in memory, the session computes in
    float32 and rounds every value to its type.

    Args:
        model: A file, or a model in memory.
        optimized: With the runtime's own fusions; without them it runs the nodes of the file one by one.
        folder: The folder of the external data of a model in memory.
        provider: The execution provider; ONNX Runtime runs on the CPU what the provider cannot.

    Raises:
        UsageError: ONNX Runtime does not have this provider, or cannot load the model.
        FileFormatError: A weights file is missing or has changed: the runtime would read it unchecked.
    """
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise UsageError(f"this ONNX Runtime does not have {provider}: it has {', '.join(available)}")
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Such a session runs once or twice: prepacking weights would take longer than it saves.
        options.add_session_config_entry(_NO_PREPACKING, "1")
    options.log_severity_level = 4  # errors are raised anyway, with the same text
    if folder is not None:
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(folder.absolute()))
    weights: dict[str, ir.TensorProtocol] = {}
    if isinstance(model, Path):
        check_weight_files(model)
        source: Path | bytes = model
    else:
        check_tensors([value.const_value for value in initializers(model)])
        source = _without_weights(model, weights)
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays.values()]
    options.add_external_initializers(list(arrays), values)
    try:
        runs = Session(source, options, providers=[provider])
    except Exception as error:  # its exception types are not public
        if isinstance(model, ir.Model) and not model.functions and (narrow := narrow_values(model)):
            runs = open_session(widened(model), folder=folder, provider=provider, optimized=optimized)
            runs.narrow = {name: dtype.numpy() for name, dtype in narrow.items()}
            return runs
        raise UsageError(f"ONNX Runtime cannot load the model: {' '.join(str(error).split())[:600]}") from error
    runs.weights = [*arrays.values(), *values]
    return runs


class Session(onnxruntime.InferenceSession):
    """A session that keeps references to the weights that it was given: the runtime reads them without a copy."""

    weights: Sequence[object] = ()
    narrow: Mapping[str, Any] = MappingProxyType({})
    """The values that it computes in float32 to NumPy's types for them."""

    def run(self, names: Any, feeds: Mapping[str, Any], options: Any = None) -> Any:
        """Run it; what goes in and comes out has the types of the model."""
        if not self.narrow:
            return super().run(names, feeds, options)
        given = {name: array.astype(np.float32) if name in self.narrow else array for name, array in feeds.items()}
        found = super().run(names, given, options)
        types = (self.narrow.get(name) for name in names)
        return [array if dtype is None else array.astype(dtype) for array, dtype in zip(found, types, strict=True)]


def _without_weights(model: ir.Model, weights: dict[str, ir.TensorProtocol]) -> bytes:
    """Serialize a model in memory without its large weights, which are put into ``weights``."""
    left: dict[ir.Value, ir.TensorProtocol] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < _LARGE:
            continue
        # The runtime drops unused initializers, and those that are inputs have to be in the model.
        if not value.uses() or value.is_graph_input():
            continue
        if tensor.dtype.numpy().isbuiltin == 1:  # the runtime accepts no other types from NumPy
            name, shape = value.name or "", ir.Shape(tensor.shape.numpy())
            weights[name] = tensor
            left[value] = ir.ExternalTensor("weights", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
    source: bytes = to_proto(model, left).SerializeToString()
    return source


def with_outputs(model: ir.Model, values: Sequence[ir.Value]) -> ir.Model:
    """A copy of a model, sharing its tensors, whose only outputs are these values of its main graph."""
    names = [value.name for value in values]
    copy = copy_of(model)
    by_name = {value.name: value for node in copy.graph for value in node.outputs}
    by_name.update((value.name, value) for value in copy.graph.inputs)
    copy.graph.outputs.clear()
    copy.graph.outputs.extend(by_name[name] for name in names)
    return copy


def split_batches(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Split names, in order, into lists of at most ``limit`` bytes in total; a larger name is a list of its own."""
    batch: list[str] = []
    total = 0
    for name, size in sizes.items():
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch


def input_names(model: onnxruntime.InferenceSession) -> list[str]:
    """The names of a session's inputs, in order."""
    return [value.name for value in model.get_inputs()]


def run_session(model: onnxruntime.InferenceSession, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run a session; returns output names to arrays.

    Raises:
        UsageError: The inputs do not have the model's names, types or shapes, or a node fails.
    """
    names = [output.name for output in model.get_outputs()]
    try:
        arrays = _interruptible(model, names, dict(feeds))
    except Exception as error:  # its exception types are not public
        raise UsageError(f"ONNX Runtime cannot run the model: {' '.join(str(error).split())[:600]}") from error
    return dict(zip(names, arrays, strict=True))


def _interruptible(model: onnxruntime.InferenceSession, names: Sequence[str], feeds: dict[str, Any]) -> Any:
    """Run a session; a signal ends the run.

    Python handles signals in the main thread, between two of its own instructions, so that thread must not be inside
    of the runtime: a graph may loop for hours.
    """
    if threading.current_thread() is not threading.main_thread():
        return model.run(names, feeds)
    options, done = onnxruntime.RunOptions(), Future[Any]()

    def work() -> None:
        try:
            done.set_result(model.run(names, feeds, options))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        return done.result()
    except BaseException:
        options.terminate = True  # is seen between two nodes
        raise
    finally:
        thread.join(_SECONDS_TO_END)


_SECONDS_TO_END = 5
"""How long a run that was told to end is waited for: the runtime should not be torn down under it."""
