"""What a module can be quantized to: a table of methods, each of them done by ONNX Runtime's own quantizers.

A method is written ``NAME`` or ``NAME:OPTION=VALUE,...``: ``int4``, ``int4:block=64,algorithm=hqq``, ``float16``. It is
applied to a small model, which contains the nodes that it is meant for and no other
(:mod:`modelexport.tools.quantize.quantized_regions`).
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import onnx
import onnx_ir as ir

from modelexport.core.collected_messages import collected
from modelexport.core.missing_extras import missing_extra
from modelexport.core.text import reason_of, suggest
from modelexport.errors import UsageError
from modelexport.files.map_types import model_of
from modelexport.format.dtypes import LARGEST_FLOAT16
from modelexport.runtime.half_precision import in_half_precision
from modelexport.runtime.products_for_quantizers import transpose_weights
from modelexport.runtime.saturating_products import without_saturation
from modelexport.tools.quantize.blockwise_weights import quantize_blockwise

if TYPE_CHECKING:
    from onnxruntime.quantization.calibrate import TensorsData

KEEP = "keep"
"""The word for no method: the module stays bit for bit what it is."""

OptionValue = int | bool | str
Ranges: TypeAlias = "TensorsData"
"""The least and the largest number of each value, as :func:`.quantize.calibrate` measures them."""
_MATRICES = ("MatMul", "Gemm", "FusedMatMul")
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_BLOCKS: Mapping[str, OptionValue] = {
    "algorithm": "rtn",
    "block": 32,
    "symmetric": False,
    "accuracy_level": 4,
    "embeddings": False,
}
_WORDS = {
    "algorithm": ("rtn", "hqq", "k_quant"),
    "block": ("16", "32", "64", "128", "256"),
    "accuracy_level": tuple("01234"),
}
_INT8: dict[str, OptionValue] = {"per_channel": True, "reduce_range": False, "weights": "uint8"}
_INT8_WORDS = {"weights": ("uint8", "int8")}
_WITHOUT = {"hqq": ("symmetric", "accuracy_level", "embeddings"), "k_quant": ("symmetric",)}
"""Options that ONNX Runtime's function for an algorithm does not have."""


class Method(msgspec.Struct, frozen=True, order=True):
    """A method by its name, with the options that are not the default."""

    name: str
    options: tuple[tuple[str, OptionValue], ...] = ()

    def __str__(self) -> str:
        texts = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.options]
        return f"{self.name}:{','.join(texts)}" if texts else self.name

    @property
    def row(self) -> MethodRow:
        """The row of the table of methods."""
        return METHODS[self.name]

    @property
    def levels(self) -> int:
        """The number of integers above zero that weights are stored as."""
        bits = self.row.bits - bool(dict(self.options).get("reduce_range", False))
        return int(2 ** (bits - 1) - 1)

    def option(self, name: str) -> Any:
        """The value of an option: the default, if the method does not name it."""
        return dict(self.options).get(name, self.row.options[name])


@dataclass(frozen=True)
class MethodRow:
    """A row of the table of methods."""

    what: str
    apply: Callable[[onnx.ModelProto, Method, Ranges | None], onnx.ModelProto]
    """Called with a model, the method, and the ranges that calibration measured, if ``needs_data``."""
    operators: tuple[str, ...] | None = None
    """The operators whose constant weight it quantizes; ``None`` if it converts every node."""
    types: tuple[ir.DataType, ...] = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    """The types of data for which ONNX Runtime has the quantized operators."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options to the values that they may have, where these are limited."""
    needs_data: bool = False
    bits: int = 8
    """The bits of a stored weight."""
    largest: float | None = None
    """The largest number that it can hold, if weights may be larger: nodes with such weights stay as they are. Written
    weights are not checked then."""


def parse_method(text: str) -> Method | None:
    """The method that a text names; ``None`` for ``keep``."""
    name, _, rest = text.strip().partition(":")
    if name == KEEP and not rest:
        return None
    if name not in METHODS:
        raise UsageError(f"there is no method '{name}'{suggest(name, METHODS)}; the methods are {', '.join(METHODS)}")
    row = METHODS[name]
    options: dict[str, OptionValue] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in row.options:
            known = ", ".join(f"{key}={value}" for key, value in row.options.items()) or "none"
            raise UsageError(f"{name} has no option '{key}'{suggest(key, row.options)}; it has {known}")
        options[key] = _value(f"{name}:{key}", row.options[key], value if equals else "true", row.choices.get(key))
    if without := [key for key in _WITHOUT.get(str(options.get("algorithm")), ()) if key in options]:
        raise UsageError(f"{name}:algorithm={options['algorithm']} has no option '{without[0]}': leave it out")
    return Method(
        name,
        tuple((key, options[key]) for key in row.options if options.get(key, default := row.options[key]) != default),
    )


