"""One job: what is written, what becomes of errors, and that only one job measures at a time."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx.external_data_helper import convert_model_to_external_data

from tests.batch.conftest import FAST, clumsy
from xrlflow.batch import Job, measures, run
from xrlflow.batch.jobs import earlier
from xrlflow.batch.plan import plan
from xrlflow.batch.sources import SourceFile
from xrlflow.onnxio import ModelError
from xrlflow.options import Options
from xrlflow.pipeline import optimize
from xrlflow.storage.exclusive import LockedError, locked, measuring

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("reference_machine")]


def job_of(path: Path, name: str | None = None, **options: Any) -> Job:
    result = SourceFile(name or path.name, str(path))
    (job,) = plan([result], path.parent / "out", Options(**{**FAST, **options}))
    return job


def test_a_job_writes_its_result_its_page_and_its_record(put: Callable[..., Path]) -> None:
    job = pickle.loads(pickle.dumps(job_of(put("x.onnx"), "deep/er/x.onnx")))
    output: list[str] = []
    row = pickle.loads(pickle.dumps(run(job, output.append)))
    assert row.error is None
    assert row.report["nodes_before"] == 5
    assert row.report["nodes_after"] == 2
    assert row.speedup is None  # nothing was measured
    assert "search" in {text.split()[0] for text in output}
    folder = job.output.parent
    assert sorted(p.name for p in folder.iterdir()) == ["x.onnx", "x.onnx.html", "x.onnx.json"]
    assert [name for name, _ in row.files] == ["deep/er/x.onnx", "deep/er/x.onnx.html"]
    onnx.checker.check_model(onnx.load(job.output), full_check=True)
    known = earlier(job)
    assert known == replace(row, earlier=True)
    assert known.report == json.loads(json.dumps(row.report))


def test_what_is_done_counts_only_if_all_of_it_is_there(put: Callable[..., Path]) -> None:
    job = job_of(put("x.onnx"))
    assert earlier(job) is None
    run(job)
    record = job.record.read_bytes()
    assert earlier(job) is not None
    assert earlier(replace(job, key="another")) is None
    for damaged in (b"", b"{", record[:-9], b"[]", b"null", record.replace(b'"version": 1', b'"version": 0'),
                    record.replace(b'"error": null', b'"error": "no"'), b"[" * 99_999):  # fmt: skip
        job.record.write_bytes(damaged)
        assert earlier(job) is None
    whole = json.loads(record)
    for name, value in (("speedup", "fast"), ("speedup", 0), ("speedup", float("nan")), ("threads", None)):
        job.record.write_text(json.dumps({**whole, "row": {**whole["row"], "report": {
            **whole["row"]["report"], name: value}}}))  # fmt: skip
        assert earlier(job) is None
    job.record.write_bytes(record)
    for path in (job.output, job.page):
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        assert earlier(job) is None
        path.unlink()
        assert earlier(job) is None
        path.write_bytes(content)
    assert earlier(job) is not None


def test_external_data_is_part_of_a_result(tmp_path: Path) -> None:
    proto = clumsy(width=64)
    convert_model_to_external_data(proto, location="weights.bin", size_threshold=0)
    onnx.save(proto, tmp_path / "x.onnx")
    job = job_of(tmp_path / "x.onnx")
    row = run(job)
    assert row.error is None
    (data,) = job.output.parent.glob("*.data")
    assert data.name in [name for name, _ in row.files]
    data.unlink()
    assert earlier(job) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "there is no such file"), (b"", "x.onnx"), (b"no model", "x.onnx"), ("folder", "x.onnx")],
)
def test_a_bad_model_is_a_row(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "x.onnx"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    job = job_of(path)
    row = run(job)
    assert not row.done
    assert row.error is not None
    assert says in row.error
    assert "\n" not in row.error
    assert not row.detail
    assert not job.output.exists()
    assert earlier(job) is None


@pytest.mark.parametrize(
    ("raised", "says", "detailed"),
    [
        (MemoryError(), "out of memory", False),
        (OSError(28, "No space left on device"), "No space left", False),
        (ModelError("x: broken\x1b[2J"), r"x: broken\x1b[2J", False),
        (ZeroDivisionError("by\nzero"), "an error in xrlflow, please report it: ZeroDivisionError: by zero", True),
    ],
)  # fmt: skip
def test_any_error_is_a_row(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, raised: Exception, says: str, detailed: bool
) -> None:
    def optimize(*arguments: object) -> None:
        raise raised

    monkeypatch.setattr("xrlflow.batch.running.optimize", optimize)
    row = run(job_of(put("x.onnx")))
    assert row.error is not None
    assert says in row.error
    assert ("Traceback" in row.detail) == detailed


@pytest.mark.parametrize("late", [False, True])
def test_what_changes_after_the_plan_is_not_what_was_asked_for(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The result would be another model's, under the key of the one that was planned."""
    job = job_of(put("x.onnx"))
    if late:

        def slow(*arguments: Any) -> Any:
            put("x.onnx", 3.0)
            return optimize(*arguments)

        monkeypatch.setattr("xrlflow.batch.running.optimize", slow)
    else:
        put("x.onnx", 3.0)
    row = run(job)
    assert "is not what it was when the batch began" in str(row.error)
    assert not job.output.exists()


