"""Models with external data: no other model's is touched, and model and data are replaced together."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.onnxio.support import info, model, run
from xrlflow import onnxio
from xrlflow.onnxio import ImportedModel, ModelError
from xrlflow.storage import files

X = np.ones((2, 64), np.float32)


def product(factor: float) -> onnx.ModelProto:
    weight = np.full((64, 64), factor, np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Identity", ["h"], ["y"])]
    return model(nodes, {"x": X}, [info("y", X)], {"w": weight})


def write(path: Path, factor: float, location: str = "model.onnx_data") -> Path:
    path.parent.mkdir(exist_ok=True)
    onnx.save(product(factor), path, save_as_external_data=True, location=location, size_threshold=0)
    return path


def save(imported: ImportedModel, path: Path) -> None:
    onnxio.save(imported, imported.graph, path)


def save_original(imported: ImportedModel, path: Path) -> None:
    onnxio.save_original(imported, path)


WAYS = pytest.mark.parametrize("way", [save, save_original])


def factor(path: Path) -> float:
    """What ONNX Runtime multiplies by; the full check passes, too."""
    onnx.checker.check_model(str(path), full_check=True)
    (out,) = run(str(path), {"x": X})
    return float(out[0, 0] / 64)


def data_of(path: Path) -> set[str]:
    proto = onnx.load(path, load_external_data=False)
    return {e.value for t in proto.graph.initializer for e in t.external_data if e.key == "location"}


@WAYS
def test_another_models_data_is_not_touched(tmp_path: Path, way: Any) -> None:
    """Both have their weights in a file of the same name, as exporters name it."""
    a, b = write(tmp_path / "a" / "a.onnx", 2.0), write(tmp_path / "b" / "b.onnx", 3.0)
    way(onnxio.load(b), a.parent / "b.onnx")
    assert factor(a) == 2.0
    assert factor(a.parent / "b.onnx") == factor(b) == 3.0


@WAYS
def test_a_data_file_that_has_the_name_already(tmp_path: Path, way: Any) -> None:
    """By accident, or as a link that somebody put there."""
    source, out = write(tmp_path / "a" / "a.onnx", 2.0), tmp_path / "out.onnx"
    way(onnxio.load(source), out)
    (name,) = data_of(out)
    secret = tmp_path / "secret"
    secret.write_bytes(b"not to be overwritten")
    for other in (b"of another", None):
        os.unlink(out)
        os.unlink(tmp_path / name)
        if other is None:
            (tmp_path / name).symlink_to(secret)
        else:
            (tmp_path / name).write_bytes(other)
        way(onnxio.load(source), out)
        assert factor(out) == 2.0
        assert data_of(out) != {name}
        assert secret.read_bytes() == b"not to be overwritten"
        if other is not None:
            assert (tmp_path / name).read_bytes() == other


@WAYS
def test_the_same_again_needs_no_more_files(tmp_path: Path, way: Any) -> None:
    imported = onnxio.load(write(tmp_path / "a" / "a.onnx", 2.0))
    way(imported, tmp_path / "out.onnx")
    before = sorted(os.listdir(tmp_path))
    way(imported, tmp_path / "out.onnx")
    assert sorted(os.listdir(tmp_path)) == before
    assert factor(tmp_path / "out.onnx") == 2.0


@WAYS
def test_old_data_goes_with_its_model(tmp_path: Path, way: Any) -> None:
    out = tmp_path / "to" / "out.onnx"
    out.parent.mkdir()
    for number in (2.0, 3.0):
        way(onnxio.load(write(tmp_path / "a" / f"{number}.onnx", number)), out)
        assert factor(out) == number
        assert set(os.listdir(out.parent)) == {"out.onnx"} | data_of(out)


@WAYS
def test_old_data_stays_for_a_copy_of_its_model(tmp_path: Path, way: Any) -> None:
    out = tmp_path / "to" / "out.onnx"
    out.parent.mkdir()
    way(onnxio.load(write(tmp_path / "a" / "a.onnx", 2.0)), out)
    shutil.copy(out, out.parent / "kept")
    way(onnxio.load(write(tmp_path / "b" / "b.onnx", 3.0)), out)
    assert factor(out.parent / "kept") == 2.0
    assert factor(out) == 3.0


@WAYS
def test_old_data_of_a_foreign_name_stays(tmp_path: Path, way: Any) -> None:
    """It may be another model's, in another folder even."""
    out = write(tmp_path / "to" / "out.onnx", 2.0)
    way(onnxio.load(write(tmp_path / "a" / "a.onnx", 3.0)), out)
    assert factor(out) == 3.0
    assert (out.parent / "model.onnx_data").exists()


