"""``optimize``: run another package's tool on a tagged file, and restore the tags. A tool is a row in ``TOOLS``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import onnx

from modelexport.core.collected_messages import collected
from modelexport.core.limits import CHECKED_BYTES
from modelexport.core.missing_extras import missing_extra
from modelexport.core.text import first_few, reason_of, suggest
from modelexport.errors import FileFormatError, ModelExportError, NotWrittenError, UsageError
from modelexport.files.atomic_writing import NO_ROOM, check_space, scratch
from modelexport.files.linked_weights import check_weights_files, data_files
from modelexport.files.path_or_model import Source, as_path
from modelexport.files.replaceable_files import check_writable
from modelexport.lineage.retagging import RetagReport, retag
from modelexport.runtime.devices import CPU
from modelexport.runtime.half_precision import in_half_precision
from modelexport.runtime.products_for_quantizers import transpose_weights
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.saturating_products import without_saturation
from modelexport.runtime.sessions import Level, open_session, session_options
from modelexport.runtime.varied_inputs import varied_inputs
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.strip_and_inline import flat_file
from modelexport.traces.array_differences import Difference, worst
from modelexport.traces.outputs_of_two_files import Rounding, compare_sessions, narrowest_type
from modelexport.traces.reference_values import open_reference, reference_path

Inputs = Callable[[], Mapping[str, Any]]
"""Returns example inputs, for the tools that run the file."""


@dataclass(frozen=True)
class Optimizer:
    """A tool of another package."""

    run: Callable[[Path, Path, Inputs], None]
    """Called with the file to read, the file to write, and a function that returns inputs."""
    what: str
    package: str = "onnxruntime"
    """The package to install, if modelexport does not depend on it."""
    module: str = "onnxruntime"
    """The module to import to check whether it is installed."""
    computes_in: str | None = ""
    """The type in which the result computes: the file's own, a narrower one, or ``None`` if weights are quantized."""


def optimize_file(path: Source, tool: str, output: str | Path) -> RetagReport:
    """Run a tool on a tagged file, and restore the tags in its output.

    A file with another encoding than ``metadata`` is converted to it for the tool. A tool that runs the file gets the
    inputs of the file's reference values, or random ones.

    Args:
        path: A tagged file.
        tool: A name in ``TOOLS``.
        output: The file to write.

    Raises:
        UsageError: The tool does not exist, its package is not installed, or it fails on the file.
        FileFormatError: ``path`` is not a tagged file.
        NotWrittenError: The tool's result computes something else than the file. Nothing is written.
        UntaggedNodeError: No owner was found for a node of the tool's output. Nothing is written.
        OutputError: The output cannot be written. An existing file of that name is unchanged.
    """
    path, output = as_path(path), Path(output)
    check_writable(output, [path])
    if tool not in TOOLS:
        raise UsageError(f"there is no tool '{tool}'{suggest(tool, TOOLS)}; the tools are {', '.join(TOOLS)}")
    chosen = TOOLS[tool]
    try:
        importlib.import_module(chosen.module)
    except ImportError as error:
        raise UsageError(f"{tool} needs another package ({error}): pip install {chosen.package}") from error
    tagged = read_tagged(path)
    check_weights_files(tagged.model)
    with scratch(output.parent) as folder:
        # onnx and tools refuse, or delete, a data file of the new name in the current folder, wherever they write to.
        # Initializers of older files have `value_info`, on which ONNX Runtime's quantizers fail.
        source, target = flat_file(tagged, folder, links=False), folder / f"{folder.parent.name}.onnx"
        try:
            with collected():
                chosen.run(source, target, lambda: _inputs(tagged, source))
        except ModelExportError:
            raise
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            raise _refusal(tool, path, error) from error
        except ImportError as error:
            raise UsageError(missing_extra(error) or str(_refusal(tool, path, error))) from error
        except Exception as error:  # whatever another package raises, also where the disk is full
            check_space(output, sum(file.stat().st_size for file in (source, *data_files(source))))
            raise _refusal(tool, path, error) from error
        computed = {value.name for node in tagged.model.graph for value in node.outputs}
        lost = [
            value.name for value in onnx.load(target, load_external_data=False).graph.input if value.name in computed
        ]
        if lost:
            raise UsageError(
                f"{tool} fails on {path}: its result takes {first_few(lost, 3)} as an input, and does not compute it"
            )
        try:
            outputs, tried = _compared(tool, tagged, source, target, output)
            return msgspec.structs.replace(retag(target, source=path, output=output), outputs=outputs, tried=tried)
        except FileFormatError as error:
            raise UsageError(f"{tool} fails on {path}: {str(error).replace(str(target), 'its result')}") from error


