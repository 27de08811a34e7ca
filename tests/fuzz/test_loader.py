"""Broken models go through the loader: none is more than refused. `tests/fuzz/loader.py` does it for longer."""

from __future__ import annotations

import contextlib
from pathlib import Path

import onnx
import pytest

from tests.fuzz import loader
from tests.fuzz.loader import Loader, Mutator
from tests.fuzz.models import idioms
from xrlflow import api, onnxio

pytestmark = pytest.mark.corpus


def starts() -> list[bytes]:
    models = [model.SerializeToString() for _, model in loader._others()]
    return models + [idioms(seed).proto.SerializeToString() for seed in range(6)]


def test_models_to_start_from_load(tmp_path: Path) -> None:
    loader = Loader(tmp_path, tmp_path / "found")
    for data in starts():
        loader.one(data)
    assert loader.loaded == loader.count == len(starts())


def test_broken_models_are_refused_in_one_line(tmp_path: Path) -> None:
    loader = Loader(tmp_path, tmp_path / "found")
    for i, data in enumerate(starts()):
        for seed in range(6):
            loader.one(Mutator(1000 * i + seed).mutate(data) or b"")
            loader.one(data[: 40 * seed] + data[40 * seed + seed % 5 :])
    assert loader.seen == set()
    assert 0.1 < loader.loaded / loader.count < 0.9


class TwoLines(onnxio.ModelError):
    def __str__(self) -> str:
        return "two\nlines"


@pytest.mark.parametrize(
    ("error", "told"),
    [(IndexError("nothing there"), "IndexError"), (TwoLines(), "several lines")],
)
def test_what_is_raised_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def load(path: str) -> None:
        raise error

    monkeypatch.setattr(onnxio, "load", load)
    loader = Loader(tmp_path, tmp_path / "found")
    for data in starts()[:3]:
        loader.one(data)
    (kept,) = (tmp_path / "found").glob("*.txt")
    assert told in kept.read_text()
    assert kept.with_suffix(".onnx").is_file()


def test_what_the_search_raises_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def optimize(path: str, **options: object) -> None:
        assert options["verify"] is False
        assert options["measure"] is False
        raise IndexError("nothing there")

    monkeypatch.setattr(api, "optimize", optimize)
    loader = Loader(tmp_path, tmp_path / "found")
    loader.one(starts()[0])
    (kept,) = (tmp_path / "found").glob("*.txt")
    assert "IndexError" in kept.read_text()


def test_nodes_are_changed_in_every_way() -> None:
    """Operands and attributes go, come and change; names stand twice; types and constants change."""
    before = onnx.ModelProto.FromString(starts()[7])
    told = set()
    for seed in range(400):
        model = onnx.ModelProto()
        model.CopyFrom(before)
        with contextlib.suppress(IndexError, TypeError, ValueError):
            Mutator(seed)._node(model)
        for old, new in zip(before.graph.node, model.graph.node):
            told.add(("operands", len(new.input) - len(old.input)) if old.input != new.input else "")
            told.add("lacking" if "" in new.input and "" not in old.input else "")
            told.add(("attributes", len(new.attribute) - len(old.attribute)))
            told.add("operator" if new.op_type != old.op_type else "")
            told.add("output" if new.output != old.output else "")
        told.add("type" if model.graph.input != before.graph.input else "")
        told.add("constant" if model.graph.initializer != before.graph.initializer else "")
    wanted = {
        ("operands", -1),
        ("operands", 0),
        ("operands", 1),
        ("attributes", -1),
        ("attributes", 1),
        "lacking",
    }
    assert wanted | {"operator", "output", "type", "constant"} <= told


def test_mutations_depend_on_the_seed_alone() -> None:
    data = starts()[0]
    changed = [Mutator(seed).mutate(data) for seed in range(20)]
    assert changed == [Mutator(seed).mutate(data) for seed in range(20)]
    assert len(set(changed)) > 10
    assert Mutator(0).mutate(b"no model at all \xff\xff") is None
    assert all(onnx.ModelProto.FromString(m) is not None for m in changed if m)
