"""Makes a file ready for ONNX Runtime's quantizers: newer operators, weights as initializers, types of all values."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.collected_messages import collected
from modelexport.errors import UsageError
from modelexport.files.linked_weights import check_weights_files
from modelexport.graph.snapshot import take_snapshot
from modelexport.graph.unique_names import name_nodes_apart
from modelexport.graph.weighted_operators import row_of
from modelexport.lineage.owners_after_passes import derive_owners
from modelexport.regions.inferred_types import infer_types
from modelexport.tagged.file import TaggedFile
from modelexport.tools.quantize.weights_behind import MOVES_WEIGHTS

QUANTIZED_SINCE = 11
"""The oldest version of the standard operators that ONNX Runtime's quantizers take."""

_INPUTS_ALONE = 4
"""The IR version from which initializers need not be inputs."""


def prepared(tagged: TaggedFile) -> TaggedFile:
    """The same file, its model made ready for the quantizers in place; owners and names stay.

    Raises:
        FileFormatError: A weights file is missing or has changed.
        UsageError: ONNX cannot convert an operator to the version that is needed, or the model cannot be loaded.
    """
    check_weights_files(tagged.model)
    _raise_version(tagged.model)
    _hold_weights(tagged.model)
    infer_types(tagged)
    return tagged


def _raise_version(model: ir.Model) -> None:
    """Convert a model whose standard operators are older than the quantizers take."""
    version = model.opset_imports.get("", QUANTIZED_SINCE)
    if version >= QUANTIZED_SINCE:
        return
    from onnxscript import version_converter  # takes longer than everything else here

    source = take_snapshot(model)
    with collected():
        version_converter.ConvertVersionPass(QUANTIZED_SINCE, fallback=True)(model)
    if model.opset_imports.get("") != QUANTIZED_SINCE:
        raise UsageError(
            f"quantization needs version {QUANTIZED_SINCE} of ONNX's operators, and the file has {version}, which "
            "onnx cannot convert"
        )
    name_nodes_apart(model)
    derive_owners(source, model)


def _hold_weights(model: ir.Model) -> None:
    """Make weights initializers that are ``Constant`` nodes, or inputs too (all are up to IR version 3).

    Others may write another weight into such an input; that of a quantized module has a meaning no more.
    """
    graph = model.graph
    if model.ir_version < _INPUTS_ALONE:
        graph.inputs[:] = [value for value in graph.inputs if not value.is_initializer()]
        model.ir_version = _INPUTS_ALONE
    for node in list(graph):
        row = row_of(node)
        value = node.inputs[row.weight] if row is not None and row.weight < len(node.inputs) else None
        while value is not None and (mover := value.producer()) is not None and mover.op_type in MOVES_WEIGHTS:
            value = mover.inputs[0]
        if value is not None and value.is_initializer() and value.is_graph_input():
            graph.inputs.remove(value)
        constant = value.producer() if value is not None else None
        if value is None or constant is None or constant.op_type != "Constant" or value.is_graph_output():
            continue
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) > 1:
            held = ir.val(value.name, const_value=tensor)
            ir.convenience.replace_all_uses_with(value, held)
            graph.remove(constant, safe=True)
            graph.register_initializer(held)