def _refusal(tool: str, path: Path, error: Exception) -> UsageError:
    return UsageError(f"{tool} fails on {path}: {type(error).__name__}: {reason_of(error)}")


def _compared(
    tool: str, tagged: TaggedFile, source: Path, target: Path, output: Path
) -> tuple[list[Difference] | None, list[str]]:
    """How far the outputs of a tool's result are from those of the file, and for which inputs, or why that is unknown.

    The file runs without ONNX Runtime's optimizer, which may be wrong itself, and the result as users run it.
    """
    if sum(file.stat().st_size for file in (source, *data_files(source))) > CHECKED_BYTES:
        return None, ["the file is too large"]
    computes_in = TOOLS[tool].computes_in
    rounding = Rounding(computes_in or narrowest_type(tagged.model)) if computes_in is not None else None
    try:
        first, second = open_session(source), open_session(target, optimized=True)
        feeds = _inputs(tagged, source)
        runs = [
            ("the inputs of the file's reference values or random ones", feeds),
            *varied_inputs(tagged.model, feeds),
        ]
        outputs, tried = compare_sessions(first, second, runs, rounding)
    except UsageError as error:
        return None, [str(error)]
    if rounding is None:  # what quantization changes has no bound, but something has to be left
        outputs = [_with_any_number(output) for output in outputs]
    if (largest := worst(outputs)) is not None and largest.status == "differ":
        fault = f"{tool} changes what {tagged.path} computes ({largest.name}: {largest.reason})"
        if rounding is not None and tool.startswith("ort-"):
            as_run, _ = compare_sessions(open_session(source, optimized=True), second, runs, rounding)
            if all(output.status != "differ" for output in as_run):
                fault += "; ONNX Runtime's optimizer does the same when it opens that file"
        raise NotWrittenError(f"{output} was not written: {fault}; use another tool, or `retag` its result as it is")
    return outputs, tried


def _with_any_number(output: Difference) -> Difference:
    """A difference, which agrees if the output has numbers that are closer to the right ones than zeros are."""
    is_close = output.relative is not None and output.relative < 1 and not output.nans
    is_choice = output.allowed is None and output.relative is not None
    return msgspec.structs.replace(output, status="agree") if is_close or is_choice else output


def _inputs(tagged: TaggedFile, file: Path) -> Mapping[str, Any]:
    if reference_path(tagged.path).is_file():
        with open_reference(tagged) as reference:
            return dict(reference.inputs)
    return make_random_inputs(tagged.model, open_session(file, optimized=True))


def _ort(level: Level) -> Callable[[Path, Path, Inputs], None]:
    def run(source: Path, target: Path, inputs: Inputs) -> None:
        import onnxruntime

        options = session_options(level, CPU)
        options.optimized_model_filepath = str(target)
        if data_files(source):
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", f"{target.name}.data"
            )
        onnxruntime.InferenceSession(source, options)

    return run


def _ort_transformers(model_type: str) -> Callable[[Path, Path, Inputs], None]:
    def run(source: Path, target: Path, inputs: Inputs) -> None:
        from onnxruntime.transformers.optimizer import optimize_model

        optimized = optimize_model(str(source), model_type=model_type)
        optimized.save_model_to_file(str(target), use_external_data_format=bool(data_files(source)))

    return run


def _quantize_dynamic(source: Path, target: Path, inputs: Inputs) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    how = {"weight_type": QuantType.QUInt8, "use_external_data_format": bool(data_files(source))}
    quantize_dynamic(transpose_weights(onnx.load(source)), target, **how)
    _save(without_saturation(onnx.load(target)), source, target)


