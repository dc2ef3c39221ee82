"""Example inputs for a module, from its forward's signature, its configs and its parameters, checked by a run.

No rule is specific to a model. If an argument has one of the field's standard names (``input_ids``, ``pixel_values``,
...), the name gives its role and the configs give the sizes. For any other name the model is run on a probe, and the
first ``torch.nn`` module that receives the probe shows what fits. Only inputs that the model ran with are returned.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelexport.core.calls import ROOT
from modelexport.core.text import error_line
from modelexport.errors import InputsError
from modelexport.pytorch.calls.call_recorder import CallRecorder
from modelexport.pytorch.calls.module_tree_of_model import check_has_forward
from modelexport.pytorch.calls.traced_tree import without_numbers
from modelexport.pytorch.inputs.argument_tensors import InputMaker
from modelexport.pytorch.inputs.described_inputs import read_spec
from modelexport.pytorch.inputs.trial_runs import SAMPLES, Inputs, TrialRuns, fitting_shapes

_MAIN = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids")
"""Arguments that carry data. They are generated even if optional, so that every part of the model runs."""
_BESIDE_TEXT = ("attention_mask", "token_type_ids")
"""Optional arguments that go with ``input_ids``."""
_SHAPED_BY_ANOTHER = ("mask", "token_type_ids", "position_ids", "bool_masked_pos")
_MAX_RUNS = 150
_MAX_RUNS_OF_SHAPES = 8


def generate_inputs(
    model: torch.nn.Module,
    *,
    spec: Mapping[str, Any] | str | Path | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
    batch: int = 2,
    has_weights: bool = True,
    grids: bool = False,
) -> Inputs:
    """Keyword arguments that ``model`` ran with, on its device and in its floating-point type.

    Args:
        model: It runs in eval mode without gradients; its modes and the caller's random state are restored.
        spec, directory, seed, batch: As in :func:`modelexport.pytorch.inputs.example_inputs.example_inputs`.
        has_weights: Whether the model can compute values. Without weights only shapes and types are checked, and if
            no inputs fit, the first that were generated are returned.
        grids: Give images with the grids of their patches to a model that takes them so; otherwise text alone. A
            capture has to keep the values of grids.

    Raises:
        InputsError: The model has no ``forward``, ``spec`` is wrong, or an argument cannot be generated; the message
            then shows the JSON to write.
    """
    check_has_forward(model)
    signature = inspect.signature(model.forward).parameters
    kind = inspect.Parameter
    named = {name: p for name, p in signature.items() if p.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)}
    maker = InputMaker(model, Path(directory) if directory is not None else None, seed, grids=grids)
    takes_any = any(p.kind is kind.VAR_KEYWORD for p in signature.values())
    entries = read_spec(spec, None if takes_any else list(named), maker)
    described = {name: value for name, value in entries.items() if value is not None}
    sized = [value.shape[0] for value in described.values() if isinstance(value, torch.Tensor) and value.ndim]

    main = getattr(model, "main_input_name", None)
    free = [name for name in named if name not in entries]
    required = [name for name in free if named[name].default is kind.empty]
    optional = [name for name in free if (name in _MAIN or name == main) and name not in required]
    beside = [name for name in _BESIDE_TEXT if name in free and name not in required]
    if maker.number("type_vocab_size") < 2 or "token_type_ids" not in getattr(
        maker.tokenizer, "model_input_names", beside
    ):
        beside = [name for name in beside if name != "token_type_ids"]
    runner = TrialRuns(model, has_weights)
    for size in (sized[0],) if sized else dict.fromkeys((batch, 1)):
        plans = _plans(runner, maker, size, known_inputs=described, required=required, optional=optional, beside=beside)
        for inputs in itertools.islice(plans, _MAX_RUNS if has_weights else _MAX_RUNS_OF_SHAPES):
            if runner.run(inputs):
                return {name: inputs[name] for name in dict.fromkeys((*named, *described)) if name in inputs}
    if not has_weights and runner.first_inputs is not None:
        # Some operations compute shapes for fewer types than values; the exporter replaces these, and reports errors.
        return runner.first_inputs
    raise InputsError(_advice(runner, maker, described)) from runner.first_error


def read_inputs(model: torch.nn.Module, spec: str | Path, *, seed: int = 0) -> Inputs:
    """The arguments in a JSON file, and no others: for a model that makes the rest of its inputs itself.

    Raises:
        InputsError: It cannot be read, or describes an argument wrongly.
    """
    return read_spec(spec, None, InputMaker(model, None, seed))


def check_inputs(model: torch.nn.Module, inputs: Mapping[str, Any] | Sequence[Any]) -> None:
    """Run ``model`` once with these keyword or positional arguments, without gradients and in eval mode."""
    runner, recorder = TrialRuns(model), CallRecorder(model)
    with recorder.attached():
        if runner.run(inputs if isinstance(inputs, Mapping) else tuple(inputs)):
            return
    call = recorder.raised_in(runner.first_error) if runner.first_error is not None else None
    where = f"in {call}: " if call not in (None, ROOT) else ""
    named = inputs if isinstance(inputs, Mapping) else {f"argument {i}": value for i, value in enumerate(inputs)}
    reason = error_line(runner.first_error)
    way_out = without_numbers(model, runner.first_error) or "give other inputs"
    if isinstance(runner.first_error, ImportError):
        way_out = "install the package that its code imports"
    raise InputsError(
        f"{type(model).__name__} does not run with {describe(named)}: {where}{reason}; {way_out}"
    ) from runner.first_error


def describe(inputs: Mapping[str, Any]) -> str:
    """``input_ids int64[2, 16], use_cache bool``."""
    texts = []
    for name, value in inputs.items():
        is_tensor = isinstance(value, torch.Tensor)
        texts.append(f"{name} {_dtype(value)}{list(value.shape)}" if is_tensor else f"{name} {type(value).__name__}")
    return ", ".join(texts) or "no inputs"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _advice(runner: TrialRuns, maker: InputMaker, described: Inputs) -> str:
    """Why no inputs worked, and JSON to correct: the inputs that were generated first."""
    kind, tried = type(runner.model).__name__, runner.first_inputs or {}
    entries: dict[str, Any] = {}
    for name, value in tried.items():
        if name not in described:
            entries[name] = {"dtype": _dtype(value), "shape": list(value.shape)}
            if maker.is_of_tokens(name):
                entries[name]["range"] = [0, maker.vocabulary]
    problem = f"{kind} does not run with {describe(tried)}: {error_line(runner.first_error)}"
    if not entries:
        return f"{problem}; give others, or let a factory return the module and its inputs"
    return f"{problem}; correct the generated part and pass it with --inputs SPEC.json: {json.dumps(entries)}"


def _plans(
    runner: TrialRuns,
    maker: InputMaker,
    batch: int,
    *,
    known_inputs: Inputs,
    required: list[str],
    optional: list[str],
    beside: list[str],
) -> Iterator[Inputs]:
    """Inputs to try, best first: those with every argument that carries data before those with fewer."""
    subsets = (itertools.combinations(optional, count) for count in range(len(optional), -1, -1))
    for chosen in itertools.chain.from_iterable(subsets):
        choices = {name: maker.options(name, batch) for name in (*required, *chosen)}
        known = {name: tensors for name, tensors in choices.items() if tensors}
        late = [name for name in choices if name not in known and name.endswith(_SHAPED_BY_ANOTHER)]
        has_tensors = any(isinstance(value, torch.Tensor) and value.ndim for value in known_inputs.values())
        late = late if len(late) < len(choices) or has_tensors else []
        unknown = [name for name in choices if name not in known and name not in late]
        for values in itertools.product(*known.values()):
            start = maker.with_placeholders(runner, known_inputs | dict(zip(known, values, strict=True)))
            text = beside if "input_ids" in start else []
            for inputs in _discover(runner, maker, batch, known=start, unknown=unknown, late=late):
                for kept in range(len(text), -1, -1):
                    yield from maker.beside(inputs, (*late, *text[:kept]))
    # A standard name may have another meaning in this model.
    yield from _discover(runner, maker, batch, known=known_inputs, unknown=required, late=[])


def _discover(
    runner: TrialRuns, maker: InputMaker, batch: int, *, known: Inputs, unknown: list[str], late: list[str]
) -> Iterator[Inputs]:
    """``known``, with each unknown argument generated to fit the first ``torch.nn`` module that receives it."""
    if not unknown:
        yield known
        return
    name, values = unknown[0], maker.unseen(unknown[0], batch)
    # Axes of size one, tried last, can be broadcast against positions and the like, whose size is not known yet.
    for edge, rank in itertools.product((2, 1), (2, 3, 4, 1, 5)):
        probes = {name: maker.floats(name, (batch,) + (edge,) * (rank - 1)) for name in unknown}
        seen = runner.watch(next(maker.beside(known | probes, late)))
        hits = [(argument, module) for argument, module in seen if argument in unknown]
        if not hits and len(unknown) == 1:
            # The forward reshaped it first: the first module receives a tensor computed from it.
            hits = [(name, module) for argument, module in seen if argument is None]
        if hits:
            name, module = hits[0][0] or name, hits[0][1]
            shapes = fitting_shapes(module, batch)
            if seen[0][0] is None:
                shapes += [((batch, samples), None) for samples in SAMPLES]
            # Generated only when needed: images are large.
            values = (maker.integers(name, at, 0, high) if high else maker.floats(name, at) for at, high in shapes)
            break
    rest = [other for other in unknown if other != name]
    if maker.states_image and not known:
        values = itertools.chain([maker.floats(name, (batch, *maker.image()))], values)
    for value in values:
        yield from _discover(runner, maker, batch, known=known | {name: value}, unknown=rest, late=late)
