"""Which cases of a test are for `make test`, and which for `make test-all`."""

from __future__ import annotations

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
