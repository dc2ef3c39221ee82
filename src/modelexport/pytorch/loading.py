"""MODEL, the way it is given on the command line, to a module in eval mode.

Over 400 lines because each way to name a model fails in its own ways, each of which gets one line that says what to do.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from modelexport.core.limits import SETTINGS_BYTES
from modelexport.core.text import error_line, first_few
from modelexport.errors import FileFormatError, ModelLoadError
from modelexport.files.regular import read_regular
from modelexport.files.safetensors_files import INDEX, SINGLE, SafetensorsFile, checkpoint
from modelexport.pytorch.lazy_weights import build_without_weights
from modelexport.pytorch.trust import check_config, no_larger_than, no_questions
from modelexport.weights.sources import Weights

BERT_TINY = "bert-tiny"
"""The built-in example: the configuration of google/bert_uncased_L-2_H-128_A-2, with seeded random weights."""

_LOCAL = "a directory with config.json and model.safetensors, bert-tiny, or file.py:factory"


@dataclass(frozen=True)
class LoadedModel:
    """A module in eval mode, and what is known about it beside its weights."""

    model: torch.nn.Module
    inputs: dict[str, Any] | tuple[Any, ...] | None
    """What the factory returned with the module: keyword arguments, or positional ones."""
    name: str
    """A short name for reports, without any path of this machine."""
    directory: Path | None = None
    """Where a local Hugging Face model lies, with its tokenizer or processor."""
    warnings: tuple[str, ...] = ()
    """What a person should know before trusting the weights, one line each: tensors that the checkpoint lacks, ..."""
    weights: Weights | None = None
    """Where the weights are, if the module was built without them."""


def load_model(
    spec: str | None = None,
    *,
    model_class: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    dtype: str | None = None,
    weights: Literal["memory", "files", "auto"] = "memory",
) -> LoadedModel:
    """The module that ``spec`` names, in eval mode. The caller's random state stays as it was.

    Args:
        spec: A Hugging Face directory or hub name, ``package.module:factory``, ``file.py:factory``, or ``bert-tiny``,
            which ``None`` means too. A factory returns the module, or the module and its inputs: a dict of keyword
            arguments, or a tuple of positional ones.
        model_class: A class of transformers, an ``Auto`` class included, in place of the one that the config names.
        trust_remote_code: Whether Python code from the model's own repository may run.
        seed: For all weights that are generated: those of ``bert-tiny``, of a factory, and those a checkpoint lacks.
        dtype: ``float32``, ``float16``, ...; ``None`` keeps what the checkpoint or the factory has.
        weights: ``files`` builds the module without them: it cannot run by itself, and ``LoadedModel.weights`` says
            where they are. ``auto`` does so if the checkpoint is in safetensors files of more than 1 GB.

    Raises:
        ModelLoadError: The model is not there, is damaged, has no weights, needs code that is not trusted, or its
            factory failed.
        WeightsError: With ``weights="files"``, a safetensors file is missing or damaged.
    """
    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ModelLoadError(f"unknown dtype {dtype!r}: give float32, float16 or bfloat16")
    spec = spec or BERT_TINY
    # A directory that happens to be called bert-tiny is ./bert-tiny.
    is_directory = spec != BERT_TINY and Path(spec).expanduser().is_dir()
    is_code = not is_directory and (spec == BERT_TINY or ":" in spec)
    if is_code and model_class is not None:
        raise ModelLoadError(f"--model-class {model_class} needs a Hugging Face directory or hub name, not {spec}")
    if not is_code and not is_directory:
        _refuse_paths(spec)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        if not is_code:
            return _from_hugging_face(spec, model_class, trust_remote_code, dtype, weights)
        if weights == "files":
            raise ModelLoadError(
                f"the weights of {spec} are in no safetensors files: only a Hugging Face directory or hub name has such"
            )
        loaded = LoadedModel(_bert_tiny(), None, BERT_TINY) if spec == BERT_TINY else _from_factory(spec)
    loaded.model.eval()
    if dtype is not None:
        loaded.model.to(getattr(torch, dtype))
    return loaded


def _bert_tiny() -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30522,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=512,
    )
    model: torch.nn.Module = BertModel(config)
    return model


# Hugging Face


def _refuse_paths(spec: str) -> None:
    """Raise for what is neither a directory nor can be a hub name (``name`` or ``owner/name``)."""
    path = Path(spec).expanduser()
    if path.is_file():
        hint = f"name its factory: {spec}:FACTORY" if path.suffix == ".py" else f"give {_LOCAL}"
        raise ModelLoadError(f"{spec} is a file: {hint}")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", spec):
        raise ModelLoadError(f"no such directory: {spec}; give {_LOCAL}")


LARGE = 10**9
"""Bytes of safetensors files above which a model is built without its weights, if that is left to this module."""


def _from_hugging_face(
    spec: str, model_class: str | None, trust_remote_code: bool, dtype: str | None, weights: str
) -> LoadedModel:
    directory = Path(spec).expanduser() if Path(spec).expanduser().is_dir() else None
    source = spec if directory is None else str(directory)
    with _quiet_transformers(), no_questions():
        local_only = directory is not None or not _hub_answers()
        config = _read_config(directory) if directory else _fetch_config(spec, local_only)
        check_config(spec, config)
        cls, notes = _choose_class(spec, config, model_class, trust_remote_code)
        files = None if weights == "memory" else _checkpoint(spec, directory, local_only)
        if weights == "files" and files is None:
            raise ModelLoadError(f"{spec} has no safetensors files: only from those can weights be linked or streamed")
        if files is not None and (weights == "files" or sum(file.size for file in files) > LARGE):
            return _without_weights(spec, directory, cls, files, notes, trust_remote_code, dtype)
        try:
            with no_larger_than(_weight_bytes(directory)) if directory is not None else nullcontext():
                model, info = cls.from_pretrained(
                    source,
                    output_loading_info=True,
                    weights_only=True,
                    local_files_only=local_only,
                    trust_remote_code=trust_remote_code,
                    dtype=dtype or "auto",
                )
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(_why_no_weights(spec, directory, cls, error)) from error
    notes += _compare_keys(spec, model, info)
    return LoadedModel(model.eval(), None, directory.resolve().name if directory else spec, directory, tuple(notes))


def _weight_bytes(directory: Path) -> int:
    files = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    return sum(file.stat().st_size for file in files if file.is_file())


def _checkpoint(spec: str, directory: Path | None, local_only: bool) -> list[SafetensorsFile] | None:
    """The safetensors files of a directory or of a hub model, which are fetched if need be."""
    from huggingface_hub import snapshot_download

    if directory is None:
        wanted = [SINGLE, INDEX, f"{Path(SINGLE).stem}-*-of-*.safetensors"]
        try:
            directory = Path(snapshot_download(spec, allow_patterns=wanted, local_files_only=local_only))
        except Exception as error:
            raise ModelLoadError(f"the weights of {spec} cannot be fetched: {error_line(error)}") from error
    return checkpoint(directory)


def _without_weights(
    spec: str,
    directory: Path | None,
    cls: Any,
    files: list[SafetensorsFile],
    notes: list[str],
    trust_remote_code: bool,
    dtype: str | None,
) -> LoadedModel:
    from transformers import AutoConfig

    source = spec if directory is None else str(directory)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=True)
        if hasattr(cls, "from_config"):  # an Auto class, which needs the name of the model to load it
            with torch.device("meta"):
                cls = type(cls.from_config(config, trust_remote_code=trust_remote_code))
        with no_larger_than(sum(file.size for file in files)):
            model, info, weights = build_without_weights(cls, config, files, dtype)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(_why_no_weights(spec, directory, cls, error)) from error
    notes += _compare_keys(spec, model, info)
    name = directory.resolve().name if directory else spec
    return LoadedModel(model.eval(), None, name, directory, tuple(notes), weights)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the progress bars and load reports of transformers, which would reach a pipe too."""
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


