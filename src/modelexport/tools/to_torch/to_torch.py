"""``to_torch``: a file as a tree of ``nn.Module``, in memory or as source code with its weights beside it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from modelexport.core.selectors import select_calls
from modelexport.core.text import plural
from modelexport.core.warned_callers import warn_caller
from modelexport.errors import ModelExportWarning, UsageError
from modelexport.files.atomic_writing import replaced_together
from modelexport.files.path_or_model import Source, as_path
from modelexport.files.replaceable_files import check_writable, signed
from modelexport.files.safetensors_files import errors_of_writing
from modelexport.graph.missing_types import infer_shapes
from modelexport.graph.nodes import required_inputs
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools.to_torch.agreement_with_file import check_agreement
from modelexport.tools.to_torch.arrays_as_tensors import as_tensor
from modelexport.tools.to_torch.attention_pattern import put_attention_together
from modelexport.tools.to_torch.call_layout import CallLayout
from modelexport.tools.to_torch.class_writing import RESERVED_NAMES, ModuleClasses
from modelexport.tools.to_torch.entries_as_nodes import Constants, Entries, entries_as_nodes
from modelexport.tools.to_torch.merged_classes import MergedClasses
from modelexport.tools.to_torch.module_nodes import ModuleNodes
from modelexport.tools.to_torch.operation import FUNCTIONS, refuse_damaged_nodes
from modelexport.tools.to_torch.separated_nodes import separate_merged_nodes
from modelexport.tools.to_torch.simplified_indexing import drop_choices_without_effect, replace_whole_gathers
from modelexport.tools.to_torch.size_numbers import FileNumbers

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TorchSource:
    """A file as code of PyTorch."""

    text: str
    """The source of a module of Python that needs torch and safetensors alone."""
    class_name: str
    """The name of the root's class."""
    tensors: Mapping[str, np.ndarray[Any, Any]]
    """The entries and large constants by the names that the model has for them."""
    is_wide: bool
    """Whether it computes in float64 what the file computes in its own floating-point type."""
    lost: tuple[str, ...]
    """Entries that the file holds only in a form from which they cannot be computed; they are zeros in the model, which
    uses what the file holds."""
    unnamed: tuple[str, ...]
    """Entries with a generated name, because the file does not name them."""
    file: Path
    """The file."""

    def model(self) -> nn.Module:
        """The model, in evaluation mode, with its weights."""
        model: nn.Module = self._module(self.text, f"<{self.class_name} of to_torch>").__dict__[self.class_name]()
        model = model.double() if self.is_wide else model
        for name, array in self.tensors.items():
            attrgetter(name)(model).data.copy_(as_tensor(array))
        return model.eval()

    def _module(self, text: str, path: str) -> types.ModuleType:
        module = types.ModuleType(f"{__name__}.generated_{id(self)}")
        module.__file__ = path
        sys.modules[module.__name__] = module  # classes are looked up there, for example to pickle a model
        exec(compile(text, path, "exec"), module.__dict__)
        return module

    def compared(self, model: nn.Module) -> str:
        """Why a model of this source was not compared with the file; empty if it was, and computes the same.

        Raises:
            CheckError: It computes something else.
        """
        return check_agreement(self.file, model, lambda: torch_source(self.file, dtype="float64").model())

    def write(self, path: str | Path) -> str:
        """Write the source, and the weights beside it under the same name with ``.safetensors``, if what is written
        computes what the file does.

        Returns:
            Why it was not compared with the file; empty if it was.

        Raises:
            OutputError: One of them exists, and was not written by this function.
            UsageError: The path does not end with ``.py``.
            CheckError: It computes something else. Nothing is replaced.
        """
        from safetensors.torch import save_file

        path, weights = source_and_weights(Path(path))
        tensors = {key: as_tensor(array) for key, array in self.tensors.items()}
        with replaced_together() as replacement:
            folder = replacement.folder(path.parent)
            with errors_of_writing():
                save_file(tensors, folder / weights.name, metadata={"made_by": "modelexport"})
            with (folder / weights.name).open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            text = self.text.replace(_NO_DIGEST, f'WEIGHTS = "{digest}"', 1)
            (folder / path.name).write_bytes(signed(text.encode()))
            return self.compared(self._module(text, str(folder / path.name)).load())


