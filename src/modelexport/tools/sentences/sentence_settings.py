"""The settings of the modules of sentence-transformers, as its folders have them: one that is not known is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from modelexport.core.json_decoding import decode_json
from modelexport.core.limits import SETTINGS_BYTES
from modelexport.errors import FileFormatError, ModelLoadError
from modelexport.files.regular_files import read_regular

_T = TypeVar("_T")
Mode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Feature = Literal["sentence_embedding", "token_embeddings"]


class Config(msgspec.Struct, forbid_unknown_fields=True):
    """The settings of a module: each is used, or changes how texts become tokens, or nothing. Others are refused."""


class Entry(Config):
    """An entry of ``modules.json``."""

    name: Annotated[str, msgspec.Meta(pattern=r"^\w+$")]
    type: str
    path: str = ""
    idx: int = 0
    kwargs: Annotated[list[str], msgspec.Meta(max_length=0)] = []


class Nothing(Config):
    trust_remote_code: bool = False


class TextOutput(Config):
    method: Literal["forward"]
    method_output_name: Literal["last_hidden_state"]


class Outputs(msgspec.Struct):
    text: TextOutput


class TransformerConfig(Config):
    transformer_task: Literal["feature-extraction"] = "feature-extraction"
    modality_config: Outputs | None = None
    module_output_name: Literal["token_embeddings"] = "token_embeddings"
    model_args: Nothing | None = None
    model_kwargs: Nothing | None = None
    config_args: Nothing | None = None
    config_kwargs: Nothing | None = None
    tokenizer_args: Any = None
    processor_kwargs: Any = None
    processing_kwargs: Any = None
    max_seq_length: Any = None
    do_lower_case: Any = None
    unpad_inputs: Any = None
    query_length: Any = None
    document_length: Any = None
    query_expansion: Any = None


class PoolingConfig(Config):
    pooling_mode: Mode | Annotated[list[Mode], msgspec.Meta(min_length=1)] | None = None
    include_prompt: bool = True
    embedding_dimension: Any = None
    word_embedding_dimension: Any = None
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False

    @property
    def modes(self) -> list[str]:
        """The modes in their order; without any, the mean."""
        if self.pooling_mode is not None:
            return [self.pooling_mode] if isinstance(self.pooling_mode, str) else [*self.pooling_mode]
        older = [name for name in self.__struct_fields__ if name.startswith("pooling_mode_") and getattr(self, name)]
        names = [name.removeprefix("pooling_mode_") for name in older or ["mean_tokens"]]
        return [name if name in get_args(Mode) else name.rpartition("_")[0] for name in names]


class NormalizeConfig(Config):
    module_input_name: Feature = "sentence_embedding"
    module_output_name: Feature | None = None


class DenseConfig(NormalizeConfig, kw_only=True):
    in_features: Annotated[int, msgspec.Meta(gt=0)]
    out_features: Annotated[int, msgspec.Meta(gt=0)]
    bias: bool = True
    activation_function: Annotated[str, msgspec.Meta(pattern=r"^torch\.nn\.")] = "torch.nn.modules.activation.Tanh"
    use_residual: bool = False


class LayerNormConfig(Config):
    dimension: Annotated[int, msgspec.Meta(gt=0)]


class DropoutConfig(Config):
    dropout: float = 0.2


class MaskConfig(Config):
    skiplist_words: Annotated[list[str], msgspec.Meta(max_length=0)] = []
    skiplist_tasks: Any = None
    keep_only_token_ids: None = None


class ModelConfig(msgspec.Struct):
    """The settings of the whole that matter here."""

    model_type: str = "SentenceTransformer"
    truncate_dim: Annotated[int, msgspec.Meta(gt=0)] | None = None


def read_model_settings(directory: Path) -> ModelConfig:
    """The settings of the whole."""
    return read_if_there(directory / "config_sentence_transformers.json", ModelConfig())


def transformer_settings(folder: Path, kind: type[_T]) -> _T | None:
    """The settings of a transformer, whose file older versions named after the kind of the model."""
    path = next(iter(sorted(folder.glob("sentence_*_config.json"))), None)
    return None if path is None else read_settings(path, kind)


def read_if_there(path: Path, default: _T) -> _T:
    return read_settings(path, type(default)) if path.is_file() else default


def read_settings(path: Path, kind: type[_T]) -> _T:
    try:
        return decode_json(read_regular(path, SETTINGS_BYTES), kind=kind)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"{path} has a setting that a package does not support: {error}") from error
    except (FileFormatError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}): copy or download it again") from error
