"""Folders of sentence-transformers: embeddings are the library's, whichever modules it has."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import sentence_transformers
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sentence_transformers.sparse_encoder.modules import (
    SparseAutoEncoder,
    SparseStaticEmbedding,
    SpladePooling,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import modelexport
from commands import run
from exports import Shared
from modelexport.errors import ModelLoadError
from modelexport.packages.package_kinds import load_for_parts
from modelexport.tools.sentences import sentence_pipelines
from modelexport.tools.sentences.encoding_check import encoding_fault
from modelexport.tools.sentences.sentence_pipelines import (
    in_one_chunk,
    is_pipeline,
    load_pipeline,
    pipeline_folder,
)

WIDTH = 32
SIZES = {
    "vocab_size": 16,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
IDENTITY = "torch.nn.modules.linear.Identity"
DENSE = {"in_features": WIDTH, "out_features": WIDTH}
Modules = list[tuple[str, dict[str, Any]]]
MASK = "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask"
SEVERAL = {"model_type": "MultiVectorEncoder"}
SPARSE = {"model_type": "SparseEncoder"}
SPLADE, AUTOENCODER = (
    f"sentence_transformers.sparse_encoder.modules.{name}" for name in ("SpladePooling", "SparseAutoEncoder")
)
FILLS_MASK = {"transformer_task": "fill-mask"}


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def masked_bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def qwen(layers: int = 1) -> Any:
    """A class with a head."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True, "num_hidden_layers": layers}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES | sizes))


def t5() -> Any:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=16, **sizes))


def folder(
    path: Path, build: Any, modules: Modules, whole: Mapping[str, Any] | None = None, side: str = "right", **first: Any
) -> Path:
    """A folder of a model, with its tokenizer.

    Args:
        modules: The types of the modules after the transformer, with their settings; weights are random.
        whole: The settings of the whole.
        first: The settings of the transformer.
    """
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3) if parameter.dim() > 1 else None
    model.save_pretrained(path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "The", "of", "is", "a", "in", "time", "Water", "list", "Once"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side=side, **names).save_pretrained(path)
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, settings) in enumerate(modules, 1):
        width = {"embedding_dimension": WIDTH} if kind == "Pooling" else {}
        (path / f"{index}_{kind}").mkdir()
        (path / f"{index}_{kind}" / "config.json").write_text(json.dumps(width | settings))
        if kind == "Dense":
            sizes = settings["in_features"], settings["out_features"]
            weights = {f"linear.{name}": one for name, one in torch.nn.Linear(*sizes).state_dict().items()}
            weights |= {"residual.weight": torch.randn(sizes[::-1])} if sizes[0] != sizes[1] else {}
            save_file(weights, path / f"{index}_{kind}" / "model.safetensors")
        if kind == "LayerNorm":
            save_file(
                {f"norm.{n}": v for n, v in torch.nn.LayerNorm(WIDTH).state_dict().items()},
                path / f"{index}_{kind}" / "model.safetensors",
            )
        if kind == AUTOENCODER:
            made = SparseAutoEncoder(**settings)
            made.encoder.weight.data.normal_()
            made.save(str(path / f"{index}_{kind}"))
        own = kind if "." in kind else f"sentence_transformers.models.{kind}"
        entries.append({"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": own})
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "config_sentence_transformers.json").write_text(json.dumps(whole or {}))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, **first}))
    return path


def export(path: Path, out: Path, *, check: bool = True) -> Any:
    loaded, _ = load_for_parts(str(path), "auto", model_class=None, trust_remote_code=False, seed=0, dtype=None)
    given = {"directory": loaded.directory, "source": loaded.weights, "check": check}
    return modelexport.export_package(loaded.model, out, **given)


MIXED: Modules = [
    ("Pooling", {"pooling_mode": ["max", "lasttoken", "mean_sqrt_len_tokens"], "include_prompt": False}),
    ("Dense", {"in_features": 3 * WIDTH, "out_features": WIDTH, "use_residual": True}),
    ("Dense", {**DENSE, "use_residual": True, "module_input_name": "sentence_embedding"}),
]


@pytest.fixture(scope="session")
def pooled(shared: Shared) -> Path:
    """A folder of a model with a head and without layers, and a package of it in ``out``, which was not compared."""

    def make(path: Path) -> None:
        last: Modules = [("Pooling", {"pooling_mode": "lasttoken", "include_prompt": False})]
        export(folder(path / "model", partial(qwen, layers=0), last, side="left"), path / "out", check=False)

    return shared("sentences", make)


def test_a_folder_without_a_tokenizer_is_compared_on_made_up_tokens(pooled: Path, tmp_path: Path) -> None:
    path, notes = Path(shutil.copytree(pooled / "model", tmp_path / "model")), list[str]()
    for file in path.glob("tokenizer*.json"):
        file.unlink()
    assert encoding_fault(load_pipeline(path).model, pooled / "out" / "model.onnx", notes) == ""
    assert [note for note in notes if "no tokenizer" in note]


