"""Checkpoints: written whole or not at all, read or refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from xrlflow.storage import checkpoint as module
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint


def some() -> Checkpoint:
    shared = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = {
        "a": shared,
        "b": shared.T,
        "state": np.arange(5, dtype=np.uint8),
        "one": np.array(3),
    }
    return Checkpoint("agent", {"width": 64, "rules": ["A", "B"], "rate": 0.1}, tensors)


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "agent.safetensors"
    save_checkpoint(some(), path)
    back = load_checkpoint(path, "agent")
    assert back.config == some().config
    assert back.tensors.keys() == some().tensors.keys()
    for name, tensor in some().tensors.items():
        assert np.array_equal(back.tensors[name], tensor)
        assert back.tensors[name].dtype == tensor.dtype


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "agent.safetensors"
    save_checkpoint(some(), path)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(Checkpoint("agent", {}, {"a": np.zeros(100)}), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["agent.safetensors"]


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, part: float) -> None:
    path = tmp_path / "agent.safetensors"
    save_checkpoint(some(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(CheckpointError, match=r"agent\.safetensors is no checkpoint, or is damaged"):
        load_checkpoint(path, "agent")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        load_checkpoint(tmp_path / "nowhere", "agent")
    with pytest.raises(CheckpointError, match="directory"):
        load_checkpoint(tmp_path, "agent")
    plain = tmp_path / "plain.safetensors"
    save_file({"a": np.zeros(2)}, plain)
    with pytest.raises(CheckpointError, match="no checkpoint of xrlflow"):
        load_checkpoint(plain, "agent")


def test_another_kind_version_or_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.safetensors"
    save_checkpoint(some(), path)
    with pytest.raises(CheckpointError, match="holds: agent; wanted: tuner"):
        load_checkpoint(path, "tuner")
    for metadata, message in (
        ({"format": "99", "kind": "agent", "config": "{}"}, "format 99"),
        ({"format": "1", "kind": "agent", "config": "{"}, "configuration is damaged"),
        ({"format": "1", "kind": "agent", "config": "[]"}, "not an object"),
    ):
        save_file({"a": np.zeros(2)}, path, metadata)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, "agent")


def test_a_configuration_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(Checkpoint("agent", {"rate": float("nan")}, {}), tmp_path / "x")
    assert not list(tmp_path.iterdir())
