"""A batch: what is done is not done again, what fails ends nothing, and one page has all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import xrlflow
from tests.batch.conftest import FAST, Here
from tests.report.pages import HOSTILE
from xrlflow.batch import Batch, Job, Processes, Progress, ProgressCallback, Row, failed
from xrlflow.batch.sources import MARK
from xrlflow.batch.terminal import bars, duration, line
from xrlflow.cli import app
from xrlflow.onnxio import ModelError
from xrlflow.options import OptionError, Options
from xrlflow.report import show
from xrlflow.storage.exclusive import locked
from xrlflow.storage.files import UNFINISHED

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("reference_machine")]
QUICK = [
    "--search",
    "greedy",
    "--cost",
    "roofline",
    "--backend",
    "onnxruntime",
    "--no-measure",
    "--time-limit",
    "20",
]


def batch(folder: Path, **changed: Any) -> tuple[Batch, list[str]]:
    """Do the batch in this process. Also returns the names of the jobs that were run."""
    executor = changed.pop("executor", Here())
    result = xrlflow.optimize_all(folder / "in", folder / "out", executor=executor, **{**FAST, **changed})
    return result, executor.ran


@pytest.fixture
def folder(put: Callable[..., Path], tmp_path: Path) -> Path:
    for index, name in enumerate(("a/x.onnx", "b/x.onnx", "report.onnx")):
        put(f"in/{name}", 1.0 + index)
    return tmp_path


def test_what_is_done_is_not_done_again(folder: Path, put: Callable[..., Path]) -> None:
    first, ran = batch(folder)
    assert ran == ["a/x.onnx", "b/x.onnx", "report.onnx"]
    assert [row.error for row in first.rows] == [None] * 3
    again, ran = batch(folder)
    assert ran == []
    assert [row.earlier for row in again.rows] == [True] * 3
    assert [row.report for row in again.rows] == [json.loads(json.dumps(row.report)) for row in first.rows]

    put("in/b/x.onnx", 9.0)  # a changed model
    (folder / "out" / "report.onnx").unlink()  # a lost result
    put("in/new.onnx", 5.0)
    assert batch(folder)[1] == ["b/x.onnx", "new.onnx", "report.onnx"]
    assert batch(folder)[1] == []
    assert len(batch(folder, seed=1)[1]) == 4  # another option
    (folder / "in" / "new.onnx").unlink()
    result, ran = batch(folder, seed=1)
    assert (ran, len(result.rows)) == ([], 3)


def test_a_model_that_fails_ends_nothing_and_is_tried_again(folder: Path, put: Callable[..., Path]) -> None:
    (folder / "in" / "b" / "x.onnx").write_bytes(b"no model")
    result, ran = batch(folder)
    assert len(ran) == 3
    assert [row.done for row in result.rows] == [True, False, True]
    assert [row.name for row in result.failed] == ["b/x.onnx"]
    assert batch(folder)[1] == ["b/x.onnx"]
    put("in/b/x.onnx", 2.0)
    assert batch(folder)[0].failed == ()


def test_ctrl_c_keeps_what_is_done(folder: Path) -> None:
    result, ran = batch(folder, executor=Here(stop_after=2))
    assert result.interrupted
    assert ran == ["a/x.onnx", "b/x.onnx"]
    assert result.to_json()["waiting"] == ["report.onnx"]
    assert '"waiting":["report.onnx"]' in (folder / "out" / "report.html").read_text()
    rest, ran = batch(folder)
    assert ran == ["report.onnx"]
    assert not rest.interrupted
    assert [row.earlier for row in rest.rows] == [True, True, False]


def test_the_page_of_a_batch_that_is_killed_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.batch.batch._BETWEEN", 0.0)

    class Killed(BaseException):
        pass

    def executor(jobs: Sequence[Job], report: ProgressCallback) -> Generator[Row, None, None]:
        yield from list(Here()(jobs[:1], report))
        raise Killed

    with pytest.raises(Killed):
        xrlflow.optimize_all(folder / "in", folder / "out", executor=executor, **FAST)
    assert '"done":1' in (folder / "out" / "report.html").read_text()
    assert batch(folder)[1] == ["b/x.onnx", "report.onnx"]


def test_a_model_without_a_row_has_failed(folder: Path) -> None:
    def executor(jobs: Sequence[Job], report: ProgressCallback) -> Generator[Row, None, None]:
        yield from ()

    result = xrlflow.optimize_all(folder / "in", folder / "out", executor=executor, **FAST)
    assert result.rows
    assert {row.name for row in result.rows} == set(result.names)
    assert {row.error for row in result.rows} == {"the executor has no result for it"}


def test_progress_tells_the_time_left(folder: Path) -> None:
    seen: list[Progress] = []
    batch(folder)
    (folder / "out" / "report.onnx.json").unlink()
    (folder / "out" / "b" / "x.onnx.json").unlink()
    (folder / "in" / "report.onnx").write_bytes(b"")
    batch(folder, listener=seen.append)
    rows = [p for p in seen if p.row is not None]
    assert (seen[0].done, seen[0].total, seen[0].left) == (1, 3, None)
    assert [(p.done, p.failed) for p in rows] == [(2, 0), (2, 1)]
    assert rows[0].left is not None
    assert rows[0].left > 0
    assert rows[1].left == 0
    assert {p.name for p in seen if p.doing} >= {"b/x.onnx"}
    assert re.fullmatch(r"2/3 b/x\.onnx: \d+ s \(about \d+ \w+ left\)", line(rows[0]))
    assert line(rows[1]).startswith("3/3 report.onnx: failed: ")
    assert [duration(s) for s in (40.2, 90, 3600 * 3.5, 3599)] == ["40 s", "2 min", "3 h 30 min", "1 h 0 min"]


def test_progress_on_a_terminal(folder: Path) -> None:
    from io import StringIO

    from rich.console import Console

    (folder / "in" / "b" / "x.onnx").write_bytes(b"no model")
    text = StringIO()
    with bars(Console(file=text, force_terminal=True, width=100)) as listener:
        batch(folder, listener=listener)
    assert "2/3 b/x.onnx: failed" in text.getvalue()
    assert "models" in text.getvalue()


# --- the output folder ---


def test_what_killed_jobs_have_left_unfinished_is_removed(folder: Path) -> None:
    batch(folder)
    old, new = (folder / "out" / "a" / f"{UNFINISHED}{name}" for name in ("old", "new"))
    library = folder / "out" / f"{UNFINISHED}library"
    library.mkdir()
    (library / "x.so").touch()
    for path in (old, new):
        path.write_bytes(b"half a model")
    for path in (old, library):
        os.utime(path, (0, 0))
    assert batch(folder)[1] == []
    assert [path.exists() for path in (old, library, new)] == [False, False, True]


def test_the_output_is_a_folder_of_batches_only(folder: Path) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("")
    with pytest.raises(OptionError, match="has files that no batch wrote"):
        xrlflow.optimize_all(folder / "in", folder / "full", **FAST)
    with pytest.raises(OptionError, match="cannot be written"):
        xrlflow.optimize_all(folder / "in", folder / "full" / "mine.txt", **FAST)
    batch(folder)
    message = r"another batch writes to it \(process"
    with locked(folder / "out" / MARK), pytest.raises(OptionError, match=message):
        batch(folder)


def test_the_output_may_be_in_the_input(put: Callable[..., Path], tmp_path: Path) -> None:
    put("x.onnx")
    for _ in range(2):
        result = xrlflow.optimize_all(tmp_path, tmp_path / "out", executor=Here(), **FAST)
        assert result.names == ("x.onnx",)


def test_a_page_that_cannot_be_written_is_said(folder: Path) -> None:
    batch(folder)
    (folder / "out" / "report.html").unlink()
    (folder / "out" / "report.html").mkdir()
    with pytest.raises(ModelError, match=r"report\.html: cannot be written .*what is done so far is kept"):
        batch(folder)


# --- the page, the table, JSON ---


def row(name: str, error: str | None = None) -> Row:
    report = {
        "nodes_before": 9, "nodes_after": 5, "latency_before_ms": 2.0, "latency_after_ms": 1.0, "speedup": 2.0,
        "speedup_low": 1.9, "speedup_high": 2.1, "verified": True, "returned_original": False, "reason": "",
        "threads": 1,
    }  # fmt: skip
    return Row(name, "key", error, None if error else report, ((name, 1), (f"{name}.html", 2)), "cpu", 1.5)


def test_hostile_names_are_text_and_links_are_quoted(tmp_path: Path) -> None:
    names = [*HOSTILE[:4], "javascript:alert(1)", "a?b#c%41 d.onnx", os.fsdecode(b"caf\xe9.onnx")]
    page = Batch(tmp_path, tuple(names), tuple(row(name) for name in names)).page()
    assert [r["link"] for r in page["batch"]["rows"]][4:] == [
        "./javascript%3Aalert%281%29.html", "./a%3Fb%23c%2541%20d.onnx.html", "./caf%E9.onnx.html",
    ]  # fmt: skip
    html = Batch(tmp_path, tuple(names), tuple(row(name) for name in names)).report_html()
    assert html.count("<script") == 3
    html.encode()


def test_figures(tmp_path: Path) -> None:
    job = Job("c", "/c", "/out", "c.onnx", "key", Options(**FAST))
    original = row("b")
    assert original.report is not None
    kept = {**original.report, "speedup": None, "returned_original": True}
    rows = (row("a"), Row("b", "key", None, kept), failed(job, "broken"))
    data = Batch(tmp_path, ("a", "b", "c", "d"), rows).to_json()
    assert (data["models"], data["done"], data["failed"], data["measured"]) == (4, 2, 1, 1)
    assert data["mean_speedup"] == pytest.approx(2.0)
    assert data["waiting"] == ["d"]
    assert Batch(tmp_path, (), ()).mean is None


def test_what_was_decided_without_a_figure_is_shown() -> None:
    measured = row("a").report
    assert measured is not None
    nothing = {**measured, "speedup": None, "speedup_low": None, "speedup_high": None}
    decided = {**nothing, "decided": 1.2, "decided_low": 1.1, "decided_high": 1.31}
    assert show._gained(measured) == "2.000 [1.900, 2.100]"
    assert show._gained(decided) == "decided at 1.200 [1.100, 1.310]"
    assert show._gained({**decided, "returned_original": True}) == "the original"
    assert show._gained(nothing) == "not measured"


# --- the command ---


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "__call__", Here().__call__)
    (folder / "in" / "b" / "x.onnx").write_bytes(b"no model")
    arguments = ["optimize-all", folder / "in", "-o", folder / "out", *QUICK]
    first = invoke(*arguments)
    assert first.exit_code == 1, first.output
    assert "5 -> 2" in first.stdout
    assert "2 of 3 models done (0 earlier), 1 failed" in first.stdout
    assert "2/3 b/x.onnx: failed" in first.stderr
    again = invoke(*arguments, "--json")
    assert again.exit_code == 1
    assert again.stderr == ""
    data = json.loads(again.stdout)
    assert (data["done"], data["earlier"], data["failed"]) == (2, 2, 1)
    assert [r["report"]["nodes_after"] if r["report"] else "failed" for r in data["rows"]] == [2, "failed", 2]
    (folder / "in" / "b" / "x.onnx").unlink()
    assert invoke(*arguments).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none", "-o", "out"], "there is no such folder, pattern or list"),
        (["in", "-o", "in"], "is the output folder, too"),
        (["in", "-o", "out", "--search", "none"], "search 'none' is not known"),
        (["in", "-o", "out", "--inputs", "none.npz"], "none.npz cannot be read"),
        (["in", "-o", "out", "--shape", "x"], "write it as NAME=1,3,224,224"),
    ],
)
def test_bad_use_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(folder)
    result = invoke("optimize-all", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (folder / "out" / "report.html").exists()


def test_one_model_has_no_batch_options() -> None:
    assert "--replay" not in invoke("optimize-all", "--help").stdout
    assert invoke("optimize-all", "in", "-o", "out", "--workers", 0).exit_code == 2
