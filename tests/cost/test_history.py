"""Comparisons that a machine has made, on disk."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tests.cost.graphs import Builder, t
from tests.cost.test_learned import small, walk
from xrlflow.cost import Roofline, history
from xrlflow.cost.history import History


def test_what_is_kept_is_found_again_for_the_same_machine(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "c.sqlite"
    before, after = walk(small("squeezenet"), 3)[::3]
    with History("a cpu", "onnxruntime 1", 2, path) as kept:
        kept.keep(Roofline(), before, after, 0.25, 0.01)
        kept.keep(Roofline(), before, before, 0.0, 0.01)  # nothing differs: it teaches nothing
    with History("a cpu", "onnxruntime 1", 2, path) as kept:
        (found,) = kept.latest(10)
    assert found.arrays["logs"].tolist() == [0.25]
    assert found.prices() == pytest.approx([Roofline().cost(before), Roofline().cost(after)])
    for device, runtime, threads in (
        ("another", "onnxruntime 1", 2),
        ("a cpu", "x", 2),
        ("a cpu", "onnxruntime 1", 1),
    ):
        with History(device, runtime, threads, path) as kept:
            assert kept.latest(10) == []


def test_the_oldest_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_ROWS", 3)
    before, after = walk(small("squeezenet"), 3)[::3]
    with History("a cpu", "r", 2, tmp_path / "c.sqlite") as kept:
        for number in range(5):
            kept.keep(Roofline(), before, after, float(number), 0.01)
        assert [c.arrays["logs"][0] for c in kept.latest(10)] == [4.0, 3.0, 2.0]
        assert [c.arrays["logs"][0] for c in kept.latest(2)] == [4.0, 3.0]


def test_no_name_and_no_weight_of_a_model_is_kept(tmp_path: Path) -> None:
    before, after = walk(small("squeezenet"), 3)[::3]
    path = tmp_path / "c.sqlite"
    with History("a cpu", "r", 2, path) as kept:
        kept.keep(Roofline(), before, after, 0.1, 0.01)
        (found,) = kept.latest(1)
    names = {name for name in before.leaves.names.values() if len(name) > 3}
    said = {*found.ops, *map(str, found.about.values())}
    assert not names & said
    assert all(np.issubdtype(array.dtype, np.number) for array in found.arrays.values())


def test_graphs_that_do_nothing_are_not_kept(tmp_path: Path) -> None:
    some, nothing = small("squeezenet"), Builder()
    nothing.input(t(2))
    with History("a cpu", "r", 2, tmp_path / "c.sqlite") as kept:
        kept.keep(Roofline(), some, nothing.graph(*nothing.inputs), 3.0, 0.01)
        assert kept.latest(1) == []


def test_rows_of_another_version_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    before, after = walk(small("squeezenet"), 3)[::3]
    path = tmp_path / "c.sqlite"
    with History("a cpu", "r", 2, path) as kept:
        kept.keep(Roofline(), before, after, 0.1, 0.01)
    with sqlite3.connect(path) as connection:
        for wrong in (b"\0", 7, "text"):
            connection.execute("INSERT INTO comparison VALUES ('a cpu', 'r', 2, 9e9, ?)", (wrong,))
    with History("a cpu", "r", 2, path) as kept:
        assert [c.arrays["logs"][0] for c in kept.latest(10)] == [0.1]
