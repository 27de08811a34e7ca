"""Which models a folder, a pattern or a list means, and what they are called."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xrlflow.batch.sources import MARK, find_models
from xrlflow.options import OptionError

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that need not be models: only their names count."""
    for name in (
        "a/x.onnx",
        "b/x.onnx",
        "b/y.onnx",
        "b/notes.txt",
        ".cache/z.onnx",
        "b/.hidden.onnx",
        "top.onnx",
    ):
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "in"


@pytest.fixture
def names(tmp_path: Path) -> Callable[..., list[str]]:
    return lambda what, output=tmp_path / "out": [item.name for item in find_models(what, output)]


def test_a_folder_means_its_models_by_their_relative_paths(
    folder: Path, names: Callable[..., list[str]]
) -> None:
    assert names(folder) == ["a/x.onnx", "b/x.onnx", "b/y.onnx", "top.onnx"]


def test_a_pattern_means_what_it_matches_from_its_first_wildcard_on(
    folder: Path, names: Callable[..., list[str]]
) -> None:
    assert names(f"{folder}/*/x.onnx") == ["a/x.onnx", "b/x.onnx"]
    assert names(f"{folder}/b/*.onnx") == ["x.onnx", "y.onnx"]
    assert names(f"{folder}/**/y.onnx") == ["b/y.onnx"]
    assert names(f"{folder}/b/*") == ["notes.txt", "x.onnx", "y.onnx"]  # whoever writes a pattern means it


def test_a_list_has_paths_and_comments(folder: Path, tmp_path: Path, names: Callable[..., list[str]]) -> None:
    file = folder / "list.txt"
    file.write_text(
        f"\ufeff# models\n\n  a/x.onnx  \r\nb/../b/y.onnx # the last one\n{folder}/top.onnx\n../none.onnx\n"
        f"{tmp_path}/b#1.onnx\n"
    )
    outside = str(tmp_path).lstrip("/")
    assert names(file) == ["a/x.onnx", "b/y.onnx", f"{outside}/b#1.onnx", f"{outside}/none.onnx", "top.onnx"]


def test_a_pipe_is_a_list(
    folder: Path, monkeypatch: pytest.MonkeyPatch, names: Callable[..., list[str]]
) -> None:
    monkeypatch.chdir(folder / "b")
    read, write = os.pipe()
    os.write(write, b"x.onnx\n../top.onnx\n")
    os.close(write)
    outside = str(folder).lstrip("/")
    assert names(f"/dev/fd/{read}") == [f"{outside}/top.onnx", "x.onnx"]
    os.close(read)


def test_a_file_is_one_model_whatever_leads_to_it(folder: Path, names: Callable[..., list[str]]) -> None:
    (folder / "0.onnx").symlink_to("b/y.onnx")
    (folder / "a" / "again").symlink_to("../b")
    (folder / "b" / "round").symlink_to("..")  # a circle
    (folder / "broken.onnx").symlink_to("nowhere")
    result = {each.name: each for each in find_models(folder, folder / "out")}
    assert len(result) == 5
    assert result["b/y.onnx"].remarks == ("also reached as 0.onnx",)
    assert "broken.onnx" in result  # it fails, and is not passed over in silence
    file = folder / "list.txt"
    file.write_text("b/y.onnx\n0.onnx\nb/y.onnx\n")
    assert names(file) == ["b/y.onnx"]


def test_models_that_are_links_into_another_folder_keep_their_names(
    tmp_path: Path, names: Callable[..., list[str]]
) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for name in ("one", "two"):
        (tmp_path / "blobs" / f"4f{name}").write_text(name)
        (tmp_path / "snapshot" / f"{name}.onnx").symlink_to(f"../blobs/4f{name}")
    assert names(tmp_path / "snapshot") == ["one.onnx", "two.onnx"]


def test_outputs_are_no_inputs(folder: Path, names: Callable[..., list[str]]) -> None:
    for output in ("out", "b/earlier"):
        (folder / output).mkdir()
        (folder / output / "x.onnx").write_text("")
    (folder / "b" / "earlier" / MARK).write_text("")
    wanted = ["a/x.onnx", "b/x.onnx", "b/y.onnx", "top.onnx"]
    assert names(folder, folder / "out") == wanted
    assert names(f"{folder}/**/*.onnx", folder / "out") == wanted
    assert names(folder / "b" / "earlier") == ["x.onnx"]  # unless they are what is asked for
    with pytest.raises(OptionError, match="is the output folder, too"):
        names(folder, folder / "a" / "..")
    file = folder / "list.txt"
    file.write_text("a/x.onnx\nout/x.onnx\n")
    with pytest.raises(OptionError, match=r"list\.txt:2: .* is in the output folder"):
        names(file, folder / "out")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("none", "there is no such folder, pattern or list"),
        ("*.none", "no file matches"),
        ("empty", "there is no model"),
        ("list.txt", "names no model"),
        ("top.onnx", "is no list of paths"),
        ("binary", "is no list of paths"),
    ],
)
def test_what_means_no_model_is_said(
    folder: Path, names: Callable[..., list[str]], what: str, says: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "list.txt").write_text("# nothing\n")
    (folder / "binary").write_bytes(b"\0\xff")
    with pytest.raises(OptionError, match=says) as raised:
        names(folder / what)
    assert "\n" not in str(raised.value)


def test_a_folder_that_cannot_be_read_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OptionError, match=r"in/b: cannot be read \(Permission denied\)"):
        find_models(folder, folder / "out")


def test_names_in_no_encoding(tmp_path: Path, names: Callable[..., list[str]]) -> None:
    place = tmp_path / "in"
    place.mkdir()
    (place / os.fsdecode(b"caf\xe9.onnx")).write_text("")
    (place / "a\nb.onnx").write_text("")
    assert names(place) == ["a\nb.onnx", "caf\udce9.onnx"]