def _value(where: str, default: OptionValue, text: str, choices: tuple[str, ...] | None) -> OptionValue:
    choices = ("true", "false") if isinstance(default, bool) else choices
    if choices and text not in choices:
        raise UsageError(f"{where} is {' or '.join(choices)}, not '{text}'")
    if isinstance(default, bool):
        return text == "true"
    if isinstance(default, int) and not text.isdecimal():
        raise UsageError(f"{where} is a number, not '{text}'")
    return int(text) if isinstance(default, int) else text


def apply_method(
    model: onnx.ModelProto, method: Method, ranges: Ranges | None = None, of: str = "the model"
) -> ir.Model:
    """Quantize every node of a model that a method can quantize; the names of its inputs and outputs are unchanged.

    Args:
        model: May be changed.
        ranges: The ranges that calibration measured, for methods that need data.
        of: The modules that own the nodes, for messages.
    """
    try:
        with collected(), _quiet():
            if method.row.largest is None:
                transpose_weights(model)
            made = model_of(method.row.apply(model, method, ranges))
        made.graph.sort()  # some libraries append new nodes at the end
    except UsageError as error:
        raise UsageError(f"{of}: {error}") from error
    except ImportError as error:
        raise UsageError(missing_extra(error) or f"{method} needs another package ({error})") from error
    except Exception as error:  # whatever the library raises
        advice = "" if isinstance(error, OSError) else ": keep the module with --keep NAME, or choose another method"
        raise UsageError(
            f"{of}: ONNX Runtime cannot quantize it to {method}{advice} (the library says: {reason_of(error)})"
        ) from error
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Undo what importing the quantizer of weights does to the root logger; k-quant prints its progress."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [logging.NullHandler()]
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _dynamic(model: onnx.ModelProto, method: Method, ranges: Ranges | None) -> onnx.ModelProto:
    from onnxruntime.quantization import quantize_dynamic

    how = _int8(method)
    how["per_channel"] &= _with_one_scale(model).isdisjoint(node.input[1] for node in _products(model))
    made = model_written_by(lambda file: quantize_dynamic(model, file, **how))
    # The quantizer of recurrent layers knows int8 weights only.
    return without_saturation(made) if _is_unsigned(method) else made


_SCALES_OF_CHANNELS = 13
"""The version of ONNX's operators since which ``DequantizeLinear`` has an axis."""


def _static(model: onnx.ModelProto, method: Method, ranges: Ranges | None) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static, save_tensors_data
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorsData

    operators, version = method.option("operators"), max(each.version for each in model.opset_import if not each.domain)
    if method.option("per_channel") and version < _SCALES_OF_CHANNELS:
        raise UsageError(
            f"a scale for each channel needs version {_SCALES_OF_CHANNELS} of ONNX's operators, and the file has "
            f"{version}: give {method.name}:per_channel=false"
        )
    how = _int8(method) | {
        "weight_type": QuantType.QInt8,  # the library fits the scales of no others to biases that are beyond int32
        "quant_format": QuantFormat.QDQ,
        "op_types_to_quantize": None if operators == "all" else operators.split("+"),
        "activation_type": QuantType.QUInt8,
        "nodes_to_exclude": _without_scales(model, ranges),
    }
    how["extra_options"] |= {"TensorQuantOverrides": {name: [{}] for name in _with_one_scale(model)}}
    # The library gives a value that only a Relu or Clip takes the range of that one's result, and removes that node,
    # though the value is returned, or the range, which holds the zero, is more than what a Clip lets pass.
    taken = {name for node in model.graph.node for name in node.input}
    returned = {output.name for output in model.graph.output if output.name in taken}
    cut = {node.input[0] for node in model.graph.node if node.op_type == "Clip" and not _lets_zero_pass(node, model)}
    marks = [f"{name}.size" for name in sorted(returned | cut)]
    model.graph.node.extend(onnx.helper.make_node("Size", [name.removesuffix(".size")], [name]) for name in marks)
    biases = _biases_without_scales(model) if method.option("per_channel") else []
    for tensor in biases:  # the library leaves a bias alone that is an input
        model.graph.initializer.remove(tensor)
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))

    def write(file: Path) -> None:
        names = {name for node in model.graph.node for name in (*node.input, *node.output)}
        needed = {name: values for name, values in (ranges or {}).items() if name in names}
        save_tensors_data(TensorsData(CalibrationMethod.MinMax, needed), cache := file.with_name("ranges.json"))
        quantize_static(model, file, None, calibration_cache_path=cache, **how)

    made = model_written_by(write)
    made.graph.initializer.extend(biases)
    del made.graph.input[len(made.graph.input) - len(biases) :]
    for node in [node for node in made.graph.node if node.output[0] in marks]:
        made.graph.node.remove(node)
    return without_saturation(made) if _is_unsigned(method) else made


def has_channels(operator: str, place: int, rank: int) -> bool:
    """Whether ONNX Runtime has kernels of an operator whose input at ``place`` has a scale for each channel. It has
    none for stacked matrices (as those of experts), and for first factors.
    """
    if operator in (*_MATRICES, *_CONVOLUTIONS):
        return place == 1 and (operator not in _MATRICES or rank == 2)
    return operator in ("LSTM", "Attention")