def source_and_weights(path: Path) -> tuple[Path, Path]:
    """The source file and the weights beside it, once both can be written.

    Raises:
        OutputError, UsageError: As :meth:`TorchSource.write` has them.
    """
    if path.suffix != ".py":
        source = path / "model.py" if path.is_dir() else path.with_suffix(".py")
        raise UsageError(f"{path} is not a Python file: give {source}; the weights are written beside it")
    files = path, path.with_suffix(".safetensors")
    for file in files:
        check_writable(file, alone=True)
    return files


def to_torch(source: Source, *, dropout: Mapping[str, float] | None = None, dtype: str = "") -> nn.Module:
    """A model of PyTorch out of a file: the modules, classes and ``state_dict`` of the one that was exported.

    Args:
        source: A file, or an open model.
        dropout: Selectors of modules to the probability with which their results are dropped in training.
        dtype: ``float64`` computes in float64 what the file computes in its own floating-point type.

    Raises:
        FileFormatError: The file cannot be read, or its tags are damaged.
        MissingOperatorError: An operator has no counterpart. Names it, its module, and what to do.
        UsageError: A selector matches nothing.
        CheckError: The model computes something else than the file.
    """
    made = torch_source(source, dropout=dropout, dtype=dtype)
    model = made.model()
    if reason := made.compared(model):
        warn_caller(f"the model was not compared with {made.file}: {reason}", ModelExportWarning)
    return model


def torch_source(source: Source, *, dropout: Mapping[str, float] | None = None, dtype: str = "") -> TorchSource:
    """The code and weights of such a model: see :func:`to_torch`."""
    if dtype not in ("", "float64"):
        raise UsageError(f"dtype is {dtype}: give float64, or leave it out")
    tagged = read_tagged(path := as_path(source))
    _ = tagged.hierarchy  # read while the graph is still the file's
    refuse_damaged_nodes(tagged.model)
    tagged.model.graph.inputs[:] = required_inputs(tagged.model)  # an initializer is a parameter, an argument never
    separate_merged_nodes(tagged)
    if any(None in (value.dtype, value.shape) for node in tagged.model.graph.all_nodes() for value in node.outputs):
        infer_shapes(tagged.model)
    entries = entries_as_nodes(tagged)
    constants = Constants(tagged.model, entries, is_wide=bool(dtype))
    numbers = FileNumbers(tagged.model.graph, constants.array)
    replace_whole_gathers(tagged.model.graph, constants, numbers)
    drop_choices_without_effect(tagged.model.graph, returned := _returned(tagged), constants)
    put_attention_together(tagged.model, returned, constants, numbers)
    layout = CallLayout(tagged, entries, constants, numbers)
    nodes = ModuleNodes(layout)
    classes = ModuleClasses(layout, nodes, dropout=_dropped(tagged, dropout or {}))
    root = classes.build("")
    tensors = _tensors(layout, nodes, classes, entries)
    name = root.constructor.removesuffix("()")
    if root.constructor.startswith("nn."):  # a root of torch.nn alone
        name = classes.wanted["Model"] = "Model"
        classes.classes[name] = f"def Model():\n    return {root.constructor}"
    texts = MergedClasses(classes.classes, classes.wanted, name, RESERVED_NAMES).texts.values()
    is_whole = all(classes.has(key) for key in tensors) and tensors.keys() == {*nodes.entries()}
    text = _file_text(tagged, classes, texts, name, _LOAD_ENTRIES if is_whole else _LOAD)
    return TorchSource(text, name, tensors, layout.is_wide, tuple(entries.lost), tuple(entries.unnamed), path)


def _returned(tagged: TaggedFile) -> set[str | None]:
    """The names of values that some call returns as it got them."""
    calls = tagged.hierarchy.calls if tagged.hierarchy is not None else []
    pairs = [({given.value for given in call.inputs}, {made.value for made in call.outputs}) for call in calls]
    return {name for given, made in pairs for name in given & made}


