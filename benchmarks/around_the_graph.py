"""What is around the graphs of packages, compared with the libraries: embeddings, chats, long texts, images in tiles.

    OMP_NUM_THREADS=1 python benchmarks/around_the_graph.py [embeddings|chats|lengths|tiles ...]

Models are tiny and random. Embeddings: the worst error of a package, as a share of its size, against `encode` of
sentence-transformers (`pip install sentence-transformers`), of four texts together and one alone, padded on the right
and on the left, with and without a prompt. Chats: two turns in onnxruntime-genai by its own tokenizer, the
first ended by an end token of `generation_config.json`, and a third after one that was cut; tokens against `generate`.
Lengths: tokens of the loop of docs/generating-loop.md, past a window or the length for which positions were made.
Tiles: the same for images that a processor cuts, the last tile with padding.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import modelexport
from modelexport.packages.package_kinds import load_for_parts

PAGE = Path(modelexport.__file__).parents[2] / "docs" / "generating-loop.md"
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 8, "pad_token_id": 0}
TEXTS = ["The cat sat on the mat .", "A dog .", "Once upon a time , in a house by the sea .", "Water boils ."]
PROMPT = "Represent this : "


def random(build: Callable[[], Any], scale: float = 0.3) -> Any:
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, scale) if parameter.dim() > 1 else None
    return model


def outcome(work: Callable[[], str]) -> str:
    """What was found, or the error in a line."""
    try:
        return work()
    except Exception as error:  # whatever an export or a runtime says is the result
        return " ".join(f"{type(error).__name__}: {error}".split())[:160]


# Embeddings

SMALL = {**SIZES, "vocab_size": 99, "pad_token_id": 0}
DENSE = {"in_features": 32, "out_features": 32}
PAIR = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SMALL))


def qwen() -> Any:
    config = transformers.Qwen3Config(**DECODER, vocab_size=99, tie_word_embeddings=True)
    return transformers.Qwen3ForCausalLM(config)


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**PAIR))


Layout = tuple[Callable[[], Any], str, list[tuple[str, dict[str, Any]]], dict[str, Any]]
LAYOUTS: dict[str, Layout] = {
    "Dense with a residual": (bert, "right", [("Pooling", {}), ("Dense", {**DENSE, "use_residual": True})], {}),
    "include_prompt false": (bert, "right", [("Pooling", {"include_prompt": False})], {}),
    "weightedmean, padded left": (lambda: qwen().model, "left", [("Pooling", {"pooling_mode": "weightedmean"})], {}),
    "a class with a head, last token": (
        qwen,
        "left",
        [("Pooling", {"pooling_mode": "lasttoken"}), ("Normalize", {})],
        {},
    ),
    "mean_sqrt_len_tokens": (bert, "right", [("Pooling", {"pooling_mode": "mean_sqrt_len_tokens"})], {}),
    "LayerNorm and Dropout": (
        bert,
        "right",
        [("Pooling", {"pooling_mode": "cls"}), ("LayerNorm", {"dimension": 32}), ("Dropout", {"dropout": 0.3})],
        {},
    ),
    "Dense on tokens, before pooling": (
        bert,
        "right",
        [("Dense", {**DENSE, "module_input_name": "token_embeddings"}), ("Pooling", {}), ("Normalize", {})],
        {},
    ),
    "five modes without the prompt": (
        bert,
        "right",
        [
            (
                "Pooling",
                {"pooling_mode": ["max", "mean", "weightedmean", "cls", "lasttoken"], "include_prompt": False},
            )
        ],
        {},
    ),
    "encoder of T5, a Dense of another size with a residual": (
        t5,
        "right",
        [("Pooling", {}), ("Dense", {**DENSE, "out_features": 8, "use_residual": True}), ("Normalize", {})],
        {},
    ),
    "truncate_dim": (bert, "right", [("Pooling", {}), ("Normalize", {})], {"truncate_dim": 12}),
    "several vectors (ColBERT)": (
        bert,
        "right",
        [
            ("Dense", {**DENSE, "module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}),
            ("MultiVectorMask", {"skiplist_words": []}),
            ("Normalize", {"module_input_name": "token_embeddings"}),
        ],
        {"model_type": "MultiVectorEncoder"},
    ),
}


def sentence_folder(path: Path, layout: Layout) -> Path:
    build, side, modules, whole = layout
    random(build).save_pretrained(path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for text in [*TEXTS, PROMPT] for word in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side=side, **names).save_pretrained(path)
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, settings) in enumerate(modules, 1):
        folder = path / f"{index}_{kind}"
        folder.mkdir()
        width = {"embedding_dimension": 32, "pooling_mode": "mean"} if kind == "Pooling" else {}
        (folder / "config.json").write_text(json.dumps(width | settings))
        sizes = settings.get("in_features", 0), settings.get("out_features", 0)
        weights = {"linear.weight": torch.randn(sizes[::-1]) / 6, "linear.bias": torch.randn(sizes[1])}
        if settings.get("use_residual") and sizes[0] != sizes[1]:
            weights["residual.weight"] = torch.randn(sizes[::-1]) / 6
        if kind == "LayerNorm":
            weights = {"norm.weight": torch.rand(32), "norm.bias": torch.rand(32)}
        save_file(weights, folder / "model.safetensors")
        kinds = {"MultiVectorMask": "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask"}
        of_kind = kinds.get(kind, f"sentence_transformers.models.{kind}")
        entries.append({"idx": index, "name": str(index), "path": folder.name, "type": of_kind})
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "config_sentence_transformers.json").write_text(json.dumps(whole))
    return path


def embedding_error(layout: Layout, folder: Path) -> str:
    import sentence_transformers

    path = sentence_folder(folder / "model", layout)
    loaded, _ = load_for_parts(str(path), "auto", model_class=None, trust_remote_code=False, seed=0, dtype=None)
    modelexport.export_package(loaded.model, folder / "out", directory=path, source=loaded.weights)
    session = onnxruntime.InferenceSession(folder / "out" / "model.onnx")
    library = getattr(sentence_transformers, layout[3].get("model_type", "SentenceTransformer"))(
        str(path), device="cpu"
    )
    worst = 0.0
    for side, texts, prompt in itertools.product(("right", "left"), (TEXTS, TEXTS[:1]), (None, PROMPT)):
        library.tokenizer.padding_side = side
        features = library.preprocess(texts, prompt=prompt)
        feeds = {one.name: np.asarray(features.get(one.name, 0), np.int64) for one in session.get_inputs()}
        (found,) = session.run(None, feeds)
        if "model_type" in layout[3]:
            kept = np.asarray(features["attention_mask"], bool)
            right = library(dict(features))["token_embeddings"].detach().numpy()[kept]
            found = found[kept]
        else:
            right = library.encode(texts, prompt=prompt)
        if found.shape != right.shape:
            return f"another shape: {list(found.shape)} for {list(right.shape)}"
        worst = max(worst, float(np.linalg.norm(found - right) / np.linalg.norm(right)))
    return f"{worst:.1e}"


# Chats

CHATML = (
    "{% for m in messages %}<|a|>{{ m['role'] }}\n{{ m['content'] }}<|z|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|a|>assistant\n{% endif %}"
)
HEADERS = (
    "{% for m in messages %}<|a|>{{ m['role'] }}<|b|>\n\n{{ m['content'] | trim }}<|z|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>assistant<|b|>\n\n{% endif %}"
)
TURNS = (
    "{% for m in messages %}<|a|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<|z|>\n{% endfor %}{% if add_generation_prompt %}<|a|>model\n{% endif %}"
)
TAGS = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|z|>\n{% endfor %}<|assistant|>\n"
CHATS = {
    "Llama": HEADERS,
    "Gemma2": TURNS,
    "Qwen2": CHATML,
    "Phi3": TAGS,
    "Granite": HEADERS,
    "Olmo2": TAGS,
    "Cohere": TURNS,
    "Mistral": CHATML,
}
SPECIAL = ["<|pad|>", "<|a|>", "<|b|>", "<|z|>"]


def chat(kind: str, template: str, folder: Path) -> str:
    import onnxruntime_genai as genai

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters])}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=SPECIAL)
    tokenizer.chat_template = template
    sizes = {**DECODER, "vocab_size": len(vocabulary), "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = random(lambda: transformers.AutoModelForCausalLM.from_config(config))

    def generated(tokens: list[int], count: int) -> list[int]:
        made = model.generate(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), max_new_tokens=count)
        return made[0].tolist()[len(tokens) :]

    said = [{"role": "user", "content": "hello"}]
    prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    model.generation_config.eos_token_id = [2, generated(prompt, 6)[-1]]
    folder = folder.resolve()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    loaded, _ = load_for_parts(
        str(folder / "model"), "auto", model_class=None, trust_remote_code=False, seed=0, dtype=None
    )
    modelexport.export_package(loaded.model, folder / "out", directory=folder / "model", source=loaded.weights)
    runtime = genai.Model(str(folder / "out"))
    words_of_genai = genai.Tokenizer(runtime)
    parameters = genai.GeneratorParams(runtime)
    parameters.set_search_options(max_length=400, do_sample=False)
    generator = genai.Generator(runtime, parameters)
    text = words_of_genai.apply_chat_template(json.dumps(said), add_generation_prompt=True)
    if words_of_genai.encode(text).tolist() != prompt:
        return "other tokens for the template"

    def turn(added: list[int], most: int = 40) -> tuple[list[int], list[int]]:
        """What was generated, and what `generate` does from the same tokens, without the end token."""
        generator.append_tokens(added)
        before = [int(token) for token in generator.get_sequence(0)]
        while not generator.is_done() and generator.token_count() < len(before) + most:
            generator.generate_next_token()
        right = generated(before, most)
        ended = right[-1] in model.generation_config.eos_token_id
        return [int(token) for token in generator.get_sequence(0)][len(before) :], right[:-1] if ended else right

    again, more = (tokenizer.encode(f"<|z|>\n{word}") for word in ("again", "more"))
    found, right = turn(prompt)
    if found != right:
        return f"goes on for {len(found)} tokens, generate for {len(right)}"
    found, right = turn(again, 5)
    if found != right:
        return "ends where generate does; other tokens in the second turn"
    tokens = [int(token) for token in generator.get_sequence(0)]
    generator.rewind_to(len(tokens) - 2)
    found, right = turn([*tokens[-2:], *more], 5)
    return "equal in three turns" if found == right else "other tokens in the third turn"


# Lengths and tiles

ROPE = {"rope_theta": 100.0, "original_max_position_embeddings": 16}
LONG = {**ROPE, "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
LENGTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi-3, longrope": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    "Llama, longrope": ("Llama", {"rope_parameters": LONG}),
    "Llama, YaRN": ("Llama", {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}}),
    "Llama, llama3": (
        "Llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "Mistral, window of 8": ("Mistral", {"sliding_window": 8}),
    "Gemma 2, window of 12": ("Gemma2", {"sliding_window": 12, "num_hidden_layers": 2}),
    "Qwen 2, window of 10": ("Qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 0}),
}
IMAGE = 60
TEXT = {"model_type": "llama", **DECODER, "vocab_size": 99, "bos_token_id": 1}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
CUT = {"text_config": TEXT, "vision_config": {**VISION, "image_size": 16, "patch_size": 4}, "image_token_id": IMAGE}
PERCEIVER = {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4, "resampler_head_dim": 8}
PERCEIVER |= {"num_key_value_heads": 2, "hidden_size": 32}
TILES: dict[str, dict[str, Any]] = {
    "Idefics3": {**CUT, "scale_factor": 2, "pad_token_id": 0},
    "SmolVLM": {**CUT, "scale_factor": 2, "pad_token_id": 0},
    "Idefics2": {**CUT, "perceiver_config": PERCEIVER},
}


def the_loop() -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1], names)  # type: ignore[index]
    return names["generate"]


def against_generate(model: Any, folder: Path, prompts: list[dict[str, Any]], tokens: int) -> str:
    model.generation_config.eos_token_id = None
    equal = []
    for prompt in prompts:
        taken = {name: torch.from_numpy(one) for name, one in prompt.items()}
        right = model.generate(**taken, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        found = the_loop()(folder, dict(prompt), tokens)
        equal.append(found.tolist() == right[:, prompt["input_ids"].shape[1] :].tolist())
    return f"{sum(equal)} of {len(equal)} prompts equal"


def long_text(kind: str, settings: dict[str, Any], folder: Path) -> str:
    sizes = {**DECODER, "vocab_size": 99, "eos_token_id": None, "tie_word_embeddings": False, **settings}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = random(lambda: transformers.AutoModelForCausalLM.from_config(config))
    modelexport.export_package(model, folder / "out")
    draw = np.random.default_rng(0)
    prompts = []
    for lengths in ((10,), (14, 6, 9), (20,)):
        mask = (np.arange(max(lengths)) >= max(lengths) - np.array(lengths)[:, None]).astype(np.int64)
        prompts.append({"input_ids": draw.integers(3, 90, mask.shape) * mask, "attention_mask": mask})
    return against_generate(model, folder / "out", prompts, 24)


def tiles(kind: str, settings: dict[str, Any], folder: Path) -> str:
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = random(lambda: getattr(transformers, f"{kind}ForConditionalGeneration")(config))
    (folder / "model").mkdir()
    (folder / "model" / "preprocessor_config.json").write_text("{}")
    modelexport.export_package(model, folder / "out", directory=folder / "model")
    draw, prompts = np.random.default_rng(0), []
    for count in (1, 3, 4):
        mask = np.ones((1, count, 16, 16), dtype=np.int64)
        mask[:, -1:, 8:] = 0
        ids = np.array([[5, *[IMAGE] * 4 * count, 7, 9]])
        pixels = draw.standard_normal((1, count, 3, 16, 16)).astype(np.float32)
        text = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        prompts.append({**text, "pixel_values": pixels, "pixel_attention_mask": mask})
    return against_generate(model, folder / "out", prompts, 8)


def rows(kind: str) -> Iterator[tuple[str, Callable[[Path], str]]]:
    match kind:
        case "embeddings":
            yield from ((name, lambda to, one=one: embedding_error(one, to)) for name, one in LAYOUTS.items())
        case "chats":
            yield from ((name, lambda to, n=name, t=template: chat(n, t, to)) for name, template in CHATS.items())
        case "lengths":
            yield from ((name, lambda to, one=one: long_text(*one, to)) for name, one in LENGTHS.items())
        case "tiles":
            yield from ((name, lambda to, n=name, s=settings: tiles(n, s, to)) for name, settings in TILES.items())


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for kind in sys.argv[1:] or ("embeddings", "chats", "lengths", "tiles"):
        print(f"\n| {kind} | |\n|---|---|")
        for name, work in rows(kind):
            with tempfile.TemporaryDirectory() as folder:
                print(f"| {name} | {outcome(lambda: work(Path(folder)))} |", flush=True)  # noqa: B023


if __name__ == "__main__":
    main()
