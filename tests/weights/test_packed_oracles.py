"""Packed weights as the formats' own libraries write and read them; skipped where a library is not installed.

``pip install --no-deps --target FOLDER compressed-tensors torchao bitsandbytes auto-gptq autoawq`` and what they import
(loguru, psutil, pydantic and its parts, accelerate), and ``PYTHONPATH=FOLDER``, run them all. Of AutoGPTQ and AutoAWQ
single files are imported: the packages import what exists in older versions of transformers only.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import packing
from modelexport.files.safetensors_files import read_header
from modelexport.pytorch.checkpoints.quantized_linear import dequantized
from modelexport.weights.packed.known_formats import find_packed
from modelexport.weights.packed.repacking import packing as packing_of
from modelexport.weights.packed.repacking import roles_of, run
from modelexport.weights.packed.scheme import Scheme


def weight(rows: int = 48, columns: int = 64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def read(path: Any, settings: dict[str, Any], tensors: Mapping[str, torch.Tensor], notes: Any = None) -> torch.Tensor:
    """The dense weight that modelexport reads out of the tensors of a layer named ``0``."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=notes)
    (scheme,) = find_packed(settings, [read_header(path)]).values()
    return dequantized(scheme, [tensors[f"0.{role}"] for role in scheme.roles], torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_decompresses_the_same(bits: int, group: int, symmetric: bool, tmp_path: Any) -> None:
    library = pytest.importorskip("compressed_tensors")
    del library
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    plain = packing.quantize(weight().numpy(), bits, group, symmetric=symmetric)
    strategy = {"strategy": "group", "group_size": group}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    middle = 2 ** (bits - 1)
    dense = {"weight": torch.tensor(plain.weight()), "weight_scale": torch.tensor(plain.scales).float()}
    if not symmetric:
        dense["weight_zero_point"] = torch.tensor(plain.zeros - middle, dtype=torch.int8)
    packed = PackedQuantizationCompressor.compress(dense, scheme)
    expected = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"0": {"weights": weights}},
    }
    tensors = {f"0.{name}": tensor for name, tensor in packed.items()}
    assert torch.equal(read(tmp_path / "model.safetensors", settings, tensors), expected)


@pytest.mark.parametrize("kind", ["int8", "int4 by group", "int8 by channel"])
def test_torchao_dequantizes_the_same(kind: str, tmp_path: Any) -> None:
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerAxis, PerGroup

        model = nn.Sequential(nn.Linear(64, 48))
        config = {
            "int8": lambda: Int8WeightOnlyConfig(version=2),
            "int4 by group": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
            "int8 by channel": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
        }[kind]()
        quantize_(model, config)
        tensors, notes = flatten_tensor_state_dict(model.state_dict())
        expected = model[0].weight.dequantize()
    assert torch.equal(read(tmp_path / "model.safetensors", {"quant_method": "torchao"}, tensors, notes), expected)


