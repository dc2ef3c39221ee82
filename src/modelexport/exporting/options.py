"""The options of an export, in groups, declared once: keywords in Python, options on the command line."""

# Annotations are evaluated: the command line reads types from them, and must not import what only Python's need.
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modelexport.capture import FrontEnd
from modelexport.capture.front_end_options import OPSETS, FrontEndOptions, QuantizedAs, QuantizedForm
from modelexport.core.declared_options import option
from modelexport.core.limits import LARGE_WEIGHTS
from modelexport.core.tags import Granularity
from modelexport.core.text import suggest
from modelexport.errors import UsageError
from modelexport.tagged.encodings import Encoding
from modelexport.weights import WeightsMode

if TYPE_CHECKING:
    from modelexport.capture.exported_graph import Exported
    from modelexport.exporting.front_end_choice import Attempt
    from modelexport.exporting.requested_names import RequestedNames
    from modelexport.format import documents
    from modelexport.graph.size_conditions import SizeCondition
    from modelexport.weights.bytes_of_entries import Weights

FuseFor = Literal["ort-cpu", "ort-cuda"]
"""The runtime that nodes are fused for."""
NodeNames = Literal["exporter", "path"]


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How the model is captured."""

    frontend: FrontEnd = option(
        "auto",
        "The front end that captures MODEL; auto: dynamo, or torchscript if that fails or its file fails the check.",
    )
    dynamic: bool | None = option(
        None,
        "Make every axis dynamic that the model does not fix; by default none of a file, and all of a package.",
        type=bool,
    )
    opset: int | None = option(None, "The opset of the file; by default the exporter's.", metavar="N")
    constants: Collection[str] = option(
        (),
        "Keep the value of this argument in the file; auto: of the arguments without which the export fails.",
        flag="--constant",
        metavar="NAME",
    )
    reuse: bool = option(True, "Process equal layers separately: the same file, but slower.")
    interface: "RequestedNames | None" = option(
        None,
        "Names of inputs, outputs and, with ``dynamic=True``, of axes: a ``RequestedNames`` of "
        "``modelexport.exporting.requested_names``; by default those of the front end.",
        only_python=True,
    )


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """How the graph is optimized."""

    optimized: bool = option(True, "Do not fold constants, rewrite and merge equal nodes.", flag="--no-optimize")
    fuse: FuseFor | None = option(
        None, "Fuse nodes into operators that only ONNX Runtime has, for its CPU or CUDA provider."
    )


AccuracyLevel = Literal["exact", "fast"]
_EIGHT_BITS = 4
"""The ``accuracy_level`` with which ONNX Runtime's CPU computes with activations in 8 bits; CUDA ignores it."""


@dataclass(frozen=True, kw_only=True)
class QuantizedOptions:
    """How the layers of a quantized checkpoint are written."""

    quantized_as: QuantizedAs = option(
        "nbits", "nbits: MatMulNBits, or MatMulBnb4, of ONNX Runtime; qdq: DequantizeLinear and MatMul of opset 21."
    )
    accuracy_level: AccuracyLevel = option(
        "exact", "fast: MatMulNBits uses 8-bit activations on a CPU (accuracy_level 4); the error is about 1 %."
    )

    def check_model(self, model: Any) -> None:
        """Refuse these options for a model that has no such layers."""
        if self == QuantizedOptions():
            return
        from modelexport.pytorch.checkpoints.quantized_linear import packed_schemes

        if not hasattr(model, "modules") or not packed_schemes(model):
            raise UsageError(
                "--quantized-as and --accuracy-level are for a checkpoint whose config.json has a quantization_config "
                "of a format that modelexport reads: leave them out"
            )

    def form(self, fuse: FuseFor | None) -> QuantizedForm:
        """The form for a provider: the one that nodes are fused for, or the CPU."""
        fast = self.accuracy_level == "fast" and fuse != "ort-cuda"
        return QuantizedForm(self.quantized_as, _EIGHT_BITS if fast else 0)


@dataclass(frozen=True, kw_only=True)
class LevelOptions:
    """Which modules get a segment in tags."""

    granularity: Granularity = option(
        "auto", "Modules with a segment in tags: all; model: of classes outside torch.nn; auto: model, or else all."
    )
    include: Collection[str] = option((), "A class that also gets a segment in tags.", metavar="CLASS")
    exclude: Collection[str] = option((), "A class that does not get a segment in tags.", metavar="CLASS")


