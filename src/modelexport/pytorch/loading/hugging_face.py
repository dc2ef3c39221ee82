"""Loading a Hugging Face directory or hub name as a module; each error is one line that says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modelexport.core.limits import LARGE_WEIGHTS
from modelexport.core.text import error_line, first_few, plural
from modelexport.errors import ModelLoadError, WeightsError, raised_as
from modelexport.files.first_module_folder import first_module_folder
from modelexport.files.named_models import WAYS_TO_NAME_IT, named_folder
from modelexport.files.regular_files import read_json
from modelexport.files.safetensors_files import INDEX, SINGLE, SafetensorsFile, checkpoint
from modelexport.pytorch.checkpoints.lazy_weights import build_without_weights, fill_weights
from modelexport.pytorch.checkpoints.quantized_linear import dequantized
from modelexport.pytorch.loading.loaded import TOKENIZER_FILES, LoadedModel
from modelexport.pytorch.loading.trust import check_config, no_larger_than, no_questions
from modelexport.weights.bytes_of_entries import Weights
from modelexport.weights.packed.known_formats import FORMATS, find_packed
from modelexport.weights.packed.scheme import Scheme


def load_hugging_face(
    spec: str, model_class: str | None, trust_remote_code: bool, dtype: str | None, weights: str
) -> LoadedModel:
    directory = named_folder(spec)
    if directory is not None:
        directory = first_module_folder(directory)
    source = spec if directory is None else str(directory)
    with quiet_transformers(), no_questions():
        local_only = directory is not None or not hub_answers()
        config = _read_config(directory) if directory else _fetch_config(spec, local_only)
        check_config(spec, config)
        cls, notes = _choose_class(spec, config, model_class, trust_remote_code)
        _check_own_code(spec, config, cls, trust_remote_code)
        settings = _packing(spec, config)
        files = None if weights == "memory" and settings is None else _checkpoint(spec, directory, local_only)
        if files is None and (weights == "files" or settings is not None):
            what = "weights can only be linked or streamed" if settings is None else "packed weights can only be read"
            raise ModelLoadError(f"{spec} has no safetensors files: {what} from those")
        if files is not None:
            stay = weights == "files" or (weights == "auto" and sum(file.size for file in files) > LARGE_WEIGHTS)
            if stay or settings is not None:
                packed = _find_packed(spec, settings, files)
                built = _without_weights(spec, directory, cls, files, notes, trust_remote_code, dtype, packed, stay)
                return replace(built, directory=directory or _tokenizer_folder(spec, local_only))
        most = no_larger_than(_weight_bytes(directory)) if directory is not None else nullcontext()
        with raised_as(lambda error: ModelLoadError(_why_no_weights(spec, directory, cls, error))), most:
            model, info = cls.from_pretrained(
                source,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are listed, and refused below
                weights_only=True,
                local_files_only=local_only,
                trust_remote_code=trust_remote_code,
                dtype=dtype or "auto",
            )
    notes += _compare_keys(spec, model, info)
    name = directory.resolve().name if directory else spec
    return LoadedModel(model.eval(), None, name, directory or _tokenizer_folder(spec, local_only), tuple(notes))


def _tokenizer_folder(spec: str, local_only: bool) -> Path | None:
    """The folder in the cache with the tokenizer of a hub model, downloaded if necessary; ``None`` if it has none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec, allow_patterns=[*TOKENIZER_FILES], local_files_only=local_only))
    except Exception:  # the model is loaded, and can be exported without it
        return None


