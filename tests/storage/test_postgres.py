"""Measurements on a PostgreSQL server: shared, keyed by machine, and nothing that was acknowledged is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import psutil
import psycopg
import pytest
from typer.testing import CliRunner

from tests import postgres
from tests.batch.conftest import clumsy
from tests.cost.graphs import Builder, t
from tests.cost.test_database import SAMPLE, SUBJECT
from xrlflow.cli import app
from xrlflow.cost import Roofline
from xrlflow.cost.database import Database
from xrlflow.cost.history import History
from xrlflow.doctor import disk
from xrlflow.doctor.finding import Status
from xrlflow.storage.stores import StoreError
from xrlflow.tuning.store import Record, Setting, Store
from xrlflow.workers.process import environment

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(postgres.programs() is None, reason="needs PostgreSQL: `make postgres` installs it"),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def running() -> Iterator[postgres.Server]:
    server = postgres.Server()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def server(running: postgres.Server) -> Iterator[postgres.Server]:
    """A server that runs, without tables of ours."""
    if running.process is None:
        running.start()
    execute(running, "DROP SCHEMA IF EXISTS xrlflow CASCADE")
    yield running
    if running.process is None:
        running.start()


def execute(server: postgres.Server, statement: str) -> list[Any]:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        done = connection.execute(statement)
        return done.fetchall() if done.description else []


def record(**changed: Any) -> Record:
    given = {
        "task": "t", "setting": Setting("{}", "1", "a cpu", 2), "candidate": "c", "trace": "[1]",
        "seconds": (1e-3,), "error": None, "taken": 5.0,
    }  # fmt: skip
    return Record(**{**given, **changed})


def test_prices_are_shared_and_keyed_by_machine(server: postgres.Server) -> None:
    with Database(server.url()) as one, Database(server.url()) as two:
        assert one.get(SUBJECT) is None
        one.put(SUBJECT, SAMPLE)
        assert two.get(SUBJECT) == SAMPLE
        two.put(SUBJECT, replace(SAMPLE, median=2e-3))  # the newest counts
        found = one.get(SUBJECT)
        assert found is not None
        assert found.median == 2e-3
        for other in (
            replace(SUBJECT, device="another"),
            replace(SUBJECT, threads=1),
            replace(SUBJECT, runtime="2"),
        ):
            assert one.get(other) is None
        assert len(one) == 1


def graphs() -> tuple[Any, Any]:
    found = []
    for op in ("Relu", "Tanh"):
        build = Builder()
        x = build.input(t(4, 8))
        found.append(build.graph(build.node(op, [x], t(4, 8)).id))
    return found[0], found[1]


def test_comparisons_are_shared_and_those_of_each_machine_are_kept(
    server: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrlflow.cost.history.MAX_ROWS", 3)
    before, after = graphs()
    for device in ("a cpu", "another"):
        with History(device, "r", 2, server.url()) as kept:
            for number in range(5):
                kept.keep(Roofline(), before, after, float(number), 0.01)
    for device in ("a cpu", "another"):
        with History(device, "r", 2, server.url()) as kept:
            assert [c.arrays["logs"][0] for c in kept.latest(10)] == [4.0, 3.0, 2.0]


def test_tuned_kernels_are_shared(server: postgres.Server) -> None:
    with Store(server.url()) as one, Store(server.url()) as two:
        assert one.state("a cpu") is None
        one.put(record())
        two.put(record(taken=9.0))  # the same measurement
        two.put(record(candidate="d", seconds=(5e-4, 6e-4)))
        two.put(record(candidate="e", seconds=(), error="crashed"))
        assert [r.candidate for r in one.best("t", 9)] == ["d", "c"]
        assert one.records("t")[0] == record()
        assert (len(one), one.tasks()) == (3, ["t"])
        assert one.state("a cpu") == "3 records"
        assert one.state("another") is None


WRITER = """
import sys
from dataclasses import replace
from tests.cost.test_database import SAMPLE, SUBJECT
from xrlflow.cost.database import Database
url, writer, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Database(url) as database:
    for i in range(count):
        database.put(replace(SUBJECT, threads=writer, operands=str(i)), replace(SAMPLE, count=i))
        print(i, flush=True)
