"""Workers in processes of this machine: what they say of their end, and that nothing stays behind."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.workers.handlers import Doing, Doubler, Meeting, aborting, made_later, never_made
from xrlflow.workers import (
    Forks,
    Processes,
    ProcessWorker,
    Terms,
    WorkerError,
    WorkerFactory,
    WorkerLate,
    WorkerLost,
    WorkerPool,
    tell,
)
from xrlflow.workers.channel import Channel
from xrlflow.workers.process import environment, last_words, manner

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(time.monotonic) as place:
        yield place


@pytest.fixture(params=["started", "forked"])
def place(request: pytest.FixtureRequest, forks: Forks) -> WorkerFactory:
    return Processes() if request.param == "started" else forks


@pytest.mark.parametrize(
    ("order", "how"),
    [
        ("abort", r"by SIGABRT: terminate called after throwing an instance of 'std::x' what\(\): no luck$"),
        ("leave", "with status 3: the last line$"),
        ("kill", "by SIGKILL: there may not be enough memory$"),
    ],
)
def test_a_lost_worker_says_how_it_ended(place: WorkerFactory, order: str, how: str) -> None:
    worker = place.worker(Doing, "worker 7")
    worker.begin(order)
    with pytest.raises(WorkerLost, match=f"worker 7 ended {how}") as lost:
        worker.reply()
    with pytest.raises(WorkerLost, match=f"worker 7 ended {how}"):
        worker.begin("process")
    assert f"worker 7 ended {lost.value.how}" == str(lost.value)
    worker.close()


@pytest.mark.quick
def test_an_error_ends_no_worker(place: WorkerFactory) -> None:
    worker = place.worker(Doing, "worker 7")
    worker.begin("fail")
    with pytest.raises(WorkerError, match="worker 7 failed: KeyError: 'a mistake'") as failed:
        worker.reply()
    assert not isinstance(failed.value, WorkerLost)
    worker.begin("process")
    pid = worker.reply()
    assert psutil.pid_exists(pid)
    worker.close()
    assert not psutil.pid_exists(pid)


def test_an_answer_that_cannot_be_sent_is_an_error(place: WorkerFactory) -> None:
    worker = place.worker(Doing, "worker 7")
    worker.begin("lambda")
    with pytest.raises(WorkerError, match="pickle"):
        worker.reply()
    worker.close()


def test_an_answer_that_cannot_be_read_ends_the_worker(place: WorkerFactory) -> None:
    """A later one would be taken for the reply to another task."""
    worker = place.worker(Doing, "worker 7")
    worker.begin("unreadable")
    await_that(lambda: worker.closed)  # type: ignore[attr-defined]
    with pytest.raises(WorkerError, match="worker 7 failed: its reply cannot be read: KeyError: 'it cannot"):
        worker.reply()
    with pytest.raises(WorkerLost, match="worker 7 is closed"):
        worker.begin("process")
    with WorkerPool(place, Doing, 2) as pool:
        with pytest.raises(WorkerError, match="cannot be read"):
            list(pool.work(iter(["process", "unreadable"])))
        assert len(list(pool.work(iter(["process"] * 3)))) == 3


LARGE = bytes(10_000_000)
"""More than a socket holds."""


def test_there_is_one_large_task_at_a_time(place: WorkerFactory) -> None:
    worker = place.worker(Doubler, "worker 7")
    for _ in range(2):
        worker.begin(LARGE)
        with pytest.raises(WorkerError, match="worker 7 has a task already"):
            worker.begin(LARGE)
        assert len(worker.reply()) == 2 * len(LARGE)
    worker.close()


def test_workers_read_large_tasks_at_the_same_time(tmp_path: Path, place: WorkerFactory) -> None:
    """Also while this process waits for the reply of one of them, which here needs the other one."""
    workers = [
        place.worker(partial(Meeting, str(tmp_path), number), f"worker {number}") for number in range(2)
    ]
    for worker in workers:
        worker.begin(LARGE)
    assert [worker.reply() for worker in workers] == ["met", "met"]
    for worker in workers:
        worker.close()


def test_a_large_task_waits_for_no_start(place: WorkerFactory) -> None:
    worker = place.worker(never_made, "worker 7")
    worker.begin(LARGE)
    with pytest.raises(WorkerLate):
        worker.reply(time.monotonic() + 0.1)  # type: ignore[call-arg]
    with (
        WorkerPool(place, never_made, 1, terms=Terms(start=0.2)) as pool,
        pytest.raises(WorkerError, match=r"it did not start in 0\.2 s"),
    ):
        list(pool.work(iter([LARGE])))


def test_a_message_may_arrive_in_parts() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with theirs:
        other = Connection(os.dup(theirs.fileno()))
        other.send_bytes(b"one")
        parts = struct.pack("!iQ", -1, 3) + b"two" + struct.pack("!i", 5) + b"three"
        found = channel.receive()
        for number in range(len(parts)):
            theirs.sendall(parts[number : number + 1])
            found += channel.receive()
        assert found == [b"one", b"two", b"three"]
        channel.send(b"four")
        assert other.recv_bytes() == b"four"
        other.close()
    assert not channel.ended
    assert channel.receive() == []
    assert channel.ended
    channel.send(LARGE)  # to nobody
    channel.close()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("one\n\ntwo\n", "two"),
        ("", ""),
        (
            "F1125 10:31:03.766393   11234 file.cc:744] Check failed: x\n  @ 0x1 somewhere\n",
            "Check failed: x",
        ),
        ("Traceback (most recent call last):\n  x\nValueError: no\n", "ValueError: no"),
        ("Fatal Python error: Aborted\n\nCurrent thread\n  File x\n", "Fatal Python error: Aborted"),
        ("\x1b[31mred\n", r"\x1b[31mred"),
    ],
)
def test_the_last_words_are_the_last_error(log: str, said: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(log.encode())
        assert last_words(file) == said


def test_signals_have_names() -> None:
    assert manner(-signal.SIGILL) == "by SIGILL"
    assert manner(-63) == "by signal 63"
    assert manner(None) == "without a status"


def test_what_is_late_is_ended_with_what_it_started(tmp_path: Path) -> None:
    worker = Processes().worker(Doing, "worker 7")
    worker.begin(tmp_path / "pids")
    await_that((tmp_path / "pids").exists)
    with pytest.raises(WorkerLate, match="worker 7 was ended: its time was over"):
        worker.reply(time.monotonic() + 0.1)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    await_that(lambda: not any(map(runs, pids)))


def test_a_forked_worker_that_is_late_is_ended(forks: Forks) -> None:
    worker = forks.worker(Doing, "worker 7")
    worker.begin("process")
    pid = worker.reply()
    worker.begin("sleep")
    with pytest.raises(WorkerLate):
        worker.reply(time.monotonic() + 0.1)
    assert not psutil.pid_exists(pid)


def test_crews_give_up_what_takes_too_long_or_ends_its_worker(place: WorkerFactory) -> None:
    terms = Terms(seconds=1.0, attempts=1)
    with WorkerPool(place, Doing, 2, "worker", terms=terms) as pool:
        result = dict(
            pool.work(iter(["process", "abort", "sleep", "process"]), fallback=lambda order, error: error)
        )
    assert isinstance(result[0], int)
    assert isinstance(result[3], int)
    assert "SIGABRT" in result[1].how
    assert isinstance(result[2], WorkerLate)
    assert str(result[2]).endswith("took longer than 1 s")


def test_worn_workers_are_replaced(place: WorkerFactory) -> None:
    with WorkerPool(place, Doing, 1, terms=Terms(uses=2)) as pool:
        pids = [pid for _, pid in pool.work(iter(["process"] * 5))]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


def test_an_idle_worker_that_was_killed_is_nobodys_fault(place: WorkerFactory) -> None:
    with WorkerPool(place, Doing, 1, terms=Terms(attempts=1)) as pool:
        pool.settle()
        (worker,) = pool.workers
        assert isinstance(worker, ProcessWorker)
        ((_, pid),) = pool.work(iter(["process"]))
        os.kill(pid, signal.SIGKILL)
        await_that(lambda: worker.closed)  # a busy server may not have closed its copy of the socket yet
        ((_, other),) = pool.work(iter(["process"]))
        assert other != pid
        assert pool.workers != [worker]


@pytest.mark.parametrize(
    ("make", "why"),
    [(aborting, "no worker can be started: worker . ended"), (never_made, "it did not start in 0.2 s")],
)
def test_workers_that_do_not_start_are_an_error(place: WorkerFactory, make: Any, why: str) -> None:
    with WorkerPool(place, make, 1, terms=Terms(start=0.2 if make is never_made else 60.0)) as pool:
        with pytest.raises(WorkerError, match=why):
            list(pool.work(iter(["process"])))
        with pytest.raises(WorkerError, match=why):
            pool.settle()


def test_what_is_told_is_heard_and_a_sign_of_life() -> None:
    heard: list[tuple[int, str]] = []

    def note(number: int, content: str) -> float:
        heard.append((number, content))
        return 5.0

    with WorkerPool(Processes(), Doing, 1, terms=Terms(seconds=0.5)) as pool:
        ((_, answer),) = pool.work(iter(["tell"]), on_message=note)
    assert answer == "told"
    assert heard == [(0, "one"), (0, "two")]
    tell("nobody")  # of a process that is no worker


def test_a_hand_that_is_unable_is_not_replaced(tmp_path: Path, place: WorkerFactory) -> None:
    with WorkerPool(place, partial(Doing, str(tmp_path / "gone")), 2) as pool:
        result = dict(pool.work(iter(["unable", "process", "process", "unable"])))
        assert result[0] == result[3] == "able"
        assert pool.count == 1
        (tmp_path / "gone").unlink()
        with pytest.raises(WorkerError, match=r"^it is gone$"):
            list(pool.work(iter(["unable"])))


def test_what_is_scarce_is_not_used_up(tmp_path: Path) -> None:
    terms = Terms(seconds=1.0, scarce=True)
    with WorkerPool(Processes(), partial(Doing, str(tmp_path / "slow")), 2, terms=terms) as pool:
        assert list(pool.work(iter(["once"]))) == [(0, "in time")]
        assert pool.count == 1


HOLDER = """
import os, signal, sys, time
from functools import partial
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from tests.workers.handlers import Doing
from xrlflow.workers import Forks, Processes
place = Processes(patience=10.0) if sys.argv[1] == "started" else Forks(time.monotonic)
worker = place.worker(partial(Doing, "left"), "it")
worker.begin("leave behind")
print(worker.reply(), flush=True)
worker.begin("busy")
worker.reply()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("kind", ["started", "forked"])
def test_nothing_stays_when_the_parent_ends(kind: str, how: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, kind], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=environment(TMPDIR=str(tmp_path)),
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        pids = [int(pid) for pid in holder.stdout.readline().split()]
        assert len(pids) == 2
        assert list(tmp_path.iterdir())
        holder.send_signal(how)
        assert holder.wait(30.0) != 0
    await_that(lambda: not any(map(runs, pids)))
    await_that(lambda: not list(tmp_path.iterdir()))