def _hub_answers() -> bool:
    """Whether the hub can be reached, asked once: huggingface_hub asks six times, which takes 23 s without network."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:
        return False
    return True


def _fetch_config(name: str, local_only: bool) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    try:
        config: dict[str, Any] = PreTrainedConfig.get_config_dict(name, local_files_only=local_only)[0]
    except Exception as error:
        why = "not a directory, and the hub cannot be reached" if local_only else error_line(error)
        raise ModelLoadError(f"no model {name}: {why}; give {_LOCAL}") from error
    if not config:
        raise ModelLoadError(f"no model {name}: it has no config.json; give {_LOCAL}")
    return config


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{directory} has no config.json: give {_LOCAL}")
    try:
        config = json.loads(read_regular(path, SETTINGS_BYTES))
    except (ValueError, FileFormatError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}; save the model again") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} is no JSON object: save the model again")
    if not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
        raise ModelLoadError(f"{directory} has no weights: put model.safetensors beside its config.json")
    return config


def _choose_class(
    spec: str, config: dict[str, Any], model_class: str | None, trust_remote_code: bool
) -> tuple[Any, list[str]]:
    """The class to load with, and notes: ``model_class``, else the first of ``architectures``, else ``AutoModel``."""
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
    # An auto_map says, for one, that AutoModelForCausalLM is modeling_x.XForCausalLM.
    mapped = config.get("auto_map")
    mapped = mapped if isinstance(mapped, dict) else {}
    remote = {auto: ref for auto, ref in mapped.items() if auto.startswith("AutoModel") and isinstance(ref, str)}
    if remote:
        if not trust_remote_code:
            raise ModelLoadError(
                f"{spec} needs Python code of its own ({', '.join(remote.values())}): read that code, "
                f"then pass --trust-remote-code to run it"
            )
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


def _class_of_transformers(name: str) -> Any:
    """The model class or ``Auto`` class of that name in transformers; ``None`` where there is none."""
    import transformers

    cls = getattr(transformers, name, None)
    if not isinstance(cls, type):
        return None
    return cls if issubclass(cls, transformers.PreTrainedModel) or hasattr(cls, "_model_mapping") else None


def _why_no_weights(spec: str, directory: Path | None, cls: Any, error: Exception) -> str:
    """One line for a failed ``from_pretrained``, naming the damaged file where there is one."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(directory.glob("*.safetensors")) if directory else ():
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as damage:
            return f"{path} is damaged or cut off ({damage}): copy or download it again"
    if "weights_only" in str(error) or "Weights only" in str(error):
        return f"the weights of {spec} hold more than tensors, which could run code: convert them to model.safetensors"
    reason = error_line(error)
    return f"{spec} cannot be loaded as {cls.__name__}: {reason}; check its files or give another --model-class"


