"""Which cases of a test are for `make test`, and which for `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def whole(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Parameters of a test: all `cases`, of which `make test` runs those in `kept`.

    Raises ValueError if one of `kept` is no case.
    """
    cases = list(cases)
    if missing := [case for case in kept if case not in cases]:
        raise ValueError(f"no cases: {missing}")
    return [case if case in kept else pytest.param(case, marks=pytest.mark.whole) for case in cases]


def crossed(first: Iterable[Any], second: Iterable[Any], kept: Collection[tuple[Any, Any]]) -> list[Any]:
    """Two parameters of a test: each of `first` with each of `second`; `make test` runs the pairs in `kept`.

    Raises ValueError if one of `kept` is no such pair.
    """
    pairs = list(itertools.product(first, second))
    if missing := [pair for pair in kept if pair not in pairs]:
        raise ValueError(f"no cases: {missing}")
    return [pair if pair in kept else pytest.param(*pair, marks=pytest.mark.whole) for pair in pairs]
