"""Child processes: their environment, their calls, and that they import this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import xrlflow
from xrlflow.backends.children import Child, ChildDied
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.common import deadline

pytestmark = pytest.mark.process


def surroundings() -> dict[str, Any]:
    """The modules, paths, process ids and variables that a child process sees."""
    return {
        "package": xrlflow.__file__,
        "json": json.__file__,
        "path": sys.path,
        "processes": (os.getpid(), os.getpgrp(), os.getsid(0)),
        "variables": (os.environ.get("XRLFLOW_HERE"), os.environ.get("XRLFLOW_THERE")),
    }


def test_a_child_has_this_package_and_a_session_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise ImportError('not of the current folder')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "inherited"))
    monkeypatch.syspath_prepend(str(tmp_path / "ours"))
    monkeypatch.setenv("XRLFLOW_HERE", "inherited")
    with Child(XRLFLOW_THERE="new") as child:
        result = child.call(surroundings)
    assert result["package"] == xrlflow.__file__
    assert result["json"] == json.__file__
    assert str(tmp_path / "ours") in result["path"]
    assert len(set(result["processes"])) == 1
    assert result["processes"][0] != os.getpid()
    assert result["variables"] == ("inherited", "new")


def double(number: int) -> int:
    return 2 * number


def leave(status: int) -> None:
    print("no more", file=sys.stderr, flush=True)
    os._exit(status)


def refuse() -> None:
    raise BackendError("this is refused")


def fail() -> None:
    raise KeyError("a mistake")


def sleep_beside(pids: str) -> None:
    """Start another process, write both process ids to the file `pids`, and never end."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as beside:
        Path(pids).write_text(f"{os.getpid()} {beside.pid}")
        time.sleep(600)


def test_a_child_answers_calls_and_starts_again() -> None:
    with Child() as child:
        assert child.call(double, 21) == 42
        with pytest.raises(BackendError, match="this is refused"):
            child.call(refuse)
        with pytest.raises(RuntimeError, match="KeyError: 'a mistake'"):
            child.call(fail)
        with pytest.raises(ChildDied, match="with status 3: no more"):
            child.call(leave, 3)
        assert child.call(double, 4) == 8


def test_what_a_child_does_first_is_not_waited_for() -> None:
    with Child() as child:
        child.prepare(refuse)
        child.prepare(fail)
        assert child.call(double, 21) == 42
        assert child.call(double, 4) == 8


def test_large_arguments_wait_no_longer_than_the_deadline() -> None:
    with Child() as child:
        child.prepare(partial(time.sleep, 600.0))
        with deadline.within(time.monotonic() + 1.0), pytest.raises(OutOfTime):
            child.call(len, bytes(10_000_000))
        assert child.call(len, bytes(10_000_000)) == 10_000_000


def test_no_call_begins_after_its_time() -> None:
    with Child() as child, deadline.within(time.monotonic() - 1.0), pytest.raises(OutOfTime):
        child.call(double, 21)


def test_a_child_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    said = tmp_path / "pids"
    seconds = 2.0
    with Child() as child:
        while not said.exists():  # however long a process takes to start here
            seconds *= 2
            with deadline.within(time.monotonic() + seconds), pytest.raises(OutOfTime):
                child.call(sleep_beside, str(said))
    pids = [int(pid) for pid in said.read_text().split()]
    end = time.monotonic() + 30.0
    while any(map(_runs, pids)):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_interrupt_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Child() as child:
        pid = child.call(os.getpid)
        with monkeypatch.context() as patch:
            patch.setattr("xrlflow.workers.process.wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                child.call(double, 2)
        assert not _runs(pid)
        assert child.call(double, 2) == 4


def _runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
