"""Finds the substitution that broke a model, by bisection over the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from xrlflow.verify.errors import VerificationError

M = TypeVar("M")


class NotASubstitution(VerificationError):
    """The model is wrong before the first substitution, so import or export is to blame."""


class NotRepeatable(VerificationError):
    """The model failed once, but passes when it is checked again."""


def blame(graph_at: Callable[[int], M], n_steps: int, check: Callable[[M], bool]) -> int:
    """The index of a substitution that breaks the model: the model is right before it and wrong after it.

    `graph_at(k)` builds the model after the first k substitutions; `check` returns whether a model is right. Takes 2 +
    log2(n_steps) checks. If several substitutions break the model, or a later one repairs it, the result is one of the
    substitutions that break it.

    Raises NotASubstitution if `graph_at(0)` is wrong, and NotRepeatable if `graph_at(n_steps)` is right.
    """
    if check(graph_at(n_steps)):
        raise NotRepeatable("none: checked again, the model after all substitutions is right")
    if n_steps == 0 or not check(graph_at(0)):
        raise NotASubstitution(
            "the model is wrong before any substitution was made: reading and writing it changed what it computes"
        )
    right, wrong = 0, n_steps
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if check(graph_at(middle)):
            right = middle
        else:
            wrong = middle
    return right
