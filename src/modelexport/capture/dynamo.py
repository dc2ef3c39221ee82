"""The `dynamo` front end: ``torch.export``, then ``torch.onnx``'s translation, unoptimized.

While the model runs under ``torch.export``, forward hooks annotate every FX node with the address of the call that
made it. The annotation is in ``node.meta["custom"]``, which decomposition preserves, and every ONNX node that the
translation makes refers to its FX node. The bodies of ``torch.cond`` and similar operators are captured by TorchDynamo,
which runs no hooks but keeps a stack of ``id(module)@n`` keys for each node; those are resolved to the same addresses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
import torch.fx.traceback
from torch import nn

from modelexport.capture.arguments_and_parameters import PLAIN, READABLE, Bound, by_name, only_tensors, state_dict_names
from modelexport.capture.dynamo_owners import (
    ADDRESS_KEY,
    PORTS_KEY,
    FxOwners,
    annotated_call,
    is_annotated,
    name_of_fx_node,
)
from modelexport.capture.exported_graph import Exported
from modelexport.capture.failure_hints import (
    OTHER_OPERATIONS,
    capture_reason,
    check_returned,
    failure,
    in_one_line,
    translated_node,
    way_out,
)
from modelexport.capture.front_end_options import DEFAULTS, FrontEndOptions
from modelexport.capture.lines_of_code import LinesOfCode
from modelexport.capture.numbers_of_python import compute_numbers_in_double, floor_quotients_of_sizes
from modelexport.capture.once.decomposed_calls import decomposed_once
from modelexport.capture.once.registries import parsed_when_used, read_once, registered_plainly, signed_when_used
from modelexport.capture.opset_conversion import convert_to_opset, translated_opset
from modelexport.capture.patches import private, replaced, require, usable
from modelexport.capture.presumed_answers import Presumed
from modelexport.capture.quantizers_in_training import ObserverError, with_flags_known, with_plain_quantizers
from modelexport.capture.recorded_conditions import RecordedConditions
from modelexport.capture.repairs.decompositions import outputs_converted_back, with_decompositions
from modelexport.capture.repairs.fourier import hide_sizes_of_transforms
from modelexport.capture.repairs.integer_weights import prepare_integer_weights
from modelexport.capture.repairs.packed_linear import opset_for
from modelexport.capture.repairs.pooling import without_last_windows
from modelexport.capture.repairs.recurrent import steps_open
from modelexport.capture.repairs.translations import translations, with_translations
from modelexport.capture.repairs.untraceable import reading_no_values
from modelexport.capture.shared_memory import is_written_later, passed_on
from modelexport.capture.symbolic_runs import with_implied
from modelexport.capture.transformers_exporter import (
    changed_caches,
    export_around_pretrained,
    export_pretrained,
    has_transformers_inside,
    register_caches,
)
from modelexport.core.calls import ROOT, ModuleCall, Port, Side, TracedCall
from modelexport.core.collected_messages import collected
from modelexport.core.text import chained, raised_first
from modelexport.errors import CaptureError
from modelexport.graph.size_symbols import rename_sizes
from modelexport.pytorch.calls.call_recorder import CallRecorder
from modelexport.pytorch.calls.traced_tree import trace_calls, untouched
from modelexport.pytorch.inputs.generated_inputs import check_inputs
from modelexport.pytorch.nested_tensors import Inputs, NamedTensors, run_arguments
from modelexport.pytorch.pretrained import is_pretrained
from modelexport.pytorch.private_torch import tree_leaves


def capture_by_dynamo(
    model: nn.Module,
    inputs: Inputs,
    options: FrontEndOptions = DEFAULTS,
    presumed: Presumed | None = None,
    *,
    says_so: bool = True,
) -> Exported:
    """Capture and translate a model. The model's state is restored afterwards, also after a failure.

    Args:
        inputs: Keyword or positional arguments of ``model.forward``; not changed.
        presumed: Answers what the model asks of values; by default that is an error.
        says_so: Tell a model that asks that it is exported; if it leaves out calls then, it is captured without.

    Raises:
        CaptureError: The exporter failed. Names the module call that was running.
        InputsError: The model has lazy parameters.
        UsageError: The opset does not exist, or quantized layers cannot be written so.
    """
    require("dynamo")
    dynamic, opset = options.dynamic, opset_for(model, options.opset, options.form)
    watcher, sizes = _TensorWatcher(), RecordedConditions()
    recorder = CallRecorder(model, _annotated, watcher.watch, changed_caches())
    programs: list[Any] = []
    asked: list[bool] = []
    captured, args, keywords = _bound(model, *by_name(model, inputs), options.constants)
    with (
        untouched(model, runs=False, captures=True),
        replaced(_replacements(recorder.seen, programs, options, presumed)),
        replaced({"created": LinesOfCode(model).noting} if options.lines else {}),
        replaced({"asks": lambda ask: _answering(ask, asked, says_so)}),
        replaced({"export": sizes.exporting, "guards": sizes.logging} if dynamic else {}),
        recorder.attached(),  # inside, since it ends the annotations of calls that were running at a failure
        steps_open(),
    ):
        if not isinstance(model, torch.jit.ScriptModule):  # takes no hooks
            model.register_forward_hook(only_tensors)
        failed: CaptureError | None = None
        try:
            translated, output_names = _translate(
                captured, args, keywords, dynamic=dynamic, ones=options.ones, opset=translated_opset(opset)
            )
        except Exception as error:  # of the model, of torch, of its exporter
            if unfinished := next((each for each in chained(error) if isinstance(each, ObserverError)), None):
                raise unfinished from None
            failed, cause = _explained(error, recorder, way_out(model, error)), error
    if failed is not None:
        check_inputs(model, inputs if isinstance(inputs, Mapping) else tuple(inputs))
        raise failed from cause
    check_returned(translated)
    if any(asked) and _lacks_calls(recorder.seen, model, inputs):
        with contextlib.suppress(CaptureError):
            return capture_by_dynamo(model, inputs, options, presumed, says_so=False)
    if captured is not model:  # the parameters have the names that they have in the model itself
        for value in list(translated.graph.initializers.values()):
            value.name = (value.name or "").removeprefix("model.")
    try:
        exported = _with_owners(
            model, inputs, translated, output_names, programs[-1].exported_program, recorder, watcher
        )
    except ir.passes.PassError as error:
        raise _explained(error, recorder) from error
    if opset is not None:
        convert_to_opset(exported.model, opset)
    if dynamic:
        exported = dataclasses.replace(
            exported, conditions=with_implied(model, inputs, exported.model, sizes.conditions())
        )
    return exported if presumed is None else dataclasses.replace(exported, presumed=tuple(presumed.lines))


def _replacements(
    calls: Sequence[TracedCall], programs: list[Any], options: FrontEndOptions, presumed: Presumed | None
) -> Mapping[str, Callable[[Any], Any]]:
    """Rows of the table of patches to what takes their place; what ``torch.onnx.export`` returns is in ``programs``."""
    answering = presumed.answering if presumed is not None else lambda capture: capture
    return {
        "annotations": lambda _: {},
        "export": lambda capture: answering(reading_no_values(capture)),
        "constants": lambda _: READABLE,
        "traced constants": lambda _: READABLE,
        "print": lambda _: lambda *text, **options: None,
        "decompose": with_decompositions,
        "prepare": lambda whole: with_plain_quantizers(
            outputs_converted_back(decomposed_once(whole, calls, ADDRESS_KEY))
        ),
        "flags": with_flags_known,
        "translate": lambda export: with_translations(export, programs, translations(options.form)),
        "parsed": parsed_when_used,
        "signatures": signed_when_used,
        "schemas": read_once,
        "protocols": functools.cache,
        "metadata": lambda describe: describe if options.stack_traces else name_of_fx_node,
        "operators": functools.cache,
        "kept operators": functools.cache,
        "registered": registered_plainly,
        "lazy graphs": lambda _: True,
        "stack traces": lambda before: before or not options.stack_traces,
    }


def _answering(ask: Callable[[], bool], asked: list[bool], says_so: bool) -> Callable[[], bool]:
    """``is_in_onnx_export``, noted in a list when a model asks."""

    def is_in_onnx_export() -> bool:
        asked.append(says_so)
        return says_so and ask()

    return is_in_onnx_export


def _lacks_calls(seen: Sequence[TracedCall], model: nn.Module, inputs: Inputs) -> bool:
    """Whether a run of the model makes calls that its capture did not."""
    calls = trace_calls(model, *run_arguments(inputs)).calls
    return not {traced.call for traced in calls} <= {traced.call for traced in seen}


def _bound(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], constants: Collection[str]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its arguments, or, if some of them are constants, a module that has those, and the others.

    ``torch.export`` finds no dynamic sizes for what goes into ``**kwargs``: it has names in that module, too.
    """
    register_caches(model)
    unnamed = not is_pretrained(model) and kwargs.keys() - inspect.signature(model.forward).parameters.keys()
    if not unnamed and not constants and all(isinstance(leaf, PLAIN) for leaf in tree_leaves((args, kwargs))):
        return model, args, kwargs
    bound = Bound(model, args, kwargs, constants)
    return bound, (), bound.given


