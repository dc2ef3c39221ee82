"""Tolerances: how far apart what a file and PyTorch compute may be, as a share of its size, each with what it is for.

Those that were not measured by a benchmark are chosen: far above rounding, and far below what a fault changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelexport.errors import UsageError

ALLOWED: Mapping[str, float] = {"float64": 1e-9, "float32": 3e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""How far off an array computed in a type may be, as a share of its size: rounding of a whole model is less."""
UNITS: Mapping[str, float] = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The unit roundoff of each floating-point type: half the distance from 1 to the next number."""
SMALLEST_NORMAL_FLOAT16 = 2.0**-14
"""The smallest number that float16 has with all its digits; those of the other types are far below any constant."""
INFINITE = 1e30
"""Numbers of this size or above count as infinite: a mask's smallest number has another one in each type."""

# Values of two runs in float64.
EQUAL_IN_FLOAT64 = ALLOWED["float64"]
"""The largest difference of two equal values, as a share of their size (root mean square)."""
PROJECTION_DEVIATIONS = 4.0
"""How many standard deviations a projection of a difference may be from zero in a fingerprint."""
EQUAL_IN_OWN_TYPES = 1e-4
"""How far off values may be from a run of PyTorch that was not possible in float64."""
FROM_STORED_VALUES = 1e-6
"""How far off what is computed from stored reference values may be: they are rounded to the types of the model."""
TIMES_NOISE = 16.0
"""The noise that is allowed: it is measured once, with random signs."""
MOST_NOISE = 1e-3
"""The noise above which a value is not excused by it."""
STILL_THE_SAME_TENSOR = 1e-2
"""How far off a wrong value may be that is taken for a tensor of PyTorch, to be replaced by it."""
CALL_ALONE = 1e-6
"""How far off a call may be that is computed alone, since the file has rounded constants."""
COMPUTED_BUFFER = 1e-5
"""How far off a buffer may be that was computed on another machine."""
COMPUTED_WEIGHTS = 2.0**-8
"""How far off weights computed in float32 may be from those in float64: the sine of a large number is
far off."""
ROUNDED_CONSTANT = 2.0**-8
"""How far off a constant of a file may be from the result that it is, rounded to its type."""
TIED_SCORES = 4 * 2.0**-24
"""What two equal sums of float32 may differ by: a choice among such scores is a tie."""
SCORES_OF_PYTORCH = 1e-6
"""How far off scores may be that are taken for PyTorch's."""

# Runs in the types of a model.
HIDES = 1e4
"""A number of this size in a mask hides in every type, in half precision, too: it counts as infinite."""
TIMES_MOVED = 1.25
"""The most that the norm of a quantized product's error may be, in norms of what half a step of its numbers changes:
right ones have at most 0.93, and a zero point that is off by one has 2."""
OF_BIASES = 1 / 127
"""The share of those norms that a bias may be off by: it is rounded to the product of both steps."""
ONE_STEP = 1.01
"""How many steps off a rounded activation may be: one, and the rounding of a product."""
TIMES_OWN = 16.0
"""How many times PyTorch's own error the file's may be, in ONNX Runtime."""
ROUNDED_TO_STEPS = 2.0**-6
"""How far off outputs may be in ONNX Runtime if the file rounds activations to 8 bits: the last bit of a number decides
between two steps."""
TIMES_ALLOWED = 10.0
"""How many times what is allowed a run in the model's types may be off without a look at its rounding."""
TIMES_ONE_BIT = 64.0
"""How many times the effect of one bit of each weight rounding may be."""
CLEARLY_WRONG = 1e-2
"""More than rounding is in any type of weights that the check of an export compares."""
ON_A_DEVICE = 1e-2
"""How far off outputs on a device may be, unless a person says another bound."""
TIMES_ROUNDING = 2.0
"""How many times what rounding costs on the CPU a device may be off that rounds at other places."""
_LOGITS, _LOGITS_OF_HALF = 1e-3, 3e-2
PIPELINE_RESULT = 1e-3
"""How far off the result of a pipeline may be: each step adds its rounding."""
ENCODED_LOGITS = 1e-4
"""How far off the logits of a model may be that was taken apart into an encoder and a decoder in PyTorch."""
ADDED_IN_ANOTHER_ORDER = 1e-4
"""How far apart the results of two files may be that add the same numbers in another order."""
CALLED_THE_SAME = 1e-6
"""How far apart outputs may be that are called the same: by some roundings of float32."""
SAME_BUT_ROUNDING = 1e-3
"""How far apart two runs of a model may be that differ by no more than rounding."""


def allowed_of_logits(itemsize: int) -> float:
    """How far off the logits of a token, or an embedding, may be in a type of so many bytes."""
    return _LOGITS if itemsize > 2 else _LOGITS_OF_HALF


def check_bound(bound: float) -> None:
    """Refuse what cannot be a bound."""
    if not 0 <= bound < float("inf"):
        raise UsageError(f"{bound:g} is not a bound: give a share of the size of outputs, such as 0.01")
