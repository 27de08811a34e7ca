"""Whether two modules compute the same: outputs on the same inputs, compared by their type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from xrlflow.passes.compiler import Comparison, CompilerError

Array: TypeAlias = npt.NDArray[Any]
Outputs: TypeAlias = Sequence[Array]

# The relative error allowed, by the name of the type, as a part of the number and as a part of the largest number of
# its tensor: passes reorder sums. Integers and truth values must be equal.
RTOL = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}


def compared(reference: Sequence[Outputs], found: Sequence[Outputs]) -> Comparison:
    """Compare the outputs on each draw of inputs.

    Numbers that are not finite must be so in both. Raises CompilerError if no number of the reference is finite: then
    nothing is compared.
    """
    worst, finite, total = 0.0, 0, 0
    for expected_all, actual_all in zip(reference, found, strict=True):
        if len(expected_all) != len(actual_all):
            return Comparison(False, np.inf, 0.0, f"{len(actual_all)} outputs instead of {len(expected_all)}")
        for number, (expected, actual) in enumerate(zip(expected_all, actual_all)):
            name = f"output {number} ({expected.dtype}{list(expected.shape)})"
            if expected.shape != actual.shape or expected.dtype != actual.dtype:
                return Comparison(False, np.inf, 0.0, f"{name}: {actual.dtype}{list(actual.shape)} instead")
            error, where = _error(expected, actual)
            worst = max(worst, error)
            total += expected.size
            finite += int(np.isfinite(_wide(expected)).sum())
            if error > 1.0:
                at = np.unravel_index(where, expected.shape)
                place = f"at {[int(i) for i in at]}" if expected.ndim else ""
                return Comparison(
                    False,
                    worst,
                    finite / total,
                    f"{name}: {actual[at]} instead of {expected[at]} {place}".rstrip(),
                )
    if total and not finite:
        raise CompilerError("no number of the reference is finite on these inputs: nothing can be compared")
    return Comparison(True, worst, finite / total if total else 1.0)


def _error(expected: Array, actual: Array) -> tuple[float, int]:
    """The largest error as a multiple of what is allowed, and its position."""
    if expected.size == 0:
        return 0.0, 0
    rtol = RTOL.get(expected.dtype.name)
    if rtol is None:
        wrong = expected != actual
        return (np.inf, int(np.argmax(wrong))) if wrong.any() else (0.0, 0)
    a, b = _wide(expected), _wide(actual)
    finite = np.isfinite(a)
    apart = ~finite & ~((a == b) | (np.isnan(a) & np.isnan(b))) | (finite & ~np.isfinite(b))
    if apart.any():
        return np.inf, int(np.argmax(apart))
    if not finite.any():
        return 0.0, 0
    scale = float(np.abs(a[finite]).max())
    allowed = rtol * (np.abs(np.where(finite, a, 0.0)) + scale) + np.finfo(np.float32).tiny
    errors = np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0)) / allowed
    return float(errors.max()), int(np.argmax(errors))


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
