"""Measurements of real sessions in this process and in fresh ones.

No latency and no ratio is asserted, because the machine may be busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import psutil
import pytest

from tests.backends.models import feeds, matmuls, strings
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import Deciding, measure, measure_in_fresh_processes, processes
from xrlflow.backends.onnxruntime.timing import Sample
from xrlflow.backends.onnxruntime.worker import Setup
from xrlflow.backends.pairs import Turn
from xrlflow.backends.results import Load, SpeedUp, Verdict
from xrlflow.workers import Forks

pytestmark = pytest.mark.measures


def test_measuring_three_models() -> None:
    result = measure([matmuls(1), matmuls(2), matmuls(1)], feeds(), threads=1, time_limit=1.0)
    assert len(result.latencies) == 3
    assert len(result.speedups) == 2
    assert result.control is not None
    assert result.threads == 1
    for speedup in (*result.speedups, result.control):
        assert 0 <= speedup.low <= speedup.median <= speedup.high
    assert result.load.cpus >= 1
    assert result.seconds < 5


def test_one_bad_model_spoils_it_with_one_line() -> None:
    with pytest.raises(BackendError, match="cannot load the model of 3 bytes"):
        measure([matmuls(1), b"bad"], feeds(), time_limit=1.0)
    with pytest.raises(BackendError, match="cannot run"):
        measure([matmuls(1), matmuls(1, width=32)], feeds(), time_limit=1.0)
    with pytest.raises(BackendError, match="at least two"):
        measure([matmuls(1)], feeds())


def ratio_is_sound(result: SpeedUp | None) -> None:
    assert result is None or 0 <= result.low <= result.median <= result.high


def test_fresh_processes(tmp_path: Path) -> None:
    path = tmp_path / "before.onnx"
    path.write_bytes(matmuls(2))
    checked: list[bool] = []

    def check() -> bool:
        checked.append(True)
        return True

    start = time.monotonic()
    result = measure_in_fresh_processes(
        path, matmuls(1), feeds(), deciding=Deciding(check), threads=1, time_limit=6.0
    )
    assert time.monotonic() - start < 6.0 + 5.0
    assert result.verdict is not None
    assert len(checked) == (result.verdict in (Verdict.FASTER, Verdict.REFUTED))
    ratio_is_sound(result.decided)
    ratio_is_sound(result.speedup)
    assert result.threads == 1
    assert result.fresh_processes


def test_a_figure_alone() -> None:
    result = measure_in_fresh_processes(matmuls(1), matmuls(1), feeds(), threads=1, time_limit=5.0)
    assert result.verdict is None
    assert result.decided is None
    assert result.processes <= 24
    ratio_is_sound(result.speedup)


def test_each_process_is_new_and_the_fork_server_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forking is only sound while the server has one thread. Its children must differ in addresses: see `_ballast`."""
    seen: list[tuple[int, int, list[int]]] = []
    ask = processes.FreshProcesses.sample

    def asked(self: Any, index: int, turns: int | None, deadline: float) -> Any:
        server = psutil.Process(self.forks.server.pid)
        result = ask(self, index, turns, deadline)
        seen.append((server.pid, server.num_threads(), [child.pid for child in server.children()]))
        return result

    monkeypatch.setattr(processes.FreshProcesses, "sample", asked)
    measure_in_fresh_processes(matmuls(1), matmuls(1), feeds(), threads=2, time_limit=3.0)
    assert len(seen) > 1
    assert {(threads, len(left)) for _, threads, left in seen} == {(1, 1)}, "what ends it with its parent"
    assert len({pid for _, _, left in seen for pid in left}) == 1
    assert not psutil.pid_exists(seen[0][0])


