"""How much worse an output is than the right one: the metrics that a search is bound by."""

from __future__ import annotations

import importlib.util
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelexport.core.text import error_line, suggest
from modelexport.errors import UsageError
from modelexport.traces.array_differences import relative_error

Measure = Callable[[Any, Any], float]
"""The right array and the one that was found, to a figure."""
_BOUND = re.compile(r"\s*(?P<metric>.+?)\s*(?P<sign>[<>]=?)\s*(?P<limit>[-+0-9.eE]+)\s*(?P<percent>%?)\s*")


@dataclass(frozen=True)
class Metric:
    """A metric by its name."""

    name: str
    measure: Measure
    ideal: float | None = 0.0
    """Its figure for equal arrays; ``None`` if that depends on the arrays."""
    power: int = 1
    """Losses to this power add up over modules whose errors are independent."""
    unit: str = ""

    def loss(self, right: np.ndarray, computed: np.ndarray) -> float:
        """How far the figure is from that of equal arrays; infinite if it is not a number."""
        ideal = self.measure(right, right) if self.ideal is None else self.ideal
        lost = abs(self.measure(right, computed) - ideal)
        return float("inf") if np.isnan(lost) else lost

    def worst(self, figures: Sequence[float], right: Sequence[np.ndarray]) -> float:
        """The figure that is the furthest from that of equal arrays; one that is not a number is the worst."""
        ideal = mean_figure(self, right, right) if self.ideal is None else self.ideal
        return max(figures, key=lambda figure: float("inf") if np.isnan(figure) else abs(figure - ideal))


@dataclass(frozen=True)
class ErrorBound:
    """A metric and its limit, as in ``cosine>=0.999``."""

    metric: Metric
    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric.name}{self.sign}{self.limit:g}"

    def holds(self, figure: float) -> bool:
        """Whether a figure is within the bound."""
        compare = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}[self.sign]
        return bool(compare(figure, self.limit))


def mean_figure(metric: Metric, right: Sequence[np.ndarray], computed: Sequence[np.ndarray]) -> float:
    """The mean of a metric over runs."""
    return float(
        np.mean([metric.measure(array, other_array) for array, other_array in zip(right, computed, strict=True)])
    )


def parse_bound(text: str) -> ErrorBound:
    """The bound that a text names: ``error<=0.05``, which ``error<=5%`` says as well."""
    parts = _BOUND.fullmatch(text)
    if parts is None:
        raise UsageError(
            f"'{text}' is not a bound: write a metric, a sign and a number, as in error<=0.05 or cosine>=0.999; "
            f"the metrics are {', '.join(METRICS)}"
        )
    metric = find_metric(parts["metric"])
    try:
        bound = ErrorBound(metric, parts["sign"], float(parts["limit"]) / (100 if parts["percent"] else 1))
    except ValueError as error:
        raise UsageError(f"'{parts['limit']}' in '{text}' is not a number") from error
    if metric.ideal is not None and not bound.holds(metric.ideal):
        raise UsageError(f"'{text}' is not even met by equal outputs, whose {metric.name} is {metric.ideal:g}")
    return bound


def find_metric(name: str) -> Metric:
    """A metric of the table, or a function of ``file.py:function`` that takes the right array and the one found."""
    if name in METRICS:
        return METRICS[name]
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        known = ", ".join(METRICS)
        raise UsageError(f"there is no metric '{name}'{suggest(name, METRICS)}; give {known} or file.py:function")
    try:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        measure = getattr(module, function)
    except Exception as error:  # whatever the file raises
        raise UsageError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error

    def figure(right: Any, computed: Any) -> float:
        try:
            return float(measure(right, computed))
        except Exception as error:  # whatever the function raises, or float of what it returns
            raise UsageError(f"{name} does not give a number: {error_line(error)}") from error

    return Metric(name, figure, ideal=None)


def _by_row(measure: Measure) -> Measure:
    """The mean of a figure of the vectors along the last axis, in float64.

    Not a number, which is within no bound, if the arrays have other shapes, or the one that was found has a NaN more.
    """

    def measured(right: np.ndarray, computed: np.ndarray) -> float:
        first, second = (np.atleast_1d(array).astype(np.float64) for array in (right, computed))
        if first.shape != second.shape or (np.isnan(second) & ~np.isnan(first)).any():
            return float("nan")
        with np.errstate(all="ignore"):
            return float(np.mean(measure(first, second)))

    return measured


def _cosine(first: Any, second: Any) -> Any:
    sizes = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    return np.where((first == second).all(-1), 1.0, (first * second).sum(-1) / sizes)


def _kl(first: Any, second: Any) -> Any:
    """The Kullback-Leibler divergence, in nats, of the distributions with these logits."""
    right, computed = (_log_softmax(logits) for logits in (first, second))
    return np.where(right > -np.inf, np.exp(right) * (right - computed), 0.0).sum(-1)


def _log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _top1(first: Any, second: Any) -> Any:
    """Whether the largest element is the same."""
    return first.argmax(axis=-1) == second.argmax(axis=-1)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("error", relative_error, power=2, unit="relative error of the output"),
        Metric("cosine", _by_row(_cosine), 1.0, unit="1 - cosine of the output"),
        Metric("kl", _by_row(_kl), unit="nats"),
        Metric("top1", _by_row(_top1), 1.0, unit="share of places with another first choice"),
    )
}