def file_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file of an installed package, without the ``__init__.py`` of the packages around it."""
    package, *_ = name.split(".")
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        pytest.skip(f"could not import {package!r}")
    (folder,) = found.submodule_search_locations
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        around = ModuleType(".".join(parents[:depth]))
        around.__path__ = ["/".join([folder, *parents[1:depth]])]
        monkeypatch.setitem(sys.modules, around.__name__, around)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_autogptq_packs_and_computes_the_same(
    bits: int, ordered: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = np.random.default_rng(0).permutation(64) if ordered else None
    plain = packing.quantize(weight(64).numpy(), bits, 16, symmetric=False, order=order)
    linear = nn.Linear(64, 64, bias=False)
    linear.weight.data = torch.tensor(plain.weight())
    packed = file_of("auto_gptq.nn_modules.qlinear.qlinear_cuda", monkeypatch).QuantLinear(bits, 16, 64, 64, bias=False)
    packed.pack(linear, *(torch.tensor(one).float() for one in (plain.scales, plain.zeros)), torch.tensor(plain.groups))
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 16}
    tensors = {f"0.{name}": tensor for name, tensor in packed.state_dict().items()}
    actual = read(tmp_path / "model.safetensors", settings, tensors)
    assert torch.equal(actual, torch.tensor(plain.weight()))
    if bits != 8:  # where its own kernel for the CPU overflows
        with torch.no_grad():
            assert torch.equal(actual, packed(torch.eye(64)).T)
    written = {name: torch.tensor(array) for name, array in packing.gptq(plain).items()}
    assert all(torch.equal(tensors[f"0.{name}"], tensor) for name, tensor in written.items())


def test_autoawq_packs_and_computes_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = packing.quantize(weight(64).numpy(), 4, 32, symmetric=False)
    linear = nn.Linear(64, 64, bias=False)
    linear.weight.data = torch.tensor(plain.weight())
    library = file_of("awq.modules.linear.gemm", monkeypatch)
    transposed = (torch.tensor(one).float().T.contiguous() for one in (plain.scales, plain.zeros))
    packed = library.WQLinear_GEMM.from_linear(linear, 4, 32, False, *transposed)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    tensors = {f"0.{name}": tensor for name, tensor in packed.state_dict().items()}
    actual = read(tmp_path / "model.safetensors", settings, tensors)
    assert torch.equal(actual, torch.tensor(plain.weight()))
    expected = library.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, 32).T
    assert torch.equal(actual.half(), expected)
    written = {name: torch.tensor(array) for name, array in packing.awq(plain).items()}
    assert all(torch.equal(tensors[f"0.{name}"], tensor) for name, tensor in written.items())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_dequantizes_the_same(kind: str, nested: bool, tmp_path: Any) -> None:
    pytest.importorskip("bitsandbytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        packed, state = quantize_4bit(weight(), blocksize=64, quant_type=kind, compress_statistics=nested)
        expected = dequantize_4bit(packed, state)
    tensors = {"0.weight": packed} | {f"0.weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    actual = read(tmp_path / "model.safetensors", settings, tensors)
    assert torch.allclose(actual, expected, rtol=2e-7, atol=0), "absmax of absmax may be rounded in another order"


def test_onnx_runtimes_own_quantizer_packs_the_same_bytes() -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    dense = weight().numpy()
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    shapes = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("x", "y")]
    initializer = onnx.numpy_helper.from_array(np.ascontiguousarray(dense.T), "w")
    graph = onnx.helper.make_graph([node], "g", shapes[:1], shapes[1:], [initializer])
    opsets = [onnx.helper.make_opsetid("", 21)]
    quantizer = MatMulNBitsQuantizer(
        onnx.helper.make_model(graph, opset_imports=opsets), block_size=32, is_symmetric=False
    )
    quantizer.process()
    made = quantizer.model.model.graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in made.initializer}
    codes, scales, zeros = (stored[name] for name in made.node[0].input[1:4])
    scales, zeros = scales.reshape(48, 2), zeros.reshape(48, 1)

    numbers = np.stack([codes & 15, codes >> 4], axis=-1).reshape(48, 64)
    points = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(48, 2)
    plain = packing.Plain(numbers.astype(np.int64), scales, points.astype(np.int64), np.arange(64) // 32, 4)
    for method, tensors in {"gptq": packing.gptq(plain), "awq": packing.awq(plain)}.items():
        roles = tuple(tensors)
        scheme = Scheme(format=method, rows=48, columns=64, bits=4, group=32, roles=roles, variant="1")
        wanted = packing_of(scheme, 32, "float32")
        attributes = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
        for operator, expected in {"Codes": codes, "Scales": scales, "ZeroPoints": zeros}.items():
            inputs = [tensors[role] for role in roles_of(operator, scheme)]
            assert run(operator, attributes, inputs).tobytes() == expected.tobytes(), (method, operator)
