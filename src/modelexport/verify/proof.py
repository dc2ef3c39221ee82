"""What the two runs of a file show: the values that are tensors of PyTorch, and how they compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.owners import owner_of
from modelexport.tagged.file import TaggedFile
from modelexport.verify.claimed_values import ValuesInRun
from modelexport.verify.differences import Difference
from modelexport.verify.layouts import LaidOut
from modelexport.verify.localizing import Suspects
from modelexport.verify.matching import FileRun
from modelexport.verify.placement import Misplaced
from modelexport.verify.segments import GIVEN
from modelexport.verify.ties import FileChoice


@dataclass
class Proof:
    """What the two runs of a file showed."""

    tagged: TaggedFile
    evidence: LaidOut
    run: FileRun
    feeds: Mapping[str, Any]
    provider: str
    batch_bytes: int
    hints: dict[str, str]
    """Name of a value of the main graph to the content that it is, or should be."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """Name of a value to the content in another layout that it has, a hint or not."""
    choices: Sequence[FileChoice] = ()
    """Where the file takes the largest or the smallest of some scores, as PyTorch does."""
    scores: Mapping[str, FileChoice] = field(default_factory=dict)
    """The values that the file chooses from and that are hints only for that, to their choices."""
    per_module: dict[str, Difference] = field(default_factory=dict)
    suspects: Mapping[str, Suspects] = field(default_factory=dict)
    """Values that differ to the nodes that may have made them so."""
    misplaced: list[Misplaced] = field(default_factory=list)
    wrong_weights: Mapping[ModuleCall, str] = field(default_factory=dict)
    """Calls whose nodes use initializers that are not the model's, to what is wrong."""

    wrong_decisions: Mapping[str, str] = field(default_factory=dict)
    """Nodes of branches that are taken by another condition than PyTorch's, to what is wrong."""

    @cached_property
    def nodes(self) -> Mapping[str, ir.Node]:
        """Name of a value of the main graph to the node that makes it."""
        return {value.name or "": node for node in self.tagged.model.graph for value in node.outputs}

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Name of a node of the main graph to where in it it is."""
        return {node.name or "": index for index, node in enumerate(self.tagged.model.graph)}

    @property
    def contents(self) -> dict[str, str]:
        """Values to the contents that they are, as PyTorch has them; without what is only known as scores."""
        return {n: self.evidence.base(content) for n, content in self.hints.items() if not self.is_scores(n)}

    def is_scores(self, name: str) -> bool:
        """Whether a value is only known as what the file chooses from."""
        return name in self.scores and self.hints.get(name) == self.scores[name].choice.scores

    @property
    def values(self) -> ValuesInRun:
        """What the values of the file were in the run."""
        return ValuesInRun(
            inputs=self.feeds,
            contents=self.contents,
            nearest={name: self.evidence.base(content) for name, content in self.run.contents.items()},
            shapes={**{name: tuple(array.shape) for name, array in self.feeds.items()}, **self.run.shapes},
            dtypes={**{name: str(array.dtype) for name, array in self.feeds.items()}, **self.run.dtypes},
            constants={
                name: value.const_value
                for name, value in self.tagged.model.graph.initializers.items()
                if value.const_value is not None
            },
            calls_taking=self._calls_taking,
            prints={} if self.differing else self.run.prints,
        )

    def _calls_taking(self, name: str) -> set[ModuleCall]:
        value = self.tagged.model.graph.initializers.get(name)
        owners = (owner_of(node) for node, _ in value.uses()) if value is not None else ()
        calls = self.tagged.calls
        return {one for owner in owners if owner for call in owner.calls if call in calls for one in calls.stack(call)}

    @property
    def differing(self) -> list[str]:
        """The values that are not what they should be."""
        return [name for name, one in self.per_module.items() if one.status == "differ"]

    def right(self, name: str) -> Any:
        """What a value of the file should be."""
        return self.evidence.array(self.hints[name]).reshape(self.run.shapes[name])

    def inputs_of(self, names: Iterable[str]) -> dict[str, Any]:
        """What the inputs of a cut file get."""
        return {n: self.right(n.removesuffix(GIVEN)) if n.endswith(GIVEN) else self.feeds[n] for n in names}