def test_in_place(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", 2.0, "m.onnx.data")
    content = path.read_bytes()
    save_original(onnxio.load(path), path)
    assert path.read_bytes() == content
    save(onnxio.load(path), path)
    assert factor(path) == 2.0
    assert set(os.listdir(tmp_path)) == {"m.onnx"} | data_of(path)


@WAYS
def test_beside_its_original(tmp_path: Path, way: Any) -> None:
    """The result stands by itself: other weights under the original's name are none of its business."""
    source = write(tmp_path / "a.onnx", 2.0)
    way(onnxio.load(source), tmp_path / "b.onnx")
    write(source, 5.0)
    assert factor(tmp_path / "b.onnx") == 2.0


@WAYS
def test_the_originals_data_is_no_place_for_a_result(tmp_path: Path, way: Any) -> None:
    source = write(tmp_path / "a.onnx", 2.0)
    (tmp_path / "link").symlink_to("model.onnx_data")
    for name in ("model.onnx_data", "link"):
        with pytest.raises(ModelError, match=r"holds the weights of .*a\.onnx: choose another output"):
            way(onnxio.load(source), tmp_path / name)
    assert factor(source) == 2.0


@WAYS
def test_through_a_link(tmp_path: Path, way: Any) -> None:
    """The data goes where the model goes: runtimes look for it beside the file, or beside the link's target."""
    source = write(tmp_path / "a" / "a.onnx", 2.0)
    (tmp_path / "store").mkdir()
    (tmp_path / "out.onnx").symlink_to("store/model.onnx")
    way(onnxio.load(source), tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").is_symlink()
    assert factor(tmp_path / "store" / "model.onnx") == 2.0
    assert sorted(os.listdir(tmp_path)) == ["a", "out.onnx", "store"]


@WAYS
@pytest.mark.parametrize(
    "name", ["with blanks.onnx", "žluť.onnx", "two\nlines.onnx", f"{'x' * 250}.onnx", b"\xff"]
)
def test_names_of_data_files(tmp_path: Path, way: Any, name: str | bytes) -> None:
    out = tmp_path / "to" / os.fsdecode(name)
    out.parent.mkdir()
    imported = onnxio.load(write(tmp_path / "a.onnx", 2.0))
    if len(os.fsencode(name)) <= 255:
        way(imported, out)
        again = onnxio.load(out)
        (weight,) = (c.numpy() for c in again.graph.leaves.consts.values())
        assert weight[0, 0] == 2.0
        assert len(os.listdir(out.parent)) == 2
    else:
        with pytest.raises(ModelError, match="File name too long"):
            way(imported, out)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """What is written beyond that fails, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@WAYS
@pytest.mark.parametrize("full", ["in the data", "in the model"])
def test_a_disk_that_is_full(tmp_path: Path, way: Any, full: str) -> None:
    """Old model and old data are as they were, wherever writing fails."""
    out = tmp_path / "to" / "out.onnx"
    out.parent.mkdir()
    way(onnxio.load(write(tmp_path / "a" / "a.onnx", 2.0)), out)
    before = contents(out.parent)
    new = product(3.0)
    new.metadata_props.add(key="k", value="v" * 20_000)
    onnx.save(new, tmp_path / "b.onnx", save_as_external_data=True, location="b.data", size_threshold=0)
    imported = onnxio.load(tmp_path / "b.onnx")
    with (
        largest_file(10_000 if full == "in the data" else 18_000),
        pytest.raises(ModelError, match=r"cannot be written \(File too large\)"),
    ):
        way(imported, out)
    assert contents(out.parent) == before
    assert factor(out) == 2.0
    way(imported, out)
    assert factor(out) == 3.0


@WAYS
def test_at_every_moment_the_model_has_its_data(
    tmp_path: Path, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each change that the folder sees."""
    out = tmp_path / "to" / "out.onnx"
    out.parent.mkdir()
    way(onnxio.load(write(tmp_path / "a" / "a.onnx", 2.0)), out)
    imported = onnxio.load(write(tmp_path / "b" / "b.onnx", 3.0))
    seen = []

    def watched(change: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(factor(out))
            found = change(*arguments, **options)
            seen.append(factor(out))
            return found

        return call

    for name in ("link", "replace", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    way(imported, out)
    assert seen == sorted(seen)
    assert set(seen) == {2.0, 3.0}


@WAYS
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError(errno.EIO, "I/O error")])
def test_an_interrupt_between_data_and_model(
    tmp_path: Path, way: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "to" / "out.onnx"
    out.parent.mkdir()
    way(onnxio.load(write(tmp_path / "a" / "a.onnx", 2.0)), out)
    before = contents(out.parent)

    def interrupted(self: files.NewFile, target: str) -> None:
        assert len(os.listdir(out.parent)) == 4  # the new data has its place, the new model has not
        raise error

    monkeypatch.setattr(files.NewFile, "replace", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit, ModelError)):
        way(onnxio.load(write(tmp_path / "b" / "b.onnx", 3.0)), out)
    assert contents(out.parent) == before


def test_an_original_with_many_data_files(tmp_path: Path) -> None:
    """In a folder of their own, as some exporters have it."""
    proto = product(2.0)
    proto.graph.initializer.append(numpy_helper.from_array(np.full((64, 64), 0.5, np.float32), "v"))
    proto.graph.node[1].CopyFrom(helper.make_node("MatMul", ["h", "v"], ["y"]))
    (tmp_path / "parts").mkdir()
    for at, tensor in enumerate(proto.graph.initializer):
        (tmp_path / "parts" / str(at)).write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=f"parts/{at}")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "to").mkdir()
    save_original(onnxio.load(tmp_path / "m.onnx"), tmp_path / "to" / "out.onnx")
    shutil.rmtree(tmp_path / "parts")
    assert factor(tmp_path / "to" / "out.onnx") == 64.0
    assert len(os.listdir(tmp_path / "to")) == 3


