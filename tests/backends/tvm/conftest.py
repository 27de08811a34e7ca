"""What the tests of compiled models share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's store of tuned kernels."""
    monkeypatch.setattr("xrlflow.tuning.store.cache_directory", lambda: tmp_path / "cache")