def _dropped(tagged: TaggedFile, dropout: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for selector, probability in dropout.items():
        if not 0 <= probability < 1:
            raise UsageError(f"the dropout of {selector} is {probability}: give a number from 0 to below 1")
        selected = select_calls([selector], tagged.calls, tagged.tags, where=tagged.path)
        found.update({call.path: probability for call in selected.calls})
    return found


def _file_text(tagged: TaggedFile, classes: ModuleClasses, texts: Iterable[str], name: str, load: str) -> str:
    body = "\n\n\n".join(
        [*(inspect.getsource(FUNCTIONS[each]).rstrip() for each in _with_callees(classes.helpers)), *texts]
    )
    docstring = (
        f"{name}, out of an ONNX file: {plural(len(tagged.calls), 'call')} of modules. Made by modelexport to-torch."
    )
    head = {
        "from __future__ import annotations\n": bool(classes.helpers),
        "import hashlib": True,
        "import math": "math." in body,
        "from collections import OrderedDict": "OrderedDict(" in body,
        "from collections.abc import Callable, Sequence": "Sequence[" in body or "Callable[" in body,
        "from operator import attrgetter": "attrgetter" in load,
        "from pathlib import Path": True,
        "from typing import Any": "Any" in body,
        "": True,
        "import torch": "torch." in body,
        "import torch.nn.functional as F": "F." in body,
        "from safetensors.torch import load_file": True,
        f"from torch import {'Tensor, ' if classes.helpers else ''}nn": True,
    }
    imports = "\n".join(line for line, is_needed in head.items() if is_needed)
    load = load.replace("NAME()", f"{name}(){'.double()' if classes.layout.is_wide else ''}")
    return f'"""{docstring}"""\n\n{imports}\n\n{_NO_DIGEST}\n\n\n{body.rstrip()}\n\n\n{_OWN_WEIGHTS}\n\n{load}'


_NO_DIGEST = 'WEIGHTS = ""'
"""The line that has the digest of the weights file once that is written."""
_OWN_WEIGHTS = '''def own_weights():
    """The file of weights that was written with this code; another one is refused."""
    path = Path(__file__).with_suffix(".safetensors")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != WEIGHTS:
            raise ValueError(f"{path} was not written with {__file__}: give load() its path if it should be loaded")
    return path
'''
_LOAD_ENTRIES = '''def load(path=None):
    """The model, in evaluation mode, with its weights or those of another safetensors file."""
    model = NAME()
    model.load_state_dict(load_file(path or own_weights()))
    return model.eval()
'''
_LOAD = '''def load(path=None):
    """The model, in evaluation mode, with its weights or those of another safetensors file."""
    model = NAME()
    for name, tensor in load_file(path or own_weights()).items():
        attrgetter(name)(model).data.copy_(tensor)
    return model.eval()
'''


def _with_callees(names: Iterable[str]) -> list[str]:
    """Names of functions and of those that they call, callees first."""
    found: dict[str, None] = {}

    def add(name: str) -> None:
        for node in ast.walk(ast.parse(inspect.getsource(FUNCTIONS[name]))):
            if isinstance(node, ast.Name) and node.id in FUNCTIONS and node.id != name and node.id not in found:
                add(node.id)
        found[name] = None

    for name in sorted(names):
        add(name)
    return list(found)


def _tensors(
    layout: CallLayout, nodes: ModuleNodes, classes: ModuleClasses, entries: Entries
) -> dict[str, np.ndarray[Any, Any]]:
    found: dict[str, np.ndarray[Any, Any]] = {}
    for key, array in entries.arrays.items():
        names = entries.names.get(key, (key,))
        entry = entries.shapes.get(key)
        if entry is not None and list(array.shape) != list(entry.shape):
            raise UsageError(
                f"{key} has the shape {list(array.shape)} and is recorded with {list(entry.shape)}: the file is damaged"
            )
        found[next((name for name in names if classes.has(name)), key)] = array
    for path in nodes.by_path:
        if nodes.by_path[path].alias_of is None:
            for value, name in classes.build(path).constants.items():
                tensor = layout.constants[value]
                if value in classes.stored and tensor.dtype != ir.DataType.STRING:
                    found[f"{path}.{name}".lstrip(".")] = tensor.numpy()
    return found
