"""Checkpoints with packed weights are exported bit for bit: numbers, scales, logits, tokens; and what is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

import packing
from commands import run
from decoders import SMALL
from exports import Shared
from modelexport import export
from modelexport.capture.front_end_options import QuantizedAs
from modelexport.errors import ModelLoadError, UsageError, WeightsError
from modelexport.files.onnx_models import load_onnx
from modelexport.graph.nodes import all_nodes
from modelexport.pytorch.loading import LoadedModel, load_model
from modelexport.tables.costs import cost
from modelexport.terminal.show_verification import format_verify
from modelexport.verify.verify import verify
from modelexport.weights.weight_updates import update_weights
from packing import Plain, Tabled, Written

IDS = torch.arange(2, 26).reshape(2, 12)
ONE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128}
SIZES = {**SMALL, **ONE, "intermediate_size": 128, "num_key_value_heads": 2, "tie_word_embeddings": False}


def build(kind: str, **more: Any) -> torch.nn.Module:
    """A tiny decoder with random weights, larger than those of an initialization, so that its tokens vary."""
    import transformers as hf

    tiny = {"vocab_size": 128, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = {
        "llama": lambda: hf.LlamaConfig(**{**SIZES, **more}),
        "qwen2": lambda: hf.Qwen2Config(**SIZES),
        "phi": lambda: hf.PhiConfig(**SIZES),
        "opt": lambda: hf.OPTConfig(**{**ONE, **tiny, "ffn_dim": 128, "word_embed_proj_dim": 64, **more}),
        "gpt_neox": lambda: hf.GPTNeoXConfig(**SIZES),
        "bloom": lambda: hf.BloomConfig(**tiny, hidden_size=64, n_layer=1, n_head=4),
        "falcon": lambda: hf.FalconConfig(**tiny, hidden_size=64, num_hidden_layers=1, num_attention_heads=4),
        "stablelm": lambda: hf.StableLmConfig(**SIZES),
        "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1),
    }[kind]()
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def by_gptq(_: str, weight: np.ndarray, *, version: int = 1, shuffled: bool = False, **how: Any) -> Any:
    order = np.random.default_rng(weight.shape[0]).permutation(weight.shape[1]) if shuffled else None
    plain = packing.quantize(weight, order=order, **how)
    return plain, packing.gptq(plain, version), {}


def by_awq(_: str, weight: np.ndarray, **how: Any) -> Any:
    plain = packing.quantize(weight, 4, **how, symmetric=False)
    return plain, packing.awq(plain), {}


def by_compressed_tensors(_: str, weight: np.ndarray, *, shuffled: bool = False, group: int = -1, **how: Any) -> Any:
    order = np.random.default_rng(weight.shape[0]).permutation(weight.shape[1]) if shuffled else None
    plain = packing.quantize(weight, order=order, group=weight.shape[1] if group == -1 else group, **how)
    return plain, packing.compressed(plain), {}


def by_torchao(layer: str, weight: np.ndarray, *, kind: str, bits: int, group: int = -1) -> Any:
    plain = packing.quantize(weight, bits, weight.shape[1] if group == -1 else group, symmetric=bits == 4)
    return plain, *packing.torchao(plain, kind, layer)


def by_bitsandbytes(_: str, weight: np.ndarray, *, kind: str, nested: bool) -> Any:
    return *packing.bitsandbytes(weight, kind, 64, nested=nested), {}


def gptq(bits: int = 4, group: int = 16, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


def compressed(bits: int, group: int = -1) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "channel" if group == -1 else "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
TORCHAO = {"quant_method": "torchao"}
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@dataclass(frozen=True)
class Case:
    """A checkpoint: the model, what its ``quantization_config`` says, and the writer of its layers."""

    model: str
    settings: dict[str, Any]
    pack: Callable[..., Any]


# The builder of onnxruntime-genai 0.18.0 refuses OPT, GPT-NeoX, BLOOM, Falcon and StableLM.
CASES = {
    "gptq with activation order": Case(
        "llama", gptq(), partial(by_gptq, bits=4, group=16, symmetric=False, shuffled=True)
    ),
    "gptq v2 of 8 bits": Case(
        "phi", gptq(8, 32, checkpoint_format="gptq_v2"), partial(by_gptq, version=2, bits=8, group=32, symmetric=False)
    ),
    "gptq by whole rows": Case("stablelm", gptq(4, 64), partial(by_gptq, bits=4, group=64, symmetric=True)),
    "awq": Case("qwen2", AWQ, partial(by_awq, group=32)),
    "compressed-tensors of 4 bits": Case(
        "opt", compressed(4, 32), partial(by_compressed_tensors, bits=4, group=32, symmetric=True)
    ),
    "compressed-tensors with activation order": Case(
        "gpt_neox",
        compressed(4, 16),
        partial(by_compressed_tensors, bits=4, group=16, symmetric=False, shuffled=True),
    ),
    "compressed-tensors of 8 bits by channel": Case(
        "llama", compressed(8), partial(by_compressed_tensors, bits=8, symmetric=False)
    ),
    "torchao int8": Case("bloom", TORCHAO, partial(by_torchao, kind="Int8Tensor", bits=8)),
    "torchao int4": Case("falcon", TORCHAO, partial(by_torchao, kind="IntxUnpackedToInt8Tensor", bits=4, group=32)),
    "bitsandbytes nf4": Case("opt", FOUR_BITS, partial(by_bitsandbytes, kind="nf4", nested=True)),
    "bitsandbytes fp4": Case("llama", FOUR_BITS, partial(by_bitsandbytes, kind="fp4", nested=False)),
}


def quick(names: Iterable[str]) -> list[Any]:
    """One of these checkpoints, the same one for each test, since every checkpoint is written and exported."""
    return [
        pytest.param(name, marks=() if name == "gptq with activation order" else pytest.mark.slow) for name in names
    ]


@dataclass(frozen=True)
class Made:
    written: Written
    path: Path


@pytest.fixture(scope="module")
def made(shared: Shared) -> Callable[..., Made]:
    """The checkpoint of a case and the file that it was exported to, made once."""

    def get(name: str, quantized_as: QuantizedAs = "nbits") -> Made:
        def make(folder: Path) -> None:
            case = CASES[name]
            written = packing.write(folder / "model", build(case.model), case.settings, case.pack)
            (folder / "written").write_bytes(pickle.dumps(written))
            loaded = load_model(str(folder / "model"))
            assert loaded.warnings == ()
            how: dict[str, Any] = {"check": False, "source": loaded.weights, "quantized_as": quantized_as}
            export(loaded.model, {"input_ids": IDS}, folder / "model.onnx", **how)

        folder = shared(f"packed-{name}-{quantized_as}", make)
        return Made(pickle.loads((folder / "written").read_bytes()), folder / "model.onnx")

    return get


@dataclass(frozen=True)
class Stored:
    """What a file has of one layer, unpacked as the documentation of MatMulNBits says."""

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    order: np.ndarray


def stored(model: onnx.ModelProto, layer: str) -> Stored:
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    calls = [
        n for n in model.graph.node if any(p.key == "modelexport.call" and p.value == layer for p in n.metadata_props)
    ]
    node = next(n for n in calls if n.op_type == "MatMulNBits")
    how = {a.name: a.i for a in node.attribute}
    bits, block, rows, columns = how["bits"], how["block_size"], how["N"], how["K"]
    codes, scales = values[node.input[1]], values[node.input[2]]
    numbers = [codes.reshape(rows, -1) >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    zeros = np.full(scales.shape, 2 ** (bits - 1))
    if len(node.input) > 3 and node.input[3]:
        packed = values[node.input[3]]
        parts = np.stack([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)], axis=2)
        zeros = parts.reshape(rows, -1)[:, : scales.shape[1]]
    gathered = next((n for n in calls if n.op_type == "Gather"), None)
    order = np.arange(columns) if gathered is None else values[gathered.input[1]]
    assert codes.shape == (rows, columns // block, block * bits // 8)
    return Stored(np.stack(numbers, axis=2).reshape(rows, columns), scales, zeros, order)


@pytest.mark.parametrize("name", quick(name for name, case in CASES.items() if case.settings is not FOUR_BITS))
def test_numbers_scales_and_zero_points_are_those_of_the_checkpoint(name: str, made: Callable[[str], Made]) -> None:
    model = onnx.load(made(name).path)
    for layer, plain in made(name).written.plain.items():
        found = stored(model, layer)
        assert isinstance(plain, Plain)
        block = plain.numbers.shape[1] // found.scales.shape[1]
        groups = plain.groups[found.order]
        assert (groups.reshape(-1, block) == groups[::block, None]).all(), "a block is of one group"
        assert (found.numbers == plain.numbers[:, found.order]).all()
        assert (found.scales == plain.scales[:, groups[::block]].astype(np.float32)).all()
        assert (found.zeros == plain.zeros[:, groups[::block]]).all()


@pytest.mark.parametrize("name", ["bitsandbytes nf4", pytest.param("bitsandbytes fp4", marks=pytest.mark.slow)])
def test_numbers_and_scales_of_a_table_are_those_of_the_checkpoint(name: str, made: Callable[[str], Made]) -> None:
    model = onnx.load(made(name).path)
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "MatMulBnb4"]
    checkpoint = load_file(made(name).written.folder / "model.safetensors")
    assert len(nodes) == len(made(name).written.plain)
    for node in nodes:
        layer = next(p.value for p in node.metadata_props if p.key == "modelexport.call")
        plain = made(name).written.plain[layer]
        assert isinstance(plain, Tabled)
        assert values[node.input[1]].tobytes() == checkpoint[f"{layer}.weight"].numpy().tobytes()
        assert values[node.input[2]].tobytes() == plain.absmax.astype(np.float32).tobytes()


@pytest.mark.parametrize("name", quick(CASES))
def test_logits_and_64_tokens_are_those_of_the_dense_model(name: str, made: Callable[[str], Made]) -> None:
    session, dense = onnxruntime.InferenceSession(made(name).path), made(name).written.dense
    with torch.no_grad():
        expected = dense(input_ids=IDS).logits.numpy()
    actual = session.run(None, {"input_ids": IDS.numpy()})[0]
    assert np.linalg.norm(actual - expected) < 2e-6 * np.linalg.norm(expected)
    ours = theirs = IDS.numpy()
    for _ in range(64):
        last = session.run(None, {"input_ids": ours[:, -12:]})[0][:, -1]
        ours = np.append(ours, last.argmax(-1)[:, None], axis=1)
        with torch.no_grad():
            right = dense(input_ids=torch.tensor(theirs[:, -12:])).logits[:, -1]
        theirs = np.append(theirs, right.argmax(-1)[:, None], axis=1)
    assert ours.tolist() == theirs.tolist()
    assert len(set(ours[0, 12:])) > 8, "tokens that repeat would tell nothing"


def test_without_its_activation_order_a_file_would_be_wrong(made: Callable[[str], Made], tmp_path: Path) -> None:
    written, path = made("gptq with activation order").written, made("gptq with activation order").path
    model = onnx.load(path)
    orders = {node.input[1] for node in model.graph.node if node.op_type == "Gather" and "g_idx" in node.input[1]}
    assert len(orders) == len(written.plain)
    for tensor in model.graph.initializer:
        if tensor.name in orders:
            tensor.raw_data = np.arange(tensor.dims[0]).tobytes()
    with torch.no_grad():
        expected = written.dense(input_ids=IDS).logits.numpy()

    def error(proto: onnx.ModelProto) -> float:
        actual = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"input_ids": IDS.numpy()})[0]
        return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))

    assert error(onnx.load(path)) < 2e-6
    assert error(model) > 0.5


TYPES = {
    "awq": ir.DataType.UINT4,
    "compressed-tensors with activation order": ir.DataType.UINT4,
    "compressed-tensors of 4 bits": ir.DataType.INT4,
    "torchao int8": ir.DataType.UINT8,
}
"""Checkpoints to the type of their numbers in DequantizeLinear, which is signed where there are no zero points."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if TYPES[name] is ir.DataType.INT4 else pytest.mark.slow) for name in TYPES]
)
def test_as_operators_of_the_standard_numbers_scales_logits_and_new_weights_are_the_same(
    name: str, made: Callable[..., Made], tmp_path: Path
) -> None:
    case, path = made(name, "qdq"), made(name, "qdq").path
    nodes = {node.metadata_props["modelexport.call"]: node for node in layers(path, "DequantizeLinear")}
    assert nodes.keys() == case.written.plain.keys()
    for layer, plain in case.written.plain.items():
        assert isinstance(plain, Plain)
        node, order = nodes[layer], order_of(nodes[layer])
        tensors = [value.const_value for value in node.inputs if value is not None and value.const_value is not None]
        codes, scales, *zeros = (tensor.numpy().astype(np.float64) for tensor in tensors)
        middle = 0 if zeros else 2 ** (plain.bits - 1)
        assert tensors[0].dtype == TYPES[name]
        assert bool(zeros) == (tensors[0].dtype != ir.DataType.INT4)
        columns = np.arange(plain.numbers.shape[1]) if order is None else order
        groups = plain.groups[columns][:: node.attributes["block_size"].as_int()]
        assert (codes.T + middle == plain.numbers[:, columns]).all()
        assert (plain.scales[:, groups].astype(np.float32) == scales.T).all()
        assert (zeros[0].T if zeros else middle == plain.zeros[:, groups]).all()
    with torch.no_grad():
        expected = case.written.dense(input_ids=IDS).logits.numpy()
        for parameter in case.written.dense.parameters():
            parameter.mul_(-0.5)
    assert np.linalg.norm(exact(path) - expected) < 2e-6 * np.linalg.norm(expected)

    other = packing.write(tmp_path / "other", case.written.dense, CASES[name].settings, CASES[name].pack)
    update_weights(path, other.folder / "model.safetensors", tmp_path / "new.onnx")
    with torch.no_grad():
        expected = other.dense(input_ids=IDS).logits.numpy()
    assert np.linalg.norm(exact(tmp_path / "new.onnx") - expected) < 2e-6 * np.linalg.norm(expected)


