"""Weights in blocks of 4 or 8 bits, by ONNX Runtime's quantizers of ``MatMul``, and tables that are tied to them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

TABLES_SINCE = 21
"""The version of ONNX's operators from which the library quantizes tables."""


def quantize_blockwise(
    model: onnx.ModelProto,
    bits: int,
    *,
    algorithm: str,
    block: int,
    symmetric: bool,
    accuracy_level: int,
    embeddings: bool,
) -> onnx.ModelProto:
    """Quantize the products of a model; the model may be changed.

    Args:
        algorithm: ``rtn``, ``hqq`` or ``k_quant``.
        block: How many numbers share a scale.
        accuracy_level: The type in which ONNX Runtime multiplies: 0 for any, 1 for float32, 4 for int8.
        embeddings: Tables, too.
    """
    from onnxruntime.quantization import matmul_nbits_quantizer as library
    from onnxruntime.quantization.onnx_model import ONNXModel

    whole = ONNXModel(model)
    whole.replace_gemm_with_matmul()
    tied = _tied_tables(whole.model, block) if embeddings else {}
    alone = (
        embeddings
        and algorithm == "rtn"
        and any(each.version >= TABLES_SINCE for each in whole.model.opset_import if not each.domain)
        and any(node.op_type == "Gather" and node.name not in tied for node in whole.model.graph.node)
    )
    operators = ("MatMul", "Gather") if alone else ("MatMul",)
    config: library.WeightOnlyQuantConfig
    if algorithm == "rtn":
        config = library.DefaultWeightOnlyQuantConfig(
            block, symmetric, accuracy_level, op_types_to_quantize=operators, bits=bits
        )
    elif algorithm == "hqq":
        config = library.HQQWeightOnlyQuantConfig(block, bits, op_types_to_quantize=operators)
    else:
        config = library.KQuantWeightOnlyQuantConfig(
            customized_weight_config={node.name: {"bits": bits} for node in whole.model.graph.node}
        )
    quantizer = library.MatMulNBitsQuantizer(
        whole.model,
        bits,
        block,
        is_symmetric=symmetric,
        accuracy_level=accuracy_level,
        algo_config=config,
        nodes_to_exclude=list(tied),
    )
    tensors = {tensor.name: tensor for tensor in whole.model.graph.initializer}
    quantizer.process()
    result: onnx.ModelProto = quantizer.model.model
    # The library removes a weight that its own product takes as the other factor, too.
    there = {tensor.name for tensor in result.graph.initializer}
    lost = {name for node in result.graph.node for name in node.input} - there
    result.graph.initializer.extend(tensor for name, tensor in tensors.items() if name in lost)
    _read_codes(result, tied)
    return result


def _tied_tables(model: onnx.ModelProto, block: int) -> dict[str, str]:
    """The names of ``Gather`` nodes whose table is the transposed weight of a ``MatMul``, to the output of that.

    The rows are whole blocks: those of a product are padded, and a table would have as many columns.
    """
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in arrays]
    return {
        node.name: product.output[0]
        for node in model.graph.node
        for product in products
        if node.op_type == "Gather"
        and arrays[node.input[0]].shape[-1] % block == 0
        and np.array_equal(arrays[node.input[0]].T, arrays[product.input[1]])
    }


def _read_codes(model: onnx.ModelProto, tied: Mapping[str, str]) -> None:
    """Let tables read the codes of the products that they are tied to, in place: both have one set."""
    products = {node.output[0]: node for node in model.graph.node if node.op_type == "MatMulNBits"}
    for table in [node for node in model.graph.node if tied.get(node.name) in products]:
        product = products[tied[table.name]]
        codes, shape = f"{product.input[1]}_rows", f"{product.input[1]}_shape"
        sizes = {attribute.name: attribute.i for attribute in product.attribute}
        rows = onnx.helper.make_node("Reshape", [product.input[1], shape], [codes], name=f"{table.name}_Reshape")
        lookup = onnx.helper.make_node(
            "GatherBlockQuantized",
            [codes, table.input[1], *product.input[2:4]],
            table.output,
            name=f"{table.name}_Q{sizes['bits']}",
            domain="com.microsoft",
            gather_axis=0,
            quantize_axis=1,
            block_size=sizes["block_size"],
            bits=sizes["bits"],
        )
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, -1]), shape))
        model.graph.node.remove(table)
        model.graph.node.extend([rows, lookup])
        unused = [tensor for tensor in model.graph.initializer if tensor.name == table.input[0]]
        for tensor in unused if not any(table.input[0] in node.input for node in model.graph.node) else ():
            model.graph.initializer.remove(tensor)