def _quantize_static(quant_format: str) -> Callable[[Path, Path, Inputs], None]:
    def run(source: Path, target: Path, inputs: Inputs) -> None:
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

        class Once(CalibrationDataReader):
            def __init__(self) -> None:
                self._left = [inputs()]

            def get_next(self) -> Mapping[str, Any] | None:
                return self._left.pop() if self._left else None

        quantize_static(
            transpose_weights(onnx.load(source)),
            target,
            Once(),
            quant_format=QuantFormat[quant_format],
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QUInt8,  # the products of int8 weights saturate on some processors
            use_external_data_format=bool(data_files(source)),
            # Otherwise, with QOperator, a Where after a quantized operator loses its input.
            extra_options={"ForceQuantizeNoInputCheck": True},
        )

    return run


def _quantize_4bit(source: Path, target: Path, inputs: Inputs) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(transpose_weights(onnx.load(source)), block_size=32)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), use_external_data_format=bool(data_files(source)))


def _float16(source: Path, target: Path, inputs: Inputs) -> None:
    _save(in_half_precision(onnx.load(source)), source, target)


def _onnxsim(source: Path, target: Path, inputs: Inputs) -> None:
    import onnxsim

    model, same = onnxsim.simplify(onnx.load(source))
    if not same:
        raise UsageError(f"onnxsim reports that its result for {source} does not compute the same outputs")
    _save(model, source, target)


def _proto(module: str, function: str, *more: Any, **options: Any) -> Callable[[Path, Path, Inputs], None]:
    """A tool that is a function of a model's message."""

    def run(source: Path, target: Path, inputs: Inputs) -> None:
        _save(getattr(importlib.import_module(module), function)(onnx.load(source), *more, **options), source, target)

    return run


def _save(model: onnx.ModelProto, source: Path, target: Path) -> None:
    external = bool(data_files(source))
    onnx.save(model, target, save_as_external_data=external, location=f"{target.name}.data" if external else None)


NEWEST_OPSET = 23
"""The newest opset that ``version-converter`` converts to: the newest that ONNX Runtime 1.31 supports."""

TOOLS: Mapping[str, Optimizer] = {
    "ort-basic": Optimizer(_ort("basic"), "ONNX Runtime's optimizer, basic level"),
    "ort-extended": Optimizer(_ort("extended"), "extended level: fusions"),
    "ort-all": Optimizer(_ort("all"), "all levels: layouts too"),
    "ort-bert": Optimizer(_ort_transformers("bert"), "onnxruntime.transformers, for BERT-like models"),
    "ort-gpt2": Optimizer(_ort_transformers("gpt2"), "onnxruntime.transformers, for GPT-2-like models"),
    "quantize-dynamic": Optimizer(
        _quantize_dynamic, "int8 weights, activations quantized at run time", computes_in=None
    ),
    "quantize-qdq": Optimizer(
        _quantize_static("QDQ"), "int8, QuantizeLinear and DequantizeLinear around operators", computes_in=None
    ),
    "quantize-qoperator": Optimizer(_quantize_static("QOperator"), "int8, quantized operators", computes_in=None),
    "quantize-4bit": Optimizer(_quantize_4bit, "4-bit weights of MatMul (MatMulNBits)", computes_in=None),
    "float16": Optimizer(_float16, "half precision, inputs and outputs unchanged", computes_in="float16"),
    "onnxslim": Optimizer(_proto("onnxslim", "slim"), "OnnxSlim", "onnxslim", "onnxslim"),
    "onnxsim": Optimizer(_onnxsim, "ONNX Simplifier", "onnxsim", "onnxsim"),
    "version-converter": Optimizer(
        _proto("onnx.version_converter", "convert_version", NEWEST_OPSET),
        f"onnx.version_converter, to opset {NEWEST_OPSET}",
    ),
    "onnxscript": Optimizer(_proto("onnxscript.optimizer", "optimize"), "onnxscript.optimizer"),
    "inliner": Optimizer(_proto("onnx.inliner", "inline_local_functions"), "onnx.inliner"),
}
