"""Export PyTorch models to ONNX with the exact module call on every node, and work on ONNX files by module.

    result = modelexport.export(model, inputs, "bert.onnx")     # a file, tagged; checked against the model
    tagged = modelexport.load("bert.onnx")                      # the tree of modules in it; needs no torch
    tagged["encoder.layer.0"].nodes                             # a module's nodes, inputs, outputs, parameters
    modelexport.verify(model, inputs, "bert.onnx")              # every module call compared with PyTorch
    modelexport.extract("bert.onnx", "encoder.layer.0", "layer.onnx")

Export and check: export, export_package, verify, verify_generation, verify_pipeline, verify_reference, verify_against.
Look: load, compare, cost, profile, sensitivity, hierarchy.
Change: extract, split, replace, place, rename, quantize, update_weights, merge_adapters, adapters_as_inputs.
Files of others: adopt, retag, strip, inline. Back to PyTorch: to_torch.

``help`` of each shows its arguments, results and errors. Every error that is raised on purpose is a
:class:`ModelExportError` whose text says what was wrong and what to do. Importing this package is fast: torch and other
slow packages are imported when a public name is first used.
"""

# The folders of this package are called rooms; docs/architecture.md lists them, and what each may import.

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from modelexport.core.missing_extras import missing_extra
from modelexport.core.version import __version__ as __version__

if TYPE_CHECKING:
    from modelexport.errors import ModelExportError as ModelExportError
    from modelexport.errors import ModelExportWarning as ModelExportWarning
    from modelexport.exporting.export_result import ExportResult as ExportResult
    from modelexport.exporting.pipeline import export as export
    from modelexport.lineage.adoption import adopt as adopt
    from modelexport.lineage.retagging import retag as retag
    from modelexport.measure.costs import cost as cost
    from modelexport.measure.profiles import profile as profile
    from modelexport.packages.changed_packages import quantize_package as quantize_package
    from modelexport.packages.changed_packages import quantize_within as quantize_within
    from modelexport.packages.measured_parts import cost_parts as cost_parts
    from modelexport.packages.measured_parts import profile_parts as profile_parts
    from modelexport.packages.package_export import PackageResult as PackageResult
    from modelexport.packages.package_export import export_package as export_package
    from modelexport.packages.transformers_backend import register_transformers_backend as register_transformers_backend
    from modelexport.packages.verify_by_generation import GenerationReport as GenerationReport
    from modelexport.packages.verify_by_generation import verify_generation as verify_generation
    from modelexport.packages.verify_by_pipeline import PipelineReport as PipelineReport
    from modelexport.packages.verify_by_pipeline import verify_pipeline as verify_pipeline
    from modelexport.packages.verify_file_or_package import verify as verify
    from modelexport.precision.quantize import quantize as quantize
    from modelexport.precision.sensitivity import sensitivity as sensitivity
    from modelexport.pytorch.hierarchy_overview import hierarchy as hierarchy
    from modelexport.pytorch.inputs.example_inputs import example_inputs as example_inputs
    from modelexport.surgery.extraction import extract as extract
    from modelexport.surgery.lora_adapters import adapters_as_inputs as adapters_as_inputs
    from modelexport.surgery.lora_adapters import merge_adapters as merge_adapters
    from modelexport.surgery.lora_adapters import write_adapter as write_adapter
    from modelexport.surgery.placing import Placement as Placement
    from modelexport.surgery.renaming import Renamed as Renamed
    from modelexport.surgery.renaming import rename as rename
    from modelexport.surgery.replacing import Replaced as Replaced
    from modelexport.surgery.replacing import replace as replace
    from modelexport.surgery.splitting import Split as Split
    from modelexport.surgery.stage_runs import run_chain as run_chain
    from modelexport.surgery.substitutes.custom_operator import CustomOperator as CustomOperator
    from modelexport.surgery.substitutes.from_model import FromModel as FromModel
    from modelexport.surgery.substitutes.substitute import Identity as Identity
    from modelexport.tagged.comparison import compare as compare
    from modelexport.tagged.comparison_report import FileComparison as FileComparison
    from modelexport.tagged.strip_and_inline import inline as inline
    from modelexport.tagged.strip_and_inline import strip as strip
    from modelexport.tagged_model import TaggedModel as TaggedModel
    from modelexport.tagged_model import load as load
    from modelexport.tagged_model import place as place
    from modelexport.tagged_model import split as split
    from modelexport.torch_source.to_torch import to_torch as to_torch
    from modelexport.verify.against_file import verify_against as verify_against
    from modelexport.verify.against_reference import verify_reference as verify_reference
    from modelexport.verify.verify_report import VerifyReport as VerifyReport
    from modelexport.weights.weight_updates import update_weights as update_weights