def _products(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type in (*_MATRICES, *_CONVOLUTIONS)]


def _with_one_scale(model: onnx.ModelProto) -> set[str]:
    """The factors of products that get one scale: a node that takes them has no kernel for a scale for each channel."""
    ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer if len(tensor.dims) > 1}
    factors = {name for node in _products(model) for name in node.input[:2] if name in ranks}
    uses = [(node.op_type, place, name) for node in model.graph.node for place, name in enumerate(node.input)]
    return {name for kind, place, name in uses if name in factors and not has_channels(kind, place, ranks[name])}


def _lets_zero_pass(clip: onnx.NodeProto, model: onnx.ModelProto) -> bool:
    """Whether the bounds of a ``Clip`` are constant, and zero lies between them."""
    bounds = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    signed = [(sign, name) for sign, name in zip((1, -1), clip.input[1:], strict=False) if name]
    return all(name in bounds and sign * bounds[name] <= 0 for sign, name in signed)


def _without_scales(model: onnx.ModelProto, ranges: Ranges | None) -> list[str]:
    """The names of nodes with an input, an output or a constant that is not finite: no scale exists for it."""
    ends = {name: values.range_value for name, values in ranges.items()} if ranges else {}
    tensors = [tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    numbers = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}
    endless = {name for name, array in (ends | numbers).items() if not np.isfinite(array).all()}
    return [node.name for node in model.graph.node if not endless.isdisjoint((*node.input, *node.output))]


def _biases_without_scales(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Biases that stay in floating point: the library gives a bias the scales of its weight, which are others.

    The weight of a ``ConvTranspose`` has an axis for the channels of a group, and its bias one for those of all groups.
    The bias of a ``Gemm`` may differ from row to row.
    """
    nodes = [node for node in model.graph.node if node.op_type in ("ConvTranspose", "Gemm") and len(node.input) > 2]
    groups = {node.input[2]: attribute.i for node in nodes for attribute in node.attribute if attribute.name == "group"}
    of_rows = {node.input[2] for node in nodes if node.op_type == "Gemm"}
    return [
        tensor
        for tensor in model.graph.initializer
        if groups.get(tensor.name, 1) > 1 or (tensor.name in of_rows and len(tensor.dims) > 1)
    ]


def _int8(method: Method) -> dict[str, Any]:
    """The options of a method as keywords of ONNX Runtime's functions."""
    from onnxruntime.quantization import QuantType

    return {
        "weight_type": QuantType.QUInt8 if _is_unsigned(method) else QuantType.QInt8,
        "per_channel": method.option("per_channel"),
        "reduce_range": method.option("reduce_range"),
        "extra_options": {"WeightSymmetric": True},  # convolutions have one zero point for all channels
    }


def _is_unsigned(method: Method) -> bool:
    """Whether weights are uint8. Those of 7 bits are int8, whose products are the fastest, and do not saturate."""
    return method.option("weights") == "uint8" and not method.option("reduce_range")


def model_written_by(run: Callable[[Path], None]) -> onnx.ModelProto:
    """The model that a quantizer writes to a file."""
    with tempfile.TemporaryDirectory(prefix="modelexport-") as folder:
        run(Path(folder) / "model.onnx")
        return onnx.load(Path(folder) / "model.onnx")


def _blockwise(bits: int) -> Callable[[onnx.ModelProto, Method, Ranges | None], onnx.ModelProto]:
    def run(model: onnx.ModelProto, method: Method, ranges: Ranges | None) -> onnx.ModelProto:
        options: Mapping[str, Any] = {name: method.option(name) for name in _BLOCKS}
        return quantize_blockwise(model, bits, **options)

    return run


def _float16(model: onnx.ModelProto, method: Method, ranges: Ranges | None) -> onnx.ModelProto:
    return in_half_precision(model)


METHODS: Mapping[str, MethodRow] = {
    "int8-dynamic": MethodRow(
        "int8 weights, activations quantized at run time",
        _dynamic,
        (*_MATRICES, "Conv", "Gather", "LSTM", "Attention"),
        (ir.DataType.FLOAT,),
        _INT8,
        _INT8_WORDS,
    ),
    "int8-static": MethodRow(
        "int8 weights and activations, with ranges measured on data",
        _static,
        None,
        options=_INT8 | {"operators": "Conv+ConvTranspose+Gather+Gemm+MatMul"},
        choices=_INT8_WORDS,
        needs_data=True,
    ),
    "int8-weights": MethodRow(
        "int8 weights by blocks, float activations",
        _blockwise(8),
        _MATRICES,
        options=_BLOCKS,
        choices=_WORDS | {"algorithm": ("rtn", "k_quant")},
    ),
    "int4": MethodRow(
        "4-bit weights by blocks, float activations", _blockwise(4), _MATRICES, options=_BLOCKS, choices=_WORDS, bits=4
    ),
    "float16": MethodRow("half precision, inputs and outputs unchanged", _float16, largest=LARGEST_FLOAT16),
}
