"""Fixtures for the tests of compiled models."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests from reading and writing the user's store of tuned kernels."""
    monkeypatch.setattr("xrlflow.tuning.store.cache_directory", lambda: tmp_path / "cache")