@dataclass
class FakeProcesses:
    """A stand-in for the measuring processes, with a clock that only the test advances.

    `seconds`: how long one process takes. `turns`: the numbers of turns that the processes were asked for.
    """

    seconds: float
    ratio: float
    now: float = 100.0
    turns: list[int | None] = field(default_factory=list)
    spread: float = 0.001

    def __call__(self, index: int, turns: int | None, deadline: float) -> Sample | None:
        self.turns.append(turns)
        self.now += self.seconds
        if self.now > deadline:
            return None
        load = Load(0.0, 0.0, 1.0, cpus=2, threads=1, seconds=0.01, disturbed=False)
        noisy = 1.0 + self.spread * (index % 3 - 1)
        taken = tuple(Turn(k % 2, 0.001 if k % 2 else 0.001 * self.ratio * noisy, 0.0) for k in range(4))
        return Sample(taken, load, loading=self.seconds / 2, measuring=self.seconds / 2)


@pytest.fixture
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], FakeProcesses]:
    def create(seconds: float, ratio: float) -> FakeProcesses:
        fake = FakeProcesses(seconds, ratio)
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: fake.now))
        monkeypatch.setattr(processes.FreshProcesses, "__init__", lambda self, setup: None)
        monkeypatch.setattr(processes.FreshProcesses, "__exit__", lambda self, *error: None)
        monkeypatch.setattr(processes.FreshProcesses, "sample", lambda self, *asked: fake(*asked))
        return fake

    return create


@pytest.mark.parametrize("limit", [0.5, 4.0, 10.0, 31.0, 100.0])
def test_what_would_not_be_over_in_time_is_not_begun(
    limit: float, fake_processes: Callable[[float, float], FakeProcesses]
) -> None:
    """A process takes one second, and both models are equally fast."""
    clock = fake_processes(1.0, 1.0)
    result = measure_in_fresh_processes(
        matmuls(1), matmuls(1), feeds(), deciding=Deciding(lambda: True), time_limit=limit
    )
    assert clock.now - 100.0 <= max(1.1 * limit, 1.0)
    assert result.processes <= limit
    assert (result.verdict is Verdict.TOO_FEW) == (limit < 3)


def test_what_is_decided_ends_it(fake_processes: Callable[[float, float], FakeProcesses]) -> None:
    """A clear decision takes some seconds of a time limit of an hour."""
    clock = fake_processes(0.1, 1.5)
    result = measure_in_fresh_processes(
        matmuls(1), matmuls(1), feeds(), deciding=Deciding(lambda: True), time_limit=3600.0
    )
    assert result.verdict is Verdict.FASTER
    assert result.speedup is not None
    assert result.speedup.median == pytest.approx(1.5, rel=0.01)
    assert clock.now - 100.0 < 10.0


@pytest.mark.parametrize(("ratio", "spread", "patient"), [(1.0035, 0.002, False), (1.05, 0.1, True)])
def test_patience_is_for_those_with_neighbours(
    ratio: float, spread: float, patient: bool, fake_processes: Callable[[float, float], FakeProcesses]
) -> None:
    """Both cases are undecided at the first analyses. Measuring then ends after the patience, unless the estimates
    differ much from each other."""
    clock = fake_processes(0.5, ratio)
    clock.spread = spread
    measure_in_fresh_processes(
        matmuls(1), matmuls(1), feeds(), deciding=Deciding(lambda: True, patience=5.0), time_limit=60.0
    )
    assert clock.now - 100.0 < 60.0
    assert (clock.now - 100.0 > 7.0) is patient


def test_the_time_of_the_check_is_kept_for_it(
    fake_processes: Callable[[float, float], FakeProcesses],
) -> None:
    clock = fake_processes(1.0, 1.5)
    began: list[float] = []

    def check() -> bool:
        began.append(clock.now - 100.0)
        clock.now += 30.0
        return True

    result = measure_in_fresh_processes(
        matmuls(1), matmuls(1), feeds(), deciding=Deciding(check, 30.0), time_limit=50.0
    )
    assert began[0] <= 20.0
    assert result.verdict is Verdict.FASTER
    assert result.speedup is not None
    assert clock.now - 100.0 <= 51.0


def test_a_decision_that_needs_all_its_time_leaves_that_of_the_check(
    fake_processes: Callable[[float, float], FakeProcesses],
) -> None:
    clock = fake_processes(1.0, 1.004)
    measure_in_fresh_processes(
        matmuls(1), matmuls(1), feeds(), deciding=Deciding(lambda: True, 40.0), time_limit=50.0
    )
    assert 5.0 < clock.now - 100.0 <= 10.0


