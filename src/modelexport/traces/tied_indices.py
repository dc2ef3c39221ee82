"""Finds integers that are indices of the largest or smallest scores, and accepts others with equal scores.

Equal scores can be chosen in any order: PyTorch's ``topk`` and ONNX's ``TopK`` do it differently, and neither is wrong.
"""

from __future__ import annotations

import numpy as np

from modelexport.traces.tolerances import TIED_SCORES


def chosen_axis(scores: np.ndarray, indices: np.ndarray) -> int | None:
    """The axis of the scores along which the indices pick the largest or the smallest, or sort them; ``None`` if they
    do not. The axis of scores that were flattened first is that of one row of them.
    """
    if not scores.size or not indices.size or indices.dtype.kind not in "iu" or scores.dtype.kind in "iub":
        return None
    for axis in range(max(scores.ndim, 1)):
        rows = _rows(scores, indices, axis)
        if rows is not None and _picks_extremes(*rows):
            return axis
    return None


def _rows(scores: np.ndarray, indices: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Scores and indices as matrices, a row for each choice; ``None`` where the shapes do not fit."""
    if indices.size == 1 and axis == 0:
        return scores.reshape(1, -1), indices.reshape(1, 1)
    if scores.ndim < 1:
        return None
    moved = np.moveaxis(scores, axis, -1)
    rest = moved.shape[:-1]
    if indices.ndim == scores.ndim:
        chosen = np.moveaxis(indices, axis, -1)
    elif indices.shape == rest:
        chosen = indices[..., None]
    else:
        return None
    if chosen.shape[:-1] != rest or chosen.shape[-1] > moved.shape[-1]:
        return None
    return moved.reshape(-1, moved.shape[-1]), chosen.reshape(-1, chosen.shape[-1])


def _picks_extremes(scores: np.ndarray, chosen: np.ndarray) -> bool:
    count, size = chosen.shape[-1], scores.shape[-1]
    if size < 2 or not _are_places(chosen, size):
        return False
    picked = np.sort(np.take_along_axis(scores, chosen.astype(np.int64), -1), -1)
    if np.isnan(picked).any():
        return False
    ordered = np.sort(scores, -1)
    return bool(np.array_equal(picked, ordered[:, size - count :]) or np.array_equal(picked, ordered[:, :count]))


def _are_places(chosen: np.ndarray, size: int) -> bool:
    """Whether each row names different places."""
    if chosen.min() < 0 or chosen.max() >= size:
        return False
    ordered = np.sort(chosen, -1)
    return bool((ordered[:, 1:] != ordered[:, :-1]).all())


def is_tie(right_scores: np.ndarray, scores: np.ndarray, right: np.ndarray, choice: np.ndarray) -> bool:
    """Whether another choice is as good as PyTorch's: what both choose scores the same.

    Args:
        right_scores: What PyTorch chose from.
        scores: What the file chose from, of the same shape. Scores that differ by no more than its error count as
            equal.
        right: PyTorch's choice.
        choice: The file's, of the same shape.
    """
    axis = chosen_axis(right_scores, right)
    if axis is None or scores.shape != right_scores.shape or choice.shape != right.shape:
        return False
    first, second = _rows(right_scores, right, axis), _rows(right_scores, choice, axis)
    if first is None or second is None or not _are_places(second[1], second[0].shape[-1]):
        return False
    expected = np.take_along_axis(first[0], first[1].astype(np.int64), -1).astype(np.float64)
    actual = np.take_along_axis(second[0], second[1].astype(np.int64), -1).astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinities side by side
        steps = np.nan_to_num(np.diff(expected, axis=-1))
    if not ((steps <= 0).all() or (steps >= 0).all()):  # it was not asked for an order
        expected, actual = np.sort(expected, -1), np.sort(actual, -1)
    finite = np.isfinite(right_scores) & np.isfinite(scores)
    size = float(np.max(np.abs(right_scores[finite]), initial=0.0))
    off = float(np.max(np.abs(right_scores[finite].astype(np.float64) - scores[finite]), initial=0.0))
    with np.errstate(invalid="ignore"):
        gaps = np.where(expected == actual, 0.0, np.abs(expected - actual))
    return bool((gaps <= 2 * off + TIED_SCORES * size).all())