def rewritten(path: Path, content: bytes) -> None:
    """Write to the file that is there, as most exporters do, at another time than before."""
    path.write_bytes(content)
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))


CHANGES = pytest.mark.parametrize(
    "change", [lambda old: old[:-1] + b"?", lambda old: old[:100], lambda _: b""]
)


@WAYS
@CHANGES
@pytest.mark.parametrize("name", ["m.onnx", "model.onnx_data"])
def test_a_file_that_was_written_to_is_not_mixed_with_what_was_read(
    tmp_path: Path, way: Any, change: Any, name: str
) -> None:
    """Weights are read when they are written: they would be new, or behind the file's end, what was computed old."""
    source = write(tmp_path / "in" / "m.onnx", 2.0)
    imported = onnxio.load(source)
    rewritten(source.parent / name, change((source.parent / name).read_bytes()))
    before = {file: file.read_bytes() for file in source.parent.iterdir()}
    for target in (tmp_path / "out.onnx", source):
        with pytest.raises(ModelError, match=f"{name}: the file has changed since it was read"):
            way(imported, target)
    with pytest.raises(ModelError, match="has changed"):
        onnxio.to_proto(imported, imported.graph)
    assert {file: file.read_bytes() for file in source.parent.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


@WAYS
def test_a_file_that_changes_while_it_is_written_leaves_nothing(
    tmp_path: Path, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in" / "m.onnx", 2.0)
    imported, replace = onnxio.load(source), files.NewFile.claim

    def claim(new: files.NewFile, target: str) -> bool:
        data = source.parent / "model.onnx_data"
        rewritten(data, data.read_bytes())
        return replace(new, target)

    monkeypatch.setattr(files.NewFile, "claim", claim)
    with pytest.raises(ModelError, match="has changed since it was read"):
        way(imported, tmp_path / "out.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


@WAYS
def test_a_file_that_another_took_the_place_of_is_as_it_was_read(tmp_path: Path, way: Any) -> None:
    source = write(tmp_path / "in" / "m.onnx", 2.0)
    imported = onnxio.load(source)
    other = write(tmp_path / "other" / "m.onnx", 3.0)
    for name in ("m.onnx", "model.onnx_data"):
        os.replace(other.parent / name, source.parent / name)
    way(imported, tmp_path / "out.onnx")
    assert factor(tmp_path / "out.onnx") == 2.0


def test_files_are_closed_with_their_model(tmp_path: Path) -> None:
    source = write(tmp_path / "m.onnx", 2.0)
    before = len(os.listdir("/proc/self/fd"))
    imported = onnxio.load(source)
    assert len(os.listdir("/proc/self/fd")) > before
    del imported
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