def _compare_keys(spec: str, model: torch.nn.Module, info: dict[str, Any]) -> list[str]:
    """One note for what the checkpoint lacks, and one for what it has too much.

    A single missing head is worth a warning: the graph is right, and it is how people try out a head. Without any
    weight in its place the names do not fit, and the result would be noise.
    """
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
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
        notes.append(f"{len(unused)} tensors of the checkpoint have no place in {kind}: {first_few(unused, 3)}")
    return notes


# Factories


def _from_factory(spec: str) -> LoadedModel:
    place, _, attribute = spec.rpartition(":")
    file = Path(place).expanduser().resolve() if place.endswith(".py") else None
    if not place or not attribute:
        raise ModelLoadError(f"{spec} names no factory: give file.py:factory or package.module:factory")
    if file is not None and not file.is_file():
        raise ModelLoadError(f"no such file: {place} (for {spec})")
    # The console script does not put the working directory on the path, and a file's siblings are nowhere on it.
    with _import_path(file.parent if file else Path.cwd()):
        if file is not None:
            module = _run(lambda: _import_file(file), f"{place} cannot be imported", file)
        else:
            module = _run(lambda: importlib.import_module(place), f"module {place} cannot be imported", None)
        try:
            factory = operator.attrgetter(attribute)(module)
        except AttributeError as error:
            callables = [name for name, value in vars(module).items() if callable(value)]
            close = difflib.get_close_matches(attribute, callables, 1)
            hint = f"did you mean {place}:{close[0]}?" if close else "name a callable that returns the module"
            raise ModelLoadError(f"{place} has no {attribute}: {hint}") from error
        if not callable(factory):
            raise ModelLoadError(f"{spec} is {_article(factory)}, no callable: name one that returns the module")
        own = file or Path(getattr(module, "__file__", None) or place)
        made = factory if isinstance(factory, torch.nn.Module) else _run(factory, f"{spec} failed", own)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise ModelLoadError(f"{spec} returned {_article(made)}: return the torch.nn.Module, or it and its inputs")
    if inputs is not None and not isinstance(inputs, dict | tuple):
        raise ModelLoadError(
            f"{spec} returned {_article(inputs)} as inputs: return a dict of keyword arguments or a tuple of arguments"
        )
    return LoadedModel(model, inputs, attribute.rpartition(".")[2])


def _article(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _run(call: Callable[[], Any], failed: str, file: Path | None) -> Any:
    """What the user's code returns; what it raises becomes one line with the place in ``file`` that it came from."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, "<string>")]
        frames = [f for f in frames if not f.filename.startswith("<frozen") and f.filename != importlib.__file__]
        own = [frame for frame in frames if Path(frame.filename) == file] or frames
        where = ""
        if isinstance(error, SyntaxError) and error.filename:
            where = f" ({Path(error.filename).name}, line {error.lineno})"
        elif own:
            where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})"
        reason = error_line(SyntaxError(error.msg)) if isinstance(error, SyntaxError) else error_line(error)
        raise ModelLoadError(f"{failed}: {reason}{where}") from error


@contextmanager
def _import_path(directory: Path) -> Iterator[None]:
    """``directory`` first on ``sys.path``, for as long as the block runs."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(str(directory))


def _import_file(file: Path) -> ModuleType:
    """Run a Python file as a module named after it.

    It and the siblings that it imports stay in ``sys.modules``: classes look there for the module they come from.
    """
    _forget_siblings_of_others(file.parent)
    taken = sys.modules.get(file.stem)
    # A file called json.py must not become everybody's json.
    name = file.stem if taken is None or getattr(taken, "__file__", None) == str(file) else f"_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _forget_siblings_of_others(directory: Path) -> None:
    """Drop modules that have a sibling's name but were loaded with a file of another directory.

    Only those: what lies on ``sys.path`` is an ordinary import and stays.
    """
    for entry in directory.iterdir():
        is_package = (entry / "__init__.py").is_file()
        if not is_package and entry.suffix != ".py":
            continue
        file = getattr(sys.modules.get(entry.stem), "__file__", None)
        if file is None:
            continue
        root = Path(file).parents[1] if Path(file).name == "__init__.py" else Path(file).parent
        if root != directory and str(root) not in sys.path:
            for name in [n for n in sys.modules if n == entry.stem or n.startswith(f"{entry.stem}.")]:
                del sys.modules[name]
