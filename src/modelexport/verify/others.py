"""Comparing outputs on inputs that find more errors than the given ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from modelexport.errors import UsageError
from modelexport.graph.requested import requested_outputs
from modelexport.pytorch.integers import integers_above, negative_integers
from modelexport.pytorch.long_rows import beyond_bounds
from modelexport.pytorch.other_sizes import ONE_SMALL_ROW, WAYS, one_row, other_sizes
from modelexport.pytorch.variations import (
    PADDED,
    PADDED_AT_THE_END,
    all_at_once,
    beyond_example,
    padded_at_the_end,
    telling_inputs,
)
from modelexport.runtime.evidence import Evidence
from modelexport.runtime.fingerprints import is_floating
from modelexport.runtime.sessions import RunningSession
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import Difference, compare_outputs, worst
from modelexport.verify.feeding import feeds
from modelexport.verify.matching import WHOLE_UNITS
from modelexport.verify.telling_sizes import false_output_sizes, run_with_telling_sizes
from modelexport.verify.verdicts import FalseClaim, OtherInputs
from modelexport.verify.whole import WholeOutputs

Inputs = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Others:
    """The comparisons of outputs on variations of the inputs."""

    compared: list[OtherInputs]
    inputs: Mapping[str, Inputs]
    """The inputs of each, by what was changed."""
    claims: list[FalseClaim]
    """Outputs that have other sizes than they declare there, or with sizes made for that."""


def run_others(
    inputs: Inputs,
    tagged: TaggedFile,
    session: onnxruntime.InferenceSession,
    run_module: Callable[[Inputs], list[Any]],
    run_plain: Callable[[Inputs], list[Any]],
    run: Callable[[Inputs], Evidence],
    provider: str,
    kept: Collection[str] = (),
) -> Others:
    """Compare the outputs on all variations of the inputs at once, or one by one if they do not agree so.

    Args:
        run_module: Called with inputs: gives what the model returns, computed as it is exported.
        run_plain: The same, computed as people run it.
        run: The same with all that it shows; where outputs differ, choices among equal scores are looked for.
        kept: The names of tensors that do not change: the file has their values.
    """
    agreeing: list[tuple[Inputs, OtherInputs]] = []
    tried: dict[str, Inputs] = {}

    def compared(what: str, other: Inputs, returned: Callable[[Inputs], list[Any]] = run_module) -> OtherInputs:
        tried[what] = other
        compare = _Compare(partial(run, other), partial(run_plain, other), tagged, provider)
        one = run_one(what, other, session, returned, compare)
        if one.status in ("agree", "tie"):
            agreeing.append((other, one))
        return one

    def finite(other: Inputs) -> list[Any]:
        returned = run_module(other)
        if not all(np.isfinite(one).all() for one in returned if is_floating(one)):
            raise ArithmeticError("the outputs are not finite")
        return returned

    together = all_at_once(inputs, tagged.model, kept)
    found = [compared(*together)] if together is not None else []
    if not found or found[0].status not in ("agree", "tie"):
        one_by_one = [
            _without_empty_rows(
                compared(what, other), lambda: compared(PADDED_AT_THE_END, padded_at_the_end(inputs, kept))
            )
            for what, other in telling_inputs(inputs, tagged.model, kept)
        ]
        one_by_one += with_other_sizes(inputs, tagged.model, compared)
        # What differs only together is a difference, too; what the model refuses together it may take one by one.
        tells = any(one.status == "differ" for one in one_by_one)
        tells = tells or any(one.status == "not compared" or _shows_empty_rows(one) for one in found)
        found = one_by_one if tells else [*found, *one_by_one]
    single: list[OtherInputs] = []
    for what, other in one_row(inputs, tagged.model):
        single = [compared(what, other)]
        # An output without elements, as of a convolution larger than its image, shows nothing.
        if single[0].status in ("agree", "tie") and all(0 not in one.shape for one in single[0].outputs):
            break
    beyond = [compared(what, other, finite) for what, other in beyond_example(inputs, tagged.model, kept)]
    for what, other in beyond_bounds(inputs, tagged.model, list(tried.values())):
        beyond.append(compared(what, other, finite))
        if beyond[-1].status != "not compared":
            break
    for ways in (*integers_above(inputs, tagged.model, kept), *negative_integers(inputs, tagged.model, kept)):
        for what, other, returned in _accepted(ways, finite):
            beyond.append(compared(what, other, returned))
    single += [one for one in beyond if one.status != "not compared"]
    small = next((other for other, one in agreeing if one.what == ONE_SMALL_ROW), None)
    ran = [inputs, *(other for other, _ in agreeing)]
    sizes = run_with_telling_sizes(
        inputs,
        tagged.model,
        ran,
        lambda what, other: run_one(what, other, session, run_module, partial(_compare_shapes, tagged.model)),
        small=small,
    )
    compared_with = {one.what: tried[one.what] for one in (*found, *single)}
    return Others([*found, *single], compared_with, list(false_output_sizes(tagged.model, [*agreeing, *sizes])))


def _without_empty_rows(one: OtherInputs, again: Callable[[], OtherInputs]) -> OtherInputs:
    """The comparison on a variation of the inputs; with other masks, if empty rows are all that differs.

    Args:
        again: Compares with masks that leave something to every row.
    """
    return again() if _shows_empty_rows(one) else one


def _shows_empty_rows(one: OtherInputs) -> bool:
    """Whether masks are padded, the model gives NaN where the file gives numbers, and all others agree.

    A causal row that begins with padding has nothing to look at: what a model makes of that means nothing.
    """
    differing = [output for output in one.outputs if output.status == "differ"]
    only_nans = all(output.nans and (output.multiple or 0.0) <= WHOLE_UNITS for output in differing)
    only_nans = only_nans and not any(output.nans_in_file for output in differing)
    return PADDED in one.what and bool(differing) and only_nans


def with_other_sizes(
    inputs: Inputs, model: ir.Model, compared: Callable[[str, Inputs], OtherInputs]
) -> list[OtherInputs]:
    """Compare the outputs with other sizes of all dynamic axes, in the first way that the model accepts.

    If it accepts none, the sizes are changed one by one: some of them may be fixed by the model itself.
    """
    found: list[OtherInputs] = []
    for what, other in other_sizes(inputs, model):
        if what not in WAYS and found and found[-1].what in WAYS:
            found = found[:1]
        one = compared(what, other)
        if one.status != "not compared" and what in WAYS:
            return [one]
        found.append(one)
    return [one for one in found if one.status != "not compared"] or found[:1]


@dataclass(frozen=True)
class _Compare:
    """Compares what a file computes with what the model returns, choices among equal scores apart."""

    run: Callable[[], Evidence]
    run_plain: Callable[[], list[Any]]
    tagged: TaggedFile
    provider: str

    def __call__(self, right: list[Any], given: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[Difference]:
        compared = self._compare(right, given, outputs)
        if not any(one.nans for one in compared):
            return compared
        # Of a row that looks at nothing, PyTorch's fused attention may give NaN, as the file does, and its steps zeros.
        try:
            plain, right = self.run_plain(), list(right)
        except Exception:  # a fused operator may refuse what its steps accept
            return compared
        asked = requested_outputs(self.tagged.model.metadata_props, range(len(right)))
        for at, found in zip(asked, outputs.values(), strict=True):
            if is_floating(found) and found.shape == right[at].shape == plain[at].shape:
                right[at] = np.where(np.isnan(found) & np.isnan(plain[at]), plain[at], right[at])
        return self._compare(right, given, outputs)

    def _compare(self, right: list[Any], given: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[Difference]:
        whole = WholeOutputs(right, self.tagged.model, self.run, measured=False)
        compared = whole.compare_with_ties(outputs, self.tagged, given, self.provider)
        if all(one.status != "differ" for one in compared):
            return compared
        # A deep model may add up more rounding than is allowed without a measurement, which takes one more run.
        measured = WholeOutputs(right, self.tagged.model, lambda: whole.run).compare(outputs)
        if all(one.status != "differ" for one in measured):
            return measured
        return whole.compare_with_kernels(self.tagged, given, self.provider) or compared


def _accepted(
    ways: Iterable[tuple[str, Inputs]], run: Callable[[Inputs], list[Any]]
) -> Iterator[tuple[str, Inputs, Callable[[Inputs], list[Any]]]]:
    """The first variation that a model accepts, if any, and what gives what it returned.

    A model often refuses them at its first operation: the file would run for nothing.
    """
    for what, other in ways:
        try:
            right = run(other)
        except Exception:  # a model may raise anything for inputs that it does not accept
            continue
        yield what, other, partial(_returned, right)
        return


def _returned(right: list[Any], _: Inputs) -> list[Any]:
    return right


def _compare_shapes(
    model: ir.Model, right: list[Any], given: Mapping[str, Any], outputs: Mapping[str, Any]
) -> list[Difference]:
    """Compare what depends on sizes alone: numbers may be random, or mean nothing."""
    expected = requested_outputs(model.metadata_props, right)
    if len(expected) != len(outputs):
        return []
    return [
        Difference(name=name, status="agree" if found.shape == one.shape else "differ", shape=list(found.shape))
        for (name, found), one in zip(outputs.items(), expected, strict=True)
    ]


def compare_numbers(right: list[Any], given: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[Difference]:
    """Compare outputs, in order, with the rounding that adds up over a deep model."""
    return compare_outputs(list(outputs), right, list(outputs.values()), units=WHOLE_UNITS)


def run_one(
    what: str,
    other: Inputs,
    session: onnxruntime.InferenceSession,
    run_module: Callable[[Inputs], list[Any]],
    compare: Callable[[list[Any], Mapping[str, Any], Mapping[str, Any]], list[Difference]] = compare_numbers,
) -> OtherInputs:
    """Compare the outputs on one variation of the inputs; not if the model does not accept it.

    Args:
        compare: Called with what the model returns, the inputs and the outputs of the file.
    """
    given = feeds(other, session)
    with RunningSession(session, given) as running:
        try:
            right = run_module(other)
        except Exception as error:  # a model may raise anything for inputs that it does not accept
            reason = f"the model does not accept them ({type(error).__name__})"
            return OtherInputs(what=what, status="not compared", reason=reason)
        try:
            outputs = running.result()
        except UsageError as error:
            return OtherInputs(what=what, status="differ", reason=str(error))
    compared = compare(right, given, outputs)
    own = worst(compared)
    status, reason = (own.status, f"{own.name}: {own.reason}") if own else ("not compared", "there are no outputs")
    return OtherInputs(what=what, status=status, reason=reason if status != "agree" else "", outputs=compared)
