"""``verify``: a file or a package compared with what it should compute, whichever that is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from modelexport.core.result_display import Rows, Shown
from modelexport.errors import UsageError
from modelexport.files.path_or_model import Source, as_path
from modelexport.runtime.devices import CPU
from modelexport.traces.array_differences import verdict_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from modelexport.format.documents import Hierarchy
    from modelexport.packages.part_reports import PartReports
    from modelexport.tables.table import Table
    from modelexport.tools.compare.against_report import AgainstReport
    from modelexport.tools.devices.device_report import DeviceReport
    from modelexport.traces.array_differences import Difference
    from modelexport.verify.verify_report import VerifyReport
    from modelexport.weights.bytes_of_entries import Weights

Report: TypeAlias = "VerifyReport | AgainstReport | DeviceReport | PartReports | StagesReport | Any"
"""What a comparison found; each has ``agrees``. Packages have the reports of their kinds."""


@dataclass(frozen=True, repr=False)
class StagesReport(Shown):
    """The outputs of stages that run one after the other, compared with those of the whole file."""

    outputs: Sequence[Difference]

    @property
    def agrees(self) -> bool:
        """Whether an output agrees and none differs."""
        return verdict_of([output.status for output in self.outputs]) == "agree"

    def _table(self) -> Rows:
        yield "output", "status", "largest difference"
        yield from ((output.name, output.status, output.absolute) for output in self.outputs)


@overload
def verify(file: Source, /, *, modules: Sequence[str] = (), provider: str = CPU) -> VerifyReport: ...
@overload
def verify(
    file: Source,
    /,
    *,
    device: str,
    inputs: Mapping[str, Any] | str | Path | None = None,
    modules: Sequence[str] = (),
    bound: float = ...,
    limit: float = ...,
    keep: bool = True,
    fix: str | Path | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> DeviceReport: ...
@overload
def verify(
    file: Source, /, *, results: str | Path, inputs: Mapping[str, Any] | str | Path | None = None, bound: float = ...
) -> DeviceReport: ...
@overload
def verify(
    file: Source,
    /,
    *,
    against: Source,
    modules: Sequence[str] = (),
    provider: str = CPU,
    seed: int = 0,
    bound: float | None = None,
    data: str | Path | None = None,
    processor: str | Path | None = None,
) -> AgainstReport | StagesReport: ...
@overload
def verify(
    model: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...] | Tensor,
    file: Source,
    /,
    *,
    modules: Sequence[str] = (),
    provider: str = CPU,
    perturb: bool | None = None,
    others: bool = True,
    sidecar: Hierarchy | None = None,
    weights: Weights | None = None,
    kept: dict[Hashable, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport | Any: ...
@overload
def verify(
    model: Any,
    inputs: Mapping[str, Any] | Sequence[Any] | None,
    folder: Source,
    /,
    *,
    provider: str = CPU,
    new_tokens: int = 64,
    steps: int = 4,
    seed: int = 0,
    weights: Weights | None = None,
    progress: Callable[[str], None] | None = None,
) -> PartReports | Any: ...
def verify(
    first: Any,
    model_inputs: Any = None,
    file: Source | None = None,
    /,
    *,
    against: Source | None = None,
    device: str | None = None,
    results: str | Path | None = None,
    inputs: Mapping[str, Any] | str | Path | None = None,
    modules: Sequence[str] = (),
    provider: str = CPU,
    seed: int | None = None,
    bound: float | None = None,
    data: str | Path | None = None,
    processor: str | Path | None = None,
    limit: float | None = None,
    keep: bool | None = None,
    fix: str | Path | None = None,
    perturb: bool | None = None,
    others: bool | None = None,
    sidecar: Hierarchy | None = None,
    weights: Weights | None = None,
    kept: dict[Hashable, Any] | None = None,
    new_tokens: int | None = None,
    steps: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Any:
    """Compare a file or a package with its model, with another file, or with the values that were stored beside it.

    ========================================  ===============================================  ======================
    call                                      compares                                         returns
    ========================================  ===============================================  ======================
    ``verify(model, inputs, "a.onnx")``       every call and output with PyTorch               ``VerifyReport``
    ``verify("a.onnx")``                      the same with the values of ``reference=True``   ``VerifyReport``
    ``verify("a.onnx", device="qnn")``        the file on a device                             ``DeviceReport``
    ``verify("a.onnx", results="r.json")``    what its kit gave on another machine             ``DeviceReport``
    ``verify("a.onnx", against="b.onnx")``    a file that was made from it                     ``AgainstReport``
    ``verify("stages/", against="a.onnx")``   the stages of a split file with the file         ``StagesReport``
    ``verify(model, prompts, "folder/")``     generated tokens and logits                      ``GenerationReport``
    ``verify(pipeline, arguments, "out/")``   the calls and images of a pipeline               ``PipelineReport``
    ``verify(model, inputs, "folder/")``      each part of another package                     ``PartReports``
    ========================================  ===============================================  ======================

    Args:
        model_inputs: Of the model; ``None`` for prompts and arguments that are made.
        device: ``NAME[,option=value...]``: the file is compared there with what it should compute.
        results: What the runner of the file's kit wrote on another machine.
        inputs: Of a file that is compared on a device: arrays by name, or a file of them.
        against: The file to compare with.
        modules: Selectors of the calls to compare, with those inside them; by default all. Of files.
        provider: The execution provider of ONNX Runtime for the outputs.
        seed: For random inputs (``against``, ``device``) and for the run of a pipeline; 0 by default.
        bound: With ``against``: how far off outputs may be, as a share of their size; by default that of the recipe
            beside the second file. With ``device``: the same of calls.
        data: With ``against``: inputs for runs, as :func:`modelexport.quantize` takes them.
        processor: With ``data``: the folder of ``tokenizer.json``, if it is not next to the first file.
        limit, keep: With ``device``: the seconds that a run may take (300), and whether results are kept and used.
        fix: With ``device``: a file to write that is right there, if there is a change that makes it so.
        perturb: Change the weights in memory, on both sides, so that no two are equal; by default if some are.
        others: Also compare outputs on other inputs, where a file is compared with a model; true by default.
        sidecar: The document of the file, if not ``NAME.hierarchy.json`` beside it.
        weights: The places of the weights of a model that was built without them.
        kept: Runs of the model on these inputs, reused and added to, if several files of it are verified.
        new_tokens: The number of tokens to generate with a package that generates; 64 by default.
        steps: The number of steps of the scheduler of a pipeline; 4 by default.
        progress: Called with the name of each step, where a file is compared with a model or on a device.

    Raises:
        FileFormatError: A file has no tags, or is damaged.
        InputsError: The inputs do not fit.
        TypeError: A keyword is for another of these cases.
        UsageError: The model is not the one that was exported, or a module or provider does not exist.
    """
    keywords = {
        "modules": modules or None, "seed": seed, "bound": bound, "perturb": perturb, "others": others,
        "sidecar": sidecar, "weights": weights, "kept": kept, "new_tokens": new_tokens, "steps": steps,
        "device": device, "inputs": inputs, "limit": limit, "keep": keep, "fix": fix,
        "data": data, "processor": processor, "against": against,
    }  # fmt: skip
    how: dict[str, Any] = {name: value for name, value in keywords.items() if value is not None}
    if results is not None:
        from modelexport.tools.devices.kits import verify_results

        return verify_results(as_path(first), results, **how)
    reporting: dict[str, Any] = {} if progress is None else {"tell": progress}
    how |= {"provider": provider} if device is None or provider != CPU else {}
    if file is None:
        if hasattr(first, "named_modules"):
            raise UsageError("the inputs of the model are missing: give verify(model, inputs, file)")
        return _without_model(as_path(first), how.pop("against", None), how if device is None else how | reporting)
    if hasattr(model_inputs, "named_modules"):
        raise UsageError("the model comes first: verify(model, inputs, path)")
    path = as_path(file)
    if path.is_dir():
        return _package(first, model_inputs, path, how, reporting)
    from modelexport.verify.verify import verify as with_model

    if not hasattr(first, "named_modules"):
        raise UsageError(f"the model is a {type(first).__name__}: give verify(model, inputs, path) a module of PyTorch")
    return with_model(first, model_inputs, path, **how, **reporting)


def _without_model(path: Path, against: Source | None, how: Mapping[str, Any]) -> Report:
    if "device" in how and against is None and not path.is_dir():
        from modelexport.tools.devices.device_verification import verify_device

        return verify_device(path, **how)
    if against is None:
        if path.is_dir():
            raise UsageError(
                f"{path} is a folder: give the exported model with --model, or for stages the split file with --against"
            )
        from modelexport.verify.against_reference import verify_reference

        return verify_reference(path, **how)
    if path.is_dir():
        from modelexport.tools.cut.stage_runs import verify_stages

        return StagesReport(verify_stages(path, against, **how))
    from modelexport.tools.compare.against_file import verify_against

    return verify_against(path, against, **how)


def _package(model: Any, inputs: Any, folder: Path, how: dict[str, Any], reporting: dict[str, Any]) -> Report:
    from modelexport.packages.package_kinds import as_module, kind_of_package
    from modelexport.tagged.package import read_package

    package, module = read_package(folder), as_module(model)
    kind = kind_of_package(package, module)
    how |= reporting if "progress" in kind.verified_with else {}
    report: Report = kind.verify(module, inputs, package, **how)
    return report


def error_table(file: str | Path, report: VerifyReport | AgainstReport | DeviceReport) -> Table:
    """The cost of a file with the errors of its verification as a column."""
    from modelexport.tables.costs import cost
    from modelexport.tagged.file import read_tagged
    from modelexport.tools.devices.device_report import DeviceReport
    from modelexport.tools.devices.placement_table import placement_table
    from modelexport.tools.figures.report_page import with_errors

    if isinstance(report, DeviceReport):
        return placement_table(read_tagged(file), report)
    return with_errors(cost(file), report)
