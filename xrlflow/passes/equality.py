"""Whether two modules compute the same: their outputs on the same inputs.

A pass may reorder sums and round constants. Where a result consists of rounding errors (a gradient that is 0 up to
rounding, divided by its own root), the outputs of two correct modules may have nothing in common, so no tolerance
distinguishes correct from wrong outputs. Hence there are two questions:

1. Are both equal in real numbers? Both run in float64, and each number must agree to 2e-6, and to 1e-7 of its
   tensor's largest. A greater difference is allowed up to 64 times the movement of this number: how much the original's
   number changes when inputs and constants change by one unit of float32 in the last place (a pass may fold constants
   in float32). The movement is bounded: where it would allow more than 1% of the number and of its tensor's largest,
   the number is not compared. An output of which at least half is never compared, except for zeros, does not count as
   equal.
2. Do both compute the same in their own types? They must agree to a tolerance by type, or each tensor must be as close
   to the float64 result as the original is on inputs changed by one unit, up to a factor of 8.

For a module without a counterpart in float64 there is only the second question, and the tolerance includes the
movement of the original on changed inputs. The movement may allow at most 1% of a tensor's largest number: an output
that moves by more does not count as equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from xrlflow.passes.compiler import Comparison, CompilerError

Array: TypeAlias = npt.NDArray[Any]
Outputs: TypeAlias = Sequence[Array]
# The outputs for each draw of inputs.
Draws: TypeAlias = Sequence[Outputs]

# The relative error allowed, by the name of the type, as a fraction of the number and of the largest number of its
# tensor (since passes reorder sums). Integers and booleans must be equal.
RTOL = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
# The relative errors allowed if both modules run in float64: 16 float32 units of the number, and one float32 unit of
# the largest number, as constants are rounded to float32.
_WIDE, _WIDE_LARGEST = 2e-6, 2.0**-23
# Larger numbers stand for infinity, as in masks, and do not count as the largest number of a tensor.
_ENDLESS = 1e30
_FEW = 64.0  # times the movement of a number. A movement is observed four times; few are so much too small by chance
_OWN = 8.0  # times the movement of a tensor
_MOST = 1e-2  # of the number and of the largest number of its tensor: the limit on what movement may allow


def compared(
    reference: Draws,
    candidate: Draws,
    slack: Draws | None = None,
    wide: bool = False,
    decides: bool = True,
    named: Outputs | None = None,
) -> Comparison:
    """Compare the outputs on each draw of inputs.

    Where a number is NaN or infinite in one module, it must be the same in the other. `slack`: an additional error
    allowed for each number; numbers for which it is infinite are not compared. `wide`: both ran in float64. `decides`:
    an output of which at least half is never compared, except for zeros, is not equal. `named`: outputs whose types
    messages name, if the reference has other types. Raises CompilerError if nothing is compared, because the reference
    has only NaN and infinities.
    """
    worst, compared_count, total = 0.0, 0, 0
    blind: dict[str, bool] = {}
    unclear: dict[str, bool] = {}
    for draw, (expected_all, actual_all) in enumerate(zip(reference, candidate, strict=True)):
        if len(expected_all) != len(actual_all):
            return Comparison(False, np.inf, 0.0, f"{len(actual_all)} outputs instead of {len(expected_all)}")
        for number, (expected, actual) in enumerate(zip(expected_all, actual_all)):
            kind = (named or expected_all)[number].dtype
            name = f"output {number} ({kind}{list(expected.shape)})"
            if expected.shape != actual.shape or expected.dtype != actual.dtype:
                return Comparison(False, np.inf, 0.0, f"{name}: {actual.dtype}{list(actual.shape)} instead")
            free = slack[draw][number] if slack is not None else np.zeros(expected.shape)
            error, where = _error(expected, actual, free, wide)
            worst = max(worst, error)
            total += expected.size
            if decides and expected.size and np.isinf(free).mean() >= 0.5:
                unclear.setdefault(name, True)
            elif _is_exact(expected) or largest(_real(expected)) > 0.0:  # equal zeros are no evidence
                unclear[name] = False
            here = int((~np.isnan(_real(expected)) & np.isfinite(free)).sum())
            compared_count += here
            blind[name] = blind.get(name, expected.size > 0) and not here
            if error > 1.0:
                at = np.unravel_index(where, expected.shape)
                position = f"at {[int(i) for i in at]}" if expected.ndim else ""
                difference = f"{name}: {actual[at]} instead of {expected[at]} {position}".rstrip()
                return Comparison(False, worst, compared_count / total, difference)
    if total and not compared_count and slack is None:
        raise CompilerError("no number of the reference is one on these inputs: nothing can be compared")
    share = compared_count / total if total else 1.0
    for name, never in unclear.items():
        if never:
            return Comparison(False, worst, share, f"{name} hangs on rounding, so it cannot be compared")
    return Comparison(True, worst, share, blind=tuple(name for name, never in blind.items() if never))


def _error(expected: Array, actual: Array, slack: Array, wide: bool) -> tuple[float, int]:
    """The largest error as a multiple of the tolerance, and its position."""
    if expected.size == 0:
        return 0.0, 0
    looked = np.isfinite(slack)
    if _is_exact(expected):
        wrong = _other(expected, actual) & looked
        return (np.inf, int(np.argmax(wrong))) if wrong.any() else (0.0, 0)
    a, b = _real(expected), _real(actual)
    finite = np.isfinite(a)
    apart = np.where(finite, ~np.isfinite(b), ~_same(a, b)) & looked
    if apart.any():
        return np.inf, int(np.argmax(apart))
    looked = looked & finite
    if not looked.any():
        return 0.0, 0
    rtol = RTOL[expected.dtype.name]
    own, all_of_it = (_WIDE, _WIDE_LARGEST) if wide else (rtol, rtol)
    a, b = np.where(looked, a, 0.0), np.where(looked, b, 0.0)
    allowed = own * np.abs(a) + all_of_it * largest(_real(expected)) + np.where(looked, slack, 0.0)
    errors = np.abs(a - b) / (allowed + np.finfo(np.float32).tiny)
    return float(errors.max()), int(np.argmax(errors))


def largest(array: Array) -> float:
    """The largest magnitude in a tensor, without numbers that stand for infinity; 0 if there is none."""
    sizes = np.abs(array)
    return float(sizes.max(where=sizes < _ENDLESS, initial=0.0))


def _real(array: Array) -> Array:
    """An array in float64 or complex128. A string counts as 1, so it is compared and is never NaN."""
    if array.dtype.kind in "OSU":
        return np.ones(array.shape)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _is_exact(array: Array) -> bool:
    return array.dtype.name not in RTOL


def movement(still: Draws, runs: Sequence[Draws]) -> list[list[Array]]:
    """The movement of each number: the greatest change from `still` to any of `runs`. It is infinite where a number
    becomes NaN or infinite, and for integers that change at all."""

    def of(first: Array, later: Sequence[Array]) -> Array:
        if _is_exact(first):
            changed = np.any([_other(first, o) for o in later], axis=0)
            return np.asarray(np.where(changed, np.inf, 0.0))
        a = _real(first)
        with np.errstate(invalid="ignore"):
            far = [np.where(_same(a, b), 0.0, np.abs(b - a)) for b in map(_real, later)]
        return np.asarray(np.nan_to_num(np.max(far, axis=0), nan=np.inf, posinf=np.inf))

    return [
        [of(first, [run[draw][number] for run in runs]) for number, first in enumerate(outputs)]
        for draw, outputs in enumerate(still)
    ]


def _other(a: Array, b: Array) -> Array:
    """A mask of exact numbers that differ. Floats of 8 bits count as exact numbers; two NaN of them count as the
    same."""
    other: Array = (a != b) & ~((a != a) & (b != b))
    return other


def _same(a: Array, b: Array) -> Array:
    same: Array = (a == b) | (np.isnan(a) & np.isnan(b))
    return same


def in_reals(
    expected: Draws, candidate: Draws, moved: Callable[[], Sequence[Draws]], named: Outputs | None = None
) -> Comparison:
    """The first question: outputs in float64. `moved`: a function that computes the outputs of the original with
    changed inputs and constants; called only if the outputs differ. `named`: as for `compared`.
    """
    plain = compared(expected, candidate, wide=True, named=named)
    if plain.equal:
        return plain
    slack = []
    for outputs, moves in zip(expected, movement(expected, moved())):
        limits = [_MOST * (np.abs(_real(o)) + largest(_real(o))) for o in outputs]
        slack.append([np.where(_FEW * m <= limit, _FEW * m, np.inf) for m, limit in zip(moves, limits)])
    return compared(expected, candidate, slack, wide=True, named=named)


def in_types(
    expected: Draws, candidate: Draws, exact: Draws | None, moved: Callable[[], Sequence[Draws]]
) -> Comparison:
    """The second question: outputs in the types of the module. `exact`: the outputs of the original in float64, if it
    has a counterpart in float64. `moved`: a function that computes the outputs of the original on changed inputs;
    called only if the outputs differ.
    """
    plain = compared(expected, candidate)
    if plain.equal or not alike(expected, candidate):
        return plain
    still = exact if exact is not None else expected
    own = movement(still, [expected, *moved()])
    slack = [
        [_of_tensor(_real(o), m, RTOL.get(e.dtype.name), exact is None) for o, e, m in zip(*row)]
        for row in zip(still, expected, own)
    ]
    real = [[_like(f, s) for f, s in zip(*row)] for row in zip(candidate, still)]
    again = compared(still, real, slack, wide=True, decides=exact is None, named=expected[0])
    if not again.equal:
        return replace(again, difference=f"{again.difference}; {plain.difference}")
    return replace(again, note=f"hangs on rounding: {plain.difference}")


def _of_tensor(array: Array, moves: Array, rtol: float | None, bounded: bool) -> Array:
    """The error allowed for each number of a tensor, computed from the movement of all its numbers; infinite where
    finite numbers become NaN or infinite. `bounded`: if a tensor moves too far, none of its numbers is compared.
    """
    if rtol is None:
        return np.full(array.shape, np.inf if moves.size and np.isinf(moves).any() else 0.0)
    largest_move, scale = largest(moves), largest(array)
    if bounded and _OWN * largest_move > _MOST * scale:
        return np.full(array.shape, np.inf)
    return np.where(np.isinf(moves), np.inf, _OWN * largest_move + rtol * (np.abs(array) + scale))


def alike(expected: Draws, candidate: Draws) -> bool:
    """Whether outputs have the same types and shapes."""
    return [[(o.dtype, o.shape) for o in outputs] for outputs in expected] == [
        [(o.dtype, o.shape) for o in outputs] for outputs in candidate
    ]


def _like(array: Array, other: Array) -> Array:
    return array if array.dtype == other.dtype else _real(array)
