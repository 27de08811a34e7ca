"""Batches in processes of their own: crashes, Ctrl-C, and what is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import xrlflow
from tests.batch.conftest import FAST
from tests.levels import whole
from xrlflow.batch import Processes
from xrlflow.options import OptionError
from xrlflow.storage.exclusive import VARIABLE
from xrlflow.storage.files import UNFINISHED
from xrlflow.workers.process import environment

pytestmark = pytest.mark.process

# Rules of a user's own are run in the process of the job: what this one does depends on files beside it.
RULES = """
import os, pathlib, signal, tempfile, time
RULES = []
here = pathlib.Path(__file__).parent
(here / "process").write_text(str(os.getpid()))
if (here / "crash").exists():
    (here / "crash").unlink()
    os.kill(os.getpid(), signal.SIGSEGV)
if (here / "hang").exists() and (here / "once").exists():
    tempfile.mkdtemp(prefix="left-")
    time.sleep(600)
(here / "once").write_text("")
"""
QUICK = [
    "--search", "greedy", "--cost", "roofline", "--backend", "onnxruntime", "--no-measure", "--time-limit", "20",
    "--trust-rules", "--rules",
]  # fmt: skip


@pytest.fixture
def folder(put: Callable[..., Path], tmp_path: Path) -> Path:
    put("in/a.onnx", 1.0)
    put("in/b.onnx", 2.0)
    (tmp_path / "rules.py").write_text(RULES)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_a_crash_ends_one_job(folder: Path) -> None:
    (folder / "crash").touch()
    batch = xrlflow.optimize_all(
        folder / "in", folder / "out", rules=folder / "rules.py", trust_rules=True, **FAST
    )
    first, second = batch.rows
    assert first.error is not None
    assert first.error.startswith("its process ended by SIGSEGV")
    assert second.error is None
    with pytest.raises(OptionError, match="workers 0 is not positive"):
        Processes(0)


def test_a_hung_job_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.batch.processes._SILENCE", 12.0)
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    (folder / "hang").touch()
    first, second = xrlflow.optimize_all(
        folder / "in",
        folder / "out",
        rules=folder / "rules.py",
        trust_rules=True,
        **{**FAST, "time_limit": 1.0},
    ).rows
    assert first.error is None
    assert str(second.error).startswith("it has not gone on for 12 s, and was ended")
    assert not psutil.pid_exists(int((folder / "process").read_text()))
    assert not list((folder / "tmp").iterdir())


def test_where_no_process_can_be_started_jobs_fail(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: object, **given: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", none)
    folder = put("in/a.onnx").parents[1]
    (row,) = xrlflow.optimize_all(folder / "in", folder / "out", **FAST).rows
    assert row.error == "no process can be started (Resource temporarily unavailable)"


class Command:
    """`xrlflow optimize-all` of the folder, which hangs at its second model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "hang").touch()
        command = [sys.executable, "-m", "xrlflow.cli", "optimize-all", "in", "-o", "out", *QUICK, "rules.py"]
        self.process = subprocess.Popen(
            command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(TMPDIR=str(folder / "tmp")),
        )  # fmt: skip

    def wait_until_it_hangs(self) -> psutil.Process:
        """Returns the process of the job."""
        until = time.monotonic() + 240
        while not (self.folder / "out" / "a.onnx.json").exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)
        return psutil.Process(int((self.folder / "process").read_text()))

    def go_on(self) -> dict[str, object]:
        """Run it again, to its end."""
        (self.folder / "hang").unlink()
        command = [*self.process.args, "--json"]  # type: ignore[misc]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=300, check=True, env=environment()
        )  # fmt: skip
        data: dict[str, object] = json.loads(done.stdout)
        return data


@pytest.fixture
def command(folder: Path, python_handles_interrupts: None) -> Iterator[Command]:
    running = Command(folder)
    yield running
    running.process.kill()
    running.process.communicate()


@pytest.mark.parametrize("number", whole([signal.SIGINT, signal.SIGKILL], (signal.SIGKILL,)))
def test_what_is_ended_goes_on(command: Command, number: int) -> None:
    worker = command.wait_until_it_hangs()
    command.process.send_signal(number)
    _, output = command.process.communicate(timeout=120)
    worker.wait(timeout=60)
    assert not list((command.folder / "tmp").iterdir())
    assert command.process.returncode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert output.endswith(
            "interrupted: 1 of 2 models are done and kept: run the same command to go on\n"
        )
    assert "Traceback" not in output
    if number == signal.SIGKILL:  # the other leaves the same behind
        data = command.go_on()
        assert (data["done"], data["earlier"], data["failed"]) == (2, 1, 0)
    assert not [p for p in (command.folder / "out").rglob("*") if p.name.startswith(UNFINISHED)]


def test_jobs_have_the_lock_of_the_driver(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their folder of temporary files is their own, and a lock in it would keep nobody out."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen: list[dict[str, str]] = []

    def none(*arguments: object, env: dict[str, str], **given: object) -> None:
        seen.append(env)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", none)
    xrlflow.optimize_all(put("in/a.onnx").parent, tmp_path / "out", executor=Processes(1), **FAST)
    assert {item[VARIABLE] for item in seen} == {str(tmp_path / "xrlflow.measuring")}
    assert all(item["TMPDIR"] != str(tmp_path) for item in seen)
