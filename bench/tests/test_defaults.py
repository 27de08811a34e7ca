"""The comparison of default searches: each begins without what another one has measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.defaults import nothing_measured, training
from xrlflow.storage.sqlite import cache_directory


def test_a_choice_knows_the_machine_and_nothing_that_another_one_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    mine = cache_directory()
    mine.mkdir(parents=True)
    for name in ("machine-0.json", "measurements.sqlite", "comparisons.sqlite"):
        (mine / name).write_text(name)
    for number in range(2):
        with nothing_measured(tmp_path / str(number)):
            assert cache_directory() != mine
            assert [p.name for p in cache_directory().iterdir()] == ["machine-0.json"]
            (cache_directory() / "comparisons.sqlite").touch()
    assert cache_directory() == mine
    assert len(list(mine.iterdir())) == 3


def test_the_table_says_what_agents_learned_from() -> None:
    notes = [
        "8 whole models were measured, and learned costs corrected by 0 of them",
        "verified with batch=1",
    ]
    row = {"model": "bert", "reports": {"rlflow/learned/9": {"notes": notes}, "taso/roofline": {"notes": []}}}
    assert training([row], ["taso/roofline", "rlflow/learned/9"]) == [
        f"- bert, rlflow/learned/9: {notes[0]}."
    ]
