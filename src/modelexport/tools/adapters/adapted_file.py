"""The initializers of a tagged file and what LoRA adapters do to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from modelexport.core.text import first_few
from modelexport.errors import WeightsError
from modelexport.files.replaceable_files import check_writable
from modelexport.format.parameter_plan import AdapterInput, ParameterPlan
from modelexport.graph.copies import value_like
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import (
    adapter_input,
    parameter_plans,
    record_adapter_input,
    record_plan,
    state_dict_of,
)
from modelexport.graph.unique_names import free_name, names_in
from modelexport.tagged.file import read_tagged
from modelexport.tools.adapters.lora_inputs import PairInputs, WeightUse, gives_last, low_rank_uses
from modelexport.tools.adapters.peft_adapters import Adapter, Changes, LowRank, changes, read_adapter
from modelexport.weights.entries_from_file import recover, transposition
from modelexport.weights.recorded_transforms import compute_planned
from modelexport.weights.weight_updates import WeightsInFile, check_placed, check_weights_fit


class AdaptedFile:
    """One tagged file, in memory, and what adapters do to its initializers."""

    def __init__(
        self,
        path: Path,
        adapters: Iterable[str | Path],
        output: Path,
        weights: str | Path | None,
        *,
        merged: bool = True,
    ) -> None:
        """Read the file and the adapters.

        Args:
            merged: The adapters change the weights; otherwise nodes add to what they compute with them.
        """
        self.path = path
        read = [read_adapter(folder) for folder in adapters]
        check_writable(output, [path, *([Path(weights)] if weights is not None else [])])
        self.tagged = read_tagged(path, checked=weights is None)
        self.model = self.tagged.model
        self.entries = state_dict_of(self.model)
        self.plans = parameter_plans(self.model)
        self.changes = changes(path, self.entries, map(self._oriented, read))
        self._before = {value: value.const_value for value in self.plans}
        self.unused = [key for key in self.changes.keys if not any(key in plan.keys for plan in self.plans.values())]
        self._weights = WeightsInFile(Path(weights)) if weights is not None else None
        if self._weights is not None:
            groups = dict.fromkeys(names for plan in self.plans.values() for names in plan.groups())
            check_placed(path, self.model, self.entries, self._weights)
            check_weights_fit(path, self.entries, groups.keys(), self._weights, strict=False)
        changed = [value for value in self.touched if not self.plans[value].recorded]
        if unknown := [value.name or "" for value in changed if merged or self._places(value) is None]:
            way = " or let the file take it as inputs (--as-inputs)," if merged and not weights else ""
            raise WeightsError(
                f"{', '.join(unknown[:5])} of {path}: quantized, or changed by another tool; apply the adapter to the "
                f"file before that,{way} and run `quantize` or the tool again",
                missing=unknown,
            )

    def _oriented(self, adapter: Adapter) -> Adapter:
        """An adapter whose pairs know from the graph which axis of a square weight is that of its results.

        PEFT's configuration has one word about that for all modules: that for the last one.
        """
        pairs = dict(adapter.pairs)
        for value, plan in self.plans.items():
            module = plan.keys[0].removesuffix(".weight")
            axes = transposition(plan.steps)
            if module in pairs and len(plan.keys) == 1 and (axes == [1, 0] or not plan.steps):
                last = gives_last(value, flipped=axes is not None)
                pairs[module] = pairs[module] if last is None else replace(pairs[module], fan_in_fan_out=last)
        return replace(adapter, pairs=pairs)

    @property
    def touched(self) -> list[ir.Value]:
        """The initializers that depend on an entry that changes."""
        changed = set(self.changes.keys)
        return [value for value, plan in self.plans.items() if changed.intersection(plan.keys)]

    def _places(self, value: ir.Value) -> list[WeightUse] | None:
        """The nodes that can add a pair to what they compute with an initializer; none if another one has them."""
        key = next(key for key in self.plans[value].keys if key in self.changes.keys)
        pairs = self.changes.pairs.get(key)
        if pairs is None or (self.plans[value].recorded and self.replaces(key, value)):
            return None
        return low_rank_uses(value, self.plans[value], pairs)

    def untie(self) -> list[str]:
        """Give modules whose name of a tied parameter changes a tensor of their own; returns these names."""
        untied = []
        for value in self.touched:
            for names in self.plans[value].groups():
                changed = [key for key in names if key in self.changes.keys and len(names) > 1]
                untied += [key for key in changed if self._split_off(value, names, key)]
        return list(dict.fromkeys(untied))

    def _split_off(self, value: ir.Value, names: tuple[str, ...], key: str) -> bool:
        """Let the module that an entry belongs to use its own initializer, if others use the same."""
        module = self.changes.module_of(key)
        users = [use for use in value.uses() if _is_in(use.node, module)]
        plan = self.plans[value]
        if not users:
            raise WeightsError(
                f"{self.path} uses {names[0]} under several names ({', '.join(names)}), and no node of '{module}' "
                "alone: merge the adapter with PEFT and export that"
            )
        rest = [other for other in plan.keys if other not in names]
        if len(users) == len(value.uses()) and not value.is_graph_output():
            self._record(value, ParameterPlan([key, *rest], plan.renamed(dict.fromkeys(names, key))))
            return False
        untied = value_like(value, free_name(key, names_in(self.model)), value.const_value)
        graph = value.graph
        assert isinstance(graph, ir.Graph)
        graph.initializers.add(untied)
        for node, index in users:
            node.replace_input_with(index, untied)
        self._before[untied] = value.const_value
        self._record(untied, ParameterPlan([key, *rest], plan.renamed(dict.fromkeys(names, key))))
        kept = [other for other in names if other != key and other in plan.keys]  # others have their own already
        self._record(value, ParameterPlan([*kept, *rest], plan.renamed(dict.fromkeys(names, kept[0]))))
        return True

    def _record(self, value: ir.Value, plan: ParameterPlan) -> None:
        self.plans[value] = plan
        record_plan(value, plan)

    def tensor(self, value: ir.Value) -> ir.LazyTensor:
        """The changed tensor of an initializer, which is computed when the file is written."""
        old = value.const_value
        assert old is not None
        dtype, shape = old.dtype, tuple(old.shape.numpy())

        def compute() -> ir.TensorProtocol:
            return ir.Tensor(np.asarray(self._computed(value, self.changes), order="C"), dtype=dtype)

        return ir.LazyTensor(compute, dtype=dtype, shape=ir.Shape(shape), name=value.name)

    def _reader(self, value: ir.Value) -> Callable[[str], np.ndarray]:
        """A function from the key of an entry that an initializer is computed from to the unchanged entry."""
        if self._weights is not None:
            weights = self._weights
            tied = {key: names for names in self.plans[value].groups() for key in names}
            return lambda key: weights.read(next(name for name in tied[key] if name in weights.types))
        needed = self.plans[value].inputs()  # initializers computed from the same entries, as they were
        shared = [(plan, self._before[each]) for each, plan in self.plans.items() if {*needed} & {*plan.inputs()}]
        before = [(plan, tensor.numpy()) for plan, tensor in shared if tensor is not None]
        return lambda key: recover([key], self.entries, before)[key]

    def make_inputs(self) -> tuple[PairInputs, list[str], int]:
        """Let each initializer that changes take a pair, or be an input itself.

        Returns:
            What was added, the names of the initializers that are inputs themselves, and how many got a pair.
        """
        added = PairInputs(self.model, partial(free_name, taken=names_in(self.model)))
        pairs, whole = 0, []
        for value in self.touched:
            key = next(key for key in self.plans[value].keys if key in self.changes.keys)
            changed, places = self.changes.pairs.get(key, ()), self._places(value)
            if places is None:
                record_adapter_input(value, AdapterInput(key, "whole"))
                self.model.graph.inputs.append(value)
                whole.append(value.name or "")
            elif places:
                added.add(key, value, changed[0], places)
                pairs += 1
        return added, whole, pairs

    def replaces(self, key: str, value: ir.Value) -> bool:
        """Whether an adapter puts another tensor in the place of an entry: PEFT also saves embeddings as they were."""
        adapter = self.changes.whole.get(key)
        return adapter is not None and not np.array_equal(adapter.read(key), self._reader(value)(key))

    def values(self, only: Changes) -> dict[str, np.ndarray]:
        """What an adapter gives to the inputs that the file has for adapters."""
        values: dict[str, np.ndarray] = {}
        taken: set[tuple[str, str]] = set()
        """The entries, and what of each, that inputs take."""
        for value, what in self.inputs.items():
            assert value.dtype is not None
            if what.part == "whole" and not set(only.keys).isdisjoint(self.plans[value].keys):
                values[value.name or ""] = self._computed(value, only)
                taken.update((key, part) for key in self.plans[value].keys for part in ("whole", "magnitude", "pair"))
            for pair in only.pairs.get(what.entry, ()) if what.part != "whole" else ():
                values[value.name or ""] = self._part(pair, what).astype(value.dtype.numpy())
                taken.add((what.entry, "pair"))
        by_key = {key: value for value, plan in self.plans.items() for key in plan.keys}
        asked: list[tuple[str, str]] = []
        for key in (key for key in only.keys if key in by_key):
            pairs = only.pairs.get(key, ())
            asked += [(key, "whole")] if not pairs or self.replaces(key, by_key[key]) else []
            asked += [(key, "pair")] if pairs else []
            asked += [(key, "magnitude")] if any("magnitude" in pair.shapes for pair in pairs) else []
        if modules := list(dict.fromkeys(key for key, part in asked if (key, part) not in taken)):
            raise WeightsError(
                f"{self.path} has no inputs for what {only.adapters[0].path} does to {first_few(modules, 3)}: "
                "make its inputs with this adapter too (--as-inputs, and --adapter for each)",
                missing=modules,
            )
        return values

    @property
    def inputs(self) -> dict[ir.Value, AdapterInput]:
        """The optional inputs of the file that are for adapters, to what each is a part of."""
        return {value: what for value in initializers(self.model) if (what := adapter_input(value)) is not None}

    def _computed(self, value: ir.Value, only: Changes) -> np.ndarray:
        """An initializer as it is computed from entries that adapters change."""
        plan, read = self.plans[value], self._reader(value)
        bases = {key: read(key) for key in plan.inputs()}
        return compute_planned(plan, {k: only.apply(k, base) if k in only.keys else base for k, base in bases.items()})

    def _part(self, pair: LowRank, what: AdapterInput) -> np.ndarray:
        """A matrix in the form of the input."""
        matrix = pair.part(what.part)
        if what.part == "b":
            matrix = matrix * np.float32(pair.scaling)
        return matrix if what.kind == "convolution" else matrix.T


def _is_in(node: ir.Node, module: str) -> bool:
    """Whether all calls that own a node are calls of a module or ran in one."""
    owner = owner_of(node)
    return owner is not None and all(
        not module or call.path == module or call.path.startswith(f"{module}.") for call in owner.calls
    )
