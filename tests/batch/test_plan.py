"""What a result depends on, and where it goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.external_data_helper import convert_model_to_external_data

from tests.batch.conftest import FAST, clumsy
from xrlflow.batch.plan import plan
from xrlflow.batch.sources import SourceFile
from xrlflow.options import OptionError, Options

pytestmark = pytest.mark.process


def key(path: Path, **options: Any) -> str:
    (job,) = plan([SourceFile(path.name, str(path))], path.parent / "out", Options(**{**FAST, **options}))
    return job.key


def targets(*names: str, **options: Any) -> list[str]:
    jobs = plan(
        [SourceFile(name, f"/none/{name}") for name in names], Path("/out"), Options(**{**FAST, **options})
    )
    assert all(job.root == "/out" and str(job.output) == f"/out/{job.target}" for job in jobs)
    return [job.target for job in jobs]


def test_each_model_has_a_place_of_its_own() -> None:
    assert targets("a/x.onnx", "b/x.onnx", "b/x.pb") == ["a/x.onnx", "b/x.onnx", "b/x.pb.onnx"]
    assert targets("X.onnx", "x.onnx", "x.pb", "x.pb.onnx") == [
        "X.onnx", "x-2.onnx", "x.pb.onnx", "x.pb-2.onnx"
    ]  # fmt: skip
    pytest.importorskip("tvm")
    assert targets("a/x.onnx", "a/y", backend="tvm") == ["a/x.so", "a/y.so"]


def test_content_and_options_count(put: Callable[..., Path], tmp_path: Path) -> None:
    path, other = put("x.onnx"), put("y.onnx")
    assert key(path) == key(path) == key(other)
    assert (
        len({key(path), key(path, seed=1), key(path, time_limit=21.0), key(path, shapes={"x": (4, 8)})}) == 4
    )
    rules = tmp_path / "rules.py"
    rules.write_text("RULES = []")
    before = key(path, rules=rules)
    moved = rules.rename(tmp_path / "moved.py")
    assert key(path, rules=moved) == before
    moved.write_text("RULES = ()")
    assert key(path, rules=moved) != before
    put("x.onnx", 2.0)
    assert key(path) != key(other)


def test_each_file_of_a_folder_of_inputs_counts(put: Callable[..., Path], tmp_path: Path) -> None:
    path, inputs = put("x.onnx"), tmp_path / "inputs"
    inputs.mkdir()
    np.savez(inputs / "a.npz", x=np.zeros((1, 8)))
    keys = [key(path, precision="int8", inputs=inputs)]
    np.savez(inputs / "b.npz", x=np.zeros((1, 8)))
    keys.append(key(path, precision="int8", inputs=inputs))
    np.savez(inputs / "a.npz", x=np.ones((1, 8)))
    keys.append(key(path, precision="int8", inputs=inputs))
    assert len(set(keys)) == 3
    assert key(path, precision="int8", inputs=inputs) == keys[-1]


def test_jobs_may_run_in_another_folder(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put("x.onnx").parent
    (folder / "rules.py").write_text("RULES = []")
    monkeypatch.chdir(folder)
    url = "postgresql://me:s3cret@host/x"
    (job,) = plan([SourceFile("x.onnx", "x.onnx")], Path("out"), Options(**FAST, rules="rules.py", store=url))
    assert (job.source, job.root) == (str(folder / "x.onnx"), str(folder / "out"))
    assert job.options.rules == str(folder / "rules.py")
    assert job.options.store == url
    assert "s3cret" not in repr(job)
    assert job.key == key(folder / "x.onnx", rules="rules.py")  # where measurements are does not count


def test_external_data_counts(tmp_path: Path) -> None:
    proto = clumsy()
    convert_model_to_external_data(proto, location="weights.bin", size_threshold=0)
    path = tmp_path / "x.onnx"
    onnx.save(proto, path)
    data = tmp_path / "weights.bin"
    before, content = key(path), data.read_bytes()
    data.write_bytes(content[:-1] + b"\1")
    assert key(path) != before
    data.unlink()
    missing = key(path)
    assert missing != before
    data.mkdir()
    assert key(path) == missing
    data.rmdir()
    data.write_bytes(content)
    assert key(path) == before


def test_data_outside_the_folder_of_a_model_is_not_read(tmp_path: Path) -> None:
    proto = clumsy()
    convert_model_to_external_data(proto, location="weights.bin", size_threshold=0)
    (tmp_path / "in").mkdir()
    onnx.save(proto, tmp_path / "in" / "x.onnx")
    for location in ("../secret", "nul\0", str(tmp_path / "secret")):
        for entry in proto.graph.initializer[0].external_data:
            entry.value = location if entry.key == "location" else entry.value
        path = tmp_path / "in" / "x.onnx"
        path.write_bytes(proto.SerializeToString())
        (tmp_path / "secret").write_bytes(b"1" * 256)
        before = key(path)
        (tmp_path / "secret").write_bytes(b"2" * 256)
        assert key(path) == before


def test_versions_count(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = put("x.onnx")
    keys = {key(path), key(path, backend="auto")}
    for package in ("none", "xrlflow", "onnxruntime", "apache-tvm"):
        changed = {package: "0.0"}
        monkeypatch.setattr(
            "xrlflow.batch.plan.version_of", lambda name, known=changed: known.get(name, "1.0")
        )
        keys |= {key(path), key(path, backend="auto")}
    assert len(keys) == 4 + 5  # that of TVM counts only where it may be used


@pytest.mark.parametrize("content", [b"", b"no model", b"\x3a\xff\xff\xff\xff\x0f"])
def test_what_is_no_model_has_a_key_too(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(content)
    assert key(path) != key(tmp_path / "none.onnx")


def test_options_that_no_batch_can_have(put: Callable[..., Path], tmp_path: Path) -> None:
    path = put("x.onnx")
    trace = tmp_path / "trace.json"
    with pytest.raises(OptionError, match="replay has no meaning for a batch"):
        key(path, replay=trace)
    with pytest.raises(OptionError, match="inputs is an object"):
        key(path, inputs={"x": np.zeros((1, 8))})
    with pytest.raises(OptionError, match=r"inputs .*none\.npz cannot be read"):
        key(path, inputs=tmp_path / "none.npz")