def _with_owners(
    model: nn.Module,
    inputs: Inputs,
    translated: ir.Model,
    output_names: tuple[str, ...] | None,
    program: torch.export.ExportedProgram | None,
    recorder: CallRecorder,
    watcher: _TensorWatcher,
) -> Exported:
    """Read the owners and the boundaries of a translated graph from the program that it was translated from.

    Raises:
        PassError: A function of the graph cannot be inlined.
    """
    # If a whole graph comes from inlined functions, no node refers to its FX node, only to its name.
    fx_graphs = {} if program is None else {translated.graph: program.graph}
    passes.InlinePass()(translated)
    floor_quotients_of_sizes(translated)
    compute_numbers_in_double(translated)
    list(without_last_windows(translated))
    list(hide_sizes_of_transforms(translated))
    seen: Sequence[TracedCall] = recorder.seen
    if program is not None and not (seen and seen[0].call == ROOT and is_annotated(program.graph)):
        # Strict capture, to which torch.onnx fell back, runs no hooks, and a GraphModule as root not its own: the calls
        # come from a run of the model.
        with collected():
            seen = trace_calls(model, *run_arguments(inputs)).calls
    owners = FxOwners(model, seen, fx_graphs)
    calls = owners.assign(translated)
    prepare_integer_weights(translated)
    if output_names is None:
        output_names = tuple(spec.name for spec in seen[0].outputs)
    if len(output_names) != len(translated.graph.outputs):
        output_names = tuple(value.name or "" for value in translated.graph.outputs)
    returned = _returned(seen, translated)
    values = {**watcher.graph_inputs(translated), **owners.values, **returned}
    return Exported(translated, calls, state_dict_names(model), values, output_names, "dynamo")