def _packing(spec: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ``quantization_config`` of packed weights that are exported as they are; transformers reads others itself."""
    from transformers.quantizers import AutoHfQuantizer

    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    method = settings.get("quant_method")
    if method in FORMATS:
        return settings
    if method is None or not AutoHfQuantizer.supports_quant_method(settings):
        raise ModelLoadError(
            f"{spec} is quantized by {method!r}, which is not known: modelexport reads {', '.join(FORMATS)}; export "
            "the model that it was made from"
        )
    return None


def _find_packed(
    spec: str, settings: Mapping[str, Any] | None, files: Sequence[SafetensorsFile]
) -> Mapping[str, Scheme]:
    if settings is None:
        return {}
    try:
        return find_packed(settings, files)
    except WeightsError as error:
        raise ModelLoadError(f"{spec}: {error}") from error


def _weight_bytes(directory: Path) -> int:
    files = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    return sum(file.stat().st_size for file in files if file.is_file())


def _checkpoint(spec: str, directory: Path | None, local_only: bool) -> list[SafetensorsFile] | None:
    """The safetensors files of a directory or of a hub model, downloaded if necessary."""
    from huggingface_hub import snapshot_download

    if directory is None:
        wanted = [SINGLE, INDEX, f"{Path(SINGLE).stem}-*-of-*.safetensors"]
        problem = f"the weights of {spec} cannot be fetched"
        with raised_as(lambda error: ModelLoadError(f"{problem}: {error_line(error)}")):
            directory = Path(snapshot_download(spec, allow_patterns=wanted, local_files_only=local_only))
    return checkpoint(directory)


def _without_weights(
    spec: str,
    directory: Path | None,
    cls: Any,
    files: list[SafetensorsFile],
    notes: list[str],
    trust_remote_code: bool,
    dtype: str | None,
    packed: Mapping[str, Scheme],
    stay: bool,
) -> LoadedModel:
    """The model with its weights in the files, or, unless they ``stay`` there, read after it is built."""
    from transformers import AutoConfig, GenerationConfig

    source = spec if directory is None else str(directory)
    kind = getattr(cls, "config_class", None) or AutoConfig  # an Auto class has none
    with raised_as(lambda error: ModelLoadError(_why_no_weights(spec, directory, cls, error))):
        config = kind.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=True)
        if packed:
            del config.quantization_config  # it would ask for the library of the format
        if hasattr(cls, "from_config"):  # an Auto class, which needs the name of the model to load it
            with torch.device("meta"):
                cls = type(cls.from_config(config, trust_remote_code=trust_remote_code))
        unpacked = sum(scheme.rows * scheme.columns for scheme in packed.values())
        with no_larger_than(sum(file.size for file in files) + unpacked):
            model, info, weights = build_without_weights(cls, config, files, dtype, packed)
        if model.can_generate():
            with suppress(OSError):  # without the file, generate takes its settings from the model's configuration
                model.generation_config = GenerationConfig.from_pretrained(source, local_files_only=True)
    notes += _compare_keys(spec, model, info)
    notes += _dense_notes(weights, packed)
    if not stay:
        fill_weights(model, weights)
    name = directory.resolve().name if directory else spec
    return LoadedModel(model.eval(), None, name, directory, tuple(notes), weights if stay else None)


def _dense_notes(weights: Weights, packed: Mapping[str, Scheme]) -> list[str]:
    """A note for the entries that are computed from packed weights, because no linear layer has them."""
    name, operations = dequantized.__name__, weights.made if packed else {}
    dense = [key for key, names in operations.items() if name in names.split(", ")]
    few = first_few(dense, 3)
    return [f"{plural(len(dense), 'packed weight')} not of linear layers, written dense: {few}"] if dense else []


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off the progress bars and load reports of transformers, which are also written into pipes."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def hub_answers() -> bool:
    """Whether the hub can be reached, asked once: huggingface_hub asks six times, which takes 23 s without network."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # that of requests or of httpx, which depends on the version of huggingface_hub
        return False
    return True


def _fetch_config(name: str, local_only: bool) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    try:
        config: dict[str, Any] = PreTrainedConfig.get_config_dict(name, local_files_only=local_only)[0]
    except Exception as error:  # of the hub, of its client for HTTP, of JSON, or transformers' own
        why = "not a directory, and the hub cannot be reached" if local_only else error_line(error)
        raise ModelLoadError(f"no model {name}: {why}; give {WAYS_TO_NAME_IT}") from error
    if not config:
        raise ModelLoadError(f"no model {name}: it has no config.json; give {WAYS_TO_NAME_IT}")
    return config


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        if (directory / "model_index.json").is_file():
            raise ModelLoadError(f"{directory} is a pipeline of several models: export it to a folder, -o OUT/")
        raise ModelLoadError(f"{directory} has no config.json: give {WAYS_TO_NAME_IT}")
    config = read_json(path, ModelLoadError, "save the model again")
    if not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
        raise ModelLoadError(f"{directory} has no weights: put model.safetensors beside its config.json")
    return config


def _choose_class(
    spec: str, config: dict[str, Any], model_class: str | None, trust_remote_code: bool
) -> tuple[Any, list[str]]:
    """The class to load with, and notes: ``model_class``, the first of ``architectures``, or ``AutoModel``."""
    import transformers

    if model_class is not None:
        if (cls := _class_of_transformers(model_class)) is None:
            known = [name for name in dir(transformers) if name.startswith("Auto") or "For" in name or "Model" in name]
            close = difflib.get_close_matches(model_class, known, 3)
            hint = f"did you mean {' or '.join(close)}?" if close else "give one such as AutoModelForMaskedLM"
            raise ModelLoadError(f"transformers has no model class {model_class}: {hint}")
        return cls, []
    architectures = config.get("architectures") or [None]
    named = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(named, str | None):
        raise ModelLoadError(f"the config.json of {spec} names {named!r} as a class: correct it, or download it again")
    if named and (cls := _class_of_transformers(named)):
        return cls, []
    # An auto_map says, for example, that AutoModelForCausalLM is modeling_x.XForCausalLM.
    mapped = config.get("auto_map")
    mapped = mapped if isinstance(mapped, dict) else {}
    remote = {auto: ref for auto, ref in mapped.items() if auto.startswith("AutoModel") and isinstance(ref, str)}
    if remote:
        if not trust_remote_code:
            raise _needs_code(spec, remote.values())
        auto = next((auto for auto, ref in remote.items() if ref.split(".")[-1] == named), next(iter(remote)))
        if _class_of_transformers(auto) is None:
            raise ModelLoadError(f"the config.json of {spec} maps {auto}, which transformers does not have")
        return getattr(transformers, auto), []
    if "model_type" not in config:
        raise ModelLoadError(
            f"the config.json of {spec} names neither a model_type nor a class that transformers has"
            f"{f' ({named})' if named else ''}: name the class with --model-class"
        )
    note = f"transformers has no class {named}, which the config names: loaded with AutoModel, without any head"
    return transformers.AutoModel, [note] if named else []


def _check_own_code(spec: str, config: dict[str, Any], cls: Any, trusted: bool) -> None:
    """Refuse a configuration that only code of the model's repository can read, unless that is trusted."""
    from transformers import CONFIG_MAPPING

    mapped = config.get("auto_map")
    code = mapped.get("AutoConfig") if isinstance(mapped, dict) else None
    known = config.get("model_type") in CONFIG_MAPPING if isinstance(config.get("model_type"), str) else False
    if code and not trusted and not known and hasattr(cls, "_model_mapping"):
        raise _needs_code(spec, [str(code)])


def _needs_code(spec: str, code: Iterable[str]) -> ModelLoadError:
    return ModelLoadError(
        f"{spec} needs its own Python code ({', '.join(code)}): read that code, then pass --trust-remote-code to run it"
    )


def _class_of_transformers(name: str) -> Any:
    """The model class or ``Auto`` class of this name in transformers; ``None`` if there is none."""
    import transformers

    cls = getattr(transformers, name, None)
    if not isinstance(cls, type):
        return None
    return cls if issubclass(cls, transformers.PreTrainedModel) or hasattr(cls, "_model_mapping") else None


def _why_no_weights(spec: str, directory: Path | None, cls: Any, error: Exception) -> str:
    """One line for a failed ``from_pretrained``, with the name of the damaged file if there is one."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(directory.glob("*.safetensors")) if directory else ():
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as damage:
            return f"{path} is damaged or truncated ({damage}): copy or download it again"
    if "weights_only" in str(error) or "Weights only" in str(error):
        return f"the weights of {spec} contain objects that could run code: convert them to model.safetensors"
    reason = error_line(error)
    return f"{spec} cannot be loaded as {cls.__name__}: {reason}; check its files or give another --model-class"


def _compare_keys(spec: str, model: torch.nn.Module, info: dict[str, Any]) -> list[str]:
    """One note for the tensors that the checkpoint lacks, and one for the tensors that the model does not use.

    A missing head is only worth a warning: the graph is right, and people try out heads this way. If none of the
    weights fits, the names are wrong and the results would be noise.
    """
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if misshapen := sorted(info.get("mismatched_keys", ())):
        name, stored, wanted = misshapen[0]
        more = f" and {len(misshapen) - 1} more" if len(misshapen) > 1 else ""
        raise ModelLoadError(
            f"the config.json of {spec} does not fit its weights: {name} is {list(stored)} and should be "
            f"{list(wanted)}{more}; download both again, or give another --model-class"
        )
    parameters = [name for name, _ in model.named_parameters()]
    kind = type(model).__name__
    if parameters and not set(parameters) - set(missing):
        raise ModelLoadError(
            f"none of the {len(parameters)} parameters of {kind} is in the weights of {spec} "
            f"(they have {first_few(unused, 3) or 'none'}): name the class that saved them with --model-class"
        )
    notes = []
    if missing:
        few = first_few(missing, 3)
        notes.append(f"{len(missing)} of {kind}'s tensors are not in the checkpoint and are random: {few}")
    if unused:
        notes.append(
            f"{plural(len(unused), 'tensor')} of the checkpoint without a place in {kind}: {first_few(unused, 3)}"
        )
    return notes