_PUBLIC = {
    "ModelExportError": "modelexport.errors",
    "ModelExportWarning": "modelexport.errors",
    "verify": "modelexport.packages.verify_file_or_package",
    "verify_generation": "modelexport.packages.verify_by_generation",
    "verify_pipeline": "modelexport.packages.verify_by_pipeline",
    "verify_against": "modelexport.verify.against_file",
    "CustomOperator": "modelexport.surgery.substitutes.custom_operator",
    "FromModel": "modelexport.surgery.substitutes.from_model",
    "Identity": "modelexport.surgery.substitutes.substitute",
    "Placement": "modelexport.surgery.placing",
    "Renamed": "modelexport.surgery.renaming",
    "Replaced": "modelexport.surgery.replacing",
    "Split": "modelexport.surgery.splitting",
    "adapters_as_inputs": "modelexport.surgery.lora_adapters",
    "extract": "modelexport.surgery.extraction",
    "merge_adapters": "modelexport.surgery.lora_adapters",
    "place": "modelexport.tagged_model",
    "rename": "modelexport.surgery.renaming",
    "replace": "modelexport.surgery.replacing",
    "run_chain": "modelexport.surgery.stage_runs",
    "split": "modelexport.tagged_model",
    "write_adapter": "modelexport.surgery.lora_adapters",
    "adopt": "modelexport.lineage.adoption",
    "VerifyReport": "modelexport.verify.verify_report",
    "ExportResult": "modelexport.exporting.export_result",
    "FileComparison": "modelexport.tagged.comparison",
    "GenerationReport": "modelexport.packages.verify_by_generation",
    "PackageResult": "modelexport.packages.package_export",
    "TaggedModel": "modelexport.tagged_model",
    "compare": "modelexport.tagged.comparison",
    "cost": "modelexport.measure.costs",
    "cost_parts": "modelexport.packages.measured_parts",
    "example_inputs": "modelexport.pytorch.inputs.example_inputs",
    "export": "modelexport.exporting.pipeline",
    "export_package": "modelexport.packages.package_export",
    "hierarchy": "modelexport.pytorch.hierarchy_overview",
    "register_transformers_backend": "modelexport.packages.transformers_backend",
    "profile": "modelexport.measure.profiles",
    "profile_parts": "modelexport.packages.measured_parts",
    "quantize": "modelexport.precision.quantize",
    "quantize_within": "modelexport.packages.changed_packages",
    "sensitivity": "modelexport.precision.sensitivity",
    "quantize_package": "modelexport.packages.changed_packages",
    "inline": "modelexport.tagged.strip_and_inline",
    "load": "modelexport.tagged_model",
    "retag": "modelexport.lineage.retagging",
    "strip": "modelexport.tagged.strip_and_inline",
    "to_torch": "modelexport.torch_source.to_torch",
    "update_weights": "modelexport.weights.weight_updates",
    "verify_reference": "modelexport.verify.against_reference",
}
__all__ = sorted(_PUBLIC)  # noqa: PLE0605 - the table above is the list


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if lacking := missing_extra(error):
            raise ImportError(f"modelexport.{name}: {lacking}", name=error.name) from error
        raise


class _Package(ModuleType):
    """Keeps a public name when the submodule of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
