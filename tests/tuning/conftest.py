"""The fixtures of tests that measure: a store and a pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xrlflow.tuning.pool import Pool
    from xrlflow.tuning.store import Store


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