class _TensorWatcher:
    """Marks the FX nodes that produce the tensors that calls get and return, while the model is captured."""

    def __init__(self) -> None:
        self._from_inputs: dict[torch.fx.Node, list[Port]] = {}

    def watch(self, call: ModuleCall, side: Side, tensors: NamedTensors) -> None:
        mode = private("proxies")() if usable("proxies", "proxy") else None
        if mode is None:
            return
        for index, (_, tensor) in enumerate(tensors):
            slot = private("proxy")(tensor, mode.tracer, None)
            if slot is None:  # a parameter, or created outside the capture
                continue
            node, port, item = slot.proxy.node, Port(call, side, index), None
            if node.op == "placeholder":
                self._from_inputs.setdefault(node, []).append(port)
                continue
            if is_written_later(node):  # through a view, so that the node has the old content
                continue
            if node.target is operator.getitem:  # decomposition replaces these nodes, without annotations
                node, item = node.args
            while node is not None and node.op != "placeholder":
                custom = node.meta.get("custom") or {}
                # A new dictionary: nodes of one call share theirs.
                node.meta["custom"] = {**custom, PORTS_KEY: (*custom.get(PORTS_KEY, ()), (port, item))}
                node = passed_on(node) if item is None else None

    def graph_inputs(self, model: ir.Model) -> dict[Port, str]:
        """The ports where the inputs of the graph enter unchanged, in the order of the root's inputs."""
        of_root: dict[int, list[Port]] = {}
        for ports in self._from_inputs.values():
            of_root.update((port.position, ports) for port in ports if port.call == ROOT and port.side == "inputs")
        inputs = [of_root[index] for index in sorted(of_root)]
        if len(inputs) != len(model.graph.inputs):
            return {}
        return {
            port: value.name or "" for ports, value in zip(inputs, model.graph.inputs, strict=True) for port in ports
        }