def test_a_package_whose_pooling_leaves_the_prompt_out_takes_its_length(pooled: Path) -> None:
    session = onnxruntime.InferenceSession(pooled / "out" / "model.onnx")
    assert [value.name for value in session.get_inputs()] == ["input_ids", "attention_mask", "prompt_length"]


@pytest.mark.parametrize(
    ("modules", "whole", "told"),
    [
        ([("Pooling", {"pooling_mode": "median"})], {}, "sentence-transformers cannot load .*median"),
        ([("custom_st.Pooling", {})], {}, "sentence-transformers cannot load .*custom_st"),
        ([(MASK, {"skiplist_words": ["a"]})], SEVERAL, "module 1 leaves tokens out by their text"),
        ([("Pooling", {"pooling_mode": "weightedmean", "include_prompt": False})], {}, "leaves the prompt out of a we"),
        ([], {"model_type": "CrossEncoder"}, "is a CrossEncoder, not one of"),
    ],
)
def test_a_model_whose_embeddings_a_graph_of_tokens_cannot_compute_is_refused(
    modules: Modules, whole: Mapping[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=told):
        load_pipeline(folder(tmp_path / "model", bert, modules, whole))


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ModelLoadError, match=r"pip install 'modelexport\[sentences\]', or .* --bare"):
        load_pipeline(tmp_path)


