"""The bound: when a search found its best graph, and what is kept of earlier runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import bound

pytestmark = pytest.mark.measures

ROW: dict[str, Any] = {
    "network": "bert", "greedy": 1.01, "taso": 1.02, "agent": 1.03, "tree": [1.04, 1.05], "hour": 1.06,
    "states": 1234, "seconds": 60.0, "limit": 60.0, "last gain": 30.0,
}  # fmt: skip


def test_the_best_cost_after_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([101.0, 102.0, 103.0])
    monkeypatch.setattr(bound, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    watched = bound.Watched(begin=100.0)
    for states, best in ((1, 5.0), (2, 5.0), (3, 4.0)):
        watched(states, best)
    assert watched.history == [(1.0, 1, 5.0), (2.0, 3, 4.0)]
    assert [watched.at(moment, 9.0) for moment in (0.5, 1.0, 1.9, 2.0, 60.0)] == [9.0, 5.0, 5.0, 4.0, 4.0]


def test_rows_are_kept_and_those_of_another_time_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def row(name: str, seconds: float) -> dict[str, Any]:
        asked.append(name)
        return {**ROW, "network": name, "limit": seconds}

    monkeypatch.setattr(bound, "row", row)
    kept = tmp_path / "rows.json"
    for names in (["bert"], ["bert", "vit-classifier"]):
        monkeypatch.setattr(sys, "argv", ["bound.py", *names, "--seconds", "60", "--json", str(kept)])
        bound.main()
    assert asked == ["bert", "vit-classifier"]
    assert list(json.loads(kept.read_text())) == asked
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["bound.py", "bert", "--seconds", "60", "--json", str(kept)])
    bound.main()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert said[-1] == "| bert | 1.010 | 1.020 | 1.030 | 1.040 | 1.050 | 1.060 | 1 | 1,234 | 0.5 |"
    monkeypatch.setattr(sys, "argv", ["bound.py", "bert", "--seconds", "61", "--json", str(kept)])
    with pytest.raises(SystemExit):
        bound.main()
    assert f"{kept} has other --seconds of bert" in capsys.readouterr().err
    assert len(asked) == 2
