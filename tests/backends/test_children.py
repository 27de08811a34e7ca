"""Processes of our own: what they are given, and that they have this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import xrlflow
from xrlflow.backends.children import Child, ChildDied, serve_in_child
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.common import deadline

pytestmark = pytest.mark.process


def tell(descriptor: int, *texts: str) -> None:
    """What a child does here."""
    print("the last words", file=sys.stderr)
    found = {
        "texts": texts,
        "package": xrlflow.__file__,
        "path": sys.path,
        "group": os.getpgrp(),
        "process": os.getpid(),
        "variables": [os.environ.get("XRLFLOW_HERE"), os.environ.get("XRLFLOW_THERE")],
    }
    os.write(descriptor, json.dumps(found).encode())


def test_a_child_has_its_arguments_this_package_and_a_group_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise ImportError('not of the current folder')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "inherited"))
    monkeypatch.setenv("XRLFLOW_HERE", "inherited")
    texts = ("it's", 'a "folder"\n', str(tmp_path))
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as log, open(ours, "rb") as answer:
        process = serve_in_child(tell, theirs, *texts, log=log, XRLFLOW_THERE="new")
        os.close(theirs)
        told = answer.read()
        assert process.wait() == 0
        log.seek(0)
        assert log.read() == b"the last words\n"
    found = json.loads(told)
    assert tuple(found["texts"]) == texts
    assert found["package"] == xrlflow.__file__
    assert str(tmp_path / "inherited") in found["path"]
    assert found["process"] == found["group"] == process.pid
    assert found["variables"] == ["inherited", "new"]


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
    """Start a process, say which it is, and never end."""
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
    for pid in map(int, said.read_text().split()):
        assert not _runs(pid)


def test_an_interrupt_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Child() as child:
        assert child.call(double, 1) == 2
        process = child._process
        assert process is not None
        held = child._connection
        assert held is not None

        class Interrupted:
            def send_bytes(self, order: bytes) -> None: ...

            def poll(self, seconds: float | None) -> bool:
                raise KeyboardInterrupt

            def close(self) -> None:
                held.close()  # not before: without it the child ends, and another would be started

        monkeypatch.setattr(child, "_connection", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            child.call(double, 2)
        assert process.returncode is not None


def _runs(pid: int) -> bool:
    """Whether a process is there and is not only a status that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
