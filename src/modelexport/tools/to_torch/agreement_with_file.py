"""Whether code of PyTorch computes what the file computes that it was made from, for several inputs and sizes.

The file is run by ONNX Runtime. Where the results differ, exact runs decide: a choice or a rounded integer may hang on
the last digit, and integer products of some processors saturate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from modelexport.core.limits import CHECKED_BYTES, COMPARED_ELEMENTS
from modelexport.core.text import error_line
from modelexport.errors import CheckError, FileFormatError, InputsError, UsageError
from modelexport.files.linked_weights import data_files
from modelexport.files.onnx_models import load_onnx
from modelexport.format import keys
from modelexport.graph.nodes import all_nodes, draws
from modelexport.graph.properties import drop_tag_attributes, text_of
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import Session, open_session, run_session
from modelexport.runtime.shapes import elements, find_shapes
from modelexport.runtime.varied_inputs import varied_inputs
from modelexport.tools.to_torch.arrays_as_tensors import as_tensor
from modelexport.traces.array_differences import Verdict, compare_arrays, verdict_of
from modelexport.traces.file_run import FileRun, type_of
from modelexport.traces.tolerances import ALLOWED, FROM_STORED_VALUES

Feeds = Mapping[str, Any]
_RUNS = 4
"""With how many inputs the two are compared, at most."""


def check_agreement(path: Path, model: nn.Module, in_float64: Callable[[], nn.Module]) -> str:
    """Compare the outputs of a model with those of the file that it was made from, in evaluation mode.

    Args:
        in_float64: Makes the model that computes in float64 what the file computes in its own type.

    Returns:
        Why they were not compared; empty if they were, and agree.
    """
    if sum(each.stat().st_size for each in (path, *data_files(path)) if each.is_file()) > CHECKED_BYTES:
        return f"the file has more than {CHECKED_BYTES:,} bytes"
    file = load_onnx(path)
    if text_of(file, keys.ENCODING) == "attributes":
        drop_tag_attributes(file)
    drawn = next((f"it draws random numbers ({node.op_type})" for node in all_nodes(file) if draws(node)), "")
    shapes = find_shapes(file)
    if reason := drawn or _too_many(map(shapes.of, file.graph.outputs)):
        return reason
    try:
        session = open_session(file, folder=path.parent)
        first = make_random_inputs(file, session)
    except FileFormatError:
        raise
    except UsageError as error:
        return str(error).partition("; ")[0] if isinstance(error, InputsError) else str(error)
    exact: list[nn.Module] = []
    verdicts: set[Verdict] = set()
    for feeds, outputs in _runs(file, session, first):
        if too_many := _too_many(array.shape for array in _flat(outputs.values())):
            return too_many
        verdict, fault = _verdict(model, feeds, _flat(outputs.values()))
        if verdict == "differ":
            exact = exact or [in_float64()]
            if not (_agrees_in_float64(file, exact[0], feeds) or _agrees_with_reference(path, model, feeds)):
                raise CheckError(f"the code of PyTorch does not compute what {path} does ({fault}): please report it")
            verdict = "agree"
        verdicts.add(verdict)
    if not verdicts:
        return "ONNX Runtime takes none of the inputs that were tried"
    return "" if "agree" in verdicts else "no output has a finite number with the inputs that were tried"


def _too_many(shapes: Iterable[tuple[int, ...] | None]) -> str:
    count = sum(elements(shape) for shape in shapes if shape is not None)
    return f"its outputs have {count:,} elements, and at most {COMPARED_ELEMENTS:,} are compared" * (
        count > COMPARED_ELEMENTS
    )


def _runs(file: ir.Model, session: Session, first: Feeds) -> Iterator[tuple[Feeds, Feeds]]:
    """Inputs that the file takes, of other sizes where axes are dynamic, with what it gives."""
    varied = [feeds for _, feeds in varied_inputs(file, first)] if first else []
    for feeds in (first, *varied[1 - _RUNS :]):  # other sizes are the last
        try:
            yield feeds, run_session(session, feeds)
        except UsageError:  # the file need not take what is not the first
            continue


def _verdict(model: nn.Module, feeds: Feeds, wanted: Sequence[Any], *, wide: bool = False) -> tuple[Verdict, str]:
    """Whether a model's outputs are the right ones, and in what they differ.

    Args:
        wide: Both are in float64.
    """
    given = [as_tensor(array) for array in feeds.values()]
    try:
        with torch.no_grad():
            found = _tensors(model(*(each.double() if wide and each.is_floating_point() else each for each in given)))
    except Exception as error:  # any code, given any tensors
        return "differ", f"it fails on inputs that the file takes: {error_line(error)}"
    right = [as_tensor(array) for array in wanted]
    if len(found) != len(right):
        return "differ", f"it gives {len(found)} tensors instead of {len(right)}"
    results = []
    for number, (one, other) in enumerate(zip(right, found, strict=True)):
        allowed = FROM_STORED_VALUES if wide else ALLOWED.get(str(other.dtype).partition(".")[2])
        results.append(compare_arrays(f"output {number}", _array(one), _array(other), allowed=allowed))
    first = next((result for result in results if result.status == "differ"), None)
    reason = f"{first.name}: {first.reason}" if first is not None else ""
    return verdict_of([result.status for result in results]), reason


def _tensors(result: Any) -> list[torch.Tensor]:
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else None
    return [result] if parts is None else [tensor for part in parts for tensor in _tensors(part)]


def _flat(results: Any) -> list[Any]:
    return [array for each in results for array in (_flat(each) if isinstance(each, list) else [np.asarray(each)])]


def _array(tensor: torch.Tensor) -> Any:
    """A tensor as an array of a type that NumPy has."""
    narrow = tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64)
    return (tensor.float() if narrow else tensor).detach().numpy()


def _agrees_in_float64(file: ir.Model, model: nn.Module, feeds: Feeds) -> bool:
    kind = type_of((*file.graph.initializers.values(), *file.graph.inputs))
    try:
        outputs = FileRun(file, in_float64_for=kind).run(feeds)
    except UsageError:
        return False
    return _verdict(model, feeds, _flat(outputs.values()), wide=True)[0] == "agree"


def _agrees_with_reference(path: Path, model: nn.Module, feeds: Feeds) -> bool:
    from onnx.reference import ReferenceEvaluator  # slow to import

    try:
        outputs = ReferenceEvaluator(str(path)).run(None, dict(feeds))
    except Exception:  # it lacks operators, and raises various errors
        return False
    return _verdict(model, feeds, _flat(outputs))[0] == "agree"
