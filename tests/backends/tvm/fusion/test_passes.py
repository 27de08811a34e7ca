"""Passes have names, and the module after each pass can be written to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.tvm.kernels.test_kernels import network
from xrlflow.backends import BackendError
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion.fuse import fuse, passes
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures

TEXT = "(float[4,8] x, float[8,8] w) => (float[4,8] y) { a = MatMul(x, w) y = Relu(a) }"


def test_each_pass_writes_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "dumped"
    monkeypatch.setenv("XRLFLOW_DUMP", str(folder))
    module = import_model(network(TEXT))
    fused = [fuse(module, detect()) for _ in range(2)][-1]
    assert sorted(p.name for p in folder.iterdir()) == ["model-1", "model-2"]
    written = sorted((folder / "model-2").iterdir())
    names = ["before", *(each.name for each in passes(detect(), None, DEFAULT))]
    assert [p.name for p in written] == [f"{i:02}-{name}.py" for i, name in enumerate(names)]
    assert "R.matmul" in written[0].read_text()
    assert written[-1].read_text() == fused.script()
    assert written[names.index("legalize")].read_text() != written[names.index("legalize") - 1].read_text()


def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XRLFLOW_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    fuse(import_model(network(TEXT)), detect())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XRLFLOW_DUMP", str(file))
    with pytest.raises(BackendError, match=rf"^XRLFLOW_DUMP: {file} cannot be written \(File exists\)$"):
        fuse(import_model(network(TEXT)), detect())
