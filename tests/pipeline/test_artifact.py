"""A model as one value: what is made of a graph is made once."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import pytest

from tests.rules.harness import model
from xrlflow.onnxio import ImportedModel, load
from xrlflow.pipeline import artifact
from xrlflow.pipeline.artifact import Artifacts, Original

CHAINS = [f"agraph (float[{n}] x) => (float[{n}] z) {{ y = Relu(x) z = Neg(y) }}" for n in range(1, 8)]


def imported(text: str = CHAINS[0]) -> ImportedModel:
    return load(model(text))


def test_a_file_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts, read = Artifacts(str(tmp_path)), imported()
    first = artifacts.of(read, read.graph)
    path = first.file
    assert [node.op_type for node in onnx.load(path).graph.node] == ["Relu", "Neg"]
    monkeypatch.setattr(artifact, "save", lambda *_, **__: pytest.fail("it is written again"))
    monkeypatch.setattr(artifact, "size_of", lambda *_: 7)
    assert artifacts.of(read, read.graph) is first
    assert first.file == path
    assert first.size == 7
    monkeypatch.setattr(artifact, "size_of", lambda *_: pytest.fail("it is sized again"))
    assert first.size == 7


def test_another_opset_is_another_file(tmp_path: Path) -> None:
    artifacts, read, again = Artifacts(str(tmp_path)), imported(), imported()
    assert read.graph.fingerprint == again.graph.fingerprint
    assert artifacts.of(read, read.graph) is not artifacts.of(again, again.graph)


def test_the_latest_files_stay(tmp_path: Path) -> None:
    artifacts, models = Artifacts(str(tmp_path)), [imported(text) for text in CHAINS]
    made = [artifacts.of(read, read.graph) for read in models]
    paths = [each.file for each in made[:4]]
    assert made[0].file == paths[0]
    made[4].file  # noqa: B018
    assert [os.path.exists(path) for path in paths] == [True, False, True, True]
    assert len(list(tmp_path.iterdir())) == 4
    assert onnx.load(made[1].file).graph.node[0].op_type == "Relu"


def test_an_original_is_serialised_once(tmp_path: Path) -> None:
    proto = model(CHAINS[0])
    original = Original(proto, str(tmp_path))
    assert original.runnable is original.runnable
    assert Path(original.file).read_bytes() == original.runnable
    assert original.file is original.file
    assert Original(tmp_path / "m.onnx", str(tmp_path)).file == str(tmp_path / "m.onnx")
