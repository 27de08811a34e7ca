"""What a training run tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from xrlflow.learn.log import Logs, TensorBoard, Terminal


def scalars(folder: Path) -> dict[int, float]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {e.step: e.value for e in events.Scalars("return")}


def test_scalars_reach_tensorboard_and_a_resumed_run_takes_over(tmp_path: Path) -> None:
    with Logs(TensorBoard(tmp_path)) as log:
        for step in range(4):
            log.scalars({"return": float(step)}, step)
    assert scalars(tmp_path) == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    # Killed, and resumed from the checkpoint before its last two iterations.
    with Logs(TensorBoard(tmp_path, since=2)) as log:
        log.scalars({"return": 20.0}, 2)
    assert scalars(tmp_path) == {0: 0.0, 1: 1.0, 2: 20.0}


def test_a_line_each_time_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Logs(Terminal(10, {"return": "return {:.1f}", "missing": "{}"})) as log:
        log.scalars({"return": 1.25, "kl": 0.1}, 3)
    assert capsys.readouterr().err.split() == ["training", "3/10", "return", "1.2"]
