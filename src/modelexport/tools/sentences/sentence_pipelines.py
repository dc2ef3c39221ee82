"""Models of sentence-transformers, loaded by that library, as one module from tokens to embeddings."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelexport.core.missing_extras import missing_extra
from modelexport.core.replaced_attributes import attribute_set
from modelexport.core.text import error_line
from modelexport.errors import ModelLoadError, raised_as
from modelexport.files.first_module_folder import SENTENCE_TRANSFORMER, first_module_folder
from modelexport.files.named_models import BERT_TINY, named_folder
from modelexport.files.regular_files import read_json
from modelexport.packages.model_parts import ModelPart
from modelexport.packages.package_kinds import Loads
from modelexport.pytorch.loading import LoadedModel, load_model
from modelexport.pytorch.loading.hugging_face import hub_answers, quiet_transformers
from modelexport.pytorch.loading.trust import no_questions

SENTENCE, TOKENS = "sentence_embedding", "token_embeddings"
_KINDS = ("SentenceTransformer", "MultiVectorEncoder", "SparseEncoder")


class SentencePipeline(nn.Module):
    """The modules of a sentence-transformers model one after the other, from tokens to an embedding.

    Args:
        library: The model as the library loads it.
        output: The feature that is returned: the embedding of the sentence, or those of its tokens.
    """

    def __init__(self, library: Any, output: str) -> None:
        super().__init__()
        self.library = (library,)  # in a tuple: its modules are this module's
        for name, module in library.named_children():
            self.add_module(name, module)
        self.output = output
        self.width = getattr(library, "truncate_dim", None) if output == SENTENCE else None
        self.is_sparse = is_sparse(library)
        self.most_active = library.max_active_dims if self.is_sparse else None
        self.takes_prompt_length = any(map(_leaves_prompt_out, self.children()))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, prompt_length: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        features = {"input_ids": input_ids, "attention_mask": attention_mask}
        with in_one_chunk(self):
            features = self._features(features, prompt_length)
        embedding = features[self.output]
        if self.most_active is not None:
            from sentence_transformers.util import select_max_active_dims

            embedding = select_max_active_dims(embedding, self.most_active)
        return {self.output: embedding if self.width is None else embedding[..., : self.width]}

    def _features(
        self, features: dict[str, torch.Tensor], prompt_length: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        attention_mask = features["attention_mask"]
        for module in self.children():
            features = dict(features)  # the modules of the library change what they are given
            if prompt_length is not None and _leaves_prompt_out(module):
                # The library asks for the length as a number of Python, which a graph cannot have.
                features["attention_mask"] = _without_prompt(attention_mask, prompt_length)
            features = module(features, **self._keywords_of(module))
        return features

    def _keywords_of(self, module: nn.Module) -> dict[str, Any]:
        takes = self.most_active is not None and "max_active_dims" in getattr(module, "forward_kwargs", ())
        return {"max_active_dims": self.most_active} if takes else {}


def is_sparse(library: Any) -> bool:
    """Whether a model of the library is a ``SparseEncoder``."""
    return hasattr(library, "max_active_dims")


@contextmanager
def in_one_chunk(model: nn.Module) -> Iterator[None]:
    """Inside the block, a pooling that takes all tokens as one chunk does not fix how many they are: ``range(0, n, n)``
    has one element for every size ``n``, but Python makes a number of it."""
    modules = (module for module in model.modules() if getattr(module, "chunk_size", 0) is None)
    names = {type(module).__module__ for module in modules}
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(attribute_set(sys.modules[name], "range", _range))
        yield


def _range(*bounds: int) -> Iterable[int]:
    whole = len(bounds) == 3 and isinstance(bounds[0], int) and bounds[0] == 0 and bounds[1] is bounds[2]
    return bounds[:1] if whole else range(*bounds)


def _leaves_prompt_out(module: nn.Module) -> bool:
    return getattr(module, "include_prompt", True) is False


def _without_prompt(mask: torch.Tensor, prompt_length: torch.Tensor) -> torch.Tensor:
    """A mask without the padding on the left and the tokens of the prompt that follow it."""
    begin = mask.to(torch.int32).argmax(1, keepdim=True)
    places = torch.arange(mask.shape[1], device=mask.device)[None]
    return mask * (places >= begin + prompt_length)


def pipeline_folder(spec: str) -> Path | None:
    """The folder of the pipeline that ``spec`` names, here or on the hub; ``None`` if it is another model."""
    folder = named_folder(spec)
    if folder is None and spec != BERT_TINY and ":" not in spec:
        from huggingface_hub import hf_hub_download, snapshot_download

        local_only = not hub_answers()
        with suppress(Exception):  # of the hub or its client for HTTP: whoever loads the model says what is wrong
            hf_hub_download(spec, SENTENCE_TRANSFORMER, local_files_only=local_only)
            files = ["*.json", "*.txt", "*.model", "*.safetensors", "*pytorch_model.bin"]
            folder = Path(snapshot_download(spec, allow_patterns=files, local_files_only=local_only))
    return folder if folder is not None and is_pipeline(folder) else None


def is_pipeline(directory: Path) -> bool:
    """Whether a folder holds a pipeline. A cross encoder, which has the same files, is one model with its head."""
    if not (directory / SENTENCE_TRANSFORMER).is_file():
        return False
    settings = next(iter(sorted(first_module_folder(directory).glob("sentence_*_config.json"))), None)
    task = {} if settings is None else read_json(settings, ModelLoadError, "copy or download it again")
    return bool(task.get("transformer_task") != "sequence-classification")


def load_library(directory: Path, dtype: torch.dtype | str, trust_remote_code: bool) -> Any:
    """The model in a folder as sentence-transformers loads it, on the CPU.

    Raises:
        ModelLoadError: The library is not installed or does not load it, or it is not a model of one or several dense
            vectors.
    """
    try:
        import sentence_transformers
    except ImportError as error:
        raise ModelLoadError(
            f"{directory} is a model of sentence-transformers: {missing_extra(error) or error_line(error)}, "
            "or export its transformer alone with --bare"
        ) from error
    settings = directory / "config_sentence_transformers.json"
    whole = read_json(settings, ModelLoadError, "copy or download it again") if settings.is_file() else {}
    kind = whole.get("model_type", _KINDS[0])
    if kind not in _KINDS:
        raise ModelLoadError(f"{directory} is a {kind}, not one of {', '.join(_KINDS)}: export it with --bare")
    how = {"trust_remote_code": trust_remote_code, "model_kwargs": {"dtype": dtype}}
    problem = f"sentence-transformers cannot load {directory}"
    with quiet_transformers(), no_questions(), raised_as(lambda error: ModelLoadError(f"{problem}: {_line(error)}")):
        return getattr(sentence_transformers, kind)(str(directory), device="cpu", local_files_only=True, **how).eval()


def _line(error: Exception) -> str:
    return f"{error_line(error)}; copy or download it again, or export its transformer alone with --bare"


def load_pipeline(
    directory: Path, *, trust_remote_code: bool = False, dtype: str | None = None, weights: Loads = "memory"
) -> LoadedModel:
    """Load the pipeline in a folder, in eval mode. Modules and entries have the names of sentence-transformers."""
    library = load_library(directory, dtype or "auto", trust_remote_code)
    modules = dict(library.named_children())
    for name, module in modules.items():
        if _leaves_prompt_out(module) and "weightedmean" in module.pooling_mode:
            raise ModelLoadError(f"{directory}: module {name} leaves the prompt out of a weighted mean: use --bare")
        if getattr(module, "skiplist_words", None) or getattr(module, "keep_only_token_ids", None):
            raise ModelLoadError(f"{directory}: module {name} leaves tokens out by their text: use --bare")
    pooled = any(hasattr(module, "pooling_mode") for module in modules.values())
    kept = None
    name, first = next(iter(modules.items()))
    if weights != "memory" and hasattr(first, "model"):
        streamed = load_model(
            str(directory),
            model_class=type(first.model).__name__,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            weights=weights,
        )
        if streamed.weights is not None:
            first.model, prefix = streamed.model, f"{name}.model."
            tensors = {f"{prefix}{key}": tensor for key, tensor in streamed.weights.tensors.items()}
            made = {f"{prefix}{key}": what for key, what in streamed.weights.made.items()}
            kept = dataclasses.replace(streamed.weights, tensors=tensors, made=made)
    model = SentencePipeline(library, SENTENCE if pooled or is_sparse(library) else TOKENS)
    classes = ", ".join(f"{type(module).__name__}{_modes(module)}" for module in modules.values())
    about = f"as in sentence-transformers: {classes}; --bare: the Transformer alone"
    return LoadedModel(model.eval(), None, directory.resolve().name, first_module_folder(directory), (), kept, about)


def _modes(module: nn.Module) -> str:
    """How a module pools, or which of its routes the graph has."""
    modes: Any = getattr(module, "pooling_mode", None) or getattr(module, "default_route", None) or ()
    return f" ({modes if isinstance(modes, str) else ', '.join(modes)})" if modes else ""


def pipeline_parts(model: SentencePipeline) -> list[ModelPart]:
    """The parts of a pipeline in the order in which they run, with example inputs.

    Raises:
        ModelLoadError: Its first module takes something else than token ids and a mask.
    """
    taken: dict[str, Any] = {}
    with suppress(Exception):  # a folder without a tokenizer
        taken = model.library[0].preprocess(["a"])
    if taken and "attention_mask" not in taken:
        first = type(next(model.children())).__name__
        raise ModelLoadError(
            f"{first}, the first module of this model, takes {' and '.join(taken)}, and packages give token ids and a "
            "mask: export a module of your own that makes these of them, as FILE.py:FUNCTION"
        )
    ids = torch.arange(10).view(2, 5) + 1
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    prompt = {"prompt_length": torch.tensor(2)} if model.takes_prompt_length else {}
    return [ModelPart("model", model, {"input_ids": ids, "attention_mask": mask, **prompt})]