"""


def writer(server: postgres.Server, number: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", WRITER, server.url(), str(number), str(count)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment())


def test_processes_share_a_server_from_the_start_and_one_may_be_killed(server: postgres.Server) -> None:
    writers = [writer(server, 1, 60), writer(server, 2, 60), writer(server, 3, 1_000_000)]
    victim = writers.pop()
    assert victim.stdout is not None
    said = [victim.stdout.readline() for _ in range(50)]
    victim.kill()
    said += victim.stdout.readlines()
    acknowledged = max(int(line) for line in said if line.endswith("\n"))
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    victim.wait()
    with Database(server.url()) as database:
        for threads, count in ((1, 60), (2, 60), (3, acknowledged + 1)):
            for i in range(count):
                found = database.get(replace(SUBJECT, threads=threads, operands=str(i)))
                assert found is not None
                assert found.count == i
        assert len(database) - 120 - acknowledged in (1, 2)  # the last one may not have been acknowledged


def test_threads_share_a_connection(server: postgres.Server) -> None:
    with Database(server.url()) as database, warnings.catch_warnings():
        warnings.simplefilter("error")
        missing: list[int] = []

        def work(number: int) -> None:
            for i in range(30):
                subject = replace(SUBJECT, threads=number, operands=str(i))
                database.put(subject, SAMPLE)
                if database.get(subject) != SAMPLE:
                    missing.append(i)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not missing
        assert len(database) == 120
        assert execute(
            server, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'xrlflow'"
        ) == [(1,)]


def test_a_fork_makes_a_connection_of_its_own(server: postgres.Server) -> None:
    with Store(server.url()) as store:
        store.put(record(candidate="parent"))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                store.put(record(candidate="child"))
                status = 0 if len(store) == 2 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(store) == 2


def test_a_full_disk_is_said_once_and_nothing_is_lost(server: postgres.Server) -> None:
    with Store(server.url()) as store:
        store.put(record(candidate="early", taken=1.0))
        execute(
            server,
            "CREATE FUNCTION xrlflow.full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION"
            " 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$;"
            "CREATE TRIGGER no_space BEFORE INSERT ON xrlflow.record FOR EACH ROW EXECUTE FUNCTION xrlflow.full()",
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(4):
                store.put(record(candidate=str(number), taken=2.0 + number))
        assert len(caught) == 1
        assert "measurements are kept in memory until they can be written" in str(caught[0].message)
        assert "No space left" in str(caught[0].message)
        assert [r.candidate for r in store.records("t")] == ["early", "0", "1", "2", "3"]
        assert len(store) == 5
        with Store(server.url()) as other:
            assert [r.candidate for r in other.records("t")] == ["early"]
        execute(
            server, "DROP TRIGGER no_space ON xrlflow.record"
        )  # somebody made room: it is written at the end
    with Store(server.url()) as store:
        assert len(store) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_server_that_goes_away_loses_nothing(
    server: postgres.Server, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    database = Database(server.url())
    database.put(SUBJECT, SAMPLE)
    server.stop(number)
    later = replace(SUBJECT, operands="later")
    with pytest.warns(RuntimeWarning, match="kept in memory until they can be written") as caught:
        database.put(later, SAMPLE)
    assert len(caught) == 1
    assert postgres.PASSWORD not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert database.get(later) == SAMPLE
        assert database.get(SUBJECT) is None  # measured anew, if it is needed
        server.start()
        monkeypatch.setattr("xrlflow.storage.sqlite._RETRY", 0.0)
        database._storage._pending.hurry()  # type: ignore[attr-defined]  # half a minute later
        database.put(replace(SUBJECT, operands="last"), SAMPLE)
        assert (len(database), database.get(SUBJECT)) == (3, SAMPLE)
    with Database(server.url()) as other:
        assert (len(other), other.get(later)) == (3, SAMPLE)
    server.stop(number)
    database = Database(server.url())
    with pytest.warns(RuntimeWarning, match="kept in memory"):
        database.put(SUBJECT, SAMPLE)
    with pytest.warns(RuntimeWarning, match=": 1 measurements are lost, as they could never be written"):
        database.close()


def test_a_server_that_hangs_is_like_one_that_is_gone(
    server: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine acknowledges what is sent, and it keeps no limit of its own."""
    monkeypatch.setattr("xrlflow.cost.database._PATIENCE", 0.1)
    monkeypatch.setattr("xrlflow.storage.postgres._GRACE", -4.0)
    assert server.process is not None
    with Database(server.url() + "?connect_timeout=2") as database:
        database.put(SUBJECT, SAMPLE)
        whole = [
            psutil.Process(server.process.pid),
            *psutil.Process(server.process.pid).children(recursive=True),
        ]
        for process in whole:
            process.suspend()
        try:
            with pytest.warns(RuntimeWarning, match="kept in memory until they can be written"):
                database.put(replace(SUBJECT, operands="later"), SAMPLE)
        finally:
            for process in whole:
                process.resume()
    with Database(server.url()) as other:
        assert other.get(replace(SUBJECT, operands="later")) == SAMPLE


def test_tables_that_somebody_removes_are_made_again(server: postgres.Server) -> None:
    with Database(server.url()) as database:
        database.put(SUBJECT, SAMPLE)
        execute(server, "DROP SCHEMA xrlflow CASCADE")
        with pytest.warns(RuntimeWarning, match="kept in memory until they can be written"):
            database.put(SUBJECT, SAMPLE)
    with Database(server.url()) as other:
        assert other.get(SUBJECT) == SAMPLE