def _returned(calls: Sequence[TracedCall], model: ir.Model) -> dict[Port, str]:
    """The outputs of the graph as the tensors that the root returns, in order."""
    specs = calls[0].outputs if calls else ()
    if len(specs) != len(model.graph.outputs):
        return {}
    return {
        Port(ROOT, "outputs", index): value.name or ""
        for index, value in enumerate(model.graph.outputs)
        if value.producer() is not None
    }


@contextlib.contextmanager
def _annotated(call: ModuleCall) -> Iterator[None]:
    # Around the root, lets the bodies of torch.cond keep TorchDynamo's record of their modules.
    preserved = torch.fx.traceback.preserve_node_meta() if call == ROOT else contextlib.nullcontext()
    with preserved, torch.fx.traceback.annotate({ADDRESS_KEY: call.address}):
        yield


def _explained(error: Exception, recorder: CallRecorder, hint: str = "") -> CaptureError:
    """The error with what failed, where, and the exporter's own reason: the exception at the bottom of the chain."""
    cause = raised_first(error)
    node = translated_node(error)
    call = recorder.running or (annotated_call(node) if node is not None else None)
    reason = capture_reason(cause)
    hint = hint or (OTHER_OPERATIONS if node is not None else "")
    return failure(cause, call, reason, f"{in_one_line(reason)}{hint}")


def _translate(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool, ones: bool, opset: int | None
) -> tuple[ir.Model, tuple[str, ...] | None]:
    """The translated graph, and the names of its outputs if the exporter knows them."""
    if is_pretrained(model) and not args:
        return export_pretrained(model, kwargs, dynamic=dynamic, opset=opset)
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    shapes = _dynamic_axes(arguments, ones) if dynamic else None
    if has_transformers_inside(model):
        exported = export_around_pretrained(model, args, kwargs, shapes, opset)
    else:
        exported = torch.onnx.export(
            model,
            args,
            kwargs=kwargs,
            dynamic_shapes=shapes,
            opset_version=opset,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert exported is not None
    program = exported.exported_program
    # torch.onnx writes a symbol even for an axis for which the capture found a single possible size.
    ranges = program.range_constraints if program is not None else {}
    rename_sizes(exported.model, {str(s): str(int(r.lower)) for s, r in ranges.items() if r.lower == r.upper})
    return exported.model, None


def _dynamic_axes(value: Any, ones: bool) -> Any:
    """``Dim.AUTO`` on every axis of every tensor in a nested value; with or without those of size one."""
    if isinstance(value, torch.Tensor):
        return {
            axis: torch.export.Dim.AUTO if ones or size != 1 else torch.export.Dim.STATIC
            for axis, size in enumerate(value.shape)
        }
    if isinstance(value, Mapping):
        return {key: _dynamic_axes(part, ones) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        made = getattr(type(value), "_make", type(value))  # of named tuples
        return made(_dynamic_axes(part, ones) for part in value)
    return None
