"""The options of an export, in groups: constants, tags, weights, fusions and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from modelexport.capture.choice import Attempt
from modelexport.capture.exported import Exported
from modelexport.core.tags import Granularity
from modelexport.errors import UsageError
from modelexport.exporting import FuseFor
from modelexport.format import documents
from modelexport.tagged.encodings import Encoding
from modelexport.weights import WeightsMode
from modelexport.weights.sources import Weights

LARGE = 10**9
"""Bytes of weights above which a model that was built without them does not run at its export."""

NodeNames = Literal["exporter", "path"]


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How a model is captured."""

    constants: Collection[str] = ()
    """Arguments of ``forward`` whose values the file keeps; ``auto`` among them: those that it cannot be captured
    without. What is not a tensor is always kept."""
    reuse: bool = True
    """Do equal work once, and leave out what no file needs (``modelexport.capture.once``). The file is the same
    without, and takes longer."""


@dataclass(frozen=True, kw_only=True)
class TagOptions:
    """How a file is tagged."""

    granularity: Granularity = "auto"
    """The modules that get a segment in the tags (see :class:`~modelexport.core.tags.Tags`)."""
    include: Collection[str] = ()
    """Names of classes that get a segment as well."""
    exclude: Collection[str] = ()
    """Names of classes that do not get a segment."""
    tags_as: Encoding = "metadata"
    """``metadata`` of nodes, ``attributes`` of nodes (which ONNX Runtime refuses until :func:`modelexport.strip`
    converts them to metadata), or ``functions``, one for each distinct module."""
    keep_torch_metadata: bool = False
    """Keep the exporter's own ``pkg.torch.*`` keys, which contain paths of this machine."""
    node_names: NodeNames = "exporter"
    """``path`` names nodes after their modules: ``/encoder/layer.0/attention/self/MatMul_1``."""


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """Where the weights of a file go."""

    weights: WeightsMode = "auto"
    """``link`` leaves them in the files of ``source``, ``copy`` writes them to ``NAME.onnx.data``, ``none`` describes
    them and leaves them out. ``auto`` links if there is a ``source``; otherwise it copies above 1 GB and embeds
    below."""
    source: Weights | None = None
    """The places of the weights of a model that was built without them
    (:func:`modelexport.pytorch.loading.load_model` with ``weights="files"``)."""

    @property
    def lent(self) -> Weights | None:
        """The weights that the model's modules have to be given while they run; ``None`` if it has its own."""
        return None if self.source is None or self.source.in_memory else self.source

    @property
    def to_check(self) -> Weights | None:
        """The same, for a check of an export, which does not read very large files: ``None`` for these."""
        return self.lent if self.lent is not None and self.lent.nbytes <= LARGE else None


@dataclass(frozen=True, kw_only=True)
class FuseOptions:
    """How nodes are fused for a runtime."""

    fuse: FuseFor | None = None
    """``ort-cpu`` or ``ort-cuda``: operators of ONNX Runtime, such as GroupQueryAttention. The file runs in no other
    runtime."""
    row: str | None = None
    """The symbol of the batch, if the graph may refuse several new tokens after a cache for more than one row."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How a file is checked."""

    check: bool = True
    """Write the file only if it is valid, ONNX Runtime loads it, and it computes the model's outputs for the example
    inputs."""
    keep_anyway: bool = False
    """Write a file that fails this check nevertheless; the result says what is wrong with it."""
    verify: bool = False
    """Run both models on the example inputs and compare every output, every call and every parameter."""
    reference: bool | Sequence[str] = False
    """Store the inputs and the boundary values of every call, or of these calls (addresses or tags) and those inside
    them, in ``NAME.reference.safetensors``: with them the file can be verified without PyTorch."""

    sizes: bool = False
    """Fail if the file fixes the size of any dynamic axis. Otherwise only a named axis has to be dynamic, and others
    become fixed."""
    checked: Mapping[str, Any] | Sequence[Any] | None = None
    """Inputs to check and verify with, if the file does not accept the example inputs."""

    @property
    def any(self) -> bool:
        """Whether the file has to run before it is moved into place."""
        return self.check or self.verify or bool(self.reference)


class Keywords(TypedDict, total=False):
    """The options as keywords of :func:`modelexport.export`."""

    constants: Collection[str]
    reuse: bool
    granularity: Granularity
    include: Collection[str]
    exclude: Collection[str]
    tags_as: Encoding
    keep_torch_metadata: bool
    node_names: NodeNames
    weights: WeightsMode
    source: Weights | None
    check: bool
    keep_anyway: bool
    verify: bool
    reference: bool | Sequence[str]
    sizes: bool
    checked: Mapping[str, Any] | Sequence[Any] | None
    fuse: FuseFor | None
    row: str | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The groups together."""

    capture: CaptureOptions = CaptureOptions()
    tags: TagOptions = TagOptions()
    weights: WeightOptions = WeightOptions()
    checks: CheckOptions = CheckOptions()
    fusing: FuseOptions = FuseOptions()

    def replaced_by(self, keywords: Keywords) -> Options:
        """The options, with those that a keyword gives replaced.

        Raises:
            TypeError: A keyword is not an option.
        """
        groups = {}
        left = dict(keywords)
        for group in dataclasses.fields(self):
            before = getattr(self, group.name)
            given = {f.name: left.pop(f.name) for f in dataclasses.fields(before) if f.name in left}
            groups[group.name] = dataclasses.replace(before, **given)
        if left:
            raise TypeError(f"export() got an unexpected keyword argument '{next(iter(left))}'")
        return Options(**groups)

    def for_capture(self, dynamic: bool, opset: int | None) -> dict[str, Any]:
        """The options as keywords of :func:`modelexport.capture.choice.capture`."""
        traces = self.tags.keep_torch_metadata
        return {"dynamic": dynamic, "opset": opset, "stack_traces": traces, "constants": self.capture.constants}

    def check_together(self, *, optimized: bool) -> None:
        """Refuse options that do not go together.

        Raises:
            UsageError: They do not.
        """
        if self.fusing.fuse is not None and not optimized:
            raise UsageError("an optimised graph is fused: leave out --no-optimize, or --fuse")
        if self.fusing.fuse is not None and self.tags.tags_as == "functions":
            raise UsageError("fused nodes are of several modules, and functions of one: leave out --tags-as, or --fuse")

    def settings(
        self, exported: Exported, attempts: Sequence[Attempt], *, dynamic: bool, optimized: bool
    ) -> documents.Settings:
        """The settings that the sidecar records for an export with these options."""
        return documents.Settings(
            frontend=exported.frontend,
            dynamo_failure=next((one.reason for one in attempts if one.frontend == "dynamo"), ""),
            granularity=self.tags.granularity,
            include=sorted(self.tags.include),
            exclude=sorted(self.tags.exclude),
            dynamic=dynamic,
            optimize=optimized,
            fuse=self.fusing.fuse or "",
            constants=dict(exported.constants),
        )
