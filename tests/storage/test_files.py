"""Files are replaced whole or not at all, and nothing else is touched."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer

from tests.rules.harness import model
from xrlflow.api import check_writable
from xrlflow.cli.failures import clear_errors
from xrlflow.onnxio import ModelError
from xrlflow.storage import files

pytestmark = pytest.mark.process

OLD, NEW = b"what was there", b"what is new"


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of the superuser, to whom nothing is read-only."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old"
    path.write_bytes(OLD)
    return path


def test_a_link_is_followed_to_what_is_written(tmp_path: Path, old: Path) -> None:
    (tmp_path / "here").mkdir()
    link, dangling = tmp_path / "here" / "link", tmp_path / "here" / "dangling"
    link.symlink_to("../old")
    dangling.symlink_to(tmp_path / "fresh")
    files.write(link, NEW)
    files.write(dangling, NEW)
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert old.read_bytes() == (tmp_path / "fresh").read_bytes() == NEW
    assert sorted(os.listdir(tmp_path / "here")) == ["dangling", "link"]


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        files.write(tmp_path / "a", NEW)


def test_mode_and_owner_stay(old: Path) -> None:
    old.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(old, 65534, 65534)
    before = old.stat()
    files.write(old, NEW)
    after = old.stat()
    assert stat.S_IMODE(after.st_mode) == 0o640
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


def test_a_new_file_has_the_mode_of_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "fresh", NEW)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o640


def test_other_hard_links_keep_what_they_held(tmp_path: Path, old: Path) -> None:
    os.link(old, tmp_path / "other")
    files.write(old, NEW)
    assert (tmp_path / "other").read_bytes() == OLD
    assert old.read_bytes() == NEW


def test_temporary_names_cannot_be_foreseen(tmp_path: Path) -> None:
    """Nobody can put a link where a temporary file will be: its name is another each time."""
    seen = set()
    for _ in range(2):
        with files.replacing(tmp_path / "fresh") as file:
            file.write(NEW)
            seen |= set(os.listdir(tmp_path)) - {"fresh"}
    assert len(seen) == 2
    assert all(len(name) >= len(files.UNFINISHED) + 32 for name in seen)


def test_a_link_of_the_temporary_name_is_not_followed(
    tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / f"{files.UNFINISHED}guessed").symlink_to(old)
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "fresh", NEW)
    assert old.read_bytes() == OLD
    assert (tmp_path / f"{files.UNFINISHED}guessed").is_symlink()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_changes_nothing(tmp_path: Path, old: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with files.replacing(old) as file:
            file.write(NEW)
            raise error

    with pytest.raises(error):
        fail()
    assert old.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["old"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "folder", "socket"):
            before = (tmp_path / name).lstat()
            with pytest.raises(OSError, match=r"Not a regular file|Is a directory"):
                files.write(tmp_path / name, NEW)
            assert os.path.samestat(before, (tmp_path / name).lstat())
    assert files.destination(tmp_path / "fresh") == str(tmp_path / "fresh")
    with pytest.raises(ModelError, match=r"/dev/null: cannot be written \(Not a regular file\): choose"):
        check_writable("/dev/null")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_where_temporary_files_have_no_room_another_folder_is_advised(code: int, tmp_path: Path) -> None:
    """Nobody has chosen where they are, so no other output helps."""
    error = OSError(code, os.strerror(code))
    folder = tempfile.gettempdir()
    assert files.cannot_write(f"{folder}/xrlflow-abc/tmp/model.onnx", error) == (
        f"the temporary folder {folder} is full: make room in it, or name another in TMPDIR"
    )
    mine = tmp_path / "model.onnx"
    assert files.cannot_write(mine, error).startswith(f"{mine}: cannot be written ({error.strerror}): choose")


def test_a_command_says_that_there_is_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, clear_errors():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")
    assert ended.value.exit_code == 2
    assert "error: /some/file: no room is left: make some, or name another folder" in capsys.readouterr().err
    with pytest.raises(PermissionError), clear_errors():
        raise PermissionError(errno.EACCES, "no")


@pytest.mark.parametrize("name", ["with blanks", "žluťoučký", "two\nlines", "x" * 255, b"\xff\xfe"])
def test_names(tmp_path: Path, name: str | bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    files.write(path, OLD)
    files.write(path, NEW)
    assert path.read_bytes() == NEW
    assert [os.fsencode(n) for n in os.listdir(tmp_path)] == [os.fsencode(name)]


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everyone gets to: pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_read_only_files_and_folders(public: Path) -> None:
    folder = public / "folder"
    folder.mkdir()
    protected = folder / "protected"
    protected.write_bytes(OLD)
    protected.chmod(0o444)
    folder.chmod(0o777)
    with as_nobody():
        with pytest.raises(ModelError, match=r"cannot be written \(The file there is read-only\)"):
            check_writable(protected)
        files.write(folder / "fresh", NEW)
    folder.chmod(0o555)
    with as_nobody(), pytest.raises(ModelError, match=r"cannot be written \(Permission denied\)"):
        check_writable(folder / "another")
    assert protected.read_bytes() == OLD


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    for expected in (True, False):
        with files.NewFile(str(tmp_path)) as new:
            new.file.write(NEW if expected else OLD)
            assert new.claim(str(tmp_path / "fresh")) is expected
    assert (tmp_path / "fresh").read_bytes() == NEW
    assert os.listdir(tmp_path) == ["fresh"]


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has other signals")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_the_command_line_is_ended(tmp_path: Path, number: str) -> None:
    """It unwinds: neither the folder that it works in stays, nor a part of the result, nor its children."""
    weight = np.eye(64, dtype=np.float32)
    text = "agraph (float[N,64] x) => (float[N,64] y) { a = MatMul(x, w)\n b = Identity(a)\n y = Relu(b) }"
    onnx.save(model(text, w=weight), tmp_path / "m.onnx")
    work = tmp_path / "work"
    work.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "xrlflow.cli", "optimize", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "out.onnx"),
         "--search", "greedy", "--time-limit", "60"],
        env={**os.environ, "TMPDIR": str(work)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.Signals[number], signal.SIG_DFL),  # under nohup it is ignored
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        # a folder: `tempfile` first writes and removes a file of its own, to see whether it can
        while (
            not any(path.is_dir() for path in work.iterdir())
            and process.poll() is None
            and time.monotonic() < end
        ):
            time.sleep(0.01)
        process.send_signal(signal.Signals[number])
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert said == "xrlflow: error: terminated\n"
    assert process.returncode == 128 + signal.Signals[number]
    assert list(work.iterdir()) == []
    assert os.listdir(tmp_path / "work") == []
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "work"]
