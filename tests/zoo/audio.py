"""Models of speech, sound and series: torchaudio's, where it is installed, and tiny ones of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo import Built, Case, floats, ids

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WAVE = {
    **SIZES, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
SEQ = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def _pretrained(name: str, inputs: dict[str, Any], **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        kind = getattr(transformers, name)
        return kind(kind.config_class(**options)), inputs

    return build


def _torchaudio(make: Callable[[Any], nn.Module], *inputs: Any) -> Callable[[], Built]:
    def build() -> Built:
        import torchaudio

        return make(torchaudio), inputs

    return build


class Tacotron(nn.Module):
    def __init__(self, torchaudio: Any) -> None:
        super().__init__()
        self.model = torchaudio.models.Tacotron2(
            n_mels=8, n_symbol=20, symbol_embedding_dim=16, encoder_embedding_dim=16, attention_rnn_dim=16,
            attention_hidden_dim=8, decoder_rnn_dim=16, prenet_dim=8, postnet_embedding_dim=16,
        )  # fmt: skip

    def forward(self, tokens, token_lengths, mels, mel_lengths):  # type: ignore[no-untyped-def]
        return self.model(tokens, token_lengths, mels, mel_lengths)[1]


SOUND, LENGTHS = floats(2, 1600), torch.tensor([20, 14])

TORCHAUDIO: dict[str, Callable[[], Built]] = {
    "conformer": _torchaudio(lambda t: t.models.Conformer(8, 2, 16, 2, 5), floats(2, 20, 8), LENGTHS),
    "conv-tasnet": _torchaudio(lambda t: t.models.ConvTasNet(2, 8, 16, 3, 8, 8, 2, 1), floats(2, 1, 800)),
    "deep-speech": _torchaudio(lambda t: t.models.DeepSpeech(20, 16, 8), floats(2, 1, 30, 20)),
    "emformer": _torchaudio(
        lambda t: t.models.Emformer(8, 2, 16, 2, 4, right_context_length=1), floats(2, 9, 8), torch.tensor([9, 7])
    ),
    "hdemucs": _torchaudio(lambda t: t.models.HDemucs(["a", "b"], channels=4, depth=4, nfft=1024), floats(1, 2, 8192)),
    "tacotron2": _torchaudio(Tacotron, ids(20, 2, 7), torch.tensor([7, 5]), floats(2, 8, 5), torch.tensor([5, 5])),
    "wav2letter": _torchaudio(lambda t: t.models.Wav2Letter(10, "mfcc", 8), floats(2, 8, 60)),
    "wav2vec2-torchaudio": _torchaudio(
        lambda t: t.models.wav2vec2_model(
            "layer_norm", [(8, 10, 5), (8, 3, 4)], True, 16, 0.0, 4, 2, 2, 2, 0.0, 24, 0.0, 0.0, False, 0.0, 6
        ),
        SOUND,
    ),
    "wavernn": _torchaudio(
        lambda t: t.models.WaveRNN([4, 4], 16, 16, n_rnn=16, n_fc=16, n_freq=8, n_hidden=8, n_output=8),
        floats(2, 1, 96),
        floats(2, 1, 8, 10),
    ),
    "mel-spectrogram": _torchaudio(lambda t: t.transforms.MelSpectrogram(n_fft=128, n_mels=16), SOUND),
    "mfcc": _torchaudio(lambda t: t.transforms.MFCC(n_mfcc=8, melkwargs={"n_fft": 128, "n_mels": 16}), SOUND),
    "resample": _torchaudio(lambda t: t.transforms.Resample(16000, 8000), SOUND),
    "amplitude": _torchaudio(
        lambda t: nn.Sequential(t.transforms.Spectrogram(128), t.transforms.AmplitudeToDB()), SOUND
    ),
    "squim": _torchaudio(lambda t: t.models.squim_objective_base(), floats(1, 3200)),
}


TOKENS = ids(40, 2, 7)

TRANSFORMERS: dict[str, Callable[[], Built]] = {
    "hubert": _pretrained("HubertModel", {"input_values": SOUND}, **WAVE),
    "wavlm": _pretrained("WavLMModel", {"input_values": SOUND}, **WAVE),
    "unispeech-sat": _pretrained("UniSpeechSatModel", {"input_values": SOUND}, **WAVE),
    "sew-d": _pretrained("SEWDModel", {"input_values": SOUND}, **WAVE, squeeze_factor=2),
    "data2vec": _pretrained(
        "Data2VecAudioModel",
        {"input_values": SOUND},
        **{**WAVE, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
    ),
    "wav2vec2-ctc": _pretrained(
        "Wav2Vec2ForCTC",
        {"input_values": SOUND, "attention_mask": torch.ones(2, 1600, dtype=torch.long), "labels": ids(30, 2, 4)},
        **WAVE,
    ),
    "wav2vec2-conformer": _pretrained("Wav2Vec2ConformerModel", {"input_values": SOUND}, **WAVE),
    "wav2vec2-bert": _pretrained(
        "Wav2Vec2BertModel", {"input_features": floats(2, 20, 16)}, **SIZES, feature_projection_input_dim=16
    ),
    "ast": _pretrained("ASTModel", {"input_values": floats(2, 64, 32)}, **SIZES, max_length=64, num_mel_bins=32),
    "whisper": _pretrained(
        "WhisperForConditionalGeneration",
        {"input_features": floats(2, 16, 60), "decoder_input_ids": TOKENS, "labels": TOKENS},
        **SEQ,
        num_mel_bins=16,
        max_source_positions=30,
        max_target_positions=20,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    ),
    "speech-to-text": _pretrained(
        "Speech2TextModel",
        {
            "input_features": floats(2, 40, 16),
            "attention_mask": torch.ones(2, 40, dtype=torch.long),
            "decoder_input_ids": TOKENS,
        },
        **SEQ,
        input_feat_per_channel=16,
        input_channels=1,
        conv_channels=16,
        max_source_positions=60,
    ),
    "moonshine": _pretrained(
        "MoonshineModel",
        {"input_values": floats(2, 2000), "decoder_input_ids": TOKENS},
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
    ),
    "parakeet": _pretrained(
        "ParakeetEncoder",
        {"input_features": floats(2, 64, 16)},
        **SIZES,
        num_mel_bins=16,
        subsampling_conv_channels=8,
    ),
    "encodec": _pretrained(
        "EncodecModel",
        {"input_values": floats(1, 1, 640)},
        num_filters=4,
        hidden_size=16,
        codebook_size=16,
        codebook_dim=16,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
    ),
    "dac": _pretrained(
        "DacModel",
        {"input_values": floats(1, 1, 640)},
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=32,
        upsampling_ratios=[4, 2],
        n_codebooks=2,
        codebook_size=16,
    ),
    "univnet": _pretrained(
        "UnivNetModel",
        {"input_features": floats(1, 10, 16)},
        model_in_channels=8,
        model_hidden_channels=8,
        num_mel_bins=16,
        kernel_predictor_hidden_channels=8,
    ),
    "hifi-gan": _pretrained(
        "SpeechT5HifiGan", {"spectrogram": floats(2, 10, 16)}, model_in_dim=16, upsample_initial_channel=16
    ),
    "clap-audio": _pretrained(
        "ClapAudioModel",
        {"input_features": floats(1, 1, 64, 64)},
        hidden_size=16,
        patch_embeds_hidden_size=16,
        depths=[1, 1],
        num_attention_heads=[2, 2],
        spec_size=128,
        num_mel_bins=64,
        patch_size=4,
        window_size=4,
        projection_dim=8,
    ),
    "vits": _pretrained(
        "VitsModel",
        {"input_ids": TOKENS},
        vocab_size=40,
        **SIZES,
        ffn_dim=24,
        flow_size=16,
        spectrogram_bins=9,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        duration_predictor_filter_channels=16,
        wavenet_dilation_rate=1,
        posterior_encoder_num_wavenet_layers=1,
        prior_encoder_num_flows=1,
        noise_scale=0.0,  # otherwise it draws random numbers, and no file agrees with it
        noise_scale_duration=0.0,
    ),
    "bark-semantic": _pretrained(
        "BarkSemanticModel",
        {"input_ids": TOKENS},
        input_vocab_size=40,
        output_vocab_size=40,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        block_size=32,
    ),
    "patchtst": _pretrained(
        "PatchTSTModel",
        {"past_values": floats(2, 32, 3)},
        num_input_channels=3,
        context_length=32,
        d_model=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
        patch_length=4,
        patch_stride=4,
    ),
    "patchtsmixer": _pretrained(
        "PatchTSMixerModel",
        {"past_values": floats(2, 32, 3)},
        num_input_channels=3,
        context_length=32,
        d_model=16,
        num_layers=2,
        patch_length=4,
        patch_stride=4,
    ),
    "timeseries": _pretrained(
        "TimeSeriesTransformerForPrediction",
        {
            "past_values": floats(2, 19),
            "past_time_features": floats(2, 19, 2),
            "past_observed_mask": torch.ones(2, 19),
            "future_time_features": floats(2, 6, 2),
            "future_values": floats(2, 6),
        },
        prediction_length=6,
        context_length=12,
        lags_sequence=[1, 7],
        num_time_features=2,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    ),
    "fastspeech2": _pretrained(
        "FastSpeech2ConformerModel",
        {"input_ids": TOKENS, "attention_mask": torch.ones(2, 7, dtype=torch.long)},
        hidden_size=16,
        vocab_size=40,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
        encoder_linear_units=16,
        decoder_linear_units=16,
        speech_decoder_postnet_units=16,
        duration_predictor_channels=8,
        pitch_predictor_channels=8,
        energy_predictor_channels=8,
    ),
    "mimi": _pretrained(
        "MimiModel",
        {"input_values": floats(1, 1, 640)},
        num_filters=8,
        hidden_size=16,
        codebook_size=16,
        codebook_dim=16,
        upsample_groups=16,
        vector_quantization_hidden_dimension=16,
        upsampling_ratios=[4, 2],
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        num_quantizers=2,
        num_semantic_quantizers=1,
    ),
}

CASES = [
    *(
        Case("torchaudio", name, build)
        for name, build in TORCHAUDIO.items()
        if importlib.util.find_spec("torchaudio") is not None
    ),
    *(Case("speech and series of transformers", name, build) for name, build in TRANSFORMERS.items()),
]
