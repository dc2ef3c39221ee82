"""The inputs of a capture, and the example that a person gave: axes that are one in this are larger in those."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from modelexport.capture.exported_graph import Exported
from modelexport.exporting.fixed_axes import FixedAxis
from modelexport.graph.size_conditions import broken, stated_with_line
from modelexport.pytorch.inputs.axes_of_one import Axis, axes_that_exclude
from modelexport.pytorch.inputs.other_sizes import inputs_of_file, symbol_sizes, symbols_by_input
from modelexport.pytorch.nested_tensors import Inputs


@dataclass
class CaptureInputs:
    """The inputs that a model is captured with."""

    example: Inputs
    """What a person gave, with which the file has to be right."""
    inputs: Inputs
    wide: Mapping[Axis, int] = field(default_factory=dict)
    """The axes that are one in the example, to their sizes in the capture."""
    fixes_ones: bool = False
    """Axes that are one in the capture, too, are fixed: the model accepts no other size, or the file is wrong then."""
    _names: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors to those of the inputs of the captured graph."""

    def axes_of_other_sizes(self, exported: Exported, *, unchecked: bool) -> list[FixedAxis]:
        """The axes of which a captured graph does not take the size of the example.

        Args:
            unchecked: The file is not run, so that its recorded conditions count.
        """
        if not self.wide:
            return []
        model = exported.model
        self._names = inputs_of_file(self.example, model)
        lines = {item.formula: item for item in exported.conditions if item.where}
        axes = dict[Axis, str]()
        for axis in axes_that_exclude(self.example, model, self.wide):
            line = lines.get(f"{self._symbol(exported, axis)} == {self.wide[axis]}")  # a size that nobody gave
            axes[axis] = f"{line.where} decides by it: `{line.source}`" if line else "the capture makes it a constant"
        if unchecked:
            sizes, symbols = symbol_sizes(self.example, model), symbols_by_input(model)
            for condition in broken(exported.unchecked_conditions, sizes):
                for name, number in self.wide:
                    known = symbols.get(self._names.get(name, ""), [])
                    if number < len(known) and known[number] in condition.symbols:
                        axes[name, number] = stated_with_line(condition)
        return [self._fixed(axis, reason) for axis, reason in axes.items()]

    @property
    def axes_of_file(self) -> frozenset[Axis]:
        """The axes that are larger in the capture, by the names of the file's inputs."""
        return frozenset((self._names.get(name, name), number) for name, number in self.wide)

    def _symbol(self, exported: Exported, axis: Axis) -> str:
        name = self._names.get(axis[0], axis[0])
        spec = next((one for one in exported.calls.calls[0].inputs if one.name == name), None)
        return str(spec.shape[axis[1]]) if spec is not None and axis[1] < len(spec.shape) else ""

    def _fixed(self, axis: Axis, reason: str) -> FixedAxis:
        name, number = axis
        return FixedAxis(input=self._names.get(name, name), axis=number, symbol="", size=1, call="", reason=reason)

    def all_as_in_example(self, reason: str) -> list[FixedAxis]:
        """All axes that are larger in the capture, as fixed ones."""
        return [self._fixed(axis, reason) for axis in self.wide]

    def as_in_example(self, axes: Sequence[FixedAxis]) -> list[FixedAxis]:
        """Axes that a file fixes, with the sizes of the example."""
        wide = self.axes_of_file
        return [msgspec.structs.replace(axis, size=1) if (axis.input, axis.axis) in wide else axis for axis in axes]

    def wide_axes(self, axes: Collection[FixedAxis]) -> list[Axis]:
        """Which of the axes that a file fixes are larger in the capture."""
        fixed = {(axis.input, axis.axis) for axis in axes}
        return [axis for axis in self.wide if (self._names.get(axis[0], axis[0]), axis[1]) in fixed]