@dataclass(frozen=True, kw_only=True)
class TagOptions(LevelOptions):
    """How the file is tagged and described."""

    tags_as: Encoding = option(
        "metadata",
        "Metadata of nodes, attributes (which ONNX Runtime refuses until `strip`), or a function for each module.",
    )
    keep_torch_metadata: bool = option(False, "Keep pkg.torch.* keys, which contain paths of this machine.")
    lines: bool = option(True, "Do not record the line of code that made each node.", flag="--no-lines")
    node_names: NodeNames = option(
        "exporter", "path: name nodes after their modules: /encoder/layer.0/attention/self/MatMul_1."
    )
    expose: Collection[str] = option(
        (), "Modules whose results become outputs of the file, named by address.", metavar="SELECTOR"
    )
    documents: bool = option(True, "Write only FILE; `modelexport documents FILE` writes its tables later.")
    dag_dir: str | Path | None = option(
        None,
        "Also write each module call's DAG to a file in DIR.",
        metavar="DIR",
        type=Path | None,
        file="written folder",
    )


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """Where the weights go."""

    weights: WeightsMode = option(
        "auto",
        "link: leave them in MODEL's safetensors files; copy: write FILE.onnx.data; none: leave them out; "
        f"auto: embed up to {LARGE_WEIGHTS // 10**9} GB, above link if MODEL has safetensors files, otherwise copy.",
    )
    source: "Weights | None" = option(
        None,
        "The weights of a model that ``modelexport.pytorch.loading.load_model(..., weights='files')`` made.",
        only_python=True,
    )

    @property
    def lent(self) -> "Weights | None":
        """The weights that the model's modules have to be given while they run; ``None`` if it has its own."""
        return None if self.source is None or self.source.in_memory else self.source

    @property
    def to_check(self) -> "Weights | None":
        """The weights for the check of an export: ``None`` for very large ones, which it does not read."""
        return self.lent if self.lent is not None and self.lent.nbytes <= LARGE_WEIGHTS else None


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How the file is checked."""

    check: bool = option(True, "Do not run the file to check its outputs against MODEL's.")
    keep_anyway: bool = option(False, "Write the file even if that check fails; the exit status is 1.")
    verify: bool = option(False, "Compare every module call with PyTorch as well.")
    reference: bool | Sequence[str] = option(
        False, "Store the inputs and the values of every call in the PyTorch run next to FILE.", type=bool
    )
    """In Python also the addresses or tags of calls: only the values of these and of the calls inside them."""
    sizes: bool = option(
        False,
        "Fail if the file fixes the size of any dynamic axis; otherwise only a named axis has to be dynamic, and "
        "others become fixed.",
        only_python=True,
    )

    @property
    def any(self) -> bool:
        """Whether the file has to run before it is moved into place."""
        return self.check or self.verify or bool(self.reference)


@dataclass(frozen=True, kw_only=True)
class PackageOptions:
    """The parts of a FOLDER/."""

    parts: "str | Mapping[str, Any] | None" = option(
        None,
        "One graph (whole), those that generate runs, or those of a pipeline; auto (default): by MODEL.",
        metavar="auto|whole|generate|pipeline",
        type=str | None,
    )
    static_cache: int | None = option(
        None,
        "Export a decoder with a cache of N positions; the input cache_position says where to write.",
        metavar="N",
        least=1,
    )
    separate_prefill: bool = option(False, "Add a graph for prompts, without a cache as input.")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The groups together."""

    capture: CaptureOptions = CaptureOptions()
    graph: GraphOptions = GraphOptions()
    quantized: QuantizedOptions = QuantizedOptions()
    tags: TagOptions = TagOptions()
    weights: WeightOptions = WeightOptions()
    checks: CheckOptions = CheckOptions()
    package: PackageOptions = PackageOptions()

    @property
    def of_a_file(self) -> Sequence[Any]:
        """The groups that go with a file; the others go with a package only."""
        return self.capture, self.graph, self.quantized, self.tags, self.weights, self.checks

    def replaced_by(self, keywords: Mapping[str, Any]) -> "Options":
        """The options, with those that a keyword gives replaced.

        Raises:
            TypeError: A keyword is not an option.
        """
        groups, known = {}, set[str]()
        left = dict(keywords)
        for group in dataclasses.fields(self):
            before = getattr(self, group.name)
            known.update(field.name for field in dataclasses.fields(before))
            replacements = {f.name: left.pop(f.name) for f in dataclasses.fields(before) if f.name in left}
            groups[group.name] = dataclasses.replace(before, **replacements)
        if left:
            name = next(iter(left))
            raise TypeError(f"export() got an unexpected keyword argument '{name}'{suggest(name, known)}")
        return Options(**groups)

    def for_front_end(self, *, ones: bool) -> FrontEndOptions:
        """Those of the options that a front end takes; ``ones``: axes of size one are dynamic, too."""
        return FrontEndOptions(
            dynamic=bool(self.capture.dynamic),
            ones=ones,
            opset=self.capture.opset,
            constants=self.capture.constants,
            stack_traces=self.tags.keep_torch_metadata,
            lines=self.tags.lines,
            form=self.quantized.form(self.graph.fuse),
        )

    def check_together(self, *, package: bool = False) -> None:
        """Refuse options that do not go together.

        Args:
            package: They are for a package, not for one file.
        """
        if self.capture.opset is not None and self.capture.opset not in OPSETS:
            choice = f"choose one from {OPSETS[0]} to {OPSETS[-1]}"
            raise UsageError(f"no front end writes opset {self.capture.opset}: {choice}")
        fused = self.graph.fuse is not None
        if fused and not self.graph.optimized:
            raise UsageError("an optimised graph is fused: leave out --no-optimize, or --fuse")
        if fused and self.tags.tags_as == "functions":
            raise UsageError("fused nodes are of several modules, and functions of one: leave out --tags-as, or --fuse")
        if self.quantized == QuantizedOptions(quantized_as="qdq", accuracy_level="fast"):
            raise UsageError(
                "accuracy_level is an attribute of MatMulNBits: leave out --accuracy-level, or --quantized-as qdq"
            )
        if not package and self.package != PackageOptions():
            raise UsageError("--parts, --static-cache and --separate-prefill go with a FOLDER/, not with a FILE.onnx")
        if self.package.static_cache is not None and self.package.static_cache < 1:
            raise UsageError(f"a static cache has at least one position, not {self.package.static_cache}")
        if self.package.static_cache is not None and self.package.separate_prefill:
            raise UsageError("one graph fills a static cache from prompts and tokens: leave out --separate-prefill")
        if package and self.tags.dag_dir is not None:
            raise UsageError("--dag-dir goes with a FILE.onnx: each part of a package has a document of its own")
        if package and not self.tags.documents:
            raise UsageError("--no-documents goes with a FILE.onnx: a package is verified by its documents")
        if package and self.tags.expose:
            raise UsageError("--expose goes with a FILE.onnx: the outputs in a package are fixed by its runtimes")
        if package and self.tags.tags_as != "metadata":
            raise UsageError("the parts of a package carry their tags as metadata: leave out --tags-as")
        if package and self.weights.weights == "none":
            raise UsageError("a package always has its weights: give --weights link or copy")

    def settings(
        self, exported: "Exported", attempts: "Sequence[Attempt]", conditions: "Sequence[SizeCondition]"
    ) -> "documents.Settings":
        """The settings that the sidecar records for an export with these options, and the conditions of sizes."""
        from modelexport.format import documents

        return documents.Settings(
            frontend=exported.frontend,
            dynamo_failure=next((item.reason for item in attempts if item.frontend == "dynamo"), ""),
            granularity=self.tags.granularity,
            include=sorted(self.tags.include),
            exclude=sorted(self.tags.exclude),
            dynamic=bool(self.capture.dynamic),
            optimize=self.graph.optimized,
            fuse=self.graph.fuse or "",
            constants=dict(exported.constants),
            presumed=list(exported.presumed),
            quantized_as=self.quantized.quantized_as if self.quantized.quantized_as != "nbits" else "",
            accuracy_level=self.quantized.form(self.graph.fuse).accuracy_level,
            valid_if=[documents.ValidIf(item.formula, item.where, item.source) for item in conditions],
        )