HELD = """
import os, signal, sys, time
from tests.workers.handlers import Doing, hold_the_lock
from xrlflow.workers import Forks, Processes
if sys.argv[1] == "preparing":
    place = Forks(hold_the_lock)
    pid = place.server.pid
else:
    place = {"started": Processes, "patient": lambda: Processes(patience=0.2), "forked": lambda: Forks(time.monotonic)}
    place = place[sys.argv[1]]()
    worker = place.worker(Doing, "it")
    worker.begin("process")
    pid = worker.reply()
    worker.begin("hold the lock")
print(pid, flush=True)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["started", "patient", "forked", "preparing"])
def test_what_holds_the_lock_ends_with_its_parent(kind: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HELD, kind],
        capture_output=True,
        text=True,
        env=environment(TMPDIR=str(tmp_path)),
    )
    pid = int(ran.stdout)
    try:
        await_that(lambda: not runs(pid), 20.0)
        await_that(lambda: not list(tmp_path.iterdir()))
    finally:
        if runs(pid):
            os.kill(pid, signal.SIGKILL)


KILLED = """
import os, signal, time
from tests.workers.handlers import Doing
from xrlflow.workers import Forks, Processes
workers = [Processes(patience=2.0).worker(Doing, "it") for _ in range(3)]
place = Forks(time.monotonic)
print(len(os.listdir(os.environ["TMPDIR"])), *(w.process.pid for w in workers), place.server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_stays_of_what_was_just_started(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, env=environment(TMPDIR=str(tmp_path))
    )
    folders, *pids = map(int, ran.stdout.split())
    assert folders == len(pids) == 4
    await_that(lambda: not any(map(runs, pids)))
    await_that(lambda: not list(tmp_path.iterdir()))


def test_a_place_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for attempt in (
        lambda: Forks(lambda: None),
        lambda: Processes(patience=1.0).worker(lambda: Doing(), "it"),
    ):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            attempt()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as if the disk were full
    try:
        with pytest.raises(WorkerError, match=r"^no process can be started \(File too large\)$"):
            Forks(time.monotonic)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    for attempt in (lambda: Forks(time.monotonic), lambda: Processes(patience=1.0).worker(Doing, "it")):
        with pytest.raises(WorkerError, match=r"^no process can be started \(No such file or directory\)$"):
            attempt()


def test_a_forked_worker_that_never_was_ready_is_ended(forks: Forks) -> None:
    worker = forks.worker(Doing, "worker 7")
    worker.begin("process")
    worker.reply()
    server = psutil.Process(forks.server.pid)
    others = set(server.children()) - {psutil.Process(worker.process.pid)}
    for make in (never_made, Doing):
        forks.worker(make, "another").close()
    worker.close()
    await_that(lambda: set(server.children()) <= others)


def test_workers_that_fail_together_failed_once(tmp_path: Path, place: WorkerFactory) -> None:
    with WorkerPool(place, partial(made_later, str(tmp_path), 3), 3) as pool:
        assert len(dict(pool.work(iter(["process"] * 3)))) == 3
        assert len(list(tmp_path.iterdir())) > 3


def test_a_tidy_worker_unwinds(tmp_path: Path) -> None:
    worker = Processes(patience=10.0).worker(partial(Doing, str(tmp_path)), "it")
    worker.begin("unwind")
    await_that((tmp_path / "begun").exists)
    worker.close()
    assert (tmp_path / "unwound").exists()


def test_a_hand_of_the_program_itself(tmp_path: Path) -> None:
    """As with processes that multiprocessing spawns."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from xrlflow.workers import Forks, Processes\n"
        "class Handler:\n"
        "    def do(self, order): return 2 * order\n"
        "def nothing(): pass\n"
        "if __name__ == '__main__':\n"
        "    for place in (Processes(), Forks(nothing)):\n"
        "        worker = place.worker(Handler, 'it')\n"
        "        worker.begin(21)\n"
        "        print(worker.reply())\n"
        "        worker.close()\n"
        "        place.close()\n"
    )
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment(), check=True
    )
    assert (ran.stdout, ran.stderr) == ("42\n42\n", "")


def test_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object, **given: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", none)
    with pytest.raises(
        WorkerError, match=r"^no process can be started \(Resource temporarily unavailable\)$"
    ):
        Processes().worker(Doing, "it")


def test_a_killed_server_is_an_error_and_no_hang() -> None:
    with Forks(time.monotonic) as place, WorkerPool(place, Doing, 1) as pool:
        os.kill(place.server.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"no worker can be started: worker 2 ended by SIGKILL"):
            list(pool.work(iter(["process"])))


def test_a_server_that_cannot_prepare_says_why() -> None:
    with (
        Forks(never_prepared) as place,
        WorkerPool(place, Doing, 1) as pool,
        pytest.raises(WorkerError, match="ValueError: not prepared"),
    ):
        list(pool.work(iter(["process"])))


OWNED = """
import os, time
from tests.workers.handlers import Doing
from xrlflow.workers import Forks, Processes, WorkerError
with Forks(time.monotonic) as forks:
    workers = [place.worker(Doing, "it") for place in (Processes(), forks)]
    for worker in workers:
        worker.begin("process")
    pids = [worker.reply() for worker in workers]
    copy = os.fork()
    if copy == 0:
        for attempt in (lambda: forks.worker(Doing, "new"), *(lambda w=w: w.begin("process") for w in workers)):
            try:
                attempt()
            except WorkerError as error:
                print(error, flush=True)
        for worker in workers:
            worker.close()
        forks.close()
        os._exit(0)
    os.waitpid(copy, 0)
    for worker in workers:
        worker.begin("process")
    assert [worker.reply() for worker in workers] == pids
"""


def test_a_forked_copy_leaves_workers_alone() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", OWNED],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
        timeout=120,
    )
    belongs = "it belongs to the process that this one was forked from\n"
    assert (
        ran.stdout == f"no process can be started (this one was forked from the one that can)\n{belongs * 2}"
    )


def never_prepared() -> None:
    raise ValueError("not prepared")


def runs(pid: int) -> bool:
    """Whether a process is there and is not only a status that nobody has asked for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def await_that(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