def test_a_node_with_other_versions_or_files_does_nothing(
    put: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("# none")
    job = job_of(put("x.onnx"), rules=rules)
    rules.write_text("# none, but others")
    assert "is not what it was" in str(run(job).error)
    rules.write_text("# none")
    monkeypatch.setattr("xrlflow.batch.plan.version_of", lambda name: "0.0")
    assert "(here: xrlflow 0.0, onnxruntime 0.0, " in str(run(job).error)


def test_a_record_of_an_earlier_run_does_not_vouch_for_files_of_a_later_one(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(put("x.onnx"))
    run(job)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("xrlflow.batch.running.write_page", full)
    again = run(job)
    assert again.error is not None
    assert "No space left" in again.error
    assert earlier(job) is None


def test_shapes_go_to_the_inputs_that_have_the_name(put: Callable[..., Path]) -> None:
    path = put("x.onnx")
    fixed = run(job_of(path, fix_shapes=True, shapes={"x": (4, 8), "other": (1, 2)}))
    assert fixed.error is None
    (dimension, _) = onnx.load(path.parent / "out" / "x.onnx").graph.input[0].type.tensor_type.shape.dim
    assert dimension.dim_value == 4
    assert run(job_of(path, shapes={"other": (1, 2)})).error is None
    assert "dimensions" in str(run(job_of(path, shapes={"x": (1, 2, 3)})).error)


def test_warnings_are_notes(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from xrlflow.pipeline import optimize

    def warning(*arguments: Any) -> Any:
        for _ in range(2):
            warnings.warn("the disk is\nslow", RuntimeWarning, stacklevel=1)
        return optimize(*arguments)

    monkeypatch.setattr("xrlflow.batch.running.optimize", warning)
    job = job_of(put("x.onnx"))
    row = run(job)
    assert row.notes == ("the disk is slow",)
    assert earlier(job) == replace(row, earlier=True)


# --- one measurement at a time ---


def test_who_measures() -> None:
    plain = Options(**FAST)
    assert not measures(plain)
    assert measures(replace(plain, measure=True))
    assert measures(replace(plain, cost="profiled"))
    assert measures(replace(plain, backend="hybrid"))


HOLD = """
import sys
from xrlflow.storage.exclusive import measuring
with measuring(print):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_that_measures_waits_for_the_one_that_does(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    def optimize(*arguments: object) -> None:
        raise ModelError("now")

    monkeypatch.setattr("xrlflow.batch.running.optimize", optimize)
    job = job_of(put("x.onnx"), measure=True)
    other = holder()
    waiting, output = threading.Event(), []

    def told(text: str) -> None:
        output.append(text)
        waiting.set()

    rows: list[Any] = []
    runner = threading.Thread(target=lambda: rows.append(run(job, told)))
    runner.start()
    assert waiting.wait(60)
    assert not rows
    assert run(job_of(put("y.onnx"))).error == "now"  # what measures nothing does not wait
    if killed:
        other.kill()
    else:
        other.communicate("")
    runner.join(60)
    other.wait()
    assert output == [
        f"waiting: another job measures on this machine (process {other.pid} has it)",
        "reading",
    ]
    assert rows[0].error == "now"


def test_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        with pytest.raises(LockedError, match=r"process [0-9]+ has it"), locked(path):
            pass
        path.write_bytes(b"\xffnonsense")
        with pytest.raises(LockedError, match="another process has it"), locked(path):
            pass
    with locked(path):
        pass
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError), locked(link):  # it could be anybody's
        pass


def test_a_lock_writes_over_nobodys_data(tmp_path: Path) -> None:
    data, planted = tmp_path / "data", tmp_path / "lock"
    data.write_text("precious")
    planted.hardlink_to(data)
    with locked(planted), pytest.raises(LockedError, match="another process has it"), locked(planted):
        pass
    assert data.read_text() == "precious"
    os.mkfifo(tmp_path / "fifo")
    with locked(tmp_path / "fifo"):
        pass


def test_a_full_disk_does_not_keep_from_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", full)
    with locked(tmp_path / "lock"):
        pass


def test_a_fork_does_not_keep_a_lock(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    with locked(tmp_path / "lock"):
        if (child := os.fork()) == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
    try:
        with locked(tmp_path / "lock"):
            pass
    finally:
        os.close(theirs)
        os.waitpid(child, 0)
        os.close(ours)


def test_who_waited_for_a_file_that_was_removed_waits_for_the_one_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    waits, has, leave = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        with locked(path, lambda holder: waits.set()):
            has.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with locked(path):
        thread.start()
        assert waits.wait(60)
        path.unlink()
    assert has.wait(60)
    try:
        with pytest.raises(LockedError), locked(path):
            pass
    finally:
        leave.set()
        thread.join()


def test_a_lock_that_cannot_be_had_says_what_to_do(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XRLFLOW_MEASURING_LOCK", str(tmp_path / "none" / "lock"))
    error = str(run(job_of(put("x.onnx"), measure=True)).error)
    assert "it cannot be locked (No such file or directory): set XRLFLOW_MEASURING_LOCK to a file" in error


def test_every_user_may_take_the_lock_of_measurements(lock_of_its_own: Path) -> None:
    with measuring(print):
        assert lock_of_its_own.stat().st_mode & 0o777 == 0o666
