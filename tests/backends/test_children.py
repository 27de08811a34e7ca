"""Processes of our own: what they are given, and that they have this package."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

import xrlflow
from xrlflow.backends.children import serve_in_child


def tell(descriptor: int, *texts: str) -> None:
    """What a child does here."""
    print("the last words", file=sys.stderr)
    found = {
        "texts": texts,
        "package": xrlflow.__file__,
        "path": sys.path,
        "group": os.getpgrp(),
        "process": os.getpid(),
        "variables": [os.environ.get("XRLFLOW_HERE"), os.environ.get("XRLFLOW_THERE")],
    }
    os.write(descriptor, json.dumps(found).encode())


def test_a_child_has_its_arguments_this_package_and_a_group_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise ImportError('not of the current folder')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "inherited"))
    monkeypatch.setenv("XRLFLOW_HERE", "inherited")
    texts = ("it's", 'a "folder"\n', str(tmp_path))
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as log, open(ours, "rb") as answer:
        process = serve_in_child(tell, theirs, *texts, log=log, XRLFLOW_THERE="new")
        os.close(theirs)
        told = answer.read()
        assert process.wait() == 0
        log.seek(0)
        assert log.read() == b"the last words\n"
    found = json.loads(told)
    assert tuple(found["texts"]) == texts
    assert found["package"] == xrlflow.__file__
    assert str(tmp_path / "inherited") in found["path"]
    assert found["process"] == found["group"] == process.pid
    assert found["variables"] == ["inherited", "new"]
