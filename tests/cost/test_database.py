"""Measurements on disk: keys, damage, many writers."""

import contextlib
import multiprocessing
import sqlite3
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from xrlflow.cost.database import VERSION, Database, Subject
from xrlflow.cost.microbench import Sample

pytestmark = pytest.mark.measures

SUBJECT = Subject("a cpu", "onnxruntime 1.31.0", 2, "Relu", "", "float[3] -> float[3]")
SAMPLE = Sample(1e-3, 0.9e-3, 1.2e-3, 17)


def test_what_is_put_is_found_again_by_another_connection(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.sqlite"
    with Database(path) as first:
        assert first.get(SUBJECT) is None
        first.put(SUBJECT, SAMPLE)
    with Database(path) as second:
        assert second.get(SUBJECT) == SAMPLE
        second.put(SUBJECT, replace(SAMPLE, median=2e-3))
        assert second.get(SUBJECT) == replace(SAMPLE, median=2e-3)
        assert len(second) == 1


@pytest.mark.parametrize("column", ["median", "low", "high", "count", "taken"])
@pytest.mark.parametrize("wrong", [b"\xff", "garbage"])
def test_what_is_no_number_is_measured_again(tmp_path: Path, column: str, wrong: str | bytes) -> None:
    path = tmp_path / "m.sqlite"
    with Database(path) as first:
        first.put(SUBJECT, SAMPLE)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"UPDATE measurement SET {column} = ?", (wrong,))
    with Database(path) as second:
        assert second.get(SUBJECT) == (SAMPLE if column == "taken" else None)
        second.put(SUBJECT, SAMPLE)
        assert second.get(SUBJECT) == SAMPLE


@pytest.mark.parametrize(
    "other",
    [
        replace(SUBJECT, device="another cpu"),
        replace(SUBJECT, runtime="onnxruntime 1.32.0"),
        replace(SUBJECT, threads=1),
        replace(SUBJECT, operator="Tanh"),
        replace(SUBJECT, attributes="alpha=1.0"),
        replace(SUBJECT, operands="float[4] -> float[4]"),
    ],
)
def test_every_part_of_the_key_counts(tmp_path: Path, other: Subject) -> None:
    with Database(tmp_path / "m.sqlite") as database:
        database.put(SUBJECT, SAMPLE)
        assert database.get(other) is None


def damage_header(path: Path) -> None:
    path.write_bytes(b"this is no database" * 100)


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1500])


def damage_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)


def damage_version(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()


def damage_tables(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE something (x)")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "damage", [damage_header, damage_truncate, damage_pages, damage_version, damage_tables]
)
def test_a_damaged_file_is_replaced_with_a_warning(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "m.sqlite"
    with Database(path) as database:
        for i in range(300):
            database.put(replace(SUBJECT, operands=f"{i} {'x' * 50}"), SAMPLE)
    damage(path)
    damaged = path.read_bytes()
    with Database(path) as database:
        with pytest.warns(RuntimeWarning, match="starting afresh"):
            assert database.get(SUBJECT) is None
        database.put(SUBJECT, SAMPLE)
    assert Path(f"{path}.damaged").read_bytes() == damaged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Database(path) as again:
            assert again.get(SUBJECT) == SAMPLE


def test_without_a_place_on_disk_measurements_last_as_long_as_the_process(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    database = Database(blocked / "m.sqlite")
    with pytest.warns(RuntimeWarning, match="kept in memory until they can be written"):
        database.put(SUBJECT, SAMPLE)
    assert database.get(SUBJECT) == SAMPLE
    with pytest.warns(RuntimeWarning, match=": 1 measurements are lost"):
        database.close()


def write_many(path: Path, writer: int, count: int) -> None:
    with Database(path) as database:
        for i in range(count):
            database.put(replace(SUBJECT, threads=writer, operands=str(i)), replace(SAMPLE, count=i))


def test_processes_share_a_file_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, w, 60)) for w in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
    assert [p.exitcode for p in writers] == [0, 0, 0]
    with Database(path) as database:
        assert len(database) == 180
        found = database.get(replace(SUBJECT, threads=2, operands="59"))
        assert found is not None
        assert found.count == 59


def test_threads_share_a_connection(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with Database(tmp_path / "m.sqlite") as database:

        def work(writer: int) -> None:
            try:
                for i in range(50):
                    subject = replace(SUBJECT, threads=writer, operands=str(i))
                    database.put(subject, SAMPLE)
                    assert database.get(subject) == SAMPLE
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(w,)) for w in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert len(database) == 200