def layers(path: Path, op_type: str) -> list[ir.Node]:
    return [node for node in all_nodes(load_onnx(path)) if node.op_type == op_type]


def order_of(node: ir.Node) -> np.ndarray | None:
    """The order of the columns of a weight that a node computes; ``None`` if it is their own."""
    ((multiplied, _),) = node.outputs[0].uses()
    gather = multiplied.inputs[0].producer() if multiplied.inputs[0] is not None else None
    index = gather.inputs[1] if gather is not None and gather.op_type == "Gather" else None
    return None if index is None or index.const_value is None else index.const_value.numpy()


def exact(path: Path) -> np.ndarray:
    """The logits of a file with ``DequantizeLinear``, for which ONNX Runtime by itself takes activations in 8 bits."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    result: np.ndarray = onnxruntime.InferenceSession(path, options).run(None, {"input_ids": IDS.numpy()})[0]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("group", [8, 24])
def test_sizes_of_groups_without_a_kernel_are_dequantized(group: int, tmp_path: Path) -> None:
    pack = partial(by_gptq, bits=4, group=group, symmetric=False)
    written = packing.write(tmp_path / "model", build("llama", **SIXTHS), gptq(4, group), pack)
    loaded = load_model(str(tmp_path / "model"))
    result = export(loaded.model, {"input_ids": IDS}, tmp_path / "model.onnx", verify=True)
    assert result.check is not None
    assert result.check.status == "passed"
    assert result.verified is not None
    assert result.verified.agrees
    found = layers(tmp_path / "model.onnx", "DequantizeLinear")
    assert len(found) == len(written.plain)
    assert not layers(tmp_path / "model.onnx", "MatMulNBits")
    assert {node.inputs[0].dtype for node in found if node.inputs[0] is not None} == {ir.DataType.UINT4}
    with pytest.raises(
        UsageError, match=f"groups of {group} numbers need DequantizeLinear with blocks, which opset 20"
    ):
        export(loaded.model, {"input_ids": IDS}, tmp_path / "model.onnx", opset=20)


SIXTHS = {"hidden_size": 96, "intermediate_size": 96}


@pytest.mark.slow
def test_the_accuracy_level_is_that_of_the_provider_and_written_down(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    plain = layers(made("gptq with activation order").path, "MatMulNBits")
    assert {node.attributes["accuracy_level"].value for node in plain} == {0}
    packing.write(tmp_path / "model", build("llama"), AWQ, partial(by_awq, group=32))
    loaded = load_model(str(tmp_path / "model"))
    how: dict[str, Any] = {"check": False, "accuracy_level": "fast", "fuse": "ort-cuda"}
    result = export(loaded.model, {"input_ids": IDS}, tmp_path / "model.onnx", **how)
    found = {node.attributes["accuracy_level"].value for node in layers(tmp_path / "model.onnx", "MatMulNBits")}
    assert found == {0}
    assert result.hierarchy.settings.accuracy_level == 0


@pytest.mark.slow
def test_activations_in_8_bits_are_named_as_the_cause_of_other_outputs(tmp_path: Path) -> None:
    packing.write(tmp_path / "model", build("llama"), AWQ, partial(by_awq, group=32))
    loaded = load_model(str(tmp_path / "model"))
    how: dict[str, Any] = {"frontend": "dynamo", "verify": True, "keep_anyway": True, "accuracy_level": "fast"}
    result = export(loaded.model, {"input_ids": IDS}, tmp_path / "model.onnx", **how)
    found = {node.attributes["accuracy_level"].value for node in layers(tmp_path / "model.onnx", "MatMulNBits")}
    assert found == {4}
    assert result.hierarchy.settings.accuracy_level == 4
    assert result.verified is not None
    assert result.verified.verdict == "differ"
    assert "differ" not in {call.status for call in result.verified.calls}
    assert format_verify(result.verified).startswith("the file is right, but MatMulNBits with accuracy_level 4")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--quantized-as", "qdq"), "nf4 is a table of values: leave out --quantized-as qdq"),
        (("--quantized-as", "qdq", "--accuracy-level", "fast"), "accuracy_level is an attribute of MatMulNBits: leave"),
    ],
)
def test_forms_that_do_not_exist_are_refused_with_status_2(options: tuple[str, ...], told: str, tmp_path: Path) -> None:
    packing.write(tmp_path / "model", build("llama"), FOUR_BITS, CASES["bitsandbytes nf4"].pack)
    result = run("export", tmp_path / "model", "-o", tmp_path / "model.onnx", *options)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert told in result.stderr
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.slow
def test_whole_rows_become_blocks_with_equal_scales(tmp_path: Path) -> None:
    pack = partial(by_compressed_tensors, bits=4, symmetric=True)
    model = build("opt", hidden_size=96, word_embed_proj_dim=96)
    packing.write(tmp_path / "model", model, compressed(4), pack)
    export(load_model(str(tmp_path / "model")).model, {"input_ids": IDS}, tmp_path / "model.onnx", check=False)
    found = stored(onnx.load(tmp_path / "model.onnx"), "model.decoder.layers.0.self_attn.q_proj")
    assert found.scales.shape == (96, 3)  # 96 = 3 * 32
    assert (found.scales == found.scales[:, :1]).all()


@pytest.mark.parametrize("name", ["gptq with activation order", "bitsandbytes nf4"])
def test_every_call_agrees_and_every_entry_has_its_transform(name: str, made: Callable[[str], Made]) -> None:
    loaded = load_model(str(made(name).written.folder))
    report = verify(loaded.model, {"input_ids": IDS}, made(name).path)
    assert report.agrees
    compared = {call.address for call in report.calls if call.status == "agree"}
    assert made(name).written.plain.keys() <= compared
    parameters = report.parameters
    assert parameters is not None
    assert parameters.agrees
    assert not parameters.untraced
    assert parameters.transformed > 2 * len(made(name).written.plain) - 1


@pytest.mark.parametrize(
    "name", ["gptq with activation order", pytest.param("bitsandbytes fp4", marks=pytest.mark.slow)]
)
def test_other_weights_of_the_same_format_are_put_into_a_file(
    name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    case = CASES[name]
    other = build(case.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.5)
    written = packing.write(tmp_path / "other", other, case.settings, case.pack)
    update_weights(made(name).path, written.folder / "model.safetensors", tmp_path / "new.onnx")
    actual = onnxruntime.InferenceSession(tmp_path / "new.onnx").run(None, {"input_ids": IDS.numpy()})[0]
    with torch.no_grad():
        expected = written.dense(input_ids=IDS).logits.numpy()
    assert np.linalg.norm(actual - expected) < 2e-6 * np.linalg.norm(expected)


@pytest.mark.slow
def test_activation_order_is_not_put_into_a_file_that_has_none(made: Callable[[str], Made], tmp_path: Path) -> None:
    tensors = load_file(made("gptq by whole rows").written.folder / "model.safetensors")
    index = "model.layers.0.mlp.down_proj.g_idx"
    tensors[index] = tensors[index].flip(0)
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(
        WeightsError, match="not consecutive, unlike the weights that the file was exported with: export"
    ):
        update_weights(made("gptq by whole rows").path, tmp_path / "other.safetensors", tmp_path / "new.onnx")


def test_numbers_stay_in_the_checkpoint_where_their_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    pack = partial(by_compressed_tensors, bits=4, group=16, symmetric=True)
    packing.write(tmp_path / "model", build("opt").half(), compressed(4, 16), pack)
    loaded = load_model(str(tmp_path / "model"), weights="files")
    result = export(
        loaded.model, {"input_ids": IDS}, tmp_path / "model.onnx", weights="link", source=loaded.weights, check=False
    )
    assert result.weights.linked == {"model/model.safetensors": "in place"}
    assert result.weights.copied_bytes == 0, "the codes and the scales are the checkpoint's own bytes"
    nodes = [node for node in all_nodes(load_onnx(tmp_path / "model.onnx")) if node.op_type == "MatMulNBits"]
    tensors = [value.const_value for node in nodes for value in node.inputs[1:3] if value is not None]
    assert all(isinstance(tensor, ir.ExternalTensor) for tensor in tensors)


@pytest.fixture
def packed_experts(tmp_path: Path) -> LoadedModel:
    """A model whose experts, which are not linear layers, are packed in the checkpoint."""
    build("mixtral").save_pretrained(tmp_path / "apart")
    state = {}
    for name, tensor in load_file(tmp_path / "apart" / "model.safetensors").items():
        if tensor.dim() == 2 and ("proj" in name or "experts" in name):
            plain = packing.quantize(tensor.numpy(), 4, 16, symmetric=True)
            layer = name.removesuffix(".weight")
            state |= {f"{layer}.{role}": torch.from_numpy(array.copy()) for role, array in packing.gptq(plain).items()}
        else:
            state[name] = tensor
    save_file(state, tmp_path / "apart" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "apart" / "config.json").read_text())
    (tmp_path / "apart" / "config.json").write_text(json.dumps({**config, "quantization_config": gptq()}))
    return load_model(str(tmp_path / "apart"))


def test_weights_that_are_not_of_linear_layers_are_named(packed_experts: LoadedModel) -> None:
    assert [note for note in packed_experts.warnings if "written dense: model.layers.0.mlp.experts." in note]


@pytest.mark.slow
def test_weights_that_are_not_of_linear_layers_are_dense(packed_experts: LoadedModel, tmp_path: Path) -> None:
    result = export(packed_experts.model, {"input_ids": IDS}, tmp_path / "model.onnx")
    assert result.check is not None
    assert result.check.status == "passed"
    assert sum(node.op_type == "MatMulNBits" for node in onnx.load(tmp_path / "model.onnx").graph.node) == 4


def test_few_bits_for_each_number_are_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelexport.pytorch.loading.trust.SPARE_ELEMENTS", 0)
    pack = partial(by_gptq, bits=2, group=64, symmetric=True)
    packing.write(tmp_path / "model", build("llama", vocab_size=16, num_hidden_layers=4).half(), gptq(2, 64), pack)
    assert load_model(str(tmp_path / "model")).warnings == ()


def test_cost_counts_the_bytes_that_the_file_has(made: Callable[[str], Made]) -> None:
    order = 128 * 8
    assert packed_layer(made("gptq with activation order"))["bytes"] == 64 * 128 / 2 + 64 * 128 / 16 * (4 + 0.5) + order


def test_cost_counts_numbers_scales_and_zero_points_and_not_their_order(made: Callable[[str], Made]) -> None:
    assert packed_layer(made("gptq with activation order"))["parameters"] == 64 * 128 + 64 * 128 / 16 * 2


def packed_layer(checkpoint: Made) -> Mapping[str, float]:
    """The own figures of a layer of 64 rows and 128 columns."""
    return next(row for row in cost(checkpoint.path).rows() if row.address == "model.layers.0.mlp.down_proj").own


def spoiled(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
    """A checkpoint in which something was changed: its tensors, or its configuration."""
    pack = partial(by_gptq, bits=4, group=16, symmetric=True)
    packing.write(folder, build("llama"), gptq(), pack)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t, s: t.pop(f"{LAYER}.qzeros"), f"the checkpoint lacks {LAYER}.qzeros: copy or download it again"),
        (lambda t, s: s.update(group_size=24), "down_proj has 128 inputs, which groups of 24 do not divide"),
        (lambda t, s: s.update(bits=3), "has numbers of 3 bits: modelexport reads GPTQ with 2, 4 and 8"),
        (lambda t, s: s.update(bits=8), "down_proj.qzeros is int32[8, 8] and should be int32[4, 16]"),
        (lambda t, s: s.update(checkpoint_format="marlin"), "has the GPTQ format 'marlin': convert it"),
        (lambda t, s: s.pop("group_size"), "group_size is missing in the quantization_config of config.json"),
        (lambda t, s: s.update(quant_method="awq"), "qzeros is int32[8, 8] and should be int32[1, 64]"),
        (
            lambda t, s: t.update({f"{LAYER}.scales": t[f"{LAYER}.scales"][:2].clone()}),
            "scales is float16[2, 64] and should",
        ),
        (lambda t, s: t[f"{LAYER}.g_idx"].fill_(1), "does not have 16 columns in each group: download"),
        (lambda t, s: s.update(quant_method="compressed-tensors"), "config_groups is missing"),
        (lambda t, s: s.update(quant_method="bitsandbytes"), "bitsandbytes weights of 8 bits: modelexport reads nf4"),
        (lambda t, s: s.update(quant_method="torchao"), "is quantized by torchao, and it has no such weights"),
        (
            lambda t, s: s.update(quant_method="squeezed"),
            "is quantized by 'squeezed', which is not known: modelexport reads gptq, awq",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(change: Any, told: str, tmp_path: Path) -> None:
    folder = spoiled(tmp_path / "model", change)
    with pytest.raises(ModelLoadError) as refused:
        load_model(str(folder))
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_command_refuses_a_damaged_checkpoint_with_status_2(tmp_path: Path) -> None:
    folder = spoiled(tmp_path / "model", lambda tensors, settings: settings.update(bits=3))
    result = run("export", folder, "-o", tmp_path / "model.onnx")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "modelexport reads GPTQ with 2, 4 and 8" in result.stderr
