"""Run both exporters on one model and record what they know about its modules."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from modelexport.capture.internals import dynamo_stages, torchscript_stages
from modelexport.capture.internals.internals_report import ExporterStage, FrontEnd, Internals, MapEntry, quality
from modelexport.core.text import error_line, raised_first
from modelexport.pytorch.calls.module_tree_of_model import module_tree
from modelexport.pytorch.calls.traced_tree import trace_calls, untouched
from modelexport.pytorch.nested_tensors import Inputs, run_arguments


def study(model: nn.Module, inputs: Inputs, name: str | None = None) -> Internals:
    """What PyTorch's exporters record about a model's modules at each stage. Neither export is kept.

    The model's state is restored afterwards, except parameters that a module overwrites in place when it runs.

    Args:
        inputs: Keyword or positional arguments of ``model.forward``; not changed.
        name: The name of the model in the result; by default its class.

    Raises:
        InputsError: The model does not run with the inputs. A failure of an exporter is part of the result.
    """
    tree = module_tree(model)
    args, kwargs = run_arguments(inputs)
    calls = trace_calls(model, args, kwargs)
    scopes = torchscript_stages.ScopeCounts()
    front_ends = [
        _front_end("dynamo", model, lambda stages: dynamo_stages.look_at_dynamo(model, inputs, stages)),
        _front_end(
            "torchscript", model, lambda stages: torchscript_stages.look_at_torchscript(model, inputs, stages, scopes)
        ),
    ]
    root = scopes.by_path.get("") or ""
    return Internals(
        model=name or tree.root.class_name,
        modules=len(tree),
        calls=len(calls),
        modules_called=len({traced.call.path for traced in calls}),
        module_map=[MapEntry(path, tree[path].class_name, scope) for path, scope in scopes.by_path.items()],
        map_quality=quality(scopes.by_path.values(), root),
        scope_quality=quality(sorted(scopes.captured), root),
        front_ends=front_ends,
    )


def _front_end(name: str, model: nn.Module, look: Callable[[list[ExporterStage]], None]) -> FrontEnd:
    stages: list[ExporterStage] = []
    try:
        # Not `runs`: the code that watches the parameters of a run would itself be traced.
        with untouched(model, runs=False, captures=True):
            look(stages)
    except Exception as error:  # of the model, of torch, of its exporter
        return FrontEnd(name, stages, error_line(raised_first(error), 200))
    return FrontEnd(name, stages, None)