@pytest.mark.parametrize(
    ("noise", "start", "each", "left", "turns"),
    [
        (0.0, 0.1, 0.004, 30.0, 12),  # little noise: enough for a robust median
        (0.1, 0.1, 0.004, 30.0, 50),  # sqrt(variance within / between * start / each)
        (0.1, 0.7, 0.1, 25.0, 14),  # 12 processes
        (0.1, 2.1, 0.3, 24.0, 8),  # as long as starting
        (0.1, 2.1, 0.3, 20.0, 6),  # 5 processes
        (0.1, 2.1, 0.3, 9.0, 4),  # fewer in any case
    ],
)
def test_turns_of_a_process(noise: float, start: float, each: float, left: float, turns: int) -> None:
    assert processes._turns(noise, start, each, left, 4) == turns


def test_ended_processes_are_not_asked_again(fake_processes: Callable[[float, float], FakeProcesses]) -> None:
    """A process that exceeds its time is killed, together with the fork server. No further sample may be asked for,
    although the check afterwards leaves time for it."""
    clock = fake_processes(1.0, 1.5)
    asked: list[Sample | None] = []
    create = type(clock).__call__

    def once_slow(self: FakeProcesses, index: int, turns: int | None, deadline: float) -> Sample | None:
        assert None not in asked
        if index == 4:
            self.now = deadline + 0.1
            asked.append(None)
            return None
        asked.append(create(self, index, turns, deadline))
        return asked[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeProcesses, "__call__", once_slow)
        result = measure_in_fresh_processes(
            matmuls(1), matmuls(1), feeds(), deciding=Deciding(lambda: True, 30.0), time_limit=45.0
        )
    assert asked[-1] is None
    assert result.verdict is Verdict.FASTER
    assert result.speedup is None


def test_what_a_child_cannot_load_is_said_as_here() -> None:
    with pytest.raises(BackendError, match="ONNX Runtime cannot load") as caught:
        measure_in_fresh_processes(b"bad", matmuls(1), feeds(), time_limit=10.0)
    assert "\n" not in str(caught.value)


def unprepared(setup: Setup) -> None:
    raise ImportError("no such worker")


class Aborting:
    def do(self, order: object) -> None:
        os.abort()


def test_a_crash_is_reported_with_what_the_server_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "prepare", unprepared)
    with pytest.raises(BackendError, match=r"a measuring process ended .*: ImportError: no such worker"):
        measure_in_fresh_processes(matmuls(1), matmuls(1), feeds(), time_limit=10.0)


def test_a_child_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server survives its child and reports the signal."""
    monkeypatch.setattr(processes, "Sampler", Aborting)
    with pytest.raises(BackendError, match=r"^a measuring process ended by SIGABRT"):
        measure_in_fresh_processes(matmuls(1), matmuls(1), feeds(), time_limit=10.0)


def test_a_child_that_takes_too_long_is_ended() -> None:
    start = time.monotonic()
    result = measure_in_fresh_processes(
        matmuls(1), matmuls(1), feeds(), deciding=Deciding(lambda: True), time_limit=0.01
    )
    assert result.verdict is Verdict.TOO_FEW
    assert result.before is None
    assert time.monotonic() - start < 5


def test_an_interrupt_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[int] = []

    def interrupted(self: Forks, *_: object) -> None:
        servers.append(self.server.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(Forks, "worker", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_in_fresh_processes(matmuls(1), matmuls(1), feeds(), time_limit=30.0)
    assert not psutil.pid_exists(servers[0])


def test_an_options_object_is_used_in_this_process() -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    result = measure_in_fresh_processes(
        matmuls(1), matmuls(1), feeds(), time_limit=1.0, session_options=options
    )
    assert not result.fresh_processes
    assert result.threads == 1


def test_texts_travel() -> None:
    text = {"x": np.array(["a", "größer"], dtype=object)}
    result = measure_in_fresh_processes(strings(), strings(), text, threads=1, time_limit=3.0)
    assert result.pairs > 0