def test_a_cross_encoder_is_one_model_with_its_head(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", bert, [], transformer_task="sequence-classification")
    assert not is_pipeline(path)


def test_a_package_is_compared_with_what_sentence_transformers_computes(pooled: Path) -> None:
    model = load_pipeline(pooled / "model").model
    next(model.children()).model.embed_tokens.weight.data.add_(1)
    fault = encoding_fault(model, pooled / "out" / "model.onnx", [])
    assert fault.startswith("sentence_embedding of 4 texts padded on the right is off by")


@pytest.fixture(scope="session", params=["", "0_Transformer"])
def of_first_module(pooled: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder of a model whose transformer is in it, or in a folder of its own, as sentence-transformers 1 did."""
    if not request.param:
        return pooled / "model"
    path = tmp_path_factory.mktemp("layout") / "model"
    transformer = shutil.copytree(pooled / "model", path / request.param)
    for name in ("modules.json", "config_sentence_transformers.json", "1_Pooling"):
        (transformer / name).rename(path / name)
    entries = json.loads((path / "modules.json").read_text())
    entries[0]["path"] = request.param
    (path / "modules.json").write_text(json.dumps(entries))
    return path


def test_weights_that_stay_in_files_have_the_names_of_entries(of_first_module: Path) -> None:
    loaded = load_pipeline(of_first_module, weights="files")
    kept = {key for key in loaded.model.state_dict() if key.startswith("0.model.")}
    assert set(loaded.weights.tensors) == kept


def test_the_tokenizer_is_beside_the_transformer(of_first_module: Path) -> None:
    assert (load_pipeline(of_first_module).directory / "tokenizer.json").is_file()


def test_a_first_module_that_is_not_a_transformer_has_its_weights_in_memory(pooled: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(pooled / "model" / "tokenizer.json"))
    sentence_transformers.SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=4)]).save(str(tmp_path))
    assert load_pipeline(tmp_path, weights="files").weights is None
    done = run("export", tmp_path, "-o", tmp_path / "m.onnx")
    assert "StaticEmbedding, the first module of this model, takes input_ids and offsets, and" in done.stderr


@pytest.mark.parametrize("listed", ["{}", "[]", '[{"path": "../other"}]'])
def test_modules_that_are_not_in_the_folder_are_refused(listed: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(listed)
    with pytest.raises(ModelLoadError, match=r"modules\.json (is not a list of modules|names a folder outside)"):
        is_pipeline(tmp_path)


LAYOUTS: dict[str, tuple[Any, Modules, dict[str, Any]]] = {
    "mean": (bert, [("Pooling", {"pooling_mode": "mean"}), ("Normalize", {})], {}),
    "all modes without the prompt": (
        bert,
        [
            (
                "Pooling",
                {"pooling_mode": ["mean", "lasttoken", "cls", "max"], "include_prompt": False},
            )
        ],
        {},
    ),
    "weighted mean": (qwen, [("Pooling", {"pooling_mode_weightedmean_tokens": True})], {"side": "left"}),
    "mixed": (qwen, MIXED, {"side": "left", "whole": {"truncate_dim": 20}}),
    "encoder of a pair": (t5, [("Pooling", {"pooling_mode_mean_sqrt_len_tokens": True}), ("Normalize", {})], {}),
    "layer norm": (bert, [("Pooling", {"pooling_mode": "cls"}), ("LayerNorm", {"dimension": 32}), ("Dropout", {})], {}),
    "dense before pooling": (
        bert,
        [("Dense", {**DENSE, "module_input_name": "token_embeddings"}), ("Pooling", {"pooling_mode": "mean"})],
        {},
    ),
    "several vectors": (
        bert,
        [
            ("Dense", {**DENSE, "module_input_name": "token_embeddings", "activation_function": IDENTITY}),
            (MASK, {"skiplist_tasks": ["document"]}),
            ("Normalize", {"module_input_name": "token_embeddings"}),
        ],
        {"whole": SEVERAL},
    ),
    "sparse": (masked_bert, [(SPLADE, {"pooling_strategy": "max"})], {"whole": SPARSE, **FILLS_MASK}),
    "sparse with few elements": (
        masked_bert,
        [(SPLADE, {"pooling_strategy": "sum", "activation_function": "log1p_relu"})],
        {"whole": {**SPARSE, "max_active_dims": 3}, **FILLS_MASK},
    ),
    "sparse by an autoencoder": (
        bert,
        [("Pooling", {}), (AUTOENCODER, {"input_dim": WIDTH, "hidden_dim": 64, "k": 4, "k_aux": 8})],
        {"whole": SPARSE},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_sentence_transformers_give_its_embeddings(name: str, tmp_path: Path) -> None:
    build, modules, options = LAYOUTS[name]
    result = export(folder(tmp_path / "model", build, modules, **options), tmp_path / "out")  # compares, or raises
    assert not result.notes


class Pools(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooling = SpladePooling()

    def forward(self, token_embeddings: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        features = {"token_embeddings": token_embeddings, "attention_mask": attention_mask}
        with in_one_chunk(self):
            return self.pooling(features)["sentence_embedding"]  # type: ignore[no-any-return]


def test_sparse_pooling_does_not_fix_how_many_tokens_a_text_has() -> None:
    length = torch.export.Dim("length")
    sizes = {"token_embeddings": {1: length}, "attention_mask": {1: length}}
    program = torch.export.export(Pools().eval(), (torch.ones(2, 5, 3), torch.ones(2, 5)), dynamic_shapes=sizes)
    assert (
        program.module()(torch.full((2, 7, 3), 2.0), torch.ones(2, 7)).tolist() == [[pytest.approx(1.0986123)] * 3] * 2
    )


@pytest.mark.slow
def test_a_model_with_routes_gives_the_embeddings_of_its_default_route(tmp_path: Path) -> None:
    modules = list(
        load_pipeline(folder(tmp_path / "one", *LAYOUTS["sparse"][:2], **LAYOUTS["sparse"][2])).model.children()
    )
    query = SparseStaticEmbedding(tokenizer=modules[0].tokenizer)
    routed = Router.for_query_document(query_modules=[query], document_modules=modules)
    sentence_transformers.SparseEncoder(modules=[routed]).save(str(tmp_path / "model"))
    export(tmp_path / "model", tmp_path / "out")  # compares, or raises


@pytest.mark.slow
def test_a_file_has_the_whole_pipeline_as_a_package_has(tmp_path: Path) -> None:
    path, file = folder(tmp_path / "model", bert, [("Pooling", {}), ("Normalize", {})]), tmp_path / "whole.onnx"
    done = run("export", path, "-o", file, "--axes", "batch,sequence")
    assert done.returncode == 0, done.stderr
    assert "out  sentence_embedding float32[batch, 32]" in done.stdout
    assert "Transformer, Pooling (mean), Normalize; --bare: the Transformer alone" in done.stdout
    inputs = {"input_ids": np.array([[2, 5, 3], [2, 4, 0]]), "attention_mask": np.array([[1, 1, 1], [1, 1, 0]])}
    (embedding,) = onnxruntime.InferenceSession(file).run(None, inputs)
    model = load_pipeline(path).model
    with torch.no_grad():
        right = model(**{name: torch.from_numpy(array) for name, array in inputs.items()})["sentence_embedding"]
    np.testing.assert_allclose(embedding, right, atol=1e-6)

    bare = tmp_path / "bare.onnx"
    assert "last_hidden_state" in run("export", path, "-o", bare, "--bare").stdout
    for each in (file, bare):  # with the part of the model that the file has
        assert run("verify", each, "--model", path).returncode == 0


def test_a_model_of_the_hub_is_the_same_as_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "model", bert, [("Pooling", {})])
    monkeypatch.setattr(sentence_pipelines, "hub_answers", lambda: False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(path / "modules.json"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(path))
    assert pipeline_folder("someone/sentences") == path


def test_weights_have_the_type_that_is_asked_for(tmp_path: Path) -> None:
    modules: Modules = [("Pooling", {}), ("Dense", DENSE)]
    model = load_pipeline(folder(tmp_path / "model", bert, modules), dtype="float16").model
    assert {one.dtype for one in model.parameters()} == {torch.float16}
