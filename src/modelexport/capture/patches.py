"""The table of private names of torch, its exporters and transformers that only this room uses or replaces.

:func:`warn_of_versions` and :func:`require` look at the rows when a front end starts. A name that is missing, or whose
parameters have changed, is not used, and a warning says once what is lost. A name without which files would be wrong is
an error. Tests go through the same table with the installed torch.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from modelexport.core.installed_versions import installed_version
from modelexport.core.replaced_attributes import attribute_set
from modelexport.core.warned_callers import warn_caller
from modelexport.errors import CaptureError, VersionWarning

Use = Literal["dynamo", "torchscript", "internals", "once"]


@dataclass(frozen=True, slots=True)
class Patch:
    """A name of another package, and why it is used."""

    use: Use
    """The front end; ``once`` are those of `dynamo` that only save time."""
    where: str
    """``module:attribute``."""
    takes: str | None
    """Its parameters; ``...`` at the end allows more. ``None`` if it is not a function of Python."""
    why: str
    lost: str
    """What is lost without it."""
    required: bool = False
    """Without it, files would be wrong."""

    @property
    def package(self) -> str:
        return self.where.partition(":")[0].partition(".")[0]


_EXPORTER = "torch.onnx._internal.exporter"

# fmt: off
TABLE: Mapping[str, Patch] = {
    # Public functions that are replaced while a model is captured
    "export": Patch("dynamo", "torch.export:export", "mod args kwargs ...",
        "while the code of a model runs, PyTorch reads no values to warn of them",
        "no exports of distributions, torch.cov and gaussian_nll_loss"),
    "decompose": Patch("dynamo", "torch.export:ExportedProgram.run_decompositions", "self decomp_table ...",
        "operators that torch.onnx translates wrongly become others; nodes keep their annotations",
        "scatter_reduce, batch normalization and views would be wrong", required=True),
    "translate": Patch("dynamo", "torch.onnx:export", "model args f kwargs ...",
        "our translations are added, and what was translated is kept",
        "pooling, losses and indices would be wrong", required=True),
    "validation": Patch("dynamo", "torch.distributions:Distribution._validate_args", None,
        "distributions read no values", "no exports of distributions"),
    "quotients": Patch("dynamo", "builtins:divmod", None, "sizes are divided", "no exports of divmod of sizes"),
    "rounding": Patch("dynamo", "torch:SymFloat.__round__", None, "torch.onnx rounds no sizes", "no exports of round"),
    "roots": Patch("dynamo", "math:sqrt", None, "it makes a number of a size", "axes are fixed by math.sqrt"),
    "powers": Patch("dynamo", "math:exp", None, "it makes a number of a size", "axes are fixed by math.exp"),
    "conversions": Patch("dynamo", "torch.nn:Module._apply", "self fn recurse",
        "a forward converts a module (`self.head.half()`)", "no exports of such models, or without the rounding"),
    "any": Patch("dynamo", "torch:any", None, "gaussian_nll_loss reads no values", "no exports of gaussian_nll_loss"),
    "asarray": Patch("dynamo", "torch:asarray", None,
        "decompositions have no room for the constants that it makes", "no exports of complex numbers"),
    "asks": Patch("dynamo", "torch.onnx:is_in_onnx_export", "",
        "a model that leaves out calls for exporters is captured as users run it", "such calls are not in the file"),
    "created": Patch("dynamo", "torch.fx.proxy:TracerBase.create_node", "self kind target args kwargs ...",
        "a node notes the line of the model that runs", "nodes without lines of code"),
    "truth": Patch("dynamo", "torch:SymBool.__bool__", "self",
        "a model asks whether anything is selected", "no exports of models that skip work for nothing"),
    # Private names that are replaced while a model is captured
    "guards": Patch("dynamo", "torch.fx.experimental.symbolic_shapes:ShapeEnv._log_guard", "self prefix g forcing_spec",
        "what is decided by sizes, and the line of the model", "files would be wrong at other sizes", required=True),
    "comparisons": Patch("dynamo", "torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_expr",
        "self orig_expr hint ...", "what a traced model asks of sizes", "fewer conditions of sizes with torchscript"),
    "ranges": Patch("dynamo", "torch.fx.experimental.symbolic_shapes:ShapeEnv._maybe_evaluate_static", "self expr ...",
        "what a traced model asks and is the same for all sizes above 1", "fewer conditions of sizes with torchscript"),
    "python kernels": Patch("dynamo", "torch._dispatch.python:enable_python_dispatcher", None,
        "operators that only take numbers run with symbolic sizes", "fewer conditions of sizes with torchscript"),
    "symbols": Patch("dynamo", "torch.fx.experimental:symbolic_shapes", None,
        "a traced model runs with symbolic sizes", "fewer conditions of sizes with torchscript"),
    "interpreted frames": Patch("dynamo", "torch._guards:TracingContext.extract_stack", "",
        "what is decided by sizes names the line of the model that dynamo interprets", "no line for such decisions"),
    "formulas": Patch("dynamo", "torch.utils._sympy.printers:PythonPrinter", "settings",
        "conditions of sizes as text", "files would be wrong at other sizes", required=True),
    "prepare": Patch("dynamo", f"{_EXPORTER}._core:_prepare_exported_program_for_export", "exported_program ...",
        "torch.onnx returns sums of half-precision numbers in float32, before they are converted back",
        "outputs of half precision would have another type", required=True),
    "annotations": Patch("dynamo", "torch.fx.traceback:current_meta", None,
        "a capture that failed may have left annotations", "owners of an earlier export", required=True),
    "constants": Patch("dynamo", "torch._subclasses.fake_tensor:CONSTANT_NUMEL_LIMIT", None,
        "Python may read constants of several elements", "no exports of models that read constants"),
    "traced constants": Patch("dynamo", "torch.fx.experimental.proxy_tensor:CONSTANT_NUMEL_LIMIT", None,
        "Python may read constants of several elements", "no exports of models that read constants"),
    "autocast": Patch("dynamo", "torch._higher_order_ops.wrap:WrapWithAutocast.__call__",
        "self device_type dtype enabled cache_enabled wrapped_func args ...",
        "nodes under torch.autocast keep their annotations", "owners of these nodes are not exact"),
    "gradients": Patch("dynamo", "torch._higher_order_ops.wrap:WrapWithSetGradEnabled.__call__",
        "self enable_grad wrapped_func args ...",
        "nodes under torch.no_grad keep their annotations", "owners of these nodes are not exact"),
    "kernels": Patch("dynamo", "torch:ops.aten.gru.input.py_kernels", None,
        "the shapes of recurrent layers for any number of steps", "no dynamic steps of recurrent layers"),
    "cached kernels": Patch("dynamo", "torch:ops.aten.gru.input._dispatch_cache", None,
        "the shapes of recurrent layers for any number of steps", "no dynamic steps of recurrent layers"),
    "dispatch keys": Patch("dynamo", "torch._C:DispatchKey", None,
        "the shapes of recurrent layers for any number of steps", "no dynamic steps of recurrent layers"),
    "print": Patch("dynamo", "torch.export._trace:print", None,
        "torch.export does not print a graph when it fails", "failures are long"),
    "flags": Patch("dynamo", "torch.export._trace:_fakify_params_buffers", "fake_mode mod",
        "Python may ask a module whether it quantizes", "no exports of models with FakeQuantize"),
    # Private names that are called
    "proxies": Patch("dynamo", "torch.fx.experimental.proxy_tensor:get_proxy_mode", "",
        "finds the FX nodes of what calls get and return", "boundaries of calls are not known"),
    "proxy": Patch("dynamo", "torch.fx.experimental.proxy_tensor:get_proxy_slot", "obj tracer default ...",
        "finds the FX nodes of what calls get and return", "boundaries of calls are not known"),
    "definitions": Patch("dynamo", "torch._decomp:decomposition_table", None,
        "PyTorch's own definitions of operators", "no dynamic steps of recurrent layers, no complex numbers"),
    "complex tensors": Patch("dynamo", "torch._subclasses.complex_tensor:ComplexTensor", "real imag",
        "operators of complex numbers in real ones", "no exports of complex numbers"),
    "complex operators": Patch("dynamo", "torch._subclasses.complex_tensor._ops.common:COMPLEX_OPS_TABLE", None,
        "operators of complex numbers in real ones", "no exports of complex numbers"),
    "registry": Patch("dynamo", f"{_EXPORTER}._registration:ONNXRegistry.from_torchlib", "opset_version",
        "which operators of complex numbers torch.onnx translates, and how it translates attention",
        "no exports of complex numbers; masks of attention that ONNX Runtime does not take from opset 23 on"),
    "converter": Patch("dynamo", "torch._export.converter:TS2EPConverter", "ts_model sample_args ...",
        "converts parts that are ScriptModules", "no exports of such parts"),
    "check": Patch("dynamo", "torch:_check", "cond message ...",
        "the lengths of keys, values and masks are one dynamic size", "fewer attentions with dynamic sizes are fused"),
    "transformers": Patch("dynamo", "transformers.exporters.exporter_onnx:_ONNX_TRANSLATION_TABLE", None,
        "a model of transformers in another module is translated as alone", "fewer exports of such modules"),
    "segments": Patch("dynamo", "transformers.exporters.exporter_dynamo:_reshaped_vision_attention_forward",
        "self hidden_states cu_seqlens ...",
        "attention of images and windows of unlike lengths, and its norms",
        "vision towers take images of one size, and lack norms of queries"),
    "packing": Patch("dynamo", "torch:_VF._pack_padded_sequence", None,
        "it reads lengths in C++", "no exports of packed sequences"),
    "padding": Patch("dynamo", "torch:_VF._pad_packed_sequence", None,
        "it reads lengths in C++", "no exports of packed sequences"),
    "states": Patch("dynamo", "torch.nn:RNNBase.check_forward_args", "self input hidden batch_sizes",
        "it makes the number of sequences a constant", "the batch of packed sequences is fixed"),
    "cells": Patch("dynamo", "torch.nn:LSTM.check_forward_args", "self input hidden batch_sizes",
        "it makes the number of sequences a constant", "the batch of packed sequences is fixed"),
    # The TorchScript exporter
    "scopes": Patch("torchscript", "torch.jit._trace:_trace_module_map", None,
        "each call has a scope of its own", "nodes would have no owners", required=True),
    "merging": Patch("torchscript", "torch._C:_jit_pass_cse", None,
        "equal nodes of different calls are not merged", "owners would be wrong", required=True),
    "fusing": Patch("torchscript", "torch._C:_jit_pass_onnx_peephole", None,
        "no nodes are fused across the boundary of a call", "owners would be wrong", required=True),
    "value": Patch("torchscript", "torch._C:_get_value_trace", None,
        "what a tensor is computed from", "files would keep numbers of the example", required=True),
    "set value": Patch("torchscript", "torch._C:_set_value_trace", None,
        "boundaries are outputs of the trace", "boundaries would be wrong", required=True),
    "translations": Patch("torchscript",
        "torch.onnx._internal.torchscript_exporter.utils:_run_symbolic_function",
        "graph block node inputs env values_in_env new_nodes ...",
        "the nodes of one operation round half precision once; writes that add do so",
        "sums of what is written twice would lack all but one, and half precision would be rounded more often",
        required=True),
    "log": Patch("torchscript", "torch._C:_jit_onnx_log", None, "a failure prints no graph", "failures are long"),
    # `modelexport internals`
    "log state": Patch("internals", "torch._C:_jit_is_onnx_log_enabled", None, "as it was", "no stages of torchscript"),
    "log switch": Patch("internals", "torch._C:_jit_set_onnx_log_enabled", None,
        "the exporter prints no graph", "no stages of torchscript"),
    "translated": Patch("internals", "torch.onnx._internal.torchscript_exporter.utils:_optimize_graph", "graph ...",
        "a stage", "no stages of torchscript"),
    "optimised": Patch("internals", "torch.onnx._internal.torchscript_exporter.utils:_model_to_graph", "model args ...",
        "a stage", "no stages of torchscript"),
    # Equal work done once
    "memory": Patch("once", "torch:UntypedStorage._cdata", None,
        "tells the memories of fake tensors apart: equal calls are decomposed once", "exports take longer"),
    "parsed": Patch("once", "onnxscript._internal.values:TracedOnnxFunction.function_ir", None,
        "the sources of translations are parsed when something but their domain is needed", "exports take longer"),
    "signatures": Patch("once", f"{_EXPORTER}._registration:OnnxDecompMeta.__post_init__", "self",
        "signatures of translations are inferred when they are used, once", "exports take longer"),
    "schemas": Patch("once", "onnx_ir.schemas:OpSignature.from_op_schema", "op_schema",
        "the schema of an operator is read once, and not for each node", "exports take longer"),
    "protocols": Patch("once", "typing:_get_protocol_attrs", "cls",
        "Python 3.11 collects the members of a protocol whenever it asks whether an object has them",
        "exports take longer"),
    "metadata": Patch("once", f"{_EXPORTER}._core:_set_node_metadata", "fx_node ir_node",
        "descriptions of FX nodes, which files do not keep, are not made", "exports take longer"),
    "inference": Patch("once", "onnxscript.optimizer._constant_folding:FoldConstantsPass._do_inference", "self node",
        "types and sizes are inferred where they are not known", "exports take longer"),
    "changed models": Patch("once", "transformers.exporters.utils:import_dotted_path", "path missing_ok",
        "transformers' exporter changes functions in the modules of thirty models, and imports those for it",
        "exports take longer"),
    "contiguity": Patch("once", "transformers.exporters.utils:is_contiguous_or_false", "a",
        "each mode of PyTorch runs transformers' reshape again, which compares all symbolic strides each time",
        "exports take longer"),
    "operators": Patch("once", "torch._export.utils:_materialize_cpp_cia_ops", "",
        "PyTorch looks for its operators once in an export, and not once for each of their sixty namespaces",
        "exports take longer"),
    "kept operators": Patch("once", "torch._export.utils:_check_valid_to_preserve", "op_overload",
        "PyTorch looks at the schema of each operator once in an export, and not three times", "exports take longer"),
    "registered": Patch("once", "torch._ops:OperatorBase.py_impl", "self k",
        "six thousand kernels are registered before a decomposition; Python builds annotations for each",
        "exports take longer"),
    "stack traces": Patch("once", "torch.fx:config.do_not_emit_stack_traces", None,
        "lines of Python are not formatted unless they are wanted", "exports take longer"),
    "lazy graphs": Patch("once", "torch.fx._lazy_graph_module:_use_lazy_graph_module_flag", None,
        "a graph becomes Python code when it runs, and not after each pass", "exports take longer"),
}
# fmt: on


@functools.cache
def owner_and_attribute(where: str) -> tuple[Any, str]:
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


@functools.cache
def problem(name: str) -> str:
    """What is wrong with a name, in a few words; empty if it is as expected."""
    row = TABLE[name]
    try:
        function = private(name)
    except Exception:  # an installed package that does not fit another one raises anything when it is imported
        return "is missing"
    if row.takes is None:
        return ""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return "is not a function of Python"
    expected = row.takes.split()
    known = parameters[: len(expected) - 1] == expected[:-1] if expected[-1:] == ["..."] else parameters == expected
    return "" if known else f"takes ({', '.join(parameters)})"


def require(use: Use) -> None:
    """Refuse a front end whose files would be wrong with the installed torch."""
    for name, row in TABLE.items():
        if row.use == use and row.required and (fault := problem(name)):
            reason = f"{row.where.replace(':', '.')} {fault} in torch {torch.__version__}; without it, {row.lost}"
            raise CaptureError(f"{reason}; install torch{tested().get('torch', '')}", reason=reason)


def warn_of_versions() -> None:
    """Warn of packages outside the tested range, and of what is not used; once in a process."""
    for text in _lacking():
        if text not in warned:
            warned.add(text)
            warn_caller(text, VersionWarning)


warned: set[str] = set()


def _lacking() -> Iterator[str]:
    for package, versions in tested().items():
        version = installed_version(package)
        if not versions.contains(version, prereleases=True):
            yield f"{package} {version} is outside the range that is tested, {versions}: verify the files"
    for name, row in TABLE.items():
        # A package that the model does not use takes a second to import.
        if not row.required and row.package in sys.modules and (fault := problem(name)):
            yield f"{row.where.replace(':', '.')} {fault}: {row.lost}"


@functools.cache  # of a file of the installed package, which is parsed as an e-mail
def tested() -> Mapping[str, SpecifierSet]:
    """The versions of packages that the tests run with: the extra ``tested`` of this package."""
    try:
        required = importlib.metadata.requires("modelexport") or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return {}
    requirements = [Requirement(line) for line in required]
    of_tests = [r for r in requirements if r.marker and r.marker.evaluate({"extra": "tested"})]
    return {requirement.name: requirement.specifier for requirement in of_tests}


_off: ContextVar[frozenset[str]] = ContextVar("modelexport.patches", default=frozenset())


@contextmanager
def turned_off(*names: str) -> Iterator[None]:
    """Inside the block, these names are not used; ``once`` stands for all that only save time."""
    rows = {name for name, row in TABLE.items() if name in names or row.use in names}
    token = _off.set(_off.get() | rows)
    try:
        yield
    finally:
        _off.reset(token)


def usable(*names: str) -> bool:
    """Whether all these names are there, as expected, and not turned off."""
    return not any(name in _off.get() or problem(name) for name in names)


def private(name: str) -> Any:
    """The object that a name of the table refers to now: torch's own, or what has replaced it."""
    owner, attribute = owner_and_attribute(TABLE[name].where)
    if attribute in vars(builtins) and isinstance(owner, ModuleType):  # a module's own function takes its place
        return getattr(owner, attribute, vars(builtins)[attribute])
    return getattr(owner, attribute)


@contextmanager
def replaced(replacements: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Inside the block, the usable named objects are replaced by what the functions make of them."""
    with ExitStack() as stack:
        for name, make in replacements.items():
            if usable(name):
                owner, attribute = owner_and_attribute(TABLE[name].where)
                stack.enter_context(attribute_set(owner, attribute, make(private(name))))
        yield