def test_looking_for_what_the_server_cannot_hold_is_no_failure(server: postgres.Server) -> None:
    with Database(server.url()) as database, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert database.get(replace(SUBJECT, operands="a\0b")) is None
        assert database.get(replace(SUBJECT, operands="a\ud800b")) is None
        database.put(SUBJECT, SAMPLE)
        with Database(server.url()) as other:
            assert other.get(SUBJECT) == SAMPLE


def test_what_the_server_cannot_hold_does_not_keep_the_rest(server: postgres.Server) -> None:
    with Store(server.url()) as store:
        execute(server, "SELECT 1")
        with pytest.warns(RuntimeWarning, match=": 1 measurements are lost, as the server cannot hold them"):
            store.put(record(candidate="nul \0"))
        store.put(record(candidate="next"))
        assert [r.candidate for r in store.records("t")] == ["next"]


# --- the first connection, and what must not be seen ---


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"port": 1}, "127.0.0.1:1/postgres: the store cannot be used"),
        ({"password": "wrong"}, "password authentication failed"),
        ({"database": "none"}, 'database "none" does not exist'),
        ({"password": "s3cret/x"}, "the URL of the store cannot be read"),
        ({"password": "s3cret@x"}, "the URL of the store cannot be read"),
        ({"password": "s3cret?x"}, "the URL of the store cannot be read"),
        (
            {"password": "s3cret", "database": "postgres?nonsense=s3cret"},
            "the URL of the store cannot be read",
        ),
    ],
)
def test_a_wrong_address_is_found_at_once(server: postgres.Server, change: dict[str, Any], says: str) -> None:
    with pytest.raises(StoreError) as raised, Database(server.url(**change)) as database:
        database.check()
    text = str(raised.value)
    assert says in text
    assert "\n" not in text
    for secret in (postgres.PASSWORD, postgres.QUOTED, "s3cret", "wrong"):
        assert secret not in text


def test_tables_of_another_version_are_refused(server: postgres.Server) -> None:
    with Database(server.url()) as database:
        database.put(SUBJECT, SAMPLE)
    execute(server, "UPDATE xrlflow.layout SET version = 9 WHERE name = 'measurement'")
    with Database(server.url()) as database, pytest.raises(StoreError, match="version 9, and 1 is wanted"):
        database.check()
    with Store(server.url()) as store:
        store.check()  # each kind has a version of its own


def test_a_user_without_rights_is_told(server: postgres.Server) -> None:
    execute(server, "DROP ROLE IF EXISTS guest; CREATE ROLE guest LOGIN PASSWORD 'guest'")
    url = server.url().replace(f"tester:{postgres.QUOTED}", "guest:guest")
    with Database(url) as database, pytest.raises(StoreError, match="permission denied for database"):
        database.check()


def test_the_doctor_looks_at_it(server: postgres.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRLFLOW_STORE", server.url())
    found = disk.server()
    assert (found.status, found.found) == (
        Status.OK, f"127.0.0.1:{server.port}/postgres: 0 measurements of operators"
    )  # fmt: skip
    server.stop()
    found = disk.server()
    assert (found.status, found.needed) == (Status.FAIL, True)
    assert "the store cannot be used" in found.found
    assert postgres.QUOTED not in found.found
    monkeypatch.delenv("XRLFLOW_STORE")
    assert disk.server().status is Status.OK


def test_an_optimisation_uses_it(
    server: postgres.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference_machine: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("xrlflow.cost.profiled.in_quiet", lambda once, tolerance: (once(), True))
    given = ["optimize", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "o.onnx"), "--search", "greedy", "--no-measure",
             "--backend", "onnxruntime", "--threads", "1", "--shape", "x=64,8", "--json"]  # fmt: skip
    onnx.save(clumsy(), given[1])
    done = CliRunner().invoke(app, [*given, "--store", server.url()])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["verified"] is True
    (count,) = execute(server, "SELECT count(*) FROM xrlflow.measurement")
    assert count > (0,)
    assert not (tmp_path / "xrlflow" / "measurements.sqlite").exists()
    monkeypatch.setenv("XRLFLOW_STORE", server.url())
    assert CliRunner().invoke(app, given).exit_code == 0
    assert execute(server, "SELECT count(*) FROM xrlflow.measurement") == [count]  # all were known
    server.stop()
    for arguments in ([*given, "--store", server.url()], given):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith(
            f"xrlflow: error: 127.0.0.1:{server.port}/postgres: the store cannot be used"
        )
        assert done.stderr.count("\n") == 1
        assert postgres.PASSWORD not in done.stderr
        assert postgres.QUOTED not in done.stderr
