"""Jobs on workers of another place: a node that is not like this machine makes no result of a batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import xrlflow
from tests.batch.conftest import FAST
from xrlflow.batch import Elsewhere, Job, Row, run
from xrlflow.workers import InProcess, Processes

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("reference_machine")]


class OwnDisk:
    """A node that has the models, and an output folder of its own."""

    def do(self, order: Job) -> Row:
        return run(replace(order, root=f"{order.root}-of-the-node"))


class Greedy:
    """A worker that is killed over models of this name, as by a machine without memory."""

    def do(self, order: Job) -> Row:
        if order.name == "big.onnx":
            os.kill(os.getpid(), signal.SIGKILL)
        return run(order)


def test_what_a_node_keeps_for_itself_is_not_done(
    put: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("in/x.onnx")
    monkeypatch.setattr("xrlflow.batch.elsewhere.JobHandler", OwnDisk)
    monkeypatch.setattr("xrlflow.batch.elsewhere._VISIBLE", 0.2)
    batch = xrlflow.optimize_all(tmp_path / "in", tmp_path / "out", executor=Elsewhere(InProcess()), **FAST)
    assert batch.rows[0].error == (
        f"a node has done it, and this machine does not see its files: {tmp_path / 'out'} has to be a folder that all "
        "nodes share"
    )


def test_a_model_that_ends_its_workers_ends_no_batch(
    put: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("big", "x", "y"):
        put(f"in/{name}.onnx")
    monkeypatch.setattr("xrlflow.batch.elsewhere.JobHandler", Greedy)
    batch = xrlflow.optimize_all(tmp_path / "in", tmp_path / "out", executor=Elsewhere(Processes(1)), **FAST)
    assert [row.done for row in batch.rows] == [False, True, True]
    assert "3 workers were lost over one task" in str(batch.rows[0].error)
