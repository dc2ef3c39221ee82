"""The outputs of a whole file, as people run it, against those of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir
import onnxruntime

from modelexport.errors import UsageError
from modelexport.files.onnx_models import load_onnx
from modelexport.format.dtypes import dtype_name
from modelexport.graph.nodes import initializers
from modelexport.graph.requested import requested_outputs
from modelexport.graph.widening import narrow_values
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.sessions import open_session
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import UNITS, Difference, compare_outputs, known_beside_noise
from modelexport.verify.kernels import outputs_in_double
from modelexport.verify.matching import WHOLE_UNITS
from modelexport.verify.ties import outputs_with_choices


def open_as_run(file: Path, provider: str) -> tuple[onnxruntime.InferenceSession, str]:
    """A session with the runtime's optimiser, or without where that fails on the file itself, and what to say of it.

    Raises:
        UsageError: ONNX Runtime does not load the file.
    """
    try:
        return open_session(file, provider=provider, optimized=True), ""
    except UsageError as error:
        told = str(error)
    try:
        session = open_session(file, provider=provider)
        return session, f"ONNX Runtime loads the file only with its optimiser off, and runs it so here: {told}"
    except UsageError:
        model = load_onnx(file)
        if not narrow_values(model):
            raise
    session = open_session(model, folder=file.parent, provider=provider)
    types = ", ".join(sorted({dtype.name.lower() for dtype in narrow_values(model).values()}))
    return (
        session,
        f"this ONNX Runtime does not run the file; computed in float32, each value rounded to {types}: {told}",
    )


@dataclass(frozen=True)
class WholeOutputs:
    """What a model returns. Rounding adds up on the way: its size is measured if a few units are not enough."""

    returned: Sequence[Any]
    file: ir.Model
    """Its types say how coarsely the outputs may be rounded on the way."""
    make_run: Callable[[], Evidence]
    """Gives the run of the model, with the weights that the file has."""
    measured: bool = True
    """Whether the noise is measured in any case; or else as much is allowed as adds up over a deep model."""

    @cached_property
    def unmeasured(self) -> Mapping[str, float]:
        """Type of an output to the units that are allowed without a measurement."""
        coarsest = max(_units(self.file), default=0.0)
        return {name: WHOLE_UNITS * max(coarsest / unit, 1.0) for name, unit in UNITS.items()}

    @cached_property
    def _is_measured(self) -> bool:
        """Narrow types leave too much that is allowed without."""
        return self.measured or any(unit > UNITS["float32"] for unit in _units(self.file))

    @cached_property
    def right(self) -> Sequence[Any]:
        """The outputs that the file is to have."""
        return requested_outputs(self.file.metadata_props, self.returned)

    @cached_property
    def run(self) -> Evidence:
        return self.make_run()

    @cached_property
    def exact(self) -> Sequence[Any] | None:
        precise = self.run.in_float64() if self._is_measured else None
        return None if precise is None else requested_outputs(self.file.metadata_props, precise.outputs)

    @cached_property
    def rounded(self) -> Sequence[Any] | None:
        """The outputs of the model with other roundings."""
        again = self.run.rounded_otherwise()
        return None if again is None else requested_outputs(self.file.metadata_props, again.outputs)

    def compare(self, found: Mapping[str, Any]) -> list[Difference]:
        """Compare outputs, in order; those that rounding alone decides are not compared."""
        return [known_beside_noise(one) for one in self._compare(found)]

    def _compare(self, found: Mapping[str, Any]) -> list[Difference]:
        names, arrays = list(found), list(found.values())
        compared = compare_outputs(names, self.right, arrays, units=None if self._is_measured else self.unmeasured)
        if not self._is_measured or all(one.status == "agree" for one in compared):
            return compared
        if self.exact is None:
            if self.rounded is None:
                return compare_outputs(names, self.right, arrays, units=self.unmeasured)
            return compare_outputs(names, self.right, arrays, self.rounded)
        measured = compare_outputs(names, self.right, arrays, self.exact)
        if not any(one.is_doubtful for one in measured) or self.rounded is None:
            return measured
        again = compare_outputs(names, self.right, arrays, self.rounded)
        return [two if one.is_doubtful else one for one, two in zip(measured, again, strict=True)]

    def agrees(self, found: Mapping[str, Any]) -> bool:
        """Whether outputs may be the model's."""
        return all(one.status != "differ" for one in self.compare(found))

    def compare_with_ties(
        self, found: Mapping[str, Any], tagged: TaggedFile, feeds: Mapping[str, Any], provider: str
    ) -> list[Difference]:
        """Compare outputs. Where the file took others of equal scores than PyTorch, what follows from that is a tie.

        Args:
            feeds: The inputs of the file.

        Raises:
            UsageError: ONNX Runtime does not run the file.
        """
        compared = self.compare(found)
        if all(one.status == "agree" for one in compared) or not self.run.choices:
            return compared
        fed, told = outputs_with_choices(tagged.model, tagged.path.parent, feeds, self.run, provider=provider)
        again = self.compare(fed) if fed else []
        if not again or any(one.status == "differ" for one in again):
            return compared
        return [_or_tie(one, two, told) for one, two in zip(compared, again, strict=True)]

    def compare_with_kernels(self, tagged: TaggedFile, feeds: Mapping[str, Any], provider: str) -> list[Difference]:
        """Compare outputs computed with the runtime's float64 kernels; nothing if they differ as well.

        Where they agree, and the file's do not without the runtime's optimiser either, its float32 kernels are less
        exact than their type.
        """
        found, told = outputs_in_double(tagged.model, tagged.path.parent, feeds, self.agrees, provider=provider)
        return [msgspec.structs.replace(one, reason=told) for one in self.compare(found)] if found else []


def _or_tie(one: Difference, with_choices: Difference, told: str) -> Difference:
    """The verdict on an output, from its comparison as it is and with PyTorch's choices."""
    if one.status == "agree":
        return one
    if with_choices.status == "agree":
        return msgspec.structs.replace(one, status="tie", reason=f"the file {told}")
    return with_choices


def _units(model: ir.Model) -> list[float]:
    """The unit roundoff of each floating-point type in which a file computes."""
    types = {value.dtype for value in initializers(model)}
    types.update(value.dtype for node in model.graph for value in node.outputs)
    return [UNITS[name] for name in (dtype_name(one) for one in types if one is not None) if name in UNITS]
