"""What the store records, and its behaviour when it cannot write."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xrlflow.storage.sqlite import connect
from xrlflow.storage.stores import StoreError
from xrlflow.tuning.store import VERSION, Record, Setting, Store
from xrlflow.tuning.tuners.protocol import Measurement

SETTING = Setting('{"kind":"llvm"}', "0.27", "some cpu", 2)


def record_of(
    task: str = "t", candidate: str = "c", seconds: tuple[float, ...] = (1e-3,), taken: float = 0.0
) -> Record:
    error = None if seconds else "it crashed"
    return Record(task, SETTING, candidate, f'["{candidate}"]', seconds, error, taken)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "tuning.sqlite") as store:
        yield store


def test_what_is_put_is_there_in_another_process_of_time(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tuning.sqlite"
    records = [
        record_of(candidate="slow", seconds=(0.1 + 0.2, 1 / 3), taken=1.0),
        record_of(candidate="failed", seconds=(), taken=2.0),
        record_of(task="other", taken=3.0),
    ]
    with Store(path) as store:
        for record in records:
            store.put(record)
    with Store(path) as store:
        assert store.records("t") == records[:2]
        assert store.records("other") == records[2:]
        assert store.records("none") == []
        assert store.tasks() == ["other", "t"]
        assert len(store) == 3
        assert store.records("t")[1].outcome == Measurement(error="it crashed")


@pytest.mark.parametrize(
    ("column", "content"),
    [
        *(
            (column, wrong)
            for column in ("seconds", "threads", "taken")
            for wrong in ("garbage", "[1.0, null]", b"\xff")
        ),
        *((column, b"\xff") for column in ("target", "tvm", "device", "trace", "error")),
        ("threads", "1e999"),
    ],
)
def test_rows_that_are_no_records_are_left_out(column: str, content: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    good, bad = record_of(candidate="good", taken=2.0), record_of(candidate="bad", taken=1.0)
    with Store(path) as store:
        store.put(good)
        store.put(bad)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"UPDATE record SET {column} = ? WHERE candidate = 'bad'", (content,))
    with Store(path) as store:
        assert store.records("t") == store.best("t", 9) == [good]


def test_the_best_are_the_fastest_by_the_median_of_all_their_times_once_each(store: Store) -> None:
    for record in (
        record_of(candidate="a", seconds=(1.0, 2.0, 9.0)),
        record_of(candidate="lucky", seconds=(0.1,)),
        record_of(candidate="lucky", seconds=(2.5,)),
        record_of(candidate="lucky", seconds=(2.6,)),
        record_of(candidate="b", seconds=(1.5, 1.6, 1.4)),
        record_of(candidate="b", seconds=()),
        record_of(candidate="b", seconds=(3.0,)),
        record_of(candidate="c", seconds=()),
        record_of(candidate="d", seconds=(1e10,)),
    ):
        store.put(record)
    assert [record.candidate for record in store.best("t", 9)] == ["a", "b", "lucky"]
    assert store.best("t", 9)[1].seconds == (1.5, 1.6, 1.4, 3.0)
    assert [record.candidate for record in store.best("t", 9, least=3)] == ["lucky"]
    assert [record.candidate for record in store.best("t", 9, least=4)] == ["a", "b", "lucky"]


def test_records_of_other_settings_are_kept_apart(store: Store) -> None:
    elsewhere = replace(SETTING, device="another cpu")
    store.put(record_of())
    store.put(replace(record_of(seconds=(1e-9,)), setting=elsewhere))
    assert store.best("t", setting=SETTING)[0].seconds == (1e-3,)
    assert store.best("t", setting=elsewhere)[0].seconds == (1e-9,)
    assert len(store.records("t")) == 2
    assert store.records("t", replace(SETTING, threads=1)) == []


def test_the_same_measurement_is_kept_once(store: Store) -> None:
    store.put(record_of(taken=1.0))
    store.put(record_of(taken=2.0))
    assert store.records("t") == [record_of(taken=1.0)]


def test_many_threads_and_connections_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"

    def write(name: str, store: Store) -> None:
        for number in range(20):
            store.put(record_of(candidate=f"{name} {number}"))

    with Store(path) as one, Store(path) as two, warnings.catch_warnings():
        warnings.simplefilter("error")
        writers = [
            threading.Thread(target=write, args=(name, store))
            for name, store in (("a", one), ("b", one), ("c", two), ("d", two))
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert len(one) == len(two) == 80


def test_who_opens_a_file_that_another_begins_waits_for_it(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    end = threading.Timer(0.2, lambda: other.execute("COMMIT"))
    end.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Store(path) as store:
            store.put(record_of())
        with Store(path) as store:
            assert len(store) == 1
    end.join()
    other.close()


@pytest.mark.parametrize("content", [b"this is no database" * 100, None])
@pytest.mark.parametrize("named", [False, True])
def test_a_file_that_is_damaged_or_of_another_version_is_set_aside_or_refused_if_somebody_named_it(
    named: bool, content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrlflow.tuning.store.cache_directory", lambda: tmp_path)
    path = tmp_path / "tuning.sqlite"
    if content is not None:
        path.write_bytes(content)
    else:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 999")
        connection.commit()
        connection.close()
        content = path.read_bytes()
    if named:
        for use in (Store.check, Store.__len__, lambda store: store.put(record_of())):
            with Store(path) as store, pytest.raises(StoreError, match="no store of measurements"):
                use(store)
        assert path.read_bytes() == content
        assert [p.name for p in tmp_path.iterdir()] == ["tuning.sqlite"]
        return
    with Store() as store, pytest.warns(RuntimeWarning, match="starting afresh"):
        store.put(record_of())
    with Store() as store:
        assert len(store) == 1
    assert Path(f"{path}.damaged").read_bytes() == content


@pytest.mark.parametrize("version", [0, VERSION])
def test_the_database_of_something_else_is_left_as_it_is(version: int, tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE something (x)")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with Store(path) as store, pytest.raises(StoreError, match="tables of something else"):
        store.check()
    assert path.read_bytes() == before


@pytest.mark.filterwarnings("error")
def test_a_file_with_a_version_and_no_tables_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    Store(path).check()
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE record")
    connection.commit()
    connection.close()
    with Store(path) as store:
        store.put(record_of())
        assert len(store) == 1
    with Store(path) as store:
        assert len(store) == 1


def test_a_file_that_is_damaged_while_it_is_open_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    with Store(path) as store:
        for number in range(200):
            store.put(record_of(candidate=f"{number}" * 50))
    size = path.stat().st_size
    with Store(path) as store:
        assert len(store) == 200
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (size - 4096))

        def put_more() -> None:
            store.put(record_of(candidate="later"))
            store.records("t")
            store.put(record_of(candidate="last"))

        with pytest.warns(RuntimeWarning, match="starting afresh"):
            put_more()
        assert store.records("t")[-1].candidate == "last"


def test_what_another_process_has_begun_in_its_place_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrlflow.tuning.store.cache_directory", lambda: tmp_path)
    path = tmp_path / "tuning.sqlite"
    path.write_bytes(b"this is no database" * 100)

    def connect_late(*given: Any) -> Any:
        try:
            return connect(*given)
        except sqlite3.DatabaseError:  # meanwhile somebody else has found that, and begun another
            monkeypatch.undo()
            path.rename(tmp_path / "tuning.sqlite.damaged")
            with Store(path) as first:
                first.put(record_of(candidate="first"))
            raise

    monkeypatch.setattr("xrlflow.storage.sqlite.connect", connect_late)
    with Store() as store, pytest.warns(RuntimeWarning, match="starting afresh"):
        store.put(record_of(candidate="second"))
    with Store(path) as store:
        assert [record.candidate for record in store.records("t")] == ["first", "second"]
    assert (tmp_path / "tuning.sqlite.damaged").read_bytes() == b"this is no database" * 100


def test_a_full_disk_is_said_once_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    with Store(path) as store:
        store.put(record_of(candidate="early", taken=1.0))
        disk = store._file._opened()
        assert disk is not None
        (pages,) = disk.execute("PRAGMA page_count").fetchone()
        disk.execute(f"PRAGMA max_page_count = {pages}")
        large = [record_of(candidate=f"{number}" * 9000, taken=2.0 + number) for number in range(1, 5)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for record in large:
                store.put(record)
        assert [str(w.message).partition(": ")[2][:20] for w in caught] == ["measurements are kept"[:20]]
        assert [r.taken for r in store.records("t")] == [1.0, 3.0, 4.0, 5.0, 6.0]
        assert len(store) == 5
        with Store(path) as other:  # none of the large ones is there in part
            assert [r.taken for r in other.records("t")] == [1.0]
        disk.execute(
            "PRAGMA max_page_count = 100000"
        )  # somebody made room: what waited is written at the end
    with Store(path) as store:
        assert store.records("t") == [record_of(candidate="early", taken=1.0), *large]


FULL = """
import resource, sys, warnings
from tests.tuning.test_store import record_of
from xrlflow.tuning.store import Store
with Store(sys.argv[1]) as store, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    store.put(record_of(candidate="early"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # files cannot grow beyond it
    for number in range(100):
        store.put(record_of(candidate=f"{number} " + "x" * 9000))
    assert len(store) == 101
    assert len([w for w in caught if w.category is RuntimeWarning]) == 1, [str(w.message) for w in caught]
"""


def test_a_file_that_cannot_grow_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    subprocess.run([sys.executable, "-c", FULL, path], cwd=Path(__file__).resolve().parents[2], check=True)
    with Store(path) as store:
        kept = store.records("t")
    assert 0 < len(kept) < 101
    assert all(json.loads(record.trace) == [record.candidate] for record in kept)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_a_locked_file_does_not_stop_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.tuning.store._PATIENCE", 0.05)
    path = tmp_path / "tuning.sqlite"
    with Store(path) as store:
        store.put(record_of(candidate="early", taken=1.0))
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.warns(RuntimeWarning, match="locked"):
            store.put(record_of(candidate="late", taken=2.0))
        store.put(record_of(candidate="later", taken=3.0))
        assert len(store) == 3
        blocker.execute("ROLLBACK")
        blocker.close()
    with Store(path) as store:
        assert len(store) == 3


def test_where_no_file_can_be_measurements_last_as_long_as_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path)  # a directory
    with pytest.warns(RuntimeWarning, match="in memory"):
        store.put(record_of())
    assert store.records("t") == [record_of()]
    with pytest.warns(RuntimeWarning, match=": 1 measurements are lost"):
        store.close()


def test_a_file_that_may_only_be_read_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    with Store(path) as store:
        store.put(record_of(candidate="early"))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    store = Store(path)
    assert len(store) == 1
    store._file._disk = store._file._open_to_read()
    with pytest.warns(RuntimeWarning, match="readonly"):
        store.put(record_of(candidate="late"))
    assert [record.candidate for record in store.records("t")] == ["early", "late"]
    with pytest.warns(RuntimeWarning, match=": 1 measurements are lost"):
        store.close()


def test_a_fork_opens_the_file_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    with Store(path) as store:
        store.put(record_of(candidate="parent"))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                store.put(record_of(candidate="child"))
                status = 0 if len(store) == 2 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(store) == 2
