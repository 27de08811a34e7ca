"""A store and a pool for tests that measure, and what tests of tuners remember of kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest

if TYPE_CHECKING:
    from xrlflow.tuning.knobs import Candidate, KnobSpace, Vector
    from xrlflow.tuning.pool import Pool
    from xrlflow.tuning.store import Store

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

    decode, describe = KnobSpace.decode, KnobSpace.described

    @functools.wraps(decode)
    def decoded(space: KnobSpace, vector: Vector) -> Candidate | None:
        known = _DECODED.setdefault(space, {})
        if vector not in known:
            known[vector] = decode(space, vector)
        return known[vector]

    def described(space: KnobSpace, candidates: Sequence[Candidate]) -> Any:
        known = _FEATURES.setdefault(space, {})
        fresh = [c for c in candidates if c.key not in known]
        if fresh:
            known.update(zip((c.key for c in fresh), describe(space, fresh)))
        return np.stack([known[c.key] for c in candidates])

    monkeypatch.setattr(KnobSpace, "decode", decoded)
    monkeypatch.setattr(KnobSpace, "described", described)
