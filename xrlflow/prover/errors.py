"""Tests that a rule keeps errors: where the left side fails, the right side must fail, too.

A left side fails if sizes do not fit together, or if an index (or a size that is an operand) is out of range.
"""

from __future__ import annotations

import numpy as np

from xrlflow.ir import FLOATS
from xrlflow.ops.evaluate import NotEvaluable
from xrlflow.ops.field import Array
from xrlflow.prover.cases import (
    Case,
    Feeds,
    Unusable,
    Wrong,
    bindings,
    draw_feeds,
    drawn_floats,
    placing,
    symbols,
    tried_bindings,
)
from xrlflow.prover.machine import MACHINE, evaluation
from xrlflow.rewrite import AnyRule

# How many sizes, and how many indices, are drawn for each case.
_SIZES, _INDICES = 4, 3


def check_errors(case: Case, rng: np.random.Generator, rule: AnyRule) -> None:
    """Raises Wrong if the left side fails for some sizes or indices and the right side does not.

    `rule.may_lose_errors` says which errors may be lost.
    """
    problem, floats = case.problem, drawn_floats(rng, "normal", 1.0)
    types = [problem.type(v) for v in case.before.inputs]
    where = [v for v in case.before.inputs if v in placing(problem) and problem.type(v).dtype not in FLOATS]
    unknown = any(t.shape is None or None in t.shape for t in types)
    try:
        if "sizes" not in rule.may_lose_errors and (unknown or symbols(problem)):
            for _ in range(_SIZES):
                numbers = {**bindings(problem, rng), "": int(rng.integers(1, 5))}
                feeds = draw_feeds(problem, numbers, rng, floats)
                _must_fail(case, {**feeds, **{v: np.zeros_like(feeds[v]) for v in where}}, "sizes")
        if "indices" not in rule.may_lose_errors and where:
            usable = _usable(case, rng)
            for _ in range(_INDICES if usable else 0):
                edges = {v: _edges(usable[v], usable, rng) for v in where}
                _must_fail(case, {**usable, **edges}, "indices")
    except (NotEvaluable, Unusable):
        return


def _usable(case: Case, rng: np.random.Generator) -> Feeds:
    """Inputs for which the left side has a value; an empty mapping if none are found."""
    for numbers in tried_bindings(case.problem, rng):
        feeds = draw_feeds(case.problem, numbers, rng, drawn_floats(rng, "normal", 1.0))
        if _fails(evaluation(case.before).run, feeds) is None:
            return feeds
    return {}


def _edges(a: Array, feeds: Feeds, rng: np.random.Generator) -> Array:
    """Random indices: at the ends of the inputs' dimensions, and just beyond them."""
    sizes = sorted({d for x in feeds.values() for d in x.shape}) or [1]
    options = [i for n in sizes for i in (0, n - 1, n, -n, -n - 1)]
    mask = rng.random(a.shape) < 0.5
    return np.where(mask, a, rng.choice(options, a.shape)).astype(a.dtype)


def _must_fail(case: Case, feeds: Feeds, what: str) -> None:
    """Raises Wrong if the left side fails and the right side has a value. Raises NotEvaluable."""
    error = _fails(evaluation(case.before).run, feeds)
    if error is not None and _fails(evaluation(case.after).run, feeds) is None:
        raise Wrong(
            f"the left side fails, the right side does not ({what}): {type(error).__name__}: {error}; "
            f'declare may_lose_errors = ("{what}",) if the inputs may be taken to fit'
        )


def _fails(run: object, feeds: Feeds) -> Exception | None:
    """The exception about sizes or indices with which an evaluation ends; None if it ends well. Raises NotEvaluable,
    and Unusable if it ends with another exception.
    """
    try:
        run(feeds, MACHINE)  # type: ignore[operator]
    except NotEvaluable:
        raise
    except (IndexError, ValueError) as error:
        return error
    except Exception:  # a division by zero, a tensor that is too large: no value on either side
        raise Unusable from None
    return None
