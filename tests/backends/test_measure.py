"""Measuring real sessions here and in fresh processes. No latency and no ratio is asserted: machines are busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.backends.models import feeds, matmuls, strings
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure, measure_in_fresh_processes, processes, wire
from xrlflow.backends.results import Comparison, Latency, Load, SpeedUp


def test_measuring_three_models() -> None:
    found = measure([matmuls(1), matmuls(2), matmuls(1)], feeds(), threads=1, time_limit=1.0)
    assert len(found.latencies) == 3
    assert len(found.speedups) == 2
    assert found.control is not None
    assert found.threads == 1
    for speedup in (*found.speedups, found.control):
        assert 0 <= speedup.low <= speedup.median <= speedup.high
    assert found.load.cpus >= 1
    assert found.seconds < 5


def test_one_bad_model_spoils_it_with_one_line() -> None:
    with pytest.raises(BackendError, match="cannot load the model of 3 bytes"):
        measure([matmuls(1), b"bad"], feeds(), time_limit=1.0)
    with pytest.raises(BackendError, match="cannot run"):
        measure([matmuls(1), matmuls(1, width=32)], feeds(), time_limit=1.0)
    with pytest.raises(BackendError, match="at least two"):
        measure([matmuls(1)], feeds())


def test_fresh_processes(tmp_path: Path) -> None:
    path = tmp_path / "before.onnx"
    path.write_bytes(matmuls(2))
    start = time.monotonic()
    found = measure_in_fresh_processes(path, matmuls(1), feeds(), pairs=3, threads=1, time_limit=6.0)
    assert time.monotonic() - start < 6.0 + processes.GRACE
    assert 1 <= len(found.runs) <= 9
    assert 0 <= found.speedup.low <= found.speedup.median <= found.speedup.high
    assert found.before.samples == sum(run.latencies[0].samples for run in found.runs)
    assert found.threads == 1


def telling(ratios: Iterable[float], each: Callable[[], None] = lambda: None) -> Callable[..., Comparison]:
    """In place of children: what they tell, one after the other. `each`: what happens meanwhile."""
    told = iter(ratios)

    def child(*_: object) -> Comparison:
        each()
        ratio = next(told)
        latency = Latency(1.0, 1.0, 1.0, samples=10)
        load = Load(0.0, 0.0, 1.0, cpus=2, threads=1, seconds=0.01, disturbed=False)
        narrow = SpeedUp(ratio, 0.9999 * ratio, 1.0001 * ratio)
        return Comparison((latency, latency), (narrow,), narrow, load, 10, 0.01, threads=1, converged=True)

    return child


@pytest.mark.parametrize(
    ("ratios", "width", "processes_used"),
    [
        ([1.02, 1.02, 1.021], 0.01, 3),  # clear of 1
        ([0.999, 1.002, 1.0], 0.01, 3),  # as good as equal
        ([0.999, 1.002, 1.0] * 3, 0.001, 9),  # not as equal as is asked
        ([1.05, 0.99, 1.02] * 4, 0.01, 9),  # in doubt to the last
        # In doubt after three, slower after five.
        ([0.99, 0.96, 0.975, 0.975, 0.975, 0.975, 0.975], 0.01, 5),
    ],
)
def test_doubt_and_time_left_are_more_processes(
    ratios: list[float], width: float, processes_used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_run_child", telling(ratios))
    found = measure_in_fresh_processes(
        matmuls(1), matmuls(1), feeds(), pairs=3, threads=1, time_limit=60.0, target_width=width
    )
    assert len(found.runs) == processes_used


@pytest.mark.parametrize(("time_limit", "processes_used"), [(19.0, 3), (22.0, 4), (26.0, 5)])
def test_what_would_not_be_over_in_time_is_not_begun(
    time_limit: float, processes_used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In doubt to the last, with children of five seconds."""
    now = 100.0

    def pass_time() -> None:
        nonlocal now
        now += 5.0

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(processes, "_run_child", telling([1.05, 0.99, 1.02] * 3, pass_time))
    found = measure_in_fresh_processes(
        matmuls(1), matmuls(1), feeds(), pairs=3, threads=1, time_limit=time_limit
    )
    assert len(found.runs) == processes_used


def test_what_a_child_cannot_load_is_said_as_here() -> None:
    with pytest.raises(BackendError, match="ONNX Runtime cannot load") as caught:
        measure_in_fresh_processes(b"bad", matmuls(1), feeds(), time_limit=10.0)
    assert "\n" not in str(caught.value)


def test_a_crash_is_reported_with_what_the_child_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "WORKER", "xrlflow.no_such_worker")
    with pytest.raises(BackendError, match=r"ended with status 1: .*no_such_worker"):
        measure_in_fresh_processes(matmuls(1), matmuls(1), feeds(), time_limit=10.0)


def test_a_child_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.0)
    start = time.monotonic()
    with pytest.raises(BackendError, match="too short"):
        measure_in_fresh_processes(matmuls(1), matmuls(1), feeds(), time_limit=0.05)
    assert time.monotonic() - start < 5


def test_an_interrupt_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Any] = []

    class Interrupted(processes.subprocess.Popen[str]):
        def communicate(self, *args: Any, **options: Any) -> Any:
            if not children:
                children.append(self)
                raise KeyboardInterrupt
            return super().communicate(*args, **options)

    monkeypatch.setattr(processes.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_in_fresh_processes(matmuls(1), matmuls(1), feeds(), time_limit=30.0)
    assert children[0].poll() is not None


def test_an_options_object_is_used_in_this_process() -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    found = measure_in_fresh_processes(
        matmuls(1), matmuls(1), feeds(), pairs=3, time_limit=1.0, session_options=options
    )
    assert not found.fresh_processes
    assert found.threads == 1


def test_no_pairs() -> None:
    with pytest.raises(BackendError, match="at least one pair"):
        measure_in_fresh_processes(matmuls(1), matmuls(1), feeds(), pairs=0)


def test_feeds_travel_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "feeds.npz"
    sent = {
        "a/b:0": np.arange(6, dtype=np.int8).reshape(2, 3),
        "file": np.array(True),
        "words": np.array(["x", "größer"], dtype=object),
        "half": np.ones(3, np.float16),
    }
    got = wire.load_feeds(path, wire.save_feeds(path, sent))
    assert list(got) == list(sent)
    for name, array in sent.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)
    with pytest.raises(BackendError, match="cannot be handed"):
        wire.save_feeds(path, {"x": np.zeros(2, "V2")})


def test_comparisons_travel_unchanged() -> None:
    text = {"x": np.array(["a", "b"], dtype=object)}
    found = measure([strings(), strings()], text, threads=1, time_limit=0.2)
    assert wire.from_json(wire.to_json(found)) == found
