"""A store and a pool for tests that measure, and what tests of tuners remember of kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest

if TYPE_CHECKING:
    from xrlflow.tuning.knobs import Candidate, KnobSpace, Vector
    from xrlflow.tuning.pool import Pool
    from xrlflow.tuning.store import Store
    from xrlflow.tuning.surrogate import Surrogate

# By space: what vectors decode to, and the features of schedules by their kernels' keys.
_DECODED: WeakKeyDictionary[KnobSpace, dict[Vector, Candidate | None]] = WeakKeyDictionary()
_FEATURES: WeakKeyDictionary[KnobSpace, dict[str, Any]] = WeakKeyDictionary()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    from xrlflow.tuning.store import Store

    with Store(tmp_path / "store.sqlite") as opened:
        yield opened


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    from tests.tuning.measured import QUICK
    from xrlflow.tuning.pool import Pool

    with Pool(QUICK) as opened:
        yield opened


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests together decode a vector of a space once, and describe a schedule once: TVM takes most of their time.

    `KnobSpace.decode.__wrapped__` decodes again.
    """
    from xrlflow.tuning.knobs import KnobSpace
    from xrlflow.tuning.surrogate import Surrogate

    decode, extract = KnobSpace.decode, Surrogate._extract

    @functools.wraps(decode)
    def decoded(space: KnobSpace, vector: Vector) -> Candidate | None:
        known = _DECODED.setdefault(space, {})
        if vector not in known:
            known[vector] = decode(space, vector)
        return known[vector]

    def extracted(surrogate: Surrogate, candidates: Sequence[Candidate]) -> None:
        known = _FEATURES.setdefault(surrogate.space, {})
        extract(surrogate, [c for c in candidates if c.key not in known])
        known.update(surrogate._schedules)
        surrogate._schedules.update({c.key: known[c.key] for c in candidates})

    monkeypatch.setattr(KnobSpace, "decode", decoded)
    monkeypatch.setattr(Surrogate, "_extract", extracted)
